"""The provider for OpenAI-compatible servers, against a real server on loopback."""

from __future__ import annotations

import asyncio
import builtins
import pickle
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

from retinue.budgets import Usage
from retinue.errors import ModelFailed, ValidationFailed
from retinue.messages import (
    AudioPart,
    FilePart,
    ImagePart,
    Message,
    Part,
    TextPart,
    ToolCall,
    assistant,
    system,
    tool_result,
    user,
)
from retinue.models import ModelClient, ModelRequest, ToolSchema
from retinue.providers import model_from_name
from retinue.providers.extractive import ExtractiveModel
from retinue.providers.openai_chat import DEFAULT_BASE_URL, OpenAIChatModel
from tests.unit.providers.chat_server import ChatServer, chat_server

KEY = "sk-test-0123456789"
READ = ToolSchema(
    "docs/read:part",
    "Reads a part.",
    {"type": "object", "properties": {"part": {"type": "string"}}, "required": ["part"]},
)
HELLO = ModelRequest(messages=[user("hello")])


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def server() -> Iterator[ChatServer]:
    with chat_server() as state:
        yield state


@pytest.fixture
async def model(server: ChatServer) -> AsyncIterator[OpenAIChatModel]:
    client = OpenAIChatModel("small", base_url=server.url)
    yield client
    await client.close()


def completion(message: dict[str, Any], finish: str | None = "stop", **more: Any) -> dict[str, Any]:
    return {
        "choices": [{"index": 0, "finish_reason": finish, "message": {"role": "assistant", **message}}],
        **more,
    }


