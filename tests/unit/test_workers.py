"""Threads and loops of user code: what happens there stays there."""

from __future__ import annotations

import asyncio
import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar

import pytest

from retinue.workers import LoopThread, Workers, in_thread
from tests.support import soon

name: ContextVar[str] = ContextVar("name", default="nobody")


async def _identity() -> threading.Thread:
    return threading.current_thread()


@pytest.mark.parametrize("error", [SystemExit(1), KeyboardInterrupt()])
def test_a_loop_survives_a_task_that_would_end_the_interpreter(
    error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    loop = LoopThread("test-loop")

    async def leave() -> None:
        raise error

    before = loop.submit(_identity()).result(5)
    left = loop.submit(leave())
    with pytest.raises(type(error)):
        left.result(5)
    assert loop.submit(_identity()).result(5) is before
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    loop.stop()
    assert not before.is_alive()


def test_stopping_cancels_what_is_left_and_a_second_time_changes_nothing() -> None:
    loop = LoopThread("test-loop")
    cancelled = threading.Event()

    async def wait() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    loop.submit(wait())
    loop.submit(_identity()).result(5)
    loop.stop()
    assert cancelled.is_set()
    assert loop.loop.is_closed()
    loop.stop()


async def test_a_loop_that_needs_the_callers_loop_can_be_stopped_from_there() -> None:
    workers = Workers("test")
    here = asyncio.get_running_loop()
    answered: list[bool] = []

    async def needs_an_answer_on_its_way_out() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            asked: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
            loop = asyncio.get_running_loop()
            here.call_soon_threadsafe(lambda: loop.call_soon_threadsafe(asked.set_result, True))
            answered.append(await asked)

    workers.submit(needs_an_answer_on_its_way_out())
    await asyncio.wrap_future(workers.submit(_identity()))
    await soon(workers.stopped())
    assert answered == [True]
    assert workers.loop.is_closed()
    await workers.stopped()


async def test_a_thread_gets_the_context_and_gives_its_result_or_error() -> None:
    with ThreadPoolExecutor(1) as threads:
        name.set("ann")
        assert await in_thread(threads, name.get) == "ann"
        with pytest.raises(ZeroDivisionError):
            await in_thread(threads, lambda: 1 // 0)


async def test_a_cancelled_wait_for_a_thread_ends_when_the_thread_does() -> None:
    began, go = threading.Event(), threading.Event()

    def work() -> str:
        began.set()
        go.wait(10)
        raise ValueError("nobody wants to know")

    with ThreadPoolExecutor(1) as threads:
        waiting = asyncio.ensure_future(in_thread(threads, work))
        queued = asyncio.ensure_future(in_thread(threads, began.clear))
        await asyncio.to_thread(began.wait, 10)
        for _ in range(3):  # impatience does not help
            waiting.cancel()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        assert not waiting.done()
        queued.cancel()
        with pytest.raises(asyncio.CancelledError):
            await soon(queued)  # it had not begun, and never will
        go.set()
        with pytest.raises(asyncio.CancelledError):
            await soon(waiting)
        assert began.is_set()
