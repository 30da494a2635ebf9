"""One run has one outcome: what is told is what the store has, also where its last write fails."""

from __future__ import annotations

from typing import Any

import pytest

from retinue import DriverOutput, ExecutionServices, Identity, Resource, RunRequest, RunResult, store_wait
from retinue.errors import LeaseLost, RetinueError, StoreUnavailable
from retinue.events import RunTerminal, decode_event
from retinue.storage.memory import MemoryEngine
from retinue.store import FinishRun, Store, StoreReply
from tests.conftest import MakeLocalRuntime
from tests.support import all_events, driver, soon


class Engine(MemoryEngine):
    """A memory store that refuses to change an outcome."""

    def __init__(self, error: RetinueError) -> None:
        super().__init__()
        self.error = error
        self.refused = 0

    async def execute(self, operations: Any) -> list[StoreReply]:
        if any(isinstance(operation, FinishRun) for operation in operations):
            self.refused += 1
            raise self.error
        return list(await super().execute(operations))


@driver
async def cannot_be_cleaned_up(request: RunRequest, services: ExecutionServices) -> DriverOutput:
    """Its result changes after the commit: a diagnostic is to be added."""

    def fail() -> None:
        raise OSError("stuck")

    async def make() -> Resource[int]:
        return Resource(value=1, dispose=fail)

    await services.resource("stuck", "run", make)
    return DriverOutput(text="done")


@pytest.mark.parametrize("error", [StoreUnavailable("down"), LeaseLost("another process has it")])
async def test_a_change_that_cannot_be_stored_is_not_told(
    local_runtime: MakeLocalRuntime,
    identity: Identity,
    session_id: str,
    monkeypatch: pytest.MonkeyPatch,
    error: RetinueError,
) -> None:
    monkeypatch.setattr(store_wait, "STORE_WAIT", 0.05)
    engine = Engine(error)
    handle = local_runtime(driver=cannot_be_cleaned_up, store=engine).start(
        "x", identity=identity, session_id=session_id
    )
    told = await soon(handle.result())
    assert engine.refused > 0
    assert (told.status, told.text, told.cleanup_diagnostics) == ("completed", "done", ())
    terminal = (await all_events(handle))[-1].payload
    assert isinstance(terminal, RunTerminal)
    assert terminal.result == told
    assert await stored(engine, identity, handle.run_id) == told


async def test_a_change_that_is_stored_is_told(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    engine = MemoryEngine()
    handle = local_runtime(driver=cannot_be_cleaned_up, store=engine).start(
        "x", identity=identity, session_id=session_id
    )
    told = await soon(handle.result())
    assert told.cleanup_diagnostics == ("resource_release_failed",)
    assert await stored(engine, identity, handle.run_id) == told


async def stored(engine: MemoryEngine, identity: Identity, run_id: str) -> RunResult:
    record = await Store(engine).read_run(identity, run_id)
    assert record is not None
    assert record.outcome is not None
    payload = decode_event(record.outcome).payload
    assert isinstance(payload, RunTerminal)
    return payload.result
