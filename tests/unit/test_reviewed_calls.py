"""Calls around their reviews: what is changed, hidden or broken meanwhile, batches, caches, heirs."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest
from pydantic import SecretStr

from retinue import (
    Agent,
    ApprovalRequest,
    Approvals,
    CallUnderReview,
    Decision,
    DriverOutput,
    ExecutionServices,
    Grants,
    Identity,
    ModelResponse,
    PolicyContext,
    RunRequest,
    RunResult,
    TelemetryEvent,
    Tool,
    ToolCall,
    agent_driver,
    tool,
)
from retinue.testing import ScriptedModel, tool_calls
from retinue.testing.scripted import ScriptStep
from retinue.tools import ToolResult
from tests.conftest import MakeLocalRuntime
from tests.support import Start, code_of, driver, flag, soon, spent, why
from tests.unit.policy_world import Named

ran: list[Any] = []


@pytest.fixture(autouse=True)
def nothing_ran() -> None:
    ran.clear()
    Named.asked.clear()


@tool
async def put(data: dict[str, Any]) -> str:
    """Takes anything."""
    ran.append(copy.deepcopy(data))
    return "put"


@tool
async def pay(amount: int) -> str:
    """Pay."""
    ran.append(amount)
    return f"paid {amount}"


async def drive(make: MakeLocalRuntime, identity: Identity, start: Start, **options: Any) -> RunResult:
    tools: list[Tool] = options.pop("tools", [put, pay])
    runtime = make(
        driver=driver(start), tools=tools, grants=Grants(tool_ids=[item.name for item in tools]), **options
    )
    result: RunResult = await soon(runtime.run("x", identity=identity, session_id="s"))
    return result


async def results_of(
    make: MakeLocalRuntime, identity: Identity, *calls: ToolCall, **options: Any
) -> list[ToolResult]:
    """What these calls gave, made one after the other."""
    results: list[ToolResult] = []

    async def start(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        results.extend([await services.dispatch(call) for call in calls])
        return DriverOutput(text="ok")

    assert (await drive(make, identity, start, **options)).status == "completed"
    return results


# --- what is reviewed is what runs ------------------------------------------------------------------------


@pytest.mark.parametrize("who", ["policy", "approver"])
async def test_what_others_change_during_a_review_is_not_run(
    local_runtime: MakeLocalRuntime, identity: Identity, who: str
) -> None:
    call = ToolCall("1", "put", {"data": {"to": {"name": "bob"}}})

    class Meddles(Named):
        def decide(self, under: CallUnderReview, ctx: PolicyContext) -> Decision:
            call.arguments["data"]["to"]["name"] = "eve"  # the very object that the tool would get
            return Decision(action="allow")

    def approve(request: ApprovalRequest) -> bool:
        call.arguments["data"]["to"]["name"] = "eve"
        return True

    options: dict[str, Any] = {"execution_policy": Meddles("m")}
    if who == "approver":
        options = {"approvals": Approvals(require="all", on_request=approve)}
    (result,) = await results_of(local_runtime, identity, call, **options)
    assert (result.denial, ran) == ("policy", [])
    assert result.text == "[denied] policy: its arguments were changed after they were reviewed"


async def test_an_approver_that_changes_what_it_sees_approves_nothing(
    local_runtime: MakeLocalRuntime, identity: Identity
) -> None:
    def approve(request: ApprovalRequest) -> bool:
        arguments: Any = request.arguments
        arguments["data"]["amount"] = 1  # not what will run
        return True

    call = ToolCall("1", "put", {"data": {"amount": 1_000}})
    approvals = Approvals(require="all", on_request=approve)
    (result,) = await results_of(local_runtime, identity, call, approvals=approvals)
    assert (result.denied, ran) == (True, [])
    assert result.text.endswith("the arguments were changed while they were reviewed")


@pytest.mark.parametrize("value", [object(), float("nan"), "\ud800"], ids=repr)
@pytest.mark.parametrize("guard", ["policy", "approvals", "tool", "agent"])
async def test_what_nobody_can_review_is_denied_where_somebody_would(
    local_runtime: MakeLocalRuntime, identity: Identity, value: Any, guard: str
) -> None:
    @tool
    async def odd(number: int) -> str:
        ran.append(number)
        return "ran"

    @tool(name="odd", requires_approval=lambda arguments: False)
    async def guarded(number: int) -> str:
        ran.append(number)
        return "ran"

    found = guarded if guard == "tool" else odd
    found.validate = lambda arguments: {"number": value}  # type: ignore[method-assign]
    options: dict[str, Any] = {}
    if guard == "policy":
        options["execution_policy"] = Named("p")
    elif guard == "approvals":
        options["approvals"] = Approvals()
    model = ScriptedModel([tool_calls(("odd", {"number": 1})), "done"])
    it = Agent(
        name="a", model=model, tools=[found], execution_policy=Named("own") if guard == "agent" else None
    )
    runtime = local_runtime(driver=agent_driver(it), grants=Grants(tool_ids=["odd"]), **options)
    result = await soon(runtime.run("x", identity=identity, session_id="s"))
    text = model.requests[-1].messages[-1].text
    assert (result.status, ran, Named.asked) == ("completed", [], [])
    assert text.startswith("[denied] policy: its arguments cannot be reviewed")
    assert spent(result).tool_calls.used == 0


async def test_an_iterator_runs_where_nobody_reviews_and_is_denied_where_somebody_does(
    local_runtime: MakeLocalRuntime, identity: Identity
) -> None:
    @tool
    async def each(ids: Iterable[int]) -> str:
        ran.append(list(ids))
        return "ran"

    call = ToolCall("1", "each", {"ids": [1, 2]})
    (result,) = await results_of(local_runtime, identity, call, tools=[each])
    assert (result.text, ran) == ("ran", [[1, 2]])
    policy = Named("p")
    (result,) = await results_of(local_runtime, identity, call, tools=[each], execution_policy=policy)
    assert (result.denial, ran) == ("policy", [[1, 2]])
    assert "cannot be reviewed" in result.text
    assert "read only once" in result.text


async def test_numbers_of_any_size_are_reviewed_as_they_are(
    local_runtime: MakeLocalRuntime, identity: Identity
) -> None:
    seen: list[Mapping[str, Any]] = []

    class Looks(Named):
        def decide(self, call: CallUnderReview, ctx: PolicyContext) -> Decision:
            seen.append(call.arguments)
            return Decision(action="allow")

    calls = [ToolCall(str(amount), "pay", {"amount": amount}) for amount in (2**53 + 1, 10**30, -(2**64))]
    results = await results_of(local_runtime, identity, *calls, execution_policy=Looks("l"))
    assert ran == [2**53 + 1, 10**30, -(2**64)]
    assert [call.arguments for call in calls] == seen
    assert [result.error for result in results] == [False] * 3


# --- application code that breaks -------------------------------------------------------------------------


def _raises(error: BaseException) -> Callable[..., Any]:
    def broken(*_: Any) -> Any:
        raise error

    return broken


def _raises_later(error: BaseException) -> Callable[..., Any]:
    async def broken(*_: Any) -> Any:
        await asyncio.sleep(0)
        raise error

    return broken


BROKEN = [
    make(error)
    for make in (_raises, _raises_later)
    for error in (ValueError("no"), SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError("odd"))
]


@pytest.mark.parametrize("broken", BROKEN)
@pytest.mark.parametrize("who", ["app", "agent", "predicate"])
async def test_a_broken_guard_denies_and_the_run_goes_on(
    local_runtime: MakeLocalRuntime, identity: Identity, broken: Callable[..., Any], who: str
) -> None:
    @tool(requires_approval=broken if who == "predicate" else None)
    async def spend(amount: int) -> str:
        ran.append(amount)
        return "spent"

    class Breaks:
        def decide(self, call: CallUnderReview, ctx: PolicyContext) -> Any:
            return broken()

    calls = tool_calls(("spend", {"amount": 1}), ("spend", {"amount": 2}))
    model = ScriptedModel([calls, "done"])
    own = Breaks() if who == "agent" else None
    runtime = local_runtime(
        driver=agent_driver(Agent(name="a", model=model, tools=[spend], execution_policy=own)),
        grants=Grants(tool_ids=["spend"]),
        execution_policy=Breaks() if who == "app" else None,
    )
    result = await soon(runtime.run("x", identity=identity, session_id="s"))
    assert (result.status, result.text, ran) == ("completed", "done", [])
    texts = [message.text for message in model.requests[-1].messages if message.role == "tool"]
    assert len(texts) == 2
    assert all(text.startswith("[denied] policy: ") for text in texts)


@pytest.mark.parametrize("answer", [None, 1, "yes"])
async def test_a_predicate_must_say_true_or_false(
    local_runtime: MakeLocalRuntime, identity: Identity, answer: Any
) -> None:
    @tool(requires_approval=lambda arguments: answer)
    async def spend(amount: int) -> str:
        ran.append(amount)
        return "spent"

    (result,) = await results_of(
        local_runtime, identity, ToolCall("1", "spend", {"amount": 1}), tools=[spend]
    )
    assert (result.denial, ran) == ("policy", [])


async def test_a_predicate_gets_a_copy_and_may_answer_later(
    local_runtime: MakeLocalRuntime, identity: Identity
) -> None:
    async def large(arguments: Mapping[str, Any]) -> bool:
        await asyncio.sleep(0)
        arguments["data"]["amount"] += 1  # nobody sees that
        return bool(arguments["data"]["amount"] > 10)

    @tool(requires_approval=large)
    async def spend(data: dict[str, int]) -> str:
        ran.append(data["amount"])
        return "spent"

    calls = [ToolCall(str(amount), "spend", {"data": {"amount": amount}}) for amount in (1, 10)]
    small, big = await results_of(local_runtime, identity, *calls, tools=[spend])
    assert (small.text, big.denial, ran) == ("spent", "approval_required", [1])


async def test_once_a_run_is_being_cancelled_nobody_is_asked(
    local_runtime: MakeLocalRuntime, identity: Identity
) -> None:
    asked: list[str] = []

    def predicate(arguments: Mapping[str, Any]) -> bool:
        asked.append("predicate")
        return False

    @tool(requires_approval=predicate)
    async def spend() -> str:
        ran.append("spent")
        return "spent"

    async def start(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        try:
            flag("begun").set()
            await asyncio.Event().wait()
        finally:
            result = await services.dispatch(ToolCall("1", "spend", {}))
            flag("told").set(result.denial)
        raise AssertionError

    runtime = local_runtime(driver=driver(start), tools=[spend], grants=Grants(tool_ids=["spend"]))
    handle = runtime.start("x", identity=identity, session_id="s")
    await flag("begun").wait()
    await handle.cancel()
    assert (await soon(handle.result())).status == "cancelled"
    assert await flag("told").wait() == "cancelled"
    assert (asked, ran) == ([], [])


# --- batches ----------------------------------------------------------------------------------------------


async def test_what_fails_one_call_of_a_batch_fails_the_run_as_itself_when_the_others_are_done(
    local_runtime: MakeLocalRuntime, identity: Identity
) -> None:
    @tool
    async def slow() -> str:
        """Ends after the request for pay has timed out."""
        await flag("over").wait()
        await asyncio.sleep(0.05)
        ran.append("slow")
        return "slow"

    def late(request: ApprovalRequest) -> None:
        asyncio.get_running_loop().call_later(0.1, flag("over").set)

    approvals = Approvals(require=["pay"], timeout=0.1, timeout_action="raise", on_request=late)
    model = ScriptedModel([tool_calls(("pay", {"amount": 1}), ("slow", {}), ("put", {"data": {}})), "never"])
    runtime = local_runtime(
        driver=agent_driver(Agent(name="a", model=model, tools=[pay, slow, put])),
        grants=Grants(tool_ids=["pay", "slow", "put"]),
        approvals=approvals,
    )
    result = await soon(runtime.run("x", identity=identity, session_id="s"))
    assert (result.status, code_of(result)) == ("failed", "tool_failed")
    assert "for pay timed out" in why(result)
    assert ran == [{}, "slow"]


async def test_five_calls_of_a_batch_run_at_once_and_results_keep_their_order(
    local_runtime: MakeLocalRuntime, identity: Identity
) -> None:
    now, most = 0, 0

    @tool
    async def count(number: int) -> str:
        nonlocal now, most
        now += 1
        most = max(most, now)
        for _ in range(20 - number):
            await asyncio.sleep(0)
        now -= 1
        if number == 3:
            raise ValueError("three")
        return str(number)

    async def start(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        calls = [ToolCall(f"c{number}", "count", {"number": number}) for number in range(12)]
        results = await services.dispatch_batch(calls)
        assert await services.dispatch_batch([]) == []
        return DriverOutput(text="ok", structured=[[each.call_id, each.text] for each in results])

    result = await drive(local_runtime, identity, start, tools=[count])
    texts = ["ValueError: three" if number == 3 else str(number) for number in range(12)]
    assert result.structured == [[f"c{number}", text] for number, text in enumerate(texts)]
    assert most == 5


# --- caches -----------------------------------------------------------------------------------------------


async def test_a_cache_knows_arguments_that_look_the_same_to_reviewers_apart(
    local_runtime: MakeLocalRuntime, identity: Identity
) -> None:
    @tool(cache=True)
    async def login(password: SecretStr, user: str = "ann") -> str:
        ran.append(password.get_secret_value())
        return password.get_secret_value()

    calls = [
        ToolCall("1", "login", {"password": "a"}),
        ToolCall("2", "login", {"password": "b"}),
        ToolCall("3", "login", {"password": "a"}),
        ToolCall("4", "login", {"password": "a", "user": "bob"}),
    ]
    results = await results_of(local_runtime, identity, *calls, tools=[login], execution_policy=Named("p"))
    assert [result.text for result in results] == ["a", "b", "a", "a"]
    assert [result.call_id for result in results] == ["1", "2", "3", "4"]
    assert ran == ["a", "b", "a"]


async def test_two_tools_of_one_name_share_no_cache(
    local_runtime: MakeLocalRuntime, identity: Identity
) -> None:
    @tool(name="read", cache=True)
    async def first() -> str:
        return "first"

    @tool(name="read", cache=True)
    async def second() -> str:
        return "second"

    async def start(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        texts = [
            (await services.dispatch(ToolCall("1", "read", {}), tools=[found])).text
            for found in (first, second)
        ]
        return DriverOutput(text=" ".join(texts))

    runtime = local_runtime(driver=driver(start), grants=Grants(tool_ids=["read"]))
    assert (await soon(runtime.run("x", identity=identity, session_id="s"))).text == "first second"


async def test_a_failure_is_not_cached_and_a_run_does_not_see_the_cache_of_another(
    local_runtime: MakeLocalRuntime, identity: Identity
) -> None:
    @tool(cache=True)
    async def flaky() -> str:
        ran.append("flaky")
        if len(ran) == 1:
            raise ValueError("first")
        return f"call {len(ran)}"

    calls = [ToolCall(str(number), "flaky", {}) for number in range(3)]
    first = await results_of(local_runtime, identity, *calls, tools=[flaky])
    assert [result.text for result in first] == ["ValueError: first", "call 2", "call 2"]
    (other,) = await results_of(local_runtime, identity, calls[0], tools=[flaky])
    assert other.text == "call 3"


async def test_what_cannot_be_compared_is_not_cached_and_runs(
    local_runtime: MakeLocalRuntime, identity: Identity
) -> None:
    @tool(cache=True)
    async def ratio(value: float) -> str:
        ran.append(value)
        return "ran"

    ratio.validate = lambda arguments: {"value": float("nan")}  # type: ignore[method-assign]
    calls = [ToolCall(str(number), "ratio", {"value": 1}) for number in range(2)]
    results = await results_of(local_runtime, identity, *calls, tools=[ratio])
    assert [result.text for result in results] == ["ran", "ran"]
    assert len(ran) == 2


# --- repeats ----------------------------------------------------------------------------------------------


async def test_another_call_in_between_is_no_repeat(
    local_runtime: MakeLocalRuntime, identity: Identity
) -> None:
    one, two = tool_calls(("pay", {"amount": 1})), tool_calls(("pay", {"amount": 2}))
    model = ScriptedModel([one, two, one, one, "done"])
    it = Agent(name="a", model=model, tools=[pay], max_repeated_calls=1)
    runtime = local_runtime(driver=agent_driver(it), grants=Grants(tool_ids=["pay"]))
    result = await soon(runtime.run("x", identity=identity, session_id="s"))
    assert (result.status, ran) == ("completed", [1, 2, 1])
    assert "1 times in a row already" in model.requests[-1].messages[-1].text


# --- observers --------------------------------------------------------------------------------------------


async def test_c72_what_an_observer_does_to_what_it_sees_changes_nothing(
    local_runtime: MakeLocalRuntime, identity: Identity
) -> None:
    class Rewrites:
        content = True

        def __init__(self) -> None:
            self.seen: list[str] = []

        def observe(self, event: TelemetryEvent) -> None:
            self.seen.append(event.type)
            content: Any = event.content
            if content is None:
                return
            for message in content.messages:
                for call in message.tool_calls:
                    call.arguments["data"] = "rewritten"
                if message.extras:
                    message.extras.clear()
            if content.answer is not None:
                for call in content.answer.tool_calls:
                    call.arguments["data"] = {"rewritten": True}
                if content.answer.extras:
                    content.answer.extras.clear()
            if content.arguments is not None:
                content.arguments["data"]["rewritten"] = True

    extras = {"fake": {"items": [{"opaque": "kept"}]}}
    asks = ModelResponse(
        tool_calls=(ToolCall("1", "put", {"data": {"what": "original"}}),),
        finish_reason="tool_calls",
        extras=extras,
    )
    model = ScriptedModel([ScriptStep(response=asks), "done"])
    observer = Rewrites()
    runtime = local_runtime(
        driver=agent_driver(Agent(name="a", model=model, tools=[put])),
        grants=Grants(tool_ids=["put"]),
        telemetry=[observer],
    )
    result = await soon(runtime.run("x", identity=identity, session_id="s"))
    assert (result.status, ran) == ("completed", [{"what": "original"}]), result.reason
    assert {"model.start", "model.result", "tool.start", "tool.result"} <= set(observer.seen)
    replayed = model.requests[-1]
    history = (await runtime.sessions.read(identity, "s")).history
    for said in (replayed.messages[1], history[1]):
        assert said.tool_calls[0].arguments == {"data": {"what": "original"}}
        assert said.extras == extras
    assert [message.text for message in history if message.role == "tool"] == ["put"]
