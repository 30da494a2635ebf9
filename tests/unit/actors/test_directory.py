"""The directory on the plain class, with hosts that are only remembered."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping

import pytest

from retinue.actors import directory as module
from retinue.actors import hosts as hosts_module
from retinue.actors.directory import Directory
from retinue.actors.hosts import HostReference
from retinue.apps import Isolation
from retinue.client import HostGone
from retinue.errors import Overloaded, SessionConflict
from retinue.hooks import DeactivationReason
from retinue.ids import SessionAddress
from tests.support import soon


def address(session_id: str, user: str = "u") -> SessionAddress:
    return SessionAddress(store_id="store", tenant_id="t", user_id=user, session_id=session_id)


class Hosts:
    """Hosts as the directory sees them."""

    def __init__(self) -> None:
        self.taken = 0
        self.active: dict[str, dict[str, SessionAddress]] = {}
        """Addresses by activation id, by host id."""
        self.busy: set[str] = set()
        """Hosts, or sessions, that must stay."""
        self.idle: dict[str, float] = {}
        """Seconds, by session id; 0 for those not named."""
        self.left: list[str] = []
        self.dead: dict[str, asyncio.Event] = {}
        self.recovered: list[str] = []
        self.returned: list[str] = []
        self.passivated: list[tuple[str, DeactivationReason]] = []
        self.activations = 0
        self.pings = 0
        self.held_elsewhere = False
        self.silent: set[str] = set()
        self.stillborn = 0
        """So many hosts die as they are activated."""
        self.activating: asyncio.Event | None = None
        self.passivating: asyncio.Event | None = None
        self.leaving: asyncio.Event | None = None

    async def take(self, digest: str) -> HostReference:
        self.taken += 1
        host = HostReference(f"{digest}-{self.taken}", None)
        self.dead[host.host_id] = asyncio.Event()
        self.active[host.host_id] = {}
        return host

    async def give_back(self, digest: str, host: HostReference) -> None:
        self.returned.append(host.host_id)

    async def activate(
        self, host: HostReference, address: SessionAddress, activation_id: str, digest: str
    ) -> None:
        self.activations += 1
        if self.activating is not None:
            await self.activating.wait()
        if self.held_elsewhere:
            raise SessionConflict("another process has its lease", retry_after=15.0)
        if self.stillborn:
            self.stillborn -= 1
            raise HostGone("stillborn")
        self.active[host.host_id][activation_id] = address

    async def passivate(self, host: HostReference, activation_id: str, reason: DeactivationReason) -> bool:
        if self.passivating is not None:
            await self.passivating.wait()
        address = self.active[host.host_id].get(activation_id)
        if address is None:
            return True
        if self.busy & {host.host_id, address.session_id}:
            return False
        del self.active[host.host_id][activation_id]
        self.passivated.append((address.session_id, reason))
        return True

    async def leave(self, host: HostReference) -> None:
        if self.leaving is not None:
            await self.leaving.wait()
        self.left.append(host.host_id)
        self.dead[host.host_id].set()

    async def watch(self, host: HostReference) -> None:
        await self.dead[host.host_id].wait()
        raise HostGone("gone")

    async def ping(self, host: HostReference) -> Mapping[str, float | None]:
        self.pings += 1
        if host.host_id in self.silent:
            await asyncio.Event().wait()
        if self.dead[host.host_id].is_set():
            raise HostGone("gone")
        return {
            activation_id: None
            if self.busy & {host.host_id, address.session_id}
            else self.idle.get(address.session_id, 0.0)
            for activation_id, address in self.active[host.host_id].items()
        }

    def end(self, host: HostReference) -> None:
        self.dead[host.host_id].set()

    async def recover(self, host_id: str) -> None:
        self.recovered.append(host_id)

    def sessions(self, host: HostReference) -> set[str]:
        """Ids of the sessions that live there."""
        return {address.session_id for address in self.active[host.host_id].values()}


@pytest.fixture
def hosts() -> Hosts:
    return Hosts()


def isolation(digest: str) -> Isolation:
    return "shared" if digest.startswith("shared") else "dedicated"


@pytest.fixture
async def directory(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Directory]:
    monkeypatch.setattr(module, "FRESH", 0.0)
    made = Directory(
        control=hosts,
        take_host=hosts.take,
        give_back=hosts.give_back,
        recover=hosts.recover,
        max_resident=2,
        isolation=isolation,
    )
    yield made
    hosts.passivating = hosts.leaving = None
    await made.close()


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_concurrent_first_locates_share_one_activation(directory: Directory, hosts: Hosts) -> None:
    for app in ("app", "shared"):
        hosts.activating = asyncio.Event()
        hosts.activations = hosts.taken = 0
        waiting = [asyncio.ensure_future(directory.locate(address(app), app)) for _ in range(50)]
        await settle()
        hosts.activating.set()
        found = await asyncio.gather(*waiting)
        assert len({activation for _, activation in found}) == 1
        assert (hosts.activations, hosts.taken) == (1, 1)
    assert directory.statistics().activations == 2


async def test_another_user_with_the_same_session_id_has_another_host(
    directory: Directory, hosts: Hosts
) -> None:
    one = await directory.locate(address("s", "ann"), "app")
    two = await directory.locate(address("s", "bob"), "app")
    assert one[0].host_id != two[0].host_id


async def test_an_idle_session_moves_to_a_host_of_another_app_and_a_busy_one_does_not(
    directory: Directory, hosts: Hosts
) -> None:
    first, _ = await directory.locate(address("s"), "one")
    hosts.busy.add(first.host_id)
    with pytest.raises(SessionConflict, match="busy in the app one"):
        await directory.locate(address("s"), "two")
    assert (await directory.locate(address("s"), "one"))[0] == first
    hosts.busy.clear()
    second, _ = await directory.locate(address("s"), "two")
    assert second.host_id.startswith("two")
    await settle()
    assert hosts.left == [first.host_id]  # a dedicated host never serves a second session


async def test_at_the_cap_the_longest_unused_idle_session_leaves(directory: Directory, hosts: Hosts) -> None:
    directory.max_resident = 4
    for name in ("a", "b", "c", "d"):
        await directory.locate(address(name), "app")
    hosts.idle = {"a": 1.0, "b": 30.0, "c": 20.0, "d": 40.0}
    hosts.busy.add("d")
    await directory.locate(address("e"), "app")
    await directory.locate(address("f"), "app")
    assert hosts.passivated == [("b", "memory_pressure"), ("c", "memory_pressure")]
    statistics = directory.statistics()
    assert (statistics.resident, statistics.hosts) == (4, 4)
    assert statistics.passivations == {"memory_pressure": 2}


async def test_what_was_asked_for_a_moment_ago_does_not_make_room(directory: Directory, hosts: Hosts) -> None:
    """A session that a client has just found again is about to be used, whatever the host said before."""
    module.FRESH = 60.0
    hosts.idle = {"a": 30.0, "b": 20.0}
    await directory.locate(address("a"), "app")
    await directory.locate(address("b"), "app")
    await directory._look_at_all()
    await directory.locate(address("a"), "app")
    await directory.locate(address("c"), "app")
    assert hosts.passivated == [("b", "memory_pressure")]


async def test_with_all_busy_at_the_cap_a_start_is_refused(
    directory: Directory, hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "ROOM_WAIT", 0.05)
    monkeypatch.setattr(module, "_ROOM_POLL", 0.01)
    for name in ("a", "b"):
        host, _ = await directory.locate(address(name), "app")
        hosts.busy.add(host.host_id)
    with pytest.raises(Overloaded, match="--max-resident"):
        await directory.locate(address("c"), "app")
    assert hosts.taken == 2  # no process was started for it


async def test_a_dead_host_is_recovered_without_anybody_asking(directory: Directory, hosts: Hosts) -> None:
    host, first = await directory.locate(address("s"), "app")
    hosts.dead[host.host_id].set()
    await directory.host_lost(host.host_id)
    assert hosts.recovered == [host.host_id]
    _, second = await directory.locate(address("s"), "app")
    assert second != first


async def test_a_host_that_only_seemed_dead_keeps_its_session(directory: Directory, hosts: Hosts) -> None:
    host, activation = await directory.locate(address("s"), "app")
    await directory.host_lost(host.host_id)
    assert hosts.recovered == []
    assert await directory.locate(address("s"), "app") == (host, activation)


async def test_a_host_that_answers_nothing_is_ended_and_recovered(
    directory: Directory, hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PING_PERIOD", 0.01)
    monkeypatch.setattr(module, "SILENCE_LIMIT", 0.05)
    host, _ = await directory.locate(address("s"), "app")
    hosts.silent.add(host.host_id)
    async with asyncio.timeout(5):
        await hosts.dead[host.host_id].wait()
        await directory.host_lost(host.host_id)
    assert hosts.recovered == [host.host_id]


async def test_a_spare_that_died_is_replaced_by_the_next(directory: Directory, hosts: Hosts) -> None:
    hosts.stillborn = 2
    host, _ = await directory.locate(address("s"), "app")
    assert host.host_id == "app-3"
    # Each may have taken the lease before it died.
    assert hosts.recovered == ["app-1", "app-2"]
    assert directory.statistics().hosts == 1


async def test_a_session_that_another_process_has_costs_no_host(directory: Directory, hosts: Hosts) -> None:
    hosts.held_elsewhere = True
    with pytest.raises(SessionConflict, match="its lease"):
        await directory.locate(address("s"), "app")
    assert (hosts.returned, hosts.left) == (["app-1"], [])
    hosts.held_elsewhere = False
    await directory.locate(address("s"), "app")


async def test_leaving_in_good_order_is_no_death(directory: Directory, hosts: Hosts) -> None:
    await directory.locate(address("s"), "app")
    assert await directory.close() == [address("s").session_key]
    await asyncio.sleep(0)
    assert hosts.recovered == []


async def test_a_stale_activation_is_forgotten_and_its_host_ended(directory: Directory, hosts: Hosts) -> None:
    host, activation = await directory.locate(address("s"), "app")
    await directory.forget(address("s"), "some-other-activation")
    assert (await directory.locate(address("s"), "app"))[1] == activation
    hosts.busy.add("s")
    await directory.forget(address("s"), activation)
    assert (await directory.locate(address("s"), "app"))[1] == activation  # its host knows better
    hosts.busy.clear()
    await directory.forget(address("s"), activation)
    await settle()
    assert hosts.left == [host.host_id]
    assert hosts.passivated == [("s", "duplicate")]
    assert (await directory.locate(address("s"), "app"))[1] != activation


# --- leaving ----------------------------------------------------------------------------------------------


async def test_who_is_asked_for_while_it_leaves_comes_to_life_anew(
    directory: Directory, hosts: Hosts
) -> None:
    """A hook may take seconds: whoever wants the session waits, and does not get an activation that ends."""
    _, first = await directory.locate(address("s"), "app")
    hosts.passivating = asyncio.Event()
    leaving = asyncio.ensure_future(directory.forget(address("s"), first))
    await settle()
    asking = asyncio.ensure_future(directory.locate(address("s"), "app"))
    await settle()
    assert not asking.done()
    hosts.passivating.set()
    _, second = await soon(asking)
    await leaving
    assert second != first
    assert hosts.passivated == [("s", "duplicate")]


async def test_a_session_that_is_being_found_is_not_asked_to_leave(
    directory: Directory, hosts: Hosts
) -> None:
    await directory.locate(address("a"), "app")
    await directory.locate(address("b"), "app")
    hosts.idle = {"a": 9.0}
    lock = directory._lock(f"store:{address('a').session_key}")
    async with lock:
        await directory.locate(address("c"), "app")
    assert hosts.passivated == [("b", "memory_pressure")]


async def test_sessions_leave_after_the_idle_timeout_and_those_in_use_stay(
    directory: Directory, hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PING_PERIOD", 0.01)
    directory.idle_timeout = 10.0
    directory.max_resident = 4
    for name in ("old", "young", "busy"):
        await directory.locate(address(name), "app")
    hosts.idle = {"old": 10.5, "young": 9.5, "busy": 50.0}
    hosts.busy.add("busy")
    async with asyncio.timeout(5):
        while not hosts.left:
            await asyncio.sleep(0.01)
    seen = hosts.pings
    while hosts.pings < seen + 6:
        await asyncio.sleep(0.01)
    assert hosts.passivated == [("old", "idle")]
    assert directory.statistics().passivations == {"idle": 1}
    assert directory.statistics().idle_timeout == 10.0


async def test_what_a_host_no_longer_has_is_dropped(directory: Directory, hosts: Hosts) -> None:
    """Its store was silent when a run was to be accepted, or its lease was lost."""
    host, activation = await directory.locate(address("s"), "shared")
    hosts.active[host.host_id].clear()
    await directory._look_at_all()
    await settle()
    assert directory.resident(address("s")) is None
    assert (await directory.locate(address("s"), "shared"))[1] != activation


async def test_an_activation_that_nobody_waits_for_any_more_does_not_stay(
    directory: Directory, hosts: Hosts
) -> None:
    await directory.locate(address("a"), "shared")
    hosts.activating = asyncio.Event()
    asking = asyncio.ensure_future(directory.locate(address("s"), "shared"))
    await settle()
    asking.cancel()
    await settle()
    host, _ = await directory.locate(address("a"), "shared")
    hosts.active[host.host_id]["half"] = address("s")  # it got there all the same
    await directory._look_at_all()
    await settle()
    assert hosts.sessions(host) == {"a"}
    hosts.activating = None
    assert (await soon(directory.locate(address("s"), "shared")))[0] == host


# --- shared hosts -----------------------------------------------------------------------------------------


async def test_sessions_of_a_shared_app_fill_its_hosts_evenly(
    directory: Directory, hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosts_module, "SESSIONS_PER_HOST", 3)
    first = [(await directory.locate(address(f"s{number}"), "shared"))[0] for number in range(3)]
    assert len(set(first)) == 1
    second, _ = await directory.locate(address("s3"), "shared")
    assert second != first[0]
    third, activation = await directory.locate(address("s4"), "shared")
    assert third == second  # it has fewer
    assert hosts.taken == 2
    other, _ = await directory.locate(address("s4", "bob"), "shared")
    assert other == second
    await settle()
    await directory.forget(address("s4"), activation)
    await settle()
    assert hosts.left == []  # the others are still there
    statistics = directory.statistics()
    assert (statistics.resident, statistics.hosts, statistics.shared_hosts) == (5, 2, 2)


async def test_another_shared_host_is_taken_ahead_of_need(
    directory: Directory, hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosts_module, "SESSIONS_PER_HOST", 4)
    for number in range(3):
        await directory.locate(address(f"s{number}"), "shared")
    await settle()
    assert hosts.taken == 1
    last, _ = await directory.locate(address("s3"), "shared")
    await settle()
    assert hosts.taken == 2
    assert (await directory.locate(address("s4"), "shared"))[0] != last
    directory.max_resident = 2  # it takes none beyond the cap
    for number in range(5, 8):
        await directory.locate(address(f"s{number}"), "shared")
    await settle()
    assert hosts.taken == 2


async def test_a_shared_app_is_spread_over_processors_before_its_hosts_are_filled(
    directory: Directory, hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosts_module, "SESSIONS_BEFORE_SPREADING", 2)
    directory.spread, directory.max_resident = 2, 10
    for number in range(3):
        await directory.locate(address(f"s{number}"), "shared")
        await settle()
    assert hosts.taken == 2, "the third session is more than one process should have"
    for number in range(3, 12):
        await directory.locate(address(f"s{number}"), "shared")
        await settle()
    assert hosts.taken == 2, "there are only two processors"
    assert sorted(len(sessions) for sessions in hosts.active.values()) == [6, 6]


async def test_many_cold_sessions_at_once_take_no_more_hosts_than_they_need(
    directory: Directory, hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosts_module, "SESSIONS_PER_HOST", 50)
    directory.max_resident = 10
    found = await asyncio.gather(
        *(directory.locate(address(f"s{number}"), "shared") for number in range(120))
    )
    assert len({activation for _, activation in found}) == 120
    assert hosts.taken == 3
    assert max(len(hosts.sessions(host)) for host, _ in found) == 50


async def test_two_shared_apps_do_not_share_a_host(directory: Directory, hosts: Hosts) -> None:
    one, _ = await directory.locate(address("s"), "shared-one")
    two, _ = await directory.locate(address("t"), "shared-two")
    assert one != two
    moved, _ = await directory.locate(address("s"), "shared-two")
    assert moved == two
    assert hosts.passivated == [("s", "migrating")]
    await settle()
    assert hosts.left == []  # the empty one waits for the next session
    assert (await directory.locate(address("u"), "shared-one"))[0] == one


async def test_a_shared_host_without_sessions_leaves_after_a_while(
    directory: Directory, hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LINGER", 0.0)
    host, activation = await directory.locate(address("s"), "shared")
    await directory._look_at_all()
    await settle()
    assert hosts.left == []
    await directory.forget(address("s"), activation)
    await asyncio.sleep(0.001)
    await directory._look_at_all()
    await settle()
    assert hosts.left == [host.host_id]
    assert directory.statistics().hosts == 0


async def test_at_the_cap_a_full_shared_host_lets_its_longest_unused_sessions_go(
    directory: Directory, hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosts_module, "SESSIONS_PER_HOST", 2)
    monkeypatch.setattr(module, "EVICTED_TOGETHER", 1)
    directory.max_resident = 1
    for name in ("a", "b"):
        await directory.locate(address(name), "shared")
    hosts.idle = {"a": 5.0, "b": 50.0}
    await directory.locate(address("c"), "shared")
    assert hosts.passivated == [("b", "memory_pressure")]
    assert hosts.taken == 1  # no process came or went
    assert hosts.left == []


async def test_at_the_cap_a_start_of_a_shared_app_waits_for_a_session_that_ends(
    directory: Directory, hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosts_module, "SESSIONS_PER_HOST", 1)
    monkeypatch.setattr(module, "_ROOM_POLL", 0.001)
    directory.max_resident = 1
    await directory.locate(address("a"), "shared")
    hosts.busy.add("a")
    asking = asyncio.ensure_future(directory.locate(address("b"), "shared"))
    await settle()
    assert not asking.done()
    hosts.busy.clear()
    await soon(asking)
    hosts.busy.add("b")
    monkeypatch.setattr(module, "ROOM_WAIT", 0.01)
    with pytest.raises(Overloaded, match="--max-resident"):
        await directory.locate(address("c"), "shared")
    hosts.busy.clear()
    await directory.locate(address("c"), "shared")


async def test_at_the_cap_a_shared_host_makes_room_for_a_dedicated_session_only_as_a_whole(
    directory: Directory, hosts: Hosts
) -> None:
    shared, _ = await directory.locate(address("a"), "shared")
    await directory.locate(address("b"), "shared")
    dedicated, _ = await directory.locate(address("c"), "app")
    hosts.idle = {"a": 90.0, "b": 30.0, "c": 10.0}
    hosts.busy.add("b")
    await directory.locate(address("d"), "app")
    assert hosts.left == [dedicated.host_id]
    assert hosts.sessions(shared) == {"a", "b"}  # not one of them was disturbed for nothing
    hosts.busy.clear()
    await directory.locate(address("e"), "app")
    assert hosts.left == [dedicated.host_id, shared.host_id]


async def test_the_death_of_a_shared_host_concerns_all_its_sessions(
    directory: Directory, hosts: Hosts
) -> None:
    found = {name: await directory.locate(address(name), "shared") for name in ("a", "b", "c")}
    host, _ = found["a"]
    hosts.dead[host.host_id].set()
    await directory.host_lost(host.host_id)
    assert hosts.recovered == [host.host_id]
    for name in ("a", "b", "c"):
        second, activation = await directory.locate(address(name), "shared")
        assert second != host
        assert activation != found[name][1]
    statistics = directory.statistics()
    assert (statistics.lost_hosts, statistics.resident, statistics.hosts) == (1, 3, 1)


async def test_a_shared_host_that_was_not_reached_gets_no_session_until_it_answers(
    directory: Directory, hosts: Hosts
) -> None:
    first, _ = await directory.locate(address("a"), "shared")
    hosts.stillborn = 1
    second, _ = await directory.locate(address("b"), "shared")
    assert second != first
    assert hosts.recovered == []  # it may live: its watcher will tell
    await directory._look_at_all()
    assert directory._occupancy.hosts[first.host_id].unreachable is False


async def test_a_refused_activation_leaves_a_shared_host_as_it_was(
    directory: Directory, hosts: Hosts
) -> None:
    hosts.held_elsewhere = True
    with pytest.raises(SessionConflict, match="its lease"):
        await directory.locate(address("s"), "shared")
    hosts.held_elsewhere = False
    await directory.locate(address("s"), "shared")
    assert (hosts.taken, hosts.returned, hosts.left) == (1, [], [])


# --- after a restart --------------------------------------------------------------------------------------


async def test_hosts_that_were_in_use_are_adopted(directory: Directory, hosts: Hosts) -> None:
    shared, warm, served = [await hosts.take(app) for app in ("shared", "shared", "app")]
    sessions = [(address("a"), "act-a"), (address("b"), "act-b")]
    hosts.active[shared.host_id] = {activation: where for where, activation in sessions}
    directory.max_resident = 3
    directory.adopt(shared, "shared", sessions)
    directory.adopt(warm, "shared", [])
    directory.adopt(served, "app", [])  # it had a session: it serves no other
    await settle()
    assert hosts.left == [served.host_id]
    assert await directory.locate(address("b"), "shared") == (shared, "act-b")
    assert (await directory.locate(address("c"), "shared"))[0] == warm
