"""The pool keeper on the plain class, with processes that are only counted."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from retinue.actors.pool import PoolKeeper, PoolOptions
from retinue.client import HostGone
from retinue.errors import Overloaded, ValidationFailed


class Processes:
    """Starts numbered handles."""

    def __init__(self) -> None:
        self.session_hosts: list[str] = []
        self.child_hosts: dict[str, asyncio.Event] = {}
        self.stopped: list[str] = []
        self.failure: Exception | None = None

    async def start_session_host(self, host_id: str) -> Any:
        if self.failure:
            raise self.failure
        self.session_hosts.append(host_id)
        return host_id

    async def start_child_host(self, host_id: str) -> Any:
        if self.failure:
            raise self.failure
        self.child_hosts[host_id] = asyncio.Event()
        return host_id

    async def watch_child_host(self, handle: Any) -> None:
        await self.child_hosts[handle].wait()
        raise HostGone("killed")

    def stop(self, handle: Any) -> None:
        self.stopped.append(handle)


def keeper(processes: Processes, **options: int) -> PoolKeeper:
    return PoolKeeper("app", processes, PoolOptions(**options))


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_spares_are_started_ahead_and_never_given_twice() -> None:
    processes = Processes()
    pool = keeper(processes, session_spares=2, child_spares=1)
    pool.prepare()
    await settle()
    assert (len(processes.session_hosts), len(processes.child_hosts)) == (2, 1)
    taken = [(await pool.take_host()).host_id for _ in range(5)]
    await settle()
    assert len(set(taken)) == 5
    assert len(processes.session_hosts) == 7  # two ahead again


async def test_without_spares_a_taker_waits_for_a_host_of_its_own() -> None:
    processes = Processes()
    pool = keeper(processes, session_spares=0, child_spares=0)
    hosts = await asyncio.gather(*(pool.take_host() for _ in range(3)))
    await settle()
    assert len({host.host_id for host in hosts}) == 3
    assert len(processes.session_hosts) == 3


async def test_what_keeps_a_host_from_starting_reaches_the_taker() -> None:
    processes = Processes()
    pool = keeper(processes, session_spares=0, child_spares=0)
    processes.failure = ValidationFailed("the app is broken", path="app")
    with pytest.raises(ValidationFailed, match="the app is broken"):
        await pool.take_host()
    processes.failure = RuntimeError("no memory")
    with pytest.raises(Overloaded, match="no memory"):
        await pool.assign("root", 1, nested=False)
    processes.failure = None
    assert (await pool.take_host()).host_id in processes.session_hosts


async def test_places_are_spread_and_bounded() -> None:
    processes = Processes()
    pool = keeper(processes, child_spares=2, max_child_hosts=2, children_per_host=3, session_spares=0)
    pool.prepare()
    await settle()
    places = await pool.assign("root", 4, nested=False)
    assert sorted(count for _, count in places) == [2, 2]
    rest = await pool.assign("root", 9, nested=False)
    assert sum(count for _, count in rest) == 2  # 3 + 3 places in all
    waiting = asyncio.ensure_future(pool.assign("root", 1, nested=False))
    await settle()
    assert not waiting.done()
    pool.release("root", places[0][0].host_id, 1)
    ((host, count),) = await waiting
    assert (host.host_id, count) == (places[0][0].host_id, 1)


async def test_nothing_is_kept_of_session_hosts_whose_delegates_have_ended() -> None:
    pool = keeper(Processes(), child_spares=1, max_child_hosts=1, session_spares=0)
    for number in range(100):
        ((host, count),) = await pool.assign(f"host-{number}", 2, nested=False)
        pool.release(f"host-{number}", host.host_id, 1)
        pool.release(f"host-{number}", host.host_id, count - 1)
        assert not pool._child_hosts[host.host_id].load
    assert pool.statistics().children == 0


async def test_delegates_of_delegates_do_not_wait_for_their_parents_places() -> None:
    processes = Processes()
    pool = keeper(processes, child_spares=1, max_child_hosts=1, children_per_host=1, session_spares=0)
    await pool.assign("root", 1, nested=False)
    ((_, count),) = await pool.assign("root", 5, nested=True)
    assert count == 5


async def test_a_cancelled_wait_gives_nothing_away() -> None:
    processes = Processes()
    pool = keeper(processes, child_spares=1, max_child_hosts=1, children_per_host=1, session_spares=0)
    ((host, _),) = await pool.assign("a", 1, nested=False)
    waiting = asyncio.ensure_future(pool.assign("b", 1, nested=False))
    await settle()
    waiting.cancel()
    await settle()
    pool.release("a", host.host_id, 1)
    ((again, _),) = await asyncio.wait_for(pool.assign("c", 1, nested=False), 1)
    assert again.host_id == host.host_id


async def test_a_dead_session_host_frees_its_places_and_a_dead_child_host_is_replaced() -> None:
    processes = Processes()
    pool = keeper(processes, child_spares=1, max_child_hosts=1, children_per_host=2, session_spares=0)
    ((host, _),) = await pool.assign("dead", 2, nested=False)
    pool.release_all("dead")
    assert pool.statistics().children == 0
    processes.child_hosts[host.host_id].set()
    await settle()
    ((other, _),) = await pool.assign("alive", 1, nested=False)
    assert other.host_id != host.host_id


async def test_a_retired_pool_ends_what_nobody_uses_and_comes_back_when_needed() -> None:
    processes = Processes()
    pool = keeper(processes, session_spares=2, child_spares=1, max_child_hosts=2)
    pool.prepare()
    await settle()
    ((used, _),) = await pool.assign("root", 1, nested=False)
    pool.retire(unused_for=3600)
    assert processes.stopped == []
    pool.retire()
    assert sorted(processes.stopped) == sorted(processes.session_hosts)
    assert used.host_id not in processes.stopped
    host = await pool.take_host()
    assert host.host_id not in processes.stopped
