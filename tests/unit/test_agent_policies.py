"""Agents' own execution policies, beside the app's and in delegates; and what each knows in a plan."""

from __future__ import annotations

from typing import Any

import pytest

from retinue import (
    Agent,
    CallUnderReview,
    Decision,
    DriverOutput,
    ExecutionServices,
    Grants,
    Identity,
    PolicyContext,
    RunRequest,
    agent_driver,
    tool,
)
from retinue.drivers import RunMode
from retinue.errors import ToolFailed
from retinue.policies import Effect, PolicyAction
from retinue.testing import ScriptedModel, tool_calls
from tests.conftest import MakeLocalRuntime
from tests.support import driver, soon
from tests.unit.policy_world import Named, Pinned

ran: list[Any] = []


@pytest.fixture(autouse=True)
def nothing_ran() -> None:
    ran.clear()
    Named.asked.clear()


@tool
async def pay(amount: int) -> str:
    """Pay."""
    ran.append(amount)
    return f"paid {amount}"


# --- plans ------------------------------------------------------------------------------------------------


class Knows(Named):
    """A policy that says what a call does."""

    def __init__(self, effect: Effect) -> None:
        super().__init__("knows")
        self.effect = effect

    def resolve_effect(self, call: CallUnderReview, ctx: PolicyContext) -> Effect:
        return self.effect


@pytest.mark.parametrize(
    ("declared", "own", "app", "denial"),
    [
        ("read", None, None, None),
        ("read", "read", "read", None),
        ("read", "write", None, "policy"),
        ("read", "write", "read", "policy"),
        ("read", "unknown", None, "approval_required"),
        ("read", None, "execute", "policy"),
        ("unknown", "read", None, "approval_required"),
        ("unknown", "read", "read", None),
        ("unknown", None, "read", None),
        ("unknown", "external", "read", "policy"),
        ("unknown", "unknown", "read", "approval_required"),
        ("write", "read", None, "policy"),
        ("write", "unknown", None, "policy"),
        ("write", "read", "read", None),
        ("write", "read", "unknown", "approval_required"),
    ],
)
async def test_in_a_plan_a_call_reads_only_where_all_who_know_say_so(
    local_runtime: MakeLocalRuntime,
    identity: Identity,
    declared: Effect,
    own: Effect | None,
    app: Effect | None,
    denial: str | None,
) -> None:
    @tool(effect=declared)
    async def act() -> str:
        ran.append("act")
        return "acted"

    model = ScriptedModel([tool_calls(("act", {})), "planned"])
    it = Agent(name="a", model=model, tools=[act], execution_policy=None if own is None else Knows(own))
    runtime = local_runtime(
        driver=agent_driver(it),
        grants=Grants(tool_ids=["act"]),
        execution_policy=None if app is None else Knows(app),
    )
    result = await soon(runtime.run("x", identity=identity, session_id="s", run_mode="plan"))
    assert result.status == "completed"
    text = model.requests[-1].messages[-1].text
    if denial is None:
        assert (text, ran) == ("acted", ["act"])
    else:
        assert (text.split(":")[0], ran) == (f"[denied] {denial}", [])


@pytest.mark.parametrize("mode", ["execute", "plan"])
async def test_an_effect_of_the_driver_is_unknown_to_a_plan_unless_a_policy_knows(
    local_runtime: MakeLocalRuntime, identity: Identity, mode: RunMode
) -> None:
    async def start(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        async def execute(arguments: dict[str, Any]) -> str:
            ran.append(arguments)
            return "done"

        try:
            return DriverOutput(text=await services.dispatch_effect("submit", {"n": 1}, execute))
        except ToolFailed as error:
            return DriverOutput(text=str(error.denial))

    for policy, planned in ((None, "approval_required"), (Knows("read"), "done"), (Knows("write"), "policy")):
        ran.clear()
        runtime = local_runtime(
            driver=driver(start), grants=Grants(tool_ids=["submit"]), execution_policy=policy
        )
        result = await soon(runtime.run("x", identity=identity, session_id="s", run_mode=mode))
        expected = planned if mode == "plan" else "done"
        assert (result.text, bool(ran)) == (expected, expected == "done")


# --- delegates --------------------------------------------------------------------------------------------


def asking(child: Agent, **options: Any) -> tuple[Agent, ScriptedModel]:
    """An agent that asks another one to pay."""
    model = ScriptedModel([tool_calls(("task", {"agent": child.name, "task": "pay"})), "done"])
    return Agent(name="boss", model=model, subagents=[child], **options), model


def payer(**options: Any) -> Agent:
    return Agent(
        name="payer",
        model=ScriptedModel([tool_calls(("pay", {"amount": 2})), "paid"]),
        tools=[pay],
        **options,
    )


BOTH = Grants(tool_ids=["task", "pay"])


@pytest.mark.parametrize(
    ("boss", "own", "pays"),
    [("deny", None, False), ("deny", "allow", False), ("allow", "deny", False), ("allow", "allow", True)],
)
async def test_c164_whom_an_agent_asks_is_bound_by_the_policy_of_that_agent(
    local_runtime: MakeLocalRuntime,
    identity: Identity,
    boss: PolicyAction,
    own: PolicyAction | None,
    pays: bool,
) -> None:
    class OnlyPay(Named):
        def decide(self, call: CallUnderReview, ctx: PolicyContext) -> Decision:
            return super().decide(call, ctx) if call.tool_name == "pay" else Decision(action="allow")

    child = payer(execution_policy=None if own is None else OnlyPay("own", own))
    it, _ = asking(child, execution_policy=OnlyPay("boss", boss))
    runtime = local_runtime(driver=agent_driver(it), grants=BOTH)
    result = await soon(runtime.run("x", identity=identity, session_id="s"))
    assert (result.status, bool(ran)) == ("completed", pays)
    asked = [name for name, _, _ in Named.asked]
    assert asked == (["boss"] if boss == "deny" else ["boss", "own"])  # each once


@pytest.mark.parametrize("where", ["boss", "child", "both"])
async def test_the_apps_policy_is_asked_once_at_the_root_whoever_else_has_it(
    local_runtime: MakeLocalRuntime, identity: Identity, where: str
) -> None:
    policy = Pinned("app")
    child = payer(execution_policy=None if where == "boss" else policy)
    it, _ = asking(child, execution_policy=None if where == "child" else policy)
    runtime = local_runtime(driver=agent_driver(it), grants=BOTH, execution_policy=policy)
    result = await soon(runtime.run("x", identity=identity, session_id="s"))
    assert (result.status, ran) == ("completed", [2])
    assert Named.asked == [("app", "task", ""), ("app", "pay", "payer")]


async def test_a_delegate_that_a_driver_starts_has_the_apps_policy_once(
    local_runtime: MakeLocalRuntime, identity: Identity
) -> None:
    policy = Pinned("app")
    nested, _ = asking(payer(execution_policy=policy), execution_policy=policy)

    async def start(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        return await (await services.delegate(nested, "x")).result()

    runtime = local_runtime(driver=driver(start), grants=BOTH, execution_policy=policy)
    result = await soon(runtime.run("x", identity=identity, session_id="s"))
    assert (result.status, ran) == ("completed", [2])
    assert Named.asked == [("app", "task", "boss"), ("app", "pay", "boss/payer")]
