"""The team driver in mode coordinate (contract section 14)."""

from __future__ import annotations

import json
from typing import Any

import pytest

from retinue import (
    Agent,
    Budgets,
    Identity,
    Message,
    ModelRequest,
    ModelResponse,
    RunResult,
    Team,
    Usage,
    team_driver,
)
from retinue.errors import ModelFailed, Unsupported, ValidationFailed
from retinue.events import ChildFinished, ChildStarted, Event, MessageCompleted
from retinue.messages import TextPart
from retinue.results import Reason
from retinue.testing import ScriptedModel, reply
from retinue.testing.scripted import ScriptStep
from tests.conftest import MakeLocalRuntime
from tests.support import (
    Flag,
    FunctionModel,
    all_events,
    answering,
    code_of,
    estimate,
    nothing_is_left,
    soon,
    spent,
)

TEN = Usage(input_tokens=6, output_tokens=4)


def plan(*tasks: tuple[str, str]) -> str:
    return json.dumps([{"member_id": member, "task": task} for member, task in tasks])


def team(model: ScriptedModel, *names: str, **options: Any) -> Team:
    members = [Agent(name=name, model=model, description=f"does {name}") for name in names]
    return Team(name="t", members=members, coordinator=Agent(name="co", model=model), **options)


async def run(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str, team_: Team, **options: Any
) -> tuple[RunResult, list[Event]]:
    runtime = local_runtime(driver=team_driver(team_), **options)
    handle = runtime.start("go", identity=identity, session_id=session_id)
    result = await soon(handle.result())
    await nothing_is_left(runtime, handle)
    return result, await all_events(handle)


def started(events: list[Event]) -> list[str]:
    return [event.payload.name for event in events if isinstance(event.payload, ChildStarted)]


def task_of(model: ScriptedModel, member: str) -> list[str]:
    return [request.messages[-1].text for request in model.requests_of(member)]


