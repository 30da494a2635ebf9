"""Streams of OpenAI-compatible servers, against a real server on loopback."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from retinue import (
    Budgets,
    FinishPiece,
    ModelChunk,
    ModelRequest,
    ModelResponse,
    StreamingModelClient,
    TextPiece,
    ToolCall,
    ToolCallPiece,
    Usage,
    UsagePiece,
)
from retinue.errors import ModelFailed
from retinue.messages import user
from retinue.models import ToolSchema
from retinue.providers.openai_chat import OpenAIChatModel
from retinue.stream_assembly import StreamAssembly
from tests.support import LIMIT, soon
from tests.unit.fake_root import root
from tests.unit.providers.chat_server import HOLD, ChatServer, chat_server

KEY = "sk-test-0123456789"
READ = ToolSchema("docs/read:part", "Reads a part.", {"type": "object", "properties": {}})
HELLO = ModelRequest(messages=[user("hello")], tools=[READ])
USAGE = {"prompt_tokens": 7, "completion_tokens": 5}
SPENT = Usage(input_tokens=7, output_tokens=5)
LAST = {"choices": [], "usage": USAGE}


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def server() -> Iterator[ChatServer]:
    with chat_server() as state:
        yield state
        state.go.set()


@pytest.fixture
async def model(server: ChatServer) -> AsyncIterator[OpenAIChatModel]:
    client = OpenAIChatModel("small", base_url=server.url)
    yield client
    await client.close()


def piece(delta: dict[str, Any] | None = None, finish: str | None = None, **more: Any) -> dict[str, Any]:
    choice = {"index": 0, "delta": {"role": "assistant", **(delta or {})}, "finish_reason": finish}
    return {"id": "c", "object": "chat.completion.chunk", "choices": [choice], **more}


def text(content: str) -> dict[str, Any]:
    return piece({"content": content})


def call(index: int | None, arguments: str, id: str | None = None, name: str | None = None) -> dict[str, Any]:
    made: dict[str, Any] = {"function": {"arguments": arguments}}
    if index is not None:
        made["index"] = index
    if id is not None:
        made |= {"id": id, "type": "function"}
        made["function"]["name"] = name
    return piece({"tool_calls": [made]})


async def read(model: OpenAIChatModel) -> tuple[list[ModelChunk], ModelResponse]:
    """One stream, read and put together."""
    assembly = StreamAssembly(model)
    chunks = [chunk async for chunk in model.stream(HELLO)]
    for chunk in chunks:
        assembly.take(chunk)
    return chunks, assembly.response()


async def failure(model: OpenAIChatModel) -> ModelFailed:
    with pytest.raises(ModelFailed) as caught:
        await soon(read(model))
    assert KEY not in str(caught.value)
    return caught.value


# --- going well -------------------------------------------------------------------------------------------


async def test_text_comes_in_pieces_and_usage_last(model: OpenAIChatModel, server: ChatServer) -> None:
    assert isinstance(model, StreamingModelClient)
    server.streams(piece({"content": ""}), text("Hel"), text("lo"), piece(finish="stop"), LAST)
    chunks, response = await read(model)
    assert chunks == [TextPiece("Hel"), TextPiece("lo"), FinishPiece(), UsagePiece(SPENT)]
    assert response == ModelResponse(text="Hello", usage=SPENT)
    (asked,) = server.requests
    assert (asked["stream"], asked["stream_options"]) == (True, {"include_usage": True})
    assert asked["tools"][0]["function"]["name"] == "docs_read_part"


async def test_tool_calls_come_in_pieces_under_our_names(model: OpenAIChatModel, server: ChatServer) -> None:
    server.streams(
        text("Look."),
        call(0, "", "a", "docs_read_part"),
        call(0, '{"part":'),
        call(1, "{}", "b", "other"),
        call(0, ' "1"}'),
        piece(finish="tool_calls"),
        LAST,
    )
    chunks, response = await read(model)
    assert chunks[1] == ToolCallPiece(index=0, id="a", name="docs/read:part")
    assert response == ModelResponse(
        text="Look.",
        tool_calls=(ToolCall("a", "docs/read:part", {"part": "1"}), ToolCall("b", "other", {})),
        usage=SPENT,
        finish_reason="tool_calls",
    )


async def test_servers_that_number_no_calls_and_call_the_finish_stop(
    model: OpenAIChatModel, server: ChatServer
) -> None:
    server.streams(
        call(None, '{"x"', "a", "f"), call(None, ": 1}"), call(None, "{}", "b", "g"), piece(finish="stop")
    )
    _, response = await read(model)
    assert response.tool_calls == (ToolCall("a", "f", {"x": 1}), ToolCall("b", "g", {}))
    assert (response.finish_reason, response.usage) == ("tool_calls", None)


@pytest.mark.parametrize(
    ("pieces", "used"),
    [
        ([text("a"), piece(finish="stop")], None),
        ([text("a"), piece(finish="stop"), {"choices": [], "usage": None}], None),
        ([text("a"), piece(finish="stop"), {"choices": [], "usage": {"prompt_tokens": 7}}], None),
        ([text("a"), piece(finish="stop", usage=USAGE)], SPENT),
        ([text("a") | {"usage": USAGE | {"completion_tokens": 1}}, piece(finish="stop", usage=USAGE)], SPENT),
        ([text("a"), piece(finish="stop"), piece(finish="stop", usage=USAGE)], SPENT),
    ],
)  # fmt: skip
async def test_usage_comes_in_several_ways_and_unknown_is_not_zero(
    model: OpenAIChatModel, server: ChatServer, pieces: list[object], used: Usage | None
) -> None:
    server.streams(*pieces)
    _, response = await read(model)
    assert (response.text, response.usage) == ("a", used)


@pytest.mark.parametrize(("finish", "expected"), [("length", "length"), ("content_filter", "content_filter")])
async def test_finish_reasons(model: OpenAIChatModel, server: ChatServer, finish: str, expected: str) -> None:
    server.streams(text("a"), piece(finish=finish), LAST)
    assert (await read(model))[1].finish_reason == expected


async def test_a_refusal_is_the_text_and_reasoning_is_not(model: OpenAIChatModel, server: ChatServer) -> None:
    server.streams(
        piece({"reasoning_content": "secret", "content": None}),
        piece({"refusal": "No."}),
        piece(finish="stop"),
    )
    assert (await read(model))[1].text == "No."


async def test_a_server_that_does_not_stream_gives_the_whole(
    model: OpenAIChatModel, server: ChatServer
) -> None:
    message = {"role": "assistant", "content": "whole"}
    server.says({"choices": [{"index": 0, "finish_reason": "stop", "message": message}], "usage": USAGE})
    chunks, response = await read(model)
    assert (response.text, response.usage) == ("whole", SPENT)
    assert chunks[0] == TextPiece("whole")


async def test_pieces_arrive_as_they_are_sent(model: OpenAIChatModel, server: ChatServer) -> None:
    server.streams(text("Hel"), HOLD, text("lo"), piece(finish="stop"), LAST)
    stream = model.stream(HELLO)
    assert await soon(anext(stream)) == TextPiece("Hel")
    assert not server.go.is_set()
    server.go.set()
    assert await soon(anext(stream)) == TextPiece("lo")
    assert [type(chunk) async for chunk in stream] == [FinishPiece, UsagePiece]


async def test_many_streams_of_one_client_at_once(model: OpenAIChatModel, server: ChatServer) -> None:
    server.streams(*[text(str(number)) for number in range(50)], piece(finish="stop"), LAST)
    answers = await asyncio.gather(*(read(model) for _ in range(8)))
    assert {response.text for _, response in answers} == {"".join(str(number) for number in range(50))}


# --- leaving ----------------------------------------------------------------------------------------------


async def _waited(event: threading.Event) -> bool:
    return await asyncio.to_thread(event.wait, LIMIT)


@pytest.mark.parametrize("way", ["close", "cancel"])
async def test_leaving_a_stream_ends_the_request(
    model: OpenAIChatModel, server: ChatServer, way: str
) -> None:
    server.streams(text("Hel"), HOLD)
    stream = model.stream(HELLO)
    assert await soon(anext(stream)) == TextPiece("Hel")
    assert await _waited(server.held)
    if way == "cancel":
        reading = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
    else:
        await stream.aclose()  # type: ignore[attr-defined]
    assert await _waited(server.left)


async def test_leaving_through_the_services_ends_the_request_and_settles_it(
    model: OpenAIChatModel, server: ChatServer
) -> None:
    server.streams(text("Hel"), HOLD)
    world = root(budgets=Budgets(max_tokens=100))
    async with world.services.stream_model(model, [user("x")], max_tokens=20) as stream:
        assert await soon(anext(stream)) == TextPiece("Hel")
    assert await _waited(server.left)
    assert (world.budget.tokens.used, world.budget.tokens.reserved) == (25, 0)
    server.streams(text("again"), piece(finish="stop"), LAST)
    async with world.services.stream_model(model, [user("x")]) as stream:
        assert len([chunk async for chunk in stream]) == 3
    assert stream.response.text == "again"
    assert world.budget.tokens.used == 25 + 12


# --- going wrong ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "step"), [(400, "smaller part"), (401, "$OPENAI_API_KEY"), (500, "its log")]
)
async def test_statuses_say_what_to_do(
    model: OpenAIChatModel, server: ChatServer, status: int, step: str
) -> None:
    server.says({"error": {"message": f"no {KEY}"}}, status)
    error = await failure(model)
    assert step in error.message
    assert error.started is (status >= 500)


async def test_nobody_listening_never_started() -> None:
    with chat_server() as gone:
        url = gone.url
    error = await failure(OpenAIChatModel("small", base_url=url))
    assert error.started is False
    assert "check that it runs" in error.message


async def test_a_stream_without_a_finish_is_no_answer(model: OpenAIChatModel, server: ChatServer) -> None:
    server.streams(text("Hel"), LAST)
    assert "without a finish" in (await failure(model)).message
    server.streams(text("Hel"), done=False)
    assert "without a finish" in (await failure(model)).message


async def test_an_error_in_the_stream_is_quoted_short_and_without_the_key(
    model: OpenAIChatModel, server: ChatServer
) -> None:
    server.streams(text("Hel"), {"error": {"message": f"out of memory {KEY} " + "x" * 1000}})
    error = await failure(model)
    assert "out of memory [key]" in error.message
    assert len(error.message) < 600
    assert error.started


@pytest.mark.parametrize(
    "odd",
    [
        b"data: {not json\n\n",
        b"data: [1, 2]\n\n",
        b'data: "text"\n\n',
        {"choices": "text"},
        {"choices": [5]},
        {"choices": [{"delta": "text"}]},
        {"choices": [{"delta": {"tool_calls": [5]}}]},
        {"choices": [{"delta": {"tool_calls": 5}}]},
    ],
)
async def test_what_is_no_chunk_is_no_answer(model: OpenAIChatModel, server: ChatServer, odd: object) -> None:
    server.streams(text("Hel"), odd, piece(finish="stop"), LAST)
    assert "no chat completion" in (await failure(model)).message


@pytest.mark.parametrize("odd", [{"content": 5}, {"content": ["a"]}, {"tool_calls": [{"index": "x"}]}])
async def test_members_of_a_wrong_type_are_no_answer(
    model: OpenAIChatModel, server: ChatServer, odd: dict[str, Any]
) -> None:
    server.streams(text("Hel"), piece(odd), piece(finish="stop"), LAST)
    assert "openai small streamed a broken piece" in (await failure(model)).message


async def test_a_page_instead_of_a_stream_names_the_base_url(
    model: OpenAIChatModel, server: ChatServer
) -> None:
    server.answer = (200, "text/html", b"<html>hello</html>")
    assert "usually ends in /v1" in (await failure(model)).message


async def test_c97_unterminated_streamed_arguments_are_no_answer(
    model: OpenAIChatModel, server: ChatServer
) -> None:
    server.streams(call(0, '{"part": "1', "a", "docs_read_part"), piece(finish="length"), LAST)
    message = (await failure(model)).message
    assert "docs/read:part" in message
    assert "cut at the output cap" in message


async def test_a_connection_that_breaks_in_the_stream(model: OpenAIChatModel) -> None:
    async def half(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(10)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: 999\r\n\r\n")
        writer.write(b'data: {"choices": [{"index": 0, "delta": {"content": "Hel"}}]}\n\n')
        await writer.drain()
        writer.close()

    listening = await asyncio.start_server(half, "127.0.0.1", 0)
    async with listening:
        port = listening.sockets[0].getsockname()[1]
        client = OpenAIChatModel("small", base_url=f"http://127.0.0.1:{port}/v1")
        error = await failure(client)
        await client.close()
    assert "broke the connection" in error.message
    assert error.started


async def test_a_server_that_falls_silent_in_the_stream(server: ChatServer) -> None:
    server.streams(text("Hel"), HOLD)
    client = OpenAIChatModel("small", base_url=server.url, timeout=0.2)
    error = await failure(client)
    assert "within 0.2 s" in error.message
    assert error.started
    await client.close()
