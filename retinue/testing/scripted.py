"""A model with a script, that records what it was asked, in child processes too.

It streams: an answer that the script gives whole comes in few pieces, and :func:`stream` says piece by piece
what comes, broken streams included.
"""

from __future__ import annotations

import asyncio
import atexit
import fcntl
import itertools
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from shutil import rmtree
from typing import Any

import msgspec

from retinue.budgets import Usage
from retinue.errors import RetinueError, error_from_payload
from retinue.messages import Message, ToolCall
from retinue.models import (
    AnswerPhase,
    FinishPiece,
    FinishReason,
    ItemPhase,
    ModelChunk,
    ModelRequest,
    ModelResponse,
    PublicItem,
    TextPiece,
    ToolCallPiece,
    ToolSchema,
    UsagePiece,
)
from retinue.stream_assembly import StreamAssembly, chunks_of


class Failure(msgspec.Struct, frozen=True, tag_field="type", tag="failure"):
    """Where a scripted stream breaks, with an error as its payload."""

    error: dict[str, Any]


class ScriptStep(msgspec.Struct, frozen=True, kw_only=True):
    """One answer of a script; made with :func:`reply`, :func:`tool_calls`, :func:`stream`, a string or an
    exception."""

    response: ModelResponse | None = None
    chunks: tuple[ModelChunk | Failure, ...] | None = None
    """What is streamed, piece by piece, instead of a response."""
    error: dict[str, Any] | None = None
    delay: float = 0.0
    """Seconds before the answer, or before each piece of a stream."""


class Recorded(msgspec.Struct, frozen=True, kw_only=True):
    """One request that a :class:`ScriptedModel` got."""

    participant: str
    messages: Sequence[Message]
    tools: Sequence[ToolSchema]
    max_tokens: int | None
    temperature: float | None
    role: str
    streamed: bool = False
    """It was asked for a stream."""


_DEFAULT_USAGE = Usage(input_tokens=10, output_tokens=5)


def reply(
    text: str = "",
    *,
    usage: Usage | None = _DEFAULT_USAGE,
    delay: float = 0.0,
    finish_reason: FinishReason = "stop",
    phase: AnswerPhase | None = None,
    items: Sequence[tuple[ItemPhase | None, str]] = (),
) -> ScriptStep:
    """An answer in text.

    Args:
        text: the answer; of the items, where there are any, unless it is given.
        usage: ``None`` is a provider that does not say.
        delay: seconds before it.
        finish_reason: why it ended.
        phase: what the provider says that the text is.
        items: parts that the provider keeps apart, with their phases: ``[("commentary", "Let me see.")]``.
    """
    made = tuple(
        PublicItem(id=f"item-{number}", phase=phase, text=part)
        for number, (phase, part) in enumerate(items, start=1)
    )
    shown = text or "".join(item.text for item in made if item.phase != "reasoning_summary")
    response = ModelResponse(text=shown, usage=usage, finish_reason=finish_reason, phase=phase, items=made)
    return ScriptStep(response=response, delay=delay)


_call_numbers = itertools.count(1)


def tool_calls(
    *calls: tuple[str, Mapping[str, Any]] | ToolCall,
    text: str = "",
    usage: Usage | None = _DEFAULT_USAGE,
    delay: float = 0.0,
    phase: AnswerPhase | None = None,
) -> ScriptStep:
    """An answer that calls tools: ``tool_calls(("lookup", {"id": "42"}))``."""
    made = tuple(
        call
        if isinstance(call, ToolCall)
        else ToolCall(f"scripted-{next(_call_numbers)}", call[0], dict(call[1]))
        for call in calls
    )
    response = ModelResponse(text=text, tool_calls=made, usage=usage, finish_reason="tool_calls", phase=phase)
    return ScriptStep(response=response, delay=delay)


def stream(
    *pieces: str | ModelChunk | Exception,
    usage: Usage | None = _DEFAULT_USAGE,
    delay: float = 0.0,
    finish_reason: FinishReason | None = None,
    phase: AnswerPhase | None = None,
    finish: bool = True,
) -> ScriptStep:
    """An answer that is streamed: ``stream("Hel", "lo")``.

    Args:
        pieces: strings are pieces of text, anything else is a chunk; an exception breaks the stream there.
        usage: reported before the end; ``None`` reports nothing. Give :class:`UsagePiece` chunks for more.
        delay: seconds before each piece.
        finish_reason: ``tool_calls`` where there are pieces of tool calls, else ``stop``.
        phase: of the text, said at the end.
        finish: false ends the stream without a finish, as a broken connection does.
    """
    made: list[ModelChunk | Failure] = []
    for piece in pieces:
        if isinstance(piece, Exception):
            made.append(Failure(_payload(piece)))
        else:
            made.append(TextPiece(piece) if isinstance(piece, str) else piece)
    calls = any(isinstance(piece, ToolCallPiece) for piece in made)
    if usage is not None:
        made.append(UsagePiece(usage))
    if finish and not any(isinstance(piece, FinishPiece) for piece in made):
        made.append(FinishPiece(finish_reason or ("tool_calls" if calls else "stop"), phase=phase))
    return ScriptStep(chunks=tuple(made), delay=delay)


