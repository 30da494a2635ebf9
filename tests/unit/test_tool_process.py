"""Tools in processes of this machine: what they may do, what becomes of them, and that they are gone."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from retinue import (
    DriverOutput,
    ExecutionServices,
    Grants,
    Identity,
    RunHandle,
    RunRequest,
    Tool,
    ToolCall,
    tool,
)
from retinue import tool_execution as executions
from retinue import tool_process as processes
from retinue.events import Event, ToolProgress
from retinue.tools import ToolResult
from tests.conftest import MakeLocalRuntime
from tests.support import FunctionDriver, driver, nothing_is_left, soon
from tests.unit import task_tools as tools

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(autouse=True)
async def none_is_left() -> AsyncIterator[None]:
    """No process that a test's tools were given outlives it."""
    yield
    assert workers() == []


def workers() -> list[psutil.Process]:
    """The processes of tools that are there now."""
    found = []
    for process in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if "tool_worker" in " ".join(process.cmdline()):
                found.append(process)
    return found


def beats(path: Path) -> int:
    return path.read_text().count("beat") if path.exists() else 0


async def works(path: Path, at_least: int = 3) -> None:
    """Wait until a tool has begun to write its file."""
    async with asyncio.timeout(20):
        while beats(path) < at_least:
            await asyncio.sleep(0.01)


async def stays_as_it_is(path: Path) -> str:
    """What a file holds that nobody writes to any more."""
    text = path.read_text()
    await asyncio.sleep(0.2)
    assert path.read_text() == text
    return text


def calling(*calls: tuple[Tool, dict[str, Any]], results: list[ToolResult]) -> FunctionDriver:
    """A driver that makes these calls, one after the other."""

    @driver
    async def call_all(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        for number, (found, arguments) in enumerate(calls):
            call = ToolCall(f"c{number}", found.name, arguments)
            results.append(await services.dispatch(call, tools=[found]))
        return DriverOutput(text="done")

    return call_all


class Calls:
    """Makes runs that call tools."""

    def __init__(self, make: MakeLocalRuntime, identity: Identity) -> None:
        self._make = make
        self._identity = identity
        self.results: list[ToolResult] = []

    def start(self, *calls: tuple[Tool, dict[str, Any]]) -> RunHandle:
        self.runtime = self._make(
            driver=calling(*calls, results=self.results),
            grants=Grants(tool_ids=sorted({found.name for found, _ in calls})),
        )
        return self.runtime.start("x", identity=self._identity, session_id="s")

    async def run(self, *calls: tuple[Tool, dict[str, Any]]) -> Sequence[Event]:
        handle = self.start(*calls)
        async with asyncio.timeout(30):
            events = [event async for event in handle.events()]
        assert (await handle.result()).status == "completed"
        await nothing_is_left(self.runtime, handle)
        return events

    @property
    def texts(self) -> list[str]:
        return [result.text for result in self.results]


@pytest.fixture
def calls(local_runtime: MakeLocalRuntime, identity: Identity) -> Calls:
    return Calls(local_runtime, identity)


async def test_a_task_runs_in_the_main_thread_of_another_process(calls: Calls, identity: Identity) -> None:
    await calls.run((tools.describe, {"point": {"x": 1, "y": 2}}), (tools.describe_async, {}))
    said = json_of(calls.texts[0])
    pid = said.pop("pid")
    assert pid != os.getpid()
    assert not psutil.pid_exists(pid)
    assert said == {
        "main": True,
        "user": identity.user_id,
        "call": "c0",
        "cancelled": False,
        "waited": False,
        "point": [1, 2],
        "argv": [],
    }
    other, call = calls.texts[1].split()
    assert int(other) not in (pid, os.getpid())
    assert call == "c1"


def json_of(text: str) -> dict[str, Any]:
    return dict(json.loads(text))


async def test_what_a_task_yields_is_progress(calls: Calls) -> None:
    events = await calls.run((tools.counts, {"to": 200}), (tools.counts_async, {"to": 200}))
    assert calls.texts == ["counted", "199"]
    for name in ("counts", "counts_async"):
        told = [
            event.payload.data
            for event in events
            if isinstance(event.payload, ToolProgress) and event.payload.tool_name == name
        ]
        assert told[-1] == 199
        assert told == sorted(set(told))
        assert len(told) < 100  # gathered


async def test_progress_of_a_task_is_seen_while_it_works(calls: Calls, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    handle = calls.start((tools.halfway, {"gate": str(gate)}))
    async with asyncio.timeout(20):
        async for event in handle.events():
            if isinstance(event.payload, ToolProgress):
                assert event.payload.data == "half done"
                break
    gate.touch()
    await soon(handle.result())
    assert calls.texts == ["done"]


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("raise", "ValueError: bad \\ud800"),
        ("exit", "SystemExit: 3"),
        ("vanish", "the tool's process ended without a result: it exited with status 3"),
        ("killed", "the tool's process ended without a result: it was ended by SIGKILL"),
        ("surrogate", "misbehaves gave text with a lone surrogate"),
        ("unpicklable", "<unlocked _thread.lock object at "),
        ("bytes", "[2 bytes of application/octet-stream, kept as artifact "),
        ("cancelled", "the tool was cancelled from inside"),
        ("stop", "StopIteration: StopIteration"),
        ("prints", "printed"),
    ],
)
async def test_whatever_a_task_does_is_its_result(calls: Calls, how: str, said: str) -> None:
    await calls.run((tools.misbehaves, {"how": how}))
    (result,) = calls.results
    assert result.text.startswith(said)
    assert result.error is (how not in ("unpicklable", "bytes", "prints"))


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("thread", "left a thread"),
        ("fork", "the tool's process ended without a result: it exited with status 0"),
    ],
)
async def test_what_a_task_leaves_behind_does_not_hold_the_run(
    calls: Calls, how: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "CANCEL_GRACE", 0.3)
    await calls.run((tools.misbehaves, {"how": how}))
    assert calls.texts == [said]


