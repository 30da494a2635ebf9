"""The responses API and the messages API, against answers as they are on the wire."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from retinue import Message, ModelRequest, ModelResponse, ToolCall, Usage
from retinue.errors import ModelFailed, ValidationFailed
from retinue.messages import (
    AudioPart,
    FilePart,
    ImagePart,
    Part,
    TextPart,
    system,
    tool_result,
    user,
)
from retinue.models import ModelClient, StreamingModelClient, ToolSchema, capabilities_of
from retinue.providers.anthropic_messages import AnthropicModel
from retinue.providers.openai_responses import OpenAIResponsesModel
from retinue.stream_assembly import StreamAssembly
from tests.unit.providers.chat_server import HOLD, ChatServer, chat_server
from tests.unit.providers.environment import only_this_server

KEY = "sk-test-0123456789"
LOOK = ToolSchema(
    "docs/look:at",
    "Looks.",
    {"type": "object", "properties": {"what": {"type": "string"}}, "required": ["what"]},
)
ASK = ModelRequest(
    messages=[system("rules"), user("hello")],
    tools=[LOOK],
    max_tokens=50,
    temperature=0.5,
    options={"top_p": 0.9},
)


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    only_this_server(monkeypatch, KEY)


@pytest.fixture
def server() -> Iterator[ChatServer]:
    with chat_server() as state:
        yield state


@pytest.fixture
async def responses(server: ChatServer) -> AsyncIterator[OpenAIResponsesModel]:
    client = OpenAIResponsesModel("gpt-x", base_url=server.url)
    yield client
    await client.close()


@pytest.fixture
async def messages(server: ChatServer) -> AsyncIterator[AnthropicModel]:
    client = AnthropicModel("claude-x", base_url=server.url.removesuffix("/v1"))
    yield client
    await client.close()


async def streamed(client: StreamingModelClient, request: ModelRequest) -> ModelResponse:
    assembly = StreamAssembly(client)
    async for chunk in client.stream(request):
        assembly.take(chunk)
    return assembly.response()


# --- the responses API ------------------------------------------------------------------------------------

REASONING = {"type": "reasoning", "id": "rs_1", "encrypted_content": "opaque==", "summary": [
    {"type": "summary_text", "text": "thought about it"}]}  # fmt: skip
SAID = {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "phase": "commentary",
        "content": [{"type": "output_text", "text": "Let me look.", "annotations": []}]}  # fmt: skip
CALL = {"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": "docs_look_at",
        "arguments": '{"what": "x"}', "status": "completed"}  # fmt: skip
USED = {"input_tokens": 20, "input_tokens_details": {"cached_tokens": 5}, "output_tokens": 9,
        "output_tokens_details": {"reasoning_tokens": 4}, "total_tokens": 29}  # fmt: skip


def response(*output: Any, status: str = "completed", **more: Any) -> dict[str, Any]:
    return {"id": "resp_1", "object": "response", "created_at": 1, "status": status, "model": "gpt-x",
            "output": list(output), "usage": USED, "parallel_tool_calls": True, "tool_choice": "auto",
            "tools": [], **more}  # fmt: skip


async def test_responses_with_phases_summaries_calls_and_continuation(
    server: ChatServer, responses: OpenAIResponsesModel
) -> None:
    server.says(response(REASONING, SAID, CALL))
    answer = await responses.generate(ASK)
    assert answer.text == "Let me look."
    assert answer.tool_calls == (ToolCall("call_1", "docs/look:at", {"what": "x"}),)
    assert answer.usage == Usage(input_tokens=20, output_tokens=9, cached_tokens=5, reasoning_tokens=4)
    assert answer.finish_reason == "tool_calls"
    assert [(item.phase, item.text) for item in answer.items] == [
        ("reasoning_summary", "thought about it"), ("commentary", "Let me look."),
    ]  # fmt: skip
    (asked,) = server.requests
    assert (asked["max_output_tokens"], asked["temperature"], asked["top_p"], asked["store"]) == (
        50, 0.5, 0.9, False,
    )  # fmt: skip
    assert asked["tools"][0]["name"] == "docs_look_at"
    assert capabilities_of(responses).message_phases == "native"

    said = Message(role="assistant", content=answer.text, tool_calls=answer.tool_calls, extras=answer.extras)
    await responses.generate(ModelRequest(messages=[user("hello"), said, tool_result("call_1", "blue")]))
    sent = server.requests[-1]["input"]
    assert sent[1:4] == [REASONING, SAID, CALL]  # verbatim
    assert sent[4] == {"type": "function_call_output", "call_id": "call_1", "output": "blue"}


async def test_responses_of_other_providers_are_sent_as_text_and_calls(
    server: ChatServer, responses: OpenAIResponsesModel
) -> None:
    server.says(response())
    other = Message(
        role="assistant",
        content="hm",
        tool_calls=(ToolCall("c", "docs/look:at", {"what": "é"}),),
        extras={"anthropic.messages": {"content": []}},
    )
    parts: list[Part] = [
        TextPart("see"),
        ImagePart("aGk=", "image/png"),
        FilePart("aGk=", "application/pdf", "a.pdf"),
    ]
    await responses.generate(ModelRequest(messages=[user(parts), other, tool_result("c", "y")], tools=[LOOK]))
    sent = server.requests[-1]["input"]
    assert [part["type"] for part in sent[0]["content"]] == ["input_text", "input_image", "input_file"]
    assert sent[1] == {"type": "message", "role": "assistant", "content": "hm"}
    assert sent[2]["arguments"] == '{"what": "é"}'


def events(*made: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"sequence_number": number, **event} for number, event in enumerate(made)]


async def test_a_streamed_response_is_what_the_whole_one_is(
    server: ChatServer, responses: OpenAIResponsesModel
) -> None:
    server.streams(
        *events(
            {"type": "response.created", "response": response(status="in_progress")},
            {"type": "response.output_item.added", "output_index": 0, "item": REASONING | {"summary": []}},
            {"type": "response.reasoning_summary_text.delta", "output_index": 0, "item_id": "rs_1",
             "summary_index": 0, "delta": "thought about it"},
            {"type": "response.output_item.added", "output_index": 1, "item": SAID | {"content": []}},
            {"type": "response.output_text.delta", "output_index": 1, "content_index": 0, "item_id": "msg_1",
             "delta": "Let me ", "logprobs": []},
            {"type": "response.output_text.delta", "output_index": 1, "content_index": 0, "item_id": "msg_1",
             "delta": "look.", "logprobs": []},
            {"type": "response.output_item.added", "output_index": 2, "item": CALL | {"arguments": ""}},
            {"type": "response.function_call_arguments.delta", "output_index": 2, "item_id": "fc_1",
             "delta": '{"what": '},
            {"type": "response.function_call_arguments.delta", "output_index": 2, "item_id": "fc_1",
             "delta": '"x"}'},
            {"type": "response.output_item.done", "output_index": 2, "item": CALL},
            {"type": "response.completed", "response": response(REASONING, SAID, CALL)},
        ),
        done=False,
    )  # fmt: skip
    answer = await streamed(responses, ASK)
    server.pieces = None
    server.says(response(REASONING, SAID, CALL))
    whole = await responses.generate(ASK)
    assert (answer.text, answer.tool_calls, answer.usage, answer.finish_reason, answer.extras) == (
        whole.text, whole.tool_calls, whole.usage, whole.finish_reason, whole.extras,
    )  # fmt: skip
    assert [(item.phase, item.text) for item in answer.items] == [
        (item.phase, item.text) for item in whole.items
    ]


@pytest.mark.parametrize(
    ("body", "says", "retryable"),
    [
        (response(status="failed", error={"code": "server_error", "message": "boom"}), "boom", True),
        (response(CALL | {"arguments": "{oops"}), "no JSON object", False),
        ({"hello": 1}, "no response", False),
        ([], "no response", False),
    ],
)
async def test_a_response_that_is_none(
    server: ChatServer, responses: OpenAIResponsesModel, body: Any, says: str, retryable: bool
) -> None:
    server.says(body)
    with pytest.raises(ModelFailed, match=says) as failed:
        await responses.generate(ASK)
    assert (failed.value.started, failed.value.retryable) == (True, retryable)


async def test_options_of_the_responses_api_join_what_the_client_asks_for(
    server: ChatServer, responses: OpenAIResponsesModel
) -> None:
    server.says(response(SAID))
    shows = OpenAIResponsesModel("gpt-x", base_url=server.url, reasoning_summary="auto")
    options = {"reasoning": {"effort": "low"}, "include": ["message.output_text.logprobs"], "store": True}
    await shows.generate(ModelRequest(messages=[user("x")], options=options))
    asked = server.requests[-1]
    assert asked["reasoning"] == {"summary": "auto", "effort": "low"}
    assert asked["include"] == ["reasoning.encrypted_content", "message.output_text.logprobs"]
    assert asked["store"] is True


async def test_a_response_without_phases_is_the_same_whole_and_streamed(
    server: ChatServer, responses: OpenAIResponsesModel
) -> None:
    said = {name: value for name, value in SAID.items() if name != "phase"}
    server.says(response(said))
    whole = await responses.generate(ASK)
    delta = {"output_index": 0, "content_index": 0, "item_id": "msg_1", "logprobs": []}
    server.streams(
        *events(
            {"type": "response.output_item.added", "output_index": 0, "item": said | {"content": []}},
            {"type": "response.output_text.delta", **delta, "delta": "Let me look."},
            {"type": "response.completed", "response": response(said)},
        ),
        done=False,
    )
    assert await streamed(responses, ASK) == whole
    assert (whole.text, whole.phase, whole.extras) == ("Let me look.", None, None)


async def test_a_refusal_is_the_answer(server: ChatServer, responses: OpenAIResponsesModel) -> None:
    no = SAID | {"phase": None, "content": [{"type": "refusal", "refusal": "I will not."}]}
    server.says(response(no))
    answer = await responses.generate(ASK)
    assert (answer.text, answer.finish_reason, answer.tool_calls) == ("I will not.", "stop", ())


@pytest.mark.parametrize(
    ("event", "retryable"),
    [
        ({"type": "error", "code": "server_error", "message": f"boom {KEY}", "param": None}, True),
        ({"type": "error", "code": "invalid_prompt", "message": f"boom {KEY}", "param": None}, False),
        ({"type": "response.failed", "response": response(
            status="failed", error={"code": "rate_limit_exceeded", "message": f"boom {KEY}"})}, True),
        ({"type": "response.failed", "response": response(
            status="failed", error={"code": "image_too_small", "message": f"boom {KEY}"})}, False),
    ],
)  # fmt: skip
async def test_a_streamed_response_that_fails(
    server: ChatServer, responses: OpenAIResponsesModel, event: dict[str, Any], retryable: bool
) -> None:
    server.streams(*events(event), done=False)
    with pytest.raises(ModelFailed, match="boom") as failed:
        await streamed(responses, ASK)
    error = failed.value
    assert (error.started, error.retryable) == (True, retryable)
    assert KEY not in error.message
    used = {"input_tokens": 20, "output_tokens": 9, "cached_tokens": 5, "reasoning_tokens": 4}
    assert error.data.get("usage") == (used if event["type"] == "response.failed" else None)


async def test_a_cut_response_says_so(server: ChatServer, responses: OpenAIResponsesModel) -> None:
    said = SAID | {"phase": None}
    for why, reason in (("max_output_tokens", "length"), ("content_filter", "content_filter")):
        server.says(response(said, status="incomplete", incomplete_details={"reason": why}))
        assert (await responses.generate(ASK)).finish_reason == reason


# --- the messages API -------------------------------------------------------------------------------------

THINKING = {"type": "thinking", "thinking": "hmm", "signature": "signed=="}
TEXT = {"type": "text", "text": "Let me look."}
USE = {"type": "tool_use", "id": "toolu_1", "name": "docs_look_at", "input": {"what": "x"}}
COUNTED = {"input_tokens": 10, "cache_read_input_tokens": 6, "cache_creation_input_tokens": 4,
           "output_tokens": 7}  # fmt: skip


def message(*content: Any, stop: str | None = "tool_use", **more: Any) -> dict[str, Any]:
    return {"id": "msg_1", "type": "message", "role": "assistant", "model": "claude-x",
            "content": list(content), "stop_reason": stop, "stop_sequence": None, "usage": COUNTED,
            **more}  # fmt: skip


async def test_messages_with_thinking_calls_and_continuation(
    server: ChatServer, messages: AnthropicModel
) -> None:
    server.says(message(THINKING, TEXT, USE))
    answer = await messages.generate(ASK)
    assert answer.text == "Let me look."
    assert answer.tool_calls == (ToolCall("toolu_1", "docs/look:at", {"what": "x"}),)
    assert answer.usage == Usage(input_tokens=20, output_tokens=7, cached_tokens=6)
    assert answer.finish_reason == "tool_calls"
    (asked,) = server.requests
    assert (asked["max_tokens"], asked["temperature"], asked["top_p"]) == (50, 0.5, 0.9)
    assert asked["system"] == [{"type": "text", "text": "rules"}]
    said = Message(role="assistant", content=answer.text, tool_calls=answer.tool_calls, extras=answer.extras)
    two = [tool_result("toolu_1", "blue"), user("and now?")]
    await messages.generate(ModelRequest(messages=[user("hello"), said, *two]))
    sent = server.requests[-1]
    assert sent["max_tokens"] == 8192
    assert [each["role"] for each in sent["messages"]] == ["user", "assistant", "user"]
    assert sent["messages"][1]["content"] == [THINKING, TEXT, USE]  # verbatim
    assert [block["type"] for block in sent["messages"][2]["content"]] == ["tool_result", "text"]


async def test_a_streamed_message_is_what_the_whole_one_is(
    server: ChatServer, messages: AnthropicModel
) -> None:
    server.streams(
        b"event: message_start\n",
        {"type": "message_start", "message": message(stop=None, usage=COUNTED | {"output_tokens": 1})},
        b"event: content_block_start\n",
        {"type": "content_block_start", "index": 0,
         "content_block": {"type": "thinking", "thinking": "", "signature": ""}},
        b"event: content_block_delta\n",
        {"type": "content_block_delta", "index": 0, "delta": {"type": "thinking_delta", "thinking": "hmm"}},
        b"event: content_block_delta\n",
        {"type": "content_block_delta", "index": 0,
         "delta": {"type": "signature_delta", "signature": "signed=="}},
        b"event: content_block_start\n",
        {"type": "content_block_start", "index": 1, "content_block": {"type": "text", "text": ""}},
        b"event: content_block_delta\n",
        {"type": "content_block_delta", "index": 1, "delta": {"type": "text_delta", "text": "Let me "}},
        b"event: content_block_delta\n",
        {"type": "content_block_delta", "index": 1, "delta": {"type": "text_delta", "text": "look."}},
        b"event: content_block_start\n",
        {"type": "content_block_start", "index": 2, "content_block": USE | {"input": {}}},
        b"event: content_block_delta\n",
        {"type": "content_block_delta", "index": 2,
         "delta": {"type": "input_json_delta", "partial_json": '{"what"'}},
        b"event: content_block_delta\n",
        {"type": "content_block_delta", "index": 2,
         "delta": {"type": "input_json_delta", "partial_json": ': "x"}'}},
        b"event: message_delta\n",
        {"type": "message_delta", "delta": {"stop_reason": "tool_use", "stop_sequence": None},
         "usage": {"output_tokens": 7}},
        b"event: message_stop\n",
        {"type": "message_stop"},
        done=False,
    )  # fmt: skip
    answer = await streamed(messages, ASK)
    server.pieces = None
    server.says(message(THINKING, TEXT, USE))
    assert answer == await messages.generate(ASK)


async def test_citations_and_calls_of_the_providers_own_tools_are_kept_as_they_came(
    server: ChatServer, messages: AnthropicModel
) -> None:
    search = {"type": "server_tool_use", "id": "srv_1", "name": "web_search", "input": {"query": "tide"}}
    found = {"type": "web_search_tool_result", "tool_use_id": "srv_1", "content": []}
    cited = {"type": "char_location", "cited_text": "In.", "document_index": 0, "document_title": None,
             "start_char_index": 0, "end_char_index": 3}  # fmt: skip
    text = TEXT | {"citations": [cited]}

    def event(kind: str, **more: Any) -> list[Any]:
        return [f"event: {kind}\n".encode(), {"type": kind, **more}]

    def begins(place: int, block: dict[str, Any]) -> list[Any]:
        return event("content_block_start", index=place, content_block=block)

    def grows(place: int, **delta: Any) -> list[Any]:
        return event("content_block_delta", index=place, delta=delta)

    server.streams(
        *event("message_start", message=message(stop=None)),
        *begins(0, search | {"input": {}}),
        *grows(0, type="input_json_delta", partial_json='{"query": "tide"}'),
        *begins(1, found),
        *begins(2, TEXT | {"text": "", "citations": []}),
        *grows(2, type="text_delta", text="Let me look."),
        *grows(2, type="citations_delta", citation=cited),
        *begins(3, USE),  # at once, with its arguments
        *event("message_delta", delta={"stop_reason": "tool_use"}, usage={"output_tokens": 7}),
        *event("message_stop"),
        done=False,
    )
    answer = await streamed(messages, ASK)
    server.pieces = None
    server.says(message(search, found, text, USE))
    assert answer == await messages.generate(ASK)
    assert answer.extras == {"anthropic.messages": {"content": [search, found, text, USE]}}
    assert answer.tool_calls == (ToolCall("toolu_1", "docs/look:at", {"what": "x"}),)


async def test_pictures_and_files_as_the_messages_api_takes_them(
    server: ChatServer, messages: AnthropicModel
) -> None:
    server.says(message(TEXT, stop="end_turn"))
    parts: list[Part] = [
        TextPart("see"),
        ImagePart("aGk=", "image/jpeg"),
        ImagePart("https://example.com/a.png"),
        ImagePart("data:image/gif;base64,aGk="),
        FilePart("aGk=", "application/pdf", "a.pdf"),
    ]
    await messages.generate(ModelRequest(messages=[user(parts)]))
    (sent,) = server.requests[-1]["messages"]
    assert [part.get("source") for part in sent["content"]] == [
        None,
        {"type": "base64", "media_type": "image/jpeg", "data": "aGk="},
        {"type": "url", "url": "https://example.com/a.png"},
        {"type": "base64", "media_type": "image/gif", "data": "aGk="},
        {"type": "base64", "media_type": "application/pdf", "data": "aGk="},
    ]
    with pytest.raises(ModelFailed) as failed:
        await messages.generate(ModelRequest(messages=[user([AudioPart("aGk=")])]))
    assert not failed.value.started


@pytest.mark.parametrize(
    ("stop", "reason"),
    [
        ("end_turn", "stop"),
        ("max_tokens", "length"),
        ("refusal", "content_filter"),
        ("stop_sequence", "stop"),
    ],
)
async def test_why_a_message_ended(
    server: ChatServer, messages: AnthropicModel, stop: str, reason: str
) -> None:
    server.says(message(TEXT, stop=stop))
    answer = await messages.generate(ASK)
    assert (answer.finish_reason, answer.extras) == (reason, None)


@pytest.mark.parametrize(
    ("kind", "retryable"), [("overloaded_error", True), ("invalid_request_error", False)]
)
async def test_a_stream_that_breaks_with_an_error(
    server: ChatServer, messages: AnthropicModel, kind: str, retryable: bool
) -> None:
    server.streams(
        b"event: message_start\n",
        {"type": "message_start", "message": message(stop=None)},
        b"event: error\n",
        {"type": "error", "error": {"type": kind, "message": f"too much {KEY}"}},
        done=False,
    )
    with pytest.raises(ModelFailed, match="too much") as failed:
        await streamed(messages, ASK)
    assert (failed.value.started, failed.value.retryable) == (True, retryable)
    assert KEY not in failed.value.message


# --- both -------------------------------------------------------------------------------------------------


@pytest.fixture(params=["responses", "messages"])
def either(request: pytest.FixtureRequest) -> ModelClient:
    client: ModelClient = request.getfixturevalue(request.param)
    return client


@pytest.mark.parametrize(
    ("status", "headers", "started", "retryable", "after"),
    [
        (429, {"Retry-After": "7"}, False, True, 7.0),
        (429, {"retry-after-ms": "1500"}, False, True, 1.5),
        (429, {}, False, True, None),
        (503, {"Retry-After": "2"}, True, True, 2.0),
        (400, {}, False, False, None),
        (401, {}, False, False, None),
    ],
)
async def test_refusals(
    server: ChatServer,
    either: ModelClient,
    status: int,
    headers: dict[str, str],
    started: bool,
    retryable: bool,
    after: float | None,
) -> None:
    server.headers = headers
    server.says({"error": {"type": "x", "message": f"no, {KEY}"}}, status)
    with pytest.raises(ModelFailed) as failed:
        await either.generate(ASK)
    error = failed.value
    assert (error.started, error.retryable, error.retry_after) == (started, retryable, after)
    assert KEY not in error.message
    assert len(server.requests) == 1  # the SDK does not try again by itself


async def test_a_date_is_a_time_to_wait_too(server: ChatServer, responses: OpenAIResponsesModel) -> None:
    server.headers = {"Retry-After": "Wed, 21 Oct 2099 07:28:00 GMT"}
    server.says({}, 429)
    with pytest.raises(ModelFailed) as failed:
        await responses.generate(ASK)
    assert failed.value.retry_after is not None
    assert failed.value.retry_after > 10**8


async def test_an_option_cannot_replace_what_was_admitted(server: ChatServer, either: ModelClient) -> None:
    taken: list[dict[str, Any]] = [{"model": "dear"}, {"tools": []}, {"stream": True}]
    for options in taken:
        with pytest.raises(ModelFailed, match=next(iter(options))) as failed:
            await either.generate(ModelRequest(messages=[user("x")], tools=[LOOK], options=options))
        assert not failed.value.started
    assert server.requests == []


async def test_nobody_answers(either: ModelClient) -> None:
    gone = type(either)("m", base_url="http://127.0.0.1:9/v1")  # type: ignore[call-arg]
    with pytest.raises(ModelFailed, match="no server answers") as failed:
        await gone.generate(ASK)
    assert (failed.value.started, failed.value.retryable) == (False, True)


async def test_a_stream_that_is_left_ends_the_request(
    server: ChatServer, either: StreamingModelClient
) -> None:
    server.streams(HOLD)
    reading = asyncio.ensure_future(streamed(either, ASK))
    await asyncio.to_thread(server.held.wait, 10)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert await asyncio.to_thread(server.left.wait, 10)


async def test_copies_and_names(either: ModelClient, server: ChatServer) -> None:
    copy = pickle.loads(pickle.dumps(either))
    assert copy == either
    for wrong in (
        {"model": ""},
        {"model": "m", "base_url": "ftp://x"},
        {"model": "m", "base_url": f"http://u:{KEY}@x"},
    ):
        with pytest.raises(ValidationFailed):
            type(either)(**wrong)
