"""Completion policies, control and finishing calls, critics and summaries, through whole runs."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from retinue import (
    Agent,
    Budgets,
    CompletionCandidate,
    CompletionDecision,
    Conversation,
    DriverOutput,
    ExecutionServices,
    Grants,
    Identity,
    Message,
    ModelRequest,
    ModelResponse,
    PolicyContext,
    Projection,
    RunRequest,
    RunResult,
    Step,
    StepOverrides,
    ToolCall,
    Usage,
    agent_driver,
    reflection_policy,
    summary_context_policy,
    tool,
)
from retinue.errors import BudgetExhausted, ModelFailed, SessionConflict, ValidationFailed
from retinue.events import CompactionCompleted, CompactionFailed, CompactionStarted
from retinue.messages import assistant, system, tool_result, user
from retinue.testing import ScriptedModel, reply, tool_calls
from tests.conftest import MakeLocalRuntime
from tests.support import Flag, FunctionModel, HeldModel, all_events, driver, nothing_is_left, soon

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


# --- completion, revisions, control and finishing calls ---------------------------------------------------


class Judges:
    """A completion policy with a list of decisions."""

    def __init__(self, *decisions: CompletionDecision) -> None:
        self.decisions = list(decisions)

    async def evaluate(
        self, candidate: CompletionCandidate, services: ExecutionServices
    ) -> CompletionDecision:
        return self.decisions.pop(0)


REVISE = CompletionDecision(action="revise", reason="again", instruction="once more")
ACCEPT = CompletionDecision(action="accept", reason="fine")


@pytest.mark.parametrize(("allowed", "times"), [(False, 1), (True, 2)])
async def test_c197_a_revision_runs_no_tools_unless_it_may(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str, allowed: bool, times: int
) -> None:
    ran: list[str] = []

    @tool
    async def act() -> str:
        """Act."""
        ran.append("x")
        return "acted"

    @driver
    async def acts(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        result = await services.dispatch(ToolCall("1", "act", {}), tools=[act])
        return DriverOutput(text=result.text)

    runtime = local_runtime(
        driver=acts,
        grants=Grants(tool_ids=["act"]),
        budgets=Budgets(max_revisions=1),
        completion_policy=Judges(REVISE, ACCEPT),
        allow_revision_effects=allowed,
    )
    result = await soon(runtime.run("x", identity=identity, session_id=session_id))
    assert len(ran) == times
    assert ("revision" in result.text) is not allowed


class Counts:
    """A driver, a controller, a context policy and a completion policy, each with a counter of its own."""

    id = "test/counts"

    def __init__(self) -> None:
        self._count = 0

    def _next(self) -> int:
        self._count += 1
        return self._count

    async def prepare_run(self, ctx: PolicyContext) -> None:
        self._next()

    async def prepare_step(self, step: Step, ctx: PolicyContext) -> None:
        return None

    async def project(self, conversation: Conversation, ctx: PolicyContext) -> Projection:
        self._next()
        return Projection(messages=conversation.history, provenance=[])

    async def evaluate(
        self, candidate: CompletionCandidate, services: ExecutionServices
    ) -> CompletionDecision:
        self._next()
        return ACCEPT


async def test_c198_implementations_keep_their_own_state(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    counted = {"driver": 0}

    @driver
    async def numbers(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        counted["driver"] += 1
        await services.model(ScriptedModel(["a"]), [user("x")])
        return DriverOutput(text=str(counted["driver"]))

    controller, context, completion = Counts(), Counts(), Counts()
    runtime = local_runtime(
        driver=numbers, controller=controller, context_policy=context, completion_policy=completion
    )
    texts = [(await soon(runtime.run("x", identity=identity, session_id=session_id))).text for _ in range(2)]
    assert texts == ["1", "2"]
    assert [each._count for each in (controller, context, completion)] == [2, 2, 2]


def judged(**options: Any) -> dict[str, Any]:
    return {"grants": ROLES, "models": {"judge": options.pop("judge")}, **options}


async def test_c201_a_critic_that_asks_for_tools_fails_the_run_and_is_paid(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    critic = ScriptedModel([tool_calls(("look", {"what": "x"}), usage=TINY)])

    @driver
    async def says(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        return DriverOutput(text="draft")

    runtime = local_runtime(
        driver=says,
        completion_policy=reflection_policy(model_role="judge", criteria="be right"),
        **judged(judge=critic),
    )
    result = await soon(runtime.run("x", identity=identity, session_id=session_id))
    assert (result.status, result.usage.total_tokens) == ("failed", 2)
    assert result.budget.tool_calls.used == 0


async def test_c202_a_cancel_during_a_control_call_waits_for_its_answer(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    asked, aborted, go = Flag(), Flag(), Flag()

    async def stubborn(request: ModelRequest) -> ModelResponse:
        asked.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            aborted.set()
            await go.wait()
        return ModelResponse(text="{}", usage=TINY)

    critic = FunctionModel(stubborn)

    @driver
    async def says(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        return DriverOutput(text="draft")

    runtime = local_runtime(
        driver=says,
        completion_policy=reflection_policy(model_role="judge", criteria="be right"),
        **judged(judge=critic),
    )
    handle = runtime.start("x", identity=identity, session_id=session_id)
    await asked.wait()
    await handle.cancel()
    second = runtime.start("y", identity=identity, session_id=session_id)
    with pytest.raises(SessionConflict):
        await soon(second.accepted())
    await aborted.wait()
    go.set()
    result = await soon(handle.result())
    assert (result.status, result.usage.total_tokens) == ("cancelled", 2)


@pytest.mark.parametrize(
    ("answer", "budgets", "status", "code", "calls"),
    [
        ('{"action":"accept","reason":"ok","more":1}', Budgets(), "failed", "model_failed", 1),
        ('{"action":"accept","reason":"ok"}', Budgets(max_model_calls=1), "stopped", "budget_exhausted", 0),
        (
            '{"action":"revise","reason":"no","instruction":"again"}',
            Budgets(max_revisions=0),
            "stopped",
            "revision_limit",
            1,
        ),
        ('{"action":"accept","reason":"ok","evidence":["a"]}', Budgets(), "completed", None, 1),
        ('{"action":"stop","reason":"hopeless"}', Budgets(), "stopped", "stop", 1),
    ],
)
async def test_c204_the_critics_answer_is_read_strictly(
    local_runtime: MakeLocalRuntime,
    identity: Identity,
    session_id: str,
    answer: str,
    budgets: Budgets,
    status: str,
    code: str | None,
    calls: int,
) -> None:
    critic = ScriptedModel([answer])
    runtime = local_runtime(
        driver=agent_driver(Agent(name="a", model=ScriptedModel(["draft"]))),
        budgets=budgets,
        completion_policy=reflection_policy(model_role="judge", criteria="be right"),
        **judged(judge=critic),
    )
    result = await soon(runtime.run("x", identity=identity, session_id=session_id))
    assert (result.status, code_of(result), len(critic.requests)) == (status, code, calls)
    if code == "revision_limit":
        assert result.text == "draft"
    for asked in critic.requests:
        assert asked.tools == []
        assert "be right" in asked.messages[0].text
        assert '"text":"draft"' in asked.messages[1].text


async def test_a_critic_sends_the_work_back(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    critic = ScriptedModel(
        ['{"action":"revise","reason":"short","instruction":"longer"}', '{"action":"accept","reason":"ok"}']
    )
    model = ScriptedModel(["short", "a longer one"])
    runtime = local_runtime(
        driver=agent_driver(Agent(name="a", model=model)),
        budgets=Budgets(max_revisions=1),
        completion_policy=reflection_policy(model_role="judge", criteria="be right"),
        **judged(judge=critic),
    )
    result = await soon(runtime.run("x", identity=identity, session_id=session_id))
    assert (result.status, result.text) == ("completed", "a longer one")
    assert model.requests[1].messages[-1].text == "longer"


@pytest.mark.parametrize(
    "answer",
    ["", "yes", "[]", '{"action":"maybe","reason":"x"}', '{"action":"accept"}',
     '{"action":"accept","reason":" "}', '{"action":"revise","reason":"x"}',
     '{"action":"accept","reason":"x","instruction":"y"}',
     '{"action":"accept","reason":"x","evidence":"y"}', '{"action":"accept","reason":"x","evidence":[1]}'],
)  # fmt: skip
async def test_anything_but_a_decision_fails(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str, answer: str
) -> None:
    @driver
    async def says(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        return DriverOutput(text="draft")

    runtime = local_runtime(
        driver=says,
        completion_policy=reflection_policy(model_role="judge", criteria="be right"),
        **judged(judge=ScriptedModel([answer])),
    )
    result = await soon(runtime.run("x", identity=identity, session_id=session_id))
    assert (result.status, code_of(result)) == ("failed", "model_failed")


async def test_a_candidate_that_is_too_large_asks_nobody(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    critic = ScriptedModel(["never"])

    @driver
    async def says(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        return DriverOutput(text="x" * 200)

    policy = reflection_policy(model_role="judge", criteria="be right", max_input_bytes=100)
    runtime = local_runtime(driver=says, completion_policy=policy, **judged(judge=critic))
    result = await soon(runtime.run("x", identity=identity, session_id=session_id))
    assert result.status == "failed"
    assert "max_input_bytes" in result.reason.message
    assert critic.requests == []


@pytest.mark.parametrize(
    "answer",
    [tool_calls(("look", {"what": "x"}), usage=TINY), reply("cut", usage=TINY, finish_reason="length")],
)
async def test_c181_a_finishing_answer_must_be_whole_and_without_tools(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str, answer: Any
) -> None:
    @driver
    async def finishes(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        with pytest.raises(ModelFailed, match="finishing"):
            await services.finish_model("judge", [user("x")], max_tokens=5)
        return DriverOutput(text="ok")

    runtime = local_runtime(driver=finishes, **judged(judge=ScriptedModel([answer])))
    result = await soon(runtime.run("x", identity=identity, session_id=session_id))
    assert (result.status, result.usage.total_tokens) == ("completed", 2)


async def test_c182_a_finishing_candidate_is_judged_like_any_other(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    @driver
    async def finishes(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        return DriverOutput(text=(await services.finish_model("judge", [user("x")])).text)

    stop = CompletionDecision(action="stop", reason="no good")
    runtime = local_runtime(
        driver=finishes, completion_policy=Judges(stop), **judged(judge=ScriptedModel(["final"]))
    )
    result = await soon(runtime.run("x", identity=identity, session_id=session_id))
    assert (result.status, code_of(result), result.text) == ("stopped", "stop", "final")


async def test_ordinary_calls_leave_the_finishing_reserve_alone(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    @driver
    async def works(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        model = ScriptedModel([reply("a", usage=TINY)] * 5)
        await services.model(model, [user("x")], max_tokens=10)
        for _ in range(3):
            with pytest.raises(BudgetExhausted, match="kept back"):
                await services.model(model, [user("x")], max_tokens=10)
            with pytest.raises(BudgetExhausted, match="kept back"):
                await services.control_model("judge", [user("x")], max_tokens=10)
        calls = services.budget.model_calls
        assert (calls.remaining, calls.finishing_reserved, calls.ordinary_remaining) == (1, 1, 0)
        return DriverOutput(text=(await services.finish_model("judge", [user("x")], max_tokens=10)).text)

    runtime = local_runtime(
        driver=works,
        budgets=Budgets(max_model_calls=2, finishing_model_calls=1),
        **judged(judge=ScriptedModel(["the end"])),
    )
    result = await soon(runtime.run("x", identity=identity, session_id=session_id))
    assert (result.status, result.text) == ("completed", "the end")
    assert (result.budget.model_calls.used, result.budget.model_calls.finishing_reserved) == (2, 0)


# --- summaries --------------------------------------------------------------------------------------------

OLD = [user("old " * 200), assistant("older answer " * 100)]
CURRENT = [user("now"), assistant("", [ToolCall("c1", "look", {"what": "x"})]), tool_result("c1", "saw x")]


def asks(messages: Sequence[Message], model: ScriptedModel) -> Any:
    @driver
    async def one_call(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        services.append([message for message in messages if message.role != "system"])
        return DriverOutput(text=(await services.model(model, messages)).text)

    return one_call


async def test_c205_old_turns_are_sent_as_a_summary(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    model, summarizer = (
        ScriptedModel([reply("done", usage=TINY)]),
        ScriptedModel([reply("in short", usage=TINY)]),
    )
    messages = [system("rules"), *OLD, *CURRENT]
    runtime = local_runtime(
        driver=asks(messages, model),
        context_policy=summary_context_policy(model_role="judge", max_context_tokens=300),
        **judged(judge=summarizer),
    )
    handle = runtime.start("x", identity=identity, session_id=session_id)
    result = await soon(handle.result())
    assert (result.status, result.usage.total_tokens) == ("completed", 4)
    assert len(summarizer.requests) == 1
    (asked,) = model.requests
    assert asked.messages[0] == system("rules")
    assert asked.messages[1] == user('{"kind":"historical_summary","trust":"source","text":"in short"}')
    assert list(asked.messages[2:]) == CURRENT
    stored = await soon(runtime.sessions.latest(identity, session_id))
    assert list(stored.history) == messages[1:]
    told = [event.payload for event in await all_events(handle)]
    begun, done = [each for each in told if isinstance(each, CompactionStarted | CompactionCompleted)]
    assert isinstance(begun, CompactionStarted)
    assert isinstance(done, CompactionCompleted)
    assert begun.compaction_id == done.compaction_id
    assert done.after_tokens <= 300 < begun.before_tokens


async def test_c207_what_fits_is_not_summarised(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    model, summarizer = ScriptedModel(["done"]), ScriptedModel(["never"])
    messages = [system("rules"), *OLD, *CURRENT]
    runtime = local_runtime(
        driver=asks(messages, model),
        context_policy=summary_context_policy(model_role="judge", max_context_tokens=5_000),
        **judged(judge=summarizer),
    )
    result = await soon(runtime.run("x", identity=identity, session_id=session_id))
    assert result.status == "completed"
    assert summarizer.requests == []
    assert list(model.requests[0].messages) == messages


async def test_c208_of_one_task_the_latest_round_stays_and_the_older_are_summarised(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    model = ScriptedModel([reply("done", usage=Usage(input_tokens=2, output_tokens=2))])
    summarizer = ScriptedModel([reply("looked once", usage=TINY)])
    opened = Message(
        role="assistant", tool_calls=(ToolCall("old", "look", {"what": "a"}),), extras={"signature": "secret"}
    )
    messages = [user("the task"), opened, tool_result("old", "long " * 400), *CURRENT[1:]]
    runtime = local_runtime(
        driver=asks(messages, model),
        context_policy=summary_context_policy(
            model_role="judge", max_context_tokens=400, grouping="tool_roundtrip"
        ),
        **judged(judge=summarizer),
    )
    handle = runtime.start("x", identity=identity, session_id=session_id)
    result = await soon(handle.result())
    assert (result.status, result.usage.total_tokens) == ("completed", 6)
    sent = list(model.requests[0].messages)
    assert user("the task") in sent
    assert sent[-2:] == CURRENT[1:]
    assert opened not in sent
    assert "secret" not in summarizer.requests[0].messages[1].text
    told = [event.payload for event in await all_events(handle)]
    ids = {each.compaction_id for each in told if isinstance(each, CompactionStarted | CompactionCompleted)}
    assert len(ids) == 1


@pytest.mark.parametrize(
    ("options", "summary", "code"),
    [
        ({"max_context_tokens": 60}, "never", "compaction_failed"),
        ({"max_context_tokens": 300, "max_input_bytes": 50}, "never", "compaction_failed"),
        ({"max_context_tokens": 300}, " ", "compaction_failed"),
        ({"max_context_tokens": 300}, "much too long " * 100, "compaction_failed"),
        ({"max_context_tokens": 300, "keep_recent_turns": 2}, "never", "compaction_failed"),
    ],
)
async def test_a_summary_that_cannot_be_made_fails_the_run_and_is_told(
    local_runtime: MakeLocalRuntime,
    identity: Identity,
    session_id: str,
    options: dict[str, Any],
    summary: str,
    code: str,
) -> None:
    model = ScriptedModel(["never"])
    runtime = local_runtime(
        driver=asks([*OLD, *CURRENT], model),
        context_policy=summary_context_policy(model_role="judge", **options),
        **judged(judge=ScriptedModel([summary])),
    )
    handle = runtime.start("x", identity=identity, session_id=session_id)
    result = await soon(handle.result())
    assert (result.status, code_of(result)) == ("failed", code)
    assert model.requests == []
    failed = [
        event.payload for event in await all_events(handle) if isinstance(event.payload, CompactionFailed)
    ]
    assert len(failed) == 1


async def test_with_one_call_left_there_is_none_for_a_summary(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    model, summarizer = ScriptedModel(["never"]), ScriptedModel(["never"])
    runtime = local_runtime(
        driver=asks([*OLD, *CURRENT], model),
        budgets=Budgets(max_model_calls=1),
        context_policy=summary_context_policy(model_role="judge", max_context_tokens=300),
        **judged(judge=summarizer),
    )
    result = await soon(runtime.run("x", identity=identity, session_id=session_id))
    assert (result.status, code_of(result)) == ("stopped", "budget_exhausted")
    assert [*model.requests, *summarizer.requests] == []


async def test_a_summary_that_is_cancelled_is_told_as_failed(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    model, summarizer = ScriptedModel(["never"]), HeldModel(usage=TINY)
    runtime = local_runtime(
        driver=asks([*OLD, *CURRENT], model),
        context_policy=summary_context_policy(model_role="judge", max_context_tokens=300),
        **judged(judge=summarizer),
    )
    handle = runtime.start("x", identity=identity, session_id=session_id)
    await summarizer.asked.wait()
    await handle.cancel()
    result = await soon(handle.result())
    assert result.status == "cancelled"
    assert model.requests == []
    told = [
        event.payload
        for event in await all_events(handle)
        if isinstance(event.payload, CompactionStarted | CompactionCompleted | CompactionFailed)
    ]
    assert [type(each) for each in told] == [CompactionStarted, CompactionFailed]
    assert told[0].compaction_id == told[1].compaction_id
    await nothing_is_left(runtime, handle)


@pytest.mark.parametrize(
    "options", [{"max_context_tokens": 0}, {"keep_recent_turns": True}, {"summary_max_tokens": 1.5},
                {"max_input_bytes": -1}, {"grouping": "week"}, {"model_role": ""}],
)  # fmt: skip
def test_a_summary_policy_checks_what_it_is_given(options: dict[str, Any]) -> None:
    with pytest.raises(ValidationFailed):
        summary_context_policy(**{"model_role": "judge", "max_context_tokens": 100, **options})
