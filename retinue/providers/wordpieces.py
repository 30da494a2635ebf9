"""The tokens of the embedded model: pieces of words, digits and punctuation. About four letters each."""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

from retinue.messages import Message, ToolCall
from retinue.models import ToolSchema

_CJK = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af"
_PIECE = re.compile(rf"[{_CJK}]|[^\W\d_{_CJK}]{{1,6}}|\d{{1,3}}|_{{1,8}}|([^\w\s])\1{{0,15}}")
_PER_MESSAGE = 1
"""Each message has one token for its role."""


def count_pieces(text: str) -> int:
    """Tokens of a text: up to six letters, three digits or a run of one punctuation mark each."""
    return sum(1 for _ in _PIECE.finditer(text))


def count_messages(messages: Sequence[Message], tools: Sequence[ToolSchema] = ()) -> int:
    """Tokens of a whole request: contents, tool calls and tool schemas."""
    total = _PER_MESSAGE * len(messages)
    for message in messages:
        content = message.content if isinstance(message.content, str) else _json(message.content)
        total += count_pieces(content) + count_calls(message.tool_calls)
    return total + sum(count_pieces(_json(tool)) for tool in tools)


def count_calls(calls: Sequence[ToolCall]) -> int:
    """Tokens of tool calls: their names and arguments."""
    return sum(count_pieces(call.name) + count_pieces(_json(call.arguments)) for call in calls)


def cut_pieces(text: str, limit: int | None) -> tuple[str, bool]:
    """The first ``limit`` tokens of a text, and whether anything was cut."""
    if limit is None:
        return text, False
    end = 0
    for index, match in enumerate(_PIECE.finditer(text)):
        if index == limit:
            return text[:end], True
        end = match.end()
    return text, False


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()
