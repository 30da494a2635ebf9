"""The tool with which an agent asks another one (contract section 5)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from retinue import (
    Agent,
    Budgets,
    DriverOutput,
    ExecutionServices,
    Grants,
    Identity,
    RunRequest,
    RuntimeConfig,
    ToolCall,
    agent_driver,
    tool,
)
from retinue.agent_defaults import AgentDefaults, Limits
from retinue.events import ChildStarted
from retinue.task_tool import TASK_TOOL, task_tool
from retinue.testing import ScriptedModel, tool_calls
from tests.conftest import MakeLocalRuntime
from tests.support import all_events, code_of, driver, nothing_is_left, raising, soon, spent, why

GRANTS = Grants(tool_ids=[TASK_TOOL, "lookup"])


@tool
async def lookup(id: str) -> str:
    """Read a record."""
    return f"record {id}"


def ask(agent: str, task: str) -> Any:
    return tool_calls(("task", {"agent": agent, "task": task}))


def results(model: ScriptedModel) -> list[str]:
    """What the tools of the root gave, as its last request has it."""
    return [message.text for message in model.requests_of("")[-1].messages if message.role == "tool"]


async def test_an_agent_asks_others_in_conversations_of_their_own(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    model = ScriptedModel(
        {
            "": [ask("reader", "read 1"), ask("reader", "read 2"), "both are read"],
            "reader": [tool_calls(("lookup", {"id": "1"})), "one"],
            "reader-2": ["two"],
        }
    )
    reader = Agent(
        name="reader", model=model, description="Reads records.", instructions="Read.", tools=[lookup]
    )
    agent = Agent(name="a", model=model, subagents=[reader])
    runtime = local_runtime(driver=agent_driver(agent), grants=GRANTS)
    handle = runtime.start("read both", identity=identity, session_id=session_id)
    result = await soon(handle.result())
    assert (result.status, result.text) == ("completed", "both are read")
    assert results(model) == ["one", "two"]
    (schema,) = model.requests_of("")[0].tools
    assert schema.name == "task"
    assert "- reader: Reads records." in schema.description
    assert schema.parameters["properties"]["agent"]["const"] == "reader"
    for name, task in (("reader", "read 1"), ("reader-2", "read 2")):
        first = model.requests_of(name)[0]
        assert [(message.role, message.text) for message in first.messages] == [
            ("system", "Read."),
            ("user", task),
        ]
        assert [schema.name for schema in first.tools] == ["lookup"]
    # One budget for all, and a conversation for each.
    assert (spent(result).model_calls.used, spent(result).tool_calls.used) == (6, 3)
    snapshot = await runtime.sessions.read(identity, session_id)
    assert snapshot.conversations is not None
    assert sorted(len(messages) for messages in snapshot.conversations.values()) == [2, 4, 6]
    names = [
        event.payload.name for event in await all_events(handle) if isinstance(event.payload, ChildStarted)
    ]
    assert names == ["reader", "reader-2"]
    await nothing_is_left(runtime, handle)


async def test_true_is_a_copy_of_the_agent_itself(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    model = ScriptedModel({"": [ask("a", "half of it"), "all of it"], "a": ["half"]})

    def make() -> Agent:
        return Agent(
            name="a", model=model, instructions="Be brief.", tools=[lookup], on_close=lambda: closed.append(1)
        )

    closed: list[int] = []
    runtime = local_runtime(
        RuntimeConfig(driver=agent_driver(make), defaults=AgentDefaults(subagents=True), grants=GRANTS)
    )
    result = await soon(runtime.run("x", identity=identity, session_id=session_id))
    assert (result.status, result.text, results(model)) == ("completed", "all of it", ["half"])
    (copy,) = model.requests_of("a")
    assert copy.messages[0].text == "Be brief."
    assert [schema.name for schema in copy.tools] == ["lookup"]  # it asks nobody itself
    assert closed == [1]


async def test_it_must_be_granted_and_is_not_there_by_itself(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    nobody: Sequence[Agent] = ()
    for subagents in (True, None, False, nobody):
        model = ScriptedModel({"": [ask("a", "x"), "alone"]})
        agent = Agent(name="a", model=model, subagents=subagents)
        granted = {} if subagents else {"grants": Grants(tool_ids=["task"])}
        runtime = local_runtime(driver=agent_driver(agent), **granted)
        result = await soon(runtime.run("x", identity=identity, session_id=session_id))
        assert (result.status, result.text) == ("completed", "alone")
        expected = (
            "[denied] grant: task is not granted to this run" if not granted else "there is no tool 'task'"
        )
        assert results(model) == [expected]
        assert list(model.requests[0].tools) == []


async def test_a_name_that_nobody_has_uses_no_attempt(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    model = ScriptedModel({"": [ask("c", "x"), "fine"]})
    others = [Agent(name=name, model=model) for name in ("b1", "b2")]
    runtime = local_runtime(
        driver=agent_driver(Agent(name="a", model=model, subagents=others)), grants=GRANTS
    )
    result = await soon(runtime.run("x", identity=identity, session_id=session_id))
    (text,) = results(model)
    assert text.startswith("invalid arguments for task: ")
    assert "'b1' or 'b2'" in text
    assert spent(result).tool_calls.used == 0


async def test_a_child_that_fails_is_text_for_who_asked(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    model = ScriptedModel({"": [ask("b", "x"), ask("poor", "x"), "so be it"], "poor": [ask("b", "x")] * 9})
    others = [
        Agent(name="b", model=raising(ValueError("no provider"))),
        Agent(name="poor", model=model, max_tool_roundtrips=1),
    ]
    runtime = local_runtime(
        driver=agent_driver(Agent(name="a", model=model, subagents=others)), grants=GRANTS
    )
    result = await soon(runtime.run("x", identity=identity, session_id=session_id))
    assert (result.status, result.text) == ("completed", "so be it")
    first, second = results(model)
    assert first == "b failed (execution_failed): no provider"
    assert second.startswith("poor failed (execution_failed): agent poor asked for more than 1 rounds")


async def test_a_child_that_the_budget_stopped_is_text_too(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    model = ScriptedModel({"": [ask("b", "x"), "never"], "b": [tool_calls(("lookup", {"id": "1"})), "never"]})
    agent = Agent(name="a", model=model, subagents=[Agent(name="b", model=model, tools=[lookup])])
    runtime = local_runtime(driver=agent_driver(agent), grants=GRANTS, budgets=Budgets(max_model_calls=2))
    result = await soon(runtime.run("x", identity=identity, session_id=session_id))
    # The child's refusal was a result; the root's own next call is refused, and that stops the run.
    assert (result.status, code_of(result)) == ("stopped", "budget_exhausted")
    history = (await runtime.sessions.read(identity, session_id)).history
    assert history[-1].text.startswith("b failed (budget_exhausted): ")


@pytest.mark.parametrize(
    ("wanted", "parent", "limit", "rounds"),
    [(None, None, None, 8), (100, None, None, 10), (3, None, None, 3), (None, 4, None, 4), (None, 9, 5, 5)],
)
async def test_c164_a_child_has_the_smaller_cap_of_rounds(
    local_runtime: MakeLocalRuntime,
    identity: Identity,
    session_id: str,
    wanted: int | None,
    parent: int | None,
    limit: int | None,
    rounds: int,
) -> None:
    model = ScriptedModel({"": [ask("b", "x"), "done"], "b": [tool_calls(("lookup", {"id": "1"}))] * 20})

    def make() -> Agent:
        child = Agent(name="b", model=model, tools=[lookup], max_tool_roundtrips=wanted)
        return Agent(name="a", model=model, subagents=[child], max_tool_roundtrips=parent)

    runtime = local_runtime(
        RuntimeConfig(driver=agent_driver(make), limits=Limits(tool_roundtrips=limit), grants=GRANTS)
    )
    result = await soon(runtime.run("x", identity=identity, session_id=session_id))
    assert result.status == "completed"
    assert f"more than {rounds} rounds" in results(model)[0]
    assert spent(result).tool_calls.used == rounds + 1


@pytest.mark.parametrize(("own", "limit"), [(0, None), (None, 0), (5, 0)])
async def test_depth_0_disables_it_and_says_so(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str, own: int | None, limit: int | None
) -> None:
    model = ScriptedModel({"": [ask("a", "x"), "alone then"]})

    def make() -> Agent:
        return Agent(name="a", model=model, subagents=True, max_child_depth=own)

    runtime = local_runtime(
        RuntimeConfig(driver=agent_driver(make), limits=Limits(max_child_depth=limit), grants=GRANTS)
    )
    result = await soon(runtime.run("x", identity=identity, session_id=session_id))
    assert (result.status, result.text) == ("completed", "alone then")
    (text,) = results(model)
    assert text.startswith("No agent can be asked here: agents may be 0 levels deep")


async def test_the_depth_of_who_asks_counts(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    model = ScriptedModel(
        {
            "one": [ask("b", "x"), "one done"],
            "one/b": ["b done"],
            "two": [ask("b", "x"), "two done"],
        }
    )

    @driver
    async def root(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        agent = Agent(name="one", model=model, subagents=[Agent(name="b", model=model)])
        one = await services.delegate(agent, "x")
        two = await services.delegate(deeper, "x", name="deeper")
        return DriverOutput(text=(await one.result()).text + ", " + (await two.result()).text)

    runtime = local_runtime(driver=root, grants=GRANTS)
    deeper = Deeper(model)
    result = await soon(runtime.run("x", identity=identity, session_id=session_id))
    assert (result.status, result.text) == ("completed", "one done, two done")
    assert model.requests_of("one")[-1].messages[-1].text == "b done"
    text = model.requests_of("two")[-1].messages[-1].text
    assert text.startswith("No agent can be asked here: agents may be 2 levels deep")
    assert "at level 2" in text


class Deeper:
    """A driver that delegates to an agent with agents of its own, one level further down."""

    id, version, capabilities = "deeper", 1, agent_driver(Agent(name="x", model=ScriptedModel())).capabilities

    def __init__(self, model: ScriptedModel) -> None:
        self.model = model

    async def start(self, request: RunRequest, services: ExecutionServices) -> DriverOutput:
        assert request.depth == 1
        agent = Agent(name="two", model=self.model, subagents=[Agent(name="b", model=self.model)])
        child = await services.delegate(agent, "x")
        return await child.result()


async def test_an_agent_cannot_have_another_tool_of_that_name(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    @tool(name="task")
    async def own() -> str:
        """Something else."""
        return ""

    model = ScriptedModel(["never"])
    runtime = local_runtime(
        driver=agent_driver(Agent(name="a", model=model, tools=[own], subagents=True)), grants=GRANTS
    )
    result = await soon(runtime.run("x", identity=identity, session_id=session_id))
    assert (result.status, code_of(result)) == ("failed", "invalid_harness")
    assert "a tool named task" in why(result)


def test_children_carry_what_they_need_and_nothing_that_their_maker_closes() -> None:
    model = ScriptedModel()
    inner = Agent(name="inner", model=model)
    child = Agent(name="b", model=model, subagents=[inner], on_close=lambda: None)
    made = task_tool([child], roundtrips=10, depth=0, max_depth=2)
    assert made.name == "task"
    assert made.validate({"agent": "b", "task": "x"}) == {"agent": "b", "task": "x"}
    assert ToolCall("1", "task").name == made.name
