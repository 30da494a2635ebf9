"""Spans and metrics for OpenTelemetry, under the names of its conventions for generative AI.

    invoke_agent <name>                     a run, or a delegate below the one that asked for it
    ├── chat <model>                        a model call
    ├── controller <operation>              a call of a controller or a completion policy
    └── execute_tool <tool>                 a tool call or an effect
        └── invoke_agent <name>             a delegate of the tool

Needs ``retinue[telemetry]``. The observer is picklable; what it exports with is made in each process.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from retinue.budgets import Usage
from retinue.errors import ValidationFailed
from retinue.messages import Message
from retinue.models import ModelResponse
from retinue.telemetry import TelemetryContent, TelemetryEvent

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.metrics import Histogram, MeterProvider
    from opentelemetry.trace import Span, TracerProvider

logger = logging.getLogger(__name__)

SEMCONV_VERSION = "1.41.1"
"""Version of the semantic conventions whose names are used here. Those for generative AI are not stable yet:
the names here change with this number only."""
SCHEMA_URL = f"https://opentelemetry.io/schemas/{SEMCONV_VERSION}"

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
_SCOPE = "retinue"
_TOKEN_BUCKETS = tuple(4**power for power in range(14))
_SECOND_BUCKETS = tuple(0.01 * 2**power for power in range(14))


@dataclass(frozen=True, kw_only=True)
class OpenTelemetryObserver:
    """What :func:`open_telemetry` gives."""

    content: bool
    provider: Callable[[], TracerProvider] | None
    meter_provider: Callable[[], MeterProvider] | None
    endpoint: str | None

    def observe(self, event: TelemetryEvent) -> None:
        spans = _spans_of(self)
        if spans is not None:
            spans.take(event)


def open_telemetry(
    *,
    content: bool = False,
    provider: Callable[[], TracerProvider] | None = None,
    meter_provider: Callable[[], MeterProvider] | None = None,
    endpoint: str | None = None,
) -> OpenTelemetryObserver:
    """An observer for ``RuntimeConfig(telemetry=[...])`` that makes spans and metrics.

    Args:
        content: put messages, arguments and results on the spans. They may be private; off by default.
        provider: gives the tracer provider, called once in each process that runs work. By default the one
            that the process has set; and where it has set none, one that exports with OTLP over HTTP to
            ``endpoint``, or to OTEL_EXPORTER_OTLP_ENDPOINT.
        meter_provider: the same for metrics.
        endpoint: base URL of an OTLP receiver, such as ``http://collector:4318``.

    Raises:
        ValidationFailed: OpenTelemetry is not installed, or a factory cannot be called.
    """
    try:
        import opentelemetry.trace  # noqa: F401 - only to see whether it is there
    except ImportError:
        raise ValidationFailed(
            "open_telemetry() needs OpenTelemetry: pip install 'retinue[telemetry]'", path="telemetry"
        ) from None
    for name, factory in (("provider", provider), ("meter_provider", meter_provider)):
        if factory is not None and not callable(factory):
            raise ValidationFailed(
                f"{name} must be a function that makes one, called in each process, not {factory!r:.80}",
                path=f"open_telemetry.{name}",
            )
    return OpenTelemetryObserver(
        content=content, provider=provider, meter_provider=meter_provider, endpoint=endpoint
    )


class Spans:
    """The open spans of one observer in this process, and what it exports with."""

    def __init__(self, observer: OpenTelemetryObserver) -> None:
        self._tracing = observer.provider() if observer.provider else _default_tracing(observer.endpoint)
        self._tracer = self._tracing.get_tracer(_SCOPE, schema_url=SCHEMA_URL)
        metering = (
            observer.meter_provider() if observer.meter_provider else _default_metering(observer.endpoint)
        )
        meter = metering.get_meter(_SCOPE, schema_url=SCHEMA_URL)
        self._tokens: Histogram = meter.create_histogram(
            "gen_ai.client.token.usage",
            unit="{token}",
            description="Number of input and output tokens used.",
            explicit_bucket_boundaries_advisory=_TOKEN_BUCKETS,
        )
        self._seconds: Histogram = meter.create_histogram(
            "gen_ai.client.operation.duration",
            unit="s",
            description="GenAI operation duration.",
            explicit_bucket_boundaries_advisory=_SECOND_BUCKETS,
        )
        self._open: dict[tuple[str, str], Span] = {}
        self._flush = _Flush(self._tracing)

    def take(self, event: TelemetryEvent) -> None:
        """Begin a span, or end one."""
        kind, _, point = event.type.partition(".")
        key = kind, event.call_id or event.run_id
        if point == "start":
            if key not in self._open:  # the same observer may be there twice
                self._open[key] = self._begin(event, kind)
            return
        span = self._open.pop(key, None)
        if span is None:  # the observer failed at its start
            return
        self._end(span, event, kind)
        if kind == "model":
            self._measure(event)
        if kind == "run":
            self._flush.soon()  # a process of a cluster may be ended at any moment now

    def _begin(self, event: TelemetryEvent, kind: str) -> Span:
        from opentelemetry import context, trace

        names = {
            "run": f"invoke_agent {event.agent_name}",
            "model": f"chat {event.model_id}",
            "tool": f"execute_tool {event.tool_name}",
            "controller": f"controller {event.operation}",
        }
        span = self._tracer.start_span(
            names[kind],
            context=_parent(event.trace),
            kind=trace.SpanKind.CLIENT if kind == "model" else trace.SpanKind.INTERNAL,
            attributes=_attributes(event, kind) | _content(event.content),
            start_time=int(event.at * 1e9),
        )
        context.attach(trace.set_span_in_context(span))  # the bus puts back what was there
        return span

    def _end(self, span: Span, event: TelemetryEvent, kind: str) -> None:
        from opentelemetry.trace import Status, StatusCode

        span.set_attributes(_result(event, kind) | _content(event.content))
        if event.status == "error":
            span.set_status(Status(StatusCode.ERROR))
        span.end(end_time=int(event.at * 1e9))

    def _measure(self, event: TelemetryEvent) -> None:
        about = {
            "gen_ai.operation.name": "chat",
            "gen_ai.provider.name": event.provider_id or "",
            "gen_ai.request.model": event.model_id or "",
        }
        failed = _error_type(event)
        self._seconds.record(event.duration or 0.0, about | ({"error.type": failed} if failed else {}))
        if event.usage is not None:
            self._tokens.record(event.usage.input_tokens, about | {"gen_ai.token.type": "input"})
            self._tokens.record(event.usage.output_tokens, about | {"gen_ai.token.type": "output"})


class _Flush:
    """Exports what is ended in a thread of its own, again where more has ended meanwhile."""

    def __init__(self, provider: object) -> None:
        self._flush = getattr(provider, "force_flush", None)
        self._wanted = threading.Event()
        self._thread: threading.Thread | None = None

    def soon(self) -> None:
        if self._flush is None:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="retinue-spans", daemon=True)
            self._thread.start()
        self._wanted.set()

    def _run(self) -> None:
        assert self._flush is not None
        while self._wanted.wait():
            self._wanted.clear()
            try:
                self._flush()
            except Exception:  # noqa: S112 - what an exporter cannot send it has logged
                continue


_lock = threading.Lock()
_spans: dict[object, Spans | None] = {}
"""By observer, so that copies of one share what they export with; ``None`` where it cannot be made."""


def _spans_of(observer: OpenTelemetryObserver) -> Spans | None:
    key: object = observer
    try:
        hash(key)
    except TypeError:  # a factory that is mutable data
        key = id(observer)
    if key not in _spans:
        with _lock:
            if key not in _spans:
                _spans[key] = _made(observer)
    return _spans[key]


def _made(observer: OpenTelemetryObserver) -> Spans | None:
    try:
        return Spans(observer)
    except Exception as error:
        logger.warning("no spans are made in this process: the provider cannot be had: %r", error)
        return None


# --- attributes -------------------------------------------------------------------------------------------


def _attributes(event: TelemetryEvent, kind: str) -> dict[str, Any]:
    """What is known at the start."""
    common: dict[str, Any] = {
        "gen_ai.agent.name": event.agent_name,
        "gen_ai.conversation.id": event.session_id,
        "retinue.tenant_id": event.tenant_id,
        "retinue.run_id": event.run_id,
        "retinue.root_run_id": event.root_run_id,
        "retinue.parent_run_id": event.parent_run_id,
        "retinue.call_id": event.call_id,
    }
    own: dict[str, dict[str, Any]] = {
        "run": {"gen_ai.operation.name": "invoke_agent", "gen_ai.provider.name": _SCOPE},
        "model": {
            "gen_ai.operation.name": "chat",
            "gen_ai.provider.name": event.provider_id,
            "gen_ai.request.model": event.model_id,
            "retinue.model_role": event.model_role,
            "retinue.call_kind": event.operation,
        },
        "tool": {
            "gen_ai.operation.name": "execute_tool",
            "gen_ai.tool.name": event.tool_name,
            "gen_ai.tool.call.id": event.tool_call_id,
            "gen_ai.tool.type": "function",
        },
        "controller": {"retinue.controller.operation": event.operation},
    }
    return _known(common | own[kind])


def _result(event: TelemetryEvent, kind: str) -> dict[str, Any]:
    """What is known at the end."""
    usage = event.usage or Usage()
    told: dict[str, Any] = {"retinue.status": event.status, "error.type": _error_type(event)}
    if kind == "controller":
        told |= {
            "retinue.controller.decision": event.decision,
            "retinue.controller.active_tools": event.active_tools,
            "retinue.model_role": event.model_role,
        }
    if event.finish_reason is not None:
        told["gen_ai.response.finish_reasons"] = [event.finish_reason]
    if event.usage is not None:
        told |= {
            "gen_ai.usage.input_tokens": usage.input_tokens,
            "gen_ai.usage.output_tokens": usage.output_tokens,
            "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens or None,
            "gen_ai.usage.reasoning.output_tokens": usage.reasoning_tokens or None,
        }
    return _known(told)


def _known(attributes: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in attributes.items() if value is not None}


def _error_type(event: TelemetryEvent) -> str | None:
    if event.status not in ("error", "cancelled"):
        return None
    return event.error_code or ("cancelled" if event.status == "cancelled" else "_OTHER")


def _content(content: TelemetryContent | None) -> dict[str, Any]:
    """What was said, as JSON in the shapes of the conventions; nothing unless it was asked for."""
    if content is None:
        return {}
    told: dict[str, Any] = {}
    if content.messages:
        told["gen_ai.input.messages"] = _json([_message(message) for message in content.messages])
    if content.answer is not None:
        told["gen_ai.output.messages"] = _json([_answer(content.answer)])
    if content.arguments is not None:
        told["gen_ai.tool.call.arguments"] = _json(content.arguments)
    if content.output is not None:
        told["gen_ai.tool.call.result"] = content.output
    return told


def _message(message: Message) -> dict[str, Any]:
    if message.role == "tool":
        part = {"type": "tool_call_response", "id": message.tool_call_id, "response": message.text}
        return {"role": "tool", "parts": [part]}
    parts: list[dict[str, Any]] = [{"type": "text", "content": message.text}] if message.text else []
    return {"role": message.role, "parts": [*parts, *_calls(message.tool_calls)]}


def _answer(answer: ModelResponse) -> dict[str, Any]:
    parts: list[dict[str, Any]] = [{"type": "text", "content": answer.text}] if answer.text else []
    return {
        "role": "assistant",
        "parts": [*parts, *_calls(answer.tool_calls)],
        "finish_reason": answer.finish_reason,
    }


def _calls(calls: Sequence[Any]) -> list[dict[str, Any]]:
    return [
        {"type": "tool_call", "id": call.id, "name": call.name, "arguments": call.arguments} for call in calls
    ]


def _json(value: object) -> str:
    return msgspec.json.encode(value, enc_hook=str).decode()


# --- where spans come from and go -------------------------------------------------------------------------


def _parent(trace: dict[str, str]) -> Context:
    """The context that an event happens in: the caller's own where it is that, else as it came."""
    from opentelemetry import context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    propagator, own = TraceContextTextMapPropagator(), dict[str, str]()
    propagator.inject(own)
    return context.get_current() if own == trace else propagator.extract(trace, context.Context())


