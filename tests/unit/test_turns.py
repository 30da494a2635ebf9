"""Turns of one run: completion policies, revisions, follow-ups, and what is committed of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from retinue import (
    Budgets,
    CompletionCandidate,
    CompletionDecision,
    DriverCapabilities,
    DriverOutput,
    ExecutionServices,
    Grants,
    Identity,
    ModelBinding,
    RunRequest,
    tool,
)
from retinue.errors import InputError, ValidationFailed
from retinue.events import Completion
from retinue.messages import ToolCall, assistant, user
from retinue.results import Reason
from tests.conftest import MakeLocalRuntime
from tests.support import (
    FunctionDriver,
    all_events,
    answering,
    code_of,
    driver,
    flag,
    nothing_is_left,
    soon,
    spent,
    user_text,
    why,
)


@driver
async def echo(request: RunRequest, services: ExecutionServices) -> DriverOutput:
    services.append([user(request.input)])
    return DriverOutput(text=user_text(request.input))


class Policy:
    """Gives its decisions in order, and keeps what it was asked."""

    def __init__(self, *decisions: CompletionDecision | object) -> None:
        self.decisions = list(decisions)
        self.candidates: list[CompletionCandidate] = []

    async def evaluate(
        self, candidate: CompletionCandidate, services: ExecutionServices
    ) -> CompletionDecision:
        self.candidates.append(candidate)
        return self.decisions.pop(0)  # type: ignore[return-value]


ACCEPT = CompletionDecision(action="accept", reason="good")


def revise(instruction: str) -> CompletionDecision:
    return CompletionDecision(action="revise", reason="not yet", instruction=instruction)


async def test_c17_a_stop_is_a_normal_commit(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    policy = Policy(CompletionDecision(action="stop", reason="enough"))
    runtime = local_runtime(driver=echo, completion_policy=policy)
    result = await soon(runtime.run("x", identity=identity, session_id=session_id))
    assert (result.status, result.reason, result.text) == ("stopped", Reason("stop", "enough"), "x")
    snapshot = await runtime.sessions.read(identity, session_id)
    assert (snapshot.revision, snapshot.replayable) == (1, True)


async def test_a_revision_starts_the_driver_again_with_the_instruction(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    policy = Policy(revise("shorter"), ACCEPT)
    runtime = local_runtime(driver=echo, completion_policy=policy, budgets=Budgets(max_revisions=1))
    handle = runtime.start("x", identity=identity, session_id=session_id)
    result = await soon(handle.result())
    assert (result.status, result.text) == ("completed", "shorter")
    assert [(each.text, each.revision) for each in policy.candidates] == [("x", 0), ("shorter", 1)]
    payloads = [event.payload for event in await all_events(handle)]
    decided = [payload for payload in payloads if isinstance(payload, Completion)]
    assert decided == [Completion("revise", "not yet"), Completion("accept", "good")]
    snapshot = await runtime.sessions.read(identity, session_id)
    assert [message.text for message in snapshot.history] == ["x", "shorter"]
    assert snapshot.revision == 1
    await nothing_is_left(runtime, handle)


async def test_without_a_budget_of_revisions_the_draft_is_kept(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    runtime = local_runtime(driver=echo, completion_policy=Policy(revise("shorter")))
    result = await soon(runtime.run("draft", identity=identity, session_id=session_id))
    assert (result.status, code_of(result), result.text) == ("stopped", "revision_limit", "draft")
    assert (await runtime.sessions.read(identity, session_id)).replayable is True


async def test_await_input_hands_back(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    policy = Policy(CompletionDecision(action="await_input", reason="which one?"))
    runtime = local_runtime(driver=echo, completion_policy=policy)
    result = await soon(runtime.run("x", identity=identity, session_id=session_id))
    assert (result.status, code_of(result), why(result)) == ("awaiting_input", "await_input", "which one?")


async def test_a_policy_sees_only_turns_that_completed(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    policy = Policy()

    @driver
    async def stops(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        return DriverOutput(text="", status="stopped", reason=Reason("stop", "by itself"))

    runtime = local_runtime(driver=stops, completion_policy=policy)
    assert (await soon(runtime.run("x", identity=identity, session_id=session_id))).status == "stopped"
    assert policy.candidates == []


@pytest.mark.parametrize("decision", ["accept", None, {"action": "accept"}])
async def test_a_policy_that_decides_nothing_fails_the_run(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str, decision: object
) -> None:
    runtime = local_runtime(driver=echo, completion_policy=Policy(decision))
    result = await soon(runtime.run("x", identity=identity, session_id=session_id))
    assert (result.status, code_of(result)) == ("failed", "execution_failed")
    assert "completion policy" in why(result)


async def test_a_policy_that_exits_ends_its_run_and_nothing_else(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    class Exits:
        async def evaluate(
            self, candidate: CompletionCandidate, services: ExecutionServices
        ) -> CompletionDecision:
            raise SystemExit(3)

    runtime = local_runtime(driver=echo, completion_policy=Exits())
    for number in range(2):  # the loop of all drivers goes on
        result = await soon(runtime.run("x", identity=identity, session_id=f"{session_id} {number}"))
        assert result.status == "failed"
        assert "SystemExit: 3" in why(result)


def test_decisions_that_cannot_be() -> None:
    for options in (
        {"action": "maybe", "reason": "no action"},
        {"action": "revise", "reason": "no instruction"},
        {"action": "accept", "reason": "good", "instruction": "for nobody"},
    ):
        with pytest.raises(ValidationFailed):
            CompletionDecision(**options)  # type: ignore[arg-type]


async def test_tools_are_denied_in_a_revision_and_in_every_turn_after_it(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    @tool
    async def touch() -> str:
        """Do something."""
        return "touched"

    denials: list[bool] = []

    async def calls(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        result = await services.dispatch(ToolCall("1", "touch", {}))
        denials.append(result.denied)
        if request.input == "x":
            flag(f"{request.run_id} runs").set()
            await flag(f"{request.run_id} go").wait()
        return DriverOutput(text="done")

    for allowed in (False, True):
        denials.clear()
        runtime = local_runtime(
            driver=FunctionDriver(calls, capabilities=DriverCapabilities(controls=("follow_up",))),
            tools=[touch],
            grants=Grants(tool_ids=["touch"]),
            budgets=Budgets(max_revisions=1),
            completion_policy=Policy(revise("again"), ACCEPT, ACCEPT),
            allow_revision_effects=allowed,
        )
        handle = runtime.start("x", identity=identity, session_id=f"{session_id} {allowed}")
        await flag(f"{handle.run_id} runs").wait()
        await handle.send("more", mode="follow_up")
        flag(f"{handle.run_id} go").set()
        assert (await soon(handle.result())).status == "completed"
        assert denials == [False, not allowed, not allowed]


async def test_steering_is_closed_while_the_policy_decides_and_open_again_in_the_revision(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    taken: list[object] = []

    async def steered(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        if request.input == "again":
            flag(f"{request.run_id} revises").set()
            await flag(f"{request.run_id} go").wait()
            taken.append(await services.take_input())
        return DriverOutput(text="done")

    @dataclass
    class Slow:
        decisions: list[CompletionDecision]

        async def evaluate(
            self, candidate: CompletionCandidate, services: ExecutionServices
        ) -> CompletionDecision:
            if candidate.revision == 0:
                flag(f"{services.request.run_id} judged").set()
                await flag(f"{services.request.run_id} decide").wait()
            return self.decisions.pop(0)

    runtime = local_runtime(
        driver=FunctionDriver(steered, capabilities=DriverCapabilities(controls=("steer",))),
        completion_policy=Slow([revise("again"), ACCEPT]),
        budgets=Budgets(max_revisions=1),
    )
    handle = runtime.start("x", identity=identity, session_id=session_id)
    await flag(f"{handle.run_id} judged").wait()
    with pytest.raises(InputError) as refused:
        await handle.send("too late", mode="steer")
    assert refused.value.code == "run_finished"
    flag(f"{handle.run_id} decide").set()
    await flag(f"{handle.run_id} revises").wait()
    await handle.send("in time", mode="steer")
    flag(f"{handle.run_id} go").set()
    assert (await soon(handle.result())).status == "completed"
    assert taken == ["in time"]


async def test_a_policy_spends_from_the_same_budget(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    class Asks:
        async def evaluate(
            self, candidate: CompletionCandidate, services: ExecutionServices
        ) -> CompletionDecision:
            answer = await services.control_model("critic", [user(candidate.text)])
            return CompletionDecision(action="accept", reason=answer.text)

    runtime = local_runtime(
        driver=echo,
        completion_policy=Asks(),
        grants=Grants(model_roles=["main", "critic"]),
        models={"critic": ModelBinding(client=answering("fine"))},
        budgets=Budgets(max_model_calls=1),
    )
    result = await soon(runtime.run("x", identity=identity, session_id=session_id))
    assert (result.status, spent(result).model_calls.used) == ("completed", 1)


async def test_c18_state_counts_over_two_runs(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    @driver
    async def counts(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        services.state["count"] = services.state.get("count", 0) + 1
        return DriverOutput(text=str(services.state["count"]))

    runtime = local_runtime(driver=counts)
    for expected in ("1", "2"):
        assert (await soon(runtime.run("x", identity=identity, session_id=session_id))).text == expected
    assert (await runtime.sessions.read(identity, session_id)).state == {"count": 2}


async def test_what_an_earlier_turn_recorded_is_history_of_the_next(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    seen: list[Sequence[str]] = []

    async def turns(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        seen.append([message.text for message in services.history])
        services.append([user(request.input)])
        if request.input == "first":
            flag(f"{request.run_id} runs").set()
            await flag(f"{request.run_id} go").wait()
        return DriverOutput(text="done")

    capabilities = DriverCapabilities(controls=("follow_up",))
    runtime = local_runtime(driver=FunctionDriver(turns, capabilities=capabilities))
    handle = runtime.start("first", identity=identity, session_id=session_id)
    await flag(f"{handle.run_id} runs").wait()
    await handle.send("second", mode="follow_up")
    await handle.send("third", mode="follow_up")
    flag(f"{handle.run_id} go").set()
    await soon(handle.result())
    assert seen == [[], ["first"], ["first", "second"]]
    assert (await runtime.sessions.read(identity, session_id)).revision == 1


async def test_a_driver_keeps_conversations_of_its_own_beside_the_history(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    @driver
    async def keeps_two(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        services.append([user(request.input)])
        call = ToolCall("1", "look", {})
        services.record_conversation([user("aside"), assistant("", [call])], execution_id="critic")
        with pytest.raises(InputError):
            services.record_conversation([user("too early")], execution_id="critic")
        services.record_conversation([user("another")], execution_id="other")
        return DriverOutput(text="done")

    runtime = local_runtime(driver=keeps_two)
    assert (await soon(runtime.run("x", identity=identity, session_id=session_id))).status == "completed"
    snapshot = await runtime.sessions.read(identity, session_id)
    assert [message.text for message in snapshot.history] == ["x"]
    assert [message.role for message in snapshot.conversations["critic"]] == ["user", "assistant", "tool"]
    assert [message.text for message in snapshot.conversations["other"]] == ["another"]


async def test_stream_is_start_and_events(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    runtime = local_runtime(driver=echo)
    seen = [event.type async for event in runtime.stream("x", identity=identity, session_id=session_id)]
    assert seen == ["run.started", "run.terminal"]
