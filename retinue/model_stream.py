"""A model call whose answer comes piece by piece."""

from __future__ import annotations

import asyncio
import inspect
from collections import deque
from collections.abc import AsyncIterator
from types import TracebackType
from typing import TYPE_CHECKING, Self

from retinue.errors import ModelFailed, RetinueError
from retinue.events import PublicMessage
from retinue.models import (
    ModelChunk,
    ModelClient,
    ModelRequest,
    ModelResponse,
    StreamingModelClient,
    UsagePiece,
)
from retinue.publishing import MessagePublisher
from retinue.stream_assembly import StreamAssembly, chunks_of

if TYPE_CHECKING:
    from retinue.model_calls import ModelCalls, PlannedCall
    from retinue.owned_work import OwnedWork


class ModelStream:
    """One streamed model call; made by ``services.stream_model``.

    ::

        async with services.stream_model(model, messages) as stream:
            async for chunk in stream:
                ...
        stream.response

    The call is made when the stream is entered or first iterated. Leaving it before its finish cancels it.
    Without ``async with`` it must be iterated to its end: a driver that returns before fails its run.

    The provider is read in a task of its own, so a consumer that is slow, or that gives up waiting for one
    piece, disturbs nothing. Belongs to the user loop.
    """

    def __init__(
        self,
        calls: ModelCalls,
        call: PlannedCall,
        owned: OwnedWork,
        publisher: MessagePublisher | None,
    ) -> None:
        self._calls = calls
        self._call = call
        self._owned = owned
        self._publisher = publisher
        self._messages = publisher.stream() if publisher is not None else None
        self.assembly = StreamAssembly(call.client)
        """What has come so far."""
        self.messages: list[PublicMessage] = []
        """The public messages of the answer, once it is whole; empty unless the call was to be published."""
        self._response: ModelResponse | None = None
        self._chunks: deque[ModelChunk] = deque()
        self._changed = asyncio.Event()
        self._pump: asyncio.Task[None] | None = None
        self._received = False
        """The provider has given all; what is left is to settle and to publish."""
        self._left = False
        self._streamed = False
        """The answer comes in pieces from its provider."""

    @property
    def response(self) -> ModelResponse:
        """The whole answer, once the stream has ended.

        Raises:
            ModelFailed: the provider failed, or gave something that is no answer.
            RetinueError: the stream has not ended, or was left before its end.
        """
        if self._response is None:
            self._raise_failure()
            raise RetinueError(
                f"the stream of {self._call.called} has not ended: iterate it to its end first",
                code="execution_failed",
            )
        return self._response

    async def __aenter__(self) -> Self:
        self._begin()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def __aiter__(self) -> AsyncIterator[ModelChunk]:
        return self

    async def __anext__(self) -> ModelChunk:
        pump = self._begin()
        while not self._chunks and not pump.done():
            self._changed.clear()
            await self._changed.wait()
        if self._chunks:
            return self._chunks.popleft()
        self._owned.finish(self)
        self._raise_failure()
        raise StopAsyncIteration

    async def close(self) -> None:
        """End the call, if it has not ended, and wait until it is settled."""
        pump = self._pump
        self._left = True
        if pump is None:
            return
        if not self._received:
            pump.cancel()
        if not pump.done():
            await asyncio.wait([pump])
        self._owned.finish(self)

    # --- the task that reads ------------------------------------------------------------------------------

    def _begin(self) -> asyncio.Task[None]:
        if self._pump is None:
            if self._left:
                raise self._was_left()
            self._pump = self._owned.run(self._run())
            self._pump.add_done_callback(self._ended)
            self._owned.expect(self, f"the stream of {self._call.called}")
        return self._pump

    async def _run(self) -> None:
        try:
            response = await self._calls.make(self._call, self._take, self.assembly)
            await self._publish(response)
        except BaseException:
            if self._messages is not None:
                self._messages.fail()
            raise
        self._response = response

    async def _publish(self, response: ModelResponse) -> None:
        if self._publisher is None or self._messages is None:
            return
        if self._streamed:
            self.messages = await self._messages.complete(response)
        else:  # it came whole, so its phases are known
            self.messages = await self._publisher.response(response)

    async def _take(self, client: ModelClient, request: ModelRequest) -> ModelResponse:
        self._streamed = isinstance(client, StreamingModelClient)
        if not isinstance(client, StreamingModelClient):
            response = self._calls.checked(await client.generate(request), client)
            for chunk in chunks_of(response):
                self._deliver(chunk)
        else:
            await self._read_whole(client.stream(request), client)
            response = self.assembly.response()
        self._received = True
        return response

    async def _read_whole(self, chunks: object, client: ModelClient) -> None:
        task = asyncio.current_task()
        assert task is not None
        try:
            await self._read(chunks, client)
        except asyncio.CancelledError:
            # Whoever leaves at the finish has the answer; only usage that was still to come is unknown.
            left_whole = self._left and self.assembly.finished and not self._call.cancelled
            if not left_whole or task.uncancel():
                raise

    async def _read(self, chunks: object, client: ModelClient) -> None:
        if not isinstance(chunks, AsyncIterator):
            if inspect.iscoroutine(chunks):
                chunks.close()
            raise ModelFailed(
                f"{client.provider_id} {client.model_id}: stream() gave {type(chunks).__name__}, not an "
                "async iterator; write it as an async generator",
                started=False,
            )
        try:
            async for chunk in chunks:
                if self._left or self._call.cancelled:
                    # A provider may still tell what a call used that was cut short; nothing else counts.
                    if isinstance(chunk, UsagePiece):
                        self.assembly.take(chunk)
                    raise asyncio.CancelledError("the stream was left")
                for item, text in self.assembly.take(chunk):
                    if self._messages is not None:
                        self._messages.grow(item, text)
                self._deliver(chunk)
                await asyncio.sleep(0)  # a provider that never waits must not keep others from the loop
        finally:
            close = getattr(chunks, "aclose", None)
            if close is not None:
                await close()

    def _deliver(self, chunk: ModelChunk) -> None:
        self._chunks.append(chunk)
        self._changed.set()

    def _ended(self, pump: asyncio.Task[None]) -> None:
        if not pump.cancelled():
            pump.exception()  # whoever iterates is told; if nobody does, the run that owns it is
        self._changed.set()

    def _raise_failure(self) -> None:
        pump = self._pump
        if pump is None or not pump.done():
            return
        if pump.cancelled():
            raise self._was_left() if self._left else asyncio.CancelledError("the stream was cancelled")
        if (error := pump.exception()) is not None:
            raise error

    def _was_left(self) -> RetinueError:
        what = f"the stream of {self._call.called} was left before its end; it has no response"
        return RetinueError(what, code="execution_failed")
