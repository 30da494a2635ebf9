"""Processes killed with SIGKILL while runs go on: what the caller sees, and what is left."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from retinue import Budgets, Grants, Identity, RunHandle
from retinue.errors import Overloaded
from retinue.events import ChildFinished, Custom, Event, EventsLost
from retinue.store import Store
from tests.ray.conftest import MAX_RESIDENT, MakeRuntime, directory_statistics
from tests.ray.drivers import CallsTool, GivesUp, HoldsModelCall, Parent, Pids, Sleeps, Ticker

TIMEOUT = 60


def until(condition: Callable[[], Any], what: str, limit: float = 30.0) -> Any:
    """Wait for something to become true, at most ``limit`` seconds."""
    deadline = time.monotonic() + limit
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.02)
    pytest.fail(f"it did not happen in {limit} s: {what}")


def pids(handle: RunHandle, count: int) -> dict[str, int]:
    """The process ids that the run and its delegates told of, by participant."""
    found: dict[str, int] = {}
    for event in handle.iter_events():
        if isinstance(event.payload, Custom) and event.payload.name == "pid":
            found[event.participant] = event.payload.data
            if len(found) == count:
                return found
    pytest.fail(f"the run ended before {count} processes were named: {found}")


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def beats(path: Path) -> int:
    return path.read_text().count("beat") if path.exists() else 0


def stops(path: Path) -> bool:
    """Whether nothing more is written to the file."""
    before = beats(path)
    time.sleep(0.3)
    return beats(path) == before


def test_killed_child_host_loses_its_delegates_only(
    make_runtime: MakeRuntime, identity: Identity, tmp_path: Path
) -> None:
    """Those in it fail with child_lost, what they had reserved is charged, those in the other finish."""
    gate = tmp_path / "gate"
    waiting = (Pids(gate=str(gate)), "wait")
    runtime = make_runtime(
        driver=Parent(delegates=((HoldsModelCall(), "hold"), waiting, waiting, waiting)),
        budgets=Budgets(max_tokens=10_000),
        estimate_input_tokens=_estimate_of_ten,
    )
    gate.touch()
    first = runtime.start("the pool grows to its second child host", identity=identity, session_id="s")
    pids(first, 5)
    until(lambda: 2 in [pool["child_hosts"] for pool in directory_statistics()["pools"]], "a second one")
    first.cancel_blocking("it is there")
    first.wait(TIMEOUT)
    gate.unlink()

    handle = runtime.start("go", identity=identity, session_id="s")
    children = {name: pid for name, pid in pids(handle, 5).items() if name}
    victim = children["child-0"]
    survivors = [name for name, pid in children.items() if pid != victim]
    assert len(survivors) == 2  # spread evenly
    kill(victim)
    gate.touch()
    result = handle.wait(TIMEOUT)
    assert result.status == "completed"
    names = [f"child-{index}" for index in range(4)]
    assert result.structured == [str(children[name]) if name in survivors else "child_lost" for name in names]
    assert result.budget is not None
    assert (result.budget.tokens.used, result.budget.tokens.reserved) == (110, 0)
    assert result.budget.unknown_usage_calls == 1
    assert len([event for event in handle.iter_events() if event.type == "child.finished"]) == 4


def _estimate_of_ten(request: object, client: object) -> int:
    return 10


def test_killed_session_host_ends_the_run_interrupted_though_nobody_asks(
    make_runtime: MakeRuntime, identity: Identity, tmp_path: Path
) -> None:
    log = tmp_path / "beats"
    runtime = make_runtime(
        driver=Parent(delegates=((CallsTool(), str(log)),)), grants=Grants(tool_ids=["beat"])
    )
    handle = runtime.start("go", identity=identity, session_id="s")
    host = pids(handle, 1)[""]
    until(lambda: beats(log) > 3, "the delegate's tool works")
    seen = _events_so_far(handle)
    kill(host)

    # Nobody asks: only the store is looked at, until the record has its outcome.
    async def outcome() -> bool:
        client = await runtime._backend.client()
        store: Store = client.store
        record = await store.read_run(identity, handle.run_id)
        return record is not None and record.outcome is not None

    from retinue.loop import blocking, on_client_loop

    until(lambda: blocking(on_client_loop(outcome())), "the record ends")
    until(lambda: stops(log), "the delegate's tool is stopped")

    result = handle.wait(TIMEOUT)
    assert (result.status, result.reason and result.reason.code) == ("failed", "interrupted")
    assert result.budget is None  # lost with the process, and not claimed to be nothing
    events = list(handle.iter_events())
    numbers = [event.sequence for event in events]
    assert numbers == sorted(set(numbers))
    lost = events[-2].payload
    assert isinstance(lost, EventsLost)
    assert events[-1].type == "run.terminal"
    assert lost.first <= lost.last == events[-2].sequence - 1
    kept = {event.sequence: event for event in events}
    for event in seen:
        assert kept.get(event.sequence) == event or lost.first <= event.sequence <= lost.last
    assert [event.sequence for event in handle.iter_events(lost.last)] == numbers[-2:]

    snapshot = asyncio.run(runtime.sessions.read(identity, "s"))
    assert [message.text for message in snapshot.history] == ["go"]
    assert (snapshot.revision, snapshot.replayable) == (1, False)
    again = make_runtime(driver=Ticker(events=1))
    assert again.run_blocking("again", identity=identity, session_id="s").status == "completed"


def _events_so_far(handle: RunHandle) -> list[Event]:
    events = []
    last = handle.last_status.cursor if handle.last_status else 0
    if not last:
        return []
    for event in handle.iter_events():
        events.append(event)
        if event.sequence >= last:
            break
    return events


def test_cancel_reaches_every_delegate_and_its_tools(
    make_runtime: MakeRuntime, identity: Identity, tmp_path: Path
) -> None:
    logs = [tmp_path / f"log-{index}" for index in range(4)]
    runtime = make_runtime(
        driver=Parent(
            delegates=(
                (CallsTool(tool_name="beat"), str(logs[0])),
                (CallsTool(tool_name="beat_in_thread"), str(logs[1])),
                (Parent(delegates=((CallsTool(), str(logs[2])),)), "nested"),
                (CallsTool(tool_name="beat"), str(logs[3])),
            )
        ),
        grants=Grants(tool_ids=["beat", "beat_in_thread"]),
        budgets=Budgets(max_tool_calls=10, max_tokens=10_000),
    )
    handle = runtime.start("go", identity=identity, session_id="s")
    until(lambda: all(beats(log) > 2 for log in logs), "all four tools work")
    asyncio.run(handle.cancel("enough"))
    result = handle.wait(TIMEOUT)
    counted = [beats(log) for log in logs]
    assert (result.status, result.reason and result.reason.message) == ("cancelled", "enough")
    assert result.budget is not None
    assert result.budget.tokens.reserved == 0
    assert result.budget.tool_calls.used == 4
    time.sleep(0.3)
    assert [beats(log) for log in logs] == counted  # not one beat after the terminal event
    assert "left" in logs[1].read_text()
    finished = [event for event in handle.iter_events() if event.type == "child.finished"]
    assert len(finished) == 5  # the nested parent's delegate too


def test_killed_store_actor_is_a_pause(make_runtime: MakeRuntime, identity: Identity, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    runtime = make_runtime(driver=Pids(gate=str(gate)))
    handle = runtime.start("x", identity=identity, session_id="s")
    pids(handle, 1)
    for pid in _pids_of("StoreActor"):
        kill(pid)
    gate.touch()
    result = handle.wait(TIMEOUT)
    assert result.status == "completed"
    snapshot = asyncio.run(runtime.sessions.read(identity, "s"))
    assert (snapshot.revision, len(snapshot.history)) == (1, 1)


def test_killed_directory_is_rebuilt_from_the_hosts(
    make_runtime: MakeRuntime, identity: Identity, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    runtime = make_runtime(driver=Pids(gate=str(gate)))
    handle = runtime.start("x", identity=identity, session_id="s")
    host = pids(handle, 1)[""]
    (pid,) = _pids_of("ControlActor")
    kill(pid)
    until(lambda: _pids_of("ControlActor") not in ([], [pid]), "the directory restarts")
    other = make_runtime(driver=Pids(gate=str(gate)))
    busy = other.start("y", identity=identity, session_id="s").wait(TIMEOUT)
    assert busy.reason is not None
    assert busy.reason.code == "session_conflict"  # it knows that the session lives, and where
    gate.touch()
    assert handle.wait(TIMEOUT).text == str(host)
    assert runtime.run_blocking("z", identity=identity, session_id="s").text == str(host)


def test_a_dead_host_of_a_rebuilt_directory_is_noticed(
    make_runtime: MakeRuntime, identity: Identity, tmp_path: Path
) -> None:
    runtime = make_runtime(driver=Pids(gate=str(tmp_path / "never")))
    handle = runtime.start("x", identity=identity, session_id="s")
    host = pids(handle, 1)[""]
    kill(host)
    result = handle.wait(TIMEOUT)
    assert (result.status, result.reason and result.reason.code) == ("failed", "interrupted")


def _pids_of(actor_class: str) -> list[int]:
    """Processes of this test session's Ray that run an actor of the class."""
    mine = {process.pid for process in psutil.Process().children(recursive=True)}
    found = []
    for pid in mine:
        try:
            if f"ray::{actor_class}" in " ".join(psutil.Process(pid).cmdline()):
                found.append(pid)
        except psutil.NoSuchProcess:
            continue
    return found


