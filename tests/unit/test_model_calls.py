"""Model calls: admitted before, settled after, under every way in which they can go wrong."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest

from retinue import (
    Budgets,
    BudgetSnapshot,
    DriverOutput,
    ExecutionServices,
    FinishPiece,
    Grants,
    Identity,
    ModelBinding,
    ModelRequest,
    ModelResponse,
    RunRequest,
    RunResult,
    TextPiece,
    ToolCall,
    Usage,
)
from retinue.errors import AccessDenied, BudgetExhausted, ModelFailed, RetinueError, Unsupported
from retinue.events import ModelComplete
from retinue.messages import assistant, system, user
from retinue.tools import Tool
from tests.conftest import MakeLocalRuntime
from tests.support import (
    Flag,
    FunctionModel,
    HeldModel,
    all_events,
    answering,
    calls,
    code_of,
    driver,
    estimate,
    nothing_is_left,
    raising,
    soon,
    spent,
    tokens,
    types,
    why,
)
from tests.unit.fake_root import root
from tests.unit.stream_models import read, streaming

QUESTION = [user("x")]


def exactly(used: int) -> Usage:
    return Usage(input_tokens=used)


async def test_c167_a_started_call_without_usage_is_charged_with_its_reservation(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    @driver
    async def asks(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        await services.model(raising(RuntimeError("broke")), QUESTION, max_tokens=500)
        raise AssertionError

    runtime = local_runtime(driver=asks, estimate_input_tokens=estimate(100))
    handle = runtime.start("x", identity=identity, session_id=session_id)
    result = await soon(handle.result())
    assert (result.status, why(result)) == ("failed", "broke")
    assert tokens(result.budget) == (None, 600, 0, None)
    assert spent(result).unknown_usage_calls == 1
    assert spent(result).model_calls.used == 1
    assert result.usage.total_tokens == 0
    assert "model.complete" not in types(await all_events(handle))
    await nothing_is_left(runtime, handle)


async def test_an_answer_without_usage_is_charged_too_and_unknown_is_not_zero(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    @driver
    async def asks(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        await services.model(answering(), QUESTION, max_tokens=7)
        return DriverOutput(text="ok")

    handle = local_runtime(driver=asks, estimate_input_tokens=estimate(3)).start(
        "x", identity=identity, session_id=session_id
    )
    result = await soon(handle.result())
    assert (spent(result).tokens.used, spent(result).unknown_usage_calls) == (10, 1)
    (complete,) = [event.payload for event in await all_events(handle) if event.type == "model.complete"]
    assert complete == ModelComplete("test", "function", None)


async def test_unbounded_output_of_unknown_size_is_charged_with_its_input(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    @driver
    async def asks(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        await services.model(answering(), QUESTION)
        return DriverOutput(text="ok")

    runtime = local_runtime(driver=asks, estimate_input_tokens=estimate(3))
    result = await runtime.run("x", identity=identity, session_id=session_id)
    assert (spent(result).tokens.used, spent(result).unknown_usage_calls) == (3, 1)


@pytest.mark.parametrize(("projected", "granted"), [(0, 10), (4, 6)])
async def test_c168_the_output_cap_is_what_the_budget_leaves(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str, projected: int, granted: int
) -> None:
    model = answering(usage=exactly(1))

    @driver
    async def asks(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        await services.model(model, QUESTION, max_tokens=999)
        await services.model(model, QUESTION)
        return DriverOutput(text="ok")

    runtime = local_runtime(
        driver=asks, budgets=Budgets(max_tokens=10), estimate_input_tokens=estimate(projected)
    )
    result = await runtime.run("x", identity=identity, session_id=session_id)
    assert result.status == "completed"
    assert [request.max_tokens for request in model.requests] == [granted, granted - 1]


async def test_without_a_limit_the_requested_cap_is_passed_unchanged(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    model = answering()

    @driver
    async def asks(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        for cap in (999, None):
            await services.model(model, QUESTION, max_tokens=cap, temperature=0.5)
        return DriverOutput(text="ok")

    await local_runtime(driver=asks).run("x", identity=identity, session_id=session_id)
    assert [(request.max_tokens, request.temperature) for request in model.requests] == [
        (999, 0.5),
        (None, 0.5),
    ]


async def test_c171_two_calls_for_one_slot_give_one_provider_call_and_a_stopped_run(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    model = HeldModel(usage=exactly(1))

    @driver
    async def asks_twice(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        await asyncio.gather(services.model(model, QUESTION), services.model(model, QUESTION))
        raise AssertionError

    runtime = local_runtime(driver=asks_twice, budgets=Budgets(max_model_calls=1))
    handle = runtime.start("x", identity=identity, session_id=session_id)
    result = await soon(handle.result())
    assert (result.status, code_of(result)) == ("stopped", "budget_exhausted")
    assert len(model.requests) <= 1
    assert calls(result.budget) == (1, 1, 0, 0)
    assert (await runtime.sessions.read(identity, session_id)).replayable is False
    await nothing_is_left(runtime, handle)


async def test_c172_a_pending_control_call_holds_its_tokens(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    judge = HeldModel("fine", usage=exactly(4))
    refused: list[BudgetExhausted] = []
    snapshots: list[BudgetSnapshot] = []

    @driver
    async def judges(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        pending = services.run_owned(services.control_model("judge", QUESTION, max_tokens=10))
        await judge.asked.wait()
        try:
            await services.control_model("judge", QUESTION, max_tokens=10)
        except BudgetExhausted as error:
            refused.append(error)
        snapshots.append(services.budget)
        judge.go.set()
        return DriverOutput(text=(await pending).text)

    runtime = local_runtime(
        driver=judges,
        grants=Grants(model_roles=["main", "judge"]),
        models={"judge": judge},
        budgets=Budgets(max_tokens=10),
        estimate_input_tokens=estimate(0),
    )
    result = await soon(runtime.run("x", identity=identity, session_id=session_id))
    assert (result.status, result.text, len(judge.requests)) == ("completed", "fine", 1)
    (error,) = refused
    assert (error.code, error.resource, error.remaining) == ("budget_exhausted", "tokens", 0)
    assert tokens(snapshots[0]) == (10, 0, 10, 0)
    assert tokens(result.budget) == (10, 4, 0, 6)
    assert spent(result).model_calls.used == 1


@pytest.mark.parametrize("max_tokens", [-100, 0, 1.5, math.nan, math.inf, True, "10"])
async def test_c174_impossible_output_caps_are_unsupported_and_ask_nobody(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str, max_tokens: Any
) -> None:
    model = answering()

    @driver
    async def asks(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        if request.input == "control":
            await services.control_model("main", QUESTION, max_tokens=max_tokens)
        await services.model(model, QUESTION, max_tokens=max_tokens)
        raise AssertionError

    runtime = local_runtime(driver=asks, models={"main": model}, budgets=Budgets(max_tokens=100))
    for kind in ("task", "control"):
        result = await runtime.run(kind, identity=identity, session_id=session_id)
        assert (result.status, code_of(result)) == ("failed", "unsupported")
        assert tokens(result.budget) == (100, 0, 0, 100)
        assert spent(result).model_calls.used == 0
    assert model.requests == []


async def test_c177_usage_above_the_limit_is_recorded_whole_and_closes_the_budget(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    model = answering(usage=exactly(30))
    caught: list[BudgetExhausted] = []

    @driver
    async def asks(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        await services.model(model, QUESTION)
        try:
            await services.model(model, QUESTION)
        except BudgetExhausted as error:
            caught.append(error)
        return DriverOutput(text="ok")

    runtime = local_runtime(driver=asks, budgets=Budgets(max_tokens=10), estimate_input_tokens=estimate(0))
    result = await runtime.run("x", identity=identity, session_id=session_id)
    assert tokens(result.budget) == (10, 30, 0, 0)
    assert result.usage.total_tokens == 30
    assert (len(model.requests), len(caught)) == (1, 1)
    assert (caught[0].code, caught[0].resource) == ("budget_exhausted", "tokens")


async def test_c178_without_limits_limit_and_remaining_are_null(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    @driver
    async def asks(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        await services.model(answering(usage=exactly(5)), QUESTION)
        return DriverOutput(text="ok")

    handle = local_runtime(driver=asks).start("x", identity=identity, session_id=session_id)
    result = await handle.result()
    assert calls(result.budget) == (None, 1, 0, None)
    assert tokens(result.budget) == (None, 5, 0, None)
    assert calls(handle.budget) == (None, 1, 0, None)


async def test_c187_a_provider_error_gives_back_what_it_held(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    model = answering(usage=exactly(2))
    after: list[BudgetSnapshot] = []

    @driver
    async def goes_on(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        for error in (RuntimeError("late"), ModelFailed("never connected", started=False)):
            with pytest.raises(type(error)):
                await services.model(raising(error), QUESTION, max_tokens=20)
            after.append(services.budget)
        await services.model(model, QUESTION, max_tokens=999)
        return DriverOutput(text="ok")

    runtime = local_runtime(
        driver=goes_on,
        budgets=Budgets(max_tokens=100, max_model_calls=2),
        estimate_input_tokens=estimate(5),
    )
    result = await soon(runtime.run("x", identity=identity, session_id=session_id))
    assert result.status == "completed", result.reason
    # A started call is charged with what it held; one that never started costs nothing, not even a call.
    assert tokens(after[0]) == (100, 25, 0, 75)
    assert tokens(after[1]) == (100, 25, 0, 75)
    assert (calls(after[0]), calls(after[1])) == ((2, 1, 0, 1), (2, 1, 0, 1))
    assert [request.max_tokens for request in model.requests] == [100 - 25 - 5]
    assert tokens(result.budget) == (100, 27, 0, 73)


async def test_c188_all_views_of_the_budget_agree(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    settled, go = Flag(), Flag()
    held = HeldModel(usage=exactly(7))

    @driver
    async def asks(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        await services.model(held, QUESTION, max_tokens=20)
        settled.set(services.budget)
        await go.wait()
        return DriverOutput(text="ok")

    runtime = local_runtime(driver=asks, budgets=Budgets(max_tokens=100), estimate_input_tokens=estimate(5))
    handle = runtime.start("x", identity=identity, session_id=session_id)
    await held.asked.wait()
    assert tokens(handle.budget) == (100, 0, 25, 75)
    held.go.set()
    inside = await settled.wait()
    assert tokens(inside) == tokens(handle.budget) == (100, 7, 0, 93)
    assert inside == handle.budget
    go.set()
    result = await soon(handle.result())
    assert result.budget == inside == handle.budget


# --- what is charged when a call is cut short -------------------------------------------------------------


async def test_a_call_that_is_cancelled_is_charged_and_its_late_usage_counts(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    asked = Flag()

    async def answers_although_cancelled(request: ModelRequest) -> ModelResponse:
        asked.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return ModelResponse(text="late", usage=exactly(9))
        raise AssertionError

    @driver
    async def asks(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        model = FunctionModel(answers_although_cancelled) if request.input == "late" else held
        await services.model(model, QUESTION, max_tokens=20)
        raise AssertionError

    held = HeldModel()
    runtime = local_runtime(driver=asks, estimate_input_tokens=estimate(5))
    results: list[RunResult] = []
    for kind, flag in (("late", asked), ("held", held.asked)):
        handle = runtime.start(kind, identity=identity, session_id=session_id)
        await flag.wait()
        await handle.cancel()
        results.append(await soon(handle.result()))
        assert "model.complete" not in types(await all_events(handle))
        await nothing_is_left(runtime, handle)
    assert [result.status for result in results] == ["cancelled", "cancelled"]
    assert [spent(result).tokens.used for result in results] == [9, 25]
    assert [spent(result).unknown_usage_calls for result in results] == [0, 1]
    assert [result.usage.total_tokens for result in results] == [9, 0]


async def test_a_caller_that_gives_up_leaves_no_reservation(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    model = HeldModel(usage=exactly(1))

    @driver
    async def gives_up(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        for ticks in range(8):  # at every step between the request, the admission and the call
            asking = asyncio.ensure_future(services.model(model, QUESTION, max_tokens=20))
            for _ in range(ticks):
                await asyncio.sleep(0)
            asking.cancel()
            await asyncio.wait([asking])
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await services.model(model, QUESTION, max_tokens=20)
        model.go.set()
        await services.model(model, QUESTION, max_tokens=20)
        return DriverOutput(text="ok", structured=services.budget.tokens.reserved)

    runtime = local_runtime(driver=gives_up, estimate_input_tokens=estimate(5))
    handle = runtime.start("x", identity=identity, session_id=session_id)
    result = await soon(handle.result())
    assert (result.status, result.structured) == ("completed", 0)
    assert spent(result).tokens.used == 1 + 25 * spent(result).unknown_usage_calls
    # Only calls that a provider was asked for are counted.
    assert spent(result).model_calls.used == len(model.requests)
    await nothing_is_left(runtime, handle)


@pytest.mark.parametrize(
    "usage",
    [Usage(input_tokens=-1), Usage(output_tokens=1.5), Usage(input_tokens=True), {"input_tokens": 1}],  # type: ignore[arg-type]
)
async def test_impossible_usage_fails_the_run_and_is_charged_as_unknown(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str, usage: Any
) -> None:
    @driver
    async def asks(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        await services.model(answering(usage=usage), QUESTION, max_tokens=20)
        raise AssertionError

    runtime = local_runtime(driver=asks, estimate_input_tokens=estimate(5))
    result = await runtime.run("x", identity=identity, session_id=session_id)
    assert (result.status, code_of(result)) == ("failed", "model_failed")
    assert "impossible usage" in why(result)
    assert (spent(result).tokens.used, spent(result).unknown_usage_calls) == (25, 1)
    assert result.usage == Usage()


async def test_a_provider_that_answers_nonsense_is_named(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    async def nonsense(request: ModelRequest) -> ModelResponse:
        return "text"  # type: ignore[return-value]

    @driver
    async def asks(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        await services.model(FunctionModel(nonsense), QUESTION)
        raise AssertionError

    result = await local_runtime(driver=asks).run("x", identity=identity, session_id=session_id)
    assert code_of(result) == "model_failed"
    assert why(result) == "test function returned str, not a ModelResponse"


# --- estimates --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("answer", [-1, 1.5, None, True, "7"])
async def test_an_estimate_that_is_no_count_is_unsupported(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str, answer: Any
) -> None:
    model = answering()

    @driver
    async def asks(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        await services.model(model, QUESTION)
        raise AssertionError

    runtime = local_runtime(driver=asks, estimate_input_tokens=lambda request, client: answer)
    result = await runtime.run("x", identity=identity, session_id=session_id)
    assert (result.status, code_of(result)) == ("failed", "unsupported")
    assert repr(answer) in why(result)
    assert (model.requests, spent(result).model_calls.used) == ([], 0)


async def test_an_estimate_that_raises_ends_the_call_before_it_is_admitted(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    seen: list[tuple[int, str]] = []

    def broken(request: ModelRequest, client: Any) -> int:
        seen.append((len(request.tools), client.model_id))
        raise ZeroDivisionError("no tokenizer")

    @driver
    async def asks(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        def look(where: str) -> str:
            return where

        await services.model(answering(), QUESTION, tools=[Tool(look).schema])
        raise AssertionError

    runtime = local_runtime(driver=asks, estimate_input_tokens=broken)
    result = await runtime.run("x", identity=identity, session_id=session_id)
    assert (result.status, why(result)) == ("failed", "no tokenizer")
    assert (seen, spent(result).model_calls.used) == ([(1, "function")], 0)


async def test_the_estimate_by_default_counts_messages_and_tools(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    @driver
    async def asks(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        with pytest.raises(BudgetExhausted) as refused:
            await services.model(answering(), [user("x" * 30)])
        return DriverOutput(text=str(refused.value))

    # 30 characters are 10 tokens, 4 for the message, 1 each for "[]" and "{}".
    runtime = local_runtime(driver=asks, budgets=Budgets(max_tokens=16))
    result = await runtime.run("x", identity=identity, session_id=session_id)
    assert "16 tokens are left and the input alone needs 16" in result.text


# --- roles ------------------------------------------------------------------------------------------------


async def test_a_role_must_be_granted_and_its_binding_replaces_the_callers_model(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    own, bound = answering("own"), answering("bound")

    @driver
    async def asks(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        with pytest.raises(AccessDenied) as denied:
            await services.model(own, QUESTION, role="writer")
        assert denied.value.role == "writer"
        assert services.budget.model_calls.used == 0
        return DriverOutput(text=(await services.model(own, QUESTION)).text)

    runtime = local_runtime(driver=asks, models={"main": bound})
    result = await runtime.run("x", identity=identity, session_id=session_id)
    assert (result.status, result.text, own.requests) == ("completed", "bound", [])


async def test_control_calls_need_a_binding_allowed_options_and_plain_messages(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    judge = answering("verdict")
    called = [assistant("", [ToolCall("1", "a")])]
    operations: list[str] = []

    @driver
    async def judges(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        attempts: list[dict[str, Any]] = [
            {"role": "main", "messages": QUESTION},
            {"role": "judge", "messages": QUESTION, "temperature": 0.1},
            {"role": "judge", "messages": QUESTION, "temperature": math.nan},
            {"role": "judge", "messages": QUESTION, "temperature": -1.0},
            {"role": "judge", "messages": called},
        ]
        for attempt in attempts:
            with pytest.raises(Unsupported) as refused:
                await services.control_model(**attempt)
            operations.append(refused.value.operation)
        assert services.budget.model_calls.used == 0
        answer = await services.control_model("judge", QUESTION, max_tokens=5)
        return DriverOutput(text=answer.text)

    runtime = local_runtime(
        driver=judges,
        grants=Grants(model_roles=["main", "judge"]),
        models={"judge": ModelBinding(client=judge, options=["max_tokens"])},
    )
    result = await runtime.run("x", identity=identity, session_id=session_id)
    assert (result.status, result.text) == ("completed", "verdict")
    assert operations == [
        "control_model:main",
        "temperature",
        "temperature",
        "temperature",
        "control_model.messages",
    ]
    (request,) = judge.requests
    assert (request.role, request.tools, request.max_tokens) == ("judge", (), 5)


@pytest.mark.parametrize(
    "answer",
    [
        ModelResponse(text="cut", finish_reason="length", usage=Usage(input_tokens=3)),
        ModelResponse(tool_calls=(ToolCall("1", "a"),), usage=Usage(input_tokens=3)),
    ],
)
async def test_a_control_answer_that_is_not_whole_fails_after_it_was_counted(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str, answer: ModelResponse
) -> None:
    async def give(request: ModelRequest) -> ModelResponse:
        return answer

    @driver
    async def judges(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        await services.control_model("judge", QUESTION)
        raise AssertionError

    runtime = local_runtime(
        driver=judges,
        grants=Grants(model_roles=["judge"]),
        models={"judge": FunctionModel(give)},
    )
    result = await runtime.run("x", identity=identity, session_id=session_id)
    assert (result.status, code_of(result)) == ("failed", "model_failed")
    assert (result.usage.total_tokens, spent(result).tokens.used) == (3, 3)


async def test_the_drivers_own_usage_stands_only_when_no_model_was_called(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    @driver
    async def reports(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        if request.input == "call":
            await services.model(answering(usage=exactly(2)), QUESTION)
        if request.input == "never":
            with pytest.raises(RetinueError):
                await services.model(raising(ModelFailed("no", started=False)), QUESTION)
        return DriverOutput(text="ok", usage=exactly(99))

    runtime = local_runtime(driver=reports)
    used = {}
    for kind in ("none", "never", "call"):
        result = await runtime.run(kind, identity=identity, session_id=session_id)
        used[kind] = result.usage.total_tokens
    assert used == {"none": 99, "never": 99, "call": 2}


async def test_prompts_of_abilities_come_first_in_task_calls_and_not_in_control_calls() -> None:
    model, judge = streaming(TextPiece("a"), FinishPiece()), answering("fine")
    world = root(models={"judge": judge})
    world.services.prompts = (system("of the ability"),)
    await world.services.model(model, QUESTION)
    await read(world, model)
    await world.services.control_model("judge", QUESTION)
    assert [request.messages for request in model.requests] == [(system("of the ability"), *QUESTION)] * 2
    assert judge.requests[0].messages == tuple(QUESTION)


async def test_a_call_takes_no_more_turns_of_the_loop_for_what_it_does_not_use() -> None:
    """Streams and publishing are beside the path of a plain call."""
    world = root()
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    counting = asyncio.ensure_future(count())
    await world.services.model(answering(), QUESTION)
    counting.cancel()
    # One for the task that the run owns, one for the admission (here a sleep), one to come back.
    assert turns <= 3
