"""What a session's export has beside its conversation."""

from __future__ import annotations

import msgspec
import pytest

from retinue import exports
from retinue.approval_records import record_of
from retinue.approvals import ApprovalRequest
from retinue.exports import SessionExport, export_session
from retinue.ids import SessionAddress
from retinue.storage.memory import MemoryEngine
from retinue.store import Store
from retinue.testing.store_trial import live_holder
from retinue.testing.store_trial import record_of as run_record_of


async def _asked(store: Store, session_id: str, count: int) -> list[ApprovalRequest]:
    """Requests of a run of a session, of which the first is approved."""
    address = _address(store, session_id)
    lease = (await store.acquire(address, live_holder("holder"))).lease
    run_id = f"run of {session_id}"
    await store.open_run(lease, run_record_of(address, run_id))
    requests = [
        ApprovalRequest(
            id=f"{run_id}:{number}",
            tenant_id="t",
            user_id="u",
            session_id=session_id,
            root_run_id=run_id,
            run_id=run_id,
            tool_name="pay",
            arguments={"amount": number},
            digest="d" * 64,
            requested_at=1.0,
            expires_at=2.0,
        )
        for number in range(count)
    ]
    for request in requests:
        await store.open_approval(lease, record_of(request))
    await store.settle_approval(lease, requests[0].id, "approved", by="carol", reason="fine", at=1.5)
    return requests


def _address(store: Store, session_id: str) -> SessionAddress:
    return SessionAddress(store_id=store.store_id, tenant_id="t", user_id="u", session_id=session_id)


async def test_an_export_has_the_requests_for_approval_page_by_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of this session's, oldest first, with what became of them, and none of another's."""
    monkeypatch.setattr(exports, "PAGE_LIMIT", 2)
    store = Store(MemoryEngine())
    wanted = await _asked(store, "mine", 5)
    await _asked(store, "another", 1)
    export = await export_session(store, _address(store, "mine"))
    assert [approval.request for approval in export.approvals] == wanted
    assert [(approval.state, approval.by, approval.reason) for approval in export.approvals] == [
        ("approved", "carol", "fine"),
        *[("pending", "", "")] * 4,
    ]
    read_back = msgspec.json.decode(export.to_json(), type=SessionExport)
    assert read_back.approvals == export.approvals
    written = msgspec.json.decode(export.to_json())
    del written["approvals"]
    older = msgspec.convert(written, SessionExport)
    assert older.approvals == (), "a document from before there were approvals"
