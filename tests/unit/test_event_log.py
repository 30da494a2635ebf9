"""The event log of a run: numbers without gap or duplicate, whoever reads, however slowly."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retinue import DriverOutput, ExecutionServices, Identity, RunRequest
from retinue.errors import EventGap, InputError, RetinueError
from retinue.event_log import EventLog, check_capacity, check_cursor
from retinue.events import Custom
from tests.conftest import MakeLocalRuntime
from tests.support import Flag, all_events, driver, event_of, soon, trivial


def body(number: int) -> bytes:
    return f"event {number}".encode()


def filled(count: int, capacity: int = 256, *, closed: bool = False) -> EventLog:
    log = EventLog(capacity)
    for number in range(1, count + 1):
        assert log.append(body(number), terminal=closed and number == count) == number
    return log


# --- the log alone ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("capacity", [1, 0, -1, 2.0, True, None])
def test_c107_a_window_holds_at_least_two_events(capacity: object) -> None:
    with pytest.raises(InputError):
        check_capacity(capacity)
    check_capacity(2)


@pytest.mark.parametrize("after", [-1, 1.5, True, "1", None])
def test_c107_a_cursor_that_is_no_count_is_refused(after: object) -> None:
    with pytest.raises(InputError):
        check_cursor(after)


async def test_c107_a_cursor_above_the_log_is_an_error_and_no_wait() -> None:
    log = filled(3)
    with pytest.raises(InputError, match="cursor 4 is ahead"):
        await soon(log.read(4, 10))


async def test_a_gap_names_the_earliest_cursor_that_still_works() -> None:
    log = filled(10, capacity=4)
    with pytest.raises(EventGap) as gap:
        await log.read(5, 10)
    assert gap.value.code == "event_gap"
    assert gap.value.earliest_cursor == 6
    assert await log.read(6, 10) == [(number, body(number)) for number in (7, 8, 9, 10)]
    assert await log.read(6, 2) == [(7, body(7)), (8, body(8))]


async def test_a_closed_log_ends_and_takes_nothing_more() -> None:
    log = filled(3, closed=True)
    assert await soon(log.read(3, 10)) == []
    with pytest.raises(RetinueError):
        log.append(body(4))
    assert log.last == 3


async def test_readers_wait_for_the_next_event() -> None:
    log = filled(1)
    readers = [asyncio.ensure_future(log.read(1, 10)) for _ in range(3)]
    await asyncio.sleep(0)
    assert not any(reader.done() for reader in readers)
    log.append(body(2))
    assert await soon(asyncio.gather(*readers)) == [[(2, body(2))]] * 3


async def test_a_reader_that_falls_out_goes_on_from_the_store() -> None:
    asked: list[tuple[int, int]] = []

    async def read_stored(after: int, limit: int) -> Sequence[tuple[int, bytes]]:
        asked.append((after, limit))
        return [(number, body(number)) for number in range(after + 1, 11)][:limit] if after >= 2 else []

    log = EventLog(4, read_stored)
    for number in range(1, 11):
        log.append(body(number))
    assert await log.read(3, 2) == [(4, body(4)), (5, body(5))]
    assert await log.read(8, 5) == [(9, body(9)), (10, body(10))]
    assert asked == [(3, 2)]  # the window answers by itself
    with pytest.raises(EventGap) as gap:
        await log.read(1, 5)
    assert gap.value.earliest_cursor == 6


@settings(deadline=None, max_examples=60)
@given(
    capacity=st.integers(2, 9),
    bursts=st.lists(st.integers(1, 12), min_size=1, max_size=12),
    readers=st.lists(st.tuples(st.integers(0, 20), st.integers(1, 7), st.integers(0, 3)), max_size=5),
)
def test_every_reader_sees_each_event_once_or_is_told_of_the_gap(
    capacity: int, bursts: list[int], readers: list[tuple[int, int, int]]
) -> None:
    asyncio.run(_read_concurrently(capacity, bursts, readers))


async def _read_concurrently(capacity: int, bursts: list[int], readers: list[tuple[int, int, int]]) -> None:
    total = sum(bursts)
    log = EventLog(capacity)

    gaps: list[tuple[int, int, int]] = []

    refusals: list[tuple[int, int]] = []

    async def follow(after: int, limit: int, laziness: int) -> None:
        cursor = after
        while True:
            for _ in range(laziness):
                await asyncio.sleep(0)
            newest = log.last
            try:
                page = await log.read(cursor, limit)
            except InputError:
                refusals.append((cursor, newest))
                return
            except EventGap as gap:
                earliest = gap.earliest_cursor
                gaps.append((cursor, earliest, log.earliest_cursor))
                page = await log.read(earliest, limit)
                cursor = earliest
            if not page:
                assert log.closed
                assert cursor == total
                return
            assert len(page) <= limit
            for number, data in page:
                assert number == cursor + 1
                assert data == body(number)
                cursor = number

    async def write() -> None:
        number = 0
        for burst in bursts:
            for _ in range(burst):
                number += 1
                log.append(body(number), terminal=number == total)
            await asyncio.sleep(0)

    await soon(asyncio.gather(write(), *(follow(*reader) for reader in readers)))
    assert all(cursor < earliest == really for cursor, earliest, really in gaps)
    assert all(cursor > newest for cursor, newest in refusals)


# --- through a handle -------------------------------------------------------------------------------------


def chatter(go: Flag, count: int) -> object:
    @driver
    async def chats(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        await go.wait()
        for number in range(count):
            services.emit(Custom("said", number))
        return DriverOutput(text="ok")

    return chats


@pytest.mark.parametrize("after", [-1, 1.5])
async def test_c107_handles_check_cursors_at_once(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str, after: int
) -> None:
    handle = local_runtime(driver=trivial).start("x", identity=identity, session_id=session_id)
    with pytest.raises(InputError):
        handle.events(after=after)
    with pytest.raises(InputError):
        handle.iter_events(after=after)
    await handle.result()


async def test_c107_a_handle_above_the_log_fails_at_the_first_read(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    handle = local_runtime(driver=trivial).start("x", identity=identity, session_id=session_id)
    result = await handle.result()
    with pytest.raises(InputError):
        await all_events(handle, after=result.final_cursor + 1)
    assert await all_events(handle, after=result.final_cursor) == []


def test_c107_a_runtime_refuses_a_window_of_one() -> None:
    from retinue import Runtime

    with pytest.raises(InputError):
        Runtime(driver=trivial, event_capacity=1, backend="inprocess")


async def test_c108_pending_reads_are_answered_in_order_and_a_closed_viewer_ends_them(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    started, go, finish = Flag(), Flag(), Flag()

    @driver
    async def says_two(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        started.set()
        await go.wait()
        services.emit(Custom("one"))
        services.emit(Custom("two"))
        await finish.wait()
        return DriverOutput(text="ok")

    handle = local_runtime(driver=says_two).start("x", identity=identity, session_id=session_id)
    await started.wait()
    viewer = handle.events(after=1)
    reads = [asyncio.ensure_future(viewer.__anext__()) for _ in range(2)]
    go.set()
    first, second = await soon(asyncio.gather(*reads))
    assert [(event.sequence, event.payload.name) for event in (first, second)] == [(2, "one"), (3, "two")]
    assert viewer.cursor == 3
    pending = [asyncio.ensure_future(viewer.__anext__()) for _ in range(2)]
    await asyncio.sleep(0.01)
    assert not any(read.done() for read in pending)
    await viewer.aclose()
    ended = await soon(asyncio.gather(*pending, return_exceptions=True))
    assert [type(error) for error in ended] == [StopAsyncIteration] * 2
    with pytest.raises(StopAsyncIteration):
        await viewer.__anext__()
    assert handle.state == "running"
    finish.set()
    assert (await soon(handle.result())).status == "completed"


async def test_a_slow_viewer_gets_a_gap_in_the_middle_and_can_go_on_from_it(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    go = Flag()
    runtime = local_runtime(driver=chatter(go, 20), event_capacity=4)
    handle = runtime.start("x", identity=identity, session_id=session_id)
    viewer = handle.events()
    assert (await soon(viewer.__anext__())).sequence == 1
    go.set()
    result = await soon(handle.result())
    assert result.final_cursor == 22
    with pytest.raises(EventGap) as gap:
        await viewer.__anext__()
    assert gap.value.earliest_cursor == 18
    with pytest.raises(StopAsyncIteration):
        await viewer.__anext__()
    rest = await all_events(handle, after=gap.value.earliest_cursor)
    assert [event.sequence for event in rest] == [19, 20, 21, 22]


async def test_a_read_that_was_given_up_loses_no_event(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    go = Flag()
    handle = local_runtime(driver=chatter(go, 5)).start("x", identity=identity, session_id=session_id)
    viewer = handle.events()
    seen = [await soon(viewer.__anext__())]
    for _ in range(3):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(viewer.__anext__(), 0.01)
    go.set()
    seen += [event async for event in viewer]
    assert [event.sequence for event in seen] == [1, 2, 3, 4, 5, 6, 7]


async def test_viewers_do_not_disturb_each_other(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    go = Flag()
    handle = local_runtime(driver=chatter(go, 50)).start("x", identity=identity, session_id=session_id)
    await event_of(handle, "run.started")
    viewers = [asyncio.ensure_future(all_events(handle, after=after)) for after in (0, 0, 1)]
    go.set()
    whole, again, later = await soon(asyncio.gather(*viewers))
    assert [event.sequence for event in whole] == list(range(1, 53))
    assert again == whole
    assert later == whole[1:]
