"""Our clients against a real server of another make: llama.cpp's, which speaks all three APIs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from retinue import Agent, Budgets, Grants, Identity, ModelRequest, RunResult, agent_driver, tool
from retinue.messages import user
from retinue.models import StreamingModelClient, UsagePiece
from retinue.providers.anthropic_messages import AnthropicModel
from retinue.providers.openai_chat import OpenAIChatModel
from retinue.providers.openai_responses import OpenAIResponsesModel
from retinue.providers.pydantic_ai import PydanticAIModel
from retinue.testing import check_model_contract
from tests.conftest import MakeLocalRuntime
from tests.support import soon, spent
from tests.unit.providers.chain_model import ENDLESS, TEXT
from tests.unit.providers.environment import only_this_server
from tests.unit.providers.local_server import busy_slots, local_server, need_local_server

NOBODY = "http://127.0.0.1:9"
"""The port of the discard service: nothing listens there."""
ran: list[str] = []


@tool
async def look(what: str) -> str:
    """Look at something."""
    ran.append(what)
    return "it is blue"


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    need_local_server()
    with local_server(tmp_path_factory.mktemp("llama")) as served:
        yield served


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    ran.clear()
    only_this_server(monkeypatch)


def chat(address: str) -> OpenAIChatModel:
    return OpenAIChatModel("chain", base_url=f"{address}/v1")


def responses(address: str) -> OpenAIResponsesModel:
    return OpenAIResponsesModel("chain", base_url=f"{address}/v1")


def messages(address: str) -> AnthropicModel:
    return AnthropicModel("chain", base_url=address)


Make = Callable[[str], Any]
APIS: dict[str, Make] = {"chat": chat, "responses": responses, "messages": messages}


@pytest.fixture(params=APIS)
async def make(request: pytest.FixtureRequest, address: str) -> AsyncIterator[Make]:
    yield APIS[request.param]
    await APIS[request.param](address).close()


@dataclass(frozen=True)
class Busy:
    """What the server works on."""

    address: str

    async def __call__(self) -> int:
        return await asyncio.to_thread(busy_slots, self.address)


async def test_the_contract_holds(make: Make, address: str) -> None:
    report = await check_model_contract(
        make(address),
        calls_tool=True,
        long_prompt=ENDLESS,
        says_length=make is not responses,  # of a response that was cut, this server says "completed"
        unreachable=make(NOBODY),
        busy=Busy(address),
    )
    assert report.checked == (
        "shape", "whole answer", "copies", "streamed answer", "continuation", "tool round", "cap",
        "cancellation", "cancellation under way", "failures",
    )  # fmt: skip
    assert (report.reports_usage, report.stream_reports_usage) == (True, True)


async def test_the_contract_holds_for_a_model_of_pydantic_ai(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", f"{address}/v1")
    model = PydanticAIModel("openai-chat:chain")
    report = await check_model_contract(model, calls_tool=True)
    await model.close()
    assert "tool round" in report.checked


async def test_whole_and_streamed_are_the_same_and_cost_the_same(make: Make, address: str) -> None:
    client: StreamingModelClient = make(address)
    request = ModelRequest(messages=[user("hello")], max_tokens=20)
    whole = await client.generate(request)
    pieces = [piece async for piece in client.stream(request)]
    assert whole.text == TEXT
    assert "".join(getattr(piece, "text", "") for piece in pieces) == TEXT
    assert whole.usage is not None
    terminal = [piece.usage for piece in pieces if isinstance(piece, UsagePiece) and piece.terminal]
    assert [(used.input_tokens, used.output_tokens) for used in terminal] == [
        (whole.usage.input_tokens, 5)  # four words and the end
    ]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_run_with_a_tool_is_charged_what_the_server_says(
    local_runtime: MakeLocalRuntime,
    identity: Identity,
    session_id: str,
    make: Make,
    address: str,
    stream: bool,
) -> None:
    agent = Agent(name="a", model=make(address), tools=[look], max_output_tokens=100)
    runtime = local_runtime(
        driver=agent_driver(agent, stream=stream),
        grants=Grants(tool_ids=["look"]),
        budgets=Budgets(max_tokens=5_000),
    )
    result: RunResult = await soon(runtime.run("look at x", identity=identity, session_id=session_id))
    assert (result.status, result.text, ran) == ("completed", TEXT, ["x"]), result.reason
    budget = spent(result)
    assert (budget.model_calls.used, budget.tool_calls.used, budget.unknown_usage_calls) == (2, 1, 0)
    assert budget.tokens.used == result.usage.total_tokens > 0
    assert budget.tokens.reserved == 0


async def test_a_run_that_is_cancelled_frees_the_servers_slot(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str, make: Make, address: str
) -> None:
    agent = Agent(name="a", model=make(address), max_output_tokens=3_000)
    runtime = local_runtime(driver=agent_driver(agent, stream=True), budgets=Budgets(max_tokens=5_000))
    handle = runtime.start(ENDLESS, identity=identity, session_id=session_id)
    async with asyncio.timeout(10):
        async for event in handle.events(0):
            if event.type == "text.delta":
                break
    assert await asyncio.to_thread(busy_slots, address) == 1
    await handle.cancel()
    result: RunResult = await soon(handle.result())
    assert result.status == "cancelled"
    budget = spent(result)
    assert (budget.unknown_usage_calls, budget.estimated_usage_calls) == (1, 1)
    assert (budget.tokens.reserved, budget.open_calls) == (0, 0)
    assert budget.tokens.used > 3_000  # the reservation, all of it
    async with asyncio.timeout(10):
        while await asyncio.to_thread(busy_slots, address):
            await asyncio.sleep(0.01)
