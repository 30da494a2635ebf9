"""Questions, answers, steers and follow-ups through the front door (contract section 6)."""

from __future__ import annotations

import asyncio
import time

import pytest

from retinue import (
    Agent,
    DriverCapabilities,
    DriverOutput,
    ExecutionServices,
    Grants,
    Identity,
    Receipt,
    RunHandle,
    RunRequest,
    Runtime,
    agent_driver,
    request_input_tool,
)
from retinue.errors import InputError, RetinueError, Unsupported
from retinue.events import InputApplied, InputReceived, InputRequest
from retinue.results import Reason
from retinue.testing import ScriptedModel
from retinue.testing.scripted import tool_calls
from tests.conftest import MakeLocalRuntime
from tests.support import (
    FunctionDriver,
    Start,
    all_events,
    answering,
    code_of,
    driver,
    event_of,
    flag,
    nothing_is_left,
    question_of,
    soon,
    types,
    user_text,
)

BOTH = DriverCapabilities(controls=("steer", "follow_up"))


def steerable(function: Start) -> FunctionDriver:
    """Decorator: a driver that takes steers and follow-ups."""
    return FunctionDriver(function, capabilities=BOTH)


@driver
async def asks(request: RunRequest, services: ExecutionServices) -> DriverOutput:
    """Asks what its input says, once for each line, and gives the last answer."""
    answer = ""
    for question in user_text(request.input).splitlines():
        reply = await services.request_input(question)
        answer = user_text(reply.input)
    return DriverOutput(text=answer)


def waits_with(handle: RunHandle) -> InputRequest | None:
    """The question that the handle knows of."""
    return handle.pending_input


async def refused(work: object) -> str:
    with pytest.raises(InputError) as error:
        await soon(work)  # type: ignore[arg-type]
    return error.value.code


@pytest.fixture
def asking(local_runtime: MakeLocalRuntime) -> Runtime:
    return local_runtime(driver=asks)


async def test_a_question_is_asked_answered_and_the_run_goes_on(
    asking: Runtime, identity: Identity, session_id: str
) -> None:
    handle = asking.start("Sure?", identity=identity, session_id=session_id)
    request = await question_of(handle)
    assert handle.state == "awaiting_input"
    assert handle.pending_input == request
    receipt = await handle.reply(request.id, "yes")
    assert (receipt.action, receipt.outcome, receipt.boundary) == ("reply", "delivered", "question")
    result = await soon(handle.result())
    assert (result.status, result.text, waits_with(handle)) == ("completed", "yes", None)
    assert types(await all_events(handle)) == [
        "run.started", "input.requested", "input.resolved", "run.resumed", "run.terminal",
    ]  # fmt: skip
    await nothing_is_left(asking, handle)


async def test_c117_an_answer_to_another_question_is_a_mismatch(
    asking: Runtime, identity: Identity, session_id: str
) -> None:
    handle = asking.start("Sure?", identity=identity, session_id=session_id)
    request = await question_of(handle)
    assert await refused(handle.reply(f"{handle.run_id}:other", "yes")) == "input_mismatch"
    assert handle.state == "awaiting_input"
    await handle.reply(request.id, "yes")
    assert (await soon(handle.result())).text == "yes"


async def test_c118_of_two_answers_one_wins(asking: Runtime, identity: Identity, session_id: str) -> None:
    handle = asking.start("first?\nsecond?", identity=identity, session_id=session_id)
    request = await question_of(handle)
    other = asking.attach(handle.run_id, identity=identity)
    answers = await asyncio.gather(
        handle.reply(request.id, "yes"), other.reply(request.id, "no"), return_exceptions=True
    )
    (won,) = [one for one in answers if isinstance(one, Receipt)]
    (lost,) = [one for one in answers if isinstance(one, InputError)]
    assert lost.code == "input_already_resolved"
    second = await question_of(handle, after=won.status.cursor)
    await handle.reply(second.id, "done")
    assert (await soon(handle.result())).text == "done"


