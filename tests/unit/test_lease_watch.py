"""Suspension: an activation that cannot renew its lease admits nothing until the store answers again."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pytest

from retinue import Agent, Identity, Runtime, agent_driver
from retinue.lease_watch import SUSPEND_AFTER, LeaseWatch
from retinue.loop import blocking, on_client_loop
from retinue.sessions import Session
from retinue.store import LEASE_PERIOD
from retinue.store_wait import STORE_WAIT
from retinue.testing import ScriptedModel

ME = Identity(tenant_id="t", user_id="u")


@dataclass
class Clock:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Watched:
    """A resident session whose lease watch has a clock of the test's own."""

    runtime: Runtime
    session: Session
    model: ScriptedModel
    clock: Clock = field(default_factory=Clock)

    def __post_init__(self) -> None:
        self.session.watch = LeaseWatch(self.clock.now, self.clock)


@pytest.fixture
def watched() -> Watched:
    model = ScriptedModel(["first", "second"])
    runtime = Runtime(driver=agent_driver(Agent(name="a", model=model)), backend="inprocess")
    runtime.run_blocking("x", identity=ME, session_id="s")
    (session,) = runtime._backend._host._sessions.values()  # type: ignore[attr-defined]
    return Watched(runtime, session, model)


def test_the_lease_is_believed_in_for_less_than_its_period() -> None:
    assert SUSPEND_AFTER < LEASE_PERIOD


async def test_silence_is_counted_from_when_the_renewal_was_sent() -> None:
    clock = Clock()
    watch = LeaseWatch(clock.now, clock)
    assert watch.room() is None
    clock.now += SUSPEND_AFTER + 1
    waiting = asyncio.ensure_future(watch.room())  # type: ignore[arg-type]
    await asyncio.sleep(0)
    watch.renewed(clock.now - SUSPEND_AFTER - 0.5)  # acknowledged now, but sent too long ago
    await asyncio.sleep(0)
    assert not waiting.done()
    watch.renewed(clock.now - 0.5)
    await asyncio.wait_for(waiting, 1)
    assert watch.room() is None
    assert watch.silence == 0.5


def test_a_suspended_session_admits_nothing_and_goes_on_when_its_lease_still_stands(watched: Watched) -> None:
    watched.clock.now += SUSPEND_AFTER + 1
    handle = watched.runtime.start("y", identity=ME, session_id="s")
    blocking(handle._accepting, 10)

    async def look() -> tuple[bool, int]:
        for _ in range(200):
            await asyncio.sleep(0)
        asked = len(watched.model.requests)
        watched.session.watch.renewed(watched.clock.now)
        return handle.state == "running", asked

    assert blocking(on_client_loop(look()), 10) == (True, 1)  # the first run's request only
    assert handle.wait(10).text == "second"


def test_a_suspended_session_whose_lease_was_taken_ends_its_run_interrupted(watched: Watched) -> None:
    watched.clock.now += SUSPEND_AFTER + 1
    handle = watched.runtime.start("y", identity=ME, session_id="s")
    blocking(handle._accepting, 10)

    async def fence() -> None:
        watched.session.fence()

    blocking(on_client_loop(fence()), 10)
    result = handle.wait(10)
    assert (result.status, result.reason and result.reason.code) == ("failed", "interrupted")
    assert len(watched.model.requests) == 1


def test_a_store_that_stays_silent_ends_the_run_after_the_store_wait(watched: Watched) -> None:
    watched.clock.now += SUSPEND_AFTER + 1
    handle = watched.runtime.start("y", identity=ME, session_id="s")
    blocking(handle._accepting, 10)

    async def silent() -> None:
        watched.session.store_silent()

    blocking(on_client_loop(silent()), 10)
    assert handle.state == "running"
    watched.clock.now += STORE_WAIT
    blocking(on_client_loop(silent()), 10)
    result = handle.wait(10)
    assert (result.status, result.reason and result.reason.code) == ("failed", "store_unavailable")
