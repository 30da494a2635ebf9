"""The directory: which host each session lives in.

It guarantees one activation of a session in ordinary times; what holds at all times is one *writer*, by the
store's epoch. It knows no Ray: hosts and pools are reached through the protocols below.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from retinue.client import HostGone
from retinue.errors import Overloaded, RetinueError, SessionConflict
from retinue.ids import SessionAddress, new_id
from retinue.sessions import DeactivationReason
from retinue.store import LEASE_PERIOD

ROOM_WAIT = 5.0
"""Seconds that a start waits for a place before it is refused as ``overloaded``."""
LEAVE_LIMIT = 5.0
"""Seconds that a host has for leaving in good order before it is ended."""
PING_PERIOD = 5.0
"""Seconds between questions to each host whether it is there."""
SILENCE_LIMIT = LEASE_PERIOD
"""Seconds without an answer after which a host is ended."""
_ROOM_POLL = 0.1
_HOST_ATTEMPTS = 4


@dataclass(frozen=True)
class HostReference:
    """A session host: its id and what the backend reaches it with."""

    host_id: str
    handle: Any


class HostControl(Protocol):
    """What the directory asks of hosts. Every method may raise :class:`HostGone`."""

    async def activate(
        self, host: HostReference, address: SessionAddress, activation_id: str, digest: str
    ) -> None: ...

    async def passivate(
        self, host: HostReference, activation_id: str, reason: DeactivationReason
    ) -> bool: ...

    async def leave(self, host: HostReference) -> None:
        """Let the host close everything and end."""
        ...

    async def watch(self, host: HostReference) -> None:
        """Return when the host left in good order; raise :class:`HostGone` when it died."""
        ...

    async def ping(self, host: HostReference) -> None: ...

    def end(self, host: HostReference) -> None:
        """End the process, whatever it is doing."""
        ...


TakeHost = Callable[[str], Awaitable[HostReference]]
"""Gives a spare host for an app digest, for the caller alone."""
GiveBack = Callable[[str, HostReference], Awaitable[None]]
"""Takes a host back that served nobody."""
Recover = Callable[[str], Awaitable[None]]
"""Fences a dead host and ends the runs that it had."""


@dataclass
class _Resident:
    address: SessionAddress
    activation_id: str
    digest: str
    host: HostReference
    since: float = field(default_factory=time.monotonic)


class DirectoryStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """What the directory knows and did."""

    resident: int
    max_resident: int
    hosts: int
    lost_hosts: int
    activations: int
    passivations: int


class Directory:
    """Sessions and their hosts. Belongs to one event loop.

    Args:
        control: reaches hosts.
        take_host, give_back: take a spare host of an app, and return one that served nobody.
        recover: ends what a dead host left.
        max_resident: sessions that may be resident at once.
        app_name: the name of an app by its digest, for messages.
    """

    def __init__(
        self,
        *,
        control: HostControl,
        take_host: TakeHost,
        give_back: GiveBack,
        recover: Recover,
        max_resident: int,
        app_name: Callable[[str], str] = str,
    ) -> None:
        self.max_resident = max_resident
        self._control = control
        self._take_host = take_host
        self._give_back = give_back
        self._recover = recover
        self._app_name = app_name
        self._resident: OrderedDict[str, _Resident] = OrderedDict()
        self._locks: dict[str, asyncio.Lock] = {}
        self._promised = 0
        """Places taken by activations under way."""
        self._watching: dict[str, asyncio.Task[None]] = {}
        self._lost: dict[str, asyncio.Future[None]] = {}
        self._leaving: set[str] = set()
        self._activations = 0
        self._passivations = 0

    async def locate(self, address: SessionAddress, digest: str) -> tuple[HostReference, str]:
        """The host and activation id of a session, activating it where it is nowhere.

        Raises:
            SessionConflict: it is busy in another app, or another cluster's process holds it.
            Overloaded: no place became free in :data:`ROOM_WAIT` seconds.
        """
        key = _key(address)
        lock = self._locks.setdefault(key, asyncio.Lock())
        async with lock:
            found = self._resident.get(key)
            if found is not None and found.digest != digest:
                await self._move_away(key, found)
                found = None
            if found is None:
                found = await self._activate(key, address, digest)
        if not lock.locked():
            self._locks.pop(key, None)
        return found.host, found.activation_id

    def resident(self, address: SessionAddress) -> tuple[HostReference, str] | None:
        """The host and activation id of a session that is resident, whatever its app."""
        found = self._resident.get(_key(address))
        return None if found is None else (found.host, found.activation_id)

    async def _move_away(self, key: str, found: _Resident) -> None:
        if not await self._passivate(key, found, "migrating"):
            app = self._app_name(found.digest)
            raise SessionConflict(
                f"session {found.address.session_id!r} is busy in the app {app}; wait for its run", app=app
            )

    async def _activate(self, key: str, address: SessionAddress, digest: str) -> _Resident:
        await self._make_room()
        self._promised += 1
        try:
            for _ in range(_HOST_ATTEMPTS):
                host = await self._take_host(digest)
                activation_id = new_id("activation")
                try:
                    await self._control.activate(host, address, activation_id, digest)
                except HostGone:
                    continue  # it died as a spare, or just now: the next one
                except RetinueError:
                    await self._give_back(digest, host)  # nothing of the session got there
                    raise
                except BaseException:
                    await self._let_go(host)
                    raise
                resident = _Resident(address, activation_id, digest, host)
                self._resident[key] = resident
                self._activations += 1
                self._watch(host)
                return resident
            raise Overloaded(f"{_HOST_ATTEMPTS} session hosts in a row died while they were being started")
        finally:
            self._promised -= 1

    # --- room ---------------------------------------------------------------------------------------------

    async def _make_room(self) -> None:
        deadline = time.monotonic() + ROOM_WAIT
        while len(self._resident) + self._promised >= self.max_resident:
            if await self._passivate_one():
                continue
            if time.monotonic() > deadline:
                raise Overloaded(
                    f"{len(self._resident)} sessions are resident and busy, which is the cap; try again, or "
                    "raise it: retinue up --max-resident N"
                )
            await asyncio.sleep(_ROOM_POLL)

    async def _passivate_one(self) -> bool:
        """Ask sessions to leave, the longest resident first, until one does."""
        for key, resident in list(self._resident.items()):
            if self._resident.get(key) is resident and await self._passivate(
                key, resident, "memory_pressure"
            ):
                return True
        return False

    async def _passivate(self, key: str, resident: _Resident, reason: DeactivationReason) -> bool:
        try:
            left = await self._control.passivate(resident.host, resident.activation_id, reason)
        except HostGone:
            left = True
        if left:
            self._passivations += 1
            self._resident.pop(key, None)
            await self._let_go(resident.host)
        return left

    async def _let_go(self, host: HostReference) -> None:
        """End a host: a dedicated one never serves a second session."""
        self._leaving.add(host.host_id)
        try:
            async with asyncio.timeout(LEAVE_LIMIT):
                await self._control.leave(host)
        except (HostGone, TimeoutError):
            pass  # leave() ends the process in any case

    # --- hosts that die -----------------------------------------------------------------------------------

    def _watch(self, host: HostReference) -> None:
        if host.host_id not in self._watching:
            self._watching[host.host_id] = asyncio.ensure_future(self._watched(host))

    async def _watched(self, host: HostReference) -> None:
        pinging = asyncio.ensure_future(self._end_if_silent(host))
        try:
            await self._control.watch(host)
        except HostGone:
            if host.host_id not in self._leaving:
                await self._host_died(host.host_id)
        finally:
            pinging.cancel()
        self._leaving.discard(host.host_id)
        self._watching.pop(host.host_id, None)

    async def _end_if_silent(self, host: HostReference) -> None:
        """End a host that answers nothing for a lease period: others could take its sessions by now."""
        with contextlib.suppress(HostGone):
            while True:
                await asyncio.sleep(PING_PERIOD)
                try:
                    async with asyncio.timeout(SILENCE_LIMIT):
                        await self._control.ping(host)
                except TimeoutError:
                    self._control.end(host)
                    return

    async def _host_died(self, host_id: str) -> None:
        done = self._lost.setdefault(host_id, asyncio.get_running_loop().create_future())
        for key, resident in list(self._resident.items()):
            if resident.host.host_id == host_id:
                del self._resident[key]
        try:
            await self._recover(host_id)
        finally:
            done.set_result(None)

    async def host_lost(self, host_id: str) -> None:
        """A client could not reach a host: return once it is known to live, or its runs were ended."""
        if host_id in self._lost:
            await asyncio.shield(self._lost[host_id])
            return
        for resident in self._resident.values():
            if resident.host.host_id == host_id:
                try:
                    async with asyncio.timeout(SILENCE_LIMIT):
                        await self._control.ping(resident.host)
                    return
                except TimeoutError:
                    self._control.end(resident.host)
                    break
                except HostGone:
                    break
        else:
            return
        watching = self._watching.get(host_id)
        if watching is not None:
            await asyncio.wait([watching])

    async def forget(self, address: SessionAddress, activation_id: str) -> None:
        """A client found that this activation is no longer in its host: end the host, which is of no use."""
        key = _key(address)
        found = self._resident.get(key)
        if found is not None and found.activation_id == activation_id:
            del self._resident[key]
            await self._let_go(found.host)

    # --- rebuilding, leaving ------------------------------------------------------------------------------

    def adopt(self, host: HostReference, digest: str, sessions: list[tuple[SessionAddress, str]]) -> None:
        """Take over a host that was there before this directory started."""
        for address, activation_id in sessions:
            self._resident[_key(address)] = _Resident(address, activation_id, digest, host)
        self._watch(host)

    async def close(self) -> list[str]:
        """End every host in good order; the session keys that were resident."""
        residents = list(self._resident.values())
        self._resident.clear()
        hosts = {resident.host.host_id: resident.host for resident in residents}
        await asyncio.gather(*(self._let_go(host) for host in hosts.values()))
        for task in self._watching.values():
            task.cancel()
        return [resident.address.session_key for resident in residents]

    def statistics(self) -> DirectoryStatistics:
        return DirectoryStatistics(
            resident=len(self._resident),
            max_resident=self.max_resident,
            hosts=len({resident.host.host_id for resident in self._resident.values()}),
            lost_hosts=len(self._lost),
            activations=self._activations,
            passivations=self._passivations,
        )


def _key(address: SessionAddress) -> str:
    return f"{address.store_id}:{address.session_key}"
