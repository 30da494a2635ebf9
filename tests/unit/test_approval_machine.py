"""Whatever comes in whatever order: a request is settled once, and all who look see the same."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from retinue import store_wait
from retinue.approval_desk import ApprovalOutcome, _Asked
from retinue.errors import InputError, StoreUnavailable
from retinue.events import ApprovalRequested, Payload
from retinue.protocol import DecideRequest
from retinue.store import FinishRun, ListApprovals, OpenApproval, RunOutcome, SettleApproval
from retinue.stored import StoredApproval
from tests.support import Flag
from tests.unit.approval_world import World, world

PARTICIPANTS = ("r", "child", "other")
WHICH = st.integers(0, 5)
OPERATIONS = st.sampled_from([OpenApproval, SettleApproval])


@dataclass
class Call:
    """One call that asks, and what the desk has of it."""

    task: asyncio.Task[ApprovalOutcome]
    asked: _Asked


class Desk(RuleBasedStateMachine):
    """One desk, over a store that is slow, fails, and that another process writes to as well."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.calls: list[Call] = []
        self.deciding: list[tuple[bool, asyncio.Task[StoredApproval]]] = []
        self.answering: list[asyncio.Task[None]] = []
        self.settled: dict[str, StoredApproval] = {}
        """Settled records, as they were seen first."""
        self.lost: set[str] = set()
        self.elsewhere: set[str] = set()
        """Requests that were decided when nobody waited for them any more."""
        self.left: set[str] = set()
        self.failed = False

    @initialize()
    def begin(self) -> None:
        self.here: World = self.loop.run_until_complete(world())
        self.here.on_event = self.hear

    def hear(self, payload: Payload) -> None:
        if isinstance(payload, ApprovalRequested):
            assert not self.here.desk._asked[payload.request.id].outcome.done()

    def do(self, work: Any) -> None:
        """Do something on the loop, and let happen what then can happen without time."""

        async def doing() -> None:
            work()
            for _ in range(30):
                await asyncio.sleep(0)

        self.loop.run_until_complete(doing())

    # --- what comes ---------------------------------------------------------------------------------------

    @rule(who=st.sampled_from(PARTICIPANTS))
    def ask(self, who: str) -> None:
        before = set(self.here.desk._asked)
        tasks: list[asyncio.Task[ApprovalOutcome]] = []
        found: list[_Asked] = []

        async def ask() -> None:
            tasks.append(self.here.ask(run_id=who))
            await asyncio.sleep(0)  # it has asked, and nothing more
            found.extend(each for key, each in self.here.desk._asked.items() if key not in before)

        self.loop.run_until_complete(ask())
        assert bool(found) == (who not in self.left)
        self.calls += [Call(task, asked) for task, asked in zip(tasks, found, strict=False)]
        self.do(lambda: None)

    @rule(which=WHICH, approve=st.booleans(), patient=st.booleans())
    def decide(self, which: int, approve: bool, patient: bool) -> None:
        if not self.calls:
            return
        asked = self.calls[-1 - which % len(self.calls)].asked
        approval_id = asked.request.id
        row = {each.approval_id: each for each in self.rows()}.get(approval_id)
        if row is not None and row.state == "pending" and asked.outcome.done() and asked.writes == 0:
            self.lost.add(approval_id)
        decision = DecideRequest(run_id="r", approval_id=approval_id, approve=approve, by="bob")

        async def decide() -> None:
            task = asyncio.ensure_future(self.here.desk.decide(decision))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            if not patient:
                task.cancel()
            self.deciding.append((approve, task))

        if row is not None:
            self.loop.run_until_complete(decide())
            self.do(lambda: None)

    @rule(which=WHICH, answer=st.sampled_from([True, False, None, "yes"]))
    def answer(self, which: int, answer: object) -> None:
        if pending := self.here.desk.pending:
            chosen = pending[which % len(pending)].id
            answered = self.here.desk.decided_by_callback
            self.do(lambda: self.answering.append(asyncio.ensure_future(answered(chosen, answer))))

    @rule(which=WHICH, state=st.sampled_from(["approved", "denied", "expired"]))
    def settle_elsewhere(self, which: int, state: Any) -> None:
        """Somebody was faster in the store: this desk has not heard of it."""
        engine, lease = self.here.engine, self.here.lease
        rows = [each for each in self.rows() if each.approval_id not in self.lost]
        if rows and SettleApproval not in engine.fail and SettleApproval not in engine.hold:
            chosen = rows[which % len(rows)].approval_id
            settling = self.here.store.settle_approval(lease, chosen, state, by="else", at=1.0)
            self.loop.run_until_complete(settling)
            self.elsewhere.add(chosen)

    @rule(which=WHICH)
    def time_is_up(self, which: int) -> None:
        waiting = [call.asked for call in self.calls if call.asked.waits]
        if waiting:
            chosen = waiting[which % len(waiting)]

            def expire() -> None:
                assert chosen.timer is not None
                chosen.timer.stand()
                chosen.timer._expired()

            self.do(expire)

    @rule(which=WHICH)
    def stop_waiting(self, which: int) -> None:
        if self.calls:
            self.do(self.calls[-1 - which % len(self.calls)].task.cancel)

    @rule(who=st.sampled_from(PARTICIPANTS[1:]))
    def participant_ends(self, who: str) -> None:
        self.left.add(who)
        self.do(lambda: self.here.desk.cancel(f"{who} ended", who))

    @rule(kind=OPERATIONS)
    def hold(self, kind: type) -> None:
        self.here.engine.hold.setdefault(kind, Flag())

    @rule(kind=OPERATIONS)
    def fail(self, kind: type) -> None:
        self.failed = True
        self.here.engine.fail[kind] = StoreUnavailable("gone")

    @rule()
    def work_again(self) -> None:
        held, self.here.engine.hold = self.here.engine.hold, {}
        for each in held.values():
            each.set()
        self.loop.run_until_complete(asyncio.sleep(0.001))  # flags cross threads
        self.here.engine.fail.clear()
        self.do(lambda: None)

    # --- what must hold -----------------------------------------------------------------------------------

    def rows(self) -> list[StoredApproval]:
        page = self.loop.run_until_complete(self.here.store.list_approvals(ListApprovals(tenant_id="acme")))
        return list(page.approvals)

    @invariant()
    def records_and_calls_and_decisions_agree(self) -> None:
        if not hasattr(self, "here"):
            return
        rows = {row.approval_id: row for row in self.rows()}
        for row in rows.values():
            if row.state != "pending":
                assert self.settled.setdefault(row.approval_id, row) == row
            if row.approval_id in self.lost:
                assert row.state in ("pending", "cancelled")
        for call in self.calls:
            if not call.task.done() or call.task.cancelled():
                continue
            error = call.task.exception()
            assert error is None or isinstance(error, StoreUnavailable)
            if error is None and call.task.result().state != "cancelled":
                row = rows[call.asked.request.id]
                assert (row.state, row.by) == (call.task.result().state, call.task.result().by)
        for approve, task in self.deciding:
            if task.done() and not task.cancelled():
                error = task.exception()
                assert error is None or isinstance(error, InputError | StoreUnavailable)
                assert error is not None or task.result().state == ("approved" if approve else "denied")

    @invariant()
    def what_is_pending_is_stored_and_shown_and_nothing_else_has_a_timer(self) -> None:
        if not hasattr(self, "here"):
            return
        stored = {row.approval_id for row in self.rows()}
        pending = {request.id for request in self.here.desk.pending}
        assert pending <= stored
        for approval_id in pending:
            assert [state for state, told in self.here.told if told == approval_id] == ["requested"]
        for call in self.calls:
            counts = call.asked.timer is not None and call.asked.timer._handle is not None
            assert not counts or call.asked.request.id in pending
        assert not {request.run_id for request in self.here.desk.pending} & self.left

    def teardown(self) -> None:
        if hasattr(self, "here"):
            self.loop.run_until_complete(self.end())
        self.loop.close()

    async def end(self) -> None:
        """The run ends: nobody waits, nothing is left, and events and records agree about every request."""
        desk, store = self.here.desk, self.here.store
        desk.cancel("the run ended")
        for each in self.here.engine.hold.values():
            each.set()
        self.here.engine.hold.clear()
        self.here.engine.fail.clear()
        await asyncio.wait_for(desk.closed(), 10)
        if self.calls:
            await asyncio.wait([call.task for call in self.calls], timeout=10)
        assert all(call.task.done() for call in self.calls)
        for _, task in self.deciding:
            assert task.done()
            assert task.cancelled() or not isinstance(task.exception(), AssertionError)
        assert desk.pending == ()
        page = await store.list_approvals(ListApprovals(tenant_id="acme", state="pending"))
        for row in page.approvals[:1]:  # too late
            with pytest.raises(InputError):
                await self.here.decide(row.approval_id)
        outcome = RunOutcome(run_id="r", outcome=b"{}", final_cursor=1)
        await store.finish_run(FinishRun(lease=self.here.lease, outcome=outcome))
        page = await store.list_approvals(ListApprovals(tenant_id="acme"))
        told: dict[str, list[str]] = {}
        for state, approval_id in self.here.told:
            told.setdefault(approval_id, []).append(state)
        for row in page.approvals:
            assert row.state != "pending"
            states = told.pop(row.approval_id, [])
            if states:
                # Where the store could not say what stands, or was not asked because the run ended, those who
                # look on hear of a cancellation.
                unheard = self.failed or row.approval_id in self.elsewhere
                assert states == ["requested", row.state] or (
                    unheard and states == ["requested", "cancelled"]
                )
        assert told == {}


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_wait, "STORE_WAIT", 0.001)


@pytest.mark.usefixtures("impatient")
def test_every_request_is_settled_once_and_for_all() -> None:
    run_state_machine_as_test(
        Desk, settings=settings(max_examples=100, stateful_step_count=30, deadline=None)
    )
