"""Whatever comes in whatever order: a request is settled once, and all who look see the same."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from retinue import store_wait
from retinue.approval_desk import ApprovalOutcome
from retinue.errors import InputError, NotFound, StoreUnavailable
from retinue.protocol import DecideRequest
from retinue.store import FinishRun, ListApprovals, OpenApproval, RunOutcome, SettleApproval
from retinue.stored import StoredApproval
from tests.support import Flag
from tests.unit.approval_world import World, world

PARTICIPANTS = ("r", "child", "other")


class Desk(RuleBasedStateMachine):
    """One desk, over a store that is slow, fails, and that another process writes to as well."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.asking: list[tuple[str, asyncio.Task[ApprovalOutcome]]] = []
        self.deciding: list[tuple[bool, asyncio.Task[StoredApproval]]] = []
        self.seen: dict[str, StoredApproval] = {}
        """Settled records, as they were seen first."""
        self.others: list[asyncio.Task[Any]] = []
        self.left: set[str] = set()

    @initialize()
    def begin(self) -> None:
        self.here: World = self.loop.run_until_complete(world())

    def turn(self) -> None:
        """Let happen what can happen without time."""

        async def settle() -> None:
            for _ in range(25):
                await asyncio.sleep(0)

        self.loop.run_until_complete(settle())

    # --- what comes ---------------------------------------------------------------------------------------

    @rule(who=st.sampled_from(PARTICIPANTS))
    def ask(self, who: str) -> None:
        async def ask() -> None:
            self.asking.append((who, self.here.ask(run_id=who)))

        self.loop.run_until_complete(ask())
        self.turn()

    @rule(number=st.integers(0, 20), approve=st.booleans(), patient=st.booleans())
    def decide(self, number: int, approve: bool, patient: bool) -> None:
        rows = self.rows()
        if not rows:
            return
        approval_id = rows[number % len(rows)].approval_id

        async def decide() -> None:
            decision = DecideRequest(run_id="r", approval_id=approval_id, approve=approve, by="bob")
            task = asyncio.ensure_future(self.here.desk.decide(decision))
            await asyncio.sleep(0)
            if not patient:
                task.cancel()
            self.deciding.append((approve, task))

        self.loop.run_until_complete(decide())
        self.turn()

    @rule(number=st.integers(0, 20), answer=st.sampled_from([True, False, None, "yes"]))
    def answer(self, number: int, answer: object) -> None:
        if pending := self.here.desk.pending:
            request_id = pending[number % len(pending)].id

            async def answered() -> None:
                task = asyncio.ensure_future(self.here.desk.decided_by_callback(request_id, answer))
                self.others.append(task)

            self.loop.run_until_complete(answered())
            self.turn()

    @rule(number=st.integers(0, 20), state=st.sampled_from(["approved", "denied", "expired"]))
    def settled_elsewhere(self, number: int, state: Any) -> None:
        """Somebody was faster in the store: this desk has not heard of it."""
        rows = self.rows()
        if rows and not self.here.engine.fail and not self.here.engine.hold:
            approval_id = rows[number % len(rows)].approval_id
            lease = self.here.lease
            self.loop.run_until_complete(
                self.here.store.settle_approval(lease, approval_id, state, by="else", at=1.0)
            )

    @rule(number=st.integers(0, 20))
    def time_is_up(self, number: int) -> None:
        asked = [each for each in self.here.desk._asked.values() if each.waits and each.timer is not None]
        if asked:
            chosen = asked[number % len(asked)]

            async def expire() -> None:
                assert chosen.timer is not None
                chosen.timer.stand()
                chosen.timer._expired()

            self.loop.run_until_complete(expire())
            self.turn()

    @rule(number=st.integers(0, 20))
    def stop_waiting(self, number: int) -> None:
        if self.asking:
            self.asking[number % len(self.asking)][1].cancel()
            self.turn()

    @rule(who=st.sampled_from(PARTICIPANTS[1:]))
    def participant_ends(self, who: str) -> None:
        async def cancel() -> None:
            self.here.desk.cancel(f"{who} ended", who)

        self.left.add(who)
        self.loop.run_until_complete(cancel())
        self.turn()

    @rule(kind=st.sampled_from([OpenApproval, SettleApproval]))
    def hold(self, kind: type) -> None:
        if not self.here.engine.fail:
            self.here.engine.hold.setdefault(kind, Flag())

    @rule()
    def let_go(self) -> None:
        held, self.here.engine.hold = self.here.engine.hold, {}
        for each in held.values():
            each.set()

        async def arrive() -> None:
            await asyncio.sleep(0.001)  # flags cross threads

        self.loop.run_until_complete(arrive())
        self.turn()

    @rule(kind=st.sampled_from([OpenApproval, SettleApproval]))
    def fail(self, kind: type) -> None:
        if not self.here.engine.hold:
            self.here.engine.fail[kind] = StoreUnavailable("gone")

    @rule()
    def recover(self) -> None:
        self.here.engine.fail.clear()

    # --- what must hold -----------------------------------------------------------------------------------

    def rows(self) -> list[StoredApproval]:
        page = self.loop.run_until_complete(self.here.store.list_approvals(ListApprovals(tenant_id="acme")))
        return list(page.approvals)

    @invariant()
    def a_settled_record_never_changes(self) -> None:
        if not hasattr(self, "here"):
            return
        for row in self.rows():
            if row.state != "pending":
                assert self.seen.setdefault(row.approval_id, row) == row

    @invariant()
    def nobody_is_approved_who_is_not_approved_in_the_store(self) -> None:
        if not hasattr(self, "here"):
            return
        approved = {row.approval_id for row in self.rows() if row.state == "approved"}
        told = [
            task.result()
            for _, task in self.asking
            if task.done() and not task.cancelled() and task.exception() is None
        ]
        assert sum(outcome.state == "approved" for outcome in told) <= len(approved)
        for state, approval_id in self.here.told:
            assert state != "approved" or approval_id in approved
        for approve, task in self.deciding:
            if not task.done() or task.cancelled():
                continue
            error = task.exception()
            if error is None:
                assert task.result().state == ("approved" if approve else "denied")
            else:
                assert isinstance(error, InputError | NotFound | StoreUnavailable)

    @invariant()
    def what_is_pending_is_stored_shown_and_timed(self) -> None:
        if not hasattr(self, "here"):
            return
        stored = {row.approval_id for row in self.rows()}
        told = self.here.told
        for request in self.here.desk.pending:
            assert request.id in stored
            assert [state for state, told_id in told if told_id == request.id] == ["requested"]
        waiting = {request.id for request in self.here.desk.pending}
        for asked in self.here.desk._asked.values():
            running = asked.timer is not None and asked.timer._handle is not None
            assert running <= (asked.request.id in waiting)
        assert not {request.run_id for request in self.here.desk.pending} & self.left

    def teardown(self) -> None:
        if hasattr(self, "here"):
            self.let_go()
            self.recover()
            self.loop.run_until_complete(self.end())
        self.loop.close()

    async def end(self) -> None:
        """The run ends: nobody waits, nothing is left, and events and records agree about every request."""
        desk, store = self.here.desk, self.here.store
        desk.cancel("the run ended")
        await asyncio.wait_for(desk.closed(), 10)
        for _, task in self.asking:
            await asyncio.wait([task])
        outcome = RunOutcome(run_id="r", outcome=b"{}", final_cursor=1)
        await store.finish_run(FinishRun(lease=self.here.lease, outcome=outcome))
        assert desk.pending == ()
        page = await store.list_approvals(ListApprovals(tenant_id="acme"))
        told: dict[str, list[str]] = {}
        for state, approval_id in self.here.told:
            told.setdefault(approval_id, []).append(state)
        for row in page.approvals:
            assert row.state != "pending"
            states = told.pop(row.approval_id, [])
            assert states == [] or states[0] == "requested"
            assert len(states) in (0, 2)
            # Where the store could not say what stands, nobody was told that a call may run.
            assert not states or states[1] in (row.state, "cancelled")
        assert told == {}


@pytest.mark.usefixtures("impatient")
def test_every_request_is_settled_once_and_for_all() -> None:
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        Desk, settings=settings(max_examples=60, stateful_step_count=30, deadline=None)
    )


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_wait, "STORE_WAIT", 0.001)
