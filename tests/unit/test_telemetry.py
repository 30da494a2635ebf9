"""What observers are told: every start with its end, in order, and nothing of what was said."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from retinue import (
    AgentDefaults,
    CompletionCandidate,
    CompletionDecision,
    DriverOutput,
    ExecutionServices,
    Grants,
    Identity,
    ModelRequest,
    ModelResponse,
    RunRequest,
    RunResult,
    TelemetryEvent,
    ToolCall,
    Usage,
    tool,
)
from retinue.controllers import Step, StepOverrides
from retinue.errors import ModelFailed, ToolFailed, ValidationFailed
from retinue.messages import user
from retinue.models import FinishPiece, TextPiece, UsagePiece
from retinue.policy_context import PolicyContext
from retinue.telemetry import TelemetryBus
from tests.conftest import MakeLocalRuntime
from tests.support import (
    Flag,
    FunctionDriver,
    FunctionModel,
    HeldModel,
    driver,
    nothing_is_left,
    raising,
    soon,
)

PRIVATE = "the private word"
"""In everything that is said and done in these tests."""


class Watcher:
    """Keeps what it is told."""

    def __init__(self, *, fails: BaseException | None = None, content: bool = False) -> None:
        self.events: list[TelemetryEvent] = []
        self.complete = Flag()
        self.content = content
        self._fails = fails

    def observe(self, event: TelemetryEvent) -> None:
        self.events.append(event)
        if event.type == "run.complete" and event.parent_run_id is None:
            self.complete.set()
        if self._fails is not None:
            raise self._fails

    def of(self, *types: str) -> list[TelemetryEvent]:
        return [event for event in self.events if event.type in types]


class Meter(FunctionModel):
    """Answers with 3 tokens."""

    def __init__(self) -> None:
        super().__init__(self._answer)

    async def _answer(self, request: ModelRequest) -> ModelResponse:
        return ModelResponse(text=PRIVATE, usage=Usage(input_tokens=2, output_tokens=1))


class StreamingMeter(Meter):
    """The same, in pieces."""

    async def stream(self, request: ModelRequest) -> Any:
        yield TextPiece(PRIVATE)
        yield UsagePiece(Usage(input_tokens=2, output_tokens=1))
        yield FinishPiece()


class Controller:
    """Lets everything be."""

    async def prepare_run(self, ctx: PolicyContext) -> StepOverrides | None:
        return None

    async def prepare_step(self, step: Step, ctx: PolicyContext) -> StepOverrides | None:
        return StepOverrides(active_tool_ids=["look"] if "look" in step.tools else None)


class Accepts:
    """Accepts, and says why."""

    async def evaluate(
        self, candidate: CompletionCandidate, services: ExecutionServices
    ) -> CompletionDecision:
        return CompletionDecision(action="accept", reason=PRIVATE)


@tool
async def look(where: str) -> str:
    """Looks somewhere."""
    return f"{PRIVATE} in {where}"


async def run(
    make: MakeLocalRuntime,
    do: Any,
    *watchers: Watcher,
    **options: Any,
) -> RunResult:
    """A run of a driver with these observers, and what they were told to its end."""
    runtime = make(driver=do if isinstance(do, FunctionDriver) else driver(do), telemetry=watchers, **options)
    handle = runtime.start(PRIVATE, identity=Identity(tenant_id="acme", user_id="u1"), session_id="s1")
    result: RunResult = await soon(handle.result())
    for watcher in watchers:
        await watcher.complete.wait()
    await nothing_is_left(runtime, handle)
    return result


def pairs_of(events: Sequence[TelemetryEvent]) -> dict[tuple[str, str | None], list[str]]:
    """The types by kind and call id."""
    found: dict[tuple[str, str | None], list[str]] = {}
    for event in events:
        kind = event.type.partition(".")[0]
        found.setdefault((kind, event.call_id or event.run_id), []).append(event.type)
    return found


def assert_whole(events: Sequence[TelemetryEvent]) -> None:
    """Every start has exactly one end, after it."""
    for (kind, _), types in pairs_of(events).items():
        ends = ("complete",) if kind == "run" else ("result", "error")
        assert len(types) == 2, types
        assert types[0] == f"{kind}.start"
        assert types[1] in [f"{kind}.{end}" for end in ends]


async def test_c288_every_call_of_a_run_is_told_once_with_its_end(local_runtime: MakeLocalRuntime) -> None:
    model, streaming = Meter(), StreamingMeter()

    async def works(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        await services.model(model, [user(PRIVATE)])
        await services.control_model("judge", [user(PRIVATE)])
        async with services.stream_model(streaming, [user(PRIVATE)]) as stream:
            async for _ in stream:
                pass
        return DriverOutput(text=PRIVATE)

    watcher, thrower = Watcher(), Watcher(fails=SystemExit(PRIVATE))
    result = await run(
        local_runtime,
        works,
        thrower,
        watcher,
        models={"judge": model},
        grants=Grants(model_roles=["main", "judge"]),
        controller=Controller(),
        completion_policy=Accepts(),
    )

    assert result.status == "completed"
    events = watcher.events
    assert [event.type for event in thrower.events] == [event.type for event in events]
    starts, results = watcher.of("model.start"), watcher.of("model.result")
    assert len(starts) == len(results) == 3
    assert {event.call_id for event in starts} == {event.call_id for event in results}
    assert len({event.call_id for event in starts}) == 3
    assert [event.operation for event in starts] == ["task", "control", "task"]
    assert {event.status for event in results} == {"success"}
    assert {(event.provider_id, event.model_id) for event in results} == {("test", "function")}
    decided = watcher.of("controller.result")
    assert [event.operation for event in decided] == [
        "prepare_run",
        "prepare_step",
        "prepare_step",
        "completion",
    ]
    assert [event.decision for event in decided] == ["continue", "continue", "continue", "accept"]
    assert (events[0].type, events[-1].type) == ("run.start", "run.complete")
    assert events[-1].status == "completed"
    assert events[-1].usage is not None
    assert events[-1].usage.total_tokens == 9
    assert events[-1].duration is not None
    assert events[-1].duration > 0
    assert_whole(events)
    assert PRIVATE not in msgspec.json.encode(events).decode()
    assert {(e.tenant_id, e.user_id, e.session_id, e.run_id, e.agent_name) for e in events} == {
        ("acme", "u1", "s1", result.run_id, "test")
    }


async def test_a_model_that_fails_is_an_error_with_its_code(local_runtime: MakeLocalRuntime) -> None:
    failing = raising(ModelFailed(PRIVATE, usage={"input_tokens": 4}))
    odd = raising(ZeroDivisionError(PRIVATE))

    async def works(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        for model in (failing, odd):
            with pytest.raises(Exception):  # noqa: B017 - whichever
                await services.model(model, [user("hi")])
        raise ModelFailed(PRIVATE)

    watcher = Watcher()
    result = await run(local_runtime, works, watcher)

    assert result.status == "failed"
    told = watcher.of("model.error")
    assert [(event.status, event.error_code) for event in told] == [
        ("error", "model_failed"),
        ("error", "ZeroDivisionError"),
    ]
    assert told[0].usage == Usage(input_tokens=4)
    assert (watcher.events[-1].status, watcher.events[-1].error_code) == ("error", "model_failed")
    assert_whole(watcher.events)
    assert PRIVATE not in msgspec.json.encode(watcher.events).decode()


async def test_an_answer_that_comes_after_the_cancellation_is_a_cancelled_error(
    local_runtime: MakeLocalRuntime, identity: Identity
) -> None:
    asked, cancelling = Flag(), Flag()

    async def answers_anyway(request: ModelRequest) -> ModelResponse:
        asked.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelling.set()
        return ModelResponse(text="late", usage=Usage(input_tokens=1, output_tokens=1))

    model = FunctionModel(answers_anyway)

    async def works(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        await services.model(model, [user("hi")])
        return DriverOutput(text="never")

    watcher = Watcher()
    runtime = local_runtime(driver=driver(works), telemetry=[watcher])
    handle = runtime.start("go", identity=identity, session_id="s")
    await asked.wait()
    await handle.cancel("enough")
    result = await soon(handle.result())
    await watcher.complete.wait()

    assert cancelling.is_set
    assert result.status == "cancelled"
    assert watcher.of("model.result") == []
    (told,) = watcher.of("model.error")
    assert told.status == "cancelled"
    assert told.usage == Usage(input_tokens=1, output_tokens=1)
    assert watcher.events[-1].status == "cancelled"
    assert_whole(watcher.events)


async def test_a_controller_that_answers_after_the_cancellation_counts_as_cancelled(
    local_runtime: MakeLocalRuntime, identity: Identity
) -> None:
    asked = Flag()

    class Slow(Controller):
        async def prepare_step(self, step: Step, ctx: PolicyContext) -> StepOverrides | None:
            asked.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                return StepOverrides()
            return None

    async def works(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        await services.model(Meter(), [user("hi")])
        return DriverOutput(text="never")

    watcher = Watcher()
    runtime = local_runtime(driver=driver(works), telemetry=[watcher], controller=Slow())
    handle = runtime.start("go", identity=identity, session_id="s")
    await asked.wait()
    await handle.cancel("enough")
    await soon(handle.result())
    await watcher.complete.wait()

    (told,) = [event for event in watcher.of("controller.error", "controller.result") if event.call_id][1:]
    assert (told.type, told.status, told.operation) == ("controller.error", "cancelled", "prepare_step")
    assert_whole(watcher.events)


@pytest.mark.parametrize("stops_at", ["prepare_run", "prepare_step"])
async def test_a_controller_that_says_stop_is_told_so(local_runtime: MakeLocalRuntime, stops_at: str) -> None:
    class Stops(Controller):
        async def prepare_run(self, ctx: PolicyContext) -> StepOverrides | None:
            return StepOverrides(stop=PRIVATE) if stops_at == "prepare_run" else None

        async def prepare_step(self, step: Step, ctx: PolicyContext) -> StepOverrides | None:
            return StepOverrides(stop=PRIVATE)

    async def works(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        await services.model(Meter(), [user("hi")])
        return DriverOutput(text="never")

    watcher = Watcher()
    result = await run(local_runtime, works, watcher, controller=Stops())

    assert result.status == "stopped"
    told = watcher.of("controller.result")
    assert [(event.operation, event.decision) for event in told][-1] == (stops_at, "stop")
    assert (watcher.events[-1].status, watcher.events[-1].error_code) == ("stopped", "budget_exhausted")
    assert PRIVATE not in msgspec.json.encode(watcher.events).decode()
    assert_whole(watcher.events)


async def test_a_controller_that_gives_nonsense_is_an_error(local_runtime: MakeLocalRuntime) -> None:
    class Nonsense(Controller):
        async def prepare_run(self, ctx: PolicyContext) -> Any:
            return PRIVATE

    watcher = Watcher()
    result = await run(local_runtime, _echoes, watcher, controller=Nonsense())

    assert result.status == "failed"
    (told,) = watcher.of("controller.error")
    assert (told.status, told.error_code) == ("error", "execution_failed")
    assert_whole(watcher.events)


async def test_tools_and_effects_are_told_when_they_run(local_runtime: MakeLocalRuntime) -> None:
    @tool
    async def breaks() -> str:
        """Breaks."""
        raise ValueError(PRIVATE)

    async def works(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        calls = [
            ToolCall(id="same", name="look", arguments={"where": PRIVATE}),
            ToolCall(id="other", name="breaks"),
            ToolCall(id="third", name="hidden"),
        ]
        await services.dispatch_batch(calls)
        await services.dispatch(calls[0])

        async def effect(arguments: dict[str, Any]) -> str:
            return PRIVATE

        await services.dispatch_effect("post", {"what": PRIVATE}, effect)
        with pytest.raises(ToolFailed):
            await services.dispatch_effect("refused", {}, effect)
        return DriverOutput(text="done")

    watcher = Watcher()
    await run(
        local_runtime,
        works,
        watcher,
        tools=[look, breaks],
        grants=Grants(tool_ids=["look", "breaks", "post"]),
    )

    told = watcher.of("tool.result")
    assert [(event.tool_name, event.status) for event in told] == [
        ("look", "success"),
        ("breaks", "error"),
        ("look", "success"),
        ("post", "success"),
    ]
    assert [event.error_code for event in told] == [None, "tool_failed", None, None]
    assert [event.tool_call_id for event in told[:3]] == ["same", "other", "same"]
    assert len({event.call_id for event in told}) == 4, "the model's own ids may repeat"
    assert PRIVATE not in msgspec.json.encode(watcher.events).decode()
    assert_whole(watcher.events)


@pytest.mark.parametrize(
    ("status", "told"),
    [("completed", "completed"), ("stopped", "stopped"), ("awaiting_input", "stopped")],
)
async def test_a_run_is_told_as_it_ended(local_runtime: MakeLocalRuntime, status: Any, told: str) -> None:
    async def works(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        return DriverOutput(text="x", status=status)

    watcher = Watcher()
    await run(local_runtime, works, watcher)

    assert [event.type for event in watcher.events] == ["run.start", "run.complete"]
    assert watcher.events[-1].status == told


async def test_a_late_cancel_is_what_is_told(local_runtime: MakeLocalRuntime, identity: Identity) -> None:
    """What counts is the result, not what the driver gave."""
    model = HeldModel(usage=Usage(input_tokens=1, output_tokens=1))

    async def works(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        await services.model(model, [user("hi")])
        return DriverOutput(text="done")

    watcher = Watcher()
    runtime = local_runtime(driver=driver(works), telemetry=[watcher])
    handle = runtime.start("go", identity=identity, session_id="s", deadline=None)
    await model.asked.wait()
    model.go.set()
    result = await soon(handle.result())
    await watcher.complete.wait()
    assert watcher.events[-1].status == result.status == "completed"


async def test_a_delegate_is_told_with_its_own_usage(local_runtime: MakeLocalRuntime) -> None:
    async def works(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        await services.model(Meter(), [user("hi")])
        await (await services.delegate(FunctionDriver(_asks_a_meter), "x", name="helper")).result()
        return DriverOutput(text="done")

    watcher = Watcher()
    result = await run(local_runtime, works, watcher, controller=Controller())

    mine = [event for event in watcher.events if event.run_id != result.run_id]
    assert {event.agent_name for event in mine} == {"helper"}
    assert {(event.parent_run_id, event.root_run_id) for event in mine} == {(result.run_id, result.run_id)}
    assert [event.type for event in mine] == [
        "run.start",
        "controller.start",
        "controller.result",
        "model.start",
        "model.result",
        "run.complete",
    ]
    assert mine[-1].usage == Usage(input_tokens=2, output_tokens=1)
    assert watcher.events[-1].usage == Usage(input_tokens=4, output_tokens=2)
    assert_whole(watcher.events)


async def _asks_a_meter(request: RunRequest, services: ExecutionServices) -> DriverOutput:
    await services.model(Meter(), [user("hi")])
    return DriverOutput(text="asked")


async def _echoes(request: RunRequest, services: ExecutionServices) -> DriverOutput:
    return DriverOutput(text="x")


async def test_content_goes_to_those_who_ask_for_it_only(local_runtime: MakeLocalRuntime) -> None:
    async def works(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        await services.dispatch(ToolCall(id="c", name="look", arguments={"where": "here"}))
        await services.model(Meter(), [user(PRIVATE)])
        return DriverOutput(text="done")

    curious, discreet = Watcher(content=True), Watcher()
    await run(local_runtime, works, curious, discreet, tools=[look], grants=Grants(tool_ids=["look"]))

    contents = {event.type: event.content for event in curious.events if event.content is not None}
    assert contents["model.start"].messages[-1] == user(PRIVATE)
    assert contents["model.result"].answer is not None
    assert contents["model.result"].answer.text == PRIVATE
    assert contents["tool.start"].arguments == {"where": "here"}
    assert contents["tool.result"].output == f"{PRIVATE} in here"
    assert all(event.content is None for event in discreet.events)
    assert PRIVATE not in msgspec.json.encode(discreet.events).decode()


def test_an_observer_that_fails_is_logged_once_without_what_it_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Fails(Watcher):
        def observe(self, event: TelemetryEvent) -> None:
            raise KeyboardInterrupt(PRIVATE)

    told = Watcher()
    request = RunRequest(
        input="x",
        identity=Identity(tenant_id="t", user_id="u"),
        session_id="s",
        run_id="r",
        attempt_id="a",
        root_run_id="r",
        grants=Grants(),
    )
    bus = TelemetryBus([Fails(), told], request, agent_name="a")
    with caplog.at_level(logging.WARNING):
        bus.run_started()
        bus.run_completed("completed", None)
        bus.run_completed("failed", None)

    assert [event.type for event in told.events] == ["run.start", "run.complete"], "one end, the first"
    (record,) = caplog.records
    assert "Fails raised KeyboardInterrupt at run.start" in record.getMessage()
    assert PRIVATE not in record.getMessage()


@pytest.mark.parametrize("wrong", ["watcher", [object()], AgentDefaults()])
def test_what_is_no_observer_is_refused(local_runtime: MakeLocalRuntime, wrong: Any) -> None:
    with pytest.raises(ValidationFailed) as caught:
        local_runtime(driver=driver(_echoes), telemetry=wrong)
    assert str(caught.value.data["path"]).startswith("config.telemetry")


def test_an_observer_whose_method_is_a_coroutine_is_refused(local_runtime: MakeLocalRuntime) -> None:
    class Wrong:
        async def observe(self, event: TelemetryEvent) -> None: ...

    with pytest.raises(ValidationFailed, match="plain function"):
        local_runtime(driver=driver(_echoes), telemetry=[Wrong()])
