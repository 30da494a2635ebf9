"""The conformance kit of the model seam: over our clients, and over clients that are wrong."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from retinue import ModelRequest, ModelResponse, ToolCall, Usage
from retinue.errors import ModelFailed
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


# --- answers that go on, and providers that are not there -------------------------------------------------


class Long(Wrong):
    """Answers ``long`` until it is cut, or for as long as it is let."""

    def __init__(self) -> None:
        self.working = 0

    async def generate(self, request: ModelRequest) -> ModelResponse:
        if request.messages[-1].text != "long":
            return await super().generate(request)
        if request.max_tokens is not None:
            return self.cut(request.max_tokens)
        self.working += 1
        try:
            await asyncio.sleep(60)
        finally:
            await self.let_go()
        raise AssertionError("it was not cancelled")

    async def stream(self, request: ModelRequest) -> AsyncIterator[ModelChunk]:
        answer = await super().generate(request)
        if request.messages[-1].text == "long":
            yield TextPiece("on ")
            answer = await self.generate(request)
        yield TextPiece(answer.text)
        yield FinishPiece(answer.finish_reason)

    def cut(self, tokens: int) -> ModelResponse:
        usage = Usage(input_tokens=1, output_tokens=tokens)
        return ModelResponse(text="on " * tokens, finish_reason="length", usage=usage)

    async def let_go(self) -> None:
        self.working -= 1

    async def busy(self) -> int:
        return self.working


class SaysStop(Long):
    def cut(self, tokens: int) -> ModelResponse:
        return ModelResponse(text="on", finish_reason="stop")


class GoesOverTheCap(Long):
    def cut(self, tokens: int) -> ModelResponse:
        return super().cut(tokens + 1)


class SwallowsCancellation(Long):
    async def generate(self, request: ModelRequest) -> ModelResponse:
        try:
            return await super().generate(request)
        except asyncio.CancelledError:
            return ModelResponse(text="never mind")


class WorksOn(Long):
    """Its provider never hears that nobody listens."""

    async def let_go(self) -> None:
        pass


class LeavesATask(Long):
    async def let_go(self) -> None:
        await super().let_go()
        self.left = asyncio.create_task(asyncio.sleep(60))


class Gone(Wrong):
    """A provider that is not there."""

    async def generate(self, request: ModelRequest) -> ModelResponse:
        raise ModelFailed("nobody answers", started=False)

    async def stream(self, request: ModelRequest) -> AsyncIterator[ModelChunk]:
        await self.generate(request)
        yield FinishPiece()


class SaysThatItBegan(Gone):
    async def generate(self, request: ModelRequest) -> ModelResponse:
        raise ModelFailed("nobody answers")


class RaisesItsOwn(Gone):
    async def generate(self, request: ModelRequest) -> ModelResponse:
        raise OSError("nobody answers")


async def test_caps_cancellation_and_failures_are_checked_where_they_can_be() -> None:
    client = Long()
    report = await check_model_contract(client, long_prompt="long", unreachable=Gone(), busy=client.busy)
    assert report.checked[-4:] == ("cap", "cancellation", "cancellation under way", "failures")


@pytest.mark.parametrize(
    ("client", "says"),
    [
        (SaysStop, "finishes with 'length'"),
        (GoesOverTheCap, "there are no 9 tokens"),
        (SwallowsCancellation, "CancelledError"),
        (WorksOn, "works on 1 requests"),
        (LeavesATask, "nothing goes on"),
    ],
)
async def test_who_does_not_stop_is_found(
    monkeypatch: pytest.MonkeyPatch, client: type[Long], says: str
) -> None:
    monkeypatch.setattr("retinue.testing.model_contract.PATIENCE", 0.2)
    made = client()
    with pytest.raises(ModelContractBroken, match=says):
        await check_model_contract(made, long_prompt="long", busy=made.busy)
    if isinstance(made, LeavesATask):
        made.left.cancel()


async def test_not_all_providers_say_that_an_answer_was_cut() -> None:
    report = await check_model_contract(SaysStop(), long_prompt="long", says_length=False)
    assert "cap" in report.checked


@pytest.mark.parametrize(
    ("gone", "says"), [(SaysThatItBegan, "started=False"), (RaisesItsOwn, "OSError"), (Wrong, "no answer")]
)
async def test_failures_that_are_told_wrong_are_found(gone: type[Wrong], says: str) -> None:
    with pytest.raises(ModelContractBroken, match=says):
        await check_model_contract(Wrong(), unreachable=gone())


class Forgets(Wrong):
    """Refuses what it gave itself."""

    async def generate(self, request: ModelRequest) -> ModelResponse:
        if any(message.extras for message in request.messages):
            raise ModelFailed("what is this?")
        return ModelResponse(text="hello", extras={"p": {"kept": [1]}})


async def test_what_goes_back_must_be_taken() -> None:
    with pytest.raises(ModelContractBroken, match="what is this"):
        await check_model_contract(Forgets())
