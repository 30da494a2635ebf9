"""The one interface that every model provider speaks."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias, runtime_checkable

import msgspec

from retinue.budgets import Usage
from retinue.errors import ValidationFailed
from retinue.messages import Message, ToolCall

FinishReason = Literal["stop", "tool_calls", "length", "content_filter"]
AnswerPhase = Literal["commentary", "final"]
"""``commentary`` is said on the way, ``final`` is the answer."""
ItemPhase = Literal["commentary", "final", "reasoning_summary"]


class ToolSchema(msgspec.Struct, frozen=True):
    """A tool as a provider is told of it; ``parameters`` is a JSON schema of an object."""

    name: str
    description: str
    parameters: dict[str, Any]


class ModelRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One call to a model."""

    messages: Sequence[Message]
    tools: Sequence[ToolSchema] = ()
    max_tokens: int | None = None
    """Output cap that the ledger granted; ``None`` when tokens are unlimited and no cap was asked for."""
    temperature: float | None = None
    options: dict[str, Any] = msgspec.field(default_factory=dict)
    """Further options, as a step controller set them; passed to the provider's API by their names."""
    role: str = "main"
    """Model role that the call was made under."""
    participant: str = ""
    """Name of the delegate that asks; empty for the root of the tree."""


class PublicItem(msgspec.Struct, frozen=True, kw_only=True):
    """A part of an answer that its provider keeps apart and that people may see."""

    id: str
    """The provider's own; events carry it behind a prefix that makes it unique in the run."""
    phase: ItemPhase | None = None
    """``None`` where the provider does not say; it is then found as for an answer without items."""
    text: str = ""


class ModelResponse(msgspec.Struct, frozen=True, kw_only=True):
    """One answer. ``usage`` is ``None`` when the provider did not say: unknown is not zero."""

    text: str = ""
    """What history keeps: the text of all items but summaries of reasoning."""
    tool_calls: tuple[ToolCall, ...] = ()
    usage: Usage | None = None
    finish_reason: FinishReason = "stop"
    extras: dict[str, Any] | None = None
    """Opaque continuation, sent back verbatim with the assistant message."""
    phase: AnswerPhase | None = None
    """What the provider says that ``text`` is; ``None`` where it does not say."""
    items: tuple[PublicItem, ...] = ()
    """Parts that the provider keeps apart; ``text`` as a whole is the one part where there are none."""


# --- streams ----------------------------------------------------------------------------------------------


class TextPiece(msgspec.Struct, frozen=True, tag_field="type", tag="text"):
    """A piece of text. Pieces with one ``item_id``, or with none, belong together, in order."""

    text: str
    item_id: str | None = None
    phase: ItemPhase | None = None
    """May come with any piece of an item, and must then stay the same."""


class ToolCallPiece(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="tool_call"):
    """A piece of a tool call. Pieces with one ``index`` belong together."""

    index: int
    """Place of the call among those of the answer; calls are given in this order."""
    id: str | None = None
    name: str | None = None
    """Id and name come once, usually with the first piece."""
    arguments: str = ""
    """A fragment of the JSON of the arguments."""


class UsagePiece(msgspec.Struct, frozen=True, tag_field="type", tag="usage"):
    """What the call used."""

    usage: Usage
    terminal: bool = True
    """False for a running total, which a later report replaces. Only one report may be terminal."""


class FinishPiece(msgspec.Struct, frozen=True, tag_field="type", tag="finish"):
    """The answer is whole; every stream has one, and nothing but usage comes after it."""

    finish_reason: FinishReason = "stop"
    extras: dict[str, Any] | None = None
    phase: AnswerPhase | None = None
    """Of all items that have no phase of their own."""
    items: tuple[PublicItem, ...] = ()
    """Items as they ended, where the provider says: with their phase, or with text that was not streamed.
    What was streamed must be the beginning of it."""


ModelChunk: TypeAlias = TextPiece | ToolCallPiece | UsagePiece | FinishPiece


# --- clients ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ModelCapabilities:
    """What a client says of its provider, as its attribute ``capabilities``."""

    message_phases: Literal["native", "inferred"] = "inferred"
    """``native``: the provider says what is commentary and what is final."""
    reasoning_summaries: Literal["native", "unsupported"] = "unsupported"
    """``native``: it gives summaries of its reasoning that are meant to be shown."""


@runtime_checkable
class ModelClient(Protocol):
    """A provider of answers.

    ``generate`` may raise anything; raise :class:`retinue.errors.ModelFailed` with ``started=False`` when
    the request certainly never reached the provider, so that nothing is charged. It is cancelled through
    ``asyncio`` cancellation. A client must survive pickling: make connections lazily.
    """

    @property
    def provider_id(self) -> str: ...

    @property
    def model_id(self) -> str: ...

    async def generate(self, request: ModelRequest) -> ModelResponse: ...


@runtime_checkable
class StreamingModelClient(ModelClient, Protocol):
    """A client whose provider can give its answer piece by piece.

    ``stream`` is an async generator: it is not awaited, but iterated. It is iterated and closed in one
    task, and closing it must end the request. Errors and cancellation are as for ``generate``.
    """

    def stream(self, request: ModelRequest) -> AsyncIterator[ModelChunk]: ...


def capabilities_of(client: object) -> ModelCapabilities:
    """What a client declares; one that declares nothing infers phases and has no summaries.

    Raises:
        ValidationFailed: its ``capabilities`` are something else.
    """
    declared = getattr(client, "capabilities", None)
    if declared is None:
        return ModelCapabilities()
    if not isinstance(declared, ModelCapabilities):
        path = f"{type(client).__name__}.capabilities"
        raise ValidationFailed(f"{path} must be a ModelCapabilities, not {declared!r:.80}", path=path)
    return declared
