"""Step controllers and context policies, through whole runs."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from retinue import (
    Agent,
    Budgets,
    Conversation,
    DriverOutput,
    ExecutionServices,
    Grants,
    Identity,
    Message,
    ModelBinding,
    ModelRequest,
    ModelResponse,
    PolicyContext,
    Projection,
    Provenance,
    RunRequest,
    RunResult,
    Step,
    StepOverrides,
    ToolCall,
    Usage,
    agent_driver,
    tool,
)
from retinue.errors import BudgetExhausted
from retinue.events import RunStarted
from retinue.messages import user
from retinue.testing import ScriptedModel, tool_calls
from tests.conftest import MakeLocalRuntime
from tests.support import Flag, FunctionModel, all_events, driver, soon

ROLES = Grants(tool_ids=["look", "other"], model_roles=["main", "judge"])
TINY = Usage(input_tokens=1, output_tokens=1)


@tool
async def look(what: str) -> str:
    """Look."""
    return f"saw {what}"


@tool
async def other(what: str) -> str:
    """Other."""
    return f"other {what}"


class Controls:
    """A controller whose answers are given."""

    def __init__(self, run: StepOverrides | None = None, *steps: StepOverrides | None) -> None:
        self.run = run
        self.steps = list(steps)
        self.seen: list[tuple[int, Sequence[str], str]] = []

    async def prepare_run(self, ctx: PolicyContext) -> StepOverrides | None:
        return self.run

    async def prepare_step(self, step: Step, ctx: PolicyContext) -> StepOverrides | None:
        self.seen.append((step.index, list(step.tools), ctx.participant))
        return self.steps.pop(0) if self.steps else None


class Projects:
    """A context policy that gives what it was made with."""

    id = "test/projects"

    def __init__(self, messages: Sequence[Message] | None, provenance: Any = ()) -> None:
        self.messages = messages
        self.provenance = provenance

    async def project(self, conversation: Conversation, ctx: PolicyContext) -> Projection:
        messages = conversation.history if self.messages is None else self.messages
        return Projection(messages=messages, provenance=self.provenance)


def code_of(result: RunResult) -> str | None:
    return None if result.reason is None else result.reason.code


# --- controllers ------------------------------------------------------------------------------------------


async def test_c191_a_required_tool_that_is_not_offered_fails_the_run(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    for controller in (None, Controls()):
        model = ScriptedModel(["never"])
        runtime = local_runtime(
            driver=agent_driver(Agent(name="a", model=model)),
            grants=Grants(tool_ids=["required"], required_tool_ids=["required"]),
            controller=controller,
        )
        result = await soon(runtime.run("x", identity=identity, session_id=session_id))
        assert result.status == "failed"
        assert "required tool" in result.reason.message
        assert model.requests == []


async def test_c192_an_option_that_no_list_allows_is_unsupported(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    cold = StepOverrides(options={"temperature": 0})
    model = ScriptedModel(["never"])
    runtime = local_runtime(
        driver=agent_driver(Agent(name="a", model=model)), controller=Controls(None, cold)
    )
    result = await soon(runtime.run("x", identity=identity, session_id=session_id))
    assert (result.status, code_of(result)) == ("failed", "unsupported")
    assert model.requests == []
    assert result.budget.model_calls.used == 0


async def test_a_controller_narrows_tools_changes_role_and_options_step_over_run(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    main, judge = ScriptedModel([tool_calls(("other", {"what": "x"})), "done"]), ScriptedModel(["judged"])
    controller = Controls(
        StepOverrides(active_tool_ids=["look"], options={"temperature": 0.5}),
        StepOverrides(model_role="judge", options={"temperature": 0.1, "max_tokens": 7}),
    )
    agent = Agent(name="a", model=ScriptedModel(), tools=[look, other])
    runtime = local_runtime(
        driver=agent_driver(agent),
        grants=ROLES,
        models={
            "main": ModelBinding(client=main, options=["temperature", "max_tokens"]),
            "judge": ModelBinding(client=judge, options=["temperature", "max_tokens"]),
        },
        controller=controller,
    )
    result = await soon(runtime.run("x", identity=identity, session_id=session_id))
    assert (result.status, result.text) == ("completed", "judged")
    (asked,) = judge.requests
    assert ([schema.name for schema in asked.tools], asked.temperature, asked.max_tokens) == (
        ["look"],
        0.1,
        7,
    )
    assert result.budget.roles["judge"].model_calls.used == 1
    assert "main" not in result.budget.roles, "what was reserved under it went back"

    again = await soon(runtime.run("y", identity=identity, session_id=session_id + "2"))
    assert again.text == "done"
    denied = [message.text for message in main.requests[-1].messages if message.role == "tool"]
    assert denied == ["[denied] grant: other was not offered with the last model call"]
    assert [index for index, _, _ in controller.seen] == [0, 0, 1]
    assert controller.seen[0][1] == ["look", "other"]


@pytest.mark.parametrize(
    ("overrides", "code", "says"),
    [
        (StepOverrides(model_role="critic"), "access_denied", "critic"),
        (StepOverrides(model_role="judge"), "unsupported", "no model bound"),
        (StepOverrides(active_tool_ids=["gone"]), "access_denied", "gone"),
        (StepOverrides(active_tool_ids=["other"]), "execution_failed", "does not offer"),
        (StepOverrides(active_tool_ids=["look", "look"]), "execution_failed", "twice"),
        ({"options": {}}, "execution_failed", "not StepOverrides"),
        (StepOverrides(options=["x"]), "execution_failed", "options="),  # type: ignore[arg-type]
    ],
)
async def test_what_a_controller_may_not_say_fails_the_run(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str, overrides: Any, code: str, says: str
) -> None:
    model = ScriptedModel(["never"])
    runtime = local_runtime(
        driver=agent_driver(Agent(name="a", model=model, tools=[look])),
        grants=ROLES,
        controller=Controls(None, overrides),
    )
    result = await soon(runtime.run("x", identity=identity, session_id=session_id))
    assert (result.status, code_of(result)) == ("failed", code)
    assert says in result.reason.message
    assert model.requests == []
    assert (result.budget.model_calls.used, result.budget.model_calls.reserved) == (0, 0)


async def test_a_controller_can_stop_before_the_run_and_before_a_step(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    stop = StepOverrides(stop="enough for today")
    for controller, started in ((Controls(stop), False), (Controls(None, None, stop), True)):
        model = ScriptedModel([tool_calls(("look", {"what": "x"})), "never"])
        runtime = local_runtime(
            driver=agent_driver(Agent(name="a", model=model, tools=[look])),
            grants=ROLES,
            controller=controller,
        )
        handle = runtime.start("x", identity=identity, session_id=session_id)
        result = await soon(handle.result())
        assert (result.status, code_of(result)) == ("stopped", "budget_exhausted")
        assert result.reason.message == "enough for today"
        assert any(isinstance(event.payload, RunStarted) for event in await all_events(handle)) is started
        assert len(model.requests) == int(started)


async def test_another_model_cannot_go_on_from_a_providers_own_data(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    signed = Message(role="assistant", content="before", extras={"signature": "s"})

    @driver
    async def asks(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        await services.model(ScriptedModel(), [user("a"), signed, user("b")])
        return DriverOutput(text="never")

    runtime = local_runtime(
        driver=asks,
        grants=ROLES,
        models={"judge": ScriptedModel(["never"])},
        controller=Controls(None, StepOverrides(model_role="judge")),
    )
    result = await soon(runtime.run("x", identity=identity, session_id=session_id))
    assert result.status == "failed"
    assert "cannot go on from" in result.reason.message


class Failing(Controls):
    async def prepare_step(self, step: Step, ctx: PolicyContext) -> StepOverrides | None:
        if step.index == 0:
            raise RuntimeError("no step")
        return None


class Refuses(Projects):
    def __init__(self) -> None:
        super().__init__(None)
        self.refused = False

    async def project(self, conversation: Conversation, ctx: PolicyContext) -> Projection:
        if not self.refused:
            self.refused = True
            raise RuntimeError("no projection")
        return await super().project(conversation, ctx)


@pytest.mark.parametrize("policies", [{"controller": Failing()}, {"context_policy": Refuses()}])
async def test_c175_a_policy_that_raises_leaves_the_call_unused_and_the_slot_usable(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str, policies: dict[str, Any]
) -> None:
    @driver
    async def asks(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        model = ScriptedModel(["a"])
        with pytest.raises(Exception, match=r"no step|no projection"):
            await services.model(model, [user("x")])
        spent = services.budget.model_calls
        answer = await services.model(model, [user("x")])
        return DriverOutput(text=answer.text, structured=[spent.used, spent.reserved])

    runtime = local_runtime(driver=asks, budgets=Budgets(max_model_calls=1), **policies)
    result = await soon(runtime.run("x", identity=identity, session_id=session_id))
    assert (result.status, result.text, result.structured) == ("completed", "a", [0, 0])
    assert result.budget.model_calls.used == 1


async def test_a_slot_is_held_while_a_policy_speaks_so_no_other_call_takes_it(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    class Slow(Controls):
        async def prepare_step(self, step: Step, ctx: PolicyContext) -> StepOverrides | None:
            if step.index == 0:
                spoke.set()
                await go.wait()
            return None

    spoke, go = asyncio.Event(), asyncio.Event()

    @driver
    async def asks(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        model = ScriptedModel(["a", "b"])
        first = services.run_owned(services.model(model, [user("x")]))
        await spoke.wait()
        with pytest.raises(BudgetExhausted):
            await services.model(model, [user("y")])
        go.set()
        return DriverOutput(text=(await first).text)

    runtime = local_runtime(driver=asks, budgets=Budgets(max_model_calls=1), controller=Slow())
    result = await soon(runtime.run("x", identity=identity, session_id=session_id))
    assert (result.status, result.text) == ("completed", "a")
    assert result.budget.model_calls.used == 1


async def test_cancelling_ends_a_controller_that_hangs(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    spoke = asyncio.Event()

    class Hangs(Controls):
        async def prepare_step(self, step: Step, ctx: PolicyContext) -> StepOverrides | None:
            loop.call_soon_threadsafe(spoke.set)
            await asyncio.Event().wait()
            return None

    loop = asyncio.get_running_loop()
    runtime = local_runtime(
        driver=agent_driver(Agent(name="a", model=ScriptedModel(["never"]))), controller=Hangs()
    )
    handle = runtime.start("x", identity=identity, session_id=session_id)
    await soon(spoke.wait())
    await handle.cancel()
    result = await soon(handle.result())
    assert result.status == "cancelled"
    assert (result.budget.model_calls.used, result.budget.model_calls.reserved) == (0, 0)


async def test_a_controller_that_answers_after_the_cancel_counts_as_cancelled(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    spoke = Flag()

    class Stubborn(Controls):
        async def prepare_step(self, step: Step, ctx: PolicyContext) -> StepOverrides | None:
            spoke.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                return StepOverrides(stop="stopped after all")
            return None

    model = ScriptedModel(["never"])
    runtime = local_runtime(driver=agent_driver(Agent(name="a", model=model)), controller=Stubborn())
    handle = runtime.start("x", identity=identity, session_id=session_id)
    await spoke.wait()
    await handle.cancel()
    result = await soon(handle.result())
    assert result.status == "cancelled"
    assert model.requests == []
    assert (result.budget.model_calls.used, result.budget.model_calls.reserved) == (0, 0)


async def test_a_controller_that_chose_a_role_for_the_run_keeps_it_with_a_providers_own_data(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    """Answers of the chosen model carry its data, and each next call is asked for under ``main`` again."""
    answers = [
        ModelResponse(
            tool_calls=(ToolCall("1", "look", {"what": "x"}),),
            finish_reason="tool_calls",
            extras={"signature": "s"},
        ),
        ModelResponse(text="done"),
    ]

    async def signed(request: ModelRequest) -> ModelResponse:
        return answers.pop(0)

    judge = FunctionModel(signed)
    runtime = local_runtime(
        driver=agent_driver(Agent(name="a", model=ScriptedModel(["never"]), tools=[look])),
        grants=ROLES,
        models={"judge": judge},
        controller=Controls(StepOverrides(model_role="judge")),
    )
    result = await soon(runtime.run("x", identity=identity, session_id=session_id))
    assert (result.status, result.text) == ("completed", "done")
    assert judge.requests[1].messages[1].extras == {"signature": "s"}


async def test_delegates_are_prepared_by_the_roots_controller_and_count_their_own_steps(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    controller = Controls()

    @driver
    async def leads(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        model = ScriptedModel(["a"])
        await services.model(model, [user("x")])
        child = await services.delegate(Agent(name="helper", model=ScriptedModel(["helped"])), "help")
        answer = await child.result()
        return DriverOutput(text=answer.text)

    runtime = local_runtime(driver=leads, controller=controller)
    result = await soon(runtime.run("x", identity=identity, session_id=session_id))
    assert (result.status, result.text) == ("completed", "helped")
    assert controller.seen == [(0, [], ""), (0, [], "helper")]


# --- context policies -------------------------------------------------------------------------------------


async def test_c194_a_projection_changes_the_request_and_not_the_history(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    model = ScriptedModel(["done"])
    runtime = local_runtime(
        driver=agent_driver(Agent(name="a", model=model)), context_policy=Projects([], provenance=[])
    )
    result = await soon(runtime.run("the question", identity=identity, session_id=session_id))
    assert result.status == "completed"
    assert list(model.requests[0].messages) == []
    stored = await soon(runtime.sessions.latest(identity, session_id))
    assert [message.text for message in stored.history] == ["the question", "done"]


@pytest.mark.parametrize("provenance", [None, "history", [{"source_id": "x"}]])
async def test_c195_without_a_list_of_provenance_the_run_fails(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str, provenance: Any
) -> None:
    model = ScriptedModel(["never"])
    runtime = local_runtime(
        driver=agent_driver(Agent(name="a", model=model)), context_policy=Projects(None, provenance)
    )
    result = await soon(runtime.run("x", identity=identity, session_id=session_id))
    assert result.status == "failed"
    assert "provenance" in result.reason.message
    assert model.requests == []


async def test_a_projection_that_breaks_a_rule_fails_the_run(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    model = ScriptedModel(["never"])
    agent = Agent(name="a", model=model, instructions="rules")
    runtime = local_runtime(driver=agent_driver(agent), context_policy=Projects([user("x")]))
    result = await soon(runtime.run("x", identity=identity, session_id=session_id))
    assert result.status == "failed"
    assert "system" in result.reason.message


async def test_a_step_may_bring_a_context_policy_of_its_own(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    model = ScriptedModel(["done"])
    shorter = StepOverrides(
        context_policy=Projects([user("shorter")], [Provenance(source_id="h", included=False)])
    )
    runtime = local_runtime(
        driver=agent_driver(Agent(name="a", model=model)),
        controller=Controls(None, shorter),
        context_policy=Projects(None, "never asked"),
    )
    result = await soon(runtime.run("long", identity=identity, session_id=session_id))
    assert result.status == "completed"
    assert [message.text for message in model.requests[0].messages] == ["shorter"]
