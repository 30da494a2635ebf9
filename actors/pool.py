"""The pool keeper of one app: spare session hosts, and places for delegates in child hosts.

It alone starts hosts of its app, so that they inherit the right runtime environment after the client that
brought the app is gone. It knows no Ray: hosts are started through :class:`HostFactory`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from retinue.actors.background import Background
from retinue.actors.hosts import HostReference
from retinue.client import HostGone
from retinue.errors import Overloaded, RetinueError
from retinue.ids import new_id

CHILDREN_PER_HOST = 64
"""Delegates at once in one child host."""
SESSION_SPARES = 2
CHILD_SPARES = 1
REFILL_DELAY = 0.25
"""Seconds before the next spare is started while others are left: a process that starts takes a processor,
which the session that is just coming to life needs."""
POOL_IDLE = 300.0
"""Seconds without any request after which a pool ends its unused processes."""


class PoolOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How many processes a pool keeps ready, and how many it may have."""

    session_spares: int = SESSION_SPARES
    """Session hosts started ahead of need."""
    child_spares: int = CHILD_SPARES
    """Child hosts started ahead of need."""
    max_child_hosts: int = 2
    """Child hosts at most, usually as many as the cluster has processors."""
    children_per_host: int = CHILDREN_PER_HOST


class HostFactory(Protocol):
    """Starts processes."""

    async def start_session_host(self, host_id: str) -> Any:
        """A handle, once the host answers."""
        ...

    async def start_child_host(self, host_id: str) -> Any: ...

    async def watch_child_host(self, handle: Any) -> None:
        """Return when it left; raise :class:`HostGone` when it died."""
        ...

    def stop(self, handle: Any) -> None:
        """End a process that nobody uses."""
        ...


class PoolStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """What a pool has."""

    app: str
    session_spares: int
    child_hosts: int
    children: int
    waiting: int
    """Delegates that wait for a place."""


@dataclass
class _ChildHost:
    host_id: str
    handle: Any
    load: Counter[str] = field(default_factory=Counter)
    """Delegates here, by the session host whose they are."""

    @property
    def children(self) -> int:
        return self.load.total()


@dataclass
class _Wait:
    requester: str
    count: int
    answer: asyncio.Future[list[tuple[HostReference, int]]]


