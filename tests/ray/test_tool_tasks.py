"""Tools that run as Ray tasks: with their resources, told and killed, and never started twice."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from retinue import (
    DriverOutput,
    ExecutionServices,
    Grants,
    Identity,
    RunHandle,
    RunRequest,
    TaskContext,
    ToolCall,
    tool,
)
from retinue.events import ToolProgress
from tests.ray.conftest import MakeRuntime
from tests.ray.drivers import Driver
from tests.ray.test_faults import beats, stops, until

TIMEOUT = 60


@tool(run_in="task", num_cpus=0.5, memory=100_000_000)
def describe(ctx: TaskContext) -> dict[str, Any]:
    """Tells where it runs, for whom, and with what."""
    context: Any = ray.get_runtime_context()
    return {
        "pid": os.getpid(),
        "resources": context.get_assigned_resources(),
        "user": ctx.identity.user_id,
        "call": ctx.call_id,
    }


@tool(run_in="task", num_cpus=0)
async def counts(to: int) -> AsyncIterator[int]:
    """Reports how far it is."""
    for number in range(to):
        await asyncio.sleep(0)
        yield number


@tool(run_in="task", num_cpus=0)
def halfway(gate: str) -> Generator[str, None, str]:
    """Says something, then waits for a file."""
    yield "half done"
    while not Path(gate).exists():
        time.sleep(0.01)
    return "done"


@tool(run_in="task", num_cpus=0)
def dies(path: str) -> None:
    """Is killed, after it was started."""
    with Path(path).open("a") as log:
        log.write("beat\n")
    os.kill(os.getpid(), signal.SIGKILL)


@tool(run_in="task", num_cpus=0)
def large() -> str:
    """Says a lot."""
    return "ä" * 200_000


@tool(run_in="task", resources={"nobody has this": 1})
def homeless(path: str) -> None:
    """Has no place to run."""
    Path(path).touch()


@tool(run_in="task", resources={"nobody has this": 1}, timeout=0.5)
def homeless_for_a_while(path: str) -> None:
    """Has no place to run, and nobody waits for long."""
    Path(path).touch()


def _beat(path: str, ctx: TaskContext | None) -> str:
    with Path(path).open("a") as log:
        log.write(f"pid {os.getpid()}\n")
        try:
            while ctx is None or not ctx.cancelled:
                log.write("beat\n")
                log.flush()
                time.sleep(0.01)
            time.sleep(0.5)
        finally:
            log.write("cleaned\n")
    return "left"


@tool(run_in="task", num_cpus=0)
def beats_and_looks(path: str, ctx: TaskContext) -> str:
    """Writes to a file until it is told to leave, which takes it a while."""
    return _beat(path, ctx)


@tool(run_in="task", num_cpus=0)
def beats_and_is_interrupted(path: str) -> str:
    """Writes to a file until it is interrupted."""
    return _beat(path, None)


@tool(run_in="task", num_cpus=0)
async def beats_async(path: str) -> None:
    """Writes to a file until it is cancelled."""
    with Path(path).open("a") as log:
        try:
            while True:
                log.write("beat\n")
                log.flush()
                await asyncio.sleep(0.01)
        finally:
            await asyncio.sleep(0.2)
            log.write("cleaned\n")


@tool(run_in="task", num_cpus=0)
def beats_and_ignores(path: str, ctx: TaskContext) -> str:
    """Writes to a file, whatever happens."""
    return _beat(path, None)


@tool(run_in="task", num_cpus=0, timeout=4)
def beats_too_long(path: str, ctx: TaskContext) -> str:
    """The same, but not for long."""
    return _beat(path, None)


TOOLS = (
    describe,
    counts,
    halfway,
    dies,
    large,
    homeless,
    homeless_for_a_while,
    beats_and_looks,
    beats_and_is_interrupted,
    beats_async,
    beats_and_ignores,
    beats_too_long,
)
GRANTS = Grants(tool_ids=[item.name for item in TOOLS])


@dataclass(frozen=True)
class Calls(Driver):
    """Makes these calls, one after the other, itself or in a delegate; tells its process and their texts."""

    calls: tuple[tuple[str, str], ...] = ()
    """Names of tools, and the JSON of their arguments."""
    in_delegate: bool = False

    async def start(self, request: RunRequest, services: ExecutionServices) -> DriverOutput:
        if self.in_delegate:
            child = await services.delegate(Calls(calls=self.calls), "go", name="child")
            return await child.result()
        results = [
            await services.dispatch(ToolCall(f"c{number}", name, json.loads(arguments)), tools=TOOLS)
            for number, (name, arguments) in enumerate(self.calls)
        ]
        texts = [result.text for result in results]
        kept = [result.artifact_id for result in results]
        return DriverOutput(text="done", structured={"pid": os.getpid(), "texts": texts, "kept": kept})


def call(name: str, **arguments: Any) -> tuple[str, str]:
    return name, json.dumps({key: str(value) if key != "to" else value for key, value in arguments.items()})


@pytest.fixture
def start(make_runtime: MakeRuntime, identity: Identity) -> Any:
    def started(*calls: tuple[str, str], in_delegate: bool = False) -> RunHandle:
        runtime = make_runtime(driver=Calls(calls=calls, in_delegate=in_delegate), grants=GRANTS)
        return runtime.start("x", identity=identity, session_id="s")

    return started


@pytest.mark.parametrize("in_delegate", [False, True])
def test_a_tool_runs_as_a_task_with_its_resources(start: Any, identity: Identity, in_delegate: bool) -> None:
    result = start(call("describe"), in_delegate=in_delegate).wait(TIMEOUT)
    assert result.status == "completed"
    said = json.loads(result.structured["texts"][0])
    assert said.pop("pid") not in (os.getpid(), result.structured["pid"])
    assert said == {
        "resources": {"CPU": 0.5, "memory": 100_000_000.0},
        "user": identity.user_id,
        "call": "c0",
    }


def test_a_task_reports_progress_while_it_works(start: Any, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    handle: RunHandle = start(call("halfway", gate=gate), call("counts", to=500))
    told: list[Any] = []
    for event in handle.iter_events():
        if isinstance(event.payload, ToolProgress):
            told.append(event.payload.data)
            gate.touch()
    assert handle.wait(TIMEOUT).structured["texts"] == ["done", "499"]
    assert told[0] == "half done"
    assert told[-1] == 499
    assert len(told) < 100  # gathered


def test_a_result_that_is_too_large_is_an_artifact(
    start: Any, make_runtime: MakeRuntime, identity: Identity
) -> None:
    result = start(call("large")).wait(TIMEOUT)
    (artifact_id,) = result.structured["kept"]
    assert result.structured["texts"][0].endswith(f"kept as artifact {artifact_id}]")
    reader = make_runtime(driver=Calls())
    kept = asyncio.run(reader.get_artifact(identity, "s", artifact_id))
    assert kept is not None
    assert kept.data.decode() == "ä" * 200_000


def test_a_task_whose_process_dies_is_an_error_and_is_not_started_again(start: Any, tmp_path: Path) -> None:
    path = tmp_path / "log"
    result = start(call("dies", path=path)).wait(TIMEOUT)
    assert result.status == "completed"
    assert result.structured["texts"][0].startswith("the tool's task ended without a result: WorkerCrashed")
    assert stops(path)
    assert beats(path) == 1


@pytest.mark.parametrize(
    ("name", "in_delegate"),
    [
        ("beats_and_looks", False),
        ("beats_and_looks", True),
        ("beats_and_is_interrupted", False),
        ("beats_async", True),
    ],
)
def test_a_cancel_reaches_a_task_and_the_run_ends_when_it_has(
    start: Any, tmp_path: Path, name: str, in_delegate: bool
) -> None:
    path = tmp_path / "log"
    handle: RunHandle = start(call(name, path=path), in_delegate=in_delegate)
    until(lambda: beats(path) > 3, "the task works")
    handle.cancel_blocking("enough")
    assert handle.wait(TIMEOUT).status == "cancelled"
    assert path.read_text().endswith("cleaned\n")  # it is there with the result, and nothing comes after it
    assert stops(path)


def test_a_task_that_does_not_leave_is_killed_before_the_run_has_ended(start: Any, tmp_path: Path) -> None:
    path = tmp_path / "log"
    handle: RunHandle = start(call("beats_and_ignores", path=path))
    until(lambda: beats(path) > 3, "the task works")
    handle.cancel_blocking("enough")
    assert handle.state == "cancelling"
    assert handle.wait(TIMEOUT).status == "cancelled"
    pid = int(path.read_text().split()[1])
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    assert stops(path)


def test_a_task_that_takes_too_long_is_killed_and_the_run_goes_on(start: Any, tmp_path: Path) -> None:
    path = tmp_path / "log"
    result = start(call("beats_too_long", path=path), call("counts", to=1)).wait(TIMEOUT)
    assert result.structured["texts"] == ["beats_too_long timed out after 4 s", "0"]
    assert beats(path) > 3
    assert stops(path)
    assert not path.read_text().endswith("cleaned\n")


def test_a_task_that_waits_for_room_is_taken_back(start: Any, tmp_path: Path) -> None:
    path = tmp_path / "begun"
    handle: RunHandle = start(call("homeless_for_a_while", path=path), call("homeless", path=path))
    for event in handle.iter_events():
        if event.type == "tool.complete":
            break
    handle.cancel_blocking("enough")
    assert handle.wait(TIMEOUT).status == "cancelled"
    assert not path.exists()
