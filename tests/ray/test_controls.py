"""Live input, overlap and conversations where sessions are actors: other handles, other processes, kills."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from retinue import DriverOutput, Identity, RunHandle, Runtime
from retinue.errors import InputError, NotFound, SessionConflict
from retinue.events import InputRequest, InputRequested
from retinue.messages import user
from tests.ray.conftest import MakeRuntime
from tests.ray.control_drivers import Asks, Steered
from tests.ray.drivers import Parent
from tests.ray.test_faults import kill, pids, until

TIMEOUT = 60


def code_of(handle: RunHandle) -> str | None:
    reason = handle.wait(TIMEOUT).reason
    return None if reason is None else reason.code


def question_of(handle: RunHandle) -> InputRequest:
    for event in handle.iter_events(types=["input.requested"]):
        assert isinstance(event.payload, InputRequested)
        return event.payload.request
    pytest.fail("the run ended without a question")


def test_c12_c138_a_run_is_steered_and_followed_up_through_another_handle(
    make_runtime: MakeRuntime, identity: Identity, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    runtime = make_runtime(driver=Steered(gate=str(gate)))
    handle = runtime.start("first", identity=identity, session_id="s")
    pids(handle, 1)
    other = runtime.attach(handle.run_id, identity=identity)
    steer = other.send_blocking("left", mode="steer")
    later = other.send_blocking("second", mode="follow_up")
    assert [(each.outcome, each.boundary) for each in (steer, later)] == [
        ("deferred", "model_call"), ("deferred", "turn"),
    ]  # fmt: skip
    rejected = runtime.start("no", identity=identity, session_id="s")
    assert code_of(rejected) == "session_conflict"
    joined = runtime.start("right", identity=identity, session_id="s", if_busy="steer")
    asyncio.run(joined.accepted())
    assert joined.run_id == handle.run_id
    gate.touch()
    assert handle.wait(TIMEOUT).text == "second"
    assert joined.wait(TIMEOUT).text == "second"
    history = asyncio.run(runtime.sessions.latest(identity, "s")).history
    assert [message.text for message in history] == ["first", "second"]
    repeated = other.send_blocking
    with pytest.raises(InputError) as refused:
        repeated("too late", mode="steer")
    assert refused.value.code == "run_finished"


def test_c118_a_question_of_a_delegate_has_one_answer(make_runtime: MakeRuntime, identity: Identity) -> None:
    runtime = make_runtime(driver=Parent(delegates=((Asks(), "Which one?"),)))
    handle = runtime.start("x", identity=identity, session_id="s")
    request = question_of(handle)
    assert request.run_id != handle.run_id  # the delegate's, which asks from another process
    until(lambda: handle.state == "awaiting_input", "the run waits")
    others = [runtime.attach(handle.run_id, identity=identity) for _ in range(4)]

    async def all_answer() -> list[object]:
        replies = (each.reply(request.id, str(number)) for number, each in enumerate(others))
        return list(await asyncio.gather(*replies, return_exceptions=True))

    outcomes = asyncio.run(all_answer())
    winners = [str(number) for number, each in enumerate(outcomes) if not isinstance(each, Exception)]
    losers = [each.code for each in outcomes if isinstance(each, InputError)]
    assert len(winners) == 1
    assert len(losers) == 3
    assert set(losers) <= {"input_already_resolved", "run_finished"}
    assert handle.wait(TIMEOUT).structured == winners


def test_a_queue_outlives_the_host_of_its_session(
    make_runtime: MakeRuntime, identity: Identity, tmp_path: Path
) -> None:
    """The run that was at work ends interrupted; those that waited are taken up in order, nobody asking."""
    gate = tmp_path / "gate"
    runtime = make_runtime(driver=Steered(gate=str(gate)))
    first = runtime.start("first", identity=identity, session_id="s")
    (pid,) = pids(first, 1).values()
    waiting = [
        runtime.start(f"later {number}", identity=identity, session_id="s", if_busy="queue")
        for number in range(3)
    ]
    for number, handle in enumerate(waiting):
        asyncio.run(handle.accepted())
        assert (handle.state, handle.queue_position) == ("queued", number + 1)
    kill(pid)
    assert code_of(first) == "interrupted"
    gate.touch()
    assert [handle.wait(TIMEOUT).text for handle in waiting] == ["later 0", "later 1", "later 2"]
    snapshot = asyncio.run(runtime.sessions.latest(identity, "s"))
    assert [message.text for message in snapshot.history] == ["first", "later 0", "later 1", "later 2"]
    assert snapshot.replayable is False


def test_c125_c127_c128_clocks_run_where_the_session_lives(
    make_runtime: MakeRuntime, identity: Identity, tmp_path: Path
) -> None:
    def ends(session_id: str, runtime: Runtime, **options: Any) -> str | None:
        handle = runtime.start("Sure?", identity=identity, session_id=session_id, **options)
        question_of(handle)
        code = code_of(handle)
        assert handle.wait(TIMEOUT).status == "cancelled"
        assert [event.type for event in handle.iter_events()].count("run.terminal") == 1
        return code

    patient = make_runtime(driver=Asks(), input_timeout=30.0)
    assert ends("deadline", patient, deadline=time.time() + 3) == "deadline_exceeded"
    assert ends("input", make_runtime(driver=Asks(), input_timeout=0.3)) == "input_timeout"
    working = make_runtime(driver=Steered(gate=str(tmp_path / "never")), active_timeout=0.5)
    assert code_of(working.start("x", identity=identity, session_id="active")) == "active_timeout"


def test_c1_c8_c104_c132_what_only_the_host_can_refuse(
    make_runtime: MakeRuntime, identity: Identity, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    runtime = make_runtime(driver=Steered(gate=str(gate)))
    late = runtime.start("x", identity=identity, session_id="s", deadline=time.time() - 1)
    assert code_of(late) == "deadline_exceeded"
    assert [event.type for event in late.iter_events()] == ["control", "run.terminal"]
    first = runtime.start("first", identity=identity, session_id="s", deadline=time.time() + 3_000_000)
    pids(first, 1)
    with pytest.raises(SessionConflict) as refused:
        asyncio.run(runtime.sessions.read(identity, "s"))
    assert refused.value.run_id == first.run_id
    urgent = runtime.start("urgent", identity=identity, session_id="s", if_busy="cancel")
    assert code_of(first) == "cancelled"
    pids(urgent, 1)
    gate.touch()
    assert urgent.wait(TIMEOUT).text == "urgent"
    queued = asyncio.run(runtime.run("last", identity=identity, session_id="s", if_busy="queue"))
    assert queued.text == "last"
    asyncio.run(runtime.sessions.import_legacy(identity, "s", [user("from before")]))
    snapshot = asyncio.run(runtime.sessions.read(identity, "s"))
    assert ([message.text for message in snapshot.history], snapshot.revision, snapshot.replayable) == (
        ["from before"], 0, False,
    )  # fmt: skip


def test_a_question_dies_with_its_host_and_says_so(make_runtime: MakeRuntime, identity: Identity) -> None:
    runtime = make_runtime(driver=Asks())
    handle = runtime.start("Sure?", identity=identity, session_id="s")
    (pid,) = pids(handle, 1).values()
    request = question_of(handle)
    kill(pid)
    with pytest.raises(InputError) as refused:
        handle.reply_blocking(request.id, "yes")
    assert refused.value.code == "run_finished"
    assert code_of(handle) == "interrupted"
    kinds = [event.type for event in handle.iter_events()]
    assert kinds[-1] == "run.terminal"
    assert "input.requested" in kinds  # what was asked stays readable


def test_forks_deletions_and_exports_go_through_the_activation(
    make_runtime: MakeRuntime, identity: Identity, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    gate.touch()
    runtime = make_runtime(driver=Steered(gate=str(gate)))

    async def work() -> tuple[DriverOutput, ...]:
        for text in ("one", "two"):
            await runtime.run(text, identity=identity, session_id="s")
        sessions = runtime.sessions
        forked = await sessions.fork(identity, "s", at=1, new_session_id="branch")
        assert (forked.messages, forked.of_revision) == (1, 2)
        await runtime.run("other two", identity=identity, session_id="branch")
        handle = await runtime.regenerate(identity=identity, session_id="s", turn=0, input="better one")
        assert (await handle.result()).text == "better one"
        listed = [each.session_id for each in await sessions.list(identity)]
        assert listed == sorted(["s", "branch", handle.session_id])
        export = await sessions.export(identity, "branch")
        assert [message.text for message in export.session.history] == ["one", "other two"]
        gate.unlink()
        running = runtime.start("held", identity=identity, session_id="s")
        await running.accepted()
        with pytest.raises(SessionConflict):
            await sessions.delete(identity, "s")
        await running.cancel()
        result = await running.result()
        assert result.status == "cancelled"
        assert await sessions.mark_replayable(identity, "s", by="ops", why="looked at it") == 4
        await sessions.delete(identity, "s")
        with pytest.raises(NotFound):
            await runtime.attach(running.run_id, identity=identity).accepted()
        gate.touch()
        again = await runtime.run("fresh", identity=identity, session_id="s")
        assert (await sessions.latest(identity, "s")).revision == 1
        assert await sessions.delete_user(identity) == listed
        assert list(await sessions.list(identity)) == []
        return (again,)  # type: ignore[return-value]

    asyncio.run(work())
