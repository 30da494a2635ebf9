"""Handles: from scripts, coroutines and several loops, blocking and not, attached and not."""

from __future__ import annotations

import asyncio
import threading

import pytest

from retinue import DriverOutput, ExecutionServices, Identity, RunHandle, RunRequest, RunResult
from retinue.errors import NotFound, SessionConflict
from retinue.events import Custom
from retinue.loop import blocking, client_loop, on_client_loop
from retinue.storage.memory import MemoryEngine
from tests.conftest import MakeLocalRuntime
from tests.support import Flag, all_events, code_of, driver, flag, soon, trivial, types, why


@driver
async def talks(request: RunRequest, services: ExecutionServices) -> DriverOutput:
    """Says three things, then waits to be let go."""
    for number in range(3):
        services.emit(Custom("said", number))
    flag(f"{request.run_id} runs").set()
    await flag(f"{request.run_id} go").wait()
    return DriverOutput(text="done")


def test_blocking_twins_need_no_loop(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    runtime = local_runtime(driver=talks)
    handle = runtime.start("x", identity=identity, session_id=session_id)
    with pytest.raises(TimeoutError):
        handle.wait(timeout=0.01)
    seen = []
    for event in handle.iter_events(after=1):
        seen.append(event.sequence)
        if len(seen) == 3:
            flag(f"{handle.run_id} go").set()
    assert seen == [2, 3, 4, 5]
    assert handle.wait(timeout=10).text == "done"
    handle.cancel_blocking("too late")
    assert (handle.wait().status, handle.state) == ("completed", "finished")


def test_run_blocking_and_cancel_blocking(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    assert (
        local_runtime(driver=trivial).run_blocking("x", identity=identity, session_id=session_id).text == "x"
    )
    handle = local_runtime(driver=talks).start("x", identity=identity, session_id=session_id)
    flag(f"{handle.run_id} runs").wait_blocking()
    handle.cancel_blocking("enough")
    result = handle.wait(timeout=10)
    assert (result.status, why(result)) == ("cancelled", "enough")


def test_a_blocking_call_on_the_clients_own_loop_is_refused(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    handle = local_runtime(driver=trivial).start("x", identity=identity, session_id=session_id)

    async def wait_there() -> str:
        assert client_loop().is_current
        with pytest.raises(RuntimeError, match="would never return"):
            handle.wait()
        return (await handle.result()).text

    assert on_client_loop(wait_there()).result(10) == "x"


def test_one_handle_can_be_awaited_from_several_loops_at_once(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    handle = local_runtime(driver=talks).start("x", identity=identity, session_id=session_id)
    results: list[tuple[RunResult, list[str]]] = []

    def follow() -> None:
        async def both() -> None:
            events = await all_events(handle)
            results.append((await handle, types(events)))

        asyncio.run(both())

    threads = [threading.Thread(target=follow) for _ in range(4)]
    for thread in threads:
        thread.start()
    flag(f"{handle.run_id} runs").wait_blocking()
    flag(f"{handle.run_id} go").set()
    for thread in threads:
        thread.join(10)
    assert len(results) == 4
    assert all(result == results[0] for result in results)
    assert results[0][1] == ["run.started", "custom", "custom", "custom", "run.terminal"]


def test_a_loop_that_ends_early_disturbs_nobody(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str, caplog: pytest.LogCaptureFixture
) -> None:
    handle = local_runtime(driver=talks).start("x", identity=identity, session_id=session_id)

    async def give_up() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(handle.result(), 0.01)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(handle.events(after=4).__anext__(), 0.01)

    asyncio.run(give_up())
    flag(f"{handle.run_id} go").set()
    assert asyncio.run(handle.result()).text == "done"
    assert caplog.records == []


async def test_start_needs_no_await_and_a_handle_is_awaitable(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    handle = local_runtime(driver=trivial).start("x", identity=identity, session_id=session_id)
    assert handle.session_id == session_id
    assert handle.run_id.startswith("run_")
    await handle.accepted()
    assert (await handle).text == "x"
    assert repr(handle) == f"<RunHandle {handle.run_id} finished>"
    assert handle.hops == 0


async def test_leaving_a_viewer_early_is_fine(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    handle = local_runtime(driver=talks).start("x", identity=identity, session_id=session_id)
    viewer = handle.events()
    async for event in viewer:
        if event.sequence == 2:
            break
    assert viewer.cursor == 2
    again = handle.events(after=viewer.cursor)
    assert (await soon(again.__anext__())).sequence == 3
    viewer.close()
    flag(f"{handle.run_id} go").set()
    assert [event.sequence async for event in again] == [4, 5]


# --- attach -----------------------------------------------------------------------------------------------


async def test_attach_follows_a_run_from_its_first_event(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    runtime = local_runtime(driver=talks)
    handle = runtime.start("x", identity=identity, session_id=session_id)
    await flag(f"{handle.run_id} runs").wait()
    attached = runtime.attach(handle.run_id, identity=identity)
    await attached.accepted()
    assert (attached.session_id, attached.state) == (session_id, "running")
    following = asyncio.ensure_future(all_events(attached))
    flag(f"{handle.run_id} go").set()
    assert await soon(attached.result()) == await handle.result()
    assert await following == await all_events(handle)
    assert (attached.state, attached.budget) == ("finished", handle.budget)


async def test_attaching_to_a_run_that_is_not_there_is_told_at_every_door(
    local_runtime: MakeLocalRuntime, identity: Identity
) -> None:
    handle = local_runtime(driver=trivial).attach("no such run", identity=identity)
    with pytest.raises(NotFound):
        await handle.accepted()
    with pytest.raises(NotFound):
        await all_events(handle)
    result = await handle.result()
    assert result.reason is not None
    assert (result.status, result.reason.code) == ("failed", "not_found")


def test_acceptance_has_a_blocking_twin(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    runtime = local_runtime(driver=trivial)
    runtime.start("x", identity=identity, session_id=session_id).accepted_blocking()
    with pytest.raises(NotFound):
        runtime.attach("no such run", identity=identity).accepted_blocking()


async def test_attach_at_once_does_not_disturb_the_start(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    """Between its record and its first step a run is known to the store alone."""
    from retinue.store import OpenRun, StoreReply

    class Engine(MemoryEngine):
        def __init__(self) -> None:
            super().__init__()
            self.recorded, self.go = Flag(), Flag()

        async def execute(self, operations: object) -> list[StoreReply]:
            replies = list(await super().execute(operations))  # type: ignore[arg-type]
            if any(isinstance(operation, OpenRun) for operation in operations):  # type: ignore[attr-defined]
                self.recorded.set()
                await self.go.wait()
            return replies

    engine = Engine()
    runtime = local_runtime(driver=trivial, store=engine)
    handle = runtime.start("x", identity=identity, session_id=session_id)
    await engine.recorded.wait()
    attached = runtime.attach(handle.run_id, identity=identity)
    result = asyncio.ensure_future(attached.result())
    await asyncio.sleep(0.05)
    engine.go.set()
    assert await soon(result) == await soon(handle.result())
    assert (await handle.result()).status == "completed"


async def test_attach_from_another_runtime_of_the_process(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    engine = MemoryEngine()
    first, second = local_runtime(driver=talks, store=engine), local_runtime(driver=trivial, store=engine)
    handle = first.start("x", identity=identity, session_id=session_id)
    await flag(f"{handle.run_id} runs").wait()
    attached = second.attach(handle.run_id, identity=identity)
    await attached.accepted()
    await attached.cancel("from elsewhere")
    result = await soon(attached.result())
    assert (result.status, why(result)) == ("cancelled", "from elsewhere")
    assert await handle.result() == result
    # Reading an ended run brings no session to life and moves none.
    assert types(await all_events(second.attach(handle.run_id, identity=identity)))[-1] == "run.terminal"


async def test_a_run_is_found_only_with_its_identity(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    runtime = local_runtime(driver=talks)
    handle = runtime.start("x", identity=identity, session_id=session_id)
    await flag(f"{handle.run_id} runs").wait()
    for other in (
        Identity(tenant_id="other", user_id=identity.user_id),
        Identity(tenant_id=identity.tenant_id, user_id="other"),
    ):
        stranger = runtime.attach(handle.run_id, identity=other)
        assert stranger.budget.model_calls.used == 0
        with pytest.raises(NotFound):
            await stranger.accepted()
        result = await stranger.result()
        assert (result.status, code_of(result), result.session_id) == ("failed", "not_found", "")
        with pytest.raises(NotFound):
            await all_events(stranger)
    assert handle.state == "running"
    flag(f"{handle.run_id} go").set()
    assert (await soon(handle.result())).status == "completed"


async def test_what_a_stranger_sees_of_a_running_run_is_nothing(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    from retinue import Budgets
    from retinue.ended_runs import empty_budget

    runtime = local_runtime(driver=talks, budgets=Budgets(max_tokens=123))
    handle = runtime.start("x", identity=identity, session_id=session_id)
    await flag(f"{handle.run_id} runs").wait()
    assert handle.budget.tokens.limit == 123
    other = Identity(tenant_id="other", user_id=identity.user_id)
    stranger = runtime.attach(handle.run_id, identity=other)
    assert (stranger.budget, stranger.last_status) == (empty_budget(), None)
    with pytest.raises(NotFound):
        await stranger.cancel("not mine")
    assert handle.state == "running"
    flag(f"{handle.run_id} go").set()
    assert (await soon(handle.result())).status == "completed"


# --- refusals ---------------------------------------------------------------------------------------------


async def test_a_refused_start_has_a_local_result_and_raises_where_it_is_accepted(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    runtime = local_runtime(driver=talks)
    handle = runtime.start("x", identity=identity, session_id=session_id)
    await flag(f"{handle.run_id} runs").wait()
    refused = runtime.start("y", identity=identity, session_id=session_id)
    for _ in range(2):
        with pytest.raises(SessionConflict):
            await refused.accepted()
    result = await refused.result()
    assert (result.status, result.final_cursor, result.run_id) == ("failed", 0, refused.run_id)
    await refused.cancel("changes nothing")
    assert list(_sequences(refused)) == []
    flag(f"{handle.run_id} go").set()
    assert (await soon(handle.result())).status == "completed"


def _sequences(handle: RunHandle) -> list[int]:
    return [event.sequence for event in handle.iter_events()]


async def test_an_unforeseen_failure_to_start_is_a_result_too(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    class Broken(MemoryEngine):
        async def execute(self, operations: object) -> list[object]:  # type: ignore[override]
            raise OSError("wires cut")

    runtime = local_runtime(driver=trivial, store=Broken())
    handle = runtime.start("x", identity=identity, session_id=session_id)
    with pytest.raises(OSError, match="wires cut"):
        await handle.accepted()
    result = await soon(handle.result())
    assert (result.status, code_of(result), why(result)) == (
        "failed",
        "execution_failed",
        "wires cut",
    )


def test_the_client_loop_serves_threads() -> None:
    async def answer() -> int:
        return 42

    assert blocking(on_client_loop(answer()), 10) == 42
