"""The one interface that every model provider speaks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol, runtime_checkable

import msgspec

from retinue.budgets import Usage
from retinue.messages import Message, ToolCall

FinishReason = Literal["stop", "tool_calls", "length", "content_filter"]


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
    role: str = "main"
    """Model role that the call was made under."""
    participant: str = ""
    """Name of the delegate that asks; empty for the root of the tree."""


class ModelResponse(msgspec.Struct, frozen=True, kw_only=True):
    """One answer. ``usage`` is ``None`` when the provider did not say: unknown is not zero."""

    text: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    usage: Usage | None = None
    finish_reason: FinishReason = "stop"
    extras: dict[str, Any] | None = None
    """Opaque continuation, sent back verbatim with the assistant message."""


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
