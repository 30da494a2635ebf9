"""Tools with ``run_in="task"`` as Ray tasks: :class:`retinue.tool_tasks.TaskRunner` on a cluster."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import RayError

from retinue.results import error_text
from retinue.tool_options import ToolOptions
from retinue.tool_output import ToolOutput
from retinue.tool_tasks import RunningTask, TaskFailed, TaskOrder, TaskOutcome, TaskProgress, decode_message
from retinue.tool_worker import perform

_perform: Any = ray.remote(perform)


class RayTasks:
    """Runs each call as a Ray task of its own, with the resources that its tool asks for."""

    def start(self, order: TaskOrder, progress: Callable[[Any], None]) -> RunningTask:
        messages = _perform.options(
            name=f"retinue.tool:{order.tool}",
            # What it yields arrives while it runs; and Ray must not run it a second time by itself.
            num_returns="streaming",
            max_retries=0,
            **_resources(order.options),
        ).remote(order.data)
        return RayTask(messages, progress)


class RayTask:
    """One Ray task. The references that it yields are awaited on the loop that this is made on."""

    def __init__(self, messages: Any, progress: Callable[[Any], None]) -> None:
        self._messages = messages
        self._progress = progress
        self._running = asyncio.ensure_future(self._run())

    async def outcome(self) -> TaskOutcome:
        return await asyncio.shield(self._running)

    async def end(self, grace: float) -> None:
        if self._running.done():
            return
        ray.cancel(self._messages)  # SIGINT in its process; a task that waits for room is taken back
        await asyncio.wait([self._running], timeout=grace)
        if not self._running.done():
            ray.cancel(self._messages, force=True)
            await asyncio.wait([self._running])

    async def _run(self) -> TaskOutcome:
        """What the call gave; the task has ended when this does."""
        outcome: TaskOutcome | None = None
        try:
            async for reference in self._messages:
                message = decode_message(await reference)
                if isinstance(message, TaskProgress):
                    self._progress(message.data)
                else:
                    outcome = message
        except RayError as error:
            return outcome or TaskFailed(f"the tool's task ended without a result: {_said(error)}")
        assert isinstance(outcome, ToolOutput | TaskFailed)
        return outcome


def _resources(options: ToolOptions) -> dict[str, Any]:
    wanted = {"num_cpus": options.num_cpus, "num_gpus": options.num_gpus, "memory": options.memory}
    return {
        **{name: amount for name, amount in wanted.items() if amount is not None},
        "resources": dict(options.resources),
    }


def _said(error: RayError) -> str:
    """The first line of what Ray says, which goes on with traces of another process."""
    return f"{type(error).__name__}: {error_text(error).splitlines()[0]}"
