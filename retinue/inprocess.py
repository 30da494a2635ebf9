"""The in-process backend: the same sessions and runs without Ray, for tests and small tools.

It opens the same stores under the same leases. All runtimes of a process share one table of resident
sessions, so that a session moves between apps here as it would between hosts on a cluster.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

from retinue.apps import AppSpec, app_by_name
from retinue.children import LocalChildren
from retinue.client import Located, SessionClient
from retinue.config import RuntimeConfig
from retinue.errors import RetinueError, SessionConflict
from retinue.handles import RunHandle
from retinue.host import Host
from retinue.ids import SessionAddress, new_id
from retinue.loop import before_exit, not_before_exit
from retinue.messages import Message
from retinue.protocol import EventPageReply, RunStatus, Settled, StartRun
from retinue.store import Holder, Store, StoredSession, StoreEngine
from retinue.workers import Workers

MAX_RESIDENT = 1024
"""Sessions kept resident in one process, the busy ones aside; the longest unused idle one leaves first."""


@dataclass(frozen=True)
class LocalApp:
    """An app of this process: by value it is used as it is, and needs no pickling."""

    spec: AppSpec
    config: RuntimeConfig | None


def local_app(app: RuntimeConfig | str) -> LocalApp:
    """An app for the in-process backend."""
    if isinstance(app, str):
        return LocalApp(app_by_name(app), None)
    digest = new_id("config")
    return LocalApp(AppSpec(kind="value", digest=digest, data=b"", name=app.name or digest), app)


GRACE = 1.0
"""Seconds in which a session that was just brought to life need not leave: its run is on the way."""


@dataclass(frozen=True)
class _Resident:
    host: Host
    activation_id: str
    digest: str
    since: float = field(default_factory=time.monotonic)


_resident: OrderedDict[str, _Resident] = OrderedDict()
_activating: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
"""Held by whoever is finding the session just now."""


class InProcessHost:
    """A :class:`retinue.client.HostPort` over a host in this process."""

    def __init__(self, host: Host) -> None:
        self._host = host

    async def start(self, activation_id: str, start: StartRun) -> RunStatus:
        return await self._host.start(activation_id, start)

    async def cancel(self, activation_id: str, run_id: str, reason: str) -> RunStatus | None:
        return self._host.cancel(activation_id, run_id, reason)

    async def result(self, activation_id: str, run_id: str) -> Settled:
        return await self._host.result(activation_id, run_id)

    async def events(self, activation_id: str, run_id: str, after: int, limit: int) -> EventPageReply:
        return await self._host.events(activation_id, run_id, after, limit)

    async def status(self, activation_id: str, run_id: str) -> RunStatus:
        return self._host.status(activation_id, run_id)

    async def read(self, activation_id: str) -> StoredSession:
        return await self._host.read(activation_id)

    async def import_legacy(self, activation_id: str, messages: Sequence[Message]) -> None:
        await self._host.import_legacy(activation_id, messages)


class InProcessBackend:
    """Sessions of one runtime in this process.

    Args:
        engine: the store.
        owns_engine: close it at the end; an engine that others may use too is left open.
        holder: this runtime, as leases describe it.
        app: what its runs run.
    """

    remote = False

    def __init__(self, engine: StoreEngine, *, owns_engine: bool, holder: Holder, app: LocalApp) -> None:
        self._store = store = Store(engine)
        self._owns_engine = owns_engine
        self._app = app.spec
        self._workers = Workers()
        self._host = Host(
            holder=holder,
            workers=self._workers,
            launcher=LocalChildren(self._workers),
            stores_events=False,
        )
        if app.config is not None:
            self._host.provide(app.spec, app.config)
        self._client = SessionClient(store, self)
        self._closed = False
        before_exit(self.close)

    async def client(self) -> SessionClient:
        return self._client

    def peek(self, handle: RunHandle) -> RunStatus | None:
        return self._host.peek(handle.identity, handle.run_id) or handle.last_status

    async def locate(self, address: SessionAddress) -> Located:
        key = f"{address.store_id}:{address.session_key}"
        async with _activating.setdefault(key, asyncio.Lock()):
            if self._closed:
                raise RetinueError("this runtime is closed; make another one")
            found = _resident.get(key)
            if found is not None and found.digest != self._app.digest:
                await self._move(key, address, found)
                found = None
            if found is None:
                activation_id = new_id("activation")
                await self._host.activate(address, activation_id, self._store, self._app)
                found = _resident[key] = _Resident(self._host, activation_id, self._app.digest)
                await _make_room()
        if key in _resident:
            _resident.move_to_end(key)
        return _located(found)

    async def resident(self, address: SessionAddress) -> Located | None:
        found = _resident.get(f"{address.store_id}:{address.session_key}")
        return None if found is None else _located(found)

    async def _move(self, key: str, address: SessionAddress, found: _Resident) -> None:
        if not await found.host.passivate(found.activation_id, "migrating"):
            raise SessionConflict(
                f"session {address.session_id!r} is in use by another app of this process; wait for its run"
            )
        _resident.pop(key, None)

    def forget(self, address: SessionAddress, located: Located) -> None:
        key = f"{address.store_id}:{address.session_key}"
        found = _resident.get(key)
        if found is not None and found.activation_id == located.activation_id:
            del _resident[key]

    async def host_lost(self, address: SessionAddress, located: Located) -> None:
        self.forget(address, located)

    async def close(self) -> None:
        """Cancel what runs, release the leases, end the threads, close the store."""
        if self._closed:
            return
        self._closed = True
        not_before_exit(self.close)
        await self._host.close("the runtime is closed")
        for key, resident in list(_resident.items()):
            if resident.host is self._host:
                del _resident[key]
        await self._workers.stopped()
        if self._owns_engine:
            await self._store.close()


def _located(found: _Resident) -> Located:
    return Located(InProcessHost(found.host), found.host.holder.holder_id, found.activation_id)


async def _make_room() -> None:
    settled = time.monotonic() - GRACE
    for key, resident in list(_resident.items()):
        if len(_resident) <= MAX_RESIDENT:
            return
        if resident.since < settled and await resident.host.passivate(
            resident.activation_id, "memory_pressure"
        ):
            _resident.pop(key, None)