class PoolKeeper:
    """Hosts of one app. Belongs to one event loop."""

    def __init__(self, app: str, factory: HostFactory, options: PoolOptions) -> None:
        self._app = app
        self._factory = factory
        self._options = options
        self._spares: deque[HostReference] = deque()
        self._background = Background(f"pool of {app}")
        self._takers: deque[asyncio.Future[HostReference]] = deque()
        self._session_hosts_coming = 0
        self._child_hosts: dict[str, _ChildHost] = {}
        self._child_hosts_coming = 0
        self._waiting: deque[_Wait] = deque()
        self._ready_ahead = False
        """Spares are kept; not while the pool is retired."""
        self._used = time.monotonic()

    def prepare(self) -> None:
        """Start the spares, and keep them up from now on."""
        self._used = time.monotonic()
        if self._ready_ahead:
            return
        self._ready_ahead = True
        self._refill()
        self._refill_child_hosts()

    def retire(self, unused_for: float = 0.0) -> None:
        """End what nobody uses, if there was no request for so many seconds; the next one prepares again."""
        if time.monotonic() - self._used < unused_for:
            return
        self._ready_ahead = False
        while self._spares:
            self._factory.stop(self._spares.popleft().handle)
        for host in list(self._child_hosts.values()):
            if not host.children:
                del self._child_hosts[host.host_id]
                self._factory.stop(host.handle)

    def _refill_child_hosts(self) -> None:
        if not self._ready_ahead:
            return
        while len(self._child_hosts) + self._child_hosts_coming < self._options.child_spares:
            self._start_child_host()

    # --- session hosts ------------------------------------------------------------------------------------

    async def take_host(self) -> HostReference:
        """A session host that nobody else has; waits for one to start where no spare is ready.

        Raises:
            Overloaded: it could not be started.
        """
        self.prepare()
        if self._spares:
            host = self._spares.popleft()
            self._refill_soon()
            return host
        taker: asyncio.Future[HostReference] = asyncio.get_running_loop().create_future()
        self._takers.append(taker)
        self._refill()
        return await taker

    def _refill_soon(self) -> None:
        """Start the next spare: at once when none is left, else after whoever took one has begun its run."""
        if self._spares:
            self._background.run(self._refill_later())
        else:
            self._refill()

    async def _refill_later(self) -> None:
        await asyncio.sleep(REFILL_DELAY)
        self._refill()

    def _refill(self) -> None:
        ahead = self._options.session_spares if self._ready_ahead else 0
        wanted = ahead + len(self._takers)
        while len(self._spares) + self._session_hosts_coming < wanted:
            self._session_hosts_coming += 1
            self._background.run(self._start_session_host())

    async def _start_session_host(self) -> None:
        host_id = new_id("host")
        try:
            handle = await self._factory.start_session_host(host_id)
        except Exception as error:
            self._session_hosts_coming -= 1
            while self._takers:
                taker = self._takers.popleft()
                if not taker.done():
                    taker.set_exception(self._cannot_start("session host", error))
                    break
            return
        self._session_hosts_coming -= 1
        self.give_back(HostReference(host_id, handle))

    def give_back(self, host: HostReference) -> None:
        """This host is free for anybody: it is new, or served nobody."""
        while self._takers:
            taker = self._takers.popleft()
            if not taker.done():
                taker.set_result(host)
                return
        if self._ready_ahead:
            self._spares.append(host)
        else:
            self._factory.stop(host.handle)

    def _cannot_start(self, what: str, error: Exception) -> RetinueError:
        if isinstance(error, RetinueError):
            return error
        return Overloaded(f"a {what} of {self._app} could not be started: {error}")

    # --- places for delegates -----------------------------------------------------------------------------

    async def assign(self, requester: str, count: int, nested: bool) -> list[tuple[HostReference, int]]:
        """Places for up to ``count`` delegates of a session host: hosts, and how many may go to each.

        Waits until there is at least one place. ``nested`` delegates (of delegates) are placed beyond the
        limit rather than made to wait for the place that their own parents hold.
        """
        self.prepare()
        wait = _Wait(requester, count, asyncio.get_running_loop().create_future())
        if nested and self._child_hosts:
            host = min(self._child_hosts.values(), key=lambda each: each.children)
            host.load[requester] += count
            return [(HostReference(host.host_id, host.handle), count)]
        self._waiting.append(wait)
        self._serve()
        try:
            return await wait.answer
        except asyncio.CancelledError:
            self._give_back(wait)
            raise

    def _give_back(self, wait: _Wait) -> None:
        if wait in self._waiting:
            self._waiting.remove(wait)
        elif wait.answer.done() and not wait.answer.cancelled() and wait.answer.exception() is None:
            for host, count in wait.answer.result():
                self.release(wait.requester, host.host_id, count)

    def _serve(self) -> None:
        """Give the free places to those who wait, first come first served, evenly over the hosts."""
        while self._waiting:
            wait = self._waiting[0]
            if wait.answer.done():
                self._waiting.popleft()
                continue
            places = self._take_places(wait)
            if not places:
                break
            self._waiting.popleft()
            wait.answer.set_result(places)
        needed = sum(wait.count for wait in self._waiting)
        coming = self._child_hosts_coming * self._options.children_per_host
        while needed > coming and (
            len(self._child_hosts) + self._child_hosts_coming < self._options.max_child_hosts
        ):
            self._start_child_host()
            coming += self._options.children_per_host

    def _take_places(self, wait: _Wait) -> list[tuple[HostReference, int]]:
        free = {
            host.host_id: self._options.children_per_host - host.children
            for host in self._child_hosts.values()
        }
        given: Counter[str] = Counter()
        for _ in range(wait.count):
            host_id = max(free, key=lambda each: free[each], default=None)
            if host_id is None or free[host_id] <= 0:
                break
            free[host_id] -= 1
            given[host_id] += 1
        for host_id, count in given.items():
            self._child_hosts[host_id].load[wait.requester] += count
        if self._room_to_grow and all(host.children for host in self._child_hosts.values()):
            self._start_child_host()  # so that one death does not take all delegates with it
        return [
            (HostReference(host_id, self._child_hosts[host_id].handle), count)
            for host_id, count in given.items()
        ]

    @property
    def _room_to_grow(self) -> bool:
        coming = self._child_hosts_coming
        return coming == 0 and len(self._child_hosts) + coming < self._options.max_child_hosts

    def release(self, requester: str, host_id: str, count: int) -> None:
        """Delegates of a session host have ended."""
        host = self._child_hosts.get(host_id)
        if host is not None:
            host.load[requester] -= count
            if host.load[requester] <= 0:
                del host.load[requester]  # session hosts come and go: nothing of them stays here
            self._serve()

    def release_all(self, requester: str) -> None:
        """A session host is gone: its places are free."""
        for host in self._child_hosts.values():
            host.load.pop(requester, None)
        self._serve()

    def _start_child_host(self) -> None:
        self._child_hosts_coming += 1
        self._background.run(self._bring_child_host())

    async def _bring_child_host(self) -> None:
        host_id = new_id("child")
        try:
            handle = await self._factory.start_child_host(host_id)
        except Exception as error:
            self._child_hosts_coming -= 1
            if not self._child_hosts:
                while self._waiting:
                    wait = self._waiting.popleft()
                    if not wait.answer.done():
                        wait.answer.set_exception(self._cannot_start("child host", error))
            return
        self._child_hosts_coming -= 1
        self.adopt_child_host(host_id, handle)

    def adopt_child_host(self, host_id: str, handle: Any) -> None:
        """Give out places in this child host from now on."""
        self._child_hosts[host_id] = _ChildHost(host_id, handle)
        self._background.run(self._watch(host_id, handle))
        self._serve()

    async def _watch(self, host_id: str, handle: Any) -> None:
        with contextlib.suppress(HostGone):
            await self._factory.watch_child_host(handle)
        self._child_hosts.pop(host_id, None)
        self._refill_child_hosts()
        self._serve()

    # --- views, leaving -----------------------------------------------------------------------------------

    def hosts(self) -> tuple[list[HostReference], list[HostReference]]:
        """Spare session hosts and child hosts."""
        children = [HostReference(host.host_id, host.handle) for host in self._child_hosts.values()]
        return list(self._spares), children

    def close(self) -> None:
        """Start nothing any more."""
        self._background.close()

    def statistics(self) -> PoolStatistics:
        return PoolStatistics(
            app=self._app,
            session_spares=len(self._spares),
            child_hosts=len(self._child_hosts),
            children=sum(host.children for host in self._child_hosts.values()),
            waiting=sum(wait.count for wait in self._waiting),
        )
