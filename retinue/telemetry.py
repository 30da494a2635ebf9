"""Telemetry: what observers are told of runs, without any content (contract section 17).

    run.start ──> controller.start, .result ──> model.start, .result ──> tool.start, .result ──> run.complete

Every start has exactly one end. Observers are called where the work is done: in its process, on its user
loop, and but for ``run.complete`` in its context: OpenTelemetry's current span as an observer sets it at a
start is that of the work until its end.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, Protocol, Self, runtime_checkable

import msgspec

from retinue.budgets import Usage
from retinue.current_work import context_as_now, current_trace
from retinue.drivers import RunRequest
from retinue.errors import RetinueError, ValidationFailed
from retinue.messages import Message
from retinue.models import ModelResponse
from retinue.results import Reason, Status

logger = logging.getLogger(__name__)

TelemetryType = Literal[
    "run.start", "run.complete", "model.start", "model.result", "model.error",
    "controller.start", "controller.result", "controller.error", "tool.start", "tool.result",
]  # fmt: skip
OperationKind = Literal["model", "controller", "tool"]


class TelemetryContent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What was said and done. Only for observers that ask for it; everything here may be private."""

    messages: Sequence[Message] = ()
    """Of a model's request."""
    answer: ModelResponse | None = None
    arguments: Mapping[str, Any] | None = None
    """Of a tool call or an effect."""
    output: str | None = None
    """What a tool gave, where it is text."""


class TelemetryEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One event. What does not apply is left out."""

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
    """The driver's id; of a delegate its name."""
    trace: dict[str, str] = msgspec.field(default_factory=dict)
    """W3C trace context of whatever this happens in."""
    call_id: str | None = None
    """Of a model, controller or tool call: unique, and equal at its start and its end."""
    provider_id: str | None = None
    model_id: str | None = None
    model_role: str | None = None
    operation: str | None = None
    """Of a controller: ``prepare_run``, ``prepare_step`` or ``completion``. Of a model call: ``task``,
    ``control`` or ``finishing``."""
    decision: str | None = None
    """Of a controller: ``continue``, ``stop``, or a completion policy's action."""
    active_tools: int | None = None
    """How many tools a controller leaves active, where it says."""
    tool_name: str | None = None
    tool_call_id: str | None = None
    """As the model knows the call; it may repeat."""
    finish_reason: str | None = None
    """Of a model's answer."""
    status: str | None = None
    """Of an operation: ``success``, ``error`` or ``cancelled``. Of a run how it ended: ``completed``,
    ``stopped`` (also one that awaits input), ``cancelled`` or ``error``."""
    error_code: str | None = None
    """A code of :mod:`retinue.errors`, else the name of the exception's class."""
    usage: Usage | None = None
    """What providers reported: of one model call, of a run with all its delegates, of a delegate alone."""
    duration: float | None = None
    """Seconds."""
    content: TelemetryContent | None = None
    """``None`` unless the observer has ``content = True``."""


@runtime_checkable
class TelemetryObserver(Protocol):
    """Told of events in the process where they happen, in order; what it raises is ignored.

    One that has an attribute ``content`` which is true gets the content of model and tool calls too. It must
    not block: it is called on the loop that drivers run on.
    """

    def observe(self, event: TelemetryEvent) -> None: ...


