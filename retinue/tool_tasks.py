"""Tools that run as a task, in a process of their own: what goes there and what comes back.

    ToolCalls ── TaskOrder ──> TaskRunner ── bytes ──> retinue.tool_worker.perform
                                   <── TaskProgress, TaskProgress, ..., ToolOutput or TaskFailed ──

What goes there is pickled, because it is code. What comes back is msgpack, and is never unpickled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from retinue.current_work import Work, current_trace
from retinue.delegates import pickle_value
from retinue.ids import Identity
from retinue.logs import LogOptions, configured
from retinue.tool_options import ToolOptions
from retinue.tool_output import ToolOutput
from retinue.tools import Tool

CANCEL_GRACE = 5.0
"""Seconds that a task has to end after it was told to; then its process is killed."""


@dataclass(frozen=True, kw_only=True)
class TaskOrder:
    """One call of a tool for a process of its own."""

    tool: str
    """The tool's name, for whoever looks at the cluster."""
    options: ToolOptions
    data: bytes
    """Pickled: ``(tool, arguments, identity, call id, TaskSurroundings)``."""


@dataclass(frozen=True, kw_only=True)
class TaskSurroundings:
    """What a call brings along into a process that knows nothing of its run."""

    work: Work | None = None
    """For log records."""
    trace: dict[str, str] = field(default_factory=dict)
    logs: LogOptions | None = None
    """How the host logs, where it was told."""


class TaskProgress(msgspec.Struct, frozen=True, tag=True):
    """A value that a generator yielded, as JSON data."""

    data: Any


class TaskFailed(msgspec.Struct, frozen=True, tag=True):
    """The tool gave nothing; ``text`` is what the model reads."""

    text: str


TaskMessage = TaskProgress | ToolOutput | TaskFailed
TaskOutcome = ToolOutput | TaskFailed

encode_message = msgspec.msgpack.Encoder().encode
decode_message: Callable[[bytes], TaskMessage] = msgspec.msgpack.Decoder(TaskMessage).decode


class RunningTask(Protocol):
    """A call that was handed over. Belongs to one user loop."""

    async def outcome(self) -> TaskOutcome:
        """What it gave; :class:`TaskFailed` too when its process died. Cancelling this changes nothing."""
        ...

    async def end(self, grace: float) -> None:
        """Tell it to stop, kill it when it has not after ``grace`` seconds; returns when it is gone."""
        ...


class TaskRunner(Protocol):
    """Where tools with ``run_in="task"`` run: a cluster, or processes of this machine."""

    def start(self, order: TaskOrder, progress: Callable[[Any], None]) -> RunningTask:
        """Hand the order over. ``progress`` gets what it reports, on the loop that this is called on.

        The order is carried out once at most: a process that dies is not replaced.
        """
        ...


def make_order(
    tool: Tool, arguments: Mapping[str, Any], identity: Identity, call_id: str, *, work: Work | None = None
) -> TaskOrder:
    """A call as an order, with the trace that the caller is in.

    Raises:
        NotShippable: the tool or an argument cannot be pickled; ``path`` names the member at fault.
    """
    import cloudpickle  # type: ignore[import-untyped]

    surroundings = TaskSurroundings(work=work, trace=current_trace(), logs=configured())
    try:
        data = bytes(cloudpickle.dumps((tool, dict(arguments), identity, call_id, surroundings)))
    except Exception:
        pickle_value(tool, tool.name)
        pickle_value(dict(arguments), f"{tool.name}.arguments")
        raise
    return TaskOrder(tool=tool.name, options=tool.options, data=data)
