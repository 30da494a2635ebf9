"""What handles send: live input, answers, cancellations, and what comes back of them."""

from __future__ import annotations

import asyncio

import pytest

from retinue import (
    DriverCapabilities,
    DriverOutput,
    ExecutionServices,
    Identity,
    RunHandle,
    RunRequest,
)
from retinue.errors import InputError, NotFound, SessionConflict, Unsupported
from retinue.events import InputReceived
from retinue.storage.memory import MemoryEngine
from retinue.store import OpenRun, StoreReply
from tests.conftest import MakeLocalRuntime
from tests.support import (
    Flag,
    FunctionDriver,
    all_events,
    code_of,
    driver,
    flag,
    question_of,
    soon,
    trivial,
    types,
    user_text,
    why,
)


async def _steered(request: RunRequest, services: ExecutionServices) -> DriverOutput:
    """Collects the steers that came until it is let go."""
    flag(f"{request.run_id} runs").set()
    await flag(f"{request.run_id} go").wait()
    seen = [user_text(request.input)]
    while (taken := await services.take_input()) is not None:
        seen.append(user_text(taken))
    return DriverOutput(text=" ".join(seen))


steered = FunctionDriver(_steered, capabilities=DriverCapabilities(controls=("steer", "follow_up")))


@driver
async def asks(request: RunRequest, services: ExecutionServices) -> DriverOutput:
    answer = await services.request_input("Which?", choices=["this", "that"])
    await flag(f"{request.run_id} go").wait()
    return DriverOutput(text=user_text(answer.input))


def let_go(handle: RunHandle) -> None:
    flag(f"{handle.run_id} go").set()


async def code_from(work: object) -> str:
    with pytest.raises(InputError) as refused:
        await soon(work)  # type: ignore[arg-type]
    return refused.value.code


# --- send -------------------------------------------------------------------------------------------------


