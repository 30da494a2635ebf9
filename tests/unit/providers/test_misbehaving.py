"""Servers that misbehave on purpose: what a run makes of them, and what its ledger says.

Whatever a server does, nothing stays reserved, unknown usage is charged and called so, and each retry is a
call of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from retinue import Agent, Budgets, Grants, Identity, RunResult, Usage, agent_driver, tool
from retinue.messages import content_text
from retinue.providers.anthropic_messages import AnthropicModel
from retinue.providers.openai_chat import OpenAIChatModel
from retinue.providers.openai_responses import OpenAIResponsesModel
from tests.conftest import MakeLocalRuntime
from tests.support import estimate, soon
from tests.unit.providers.chat_server import HOLD, ChatServer, chat_server
from tests.unit.providers.environment import only_this_server

ran: list[str] = []


@tool
async def look(what: str) -> str:
    """Look."""
    ran.append(what)
    return "blue"


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    ran.clear()
    monkeypatch.setattr("retinue.model_retries.FIRST_WAIT", 0.01)
    only_this_server(monkeypatch)


@pytest.fixture
def server() -> Iterator[ChatServer]:
    with chat_server() as state:
        yield state


def chunk(delta: dict[str, Any], finish: str | None = None, **more: Any) -> dict[str, Any]:
    return {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m",
            "choices": [{"index": 0, "delta": delta, "finish_reason": finish}], **more}  # fmt: skip


USED = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
COUNTED = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [],
           "usage": USED}  # fmt: skip
HELLO = [chunk({"role": "assistant", "content": "hel"}), chunk({"content": "lo"})]
STOP = chunk({}, "stop")


def call(arguments: str) -> dict[str, Any]:
    function = {"name": "look", "arguments": arguments}
    return chunk({"tool_calls": [{"index": 0, "id": "c1", "type": "function", "function": function}]})


async def run(
    make: MakeLocalRuntime,
    identity: Identity,
    session_id: str,
    model: Any,
    *,
    stream: bool = True,
    **agent: Any,
) -> RunResult:
    runtime = make(
        driver=agent_driver(
            Agent(name="a", model=model, tools=[look], max_output_tokens=50, **{"model_retries": 0, **agent}),
            stream=stream,
        ),
        grants=Grants(tool_ids=["look"]),
        budgets=Budgets(max_tokens=1_000),
        estimate_input_tokens=estimate(10),
    )
    result: RunResult = await soon(runtime.run("x", identity=identity, session_id=session_id))
    assert result.budget is not None
    assert (result.budget.tokens.reserved, result.budget.model_calls.reserved) == (0, 0)
    assert result.budget.open_calls == 0
    return result


@pytest.mark.parametrize(
    ("pieces", "status", "says", "exact", "estimated"),
    [
        pytest.param([], "failed", "without a finish", 0, 0, id="nothing at all"),
        pytest.param(HELLO, "failed", "without a finish", 0, 1, id="cut in the text"),
        pytest.param([call('{"wha')], "failed", "without a finish", 0, 1, id="cut in the arguments"),
        pytest.param([*HELLO, STOP], "completed", "", 0, 1, id="no usage"),
        pytest.param([*HELLO, STOP, STOP, COUNTED], "completed", "", 1, 0, id="two finishes"),
        pytest.param([*HELLO, STOP, COUNTED, COUNTED], "failed", "usage", 1, 0, id="two usages"),
        pytest.param(
            [call('{"what": oops}'), chunk({}, "tool_calls"), COUNTED], "failed", "JSON", 1, 0, id="no JSON"
        ),
        pytest.param(
            [call('["x"]'), chunk({}, "tool_calls"), COUNTED], "failed", "JSON", 1, 0, id="no object"
        ),
        pytest.param(
            [call('{"what": "x"}'), chunk({}, "length"), COUNTED], "failed", "length", 1, 0, id="a call, cut"
        ),
        pytest.param(
            [*HELLO, chunk({}, "bored"), COUNTED], "completed", "", 1, 0, id="a reason that nobody knows"
        ),
        pytest.param([b"data: {not json\n\n"], "failed", "no chat completion", 0, 0, id="garbage"),
        pytest.param([b"data: " + b"x" * 300_000 + b"\n\n"], "failed", "", 0, 0, id="an enormous line"),
    ],
)
async def test_streams(
    local_runtime: MakeLocalRuntime,
    identity: Identity,
    session_id: str,
    server: ChatServer,
    pieces: list[Any],
    status: str,
    says: str,
    exact: int,
    estimated: int,
) -> None:
    server.streams(*pieces, done=bool(pieces) and status == "completed")
    model = OpenAIChatModel("m", base_url=server.url)
    result = await run(local_runtime, identity, session_id, model)
    assert result.status == status, result.reason
    assert says in (result.reason.message if result.reason else "")
    assert ran == []
    assert result.budget is not None
    assert result.budget.model_calls.used == 1
    assert result.budget.unknown_usage_calls == 1 - exact
    assert result.budget.estimated_usage_calls == estimated
    # Known usage is charged as it is, all else with what was reserved: 10 of input and a cap of 50.
    assert result.budget.tokens.used == (5 if exact else 60)
    assert result.usage == (Usage(input_tokens=3, output_tokens=2) if exact else Usage())


@pytest.mark.parametrize(
    ("answers", "calls", "unknown", "status"),
    [
        ([429, 429, 200], 1, 0, "completed"),  # what was refused is no call: it was never begun
        ([503, 200], 2, 1, "completed"),
        ([500, 502, 503], 3, 3, "failed"),
        ([400], 0, 0, "failed"),
    ],
)
async def test_refusals_are_retried_and_each_retry_is_admitted(
    local_runtime: MakeLocalRuntime,
    identity: Identity,
    session_id: str,
    server: ChatServer,
    answers: list[int],
    calls: int,
    unknown: int,
    status: str,
) -> None:
    good = b'{"choices":[{"finish_reason":"stop","message":{"content":"hello"}}],"usage":%s}'
    body = good % b'{"prompt_tokens":3,"completion_tokens":2}'
    server.headers = {"Retry-After": "0.02"}
    server.answers = [
        (code, "application/json", body if code == 200 else b'{"error":{"message":"no"}}') for code in answers
    ]
    model = OpenAIChatModel("m", base_url=server.url)
    result = await run(local_runtime, identity, session_id, model, stream=False, model_retries=2)
    assert result.status == status
    assert len(server.requests) == len(answers)
    assert result.budget is not None
    assert (result.budget.model_calls.used, result.budget.unknown_usage_calls) == (calls, unknown)
    assert result.budget.tokens.used == 60 * unknown + (5 if status == "completed" else 0)


async def test_a_stream_that_was_seen_is_not_asked_again(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str, server: ChatServer
) -> None:
    server.streams(*HELLO, b"data: {", done=False)
    model = OpenAIChatModel("m", base_url=server.url)
    result = await run(local_runtime, identity, session_id, model, model_retries=2)
    assert result.status == "failed"
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    "make",
    [
        lambda url: OpenAIChatModel("m", base_url=url),
        lambda url: OpenAIResponsesModel("m", base_url=url),
        lambda url: AnthropicModel("m", base_url=url.removesuffix("/v1")),
    ],
    ids=["chat", "responses", "messages"],
)
@pytest.mark.parametrize("stream", [True, False])
async def test_a_server_that_hangs_is_left_at_once_by_a_cancel(
    local_runtime: MakeLocalRuntime,
    identity: Identity,
    session_id: str,
    server: ChatServer,
    make: Any,
    stream: bool,
) -> None:
    server.streams(HOLD)
    server.delay = 0 if stream else 3.0
    runtime = local_runtime(
        driver=agent_driver(Agent(name="a", model=make(server.url)), stream=stream),
        budgets=Budgets(max_tokens=1_000),
        estimate_input_tokens=estimate(10),
    )
    handle = runtime.start("x", identity=identity, session_id=session_id)
    async with asyncio.timeout(10):
        while not server.requests:
            await asyncio.sleep(0.01)
    began = asyncio.get_running_loop().time()
    await handle.cancel()
    result: RunResult = await soon(handle.result())
    assert result.status == "cancelled"
    assert asyncio.get_running_loop().time() - began < 2.5
    assert result.budget is not None
    assert (result.budget.tokens.reserved, result.budget.unknown_usage_calls) == (0, 1)
    assert result.budget.tokens.used > 0


async def test_a_slow_first_token_is_waited_for(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str, server: ChatServer
) -> None:
    server.streams(HOLD, *HELLO, STOP, COUNTED)
    asyncio.get_running_loop().call_later(0.3, server.go.set)
    model = OpenAIChatModel("m", base_url=server.url)
    result = await run(local_runtime, identity, session_id, model)
    assert (result.status, result.text) == ("completed", "hello")


@pytest.mark.parametrize(
    "answer",
    [
        (200, "text/html", b"<html>hello</html>"),
        (200, "application/json", b"[]"),
        (200, "application/json", b""),
        (200, "application/json", b'{"choices":[]}'),
        (200, "application/json", b'{"content":[{"type":"tool_use"}]}'),
    ],
)
@pytest.mark.parametrize("api", ["chat", "responses", "messages"])
@pytest.mark.parametrize("stream", [False, True])
async def test_what_is_no_answer_at_all(
    local_runtime: MakeLocalRuntime,
    identity: Identity,
    session_id: str,
    server: ChatServer,
    answer: tuple[int, str, bytes],
    api: str,
    stream: bool,
) -> None:
    server.answer = answer
    model = {
        "chat": OpenAIChatModel("m", base_url=server.url),
        "responses": OpenAIResponsesModel("m", base_url=server.url),
        "messages": AnthropicModel("m", base_url=server.url.removesuffix("/v1")),
    }[api]
    result = await run(local_runtime, identity, session_id, model, stream=stream)
    assert result.status == "failed"
    assert result.reason is not None
    assert result.reason.code == "model_failed", result.reason
    assert result.budget is not None
    assert result.budget.tokens.used == 60
    assert content_text(result.text) == ""
