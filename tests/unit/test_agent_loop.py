"""The agent loop: rounds of tools, denied and failing ones, caps, and what history keeps."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from retinue import (
    Agent,
    Budgets,
    ExecutionServices,
    Grants,
    Identity,
    ModelResponse,
    RunResult,
    ToolCall,
    ToolContext,
    Usage,
    agent_driver,
    tool,
)
from retinue.errors import ModelFailed
from retinue.events import TextDelta, ToolComplete
from retinue.messages import Message, TextPart
from retinue.models import ToolCallPiece
from retinue.testing import ScriptedModel, reply, stream, tool_calls
from retinue.testing.scripted import ScriptStep
from retinue.tool_calls import check_batch
from tests.conftest import MakeLocalRuntime
from tests.support import Flag, all_events, code_of, estimate, flag, nothing_is_left, soon, spent, types, why


@tool
async def lookup(id: str) -> str:
    """Read a record."""
    return f"record {id}"


@tool
def shout(text: str) -> str:
    """Say it louder."""
    return text.upper()


@tool
async def broken(why: str) -> str:
    """Fails."""
    raise ValueError(f"{why} \ud800")


def scripted(*steps: Any, **options: Any) -> Agent:
    return Agent(name="a", model=ScriptedModel({"": list(steps)}), tools=[lookup, shout, broken], **options)


ALL = Grants(tool_ids=["lookup", "shout", "broken"])


def requests(agent: Agent) -> Any:
    assert isinstance(agent.model, ScriptedModel)
    return agent.model.requests


async def test_a_model_calls_tools_until_it_answers(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    agent = scripted(
        tool_calls(("lookup", {"id": "1"}), ("shout", {"text": "hi"}), text="let me see"),
        tool_calls(("lookup", {"id": "2"})),
        "it is 2",
        instructions="Be brief.",
        temperature=0.3,
    )
    runtime = local_runtime(driver=agent_driver(agent), grants=ALL)
    handle = runtime.start("what is it?", identity=identity, session_id=session_id)
    result = await soon(handle.result())
    assert (result.status, result.text) == ("completed", "it is 2")
    assert result.usage == Usage(input_tokens=30, output_tokens=15)
    assert (spent(result).model_calls.used, spent(result).tool_calls.used) == (3, 3)

    last = requests(agent)[-1]
    said = [(message.role, message.text) for message in last.messages]
    assert said == [
        ("system", "Be brief."),
        ("user", "what is it?"),
        ("assistant", "let me see"),
        ("tool", "record 1"),
        ("tool", "HI"),
        ("assistant", ""),
        ("tool", "record 2"),
    ]
    assert [schema.name for schema in last.tools] == ["lookup", "shout", "broken"]
    assert (last.temperature, last.max_tokens, last.role) == (0.3, None, "main")

    snapshot = await runtime.sessions.read(identity, session_id)
    assert [message.role for message in snapshot.history] == [
        *("user", "assistant", "tool", "tool", "assistant", "tool", "assistant")
    ]
    assert snapshot.conversations == {handle.run_id: snapshot.history}
    assert types(await all_events(handle)) == [
        "run.started",
        *("model.complete", "message.started", "message.delta", "message.completed"),
        *("tool.complete", "tool.complete"),
        *("model.complete", "tool.complete"),
        *("model.complete", "message.started", "message.delta", "message.completed"),
        *("text.delta", "run.terminal"),
    ]
    await nothing_is_left(runtime, handle)


async def test_the_next_run_goes_on_with_the_conversation(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    agent = scripted(tool_calls(("lookup", {"id": "1"})), "one", "two")
    runtime = local_runtime(driver=agent_driver(agent), grants=ALL)
    for text in ("first", "second"):
        await runtime.run(text, identity=identity, session_id=session_id)
    roles = [message.role for message in requests(agent)[-1].messages]
    assert roles == ["user", "assistant", "tool", "assistant", "user"]


async def test_denied_tools_are_results_and_the_run_completes(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    agent = scripted(
        tool_calls(("shout", {"text": "a"}), ("nothing", {}), ("lookup", {"id": 5, "x": 1})),
        tool_calls(("lookup", {"id": "1"}), ("lookup", {"id": "2"}), ("lookup", {"id": "3"})),
        "done",
    )
    runtime = local_runtime(
        driver=agent_driver(agent), grants=Grants(tool_ids=["lookup"]), budgets=Budgets(max_tool_calls=2)
    )
    handle = runtime.start("x", identity=identity, session_id=session_id)
    result = await soon(handle.result())
    assert result.status == "completed"
    results = [message.text for message in requests(agent)[-1].messages if message.role == "tool"]
    assert results[0] == "[denied] grant: shout is not granted to this run"
    assert results[1] == "there is no tool 'nothing'"
    assert results[2].startswith("invalid arguments for lookup: ")
    # Of a batch over the limit the first that fit run; what the gate refused before used no attempt.
    assert results[3:] == [
        "record 1",
        "record 2",
        "[denied] budget: the tool call budget is exhausted (limit 2, used 2; run)",
    ]
    assert (spent(result).tool_calls.used, spent(result).tool_calls.remaining) == (2, 0)
    done = [event.payload for event in await all_events(handle) if isinstance(event.payload, ToolComplete)]
    assert sorted(payload.denied for payload in done) == [False, False, True, True, True, True]


async def test_a_failing_tool_is_a_result_and_stops_nobody(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    agent = scripted(
        tool_calls(("broken", {"why": "bad"}), ("lookup", {"id": "1"})),
        "done",
    )
    runtime = local_runtime(driver=agent_driver(agent), grants=ALL)
    result = await soon(runtime.run("x", identity=identity, session_id=session_id))
    assert result.status == "completed"
    results = [message.text for message in requests(agent)[-1].messages if message.role == "tool"]
    assert results == ["ValueError: bad \\ud800", "record 1"]
    assert spent(result).tool_calls.used == 2


@tool
async def leaves() -> str:
    """Calls sys.exit."""
    raise SystemExit(3)


@tool
def leaves_in_a_thread() -> str:
    """Calls sys.exit in a thread."""
    raise SystemExit(4)


@tool
async def cancels_itself() -> str:
    """Is cancelled from inside."""
    raise asyncio.CancelledError("odd")


@tool
def gives_a_coroutine() -> Any:
    """A plain function that gives something to await."""

    async def later() -> dict[str, int]:
        return {"later": 1}

    return later()


@tool
async def gives_a_surrogate() -> str:
    """Text that nobody can store."""
    return "\ud800"


@tool
async def gives_an_object(ctx: ToolContext) -> dict[str, Any]:
    """JSON, and who asks."""
    return {"tenant": ctx.identity.tenant_id, "call": ctx.call_id, "cancelled": ctx.cancelled}


async def test_no_tool_can_do_more_than_fail(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    odd = [leaves, leaves_in_a_thread, cancels_itself, gives_a_coroutine, gives_a_surrogate, gives_an_object]
    calls = [ToolCall(str(number), item.name) for number, item in enumerate(odd)]
    model = ScriptedModel([tool_calls(*calls), "done"])
    runtime = local_runtime(
        driver=agent_driver(Agent(name="a", model=model)),
        tools=odd,
        grants=Grants(tool_ids=[item.name for item in odd]),
    )
    handle = runtime.start("x", identity=identity, session_id=session_id)
    result = await soon(handle.result())
    assert (result.status, result.text) == ("completed", "done")
    results = [message.text for message in model.requests[-1].messages if message.role == "tool"]
    assert results == [
        "SystemExit: 3",
        "SystemExit: 4",
        "the tool was cancelled from inside",
        '{"later":1}',
        "gives_a_surrogate gave text with a lone surrogate",
        '{"tenant":"acme","call":"5","cancelled":false}',
    ]
    await nothing_is_left(runtime, handle)
    assert (
        await soon(runtime.run("y", identity=identity, session_id="other"))
    ).status == "failed"  # script is over


async def test_the_cap_on_rounds_ends_the_run_before_the_tool_runs(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    steps = [tool_calls(("lookup", {"id": str(number)})) for number in range(3)]
    agent = scripted(*steps, max_tool_roundtrips=2)
    runtime = local_runtime(driver=agent_driver(agent), grants=ALL)
    result = await soon(runtime.run("x", identity=identity, session_id=session_id))
    assert (result.status, code_of(result)) == ("failed", "execution_failed")
    assert "more than 2 rounds" in why(result)
    assert spent(result).tool_calls.used == 2
    history = (await runtime.sessions.read(identity, session_id)).history
    assert [message.role for message in history] == ["user", "assistant", "tool", "assistant", "tool"]


@pytest.mark.parametrize(
    "calls", [[ToolCall("", "lookup")], [ToolCall("1", "lookup"), ToolCall("1", "lookup")]]
)
async def test_a_batch_with_empty_or_repeated_ids_runs_nothing(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str, calls: list[ToolCall]
) -> None:
    with pytest.raises(ModelFailed, match="empty or repeated ids"):
        check_batch(calls)
    runtime = local_runtime(driver=agent_driver(scripted(tool_calls(*calls))), grants=ALL)
    result = await soon(runtime.run("x", identity=identity, session_id=session_id))
    assert (result.status, code_of(result)) == ("failed", "model_failed")
    assert spent(result).tool_calls.used == 0
    assert (await runtime.sessions.read(identity, session_id)).history == []


async def test_ids_may_come_again_in_a_later_round(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    again = ToolCall("call_0", "lookup", {"id": "1"})
    agent = scripted(tool_calls(again), tool_calls(again), "done")
    runtime = local_runtime(driver=agent_driver(agent), grants=ALL)
    result = await soon(runtime.run("x", identity=identity, session_id=session_id))
    assert (result.status, spent(result).tool_calls.used) == ("completed", 2)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("finish", ["stop", "length", "content_filter"])
async def test_c97_calls_of_an_unfinished_answer_are_not_run_and_nothing_is_recorded(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str, finish: Any, streaming: bool
) -> None:
    call = ToolCall("1", "lookup", {"id": "1"})
    response = ModelResponse(tool_calls=(call,), finish_reason=finish, usage=Usage(input_tokens=1))
    agent = scripted(ScriptStep(response=response))
    runtime = local_runtime(driver=agent_driver(agent, stream=streaming), grants=ALL)
    result = await soon(runtime.run("x", identity=identity, session_id=session_id))
    assert (result.status, code_of(result)) == ("failed", "model_failed")
    assert finish in why(result)
    assert (spent(result).tool_calls.used, result.usage.total_tokens) == (0, 1)
    snapshot = await runtime.sessions.read(identity, session_id)
    assert (snapshot.history, snapshot.replayable) == ([], False)


@pytest.mark.parametrize("broken", [{"arguments": '{"id": "1'}, {"finish": False}])
async def test_c97_calls_of_a_broken_stream_are_not_run(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str, broken: dict[str, Any]
) -> None:
    arguments = broken.get("arguments", '{"id": "1"}')
    pieces = [
        ToolCallPiece(index=0, id="1", name="lookup", arguments=arguments[:4]),
        ToolCallPiece(index=0, arguments=arguments[4:]),
    ]
    whole = tool_calls(("lookup", {"id": "0"}))
    agent = scripted(whole, stream("one moment", *pieces, finish=broken.get("finish", True)))
    runtime = local_runtime(driver=agent_driver(agent, stream=True), grants=ALL)
    handle = runtime.start("x", identity=identity, session_id=session_id)
    result = await soon(handle.result())
    assert (result.status, code_of(result)) == ("failed", "model_failed")
    assert spent(result).tool_calls.used == 1
    # The round before was whole, and stays.
    history = (await runtime.sessions.read(identity, session_id)).history
    assert [message.role for message in history] == ["user", "assistant", "tool"]
    assert types(await all_events(handle)).count("message.failed") == 1


@pytest.mark.parametrize(
    ("limit", "cap", "asked"), [(5000, 1024, 1024), (500, 1024, 490), (5000, None, 4990), (None, 1024, None)]
)
async def test_under_a_token_limit_an_agent_asks_for_its_usual_output_only(
    local_runtime: MakeLocalRuntime,
    identity: Identity,
    session_id: str,
    limit: int | None,
    cap: int | None,
    asked: int | None,
) -> None:
    agent = scripted("ok", max_output_tokens=cap)
    runtime = local_runtime(
        driver=agent_driver(agent), budgets=Budgets(max_tokens=limit), estimate_input_tokens=estimate(10)
    )
    await runtime.run("x", identity=identity, session_id=session_id)
    assert [request.max_tokens for request in requests(agent)] == [asked]


async def test_five_tools_run_at_once_and_results_keep_the_order_of_the_calls(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    most, running, lock = 0, 0, threading.Lock()
    all_five = threading.Barrier(5, timeout=10)

    @tool
    def meet(number: int) -> int:
        nonlocal most, running
        with lock:
            running += 1
            most = max(most, running)
        if number < 5:
            all_five.wait()
        with lock:
            running -= 1
        return number

    model = ScriptedModel([tool_calls(*(("meet", {"number": number}) for number in range(7))), "done"])
    runtime = local_runtime(
        driver=agent_driver(Agent(name="a", model=model, tools=[meet])), grants=Grants(tool_ids=["meet"])
    )
    result = await soon(runtime.run("x", identity=identity, session_id=session_id))
    assert (result.status, most) == ("completed", 5)
    results = [message.text for message in model.requests[-1].messages if message.role == "tool"]
    assert results == [str(number) for number in range(7)]


async def test_cancelling_waits_for_a_tool_in_a_thread_which_is_told(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    began, told, returned = Flag(), threading.Event(), Flag()

    @tool
    def long(ctx: ToolContext) -> str:
        began.set()
        deadline = threading.Event()
        for _ in range(1000):
            if ctx.cancelled:
                told.set()
                break
            deadline.wait(0.01)
        returned.set()
        return "late"

    model = ScriptedModel([tool_calls(("long", {})), "never"])
    runtime = local_runtime(
        driver=agent_driver(Agent(name="a", model=model, tools=[long])), grants=Grants(tool_ids=["long"])
    )
    handle = runtime.start("x", identity=identity, session_id=session_id)
    await began.wait()
    await handle.cancel("enough")
    result = await soon(handle.result())
    assert told.is_set()
    assert returned.is_set
    assert (result.status, len(model.requests)) == ("cancelled", 1)
    history = (await runtime.sessions.read(identity, session_id)).history
    assert [message.role for message in history] == ["user"]  # no call without its result
    await nothing_is_left(runtime, handle)


async def test_a_tool_that_waits_for_a_thread_is_never_begun_after_a_cancel(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    from tests.support import backend_of

    ran = Flag()

    @tool
    def queued() -> str:
        ran.set()
        return "x"

    model = ScriptedModel([tool_calls(("queued", {})), "never"])
    runtime = local_runtime(
        driver=agent_driver(Agent(name="a", model=model, tools=[queued])), grants=Grants(tool_ids=["queued"])
    )
    threads = backend_of(runtime)._workers.threads
    go = threading.Event()
    blocked = [threads.submit(go.wait, 10) for _ in range(threads._max_workers)]
    handle = runtime.start("x", identity=identity, session_id=session_id)
    async for event in handle.events():
        if event.type == "model.complete":
            break
    while handle.budget.tool_calls.used == 0:
        await asyncio.sleep(0)
    await handle.cancel()
    assert (await soon(handle.result())).status == "cancelled"
    go.set()
    assert all(future.result(10) for future in blocked)
    threads.submit(lambda: None).result(10)
    assert not ran.is_set


async def test_a_plan_runs_no_tool(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    agent = scripted(tool_calls(("lookup", {"id": "1"})), "planned")
    runtime = local_runtime(driver=agent_driver(agent), grants=ALL)
    result: RunResult = await soon(
        runtime.run("x", identity=identity, session_id=session_id, run_mode="plan")
    )
    assert (result.status, result.text) == ("completed", "planned")
    (text,) = [message.text for message in requests(agent)[-1].messages if message.role == "tool"]
    assert text.startswith("[denied] approval_required")
    assert spent(result).tool_calls.used == 1  # a denied tool uses an attempt once the gate let it through


async def test_tools_of_the_agent_and_of_the_app_must_not_share_a_name(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    agent = scripted("never asked")
    runtime = local_runtime(driver=agent_driver(agent), tools=[lookup], grants=ALL)
    result = await soon(runtime.run("x", identity=identity, session_id=session_id))
    assert (result.status, code_of(result)) == ("failed", "invalid_harness")
    assert "lookup" in why(result)
    assert requests(agent) == []


async def test_extras_go_back_to_the_provider_and_parts_are_kept(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    opaque = {"signature": "abc", "nested": [1]}
    response = ModelResponse(
        tool_calls=(ToolCall("1", "lookup", {"id": "1"}),), finish_reason="tool_calls", extras=opaque
    )
    agent = scripted(ScriptStep(response=response), "done")
    runtime = local_runtime(driver=agent_driver(agent), grants=ALL)
    result = await soon(runtime.run([TextPart("look")], identity=identity, session_id=session_id))
    assert result.status == "completed"
    asked: list[Message] = list(requests(agent)[-1].messages)
    assert (asked[0].content, asked[1].extras) == ([TextPart("look")], opaque)


async def test_an_answer_that_cannot_be_stored_fails_the_run_by_name(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    from tests.support import answering

    for text, named in (("\ud800", "surrogates not allowed"), (None, "Expected `str`")):
        model = answering(text)  # type: ignore[arg-type]
        runtime = local_runtime(driver=agent_driver(Agent(name="a", model=model)))
        result = await soon(runtime.run("x", identity=identity, session_id=session_id))
        assert (result.status, code_of(result)) == ("failed", "model_failed")
        assert named in why(result)
        assert (await runtime.sessions.read(identity, session_id)).history == []


async def test_effects_pass_the_gate_and_raise_when_it_refuses(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    from retinue import DriverOutput, RunRequest
    from retinue.errors import ToolFailed
    from tests.support import driver

    @driver
    async def acts(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        given = {"count": 1}

        async def execute(arguments: dict[str, Any]) -> int:
            arguments["count"] += 1
            return int(arguments["count"])

        async def fail(arguments: dict[str, Any]) -> int:
            raise ValueError("effect failed")

        value = await services.dispatch_effect("workflow:submit", given, execute)
        with pytest.raises(ValueError, match="effect failed"):
            await services.dispatch_effect("workflow:submit", given, fail)
        refused = []
        for name in ("workflow:other", "workflow:submit"):
            with pytest.raises(ToolFailed) as error:
                await services.dispatch_effect(name, given, execute)
            refused.append(str(error.value))
        return DriverOutput(text="ok", structured=[value, given, refused])

    runtime = local_runtime(
        driver=acts, grants=Grants(tool_ids=["workflow:submit"]), budgets=Budgets(max_tool_calls=2)
    )
    handle = runtime.start("x", identity=identity, session_id=session_id)
    result = await soon(handle.result())
    assert result.structured == [
        2,
        {"count": 1},
        [
            "workflow:other was denied: grant: workflow:other is not granted to this run",
            "workflow:submit was denied: budget: the tool call budget is exhausted (limit 2, used 2; run)",
        ],
    ]
    done = [event.payload.denied for event in await all_events(handle) if event.type == "tool.complete"]  # type: ignore[union-attr]
    assert done == [False, True, True, True]


async def test_a_long_answer_is_told_in_pieces(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    runtime = local_runtime(driver=agent_driver(scripted(reply("x" * 9000))))
    handle = runtime.start("x", identity=identity, session_id=session_id)
    pieces = [e.payload.text for e in await all_events(handle) if isinstance(e.payload, TextDelta)]
    assert [len(piece) for piece in pieces] == [8192, 808]


def test_flags_have_names() -> None:
    assert flag("a") is flag("a")
