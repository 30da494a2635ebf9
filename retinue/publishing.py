"""Public messages: what people see of an answer, as events (contract section 6).

A message is started, grows by deltas and is completed, or failed, all under one id. Reasoning as such,
signatures and opaque extras are never in one. An answer that comes whole gives messages of a known phase; one
that is streamed may only say at its end what it was, and its messages are ``pending`` until then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from retinue.deltas import Deltas, text_size
from retinue.errors import InputError
from retinue.events import (
    MessageCompleted,
    MessageDelta,
    MessageFailed,
    MessagePhase,
    MessageStarted,
    Payload,
    PublicMessage,
    TextDelta,
)
from retinue.ids import new_id
from retinue.models import ItemPhase, ModelResponse, PublicItem
from retinue.protocol import Emit

if TYPE_CHECKING:
    from retinue.services import ExecutionServices
    from retinue.stream_assembly import StreamedItem

MAX_INLINE_BYTES = 60_000
"""Largest ``message.completed`` that carries its text, in bytes of JSON."""
MIME_TYPE = "application/json"

_TEXT_EVENTS = (TextDelta, MessageStarted, MessageDelta, MessageCompleted, MessageFailed)


def is_text_event(payload: Payload) -> bool:
    """Whether this is text for people, which a delegate keeps to itself unless the app says otherwise."""
    return isinstance(payload, _TEXT_EVENTS)


def answer_phase(response: ModelResponse) -> ItemPhase:
    """The phase of text that has none of its own: the answer's, else ``commentary`` beside tool calls."""
    if response.phase is not None:
        return response.phase
    calls = bool(response.tool_calls) or response.finish_reason == "tool_calls"
    return "commentary" if calls else "final"


@dataclass(eq=False)
class _Open:
    """A message that was started and has not ended."""

    id: str
    started: MessagePhase
    pieces: list[str] = field(default_factory=list)


class MessagePublisher:
    """Publishes the messages of one execution. Belongs to its user loop.

    A delegate's messages become events only where ``RuntimeConfig.child_text`` says so; what was published
    is returned either way.
    """

    def __init__(self, services: ExecutionServices, deltas: Deltas) -> None:
        self._services = services
        self._deltas = deltas

    async def message(self, text: str, phase: MessagePhase = "final") -> PublicMessage:
        """Publish one message that is there as a whole."""
        if phase not in ("commentary", "final", "reasoning_summary"):
            raise InputError(
                f"the phase of a message is commentary, final or reasoning_summary, not {phase!r}"
            )
        if not text_size(text):
            raise InputError("a public message needs some text")
        return await self._whole(new_id("message"), phase, text)

    async def response(self, response: ModelResponse) -> list[PublicMessage]:
        """Publish what an answer that came whole has for people."""
        _check_response(response)
        phase = answer_phase(response)
        items: Sequence[PublicItem] = response.items or (PublicItem(id="", phase=phase, text=response.text),)
        ids = _Ids()
        return [
            await self._whole(ids.take(item.id), item.phase or phase, item.text)
            for item in items
            if item.text
        ]

    def stream(self) -> StreamedMessages:
        """A publisher of the messages of one stream, as they come."""
        return StreamedMessages(self)

    # --- events -------------------------------------------------------------------------------------------

    def _emit(self, payload: Payload) -> None:
        if self._services.speaks:
            self._services.tell(Emit(participant=self._services.participant, payload=payload))

    async def _whole(self, message_id: str, phase: MessagePhase, text: str) -> PublicMessage:
        opened = self._start(message_id, phase)
        self._grow(opened, text)
        try:
            return await self._complete(opened, phase)
        except BaseException:  # what it takes to keep a large one may fail or be cancelled
            self._fail(opened)
            raise

    def _start(self, message_id: str, phase: MessagePhase) -> _Open:
        self._emit(MessageStarted(message_id, phase))
        return _Open(message_id, phase)

    def _grow(self, opened: _Open, text: str) -> None:
        opened.pieces.append(text)
        if self._services.speaks:
            self._deltas.add(text, opened.id)

    async def _complete(self, opened: _Open, phase: MessagePhase) -> PublicMessage:
        message = PublicMessage(opened.id, phase, "".join(opened.pieces))
        completed = MessageCompleted(message)
        if self._services.speaks and len(msgspec.json.encode(completed)) > MAX_INLINE_BYTES:
            whole = msgspec.json.encode(message)
            kept = await self._services.put_artifact(whole, mime_type=MIME_TYPE)
            completed = MessageCompleted(PublicMessage(message.id, phase, ""), kept.id)
        self._emit(completed)
        return message

    def _fail(self, opened: _Open) -> None:
        self._emit(MessageFailed(opened.id, "cancelled" if self._services.cancelled else "interrupted"))


class StreamedMessages:
    """The messages of one stream."""

    def __init__(self, publisher: MessagePublisher) -> None:
        self._publisher = publisher
        self._ids = _Ids()
        self._open: dict[StreamedItem, _Open] = {}

    def grow(self, item: StreamedItem, text: str) -> None:
        """This text was added to this item."""
        opened = self._open.get(item)
        if opened is None:
            opened = self._publisher._start(self._ids.take(item.id or ""), item.phase or "pending")
            self._open[item] = opened
        self._publisher._grow(opened, text)

    async def complete(self, response: ModelResponse) -> list[PublicMessage]:
        """The stream ended well, and this is what it gave."""
        published: list[PublicMessage] = []
        for item, opened in list(self._open.items()):
            published.append(await self._publisher._complete(opened, item.phase or answer_phase(response)))
            del self._open[item]
        return published

    def fail(self) -> None:
        """The stream failed, was left or was cancelled: every message that is open fails, once."""
        opened, self._open = self._open, {}
        for message in opened.values():
            self._publisher._fail(message)


def _check_response(response: object) -> None:
    """A driver may make a response of its own: structs do not look at what they are made of."""
    if not isinstance(response, ModelResponse):
        raise InputError(f"not a ModelResponse but a {type(response).__name__}")
    try:
        msgspec.json.decode(msgspec.json.encode(response), type=ModelResponse)
    except UnicodeEncodeError:
        raise InputError("the response holds a lone surrogate, which no store can carry") from None
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(f"not a response that can be published: {error}") from None


class _Ids:
    """Ids for the messages of one answer: the provider's, behind a prefix that no other answer has."""

    def __init__(self) -> None:
        self._prefix = new_id("message")
        self._taken: set[str] = set()

    def take(self, item_id: str) -> str:
        message_id, number = f"{self._prefix}:{item_id}" if item_id else self._prefix, 1
        while message_id in self._taken:  # some providers repeat their ids
            number += 1
            message_id = f"{self._prefix}:{number}:{item_id}"
        self._taken.add(message_id)
        return message_id
