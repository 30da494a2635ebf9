"""Runs as OpenTelemetry sees them: spans with their parents, metrics, nothing private unless asked for."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from retinue import (
    DriverOutput,
    ExecutionServices,
    Grants,
    Identity,
    ModelRequest,
    ModelResponse,
    RunRequest,
    RuntimeConfig,
    TaskContext,
    ToolCall,
    ToolContext,
    Usage,
    tool,
)
from retinue.apps import app_by_value
from retinue.controllers import Step, StepOverrides
from retinue.errors import ModelFailed, ValidationFailed
from retinue.messages import user
from retinue.policy_context import PolicyContext
from retinue.spans import SCHEMA_URL, open_telemetry
from tests.conftest import MakeLocalRuntime
from tests.support import FunctionDriver, FunctionModel, driver, soon, trivial
from tests.unit.test_telemetry import Accepts, Controller, Watcher

otel = pytest.importorskip("opentelemetry.sdk.trace")

from opentelemetry import trace  # noqa: E402
from opentelemetry.sdk.metrics import MeterProvider  # noqa: E402
from opentelemetry.sdk.metrics.export import InMemoryMetricReader  # noqa: E402
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider  # noqa: E402
from opentelemetry.sdk.trace.export import SimpleSpanProcessor  # noqa: E402
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter  # noqa: E402

PRIVATE = "the private word"


class World:
    """Where spans and metrics go in one test."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.reader = InMemoryMetricReader()
        self.meters = MeterProvider(metric_readers=[self.reader])
        self.made = 0

    def make(self) -> TracerProvider:
        self.made += 1
        return self.provider

    def observer(self, **options: Any) -> Any:
        return open_telemetry(provider=self.make, meter_provider=lambda: self.meters, **options)

    @property
    def spans(self) -> dict[str, ReadableSpan]:
        """By name; a name that comes twice fails."""
        finished = self.exporter.get_finished_spans()
        found = {span.name: span for span in finished}
        assert len(found) == len(finished), [span.name for span in finished]
        return found

    def parent_of(self, name: str) -> str | None:
        spans = self.spans
        parent = spans[name].parent
        if parent is None:
            return None
        return next(span.name for span in spans.values() if span.context.span_id == parent.span_id)

    def points(self, metric: str) -> list[Any]:
        data = self.reader.get_metrics_data()
        assert data is not None
        return [
            point
            for resource in data.resource_metrics
            for scope in resource.scope_metrics
            for each in scope.metrics
            if each.name == metric
            for point in each.data.data_points
        ]


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.meters.shutdown()
    made.provider.shutdown()


class Meter(FunctionModel):
    def __init__(self) -> None:
        super().__init__(self._answer)

    async def _answer(self, request: ModelRequest) -> ModelResponse:
        return ModelResponse(text=PRIVATE, usage=Usage(input_tokens=20, output_tokens=3, cached_tokens=4))


async def _delegate(request: RunRequest, services: ExecutionServices) -> DriverOutput:
    return DriverOutput(text=trace.get_current_span().get_span_context().span_id.to_bytes(8).hex())


@tool
async def ask_helper(ctx: ToolContext) -> str:
    """Asks a delegate."""
    output = await (await ctx.delegate(FunctionDriver(_delegate), "x", name="helper")).result()
    return f"{ctx.trace['traceparent']} {output.text}"


@tool(run_in="thread")
def in_a_thread() -> str:
    """Says which span it is in."""
    return trace.get_current_span().get_span_context().span_id.to_bytes(8).hex()


@tool(run_in="task")
def in_a_process(ctx: TaskContext) -> dict[str, str]:
    """Says which span it is in, in three ways."""
    current = trace.get_current_span().get_span_context()
    return {
        "context": ctx.trace["traceparent"],
        "environment": os.environ["TRACEPARENT"],
        "current": current.span_id.to_bytes(8).hex(),
    }


async def _asks(request: RunRequest, services: ExecutionServices) -> DriverOutput:
    await services.model(Meter(), [user("hi")])
    return DriverOutput(text="x")