def call_pieces(name: str, *arguments: str, index: int = 0, id: str | None = None) -> list[ToolCallPiece]:
    """One tool call in pieces, for :func:`stream`: ``stream(*call_pieces("lookup", '{"id": ', '"42"}'))``.

    Args:
        name: the tool.
        arguments: fragments of the JSON of its arguments, which need not be JSON.
        index: place among the calls of the answer.
        id: made up when left out.
    """
    first = ToolCallPiece(index=index, id=id or f"scripted-{next(_call_numbers)}", name=name)
    return [first, *(ToolCallPiece(index=index, arguments=piece) for piece in arguments)]


Script = Sequence[ScriptStep | str | Exception]


class ScriptedModel:
    """Answers from a script, in order, and records every request.

    Args:
        script: the answers; or a mapping of participant names to theirs (``""`` is the root of the tree),
            because delegates run in other processes and in no fixed order. A participant that the mapping
            does not name uses the key ``"*"``.

    Copies of it, in any process of this machine, share one record and one place in the script, kept in a
    temporary folder that goes away when the process ends that made the original.
    """

    provider_id = "scripted"
    model_id = "scripted-1"

    def __init__(self, script: Script | Mapping[str, Script] = ()) -> None:
        scripts: Mapping[str, Script] = script if isinstance(script, Mapping) else {"*": script}
        self._scripts = {name: [_step(item) for item in steps] for name, steps in scripts.items()}
        self._folder = tempfile.mkdtemp(prefix="retinue-script-")
        atexit.register(rmtree, self._folder, True)

    def __getstate__(self) -> dict[str, Any]:
        return {"scripts": msgspec.json.encode(self._scripts), "folder": self._folder}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._scripts = msgspec.json.decode(state["scripts"], type=dict[str, list[ScriptStep]])
        self._folder = state["folder"]

    @property
    def requests(self) -> list[Recorded]:
        """Every request so far, from all processes; in order for each participant."""
        found: list[Recorded] = []
        for path in sorted(Path(self._folder).glob("*.jsonl")):
            found.extend(
                msgspec.json.decode(line, type=Recorded) for line in path.read_bytes().splitlines() if line
            )
        return found

    def requests_of(self, participant: str) -> list[Recorded]:
        """The requests of one participant; ``""`` is the root."""
        return [request for request in self.requests if request.participant == participant]

    async def generate(self, request: ModelRequest) -> ModelResponse:
        step = self._next(request)
        if step.chunks is None:
            await _wait(step)
            return _response(step)
        assembly = StreamAssembly(self)
        async for chunk in _streamed(step):
            assembly.take(chunk)
        return assembly.response()

    async def stream(self, request: ModelRequest) -> AsyncIterator[ModelChunk]:
        step = self._next(request, streamed=True)
        if step.chunks is None:
            await _wait(step)
            for chunk in chunks_of(_response(step)):
                yield chunk
        else:
            async for chunk in _streamed(step):
                yield chunk

    def _next(self, request: ModelRequest, streamed: bool = False) -> ScriptStep:
        key = request.participant if request.participant in self._scripts else "*"
        index = self._record(request, key, streamed)
        steps = self._scripts.get(key, [])
        if index >= len(steps):
            raise RetinueError(
                f"the script of participant {request.participant!r} has {len(steps)} answers and was asked "
                f"for number {index + 1}",
                code="execution_failed",
            )
        return steps[index]

    def _record(self, request: ModelRequest, key: str, streamed: bool) -> int:
        """Write the request down; how many this part of the script had before."""
        name = key.encode().hex() or "root"
        line = msgspec.json.encode(
            Recorded(
                participant=request.participant,
                messages=request.messages,
                tools=request.tools,
                max_tokens=request.max_tokens,
                temperature=request.temperature,
                role=request.role,
                streamed=streamed,
            )
        )
        with (Path(self._folder) / f"{name}.jsonl").open("a+b") as record:
            fcntl.flock(record, fcntl.LOCK_EX)
            record.seek(0)
            before = sum(1 for _ in record)
            record.write(line + b"\n")
        return before


def _step(item: ScriptStep | str | Exception) -> ScriptStep:
    if isinstance(item, ScriptStep):
        return item
    if isinstance(item, str):
        return reply(item)
    return ScriptStep(error=_payload(item))


def _payload(error: Exception) -> dict[str, Any]:
    if isinstance(error, RetinueError):
        return error.to_payload()
    return {"code": "execution_failed", "message": str(error) or type(error).__name__}


async def _wait(step: ScriptStep) -> None:
    if step.delay:
        await asyncio.sleep(step.delay)


def _response(step: ScriptStep) -> ModelResponse:
    if step.error is not None:
        raise error_from_payload(step.error)
    assert step.response is not None
    return step.response


async def _streamed(step: ScriptStep) -> AsyncIterator[ModelChunk]:
    for piece in step.chunks or ():
        await _wait(step)
        if isinstance(piece, Failure):
            raise error_from_payload(piece.error)
        yield piece
