"""One trace over a client, a session host, a child host and a tool's process; logs and metrics of actors."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import ray

from retinue import (
    DriverOutput,
    ExecutionServices,
    Grants,
    Identity,
    ModelRequest,
    ModelResponse,
    RunRequest,
    TaskContext,
    ToolCall,
    Usage,
    tool,
)
from retinue.actors.metrics import RayInstrument, metrics_are_exported
from retinue.messages import user
from retinue.spans import open_telemetry
from tests.ray.conftest import MakeRuntime
from tests.ray.drivers import Driver
from tests.ray.test_faults import until

pytest.importorskip("opentelemetry.sdk.trace")

from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import (
    SimpleSpanProcessor,
    SpanExporter,
    SpanExportResult,
)

PRIVATE = "the private word"


class FileExporter(SpanExporter):
    """Writes a line for each span into a file of its process."""

    def __init__(self, folder: str) -> None:
        self._path = Path(folder) / f"{os.getpid()}.jsonl"

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        with self._path.open("a") as file:
            for span in spans:
                file.write(json.dumps(_line(span)) + "\n")
        return SpanExportResult.SUCCESS


def _line(span: ReadableSpan) -> dict[str, Any]:
    context = span.get_span_context()
    assert context is not None
    return {
        "name": span.name,
        "pid": os.getpid(),
        "trace": f"{context.trace_id:032x}",
        "span": f"{context.span_id:016x}",
        "parent": None if span.parent is None else f"{span.parent.span_id:016x}",
        "attributes": dict(span.attributes or {}),
    }


@dataclass(frozen=True)
class ToFiles:
    """Makes a provider that exports into files of this folder."""

    folder: str

    def __call__(self) -> TracerProvider:
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(FileExporter(self.folder)))
        return provider


class Meter:
    provider_id = "test"
    model_id = "meter"

    async def generate(self, request: ModelRequest) -> ModelResponse:
        return ModelResponse(text=PRIVATE, usage=Usage(input_tokens=2, output_tokens=1))


@tool(run_in="task", num_cpus=0)
def measures(folder: str, ctx: TaskContext) -> str:
    """Makes a span of its own, in a process that Ray gave it, and logs."""
    tracer = ToFiles(folder)().get_tracer("tool")
    with tracer.start_as_current_span("inside the tool"):
        logging.getLogger("app").warning("from the tool")
    return os.environ["TRACEPARENT"]


@dataclass(frozen=True)
class Helper(Driver):
    """A delegate that asks a model."""

    id: str = "helper"

    async def start(self, request: RunRequest, services: ExecutionServices) -> DriverOutput:
        await services.model(Meter(), [user(PRIVATE)])
        return DriverOutput(text=str(os.getpid()))


@dataclass(frozen=True)
class Boss(Driver):
    """Asks a tool in a task, and a delegate."""

    folder: str = ""
    id: str = "boss"

    async def start(self, request: RunRequest, services: ExecutionServices) -> DriverOutput:
        call = ToolCall(id="c1", name="measures", arguments={"folder": self.folder})
        measured = await services.dispatch(call)
        helper = await (await services.delegate(Helper(), "x")).result()
        return DriverOutput(text=measured.text, structured={"child": int(helper.text), "host": os.getpid()})


def spans_in(folder: Path) -> dict[str, dict[str, Any]]:
    lines = [json.loads(line) for path in folder.glob("*.jsonl") for line in path.read_text().splitlines()]
    return {line["name"]: line for line in lines}


async def test_one_trace_over_client_host_delegate_and_tool(
    make_runtime: MakeRuntime, identity: Identity, tmp_path: Path
) -> None:
    folder = str(tmp_path)
    runtime = make_runtime(
        driver=Boss(folder=folder),
        tools=[measures],
        grants=Grants(tool_ids=["measures"]),
        telemetry=[open_telemetry(provider=ToFiles(folder))],
    )
    tracer = ToFiles(folder)().get_tracer("client")
    with tracer.start_as_current_span("the client"):
        result = await runtime.run(PRIVATE, identity=identity, session_id="traced")

    assert result.status == "completed", result.reason
    await asyncio.to_thread(until, lambda: "invoke_agent boss" in spans_in(tmp_path), "the run's span")
    spans = spans_in(tmp_path)
    assert set(spans) == {
        "the client",
        "invoke_agent boss",
        "execute_tool measures",
        "inside the tool",
        "invoke_agent helper",
        "chat meter",
    }
    assert len({span["trace"] for span in spans.values()}) == 1
    names = {span["span"]: name for name, span in spans.items()}
    assert {name: names.get(span["parent"]) for name, span in spans.items()} == {
        "the client": None,
        "invoke_agent boss": "the client",
        "execute_tool measures": "invoke_agent boss",
        "inside the tool": "execute_tool measures",
        "invoke_agent helper": "invoke_agent boss",
        "chat meter": "invoke_agent helper",
    }
    assert spans["the client"]["pid"] == os.getpid()
    assert spans["invoke_agent boss"]["pid"] == result.structured["host"]
    assert spans["chat meter"]["pid"] == result.structured["child"]
    assert len({span["pid"] for span in spans.values()}) == 4
    assert result.text.split("-")[1:3] == [
        spans["execute_tool measures"]["trace"],
        spans["execute_tool measures"]["span"],
    ]
    assert PRIVATE not in json.dumps(spans)
    assert spans["invoke_agent boss"]["attributes"]["gen_ai.usage.input_tokens"] == 2
    assert trace.get_current_span() is trace.INVALID_SPAN


@ray.remote
class Recorder:
    """An actor that has metrics, whether or not they go anywhere."""

    def record(self) -> bool:
        RayInstrument("retinue_test_sessions", "gauge", "of a test", ("app",)).record(1, {"app": "a"})
        RayInstrument("retinue_test_runs_total", "counter", "of a test", ("app",)).record(1, {"app": "a"})
        return metrics_are_exported()


def test_ray_takes_what_is_recorded(cluster: str) -> None:
    recorder = Recorder.remote()  # type: ignore[attr-defined]
    exported = ray.get(recorder.record.remote())
    (node,) = ray.nodes()  # type: ignore[no-untyped-call]
    assert exported == (node["MetricsExportPort"] > 0)
    ray.kill(recorder)


PROGRAM = """
import json, logging, sys
from pathlib import Path
import ray
from retinue import DriverOutput, Grants, Identity, Runtime, ToolCall, logs, tool
from tests.ray.drivers import Driver

