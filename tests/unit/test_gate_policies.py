"""What policies, approvals and plan mode make of tool calls, through whole runs."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from retinue import (
    Agent,
    ApprovalRequest,
    Approvals,
    Budgets,
    CallUnderReview,
    Decision,
    DriverOutput,
    ExecutionServices,
    Grants,
    Identity,
    PolicyContext,
    RunRequest,
    RunResult,
    ToolCall,
    agent_driver,
    tool,
)
from retinue.errors import ModelFailed, ToolFailed
from retinue.policies import Effect, PolicyAction
from retinue.testing import ScriptedModel, tool_calls
from tests.conftest import MakeLocalRuntime
from tests.support import driver, soon

ran: list[Any] = []


@pytest.fixture(autouse=True)
def nothing_ran() -> None:
    ran.clear()


@tool
async def pay(amount: int) -> str:
    """Pay."""
    ran.append(amount)
    return f"paid {amount}"


@tool(effect="read")
async def look(what: str) -> str:
    """Look."""
    ran.append(what)
    return f"saw {what}"


@tool(effect="write")
async def write(what: str) -> str:
    """Write."""
    ran.append(what)
    return "written"


TOOLS = [pay, look, write]
ALL = Grants(tool_ids=["pay", "look", "write"])


class Says:
    """An execution policy that always says the same, and notes what it was asked."""

    def __init__(self, action: PolicyAction = "allow", reason: str = "") -> None:
        self.action: PolicyAction = action
        self.reason = reason
        self.asked: list[tuple[str, Mapping[str, Any], str]] = []

    async def decide(self, call: CallUnderReview, ctx: PolicyContext) -> Decision:
        self.asked.append((call.tool_name, call.arguments, ctx.participant))
        return Decision(action=self.action, reason=self.reason)

    def __reduce__(self) -> Any:  # a delegate's process would have a copy that nobody looks at
        raise TypeError("the policy stays at the root")


def agent(*steps: Any, **options: Any) -> Agent:
    return Agent(name="a", model=ScriptedModel(list(steps)), tools=TOOLS, **options)


def tool_texts(agent: Agent) -> list[str]:
    """What the model was told of its tool calls."""
    model = agent.model
    assert isinstance(model, ScriptedModel)
    return [message.text for message in model.requests[-1].messages if message.role == "tool"]


@pytest.mark.parametrize("stream", [False, True])
async def test_c147_what_the_policy_denies_is_not_executed_and_the_run_completes(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str, stream: bool
) -> None:
    @tool(requires_approval=False)
    async def free(x: int) -> str:
        """No approval."""
        ran.append(x)
        return "free"

    policy = Says("deny", "not today")
    it = Agent(name="a", model=ScriptedModel([tool_calls(("free", {"x": 1})), "done"]), tools=[free])
    runtime = local_runtime(
        driver=agent_driver(it, stream=stream), grants=Grants(tool_ids=["free"]), execution_policy=policy
    )
    result: RunResult = await soon(runtime.run("x", identity=identity, session_id=session_id))
    assert (result.status, result.text, ran) == ("completed", "done", [])
    assert tool_texts(it) == ["[denied] policy: not today"]
    assert result.budget is not None
    assert result.budget.tool_calls.used == 1  # it had passed the runtime's own gate


async def test_c148_without_attempts_left_a_tool_is_denied_and_the_run_completes(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    it = agent(tool_calls(("write", {"what": "a"})), "done")
    policy = Says()
    runtime = local_runtime(
        driver=agent_driver(it), grants=ALL, budgets=Budgets(max_tool_calls=0), execution_policy=policy
    )
    result = await soon(runtime.run("x", identity=identity, session_id=session_id))
    assert (result.status, ran, policy.asked) == ("completed", [], [])
    assert tool_texts(it)[0].startswith("[denied] budget: ")


async def test_c151_with_arguments_that_do_not_fit_nobody_is_asked(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    asked: list[str] = []

    def predicate(arguments: Mapping[str, Any]) -> bool:
        asked.append("predicate")
        return False

    @tool(requires_approval=predicate)
    async def strict(x: int) -> str:
        """Strict."""
        ran.append(x)
        return "ok"

    policy = Says()
    approvals = Approvals(on_request=lambda request: asked.append("approver"))
    model = ScriptedModel([tool_calls(("strict", {"x": "many"}), ("strict", {"y": 1})), "done"])
    it = Agent(name="a", model=model, tools=[strict])
    runtime = local_runtime(
        driver=agent_driver(it),
        grants=Grants(tool_ids=["strict"]),
        execution_policy=policy,
        approvals=approvals,
    )
    result = await soon(runtime.run("x", identity=identity, session_id=session_id))
    assert (result.status, ran, policy.asked, asked) == ("completed", [], [], [])
    assert all("invalid arguments" in text for text in tool_texts(it))
    assert result.budget is not None
    assert result.budget.tool_calls.used == 0


async def test_c152_an_approval_that_nobody_can_give_is_a_denial(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    @tool(requires_approval=True)
    async def guarded() -> str:
        """Guarded."""
        ran.append("guarded")
        return "ok"

    it = Agent(name="a", model=ScriptedModel([tool_calls(("guarded", {})), "done"]), tools=[guarded])
    runtime = local_runtime(driver=agent_driver(it), grants=Grants(tool_ids=["guarded"]))
    result = await soon(runtime.run("x", identity=identity, session_id=session_id))
    assert (result.status, ran) == ("completed", [])
    assert tool_texts(it)[0].startswith("[denied] approval_required: ")


async def test_c154_an_approval_that_comes_with_a_cancel_runs_nothing(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    handles: list[Any] = []

    async def approve(request: ApprovalRequest) -> bool:
        await handles[0].cancel("enough")
        return True

    it = agent(tool_calls(("pay", {"amount": 1})), "done")
    runtime = local_runtime(
        driver=agent_driver(it), grants=ALL, approvals=Approvals(require="all", on_request=approve)
    )
    handles.append(runtime.start("x", identity=identity, session_id=session_id))
    result = await soon(handles[0].result())
    assert (result.status, ran) == ("cancelled", [])
    (request,) = await soon(runtime.approvals.list(tenant_id=identity.tenant_id, state=None))
    assert request.state == "cancelled"


@pytest.mark.parametrize(("answer", "says"), [(True, "paid 5"), (False, "[denied] approval_denied: ")])
async def test_the_application_decides_and_only_true_approves(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str, answer: bool, says: str
) -> None:
    seen: list[ApprovalRequest] = []

    def decide(request: ApprovalRequest) -> bool:
        seen.append(request)
        return answer

    it = agent(tool_calls(("pay", {"amount": 5}), ("look", {"what": "x"})), "done")
    runtime = local_runtime(
        driver=agent_driver(it), grants=ALL, approvals=Approvals(require=["pay"], on_request=decide)
    )
    result = await soon(runtime.run("x", identity=identity, session_id=session_id))
    assert result.status == "completed"
    paid, looked = tool_texts(it)
    assert paid.startswith(says)
    assert looked == "saw x"
    (request,) = seen
    assert (request.tool_name, request.arguments, request.user_id) == ("pay", {"amount": 5}, identity.user_id)


async def test_c161_a_cached_result_is_not_given_once_the_policy_denies(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    policy = Says()

    @tool(cache=True)
    async def once(x: int) -> str:
        """Once."""
        ran.append(x)
        return "fresh"

    @driver
    async def asks(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        texts = []
        for number, action in enumerate(("allow", "allow", "deny")):
            policy.action = action  # type: ignore[assignment]
            call = ToolCall(str(number), "once", {"x": 1})
            result = await services.dispatch(call, tools=[once])
            texts.append([result.text, result.denial, result.call_id])
        return DriverOutput(text="ok", structured=texts)

    runtime = local_runtime(driver=asks, grants=Grants(tool_ids=["once"]), execution_policy=policy)
    result = await soon(runtime.run("x", identity=identity, session_id=session_id))
    assert ran == [1]
    assert result.structured[:2] == [["fresh", None, "0"], ["fresh", None, "1"]]
    assert result.structured[2][1] == "policy"
    assert result.budget is not None
    assert result.budget.tool_calls.used == 3


@pytest.mark.parametrize("ids", [["1", "1"], ["1", ""]])
async def test_c162_a_batch_with_repeated_or_empty_ids_runs_nothing(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str, ids: list[str]
) -> None:
    @driver
    async def asks(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        calls = [ToolCall(call_id, "look", {"what": "x"}) for call_id in ids]
        with pytest.raises(ModelFailed, match="empty or repeated ids"):
            await services.dispatch_batch(calls, tools=TOOLS)
        return DriverOutput(text="ok")

    runtime = local_runtime(driver=asks, grants=ALL)
    result = await soon(runtime.run("x", identity=identity, session_id=session_id))
    assert (result.status, ran) == ("completed", [])
    assert result.budget is not None
    assert result.budget.tool_calls.used == 0


async def test_c164_delegates_are_judged_by_the_roots_policy_and_asked_for_at_its_desk(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    policy, asked = Says("ask", "money"), []

    def decide(request: ApprovalRequest) -> bool:
        asked.append((request.agent_name, request.reason))
        return True

    child = Agent(
        name="child", model=ScriptedModel([tool_calls(("pay", {"amount": 2})), "child done"]), tools=[pay]
    )

    @driver
    async def delegates(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        output = await (await services.delegate(child, "pay two")).result()
        return DriverOutput(text=output.text)

    runtime = local_runtime(
        driver=delegates, grants=ALL, execution_policy=policy, approvals=Approvals(on_request=decide)
    )
    result = await soon(runtime.run("x", identity=identity, session_id=session_id))
    assert (result.status, result.text) == ("completed", "child done")
    assert policy.asked == [("pay", {"amount": 2}, "child")]
    assert asked == [("child", "money")]


@pytest.mark.parametrize(
    ("name", "arguments", "says"),
    [
        ("look", {"what": "x"}, "saw x"),
        ("write", {"what": "x"}, "[denied] policy: "),
        ("pay", {"amount": 1}, "[denied] approval_required: "),
    ],
)
async def test_a_plan_runs_what_reads_asks_about_the_unknown_and_denies_the_rest(
    local_runtime: MakeLocalRuntime,
    identity: Identity,
    session_id: str,
    name: str,
    arguments: dict[str, Any],
    says: str,
) -> None:
    it = agent(tool_calls((name, arguments)), "planned")
    runtime = local_runtime(driver=agent_driver(it), grants=ALL)
    result = await soon(runtime.run("x", identity=identity, session_id=session_id, run_mode="plan"))
    assert result.status == "completed"
    (text,) = tool_texts(it)
    assert text.startswith(says)


async def test_in_a_plan_a_policy_may_know_the_effect_and_no_reviewer_allows_a_write(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    class Knows(Says):
        def resolve_effect(self, call: CallUnderReview, ctx: PolicyContext) -> Effect:
            return "read" if call.arguments.get("amount") == 0 else "external"

    it = agent(tool_calls(("pay", {"amount": 0}), ("pay", {"amount": 1})), "planned")
    approvals = Approvals(require="all", on_request=lambda request: True)
    runtime = local_runtime(
        driver=agent_driver(it), grants=ALL, execution_policy=Knows(), approvals=approvals
    )
    await soon(runtime.run("x", identity=identity, session_id=session_id, run_mode="plan"))
    free, paid = tool_texts(it)
    assert free == "paid 0"
    assert paid.startswith("[denied] policy: its effect is 'external'")


class Raises(Says):
    async def decide(self, call: CallUnderReview, ctx: PolicyContext) -> Decision:
        raise RuntimeError("broken")


class Meddles(Says):
    async def decide(self, call: CallUnderReview, ctx: PolicyContext) -> Decision:
        call.arguments["amount"] = 1_000_000  # type: ignore[index]
        return Decision(action="allow")


class Mumbles(Says):
    async def decide(self, call: CallUnderReview, ctx: PolicyContext) -> Decision:
        return "allow"  # type: ignore[return-value]


class Exits(Says):
    async def decide(self, call: CallUnderReview, ctx: PolicyContext) -> Decision:
        raise SystemExit(3)


@pytest.mark.parametrize("policy", [Raises(), Meddles(), Mumbles(), Says("maybe")])  # type: ignore[arg-type]
async def test_what_is_no_decision_denies(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str, policy: Says
) -> None:
    it = agent(tool_calls(("pay", {"amount": 1})), "done")
    runtime = local_runtime(driver=agent_driver(it), grants=ALL, execution_policy=policy)
    result = await soon(runtime.run("x", identity=identity, session_id=session_id))
    assert (result.status, ran) == ("completed", [])
    assert tool_texts(it)[0].startswith("[denied] policy: ")


async def test_a_policy_that_exits_denies_and_ends_neither_the_run_nor_the_process(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    it = agent(tool_calls(("pay", {"amount": 1})), "done")
    runtime = local_runtime(driver=agent_driver(it), grants=ALL, execution_policy=Exits())
    result = await soon(runtime.run("x", identity=identity, session_id=session_id))
    assert (result.status, ran) == ("completed", [])
    assert tool_texts(it) == ["[denied] policy: the execution policy raised SystemExit: 3"]


async def test_the_stricter_of_the_apps_and_the_agents_policy_holds(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    for app, own, says in (
        ("allow", "deny", "[denied] policy: the agent's"),
        ("deny", "allow", "[denied] policy: the app's"),
        ("allow", "ask", "[denied] approval_required: the agent's"),
        ("ask", "deny", "[denied] policy: the agent's"),
        ("allow", "allow", "paid 1"),
    ):
        policies = Says(app, "the app's"), Says(own, "the agent's")  # type: ignore[arg-type]
        it = agent(tool_calls(("pay", {"amount": 1})), "done", execution_policy=policies[1])
        runtime = local_runtime(driver=agent_driver(it), grants=ALL, execution_policy=policies[0])
        await soon(runtime.run("x", identity=identity, session_id=session_id))
        assert tool_texts(it)[0].startswith(says), (app, own)
    shared = Says()
    it = agent(tool_calls(("pay", {"amount": 1})), "done", execution_policy=shared)
    runtime = local_runtime(driver=agent_driver(it), grants=ALL, execution_policy=shared)
    await soon(runtime.run("x", identity=identity, session_id=session_id))
    assert len(shared.asked) == 1


@pytest.mark.parametrize(
    ("batches", "texts"),
    [("first_n", ["saw a", "saw b", "[denied] budget"]), ("all_or_nothing", ["[denied] budget"] * 3)],
)
async def test_a_batch_over_the_limit(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str, batches: Any, texts: list[str]
) -> None:
    it = agent(tool_calls(*[("look", {"what": name}) for name in "abc"]), "done")
    runtime = local_runtime(
        driver=agent_driver(it), grants=ALL, budgets=Budgets(max_tool_calls=2), tool_batches=batches
    )
    result = await soon(runtime.run("x", identity=identity, session_id=session_id))
    assert all(text.startswith(wanted) for text, wanted in zip(tool_texts(it), texts, strict=True))
    assert result.budget is not None
    assert result.budget.tool_calls.used == (2 if batches == "first_n" else 0)


async def test_single_tools_have_limits_of_their_own(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    it = agent(tool_calls(("pay", {"amount": 1}), ("pay", {"amount": 2}), ("look", {"what": "x"})), "done")
    budgets = Budgets(max_tool_calls=5, tools={"pay": 1})
    runtime = local_runtime(driver=agent_driver(it), grants=ALL, budgets=budgets)
    result = await soon(runtime.run("x", identity=identity, session_id=session_id))
    first, second, third = tool_texts(it)
    assert (first, third) == ("paid 1", "saw x")
    assert "the budget of pay is exhausted" in second
    assert result.budget is not None
    assert (result.budget.tools["pay"].used, result.budget.tools["look"].used) == (1, 1)
    assert result.budget.tool_calls.used == 2


async def test_a_batch_about_which_people_are_asked_is_decided_call_by_call(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    waiting: dict[int, asyncio.Future[bool]] = {}
    there = asyncio.Event()

    async def decide(request: ApprovalRequest) -> bool:
        waiting[request.arguments["amount"]] = asyncio.get_running_loop().create_future()
        if len(waiting) == 2:
            waiting[2].set_result(True)
        if request.arguments["amount"] == 2:
            there.set()
        return await waiting[request.arguments["amount"]]

    @tool
    async def release() -> str:
        """Answers the first request, when the second call ran."""
        return "ok"

    it = agent(tool_calls(("pay", {"amount": 1}), ("pay", {"amount": 2})), "done")
    approvals = Approvals(require="all", on_request=decide, timeout=0.2)
    runtime = local_runtime(driver=agent_driver(it), grants=ALL, approvals=approvals)
    result = await soon(runtime.run("x", identity=identity, session_id=session_id))
    assert result.status == "completed"
    first, second = tool_texts(it)
    assert second == "paid 2"
    assert first.startswith("[denied] approval_denied: timed out")
    assert ran == [2]


async def test_an_effect_of_the_driver_is_judged_like_a_tool(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    policy = Says("deny", "closed")

    @driver
    async def acts(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        async def execute(arguments: dict[str, Any]) -> str:
            ran.append(arguments)
            return "done"

        with pytest.raises(ToolFailed, match="policy: closed") as refused:
            await services.dispatch_effect("workflow:submit", {"n": 1}, execute)
        return DriverOutput(text=str(refused.value.denial))

    runtime = local_runtime(driver=acts, grants=Grants(tool_ids=["workflow:submit"]), execution_policy=policy)
    result = await soon(runtime.run("x", identity=identity, session_id=session_id))
    assert (result.text, ran) == ("policy", [])
    assert policy.asked == [("workflow:submit", {"n": 1}, "")]


async def test_the_same_call_too_often_in_a_row_is_refused(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    same = tool_calls(("look", {"what": "x"}))
    it = agent(same, same, same, "done", max_repeated_calls=2)
    runtime = local_runtime(driver=agent_driver(it), grants=ALL)
    await soon(runtime.run("x", identity=identity, session_id=session_id))
    texts = tool_texts(it)
    assert texts[:2] == ["saw x", "saw x"]
    assert "2 times in a row already" in texts[2]
    assert ran == ["x", "x"]
