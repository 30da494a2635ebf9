"""A host's activations and the leases that they hold."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from retinue import DriverOutput, ExecutionServices, Identity, RunRequest, RuntimeConfig
from retinue import host as host_module
from retinue.apps import AppSpec, app_by_value
from retinue.children import LocalChildren
from retinue.errors import LeaseLost, NotFound, SessionConflict, StoreUnavailable
from retinue.host import Host
from retinue.ids import SessionAddress
from retinue.protocol import StartRun
from retinue.storage import this_process
from retinue.storage.memory import MemoryEngine
from retinue.store import AcquireLease, RenewLeases, Store, StoreReply
from retinue.workers import Workers
from tests.support import Flag, code_of, driver, flag, soon, trivial

WHO = Identity(tenant_id="a", user_id="b")


class Engine(MemoryEngine):
    """A memory store that notes renewals and can be down."""

    def __init__(self) -> None:
        super().__init__()
        self.renewals: list[int] = []
        self.renewed = Flag()
        self.down = False
        self.acquired = 0

    async def execute(self, operations: Any) -> list[StoreReply]:
        if self.down:
            self.renewed.set()
            raise StoreUnavailable("down")
        replies = list(await super().execute(operations))
        for operation in operations:
            if isinstance(operation, RenewLeases):
                self.renewals.append(len(operation.leases))
                self.renewed.set()
            self.acquired += isinstance(operation, AcquireLease)
        return replies


@driver
async def waits(request: RunRequest, services: ExecutionServices) -> DriverOutput:
    flag(f"{request.run_id} runs").set()
    await flag(f"{request.run_id} go").wait()
    return DriverOutput(text="done")


MakeHost = Callable[[str], Host]


class World:
    def __init__(self) -> None:
        self.engine = Engine()
        self.store = Store(self.engine)
        self.workers = Workers("test-host")
        self.app: AppSpec = app_by_value(RuntimeConfig(driver=trivial))
        self.config = RuntimeConfig(driver=waits)
        self.hosts: list[Host] = []

    def host(self, name: str = "host") -> Host:
        made = Host(
            holder=this_process(name, "test"),
            workers=self.workers,
            launcher=LocalChildren(self.workers),
            stores_events=True,
        )
        made.provide(self.app, self.config)
        self.hosts.append(made)
        return made

    def address(self, session_id: str = "s") -> SessionAddress:
        return SessionAddress(store_id=self.store.store_id, tenant_id="a", user_id="b", session_id=session_id)

    async def activate(self, host: Host, activation_id: str, session_id: str = "s") -> None:
        await host.activate(self.address(session_id), activation_id, self.store, self.app)


def start(run_id: str, session_id: str = "s") -> StartRun:
    return StartRun(run_id=run_id, identity=WHO, session_id=session_id, input="x")


@pytest.fixture
async def world(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    monkeypatch.setattr(host_module, "LEASE_RENEWAL", 0.02)
    here = World()
    yield here
    for host in here.hosts:
        await soon(host.close("the test is over"))
    await here.workers.stopped()


async def test_an_activation_takes_one_lease_however_often_it_is_asked_for(world: World) -> None:
    host = world.host()
    await asyncio.gather(*(world.activate(host, "one") for _ in range(3)))
    await world.activate(host, "one")
    assert world.engine.acquired == 1
    assert host.has("one")
    statistics = host.statistics()
    assert (statistics.activations, statistics.active_runs, statistics.runs_started) == (1, 0, 0)
    assert list(statistics.sessions) == ['["a","b","s"]']


async def test_a_failed_activation_fails_for_all_that_wait_for_it(world: World) -> None:
    first, second = world.host("first"), world.host("second")
    await world.activate(first, "one")
    outcomes = await asyncio.gather(
        *(world.activate(second, "two") for _ in range(2)), return_exceptions=True
    )
    assert [type(outcome) for outcome in outcomes] == [SessionConflict] * 2
    assert not second.has("two")
    assert await first.passivate("one", "idle")
    await world.activate(second, "two")
    assert second.has("two")


async def test_leases_are_renewed_together_and_what_was_taken_is_fenced(world: World) -> None:
    host = world.host()
    for number in range(3):
        await world.activate(host, f"a{number}", f"s{number}")
    await host.start("a0", start("taken", "s0"))
    await flag("taken runs").wait()
    world.engine.renewed = Flag()
    await world.engine.renewed.wait()
    assert set(world.engine.renewals) == {3}
    # Another process takes one session: the next renewal says so, and its run ends.
    await world.store.acquire(world.address("s0"), host.holder)
    settled = await soon(host.result("a0", "taken"))
    assert (settled.result.status, code_of(settled.result)) == ("failed", "interrupted")
    assert (await world.store.read_run(WHO, "taken")).outcome is None  # type: ignore[union-attr]
    with pytest.raises(LeaseLost):
        await host.start("a0", start("again", "s0"))
    world.engine.renewed = Flag()
    await world.engine.renewed.wait()
    assert world.engine.renewals[-1] == 2
    await world.activate(host, "b0", "s0")
    assert not host.has("a0")  # nobody asks for it by that name again
    assert host.has("b0")


async def test_a_store_that_is_down_for_a_moment_fences_nobody(world: World) -> None:
    host = world.host()
    await world.activate(host, "one")
    await host.start("one", start("through"))
    await flag("through runs").wait()
    world.engine.down, world.engine.renewed = True, Flag()
    await world.engine.renewed.wait()
    world.engine.down, world.engine.renewed = False, Flag()
    await world.engine.renewed.wait()
    flag("through go").set()
    settled = await soon(host.result("one", "through"))
    assert settled.result.status == "completed"
    events = await world.store.read_events(WHO, "through", 0, 10)
    assert [event.sequence for event in events] == [1]  # the terminal one is the record's outcome


async def test_a_busy_activation_stays_and_an_idle_one_leaves(world: World) -> None:
    host = world.host()
    await world.activate(host, "one")
    await host.start("one", start("busy"))
    await flag("busy runs").wait()
    assert await host.passivate("one", "idle") is False
    assert host.statistics().active_runs == 1
    flag("busy go").set()
    await soon(host.result("one", "busy"))
    assert await host.passivate("one", "idle") is True
    assert await host.passivate("one", "idle") is True
    with pytest.raises(NotFound) as gone:
        await host.result("one", "busy")
    assert gone.value.activation_id == "one"
    assert host.statistics().runs_started == 1


async def test_a_run_that_an_activation_does_not_know_is_another_refusal(world: World) -> None:
    """A client must not forget a living activation because of it: another would take its lease."""
    host = world.host()
    await world.activate(host, "one")
    for read in (host.result("one", "nobody"), host.events("one", "nobody", 0, 1)):
        with pytest.raises(NotFound) as unknown:
            await read
        assert unknown.value.data == {"run_id": "nobody"}
    assert host.cancel("one", "nobody", "x") is None


async def test_peeking_needs_the_identity(world: World) -> None:
    host = world.host()
    await world.activate(host, "one")
    await host.start("one", start("seen"))
    await flag("seen runs").wait()
    status = host.peek(WHO, "seen")
    assert status is not None
    assert (status.state, status.cursor) == ("running", 1)
    assert host.peek(Identity(tenant_id="other", user_id="b"), "seen") is None
    assert host.peek(WHO, "other") is None
    flag("seen go").set()
    await soon(host.result("one", "seen"))


async def test_closing_refuses_what_comes_and_frees_the_session(world: World) -> None:
    host = world.host()
    await world.activate(host, "one")
    await host.start("one", start("closed"))
    await flag("closed runs").wait()
    closing = asyncio.ensure_future(host.close("leaving"))
    while host._sessions["one"].closing is None:
        await asyncio.sleep(0)
    with pytest.raises(NotFound):
        await host.start("one", start("late"))
    await soon(closing)
    record = await world.store.read_run(WHO, "closed")
    assert record is not None
    assert record.outcome is not None
    assert b'"leaving"' in record.outcome
    other = world.host("other")
    await world.activate(other, "two")
    assert (await other.read("two")).revision == 1
