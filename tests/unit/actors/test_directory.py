"""The directory on the plain class, with hosts that are only remembered."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from retinue.actors import directory as module
from retinue.actors.directory import Directory, HostReference
from retinue.client import HostGone
from retinue.errors import Overloaded, SessionConflict
from retinue.ids import SessionAddress
from retinue.sessions import DeactivationReason


def address(session_id: str, user: str = "u") -> SessionAddress:
    return SessionAddress(store_id="store", tenant_id="t", user_id=user, session_id=session_id)


class Hosts:
    """Hosts as the directory sees them."""

    def __init__(self) -> None:
        self.taken = 0
        self.active: dict[str, str] = {}
        """Activation id by host id."""
        self.busy: set[str] = set()
        self.left: list[str] = []
        self.dead: dict[str, asyncio.Event] = {}
        self.recovered: list[str] = []
        self.returned: list[str] = []
        self.held_elsewhere = False
        self.silent: set[str] = set()
        self.stillborn = 0
        """So many hosts die as they are activated."""
        self.activating: asyncio.Event | None = None

    async def take(self, digest: str) -> HostReference:
        self.taken += 1
        host = HostReference(f"{digest}-{self.taken}", None)
        self.dead[host.host_id] = asyncio.Event()
        return host

    async def give_back(self, digest: str, host: HostReference) -> None:
        self.returned.append(host.host_id)

    async def activate(
        self, host: HostReference, address: SessionAddress, activation_id: str, digest: str
    ) -> None:
        if self.activating is not None:
            await self.activating.wait()
        if self.held_elsewhere:
            raise SessionConflict("another process has its lease", retry_after=15.0)
        if self.stillborn:
            self.stillborn -= 1
            raise HostGone("stillborn")
        self.active[host.host_id] = activation_id

    async def passivate(self, host: HostReference, activation_id: str, reason: DeactivationReason) -> bool:
        if host.host_id in self.busy:
            return False
        self.active.pop(host.host_id, None)
        return True

    async def leave(self, host: HostReference) -> None:
        self.left.append(host.host_id)
        self.dead[host.host_id].set()

    async def watch(self, host: HostReference) -> None:
        await self.dead[host.host_id].wait()
        raise HostGone("gone")

    async def ping(self, host: HostReference) -> None:
        if host.host_id in self.silent:
            await asyncio.Event().wait()
        if self.dead[host.host_id].is_set():
            raise HostGone("gone")

    def end(self, host: HostReference) -> None:
        self.dead[host.host_id].set()

    async def recover(self, host_id: str) -> None:
        self.recovered.append(host_id)


@pytest.fixture
def hosts() -> Hosts:
    return Hosts()


@pytest.fixture
async def directory(hosts: Hosts) -> AsyncIterator[Directory]:
    made = Directory(
        control=hosts,
        take_host=hosts.take,
        give_back=hosts.give_back,
        recover=hosts.recover,
        max_resident=2,
    )
    yield made
    await made.close()


async def test_concurrent_first_locates_share_one_activation(directory: Directory, hosts: Hosts) -> None:
    hosts.activating = asyncio.Event()
    waiting = [asyncio.ensure_future(directory.locate(address("s"), "app")) for _ in range(10)]
    await asyncio.sleep(0)
    hosts.activating.set()
    found = await asyncio.gather(*waiting)
    assert len({activation for _, activation in found}) == 1
    assert hosts.taken == 1


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
    assert hosts.left == [first.host_id]  # a dedicated host never serves a second session


async def test_at_the_cap_the_longest_resident_idle_session_leaves(
    directory: Directory, hosts: Hosts
) -> None:
    a, _ = await directory.locate(address("a"), "app")
    b, _ = await directory.locate(address("b"), "app")
    hosts.busy.add(a.host_id)
    await directory.locate(address("c"), "app")
    assert hosts.left == [b.host_id]
    assert directory.statistics().resident == 2


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
    await directory.forget(address("s"), activation)
    assert hosts.left == [host.host_id]
    assert (await directory.locate(address("s"), "app"))[1] != activation
