"""Models of pydantic-ai's model layer: its own test models, and its OpenAI model against a server."""

from __future__ import annotations

import json
import pickle
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from pydantic_ai import exceptions
from pydantic_ai.messages import ModelResponse as WireResponse
from pydantic_ai.messages import TextPart as WireText
from pydantic_ai.messages import ThinkingPart, ToolCallPart
from pydantic_ai.models import KnownModelName, Model
from pydantic_ai.models.function import DeltaToolCall, FunctionModel
from pydantic_ai.models.test import TestModel
from pydantic_ai.usage import RequestUsage

from retinue import Message, ModelRequest, ModelResponse, ToolCall, Usage
from retinue.errors import ModelFailed, ValidationFailed
from retinue.messages import assistant, system, tool_result, user
from retinue.models import StreamingModelClient, ToolSchema
from retinue.providers.pydantic_ai import PydanticAIModel
from retinue.stream_assembly import StreamAssembly
from tests.unit.providers.chat_server import ChatServer, chat_server

KEY = "sk-test-0123456789"
LOOK = ToolSchema(
    "docs/look:at",
    "Looks.",
    {"type": "object", "properties": {"what": {"type": "string"}}, "required": ["what"]},
)
HELLO = ModelRequest(messages=[user("hello")], tools=[LOOK], max_tokens=50)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ChatServer]:
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    with chat_server() as state:
        monkeypatch.setenv("OPENAI_API_KEY", KEY)
        monkeypatch.setenv("OPENAI_BASE_URL", state.url)
        yield state


@pytest.fixture
async def named(server: ChatServer) -> AsyncIterator[PydanticAIModel]:
    client = PydanticAIModel("openai-chat:m")
    yield client
    await client.close()


async def streamed(client: StreamingModelClient, request: ModelRequest) -> ModelResponse:
    assembly = StreamAssembly(client)
    async for chunk in client.stream(request):
        assembly.take(chunk)
    return assembly.response()


def answering(*parts: Any, **more: Any) -> PydanticAIModel:
    return PydanticAIModel(FunctionModel(lambda conversation, info: WireResponse(parts=list(parts), **more)))


def raising(error: Exception) -> PydanticAIModel:
    def fails(conversation: Any, info: Any) -> WireResponse:
        raise error

    return PydanticAIModel(FunctionModel(fails))


async def test_pydantic_ai_answers_calls_tools_and_goes_on() -> None:
    client = PydanticAIModel(TestModel())
    first = ModelRequest(messages=[system("rules"), user("go")], tools=[LOOK], max_tokens=9)
    answer = await client.generate(first)
    (call,) = answer.tool_calls
    assert (call.name, answer.finish_reason) == ("docs/look:at", "tool_calls")
    assert (await streamed(client, first)).tool_calls == answer.tool_calls
    said = Message(role="assistant", content=answer.text, tool_calls=answer.tool_calls, extras=answer.extras)
    going_on = ModelRequest(messages=[*first.messages, said, tool_result(call.id, "blue")], tools=[LOOK])
    assert json.loads((await client.generate(going_on)).text) == {"docs_look_at": "blue"}
    assert (client.provider_id, client.model_id) == ("test", "test")


async def test_pydantic_ai_keeps_what_only_its_provider_understands() -> None:
    seen: list[Any] = []

    def thinks(conversation: Any, info: Any) -> WireResponse:
        seen.append(conversation)
        return WireResponse(parts=[ThinkingPart("hmm", signature="signed=="), WireText("hi")])

    client = PydanticAIModel(FunctionModel(thinks))
    answer = await client.generate(ModelRequest(messages=[user("a")]))
    assert answer.text == "hi"
    said = Message(role="assistant", content=answer.text, extras=answer.extras)
    await client.generate(ModelRequest(messages=[user("a"), said, assistant("plain"), user("b")]))
    kept = seen[-1][1]
    assert [type(part).__name__ for part in kept.parts] == ["ThinkingPart", "TextPart"]
    assert kept.parts[0].signature == "signed=="


