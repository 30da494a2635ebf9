"""The conformance kit of the model seam: over our clients, and over clients that are wrong."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from retinue import ModelRequest, ModelResponse, ToolCall, Usage
from retinue.models import FinishPiece, ModelChunk, TextPiece, UsagePiece
from retinue.providers.openai_chat import OpenAIChatModel
from retinue.providers.pydantic_ai import PydanticAIModel
from retinue.testing import ModelContractBroken, ScriptedModel, check_model_contract, reply, tool_calls
from tests.unit.providers.chat_server import chat_server


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-test")
    for name in ("OPENAI_BASE_URL", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy",
                 "all_proxy"):  # fmt: skip
        monkeypatch.delenv(name, raising=False)


async def test_a_scripted_model_keeps_it() -> None:
    call = tool_calls(("look", {"what": "x"}))
    model = ScriptedModel(
        [reply("hello")] * 5 + [call, call, reply("blue"), reply("blue")] + [reply("x")] * 4
    )
    report = await check_model_contract(model, calls_tool=True)
    assert report.checked == (
        "shape", "whole answer", "copies", "streamed answer", "continuation", "tool round", "cancellation",
    )  # fmt: skip
    assert (report.reports_usage, report.stream_reports_usage, report.called_a_tool) == (True, True, True)


async def test_an_openai_compatible_server_keeps_it() -> None:
    with chat_server() as server:
        model = OpenAIChatModel("small", base_url=server.url)
        report = await check_model_contract(model, prompt="What is a lease?")
        await model.close()
    assert report.streams


async def test_a_model_of_pydantic_ai_keeps_it() -> None:
    from pydantic_ai.models.test import TestModel

    plain = PydanticAIModel(TestModel(custom_output_text="hello there"))
    assert (await check_model_contract(plain)).stream_reports_usage
    assert (await check_model_contract(PydanticAIModel(TestModel()), calls_tool=True)).called_a_tool


class Wrong:
    """A client that is right, until a part of it is replaced."""

    provider_id = "p"
    model_id = "m"

    async def generate(self, request: ModelRequest) -> ModelResponse:
        return ModelResponse(text="hello", usage=Usage(input_tokens=1, output_tokens=1))

    async def stream(self, request: ModelRequest) -> AsyncIterator[ModelChunk]:
        yield TextPiece("hello")
        yield UsagePiece(Usage(input_tokens=1, output_tokens=1))
        yield FinishPiece()


class NoIds(Wrong):
    model_id = ""


class SaysNothing(Wrong):
    async def generate(self, request: ModelRequest) -> ModelResponse:
        return ModelResponse()


class CallsUnasked(Wrong):
    async def generate(self, request: ModelRequest) -> ModelResponse:
        return ModelResponse(text="x", tool_calls=(ToolCall("1", "look"),), finish_reason="tool_calls")


class GivesADictionary(Wrong):
    async def generate(self, request: ModelRequest) -> Any:
        return {"text": "hello"}


class Impossible(Wrong):
    async def generate(self, request: ModelRequest) -> ModelResponse:
        return ModelResponse(text="hello", usage=Usage(input_tokens=-1))


class NeverFinishes(Wrong):
    async def stream(self, request: ModelRequest) -> AsyncIterator[ModelChunk]:
        yield TextPiece("hello")


class FinishesTwice(Wrong):
    async def stream(self, request: ModelRequest) -> AsyncIterator[ModelChunk]:
        for piece in (TextPiece("hello"), FinishPiece(), FinishPiece()):
            yield piece


class NoStream(Wrong):
    async def stream(self, request: ModelRequest) -> Any:  # type: ignore[override]
        return []


class NoCopies(Wrong):
    def __reduce__(self) -> Any:
        return Wrong, (), {"model_id": "another"}


@pytest.mark.parametrize(
    "client",
    [NoIds, SaysNothing, CallsUnasked, GivesADictionary, Impossible, NeverFinishes, FinishesTwice, NoStream,
     NoCopies],
)  # fmt: skip
async def test_what_is_wrong_is_found(client: type[Wrong]) -> None:
    assert (await check_model_contract(Wrong())).checked
    with pytest.raises(ModelContractBroken):
        await check_model_contract(client())