async def test_what_was_sent_is_delivered_once_and_in_order(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    handle = local_runtime(driver=steered).start("start", identity=identity, session_id=session_id)
    await flag(f"{handle.run_id} runs").wait()
    first = await handle.send("one")
    again = [await handle.send("two", input_id="mine") for _ in range(3)]
    assert (first.action, first.outcome, first.boundary) == ("steer", "deferred", "model_call")
    assert [receipt.id for receipt in again] == ["mine"] * 3
    assert handle.last_status is not None
    assert handle.last_status.cursor == again[-1].status.cursor  # a receipt is news of the run
    let_go(handle)
    assert (await soon(handle.result())).text == "start one two"
    received = [event.payload for event in await all_events(handle) if event.type == "input.received"]
    assert received == [InputReceived(first.id, "steer"), InputReceived("mine", "steer")]


async def test_sends_wait_for_the_start(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    handle = local_runtime(driver=steered).start("start", identity=identity, session_id=session_id)
    receipt = await handle.send("at once")
    assert receipt.outcome == "deferred"
    let_go(handle)
    assert (await soon(handle.result())).text == "start at once"


async def test_bad_input_is_refused_before_anything_is_sent(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    handle = local_runtime(driver=asks).start("x", identity=identity, session_id=session_id)
    request = await question_of(handle)
    for content in ("\ud800", "x" * 65_536, 7, [], [{"type": "nonsense"}]):
        assert await code_from(handle.send(content)) == "invalid_input"  # type: ignore[arg-type]
        assert await code_from(handle.reply(request.id, content)) == "invalid_input"  # type: ignore[arg-type]
    assert await code_from(handle.send("x", mode="sideways")) == "invalid_input"  # type: ignore[arg-type]
    assert await code_from(handle.send("x", input_id="")) == "invalid_input"
    assert await code_from(handle.reply("", "x")) == "invalid_input"
    assert handle.pending_input == request  # a bad answer answers nothing
    with pytest.raises(Unsupported):
        await handle.send("x", mode="replace")
    await handle.reply(request.id, "that")
    let_go(handle)
    assert (await soon(handle.result())).text == "that"


def test_blocking_twins(local_runtime: MakeLocalRuntime, identity: Identity, session_id: str) -> None:
    runtime = local_runtime(driver=steered)
    handle = runtime.start("start", identity=identity, session_id=session_id)
    assert handle.send_blocking("more", mode="steer").action == "steer"
    let_go(handle)
    assert handle.wait(10).text == "start more"
    asking = local_runtime(driver=asks).start("x", identity=identity, session_id="other")
    request = asyncio.run(question_of(asking))
    assert asking.reply_blocking(request.id, "this").boundary == "question"
    receipt = asking.cancel_blocking("enough")
    assert (receipt.action, receipt.outcome, receipt.status.state) == ("cancel", "delivered", "cancelling")
    let_go(asking)
    assert asking.wait(10).status == "cancelled"


# --- questions --------------------------------------------------------------------------------------------


async def test_a_question_shows_in_the_handle_and_is_gone_with_the_receipt(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    runtime = local_runtime(driver=asks)
    handle = runtime.start("x", identity=identity, session_id=session_id)
    request = await question_of(handle)
    other = runtime.attach(handle.run_id, identity=identity)
    await other.accepted()
    for each in (handle, other):
        assert each.state == "awaiting_input"
        assert each.pending_input == request
        assert each.pending_input is not each.pending_input  # a copy each time
    assert (request.question, list(request.choices or ())) == ("Which?", ["this", "that"])
    receipt = await other.reply(request.id, "this")
    assert (receipt.id, receipt.action, receipt.outcome) == (request.id, "reply", "delivered")
    assert (receipt.status.state, receipt.status.pending_input) == ("running", None)
    assert (handle.state, handle.pending_input) == ("running", None)
    assert await code_from(handle.reply(request.id, "that")) == "input_already_resolved"
    let_go(handle)
    assert (await soon(handle.result())).text == "this"
    assert handle.pending_input is None


# --- runs that are not there ------------------------------------------------------------------------------


async def test_c122_nothing_is_taken_where_only_the_record_is_left(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    engine = MemoryEngine()
    first = local_runtime(driver=trivial, store=engine)
    handle = first.start("x", identity=identity, session_id=session_id)
    ended = await soon(handle.result())
    await asyncio.to_thread(first.close)
    attached = local_runtime(driver=trivial, store=engine).attach(handle.run_id, identity=identity)
    assert await code_from(attached.send("more")) == "run_finished"
    assert await code_from(attached.reply(f"{handle.run_id}:x", "yes")) == "run_finished"
    receipt = await attached.cancel("late")
    assert (receipt.id, receipt.outcome, receipt.status.state) == (handle.run_id, "returned", "finished")
    assert receipt.status.cursor == ended.final_cursor
    assert (await attached.result()).status == "completed"


async def test_nothing_is_taken_by_a_run_that_was_refused(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    runtime = local_runtime(driver=steered)
    running = runtime.start("x", identity=identity, session_id=session_id)
    await running.accepted()
    refused = runtime.start("y", identity=identity, session_id=session_id)
    for work in (refused.send("more"), refused.reply("question", "yes")):
        with pytest.raises(InputError, match="its start was refused") as error:
            await soon(work)
        assert (error.value.code, error.value.run_id) == ("run_finished", refused.run_id)
    receipt = await refused.cancel()
    assert (receipt.outcome, receipt.status.state) == ("returned", "finished")
    assert refused.queue_position is None
    let_go(running)
    assert (await soon(running.result())).text == "x"


async def test_a_stranger_can_send_nothing(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    runtime = local_runtime(driver=steered)
    handle = runtime.start("x", identity=identity, session_id=session_id)
    await handle.accepted()
    stranger = runtime.attach(handle.run_id, identity=Identity(tenant_id="other", user_id="b"))
    for work in (stranger.send("more"), stranger.reply("question", "yes"), stranger.cancel()):
        with pytest.raises(NotFound):
            await soon(work)
    assert (stranger.pending_input, stranger.queue_position) == (None, None)
    let_go(handle)
    assert (await soon(handle.result())).text == "x"


async def test_a_cancel_that_overtakes_its_start_is_deferred(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    class Slow(MemoryEngine):
        def __init__(self) -> None:
            super().__init__()
            self.recording, self.go = Flag(), Flag()

        async def execute(self, operations: object) -> list[StoreReply]:
            if any(isinstance(operation, OpenRun) for operation in operations):  # type: ignore[attr-defined]
                self.recording.set()
                await self.go.wait()
            return list(await super().execute(operations))  # type: ignore[arg-type]

    engine = Slow()
    handle = local_runtime(driver=steered, store=engine).start("x", identity=identity, session_id=session_id)
    await engine.recording.wait()
    receipt = await soon(handle.cancel("changed my mind"))
    assert (receipt.id, receipt.outcome, receipt.boundary) == (handle.run_id, "deferred", "run")
    assert handle.last_status is not None
    assert handle.last_status.state == "cancelling"
    engine.go.set()
    result = await soon(handle.result())
    assert (result.status, why(result)) == ("cancelled", "changed my mind")
    late = await handle.cancel("again")
    assert (late.outcome, late.status.state) == ("returned", "finished")
    assert types(await all_events(handle)).count("control") == 1


# --- overlap ----------------------------------------------------------------------------------------------


async def test_a_handle_follows_the_run_that_took_its_input(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    runtime = local_runtime(driver=steered)
    running = runtime.start("first", identity=identity, session_id=session_id)
    await flag(f"{running.run_id} runs").wait()
    steering = runtime.start(
        "more", identity=identity, session_id=session_id, run_id="run-mine", if_busy="steer"
    )
    await steering.accepted()
    assert steering.run_id == running.run_id
    assert steering.state == "running"
    let_go(running)
    assert await soon(steering.result()) == await soon(running.result())
    assert (await steering.result()).text == "first more"
    assert await all_events(steering) == await all_events(running)
    with pytest.raises(NotFound):
        await runtime.attach("run-mine", identity=identity).accepted()
    # Where nothing runs, it is a start like any other.
    alone = runtime.start("alone", identity=identity, session_id=session_id, if_busy="steer")
    await flag(f"{alone.run_id} runs").wait()
    let_go(alone)
    assert (await soon(alone.result())).text == "alone"


async def test_a_cancel_waits_until_it_is_known_which_run_is_followed(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    runtime = local_runtime(driver=steered)
    running = runtime.start("first", identity=identity, session_id=session_id)
    await flag(f"{running.run_id} runs").wait()
    steering = runtime.start("more", identity=identity, session_id=session_id, if_busy="steer")
    receipt = await soon(steering.cancel("stop it"))
    assert (receipt.id, receipt.outcome) == (running.run_id, "delivered")
    assert (await soon(running.result())).status == "cancelled"
    refused = local_runtime(driver=asks)
    asking = refused.start("x", identity=identity, session_id="s")
    await question_of(asking)
    not_steered = refused.start("y", identity=identity, session_id="s", if_busy="steer")
    assert (await soon(not_steered.cancel())).outcome == "returned"
    assert code_of(await not_steered.result()) == "unsupported"
    await asking.cancel()
    assert (await soon(asking.result())).status == "cancelled"


async def test_queued_handles_know_their_places(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    runtime = local_runtime(driver=steered)
    first = runtime.start("first", identity=identity, session_id=session_id)
    await flag(f"{first.run_id} runs").wait()
    queued = []
    for number in range(2):
        handle = runtime.start(f"{number}", identity=identity, session_id=session_id, if_busy="queue")
        await handle.accepted()
        queued.append(handle)
    assert [(handle.state, handle.queue_position) for handle in queued] == [("queued", 1), ("queued", 2)]
    assert (first.state, first.queue_position) == ("running", None)
    receipt = await queued[0].cancel("not needed")
    assert (receipt.id, receipt.outcome) == (queued[0].run_id, "delivered")
    assert (await soon(queued[0].result())).status == "cancelled"
    assert (queued[1].state, queued[1].queue_position) == ("queued", 1)
    let_go(first)
    await flag(f"{queued[1].run_id} runs").wait()
    assert (queued[1].state, queued[1].queue_position) == ("running", None)
    let_go(queued[1])
    assert (await soon(queued[1].result())).text == "1"


async def test_if_busy_is_checked_at_once(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    runtime = local_runtime(driver=steered)
    with pytest.raises(InputError, match="reject, queue, steer, cancel") as wrong:
        runtime.start("x", identity=identity, session_id=session_id, if_busy="wait")  # type: ignore[arg-type]
    assert wrong.value.field == "if_busy"
    running = runtime.start("x", identity=identity, session_id=session_id)
    await running.accepted()
    with pytest.raises(SessionConflict) as conflict:
        await runtime.start("y", identity=identity, session_id=session_id, if_busy="reject").accepted()
    assert conflict.value.run_id == running.run_id
    let_go(running)
    assert (await soon(running.result())).text == "x"


async def test_a_handle_knows_the_end_of_a_run_that_left_memory(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    from retinue.sessions import FINISHED_RUNS

    runtime = local_runtime(driver=trivial)
    first = runtime.start("first", identity=identity, session_id=session_id)
    await first.accepted()
    for number in range(FINISHED_RUNS + 2):
        handle = runtime.start(f"{number}", identity=identity, session_id=session_id, if_busy="queue")
        await soon(handle.result())
    assert first.last_status is not None
    while first.state != "finished":
        await asyncio.sleep(0.005)
