"""Events of a run: the envelope and its payloads (contract section 6)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from retinue.approvals import ApprovalRequest, ApprovalState
from retinue.budgets import Usage
from retinue.errors import InputError
from retinue.json_values import encode_json
from retinue.results import Reason, RunResult, Status

SCHEMA_VERSION = 1
MAX_EVENT_BYTES = 65_536
"""Largest payload that ``services.emit`` takes, in bytes of JSON."""
MAX_DELTA = 8_192
"""Longest ``text.delta`` or ``message.delta``, in characters."""

InputMode = Literal["steer", "follow_up"]
"""``steer`` redirects the turn that is going on; ``follow_up`` is the next turn."""
MessagePhase = Literal["commentary", "final", "reasoning_summary", "pending"]
CompletionAction = Literal["accept", "revise", "await_input", "stop"]


class RunStarted(msgspec.Struct, frozen=True, tag_field="type", tag="run.started"):
    """The driver is about to start; absent when the run ended earlier."""

    driver_id: str


class RunTerminal(msgspec.Struct, frozen=True, tag_field="type", tag="run.terminal"):
    """The last event of every run."""

    result: RunResult


class TextDelta(msgspec.Struct, frozen=True, tag_field="type", tag="text.delta"):
    """A piece of the answer, at most :data:`MAX_DELTA` characters."""

    text: str


class ModelComplete(msgspec.Struct, frozen=True, tag_field="type", tag="model.complete"):
    """A model call ended with an answer. ``usage`` is ``None`` when the provider did not say."""

    provider_id: str
    model_id: str
    usage: Usage | None = None


class ToolComplete(msgspec.Struct, frozen=True, tag_field="type", tag="tool.complete"):
    """A tool call has its result. ``denied`` is true for any error result (contract section 20)."""

    tool_name: str
    tool_call_id: str
    denied: bool = False


class Control(msgspec.Struct, frozen=True, tag_field="type", tag="control"):
    """Somebody asked for something from outside."""

    operation: Literal["cancel", "follow_up", "steer", "replace"]
    reason: str | None = None


class InputRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A question that a run waits with; answered with ``handle.reply(id, ...)``."""

    id: str
    """``<run id>:<uuid>``."""
    run_id: str
    """Of the run or delegate that asks."""
    question: str
    choices: Sequence[str] | None = None
    timeout_ms: int | None = None


class InputRequested(msgspec.Struct, frozen=True, tag_field="type", tag="input.requested"):
    """The run asks something, and makes no model call until it is answered."""

    request: InputRequest


class InputResolved(msgspec.Struct, frozen=True, tag_field="type", tag="input.resolved"):
    """Somebody answered; whoever comes later is refused."""

    request_id: str


class RunResumed(msgspec.Struct, frozen=True, tag_field="type", tag="run.resumed"):
    """The run goes on after an answer; its active clock runs again."""

    request_id: str


class InputReceived(msgspec.Struct, frozen=True, tag_field="type", tag="input.received"):
    """Live input arrived and waits for its boundary."""

    input_id: str
    mode: InputMode


class InputApplied(msgspec.Struct, frozen=True, tag_field="type", tag="input.applied"):
    """Live input reached the work: a steer before a model call, a follow-up as the next turn."""

    input_id: str
    mode: InputMode


class Completion(msgspec.Struct, frozen=True, tag_field="type", tag="completion"):
    """What the completion policy decided of a turn."""

    action: CompletionAction
    reason: str


class CompactionStarted(msgspec.Struct, frozen=True, tag_field="type", tag="compaction.started"):
    """A context policy shortens a request that is too long; the three events of one have one id."""

    compaction_id: str
    policy_id: str
    before_tokens: int


class CompactionCompleted(msgspec.Struct, frozen=True, tag_field="type", tag="compaction.completed"):
    """The request was shortened; history is unchanged."""

    compaction_id: str
    policy_id: str
    before_tokens: int
    after_tokens: int


class CompactionFailed(msgspec.Struct, frozen=True, tag_field="type", tag="compaction.failed"):
    """The request could not be shortened, or the run was cancelled meanwhile."""

    compaction_id: str
    policy_id: str
    before_tokens: int
    reason: str
    """At most 1,024 characters."""


CompactionPayload = CompactionStarted | CompactionCompleted | CompactionFailed


class ApprovalRequested(msgspec.Struct, frozen=True, tag_field="type", tag="tool.approval.request"):
    """A call waits for a decision; the request is stored before anybody sees this."""

    request: ApprovalRequest


class ApprovalResolved(msgspec.Struct, frozen=True, tag_field="type", tag="tool.approval.resolved"):
    """A call waits no longer."""

    approval_id: str
    state: ApprovalState
    by: str = ""
    """Who decided; empty where time or the end of the run did."""
    reason: str = ""


class MessageStarted(msgspec.Struct, frozen=True, tag_field="type", tag="message.started"):
    """A public message begins; its pieces and its end carry the same id."""

    id: str
    phase: MessagePhase


