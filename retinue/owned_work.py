"""Work that an execution owns: nothing that a driver started outlives it (contract section 5).

Calls of models, tools and delegates are registered by themselves, and so is what a driver registers. Work
that is still pending when the driver returns is waited for, and fails it should it fail; when the driver
raises or is cancelled, it is cancelled too.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from retinue.errors import InputError, RetinueError

T = TypeVar("T")


class OwnedWork:
    """The pending work of one execution. Belongs to its user loop.

    Args:
        at_end: called once, when the execution has ended and nothing of it runs any more.
    """

    def __init__(self, at_end: Callable[[], None] = lambda: None) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._expected: dict[object, str] = {}
        self._at_end = at_end
        self._ended = False

    def run(self, work: Awaitable[T]) -> asyncio.Task[T]:
        """Begin ``work`` and own it; awaiting the task gives its result, cancelling the wait cancels it."""
        if self._ended and inspect.iscoroutine(work):
            work.close()
        self.check_running()
        task: asyncio.Task[T] = asyncio.create_task(work if inspect.iscoroutine(work) else _awaited(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def check_running(self) -> None:
        """Raise ``InputError`` (``run_finished``) once :meth:`end` was called."""
        if self._ended:
            raise InputError("the run has ended; its services cannot be used any more", code="run_finished")

    def expect(self, thing: object, what: str) -> None:
        """The driver must be through with this, such as a stream, before it returns."""
        self._expected[thing] = what

    def finish(self, thing: object) -> None:
        """The driver is through with what was expected; it may have been before."""
        self._expected.pop(thing, None)

    async def settle(self) -> None:
        """The driver has returned: wait until all of it is done; raise the first failure.

        Raises:
            RetinueError: it returned before it was through with something that was expected of it.
        """
        at_return = dict(self._expected)
        await asyncio.sleep(0)  # tasks that the driver has just made come to register their calls
        while pending := list(self._tasks):
            await asyncio.wait(pending)
            for task in pending:
                error = None if task.cancelled() else task.exception()
                # A delegate that its parent cancelled is no failure of the parent.
                if error is not None and not (isinstance(error, RetinueError) and error.code == "cancelled"):
                    raise error
        if unfinished := [*at_return.values(), *self._expected.values()]:
            raise RetinueError(
                f"the driver returned while {unfinished[0]} was unfinished; iterate it to its end, or leave "
                "it with 'async with'",
                code="execution_failed",
            )

    async def cancel(self) -> None:
        """Cancel it and wait until it is gone; its outcome is nobody's any more."""
        while pending := list(self._tasks):
            for task in pending:
                task.cancel()
            await asyncio.wait(pending)
            for task in pending:
                if not task.cancelled():
                    task.exception()

    def end(self) -> None:
        """The driver has ended and its work is gone: whoever goes on all the same is refused."""
        self._ended = True
        self._at_end()


async def _awaited(work: Awaitable[T]) -> T:
    return await work
