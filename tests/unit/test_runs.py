"""A run from its start to its one result: states, events, cancellation, deadlines, what drivers may do."""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Any

import pytest

from retinue import Budgets, DriverOutput, ExecutionServices, Identity, RunRequest, Usage, clocks
from retinue.errors import InputError, RetinueError
from retinue.events import Control, Custom, RunStarted, RunTerminal
from retinue.loop import on_client_loop
from retinue.messages import user
from retinue.protocol import StartRun
from retinue.results import ArtifactReference, Reason
from retinue.storage.memory import MemoryEngine
from retinue.store import CommitSession, FinishRun, StoreOperation, StoreReply
from tests.conftest import MakeLocalRuntime
from tests.support import (
    LIMIT,
    Flag,
    HeldModel,
    all_events,
    answering,
    backend_of,
    code_of,
    driver,
    nothing_is_left,
    run_of,
    soon,
    spent,
    tasks_of_users,
    trivial,
    types,
    why,
)


class Waiting:
    """A driver that says that it runs, waits, and says how it was ended."""

    id = "waiting"
    version = 1

    def __init__(self) -> None:
        from retinue import DriverCapabilities

        self.capabilities = DriverCapabilities()
        self.runs = Flag()
        self.go = Flag()
        self.cancelled = Flag()

    async def start(self, request: RunRequest, services: ExecutionServices) -> DriverOutput:
        services.append([user(request.input)])
        self.runs.set()
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        return DriverOutput(text="done")