async def test_what_cannot_be_pickled_is_named_in_the_result(calls: Calls) -> None:
    lock = threading.Lock()

    @tool(run_in="task")
    def locks() -> None:
        lock.acquire()

    await calls.run((locks, {}))
    (result,) = calls.results
    assert result.error
    assert result.text.startswith("NotShippable: locks.function:lock cannot be sent to another process: ")


async def test_a_module_that_the_process_cannot_import_is_named(
    calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    import types

    module = types.ModuleType("made_up_here")

    @tool(run_in="task")
    def somewhere() -> None: ...

    somewhere.__module__, somewhere._qualname = "made_up_here", "somewhere"
    module.somewhere = somewhere  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "made_up_here", module)
    await calls.run((somewhere, {}))
    said = "the tool cannot be loaded in its process: ModuleNotFoundError: No module named 'made_up_here'. "
    assert calls.texts[0].startswith(said)


@pytest.mark.parametrize(
    ("found", "cleaned"),
    [
        (tools.beats, "cleaned\n"),
        (tools.beats_and_looks, "left\ncleaned\n"),
        (tools.beats_async, "cleaned True\n"),
        (tools.beats_and_yields, "cleaned\n"),
        (tools.blocks, "cleaned\n"),
    ],
)
async def test_a_cancel_reaches_a_task_and_waits_until_it_has_cleaned_up(
    calls: Calls, tmp_path: Path, found: Tool, cleaned: str
) -> None:
    path = tmp_path / "log"
    handle = calls.start((found, {"path": str(path)}))
    await works(path, 1 if found is tools.blocks else 3)
    await handle.cancel("enough")
    assert (await soon(handle.result())).status == "cancelled"
    assert (await stays_as_it_is(path)).endswith(f"beat\n{cleaned}")
    assert calls.results == []
    await nothing_is_left(calls.runtime, handle)


@pytest.mark.parametrize("found", [tools.beats_and_ignores, tools.starts_another])
async def test_a_task_that_does_not_leave_is_killed_with_all_it_started(
    calls: Calls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, found: Tool
) -> None:
    monkeypatch.setattr(executions, "CANCEL_GRACE", 0.3)
    path = tmp_path / "log"
    handle = calls.start((found, {"path": str(path)}))
    await works(path)
    await handle.cancel("enough")
    assert (await soon(handle.result())).status == "cancelled"
    assert (await stays_as_it_is(path)).endswith("beat\n")
    await nothing_is_left(calls.runtime, handle)