async def test_c252_a_plan_of_two_members_is_done_in_order_and_composed(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    model = ScriptedModel(
        {
            "": [reply(plan(("b", "do b"), ("a", "do a")), usage=TEN), reply("composed", usage=TEN)],
            "a": [reply("A!", usage=TEN)],
            "b": [reply("B!", usage=TEN)],
        }
    )
    runtime = local_runtime(driver=team_driver(team(model, "a", "b")))
    handle = runtime.start("go", identity=identity, session_id=session_id)
    result = await soon(handle.result())
    assert (result.status, result.text, result.usage.total_tokens) == ("completed", "composed", 40)
    assert spent(result).model_calls.used == 4
    assert (task_of(model, "a"), task_of(model, "b")) == (["do a"], ["do b"])
    events = await all_events(handle)
    order = [e.payload.name for e in events if isinstance(e.payload, ChildStarted | ChildFinished)]
    assert order == ["b", "b", "a", "a"]
    synthesis = model.requests_of("")[-1].messages[-1].text
    assert synthesis.index("B!") < synthesis.index("A!")
    snapshot = await runtime.sessions.read(identity, session_id)
    assert [(m.role, m.text) for m in snapshot.history] == [("user", "go"), ("assistant", "composed")]
    members = {event.run_id for event in events if isinstance(event.payload, ChildStarted)}
    assert set(snapshot.conversations) == {handle.run_id, *members}
    # People see the answer, and neither the plan nor what members say among themselves.
    seen = [event.payload.message for event in events if isinstance(event.payload, MessageCompleted)]
    assert [(message.phase, message.text) for message in seen] == [("final", "composed")]
    await nothing_is_left(runtime, handle)


async def test_a_follow_up_is_planned_and_composed_as_the_first_was(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    begun, go = Flag(), Flag()

    async def hold(request: ModelRequest) -> ModelResponse:
        begun.set()
        await go.wait()
        return ModelResponse(text=plan(("a", "first")))

    scripted = ScriptedModel({"": ["one", plan(("a", "second")), "two"], "a": ["A1", "A2"]})
    held = FunctionModel(lambda request: scripted.generate(request) if begun.is_set else hold(request))
    members = [Agent(name="a", model=scripted)]
    team_ = Team(name="t", members=members, coordinator=Agent(name="co", model=held))
    runtime = local_runtime(driver=team_driver(team_))
    handle = runtime.start("go", identity=identity, session_id=session_id)
    await begun.wait()
    with pytest.raises(Unsupported):
        await handle.send("not that", mode="steer")
    await handle.send("and then?", mode="follow_up")
    go.set()
    result = await soon(handle.result())
    assert (result.status, result.text, task_of(scripted, "a")) == ("completed", "two", ["first", "second"])
    snapshot = await runtime.sessions.read(identity, session_id)
    assert [message.text for message in snapshot.history] == ["go", "one", "and then?", "two"]


async def test_c252_an_unreadable_plan_goes_to_every_member(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    model = ScriptedModel({"": ["let us all think", "composed"], "a": ["A!"], "b": ["B!"]})
    result, events = await run(local_runtime, identity, session_id, team(model, "a", "b"))
    assert (result.status, result.text, started(events)) == ("completed", "composed", ["a", "b"])
    assert task_of(model, "a") == task_of(model, "b") == ["let us all think"]


async def test_unknown_members_are_skipped(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    script = plan(("nobody", "x"), ("a", "do a"), ("other", "y"))
    model = ScriptedModel({"": [script, "composed"], "a": ["A!"]})
    result, events = await run(local_runtime, identity, session_id, team(model, "a", "b"))
    assert (result.status, started(events)) == ("completed", ["a"])


async def test_a_plan_for_nobody_is_composed_all_the_same(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    model = ScriptedModel({"": [plan(("nobody", "x")), "composed of nothing"]})
    result, events = await run(local_runtime, identity, session_id, team(model, "a"))
    assert (result.status, result.text, started(events)) == ("completed", "composed of nothing", [])


async def test_a_members_error_ends_a_sequential_team_at_once(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    script = plan(("a", "do a"), ("b", "do b"), ("c", "do c"))
    model = ScriptedModel({"": [script, "never"], "a": ["A!"], "b": [ModelFailed("b broke")], "c": ["C!"]})
    runtime = local_runtime(driver=team_driver(team(model, "a", "b", "c")))
    handle = runtime.start("go", identity=identity, session_id=session_id)
    result = await soon(handle.result())
    assert (result.status, result.reason) == ("failed", Reason("model_failed", "b broke"))
    assert started(await all_events(handle)) == ["a", "b"]
    assert len(model.requests_of("")) == 1
    assert (await runtime.sessions.read(identity, session_id)).replayable is False
    await nothing_is_left(runtime, handle)


async def test_a_parallel_team_settles_before_it_raises_the_first_error_in_plan_order(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    script = plan(("a", "do a"), ("b", "do b"), ("c", "do c"))
    model = ScriptedModel(
        {
            "": [script, "never"],
            "a": [reply("A!", delay=0.15)],
            "b": [ScriptStep(error=ModelFailed("b is first in order").to_payload(), delay=0.1)],
            "c": [ModelFailed("c is first in time")],
        }
    )
    result, events = await run(local_runtime, identity, session_id, team(model, "a", "b", "c", parallel=True))
    assert (result.status, result.reason) == ("failed", Reason("model_failed", "b is first in order"))
    finished = {e.payload.name: e.payload.status for e in events if isinstance(e.payload, ChildFinished)}
    assert finished == {"a": "completed", "b": "failed", "c": "failed"}  # the slowest too
    assert len(model.requests_of("")) == 1


async def test_a_team_that_continues_tells_the_synthesis_of_failures(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    for parallel in (False, True):
        script = plan(("a", "do a"), ("b", "do b"))
        model = ScriptedModel({"": [script, "composed"], "a": [ModelFailed("a broke")], "b": ["B!"]})
        members = team(model, "a", "b", parallel=parallel, on_member_error="continue")
        result, _ = await run(local_runtime, identity, f"{session_id}-{parallel}", members)
        assert (result.status, result.text) == ("completed", "composed")
        synthesis = model.requests_of("")[-1].messages[-1].text
        assert "a broke" in synthesis
        assert "B!" in synthesis


@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("on_member_error", ["fail", "continue"])
async def test_a_spent_budget_gives_what_was_found_without_another_call(
    local_runtime: MakeLocalRuntime,
    identity: Identity,
    session_id: str,
    parallel: bool,
    on_member_error: Any,
) -> None:
    script = plan(("a", "do a"), ("b", "do b"), ("c", "do c"))
    model = ScriptedModel(
        {
            "": [reply(script, usage=TEN), "never"],
            "*": [reply("found it", usage=TEN), reply("never", usage=TEN)],
        }
    )
    members = team(model, "a", "b", "c", parallel=parallel, on_member_error=on_member_error)
    runtime = local_runtime(driver=team_driver(members), budgets=Budgets(max_model_calls=2))
    handle = runtime.start("go", identity=identity, session_id=session_id)
    result = await soon(handle.result())
    assert (result.status, code_of(result)) == ("stopped", "budget_exhausted")
    assert "found it" in result.text
    assert "not finished: budget exhausted" in result.text
    assert len(model.requests) == 2
    assert spent(result).model_calls.used == 2
    # Returned, not raised: the session stays replayable.
    snapshot = await runtime.sessions.read(identity, session_id)
    assert (snapshot.replayable, [m.text for m in snapshot.history]) == (True, ["go", result.text])
    await nothing_is_left(runtime, handle)


async def test_a_budget_too_small_for_the_plan_says_that_nothing_was_found(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    model = ScriptedModel({"": ["never"]})
    result, _ = await run(
        local_runtime, identity, session_id, team(model, "a"), budgets=Budgets(max_model_calls=0)
    )
    assert (result.status, code_of(result)) == ("stopped", "budget_exhausted")
    assert result.text == "Nothing was found before the budget was exhausted."
    assert model.requests == []


async def test_a_refused_synthesis_gives_the_members_outputs(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    script = plan(("a", "do a"), ("b", "do b"))
    model = ScriptedModel({"": [script, "never"], "a": ["A!"], "b": ["B!"]})
    result, _ = await run(
        local_runtime, identity, session_id, team(model, "a", "b"), budgets=Budgets(max_model_calls=3)
    )
    assert (result.status, result.text) == ("stopped", "a:\nA!\n\nb:\nB!")


async def test_a_team_takes_text_only(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    model = ScriptedModel({"": ["never"]})
    runtime = local_runtime(driver=team_driver(team(model, "a")))
    result = await soon(runtime.run([TextPart("go")], identity=identity, session_id=session_id))
    assert (result.status, code_of(result)) == ("failed", "invalid_input")
    assert model.requests == []


async def test_the_coordinator_sees_the_conversation_and_the_members_do_not(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    model = ScriptedModel(
        {"": [plan(("a", "one")), "first", plan(("a", "two")), "second"], "a": ["A1", "A2"]}
    )
    coordinator = Agent(name="co", model=model, instructions="Be kind.", max_output_tokens=77)
    members = Team(name="t", members=[Agent(name="a", model=model)], coordinator=coordinator)
    runtime = local_runtime(
        driver=team_driver(members), budgets=Budgets(max_tokens=100_000), estimate_input_tokens=estimate(1)
    )
    for text in ("first question", "second question"):
        await soon(runtime.run(text, identity=identity, session_id=session_id))
    second_plan: list[Message] = list(model.requests_of("")[2].messages)
    assert second_plan[0].text == "Be kind."
    assert [m.text for m in second_plan if m.role != "system"] == [
        "first question",
        "first",
        "second question",
    ]
    assert [request.max_tokens for request in model.requests_of("")] == [77] * 4
    assert [len(request.messages) for request in model.requests_of("a")] == [1, 1]


def test_a_team_is_checked_where_it_is_made() -> None:
    agent = Agent(name="a", model=answering())
    for options, path in (
        ({"members": [agent, agent]}, "team.members"),
        ({"members": [agent], "mode": "shout"}, "team.mode"),
        ({"members": [agent], "on_member_error": "cry"}, "team.on_member_error"),
    ):
        with pytest.raises(ValidationFailed) as refused:
            Team(name="t", coordinator=agent, **options)
        assert refused.value.path == path
    made = Team(name="t", coordinator=agent, members=[agent])
    assert (made.mode, made.parallel, made.on_member_error) == ("coordinate", False, "fail")
    assert (team_driver(made).id, team_driver(made).version) == ("team:t", 1)