@pytest.mark.parametrize(
    ("error", "started", "retryable", "after"),
    [
        (exceptions.ModelHTTPError(429, "m", {"x": KEY}, headers={"Retry-After": "7"}), False, True, 7.0),
        (exceptions.ModelHTTPError(503, "m", {"x": KEY}), True, True, None),
        (exceptions.ModelHTTPError(400, "m", {"x": KEY}), False, False, None),
        (exceptions.ModelHTTPError(429, "m", {"x": KEY}, in_stream=True), True, True, None),
        (exceptions.ModelConnectionError("m", KEY, phase="connect"), False, True, None),
        (exceptions.ModelConnectionError("m", KEY, phase="read"), True, True, None),
        (exceptions.ModelRequestTimeout("m", 1.0), True, True, None),
        (exceptions.ModelQuotaExceededError("m", KEY), False, False, None),
        (exceptions.UnexpectedModelBehavior("odd", KEY), True, False, None),
        (ValueError(KEY), True, False, None),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else None,
)
async def test_failures_are_ours(
    error: Exception, started: bool, retryable: bool, after: float | None
) -> None:
    with pytest.raises(ModelFailed) as failed:
        await raising(error).generate(ModelRequest(messages=[user("a")]))
    ours = failed.value
    assert (ours.started, ours.retryable, ours.retry_after) == (started, retryable, after)
    assert KEY not in ours.message


async def test_a_model_that_there_is_not() -> None:
    with pytest.raises(ModelFailed, match="nowhere") as failed:
        await PydanticAIModel("nowhere:model").generate(ModelRequest(messages=[user("a")]))
    assert not failed.value.started
    with pytest.raises(ValidationFailed):
        PydanticAIModel("")
    with pytest.raises(ValidationFailed) as refused:
        PydanticAIModel("no-colon")
    example = refused.value.message.split("as in ")[1].split(",")[0]  # which must be one that there is
    assert example.partition(":")[0] in {name.partition(":")[0] for name in KnownModelName.__value__.__args__}


@pytest.mark.parametrize("arguments", ['{"what": oops', '["x"]', "3"])
async def test_arguments_that_are_no_object_call_nothing(arguments: str) -> None:
    call = ToolCallPart("docs_look_at", arguments, "c1")
    client = answering(call, usage=RequestUsage(input_tokens=3, output_tokens=2))
    with pytest.raises(ModelFailed, match="no JSON object") as failed:
        await client.generate(HELLO)
    assert failed.value.data["usage"] == {"input_tokens": 3, "output_tokens": 2}

    async def pieces(conversation: Any, info: Any) -> AsyncIterator[dict[int, DeltaToolCall]]:
        yield {0: DeltaToolCall(name="docs_look_at", json_args=arguments, tool_call_id="c1")}

    with pytest.raises(ModelFailed, match="no JSON object"):
        await streamed(PydanticAIModel(FunctionModel(stream_function=pieces)), HELLO)


async def test_calls_whose_pieces_are_mixed_up_are_put_together() -> None:
    async def pieces(conversation: Any, info: Any) -> AsyncIterator[dict[int, DeltaToolCall]]:
        yield {0: DeltaToolCall(name="docs_look_at", json_args='{"what": ', tool_call_id="c1")}
        yield {1: DeltaToolCall(name="docs_look_at", json_args='{"what": ', tool_call_id="c2")}
        yield {0: DeltaToolCall(json_args='"x"}'), 1: DeltaToolCall(json_args='"y"}')}

    answer = await streamed(PydanticAIModel(FunctionModel(stream_function=pieces)), HELLO)
    assert answer.tool_calls == (
        ToolCall("c1", "docs/look:at", {"what": "x"}),
        ToolCall("c2", "docs/look:at", {"what": "y"}),
    )
    assert answer.finish_reason == "tool_calls"


async def test_usage_of_all_kinds() -> None:
    used = RequestUsage(
        input_tokens=20,
        output_tokens=9,
        cache_read_tokens=5,
        input_audio_tokens=3,
        output_audio_tokens=2,
        details={"reasoning_tokens": 4},
    )
    answer = await answering(WireText("hi"), usage=used).generate(HELLO)
    assert answer.usage == Usage(
        input_tokens=20,
        output_tokens=9,
        cached_tokens=5,
        reasoning_tokens=4,
        audio_input_tokens=3,
        audio_output_tokens=2,
    )


async def test_a_model_that_cannot_stream_answers_in_few_pieces() -> None:
    class Whole(Model):
        model_name, system = "whole", "mine"

        async def request(self, messages: Any, model_settings: Any, model_request_parameters: Any) -> Any:
            return WireResponse(parts=[WireText("hi")], model_name="whole")

    client = PydanticAIModel(Whole())
    assert (await streamed(client, HELLO)).text == (await client.generate(HELLO)).text == "hi"


# --- against a server -------------------------------------------------------------------------------------

CHOICE = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "hello"}}
COMPLETION = {"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": [CHOICE],
              "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}}  # fmt: skip


async def test_the_sdk_below_does_not_try_again(server: ChatServer, named: PydanticAIModel) -> None:
    server.headers = {"Retry-After": "2"}
    for status, started in ((503, True), (429, False)):
        server.says({"error": {"message": f"no, {KEY}"}}, status)
        server.requests.clear()
        for asking in (named.generate(HELLO), streamed(named, HELLO)):
            with pytest.raises(ModelFailed) as failed:
                await asking
            error = failed.value
            assert (error.started, error.retryable, error.retry_after) == (started, True, 2.0)
            assert KEY not in error.message
        assert len(server.requests) == 2


async def test_an_account_with_nothing_left_is_not_asked_again(
    server: ChatServer, named: PydanticAIModel
) -> None:
    server.says({"error": {"code": "insufficient_quota", "type": "insufficient_quota", "message": "x"}}, 429)
    with pytest.raises(ModelFailed) as failed:
        await named.generate(HELLO)
    assert (failed.value.started, failed.value.retryable) == (False, False)


async def test_options_are_settings_of_the_model_layer(server: ChatServer, named: PydanticAIModel) -> None:
    server.says(COMPLETION)
    options = {"top_p": 0.5, "extra_body": {"repetition_penalty": 1.1}}
    answer = await named.generate(ModelRequest(messages=[user("x")], max_tokens=7, options=options))
    assert (answer.text, answer.usage) == ("hello", Usage(input_tokens=3, output_tokens=2))
    asked = server.requests[-1]
    assert (asked["top_p"], asked["repetition_penalty"]) == (0.5, 1.1)
    assert 7 in (asked.get("max_tokens"), asked.get("max_completion_tokens"))


async def test_nobody_answers(server: ChatServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:9/v1")
    client = PydanticAIModel("openai-chat:m")
    with pytest.raises(ModelFailed) as failed:
        await client.generate(HELLO)
    assert (failed.value.started, failed.value.retryable) == (False, True)
    await client.close()


async def test_a_copy_answers_too(server: ChatServer, named: PydanticAIModel) -> None:
    server.says(COMPLETION)
    await named.generate(HELLO)  # with connections open
    copy = pickle.loads(pickle.dumps(named))
    assert copy == named
    assert (copy.provider_id, copy.model_id) == ("openai-chat", "m")
    assert (await copy.generate(HELLO)).text == "hello"
