"""Delegates at work: results, failures, limits, cancellation, and that nothing of them is left."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from retinue import (
    Agent,
    Budgets,
    DriverCapabilities,
    DriverOutput,
    ExecutionServices,
    Grants,
    Identity,
    ModelRequest,
    ModelResponse,
    RunRequest,
    RunResult,
    Runtime,
    ToolContext,
    Usage,
    agent_driver,
    tool,
)
from retinue.children import LocalChildren
from retinue.errors import (
    BudgetExhausted,
    ChildLost,
    InputError,
    NotShippable,
    RetinueError,
    Unsupported,
    ValidationFailed,
)
from retinue.events import ChildFinished, ChildStarted, Custom, Event
from retinue.messages import assistant, user
from retinue.results import Reason
from retinue.testing import ScriptedModel, reply, tool_calls
from tests.conftest import MakeLocalRuntime
from tests.support import (
    FunctionModel,
    Start,
    all_events,
    answering,
    backend_of,
    code_of,
    driver,
    estimate,
    flag,
    nothing_is_left,
    run_of,
    soon,
    spent,
    tasks_of_users,
    tokens,
    trivial,
    why,
)

# What delegates do is at module level: their work travels pickled, and meets the test through named flags.


@dataclass(frozen=True)
class Child:
    """A driver that does what its input says."""

    id: str = "child"
    version: int = 1
    capabilities: DriverCapabilities = field(default_factory=DriverCapabilities)

    async def start(self, request: RunRequest, services: ExecutionServices) -> DriverOutput:
        action, _, rest = str(request.input).partition(" ")
        return await ACTIONS[action](self, rest, request, services)


Action = Callable[[Child, str, RunRequest, ExecutionServices], Awaitable[DriverOutput]]


async def _fail(child: Child, rest: str, request: RunRequest, services: ExecutionServices) -> DriverOutput:
    raise ValueError(rest)


async def _say(child: Child, rest: str, request: RunRequest, services: ExecutionServices) -> DriverOutput:
    services.append([user(request.input), assistant(rest)])
    services.emit(Custom("said", rest))
    services.emit_text("stays inside")
    services.state["lost"] = True
    return DriverOutput(text=rest, structured={"history": len(services.history)})


async def _wait(child: Child, rest: str, request: RunRequest, services: ExecutionServices) -> DriverOutput:
    flag(f"{rest} runs").set()
    try:
        await flag(f"{rest} go").wait()
    except asyncio.CancelledError:
        flag(f"{rest} cancelled").set()
        raise
    return DriverOutput(text="waited")


async def _ignore(child: Child, rest: str, request: RunRequest, services: ExecutionServices) -> DriverOutput:
    """Ignores its cancellation, and tries to go on."""
    flag(f"{rest} runs").set()
    refusals = 0
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        for call in (
            lambda: services.model(answering(), [user("x")]),
            lambda: services.delegate(child, "say more"),
            lambda: services.dispatch_effect("effect", {}, _nothing),
        ):
            try:
                await call()
            except asyncio.CancelledError:
                refusals += 1
    flag(f"{rest} refusals").set(refusals)
    return DriverOutput(text="ignored")


async def _nothing(arguments: dict[str, Any]) -> None: ...


async def _ask(child: Child, rest: str, request: RunRequest, services: ExecutionServices) -> DriverOutput:
    """Asks as often as it says a model that uses ten tokens, or as many as it is allowed."""

    async def answer(request: ModelRequest) -> ModelResponse:
        assert request.max_tokens is not None
        usage = Usage(input_tokens=2, output_tokens=min(8, request.max_tokens))
        return ModelResponse(text="x", usage=usage)

    for _ in range(int(rest)):
        await services.model(FunctionModel(answer), [user("x")], max_tokens=10)
    return DriverOutput(text="asked")


async def _nest(child: Child, rest: str, request: RunRequest, services: ExecutionServices) -> DriverOutput:
    below = await services.delegate(child, rest, name="below")
    output = await below.result()
    return DriverOutput(text=f"below said: {output.text}")


async def _leave(child: Child, rest: str, request: RunRequest, services: ExecutionServices) -> DriverOutput:
    """Starts another and does not wait for it."""
    await services.delegate(child, rest, name="left")
    return DriverOutput(text="left")


async def _half(child: Child, rest: str, request: RunRequest, services: ExecutionServices) -> DriverOutput:
    return DriverOutput(text="half", status="stopped", reason=Reason("stop", "enough"))


async def _who(child: Child, rest: str, request: RunRequest, services: ExecutionServices) -> DriverOutput:
    return DriverOutput(
        text=request.session_id,
        structured={
            "tenant": request.identity.tenant_id,
            "tools": list(request.grants.tool_ids),
            "participant": request.participant,
            "history": len(services.history),
            "state": services.state,
        },
    )


ACTIONS: dict[str, Action] = {
    "fail": _fail,
    "say": _say,
    "wait": _wait,
    "ignore": _ignore,
    "ask": _ask,
    "nest": _nest,
    "leave": _leave,
    "half": _half,
    "who": _who,
}
CHILD = Child()


async def run(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str, work: Start, **options: Any
) -> tuple[RunResult, list[Event]]:
    """Run a root driver to its end, and see that nothing is left."""
    runtime = local_runtime(driver=driver(work), **options)
    handle = runtime.start("x", identity=identity, session_id=session_id)
    result = await soon(handle.result())
    await nothing_is_left(runtime, handle)
    return result, await all_events(handle)


async def test_a_delegate_gives_its_output_and_its_transcript(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    async def root(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        services.append([user("question"), assistant("answer")])
        child = await services.delegate(CHILD, "say hello", name="speaker")
        assert child.name == "speaker"
        output = await child.result()
        assert (output, await child.result()) == (output, output)
        return DriverOutput(text=output.text, structured=[child.run_id, output.structured])

    runtime = local_runtime(driver=driver(root))
    handle = runtime.start("x", identity=identity, session_id=session_id)
    result = await soon(handle.result())
    run_id, structured = result.structured
    assert (result.status, result.text, structured) == ("completed", "hello", {"history": 0})
    snapshot = await runtime.sessions.read(identity, session_id)
    assert [message.text for message in snapshot.history] == ["question", "answer"]
    assert [message.text for message in snapshot.conversations[run_id]] == ["say hello", "hello"]
    assert snapshot.state == {}
    child_events = [event for event in await all_events(handle) if event.run_id == run_id]
    assert [event.payload for event in child_events] == [
        ChildStarted("speaker"),
        Custom("said", "hello"),
        ChildFinished("speaker", "completed"),
    ]
    for event in child_events:
        assert (event.participant, event.parent_run_id) == ("speaker", handle.run_id)
        assert (event.root_run_id, event.session_id) == (handle.run_id, session_id)
    sequences = [event.sequence for event in await all_events(handle)]
    assert sequences == list(range(1, len(sequences) + 1))
    await nothing_is_left(runtime, handle)


async def test_a_delegate_inherits_who_and_what_but_no_history(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    async def root(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        services.append([user("question")])
        services.state["count"] = 1
        return await (await services.delegate(CHILD, "who")).result()

    result, _ = await run(local_runtime, identity, session_id, root, grants=Grants(tool_ids=["a", "b"]))
    assert result.text == f"{session_id}:child"
    assert result.structured == {
        "tenant": "acme",
        "tools": ["a", "b"],
        "participant": "child",
        "history": 0,
        "state": {},
    }


async def test_an_agent_is_work_too(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    model = ScriptedModel({"reader": [reply("read", usage=Usage(input_tokens=3, output_tokens=4))]})

    async def root(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        child = await services.delegate(Agent(name="reader", model=model), "read this")
        return await child.result()

    result, events = await run(local_runtime, identity, session_id, root)
    assert (result.text, result.usage.total_tokens) == ("read", 7)
    (request,) = model.requests_of("reader")
    assert [message.text for message in request.messages] == ["read this"]
    finished = [event.payload for event in events if isinstance(event.payload, ChildFinished)]
    assert finished == [ChildFinished("reader", "completed", None, Usage(input_tokens=3, output_tokens=4))]
    assert "text.delta" not in [event.type for event in events]


async def test_a_failing_delegate_raises_where_its_result_is_awaited(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    async def root(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        child = await services.delegate(CHILD, "fail badly")
        with pytest.raises(RetinueError) as failed:
            await child.result()
        assert (failed.value.code, failed.value.message) == ("execution_failed", "badly")
        half = await (await services.delegate(CHILD, "half")).result()
        return DriverOutput(text=f"{half.status} {half.text}")

    result, events = await run(local_runtime, identity, session_id, root)
    assert (result.status, result.text) == ("completed", "stopped half")
    finished = [event.payload for event in events if isinstance(event.payload, ChildFinished)]
    assert [(payload.status, payload.reason) for payload in finished] == [
        ("failed", Reason("execution_failed", "badly")),
        ("stopped", Reason("stop", "enough")),
    ]


async def test_a_delegate_that_nobody_awaits_is_waited_for_and_its_failure_counts(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    async def leaves(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        await services.delegate(CHILD, "wait unawaited")
        return DriverOutput(text="early")

    runtime = local_runtime(driver=driver(leaves))
    handle = runtime.start("x", identity=identity, session_id=session_id)
    await flag("unawaited runs").wait()
    assert handle.state == "running"
    flag("unawaited go").set()
    result = await soon(handle.result())
    assert (result.status, result.text) == ("completed", "early")
    finished = [e.payload for e in await all_events(handle) if isinstance(e.payload, ChildFinished)]
    assert [payload.status for payload in finished] == ["completed"]

    async def ignores(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        await services.delegate(CHILD, "fail unseen")
        return DriverOutput(text="early")

    result, _ = await run(local_runtime, identity, f"{session_id}-2", ignores)
    assert (result.status, why(result)) == ("failed", "unseen")


async def test_cancelling_the_run_cancels_its_delegates_at_every_depth(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    async def root(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        for number in range(3):
            await services.delegate(CHILD, f"nest wait deep{number}", name=f"child{number}")
        await asyncio.Event().wait()
        raise AssertionError

    runtime = local_runtime(driver=driver(root))
    handle = runtime.start("x", identity=identity, session_id=session_id)
    for number in range(3):
        await flag(f"deep{number} runs").wait()
    await handle.cancel("enough")
    result = await soon(handle.result())
    assert (result.status, result.reason) == ("cancelled", Reason("cancelled", "enough"))
    for number in range(3):
        assert flag(f"deep{number} cancelled").is_set
    events = await all_events(handle)
    assert events[-1].type == "run.terminal"
    finished = [event.payload for event in events if isinstance(event.payload, ChildFinished)]
    assert sorted(payload.name for payload in finished) == ["below"] * 3 + ["child0", "child1", "child2"]
    assert {payload.status for payload in finished} == {"cancelled"}
    await nothing_is_left(runtime, handle)


async def test_a_parent_can_cancel_one_delegate_and_go_on(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    async def root(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        child = await services.delegate(CHILD, "nest wait one")
        sibling = await services.delegate(CHILD, "wait other")
        await flag("one runs").wait()
        child.cancel("not needed")
        with pytest.raises(RetinueError) as cancelled:
            await child.result()
        assert cancelled.value.code == "cancelled"
        await flag("one cancelled").wait()
        unawaited = await services.delegate(CHILD, "wait third")
        await flag("third runs").wait()
        unawaited.cancel()  # deliberate: no failure of the parent
        flag("other go").set()
        return await sibling.result()

    result, events = await run(local_runtime, identity, session_id, root)
    assert (result.status, result.text) == ("completed", "waited")
    finished = [event.payload for event in events if isinstance(event.payload, ChildFinished)]
    assert sorted(payload.status for payload in finished) == ["cancelled"] * 3 + ["completed"]


async def test_a_delegate_that_ignores_its_cancellation_gets_nothing_more(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    async def root(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        child = await services.delegate(CHILD, "ignore it")
        await flag("it runs").wait()
        child.cancel()
        assert await flag("it refusals").wait() == 3
        with pytest.raises(RetinueError) as cancelled:
            await child.result()
        return DriverOutput(text=cancelled.value.code)

    result, events = await run(local_runtime, identity, session_id, root, grants=Grants(tool_ids=["effect"]))
    assert (result.status, result.text) == ("completed", "cancelled")
    assert (spent(result).model_calls.used, spent(result).tool_calls.used) == (0, 0)
    assert [e.payload.name for e in events if isinstance(e.payload, ChildStarted)] == ["child"]


async def test_delegates_of_a_failing_driver_are_cancelled(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    async def root(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        await services.delegate(CHILD, "wait orphan")
        await flag("orphan runs").wait()
        raise ValueError("primary")

    result, _ = await run(local_runtime, identity, session_id, root)
    assert (result.status, why(result)) == ("failed", "primary")
    assert flag("orphan cancelled").is_set


async def test_a_delegate_whose_start_is_given_up_does_not_run_on(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    given_up = 0

    async def root(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        nonlocal given_up
        for ticks in range(8):
            starting = asyncio.ensure_future(services.delegate(CHILD, f"wait given{ticks}"))
            for _ in range(ticks):
                await asyncio.sleep(0)
            starting.cancel()
            await asyncio.wait([starting])
            if starting.cancelled():
                given_up += 1
            else:
                starting.result().cancel()
        async with asyncio.timeout(30):
            tree = run_of(runtime, handle).tree
            while tree._live_children():
                await asyncio.sleep(0.01)
        return DriverOutput(text="ok")

    runtime = local_runtime(driver=driver(root))
    handle = runtime.start("x", identity=identity, session_id=session_id)
    result = await soon(handle.result())
    assert (result.status, result.text) == ("completed", "ok"), result.reason
    assert given_up > 0
    finished = [e.payload for e in await all_events(handle) if isinstance(e.payload, ChildFinished)]
    assert {payload.status for payload in finished} == {"cancelled"}
    await nothing_is_left(runtime, handle)


@pytest.mark.parametrize("ticks", range(5))
async def test_a_cancel_at_any_moment_of_a_start_leaves_nothing(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str, ticks: int
) -> None:
    from retinue.loop import on_client_loop

    runtime = local_runtime(driver=driver(_starts_two))
    handle = runtime.start("x", identity=identity, session_id=session_id)
    await handle.accepted()
    run_ = run_of(runtime, handle)

    async def cancel_then() -> None:
        # On the control loop, in the step in which the first delegate has just been asked for.
        while run_.tree.children == 0 and not run_.settled.done():
            await asyncio.sleep(0)
        for _ in range(ticks):
            await asyncio.sleep(0)
        run_.cancel("now")

    await asyncio.wrap_future(on_client_loop(cancel_then()))
    result = await soon(handle.result())
    assert result.status == "cancelled"
    await nothing_is_left(runtime, handle)


async def _starts_two(request: RunRequest, services: ExecutionServices) -> DriverOutput:
    for number in range(2):
        await services.delegate(CHILD, f"wait {request.run_id}-{number}")
    await asyncio.Event().wait()
    raise AssertionError


async def test_a_nested_delegate_that_is_left_is_waited_for_by_its_parent(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    async def root(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        child = await services.delegate(CHILD, "leave wait below")
        await flag("below runs").wait()
        pending = asyncio.ensure_future(child.result())
        await asyncio.sleep(0)
        assert not pending.done()
        flag("below go").set()
        return await pending

    result, events = await run(local_runtime, identity, session_id, root)
    assert (result.status, result.text) == ("completed", "left")
    finished = [e.payload.name for e in events if isinstance(e.payload, ChildFinished)]
    assert finished == ["left", "child"]
    nested = next(e for e in events if isinstance(e.payload, ChildStarted) and e.payload.name == "left")
    parent = next(e for e in events if isinstance(e.payload, ChildStarted) and e.payload.name == "child")
    assert nested.parent_run_id == parent.run_id


# --- budgets ----------------------------------------------------------------------------------------------


async def test_a_delegates_limits_lie_within_those_above(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    async def root(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        told: list[Any] = []
        for budgets in (Budgets(max_model_calls=2), Budgets(max_tokens=12), Budgets(max_model_calls=99)):
            child = await services.delegate(CHILD, "ask 3", budgets=budgets)
            try:
                await child.result()
            except BudgetExhausted as error:
                told.append([error.resource, error.message.split(" (")[1]])
        return DriverOutput(text="ok", structured=told)

    result, events = await run(
        local_runtime,
        identity,
        session_id,
        root,
        budgets=Budgets(max_model_calls=5),
        estimate_input_tokens=estimate(2),
    )
    assert result.structured == [
        ["model_calls", "limit 2, used 2, reserved 0; delegate:child)"],
        ["tokens", "limit 12, used 10, reserved 0; delegate:child)"],
        ["model_calls", "limit 5, used 5, reserved 0; run)"],
    ]
    assert result.status == "completed"
    assert (spent(result).model_calls.used, spent(result).tokens.used) == (5, 50)
    finished = [e.payload for e in events if isinstance(e.payload, ChildFinished)]
    assert [(p.status, code_of(p)) for p in finished if p.reason] == [("stopped", "budget_exhausted")] * 3
    assert [payload.usage.total_tokens for payload in finished] == [20, 10, 20]


async def test_c184_parent_child_parent_share_two_calls(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    model = answering(usage=Usage(input_tokens=1))

    async def root(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        await services.model(model, [user("x")])
        await (await services.delegate(CHILD, "ask 1")).result()
        await services.model(model, [user("x")])
        raise AssertionError

    result, _ = await run(local_runtime, identity, session_id, root, budgets=Budgets(max_model_calls=2))
    assert (result.status, code_of(result)) == ("stopped", "budget_exhausted")
    assert (spent(result).model_calls.used, len(model.requests)) == (2, 1)


async def test_many_delegates_never_spend_more_than_there_is(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    async def root(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        children = await asyncio.gather(*(services.delegate(CHILD, "ask 2") for _ in range(20)))
        outcomes = await asyncio.gather(*(child.result() for child in children), return_exceptions=True)
        refused = [outcome for outcome in outcomes if isinstance(outcome, BudgetExhausted)]
        assert all(isinstance(outcome, DriverOutput | BudgetExhausted) for outcome in outcomes)
        return DriverOutput(text="ok", structured=len(refused))

    result, _ = await run(
        local_runtime,
        identity,
        session_id,
        root,
        budgets=Budgets(max_tokens=155, max_model_calls=30),
        estimate_input_tokens=estimate(2),
    )
    assert result.status == "completed"
    assert tokens(result.budget)[2] == 0
    assert 145 <= spent(result).tokens.used <= 155
    assert result.usage.total_tokens == spent(result).tokens.used
    # Some fifteen calls of ten tokens fit; twenty children wanted forty.
    assert 15 <= spent(result).model_calls.used <= 17
    assert result.structured >= 20 - 17 // 2


# --- refusals ---------------------------------------------------------------------------------------------


async def test_what_cannot_be_delegated_is_refused_at_once(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    @dataclass(frozen=True)
    class Locked(Child):
        lock: Any = field(default_factory=threading.Lock)

    async def root(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        errors: list[RetinueError] = []
        attempts: list[tuple[Any, Any, dict[str, Any]]] = [
            (Locked(), "say x", {"name": "locked"}),
            ("no work", "say x", {}),
            (CHILD, "say x", {"placement": "dedicated"}),
            (CHILD, "say x", {"budgets": {"max_tokens": 5}}),
            (CHILD, "\ud800", {}),
            (CHILD, b"bytes", {}),
            (CHILD, "say x", {"name": "\ud800"}),
        ]
        for work, input_, options in attempts:
            with pytest.raises(RetinueError) as refused:
                await services.delegate(work, input_, **options)
            errors.append(refused.value)
        return DriverOutput(text="ok", structured=[[type(e).__name__, e.data.get("path")] for e in errors])

    result, events = await run(local_runtime, identity, session_id, root)
    assert result.structured == [
        [NotShippable.__name__, "locked.lock"],
        [ValidationFailed.__name__, "delegate"],
        [Unsupported.__name__, None],
        [ValidationFailed.__name__, "budgets"],
        [InputError.__name__, None],
        [InputError.__name__, None],
        [InputError.__name__, None],
    ]
    assert [event.type for event in events] == ["run.started", "run.terminal"]


class Unreadable:
    """Pickles, and cannot be read where it runs."""

    id = "unreadable"
    version = 1
    capabilities = DriverCapabilities()

    async def start(self, request: RunRequest, services: ExecutionServices) -> DriverOutput:
        raise AssertionError

    def __reduce__(self) -> tuple[Any, ...]:
        return _explode, ()


def _explode() -> None:
    raise ImportError("not installed here")


async def test_work_that_cannot_be_loaded_where_it_runs_fails_by_name(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    async def root(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        child = await services.delegate(Unreadable(), "x")
        with pytest.raises(NotShippable, match="cannot be loaded where it runs: ImportError: not installed"):
            await child.result()
        return DriverOutput(text="ok")

    assert (await run(local_runtime, identity, session_id, root))[0].text == "ok"


async def test_a_place_that_cannot_be_had_fails_the_delegate(
    local_runtime: MakeLocalRuntime,
    identity: Identity,
    session_id: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def no_room(self: LocalChildren, order: Any, tree: Any) -> None:
        raise OSError("no room")

    monkeypatch.setattr(LocalChildren, "launch", no_room)

    async def root(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        child = await services.delegate(CHILD, "say x")
        with pytest.raises(ChildLost, match="child: no room"):
            await child.result()
        return DriverOutput(text="ok")

    result, events = await run(local_runtime, identity, session_id, root)
    assert result.text == "ok"
    assert [event.type for event in events] == ["run.started", "child.finished", "run.terminal"]


async def test_a_lost_delegate_fails_and_what_it_held_is_charged(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    from retinue.loop import on_client_loop

    runtime: Runtime

    async def lose(run_id: str, tree: Any) -> None:
        tree.child_lost(run_id, "its process died")
        tree.child_lost(run_id, "said twice")

    async def root(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        child = await services.delegate(CHILD, "nest wait lost")
        sibling = await services.delegate(CHILD, "say fine")
        await flag("lost runs").wait()
        tree = run_of(runtime, handle).tree
        tree.ledger.admit_model(child.run_id, "held", 10, 20)
        await asyncio.wrap_future(on_client_loop(lose(child.run_id, tree)))
        with pytest.raises(ChildLost) as lost:
            await child.result()
        return DriverOutput(text=(await sibling.result()).text, structured=[lost.value.run_id, child.run_id])

    runtime = local_runtime(driver=driver(root))
    handle = runtime.start("x", identity=identity, session_id=session_id)
    result = await soon(handle.result())
    assert (result.status, result.text) == ("completed", "fine")
    assert result.structured[0] == result.structured[1]
    assert (spent(result).tokens.used, spent(result).unknown_usage_calls) == (30, 1)
    # What ran below the lost one was stopped, and nothing that the lost one still said was heard.
    assert flag("lost cancelled").is_set
    finished = [e.payload for e in await all_events(handle) if isinstance(e.payload, ChildFinished)]
    statuses = {payload.name: payload.status for payload in finished}
    assert (statuses["child"], statuses["below"]) == ("completed", "cancelled") or len(finished) == 3
    await soon(_until_idle(runtime))


async def _until_idle(runtime: Runtime) -> None:
    while await tasks_of_users(runtime):
        await asyncio.sleep(0)


# --- tools and threads ------------------------------------------------------------------------------------


@tool
def patient(ctx: ToolContext) -> str:
    """Waits in a thread until it is told to stop."""
    flag("patient runs").set()
    for _ in range(1000):
        if ctx.cancelled:
            flag("patient told").set()
            return "stopped"
        threading.Event().wait(0.01)
    return "gave up"


async def test_a_cancel_reaches_a_tool_in_a_thread_of_a_delegate(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    model = ScriptedModel({"worker": [tool_calls(("patient", {})), "never"]})

    async def root(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        child = await services.delegate(Agent(name="worker", model=model, tools=[patient]), "go")
        return await child.result()

    runtime = local_runtime(driver=driver(root), grants=Grants(tool_ids=["patient"]))
    handle = runtime.start("x", identity=identity, session_id=session_id)
    await flag("patient runs").wait()
    await handle.cancel()
    assert (await soon(handle.result())).status == "cancelled"
    assert flag("patient told").is_set
    await nothing_is_left(runtime, handle)


@tool
async def ask_another(question: str, ctx: ToolContext) -> str:
    """Puts a question to a delegate."""
    child = await ctx.delegate(CHILD, f"say {question}", name="helper", budgets=Budgets(max_tokens=5))
    return (await child.result()).text


async def test_a_tool_can_delegate(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    model = ScriptedModel({"": [tool_calls(("ask_another", {"question": "why"})), "because"]})
    runtime = local_runtime(
        driver=agent_driver(Agent(name="a", model=model, tools=[ask_another])),
        grants=Grants(tool_ids=["ask_another"]),
    )
    handle = runtime.start("x", identity=identity, session_id=session_id)
    result = await soon(handle.result())
    assert (result.status, result.text) == ("completed", "because")
    assert model.requests[-1].messages[-1].text == "why"
    await nothing_is_left(runtime, handle)
    assert backend_of(runtime)._host.statistics().active_runs == 0


async def test_a_name_is_the_callers_the_agents_or_the_drivers(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    model = ScriptedModel(["x"])

    async def root(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        names = [
            (await services.delegate(CHILD, "half", name="mine")).name,
            (await services.delegate(CHILD, "half")).name,
            (await services.delegate(trivial, "half")).name,
            (await services.delegate(Agent(name="agent", model=model), "half")).name,
        ]
        return DriverOutput(text=" ".join(names))

    assert (await run(local_runtime, identity, session_id, root))[0].text == "mine child test agent"
