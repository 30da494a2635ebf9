"""What a tool gave, as text for the model or as bytes to keep, and why it gave nothing."""

from __future__ import annotations

from typing import Any

import msgspec

_BINARY = "application/octet-stream"


class ToolProblem(Exception):
    """A call that has no output; its text is the error result as the model reads it."""


class ToolOutput(msgspec.Struct, frozen=True, tag=True):
    """A tool's return value: text as it is, ``None`` as nothing, bytes as bytes, anything else as JSON."""

    data: bytes
    """UTF-8, unless it was bytes."""
    mime_type: str = "text/plain"

    @classmethod
    def of(cls, value: Any, tool: str) -> ToolOutput:
        """``value`` as output; :class:`ToolProblem` when it is text that no store can carry."""
        if isinstance(value, bytes | bytearray | memoryview):
            return cls(bytes(value), _BINARY)
        if value is None:
            return cls(b"")
        if not isinstance(value, str):
            try:
                return cls(msgspec.json.encode(value), "application/json")
            except (TypeError, ValueError):
                value = str(value)
        try:
            return cls(value.encode())
        except UnicodeEncodeError:
            raise ToolProblem(f"{tool} gave text with a lone surrogate") from None

    @property
    def text(self) -> str | None:
        """``None`` when it is not text."""
        return None if self.mime_type == _BINARY else self.data.decode()
