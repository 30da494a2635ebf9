"""Events that are written behind: numbered only within reserved blocks, readable at every moment."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from retinue import store_wait
from retinue.errors import LeaseLost, RetinueError, StoreUnavailable
from retinue.events import Custom, InputRequest, InputRequested, decode_event
from retinue.ids import Identity, SessionAddress
from retinue.results import RunResult
from retinue.run_events import EventSource, RunEvents
from retinue.storage import this_process
from retinue.storage.memory import MemoryEngine
from retinue.store import EVENT_BLOCK, AppendEvents, LeaseGrant, RunRecord, Store, StoreReply
from tests.support import Flag, soon

WHO = Identity(tenant_id="a", user_id="b")


class Engine(MemoryEngine):
    """A memory store whose appends can be held back, or fail."""

    def __init__(self) -> None:
        super().__init__()
        self.hold: Flag | None = None
        self.appending = Flag()
        self.fail: RetinueError | None = None
        self.failed = 0
        self.failed_often = Flag()
        self.reserved: list[int | None] = []

    async def execute(self, operations: Any) -> list[StoreReply]:
        for operation in operations:
            if isinstance(operation, AppendEvents):
                self.appending.set()
                if self.hold is not None:
                    await self.hold.wait()
                if self.fail is not None:
                    self.failed += 1
                    if self.failed == 4:  # more than one try with all its repeats
                        self.failed_often.set()
                    raise self.fail
                self.reserved.append(operation.reserve_to)
        return list(await super().execute(operations))


class World:
    """One run with its record in a store."""

    def __init__(self, engine: Engine, grant: LeaseGrant, capacity: int) -> None:
        self.engine = engine
        self.store = Store(engine)
        self.failures: list[RetinueError] = []
        self.events = RunEvents(
            session_id="s",
            root_run_id="r",
            source=EventSource(run_id="r", attempt_id="attempt"),
            capacity=capacity,
            store=self.store,
            lease=grant.lease,
            on_failure=self.failures.append,
        )

    async def stored(self) -> list[int]:
        return [event.sequence for event in await self.store.read_events(WHO, "r", 0, 10_000)]


async def world(capacity: int = 256) -> World:
    engine = Engine()
    store = Store(engine)
    address = SessionAddress(store_id=store.store_id, tenant_id="a", user_id="b", session_id="s")
    grant = await store.acquire(address, this_process("host", "test"))
    record = RunRecord(
        tenant_id="a",
        user_id="b",
        session_id="s",
        run_id="r",
        root_run_id="r",
        app="app",
        input=b'"x"',
        created_at=0.0,
    )
    await store.open_run(grant.lease, record)
    return World(engine, grant, capacity)


async def emitted(here: World, count: int) -> None:
    for number in range(count):
        here.events.emit(Custom("e", number))


async def test_events_are_written_behind_and_the_rest_is_the_commits() -> None:
    here = await world()
    await emitted(here, 3)
    await here.engine.appending.wait()
    await here.events.pause()
    assert await here.stored() == [1, 2, 3]
    assert len(here.events.unstored) == 0
    await emitted(here, 2)
    await here.events.pause()
    rest = here.events.unstored
    assert [item.sequence for item in rest] == [4, 5]
    here.events.stored(here.events.unstored)
    assert len(here.events.unstored) == 0


async def test_an_event_on_its_way_to_the_store_can_be_read() -> None:
    """A reader that fell out of the window must not find a gap where a write is under way."""
    here = await world(capacity=2)
    here.engine.hold = Flag()
    await emitted(here, 5)
    await here.engine.appending.wait()
    await emitted(here, 5)
    page = await soon(here.events.log.read(0, 100))
    assert [number for number, _ in page] == list(range(1, 11))
    assert [decode_event(data).payload for _, data in page] == [Custom("e", n % 5) for n in range(10)]
    here.engine.hold.set()
    await here.events.pause()
    page = await soon(here.events.log.read(0, 100))
    assert [number for number, _ in page] == [1, 2, 3, 4, 5]  # what the store has, then what it has not
    page = await soon(here.events.log.read(5, 100))
    assert [number for number, _ in page] == [6, 7, 8, 9, 10]


async def test_numbers_stay_inside_the_reserved_block_and_the_last_one_is_kept_for_the_end() -> None:
    here = await world(capacity=2)
    here.engine.hold = Flag()
    await emitted(here, EVENT_BLOCK + 100)
    assert here.events.next_number == EVENT_BLOCK  # the terminal event can always be numbered
    assert not here.events.has_room
    waiting = asyncio.ensure_future(here.events.room())
    await here.engine.appending.wait()
    assert not waiting.done()
    here.engine.hold.set()
    await soon(waiting)
    assert here.events.log.last == EVENT_BLOCK + 100
    record = await here.store.read_run(WHO, "r")
    assert record is not None
    assert record.reserved_to == 2 * EVENT_BLOCK
    await here.events.pause()
    here.events.stored(())
    numbers = await here.stored()
    assert numbers == list(range(1, len(numbers) + 1))
    page = await here.events.log.read(0, 5000)
    assert [number for number, _ in page][:3] == [1, 2, 3]


async def test_the_next_block_is_reserved_at_half_use() -> None:
    here = await world()
    await emitted(here, EVENT_BLOCK // 2)
    await here.events.pause()
    assert [reserve for reserve in here.engine.reserved if reserve] == []
    here.engine.appending = Flag()
    await emitted(here, 1)
    await here.engine.appending.wait()
    await here.events.pause()
    assert [reserve for reserve in here.engine.reserved if reserve] == [2 * EVENT_BLOCK]
    assert here.events.has_room


async def test_a_store_that_answers_again_gets_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_wait, "STORE_WAIT", 0.05)
    here = await world()
    here.engine.fail = StoreUnavailable("down")
    await emitted(here, 3)
    await here.engine.failed_often.wait()
    assert here.failures == []
    here.engine.fail, here.engine.appending = None, Flag()
    await here.engine.appending.wait()
    await here.events.pause()
    assert await here.stored() == [1, 2, 3]


async def test_a_run_that_needs_numbers_does_not_wait_for_a_dead_store_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(store_wait, "STORE_WAIT", 0.05)
    here = await world()
    here.engine.fail = StoreUnavailable("down")
    await emitted(here, EVENT_BLOCK + 5)
    assert not here.events.has_room
    await soon(here.events.room())
    assert [error.code for error in here.failures] == ["store_unavailable"]
    assert here.events.next_number == EVENT_BLOCK
    await here.events.pause()


@pytest.mark.parametrize("count", [3, EVENT_BLOCK + 5])
async def test_a_lost_lease_is_told_once(count: int) -> None:
    here = await world()
    here.engine.fail = LeaseLost("fenced")
    told = Flag()
    here.events._on_failure = lambda error: told.set(error.code)
    await emitted(here, count)
    assert await told.wait() == "lease_lost"
    await soon(here.events.room())
    await soon(here.events.pause())


async def test_the_terminal_event_closes_the_log() -> None:
    here = await world()
    await emitted(here, 2)
    result = RunResult(status="completed", run_id="r", session_id="s", final_cursor=here.events.next_number)
    await here.events.pause()
    here.events.terminal(here.events.encode_terminal(result))
    here.events.emit(Custom("late"))
    assert here.events.log.last == 3
    page = await here.events.log.read(2, 10)
    assert [(number, decode_event(data).type) for number, data in page] == [(3, "run.terminal")]


def _question(number: int) -> InputRequested:
    return InputRequested(InputRequest(id=f"r:{number}", run_id="r", question="Sure?"))


async def test_a_question_is_stored_before_anybody_sees_it_and_order_is_kept() -> None:
    it = await world()
    it.engine.hold = Flag()
    it.events.emit(Custom("before"))
    it.events.emit(_question(2))
    it.events.emit(Custom("after"))
    assert it.events.log.last == 1
    assert not it.events.has_room
    await it.engine.appending.wait()
    reading = asyncio.ensure_future(it.events.log.read(1, 10))
    await asyncio.sleep(0)
    assert not reading.done()
    it.engine.hold.set()
    await soon(it.events.room())
    assert 2 in await it.stored()
    page = await soon(reading)
    assert [decode_event(body).type for _, body in page][:1] == ["input.requested"]
    assert [decode_event(body).type for _, body in await it.events.log.read(0, 10)] == [
        "custom", "input.requested", "custom",
    ]  # fmt: skip
    await it.events.pause()


async def test_a_question_that_cannot_be_stored_is_shown_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(store_wait, "STORE_WAIT", 0.05)
    it = await world()
    it.engine.fail = StoreUnavailable("down")
    it.events.emit(_question(1))
    it.events.emit(Custom("after"))
    await soon(it.events.room())
    assert it.events.log.last == 2
    assert [event.sequence for event in it.events.unstored] == [1, 2]  # the commit takes them along
    await it.events.pause()