async def test_the_same_reply_again_gives_the_same_receipt(
    asking: Runtime, identity: Identity, session_id: str
) -> None:
    handle = asking.start("first?\nsecond?", identity=identity, session_id=session_id)
    request = await question_of(handle)
    for _ in range(2):
        receipt = await handle.reply(request.id, "yes", reply_id="mine")
        assert (receipt.id, receipt.outcome) == (request.id, "delivered")
    assert await refused(handle.reply(request.id, "yes", reply_id="another")) == "input_already_resolved"
    await handle.cancel()
    await soon(handle.result())


async def test_a_cancelled_run_applies_no_steer(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    @steerable
    async def clings(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        flag(f"{request.run_id} runs").set()
        try:
            await flag("never").wait()
        except asyncio.CancelledError:
            await services.take_input()
        return DriverOutput(text="unreachable")

    handle = local_runtime(driver=clings).start("x", identity=identity, session_id=session_id)
    await flag(f"{handle.run_id} runs").wait()
    await handle.send("left", mode="steer")
    await handle.cancel()
    assert (await soon(handle.result())).status == "cancelled"
    assert "input.applied" not in types(await all_events(handle))


async def test_c121_a_stale_answer_does_not_answer_the_second_question(
    asking: Runtime, identity: Identity, session_id: str
) -> None:
    handle = asking.start("first?\nsecond?", identity=identity, session_id=session_id)
    first = await question_of(handle)
    resolved = await handle.reply(first.id, "one")
    second = await question_of(handle, after=resolved.status.cursor)
    assert await refused(handle.reply(first.id, "stale")) == "input_already_resolved"
    assert handle.state == "awaiting_input"
    await handle.reply(second.id, "second")
    assert (await soon(handle.result())).text == "second"


async def test_c122_after_the_end_nothing_is_taken(
    asking: Runtime, identity: Identity, session_id: str
) -> None:
    handle = asking.start("Sure?", identity=identity, session_id=session_id)
    request = await question_of(handle)
    await handle.reply(request.id, "yes")
    await soon(handle.result())
    assert await refused(handle.reply(request.id, "again")) == "run_finished"
    assert await refused(handle.send("more", mode="follow_up")) == "run_finished"


BAD_QUESTIONS = [
    {"question": "  "},
    {"question": "?", "choices": ["x"] * 101},
    {"question": "?", "choices": [""]},
    {"question": "?", "choices": []},
    {"question": "?", "timeout": 0},
    {"question": "?", "timeout": -1},
    {"question": "?", "timeout": float("nan")},
    {"question": "?" * 32_768},
]


async def test_c124_questions_that_cannot_be_asked(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    codes = []

    @driver
    async def asks_badly(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        for options in BAD_QUESTIONS:
            try:
                await services.request_input(**options)  # type: ignore[arg-type]
            except InputError as error:
                codes.append(error.code)
        with pytest.raises(TypeError):
            await services.request_input("?", colour="red")  # type: ignore[call-arg]
        reply = await services.request_input("?", choices=[f"choice {number}" for number in range(100)])
        return DriverOutput(text=user_text(reply.input))

    handle = local_runtime(driver=asks_badly).start("x", identity=identity, session_id=session_id)
    request = await question_of(handle)
    assert request.choices is not None
    assert len(request.choices) == 100
    await handle.reply(request.id, "fine")
    assert (await soon(handle.result())).text == "fine"
    assert codes == ["invalid_input"] * len(BAD_QUESTIONS)


async def test_c125_waiting_is_not_working(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    @driver
    async def works_and_asks(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        await services.request_input("?")
        flag(f"{request.run_id} goes on").set()
        await flag("never").wait()
        return DriverOutput(text="unreachable")

    runtime = local_runtime(driver=works_and_asks, active_timeout=0.3)
    handle = runtime.start("x", identity=identity, session_id=session_id)
    request = await question_of(handle)
    await asyncio.sleep(0.6)  # longer than the run may work
    assert handle.state == "awaiting_input"
    await handle.reply(request.id, "on")
    await flag(f"{handle.run_id} goes on").wait()
    result = await soon(handle.result())
    assert (result.status, code_of(result)) == ("cancelled", "active_timeout")
    await nothing_is_left(runtime, handle)


@pytest.mark.parametrize(
    ("options", "deadline_in", "cancels", "code"),
    [
        ({"input_timeout": 0.1}, None, False, "input_timeout"),
        ({"input_timeout": 5.0}, 0.2, False, "deadline_exceeded"),
        ({"input_timeout": 5.0}, None, True, "cancelled"),
    ],
)
async def test_c127_a_wait_ends_in_one_of_three_ways(
    local_runtime: MakeLocalRuntime,
    identity: Identity,
    session_id: str,
    options: dict[str, float],
    deadline_in: float | None,
    cancels: bool,
    code: str,
) -> None:
    runtime = local_runtime(driver=asks, **options)
    deadline = None if deadline_in is None else time.time() + deadline_in
    handle = runtime.start("Sure?", identity=identity, session_id=session_id, deadline=deadline)
    request = await question_of(handle)
    if cancels:
        await handle.cancel("changed my mind")
    result = await soon(handle.result())
    assert (result.status, code_of(result)) == ("cancelled", code)
    assert await refused(handle.reply(request.id, "late")) == "run_finished"
    assert types(await all_events(handle)).count("run.terminal") == 1
    await nothing_is_left(runtime, handle)


async def test_c128_the_questions_own_limit_counts(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    @driver
    async def in_a_hurry(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        await services.request_input("?", timeout=0.02)
        return DriverOutput(text="unreachable")

    runtime = local_runtime(driver=in_a_hurry, input_timeout=10.0)
    handle = runtime.start("x", identity=identity, session_id=session_id)
    assert code_of(await soon(handle.result())) == "input_timeout"


async def test_c131_cancelling_an_agent_that_asks_leaves_the_session_free(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    model = ScriptedModel([tool_calls(("request_input", {"question": "Which one?"})), "unreachable"])
    agent = Agent(name="assistant", model=model, tools=[request_input_tool()])
    runtime = local_runtime(driver=agent_driver(agent), grants=Grants(tool_ids=["request_input"]))
    handle = runtime.start("x", identity=identity, session_id=session_id)
    await question_of(handle)
    await handle.cancel()
    result = await soon(handle.result())
    assert result.status == "cancelled"
    assert len(model.requests) == 1
    assert types(await all_events(handle)).count("run.terminal") == 1
    await runtime.sessions.read(identity, session_id)


async def test_an_agent_gets_the_answer_as_json_and_goes_on(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    model = ScriptedModel(
        [tool_calls(("request_input", {"question": "Which?", "choices": ["a", "b"]})), "took b"]
    )
    agent = Agent(name="assistant", model=model, tools=[request_input_tool()])
    runtime = local_runtime(driver=agent_driver(agent), grants=Grants(tool_ids=["request_input"]))
    handle = runtime.start("x", identity=identity, session_id=session_id)
    request = await question_of(handle)
    assert request.choices == ["a", "b"]
    await handle.reply(request.id, "b")
    assert (await soon(handle.result())).text == "took b"
    assert model.requests[1].messages[-1].text == '"b"'


async def test_c132_a_clock_of_no_seconds_is_refused_at_start(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    runtime = local_runtime(driver=asks, active_timeout=0)
    with pytest.raises(InputError) as error:
        runtime.start("x", identity=identity, session_id=session_id)
    assert error.value.code == "invalid_input"


async def test_no_model_call_starts_while_a_question_waits(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    model = answering("never asked")

    @driver
    async def asks_both(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        question = asyncio.ensure_future(services.request_input("?"))
        await flag(f"{request.run_id} asked").wait()
        try:
            await services.model(model, [])
        except RetinueError as error:
            code = error.code
        else:
            code = "none"
        await question
        return DriverOutput(text=code)

    handle = local_runtime(driver=asks_both).start("x", identity=identity, session_id=session_id)
    request = await question_of(handle)
    flag(f"{handle.run_id} asked").set()
    await asyncio.sleep(0.05)
    await handle.reply(request.id, "yes")
    assert (await soon(handle.result())).text == "input_pending"
    assert model.requests == []


async def test_a_question_given_up_by_its_asker_is_withdrawn(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    @driver
    async def impatient(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        try:
            async with asyncio.timeout(0.05):
                await services.request_input("first?")
        except TimeoutError:
            reply = await services.request_input("second?")
            return DriverOutput(text=user_text(reply.input))
        return DriverOutput(text="answered in time")

    handle = local_runtime(driver=impatient).start("x", identity=identity, session_id=session_id)
    resumed = await event_of(handle, "run.resumed")
    second = await question_of(handle, after=resumed.sequence)
    assert second.question == "second?"
    await handle.reply(second.id, "two")
    assert (await soon(handle.result())).text == "two"


async def test_c138_a_steer_and_a_follow_up_reach_a_driver_of_ones_own(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    seen: list[object] = []

    @steerable
    async def two_turns(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        seen.append(request.input)
        if request.input == "first":
            flag(f"{request.run_id} runs").set()
            await flag(f"{request.run_id} go").wait()
        seen.append(await services.take_input())
        return DriverOutput(text=str(request.input))

    handle = local_runtime(driver=two_turns).start("first", identity=identity, session_id=session_id)
    await flag(f"{handle.run_id} runs").wait()
    steer = await handle.send("steer", mode="steer")
    later = await handle.send("second", mode="follow_up")
    assert [(each.outcome, each.boundary) for each in (steer, later)] == [
        ("deferred", "model_call"), ("deferred", "turn"),
    ]  # fmt: skip
    flag(f"{handle.run_id} go").set()
    result = await soon(handle.result())
    assert seen == ["first", "steer", "second", None]
    assert (result.status, result.text) == ("completed", "second")
    events = [event.payload for event in await all_events(handle)]
    received = [event.input_id for event in events if isinstance(event, InputReceived)]
    applied = [event.input_id for event in events if isinstance(event, InputApplied)]
    assert received == applied == [steer.id, later.id]


async def test_a_repeated_send_is_one_input_and_tells_where_it_is(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    seen: list[object] = []

    @steerable
    async def takes(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        flag(f"{request.run_id} runs").set()
        await flag(f"{request.run_id} go").wait()
        while (content := await services.take_input()) is not None:
            seen.append(content)
        flag(f"{request.run_id} took").set()
        await flag(f"{request.run_id} end").wait()
        return DriverOutput(text="done")

    handle = local_runtime(driver=takes).start("x", identity=identity, session_id=session_id)
    await flag(f"{handle.run_id} runs").wait()
    for _ in range(3):
        assert (await handle.send("once", mode="steer", input_id="mine")).outcome == "deferred"
    flag(f"{handle.run_id} go").set()
    await flag(f"{handle.run_id} took").wait()
    assert (await handle.send("once", mode="steer", input_id="mine")).outcome == "delivered"
    flag(f"{handle.run_id} end").set()
    await soon(handle.result())
    assert seen == ["once"]


async def test_c141_a_turn_that_did_not_complete_takes_no_follow_up(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    turns: list[object] = []

    @steerable
    async def fails_politely(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        turns.append(request.input)
        flag(f"{request.run_id} runs").set()
        await flag(f"{request.run_id} go").wait()
        return DriverOutput(text="no", status="failed", reason=Reason("execution_failed", "as asked"))

    handle = local_runtime(driver=fails_politely).start("first", identity=identity, session_id=session_id)
    await flag(f"{handle.run_id} runs").wait()
    await handle.send("second", mode="follow_up")
    flag(f"{handle.run_id} go").set()
    assert (await soon(handle.result())).status == "failed"
    assert turns == ["first"]
    assert "input.applied" not in types(await all_events(handle))


async def test_a_driver_without_controls_refuses_input_by_name(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    @driver
    async def held(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        flag(f"{request.run_id} runs").set()
        await flag(f"{request.run_id} go").wait()
        return DriverOutput(text="done")

    handle: RunHandle = local_runtime(driver=held).start("x", identity=identity, session_id=session_id)
    await flag(f"{handle.run_id} runs").wait()
    for mode in ("steer", "follow_up"):
        with pytest.raises(Unsupported) as error:
            await handle.send("x", mode=mode)
        assert error.value.operation == mode
    flag(f"{handle.run_id} go").set()
    await soon(handle.result())
