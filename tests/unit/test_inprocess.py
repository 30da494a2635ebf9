"""The in-process backend: sessions that move between runtimes, room in memory, closing."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import weakref
from pathlib import Path

import pytest

from retinue import DriverOutput, ExecutionServices, Identity, RunRequest, Runtime, inprocess, loop
from retinue import host as host_module
from retinue.errors import RetinueError, SessionConflict, StoreUnavailable
from retinue.hooks import DeactivationReason, SessionHooks, SessionInfo
from retinue.messages import user
from retinue.storage.memory import MemoryEngine
from tests.conftest import MakeLocalRuntime
from tests.support import Flag, FunctionDriver, Start, backend_of, code_of, driver, flag, soon, trivial, why

ROOT = Path(__file__).resolve().parents[2]


def says(text: str) -> FunctionDriver:
    @driver
    async def saying(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        services.append([user(f"{text}: {request.input}")])
        return DriverOutput(text=text, structured=len(services.history))

    return saying


@driver
async def waits(request: RunRequest, services: ExecutionServices) -> DriverOutput:
    flag(f"{request.run_id} runs").set()
    await flag(f"{request.run_id} go").wait()
    return DriverOutput(text="waited")


async def test_a_session_moves_between_two_apps_of_one_process(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    engine = MemoryEngine()
    first = local_runtime(driver=says("first"), store=engine)
    second = local_runtime(driver=says("second"), store=engine)
    seen = []
    for runtime in (first, second, first, first, second):
        result = await soon(runtime.run("x", identity=identity, session_id=session_id))
        seen.append((result.text, result.structured))
    assert seen == [("first", 1), ("second", 2), ("first", 3), ("first", 4), ("second", 5)]
    snapshot = await first.sessions.read(identity, session_id)
    assert (snapshot.revision, snapshot.replayable) == (5, True)
    activations = [backend_of(runtime)._host.statistics().activations for runtime in (first, second)]
    assert activations == [3, 2]


async def test_a_busy_session_does_not_move(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    engine = MemoryEngine()
    first, second = local_runtime(driver=waits, store=engine), local_runtime(driver=trivial, store=engine)
    running = first.start("x", identity=identity, session_id=session_id)
    await flag(f"{running.run_id} runs").wait()
    refused = second.start("y", identity=identity, session_id=session_id)
    with pytest.raises(SessionConflict, match="another app"):
        await refused.accepted()
    flag(f"{running.run_id} go").set()
    assert (await soon(running.result())).text == "waited"
    assert (await soon(second.run("y", identity=identity, session_id=session_id))).text == "y"


async def test_two_runtimes_of_one_file_take_turns(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str, tmp_path: Path
) -> None:
    url = f"sqlite:///{tmp_path}/store.db"
    first, second = (
        local_runtime(driver=says("first"), store=url),
        local_runtime(driver=says("second"), store=url),
    )
    for runtime in (first, second, first):
        assert (await soon(runtime.run("x", identity=identity, session_id=session_id))).status == "completed"
    assert (await second.sessions.latest(identity, session_id)).revision == 3
    guarantees = await second.store_guarantees()
    assert (guarantees.durable, guarantees.single_writer) == (True, "distributed")


async def test_memory_stores_are_apart(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    first, second = local_runtime(driver=says("first")), local_runtime(driver=says("second"), store="memory:")
    await first.run("x", identity=identity, session_id=session_id)
    assert (await second.sessions.read(identity, session_id)).revision == 0
    guarantees = await first.store_guarantees()
    assert (guarantees.durable, guarantees.compare_and_swap, guarantees.single_writer) == (
        False,
        False,
        "process",
    )


async def test_the_longest_unused_idle_session_makes_room(
    local_runtime: MakeLocalRuntime, identity: Identity, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inprocess, "_resident", type(inprocess._resident)())
    monkeypatch.setattr(inprocess, "MAX_RESIDENT", 2)
    runtime = local_runtime(driver=says("x"))
    busy = local_runtime(driver=waits)
    running = busy.start("x", identity=identity, session_id="busy")
    await flag(f"{running.run_id} runs").wait()
    for number in (1, 2, 1, 3):
        await soon(runtime.run("x", identity=identity, session_id=f"s{number}"))
    keys = [key.rsplit('"', 2)[1] for key in inprocess._resident]
    assert keys == ["busy", "s3"]
    host = backend_of(runtime)._host
    assert [session.session_id for session in host.statistics().sessions] == ["s3"]
    assert host.statistics().runs_started == 4
    # Everything busy: newcomers still get a place, and do not push each other out.
    monkeypatch.setattr(host_module, "GRACE", 60.0)
    more = [busy.start("x", identity=identity, session_id=f"busy{number}") for number in range(5)]
    for handle in more:
        await flag(f"{handle.run_id} runs").wait()
    assert (await soon(runtime.run("x", identity=identity, session_id="s9"))).status == "completed"
    for handle in (running, *more):
        flag(f"{handle.run_id} go").set()
        assert (await soon(handle.result())).text == "waited"
    for number in (1, 2, 3):
        snapshot = await runtime.sessions.read(identity, f"s{number}")
        assert snapshot.revision == (2 if number == 1 else 1)


# --- leaving memory ---------------------------------------------------------------------------------------


def resident_ids(runtime: Runtime) -> list[str]:
    return [session.session_id for session in backend_of(runtime)._host.statistics().sessions]


async def test_fifty_starts_on_a_cold_session_share_one_activation(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    runtime = local_runtime(driver=waits)
    handles = [runtime.start("x", identity=identity, session_id=session_id) for _ in range(50)]
    outcomes = await asyncio.gather(*(handle.accepted() for handle in handles), return_exceptions=True)
    (accepted,) = [handle for handle, outcome in zip(handles, outcomes, strict=True) if outcome is None]
    assert {type(outcome) for outcome in outcomes if outcome is not None} == {SessionConflict}
    assert backend_of(runtime)._host.statistics().activations == 1
    flag(f"{accepted.run_id} go").set()
    assert (await soon(accepted.result())).text == "waited"
    assert (await runtime.sessions.latest(identity, session_id)).revision == 1  # no second history


@pytest.mark.parametrize("isolation", ["dedicated", "shared"])
async def test_unused_sessions_leave_memory_and_come_back_with_their_history(
    local_runtime: MakeLocalRuntime, identity: Identity, isolation: str
) -> None:
    left: list[tuple[str, str]] = []

    async def deactivating(info: SessionInfo, reason: DeactivationReason) -> None:
        left.append((info.session_id, reason))

    hooks = SessionHooks(deactivating=deactivating)
    engine = MemoryEngine()
    runtime = local_runtime(driver=says("x"), hooks=hooks, store=engine, isolation=isolation)
    busy = local_runtime(driver=waits, store=engine)
    backend_of(runtime)._idle_timeout = backend_of(busy)._idle_timeout = 0.2
    running = busy.start("x", identity=identity, session_id="busy")
    await flag(f"{running.run_id} runs").wait()
    finished = runtime.start("x", identity=identity, session_id="s")
    assert (await soon(finished.result())).structured == 1
    async with asyncio.timeout(5):
        while resident_ids(runtime):
            await asyncio.sleep(0.01)
    assert left == [("s", "idle")]
    assert backend_of(runtime)._host.statistics().passivations == {"idle": 1}
    assert resident_ids(busy) == ["busy"]  # whoever works stays, however long
    assert backend_of(runtime)._idling is None  # nobody looks where nobody lives
    assert (await soon(finished.result())).text == "x"
    assert (await soon(runtime.run("y", identity=identity, session_id="s"))).structured == 2
    flag(f"{running.run_id} go").set()
    assert (await soon(running.result())).text == "waited"


async def test_a_session_that_is_wanted_while_it_leaves_comes_back(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    leaving, go = Flag(), Flag()

    async def deactivating(info: SessionInfo, reason: DeactivationReason) -> None:
        leaving.set()
        await go.wait()

    runtime = local_runtime(driver=says("x"), hooks=SessionHooks(deactivating=deactivating))
    backend_of(runtime)._idle_timeout = 0.05
    await soon(runtime.run("x", identity=identity, session_id=session_id))
    await leaving.wait()
    again = runtime.start("y", identity=identity, session_id=session_id)
    accepting = asyncio.ensure_future(again.accepted())
    await asyncio.sleep(0.05)
    assert not accepting.done()
    backend_of(runtime)._idle_timeout = 60.0
    go.set()
    await soon(accepting)
    assert (await soon(again.result())).structured == 2
    assert backend_of(runtime)._host.statistics().activations == 2


# --- closing ----------------------------------------------------------------------------------------------


async def test_closing_cancels_what_runs_and_gives_sessions_back(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    engine = MemoryEngine()
    first, second = local_runtime(driver=waits, store=engine), local_runtime(driver=trivial, store=engine)
    handle = first.start("x", identity=identity, session_id=session_id)
    await flag(f"{handle.run_id} runs").wait()
    result = asyncio.ensure_future(handle.result())
    await asyncio.sleep(0)
    await asyncio.to_thread(first.close)
    assert (await soon(result)).status == "cancelled"
    assert "closed" in why(await result)
    # An engine that was given stays open, for others too.
    assert (await soon(second.run("y", identity=identity, session_id=session_id))).text == "y"
    late = first.start("z", identity=identity, session_id="other")
    with pytest.raises(RetinueError, match="closed"):
        await soon(late.accepted())
    first.close()


async def test_closing_in_the_middle_of_a_start_leaves_no_run(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    from retinue.store import OpenRun, StoreOperation, StoreReply

    class Engine(MemoryEngine):
        def __init__(self) -> None:
            super().__init__()
            self.recorded, self.go = Flag(), Flag()

        async def execute(self, operations: list[StoreOperation]) -> list[StoreReply]:  # type: ignore[override]
            replies = list(await super().execute(operations))
            if isinstance(operations[0], OpenRun):
                self.recorded.set()
                await self.go.wait()
            return replies

    engine = Engine()
    runtime = local_runtime(driver=trivial, store=engine)
    handle = runtime.start("x", identity=identity, session_id=session_id)
    await engine.recorded.wait()
    closing = asyncio.ensure_future(asyncio.to_thread(runtime.close))
    host = backend_of(runtime)._host
    (session,) = host._sessions.values()
    while session.closing is None:
        await asyncio.sleep(0)
    engine.go.set()
    await soon(closing)
    assert not session.busy
    other = local_runtime(driver=trivial, store=engine)
    record = await backend_of(other)._store.read_run(identity, handle.run_id)
    assert record is not None
    assert record.outcome is not None
    assert b'"cancelled"' in record.outcome
    assert (await other.sessions.latest(identity, session_id)).revision == 0


async def test_a_stuck_driver_of_one_runtime_does_not_stop_the_others(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    """Whatever happens on a loop of users, the control loop goes on serving."""
    import threading

    block = threading.Event()

    @driver
    async def blocks(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        flag(f"{request.run_id} blocks").set()
        block.wait(10)
        return DriverOutput(text="unblocked")

    stuck, other = local_runtime(driver=blocks), local_runtime(driver=trivial)
    handle = stuck.start("x", identity=identity, session_id=session_id)
    await flag(f"{handle.run_id} blocks").wait()
    await handle.cancel("does not help yet")
    assert handle.state == "cancelling"
    assert (await soon(other.run("y", identity=identity, session_id=session_id))).text == "y"
    block.set()
    assert (await soon(handle.result())).status == "cancelled"


def test_a_closed_runtime_is_forgotten(identity: Identity, session_id: str) -> None:
    with Runtime(driver=trivial, backend="inprocess") as runtime:
        assert runtime.run_blocking("x", identity=identity, session_id=session_id).text == "x"
        known = len(loop._at_exit)
        backend = weakref.ref(backend_of(runtime))
    assert len(loop._at_exit) == known - 1
    assert len(inprocess._activating) == 0
    del runtime
    gc.collect()
    assert backend() is None


def test_an_engine_that_a_runtime_opened_is_closed_with_it(identity: Identity, session_id: str) -> None:
    runtime = Runtime(driver=trivial, backend="inprocess", store="memory:")
    engine = backend_of(runtime)._store
    runtime.close()
    with pytest.raises(StoreUnavailable):
        asyncio.run(engine.read_run(identity, "r"))


SCRIPT = """
import asyncio, sys
from retinue import DriverCapabilities, DriverOutput, Identity, Runtime

class Waits:
    id, version, capabilities = "waits", 1, DriverCapabilities()
    async def start(self, request, services):
        print("runs", flush=True)
        await asyncio.Event().wait()

runtime = Runtime(driver=Waits(), backend="inprocess", store=sys.argv[1])
handle = runtime.start("x", identity=Identity(tenant_id="a", user_id="b"), session_id="s", run_id="run_exit")
next(handle.iter_events())
"""


def test_the_end_of_a_script_ends_its_runs_in_good_order(
    local_runtime: MakeLocalRuntime, tmp_path: Path
) -> None:
    url = f"sqlite:///{tmp_path}/store.db"
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, url],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT)},
    )
    assert (done.returncode, done.stderr) == (0, "")
    # The run was cancelled, its record closed and its lease given back.
    runtime = local_runtime(driver=trivial, store=url)
    who = Identity(tenant_id="a", user_id="b")
    result = runtime.attach("run_exit", identity=who).wait(timeout=10)
    assert (result.status, code_of(result)) == ("cancelled", "cancelled")
    assert runtime.run_blocking("y", identity=who, session_id="s").status == "completed"


def test_starts_are_functions_of_drivers() -> None:
    start: Start = trivial.function
    assert FunctionDriver(start) == trivial
