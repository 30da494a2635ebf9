"""A host's activations and the leases that they hold."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from retinue import DriverOutput, ExecutionServices, Identity, RunRequest, RuntimeConfig
from retinue import hooks as hooks_module
from retinue import host as host_module
from retinue.apps import AppSpec, app_by_name, app_by_value
from retinue.children import LocalChildren
from retinue.errors import LeaseLost, NotFound, SessionConflict, StoreUnavailable, ValidationFailed
from retinue.hooks import DeactivationReason, SessionHooks, SessionInfo
from retinue.host import Host
from retinue.ids import SessionAddress
from retinue.protocol import StartRun
from retinue.resources import Resource
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
    (resident,) = statistics.sessions
    assert (resident.tenant_id, resident.user_id, resident.session_id) == ("a", "b", "s")
    assert (resident.activation_id, resident.active_run, resident.runs_started) == ("one", None, 0)


async def test_a_failed_activation_fails_for_all_that_wait_for_it(world: World) -> None:
    first, second = world.host("first"), world.host("second")
    await world.activate(first, "one")
    outcomes = await asyncio.gather(
        *(world.activate(second, "two") for _ in range(2)), return_exceptions=True
    )
    assert [type(outcome) for outcome in outcomes] == [SessionConflict] * 2
    assert not second.has("two")
    assert await first.passivate("one", "migrating")
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
    with pytest.raises((LeaseLost, NotFound)):
        await host.start("a0", start("again", "s0"))
    world.engine.renewed = Flag()
    await world.engine.renewed.wait()
    assert world.engine.renewals[-1] == 2
    await world.activate(host, "b0", "s0")
    assert not host.has("a0")  # nobody asks for it by that name again
    assert host.has("b0")
    assert host.statistics().passivations == {"duplicate": 1}


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
    assert host.idle() == {"one": None}
    assert host.statistics().active_runs == 1
    assert host.statistics().sessions[0].active_run == "busy"
    flag("busy go").set()
    await soon(host.result("one", "busy"))
    seconds = host.idle()["one"]
    assert seconds is not None
    assert 0.0 <= seconds < 10.0
    assert await host.passivate("one", "idle") is True
    assert await host.passivate("one", "idle") is True
    assert (host.idle(), host.statistics().passivations) == ({}, {"idle": 1})
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


async def test_a_session_that_has_just_come_to_life_makes_no_room(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first message is on the way: it would only come back."""
    monkeypatch.setattr(host_module, "GRACE", 60.0)
    host = world.host()
    await world.activate(host, "one")
    assert host.idle() == {"one": None}
    assert not await host.passivate("one", "memory_pressure")
    assert not await host.passivate("one", "idle")
    await host.read("one")
    assert host.idle()["one"] is not None
    assert await host.passivate("one", "memory_pressure")
    await world.activate(host, "two")
    assert await host.passivate("two", "migrating")  # another app is about to use it
    monkeypatch.setattr(host_module, "GRACE", 0.0)
    await world.activate(host, "three")
    assert await host.passivate("three", "idle")  # whoever wanted it did not come


async def test_an_app_is_loaded_once_for_all_sessions_that_come_together(world: World) -> None:
    counted = app_by_name("tests.unit.test_host:counted_app")
    _loaded.clear()
    host = world.host()
    await asyncio.gather(
        *(host.activate(world.address(f"s{n}"), f"a{n}", world.store, counted) for n in range(8))
    )
    assert len(_loaded) == 1


_loaded: list[int] = []


def counted_app() -> RuntimeConfig:
    _loaded.append(1)
    return RuntimeConfig(driver=trivial)


# --- hooks ------------------------------------------------------------------------------------------------


class Hooks:
    """Notes what happened, in order; on a user loop."""

    def __init__(self, world: World) -> None:
        self.happened: list[str] = []
        self.go: Flag | None = None
        self.infos: list[SessionInfo] = []
        world.config = RuntimeConfig(
            driver=world.config.driver,
            hooks=SessionHooks(activated=self.activated, deactivating=self.deactivating),
        )

    async def activated(self, info: SessionInfo) -> None:
        self.happened.append("activated begins")
        self.infos.append(info)
        if self.go is not None:
            await self.go.wait()
        self.happened.append("activated")

    async def deactivating(self, info: SessionInfo, reason: DeactivationReason) -> None:
        assert threading.current_thread().name == "test-host"
        self.happened.append(reason)
        self.infos.append(info)


async def test_hooks_hear_of_a_session_that_comes_and_goes(world: World) -> None:
    hooks = Hooks(world)
    hooks.go = Flag()
    host = world.host()
    await world.activate(host, "one")
    await host.start("one", start("beside"))  # its first run does not wait for the hook
    await flag("beside runs").wait()
    flag("beside go").set()
    assert (await soon(host.result("one", "beside"))).result.status == "completed"
    assert hooks.happened == ["activated begins"]
    leaving = asyncio.ensure_future(host.passivate("one", "idle"))
    await asyncio.sleep(0)
    hooks.go.set()
    assert await soon(leaving)
    assert hooks.happened == ["activated begins", "activated", "idle"]
    assert [(info.identity, info.session_id, info.activation_id) for info in hooks.infos] == [
        (WHO, "s", "one")
    ] * 2
    assert [info.revision for info in hooks.infos] == [0, 1]


