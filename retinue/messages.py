"""Conversation messages: what providers are sent and what history keeps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any, Literal
from uuid import UUID

import msgspec

from retinue.errors import InputError

Role = Literal["system", "user", "assistant", "tool"]

MAX_INPUT_BYTES = 65_536
"""Largest run input, in UTF-8 bytes of compact JSON (contract section 12)."""


class TextPart(msgspec.Struct, frozen=True, tag="text", forbid_unknown_fields=True):
    """Plain text."""

    text: str


class ImagePart(msgspec.Struct, frozen=True, tag="image", forbid_unknown_fields=True, omit_defaults=True):
    """A picture: ``data`` is base64 or a URL, as the provider takes it."""

    data: str
    mime_type: Literal["image/png", "image/jpeg", "image/gif", "image/webp"] | None = None


class AudioPart(msgspec.Struct, frozen=True, tag="audio", forbid_unknown_fields=True, omit_defaults=True):
    """Sound: ``data`` is base64."""

    data: str
    mime_type: Literal["audio/mp3", "audio/wav", "audio/ogg", "audio/webm"] | None = None


class FilePart(msgspec.Struct, frozen=True, tag="file", forbid_unknown_fields=True, omit_defaults=True):
    """A file: ``data`` is base64."""

    data: str
    mime_type: str
    filename: str | None = None


Part = TextPart | ImagePart | AudioPart | FilePart
Content = str | list[Part]
"""What a user can say: text, or a nonempty list of parts (contract section 12)."""


class ToolCall(msgspec.Struct, frozen=True):
    """A tool call that a model asked for; ``arguments`` is the parsed JSON object."""

    id: str
    name: str
    arguments: dict[str, Any] = msgspec.field(default_factory=dict)


class Message(msgspec.Struct, frozen=True, omit_defaults=True):
    """One message of a conversation.

    ``extras`` is opaque provider data (continuation, signatures), kept verbatim and never shown.
    """

    role: Role
    content: Content = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    extras: dict[str, Any] | None = None

    @property
    def text(self) -> str:
        """The text of the message: its string, or its text parts joined by line ends."""
        return content_text(self.content)


def system(text: str) -> Message:
    return Message(role="system", content=text)


def user(content: Content) -> Message:
    return Message(role="user", content=content)


def assistant(text: str, tool_calls: Sequence[ToolCall] = ()) -> Message:
    return Message(role="assistant", content=text, tool_calls=tuple(tool_calls))


def tool_result(call_id: str, text: str) -> Message:
    return Message(role="tool", content=text, tool_call_id=call_id)


def content_text(content: Content) -> str:
    """The text in a content value."""
    if isinstance(content, str):
        return content
    return "\n".join(part.text for part in content if isinstance(part, TextPart))


_NO_TEXT = (bytes, bytearray, memoryview, datetime, date, time, timedelta, UUID, Decimal)
"""What msgspec would turn into text that nobody wrote."""


def check_content(value: object) -> Content:
    """A validated copy of a run input (contract section 12).

    Args:
        value: a string, or a nonempty list of parts (structs or mappings with a ``type``).

    Raises:
        InputError: wrong shape, text that UTF-8 cannot carry, or more than :data:`MAX_INPUT_BYTES`.
    """
    if not isinstance(value, str | list | tuple):  # bytes and dates would become text that nobody wrote
        raise InputError(f"the input must be a string or a list of content parts, not {type(value).__name__}")
    try:
        plain = msgspec.to_builtins(value, builtin_types=_NO_TEXT)
        content: Content = msgspec.convert(plain, Content, strict=True)
        encoded = msgspec.json.encode(content)
    except UnicodeEncodeError:
        raise InputError("the input holds a lone surrogate, which no store can carry") from None
    except (ValueError, TypeError, RecursionError) as error:  # msgspec.ValidationError is a ValueError
        raise InputError(f"the input must be a string or a list of content parts: {error}") from None
    if content == []:
        raise InputError("the input is an empty list; give at least one content part")
    if len(encoded) > MAX_INPUT_BYTES:
        raise InputError(
            f"the input has {len(encoded)} bytes of JSON, more than the {MAX_INPUT_BYTES} that a run "
            "accepts; pass long material through a tool or a file"
        )
    return content


class ToolPairing:
    """Follows a conversation and refuses the message with which calls and results no longer pair up.

    Every tool result answers an open call, and no other message comes before all results arrived
    (contract section 9). Calls may be left open at the end.
    """

    def __init__(self) -> None:
        self.open_calls: set[str] = set()

    def add(self, message: Message) -> None:
        """Go on with this message, or raise ``ValueError`` and stay as before."""
        if message.role == "system":
            return
        if message.role == "tool":
            if message.tool_call_id not in self.open_calls:
                raise ValueError(f"answers the call {message.tool_call_id!r}, which is not open")
            self.open_calls.discard(message.tool_call_id)
            return
        if self.open_calls:
            raise ValueError(f"comes before the results of {sorted(self.open_calls)}")
        ids = [call.id for call in message.tool_calls]
        if not all(ids) or len(set(ids)) != len(ids):
            raise ValueError(f"has an empty or repeated call id: {ids}")
        self.open_calls.update(ids)


def check_structure(messages: Iterable[Message]) -> None:
    """Raise ``ValueError`` where tool calls and results do not pair up, or a call id comes twice."""
    pairing = ToolPairing()
    seen: set[str] = set()
    for index, message in enumerate(messages):
        try:
            pairing.add(message)
        except ValueError as error:
            raise ValueError(f"messages[{index}] {error}") from None
        for call in message.tool_calls:
            if call.id in seen:
                raise ValueError(f"messages[{index}] repeats the call id {call.id!r}")
            seen.add(call.id)


def close_open_calls(messages: Sequence[Message], reason: str) -> list[Message]:
    """Results for the calls that ``messages`` leaves open, each saying ``reason``.

    Providers refuse a history with a call that has no result; whatever interrupted a run, what is
    committed is closed with this.
    """
    open_calls: dict[str, None] = {}
    for message in messages:
        for call in message.tool_calls:
            open_calls[call.id] = None
        if message.tool_call_id is not None:
            open_calls.pop(message.tool_call_id, None)
    return [tool_result(call_id, f"[no result: {reason}]") for call_id in open_calls]


decode_message = msgspec.json.Decoder(Message).decode
"""One message from stored JSON; raises ``msgspec.ValidationError`` or ``msgspec.DecodeError``."""


def encode_message(message: Message) -> bytes:
    """One message as stored JSON.

    Raises:
        InputError: it could not be read again: text that UTF-8 cannot carry, or a member of a wrong type.
    """
    value: object = message
    if not isinstance(value, Message):
        raise InputError(f"a message must be a retinue.Message, not {type(value).__name__}")
    try:
        body = msgspec.json.encode(message)
        decode_message(body)
    except UnicodeEncodeError:
        raise InputError("a message holds a lone surrogate, which no store can carry") from None
    except (msgspec.ValidationError, TypeError, RecursionError) as error:
        raise InputError(f"not a message that can be kept: {error}") from None
    return body


def escape_surrogates(text: str) -> str:
    """``text`` with what UTF-8 cannot carry written out, for texts that must arrive whatever they hold."""
    return text.encode("utf-8", "backslashreplace").decode()