def test_a_session_host_that_answers_nothing_is_ended_and_its_run_interrupted(
    make_runtime: MakeRuntime, identity: Identity, tmp_path: Path
) -> None:
    """Paused with SIGSTOP: no death to notice, no answer to anybody."""
    log = tmp_path / "beats"
    runtime = make_runtime(
        driver=Parent(delegates=((CallsTool(), str(log)),)), grants=Grants(tool_ids=["beat"])
    )
    handle = runtime.start("go", identity=identity, session_id="s")
    host = pids(handle, 1)[""]
    until(lambda: beats(log) > 3, "the delegate's tool works")
    os.kill(host, signal.SIGSTOP)
    result = handle.wait(TIMEOUT)
    assert (result.status, result.reason and result.reason.code) == ("failed", "interrupted")
    until(lambda: not psutil.pid_exists(host), "the host is ended")
    until(lambda: stops(log), "the delegate's tool is stopped")
    again = make_runtime(driver=Ticker(events=1))
    assert again.run_blocking("x", identity=identity, session_id="s").status == "completed"


def test_delegates_that_are_stopped_as_they_arrive_do_not_run_on(
    make_runtime: MakeRuntime, identity: Identity
) -> None:
    """The root gives up while its delegates are on their way: start and stop may come in one batch."""
    runtime = make_runtime(driver=GivesUp(children=40))
    began = time.monotonic()
    for attempt in range(3):
        handle = runtime.start(str(attempt * 0.004), identity=identity, session_id="s")
        result = handle.wait(TIMEOUT)
        assert (result.status, result.reason and result.reason.message) == ("failed", "gives up")
        finished = [event.payload for event in handle.iter_events() if event.type == "child.finished"]
        assert {each.status for each in finished if isinstance(each, ChildFinished)} == {"cancelled"}
        assert len(finished) == 40
    assert time.monotonic() - began < Sleeps.seconds