logs.configure(json=True, level="warning")
app = logging.getLogger("app")

@tool(run_in="task", num_cpus=0)
def says() -> str:
    app.warning("from the tool")
    return "said"

class Says(Driver):
    async def start(self, request, services):
        app.warning("from the driver")
        await services.dispatch(ToolCall(id="c", name="says"))
        return DriverOutput(text="done")

runtime = Runtime(driver=Says(), tools=[says], grants=Grants(tool_ids=["says"]),
                  store=f"sqlite:///{sys.argv[1]}/s.db", address="local")
result = runtime.run_blocking("x", identity=Identity(tenant_id="acme", user_id="u"), session_id="s")
folder = Path(ray._private.worker._global_node.get_logs_dir_path())
lines = [line for path in folder.glob("worker-*.err") for line in path.read_text().splitlines()]
print(json.dumps({"run": result.run_id, "lines": [json.loads(line) for line in lines if "from the" in line]}))
"""


def test_hosts_and_tools_log_as_the_process_that_deployed_them(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RETINUE_")}
    root = Path(__file__).parents[2]
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)],
        env=environment | {"RETINUE_HOME": str(tmp_path), "PYTHONPATH": str(root)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert ended.returncode == 0, ended.stderr
    told = json.loads(ended.stdout.splitlines()[-1])
    assert {
        (line["message"], line["tenant_id"], line["session_id"], line["run_id"]) for line in told["lines"]
    } == {
        ("from the driver", "acme", "s", told["run"]),
        ("from the tool", "acme", "s", told["run"]),
    }
