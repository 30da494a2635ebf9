"""Telemetry: what observers are told of runs, without any content (contract section 17)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol, runtime_checkable

import msgspec

from retinue.budgets import Usage
from retinue.errors import ValidationFailed

TelemetryType = Literal[
    "run.start", "run.complete", "model.start", "model.result", "model.error",
    "controller.start", "controller.result", "controller.error", "tool.start", "tool.result",
]  # fmt: skip


class TelemetryEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One event. Every start has exactly one end; what does not apply is left out."""

    type: TelemetryType
    at: float
    """Epoch seconds."""
    tenant_id: str
    user_id: str
    session_id: str
    run_id: str
    root_run_id: str
    parent_run_id: str | None = None
    agent_name: str = ""
    """The driver's id."""
    trace: dict[str, str] = msgspec.field(default_factory=dict)
    """W3C trace context of whatever this happens in."""
    call_id: str | None = None
    """Of a model, controller or tool call; equal at its start and its end."""
    provider_id: str | None = None
    model_id: str | None = None
    model_role: str | None = None
    operation: str | None = None
    """Of a controller: ``prepare_run``, ``prepare_step`` or ``completion``."""
    decision: str | None = None
    active_tools: int | None = None
    tool_name: str | None = None
    status: str | None = None
    """``success``, ``error``, ``cancelled``, or how the run ended."""
    error_code: str | None = None
    usage: Usage | None = None
    duration: float | None = None
    """Seconds."""


@runtime_checkable
class TelemetryObserver(Protocol):
    """Told of events in the process where they happen, in order; what it raises is ignored."""

    def observe(self, event: TelemetryEvent) -> None: ...


def check_observers(path: str, value: object) -> tuple[TelemetryObserver, ...]:
    """The observers, or :class:`ValidationFailed` naming the one that is none."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise ValidationFailed(f"{path} must be a list of observers, not {value!r:.80}", path=path)
    for index, observer in enumerate(value):
        if not isinstance(observer, TelemetryObserver):
            raise ValidationFailed(f"{path}[{index}] is {observer!r:.80}; it has no observe()", path=path)
    return tuple(value)
