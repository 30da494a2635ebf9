"""Whose work runs here, and in which trace: set wherever a message brings work, seen by logs and telemetry.

    caller ── StartRun.trace ──> run ── Spawn.trace ──> delegate ── TaskOrder ──> tool in a process of its own

Context variables, so they follow a task into what it starts and into the threads of
:func:`retinue.workers.in_thread`. A trace travels as W3C trace context (``traceparent``, ``tracestate``).
Where OpenTelemetry is installed its own current span says what the trace is; where it is not, what came is
handed on as it is.
"""

from __future__ import annotations

import contextlib
import contextvars
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from retinue.drivers import RunRequest

Trace = Mapping[str, str]
"""W3C trace context: ``traceparent`` and perhaps ``tracestate``; empty where there is no trace."""

_TRACE_HEADERS = ("traceparent", "tracestate")


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a process works for just now."""

    tenant_id: str
    user_id: str
    session_id: str
    """For a delegate its label, ``<session>:<name>``."""
    run_id: str

    @classmethod
    def of(cls, request: RunRequest) -> Work:
        """The work of a run or a delegate."""
        return cls(
            tenant_id=request.identity.tenant_id,
            user_id=request.identity.user_id,
            session_id=request.session_id,
            run_id=request.run_id,
        )


_work: contextvars.ContextVar[Work | None] = contextvars.ContextVar("retinue_work", default=None)
_handed_on: contextvars.ContextVar[Trace | None] = contextvars.ContextVar("retinue_trace", default=None)


def current_work() -> Work | None:
    """What the caller works for; ``None`` outside of runs."""
    return _work.get()


def current_trace() -> dict[str, str]:
    """The trace that the caller is in, to be sent with what it asks of others; empty where there is none."""
    if "opentelemetry.trace" in sys.modules:
        carrier: dict[str, str] = {}
        _propagator().inject(carrier)
        if carrier:
            return carrier
    return dict(_handed_on.get() or {})


@contextlib.contextmanager
def working(work: Work | None, trace: Trace) -> Iterator[None]:
    """In here runs this work, in this trace, and in no other that the caller may be in.

    Args:
        work: whose ids log records get.
        trace: becomes OpenTelemetry's current context, with nothing else in it, where that is installed.
    """
    working_for, handed_on = _work.set(work), _handed_on.set(trace)
    try:
        with _attached(trace):
            yield
    finally:
        _handed_on.reset(handed_on)
        _work.reset(working_for)


@contextlib.contextmanager
def trace_in_environment(trace: Trace) -> Iterator[None]:
    """``TRACEPARENT`` and ``TRACESTATE`` for programs that are started in here.

    The environment is the process's, so this is for one that has one task at a time.
    """
    names = {header: header.upper() for header in _TRACE_HEADERS}
    before = {name: os.environ.pop(name, None) for name in names.values()}
    os.environ.update({names[header]: value for header, value in trace.items() if header in names})
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def context_as_now() -> Callable[[], None]:
    """Gives a function that makes OpenTelemetry's context in this task what it is now again."""
    if "opentelemetry.context" not in sys.modules:
        return _leave_context
    from opentelemetry import context

    now = context.get_current()
    return lambda: _put_back(now)


def trace_ids(trace: Trace) -> tuple[str, str] | None:
    """Trace id and span id in hexadecimal; ``None`` where there is no trace."""
    pieces = trace.get("traceparent", "").split("-")
    return (pieces[1], pieces[2]) if len(pieces) >= 4 else None


@contextlib.contextmanager
def _attached(trace: Trace) -> Iterator[None]:
    if not (trace or "opentelemetry.trace" in sys.modules) or not _is_installed():
        yield
        return
    from opentelemetry import context

    put_back = context_as_now()  # no token: one must be given back in the very context that it is of
    context.attach(_propagator().extract(trace, context.Context()))
    try:
        yield
    finally:
        put_back()


def _put_back(context: Any) -> None:
    from opentelemetry.context import attach

    attach(context)


def _leave_context() -> None:
    """OpenTelemetry was not there, or came to be there within: then its context is emptied."""
    if "opentelemetry.context" in sys.modules:
        from opentelemetry.context import Context

        _put_back(Context())


def _is_installed() -> bool:
    return "opentelemetry.trace" in sys.modules or importlib.util.find_spec("opentelemetry") is not None


def _propagator() -> Any:
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return TraceContextTextMapPropagator()