async def test_a_task_that_takes_too_long_is_killed_and_may_be_called_again(
    calls: Calls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executions, "LEAVING_GRACE", 0.1)
    path = tmp_path / "log"
    await calls.run(*[(tools.beats_too_long, {"path": str(path)})] * 2)
    assert calls.texts == ["beats_too_long timed out after 0.5 s"] * 2
    await stays_as_it_is(path)


async def test_a_cancel_before_the_process_has_begun_leaves_nothing(calls: Calls, tmp_path: Path) -> None:
    path = tmp_path / "log"
    handle = calls.start((tools.beats, {"path": str(path)}))
    async with asyncio.timeout(20):
        while not workers():
            await asyncio.sleep(0)
    await handle.cancel("at once")
    assert (await soon(handle.result())).status == "cancelled"
    await nothing_is_left(calls.runtime, handle)
    assert beats(path) == 0


async def test_a_cancel_reaches_the_task_of_a_delegate(
    local_runtime: MakeLocalRuntime, identity: Identity, tmp_path: Path
) -> None:
    path = tmp_path / "log"

    @driver
    async def root(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        child = await services.delegate(
            calling((tools.beats_and_looks, {"path": str(path)}), results=[]), "go", name="child"
        )
        return await child.result()

    runtime = local_runtime(driver=root, grants=Grants(tool_ids=["beats_and_looks"]))
    handle = runtime.start("x", identity=identity, session_id="s")
    await works(path)
    await handle.cancel("enough")
    assert (await soon(handle.result())).status == "cancelled"
    assert (await stays_as_it_is(path)).endswith("left\ncleaned\n")
    await nothing_is_left(runtime, handle)


async def test_a_process_ends_with_its_host(tmp_path: Path) -> None:
    path = tmp_path / "log"
    program = f"""
import asyncio, os
from retinue import Identity
from retinue.tool_process import LocalTasks
from retinue.tool_tasks import make_order
from tests.unit.task_tools import beats_and_ignores

async def main():
    identity = Identity(tenant_id="t", user_id="u")
    order = make_order(beats_and_ignores, {{"path": {str(path)!r}}}, identity, "c")
    await LocalTasks().start(order, print).outcome()

asyncio.run(main())
"""
    root = Path(__file__).resolve().parents[2]
    host = subprocess.Popen([sys.executable, "-c", program], env={"PYTHONPATH": str(root)})
    try:
        await works(path)
        (worker,) = psutil.Process(host.pid).children()
    finally:
        host.kill()
        host.wait()
    async with asyncio.timeout(10):
        while worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE:
            await asyncio.sleep(0.01)
    await stays_as_it_is(path)


async def test_a_tool_of_a_script_runs_in_a_task(tmp_path: Path) -> None:
    """Its hints are text, and name what only the script has imported."""
    script = tmp_path / "script.py"
    script.write_text(
        "from __future__ import annotations\n"
        "import os\n"
        "from retinue import Agent, Grants, Identity, Runtime, TaskContext, agent_driver, tool\n"
        "from retinue.testing import ScriptedModel, tool_calls\n"
        "@tool(run_in='task')\n"
        "def add(a: int, ctx: TaskContext) -> int:\n"
        "    assert os.getpid() != HERE\n"
        "    return a + OFFSET\n"
        "HERE, OFFSET = os.getpid(), 40\n"
        "model = ScriptedModel([tool_calls(('add', {'a': 2})), 'done'])\n"
        "agent = Agent(name='a', model=model, tools=[add])\n"
        "driver, grants = agent_driver(agent), Grants(tool_ids=['add'])\n"
        "with Runtime(driver=driver, grants=grants, backend='inprocess') as runtime:\n"
        "    runtime.run_blocking('x', identity=Identity(tenant_id='t', user_id='u'), session_id='s')\n"
        "print(model.requests[-1].messages[-1].text)\n"
    )
    root = Path(__file__).resolve().parents[2]
    ran = subprocess.run(
        [sys.executable, str(script)], capture_output=True, timeout=60, env={"PYTHONPATH": str(root)}
    )
    assert (ran.stdout.decode(), ran.stderr.decode()) == ("42\n", "")