class MessageDelta(msgspec.Struct, frozen=True, tag_field="type", tag="message.delta"):
    """A piece of a public message, at most :data:`MAX_DELTA` characters."""

    id: str
    text: str


class PublicMessage(msgspec.Struct, frozen=True):
    """A whole public message."""

    id: str
    phase: MessagePhase
    text: str


class MessageCompleted(
    msgspec.Struct, frozen=True, tag_field="type", tag="message.completed", omit_defaults=True
):
    """A public message is whole. One too large for an event has no text here and an ``artifact_id``."""

    message: PublicMessage
    artifact_id: str | None = None


class MessageFailed(msgspec.Struct, frozen=True, tag_field="type", tag="message.failed"):
    """A public message that was begun will not be completed."""

    id: str
    reason: Literal["cancelled", "interrupted"]


class ToolProgress(msgspec.Struct, frozen=True, tag_field="type", tag="tool.progress"):
    """What a tool that is a generator has to say while it works: JSON data of its own."""

    tool_name: str
    tool_call_id: str
    data: Any = None


class ChildStarted(msgspec.Struct, frozen=True, tag_field="type", tag="child.started"):
    """A delegate has a place to run and was sent there; the envelope's ``run_id`` is the delegate's."""

    name: str


class ChildFinished(msgspec.Struct, frozen=True, tag_field="type", tag="child.finished"):
    """A delegate ended. ``usage`` is its own, without its delegates'."""

    name: str
    status: Status
    reason: Reason | None = None
    usage: Usage = msgspec.field(default_factory=Usage)


class EventsLost(msgspec.Struct, frozen=True, tag_field="type", tag="events.lost"):
    """A crash took the events ``first`` to ``last``; cursors inside that range stay valid."""

    first: int
    last: int


class Custom(msgspec.Struct, frozen=True, tag_field="type", tag="custom"):
    """An event of the application's own: a name and JSON data."""

    name: str
    data: Any = None


Payload = (
    RunStarted | RunTerminal | TextDelta | ModelComplete | ToolComplete | ToolProgress | Control
    | InputRequested | InputResolved | RunResumed | InputReceived | InputApplied | Completion
    | MessageStarted | MessageDelta | MessageCompleted | MessageFailed | ChildStarted | ChildFinished
    | CompactionStarted | CompactionCompleted | CompactionFailed | ApprovalRequested | ApprovalResolved
    | EventsLost | Custom
)  # fmt: skip

_FROM_RUNTIME_ONLY = (
    RunStarted,
    RunTerminal,
    EventsLost,
    ChildStarted,
    ChildFinished,
    Control,
    InputRequested,
    InputResolved,
    RunResumed,
    InputReceived,
    InputApplied,
    Completion,
    # What was spent is read from these after a crash: nobody else may say it.
    ModelComplete,
    ToolComplete,
    CompactionStarted,
    CompactionCompleted,
    CompactionFailed,
    ApprovalRequested,
    ApprovalResolved,
)


class Event(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The envelope. ``sequence`` counts 1, 2, 3, ... in one run and is the cursor to go on from.

    ``run_id`` is that of the run or delegate that it tells of; ``participant`` is a delegate's name.
    """

    schema_version: int = SCHEMA_VERSION
    event_id: str
    sequence: int
    timestamp: float
    """Epoch seconds."""
    session_id: str
    run_id: str
    attempt_id: str
    parent_run_id: str | None = None
    root_run_id: str
    participant: str = ""
    payload: Payload

    @property
    def type(self) -> str:
        """The payload's type, such as ``run.terminal``."""
        return payload_type(self.payload)


def payload_type(payload: Payload) -> str:
    return str(type(payload).__struct_config__.tag)


def check_payload(value: object) -> Payload:
    """A payload that an application may emit: a struct of this module, or a mapping with ``type``.

    Raises:
        InputError: unknown type or shape, a type that only the runtime emits, or more than
            :data:`MAX_EVENT_BYTES` of JSON.
    """
    try:
        plain = msgspec.to_builtins(dict(value) if isinstance(value, Mapping) else value)
        payload: Payload = msgspec.convert(plain, Payload)
        size = len(encode_json(payload))
    except UnicodeEncodeError:
        raise InputError("the event holds a lone surrogate, which no store can carry") from None
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(
            f"not an event payload: {error}; for an event of your own use retinue.events.Custom(name, data)"
        ) from None
    if isinstance(payload, _FROM_RUNTIME_ONLY):
        raise InputError(f"{payload_type(payload)} is emitted by the runtime only")
    if size > MAX_EVENT_BYTES:
        raise InputError(
            f"the event has {size} bytes of JSON, more than {MAX_EVENT_BYTES}; put the data into an artifact"
        )
    return payload


def encode_event(event: Event) -> bytes:
    return msgspec.json.encode(event)


decode_event = msgspec.json.Decoder(Event).decode
