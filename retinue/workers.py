"""Threads for user code: one event loop for drivers, models and async tools, a pool for sync tools.

User code never runs on the loop that owns state; what crosses is a message.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import contextvars
import logging
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from retinue.tool_process import LocalTasks
from retinue.tool_tasks import TaskRunner

T = TypeVar("T")

logger = logging.getLogger(__name__)

TOOL_THREADS = 32
"""Sync tools of one process that run at once."""


class LoopThread:
    """An event loop in a daemon thread of its own."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._stopping = False
        self._ended: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._submitted: set[concurrent.futures.Future[Any]] = set()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        while not self._stopping:
            try:
                self.loop.run_forever()
            except (SystemExit, KeyboardInterrupt):
                # asyncio lets these out of the loop as well as into the task's result; a tool that calls
                # sys.exit() must not take everybody else's work with it.
                logger.exception("a task on the loop %s raised", self._thread.name)
        self._ended.set_result(None)

    def submit(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Run a coroutine there; cancelling the future cancels it."""
        submitted = asyncio.run_coroutine_threadsafe(work, self.loop)
        # A loop refers to its tasks weakly: one that nobody waits for would be collected half done.
        self._submitted.add(submitted)
        submitted.add_done_callback(self._submitted.discard)
        return submitted

    @property
    def is_current(self) -> bool:
        return threading.current_thread() is self._thread

    def stop(self, timeout: float = 5.0) -> None:
        """Cancel what is left on the loop and end the thread; waits at most ``timeout`` seconds."""
        if not self._thread.is_alive():
            return
        if not self.is_current:
            ending = self.submit(_cancel_all())
            with contextlib.suppress(TimeoutError, concurrent.futures.CancelledError):
                ending.result(timeout)
        self._stop_running()
        if not self.is_current:
            self._thread.join(timeout)
            if not self._thread.is_alive():
                self.loop.close()

    async def stopped(self, timeout: float = 5.0) -> None:
        """:meth:`stop` from a coroutine of another loop, which goes on meanwhile."""
        if not self._thread.is_alive():
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await asyncio.wrap_future(self.submit(_cancel_all()))
        self._stop_running()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await asyncio.wrap_future(self._ended)
                self._thread.join()
                self.loop.close()

    def _stop_running(self) -> None:
        self._stopping = True
        self.loop.call_soon_threadsafe(self.loop.stop)


async def _cancel_all() -> None:
    tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class Workers:
    """Where one process runs user code.

    Args:
        name: of the loop's thread, and of the others with ``-tool`` behind it.
        tasks: where tools with ``run_in="task"`` run: processes of this machine by default.
    """

    def __init__(self, name: str = "retinue-user", *, tasks: TaskRunner | None = None) -> None:
        self.tasks: TaskRunner = tasks or LocalTasks()
        self._loop_thread = LoopThread(name)
        self.threads = concurrent.futures.ThreadPoolExecutor(TOOL_THREADS, thread_name_prefix=f"{name}-tool")

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        return self._loop_thread.loop

    def submit(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        return self._loop_thread.submit(work)

    def stop(self) -> None:
        """Cancel what runs and end the threads."""
        self._loop_thread.stop()
        self.threads.shutdown(wait=False, cancel_futures=True)

    async def stopped(self) -> None:
        """:meth:`stop` from a coroutine of another loop, which goes on meanwhile."""
        await self._loop_thread.stopped()
        self.threads.shutdown(wait=False, cancel_futures=True)


def _without_stop_iteration(function: Callable[[], T]) -> T:
    try:
        return function()
    except StopIteration as error:
        raise RuntimeError("StopIteration was raised: a next() without a default, perhaps") from error


async def in_thread(threads: concurrent.futures.Executor, function: Callable[[], T]) -> T:
    """Run a blocking function in a thread; a cancellation waits until it has returned.

    Raises:
        RuntimeError: the function raised ``StopIteration``, which no future and no coroutine can carry.
    """
    work = threads.submit(contextvars.copy_context().run, _without_stop_iteration, function)
    waiting = asyncio.wrap_future(work)
    try:
        return await asyncio.shield(waiting)
    except asyncio.CancelledError:
        # What has not begun never will; a thread that runs cannot be stopped from outside.
        if not work.cancel():
            while not waiting.done():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait([waiting])
            waiting.exception()
        raise
