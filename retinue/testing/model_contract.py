"""The conformance kit of the model seam: what every model client must do, ours and yours.

It needs no test framework::

    report = asyncio.run(check_model_contract(client, calls_tool=True))

The client is asked for real, so give it a small model and a cheap server. What cannot be seen from outside
(that nothing is billed for a refused call, say) is not covered.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import pickle
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from retinue.budgets import Usage
from retinue.errors import ModelFailed
from retinue.messages import Message, system, tool_result, user
from retinue.models import (
    FinishPiece,
    ModelChunk,
    ModelClient,
    ModelRequest,
    ModelResponse,
    StreamingModelClient,
    ToolSchema,
    UsagePiece,
    capabilities_of,
)
from retinue.stream_assembly import StreamAssembly

LIMIT = 60.0
"""Seconds for one answer."""
PATIENCE = 30.0
"""Seconds within which a request that was left must have ended everywhere."""
UNDER_WAY = 0.2
"""Seconds after which an answer to ``long_prompt`` is taken to be under way."""
CAP = 8
"""Output cap that the answer to ``long_prompt`` is cut at."""
PROMPT = "Say hello."
TOOL_PROMPT = "Use the tool `look` to look at 'x'."
LOOK = ToolSchema(
    "look",
    "Looks at something.",
    {
        "type": "object",
        "properties": {"what": {"type": "string"}},
        "required": ["what"],
        "additionalProperties": False,
    },
)


class ModelContractBroken(AssertionError):
    """A model client does not keep the contract; the text says which part."""


@dataclass(frozen=True, kw_only=True)
class ModelContractReport:
    """What was checked, and what was seen."""

    checked: Sequence[str]
    """Names of the rules."""
    reports_usage: bool
    """Whole answers come with their usage."""
    streams: bool
    stream_reports_usage: bool = False
    called_a_tool: bool = False


async def check_model_contract(
    client: ModelClient,
    *,
    prompt: str = PROMPT,
    calls_tool: bool = False,
    tool_prompt: str = TOOL_PROMPT,
    max_tokens: int = 64,
    cancels: bool = True,
    long_prompt: str | None = None,
    says_length: bool = True,
    unreachable: ModelClient | None = None,
    busy: Callable[[], Awaitable[int]] | None = None,
) -> ModelContractReport:
    """Check a client: shape, copies, whole answers, streams, what goes back in the next request, tools, caps,
    cancellation, failures.

    Args:
        client: to check; it is asked some ten times, and not closed.
        prompt: something that it answers in text.
        calls_tool: the model answers ``tool_prompt`` with a call of the tool ``look``; then the round is
            checked.
        tool_prompt: what makes it call the tool.
        max_tokens: output cap of every request.
        cancels: a request can be cancelled before it is answered.
        long_prompt: something whose answer is longer than eight tokens and takes a second at least. Then caps
            are checked, and cancellation in the midst of an answer.
        says_length: the provider says of an answer that it was cut at the cap; not all do.
        unreachable: a client of the same kind whose provider certainly gets no request, as one at a port
            where nothing listens. Then failures are checked.
        busy: how many requests the provider works on; it must come down to 0 after a cancellation.

    Raises:
        ModelContractBroken: the first rule that is not kept.
    """
    kit = _Kit(client, prompt, max_tokens)
    await kit.shape()
    await kit.whole_answer()
    await kit.copies()
    if isinstance(client, StreamingModelClient):
        await kit.streamed_answer()
    await kit.continuation()
    if calls_tool:
        await kit.tool_round(tool_prompt)
    if long_prompt is not None:
        await kit.cap(long_prompt, says_length)
    if cancels:
        await kit.cancellation()
    if cancels and long_prompt is not None:
        await kit.cancellation_under_way(long_prompt, busy)
    if unreachable is not None:
        await kit.failures(unreachable)
    return ModelContractReport(
        checked=tuple(kit.checked),
        reports_usage=kit.usage,
        streams=isinstance(client, StreamingModelClient),
        stream_reports_usage=kit.stream_usage,
        called_a_tool=calls_tool,
    )


class _Kit:
    def __init__(self, client: ModelClient, prompt: str, max_tokens: int) -> None:
        self._client = client
        self._request = ModelRequest(messages=[system("You are brief."), user(prompt)], max_tokens=max_tokens)
        self._answers: list[ModelResponse] = []
        """Of the whole and the streamed request."""
        self.checked: list[str] = []
        self.usage = False
        self.stream_usage = False

    async def shape(self) -> None:
        client: object = self._client
        _expect(isinstance(client, ModelClient), "it has provider_id, model_id and generate()")
        for name in ("provider_id", "model_id"):
            value: object = getattr(client, name)
            _expect(isinstance(value, str) and bool(value), f"{name} is a nonempty string, not {value!r:.80}")
        capabilities_of(self._client)
        self.checked.append("shape")

    async def whole_answer(self) -> None:
        response = await self._generate(self._request)
        _expect(bool(response.text), "an answer to a plain question has text")
        _expect(not response.tool_calls, "without tools there are no tool calls")
        _expect(response.finish_reason in ("stop", "length"), f"it finished with {response.finish_reason!r}")
        self.usage = response.usage is not None
        self._answers.append(response)
        self.checked.append("whole answer")

    async def copies(self) -> None:
        copy = pickle.loads(pickle.dumps(self._client))  # noqa: S301 - bytes of our own
        _expect(
            (copy.provider_id, copy.model_id) == (self._client.provider_id, self._client.model_id),
            "a copy has the same ids",
        )
        response = _checked(await asyncio.wait_for(copy.generate(self._request), LIMIT))
        _expect(bool(response.text), "a pickled copy answers")
        self.checked.append("copies")

    async def streamed_answer(self) -> None:
        response, chunks = await self._stream(self._request)
        _expect(bool(response.text), "a streamed answer has text")
        _expect(sum(isinstance(chunk, FinishPiece) for chunk in chunks) == 1, "a stream has one finish")
        terminal = [chunk for chunk in chunks if isinstance(chunk, UsagePiece) and chunk.terminal]
        _expect(len(terminal) <= 1, "at most one report of usage is terminal")
        after = chunks[next(n for n, chunk in enumerate(chunks) if isinstance(chunk, FinishPiece)) + 1 :]
        _expect(all(isinstance(chunk, UsagePiece) for chunk in after), "only usage comes after the finish")
        self.stream_usage = response.usage is not None
        self._answers.append(response)
        self.checked.append("streamed answer")

    async def continuation(self) -> None:
        for answer in self._answers:
            messages = [*self._request.messages, _kept(answer), user("Go on.")]
            await self._generate(msgspec.structs.replace(self._request, messages=messages))
        self.checked.append("continuation")

    async def cap(self, prompt: str, says_length: bool) -> None:
        request = ModelRequest(messages=[user(prompt)], max_tokens=CAP)
        answers = [await self._generate(request)]
        if isinstance(self._client, StreamingModelClient):
            answers.append((await self._stream(request))[0])
        for answer in answers:
            _expect(
                answer.finish_reason == "length" or not says_length,
                f"an answer cut at {CAP} tokens finishes with 'length', not {answer.finish_reason!r}",
            )
            used = CAP if answer.usage is None else answer.usage.output_tokens
            _expect(used <= CAP, f"with max_tokens={CAP} there are no {used} tokens of output")
        self.checked.append("cap")

    async def tool_round(self, prompt: str) -> None:
        request = ModelRequest(messages=[user(prompt)], tools=[LOOK], max_tokens=self._request.max_tokens)
        answers = [await self._generate(request)]
        if isinstance(self._client, StreamingModelClient):
            answers.append((await self._stream(request))[0])
        for answer in answers:
            _expect(len(answer.tool_calls) >= 1, "it calls the tool")
            _expect(answer.finish_reason == "tool_calls", f"it finished with {answer.finish_reason!r}")
            _expect(
                all(call.name == LOOK.name for call in answer.tool_calls), "it calls the tool by its name"
            )
            ids = [call.id for call in answer.tool_calls]
            _expect(all(ids) and len(set(ids)) == len(ids), "each call has an id of its own")
            results = [tool_result(call_id, "it is blue") for call_id in ids]
            following = ModelRequest(
                messages=[*request.messages, _kept(answer), *results],
                tools=[LOOK],
                max_tokens=request.max_tokens,
            )
            await self._generate(following)
        self.checked.append("tool round")

    async def cancellation(self) -> None:
        before = asyncio.all_tasks()
        asking = asyncio.ensure_future(self._client.generate(self._request))
        await asyncio.sleep(0)
        asking.cancel()
        with contextlib.suppress(asyncio.CancelledError, ModelFailed):
            await asyncio.wait_for(asyncio.shield(asking), LIMIT)
        _expect(asking.done(), "a cancelled request ends")
        if isinstance(self._client, StreamingModelClient):
            stream = self._client.stream(self._request)
            with contextlib.suppress(StopAsyncIteration, ModelFailed):
                await asyncio.wait_for(anext(stream), LIMIT)
            if (close := getattr(stream, "aclose", None)) is not None:
                await asyncio.wait_for(close(), LIMIT)
        for _ in range(20):
            await asyncio.sleep(0)
        left = [task for task in asyncio.all_tasks() - before if not task.done()]
        _expect(not left, f"nothing goes on after a request that was left: {left!r:.200}")
        self.checked.append("cancellation")

    async def cancellation_under_way(self, prompt: str, busy: Callable[[], Awaitable[int]] | None) -> None:
        before = asyncio.all_tasks()
        request = ModelRequest(messages=[user(prompt)])
        asking = asyncio.ensure_future(self._client.generate(request))
        await asyncio.wait([asking], timeout=UNDER_WAY)
        _expect(not asking.done(), "an answer to long_prompt takes longer than a moment")
        await _cancelled(asking)
        await _nothing_left(before, busy)
        if isinstance(self._client, StreamingModelClient):
            begun = asyncio.Event()
            streaming = asyncio.ensure_future(self._stream(request, begun))
            waiting = asyncio.ensure_future(begun.wait())
            await asyncio.wait([streaming, waiting], timeout=LIMIT, return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
            _expect(not streaming.done(), "a stream that answers long_prompt takes longer than a moment")
            await _cancelled(streaming)
            await _nothing_left(before, busy)
        self.checked.append("cancellation under way")

    async def failures(self, client: ModelClient) -> None:
        asked: list[Callable[[], Awaitable[object]]] = [partial(client.generate, self._request)]
        if isinstance(client, StreamingModelClient):
            asked.append(partial(_read, client, self._request))
        for ask in asked:
            try:
                await asyncio.wait_for(ask(), LIMIT)
            except ModelFailed as error:
                _expect(not error.started, "a provider that was not reached has not begun: started=False")
            except Exception as error:
                raise ModelContractBroken(f"a failure is a ModelFailed, not {error!r:.200}") from error
            else:
                _expect(False, "a provider that cannot be reached gives no answer")
        self.checked.append("failures")

    async def _generate(self, request: ModelRequest) -> ModelResponse:
        try:
            return _checked(await asyncio.wait_for(self._client.generate(request), LIMIT))
        except ModelFailed as error:
            raise ModelContractBroken(f"it failed: {error.message}") from error
        except TimeoutError:
            raise ModelContractBroken(f"it gave no answer within {LIMIT:g} s") from None

    async def _stream(
        self, request: ModelRequest, begun: asyncio.Event | None = None
    ) -> tuple[ModelResponse, list[ModelChunk]]:
        assert isinstance(self._client, StreamingModelClient)
        try:
            async with asyncio.timeout(LIMIT):
                return await _read(self._client, request, begun)
        except ModelFailed as error:
            raise ModelContractBroken(f"its stream failed: {error.message}") from error
        except TimeoutError:
            raise ModelContractBroken(f"its stream did not end within {LIMIT:g} s") from None


async def _read(
    client: StreamingModelClient, request: ModelRequest, begun: asyncio.Event | None = None
) -> tuple[ModelResponse, list[ModelChunk]]:
    """A stream to its end, by the rules that runs read it with; sets ``begun`` at the first piece."""
    assembly, chunks = StreamAssembly(client), list[ModelChunk]()
    stream: object = client.stream(request)
    if inspect.iscoroutine(stream):
        stream.close()
    _expect(isinstance(stream, AsyncIterator), "stream() gives an async iterator; write an async generator")
    assert isinstance(stream, AsyncIterator)
    try:
        async for chunk in stream:
            if begun is not None:
                begun.set()
            assembly.take(chunk)
            chunks.append(chunk)
    finally:
        if (close := getattr(stream, "aclose", None)) is not None:
            await close()
    return _checked(assembly.response()), chunks


async def _cancelled(asking: asyncio.Future[Any]) -> None:
    asking.cancel()
    await asyncio.wait([asking], timeout=PATIENCE)
    _expect(asking.done(), f"a cancelled request ends within {PATIENCE:g} s")
    _expect(asking.cancelled(), "a cancelled request raises CancelledError, and nothing else")


async def _nothing_left(before: set[asyncio.Task[object]], busy: Callable[[], Awaitable[int]] | None) -> None:
    """Wait until neither a task of this loop nor the provider works on what was left."""
    deadline = time.monotonic() + PATIENCE
    while True:
        left = [task for task in asyncio.all_tasks() - before if not task.done()]
        working = 0 if busy is None else await busy()
        if not left and not working:
            return
        if time.monotonic() > deadline:
            break
        await asyncio.sleep(0.01)
    _expect(not left, f"nothing goes on after a request that was left: {left!r:.200}")
    _expect(not working, f"the provider does not go on either, and works on {working} requests")


def _kept(answer: ModelResponse) -> Message:
    """An answer as history has it in the next request: once through JSON."""
    said = Message(role="assistant", content=answer.text, tool_calls=answer.tool_calls, extras=answer.extras)
    kept = msgspec.json.decode(msgspec.json.encode(said), type=Message)
    _expect(kept == said, "what goes back with the next request survives JSON")
    return kept


def _checked(response: object) -> ModelResponse:
    _expect(isinstance(response, ModelResponse), f"it gives a ModelResponse, not {type(response).__name__}")
    assert isinstance(response, ModelResponse)
    usage: object = response.usage
    _expect(usage is None or isinstance(usage, Usage), "usage is a Usage, or None where nobody says")
    if isinstance(usage, Usage):
        _expect(usage.problem() is None, f"usage is possible: {usage.problem()}")
    return response


def _expect(condition: bool, what: str) -> None:
    if not condition:
        raise ModelContractBroken(f"not kept: {what}")
