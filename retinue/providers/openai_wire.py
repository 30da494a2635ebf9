"""Messages, tools and usage in the form of the chat completions API, and back."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from retinue.budgets import Usage
from retinue.messages import AudioPart, Content, FilePart, ImagePart, Message, TextPart
from retinue.models import (
    FinishPiece,
    FinishReason,
    ModelChunk,
    TextPiece,
    ToolCallPiece,
    ToolSchema,
    UsagePiece,
)


class WireNames:
    """Tool names as the API takes them (letters, digits, _ and -, at most 64), and back."""

    def __init__(self, tools: Sequence[ToolSchema]) -> None:
        self._wire: dict[str, str] = {}
        for schema in tools:
            self.to_wire(schema.name)

    def to_wire(self, name: str) -> str:
        if name not in self._wire:
            wire = base = re.sub(r"[^A-Za-z0-9_-]", "_", name)[:64]
            number = 2
            while wire in self._wire.values():
                wire, number = f"{base[:60]}_{number}", number + 1
            self._wire[name] = wire
        return self._wire[name]

    def from_wire(self, wire: str) -> str:
        return next((name for name, known in self._wire.items() if known == wire), wire)


def wire_tool(schema: ToolSchema, names: WireNames) -> dict[str, Any]:
    """A tool schema as the API takes it."""
    return {
        "type": "function",
        "function": {
            "name": names.to_wire(schema.name),
            "description": schema.description,
            "parameters": schema.parameters,
        },
    }


def wire_message(message: Message, names: WireNames) -> dict[str, Any]:
    """A message as the API takes it; opaque extras of other providers are left out."""
    if message.role == "tool":
        return {"role": "tool", "tool_call_id": message.tool_call_id, "content": message.text}
    wire: dict[str, Any] = {"role": message.role, "content": _wire_content(message.content)}
    if message.tool_calls:
        wire["content"] = wire["content"] or None
        wire["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": names.to_wire(call.name),
                    "arguments": json.dumps(call.arguments, ensure_ascii=False),
                },
            }
            for call in message.tool_calls
        ]
    return wire


def _wire_content(content: Content) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    return [_wire_part(part) for part in content]


def _wire_part(part: TextPart | ImagePart | AudioPart | FilePart) -> dict[str, Any]:
    if isinstance(part, TextPart):
        return {"type": "text", "text": part.text}
    if isinstance(part, ImagePart):
        is_url = part.data.startswith(("http://", "https://", "data:"))
        url = part.data if is_url else f"data:{part.mime_type or 'image/png'};base64,{part.data}"
        return {"type": "image_url", "image_url": {"url": url}}
    if isinstance(part, AudioPart):
        kind = (part.mime_type or "audio/wav").removeprefix("audio/")
        return {"type": "input_audio", "input_audio": {"data": part.data, "format": kind}}
    data = f"data:{part.mime_type or 'application/octet-stream'};base64,{part.data}"
    return {"type": "file", "file": {"filename": part.filename or "file", "file_data": data}}


def usage(reported: object) -> Usage | None:
    """The usage of an answer, or ``None`` where the server did not say both numbers: unknown is not zero."""
    if not isinstance(reported, Mapping):
        return None
    given, made = _number(reported.get("prompt_tokens")), _number(reported.get("completion_tokens"))
    if given is None or made is None:
        return None
    return Usage(
        input_tokens=given,
        output_tokens=made,
        reasoning_tokens=_detail(reported, "completion_tokens_details", "reasoning_tokens"),
        cached_tokens=_detail(reported, "prompt_tokens_details", "cached_tokens"),
        audio_input_tokens=_detail(reported, "prompt_tokens_details", "audio_tokens"),
        audio_output_tokens=_detail(reported, "completion_tokens_details", "audio_tokens"),
    )


def _detail(reported: Mapping[str, Any], group: str, name: str) -> int:
    details = reported.get(group)
    return (_number(details.get(name)) if isinstance(details, Mapping) else None) or 0


def _number(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def finish_reason(reported: object, has_calls: bool) -> FinishReason:
    """The reason as ours. Some servers end an answer with complete tool calls as ``stop``."""
    if reported in ("length", "content_filter"):
        return "length" if reported == "length" else "content_filter"
    return "tool_calls" if has_calls else "stop"


class StreamPieces:
    """Turns the chunks of one streamed completion into ours.

    The usage comes last, in a chunk without choices. Some servers repeat it with every chunk, as a running
    total, and some put it into the last one that has choices. Reasoning is left out.
    """

    def __init__(self, names: WireNames) -> None:
        self._names = names
        self._calls: dict[str, int] = {}
        """Places of tool calls by id, for servers that give none."""
        self._place = 0
        self._called = False
        self._finished = False

    def take(self, raw: Mapping[str, Any]) -> Iterator[ModelChunk]:
        """The pieces in a chunk; raises ``TypeError`` or ``LookupError`` for what is none."""
        choices = raw.get("choices") or []
        for choice in choices[:1]:
            delta = choice.get("delta") or {}
            if text := delta.get("content") or delta.get("refusal"):
                yield TextPiece(text)
            for call in delta.get("tool_calls") or []:
                yield self._call(call)
            finish = choice.get("finish_reason")
            if finish and not self._finished:
                self._finished = True
                yield FinishPiece(finish_reason(finish, self._called))
        if (used := usage(raw.get("usage"))) is not None:
            yield UsagePiece(used, terminal=not choices)

    def _call(self, call: Mapping[str, Any]) -> ToolCallPiece:
        function = call.get("function") or {}
        call_id, name, index = call.get("id"), function.get("name"), call.get("index")
        if index is None:
            index = self._calls.setdefault(call_id, len(self._calls)) if call_id else self._place
        self._place, self._called = index, True
        return ToolCallPiece(
            index=index,
            id=call_id,
            name=self._names.from_wire(name) if name else None,
            arguments=function.get("arguments") or "",
        )