async def test_c101_a_trivial_run_has_two_events_with_both_labels(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    runtime = local_runtime(driver=trivial)
    handle = runtime.start(
        "x", identity=identity, session_id=session_id, parent_run_id="parent", root_run_id="root"
    )
    events = await all_events(handle)
    assert [(event.sequence, event.type) for event in events] == [(1, "run.started"), (2, "run.terminal")]
    for event in events:
        assert (event.parent_run_id, event.root_run_id) == ("parent", "root")
        assert (event.run_id, event.session_id, event.schema_version) == (handle.run_id, session_id, 1)
        assert event.attempt_id.startswith("attempt_")
    assert len({event.event_id for event in events}) == 2
    assert events[0].payload == RunStarted("test")
    assert (await handle.result()).final_cursor == 2


async def test_a_run_is_its_own_root_without_labels(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    handle = local_runtime(driver=trivial).start("x", identity=identity, session_id=session_id)
    for event in await all_events(handle):
        assert (event.parent_run_id, event.root_run_id) == (None, handle.run_id)


async def test_c102_the_terminal_event_carries_the_result_and_a_late_cancel_changes_nothing(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    @driver
    async def gives(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        return DriverOutput(
            text="x",
            structured={"a": [1, 2.5, None]},
            artifacts=[ArtifactReference("one", "text/plain")],
            usage=Usage(input_tokens=3),
        )

    runtime = local_runtime(driver=gives)
    handle = runtime.start("x", identity=identity, session_id=session_id)
    result = await handle.result()
    events = await all_events(handle)
    assert events[-1].payload == RunTerminal(result)
    assert events[-1].sequence == result.final_cursor == 2
    await handle.cancel("too late")
    await handle.cancel("again")
    assert await handle.result() == result
    assert await runtime.attach(handle.run_id, identity=identity).result() == result
    assert await all_events(handle) == events
    assert handle.state == "finished"
    assert result.usage == Usage(input_tokens=3)
    await nothing_is_left(runtime, handle)


async def test_c104_a_past_deadline_never_enters_the_driver(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    waiting = Waiting()
    runtime = local_runtime(driver=waiting)
    handle = runtime.start("x", identity=identity, session_id=session_id, deadline=time.time() - 1)
    result = await soon(handle.result())
    assert (result.status, code_of(result)) == ("cancelled", "deadline_exceeded")
    assert not waiting.runs.is_set
    assert types(await all_events(handle)) == ["control", "run.terminal"]
    # The session is as it was: not written, and still replayable.
    snapshot = await runtime.sessions.read(identity, session_id)
    assert (snapshot.revision, snapshot.replayable) == (0, True)


async def test_c104_a_deadline_far_ahead_is_no_obstacle(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    runtime = local_runtime(driver=trivial)
    deadline = time.time() + 3_000_000
    handle = runtime.start("x", identity=identity, session_id=session_id, deadline=deadline)
    assert (await soon(handle.result())).status == "completed"
    await nothing_is_left(runtime, handle)


async def test_a_deadline_cancels_what_runs(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    from datetime import UTC, datetime, timedelta

    waiting = Waiting()
    runtime = local_runtime(driver=waiting)
    deadline = datetime.now(UTC) + timedelta(seconds=0.2)
    handle = runtime.start("x", identity=identity, session_id=session_id, deadline=deadline)
    result = await soon(handle.result())
    assert (result.status, code_of(result)) == ("cancelled", "deadline_exceeded")
    await waiting.cancelled.wait()
    await nothing_is_left(runtime, handle)


async def test_a_deadline_beyond_what_one_timer_bears_is_armed_again(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clocks, "MAX_TIMER", 0.02)
    waiting = Waiting()
    deadline = time.time() + 0.2
    handle = local_runtime(driver=waiting).start(
        "x", identity=identity, session_id=session_id, deadline=deadline
    )
    result = await soon(handle.result())
    assert code_of(result) == "deadline_exceeded"
    assert time.time() >= deadline


# --- cancel -----------------------------------------------------------------------------------------------


async def test_cancel_stops_the_driver_once_and_marks_the_session(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    waiting = Waiting()
    runtime = local_runtime(driver=waiting)
    handle = runtime.start("x", identity=identity, session_id=session_id)
    await waiting.runs.wait()
    assert handle.state == "running"
    await handle.cancel("user left")
    await handle.cancel("another reason")
    result = await soon(handle.result())
    assert (result.status, result.reason) == ("cancelled", Reason("cancelled", "user left"))
    events = await all_events(handle)
    assert types(events) == ["run.started", "control", "run.terminal"]
    assert events[1].payload == Control("cancel", "user left")
    snapshot = await runtime.sessions.read(identity, session_id)
    assert ([message.text for message in snapshot.history], snapshot.replayable) == (["x"], False)
    await nothing_is_left(runtime, handle)


async def test_a_cancel_without_a_reason_has_one(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    waiting = Waiting()
    handle = local_runtime(driver=waiting).start("x", identity=identity, session_id=session_id)
    await handle.cancel()
    assert why(await soon(handle.result()))


async def test_a_cancel_that_overtakes_its_start_leaves_the_session_untouched(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    waiting = Waiting()
    runtime = local_runtime(driver=waiting)
    await runtime.sessions.read(identity, session_id)  # so that the session is resident
    (session,) = backend_of(runtime)._host._sessions.values()

    async def overtake() -> None:
        assert session.cancel("run_late", "changed my mind") is None

    await asyncio.wrap_future(on_client_loop(overtake()))
    handle = runtime.start("x", identity=identity, session_id=session_id, run_id="run_late")
    result = await soon(handle.result())
    assert (result.status, result.reason) == ("cancelled", Reason("cancelled", "changed my mind"))
    assert not waiting.runs.is_set
    snapshot = await runtime.sessions.read(identity, session_id)
    assert (snapshot.revision, snapshot.replayable) == (0, True)


@pytest.mark.parametrize("ending", ["returns", "raises"])
async def test_an_aborted_run_is_cancelled_however_its_driver_ends(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str, ending: str
) -> None:
    runs = Flag()

    @driver
    async def stubborn(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        services.append([user("x")])
        runs.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            if ending == "raises":
                raise ValueError("on the way out") from None
        with pytest.raises(asyncio.CancelledError):  # all calls fail after a cancellation
            await services.model(answering(), [user("x")])
        return DriverOutput(text="done all the same")

    runtime = local_runtime(driver=stubborn)
    handle = runtime.start("x", identity=identity, session_id=session_id)
    await runs.wait()
    await handle.cancel("stop")
    result = await soon(handle.result())
    assert (result.status, result.text, result.reason) == ("cancelled", "", Reason("cancelled", "stop"))
    assert (await runtime.sessions.read(identity, session_id)).replayable is False
    assert spent(result).model_calls.used == 0
    await nothing_is_left(runtime, handle)


async def test_a_cancelling_run_keeps_its_session_until_it_is_gone(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    runs, go = Flag(), Flag()

    @driver
    async def slow_to_leave(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        runs.set()
        try:
            await asyncio.Event().wait()
        finally:
            await go.wait()
        raise AssertionError

    runtime = local_runtime(driver=slow_to_leave)
    handle = runtime.start("x", identity=identity, session_id=session_id)
    await runs.wait()
    await handle.cancel()
    assert handle.state == "cancelling"
    refused = await soon(runtime.start("y", identity=identity, session_id=session_id).result())
    assert code_of(refused) == "session_conflict"
    go.set()
    assert (await soon(handle.result())).status == "cancelled"
    assert (await runtime.sessions.read(identity, session_id)).revision == 1


@pytest.mark.parametrize("reason", ["\ud800", "x" * 200_000])
async def test_no_reason_keeps_a_cancel_from_arriving(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str, reason: str
) -> None:
    waiting = Waiting()
    runtime = local_runtime(driver=waiting)
    handle = runtime.start("x", identity=identity, session_id=session_id)
    await waiting.runs.wait()
    await handle.cancel(reason)
    assert (await soon(handle.result())).status == "cancelled"
    await nothing_is_left(runtime, handle)


class SlowEngine(MemoryEngine):
    """A store whose writes of one kind wait until they are let go."""

    def __init__(self, kind: type[StoreOperation]) -> None:
        super().__init__()
        self._kind = kind
        self.writing = Flag()
        self.go = Flag()
        self.outcomes: list[bytes] = []

    async def execute(self, operations: Any) -> list[StoreReply]:
        replies = list(await super().execute(operations))
        for operation in operations:
            if isinstance(operation, CommitSession | FinishRun) and operation.outcome is not None:
                self.outcomes.append(operation.outcome.outcome)
            if isinstance(operation, self._kind):
                self.writing.set()
                await self.go.wait()
        return replies


@pytest.mark.parametrize("by", ["caller", "deadline"])
async def test_a_cancel_wins_even_while_the_commit_is_on_its_way(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str, by: str
) -> None:
    from retinue.events import decode_event

    @driver
    async def keeps(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        services.append([user("kept")])
        return DriverOutput(text="the answer")

    engine = SlowEngine(CommitSession)
    runtime = local_runtime(driver=keeps, store=engine)
    deadline = time.time() + 0.3 if by == "deadline" else None
    handle = runtime.start("x", identity=identity, session_id=session_id, deadline=deadline)
    await engine.writing.wait()
    if by == "caller":
        await handle.cancel("late")
    else:
        async with asyncio.timeout(LIMIT):
            async for event in handle.events(after=1):
                assert event.payload == Control("cancel", "the deadline has passed")
                break
    assert handle.state == "cancelling"
    engine.go.set()
    result = await soon(handle.result())
    code = "cancelled" if by == "caller" else "deadline_exceeded"
    assert (result.status, code_of(result), result.final_cursor) == ("cancelled", code, 3)
    events = await all_events(handle)
    assert types(events) == ["run.started", "control", "run.terminal"]
    assert events[-1].payload == RunTerminal(result)
    # What the store says last is what the handle was told, and history stays as it was committed.
    assert decode_event(engine.outcomes[-1]).payload == RunTerminal(result)
    snapshot = await runtime.sessions.read(identity, session_id)
    assert (snapshot.revision, snapshot.replayable, snapshot.history[0].text) == (1, True, "kept")
    await nothing_is_left(runtime, handle)


async def test_a_cancel_between_the_second_write_and_the_end_is_not_lost(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    from retinue.events import decode_event

    engine = SlowEngine(FinishRun)
    waiting = Waiting()
    runtime = local_runtime(driver=waiting, store=engine)
    handle = runtime.start("x", identity=identity, session_id=session_id, deadline=time.time() - 1)
    await engine.writing.wait()
    await handle.cancel("a second reason")
    engine.go.set()
    result = await soon(handle.result())
    assert (result.status, code_of(result)) == ("cancelled", "deadline_exceeded")
    assert decode_event(engine.outcomes[-1]).payload == RunTerminal(result)


async def test_a_cancel_of_a_run_that_ends_cancelled_anyway_still_moves_the_end(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    from retinue.events import decode_event

    @driver
    async def gives_up(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        return DriverOutput(text="x", status="cancelled", reason=Reason("cancelled", "by itself"))

    engine = SlowEngine(CommitSession)
    runtime = local_runtime(driver=gives_up, store=engine)
    handle = runtime.start("x", identity=identity, session_id=session_id)
    await engine.writing.wait()
    await handle.cancel("from outside")
    engine.go.set()
    result = await soon(handle.result())
    assert (result.status, result.final_cursor) == ("cancelled", 3)
    events = await all_events(handle)
    assert [event.sequence for event in events] == [1, 2, 3]
    assert decode_event(engine.outcomes[-1]) == events[-1]


async def test_the_reason_of_a_cancel_is_escaped_where_it_arrives(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    waiting = Waiting()
    runtime = local_runtime(driver=waiting)
    handle = runtime.start("x", identity=identity, session_id=session_id)
    await waiting.runs.wait()
    run = run_of(runtime, handle)

    async def cancel() -> None:
        run.cancel("\ud800")

    await asyncio.wrap_future(on_client_loop(cancel()))
    result = await soon(handle.result())
    assert (result.status, result.reason) == ("cancelled", Reason("cancelled", "\\ud800"))


# --- what drivers may do ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("output", "named"),
    [
        ("text", "returned str"),
        (None, "returned NoneType"),
        (DriverOutput(text=None), "text is NoneType"),  # type: ignore[arg-type]
        (DriverOutput(text="\ud800"), "bad output"),
        (DriverOutput(text="x", status="done"), "status 'done'"),  # type: ignore[arg-type]
        (DriverOutput(text="x", structured=object()), "bad output"),
        (DriverOutput(text="x", usage={"input_tokens": "many"}), "bad output"),  # type: ignore[arg-type]
        (DriverOutput(text="x", usage=Usage(input_tokens=-1)), "usage.input_tokens"),
        (DriverOutput(text="x", reason="because"), "bad output"),  # type: ignore[arg-type]
        (DriverOutput(text="x", reason=Reason(5)), "bad output"),  # type: ignore[arg-type]
        (DriverOutput(text="x", artifacts=[5]), "bad output"),  # type: ignore[list-item]
        (DriverOutput(text="x", history=[user("kept"), "no message"]), "broken"),  # type: ignore[list-item]
    ],
)
async def test_a_bad_output_fails_the_run_and_keeps_what_was_recorded(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str, output: Any, named: str
) -> None:
    @driver
    async def wrong(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        services.append([user("kept")])
        return output  # type: ignore[no-any-return]

    runtime = local_runtime(driver=wrong)
    handle = runtime.start("x", identity=identity, session_id=session_id)
    result = await soon(handle.result())
    assert (result.status, code_of(result)) == ("failed", "execution_failed")
    assert named in why(result)
    snapshot = await runtime.sessions.read(identity, session_id)
    assert ([message.text for message in snapshot.history], snapshot.replayable) == (["kept"], False)
    await nothing_is_left(runtime, handle)


class NotAnException(BaseException):
    pass


@pytest.mark.parametrize(
    "error",
    [
        SystemExit(3),
        KeyboardInterrupt(),
        NotAnException("odd"),
        asyncio.CancelledError("by itself"),
        RecursionError("deep"),
        ExceptionGroup("many", [ValueError("first"), ValueError("second")]),
        RetinueError("with \ud800 inside"),
        RetinueError("with data", what=object()),
        ValueError("\ud800"),
    ],
)
async def test_whatever_a_driver_raises_ends_its_run_and_nobody_elses(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str, error: BaseException
) -> None:
    @driver
    async def raises(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        if request.input == "raise":
            services.append([user("kept")])
            raise error
        await services.model(answering(), [user("x")])
        return DriverOutput(text="fine")

    runtime = local_runtime(driver=raises)
    handle = runtime.start("raise", identity=identity, session_id=session_id)
    result = await soon(handle.result())
    assert result.status == "failed"
    assert why(result).encode()
    assert (await runtime.sessions.read(identity, session_id)).replayable is False
    await nothing_is_left(runtime, handle)
    assert (await soon(runtime.run("x", identity=identity, session_id=session_id))).text == "fine"


async def test_a_driver_that_ends_the_interpreter_ends_its_run_only(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    @driver
    async def leaves(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        async def leave() -> None:
            sys.exit("bye")

        await services.run_owned(leave())
        raise AssertionError

    runtime = local_runtime(driver=leaves)
    result = await soon(runtime.run("x", identity=identity, session_id=session_id))
    assert (result.status, code_of(result)) == ("failed", "execution_failed")
    assert "SystemExit" in why(result)
    assert await tasks_of_users(runtime) == []


async def test_the_code_of_an_error_becomes_the_reason(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    @driver
    async def raises(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        if request.input == "group":
            async with asyncio.TaskGroup() as group:
                group.create_task(services.model(answering(), [user("x")]))
                group.create_task(services.model(answering(), [user("x")]))
        raise InputError("already", code="input_already_resolved")

    runtime = local_runtime(driver=raises, budgets=Budgets(max_model_calls=1))
    result = await runtime.run("x", identity=identity, session_id=session_id)
    assert (result.status, result.reason) == ("failed", Reason("input_already_resolved", "already"))
    # A refusal inside a task group is still a refusal.
    result = await runtime.run("group", identity=identity, session_id=session_id)
    assert (result.status, code_of(result)) == ("stopped", "budget_exhausted")


# --- owned work -------------------------------------------------------------------------------------------


async def test_work_still_pending_when_the_driver_returns_is_waited_for(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    held = HeldModel(usage=Usage(input_tokens=2, output_tokens=3))
    returned = Flag()

    @driver
    async def leaves_a_call(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        services.state["pending"] = 1
        services.run_owned(services.model(held, [user("x")]))
        returned.set()
        return DriverOutput(text="early")

    runtime = local_runtime(driver=leaves_a_call)
    handle = runtime.start("x", identity=identity, session_id=session_id)
    await returned.wait()
    await held.asked.wait()
    assert handle.state == "running"
    held.go.set()
    result = await soon(handle.result())
    assert (result.status, result.text, result.usage.total_tokens) == ("completed", "early", 5)
    await nothing_is_left(runtime, handle)


async def test_a_call_in_a_task_of_the_drivers_own_is_waited_for_too(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    held = HeldModel(usage=Usage(input_tokens=2))
    kept: list[asyncio.Task[Any]] = []

    @driver
    async def forgets(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        kept.append(asyncio.ensure_future(services.model(held, [user("x")])))
        return DriverOutput(text="early")

    runtime = local_runtime(driver=forgets)
    handle = runtime.start("x", identity=identity, session_id=session_id)
    await held.asked.wait()
    held.go.set()
    result = await soon(handle.result())
    assert (result.status, result.usage.total_tokens) == ("completed", 2)
    await nothing_is_left(runtime, handle)


async def test_owned_work_that_fails_late_fails_the_run(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    @driver
    async def owes(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        async def fail_later() -> None:
            await services.model(answering(), [user("x")])
            raise ValueError("owed")

        async def fail_now() -> None:
            raise ValueError("the caller's concern")

        early = services.run_owned(fail_now())
        await asyncio.wait([early])
        early.exception()
        if request.input == "late":
            services.run_owned(fail_later())
        return DriverOutput(text="ok")

    runtime = local_runtime(driver=owes)
    assert (await runtime.run("early", identity=identity, session_id=session_id)).status == "completed"
    result = await soon(runtime.run("late", identity=identity, session_id=session_id))
    assert (result.status, why(result)) == ("failed", "owed")


async def test_a_failing_driver_takes_its_owned_work_with_it(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    held = HeldModel()

    @driver
    async def fails(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        kept = asyncio.ensure_future(services.model(held, [user("x")]))
        await held.asked.wait()
        raise ValueError(f"before {bool(kept)}")

    runtime = local_runtime(
        driver=fails, budgets=Budgets(max_tokens=100), estimate_input_tokens=lambda r, c: 10
    )
    handle = runtime.start("x", identity=identity, session_id=session_id)
    result = await soon(handle.result())
    assert (result.status, code_of(result)) == ("failed", "execution_failed")
    # The call had begun, and nobody knows what it used: its reservation is charged.
    assert (spent(result).tokens.used, spent(result).tokens.reserved) == (100, 0)
    assert spent(result).unknown_usage_calls == 1
    await nothing_is_left(runtime, handle)


async def test_services_are_refused_after_the_end(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    kept: list[ExecutionServices] = []

    @driver
    async def leaks(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        kept.append(services)
        return DriverOutput(text="ok")

    model = answering()
    runtime = local_runtime(driver=leaks)
    handle = runtime.start("x", identity=identity, session_id=session_id)
    await handle.result()

    async def use_late() -> list[str]:
        (services,) = kept
        codes = []
        for call in (
            lambda: services.model(model, [user("x")]),
            lambda: services.delegate(trivial, "x"),
        ):
            with pytest.raises(InputError) as refused:
                await call()
            codes.append(refused.value.code)
        with pytest.raises(InputError) as refused:
            services.emit(Custom("late"))
        codes.append(refused.value.code)
        with pytest.raises(InputError) as refused:
            services.append([user("late")])
        codes.append(refused.value.code)
        return codes

    late = backend_of(runtime)._workers.submit(use_late())
    assert await asyncio.wrap_future(late) == ["run_finished"] * 4
    assert model.requests == []
    assert types(await all_events(handle)) == ["run.started", "run.terminal"]
    assert list((await runtime.sessions.read(identity, session_id)).history) == []


# --- repeats ----------------------------------------------------------------------------------------------


async def test_a_repeated_start_begins_nothing_twice(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    waiting = Waiting()
    runtime = local_runtime(driver=waiting)
    options: dict[str, Any] = {"identity": identity, "session_id": session_id, "run_id": "run_once"}
    handles = [runtime.start("x", **options) for _ in range(3)]
    await asyncio.gather(*(handle.accepted() for handle in handles))
    await waiting.runs.wait()
    handles.append(runtime.start("x", **options))
    await handles[-1].accepted()
    waiting.go.set()
    results = await soon(asyncio.gather(*(handle.result() for handle in handles)))
    assert all(result == results[0] for result in results)
    assert results[0].status == "completed"
    snapshot = await runtime.sessions.read(identity, session_id)
    assert (len(snapshot.history), snapshot.revision) == (1, 1)


async def test_a_repeat_of_a_run_that_left_memory_gets_the_first_result(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    from retinue.sessions import FINISHED_RUNS

    runtime = local_runtime(driver=trivial)
    first = await runtime.run("first", identity=identity, session_id=session_id, run_id="run_first")
    for number in range(FINISHED_RUNS + 1):
        await runtime.run(f"more {number}", identity=identity, session_id=session_id)
    again = runtime.start("other input", identity=identity, session_id=session_id, run_id="run_first")
    await again.accepted()
    assert await again.result() == first
    # Also while another run has the session.
    waiting = Waiting()
    engine = MemoryEngine()
    short = local_runtime(driver=trivial, store=engine)
    first = await short.run("first", identity=identity, session_id=session_id, run_id="run_first")
    busy = local_runtime(driver=waiting, store=engine)
    running = busy.start("x", identity=identity, session_id=session_id)
    await waiting.runs.wait()
    again = busy.start("first", identity=identity, session_id=session_id, run_id="run_first")
    assert await soon(again.result()) == first
    waiting.go.set()
    assert (await soon(running.result())).status == "completed"


async def test_a_run_id_belongs_to_its_user_and_session(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    runtime = local_runtime(driver=trivial)
    mine = await runtime.run("mine", identity=identity, session_id=session_id, run_id="run_same")
    other = Identity(tenant_id="other", user_id=identity.user_id)
    theirs = await runtime.run("theirs", identity=other, session_id=session_id, run_id="run_same")
    assert (mine.text, theirs.text) == ("mine", "theirs")
    assert (await runtime.attach("run_same", identity=other).result()).text == "theirs"
    assert (await runtime.attach("run_same", identity=identity).result()).text == "mine"
    taken = runtime.start("x", identity=identity, session_id=f"{session_id}-2", run_id="run_same")
    with pytest.raises(InputError):
        await taken.accepted()


async def test_a_message_of_a_start_for_another_activation_is_refused() -> None:
    from retinue.errors import NotFound
    from retinue.host import Host
    from retinue.storage import this_process
    from retinue.workers import Workers

    workers = Workers()
    host = Host(
        holder=this_process("host", "test"), workers=workers, launcher=_NoChildren(), stores_events=False
    )
    start = StartRun(run_id="r", identity=Identity(tenant_id="a", user_id="b"), session_id="s", input="x")
    with pytest.raises(NotFound) as refused:
        await host.start("activation_of_another_host", start)
    assert refused.value.activation_id == "activation_of_another_host"
    await host.close("done")
    workers.stop()


class _NoChildren:
    async def launch(self, order: Any, tree: Any) -> None:
        raise AssertionError

    def cancel(self, child_run_id: str, reason: str) -> None:
        raise AssertionError


# --- losing the session -----------------------------------------------------------------------------------


async def test_a_fenced_run_fails_as_interrupted_and_writes_nothing(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    engine = MemoryEngine()
    waiting = Waiting()
    runtime = local_runtime(driver=waiting, store=engine)
    handle = runtime.start("x", identity=identity, session_id=session_id)
    await waiting.runs.wait()
    (session,) = backend_of(runtime)._host._sessions.values()

    async def lose() -> None:
        session.fence()

    await asyncio.wrap_future(on_client_loop(lose()))
    await waiting.cancelled.wait()
    result = await soon(handle.result())
    assert (result.status, code_of(result)) == ("failed", "interrupted")
    record = await runtime_store(runtime).read_run(identity, handle.run_id)
    assert record is not None
    assert record.outcome is None
    assert run_of(runtime, handle).fenced


async def test_a_commit_that_is_refused_as_fenced_is_not_reported_done(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    engine = MemoryEngine()
    waiting = Waiting()
    runtime = local_runtime(driver=waiting, store=engine)
    handle = runtime.start("x", identity=identity, session_id=session_id)
    await waiting.runs.wait()
    await runtime_store(runtime).fence(backend_of(runtime)._host.holder.holder_id)
    waiting.go.set()
    result = await soon(handle.result())
    assert (result.status, code_of(result), result.text) == ("failed", "interrupted", "")
    # Another process ends the record and goes on.
    other = local_runtime(driver=trivial, store=engine)
    assert (await soon(other.run("next", identity=identity, session_id=session_id))).status == "completed"
    history = (await other.sessions.read(identity, session_id)).history
    assert [message.text for message in history] == ["x"]
    ended = await other.attach(handle.run_id, identity=identity).result()
    assert (ended.status, code_of(ended)) == ("failed", "interrupted")


def runtime_store(runtime: Any) -> Any:
    return backend_of(runtime)._store


async def test_a_refusal_of_the_store_is_the_reason_and_the_record_is_closed(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    class Refusing(MemoryEngine):
        async def execute(self, operations: Any) -> list[StoreReply]:
            if isinstance(operations[0], CommitSession):
                raise OSError("the disk says no")
            return list(await super().execute(operations))

    runtime = local_runtime(driver=trivial, store=Refusing())
    handle = runtime.start("x", identity=identity, session_id=session_id)
    result = await soon(handle.result())
    assert (result.status, result.text) == ("failed", "")
    assert "the disk says no" in why(result)
    record = await runtime_store(runtime).read_run(identity, handle.run_id)
    assert record.outcome is not None
    assert (await runtime.sessions.read(identity, session_id)).revision == 0

    @driver
    async def raises(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        raise ValueError("primary")

    runtime = local_runtime(driver=raises, store=Refusing())
    result = await soon(runtime.run("x", identity=identity, session_id=session_id))
    assert (why(result), result.cleanup_diagnostics) == (
        "primary",
        ("partial_history_commit_failed",),
    )
