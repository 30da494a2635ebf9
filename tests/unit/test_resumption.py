"""Going on where a run ran out of budget."""

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
    Message,
    RunRequest,
    RunResult,
    agent_driver,
    tool,
)
from retinue.errors import InputError, NotFound
from retinue.messages import user
from retinue.testing import ScriptedModel, tool_calls
from tests.conftest import MakeLocalRuntime
from tests.support import driver, soon

SESSION = "s"


@tool
async def lookup(id: str) -> str:
    """Read a record."""
    return f"record {id}"


async def history(runtime: Any, identity: Identity) -> Sequence[Message]:
    return (await soon(runtime.sessions.latest(identity, SESSION))).history  # type: ignore[no-any-return]


async def test_an_agent_goes_on_with_its_conversation_and_all_that_was_spent(
    local_runtime: MakeLocalRuntime, identity: Identity
) -> None:
    model = ScriptedModel([tool_calls(("lookup", {"id": "1"})), tool_calls(("lookup", {"id": "2"})), "done"])
    runtime = local_runtime(
        driver=agent_driver(Agent(name="a", model=model, tools=[lookup])),
        grants=Grants(tool_ids=["lookup"]),
        budgets=Budgets(max_model_calls=1, max_tool_calls=5),
    )
    run = runtime.start("find both", identity=identity, session_id=SESSION)
    result: RunResult = await soon(run.result())
    assert result.status == "stopped"
    assert result.reason is not None
    assert result.reason.code == "budget_exhausted"
    assert result.reason.data is not None
    assert (result.reason.data["resource"], result.reason.data["scope"]) == ("model_calls", "run")
    kept = await history(runtime, identity)
    assert [message.role for message in kept] == ["user", "assistant", "tool"]

    again = await soon(runtime.resume(run, top_up=Budgets(max_model_calls=2)))
    resumed: RunResult = await soon(again.result())
    assert (resumed.status, resumed.text) == ("completed", "done")
    assert resumed.run_id != result.run_id
    assert resumed.budget is not None
    assert (resumed.budget.model_calls.limit, resumed.budget.model_calls.used) == (3, 3)
    assert (resumed.budget.tool_calls.limit, resumed.budget.tool_calls.used) == (5, 2)
    kept = await history(runtime, identity)
    assert [message.role for message in kept] == [
        "user",
        "assistant",
        "tool",
        "assistant",
        "tool",
        "assistant",
    ]
    assert [message.text for message in kept if message.role == "user"] == ["find both"]


async def test_limits_that_run_out_again_stop_again_and_can_be_resumed_again(
    local_runtime: MakeLocalRuntime, identity: Identity
) -> None:
    model = ScriptedModel([*[tool_calls(("lookup", {"id": str(n)})) for n in range(3)], "done"])
    runtime = local_runtime(
        driver=agent_driver(Agent(name="a", model=model, tools=[lookup])),
        grants=Grants(tool_ids=["lookup"]),
        budgets=Budgets(max_model_calls=1),
    )
    run = runtime.start("x", identity=identity, session_id=SESSION)
    result: RunResult = await soon(run.result())
    for limit in (2, 3, 4):
        run = await soon(runtime.resume(run.run_id, top_up=Budgets(max_model_calls=1), identity=identity))
        result = await soon(run.result())
        assert result.budget is not None
        assert result.budget.model_calls.limit == limit
    assert (result.status, result.text) == ("completed", "done")
    assert len(model.requests) == 4


async def test_what_cannot_be_resumed_says_why(local_runtime: MakeLocalRuntime, identity: Identity) -> None:
    runtime = local_runtime(
        driver=agent_driver(Agent(name="a", model=ScriptedModel(["done", "more"]))),
        budgets=Budgets(max_model_calls=1, max_tokens=100_000),
    )
    done = runtime.start("x", identity=identity, session_id=SESSION)
    await soon(done.result())
    more = Budgets(max_model_calls=1)
    refused = await soon(runtime.resume(done, top_up=more))
    with pytest.raises(InputError, match="ended completed"):
        await soon(refused.accepted())
    with pytest.raises(NotFound):
        await soon(runtime.resume("run_none", top_up=more, identity=identity))
    stranger = Identity(tenant_id="other", user_id=identity.user_id)
    with pytest.raises(NotFound):
        await soon(runtime.resume(done.run_id, top_up=more, identity=stranger))
    with pytest.raises(InputError, match="identity"):
        await soon(runtime.resume(done.run_id, top_up=more))
    with pytest.raises(InputError, match="top_up"):
        await soon(runtime.resume(done, top_up={"max_model_calls": 1}))  # type: ignore[arg-type]

    @driver
    async def twice(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        for _ in range(2):
            await services.model(ScriptedModel(["a"]), [user("x")])
        return DriverOutput(text="both")

    runtime = local_runtime(driver=twice, budgets=Budgets(max_model_calls=1))
    out = runtime.start("x", identity=identity, session_id="t")
    await soon(out.result())
    short = await soon(runtime.resume(out, top_up=Budgets(max_tokens=5)))
    with pytest.raises(InputError, match="no max_model_calls"):
        await soon(short.accepted())


async def test_a_driver_is_told_and_the_grants_and_mode_are_those_of_the_run(
    local_runtime: MakeLocalRuntime, identity: Identity
) -> None:
    seen: list[Any] = []

    @driver
    async def tells(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        seen.append((request.resumes, request.input, request.grants.tool_ids, request.run_mode))
        await services.model(ScriptedModel(["a"]), [user("x")])
        return DriverOutput(text="ok")

    runtime = local_runtime(
        driver=tells, grants=Grants(tool_ids=["a", "b"]), budgets=Budgets(max_model_calls=0)
    )
    run = runtime.start(
        "the task", identity=identity, session_id=SESSION, grants=Grants(tool_ids=["a"]), run_mode="plan"
    )
    assert (await soon(run.result())).status == "stopped"
    again = await soon(runtime.resume(run, top_up=Budgets(max_model_calls=1), run_id="mine"))
    assert (await soon(again.result())).status == "completed"
    assert again.run_id == "mine"
    assert seen == [
        (None, "the task", ("a",), "plan"),
        (run.run_id, "the task", ("a",), "plan"),
    ]
    repeated = await soon(runtime.resume(run, top_up=Budgets(max_model_calls=1), run_id="mine"))
    assert (await soon(repeated.result())).status == "completed"
    assert len(seen) == 2