class TelemetryBus:
    """Tells observers of one execution, on its user loop.

    Args:
        observers: of the app.
        request: of the run or delegate.
        agent_name: see :attr:`TelemetryEvent.agent_name`.
    """

    def __init__(
        self, observers: Sequence[TelemetryObserver], request: RunRequest, *, agent_name: str
    ) -> None:
        self._observers = observers
        self.observed = bool(observers)
        """Whether there is anybody to tell."""
        self.wants_content = any(getattr(each, "content", False) is True for each in observers)
        """Whether any observer asks for content."""
        self._base: dict[str, Any] = {
            "tenant_id": request.identity.tenant_id,
            "user_id": request.identity.user_id,
            "session_id": request.session_id,
            "run_id": request.run_id,
            "root_run_id": request.root_run_id,
            "parent_run_id": request.parent_run_id,
            "agent_name": agent_name,
        }
        self.usage = Usage()
        """What the model calls of this execution used that have ended, as far as providers say."""
        self.trace: dict[str, str] = dict(request.trace)
        """The trace of what is done for this execution; from its start on, as observers set it."""
        self._began: float | None = None

    def emit(self, type: TelemetryType, content: TelemetryContent | None = None, **fields: Any) -> None:
        """Tell every observer. Never raises."""
        if not self._observers:
            return
        fields.setdefault("trace", current_trace())
        event = TelemetryEvent(type=type, at=time.time(), **self._base, **fields)
        for observer in self._observers:
            wants = content is not None and getattr(observer, "content", False) is True
            _tell(observer, msgspec.structs.replace(event, content=content) if wants else event)

    def begin(
        self, kind: OperationKind, call_id: str, *, cancelled: Callable[[], bool], **fields: Any
    ) -> Operation:
        """An operation that is made in ``with``; it starts there, and the end of the block is its one end.

        Args:
            call_id: unique for this execution.
            cancelled: whether whoever makes it is being cancelled; what ends then counts as cancelled.
            fields: of all its events.
        """
        return Operation(self, kind, cancelled, {"call_id": f"{self._base['run_id']}:{call_id}", **fields})

    def run_started(self) -> None:
        """The driver is about to run, in the context that this is called in."""
        self._began = time.monotonic()
        self.emit("run.start")
        self.trace = current_trace()

    def run_completed(self, status: Status, reason: Reason | None, usage: Usage | None = None) -> None:
        """How it ended. Says nothing where :meth:`run_started` did not come before, or the second time.

        Args:
            usage: what the run used; what its own model calls did when left out.
        """
        if self._began is None:
            return
        duration, self._began = time.monotonic() - self._began, None
        told = {"failed": "error", "awaiting_input": "stopped"}.get(status, status)
        self.emit(
            "run.complete",
            trace=self.trace,
            status=told,
            error_code=reason.code if reason is not None and told != "completed" else None,
            usage=self.usage if usage is None else usage,
            duration=duration,
        )


class Operation:
    """A call of a model, a controller or a tool, from its start to its one end; use it in ``with``."""

    def __init__(
        self, bus: TelemetryBus, kind: OperationKind, cancelled: Callable[[], bool], fields: dict[str, Any]
    ) -> None:
        self._bus = bus
        self._kind = kind
        self._cancelled = cancelled
        self._fields = fields
        self._began = 0.0
        self._put_context_back: Callable[[], None] = lambda: None
        self.usage: Usage | None = None
        """Of a model call, known or not however it ends."""
        self.error_code: str | None = None
        """Told for an error in place of what its class says."""
        self.content: TelemetryContent | None = None
        """Beside the events; ``None`` unless ``bus.wants_content``."""

    def add(self, **fields: Any) -> None:
        """Say more with the end."""
        self._fields |= fields

    def __enter__(self) -> Self:
        self._began = time.monotonic()
        self._put_context_back = context_as_now()
        self._bus.emit(f"{self._kind}.start", self.content, **self._fields)  # type: ignore[arg-type]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        bus = self._bus
        if self.usage is not None:
            bus.usage += self.usage
        ended: dict[str, Any] = {"duration": time.monotonic() - self._began}
        failed = "result" if self._kind == "tool" else "error"
        if self._cancelled() or isinstance(error, asyncio.CancelledError):
            outcome, status = failed, "cancelled"
        elif error is not None:
            outcome, status = failed, "error"
            code = error.code if isinstance(error, RetinueError) else type(error).__name__
            ended["error_code"] = self.error_code or code
        else:
            outcome, status = "result", "success"
        content = self.content if status == "success" else None
        fields = {**self._fields, **ended, "status": status, "usage": self.usage}
        bus.emit(f"{self._kind}.{outcome}", content, **fields)  # type: ignore[arg-type]
        self._put_context_back()


_blamed: set[type] = set()
"""Classes of observers whose failure has been logged in this process."""


def _tell(observer: TelemetryObserver, event: TelemetryEvent) -> None:
    try:
        if event.content is not None:  # of its own: what it does to it changes no request and no call
            event = msgspec.structs.replace(event, content=copy.deepcopy(event.content))
        observer.observe(event)
    except BaseException as error:  # an observer must never matter, whatever it raises
        if type(observer) not in _blamed:
            _blamed.add(type(observer))
            logger.warning(
                "telemetry observer %s raised %s at %s; later failures of its class are not logged",
                type(observer).__qualname__,
                type(error).__name__,
                event.type,
            )


def check_observers(path: str, value: object) -> tuple[TelemetryObserver, ...]:
    """The observers, or :class:`ValidationFailed` naming the one that is none."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise ValidationFailed(f"{path} must be a list of observers, not {value!r:.80}", path=path)
    for index, observer in enumerate(value):
        if not isinstance(observer, TelemetryObserver):
            raise ValidationFailed(f"{path}[{index}] is {observer!r:.80}; it has no observe()", path=path)
        if inspect.iscoroutinefunction(observer.observe):
            raise ValidationFailed(f"{path}[{index}]: observe() must be a plain function", path=path)
    return tuple(value)
