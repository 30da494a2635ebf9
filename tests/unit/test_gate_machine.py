"""The whole gate under anything in any order, beside a small oracle that knows only the rules.

Grants, offered tools, policy, approval, budget, revision, cancellation and lost participants. Real are the
tree, the gate, the ledger and the desk with its store; what the application says comes from the test.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from retinue import Approvals, Budgets, Grants, Identity, RunRequest, RuntimeConfig, Usage
from retinue.approval_desk import ApprovalDesk
from retinue.drivers import RunRequest as Asker
from retinue.errors import RetinueError
from retinue.events import Payload
from retinue.gate import PoliciesStopped
from retinue.ids import SessionAddress
from retinue.inbox import RunInbox
from retinue.ledger import ROOT
from retinue.policies import PolicyAction
from retinue.protocol import (
    AdmitModel,
    AdmitTools,
    AwaitVerdict,
    ChildOrder,
    DecideRequest,
    ModelAdmitted,
    Rejected,
    Revise,
    RootReply,
    SettleModel,
    Spawn,
    ToolAttempt,
    ToolsAdmitted,
    ToolVerdict,
)
from retinue.reviews import Judgement
from retinue.storage.memory import MemoryEngine
from retinue.store import Store
from retinue.testing.store_trial import live_holder, record_of
from retinue.tree import Tree
from tests.support import trivial

T = TypeVar("T")
TOOLS = ("look", "pay", "gone")
GRANTED = ("look", "pay")
NEEDS_APPROVAL = "pay"
OWNER = Identity(tenant_id="t", user_id="u")

Fate = Literal["denied", "asked policy", "asked person", "allowed"]


@dataclass(eq=False)
class Attempt:
    """One attempt, as the oracle sees it."""

    owner: str
    id: str
    tool: str
    counted: bool = False
    fate: Fate = "denied"
    verdict: ToolVerdict | None = None
    action: PolicyAction | None = None
    """What the policy said."""
    ran: bool = False


class Policies:
    """What the application says, when the test says so."""

    def __init__(self) -> None:
        self.asked: dict[str, asyncio.Future[Judgement]] = {}
        self.owners: dict[str, str] = {}

    def prepare_run(self, revision: int) -> Awaitable[None]:
        raise NotImplementedError

    def prepare(self, asker: Asker, message: Any, index: int, revision: int) -> Awaitable[Any]:
        raise NotImplementedError

    def review(self, asker: Asker, attempt: ToolAttempt, revision: int) -> Awaitable[Judgement]:
        self.asked[attempt.id] = asyncio.get_running_loop().create_future()
        self.owners[attempt.id] = asker.run_id
        return self.asked[attempt.id]

    def stop(self, run_id: str | None = None) -> None:
        for attempt_id, future in self.asked.items():
            if run_id in (None, self.owners[attempt_id]) and not future.done():
                future.set_exception(PoliciesStopped())


class Launcher:
    async def launch(self, order: ChildOrder, tree: Tree) -> None:
        tree.child_placed(order.run_id)

    def cancel(self, child_run_id: str, reason: str) -> None:
        pass


class GateMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(asyncio.wait_for(work, 10))

    def settle_down(self) -> None:
        """Let everything happen that can."""

        async def turns() -> None:
            for _ in range(30):
                await asyncio.sleep(0)

        self.do(turns())

    @initialize(
        attempts=st.none() | st.integers(3, 12),
        calls=st.none() | st.integers(0, 3),
        pays=st.none() | st.integers(1, 6),
        policy=st.booleans(),
        whole=st.booleans(),
        effects=st.booleans(),
    )
    def begin(
        self,
        attempts: int | None,
        calls: int | None,
        pays: int | None,
        policy: bool,
        whole: bool,
        effects: bool,
    ) -> None:
        self.limit, self.calls_limit, self.pay_limit = attempts, calls, pays
        self.has_policy, self.whole, self.effects = policy, whole, effects
        self.attempts: dict[str, Attempt] = {}
        self.waiting: dict[str, asyncio.Task[RootReply]] = {}
        self.parents: dict[str, str] = {}
        self.offered: dict[str, set[str] | None] = {ROOT: None}
        self.lost: set[str] = set()
        self.model_calls: dict[tuple[str, str], bool] = {}
        """Admitted ones, and whether they are settled."""
        self.revised = False
        self.stopped = False
        self.numbers = 0
        self.do(self._make())

    async def _make(self) -> None:
        self.policies = Policies()
        config = RuntimeConfig(
            driver=trivial,
            grants=Grants(tool_ids=GRANTED),
            budgets=Budgets(
                max_tool_calls=self.limit,
                max_model_calls=self.calls_limit,
                max_revisions=1,
                tools={} if self.pay_limit is None else {"pay": self.pay_limit},
            ),
            execution_policy=_Present() if self.has_policy else None,
            approvals=Approvals(require=[NEEDS_APPROVAL], timeout=1_000_000),
            tool_batches="all_or_nothing" if self.whole else "first_n",
            allow_revision_effects=self.effects,
        )
        request = RunRequest(
            input="x",
            identity=OWNER,
            session_id="s",
            run_id="root",
            attempt_id="a",
            root_run_id="root",
            grants=config.grants,
        )
        self.store = Store(MemoryEngine())
        address = SessionAddress(store_id=self.store.store_id, tenant_id="t", user_id="u", session_id="s")
        lease = (await self.store.acquire(address, live_holder("holder"))).lease
        await self.store.open_run(lease, record_of(address, "root"))
        self.events: list[Payload] = []
        assert config.approvals is not None
        self.desk = ApprovalDesk(
            request,
            config.approvals,
            store=self.store,
            lease=lease,
            emit=self.events.append,
            notify=lambda request: None,
        )
        self.tree = Tree(
            request,
            config,
            Launcher(),
            lambda payload, participant: self.events.append(payload),
            inbox=RunInbox("root", (), self.events.append),
            artifacts=_NoArtifacts(),
            desk=self.desk,
        )
        self.tree.gate.policies = self.policies

    # --- the oracle ---------------------------------------------------------------------------------------

    def gone(self, name: str) -> bool:
        """Whether nothing is admitted for a participant any more."""
        at: str | None = name
        while at is not None:
            if at in self.lost:
                return True
            at = self.parents.get(at)
        return self.stopped

    def refused(self, name: str, tool: str) -> bool:
        offered = self.offered[name]
        return (
            tool not in GRANTED
            or (offered is not None and tool not in offered)
            or (self.revised and not self.effects)
        )

    def used(self, tool: str | None = None) -> int:
        return sum(each.counted and tool in (None, each.tool) for each in self.attempts.values())

    def count(self, batch: list[Attempt]) -> None:
        """Which of a batch are counted, by the limits of the run and of ``pay``."""
        fits: list[bool] = []
        used, pays = self.used(), self.used("pay")
        candidates = [each for each in batch if not self.refused(each.owner, each.tool)]
        for each in candidates:
            ok = (self.limit is None or used < self.limit) and (
                each.tool != "pay" or self.pay_limit is None or pays < self.pay_limit
            )
            fits.append(ok)
            used, pays = used + ok, pays + (ok and each.tool == "pay")
        if self.whole and not all(fits):
            fits = [False] * len(fits)
        for each, ok in zip(candidates, fits, strict=True):
            each.counted = ok
            if ok:
                asks = each.tool == NEEDS_APPROVAL
                each.fate = "asked policy" if self.has_policy else "asked person" if asks else "allowed"

    # --- what happens -------------------------------------------------------------------------------------

    @property
    def names(self) -> list[str]:
        return list(self.offered)

    def number(self) -> int:
        self.numbers += 1
        return self.numbers

    @rule(data=st.data())
    def spawn(self, data: st.DataObject) -> None:
        if len(self.names) > 4:
            return
        parent, name = data.draw(st.sampled_from(self.names)), f"child-{self.number()}"
        message = Spawn(
            participant=parent,
            child_run_id=name,
            name=name,
            input="x",
            budgets=None,
            placement="pooled",
            work=b"",
        )
        reply = self.do(self._say(message))
        assert isinstance(reply, Rejected) is self.gone(parent)
        if not self.gone(parent):
            self.parents[name], self.offered[name] = parent, None
        self.settle_down()

    @rule(data=st.data(), offered=st.sampled_from([set(TOOLS), set(TOOLS), {"look"}, {"pay"}, set()]))
    def call_a_model(self, data: st.DataObject, offered: set[str]) -> None:
        name, call_id = data.draw(st.sampled_from(self.names)), f"call-{self.number()}"
        message = AdmitModel(
            participant=name,
            call_id=call_id,
            role="main",
            projected_input=1,
            requested_output=1,
            tools=sorted(offered),
        )
        full = self.calls_limit is not None and len(self.model_calls) >= self.calls_limit
        reply = self.do(self._say(message))
        admitted = not self.gone(name) and not full
        assert isinstance(reply, ModelAdmitted) is admitted
        if admitted:
            self.offered[name] = offered
            self.model_calls[name, call_id] = False

    @rule(data=st.data())
    def settle_a_call(self, data: st.DataObject) -> None:
        open_calls = [key for key, settled in self.model_calls.items() if not settled]
        if not open_calls:
            return
        name, call_id = data.draw(st.sampled_from(open_calls))
        message = SettleModel(
            participant=name,
            call_id=call_id,
            provider_id="p",
            model_id="m",
            usage=Usage(input_tokens=1),
            started=True,
            answered=True,
        )
        self.do(self._say(message))
        self.model_calls[name, call_id] = True

    @rule(
        data=st.data(),
        tools=st.lists(st.sampled_from(("pay", "look", "pay", "gone")), min_size=1, max_size=4),
    )
    def try_tools(self, data: st.DataObject, tools: list[str]) -> None:
        name = data.draw(st.sampled_from(self.names))
        batch = [Attempt(name, f"try-{self.number()}", tool) for tool in tools]
        gone = self.gone(name)
        if not gone:
            self.count(batch)
        message = AdmitTools(
            participant=name,
            attempts=[ToolAttempt(id=each.id, call_id=each.id, tool_name=each.tool) for each in batch],
        )
        reply = self.do(self._say_or_wait(message, batch))
        self.attempts.update((each.id, each) for each in batch)
        if reply is None:
            return
        if gone:
            assert isinstance(reply, Rejected)
            assert reply.cancelled
            return
        assert isinstance(reply, ToolsAdmitted)
        for each, verdict in zip(batch, reply.verdicts, strict=True):
            if verdict.pending:
                assert each.fate in ("asked policy", "asked person")
                self.do(self._wait_for(each))
            else:
                self.told(each, verdict)
        self.settle_down()

    async def _say(self, message: Any) -> RootReply:
        reply = self.tree.handle(message)
        return await reply if isinstance(reply, Awaitable) else reply

    async def _say_or_wait(self, message: AdmitTools, batch: list[Attempt]) -> RootReply | None:
        """The reply; ``None`` where it comes later, and is noted then."""
        reply = self.tree.handle(message)
        if not isinstance(reply, Awaitable):
            return reply
        assert len(batch) == 1
        assert batch[0].fate in ("asked policy", "asked person")
        self.waiting[batch[0].id] = asyncio.ensure_future(_awaited(reply))
        for _ in range(30):
            await asyncio.sleep(0)
        return None

    async def _wait_for(self, attempt: Attempt) -> None:
        reply = self.tree.handle(AwaitVerdict(participant=attempt.owner, attempt_id=attempt.id))
        assert isinstance(reply, Awaitable)
        self.waiting[attempt.id] = asyncio.ensure_future(_awaited(reply))

    def told(self, attempt: Attempt, verdict: ToolVerdict) -> None:
        """A verdict is there: it must be what the oracle says."""
        attempt.verdict = verdict
        assert verdict.allowed is (attempt.fate == "allowed"), (attempt, verdict)
        attempt.ran = verdict.allowed

    @precondition(lambda self: self.has_policy and any(self._undecided()))
    @rule(data=st.data(), action=st.sampled_from(["allow", "ask", "deny"]))
    def another_policy_says(self, data: st.DataObject, action: PolicyAction) -> None:
        self.say(data, action, None)

    @precondition(lambda self: self.has_policy and any(self._undecided()))
    @rule(
        data=st.data(),
        action=st.sampled_from(["allow", "ask", "deny"]),
        meanwhile=st.sampled_from([None] * 9 + ["stop", "lose", "revise"]),
    )
    def the_policy_says(self, data: st.DataObject, action: PolicyAction, meanwhile: str | None) -> None:
        self.say(data, action, meanwhile)

    def say(self, data: st.DataObject, action: PolicyAction, meanwhile: str | None) -> None:
        """The policy's answer is there; before anybody acts on it, something else may happen."""
        attempt = self.attempts[data.draw(st.sampled_from(self._undecided()))]
        attempt.action = action
        self.do(self._say_so(attempt, meanwhile))
        if meanwhile == "stop":
            self.stopped = True
        elif meanwhile == "lose" and attempt.owner != ROOT:
            self.lost.add(attempt.owner)
        elif meanwhile == "revise" and not self.stopped:
            self.revised = True
        if self.gone(attempt.owner) or action == "deny":
            attempt.fate = "denied"
        elif action == "ask" or attempt.tool == NEEDS_APPROVAL:
            attempt.fate = "asked person"
        else:
            attempt.fate = "denied" if self.revised and not self.effects else "allowed"
        self._drop()
        self.settle_down()

    async def _say_so(self, attempt: Attempt, meanwhile: str | None) -> None:
        """In one step of the loop, so that what happens meanwhile comes before anybody acts on the answer."""
        assert attempt.action is not None
        self.policies.asked[attempt.id].set_result(Judgement(action=attempt.action, reason="said"))
        if meanwhile == "stop":
            self.tree.stop("enough")
        elif meanwhile == "lose" and attempt.owner != ROOT:
            self.tree.child_lost(attempt.owner, "killed")
        elif meanwhile == "revise":
            self.tree.handle(Revise(action="revise", reason="again"))

    def _undecided(self) -> list[str]:
        return [key for key, future in self.policies.asked.items() if not future.done()]

    @precondition(lambda self: bool(self.desk.pending))
    @rule(data=st.data(), approve=st.booleans(), twice=st.booleans())
    def another_person_decides(self, data: st.DataObject, approve: bool, twice: bool) -> None:
        self.a_person_decides(data, approve, twice)

    @precondition(lambda self: bool(self.desk.pending))
    @rule(data=st.data(), approve=st.booleans(), twice=st.booleans())
    def one_more_person_decides(self, data: st.DataObject, approve: bool, twice: bool) -> None:
        self.a_person_decides(data, approve, twice)

    def a_person_decides(self, data: st.DataObject, approve: bool, twice: bool) -> None:
        request = data.draw(st.sampled_from(list(self.desk.pending)))
        name = ROOT if request.run_id == "root" else request.run_id
        mine = [
            each
            for each in self.attempts.values()
            if each.owner == name
            and each.fate == "asked person"
            and each.tool == request.tool_name
            and each.verdict is None
        ]
        assert mine
        before = {each.id for each in mine if self.waiting[each.id].done()}
        decision = DecideRequest(run_id="root", approval_id=request.id, approve=approve, by="ann")
        for _ in range(2 if twice else 1):
            stands = self.do(self.desk.decide(decision))
            assert stands.state == ("approved" if approve else "denied")
        self.settle_down()
        (decided,) = [each for each in mine if self.waiting[each.id].done() and each.id not in before]
        allowed = approve and not (self.revised and not self.effects)
        decided.fate = "allowed" if allowed else "denied"

    @precondition(lambda self: self.numbers > 12)
    @rule()
    def revise_now_and_then(self) -> None:
        self.revise()

    def revise(self) -> None:
        reply = self.do(self._say(Revise(action="revise", reason="again")))
        del reply
        if not self.stopped:
            self.revised = True

    @precondition(lambda self: len(self.offered) > 1 and self.numbers % 3 == 0)
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.names[1:]))
        self.do(self._lose(name))
        if name not in self.lost and not self.stopped:
            self.lost.add(name)
        self.lost.add(name)
        self._drop()
        self.settle_down()

    async def _lose(self, name: str) -> None:
        self.tree.child_lost(name, "killed")

    @precondition(lambda self: self.numbers > 25)
    @rule()
    def stop(self) -> None:
        self.do(self._stop())
        self.stopped = True
        self._drop()
        self.settle_down()

    async def _stop(self) -> None:
        self.tree.stop("enough")

    def _drop(self) -> None:
        """What waited for somebody who is gone is denied."""
        for attempt in self.attempts.values():
            waits = attempt.fate in ("asked policy", "asked person")
            if waits and attempt.verdict is None and self.gone(attempt.owner):
                attempt.fate = "denied"

    # --- what must always hold ----------------------------------------------------------------------------

    @invariant()
    def verdicts_are_what_the_oracle_says(self) -> None:
        if not hasattr(self, "waiting"):
            return
        for attempt_id, waiting in list(self.waiting.items()):
            attempt = self.attempts.get(attempt_id)
            if attempt is None or not waiting.done() or attempt.verdict is not None:
                continue
            reply = waiting.result()
            assert isinstance(reply, ToolsAdmitted)
            self.told(attempt, reply.verdicts[0])
        for attempt in self.attempts.values():
            decided = attempt.fate in ("denied", "allowed")
            if attempt.id in self.waiting and attempt.verdict is None:
                assert not decided, f"nobody is told of {attempt}"

    @invariant()
    def attempts_are_counted_exactly(self) -> None:
        if not hasattr(self, "attempts"):
            return
        assert self.tree.budget.tool_calls.used == self.used()
        assert self.limit is None or self.used() <= self.limit
        assert self.tree.budget.model_calls.used == len(self.model_calls)

    def teardown(self) -> None:
        if hasattr(self, "waiting"):
            self.stop()
            self.verdicts_are_what_the_oracle_says()
            self.do(self._end())
            for attempt in self.attempts.values():
                assert not attempt.ran or attempt.counted
                if attempt.id in self.waiting:
                    assert attempt.verdict is not None, attempt
        self.loop.close()

    async def _end(self) -> None:
        for name in list(self.parents):
            self.tree.child_lost(name, "the end")
        await self.tree.settled()
        assert self.tree.ledger.open_reservations == 0
        assert self.tree.budget.tokens.reserved == 0
        assert self.desk.pending == ()
        await self.store.close()


async def _awaited(reply: Awaitable[RootReply]) -> RootReply:
    return await reply


class _Present:
    """Stands for an execution policy: what it says comes from :class:`Policies`."""

    async def decide(self, call: Any, ctx: Any) -> Any:
        raise RetinueError("nobody asks here")


class _NoArtifacts:
    async def put(self, artifact: Any) -> None:
        raise NotImplementedError

    async def get(self, artifact_id: str) -> Any:
        raise NotImplementedError


GateMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)
TestGateMachine = GateMachine.TestCase
