"""Where calls wait for a person: stored before shown, decided once, over with whoever asked."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from retinue import store_wait
from retinue.approval_desk import ApprovalOutcome
from retinue.clocks import MAX_TIMER
from retinue.errors import InputError, LeaseLost, NotFound, StoreUnavailable, ToolFailed
from retinue.events import ApprovalRequested, Payload
from retinue.protocol import DecideRequest
from retinue.recovery import end_interrupted_runs
from retinue.storage import this_process
from retinue.store import FinishRun, ListApprovals, OpenApproval, RunOutcome, SettleApproval
from tests.support import Flag, soon
from tests.unit.approval_world import World, world


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that does not answer is not waited for."""
    monkeypatch.setattr(store_wait, "STORE_WAIT", 0.01)


async def over(here: World) -> None:
    """The run has ended: nothing of the desk is left."""
    here.desk.cancel("the run ended")
    await soon(here.desk.closed())
    assert here.desk.pending == ()
    assert timers() == []


def timers() -> list[Any]:
    """Timers of this loop that would still fire."""
    loop: Any = asyncio.get_running_loop()
    return [each for each in loop._scheduled if not each.cancelled() and "Stopwatch" in repr(each._callback)]


# --- asking -----------------------------------------------------------------------------------------------


async def test_an_approved_call_is_told_who_and_why() -> None:
    here = await world()
    asking = here.ask(reason="it costs money")
    (request,) = await here.shown()
    assert (request.tool_name, request.arguments, request.reason) == ("pay", {"amount": 3}, "it costs money")
    assert here.notified == [request]
    stands = await here.decide(request.id, reason="fine")
    assert (stands.state, stands.by, stands.reason) == ("approved", "bob", "fine")
    assert await soon(asking) == ApprovalOutcome(state="approved", reason="fine", by="bob")
    assert await here.stored(request.id) == stands
    assert here.told == [("requested", request.id), ("approved", request.id)]
    assert here.changes == [1, 0]
    await over(here)


async def test_a_denied_call_is_told_so_without_who() -> None:
    here = await world()
    asking = here.ask()
    (request,) = await here.shown()
    await here.decide(request.id, approve=False)
    outcome = await soon(asking)
    assert (outcome.state, outcome.by) == ("denied", "bob")
    assert "bob" not in outcome.reason
    await over(here)


async def test_a_listener_that_answers_at_once_wins() -> None:
    here = await world()
    answers: list[asyncio.Task[Any]] = []

    def answer(payload: Payload) -> None:
        if isinstance(payload, ApprovalRequested):
            assert here.desk.pending == (payload.request,)
            answers.append(asyncio.ensure_future(here.decide(payload.request.id)))

    here.on_event = answer
    assert (await soon(here.ask())).state == "approved"
    assert (await answers[0]).by == "bob"
    await over(here)


async def test_nobody_sees_a_request_before_it_is_stored() -> None:
    here = await world()
    stored: list[str] = []

    def look(payload: Payload) -> None:
        rows: Any = here.engine
        stored.extend(row.approval.approval_id for row in rows._rows._approvals.values())

    here.on_event = look
    here.engine.hold[OpenApproval] = Flag()
    asking = here.ask()
    await here.engine.arrived[OpenApproval].wait()
    assert (here.events, here.notified, here.desk.pending) == ([], [], ())
    here.engine.hold[OpenApproval].set()
    (request,) = await here.shown()
    assert stored == [request.id]
    asking.cancel()
    await over(here)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    "error", [StoreUnavailable("gone"), LeaseLost("fenced")], ids=["unavailable", "fenced"]
)
async def test_what_cannot_be_stored_is_never_shown(error: Exception) -> None:
    here = await world()
    here.engine.fail[OpenApproval] = error  # type: ignore[assignment]
    with pytest.raises(type(error)):
        await soon(here.ask())
    assert (here.events, here.notified, here.desk.pending) == ([], [], ())
    assert await here.states() == []
    await over(here)


async def test_several_wait_at_once_oldest_first_and_are_told_apart() -> None:
    here = await world()
    asking = [here.ask(tool=name) for name in ("one", "two", "three")]
    requests = await here.shown(3)
    assert [each.tool_name for each in requests] == ["one", "two", "three"]
    await here.decide(requests[1].id, approve=False)
    await here.decide(requests[2].id)
    assert [each.tool_name for each in here.desk.pending] == ["one"]
    assert [(await soon(each)).state for each in asking[1:]] == ["denied", "approved"]
    assert not asking[0].done()
    here.desk.cancel("enough")
    assert (await soon(asking[0])).state == "cancelled"
    await over(here)