def test_idle_sessions_make_room_and_busy_ones_do_not(
    make_runtime: MakeRuntime, identity: Identity, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    runtime = make_runtime(driver=Pids(gate=str(gate)))
    gate.touch()
    for index in range(MAX_RESIDENT + 2):
        assert runtime.run_blocking("x", identity=identity, session_id=f"idle-{index}").status == "completed"
    assert directory_statistics()["directory"]["resident"] <= MAX_RESIDENT
    gate.unlink()
    busy = [
        runtime.start("x", identity=identity, session_id=f"busy-{index}") for index in range(MAX_RESIDENT)
    ]
    for handle in busy:
        asyncio.run(handle.accepted())
    refused = runtime.start("x", identity=identity, session_id="one-too-many")
    with pytest.raises(Overloaded, match="max-resident"):
        asyncio.run(refused.accepted())
    gate.touch()
    assert all(handle.wait(TIMEOUT).status == "completed" for handle in busy)
    # An idle session that had to leave is there again with its history.
    runtime.run_blocking("again", identity=identity, session_id="idle-0")
    snapshot = asyncio.run(runtime.sessions.latest(identity, "idle-0"))
    assert (snapshot.revision, len(snapshot.history)) == (2, 2)


def test_an_overtaken_cancel_leaves_a_tombstone(
    make_runtime: MakeRuntime, identity: Identity, tmp_path: Path
) -> None:
    from retinue.loop import blocking, on_client_loop

    runtime = make_runtime(driver=Pids(gate=str(tmp_path / "never")))

    async def cancel_first() -> None:
        client = await runtime._backend.client()
        await client.cancel(identity, "s", "run-late", "too late")

    blocking(on_client_loop(cancel_first()))
    result = runtime.start("x", identity=identity, session_id="s", run_id="run-late").wait(TIMEOUT)
    assert (result.status, result.reason and result.reason.message) == ("cancelled", "too late")
