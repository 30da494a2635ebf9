"""How an application tests its agents: without Ray, without a model, in milliseconds.

    pytest examples/in_process_test.py

The in-process backend runs the same sessions, ledger and event log; delegates are pickled all the same, so
what could not travel to another process fails here too.
"""

from __future__ import annotations

from retinue import Agent, Budgets, Grants, Identity, Runtime, Team, agent_driver, team_driver, tool
from retinue.testing import ScriptedModel, reply, tool_calls

WHO = Identity(tenant_id="acme", user_id="ann")


@tool
def lookup(id: str) -> str:
    """Read a record."""
    return f"record {id}"


def test_the_agent_reads_the_record_before_it_answers() -> None:
    model = ScriptedModel([tool_calls(("lookup", {"id": "42"})), reply("It is approved.")])
    agent = Agent(name="clerk", model=model, tools=[lookup])
    with Runtime(
        driver=agent_driver(agent), grants=Grants(tool_ids=["lookup"]), backend="inprocess"
    ) as runtime:
        result = runtime.run_blocking("What about 42?", identity=WHO, session_id="s")

    assert (result.status, result.text) == ("completed", "It is approved.")
    # The recorder: what the model was asked, in order.
    assert [message.role for message in model.requests[1].messages] == ["user", "assistant", "tool"]
    assert model.requests[1].messages[-1].text == "record 42"


def test_a_budget_that_is_too_small_gives_what_was_found_so_far() -> None:
    plan = '[{"member_id": "first", "task": "look here"}, {"member_id": "second", "task": "look there"}]'
    # One script for each participant: "" is the coordinator, the others go by the members' names.
    model = ScriptedModel({"": [plan, "never asked"], "first": ["here it is"], "second": ["there it is"]})
    team = Team(
        name="pair",
        members=[Agent(name="first", model=model), Agent(name="second", model=model)],
        coordinator=Agent(name="lead", model=model),
    )
    with Runtime(
        driver=team_driver(team), budgets=Budgets(max_model_calls=2), backend="inprocess"
    ) as runtime:
        result = runtime.run_blocking("find it", identity=WHO, session_id="s")

    assert result.status == "stopped"
    assert result.reason is not None
    assert result.reason.code == "budget_exhausted"
    assert "here it is" in result.text
    assert model.requests_of("second") == []  # refused before anything was sent
