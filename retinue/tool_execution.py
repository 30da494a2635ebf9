"""One admitted call of a tool where it runs: on the loop, in a thread, or as a task (contract section 7)."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
from collections.abc import Callable, Generator, Mapping
from typing import TYPE_CHECKING, Any

from retinue.current_work import Work
from retinue.results import error_text
from retinue.tool_context import CancelToken, ToolContext
from retinue.tool_output import ToolOutput, ToolProblem
from retinue.tool_progress import Progress
from retinue.tool_tasks import CANCEL_GRACE, TaskFailed, make_order
from retinue.tools import Tool
from retinue.workers import in_thread

if TYPE_CHECKING:
    from retinue.services import ExecutionServices

LEAVING_GRACE = 1.0
"""Seconds that a call which timed out has to end before its error result is given."""


class ToolExecution:
    """Runs one call. Belongs to the user loop.

    Args:
        services: of the execution that makes the call.
        arguments: as the function takes them.
        call_id: as the model knows the call.
        progress: takes what the tool reports while it works.
    """

    def __init__(
        self,
        tool: Tool,
        arguments: Mapping[str, Any],
        call_id: str,
        *,
        services: ExecutionServices,
        progress: Progress,
    ) -> None:
        self._tool = tool
        self._arguments = dict(arguments)
        self._call_id = call_id
        self._services = services
        self._progress = progress
        self._token = CancelToken(lambda: services.cancelled)
        self._grace = CANCEL_GRACE
        self._work: asyncio.Task[ToolOutput | ToolProblem] | None = None

    async def run(self) -> ToolOutput:
        """Run to the end, or until the tool's timeout. A cancellation waits until the work is gone.

        Raises:
            ToolProblem: the tool raised, timed out, or cannot be sent where it runs.
        """
        work = self._work = asyncio.ensure_future(self._outcome())
        try:
            await asyncio.wait([work], timeout=self._tool.options.timeout)
            if not work.done():
                await self._time_out(work)
        except asyncio.CancelledError:
            self._stop(work, "the run is being cancelled")
            await until_done(work)
            raise
        self._progress.close(flush=True)
        return self._taken(work)

    async def gone(self) -> None:
        """Return when nothing of the call runs any more, however often this is cancelled."""
        if self._work is not None:
            await until_done(self._work)

    @property
    def is_running(self) -> bool:
        return self._work is not None and not self._work.done()

    async def _time_out(self, work: asyncio.Task[Any]) -> None:
        why = f"{self._tool.name} timed out after {self._tool.options.timeout:g} s"
        self._grace = LEAVING_GRACE
        self._stop(work, why)
        # A task is killed after that time, so it is gone soon in any case.
        await asyncio.wait([work], timeout=None if self._tool.run_in == "task" else LEAVING_GRACE)
        raise ToolProblem(why if work.done() else f"{why}, and is still running")

    def _stop(self, work: asyncio.Task[Any], why: str) -> None:
        self._progress.close(flush=False)
        self._token.set(why)
        work.cancel()

    def _taken(self, work: asyncio.Task[ToolOutput | ToolProblem]) -> ToolOutput:
        if work.cancelled():
            if self._services.cancelled:  # the root refused something because the run is ending
                raise asyncio.CancelledError("the run is being cancelled")
            raise ToolProblem("the tool was cancelled from inside")
        outcome = work.result()
        if isinstance(outcome, ToolProblem):
            raise outcome
        return outcome

    async def _outcome(self) -> ToolOutput | ToolProblem:
        """The output, or why there is none; an exception that is not caught here would end the loop."""
        try:
            if self._tool.run_in == "task":
                return await self._in_task()
            value = await self._settled(await self._called())
            return ToolOutput.of(value, self._tool.name)
        except asyncio.CancelledError:
            raise
        except ToolProblem as problem:
            return problem
        except BaseException as error:  # whatever a tool raises is its result
            return ToolProblem(f"{type(error).__name__}: {error_text(error)}")

    async def _called(self) -> Any:
        """What the function gave: a value, or something that the loop must await or follow."""
        arguments = self._arguments
        if self._tool.takes_context:
            arguments = {**arguments, "ctx": ToolContext(self._services, self._call_id, self._token)}
        call = functools.partial(self._tool.function, **arguments)
        if self._tool.run_in == "loop":
            return call()
        return await in_thread(self._services.threads, functools.partial(self._followed, call))

    def _followed(self, call: Callable[[], Any]) -> Any:
        """Call it and, should it be a generator, follow it to its end; in a thread."""
        value = call()
        return self._last_of(value) if inspect.isgenerator(value) else value

    def _last_of(self, generator: Generator[Any, Any, Any]) -> Any:
        """Report what a generator yields; what it returns, or else what it yielded last."""
        value = None
        with contextlib.closing(generator):
            while not self._token.is_set:
                try:
                    value = next(generator)
                except StopIteration as end:
                    return value if end.value is None else end.value
                self._progress.report(value)
        return value

    async def _settled(self, value: Any) -> Any:
        """``value``, awaited if it can be, and followed if it is an async generator."""
        if inspect.isasyncgen(value):
            last = None
            async with contextlib.aclosing(value):
                async for last in value:
                    self._progress.report(last)
            return last
        return await value if inspect.isawaitable(value) else value

    async def _in_task(self) -> ToolOutput | ToolProblem:
        request = self._services.request
        work = Work.of(request)
        order = make_order(self._tool, self._arguments, request.identity, self._call_id, work=work)
        task = self._services.tasks.start(order, self._progress.report)
        try:
            outcome = await task.outcome()
        except asyncio.CancelledError:
            await until_done(asyncio.ensure_future(task.end(self._grace)))
            raise
        return ToolProblem(outcome.text) if isinstance(outcome, TaskFailed) else outcome


async def until_done(work: asyncio.Future[Any]) -> None:
    """Wait for ``work``, whatever becomes of it; cancelling this waits too and has no other effect."""
    while not work.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait([work])
    if not work.cancelled():
        work.exception()
