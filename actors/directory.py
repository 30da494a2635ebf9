"""The directory: which host each session lives in.

It guarantees one activation of a session in ordinary times; what holds at all times is one *writer*, by the
store's epoch. It knows no Ray: hosts and pools are reached through the protocols of
:mod:`retinue.actors.hosts`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakValueDictionary

import msgspec

from retinue.actors.background import Background
from retinue.actors.hosts import (
    GiveBack,
    HostControl,
    HostInUse,
    HostReference,
    Occupancy,
    Recover,
    Resident,
    TakeHost,
)
from retinue.apps import Isolation
from retinue.client import HostGone
from retinue.errors import Overloaded, RetinueError, SessionConflict
from retinue.hooks import DeactivationReason
from retinue.host import IDLE_TIMEOUT
from retinue.ids import SessionAddress, new_id
from retinue.store import LEASE_PERIOD

ROOM_WAIT = 5.0
"""Seconds that a start waits for a place before it is refused as ``overloaded``."""
LEAVE_LIMIT = 5.0
"""Seconds that a host has for leaving in good order before it is ended."""
PING_PERIOD = 5.0
"""Seconds between questions to each host whether it is there, and which of its sessions are idle."""
SILENCE_LIMIT = LEASE_PERIOD
"""Seconds without an answer after which a host is ended."""
LINGER = 60.0
"""Seconds for which a shared host without sessions waits for the next one."""
FRESH = 0.25
"""Seconds for which what a host said of its sessions is good enough to choose who leaves at the cap."""
EVICTED_TOGETHER = 16
"""Sessions of a shared app that are asked to leave at once where all its hosts are full."""
REMEMBERED_DEATHS = 1_000
_ROOM_POLL = 0.1
_LOOK_LIMIT = 1.0
"""Seconds for hosts to say which of their sessions are idle, when room is needed."""
_HOST_ATTEMPTS = 4


class DirectoryStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """What the directory knows and did."""

    resident: int
    """Sessions that live in a host."""
    max_resident: int
    """Session hosts that may be in use at once; see :class:`Directory`."""
    idle_timeout: float
    """Seconds."""
    hosts: int
    """Session hosts in use."""
    shared_hosts: int
    """Those of them that hold sessions of an app with ``isolation="shared"``."""
    lost_hosts: int
    activations: int
    passivations: dict[DeactivationReason, int]
    """Sessions that left, by reason."""


class Directory:
    """Sessions and their hosts. Belongs to one event loop.

    A session of a dedicated app gets a host of its own, which never serves another. Sessions of a shared app
    go to the host of that app that has the fewest, up to :data:`retinue.actors.hosts.SESSIONS_PER_HOST`;
    another host is taken before that where there is a processor for it. The cap counts hosts, because
    processes are what costs memory: dedicated sessions, and shared hosts whatever they hold.

    Args:
        control: reaches hosts.
        take_host, give_back: take a spare host of an app, and return one that served nobody.
        recover: ends what a dead host left.
        max_resident: session hosts that may be in use at once.
        spread: hosts over which a shared app is spread before its hosts are filled.
        idle_timeout: seconds without use after which a session is asked to leave.
        app_name, isolation: of an app, by its digest.
    """

    def __init__(
        self,
        *,
        control: HostControl,
        take_host: TakeHost,
        give_back: GiveBack,
        recover: Recover,
        max_resident: int,
        spread: int = 1,
        idle_timeout: float = IDLE_TIMEOUT,
        app_name: Callable[[str], str] = str,
        isolation: Callable[[str], Isolation] = lambda digest: "dedicated",
    ) -> None:
        self.max_resident = max_resident
        self.idle_timeout = idle_timeout
        self.spread = spread
        self._control = control
        self._take_host = take_host
        self._give_back = give_back
        self._recover = recover
        self._app_name = app_name
        self._isolation = isolation
        self._occupancy = Occupancy()
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """By session: held while it is found, moved, or asked to leave."""
        self._hosts_coming = 0
        """Hosts that are being taken from a pool."""
        self._widening: dict[str, asyncio.Future[None]] = {}
        """Shared apps for which room is being made, by digest."""
        self._looking: asyncio.Future[None] | None = None
        self._watching: dict[str, asyncio.Task[None]] = {}
        self._lost: OrderedDict[str, asyncio.Future[None]] = OrderedDict()
        self._background = Background("directory")
        self._lost_hosts = 0
        self._activations = 0
        self._passivations: Counter[DeactivationReason] = Counter()

    async def locate(self, address: SessionAddress, digest: str) -> tuple[HostReference, str]:
        """The host and activation id of a session, activating it where it is nowhere.

        Whoever asks for the same session meanwhile shares the attempt.

        Raises:
            SessionConflict: it is busy in another app, or another cluster's process holds it.
            Overloaded: no place became free in :data:`ROOM_WAIT` seconds.
        """
        key = _key(address)
        async with self._lock(key):
            found = self._occupancy.resident(key)
            if found is not None and found.digest != digest:
                await self._move_away(found)
                found = None
            if found is None:
                found = await self._activate(key, address, digest)
            elif found.idle_since is not None:
                found.idle_since = time.monotonic()  # somebody is about to use it
        return found.host.reference, found.activation_id

    def resident(self, address: SessionAddress) -> tuple[HostReference, str] | None:
        """The host and activation id of a session that is resident, whatever its app."""
        found = self._occupancy.resident(_key(address))
        return None if found is None else (found.host.reference, found.activation_id)

    def _lock(self, key: str) -> asyncio.Lock:
        return self._locks.setdefault(key, asyncio.Lock())

    async def _move_away(self, found: Resident) -> None:
        if not await self._passivate(found, "migrating"):
            app = self._app_name(found.digest)
            raise SessionConflict(
                f"session {found.address.session_id!r} is busy in the app {app}, or holds resources there; "
                "wait for its run, or close its resources",
                app=app,
            )

    async def _activate(self, key: str, address: SessionAddress, digest: str) -> Resident:
        for _ in range(_HOST_ATTEMPTS):
            host = await self._place(digest)
            activation_id = new_id("activation")
            try:
                await self._control.activate(host.reference, address, activation_id, digest)
            except HostGone:
                await self._not_reached(host)  # it died as a spare, or just now: the next one
                continue
            except RetinueError:
                await self._not_used(host)  # nothing of the session got there
                raise
            except BaseException:
                self._background.run(self._undo(host, activation_id))
                raise
            finally:
                host.promised -= 1
            resident = self._occupancy.settle(key, address, activation_id, host)
            self._activations += 1
            self._watch(host)
            return resident
        raise Overloaded(f"{_HOST_ATTEMPTS} session hosts in a row died while they were being started")

    async def _not_reached(self, host: HostInUse) -> None:
        """An activation may have got there or not."""
        host.unreachable = True
        if host.reference.host_id not in self._watching:  # it served nobody: nobody else will notice
            self._occupancy.drop_host(host)
            self._control.end(host.reference)
            await self._recover(host.reference.host_id)

    async def _not_used(self, host: HostInUse) -> None:
        if host.isolation == "dedicated":
            self._occupancy.drop_host(host)
            await self._give_back(host.digest, host.reference)

    async def _undo(self, host: HostInUse, activation_id: str) -> None:
        """Nobody waits for this activation any more, and it may stand."""
        if host.isolation == "dedicated":
            self._let_go(host)
        else:
            with contextlib.suppress(HostGone):
                await self._control.passivate(host.reference, activation_id, "duplicate")

    # --- places -------------------------------------------------------------------------------------------

    async def _place(self, digest: str) -> HostInUse:
        """A host with a place that is promised to the caller."""
        if self._isolation(digest) == "dedicated":
            host = await self._new_host(digest)
            host.promised += 1
            return host
        while (found := self._occupancy.with_room(digest)) is None:
            await asyncio.shield(self._widening.get(digest) or self._begin_widening(digest))
        found.promised += 1
        wider = found.nearly_full or self._occupancy.is_crowded(digest, self.spread)
        if wider and not self._full and digest not in self._widening:
            self._begin_widening(digest, ahead=True)  # ahead of need: a process takes a second to start
        return found

    def _begin_widening(self, digest: str, *, ahead: bool = False) -> asyncio.Future[None]:
        """Make room for a shared app; one attempt, however many sessions wait for it."""
        work = self._take(digest) if ahead else self._widen(digest)
        widening: asyncio.Future[Any] = asyncio.ensure_future(work)
        self._widening[digest] = widening
        widening.add_done_callback(functools.partial(self._widened, digest))
        return widening

    def _widened(self, digest: str, widening: asyncio.Future[Any]) -> None:
        del self._widening[digest]
        if not widening.cancelled():
            widening.exception()  # whoever still waits for it is told

    async def _widen(self, digest: str) -> None:
        """Another host for a shared app; at the cap, room in those that it has."""
        deadline = time.monotonic() + ROOM_WAIT
        while self._occupancy.with_room(digest) is None:
            if not self._full:
                await self._take(digest)
            elif not (await self._evict(digest) or await self._free_a_host()):
                await self._wait_for_room(deadline)

    async def _new_host(self, digest: str) -> HostInUse:
        """A host from the pool, once there is room for another process."""
        deadline = time.monotonic() + ROOM_WAIT
        while self._full:
            if not await self._free_a_host():
                await self._wait_for_room(deadline)
        return await self._take(digest)

    async def _wait_for_room(self, deadline: float) -> None:
        if time.monotonic() > deadline:
            raise Overloaded(
                f"{len(self._occupancy.hosts)} session hosts are in use by sessions that must stay, which is "
                "the cap; try again, or raise it: retinue up --max-resident N"
            )
        await asyncio.sleep(_ROOM_POLL)

    async def _take(self, digest: str) -> HostInUse:
        self._hosts_coming += 1
        try:
            reference = await self._take_host(digest)
            host = self._occupancy.add_host(reference, digest, self._isolation(digest))
            if host.isolation == "shared":
                self._watch(host)
            return host
        finally:
            self._hosts_coming -= 1

    @property
    def _full(self) -> bool:
        return len(self._occupancy.hosts) + self._hosts_coming >= self.max_resident

    async def _evict(self, digest: str) -> bool:
        """Ask sessions of a shared app to leave, the longest unused first; whether one did or is about to."""
        await self._look_at_all()
        idle = self._occupancy.idle_sessions(digest)
        asked = [each for each in idle if not self._lock(each.key).locked()][:EVICTED_TOGETHER]
        if idle and not asked:
            await asyncio.sleep(_ROOM_POLL)
            return True
        left = await asyncio.gather(*(self._ask_to_leave(each, "memory_pressure") for each in asked))
        return any(left)

    async def _free_a_host(self) -> bool:
        """Let the host go whose sessions were unused for longest; false when all must stay."""
        await self._look_at_all()
        for host in self._occupancy.idle_hosts():
            if await self._empty(host):
                return True
        return False

    async def _empty(self, host: HostInUse) -> bool:
        residents = list(host.residents.values())
        left = await asyncio.gather(*(self._ask_to_leave(each, "memory_pressure") for each in residents))
        if not all(left) or host.load:
            return False
        await asyncio.shield(self._let_go(host))
        return True

    # --- leaving ------------------------------------------------------------------------------------------

    async def _ask_to_leave(self, resident: Resident, reason: DeactivationReason) -> bool:
        """Whether it left; false at once for a session that somebody is finding just now."""
        lock = self._lock(resident.key)
        if lock.locked():
            return False
        async with lock:
            return await self._passivate(resident, reason)

    async def _passivate(self, resident: Resident, reason: DeactivationReason) -> bool:
        """With the session's lock held."""
        host = resident.host
        if host.residents.get(resident.activation_id) is not resident:
            return True
        try:
            left = await self._control.passivate(host.reference, resident.activation_id, reason)
        except HostGone:
            left = True
        if left:
            self._passivations[reason] += 1
            self._occupancy.remove(resident)
            if host.isolation == "dedicated":
                self._let_go(host)
        else:
            resident.idle_since = None
        return left

    def _let_go(self, host: HostInUse) -> asyncio.Future[None]:
        """End a host in good order; done when it has ended. A dedicated one never serves a second session."""
        if host.ending is None:
            host.ending = asyncio.ensure_future(self._end(host))
        return host.ending

    async def _end(self, host: HostInUse) -> None:
        try:
            async with asyncio.timeout(LEAVE_LIMIT):
                await self._control.leave(host.reference)
        except (HostGone, TimeoutError):
            pass  # leave() ends the process in any case
        finally:
            self._occupancy.drop_host(host)

    # --- what hosts say -----------------------------------------------------------------------------------

    async def _look_at_all(self) -> None:
        """Hear from every host that was silent for a moment, to know who is idle; once for all callers."""
        if self._looking is None:
            self._looking = asyncio.ensure_future(self._look_around())
            self._looking.add_done_callback(lambda _: setattr(self, "_looking", None))
        await asyncio.shield(self._looking)

    async def _look_around(self) -> None:
        now = time.monotonic()
        stale = [host for host in self._occupancy.hosts.values() if now - host.heard_at > FRESH]
        if stale:
            asking = asyncio.gather(*map(self._look_at, stale), return_exceptions=True)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_LIMIT):
                    await asking

    async def _look_at(self, host: HostInUse) -> None:
        """Ask a host for its sessions. Raises :class:`HostGone`."""
        asked_at = time.monotonic()
        known = set(host.residents)
        said = await self._control.ping(host.reference)
        host.heard_at = time.monotonic()
        host.unreachable = False
        for activation_id, idle in said.items():
            resident = host.residents.get(activation_id)
            if resident is not None:
                resident.idle_since = None if idle is None else asked_at - idle
        self._background.run(self._tidy(host, said, known))

    async def _tidy(self, host: HostInUse, said: Mapping[str, float | None], known: set[str]) -> None:
        """What follows from a host's answer: sessions that nobody uses leave, and so does an empty host."""
        for activation_id in known - set(said):
            # It is no longer there (its store was silent when a run was accepted, or its lease is lost).
            if (resident := host.residents.get(activation_id)) is not None:
                await self._ask_to_leave(resident, "duplicate")
        if not host.promised:
            for activation_id in set(said) - set(host.residents):  # its activation was given up half-way
                with contextlib.suppress(HostGone):
                    await self._control.passivate(host.reference, activation_id, "duplicate")
        idle = [
            resident
            for activation_id, seconds in said.items()
            if seconds is not None
            and seconds >= self.idle_timeout
            and (resident := host.residents.get(activation_id)) is not None
        ]
        await asyncio.gather(*(self._ask_to_leave(resident, "idle") for resident in idle))
        empty = host.empty_since is not None and not host.load
        if empty and time.monotonic() - (host.empty_since or 0.0) > LINGER:
            self._let_go(host)

    # --- hosts that die -----------------------------------------------------------------------------------

    def _watch(self, host: HostInUse) -> None:
        if host.reference.host_id not in self._watching:
            self._watching[host.reference.host_id] = asyncio.ensure_future(self._watched(host))

    async def _watched(self, host: HostInUse) -> None:
        pinging = asyncio.ensure_future(self._keep_looking(host))
        try:
            await self._control.watch(host.reference)
        except HostGone:
            if host.ending is None:
                await self._host_died(host)
        finally:
            pinging.cancel()
            self._watching.pop(host.reference.host_id, None)

    async def _keep_looking(self, host: HostInUse) -> None:
        """End a host that answers nothing for a lease period: others could take its sessions by now."""
        with contextlib.suppress(HostGone):
            while True:
                await asyncio.sleep(min(PING_PERIOD, max(self.idle_timeout / 4, 0.1)))
                try:
                    async with asyncio.timeout(SILENCE_LIMIT):
                        await self._look_at(host)
                except TimeoutError:
                    self._control.end(host.reference)
                    return

    async def _host_died(self, host: HostInUse) -> None:
        host_id = host.reference.host_id
        done = self._lost.setdefault(host_id, asyncio.get_running_loop().create_future())
        while len(self._lost) > REMEMBERED_DEATHS:
            self._lost.popitem(last=False)
        self._lost_hosts += 1
        host.ending = done
        self._occupancy.drop_host(host)
        self._control.end(host.reference)  # should it only seem dead: fenced, it is of no use
        try:
            await self._recover(host_id)
        finally:
            done.set_result(None)

    async def host_lost(self, host_id: str) -> None:
        """A client could not reach a host: return once it is known to live, or its runs were ended."""
        if host_id in self._lost:
            await asyncio.shield(self._lost[host_id])
            return
        host = self._occupancy.hosts.get(host_id)
        if host is None or host.ending is not None:
            return
        try:
            async with asyncio.timeout(SILENCE_LIMIT):
                await self._look_at(host)
            return
        except TimeoutError:
            self._control.end(host.reference)
        except HostGone:
            pass
        watching = self._watching.get(host_id)
        if watching is not None:
            await asyncio.wait([watching])

    async def forget(self, address: SessionAddress, activation_id: str) -> None:
        """A client found that this activation is of no use any more; its host is asked."""
        key = _key(address)
        async with self._lock(key):
            found = self._occupancy.resident(key)
            if found is not None and found.activation_id == activation_id:
                await self._passivate(found, "duplicate")

    # --- rebuilding, leaving ------------------------------------------------------------------------------

    def adopt(self, host: HostReference, digest: str, sessions: Sequence[tuple[SessionAddress, str]]) -> None:
        """Take over a host that was in use before this directory started."""
        known = self._occupancy.add_host(host, digest, self._isolation(digest))
        for address, activation_id in sessions:
            self._occupancy.settle(_key(address), address, activation_id, known)
        if not sessions:
            known.empty_since = time.monotonic()
            if known.isolation == "dedicated":
                self._let_go(known)
                return
        self._watch(known)

    async def close(self) -> list[str]:
        """End every host in good order; the session keys that were resident."""
        keys = [resident.address.session_key for resident in self._occupancy.residents()]
        await asyncio.gather(*(self._let_go(host) for host in list(self._occupancy.hosts.values())))
        self._passivations["shutting_down"] += len(keys)
        for task in self._watching.values():
            task.cancel()
        self._background.close()
        return keys

    def statistics(self) -> DirectoryStatistics:
        hosts = self._occupancy.hosts.values()
        return DirectoryStatistics(
            resident=len(self._occupancy.residents()),
            max_resident=self.max_resident,
            idle_timeout=self.idle_timeout,
            hosts=len(hosts),
            shared_hosts=sum(host.isolation == "shared" for host in hosts),
            lost_hosts=self._lost_hosts,
            activations=self._activations,
            passivations=dict(self._passivations),
        )


def _key(address: SessionAddress) -> str:
    return f"{address.store_id}:{address.session_key}"