# --- deciding ---------------------------------------------------------------------------------------------


async def test_the_same_decision_again_gives_the_outcome_that_stands() -> None:
    here = await world()
    asking = here.ask()
    (request,) = await here.shown()
    first = await here.decide(request.id, by="bob")
    assert await here.decide(request.id, by="eve") == first
    assert (await soon(asking)).by == "bob"
    assert here.told == [("requested", request.id), ("approved", request.id)]
    await over(here)


async def test_another_decision_is_a_conflict_that_says_what_stands() -> None:
    here = await world()
    here.ask()
    (request,) = await here.shown()
    await here.decide(request.id, approve=False, by="bob")
    with pytest.raises(InputError) as refused:
        await here.decide(request.id, approve=True, by="eve")
    assert refused.value.code == "input_already_resolved"
    assert (refused.value.state, refused.value.by) == ("denied", "bob")
    await over(here)


async def test_of_two_deciders_at_once_one_wins_and_the_call_is_told_that_one() -> None:
    for approve_first in (True, False):
        here = await world()
        asking = here.ask()
        (request,) = await here.shown()
        answers = await asyncio.gather(
            here.decide(request.id, approve=approve_first, by="first"),
            here.decide(request.id, approve=not approve_first, by="second"),
            return_exceptions=True,
        )
        (won,) = [each for each in answers if not isinstance(each, BaseException)]
        (lost,) = [each for each in answers if isinstance(each, InputError)]
        outcome = await soon(asking)
        assert (outcome.state, outcome.by) == (won.state, won.by) == (lost.state, lost.by)
        assert len(here.told) == 2
        await over(here)


async def test_a_decision_is_stored_before_the_call_hears_of_it() -> None:
    here = await world()
    asking = here.ask()
    (request,) = await here.shown()
    here.engine.hold[SettleApproval] = Flag()
    deciding = asyncio.ensure_future(here.decide(request.id))
    await here.engine.arrived[SettleApproval].wait()
    assert not asking.done()
    assert here.told == [("requested", request.id)]
    here.engine.hold[SettleApproval].set()
    assert (await soon(asking)).state == "approved"
    await deciding
    await over(here)


async def test_the_call_hears_of_a_decision_whose_decider_went_away() -> None:
    here = await world()
    asking = here.ask()
    (request,) = await here.shown()
    here.engine.hold[SettleApproval] = Flag()
    deciding = asyncio.ensure_future(here.decide(request.id))
    await here.engine.arrived[SettleApproval].wait()
    deciding.cancel()
    await asyncio.wait([deciding])
    here.engine.hold[SettleApproval].set()
    assert (await soon(asking)).state == "approved"
    await over(here)


async def test_a_decision_whose_answer_was_lost_still_counts() -> None:
    here = await world()
    asking = here.ask()
    (request,) = await here.shown()
    here.engine.lose_answers = 1
    assert (await here.decide(request.id)).by == "bob"
    assert (await soon(asking)).state == "approved"
    await over(here)


@pytest.mark.usefixtures("impatient")
async def test_a_decision_that_cannot_be_stored_decides_nothing() -> None:
    here = await world()
    asking = here.ask()
    (request,) = await here.shown()
    here.engine.fail[SettleApproval] = StoreUnavailable("gone")
    with pytest.raises(StoreUnavailable):
        await here.decide(request.id)
    assert not asking.done()
    assert here.desk.pending == (request,)
    here.engine.fail.clear()
    await here.decide(request.id, approve=False)
    assert (await soon(asking)).state == "denied"
    await over(here)


async def test_an_id_that_nobody_gave_out_is_not_found() -> None:
    here = await world()
    asking = here.ask()
    (request,) = await here.shown()
    for unknown in (f"{here.run_id}:other", "another-run:1", "nonsense"):
        with pytest.raises(NotFound) as refused:
            await here.decide(unknown)
        assert refused.value.approval_id == unknown
    assert here.desk.pending == (request,)
    asking.cancel()
    await over(here)


# --- the application's own answer ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "state"),
    [(True, "approved"), (False, "denied"), (1, "denied"), ("yes", "denied"), (object(), "denied")],
    ids=str,
)
async def test_only_true_approves(answer: object, state: str) -> None:
    here = await world()
    asking = here.ask()
    (request,) = await here.shown()
    await here.desk.decided_by_callback(request.id, answer)
    outcome = await soon(asking)
    assert (outcome.state, outcome.by) == (state, "application")
    await over(here)


