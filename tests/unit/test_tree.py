"""The root's side of a tree: the gate, and messages of participants in any order."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

import pytest

from retinue import Budgets, Grants, Identity, RunRequest, RuntimeConfig, Usage
from retinue.errors import InputError, StoreUnavailable, error_from_payload
from retinue.events import (
    ChildFinished,
    ChildStarted,
    Completion,
    Custom,
    ModelComplete,
    Payload,
    ToolComplete,
)
from retinue.inbox import RunInbox
from retinue.ledger import ROOT
from retinue.participants import Participant
from retinue.protocol import (
    Acknowledged,
    AdmitModel,
    AdmitTools,
    ArtifactRead,
    AskInput,
    AwaitChild,
    CancelChild,
    ChildEnded,
    ChildOrder,
    Emit,
    EndTurn,
    Finished,
    GetArtifact,
    ModelAdmitted,
    NextTurn,
    PutArtifact,
    Record,
    Rejected,
    Revise,
    Revision,
    SendInput,
    SettleModel,
    Spawn,
    Spawned,
    TakeInput,
    TakenInput,
    ToolAttempt,
    ToolDone,
    ToolsAdmitted,
    ToolVerdict,
    encode_output,
)
from retinue.results import DriverOutput
from retinue.store import StoredArtifact
from retinue.tree import Tree
from tests.support import Flag, soon, trivial

DONE = encode_output(DriverOutput(text="ok"))


class Launcher:
    """Notes what it is asked, and places children when it may."""

    def __init__(self) -> None:
        self.orders: list[ChildOrder] = []
        self.cancelled: list[tuple[str, str]] = []
        self.go = Flag()
        self.go.set()

    async def launch(self, order: ChildOrder, tree: Tree) -> None:
        await self.go.wait()
        self.orders.append(order)
        tree.child_placed(order.run_id)

    def cancel(self, child_run_id: str, reason: str) -> None:
        self.cancelled.append((child_run_id, reason))


class Artifacts:
    """Artifacts in a dictionary; a store that is down refuses."""

    def __init__(self) -> None:
        self.kept: dict[str, StoredArtifact] = {}
        self.down = False

    async def put(self, artifact: StoredArtifact) -> None:
        if self.down:
            raise StoreUnavailable("the store is down")
        self.kept[artifact.artifact_id] = artifact

    async def get(self, artifact_id: str) -> StoredArtifact | None:
        return self.kept.get(artifact_id)


class World:
    def __init__(self, config: RuntimeConfig, **request: Any) -> None:
        self.launcher = Launcher()
        self.events: list[tuple[str, Payload]] = []
        self.open = asyncio.Event()
        self.open.set()
        self.request = RunRequest(
            input="x",
            identity=Identity(tenant_id="t", user_id="u"),
            session_id="s",
            run_id="root",
            attempt_id="attempt",
            root_run_id="root",
            grants=config.grants,
            **request,
        )
        self.artifacts = Artifacts()
        self.inbox = RunInbox(
            "root", ("steer", "follow_up"), lambda payload: self.events.append(("", payload))
        )
        self.tree = Tree(
            self.request,
            config,
            self.launcher,
            self._emit,
            inbox=self.inbox,
            artifacts=self.artifacts,
            room=self._room,
        )

    def _emit(self, payload: Payload, participant: Participant) -> None:
        self.events.append((participant.name, payload))

    def _room(self) -> Awaitable[None] | None:
        async def wait() -> None:
            await self.open.wait()

        return None if self.open.is_set() else wait()

    def say(self, message: Any) -> Any:
        return self.tree.handle(message)

    async def placed(self, count: int) -> None:
        async with asyncio.timeout(5):
            while len(self.launcher.orders) < count:
                await asyncio.sleep(0)


def world(*, tools: tuple[str, ...] = ("tool",), budgets: Budgets | None = None, **request: Any) -> World:
    grants = Grants(tool_ids=tools)
    return World(RuntimeConfig(driver=trivial, grants=grants, budgets=budgets or Budgets()), **request)


def admit(participant: str = ROOT, call_id: str = "1", tokens: int | None = 10) -> AdmitModel:
    return AdmitModel(
        participant=participant, call_id=call_id, role="main", projected_input=5, requested_output=tokens
    )


def settle(
    participant: str = ROOT, call_id: str = "1", usage: Usage | None = None, **more: Any
) -> SettleModel:
    return SettleModel(
        participant=participant,
        call_id=call_id,
        provider_id="p",
        model_id="m",
        usage=usage,
        **{"started": True, "answered": usage is not None, **more},
    )


def attempt(call_id: str, name: str = "tool", participant: str = ROOT) -> AdmitTools:
    return AdmitTools(
        participant=participant, attempts=[ToolAttempt(id=call_id, call_id=call_id, tool_name=name)]
    )


def spawn(child: str = "child", participant: str = ROOT, budgets: Budgets | None = None) -> Spawn:
    return Spawn(
        participant=participant,
        child_run_id=child,
        name=f"named {child}",
        input="x",
        budgets=budgets,
        placement="pooled",
        work=b"work",
    )


async def test_the_gate_refuses_in_order_and_counts_what_it_lets_through() -> None:
    here = world(budgets=Budgets(max_tool_calls=1))

    def ask(call_id: str, name: str) -> Any:
        (verdict,) = here.say(attempt(call_id, name)).verdicts
        return verdict

    assert ask("1", "other") == ToolVerdict(denial="grant", reason="other is not granted to this run")
    assert here.tree.budget.tool_calls.used == 0
    assert ask("2", "tool") == ToolVerdict(allowed=True)
    assert ask("2", "tool") == ToolVerdict(allowed=True)  # the message came twice
    assert ask("3", "tool").denial == "budget"
    assert here.tree.budget.tool_calls.used == 1


async def test_a_plan_admits_no_tool_and_still_counts() -> None:
    here = world(run_mode="plan", budgets=Budgets(max_tool_calls=1))
    for call_id, why in (("1", "approval_required"), ("2", "budget")):
        (verdict,) = here.say(attempt(call_id)).verdicts
        assert not verdict.allowed
        assert verdict.denial == why


async def test_a_role_that_is_not_granted_is_denied_before_anything_is_reserved() -> None:
    here = world()
    reply = here.say(
        AdmitModel(participant=ROOT, call_id="1", role="judge", projected_input=1, requested_output=1)
    )
    assert isinstance(reply, Rejected)
    assert error_from_payload(reply.error).code == "access_denied"
    assert here.tree.ledger.open_reservations == 0


async def test_a_model_call_is_told_of_once_it_is_answered() -> None:
    here = world()
    assert here.say(admit()) == ModelAdmitted(max_tokens=10)
    assert here.tree.budget.tokens.reserved == 15
    usage = Usage(input_tokens=3)
    assert here.say(settle(usage=usage)) == Acknowledged()
    assert here.tree.budget.tokens.used == 3
    here.say(admit(call_id="2"))
    here.say(settle(call_id="2"))
    assert here.events == [("", ModelComplete("p", "m", usage))]


async def test_after_a_stop_nothing_is_admitted_and_settlements_still_count() -> None:
    here = world()
    here.say(admit())
    here.tree.stop("enough")
    for message in (admit(call_id="2"), attempt("1"), spawn()):
        reply = here.say(message)
        assert isinstance(reply, Rejected)
        assert reply.cancelled
        assert reply.error["message"] == "enough"
    here.say(settle(usage=Usage(input_tokens=2)))
    assert (here.tree.budget.tokens.used, here.tree.budget.tokens.reserved) == (2, 0)
    assert here.events == []  # model.complete is not emitted once aborted
    here.tree.close()
    reply = here.say(Emit(participant=ROOT, payload=Custom("late")))
    assert isinstance(reply, Rejected)
    assert here.events == []


async def test_a_child_is_started_once_and_its_end_is_told_once() -> None:
    here = world()
    assert here.say(spawn()) == Spawned()
    assert here.say(spawn()) == Spawned()
    await here.placed(1)
    assert here.tree.children == 1
    waiting = asyncio.ensure_future(here.say(AwaitChild(participant=ROOT, child_run_id="child")))
    here.say(admit("child"))
    for output in (DONE, encode_output(DriverOutput(text="second"))):
        here.say(Finished(participant="child", output=output, hops=3))
    ended = await soon(waiting)
    assert ended == ChildEnded(output=DONE)
    assert here.tree.ledger.snapshot("child").unknown_usage_calls == 1  # what it left open is charged
    assert here.tree.hops == 3
    assert [payload for _, payload in here.events] == [
        ChildStarted("named child"),
        ChildFinished("named child", "completed"),
    ]


async def test_what_an_ended_child_says_is_not_heard_but_for_its_settlements() -> None:
    here = world()
    here.say(spawn())
    await here.placed(1)
    here.say(admit("child"))
    here.tree.child_lost("child", "killed")
    before = list(here.events)
    for message in (
        Emit(participant="child", payload=Custom("ghost")),
        ToolDone(participant="child", call_id="1", tool_name="tool", error=False),
        admit("child", "2"),
        attempt("1", participant="child"),
        spawn("grandchild", "child"),
    ):
        reply = here.say(message)
        assert isinstance(reply, Rejected)
        assert reply.cancelled
    assert here.tree.budget.tokens.used == 15
    here.say(settle("child", usage=Usage(input_tokens=1)))
    assert (here.tree.budget.tokens.used, here.tree.budget.unknown_usage_calls) == (1, 0)
    assert here.events == before
    assert here.tree.children == 1


async def test_a_child_that_is_being_cancelled_gets_nothing_more() -> None:
    here = world()
    here.say(spawn())
    here.say(spawn("grandchild", "child"))
    here.say(spawn("sibling"))
    await here.placed(3)
    here.say(CancelChild(participant=ROOT, child_run_id="child", reason="not needed"))
    assert here.launcher.cancelled == [("child", "not needed"), ("grandchild", "not needed")]
    for message in (admit("child"), admit("grandchild"), spawn("more", "child")):
        reply = here.say(message)
        assert isinstance(reply, Rejected)
        assert (reply.cancelled, reply.error["message"]) == (True, "not needed")
    assert here.say(admit("sibling")) == ModelAdmitted(max_tokens=10)


async def test_the_end_of_a_child_ends_what_is_below_it() -> None:
    here = world()
    here.say(spawn())
    here.say(spawn("grandchild", "child"))
    await here.placed(2)
    here.say(Finished(participant="child", output=DONE))
    assert here.launcher.cancelled == [("grandchild", "its parent named child ended")]
    settling = asyncio.ensure_future(here.tree.settled())
    await asyncio.sleep(0)
    assert not settling.done()
    here.say(Finished(participant="grandchild", cancelled=True))
    await soon(settling)


@pytest.mark.parametrize("ticks", range(4))
async def test_a_child_that_is_cancelled_before_it_has_a_place_ends(ticks: int) -> None:
    here = world()
    here.launcher.go = Flag()
    here.say(spawn())
    for _ in range(ticks):
        await asyncio.sleep(0)
    here.tree.stop("enough")
    await soon(here.tree.settled())
    ((_, payload),) = here.events
    assert isinstance(payload, ChildFinished)
    assert (payload.name, payload.status) == ("named child", "cancelled")
    assert here.launcher.orders == []


async def test_what_the_root_left_open_is_charged_when_the_tree_settles() -> None:
    here = world()
    here.say(admit())
    here.tree.stop("the run ended")
    await soon(here.tree.settled())
    assert here.tree.ledger.open_reservations == 0
    assert (here.tree.budget.tokens.used, here.tree.budget.unknown_usage_calls) == (15, 1)


async def test_strangers_are_refused() -> None:
    here = world()
    for message in (admit("stranger"), Finished(participant="stranger"), spawn("x", "stranger")):
        assert isinstance(here.say(message), Rejected)
    for about_nobody in (
        AwaitChild(participant=ROOT, child_run_id="nobody"),
        CancelChild(participant=ROOT, child_run_id="nobody", reason="x"),
    ):
        reply = here.say(about_nobody)
        assert isinstance(reply, Rejected)
        assert reply.error["code"] == "not_found"
    assert isinstance(here.say(Finished(participant=ROOT, output=DONE)), Rejected)


async def test_a_defect_is_an_answer_and_no_silence() -> None:
    here = world()
    reply = here.say(spawn(budgets={"max_tokens": 5}))  # type: ignore[arg-type]
    assert isinstance(reply, Rejected)
    assert reply.error["code"] == "execution_failed"


async def test_messages_keep_their_order_while_the_event_log_is_full() -> None:
    here = world()
    here.open.clear()
    pending = []
    for number in range(3):
        reply = here.say(Record(canonical=[b"%d" % number], execution_id="root"))
        assert isinstance(reply, Awaitable)
        pending.append(asyncio.ensure_future(reply))
    await asyncio.sleep(0)
    assert here.tree.canonical == []
    settling = asyncio.ensure_future(here.tree.settled())
    await asyncio.sleep(0)
    assert not settling.done()
    here.open.set()
    # There is room again, but those before have not had their turn: this one waits behind them.
    last = here.say(Record(canonical=[b"3"], execution_id="root"))
    assert isinstance(last, Awaitable)
    pending.append(asyncio.ensure_future(last))
    assert here.tree.canonical == []
    await soon(asyncio.gather(*pending))
    assert here.tree.canonical == [b"0", b"1", b"2", b"3"]
    await soon(settling)
    assert here.say(Record(canonical=[b"4"], execution_id="root")) == Acknowledged()


async def test_messages_of_delegates_are_labelled_with_their_name() -> None:
    here = world()
    here.say(spawn())
    await here.placed(1)
    here.say(ToolDone(participant="child", call_id="7", tool_name="tool", error=True))
    here.say(Emit(participant="child", payload=Custom("x")))
    assert here.events[1:] == [("named child", ToolComplete("tool", "7", True)), ("named child", Custom("x"))]
    (order,) = here.launcher.orders
    assert (order.tree_id, order.parent_run_id, order.root_run_id) == ("root", "root", "root")
    assert (order.session_id, order.participant, order.work) == ("s", "named child", b"work")
    assert order.token_limited is False


@pytest.mark.parametrize(
    ("tree", "own", "limited"),
    [(None, None, False), (5, None, True), (None, 5, True), (5, 5, True)],
)
async def test_a_child_knows_whether_tokens_are_limited(
    tree: int | None, own: int | None, limited: bool
) -> None:
    here = world(budgets=Budgets(max_tokens=tree))
    here.say(spawn(budgets=None if own is None else Budgets(max_tokens=own)))
    await here.placed(1)
    assert here.launcher.orders[0].token_limited is limited


async def test_live_input_reaches_the_root_at_its_boundaries() -> None:
    it = world()
    it.inbox.send(SendInput(run_id="root", input_id="1", input="go left", mode="steer"))
    it.inbox.send(SendInput(run_id="root", input_id="2", input="and then?", mode="follow_up"))
    assert it.say(TakeInput()) == TakenInput(input_id="1", input="go left")
    assert it.say(TakeInput()) == TakenInput()
    it.say(EndTurn())
    with pytest.raises(InputError):
        it.inbox.send(SendInput(run_id="root", input_id="3", input="late", mode="steer"))
    assert it.say(NextTurn()) == TakenInput(input_id="2", input="and then?")
    assert it.say(NextTurn()) == TakenInput()


async def test_a_stopped_run_takes_no_follow_up() -> None:
    it = world()
    it.inbox.send(SendInput(run_id="root", input_id="1", input="more", mode="follow_up"))
    it.tree.stop("cancelled")
    reply = it.say(NextTurn())
    assert isinstance(reply, Rejected)
    assert reply.cancelled


async def test_a_question_of_a_child_ends_with_it_and_the_others_go_on() -> None:
    it = world()
    it.say(spawn("one"))
    await it.placed(1)
    asked = it.say(AskInput(participant="one", question="?", choices=None, timeout=None))
    refused = it.say(admit())
    assert isinstance(refused, Rejected)
    assert refused.error["code"] == "input_pending"
    it.tree.child_lost("one", "its process died")
    assert isinstance(await asked, Rejected)
    assert isinstance(it.say(admit()), ModelAdmitted)


async def test_a_revision_needs_its_budget_and_calls_no_tools() -> None:
    it = world(budgets=Budgets(max_revisions=1))
    assert it.say(Revise(action="revise", reason="too short")) == Revision(allowed=True)
    admitted = it.say(attempt("1"))
    assert isinstance(admitted, ToolsAdmitted)
    assert admitted.verdicts[0].denial == "revision"
    assert it.say(Revise(action="revise", reason="still")) == Revision(allowed=False)
    assert it.say(Revise(action="accept", reason="fine")) == Revision(allowed=False)
    assert [payload for _, payload in it.events] == [
        Completion("revise", "too short"), Completion("revise", "still"), Completion("accept", "fine"),
    ]  # fmt: skip


async def test_artifacts_are_kept_at_once_and_a_store_that_is_down_is_an_answer() -> None:
    it = world()
    artifact = StoredArtifact(artifact_id="a", mime_type="text/plain", data=b"x")
    assert await it.say(PutArtifact(participant=ROOT, artifact=artifact)) == Acknowledged()
    assert await it.say(GetArtifact(participant=ROOT, artifact_id="a")) == ArtifactRead(artifact=artifact)
    assert await it.say(GetArtifact(participant=ROOT, artifact_id="b")) == ArtifactRead(artifact=None)
    it.artifacts.down = True
    refused = await it.say(PutArtifact(participant=ROOT, artifact=artifact))
    assert refused.error["code"] == "store_unavailable"
