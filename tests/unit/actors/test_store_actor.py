"""The store actor as a plain class: what it makes of a list that several sessions share."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from retinue.actors.store_actor import StoreActor, StoreDescription
from retinue.actors.wire import encode, read_reply
from retinue.ids import SessionAddress
from retinue.store import (
    AcquireLease,
    Committed,
    LeaseGrant,
    ListApprovals,
    Refused,
    SettleApproval,
    StoreReply,
)
from retinue.testing.store_trial import commit_of, live_holder


@pytest.fixture
async def actor(tmp_path: Path) -> AsyncIterator[StoreActor]:
    actor = StoreActor(f"sqlite:///{tmp_path}/store.db")
    yield actor
    await actor.close()


async def _ask(actor: StoreActor, *operations: Any) -> Sequence[StoreReply]:
    replies: Sequence[StoreReply] = read_reply(await actor.execute(encode(operations)), list[StoreReply])
    return replies


async def test_an_operation_that_cannot_be_read_leaves_its_neighbours_alone(actor: StoreActor) -> None:
    description = read_reply(await actor.describe(), StoreDescription)
    leases = []
    for session_id in ("one", "two"):
        address = SessionAddress(
            store_id=description.store_id, tenant_id="t", user_id="u", session_id=session_id
        )
        (grant,) = await _ask(actor, AcquireLease(address=address, holder=live_holder("holder")))
        assert isinstance(grant, LeaseGrant)
        leases.append(grant.lease)
    no_state: Any = "maybe"
    replies = await _ask(
        actor,
        commit_of(leases[0], 0, messages=[b"1"]),
        SettleApproval(lease=leases[0], approval_id="run:1", state=no_state, at=1.0),
        ListApprovals(state=no_state),
        {"type": "NoOperation"},
        commit_of(leases[1], 0, messages=[b"2"]),
        commit_of(leases[0], 7),
    )
    assert [type(reply) for reply in replies] == [Committed, Refused, Refused, Refused, Committed, Refused]
    codes = [reply.error["code"] for reply in replies if isinstance(reply, Refused)]
    assert codes == ["invalid_input", "invalid_input", "invalid_input", "session_conflict"]
    assert isinstance(replies[1], Refused)
    assert "'maybe'" in replies[1].error["message"]