def called(arguments: object, name: str = "docs_read_part", call_id: object = "c1") -> dict[str, Any]:
    return {
        "content": None,
        "tool_calls": [
            {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        ],
    }


# --- going well -------------------------------------------------------------------------------------------


async def test_a_whole_turn_with_tools(model: OpenAIChatModel, server: ChatServer) -> None:
    """The embedded model behind the server answers as it does directly."""
    task = user("question: How long does a lease last?\npart: a.md:1-2")
    first = await model.generate(ModelRequest(messages=[system("Read."), task], tools=[READ], max_tokens=99))
    assert [(call.name, call.arguments) for call in first.tool_calls] == [
        ("docs/read:part", {"part": "a.md:1-2"})
    ]
    assert first.finish_reason == "tool_calls"
    result = tool_result(first.tool_calls[0].id, "file: a.md\n1| A lease lasts 15 s.")
    second = await model.generate(
        ModelRequest(messages=[system("Read."), task, assistant("", first.tool_calls), result], tools=[READ])
    )
    assert second.text.endswith("A lease lasts 15 s. [a.md:1]")
    assert second.usage is not None
    assert second.usage.input_tokens > 20
    assert second.usage.output_tokens > 5
    asked = server.requests[0]
    assert asked["model"] == "small"
    assert asked["max_tokens"] == 99
    assert asked["messages"][0] == {"role": "system", "content": "Read."}
    assert asked["tools"][0]["function"]["name"] == "docs_read_part"
    assert "max_tokens" not in server.requests[1]
    assert "temperature" not in asked
    assert server.keys[0] == f"Bearer {KEY}"


async def test_usage_with_details(model: OpenAIChatModel, server: ChatServer) -> None:
    usage = {
        "prompt_tokens": 7,
        "completion_tokens": 5,
        "completion_tokens_details": {"reasoning_tokens": 3},
        "prompt_tokens_details": {"cached_tokens": 2},
    }
    server.says(completion({"content": "hi"}, usage=usage))
    response = await model.generate(HELLO)
    assert response.usage == Usage(input_tokens=7, output_tokens=5, reasoning_tokens=3, cached_tokens=2)


@pytest.mark.parametrize(
    "usage",
    [
        None,
        {},
        {"prompt_tokens": 7},
        {"prompt_tokens": "7", "completion_tokens": 5},
        [],
        {"total_tokens": 12},
    ],
)
async def test_usage_that_is_not_told_is_unknown_and_not_zero(
    model: OpenAIChatModel, server: ChatServer, usage: object
) -> None:
    server.says(completion({"content": "hi"}, usage=usage))
    assert (await model.generate(HELLO)).usage is None
    server.says(completion({"content": "hi"}))
    assert (await model.generate(HELLO)).usage is None


@pytest.mark.parametrize(
    ("reported", "message", "expected"),
    [
        ("stop", {"content": "x"}, "stop"),
        ("length", {"content": "x"}, "length"),
        ("content_filter", {"content": None}, "content_filter"),
        ("tool_calls", called("{}"), "tool_calls"),
        ("stop", called("{}"), "tool_calls"),
        ("length", called("{}"), "length"),
        (None, {"content": "x"}, "stop"),
        ("eos", {"content": "x"}, "stop"),
    ],
)
async def test_finish_reasons(
    model: OpenAIChatModel, server: ChatServer, reported: str | None, message: dict[str, Any], expected: str
) -> None:
    server.says(completion(message, reported))
    assert (await model.generate(HELLO)).finish_reason == expected


async def test_a_refusal_is_the_text(model: OpenAIChatModel, server: ChatServer) -> None:
    server.says(completion({"content": None, "refusal": "I will not."}))
    assert (await model.generate(HELLO)).text == "I will not."


async def test_messages_are_mapped(model: OpenAIChatModel, server: ChatServer) -> None:
    parts: list[Part] = [
        TextPart("look"),
        ImagePart("QUJD", "image/png"),
        ImagePart("https://example.org/a.png"),
        AudioPart("QUJD", "audio/mp3"),
        FilePart("QUJD", "application/pdf", "a.pdf"),
    ]
    calls = [ToolCall("c1", "docs/read:part", {"part": "ä"}), ToolCall("c2", "docs/read.part", {})]
    both = [READ, ToolSchema("docs/read.part", "Another.", {"type": "object", "properties": {}})]
    messages = [user(parts), Message(role="assistant", tool_calls=tuple(calls), extras={"secret": 1})]
    await model.generate(ModelRequest(messages=messages, tools=both, temperature=0.5))
    asked = server.requests[0]
    assert asked["temperature"] == 0.5
    assert asked["messages"][0]["content"] == [
        {"type": "text", "text": "look"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,QUJD"}},
        {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}},
        {"type": "input_audio", "input_audio": {"data": "QUJD", "format": "mp3"}},
        {"type": "file", "file": {"filename": "a.pdf", "file_data": "data:application/pdf;base64,QUJD"}},
    ]
    # Two names that the API could not tell apart stay two names; opaque extras are not sent.
    assert [call["function"] for call in asked["messages"][1]["tool_calls"]] == [
        {"name": "docs_read_part", "arguments": '{"part": "ä"}'},
        {"name": "docs_read_part_2", "arguments": "{}"},
    ]
    assert asked["messages"][1]["content"] is None
    assert set(asked["messages"][1]) == {"role", "content", "tool_calls"}


async def test_the_cap_goes_under_the_name_that_the_server_takes(server: ChatServer) -> None:
    model = OpenAIChatModel("small", base_url=server.url, limit_parameter="max_completion_tokens")
    await model.generate(ModelRequest(messages=[user("hi")], max_tokens=5))
    assert server.requests[0]["max_completion_tokens"] == 5
    assert "max_tokens" not in server.requests[0]
    await model.close()


async def test_a_server_of_ones_own_needs_no_key(
    model: OpenAIChatModel, server: ChatServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OPENAI_API_KEY")
    assert (await model.generate(HELLO)).text
    assert KEY not in (server.keys[0] or "")


async def test_the_key_has_the_name_that_was_given(
    server: ChatServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTHER_KEY", "sk-other")
    model = OpenAIChatModel("small", base_url=server.url, api_key_env="OTHER_KEY")
    await model.generate(HELLO)
    assert server.keys == ["Bearer sk-other"]
    await model.close()


def test_it_serves_several_event_loops(server: ChatServer) -> None:
    model = OpenAIChatModel("small", base_url=server.url)

    async def once() -> str:
        try:
            return (await model.generate(HELLO)).text
        finally:
            await model.close()

    assert asyncio.run(once()) == asyncio.run(once())


async def test_it_travels_without_key_and_connections(model: OpenAIChatModel, server: ChatServer) -> None:
    await model.generate(HELLO)
    data = pickle.dumps(model)
    assert KEY.encode() not in data
    again = pickle.loads(data)
    assert again == model
    assert isinstance(again, ModelClient)
    assert (await again.generate(HELLO)).text


async def test_a_cancelled_call_ends_at_once(model: OpenAIChatModel, server: ChatServer) -> None:
    server.delay = 5.0
    call = asyncio.ensure_future(model.generate(HELLO))
    while not server.requests:
        await asyncio.sleep(0.01)
    began = time.monotonic()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert time.monotonic() - began < 4.0


# --- going wrong ------------------------------------------------------------------------------------------


async def failure(model: OpenAIChatModel) -> ModelFailed:
    with pytest.raises(ModelFailed) as caught:
        await model.generate(HELLO)
    assert KEY not in str(caught.value)
    assert "Traceback" not in str(caught.value)
    assert pickle.loads(pickle.dumps(caught.value)).message == caught.value.message
    return caught.value


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


async def test_nobody_listening_never_started() -> None:
    url = f"http://127.0.0.1:{free_port()}/v1"
    error = await failure(OpenAIChatModel("small", base_url=url))
    assert error.started is False
    assert url in error.message
    assert "check that it runs" in error.message


async def test_an_unknown_host_never_started() -> None:
    error = await failure(OpenAIChatModel("small", base_url="http://no-such-host.invalid/v1"))
    assert error.started is False
    assert "no-such-host.invalid" in error.message


@pytest.mark.parametrize(
    ("status", "step"),
    [
        (400, "smaller part"),
        (401, "$OPENAI_API_KEY"),
        (403, "$OPENAI_API_KEY"),
        (404, "model's name"),
        (422, "smaller part"),
        (429, "quota"),
        (500, "look into its log"),
        (503, "look into its log"),
        (418, "documentation"),
    ],
)
async def test_statuses_say_what_to_do(
    model: OpenAIChatModel, server: ChatServer, status: int, step: str
) -> None:
    server.says({"error": {"message": f"about {KEY}: no", "type": "x"}}, status)
    error = await failure(model)
    assert error.started is (status >= 500)  # what was refused was not begun, and is not charged
    assert f"HTTP {status}" in error.message
    assert server.url in error.message
    assert step in error.message
    assert len(server.requests) == 1, "the SDK must not retry: every attempt is admitted by the ledger"


async def test_what_the_server_says_is_quoted_short(model: OpenAIChatModel, server: ChatServer) -> None:
    server.says({"error": {"message": "context of 512 tokens exceeded " + "x" * 2000}}, 400)
    error = await failure(model)
    assert "context of 512 tokens exceeded" in error.message
    assert len(error.message) < 600


@pytest.mark.parametrize("arguments", ['{"part": ', "[1]", '"text"', "null", "7", "not json"])
async def test_malformed_tool_arguments(model: OpenAIChatModel, server: ChatServer, arguments: str) -> None:
    server.says(completion(called(arguments), "tool_calls"))
    error = await failure(model)
    assert "docs_read_part" in error.message
    assert "no JSON object" in error.message


async def test_arguments_cut_at_the_cap_say_so(model: OpenAIChatModel, server: ChatServer) -> None:
    server.says(completion(called('{"part": "a'), "length"))
    assert "output cap" in (await failure(model)).message


@pytest.mark.parametrize("call_id", [None, 7])
async def test_a_tool_call_without_an_id(model: OpenAIChatModel, server: ChatServer, call_id: object) -> None:
    server.says(completion(called("{}", call_id=call_id), "tool_calls"))
    assert "without an id" in (await failure(model)).message


@pytest.mark.parametrize(
    "answer",
    [
        (200, "text/html", b"<html>welcome</html>"),
        (200, "application/json", b"{"),
        (200, "application/json", b"[]"),
        (200, "application/json", b"null"),
        (200, "application/json", b""),
        (200, "application/json", b'{"choices": []}'),
        (200, "application/json", b'{"choices": [{"message": null}]}'),
        (200, "application/json", b'{"choices": [{"message": {"content": 7}}]}'),
        (200, "application/json", b'{"error": {"message": "out of memory"}}'),
        (200, "text/plain", b"\xff\xfe\x00"),
    ],
)
async def test_an_answer_that_is_no_completion(
    model: OpenAIChatModel, server: ChatServer, answer: tuple[int, str, bytes]
) -> None:
    server.answer = answer
    error = await failure(model)
    assert "no chat completion" in error.message
    assert "/v1" in error.message


async def test_an_error_inside_an_answer_is_quoted(model: OpenAIChatModel, server: ChatServer) -> None:
    server.says({"error": {"message": "out of memory"}})
    assert "out of memory" in (await failure(model)).message


async def test_a_server_that_hangs_up(environment: None) -> None:
    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(10)
        writer.close()

    listening = await asyncio.start_server(hang_up, "127.0.0.1", 0)
    async with listening:
        port = listening.sockets[0].getsockname()[1]
        model = OpenAIChatModel("small", base_url=f"http://127.0.0.1:{port}/v1")
        error = await failure(model)
        await model.close()
    assert error.started is True
    assert "broke the connection" in error.message


async def test_a_server_that_says_nothing_in_time(server: ChatServer) -> None:
    server.delay = 2.0
    model = OpenAIChatModel("small", base_url=server.url, timeout=0.2)
    error = await failure(model)
    assert error.started is True
    assert "within 0.2 s" in error.message
    await model.close()


async def test_openai_itself_needs_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY")
    error = await failure(OpenAIChatModel("small"))
    assert error.started is False
    assert "$OPENAI_API_KEY" in error.message


async def test_a_missing_sdk_names_the_extra(model: OpenAIChatModel, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without_openai(name: str, *arguments: Any, **options: Any) -> Any:
        if name == "openai":
            raise ImportError(name)
        return real(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", without_openai)
    error = await failure(model)
    assert error.started is False
    assert "retinue[openai]" in error.message


# --- names ------------------------------------------------------------------------------------------------


def test_models_by_name() -> None:
    assert model_from_name("extractive", None) == ExtractiveModel()
    assert model_from_name("openai:a/b:c", None) == OpenAIChatModel("a/b:c")
    assert model_from_name("openai:x", "http://h:1/v1") == OpenAIChatModel("x", base_url="http://h:1/v1")


def test_the_environment_names_the_server_where_the_options_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    assert OpenAIChatModel("x").server == DEFAULT_BASE_URL
    monkeypatch.setenv("OPENAI_BASE_URL", "http://h:1/v1")
    assert OpenAIChatModel("x").server == "http://h:1/v1"


@pytest.mark.parametrize(
    ("make", "hint"),
    [
        (lambda: model_from_name("gpt-5", None), "extractive"),
        (lambda: model_from_name("", None), "extractive"),
        (lambda: model_from_name("openai:", None), "after the colon"),
        (lambda: model_from_name("extractive:x", None), "not known"),
        (lambda: model_from_name("extractive", "http://h/v1"), "talks to no server"),
        (lambda: model_from_name("openai:x", "h:1"), "must look like"),
        (lambda: model_from_name("openai:x", "ftp://h/v1"), "must look like"),
        (lambda: model_from_name("openai:x", "http://user:pw@h/v1"), "must hold no key"),
        (lambda: OpenAIChatModel(""), "needs a name"),
    ],
)
def test_names_that_are_none(make: Callable[[], object], hint: str) -> None:
    with pytest.raises(ValidationFailed, match=hint) as caught:
        make()
    assert "pw" not in str(caught.value)


def test_importing_the_provider_does_not_import_the_sdk() -> None:
    program = (
        "import sys, retinue.providers.openai_chat as m; m.OpenAIChatModel('x');"
        "print([n for n in ('openai', 'httpx', 'httpx2', 'ray') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr
