"""Following runs on a real local Ray: one call per host, hosts that die, live input, statuses."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import ray

from retinue import DriverCapabilities, DriverOutput, ExecutionServices, Identity, RunHandle, RunRequest
from retinue.actors.wire import decode
from retinue.errors import InputError
from retinue.events import Custom, EventsLost
from retinue.feeds import FeedStatistics
from retinue.following import FollowingStatistics, following
from retinue.host import HostStatistics
from retinue.loop import on_client_loop
from tests.ray.conftest import MakeRuntime, session_hosts
from tests.ray.drivers import Pids, Ticker

TIMEOUT = 60


def until(condition: Callable[[], Any], what: str, limit: float = 30.0) -> Any:
    """Wait for something to become true, at most ``limit`` seconds."""
    deadline = time.monotonic() + limit
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.02)
    pytest.fail(f"it did not happen in {limit} s: {what}")


@dataclass(frozen=True)
class Asks:
    """Asks, takes what was sent meanwhile, and answers with both."""

    id: str = "asks"
    version: int = 1
    capabilities: DriverCapabilities = field(default_factory=lambda: DriverCapabilities(controls=("steer",)))

    async def start(self, request: RunRequest, services: ExecutionServices) -> DriverOutput:
        answer = await services.request_input("Which?", choices=["this", "that"])
        seen = [str(answer.input)]
        while (taken := await services.take_input()) is not None:
            seen.append(str(taken))
        return DriverOutput(text=" ".join(seen))


def host_statistics(session_id: str) -> HostStatistics:
    """Of the host that has the session."""
    for host in session_hosts():
        found: HostStatistics | None = decode(ray.get(host.statistics.remote()), HostStatistics | None)
        if found is not None and any(each.session_id == session_id for each in found.sessions):
            return found
    pytest.fail(f"no host has session {session_id}")


def looked(handle: RunHandle) -> bool:
    """Look at a handle's state, whatever it is."""
    return handle.state is not None


def test_two_hundred_viewers_of_many_runs_on_one_host_use_one_call(
    make_runtime: MakeRuntime, identity: Identity, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    runtime = make_runtime(driver=Pids(gate=str(gate)), isolation="shared")
    handles = [runtime.start("x", identity=identity, session_id=f"viewed-{number}") for number in range(20)]
    first = [next(handle.iter_events(types=["custom"])) for handle in handles]
    assert len({event.payload.data for event in first if isinstance(event.payload, Custom)}) == 1
    attached = [runtime.attach(handle.run_id, identity=identity) for handle in handles]

    async def read_all() -> list[list[int]]:
        async def read(handle: RunHandle, after: int) -> list[int]:
            return [event.sequence async for event in handle.events(after)]

        reading = [
            asyncio.ensure_future(read(handle, after))
            for handle in (*handles, *attached)
            for after in (0, 0, 1, 2, 2)
        ]
        assert len(reading) == 200

        async def mine() -> dict[str, FollowingStatistics]:
            return following()

        def all_wait() -> FeedStatistics | None:
            viewers = [each for each in on_client_loop(mine()).result().values() if each.viewers == 200]
            host = host_statistics("viewed-0").feeds
            # All of them wait for the third event of their run, and what is the same is asked for once.
            return host if host.wants == 20 and [each.calls for each in viewers] == [1] else None

        host = await asyncio.to_thread(until, all_wait, "200 viewers wait for the third events")
        assert (host.subscribers, host.calls) == (1, 1)
        gate.touch()
        return await asyncio.gather(*reading)

    sequences = asyncio.run(asyncio.wait_for(read_all(), TIMEOUT))
    assert sequences == [[1, 2, 3], [1, 2, 3], [2, 3], [3], [3]] * 40
    assert {handle.wait(TIMEOUT).status for handle in handles} == {"completed"}


def test_viewers_of_a_host_that_is_killed_read_to_the_end_without_gap_or_repeat(
    make_runtime: MakeRuntime, identity: Identity, tmp_path: Path
) -> None:
    runtime = make_runtime(driver=Ticker(gate=str(tmp_path / "never")), event_capacity=16)
    handle = runtime.start("x", identity=identity, session_id="killed-viewers")
    ticking = handle.iter_events()
    assert [next(ticking).sequence for _ in range(30)] == list(range(1, 31))
    events: dict[int, list[Any]] = {}

    def follow(number: int, after: int, slow: bool) -> None:
        seen = events.setdefault(number, [])
        for event in runtime.attach(handle.run_id, identity=identity).iter_events(after):
            seen.append(event)
            if slow:
                time.sleep(0.02)

    viewers = [
        threading.Thread(target=follow, args=(number, number * 3, number % 5 == 0)) for number in range(10)
    ]
    for viewer in viewers:
        viewer.start()
    until(lambda: len(events) == 10 and all(events.values()), "every viewer reads")
    os.kill(host_statistics("killed-viewers").pid, signal.SIGKILL)
    rest = list(ticking)
    for viewer in viewers:
        viewer.join(TIMEOUT)
        assert not viewer.is_alive()
    result = handle.wait(TIMEOUT)
    assert (result.status, result.reason and result.reason.code) == ("failed", "interrupted")
    assert handle.state == "finished"
    for number, seen in [*events.items(), (10, rest)]:
        after = number * 3
        assert seen[-1].type == "run.terminal"
        assert seen[-1].sequence == result.final_cursor
        expected = after + 1
        for event in seen:
            if isinstance(event.payload, EventsLost):
                assert event.payload.first <= max(expected, event.payload.last + 1)
                assert event.sequence > event.payload.last
            else:
                assert event.sequence == expected
            expected = event.sequence + 1


def test_live_input_and_answers_reach_a_run_with_receipts(
    make_runtime: MakeRuntime, identity: Identity
) -> None:
    runtime = make_runtime(driver=Asks())
    handle = runtime.start("x", identity=identity, session_id="asked")
    asyncio.run(handle.accepted())
    other = make_runtime(driver=Ticker(events=1)).attach(handle.run_id, identity=identity)
    until(lambda: handle.state == "awaiting_input", "it asks")
    asked = until(lambda: other.pending_input, "the other sees it")
    assert asked == handle.pending_input
    assert (asked.question, list(asked.choices)) == ("Which?", ["this", "that"])
    sent = [other.send_blocking("quickly", input_id="mine") for _ in range(2)]
    assert [(receipt.outcome, receipt.boundary) for receipt in sent] == [("deferred", "model_call")] * 2
    receipt = other.reply_blocking(asked.id, "that")
    assert (receipt.outcome, receipt.boundary) == ("delivered", "question")
    assert other.pending_input is None  # what the receipt says is never older than it
    assert handle.wait(TIMEOUT).text == "that quickly"
    for late in (other.send_blocking, lambda text: other.reply_blocking(asked.id, text)):
        with pytest.raises(InputError) as refused:
            late("late")
        assert refused.value.code == "run_finished"
    assert other.cancel_blocking().outcome == "returned"
    received = list(handle.iter_events(types=["input.received"]))
    assert [event.type for event in received] == ["input.received", "run.terminal"]


def test_the_state_of_a_handle_is_fresh_however_long_nobody_looked(
    make_runtime: MakeRuntime, identity: Identity, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("retinue.looks.LOOKED_FOR", 0.5)
    gate = tmp_path / "gate"
    runtime = make_runtime(driver=Pids(gate=str(gate)))
    handle = runtime.start("x", identity=identity, session_id="looked-at")
    assert next(handle.iter_events(types=["custom"])).type == "custom"
    states = [handle.state]
    until(lambda: looked(handle) and host_statistics("looked-at").feeds.looks == 1, "the look has arrived")
    until(lambda: host_statistics("looked-at").feeds.looks == 0, "nobody looks any more")
    gate.touch()
    other = runtime.attach(handle.run_id, identity=identity)
    final = other.wait(TIMEOUT)
    time.sleep(1.1)  # what was heard at the start is no longer fresh
    assert [*states, handle.state] == ["running", "finished"]
    assert handle.budget == final.budget


def test_a_warm_run_that_is_streamed_takes_no_more_hops(
    make_runtime: MakeRuntime, identity: Identity
) -> None:
    runtime = make_runtime(driver=Ticker(events=2))
    hops = []
    for _ in range(3):
        handle = runtime.start("x", identity=identity, session_id="warm")
        assert [event.sequence for event in handle.iter_events()] == [1, 2, 3, 4]
        handle.wait(TIMEOUT)
        hops.append(handle.hops)
    assert hops[1:] == [4, 4]