async def test_none_leaves_it_to_others_and_a_late_answer_changes_nothing() -> None:
    here = await world()
    asking = here.ask()
    (request,) = await here.shown()
    await here.desk.decided_by_callback(request.id, None)
    assert here.desk.pending == (request,)
    await here.decide(request.id, approve=False)
    await here.desk.decided_by_callback(request.id, True)
    await here.desk.decided_by_callback("nobody:1", True)
    assert (await soon(asking)).state == "denied"
    assert (await here.stored(request.id)).by == "bob"
    await over(here)


@pytest.mark.usefixtures("impatient")
async def test_an_answer_that_cannot_be_stored_is_logged_and_decides_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    here = await world()
    asking = here.ask()
    (request,) = await here.shown()
    here.engine.fail[SettleApproval] = StoreUnavailable("gone")
    with caplog.at_level(logging.WARNING, "retinue.approval_desk"):
        await here.desk.decided_by_callback(request.id, True)
    assert request.id in caplog.text
    assert not asking.done()
    asking.cancel()
    await over(here)


# --- time -------------------------------------------------------------------------------------------------


async def test_c155_a_request_that_nobody_decides_times_out_as_not_approved() -> None:
    here = await world(timeout=0.05)
    asking = here.ask()
    (request,) = await here.shown()
    outcome = await soon(asking)
    assert outcome.state == "expired"
    assert "timed out" in outcome.reason
    assert here.desk.pending == ()
    assert (await here.stored(request.id)).state == "expired"
    assert here.told == [("requested", request.id), ("expired", request.id)]
    await soon(here.desk.closed())
    assert timers() == []
    with pytest.raises(InputError) as refused:
        await here.decide(request.id, approve=False)
    assert refused.value.state == "expired"
    await over(here)


async def test_c155_a_timeout_can_raise() -> None:
    here = await world(timeout=0.05, timeout_action="raise")
    with pytest.raises(ToolFailed, match="timed out") as failed:
        await soon(here.ask())
    assert (failed.value.timeout, failed.value.tool_name) == (0.05, "pay")
    assert (await here.stored(failed.value.approval_id)).state == "expired"
    assert here.desk.pending == ()
    await soon(here.desk.closed())
    assert timers() == []


async def test_c155_a_timeout_can_approve_and_says_so() -> None:
    here = await world(timeout=0.05, timeout_action="approve")
    outcome = await soon(here.ask())
    assert (outcome.state, outcome.by) == ("approved", "timeout")
    assert await here.states() == [("pay", "approved")]
    await over(here)


async def test_a_decision_that_came_first_stands_against_the_timeout() -> None:
    here = await world(timeout=0.05)
    asking = here.ask()
    (request,) = await here.shown()
    # Decided by another process at the same moment: this desk has not heard of it.
    await here.store.settle_approval(here.lease, request.id, "approved", by="bob", reason="ok", at=1.0)
    assert await soon(asking) == ApprovalOutcome(state="approved", reason="ok", by="bob")
    assert here.told == [("requested", request.id), ("approved", request.id)]
    await over(here)


async def test_no_timer_is_left_after_a_decision_or_a_cancellation() -> None:
    here = await world(timeout=1000.0)
    asking = [here.ask(tool="one"), here.ask(tool="two"), here.ask(tool="three", run_id="child")]
    requests = await here.shown(3)
    assert len(timers()) == 3
    await here.decide(requests[0].id)
    assert len(timers()) == 2
    here.desk.cancel("it died", "child")
    assert len(timers()) == 1
    here.desk.cancel("over")
    assert timers() == []
    assert [(await soon(each)).state for each in asking] == ["approved", "cancelled", "cancelled"]
    await over(here)


async def test_a_long_timeout_is_waited_for_in_pieces() -> None:
    here = await world(timeout=400 * MAX_TIMER)
    asking = here.ask()
    await here.shown()
    (timer,) = timers()
    assert timer.when() - asyncio.get_running_loop().time() <= MAX_TIMER
    asking.cancel()
    await over(here)


