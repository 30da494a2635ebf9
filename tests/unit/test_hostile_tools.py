"""Tools and models that do what nobody should: the run goes on, or says clearly why it does not."""

from __future__ import annotations

from typing import Any

import pytest

from retinue import (
    Agent,
    Budgets,
    Grants,
    Identity,
    Runtime,
    RuntimeConfig,
    Team,
    ToolCall,
    agent_driver,
    tool,
)
from retinue.errors import InputError, ValidationFailed
from retinue.testing import ScriptedModel, tool_calls

ME = Identity(tenant_id="t", user_id="u")


class Unspeakable(Exception):
    """Cannot even be asked what it says."""

    def __str__(self) -> str:
        raise RuntimeError("no words")


@tool
def misbehave(how: str) -> str:
    """Raise something."""
    if how == "stop":
        return next(iter(()))
    raise {"unspeakable": Unspeakable, "base": BaseException, "exit": GeneratorExit}[how]()


@tool
async def misbehave_async(how: str) -> str:
    """The same in a coroutine."""
    return str(misbehave.function(how))


@pytest.mark.parametrize("name", ["misbehave", "misbehave_async"])
@pytest.mark.parametrize("how", ["stop", "unspeakable", "base", "exit"])
def test_whatever_a_tool_raises_is_its_result(name: str, how: str) -> None:
    model = ScriptedModel([tool_calls((name, {"how": how})), "went on"])
    agent = Agent(name="a", model=model, tools=[misbehave, misbehave_async])
    grants = Grants(tool_ids=["misbehave", "misbehave_async"])
    with Runtime(driver=agent_driver(agent), grants=grants, backend="inprocess") as runtime:
        result = runtime.start("x", identity=ME, session_id="s").wait(20)
    assert (result.status, result.text) == ("completed", "went on")
    said = model.requests[1].messages[-1].text
    assert said.startswith(("RuntimeError", "Unspeakable", "BaseException", "GeneratorExit"))


@pytest.mark.parametrize(
    "call",
    [
        ToolCall("a", "misbehave", {"how": "\ud800"}),
        ToolCall("\ud800", "misbehave", {"how": "stop"}),
        ToolCall("a", "misbehave", None),  # type: ignore[arg-type]
    ],
)
def test_a_call_that_cannot_be_kept_is_refused_before_any_tool_runs(call: ToolCall) -> None:
    class Broken:
        provider_id = "test"
        model_id = "broken"

        async def generate(self, request: Any) -> Any:
            step = tool_calls(call)
            return step.response

    agent = Agent(name="a", model=Broken(), tools=[misbehave])
    grants = Grants(tool_ids=["misbehave"])
    with Runtime(driver=agent_driver(agent), grants=grants, backend="inprocess") as runtime:
        result = runtime.start("x", identity=ME, session_id="s").wait(20)
    assert (result.status, result.reason and result.reason.code) == ("failed", "model_failed")
    assert result.budget is not None
    assert result.budget.tool_calls.used == 0


MODEL = ScriptedModel()


# Without their types: what is wrong here a type checker would see.
def _runtime(**options: Any) -> Runtime:
    return Runtime(driver=_driver(), **options)


def _agent(**options: Any) -> Agent:
    return Agent(name="a", model=MODEL, **options)


def _team(**options: Any) -> Team:
    return Team(**{"name": "t", "members": [], "coordinator": _agent(), **options})


@pytest.mark.parametrize(
    ("path", "make"),
    [
        ("config.budgets", lambda: _runtime(budgets=0)),
        ("config.grants", lambda: _runtime(grants=[])),
        ("config.models", lambda: _runtime(models=1)),
        ("config.name", lambda: _runtime(name=1)),
        (
            "config.estimate_input_tokens",
            lambda: _runtime(estimate_input_tokens="x"),
        ),
        ("app", lambda: Runtime(1)),  # type: ignore[arg-type]
        ("store", lambda: _runtime(backend="inprocess", store=1)),
        ("agent.a.instructions", lambda: _agent(instructions=1)),
        ("agent.a.max_output_tokens", lambda: _agent(max_output_tokens=-1)),
        (
            "agent.a.max_tool_roundtrips",
            lambda: _agent(max_tool_roundtrips="x"),
        ),
        ("agent.a.temperature", lambda: _agent(temperature="x")),
        ("team.coordinator", lambda: _team(coordinator=1)),
        (
            "team.members[0]",
            lambda: _team(members=[1]),
        ),
    ],
)
def test_a_wrong_type_is_named_where_it_is_given(path: str, make: Any) -> None:
    with pytest.raises(ValidationFailed) as caught:
        make()
    assert caught.value.path == path


def test_an_empty_run_id_is_refused_and_not_made_up() -> None:
    with Runtime(driver=_driver(), backend="inprocess") as runtime, pytest.raises(InputError, match="run_id"):
        runtime.start("x", identity=ME, session_id="s", run_id="")


def test_an_event_window_without_bound_is_refused() -> None:
    with pytest.raises(InputError, match="event_capacity"):
        RuntimeConfig(driver=_driver(), event_capacity=2**70, budgets=Budgets())


def _driver() -> Any:
    return agent_driver(Agent(name="a", model=MODEL))