async def test_each_way_out_has_its_reason(world: World) -> None:
    hooks = Hooks(world)
    host = world.host()
    reasons: list[DeactivationReason] = ["idle", "memory_pressure", "migrating", "application"]
    for reason in reasons:
        await world.activate(host, reason)
        await host.read(reason)
        assert await host.passivate(reason, reason)
    await world.activate(host, "taken", "taken")
    await world.store.acquire(world.address("taken"), host.holder)
    async with asyncio.timeout(5):
        while "duplicate" not in hooks.happened:  # at the next renewal, whether or not another session comes
            await asyncio.sleep(0.005)
    assert not host.has("taken")
    await world.activate(host, "deleted", "deleted")
    await host.delete("deleted")
    await world.activate(host, "last")
    await soon(host.close("the process ends"))
    assert hooks.happened.count("activated") == 7
    heard = [each for each in hooks.happened if not each.startswith("activated")]
    assert sorted(heard) == sorted([*reasons, "duplicate", "application", "shutting_down"])
    assert host.statistics().passivations == {**dict.fromkeys(heard, 1), "application": 2}


async def test_the_lease_is_held_until_the_hook_has_returned(world: World) -> None:
    other = world.host("other")
    held, go = Flag(), Flag()

    async def deactivating(info: SessionInfo, reason: DeactivationReason) -> None:
        held.set()
        await go.wait()

    world.config = RuntimeConfig(driver=waits, hooks=SessionHooks(deactivating=deactivating))
    host = world.host()
    await world.activate(host, "one")
    leaving = asyncio.ensure_future(host.passivate("one", "migrating"))
    await held.wait()
    with pytest.raises(SessionConflict):
        await world.activate(other, "two")
    with pytest.raises(NotFound):  # and nothing new begins here
        await host.start("one", start("late"))
    assert host.idle() == {"one": None}
    go.set()
    assert await soon(leaving)
    await world.activate(other, "two")


async def test_hooks_that_fail_or_hang_change_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(hooks_module, "HOOK_LIMIT", 0.05)
    stopped = Flag()

    async def hangs(info: SessionInfo) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            stopped.set()

    async def exits(info: SessionInfo, reason: DeactivationReason) -> None:
        raise SystemExit("not from here")

    async def raises(info: SessionInfo, reason: DeactivationReason) -> None:
        raise RuntimeError("the cache is gone")

    async def cancels_itself(info: SessionInfo, reason: DeactivationReason) -> None:
        raise asyncio.CancelledError

    for number, hook in enumerate((exits, raises, cancels_itself)):
        world.config = RuntimeConfig(driver=waits, hooks=SessionHooks(activated=hangs, deactivating=hook))
        host = world.host(f"host-{number}")
        await world.activate(host, "one")
        assert await soon(host.passivate("one", "migrating"))
    await stopped.wait()
    for part in (
        "activated",
        "took longer",
        "deactivating",
        "SystemExit",
        "the cache is gone",
        "CancelledError",
    ):
        assert part in caplog.text


def test_hooks_must_be_functions() -> None:
    with pytest.raises(ValidationFailed) as refused:
        SessionHooks(activated="not a function")  # type: ignore[arg-type]
    assert refused.value.path == "config.hooks.activated"


# --- resources --------------------------------------------------------------------------------------------


@driver
async def opens(request: RunRequest, services: ExecutionServices) -> DriverOutput:
    async def disposed() -> None:
        flag("connection closed").set()

    await services.resource("connection", "session", lambda: Resource(value=1, dispose=disposed))
    return DriverOutput(text="open")


@pytest.mark.parametrize("limit", [None, 0.01])
async def test_a_session_resource_keeps_its_session_until_its_idle_limit(
    world: World, limit: float | None
) -> None:
    happened: list[str] = []

    async def deactivating(info: SessionInfo, reason: DeactivationReason) -> None:
        happened.append(f"{reason}, closed: {flag('connection closed').is_set}")

    _forget_flag("connection closed")
    world.config = RuntimeConfig(
        driver=opens, resource_idle_limit=limit, hooks=SessionHooks(deactivating=deactivating)
    )
    host = world.host()
    await world.activate(host, "one")
    await host.start("one", start("opens"))
    assert (await soon(host.result("one", "opens"))).result.status == "completed"
    if limit is None:
        assert host.idle() == {"one": None}
        assert not await host.passivate("one", "idle")
        assert await host.close_resources("one") == []
    else:
        async with asyncio.timeout(5):
            while host.idle()["one"] is None:
                await asyncio.sleep(0.005)
        assert not flag("connection closed").is_set
    assert await host.passivate("one", "idle")
    assert happened == ["idle, closed: True"]


def _forget_flag(name: str) -> None:
    from tests import support

    support._flags.pop(name, None)