@pytest.mark.usefixtures("impatient")
async def test_a_timeout_that_cannot_be_stored_approves_nothing() -> None:
    here = await world(timeout=0.05, timeout_action="approve")
    asking = here.ask()
    (request,) = await here.shown()
    here.engine.fail[SettleApproval] = StoreUnavailable("gone")
    with pytest.raises(StoreUnavailable):
        await soon(asking)
    assert here.desk.pending == ()
    here.engine.fail.clear()
    with pytest.raises(InputError):  # nobody waits for it any more, so it can only be cancelled
        await here.decide(request.id)
    assert (await here.stored(request.id)).state == "cancelled"
    await over(here)


# --- the end ----------------------------------------------------------------------------------------------


async def test_c157_cancelling_one_run_leaves_the_other_and_unknown_ids_change_nothing() -> None:
    one, two = await world("one"), await world("two")
    asking = [one.ask(), two.ask()]
    (request,) = await one.shown()
    (other,) = await two.shown()
    with pytest.raises(NotFound):
        await one.decide(other.id)
    one.desk.cancel("stop")
    assert await soon(asking[0]) == ApprovalOutcome(state="cancelled", reason="stop")
    assert (one.desk.pending, two.desk.pending) == ((), (other,))
    assert one.told == [("requested", request.id), ("cancelled", request.id)]
    await two.decide(other.id)
    assert (await soon(asking[1])).state == "approved"
    await over(one)
    await over(two)


async def test_c157_pending_requests_are_told_apart_by_tenant() -> None:
    here = await world()
    here.ask()
    await here.shown()
    for tenant, count in (("acme", 1), ("other", 0)):
        page = await here.store.list_approvals(ListApprovals(tenant_id=tenant, state="pending"))
        assert len(page.approvals) == count
    await over(here)


async def test_c158_a_closed_desk_approves_nothing_pending_and_nothing_new() -> None:
    here = await world()
    asking = here.ask()
    await here.shown()
    here.desk.cancel("the run ended")
    assert (await soon(asking)).state == "cancelled"
    events = len(here.events)
    assert await soon(here.ask()) == ApprovalOutcome(state="cancelled", reason="the run ended")
    assert len(here.events) == events
    assert [state for _, state in await here.states()] == ["pending"]  # until the outcome is stored
    await here.store.finish_run(
        FinishRun(
            lease=here.lease, outcome=RunOutcome(run_id="r", outcome=b"{}", final_cursor=1, approvals="x")
        )
    )
    assert [state for _, state in await here.states()] == ["cancelled"]
    await over(here)


async def test_a_decision_after_the_cancellation_is_a_conflict_and_approves_nothing() -> None:
    here = await world()
    asking = here.ask()
    (request,) = await here.shown()
    here.desk.cancel("stop")
    with pytest.raises(InputError) as refused:
        await here.decide(request.id)
    assert (refused.value.code, refused.value.state) == ("input_already_resolved", "cancelled")
    assert (await here.stored(request.id)).state == "cancelled"
    assert (await soon(asking)).state == "cancelled"
    assert here.told == [("requested", request.id), ("cancelled", request.id)]
    await over(here)


async def test_a_decision_that_was_being_stored_when_the_run_was_cancelled_is_told_as_it_stands() -> None:
    here = await world()
    asking = here.ask()
    (request,) = await here.shown()
    here.engine.hold[SettleApproval] = Flag()
    deciding = asyncio.ensure_future(here.decide(request.id))
    await here.engine.arrived[SettleApproval].wait()
    here.desk.cancel("stop")
    assert (await soon(asking)).state == "cancelled"  # it does not run, whatever the record says
    here.engine.hold[SettleApproval].set()
    assert (await soon(deciding)).state == "approved"
    assert here.told == [("requested", request.id), ("approved", request.id)]
    await over(here)


async def test_a_participant_that_ends_takes_only_its_own_requests_with_it() -> None:
    here = await world()
    own, childs = here.ask(tool="own"), here.ask(tool="childs", run_id="child")
    requests = await here.shown(2)
    here.desk.cancel("the child is lost", "child")
    assert await soon(childs) == ApprovalOutcome(state="cancelled", reason="the child is lost")
    assert (await soon(here.ask(tool="again", run_id="child"))).state == "cancelled"
    await soon(here.desk.closed())
    assert await here.states() == [("own", "pending"), ("childs", "cancelled")]
    assert here.told[-1] == ("cancelled", requests[1].id)
    await here.decide(requests[0].id)
    assert (await soon(own)).state == "approved"
    await over(here)