def _exports(endpoint: str | None) -> bool:
    return endpoint is not None or any(os.environ.get(name) for name in _ENDPOINTS)


def _default_tracing(endpoint: str | None) -> TracerProvider:
    """What the process has set; else, with an endpoint, one that exports there, set for the process too."""
    from opentelemetry import trace

    provider = trace.get_tracer_provider()
    if not isinstance(provider, trace.ProxyTracerProvider) or not _exports(endpoint):
        return provider
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace import TracerProvider as Exporting
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    exporting = Exporting()
    url = None if endpoint is None else f"{endpoint.rstrip('/')}/v1/traces"
    exporting.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=url)))
    trace.set_tracer_provider(exporting)
    return exporting


def _default_metering(endpoint: str | None) -> MeterProvider:
    from opentelemetry import metrics

    provider = metrics.get_meter_provider()
    if hasattr(provider, "force_flush") or not _exports(endpoint):
        return provider
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
    from opentelemetry.sdk.metrics import MeterProvider as Exporting
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader

    url = None if endpoint is None else f"{endpoint.rstrip('/')}/v1/metrics"
    reader = PeriodicExportingMetricReader(OTLPMetricExporter(endpoint=url))
    exporting = Exporting(metric_readers=[reader])
    metrics.set_meter_provider(exporting)
    return exporting
