"""How a tool runs: where, with which resources, for how long, and how much it may give back."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from retinue.errors import ValidationFailed
from retinue.policies import Effect

RunIn = Literal["loop", "thread", "task"]
"""``loop``: on the user loop, beside the driver. ``thread``: in a thread of that process. ``task``: in a
process of its own, on a cluster as a Ray task."""

MAX_RESULT_BYTES = 65_536
"""Bytes of UTF-8 that a result may have before it becomes an artifact."""

ApprovalPredicate = Callable[[Mapping[str, Any]], bool | Awaitable[bool]]
"""Gets a copy of the arguments as JSON values, on a user loop; what it raises denies the call."""

_ONLY_TASKS = ("num_cpus", "num_gpus", "memory", "resources")


@dataclass(frozen=True, kw_only=True)
class ToolOptions:
    """How a tool runs. :func:`retinue.tool` takes each of these as a keyword."""

    run_in: RunIn | None = None
    """Where; by default async functions run on the loop and all others in a thread."""
    num_cpus: float | None = None
    """CPUs that a task asks of the cluster; one by default."""
    num_gpus: float | None = None
    """GPUs that a task asks of the cluster; none by default."""
    memory: int | None = None
    """Bytes of memory that a task asks of the cluster; not asked for by default."""
    resources: Mapping[str, float] = field(default_factory=dict)
    """Custom resources that a task asks of the cluster, by name."""
    timeout: float | None = None
    """Seconds from the start of a call to its error result; unlimited by default."""
    max_result_bytes: int = MAX_RESULT_BYTES
    """Bytes of UTF-8; a longer result is kept as an artifact, and its beginning is the result."""
    effect: Effect = "unknown"
    """What a call does to the world; plan mode runs what only reads, and asks about what is unknown."""
    requires_approval: bool | ApprovalPredicate | None = None
    """Whether a person must approve each call, or a function of the arguments that says so; ``None`` leaves
    it to the app's :class:`retinue.Approvals`."""
    cache: bool = False
    """A call that succeeded is not made again in the same run: its result is given for the same arguments. It
    passes the gate all the same."""

    def __post_init__(self) -> None:
        if isinstance(self.resources, Mapping):
            object.__setattr__(self, "resources", dict(self.resources))

    def check(self, tool: str, *, is_async: bool) -> RunIn:
        """Where a tool with these options runs.

        Raises:
            ValidationFailed: a value is wrong, or does not go with the others or with the function; ``path``
                is ``<tool>.<option>``.
        """
        if self.run_in is not None and self.run_in not in get_args(RunIn):
            raise _wrong(tool, "run_in", f"must be 'loop', 'thread' or 'task', not {self.run_in!r:.80}")
        if self.run_in == "loop" and not is_async:
            raise _wrong(
                tool, "run_in", "is 'loop', which a sync function would block; make it async, or use 'thread'"
            )
        if self.run_in == "thread" and is_async:
            raise _wrong(tool, "run_in", "is 'thread', but an async function needs a loop: 'loop' or 'task'")
        self._check_numbers(tool)
        self._check_rules(tool)
        place = self.run_in or ("loop" if is_async else "thread")
        for name in _ONLY_TASKS:
            if place != "task" and getattr(self, name) not in (None, {}):
                raise _wrong(tool, name, "is for tools that run as a task: add run_in='task'")
        return place

    def _check_rules(self, tool: str) -> None:
        if self.effect not in get_args(Effect):
            kinds = ", ".join(get_args(Effect))
            raise _wrong(tool, "effect", f"must be one of {kinds}, not {self.effect!r:.80}")
        asks: object = self.requires_approval
        if asks is not None and not isinstance(asks, bool) and not callable(asks):
            raise _wrong(tool, "requires_approval", f"must be a bool or a function, not {asks!r:.80}")
        if not isinstance(self.cache, bool):
            raise _wrong(tool, "cache", f"must be a bool, not {self.cache!r:.80}")

    def _check_numbers(self, tool: str) -> None:
        for name in ("num_cpus", "num_gpus"):
            if (value := getattr(self, name)) is not None and not _is_amount(value):
                raise _wrong(tool, name, f"must be a number of at least 0, not {value!r:.80}")
        if self.memory is not None and not _is_count(self.memory):
            raise _wrong(tool, "memory", f"must be a number of bytes, not {self.memory!r:.80}")
        if self.timeout is not None and not (_is_amount(self.timeout) and self.timeout > 0):
            raise _wrong(tool, "timeout", f"must be a positive number of seconds, not {self.timeout!r:.80}")
        if not _is_count(self.max_result_bytes):
            raise _wrong(
                tool, "max_result_bytes", f"must be a number of bytes, not {self.max_result_bytes!r:.80}"
            )
        if not isinstance(self.resources, Mapping):
            raise _wrong(tool, "resources", f"must map names to amounts, not be {self.resources!r:.80}")
        amounts: Mapping[Any, Any] = self.resources
        for key, amount in amounts.items():
            if not isinstance(key, str) or not key or not _is_amount(amount):
                raise _wrong(tool, "resources", f"must map names to amounts; {key!r:.80}: {amount!r:.80}")
            if key in ("CPU", "GPU", "memory", "object_store_memory"):
                raise _wrong(tool, "resources", f"cannot hold {key}; use num_cpus, num_gpus or memory")


def _wrong(tool: str, option: str, what: str) -> ValidationFailed:
    return ValidationFailed(f"tool {tool}: {option} {what}", path=f"{tool}.{option}")


def _is_amount(value: object) -> bool:
    return (
        isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0
    )


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
