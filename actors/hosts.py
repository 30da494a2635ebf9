"""Session hosts as the directory sees them: how they are reached, and which of them have whose sessions.

Nothing here waits for anything: :class:`Occupancy` is a table, on which
:class:`retinue.actors.directory.Directory` acts.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from retinue.apps import Isolation
from retinue.hooks import DeactivationReason
from retinue.ids import SessionAddress

SESSIONS_PER_HOST = 256
"""Sessions that live at once in one session host of an app with ``isolation="shared"``."""
SESSIONS_BEFORE_SPREADING = 16
"""Sessions in each shared host of an app from which on more processes take some: each runs Python on one
processor."""
FILLED = 0.75
"""Part of a host's places beyond which it counts as nearly full."""


@dataclass(frozen=True)
class HostReference:
    """A host: its id and what the backend reaches it with."""

    host_id: str
    handle: Any


class HostControl(Protocol):
    """What the directory asks of hosts. Every method may raise :class:`retinue.client.HostGone`."""

    async def activate(
        self, host: HostReference, address: SessionAddress, activation_id: str, digest: str
    ) -> None: ...

    async def passivate(self, host: HostReference, activation_id: str, reason: DeactivationReason) -> bool:
        """Whether the activation is gone; false when it must stay. The host decides."""
        ...

    async def leave(self, host: HostReference) -> None:
        """Let the host close everything and end."""
        ...

    async def watch(self, host: HostReference) -> None:
        """Return when the host left in good order; raise :class:`HostGone` when it died."""
        ...

    async def ping(self, host: HostReference) -> Mapping[str, float | None]:
        """The host's activations, and for how many seconds each has been idle; ``None`` for those that must
        stay."""
        ...

    def end(self, host: HostReference) -> None:
        """End the process, whatever it is doing."""
        ...


TakeHost = Callable[[str], Awaitable[HostReference]]
"""Gives a spare host for an app digest, for the caller alone."""
GiveBack = Callable[[str, HostReference], Awaitable[None]]
"""Takes a host back that served nobody."""
Recover = Callable[[str], Awaitable[None]]
"""Fences a dead host and ends the runs that it had."""


@dataclass(eq=False)
class Resident:
    """A session in a host."""

    key: str
    address: SessionAddress
    activation_id: str
    host: HostInUse
    idle_since: float | None = field(default_factory=time.monotonic)
    """``time.monotonic()`` of its last use, as far as it was heard of; ``None`` when it had to stay."""

    @property
    def digest(self) -> str:
        return self.host.digest


@dataclass(eq=False)
class HostInUse:
    """A session host that was taken from its pool."""

    reference: HostReference
    digest: str
    isolation: Isolation
    residents: dict[str, Resident] = field(default_factory=dict)
    """By activation id."""
    promised: int = 0
    """Places taken by activations under way."""
    heard_at: float = 0.0
    """When it last answered, on the monotonic clock."""
    empty_since: float | None = field(default_factory=time.monotonic)
    unreachable: bool = False
    """A message did not get there; until it answers again it gets no new session."""
    ending: asyncio.Future[None] | None = None
    """Set when it is to end, or has died; done when nothing is left of it."""

    @property
    def load(self) -> int:
        return len(self.residents) + self.promised

    @property
    def nearly_full(self) -> bool:
        """Whether another host is taken ahead of need."""
        return self.load > FILLED * SESSIONS_PER_HOST

    @property
    def idle_since(self) -> float | None:
        """When the last of its sessions was used last; ``None`` when one had to stay, or is on its way."""
        if self.promised or self.ending is not None:
            return None
        youngest = 0.0
        for resident in self.residents.values():
            if resident.idle_since is None:
                return None
            youngest = max(youngest, resident.idle_since)
        return youngest


class Occupancy:
    """Which hosts are in use, and which sessions are where. Belongs to one event loop."""

    def __init__(self) -> None:
        self.hosts: dict[str, HostInUse] = {}
        """By host id; a host counts until its process was let go."""
        self._residents: dict[str, Resident] = {}

    def add_host(self, reference: HostReference, digest: str, isolation: Isolation) -> HostInUse:
        """A host is in use from now on; one that is known is left as it is."""
        host = self.hosts.get(reference.host_id)
        if host is None:
            host = self.hosts[reference.host_id] = HostInUse(reference, digest, isolation)
        return host

    def drop_host(self, host: HostInUse) -> list[Resident]:
        """A host is no longer in use; the sessions that were there."""
        self.hosts.pop(host.reference.host_id, None)
        residents = list(host.residents.values())
        for resident in residents:
            self.remove(resident)
        return residents

    def resident(self, key: str) -> Resident | None:
        return self._residents.get(key)

    def residents(self) -> list[Resident]:
        return list(self._residents.values())

    def settle(self, key: str, address: SessionAddress, activation_id: str, host: HostInUse) -> Resident:
        """A session lives in this host from now on."""
        resident = Resident(key, address, activation_id, host)
        self._residents[key] = host.residents[activation_id] = resident
        host.empty_since = None
        return resident

    def remove(self, resident: Resident) -> None:
        """A session has left its host."""
        if self._residents.get(resident.key) is resident:
            del self._residents[resident.key]
        host = resident.host
        host.residents.pop(resident.activation_id, None)
        if not host.residents:
            host.empty_since = time.monotonic()

    def with_room(self, digest: str) -> HostInUse | None:
        """The host of a shared app that has the fewest sessions, if it has room for another."""
        host = min(self._shared_by(digest), key=lambda each: each.load, default=None)
        return host if host is not None and host.load < SESSIONS_PER_HOST else None

    def is_crowded(self, digest: str, processes: int) -> bool:
        """Whether a shared app has fewer hosts than it may use processors, and all have work for another."""
        hosts = list(self._shared_by(digest))
        return len(hosts) < processes and all(host.load > SESSIONS_BEFORE_SPREADING for host in hosts)

    def _shared_by(self, digest: str) -> Iterator[HostInUse]:
        for host in self.hosts.values():
            usable = host.ending is None and not host.unreachable
            if host.digest == digest and host.isolation == "shared" and usable:
                yield host

    def idle_sessions(self, digest: str) -> list[Resident]:
        """Sessions of a shared app that need not stay, the longest unused first."""
        found = [
            (resident.idle_since, resident)
            for host in self._shared_by(digest)
            for resident in host.residents.values()
            if resident.idle_since is not None
        ]
        return [resident for _, resident in sorted(found, key=lambda pair: pair[0])]

    def idle_hosts(self) -> list[HostInUse]:
        """Hosts without a session that must stay: empty ones first, then the longest unused."""
        found = [(since, host) for host in self.hosts.values() if (since := host.idle_since) is not None]
        return [host for _, host in sorted(found, key=lambda pair: pair[0])]
