"""Event streams: filters by type and child, which never renumber."""

from __future__ import annotations

from typing import Any

import pytest

from retinue import DriverOutput, ExecutionServices, Identity, RunHandle, RunRequest
from retinue.errors import InputError
from retinue.event_streams import EVENT_TYPES
from retinue.events import Custom, Event, TextDelta
from tests.conftest import MakeLocalRuntime
from tests.support import driver, flag, soon, types


@driver
async def child(request: RunRequest, services: ExecutionServices) -> DriverOutput:
    services.emit(Custom("child", request.participant))
    return DriverOutput(text="done")


@driver
async def family(request: RunRequest, services: ExecutionServices) -> DriverOutput:
    """Events of its own between those of two delegates."""
    services.emit(Custom("own", 1))
    for name in ("left", "right"):
        delegate = await services.delegate(child, "x", name=name)
        await delegate.result()
        services.emit(TextDelta(name))
    services.emit(Custom("own", 2))
    return DriverOutput(text="ok")


@pytest.fixture
async def run(local_runtime: MakeLocalRuntime, identity: Identity, session_id: str) -> RunHandle:
    """A run that has ended, with its delegates."""
    handle = local_runtime(driver=family).start("x", identity=identity, session_id=session_id)
    await soon(handle.result())
    return handle


async def read(handle: RunHandle, after: int = 0, **only: Any) -> list[Event]:
    return [event async for event in handle.events(after, **only)]


async def test_types_are_picked_and_keep_their_numbers(run: RunHandle) -> None:
    whole = await read(run)
    assert [event.sequence for event in whole] == list(range(1, len(whole) + 1))
    picked = await read(run, types=["text.delta", "child.started"])
    wanted = {"text.delta", "child.started", "run.terminal"}
    assert picked == [event for event in whole if event.type in wanted]
    assert len(picked) == 5
    assert list(run.iter_events(types={"text.delta", "child.started"})) == picked
    # From the cursor of any of them one goes on with the rest.
    assert await read(run, picked[1].sequence, types=["text.delta", "child.started"]) == picked[2:]


async def test_the_terminal_event_always_comes(run: RunHandle) -> None:
    filters: list[dict[str, Any]] = [{"types": []}, {"types": ["input.requested"], "children": []}]
    for only in filters:
        assert types(await read(run, **only)) == ["run.terminal"]


async def test_children_are_left_out_or_picked_by_name(run: RunHandle) -> None:
    whole = await read(run)
    assert {event.participant for event in whole} == {"", "left", "right"}
    assert await read(run, children=True) == whole
    assert await read(run, children=False) == [event for event in whole if not event.participant]
    beside = await read(run, children=["left", "nobody"])
    assert beside == [event for event in whole if event.participant in ("", "left")]
    both = await read(run, children=["right"], types=["custom"])
    assert [event.payload.data for event in both[:-1] if isinstance(event.payload, Custom)] == [1, "right", 2]


async def test_the_cursor_moves_past_what_was_filtered_out(run: RunHandle) -> None:
    viewer = run.events(types=["text.delta"])
    assert viewer.cursor == 0
    first = await soon(viewer.__anext__())
    assert viewer.cursor == first.sequence > 1
    rest = [event async for event in viewer]
    assert types(rest) == ["text.delta", "run.terminal"]
    assert viewer.cursor == rest[-1].sequence == (await run.result()).final_cursor


@driver
async def chatters(request: RunRequest, services: ExecutionServices) -> DriverOutput:
    await flag(f"{request.run_id} go").wait()
    for number in range(1000):
        services.emit(Custom("noise", number))
    services.emit(TextDelta("signal"))
    return DriverOutput(text="ok")


async def test_a_live_viewer_waits_through_pages_of_what_it_does_not_want(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    runtime = local_runtime(driver=chatters, event_capacity=2000)
    handle = runtime.start("x", identity=identity, session_id=session_id)
    viewer = handle.events(types=["text.delta"])
    flag(f"{handle.run_id} go").set()
    event = await soon(viewer.__anext__())
    assert (event.sequence, event.payload) == (1002, TextDelta("signal"))


@pytest.mark.parametrize(
    ("only", "said"),
    [
        ({"types": ["text.delta", "text.delat"]}, "text.delat; there are .*custom.*text.delta"),
        ({"types": "custom"}, "types must be a list"),
        ({"types": [1]}, "types must be a list of names"),
        ({"types": 3}, "types must be a list"),
        ({"children": "left"}, "children must be a list"),
        ({"children": [b"left"]}, "children must be a list of names"),
        ({"children": None}, "children must be a list"),
    ],
)
async def test_wrong_filters_are_refused_at_once(run: RunHandle, only: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said) as wrong:
        run.events(**only)
    assert wrong.value.field == next(iter(only))
    with pytest.raises(InputError, match=said):
        run.iter_events(**only)


def test_every_payload_has_its_type() -> None:
    assert {"run.started", "run.terminal", "text.delta", "custom", "events.lost"} < set(EVENT_TYPES)
    assert len(set(EVENT_TYPES)) == len(EVENT_TYPES)
