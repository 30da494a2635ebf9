"""Streams that break, in each of the three APIs: what a run makes of them, and what its ledger says."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import pytest

from retinue import Agent, Budgets, Grants, Identity, ModelRequest, RunResult, agent_driver, tool
from retinue.errors import ModelFailed
from retinue.messages import user
from retinue.providers.anthropic_messages import AnthropicModel
from retinue.providers.openai_chat import OpenAIChatModel
from retinue.providers.openai_responses import OpenAIResponsesModel
from retinue.stream_assembly import StreamAssembly
from tests.conftest import MakeLocalRuntime
from tests.support import estimate, soon, spent
from tests.unit.providers.chat_server import RESET, ChatServer, chat_server
from tests.unit.providers.environment import only_this_server

CAP, INPUT = 50, 10
RESERVED = CAP + INPUT
"""Tokens that each call reserves."""
ran: list[str] = []


@tool
async def look(what: str) -> str:
    """Look."""
    ran.append(what)
    return "blue"


class Wire(Protocol):
    """The events of a stream, as one API has them."""

    def client(self, url: str) -> Any: ...

    def text(self) -> list[object]:
        """A stream that begins, and says ``hello``."""

    def call(self, arguments: str) -> list[object]:
        """A stream that begins, and calls ``look`` with these characters."""

    def end(self, *, usage: bool = True, called: bool = False, reason: str | None = None) -> list[object]:
        """The finish, and 3 + 2 tokens."""


def event(data: dict[str, Any]) -> bytes:
    return f"event: {data['type']}\ndata: {json.dumps(data)}\n\n".encode()


class Chat:
    def client(self, url: str) -> Any:
        return OpenAIChatModel("m", base_url=url)

    def _chunk(self, delta: dict[str, Any], finish: str | None = None, **more: Any) -> dict[str, Any]:
        choices = [{"index": 0, "delta": delta, "finish_reason": finish}]
        made = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": choices}
        return made | more

    def text(self) -> list[object]:
        return [self._chunk({"role": "assistant", "content": "hel"}), self._chunk({"content": "lo"})]

    def call(self, arguments: str) -> list[object]:
        function = {"name": "look", "arguments": arguments}
        call = {"index": 0, "id": "c1", "type": "function", "function": function}
        return [self._chunk({"tool_calls": [call]})]

    def end(self, *, usage: bool = True, called: bool = False, reason: str | None = None) -> list[object]:
        used = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
        finish = self._chunk({}, reason or ("tool_calls" if called else "stop"))
        return [finish, *([self._chunk({}, choices=[], usage=used)] if usage else [])]


class Responses:
    def client(self, url: str) -> Any:
        return OpenAIResponsesModel("m", base_url=url)

    def __init__(self) -> None:
        self._output: list[dict[str, Any]] = []

    def _response(self, status: str, **more: Any) -> dict[str, Any]:
        made = {"id": "r", "object": "response", "created_at": 1, "model": "m", "status": status}
        return made | {"output": self._output, **more}

    def text(self) -> list[object]:
        item = {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed"}
        self._output = [item | {"content": [{"type": "output_text", "text": "hello", "annotations": []}]}]
        added = {"type": "response.output_item.added", "output_index": 0, "item": item | {"content": []}}
        grown = {"type": "response.output_text.delta", "output_index": 0, "content_index": 0,
                 "item_id": "msg_1"}  # fmt: skip
        return [
            event({"type": "response.created", "response": self._response("in_progress", output=[])}),
            event(added),
            *(event({**grown, "delta": part}) for part in ("hel", "lo")),
        ]

    def call(self, arguments: str) -> list[object]:
        item = {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "look", "arguments": ""}
        self._output = [item | {"arguments": arguments}]
        return [
            event({"type": "response.created", "response": self._response("in_progress", output=[])}),
            event({"type": "response.output_item.added", "output_index": 0, "item": item}),
            event({"type": "response.function_call_arguments.delta", "output_index": 0, "item_id": "fc_1",
                   "delta": arguments}),
        ]  # fmt: skip

    def end(self, *, usage: bool = True, called: bool = False, reason: str | None = None) -> list[object]:
        used = {"usage": {"input_tokens": 3, "output_tokens": 2, "total_tokens": 5}} if usage else {}
        response = self._response(reason or "completed", **used)
        return [event({"type": "response.completed", "response": response})]


class Messages:
    def client(self, url: str) -> Any:
        return AnthropicModel("m", base_url=url.removesuffix("/v1"))

    def _begin(self, block: dict[str, Any]) -> list[object]:
        # A server that counts nothing before the end: what is known of the input comes with the output.
        message: dict[str, Any] = {"id": "m", "type": "message", "role": "assistant", "model": "m"}
        message |= {"content": [], "stop_reason": None, "stop_sequence": None}
        return [
            event({"type": "message_start", "message": message}),
            event({"type": "content_block_start", "index": 0, "content_block": block}),
        ]

    def _grow(self, **delta: str) -> bytes:
        return event({"type": "content_block_delta", "index": 0, "delta": delta})

    def text(self) -> list[object]:
        parts = [self._grow(type="text_delta", text=part) for part in ("hel", "lo")]
        return [*self._begin({"type": "text", "text": ""}), *parts]

    def call(self, arguments: str) -> list[object]:
        block = {"type": "tool_use", "id": "c1", "name": "look", "input": {}}
        return [*self._begin(block), self._grow(type="input_json_delta", partial_json=arguments)]

    def end(self, *, usage: bool = True, called: bool = False, reason: str | None = None) -> list[object]:
        used = {"usage": {"input_tokens": 3, "output_tokens": 2}} if usage else {}
        delta = {"stop_reason": reason or ("tool_use" if called else "end_turn"), "stop_sequence": None}
        return [
            event({"type": "content_block_stop", "index": 0}),
            event({"type": "message_delta", "delta": delta, **used}),
            event({"type": "message_stop"}),
        ]


WIRES: dict[str, Callable[[], Wire]] = {"chat": Chat, "responses": Responses, "messages": Messages}


@pytest.fixture(params=WIRES)
def wire(request: pytest.FixtureRequest) -> Wire:
    return WIRES[request.param]()


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    ran.clear()
    monkeypatch.setattr("retinue.model_retries.FIRST_WAIT", 0.01)
    only_this_server(monkeypatch)


@pytest.fixture
def server() -> Iterator[ChatServer]:
    with chat_server() as state:
        yield state


async def run(
    make: MakeLocalRuntime, identity: Identity, session_id: str, client: Any, retries: int = 0
) -> RunResult:
    agent = Agent(name="a", model=client, tools=[look], max_output_tokens=CAP, model_retries=retries)
    runtime = make(
        driver=agent_driver(agent, stream=True),
        grants=Grants(tool_ids=["look"]),
        budgets=Budgets(max_tokens=1_000),
        estimate_input_tokens=estimate(INPUT),
    )
    result: RunResult = await soon(runtime.run("x", identity=identity, session_id=session_id))
    budget = spent(result)
    assert (budget.tokens.reserved, budget.model_calls.reserved, budget.open_calls) == (0, 0, 0)
    return result


async def failure(client: Any) -> ModelFailed:
    """What the client alone raises, or what comes of putting its pieces together."""

    async def read() -> None:
        assembly = StreamAssembly(client)
        async for piece in client.stream(ModelRequest(messages=[user("x")], max_tokens=CAP)):
            assembly.take(piece)
        assembly.response()

    with pytest.raises(ModelFailed) as failed:
        await read()
    await client.close()
    return failed.value


Pieces = Callable[[Wire], list[object]]


@pytest.mark.parametrize(
    ("pieces", "estimated"),
    [
        pytest.param(lambda wire: [], 0, id="cut before the first byte"),
        pytest.param(lambda wire: wire.text(), 1, id="cut in the text"),
        pytest.param(lambda wire: wire.call('{"wha'), 1, id="cut in the arguments"),
        pytest.param(lambda wire: [RESET], 0, id="reset at once"),
        pytest.param(lambda wire: [*wire.text(), RESET], 1, id="reset in the text"),
        pytest.param(lambda wire: [*wire.call('{"what": "x"}'), RESET], 1, id="reset after the arguments"),
    ],
)
async def test_a_stream_that_breaks_off(
    local_runtime: MakeLocalRuntime,
    identity: Identity,
    session_id: str,
    server: ChatServer,
    wire: Wire,
    pieces: Pieces,
    estimated: int,
) -> None:
    sent = pieces(wire)
    server.streams(*sent, done=False)
    error = await failure(wire.client(server.url))
    assert (error.started, error.retry_after, error.data.get("usage")) == (True, None, None)
    assert error.retryable == (RESET in sent)

    result = await run(local_runtime, identity, session_id, wire.client(server.url))
    assert (result.status, ran) == ("failed", [])
    assert result.reason is not None
    assert result.reason.code == "model_failed"
    budget = spent(result)
    assert (budget.model_calls.used, budget.tokens.used) == (1, RESERVED)
    assert (budget.unknown_usage_calls, budget.estimated_usage_calls) == (1, estimated)


async def test_a_finish_without_usage_is_an_answer_that_is_charged_in_full(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str, server: ChatServer, wire: Wire
) -> None:
    server.streams(*wire.text(), *wire.end(usage=False), done=isinstance(wire, Chat))
    result = await run(local_runtime, identity, session_id, wire.client(server.url))
    assert (result.status, result.text) == ("completed", "hello")
    budget = spent(result)
    assert budget.tokens.used == RESERVED
    assert (budget.unknown_usage_calls, budget.estimated_usage_calls) == (1, 1)


@pytest.mark.parametrize("arguments", ['{"what": oops}', '["x"]', '{"what": "x"'])
async def test_arguments_that_are_none_run_no_tool_and_cost_what_was_said(
    local_runtime: MakeLocalRuntime,
    identity: Identity,
    session_id: str,
    server: ChatServer,
    wire: Wire,
    arguments: str,
) -> None:
    server.streams(*wire.call(arguments), *wire.end(called=True), done=isinstance(wire, Chat))
    result = await run(local_runtime, identity, session_id, wire.client(server.url))
    assert (result.status, ran) == ("failed", [])
    assert result.reason is not None
    assert "JSON" in result.reason.message
    budget = spent(result)
    assert (budget.tokens.used, budget.unknown_usage_calls, budget.tool_calls.used) == (5, 0, 0)


async def test_a_second_finish_changes_nothing_that_was_reported(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str, server: ChatServer, wire: Wire
) -> None:
    server.streams(*wire.text(), *wire.end(), *wire.end(usage=False), done=isinstance(wire, Chat))
    result = await run(local_runtime, identity, session_id, wire.client(server.url))
    # Chat completions without a second choice go on; the other APIs have one end, and a stream has only one.
    assert result.status == ("completed" if isinstance(wire, Chat) else "failed"), result.reason
    budget = spent(result)
    assert (budget.tokens.used, budget.unknown_usage_calls) == (5, 0)


async def test_usage_that_comes_twice_as_the_last_is_refused(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str, server: ChatServer, wire: Wire
) -> None:
    begun, end = wire.text(), wire.end()
    again = end[-1:] if isinstance(wire, Chat) else end
    server.streams(*begun, *end, *again, done=isinstance(wire, Chat))
    result = await run(local_runtime, identity, session_id, wire.client(server.url))
    assert result.status == "failed"
    budget = spent(result)
    assert (budget.tokens.used, budget.unknown_usage_calls) == (5, 0)


async def test_a_reason_that_nobody_knows_is_an_end(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str, server: ChatServer, wire: Wire
) -> None:
    server.streams(*wire.text(), *wire.end(reason="bored"), done=isinstance(wire, Chat))
    result = await run(local_runtime, identity, session_id, wire.client(server.url))
    assert (result.status, result.text, spent(result).tokens.used) == ("completed", "hello", 5)


async def test_each_attempt_after_a_reset_is_a_call_of_its_own(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str, server: ChatServer, wire: Wire
) -> None:
    server.streams(RESET)
    result = await run(local_runtime, identity, session_id, wire.client(server.url), retries=2)
    assert result.status == "failed"
    assert len(server.requests) == 3
    budget = spent(result)
    assert (budget.model_calls.used, budget.unknown_usage_calls) == (3, 3)
    assert budget.tokens.used == 3 * RESERVED
