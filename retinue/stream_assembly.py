"""An answer put together from its pieces, and taken apart into pieces again (contract sections 5 and 6)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from retinue.budgets import Usage
from retinue.errors import ModelFailed
from retinue.messages import ToolCall
from retinue.models import (
    FinishPiece,
    ItemPhase,
    ModelChunk,
    ModelClient,
    ModelResponse,
    PublicItem,
    TextPiece,
    ToolCallPiece,
    UsagePiece,
)
from retinue.tokens import estimate_text

_CHUNKS = (TextPiece, ToolCallPiece, UsagePiece, FinishPiece)
_decoder: msgspec.json.Decoder[ModelChunk] = msgspec.json.Decoder(ModelChunk)
_arguments = msgspec.json.Decoder(dict[str, Any])


@dataclass(eq=False)
class StreamedItem:
    """A part of an answer as far as it has come."""

    id: str | None
    """The provider's; ``None`` for text that it keeps apart from nothing."""
    phase: ItemPhase | None = None
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.pieces)


@dataclass(eq=False)
class _StreamedCall:
    id: str = ""
    name: str = ""
    arguments: list[str] = field(default_factory=list)


class StreamAssembly:
    """Takes the pieces of one answer, in order, and gives the whole.

    Everything that it raises is a :class:`ModelFailed` that names the provider; what came before still
    stands then, so that usage which was reported is charged as it was reported.
    """

    def __init__(self, client: ModelClient) -> None:
        self._called = f"{client.provider_id} {client.model_id}"
        self._items: dict[tuple[str, str], StreamedItem] = {}
        self._calls: dict[int, _StreamedCall] = {}
        self._reported: UsagePiece | None = None
        self._finish: FinishPiece | None = None
        self.begun = False
        """Something has come, so the provider certainly began."""

    @property
    def usage(self) -> Usage | None:
        """What the call used, once that is known whole; a running total of a broken stream is not."""
        report = self._reported
        whole = report is not None and (report.terminal or self._finish is not None)
        return report.usage if report is not None and whole else None

    def estimate(self, model_id: str) -> Usage | None:
        """What can be told of a stream that broke off: the last running total, or else the output that came.

        ``None`` where nothing came. Without a running total the input is 0: whoever asked knows it better.
        """
        if self._reported is not None:
            return self._reported.usage
        if not self.begun:
            return None
        pieces = [item.text for item in self._items.values()]
        for call in self._calls.values():
            pieces += [call.name, "".join(call.arguments)]
        return Usage(output_tokens=sum(estimate_text(piece, model_id) for piece in pieces))

    @property
    def finished(self) -> bool:
        """The finish has come: nothing but usage may follow."""
        return self._finish is not None

    def take(self, given: object) -> list[tuple[StreamedItem, str]]:
        """Take the next piece; the text that it added, and to which items."""
        chunk = self._checked(given)
        self.begun = True
        if isinstance(chunk, UsagePiece):
            self._take_usage(chunk)
            return []
        if self._finish is not None:
            what = "a second finish" if isinstance(chunk, FinishPiece) else f"{type(chunk).__name__}"
            raise ModelFailed(f"{self._called} gave {what} after the stream had finished")
        if isinstance(chunk, TextPiece):
            return [(self._text_item(chunk), chunk.text)] if chunk.text else []
        if isinstance(chunk, ToolCallPiece):
            self._take_call(chunk)
            return []
        self._finish = chunk
        return [pair for item in chunk.items if (pair := self._end_item(item))[1]]

    def response(self) -> ModelResponse:
        """The whole answer, after the last piece."""
        finish = self._finish
        if finish is None:
            raise ModelFailed(f"{self._called}: the stream ended without a finish; nothing of it is used")
        items = list(self._items.values())
        kept_apart = any(item.id is not None or item.phase == "reasoning_summary" for item in items)
        phase = finish.phase
        if phase is None and not kept_apart:
            phase = next((item.phase for item in items if item.phase != "reasoning_summary"), None)
        return ModelResponse(
            text="".join(item.text for item in items if item.phase != "reasoning_summary"),
            tool_calls=tuple(self._whole_call(index) for index in sorted(self._calls)),
            usage=self.usage,
            finish_reason=finish.finish_reason,
            extras=finish.extras,
            phase=phase,
            items=tuple(
                PublicItem(id=item.id or item.phase or "answer", phase=item.phase, text=item.text)
                for item in items
                if kept_apart
            ),
        )

    # --- pieces -------------------------------------------------------------------------------------------

    def _checked(self, chunk: object) -> ModelChunk:
        if not isinstance(chunk, _CHUNKS):
            raise ModelFailed(f"{self._called} streamed {type(chunk).__name__}, not a ModelChunk")
        if isinstance(chunk, UsagePiece):
            usage: object = chunk.usage
            problem = usage.problem() if isinstance(usage, Usage) else f"it is a {type(usage).__name__}"
            if problem:
                raise ModelFailed(f"{self._called} reported impossible usage: {problem}")
        try:
            # A copy, made as whoever reads it later would: structs do not look at what they are made of.
            return _decoder.decode(msgspec.json.encode(chunk))
        except UnicodeEncodeError:
            raise ModelFailed(f"{self._called} streamed a lone surrogate, which no store can carry") from None
        except (TypeError, ValueError, RecursionError) as error:
            raise ModelFailed(f"{self._called} streamed a broken piece: {error}") from None

    def _take_usage(self, chunk: UsagePiece) -> None:
        if self._reported is not None and self._reported.terminal:
            if not chunk.terminal:
                return  # a running total that comes late says nothing new
            raise ModelFailed(f"{self._called} reported its usage twice, both times as the last")
        self._reported = chunk

    def _text_item(self, chunk: TextPiece) -> StreamedItem:
        item = self._item(chunk.item_id, chunk.phase)
        item.pieces.append(chunk.text)
        return item

    def _item(self, item_id: str | None, phase: ItemPhase | None) -> StreamedItem:
        if item_id is not None:
            key = ("id", item_id)
        else:
            key = ("none", "summary" if phase == "reasoning_summary" else "answer")
        item = self._items.setdefault(key, StreamedItem(item_id))
        if phase is not None and item.phase not in (None, phase):
            raise ModelFailed(
                f"{self._called} first called the item {item_id!r} {item.phase} and then {phase}"
            )
        item.phase = phase or item.phase
        return item

    def _end_item(self, whole: PublicItem) -> tuple[StreamedItem, str]:
        item = self._item(whole.id, whole.phase)
        streamed = item.text
        if not whole.text.startswith(streamed):
            raise ModelFailed(
                f"{self._called} rewrote the item {whole.id!r}: it ended with another text than was streamed"
            )
        added = whole.text[len(streamed) :]
        if added:
            item.pieces.append(added)
        return item, added

    def _take_call(self, chunk: ToolCallPiece) -> None:
        call = self._calls.setdefault(chunk.index, _StreamedCall())
        for name in ("id", "name"):
            known, told = getattr(call, name), getattr(chunk, name)
            if told and known and told != known:
                raise ModelFailed(
                    f"{self._called} changed the {name} of tool call {chunk.index} from {known!r} to {told!r}"
                )
            setattr(call, name, known or told or "")
        call.arguments.append(chunk.arguments)

    def _whole_call(self, index: int) -> ToolCall:
        call = self._calls[index]
        if not call.id or not call.name:
            raise ModelFailed(f"{self._called} called a tool without an id or a name; no tool was run")
        try:
            # A call without arguments often comes without their JSON too.
            arguments = _arguments.decode("".join(call.arguments).strip() or "{}")
        except (msgspec.DecodeError, RecursionError):
            cut = self._finish is not None and self._finish.finish_reason == "length"
            why = ": the answer was cut at the output cap" if cut else ""
            raise ModelFailed(
                f"{self._called} called {call.name} with arguments that are no JSON object{why}; "
                "no tool was run"
            ) from None
        return ToolCall(call.id, call.name, arguments)


def chunks_of(response: ModelResponse) -> Iterator[ModelChunk]:
    """An answer that came whole, as the pieces of a stream."""
    if response.items:
        for item in response.items:
            yield TextPiece(item.text, item.id, item.phase)
    elif response.text:
        yield TextPiece(response.text)
    for index, call in enumerate(response.tool_calls):
        yield ToolCallPiece(
            index=index, id=call.id, name=call.name, arguments=msgspec.json.encode(call.arguments).decode()
        )
    if response.usage is not None:
        yield UsagePiece(response.usage)
    yield FinishPiece(response.finish_reason, response.extras, response.phase)
