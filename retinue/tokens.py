"""Token estimates for when no tokenizer is at hand (contract section 9)."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence

import msgspec

from retinue.errors import Unsupported
from retinue.messages import Message
from retinue.models import ModelClient, ModelRequest, ToolSchema

_PER_MESSAGE = 4
_O_SERIES = re.compile(r"(^|[/:])o\d")


def characters_per_token(model_id: str) -> float:
    """Characters of one token, by the family that the model id names (contract section 9)."""
    name = model_id.lower()
    if "gemini" in name:
        return 3.4
    if "claude" in name:
        return 3.2
    if "gpt-4" in name or "gpt-3.5" in name or _O_SERIES.search(name):
        return 3.3
    return 3.0


def estimate_text(text: str, model_id: str = "") -> int:
    """Tokens of a text: its characters over :func:`characters_per_token`, rounded up; 0 when empty."""
    return math.ceil(len(text) / characters_per_token(model_id))


def estimate_messages(
    messages: Sequence[Message], tools: Sequence[ToolSchema] = (), model_id: str = ""
) -> int:
    """Tokens of a request: its texts, tool calls, provider extras and tool schemas, 4 more a message."""
    total = 0
    for message in messages:
        content = message.content if isinstance(message.content, str) else _json(message.content)
        calls = _json(message.tool_calls)
        extras = _json(message.extras or {})
        total += _PER_MESSAGE + sum(estimate_text(text, model_id) for text in (content, calls, extras))
    for tool in tools:
        total += estimate_text(_json(tool), model_id)
    return total


def estimate_request(
    request: ModelRequest,
    client: ModelClient,
    estimate: Callable[[ModelRequest, ModelClient], int] | None = None,
) -> int:
    """Tokens of a request: as the application estimates them, else by :func:`estimate_messages`.

    Raises:
        Unsupported: the application gave something else than a nonnegative integer.
    """
    if estimate is None:
        return estimate_messages(request.messages, request.tools, client.model_id)
    projected: object = estimate(request, client)
    if isinstance(projected, bool) or not isinstance(projected, int) or projected < 0:
        raise Unsupported(
            f"estimate_input_tokens gave {projected!r}; it must give a nonnegative integer",
            operation="estimate_input_tokens",
        )
    return projected


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()
