"""The store kit over every engine, and the acceptance cases that belong to the store alone."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from retinue.ids import Identity, SessionAddress
from retinue.storage.memory import MemoryEngine
from retinue.storage.memory_rows import MemoryRows
from retinue.store import (
    CommitSession,
    Guarantees,
    ListApprovals,
    ListRuns,
    ListSessions,
    Origin,
    RunRecord,
    StoredSession,
    StoreEngine,
    StoreOperation,
    StoreReply,
)
from retinue.testing.store_kit import STORE_RULES, OpenEngine, StoreRule, StoreRuleBroken, check_store_engine
from tests.unit.storage.world import KINDS, World


@pytest.fixture
def open_engine(world: World, kind: str) -> OpenEngine:
    """Opens an engine of each kind by the name of its store."""

    async def opening(name: str) -> StoreEngine:
        return world.open(kind, name)

    return opening


@pytest.mark.parametrize("rule", STORE_RULES.values(), ids=STORE_RULES)
async def test_rule(rule: StoreRule, open_engine: OpenEngine) -> None:
    await rule.check(open_engine)


async def test_the_kit_runs_without_a_test_framework(world: World) -> None:
    async def opening(name: str) -> StoreEngine:
        return world.open("memory", name)

    assert await check_store_engine(opening) == tuple(STORE_RULES)


async def test_c1_second_acquire_conflicts(open_engine: OpenEngine) -> None:
    await STORE_RULES["c1_second_acquire_conflicts"].check(open_engine)


async def test_c2_tenants_are_separate(open_engine: OpenEngine) -> None:
    await STORE_RULES["c2_tenants_are_separate"].check(open_engine)


async def test_c4_unknown_session_has_defaults(open_engine: OpenEngine) -> None:
    await STORE_RULES["c4_unknown_session_has_defaults"].check(open_engine)


async def test_c5_commits_count_up(open_engine: OpenEngine) -> None:
    await STORE_RULES["c5_commits_count_up"].check(open_engine)


async def test_c7_released_lease_is_spent(open_engine: OpenEngine) -> None:
    await STORE_RULES["c7_released_lease_is_spent"].check(open_engine)


async def test_c8_replaced_history_is_for_display(open_engine: OpenEngine) -> None:
    await STORE_RULES["c8_replaced_history_is_for_display"].check(open_engine)


async def test_c11_ids_never_collide(open_engine: OpenEngine) -> None:
    await STORE_RULES["c11_ids_never_collide"].check(open_engine)


@pytest.mark.parametrize(
    ("kind", "guarantees"),
    [
        ("memory", Guarantees(durable=False, compare_and_swap=False, single_writer="process")),
        ("shared memory", Guarantees(durable=False, compare_and_swap=True, single_writer="distributed")),
        ("sqlite", Guarantees(durable=True, compare_and_swap=True, single_writer="distributed")),
    ],
)
async def test_each_engine_says_what_it_guarantees(world: World, kind: str, guarantees: Guarantees) -> None:
    assert set(KINDS) == {"memory", "shared memory", "sqlite"}
    assert world.open(kind).guarantees == guarantees


class ForgetsEpochs(MemoryRows):
    """Starts at epoch 0 again after each release."""

    def end_lease(self, session_key: int) -> None:
        session = self._sessions[session_key]
        session.row = msgspec.structs.replace(session.row, holder=None, epoch=0)


class MixesTenants(MemoryRows):
    """Joins ids to one text."""

    def find_session(self, address: SessionAddress) -> Any:
        return super().find_session(_joined(address))

    def add_session(self, address: SessionAddress) -> Any:
        return super().add_session(_joined(address))

    def read_session(self, address: SessionAddress) -> StoredSession:
        return super().read_session(_joined(address))


class ForgetsCommits(MemoryRows):
    """Knows no repeat of a commit."""

    def advance_session(self, session_key: int, revision: int, commit_id: str, replayable: bool) -> None:
        super().advance_session(session_key, revision, "", replayable)


class RewritesEvents(MemoryRows):
    """Lets a later event replace the one that stands."""

    def add_events(self, run_key: int, events: Any) -> None:
        super().add_events(run_key, events)
        self._runs[run_key].events.update({event.sequence: event for event in events})


class BeginsAnew(MemoryRows):
    """Remembers no epochs of what was deleted."""

    def raise_epoch_floor(self, epoch: int) -> None:
        pass


class KeepsRuns(MemoryRows):
    """Deletes a session, but not its runs."""

    def delete_session(self, session_key: int) -> None:
        self._sessions[session_key].runs.clear()
        super().delete_session(session_key)


class ForksOverAnything(MemoryRows):
    """Takes every session that nobody holds for one that was never written to."""

    def is_blank(self, session_key: int) -> bool:
        return True


class ForksByReference(MemoryRows):
    """Gives a fork the list of messages of the session that it was forked from."""

    def fork_session(self, session_key: int, target_key: int, fork_id: str, origin: Origin) -> None:
        super().fork_session(session_key, target_key, fork_id, origin)
        self._sessions[target_key].messages = self._sessions[session_key].messages


class ForgetsWhoVouched(MemoryRows):
    """Drops attestations with the next commit."""

    def advance_session(self, session_key: int, revision: int, commit_id: str, replayable: bool) -> None:
        super().advance_session(session_key, revision, commit_id, replayable)
        self._sessions[session_key].attestations = []


class StartsQueuedRuns(MemoryRows):
    """Stores no run as queued."""

    def add_run(self, session_key: int, record: RunRecord) -> None:
        super().add_run(session_key, msgspec.structs.replace(record, queued=False))


class ListsOldestFirst(MemoryRows):
    """Turns a page of runs round."""

    def list_runs(self, question: ListRuns) -> Any:
        return super().list_runs(question)[::-1]


class ListsAllTenants(MemoryRows):
    """Lists sessions whoever asks."""

    def list_sessions(self, question: ListSessions) -> Any:
        return super().list_sessions(msgspec.structs.replace(question, tenant_id=None, user_id=None))


class SettlesAgain(MemoryRows):
    """Lets the last settlement count."""

    def find_approval(self, identity: Identity, approval_id: str) -> Any:
        row = super().find_approval(identity, approval_id)
        pending = row and msgspec.structs.replace(row.approval, state="pending")
        return row and msgspec.structs.replace(row, approval=pending)

    def settle_approval(self, approval_key: int, settlement: Any) -> None:
        self._change_approval(approval_key, state=settlement.state, by=settlement.by)


class LeavesRequestsPending(MemoryRows):
    """Cancels no request with its run."""

    def cancel_approvals(self, run_key: int, reason: str) -> None:
        pass


class CancelsDecidedRequests(MemoryRows):
    """Cancels every request of a run that ended."""

    def cancel_approvals(self, run_key: int, reason: str) -> None:
        for key in self._runs[run_key].approvals:
            self._change_approval(key, state="cancelled", reason=reason)


class FindsAnybodysRequests(MemoryRows):
    """Finds a request by its id alone."""

    def find_approval(self, identity: Identity, approval_id: str) -> Any:
        found = (row for row in self._approvals.values() if row.approval.approval_id == approval_id)
        return next(found, None)


class ListsARunsRequestsAnywhere(MemoryRows):
    """Lists the requests of a run whatever session is named."""

    def list_approvals(self, question: ListApprovals) -> Any:
        if question.run_id is not None:
            question = msgspec.structs.replace(question, session_id=None)
        return super().list_approvals(question)


class KeepsRequests(MemoryRows):
    """Deletes a session, but not its requests for approval."""

    def delete_session(self, session_key: int) -> None:
        for run in self._sessions[session_key].runs:
            run.approvals.clear()
        super().delete_session(session_key)


def _joined(address: SessionAddress) -> SessionAddress:
    joined = f"{address.tenant_id}:{address.user_id}:{address.session_id}"
    return msgspec.structs.replace(address, tenant_id="", user_id="", session_id=joined)


@pytest.mark.parametrize(
    ("rows", "rule"),
    [
        (ForgetsEpochs, "c7_released_lease_is_spent"),
        (ForgetsEpochs, "c1_second_acquire_conflicts"),
        (MixesTenants, "c11_ids_never_collide"),
        (ForgetsCommits, "a_repeated_commit_has_no_second_effect"),
        (ForgetsCommits, "a_cancelled_caller_leaves_the_store_whole"),
        (RewritesEvents, "an_event_is_stored_once"),
        (BeginsAnew, "nothing_late_reaches_a_new_session"),
        (KeepsRuns, "a_deleted_session_leaves_nothing"),
        (ForksOverAnything, "a_fork_is_refused_whole"),
        (ForksByReference, "a_fork_begins_with_a_prefix"),
        (ForgetsWhoVouched, "an_attestation_makes_replayable"),
        (StartsQueuedRuns, "a_queued_run_waits_until_it_begins"),
        (ListsOldestFirst, "runs_are_listed_newest_first"),
        (ListsAllTenants, "sessions_are_listed_in_order"),
        (SettlesAgain, "a_request_is_settled_once"),
        (LeavesRequestsPending, "requests_end_with_their_run"),
        (CancelsDecidedRequests, "requests_end_with_their_run"),
        (FindsAnybodysRequests, "a_request_belongs_to_one_session"),
        (ListsARunsRequestsAnywhere, "requests_are_listed_by_whom_they_concern"),
        (KeepsRequests, "requests_are_deleted_with_their_session"),
    ],
)
async def test_the_kit_notices_a_broken_store(rows: type[MemoryRows], rule: str) -> None:
    async def opening(_: str) -> StoreEngine:
        engine = MemoryEngine()
        engine._rows = rows()
        return engine

    with pytest.raises(StoreRuleBroken, match=rule):
        await STORE_RULES[rule].check(opening)


class ChecksNothing(MemoryEngine):
    """Takes commits under any epoch."""

    async def execute(self, operations: Any) -> Any:
        current: list[StoreOperation] = []
        for operation in operations:
            if isinstance(operation, CommitSession):
                row = self._rows.find_session(operation.lease.address)
                epoch = row.epoch if row is not None else 0
                lease = msgspec.structs.replace(operation.lease, epoch=epoch)
                current.append(msgspec.structs.replace(operation, lease=lease))
            else:
                current.append(operation)
        replies: list[StoreReply] = list(await super().execute(current))
        return replies


@pytest.mark.parametrize("rule", ["c7_released_lease_is_spent", "the_epoch_always_rises"])
async def test_the_kit_notices_a_store_without_fencing(rule: str) -> None:
    async def opening(_: str) -> StoreEngine:
        return ChecksNothing()

    with pytest.raises(StoreRuleBroken, match=rule):
        await STORE_RULES[rule].check(opening)
