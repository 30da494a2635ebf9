"""Steers, follow-ups and public messages as an agent takes and gives them (contract section 6)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from retinue import (
    Agent,
    Budgets,
    DriverOutput,
    ExecutionServices,
    Grants,
    Identity,
    ModelRequest,
    ModelResponse,
    RunHandle,
    RunRequest,
    RuntimeConfig,
    Tool,
    ToolCall,
    agent_driver,
    tool,
)
from retinue.agent_loop import MAX_COMMENTARY
from retinue.agents import DEFAULT_TOOL_ROUNDTRIPS
from retinue.errors import InputError
from retinue.events import InputApplied, InputReceived, MessageCompleted, TextDelta
from retinue.messages import assistant, user
from retinue.models import FinishPiece, ModelChunk, PublicItem, TextPiece
from retinue.testing import ScriptedModel, reply, tool_calls
from retinue.testing import stream as pieces
from tests.conftest import MakeLocalRuntime
from tests.support import Flag, all_events, code_of, driver, nothing_is_left, soon, spent, types, why

BOTH_MODES = pytest.mark.parametrize("stream", [False, True])


class Talker:
    """Gives texts, whole or streamed; the first one waits in its middle until it is let go."""

    provider_id = "test"
    model_id = "talker"

    def __init__(self, *texts: str) -> None:
        self.texts = list(texts)
        self.requests: list[ModelRequest] = []
        self.held, self.go = Flag(), Flag()

    def _next(self, request: ModelRequest) -> str:
        self.requests.append(request)
        return self.texts[len(self.requests) - 1]

    async def _hold(self) -> None:
        if len(self.requests) == 1:
            self.held.set()
            await self.go.wait()

    async def generate(self, request: ModelRequest) -> ModelResponse:
        text = self._next(request)
        await self._hold()
        return ModelResponse(text=text)

    async def stream(self, request: ModelRequest) -> AsyncIterator[ModelChunk]:
        text = self._next(request)
        yield TextPiece(text[:2])
        await self._hold()
        yield TextPiece(text[2:])
        yield FinishPiece()


def said(request: ModelRequest) -> list[tuple[str, str]]:
    return [(message.role, message.text) for message in request.messages]


async def inputs(handle: RunHandle) -> tuple[list[str], list[str]]:
    """Ids of live input as it was received and as it was applied."""
    payloads = [event.payload for event in await all_events(handle)]
    received = [payload.input_id for payload in payloads if isinstance(payload, InputReceived)]
    return received, [payload.input_id for payload in payloads if isinstance(payload, InputApplied)]


@BOTH_MODES
async def test_c134_a_steer_during_the_last_model_call_is_answered_by_one_more(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str, stream: bool
) -> None:
    model = Talker("draft", "updated")
    made = []

    def make() -> Agent:
        made.append(1)
        return Agent(name="a", model=model)

    runtime = local_runtime(driver=agent_driver(make, stream=stream), budgets=Budgets(max_model_calls=2))
    handle = runtime.start("question", identity=identity, session_id=session_id)
    await model.held.wait()
    await handle.send("new constraint", mode="steer")
    model.go.set()
    result = await soon(handle.result())
    assert (result.status, result.text, made) == ("completed", "updated", [1])
    assert said(model.requests[0]) == [("user", "question")]
    assert said(model.requests[1]) == [
        ("user", "question"),
        ("assistant", "draft"),
        ("user", "new constraint"),
    ]
    history = (await runtime.sessions.read(identity, session_id)).history
    assert history == [user("question"), assistant("draft"), user("new constraint"), assistant("updated")]
    received, applied = await inputs(handle)
    assert (len(received), received) == (1, applied)
    emitted = [e.payload.text for e in await all_events(handle) if isinstance(e.payload, TextDelta)]
    assert "".join(emitted) == ("draftupdated" if stream else "updated")
    with pytest.raises(InputError) as refused:
        await handle.send("too late", mode="steer")
    assert refused.value.code == "run_finished"
    await nothing_is_left(runtime, handle)


async def test_text_is_forwarded_while_the_model_still_speaks(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    model = Talker("draft")
    runtime = local_runtime(driver=agent_driver(Agent(name="a", model=model), stream=True))
    handle = runtime.start("x", identity=identity, session_id=session_id)
    await model.held.wait()
    async for event in handle.events():
        if isinstance(event.payload, TextDelta):
            assert event.payload.text == "dr"
            break
    assert not model.go.is_set
    model.go.set()
    assert (await soon(handle.result())).text == "draft"
    emitted = [e.payload.text for e in await all_events(handle) if isinstance(e.payload, TextDelta)]
    assert emitted == ["dr", "aft"]


@BOTH_MODES
async def test_c135_steers_come_after_all_results_of_the_batch(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str, stream: bool
) -> None:
    both, go, effects = Flag(), Flag(), []

    @tool
    async def act(number: int) -> str:
        effects.append(number)
        if len(effects) == 2:
            both.set()
        await go.wait()
        return f"done {number}"

    model = ScriptedModel([tool_calls(("act", {"number": 1}), ("act", {"number": 2})), "finished"])
    agent = Agent(name="a", model=model, tools=[act])
    runtime = local_runtime(driver=agent_driver(agent, stream=stream), grants=Grants(tool_ids=["act"]))
    handle = runtime.start("x", identity=identity, session_id=session_id)
    await both.wait()
    for text in ("user 1", "user 2"):
        await handle.send(text, mode="steer")
    go.set()
    result = await soon(handle.result())
    assert (result.status, result.text, sorted(effects)) == ("completed", "finished", [1, 2])
    asked = [(message.role, message.text) for message in model.requests[-1].messages]
    assert asked[-4:] == [("tool", "done 1"), ("tool", "done 2"), ("user", "user 1"), ("user", "user 2")]
    assert [request.streamed for request in model.requests] == [stream, stream]
    received, applied = await inputs(handle)
    assert (len(received), received) == (2, applied)
    assert types(await all_events(handle)).count("tool.complete") == 2


async def test_a_follow_up_is_the_next_turn_of_the_same_agent(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    model = Talker("one", "two", "three")
    made = []

    def make() -> Agent:
        made.append(1)
        return Agent(name="a", model=model)

    runtime = local_runtime(driver=agent_driver(make))
    handle = runtime.start("first", identity=identity, session_id=session_id)
    await model.held.wait()
    for text in ("second", "third"):
        await handle.send(text, mode="follow_up")
    model.go.set()
    result = await soon(handle.result())
    assert (result.status, result.text, made) == ("completed", "three", [1])
    assert said(model.requests[2]) == [
        ("user", "first"),
        ("assistant", "one"),
        ("user", "second"),
        ("assistant", "two"),
        ("user", "third"),
    ]
    assert [message.text for message in (await runtime.sessions.read(identity, session_id)).history] == [
        *("first", "one", "second", "two", "third", "three")
    ]


def counting(calls: list[str], hold: Flag | None = None, held: Flag | None = None) -> Tool:
    @tool
    async def count(n: int) -> str:
        calls.append(str(n))
        if hold is not None and held is not None:
            held.set()
            await hold.wait()
        return "counted"

    return count


async def test_rounds_of_tools_are_counted_over_all_turns_of_a_run(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    calls: list[str] = []
    hold, held = Flag(), Flag()
    call = tool_calls(("count", {"n": 1}))
    model = ScriptedModel([call, "one", call, call, "never"])
    agent = Agent(name="a", model=model, tools=[counting(calls, hold, held)], max_tool_roundtrips=2)
    runtime = local_runtime(driver=agent_driver(agent), grants=Grants(tool_ids=["count"]))
    handle = runtime.start("first", identity=identity, session_id=session_id)
    await held.wait()
    await handle.send("second", mode="follow_up")
    hold.set()
    result = await soon(handle.result())
    assert (result.status, code_of(result), len(calls)) == ("failed", "execution_failed", 2)
    assert "more than 2 rounds" in why(result)
    # The call that was one too many is not recorded.
    roles = [message.role for message in (await runtime.sessions.read(identity, session_id)).history]
    assert roles == ["user", "assistant", "tool", "assistant", "user", "assistant", "tool"]
    again = ScriptedModel([call] * DEFAULT_TOOL_ROUNDTRIPS + ["ten is the default"])
    agent = Agent(name="a", model=again, tools=[counting(calls)])
    runtime = local_runtime(driver=agent_driver(agent), grants=Grants(tool_ids=["count"]))
    result = await soon(runtime.run("x", identity=identity, session_id=session_id))
    assert (result.status, result.text) == ("completed", "ten is the default")


# --- public messages --------------------------------------------------------------------------------------


@BOTH_MODES
async def test_c142_commentary_does_not_end_the_work(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str, stream: bool
) -> None:
    model = ScriptedModel([reply("Let me see.", phase="commentary"), reply("It is 2.", phase="final")])
    runtime = local_runtime(driver=agent_driver(Agent(name="a", model=model), stream=stream))
    handle = runtime.start("what?", identity=identity, session_id=session_id)
    result = await soon(handle.result())
    assert (result.status, result.text) == ("completed", "It is 2.")
    assert spent(result).model_calls.used == 2
    last = [(message.role, message.text) for message in model.requests[-1].messages]
    assert last == [("user", "what?"), ("assistant", "Let me see.")]
    events = await all_events(handle)
    completed = [event.payload.message for event in events if isinstance(event.payload, MessageCompleted)]
    assert [(message.phase, message.text) for message in completed] == [
        ("commentary", "Let me see."),
        ("final", "It is 2."),
    ]
    for message in completed:
        own = [event for event in events if getattr(event.payload, "id", None) == message.id]
        assert types(own) == ["message.started", "message.delta"]
    history = (await runtime.sessions.read(identity, session_id)).history
    assert history == [user("what?"), assistant("Let me see."), assistant("It is 2.")]


@BOTH_MODES
async def test_the_result_is_the_last_final_message(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str, stream: bool
) -> None:
    items: Sequence[Any] = [
        ("reasoning_summary", "thought"),
        ("commentary", "Now: "),
        ("final", "two"),
    ]
    model = ScriptedModel([reply(items=items)])
    runtime = local_runtime(driver=agent_driver(Agent(name="a", model=model), stream=stream))
    handle = runtime.start("x", identity=identity, session_id=session_id)
    result = await soon(handle.result())
    assert (result.status, result.text) == ("completed", "two")
    emitted = [e.payload.text for e in await all_events(handle) if isinstance(e.payload, TextDelta)]
    assert "".join(emitted) == ("Now: two" if stream else "two")  # never what it thought


async def test_text_that_comes_with_the_finish_only_is_emitted_too(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    whole = FinishPiece(items=(PublicItem(id="i", phase="final", text="Hello"),))
    model = ScriptedModel([pieces(TextPiece("He", "i"), whole, finish=False)])
    runtime = local_runtime(driver=agent_driver(Agent(name="a", model=model), stream=True))
    handle = runtime.start("x", identity=identity, session_id=session_id)
    result = await soon(handle.result())
    assert (result.status, result.text) == ("completed", "Hello")
    emitted = [e.payload.text for e in await all_events(handle) if isinstance(e.payload, TextDelta)]
    assert emitted == ["He", "llo"]


async def test_commentary_without_end_ends_the_run(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    endless = [reply("Let me see.", phase="commentary")] * 50
    model = ScriptedModel(endless)
    runtime = local_runtime(driver=agent_driver(Agent(name="a", model=model)))
    result = await soon(runtime.run("x", identity=identity, session_id=session_id))
    assert (result.status, code_of(result)) == ("failed", "execution_failed")
    assert "nothing but commentary" in why(result)
    assert len(model.requests) == MAX_COMMENTARY + 1
    model = ScriptedModel(endless)
    runtime = local_runtime(
        driver=agent_driver(Agent(name="a", model=model)), budgets=Budgets(max_model_calls=2)
    )
    result = await soon(runtime.run("x", identity=identity, session_id=session_id))
    assert (result.status, code_of(result), len(model.requests)) == ("stopped", "budget_exhausted", 2)


# --- what is kept of a turn that has no answer ------------------------------------------------------------


async def test_what_was_asked_stays_when_a_run_is_stopped_and_goes_when_it_fails(
    local_runtime: MakeLocalRuntime, identity: Identity
) -> None:
    async def history(session_id: str) -> list[tuple[str, str]]:
        found = (await runtime.sessions.read(identity, session_id)).history
        return [(message.role, message.text) for message in found]

    model = Talker("never")
    runtime = local_runtime(driver=agent_driver(Agent(name="a", model=model)))
    handle = runtime.start("cancelled", identity=identity, session_id="cancelled")
    await model.held.wait()
    await handle.cancel()
    assert (await soon(handle.result())).status == "cancelled"
    assert await history("cancelled") == [("user", "cancelled")]

    poor = Agent(name="a", model=ScriptedModel(["never"]))
    runtime = local_runtime(driver=agent_driver(poor), budgets=Budgets(max_model_calls=0))
    result = await soon(runtime.run("refused", identity=identity, session_id="refused"))
    assert (result.status, await history("refused")) == ("stopped", [("user", "refused")])

    broken = Agent(name="a", model=ScriptedModel([ValueError("no provider"), "fine"]))
    runtime = local_runtime(driver=agent_driver(broken))
    result = await soon(runtime.run("failed", identity=identity, session_id="failed"))
    assert (result.status, await history("failed")) == ("failed", [])
    # Asked again, the question is there once.
    await soon(runtime.run("failed", identity=identity, session_id="failed"))
    assert await history("failed") == [("user", "failed"), ("assistant", "fine")]


@pytest.mark.parametrize("option", ["reflection", "compress_tool_results", "compaction"])
def test_c98_an_agent_has_no_options_that_would_go_round_the_services(option: str) -> None:
    with pytest.raises(TypeError, match=option):
        Agent(name="a", model=ScriptedModel(), **{option: True})  # type: ignore[arg-type]


async def test_a_driver_of_ones_own_may_run_an_agent_in_it(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    inner = agent_driver(Agent(name="inner", model=ScriptedModel(["one", "two"])))

    @driver
    async def twice(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        await inner.start(request, services)
        return await inner.start(request, services)

    runtime = local_runtime(RuntimeConfig(driver=twice))
    result = await soon(runtime.run("x", identity=identity, session_id=session_id))
    assert (result.status, result.text) == ("completed", "two")
    history = (await runtime.sessions.read(identity, session_id)).history
    assert [message.text for message in history] == ["x", "one", "x", "two"]


async def test_a_tool_call_beside_commentary_is_run(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    calls: list[str] = []
    first = tool_calls(ToolCall("1", "count", {"n": 1}), text="Counting.", phase="commentary")
    model = ScriptedModel([first, "one"])
    agent = Agent(name="a", model=model, tools=[counting(calls)])
    runtime = local_runtime(driver=agent_driver(agent), grants=Grants(tool_ids=["count"]))
    result = await soon(runtime.run("x", identity=identity, session_id=session_id))
    assert (result.text, calls, len(model.requests)) == ("one", ["1"], 2)
