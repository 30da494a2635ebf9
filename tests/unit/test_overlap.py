"""What a start does where another run has the session (``if_busy``)."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from retinue import (
    DriverCapabilities,
    DriverOutput,
    ExecutionServices,
    Grants,
    Identity,
    RunHandle,
    RunRequest,
    Runtime,
)
from retinue.errors import InputError, Overloaded, SessionConflict, Unsupported
from retinue.messages import user
from retinue.run_queue import MAX_QUEUED_RUNS
from retinue.storage.memory import MemoryEngine
from tests.conftest import MakeLocalRuntime
from tests.support import FunctionDriver, code_of, driver, flag, nothing_is_left, soon, user_text


async def _held(request: RunRequest, services: ExecutionServices) -> DriverOutput:
    """Keeps its input in history, says that it runs, and goes on when it is let go."""
    services.append([user(request.input)])
    flag(f"{request.run_id} runs").set()
    await flag(f"{request.run_id} go").wait()
    steers = []
    while (content := await services.take_input()) is not None:
        steers.append(user_text(content))
    return DriverOutput(text=" ".join([user_text(request.input), *steers]))


held = FunctionDriver(_held, capabilities=DriverCapabilities(controls=("steer",)))


class Running:
    """A session with a run in it."""

    def __init__(self, runtime: Runtime, identity: Identity, session_id: str) -> None:
        self.runtime = runtime
        self.identity = identity
        self.session_id = session_id

    def start(self, text: str, **options: object) -> RunHandle:
        return self.runtime.start(
            text,
            identity=self.identity,
            session_id=self.session_id,
            run_id=f"{self.session_id} {text}",
            **options,  # type: ignore[arg-type]
        )

    async def running(self, text: str) -> RunHandle:
        handle = self.start(text)
        await self.until_running(handle)
        return handle

    async def until_running(self, handle: RunHandle) -> None:
        await flag(f"{handle.run_id} runs").wait()

    def let_go(self, handle: RunHandle) -> None:
        flag(f"{handle.run_id} go").set()

    async def history(self) -> list[str]:
        snapshot = await self.runtime.sessions.latest(self.identity, self.session_id)
        return [message.text for message in snapshot.history]


@pytest.fixture
def session(local_runtime: MakeLocalRuntime, identity: Identity, session_id: str) -> Running:
    return Running(local_runtime(driver=held), identity, session_id)


async def test_reject_names_the_run_in_the_way(session: Running) -> None:
    first = await session.running("first")
    for options in ({}, {"if_busy": "reject"}):
        second = session.start("second", **options)
        with pytest.raises(SessionConflict) as refused:
            await soon(second.accepted())
        assert refused.value.run_id == first.run_id
        assert code_of(await soon(second.result())) == "session_conflict"
    session.let_go(first)
    assert (await soon(first.result())).status == "completed"


async def test_queued_runs_begin_in_order_and_know_their_places(session: Running) -> None:
    first = await session.running("first")
    waiting = [session.start(f"later {number}", if_busy="queue") for number in range(3)]
    for number, handle in enumerate(waiting):
        await soon(handle.accepted())
        assert (handle.state, handle.queue_position) == ("queued", number + 1)
    session.let_go(first)
    for handle in waiting:
        await session.until_running(handle)
        assert handle.queue_position is None
        session.let_go(handle)
    results = [await soon(handle.result()) for handle in (first, *waiting)]
    assert [result.text for result in results] == ["first", "later 0", "later 1", "later 2"]
    assert await session.history() == ["first", "later 0", "later 1", "later 2"]
    await nothing_is_left(session.runtime, waiting[-1])


async def test_a_queue_is_bounded(session: Running) -> None:
    first = await session.running("first")
    waiting = [session.start(f"later {number}", if_busy="queue") for number in range(MAX_QUEUED_RUNS)]
    await asyncio.gather(*(soon(handle.accepted()) for handle in waiting))
    with pytest.raises(Overloaded) as refused:
        await soon(session.start("too many", if_busy="queue").accepted())
    assert (refused.value.reason, refused.value.run_id) == ("queue_full", first.run_id)
    for handle in waiting:
        await handle.cancel()
    session.let_go(first)
    await soon(first.result())


async def test_starts_of_one_moment_are_queued_in_order_and_bounded(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str, tmp_path: Path
) -> None:
    """With a store that takes a moment to answer: places are given before it does."""
    session = Running(
        local_runtime(driver=held, store=f"sqlite:///{tmp_path / 'x.db'}"), identity, session_id
    )
    first = await session.running("first")
    many = [session.start(f"later {number}", if_busy="queue") for number in range(MAX_QUEUED_RUNS + 8)]
    outcomes = await asyncio.gather(*(soon(handle.accepted()) for handle in many), return_exceptions=True)
    refused = [number for number, outcome in enumerate(outcomes) if isinstance(outcome, Overloaded)]
    assert refused == list(range(MAX_QUEUED_RUNS, MAX_QUEUED_RUNS + 8))
    session.let_go(first)
    for handle in many[:MAX_QUEUED_RUNS]:
        await session.until_running(handle)
        session.let_go(handle)
        await soon(handle.result())
    assert await session.history() == ["first", *(f"later {number}" for number in range(MAX_QUEUED_RUNS))]


async def test_a_queued_run_that_is_cancelled_leaves_no_trace_in_the_session(session: Running) -> None:
    first = await session.running("first")
    second = session.start("second", if_busy="queue")
    third = session.start("third", if_busy="queue")
    await soon(third.accepted())
    receipt = await second.cancel("not needed")
    assert (receipt.action, receipt.outcome) == ("cancel", "delivered")
    result = await soon(second.result())
    assert (result.status, code_of(result)) == ("cancelled", "cancelled")
    assert not flag(f"{second.run_id} runs").is_set
    session.let_go(first)
    await session.until_running(third)
    session.let_go(third)
    await soon(third.result())
    assert await session.history() == ["first", "third"]


async def test_the_deadline_counts_in_the_queue_and_the_active_clock_does_not(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    session = Running(local_runtime(driver=held, active_timeout=0.8), identity, session_id)
    first = await session.running("first")
    late = session.start("late", if_busy="queue", deadline=time.time() + 0.1)
    second = session.start("second", if_busy="queue")
    assert code_of(await soon(late.result())) == "deadline_exceeded"
    assert first.state == "running"
    assert code_of(await soon(first.result())) == "active_timeout"
    await session.until_running(second)
    session.let_go(second)
    assert (await soon(second.result())).status == "completed"


async def test_steer_gives_the_input_to_the_run_and_follows_it(session: Running) -> None:
    first = await session.running("first")
    again = [session.start("and faster", if_busy="steer") for _ in range(2)]  # a repeat steers once
    for handle in again:
        await soon(handle.accepted())
        assert handle.run_id == first.run_id
    session.let_go(first)
    assert (await soon(again[1].result())).text == "first and faster"


async def test_steer_starts_where_nothing_runs(session: Running) -> None:
    handle = session.start("alone", if_busy="steer")
    await session.until_running(handle)
    session.let_go(handle)
    assert (await soon(handle.result())).text == "alone"


async def test_steer_is_refused_where_the_driver_takes_none(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    runtime = local_runtime(driver=FunctionDriver(_held))
    session = Running(runtime, identity, session_id)
    first = await session.running("first")
    with pytest.raises(Unsupported):
        await soon(session.start("second", if_busy="steer").accepted())
    session.let_go(first)
    await soon(first.result())


async def test_steer_cannot_narrow_the_run_that_is_there(session: Running) -> None:
    first = await session.running("first")
    narrowing: list[dict[str, object]] = [
        {"grants": Grants()},
        {"deadline": time.time() + 60},
        {"run_mode": "plan"},
    ]
    for number, options in enumerate(narrowing):
        with pytest.raises(InputError) as refused:
            await soon(session.start(f"other {number}", if_busy="steer", **options).accepted())
        assert (refused.value.field, refused.value.run_id) == ("if_busy", first.run_id)
    session.let_go(first)
    assert (await soon(first.result())).text == "first"


async def test_a_queued_run_takes_no_input_before_it_works(session: Running) -> None:
    first = await session.running("first")
    later = session.start("later", if_busy="queue")
    await soon(later.accepted())
    with pytest.raises(Unsupported) as refused:
        await later.send("too early", mode="steer")
    assert "queued" in refused.value.message
    session.let_go(first)
    await session.until_running(later)
    assert (await later.send("in time", mode="steer")).outcome == "deferred"
    session.let_go(later)
    assert (await soon(later.result())).text == "later in time"


async def test_cancel_takes_the_place_of_the_run_and_of_nobody_else(session: Running) -> None:
    first = await session.running("first")
    waiting = session.start("waiting", if_busy="queue")
    await soon(waiting.accepted())
    urgent = session.start("urgent", if_busy="cancel")
    result = await soon(first.result())
    assert (result.status, code_of(result)) == ("cancelled", "cancelled")
    await session.until_running(urgent)
    assert waiting.state == "queued"
    for handle in (urgent, waiting):
        session.let_go(handle)
        assert (await soon(handle.result())).status == "completed"
    assert await session.history() == ["first", "urgent", "waiting"]


async def test_anything_else_is_refused_at_once(session: Running) -> None:
    with pytest.raises(InputError) as refused:
        session.start("x", if_busy="wait")
    assert refused.value.field == "if_busy"


async def test_a_repeated_start_is_queued_once(session: Running) -> None:
    first = await session.running("first")
    again = [session.start("later", if_busy="queue") for _ in range(3)]
    await asyncio.gather(*(soon(handle.accepted()) for handle in again))
    session.let_go(first)
    await session.until_running(again[0])
    session.let_go(again[0])
    texts = [(await soon(handle.result())).text for handle in again]
    assert texts == ["later"] * 3
    assert await session.history() == ["first", "later"]


async def test_an_exclusive_read_conflicts_with_a_queue(session: Running) -> None:
    first = await session.running("first")
    later = session.start("later", if_busy="queue")
    await soon(later.accepted())
    with pytest.raises(SessionConflict):
        await session.runtime.sessions.read(session.identity, session.session_id)
    session.let_go(first)
    session.let_go(later)
    await soon(later.result())
    await session.runtime.sessions.read(session.identity, session.session_id)


@driver
async def _quick(request: RunRequest, services: ExecutionServices) -> DriverOutput:
    return DriverOutput(text="quick")


async def test_a_queue_outlives_its_process_where_its_app_does_not(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    """Another app takes the session over: what waited for the first ends interrupted, and says why."""
    engine = MemoryEngine()
    runtime = local_runtime(driver=held, store=engine)
    session = Running(runtime, identity, session_id)
    first = await session.running("first")
    later = session.start("later", if_busy="queue")
    await soon(later.accepted())
    closing = asyncio.ensure_future(asyncio.to_thread(runtime.close))
    result = await soon(first.result())
    assert result.status == "cancelled"
    await soon(closing)
    other = local_runtime(driver=_quick, store=engine)
    assert (await soon(other.run("x", identity=identity, session_id=session_id))).text == "quick"
    ended = await soon(other.attach(later.run_id, identity=identity).result())
    assert (ended.status, code_of(ended)) == ("failed", "interrupted")
    assert (await other.sessions.latest(identity, session_id)).replayable is False  # the cancelled first run