async def test_whoever_stops_waiting_takes_the_request_back() -> None:
    here = await world()
    asking = here.ask()
    (request,) = await here.shown()
    asking.cancel()
    await asyncio.wait([asking])
    assert asking.cancelled()
    assert here.desk.pending == ()
    await soon(here.desk.closed())
    assert (await here.stored(request.id)).state == "cancelled"
    assert here.told == [("requested", request.id), ("cancelled", request.id)]
    await over(here)


@pytest.mark.parametrize("how", ["withdrawn", "participant", "run"])
async def test_a_request_that_is_taken_back_while_it_is_being_stored_is_never_shown(how: str) -> None:
    here = await world()
    here.engine.hold[OpenApproval] = Flag()
    asking = here.ask(run_id="child")
    await here.engine.arrived[OpenApproval].wait()
    if how == "withdrawn":
        asking.cancel()
    else:
        here.desk.cancel("stop", "child" if how == "participant" else None)
    await asyncio.wait([asking])
    here.engine.hold[OpenApproval].set()
    await soon(here.desk.closed())
    assert (here.events, here.notified, here.desk.pending) == ([], [], ())
    # The record of a run that is ending is settled with its outcome.
    assert await here.states() == [("pay", "pending" if how == "run" else "cancelled")]
    assert timers() == []
    await over(here)


async def test_a_request_of_a_run_that_has_its_outcome_is_cancelled() -> None:
    here = await world()
    await here.store.finish_run(
        FinishRun(lease=here.lease, outcome=RunOutcome(run_id="r", outcome=b"{}", final_cursor=1))
    )
    assert (await soon(here.ask())).state == "cancelled"
    assert (here.events, here.notified) == ([], [])
    await over(here)


@pytest.mark.usefixtures("impatient")
async def test_a_cancellation_that_cannot_be_stored_is_told_when_the_run_ends(
    caplog: pytest.LogCaptureFixture,
) -> None:
    here = await world()
    here.ask(run_id="child")
    (request,) = await here.shown()
    here.engine.fail[SettleApproval] = StoreUnavailable("gone")
    with caplog.at_level(logging.WARNING, "retinue.approval_desk"):
        here.desk.cancel("the child is lost", "child")
        await soon(here.desk.closed())
    assert request.id in caplog.text
    await over(here)
    assert here.told == [("requested", request.id), ("cancelled", request.id)]


async def test_many_calls_many_deciders_and_a_cancellation_agree_about_every_request() -> None:
    here = await world()
    asking = [here.ask(tool=f"tool {number}", run_id=f"child {number % 5}") for number in range(50)]
    requests = await here.shown(50)
    refused: set[str] = set()

    async def decide(number: int, approve: bool) -> None:
        decision = DecideRequest(
            run_id="r", approval_id=requests[number].id, approve=approve, by=f"{number} {approve}"
        )
        try:
            stands = await here.desk.decide(decision)
            assert stands.state == ("approved" if approve else "denied")
        except InputError as error:
            refused.add(error.code)

    deciding = [
        asyncio.ensure_future(decide(number, (number + turn) % 2 == 0))
        for turn in range(3)
        for number in range(50)
    ]
    await asyncio.sleep(0)
    here.desk.cancel("it died", "child 2")
    here.desk.cancel("it died", "child 4")
    await soon(asyncio.gather(*deciding))
    outcomes = [await soon(each) for each in asking]
    await soon(here.desk.closed())
    assert refused == {"input_already_resolved"}
    for request, outcome in zip(requests, outcomes, strict=True):
        stands = await here.stored(request.id)
        if outcome.state != "cancelled":
            assert (stands.state, stands.by) == (outcome.state, outcome.by)
        told = [state for state, told_id in here.told if told_id == request.id]
        assert told == ["requested", stands.state]
    await over(here)


async def test_the_request_of_a_run_whose_process_died_is_cancelled_as_interrupted() -> None:
    here = await world()
    asking = here.ask()
    (request,) = await here.shown()
    await here.store.fence("host")
    grant = await here.store.acquire(here.lease.address, this_process("next", "test"))
    await end_interrupted_runs(here.store, grant)
    stands = await here.stored(request.id)
    assert (stands.state, stands.reason, stands.by) == ("cancelled", "interrupted", "")
    # Should the process live on after all, it decides nothing any more.
    with pytest.raises(LeaseLost):
        await here.decide(request.id)
    assert not asking.done()
    assert await here.stored(request.id) == stands
    await over(here)
    assert (await soon(asking)).state == "cancelled"
