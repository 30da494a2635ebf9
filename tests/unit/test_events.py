"""Event payloads: what an application may emit, and what comes out of the log."""

from __future__ import annotations

from typing import Any

import pytest

from retinue import DriverOutput, ExecutionServices, Identity, RunRequest
from retinue.errors import InputError
from retinue.events import (
    MAX_DELTA,
    MAX_EVENT_BYTES,
    ChildFinished,
    ChildStarted,
    Custom,
    EventsLost,
    Payload,
    RunStarted,
    RunTerminal,
    TextDelta,
    check_payload,
    payload_type,
)
from retinue.results import RunResult
from tests.conftest import MakeLocalRuntime
from tests.support import all_events, driver, types

ROOM = MAX_EVENT_BYTES - len('{"type":"custom","name":"n","data":""}')


async def test_c112_a_payload_above_the_limit_raises(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    refused: list[InputError] = []

    @driver
    async def emits(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        services.emit(Custom("n", "x" * ROOM))
        for data in ("x" * (ROOM + 1), "é" * (ROOM // 2 + 1)):
            with pytest.raises(InputError) as error:
                services.emit(Custom("n", data))
            refused.append(error.value)
        return DriverOutput(text="ok")

    handle = local_runtime(driver=emits).start("x", identity=identity, session_id=session_id)
    assert (await handle.result()).status == "completed"
    assert types(await all_events(handle)) == ["run.started", "custom", "run.terminal"]
    assert [error.code for error in refused] == ["invalid_input"] * 2
    assert f"{MAX_EVENT_BYTES + 1} bytes" in str(refused[0])


RESULT = RunResult(status="completed", run_id="r", session_id="s", final_cursor=1)


@pytest.mark.parametrize(
    "payload",
    [RunStarted("x"), RunTerminal(RESULT), EventsLost(1, 2), ChildStarted("x"), ChildFinished("x", "failed")],
)
def test_only_the_runtime_tells_of_its_own_work(payload: Payload) -> None:
    with pytest.raises(InputError, match="emitted by the runtime only"):
        check_payload(payload)


@pytest.mark.parametrize(
    "value",
    [
        {"type": "no.such.event"},
        {"name": "n"},
        {"type": "custom"},
        {"type": "custom", "name": 5},
        {"type": "custom", "name": "n", "data": object()},
        Custom("n", object()),
        "text",
        None,
        Custom("n", "\ud800"),
        {"type": "text.delta", "text": "\ud800"},
    ],
)
def test_what_is_no_payload_is_refused(value: Any) -> None:
    with pytest.raises(InputError):
        check_payload(value)


def test_a_lone_surrogate_is_refused_by_name() -> None:
    with pytest.raises(InputError, match="lone surrogate"):
        check_payload(Custom("n", {"deep": ["\ud800"]}))


def test_a_payload_is_a_copy() -> None:
    data = {"list": [1]}
    for value in (Custom("n", data), {"type": "custom", "name": "n", "data": data}):
        payload = check_payload(value)
        data["list"].append(2)
        assert isinstance(payload, Custom)
        assert payload.data == {"list": [1]}
        data["list"].pop()


async def test_text_is_emitted_in_pieces(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    text = "\x00é\U0001f600" * MAX_DELTA

    @driver
    async def speaks(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        services.emit_text(text)
        return DriverOutput(text="ok")

    handle = local_runtime(driver=speaks).start("x", identity=identity, session_id=session_id)
    pieces = [
        event.payload.text for event in await all_events(handle) if isinstance(event.payload, TextDelta)
    ]
    assert [len(piece) for piece in pieces] == [MAX_DELTA] * 3
    assert "".join(pieces) == text


def test_types_are_the_contracts_names() -> None:
    assert payload_type(Custom("x")) == "custom"
    assert payload_type(EventsLost(1, 2)) == "events.lost"
