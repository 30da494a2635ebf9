"""How sessions come to life on a real Ray, share processes, and leave them."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from retinue import Identity, RunHandle
from retinue.actors.directory import FRESH
from retinue.actors.listing import ActorRow, list_actors
from retinue.actors.names import REGISTRY
from retinue.errors import SessionConflict
from retinue.events import Custom
from tests.ray.conftest import MAX_RESIDENT, MakeRuntime, directory, directory_statistics
from tests.ray.drivers import Notes, Pids, Ticker

TIMEOUT = 60
SetLimits = Callable[[int, float], None]


@pytest.fixture
def set_limits(cluster: str) -> Iterator[SetLimits]:
    """Changes how many hosts may be in use, and for how many seconds a session may be unused."""

    def change(max_resident: int, idle_timeout: float) -> None:
        ray.get(directory().set_limits.remote(max_resident, idle_timeout))

    yield change
    change(MAX_RESIDENT, 900.0)


def pid_of(handle: RunHandle) -> int:
    """The process that the run told of."""
    for event in handle.iter_events():
        if isinstance(event.payload, Custom):
            return int(event.payload.data)
    pytest.fail(f"the run ended before it told of its process: {handle.wait(TIMEOUT)}")


def until(condition: Callable[[], Any], what: str, limit: float = 30.0) -> Any:
    """Wait for something to become true, at most ``limit`` seconds."""
    deadline = time.monotonic() + limit
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.02)
    pytest.fail(f"it did not happen in {limit} s: {what}")


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def residents() -> dict[str, ActorRow]:
    """The session hosts by the ids of the sessions that they have."""
    page = asyncio.run(list_actors())
    return {session.session_id: row for row in page.actors for session in row.sessions}


# --- one process for many sessions ------------------------------------------------------------------------


def test_sessions_of_a_shared_app_run_at_once_in_one_process(
    make_runtime: MakeRuntime, identity: Identity, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    runtime = make_runtime(driver=Pids(gate=str(gate)), isolation="shared")
    before = directory_statistics()["directory"]
    handles = [runtime.start("x", identity=identity, session_id=f"shared-{index}") for index in range(8)]
    (pid,) = {pid_of(handle) for handle in handles}  # every one of them is still at work
    after = directory_statistics()["directory"]
    assert after["activations"] == before["activations"] + 8
    assert after["shared_hosts"] == before["shared_hosts"] + 1
    row = residents()["shared-3"]
    assert (row.pid, row.state, len(row.sessions)) == (pid, "serving", 8)
    assert {session.active_run for session in row.sessions} == {handle.run_id for handle in handles}
    # A second run in one of them conflicts; one in another does not.
    with pytest.raises(SessionConflict):
        asyncio.run(runtime.start("x", identity=identity, session_id="shared-0").accepted())
    gate.touch()
    assert {handle.wait(TIMEOUT).text for handle in handles} == {str(pid)}
    again = runtime.start("y", identity=identity, session_id="shared-0").wait(TIMEOUT)
    assert again.text == str(pid)
    for index in range(8):
        snapshot = asyncio.run(runtime.sessions.latest(identity, f"shared-{index}"))
        assert [message.text for message in snapshot.history] == (["x", "y"] if index == 0 else ["x"])
    # The same driver with processes of its own is another app: the session moves there.
    dedicated = make_runtime(driver=Pids(gate=str(gate)))
    assert dedicated.run_blocking("z", identity=identity, session_id="shared-0").text != str(pid)


def test_a_killed_shared_host_interrupts_the_runs_of_all_its_sessions(
    make_runtime: MakeRuntime, identity: Identity, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    runtime = make_runtime(driver=Pids(gate=str(gate)), isolation="shared")
    gate.touch()
    idle = runtime.start("x", identity=identity, session_id="idle")
    assert idle.wait(TIMEOUT).status == "completed"
    gate.unlink()
    handles = [runtime.start("x", identity=identity, session_id=f"lost-{index}") for index in range(4)]
    (pid,) = {pid_of(handle) for handle in (*handles, idle)}
    os.kill(pid, signal.SIGKILL)
    ends = [handle.wait(TIMEOUT) for handle in handles]
    assert [(end.status, end.reason and end.reason.code) for end in ends] == [("failed", "interrupted")] * 4
    gate.touch()
    for session_id in ("idle", "lost-0", "lost-3"):
        result = runtime.run_blocking("again", identity=identity, session_id=session_id)
        assert result.status == "completed"
        assert result.text != str(pid)
    assert idle.wait(TIMEOUT).status == "completed"


def test_a_restarted_directory_knows_the_sessions_of_a_shared_host(
    make_runtime: MakeRuntime, identity: Identity, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    app = {"driver": Pids(gate=str(gate)), "isolation": "shared", "name": "survives"}
    runtime = make_runtime(**app)
    handles = [runtime.start("x", identity=identity, session_id=f"kept-{index}") for index in range(3)]
    (pid,) = {pid_of(handle) for handle in handles}
    control = until(_control_pid, "the directory answers")
    os.kill(control, signal.SIGKILL)
    until(lambda: _control_pid() not in (None, control), "the directory restarts")
    other = make_runtime(**app)
    with pytest.raises(SessionConflict):
        asyncio.run(other.start("y", identity=identity, session_id="kept-1").accepted())
    fresh = other.start("y", identity=identity, session_id="fresh")
    assert pid_of(fresh) == pid  # its host has room still
    gate.touch()
    assert {handle.wait(TIMEOUT).text for handle in (*handles, fresh)} == {str(pid)}


def _control_pid() -> int | None:
    page = asyncio.run(list_actors())
    return next(row.pid for row in page.actors if row.name == REGISTRY)


# --- coming to life ---------------------------------------------------------------------------------------


def test_fifty_starts_on_a_cold_session_are_one_activation(
    make_runtime: MakeRuntime, identity: Identity, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    runtimes = [make_runtime(driver=Pids(gate=str(gate))) for _ in range(5)]
    before = directory_statistics()["directory"]["activations"]
    handles = [
        runtime.start(str(index), identity=identity, session_id="cold")
        for index in range(10)
        for runtime in runtimes
    ]
    refused = []
    for handle in handles:
        try:
            asyncio.run(handle.accepted())
        except SessionConflict as error:
            refused.append(error.run_id)
    assert len(refused) == 49
    (winner,) = set(refused)
    assert directory_statistics()["directory"]["activations"] == before + 1
    gate.touch()
    (accepted,) = [handle for handle in handles if handle.run_id == winner]
    assert accepted.wait(TIMEOUT).status == "completed"
    snapshot = asyncio.run(runtimes[0].sessions.latest(identity, "cold"))
    assert (snapshot.revision, len(snapshot.history)) == (1, 1)


# --- leaving ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("isolation", ["dedicated", "shared"])
def test_an_unused_session_leaves_and_comes_back_with_its_history(
    make_runtime: MakeRuntime,
    identity: Identity,
    set_limits: SetLimits,
    tmp_path: Path,
    isolation: str,
) -> None:
    notes, gate = tmp_path / "notes", tmp_path / "gate"
    app = {"driver": Pids(gate=str(gate)), "hooks": Notes(str(notes)).hooks, "isolation": isolation}
    runtime = make_runtime(**app)
    gate.touch()
    finished = runtime.start("one", identity=identity, session_id="unused")
    pid = int(finished.wait(TIMEOUT).text)
    seen = [event.sequence for event in finished.iter_events()]
    gate.unlink()
    working = runtime.start("x", identity=identity, session_id="working")
    pid_of(working)
    before = directory_statistics()["directory"]["passivations"].get("idle", 0)
    set_limits(MAX_RESIDENT, 1.0)
    until(lambda: f"idle unused at 1 in {pid}" in lines(notes), "the unused session leaves")
    until(lambda: "unused" not in residents(), "it is in no host any more")
    assert directory_statistics()["directory"]["passivations"]["idle"] > before
    if isolation == "dedicated":
        until(lambda: not psutil.pid_exists(pid), "its process ends")
    else:
        assert psutil.pid_exists(pid)  # others live there
    # Whoever reads its run goes on, from the store, and nothing comes to life because of that.
    assert finished.wait(TIMEOUT).text == str(pid)
    attached = make_runtime(**app).attach(finished.run_id, identity=identity)
    assert [event.sequence for event in attached.iter_events()] == seen
    assert "unused" not in residents()
    # The one that works stays, however long.
    assert "working" in residents()
    gate.touch()
    assert working.wait(TIMEOUT).status == "completed"
    set_limits(MAX_RESIDENT, 900.0)
    assert runtime.run_blocking("two", identity=identity, session_id="unused").status == "completed"
    snapshot = asyncio.run(runtime.sessions.latest(identity, "unused"))
    assert [message.text for message in snapshot.history] == ["one", "two"]
    mine = [line.split(" in ")[0] for line in lines(notes) if " unused " in line]
    assert mine == ["activated unused at 0", "idle unused at 1", "activated unused at 1"]


def test_at_the_cap_the_session_leaves_that_was_unused_for_longest(
    make_runtime: MakeRuntime, identity: Identity, set_limits: SetLimits, tmp_path: Path
) -> None:
    notes = tmp_path / "notes"
    runtime = make_runtime(driver=Ticker(events=1), hooks=Notes(str(notes)).hooks)
    set_limits(3, 900.0)
    # The third and fourth run of a warm session go past the directory: only its host knows of them.
    for name in ("a", "b", "c", "a", "b", "a"):
        assert runtime.run_blocking("x", identity=identity, session_id=name).status == "completed"
    time.sleep(FRESH)  # what the directory heard when it made room for these is old by then
    for name in ("d", "e"):
        assert runtime.run_blocking("x", identity=identity, session_id=name).status == "completed"
    left = [line.split(" at ")[0] for line in lines(notes) if line.startswith("memory_pressure")]
    assert left == ["memory_pressure c", "memory_pressure b"]
    assert {name for name in residents() if name in "abcde"} == {"a", "d", "e"}


def test_a_session_says_why_it_leaves(make_runtime: MakeRuntime, identity: Identity, tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    hooks = Notes(str(notes)).hooks
    first = make_runtime(driver=Ticker(events=1), hooks=hooks)
    second = make_runtime(driver=Ticker(events=2), hooks=hooks)
    assert first.run_blocking("x", identity=identity, session_id="moves").status == "completed"
    assert second.run_blocking("x", identity=identity, session_id="moves").status == "completed"
    said = [line.split(" in ")[0] for line in lines(notes)]
    assert said == ["activated moves at 0", "migrating moves at 1", "activated moves at 1"]


# --- seeing it --------------------------------------------------------------------------------------------


def test_every_actor_is_listed_with_what_it_has(
    make_runtime: MakeRuntime, identity: Identity, store_url: str
) -> None:
    runtime = make_runtime(driver=Pids(), name="listed-app")
    pid = int(runtime.run_blocking("x", identity=identity, session_id="listed").text)
    page = asyncio.run(list_actors())
    assert page.next is None
    rows = {row.name: row for row in page.actors}
    assert list(rows) == sorted(rows)
    assert list(rows[REGISTRY].roles) == ["registry", "directory", "keeper"]  # one process has them all here
    assert "listed-app" in rows[REGISTRY].apps
    (mine,) = [row for row in page.actors if row.pid == pid]
    assert (list(mine.roles), mine.state, list(mine.apps)) == (["session host"], "serving", ["listed-app"])
    (session,) = mine.sessions
    assert (session.tenant_id, session.user_id, session.session_id) == (
        identity.tenant_id,
        identity.user_id,
        "listed",
    )
    assert session.idle is not None
    assert (session.active_run, session.runs_started) == (None, 1)
    assert mine.node_id == ray.get_runtime_context().get_node_id()
    assert store_url in {row.store for row in page.actors}
    assert {"spare", "ready"} & {row.state for row in page.actors}
    assert any(row.delegates == 0 for row in page.actors)
    # In pages, the same.
    seen: list[str] = []
    after: str | None = None
    while True:
        part = asyncio.run(list_actors(after=after, limit=2))
        seen += [row.name for row in part.actors]
        if part.next is None:
            break
        after = part.next
    assert set(rows) <= set(seen)
    assert len(seen) == len(set(seen))
