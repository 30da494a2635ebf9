"""Streamed model calls: admitted, read, settled and ended, under every way in which they can go wrong."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from retinue import (
    Budgets,
    DriverOutput,
    ExecutionServices,
    FinishPiece,
    Grants,
    ModelChunk,
    ModelRequest,
    ModelResponse,
    ModelStream,
    RunRequest,
    StreamingModelClient,
    TextPiece,
    ToolCall,
    ToolCallPiece,
    Usage,
    UsagePiece,
)
from retinue.errors import BudgetExhausted, ModelFailed, RetinueError, Unsupported
from retinue.events import ModelComplete
from retinue.testing import ScriptedModel, call_pieces, stream, tool_calls
from tests.conftest import MakeLocalRuntime
from tests.support import (
    Flag,
    FunctionModel,
    all_events,
    answering,
    code_of,
    estimate,
    nothing_is_left,
    soon,
    spent,
    tokens,
    types,
    why,
)
from tests.support import driver as as_driver
from tests.unit.fake_root import FakeRoot, root
from tests.unit.stream_models import HELLO, QUESTION, USAGE, HeldStream, StreamModel, read, streaming


async def failed(world: FakeRoot, model: Any, **options: Any) -> Exception:
    """How one stream fails; nothing of it is left."""
    with pytest.raises(Exception) as error:
        await soon(read(world, model, **options))
    assert world.ledger.open_reservations == 0
    return error.value


# --- going well -------------------------------------------------------------------------------------------


async def test_a_stream_gives_its_pieces_then_the_whole_answer() -> None:
    world = root(budgets=Budgets(max_tokens=100))
    model = streaming(*HELLO)
    chunks, response = await read(world, model, max_tokens=20, temperature=0.5, role="main")
    assert chunks == list(HELLO)
    assert response == ModelResponse(text="Hello", usage=USAGE)
    assert world.events == [ModelComplete("test", "function", USAGE)]
    assert tokens(world.budget) == (100, 7, 0, 93)
    (request,) = model.requests
    assert (request.max_tokens, request.temperature, request.messages) == (20, 0.5, (QUESTION[0],))


async def test_tool_calls_come_in_pieces() -> None:
    model = ScriptedModel(
        [stream("Look: ", *call_pieces("f", '{"a"', ": 1}", id="c1"), *call_pieces("g", index=1, id="c2"))]
    )
    _, response = await read(root(), model)
    assert response.tool_calls == (ToolCall("c1", "f", {"a": 1}), ToolCall("c2", "g", {}))
    assert (response.text, response.finish_reason) == ("Look: ", "tool_calls")


async def test_a_client_that_cannot_stream_is_asked_for_the_whole() -> None:
    world = root()
    call = ToolCall("c", "f", {"a": [1]})
    whole = ModelResponse(
        text="hi", tool_calls=(call,), usage=USAGE, finish_reason="tool_calls", extras={"s": 1}
    )

    async def give(request: ModelRequest) -> ModelResponse:
        return whole

    assert not isinstance(FunctionModel(give), StreamingModelClient)
    chunks, response = await read(world, FunctionModel(give), max_tokens=9)
    assert response is whole
    assert chunks == [
        TextPiece("hi"),
        ToolCallPiece(index=0, id="c", name="f", arguments='{"a":[1]}'),
        UsagePiece(USAGE),
        FinishPiece("tool_calls", {"s": 1}),
    ]
    assert world.types == ["model.complete"]


async def test_pieces_are_given_as_they_come_and_giving_up_on_one_ends_nothing() -> None:
    model = HeldStream()
    given = root().services.stream_model(model, QUESTION)
    assert await soon(anext(given)) == TextPiece("Hel")
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(anext(given), 0.01)
    with pytest.raises(RetinueError, match="has not ended"):
        _ = given.response
    model.go.set()
    assert [chunk async for chunk in given] == list(HELLO[1:])
    assert given.response.text == "Hello"
    with pytest.raises(StopAsyncIteration):
        await anext(given)


async def test_two_may_read_one_stream_and_share_its_pieces() -> None:
    given = root().services.stream_model(
        streaming(*[TextPiece(str(n)) for n in range(50)], FinishPiece()), QUESTION
    )

    async def take() -> list[ModelChunk]:
        return [chunk async for chunk in given]

    first, second = await soon(asyncio.gather(take(), take()))
    assert len(first) + len(second) == 51
    assert given.response.text == "".join(str(n) for n in range(50))


async def test_a_stream_is_read_and_closed_in_one_task() -> None:
    model = HeldStream()
    async with root().services.stream_model(model, QUESTION) as given:
        await anext(given)
    assert len(model.tasks) == 1
    assert asyncio.current_task() not in model.tasks


async def test_what_is_never_read_asks_nobody() -> None:
    world = root(budgets=Budgets(max_model_calls=1))
    model = streaming(*HELLO)
    given = world.services.stream_model(model, QUESTION)
    await given.close()
    with pytest.raises(RetinueError, match="was left before its end"):
        await anext(given)
    with pytest.raises(RetinueError, match="has not ended"):
        _ = given.response
    assert model.requests == []
    assert world.budget.model_calls.used == 0


# --- admission --------------------------------------------------------------------------------------------


async def test_the_budget_refuses_a_stream_as_it_refuses_a_call() -> None:
    world = root(budgets=Budgets(max_model_calls=1, max_tokens=20))
    model = streaming(*HELLO)
    await read(world, model, max_tokens=999)
    assert model.requests[0].max_tokens == 15
    error = await failed(world, model)
    assert isinstance(error, BudgetExhausted)
    assert error.resource == "model_calls"
    assert len(model.requests) == 1


@pytest.mark.parametrize("max_tokens", [0, -1, 1.5, True])
async def test_c174_an_impossible_output_cap_is_refused_before_anything(max_tokens: Any) -> None:
    world = root()
    with pytest.raises(Unsupported):
        world.services.stream_model(streaming(*HELLO), QUESTION, max_tokens=max_tokens)
    assert world.budget.model_calls.used == 0


async def test_a_binding_of_the_role_replaces_the_callers_model() -> None:
    own, bound = streaming(*HELLO), streaming(TextPiece("bound"), FinishPiece())
    _, response = await read(root(models={"main": bound}), own)
    assert (response.text, own.requests) == ("bound", [])


async def test_a_stream_that_the_ending_run_refuses_is_cancelled() -> None:
    world = root()
    world.cancelled = True
    model = streaming(*HELLO)
    with pytest.raises(asyncio.CancelledError):
        await read(world, model)
    assert model.requests == []
    assert world.services.cancelled


# --- going wrong ------------------------------------------------------------------------------------------


async def test_c115_two_terminal_usages_or_no_finish_fail_and_are_charged() -> None:
    world = root()
    error = await failed(world, streaming(UsagePiece(USAGE), UsagePiece(USAGE), FinishPiece()), max_tokens=20)
    assert isinstance(error, ModelFailed)
    assert "twice" in str(error)
    assert (world.budget.tokens.used, world.budget.unknown_usage_calls) == (7, 0)
    error = await failed(world, streaming(TextPiece("Hel")), max_tokens=20)
    assert isinstance(error, ModelFailed)
    assert "without a finish" in str(error)
    assert (world.budget.tokens.used, world.budget.unknown_usage_calls) == (7 + 25, 1)
    error = await failed(world, streaming(TextPiece("Hel"), UsagePiece(USAGE)), max_tokens=20)
    assert isinstance(error, ModelFailed)
    assert (world.budget.tokens.used, world.budget.unknown_usage_calls) == (7 + 25 + 7, 1)
    assert world.events == []


async def test_a_running_total_of_a_broken_stream_is_charged_as_unknown() -> None:
    world = root()
    running = UsagePiece(Usage(input_tokens=3, output_tokens=1), False)
    await failed(world, streaming(running, RuntimeError("broke")), max_tokens=20)
    assert (world.budget.tokens.used, world.budget.unknown_usage_calls) == (25, 1)


async def test_c97_malformed_streamed_arguments_fail_and_their_usage_counts() -> None:
    world = root()
    for pieces in (['{"a": '], ["[]"], ["{}", "{}"]):
        model = ScriptedModel([stream(*call_pieces("f", *pieces), usage=USAGE)])
        error = await failed(world, model)
        assert isinstance(error, ModelFailed)
        assert "no tool was run" in str(error)
    assert (world.budget.tokens.used, world.budget.unknown_usage_calls) == (21, 0)
    assert world.events == []


@pytest.mark.parametrize(
    ("first", "error", "charged"),
    [
        ([], ModelFailed("refused", started=False), 0),
        ([TextPiece("a")], ModelFailed("refused", started=False), 25),  # it did start: something came
        ([], ModelFailed("broke"), 25),
        ([], ModelFailed("broke", usage={"input_tokens": 2}), 2),
        ([UsagePiece(USAGE)], ModelFailed("broke", usage={"input_tokens": 2}), 2),
        ([TextPiece("a"), UsagePiece(USAGE)], RuntimeError("broke"), 7),
        ([TextPiece("a")], RuntimeError("broke"), 25),
    ],
)
async def test_what_a_provider_raises_reaches_the_reader_after_what_came(
    first: list[ModelChunk], error: Exception, charged: int
) -> None:
    world = root()
    given = world.services.stream_model(streaming(*first, error), QUESTION, max_tokens=20)
    seen: list[ModelChunk] = []

    async def reads() -> None:
        async for chunk in given:
            seen.append(chunk)  # noqa: PERF401 - what came before the error is kept

    with pytest.raises(type(error)) as raised:
        await soon(reads())
    assert raised.value is error
    assert seen == first
    with pytest.raises(type(error)):
        _ = given.response
    with pytest.raises(type(error)):
        await anext(given)
    assert world.budget.tokens.used == charged
    assert world.budget.tokens.reserved == 0
    assert world.events == []


async def test_what_is_no_piece_fails_with_the_providers_name() -> None:
    for odd in ("text", None, 5, ModelResponse(text="x"), TextPiece(3)):  # type: ignore[arg-type]
        error = await failed(root(), streaming(odd))
        assert isinstance(error, ModelFailed)
        assert str(error).startswith("test function streamed")


async def test_a_stream_that_is_no_iterator_is_named_and_never_started() -> None:
    async def wrong(request: ModelRequest) -> Any:
        return iter(HELLO)

    for function in (wrong, lambda request: HELLO):
        world = root()
        error = await failed(world, StreamModel(function))  # type: ignore[arg-type]
        assert "write it as an async generator" in str(error)
        assert world.budget.model_calls.used == 0


async def test_an_iterator_without_aclose_will_do() -> None:
    class Bare:
        def __init__(self) -> None:
            self.left: list[ModelChunk] = list(HELLO)

        def __aiter__(self) -> Bare:
            return self

        async def __anext__(self) -> ModelChunk:
            if not self.left:
                raise StopAsyncIteration
            return self.left.pop(0)

    _, response = await read(root(), StreamModel(lambda request: Bare()))
    assert response.text == "Hello"


# --- leaving and returning --------------------------------------------------------------------------------


@pytest.mark.parametrize("left_by", ["break", "error", "close"])
async def test_leaving_early_ends_the_call_and_settles_it(left_by: str) -> None:
    world = root()
    model = HeldStream()
    given = world.services.stream_model(model, QUESTION, max_tokens=20)
    with contextlib.suppress(ZeroDivisionError):
        async with given:
            assert await soon(anext(given)) == TextPiece("Hel")
            await model.asked.wait()
            if left_by == "error":
                raise ZeroDivisionError
            if left_by == "close":
                await given.close()
    assert model.closed.is_set
    assert world.ledger.open_reservations == 0
    assert (world.budget.tokens.used, world.budget.unknown_usage_calls) == (25, 1)
    assert world.events == []
    for look in (lambda: given.response, lambda: asyncio.ensure_future(anext(given))):
        with pytest.raises(RetinueError, match="was left before its end"):
            await look()  # type: ignore[misc]
    await world.services.owned.settle()


@pytest.mark.parametrize("usage_first", [True, False])
async def test_leaving_at_the_finish_keeps_the_answer(usage_first: bool) -> None:
    """Usage that was still to come is unknown then."""
    world = root()
    last = (UsagePiece(USAGE), FinishPiece()) if usage_first else (FinishPiece(), UsagePiece(USAGE))
    model = HeldStream(TextPiece("Hello"), *last, before=3 if usage_first else 2)
    async with world.services.stream_model(model, QUESTION, max_tokens=20) as given:
        async for chunk in given:
            if isinstance(chunk, FinishPiece):
                break
    assert given.response.text == "Hello"
    assert given.response.usage == (USAGE if usage_first else None)
    assert world.budget.tokens.used == (7 if usage_first else 25)
    assert model.closed.is_set
    assert world.types == ["model.complete"]


async def test_usage_that_comes_after_the_stream_was_left_counts() -> None:
    waiting = Flag()

    async def tells_late(request: ModelRequest) -> AsyncIterator[ModelChunk]:
        yield TextPiece("Hel")
        try:
            waiting.set()
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            yield UsagePiece(USAGE)
            yield TextPiece("never read")
            raise AssertionError from None

    world = root()
    async with world.services.stream_model(StreamModel(tells_late), QUESTION, max_tokens=20) as given:
        await anext(given)
        await waiting.wait()
    assert (world.budget.tokens.used, world.budget.unknown_usage_calls) == (7, 0)


@pytest.mark.parametrize("pieces_read", [0, 1])
async def test_returning_while_a_stream_is_unfinished_fails_after_waiting_for_it(pieces_read: int) -> None:
    world = root()
    model = HeldStream()
    streams: list[ModelStream] = []

    async def returns_early(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        given = services.stream_model(model, QUESTION)
        streams.append(given)
        await anext(given)
        if not pieces_read:
            await given.__aenter__()
        return DriverOutput(text="done")

    running = asyncio.ensure_future(world.run(returns_early))
    await model.asked.wait()
    assert not running.done()
    model.go.set()
    finished = await running
    assert finished.error is not None
    assert finished.error["code"] == "execution_failed"
    assert "returned while the stream of test function was unfinished" in finished.error["message"]
    assert streams[0].response.text == "Hello", "it was waited for, not cut"
    assert (world.budget.tokens.used, world.types) == (7, ["model.complete"])


async def test_a_stream_whose_pieces_nobody_took_is_unfinished_however_early_it_ended() -> None:
    world = root()

    async def returns_early(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        given = services.stream_model(streaming(*HELLO), QUESTION)
        await anext(given)
        while world.types != ["model.complete"]:
            await asyncio.sleep(0)
        return DriverOutput(text="done")

    finished = await world.run(returns_early)
    assert finished.error is not None
    assert "was unfinished" in finished.error["message"]


async def test_a_stream_that_breaks_after_the_return_fails_the_run_with_its_error() -> None:
    world = root()
    model = HeldStream(TextPiece("a"), TextPiece("b"))

    async def returns_early(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        await anext(services.stream_model(model, QUESTION))
        model.go.set()
        return DriverOutput(text="done")

    finished = await world.run(returns_early)
    assert finished.error is not None
    assert "ended without a finish" in finished.error["message"]


@pytest.mark.parametrize("way", ["read", "left", "failed"])
async def test_a_stream_that_is_over_one_way_or_another_is_no_failure(way: str) -> None:
    world = root()
    model = {"read": streaming(*HELLO), "left": HeldStream(), "failed": streaming(ValueError("no"))}[way]

    async def uses(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        async with services.stream_model(model, QUESTION) as given:
            if way == "left":
                await anext(given)
            else:
                with contextlib.suppress(ValueError):
                    async for _ in given:
                        pass
        return DriverOutput(text="done")

    finished = await world.run(uses)
    assert finished.error is None
    assert finished.output is not None


# --- cancellation -----------------------------------------------------------------------------------------


async def test_cancelling_the_run_ends_the_stream_and_late_usage_counts() -> None:
    world = root()
    model = HeldStream()

    async def reads(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        async for _ in services.stream_model(model, QUESTION, max_tokens=20):
            pass
        raise AssertionError

    running = asyncio.ensure_future(world.run(reads))
    await model.asked.wait()
    world.execution.cancel()
    finished = await running
    assert finished.cancelled
    assert model.closed.is_set
    assert (world.budget.tokens.used, world.budget.unknown_usage_calls) == (25, 1)
    assert world.events == []


async def test_a_provider_that_finishes_although_cancelled_is_counted_and_not_answered() -> None:
    asked = Flag()

    async def stubborn(request: ModelRequest) -> AsyncIterator[ModelChunk]:
        asked.set()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        for chunk in (UsagePiece(USAGE), TextPiece("late"), FinishPiece()):
            yield chunk

    world = root()

    async def reads(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        await read(world, StreamModel(stubborn), max_tokens=20)
        raise AssertionError

    running = asyncio.ensure_future(world.run(reads))
    await asked.wait()
    world.execution.cancel()
    assert (await running).cancelled
    assert world.budget.tokens.used == 7
    assert world.events == []


async def test_a_reader_that_is_cancelled_at_any_step_leaves_no_reservation() -> None:
    for ticks in range(12):
        world = root()
        model = HeldStream()

        async def reads(world: FakeRoot = world, model: HeldStream = model) -> None:
            async with world.services.stream_model(model, QUESTION) as given:
                async for _ in given:
                    pass

        reading = asyncio.ensure_future(reads())
        for _ in range(ticks):
            await asyncio.sleep(0)
        reading.cancel()
        await asyncio.wait([reading])
        await world.services.owned.cancel()
        assert world.ledger.open_reservations == 0
        assert world.budget.model_calls.used == len(model.requests)
        assert not model.requests or model.closed.is_set or model.tasks == set()


# --- whole runs -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["whole", "streamed"])
async def test_c114_a_cancel_during_the_projection_asks_no_provider(
    local_runtime: MakeLocalRuntime, identity: Any, session_id: str, mode: str
) -> None:
    projecting, go = Flag(), Flag()
    model = streaming(*HELLO)

    def slow_estimate(request: ModelRequest, client: Any) -> int:
        projecting.set()
        go.wait_blocking()
        return 1

    @as_driver
    async def asks(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        if mode == "whole":
            await services.model(model, QUESTION)
        else:
            async for _ in services.stream_model(model, QUESTION):
                pass
        raise AssertionError

    runtime = local_runtime(driver=asks, estimate_input_tokens=slow_estimate)
    handle = runtime.start("x", identity=identity, session_id=session_id)
    await projecting.wait()
    await handle.cancel()
    go.set()
    result = await soon(handle.result())
    assert (result.status, code_of(result)) == ("cancelled", "cancelled")
    assert model.requests == []
    assert spent(result).model_calls.used == 0
    await nothing_is_left(runtime, handle)


async def test_c115_a_run_whose_stream_is_broken_fails(
    local_runtime: MakeLocalRuntime, identity: Any, session_id: str
) -> None:
    script = [
        stream("a", UsagePiece(USAGE), UsagePiece(USAGE), usage=None),
        stream("a", finish=False),
        stream("a"),
    ]
    model = ScriptedModel(script)

    @as_driver
    async def asks(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        async with services.stream_model(model, QUESTION) as given:
            async for _ in given:
                pass
        return DriverOutput(text=given.response.text)

    runtime = local_runtime(driver=asks, estimate_input_tokens=estimate(5))
    results = []
    for _ in script:
        handle = runtime.start("x", identity=identity, session_id=session_id)
        results.append(await soon(handle.result()))
        await nothing_is_left(runtime, handle)
    assert [(result.status, code_of(result)) for result in results] == [
        ("failed", "model_failed"),
        ("failed", "model_failed"),
        ("completed", None),
    ]
    assert "twice" in why(results[0])
    assert "without a finish" in why(results[1])
    assert [request.streamed for request in model.requests] == [True] * 3


async def test_a_stream_and_a_call_draw_on_one_budget(
    local_runtime: MakeLocalRuntime, identity: Any, session_id: str
) -> None:
    model = HeldStream()

    @as_driver
    async def asks(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        async with services.stream_model(model, QUESTION, max_tokens=15) as given:
            await anext(given)
            with pytest.raises(BudgetExhausted):
                await services.model(answering(), QUESTION)
            model.go.set()
            async for _ in given:
                pass
        return DriverOutput(text=(await services.model(answering("after", USAGE), QUESTION)).text)

    runtime = local_runtime(
        driver=asks, budgets=Budgets(max_tokens=20), estimate_input_tokens=estimate(5), grants=Grants()
    )
    handle = runtime.start("x", identity=identity, session_id=session_id)
    result = await soon(handle.result())
    assert (result.status, result.text) == ("completed", "after")
    assert tokens(result.budget) == (20, 14, 0, 6)
    assert types(await all_events(handle)).count("model.complete") == 2


def test_scripts_give_whole_answers_to_streams_and_streams_to_whole_calls() -> None:
    async def both() -> tuple[ModelResponse, ModelResponse]:
        world = root()
        model = ScriptedModel(
            [tool_calls(ToolCall("c", "f", {"a": 1}), text="t"), stream("Hel", "lo", usage=USAGE)]
        )
        _, streamed = await read(world, model)
        return streamed, await world.services.model(model, QUESTION)

    streamed, whole = asyncio.run(both())
    assert (streamed.text, streamed.tool_calls) == ("t", (ToolCall("c", "f", {"a": 1}),))
    assert whole == ModelResponse(text="Hello", usage=USAGE)
