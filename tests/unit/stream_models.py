"""Models that stream, for tests: of given pieces, or held in the middle."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

from retinue import (
    FinishPiece,
    ModelChunk,
    ModelRequest,
    ModelResponse,
    TextPiece,
    Usage,
    UsagePiece,
)
from retinue.messages import user
from tests.support import Flag, FunctionModel
from tests.unit.fake_root import FakeRoot

QUESTION = [user("x")]
USAGE = Usage(input_tokens=3, output_tokens=4)
HELLO = (TextPiece("Hel"), TextPiece("lo"), UsagePiece(USAGE), FinishPiece())


class StreamModel(FunctionModel):
    """A model whose streams are made by a function; keeps the requests that it got."""

    def __init__(self, function: Callable[[ModelRequest], AsyncIterator[ModelChunk]]) -> None:
        super().__init__()
        self._stream = function

    def stream(self, request: ModelRequest) -> AsyncIterator[ModelChunk]:
        self.requests.append(request)
        return self._stream(request)


class HeldStream(StreamModel):
    """Gives its first pieces, and the others when it is let go; knows how it ended."""

    def __init__(self, *chunks: ModelChunk, before: int = 1) -> None:
        super().__init__(self._held)
        self.chunks = chunks or HELLO
        self.before = before
        self.asked, self.go, self.closed = Flag(), Flag(), Flag()
        self.tasks: set[Any] = set()

    async def _held(self, request: ModelRequest) -> AsyncIterator[ModelChunk]:
        self.tasks.add(asyncio.current_task())
        try:
            for number, chunk in enumerate(self.chunks):
                if number == self.before:
                    self.asked.set()
                    await self.go.wait()
                yield chunk
        finally:
            self.tasks.add(asyncio.current_task())
            self.closed.set()


def streaming(*chunks: Any) -> StreamModel:
    """A model that always streams these pieces; an exception among them is raised there."""

    async def give(request: ModelRequest) -> AsyncIterator[ModelChunk]:
        for chunk in chunks:
            if isinstance(chunk, BaseException):
                raise chunk
            yield chunk

    return StreamModel(give)


async def read(world: FakeRoot, model: Any, **options: Any) -> tuple[list[ModelChunk], ModelResponse]:
    """One stream, read to its end."""
    async with world.services.stream_model(model, QUESTION, **options) as given:
        chunks = [chunk async for chunk in given]
    return chunks, given.response