async def go(make: MakeLocalRuntime, do: Any, *observers: Any, **options: Any) -> Any:
    watcher = Watcher()
    runtime = make(driver=driver(do), telemetry=[*observers, watcher], **options)
    handle = runtime.start(PRIVATE, identity=Identity(tenant_id="acme", user_id="u"), session_id="s")
    result = await soon(handle.result())
    await watcher.complete.wait()
    assert result.reason is None, result.reason
    return result


async def test_a_run_is_one_trace_below_its_caller(world: World, local_runtime: MakeLocalRuntime) -> None:
    said: dict[str, str] = {}

    async def works(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        said["driver"] = trace.get_current_span().get_span_context().span_id.to_bytes(8).hex()
        said["helper"] = (await services.dispatch(ToolCall(id="c1", name="ask_helper"))).text
        said["thread"] = (await services.dispatch(ToolCall(id="c2", name="in_a_thread"))).text
        await services.model(Meter(), [user(PRIVATE)])
        return DriverOutput(text=PRIVATE)

    tracer = world.provider.get_tracer("client")
    with tracer.start_as_current_span("client"):
        result = await go(
            local_runtime,
            works,
            world.observer(),
            tools=[ask_helper, in_a_thread],
            grants=Grants(tool_ids=["ask_helper", "in_a_thread"]),
            controller=Controller(),
            completion_policy=Accepts(),
        )

    spans = world.spans
    assert len({span.context.trace_id for span in spans.values()}) == 1
    assert {name: world.parent_of(name) for name in spans} == {
        "client": None,
        "invoke_agent test": "client",
        "controller prepare_run": "invoke_agent test",
        "controller prepare_step": "invoke_agent test",
        "controller completion": "invoke_agent test",
        "execute_tool ask_helper": "invoke_agent test",
        "invoke_agent helper": "execute_tool ask_helper",
        "execute_tool in_a_thread": "invoke_agent test",
        "chat function": "invoke_agent test",
    }

    def span_id(name: str) -> str:
        return str(spans[name].context.span_id.to_bytes(8).hex())

    assert said["driver"] == span_id("invoke_agent test")
    assert said["thread"] == span_id("execute_tool in_a_thread")
    traceparent, helper = said["helper"].split()
    assert traceparent.split("-")[2] == span_id("execute_tool ask_helper")
    assert helper == span_id("invoke_agent helper")

    agent, chat, tool_span = (
        dict(spans[name].attributes or {})
        for name in ("invoke_agent test", "chat function", "execute_tool ask_helper")
    )
    assert agent["gen_ai.operation.name"] == "invoke_agent"
    assert agent["gen_ai.agent.name"] == "test"
    assert agent["gen_ai.conversation.id"] == "s"
    assert (agent["retinue.tenant_id"], agent["retinue.run_id"]) == ("acme", result.run_id)
    assert agent["gen_ai.usage.input_tokens"] == 20
    assert chat["gen_ai.operation.name"] == "chat"
    assert (chat["gen_ai.provider.name"], chat["gen_ai.request.model"]) == ("test", "function")
    assert (chat["gen_ai.usage.input_tokens"], chat["gen_ai.usage.output_tokens"]) == (20, 3)
    assert chat["gen_ai.usage.cache_read.input_tokens"] == 4
    assert chat["gen_ai.response.finish_reasons"] == ("stop",)
    assert (tool_span["gen_ai.tool.name"], tool_span["gen_ai.tool.call.id"]) == ("ask_helper", "c1")
    assert spans["chat function"].kind is trace.SpanKind.CLIENT
    scopes = [span.instrumentation_scope for name, span in spans.items() if name != "client"]
    assert {scope and scope.schema_url for scope in scopes} == {SCHEMA_URL}
    assert not any(PRIVATE in span.to_json() for span in spans.values())
    assert world.made == 1

    totals = {
        point.attributes["gen_ai.token.type"]: point.sum
        for point in world.points("gen_ai.client.token.usage")
    }
    assert totals == {"input": 20, "output": 3}
    (seconds,) = world.points("gen_ai.client.operation.duration")
    assert seconds.count == 1
    assert seconds.attributes["gen_ai.request.model"] == "function"


async def test_what_fails_has_its_error_type(world: World, local_runtime: MakeLocalRuntime) -> None:
    async def fails(request: ModelRequest) -> ModelResponse:
        raise ModelFailed(PRIVATE)

    async def works(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        with pytest.raises(ModelFailed):
            await services.model(FunctionModel(fails), [user("hi")])
        return DriverOutput(text="x")

    await go(local_runtime, works, world.observer())

    span = world.spans["chat function"]
    assert span.status.status_code is trace.StatusCode.ERROR
    assert (span.attributes or {})["error.type"] == "model_failed"
    assert PRIVATE not in span.to_json()
    (seconds,) = world.points("gen_ai.client.operation.duration")
    assert seconds.attributes["error.type"] == "model_failed"
    assert world.spans["invoke_agent test"].status.status_code is trace.StatusCode.UNSET


async def test_content_is_on_spans_where_it_is_asked_for(
    world: World, local_runtime: MakeLocalRuntime
) -> None:
    @tool
    async def look(where: str) -> str:
        """Looks."""
        return f"seen {where}"

    async def works(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        await services.dispatch(ToolCall(id="c1", name="look", arguments={"where": "here"}))
        await services.model(Meter(), [user("a question")])
        return DriverOutput(text="x")

    await go(
        local_runtime,
        works,
        world.observer(content=True),
        tools=[look],
        grants=Grants(tool_ids=["look"]),
    )

    chat = world.spans["chat function"].attributes or {}
    assert json.loads(str(chat["gen_ai.input.messages"])) == [
        {"role": "user", "parts": [{"type": "text", "content": "a question"}]}
    ]
    assert json.loads(str(chat["gen_ai.output.messages"])) == [
        {"role": "assistant", "parts": [{"type": "text", "content": PRIVATE}], "finish_reason": "stop"}
    ]
    looked = world.spans["execute_tool look"].attributes or {}
    assert json.loads(str(looked["gen_ai.tool.call.arguments"])) == {"where": "here"}
    assert looked["gen_ai.tool.call.result"] == "seen here"


async def test_two_observers_do_not_see_each_others_spans(
    world: World, local_runtime: MakeLocalRuntime
) -> None:
    other = World()
    after: list[str] = []

    async def works(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        before = trace.get_current_span().get_span_context().span_id
        await services.model(Meter(), [user("hi")])
        after.append("same" if trace.get_current_span().get_span_context().span_id == before else "other")
        return DriverOutput(text="x")

    await go(local_runtime, works, world.observer(), other.observer())

    assert world.parent_of("invoke_agent test") is None
    assert {span.name for span in other.spans.values()} == {"invoke_agent test", "chat function"}
    assert after == ["same"], "the context of the work is what it was once the call has ended"


async def test_a_tool_in_a_process_of_its_own_is_in_the_trace(
    world: World, local_runtime: MakeLocalRuntime
) -> None:
    said: dict[str, str] = {}

    async def works(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        said.update(json.loads((await services.dispatch(ToolCall(id="c", name="in_a_process"))).text))
        return DriverOutput(text="x")

    await go(
        local_runtime,
        works,
        world.observer(),
        tools=[in_a_process],
        grants=Grants(tool_ids=["in_a_process"]),
    )

    context = world.spans["execute_tool in_a_process"].context
    trace_id, span_id = context.trace_id.to_bytes(16).hex(), context.span_id.to_bytes(8).hex()
    assert said.pop("current") == span_id
    assert {name: value.rpartition("-")[0] for name, value in said.items()} == {
        "context": f"00-{trace_id}-{span_id}",
        "environment": f"00-{trace_id}-{span_id}",
    }


async def test_a_run_without_a_caller_begins_a_trace_of_its_own(
    world: World, local_runtime: MakeLocalRuntime
) -> None:
    async def works(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        return DriverOutput(text="x")

    observer = world.observer()
    for _ in range(2):
        await go(local_runtime, works, observer)

    finished = world.exporter.get_finished_spans()
    assert len({span.context.trace_id for span in finished}) == len(finished) == 2


def test_an_observer_travels_and_is_the_same_in_every_program() -> None:
    """It is part of the app's digest: a program that is started again finds its hosts by it."""
    observer = open_telemetry(endpoint="http://collector:4318/")
    assert pickle.loads(pickle.dumps(observer)) == observer
    one, other = (
        app_by_value(RuntimeConfig(driver=trivial, telemetry=[open_telemetry()]), "dedicated")
        for _ in range(2)
    )
    assert one.digest == other.digest


async def test_copies_of_an_observer_share_what_they_export_with(
    world: World, local_runtime: MakeLocalRuntime
) -> None:
    async def works(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        await services.model(Meter(), [user("hi")])
        return DriverOutput(text="x")

    observer = world.observer()
    await go(local_runtime, works, observer, replace(observer))

    assert world.made == 1
    assert world.parent_of("chat function") == "invoke_agent test"


async def test_a_provider_that_cannot_be_had_is_tried_once_and_matters_to_nobody(
    local_runtime: MakeLocalRuntime, caplog: pytest.LogCaptureFixture
) -> None:
    tried: list[int] = []

    def fails() -> TracerProvider:
        tried.append(1)
        raise ConnectionError("no collector")

    async def works(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        await services.model(Meter(), [user("hi")])
        return DriverOutput(text="x")

    await go(local_runtime, works, open_telemetry(provider=fails))

    assert tried == [1]
    assert "no collector" in caplog.text


async def test_what_policies_do_for_a_delegate_is_below_its_call(
    world: World, local_runtime: MakeLocalRuntime
) -> None:
    class Asks(Controller):
        async def prepare_step(self, step: Step, ctx: PolicyContext) -> StepOverrides | None:
            await ctx.control_model("judge", [user("may it?")])
            return None

    async def works(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        await (await services.delegate(FunctionDriver(_asks), "x", name="helper")).result()
        return DriverOutput(text="x")

    judge = Meter()
    judge.model_id = "judge"
    await go(
        local_runtime,
        works,
        world.observer(),
        controller=Asks(),
        models={"judge": judge},
        grants=Grants(model_roles=["main", "judge"]),
    )

    assert {name: world.parent_of(name) for name in world.spans} == {
        "invoke_agent test": None,
        "controller prepare_run": "invoke_agent test",
        "invoke_agent helper": "invoke_agent test",
        "controller prepare_step": "invoke_agent helper",
        "chat judge": "controller prepare_step",
        "chat function": "invoke_agent helper",
    }


EXPORTS = """
import sys
from retinue import Identity, Runtime
from retinue.spans import open_telemetry
from tests.support import trivial

observer = open_telemetry(endpoint=sys.argv[1])
with Runtime(driver=trivial, telemetry=[observer], backend="inprocess") as runtime:
    who = Identity(tenant_id="t", user_id="u")
    print(runtime.run_blocking("x", identity=who, session_id="s").status)
"""


def test_with_an_endpoint_spans_go_there() -> None:
    received: list[tuple[str, bytes]] = []

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            received.append((self.path, gzip.decompress(body) if body[:2] == b"\x1f\x8b" else body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *arguments: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Receiver) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        ended = subprocess.run(
            [sys.executable, "-c", EXPORTS, f"http://127.0.0.1:{server.server_port}"],
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
            timeout=60,
        )
        server.shutdown()
        thread.join()

    assert (ended.stdout, ended.stderr) == ("completed\n", "")
    assert any(path == "/v1/traces" and b"invoke_agent test" in body for path, body in received), received


def test_without_opentelemetry_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.trace", None)
    with pytest.raises(ValidationFailed, match=r"retinue\[telemetry\]"):
        open_telemetry()


def test_a_provider_is_a_function() -> None:
    with pytest.raises(ValidationFailed, match="called in each process"):
        open_telemetry(provider=TracerProvider())  # type: ignore[arg-type]
