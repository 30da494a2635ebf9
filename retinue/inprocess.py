"""The in-process backend: the same sessions and runs without Ray, for tests and small tools.

It opens the same stores under the same leases. All runtimes of a process share one table of resident
sessions, so that a session moves between apps here as it would between hosts on a cluster.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakValueDictionary

from retinue.apps import AppSpec, Isolation, app_by_name
from retinue.budgets import UsageReport
from retinue.children import LocalChildren
from retinue.client import Located, SessionClient
from retinue.config import RuntimeConfig
from retinue.errors import RetinueError, SessionConflict
from retinue.feeds import FeedBatch, FeedChanges
from retinue.handles import RunHandle
from retinue.hooks import DeactivationReason
from retinue.host import IDLE_TIMEOUT, Host
from retinue.ids import SessionAddress, new_id
from retinue.looks import Looks
from retinue.loop import before_exit, not_before_exit
from retinue.messages import Message
from retinue.protocol import (
    DecideRequest,
    EventPageReply,
    Fork,
    Forked,
    Receipt,
    ReplyInput,
    RunStatus,
    SendInput,
    Settled,
    StartRun,
    VouchFor,
)
from retinue.store import Holder, Store, StoredApproval, StoredSession, StoreEngine
from retinue.workers import Workers

MAX_RESIDENT = 1024
"""Sessions kept resident in one process, the busy ones aside; the longest unused idle one leaves first."""
_IDLE_POLL = 0.05


@dataclass(frozen=True)
class LocalApp:
    """An app of this process: by value it is used as it is, and needs no pickling."""

    spec: AppSpec
    config: RuntimeConfig | None


def local_app(app: RuntimeConfig | str, isolation: Isolation = "dedicated") -> LocalApp:
    """An app for the in-process backend, where all sessions share the process, whatever their isolation."""
    if isinstance(app, str):
        return LocalApp(app_by_name(app, isolation), None)
    digest = new_id("config")
    name = app.name or digest
    return LocalApp(AppSpec(kind="value", digest=digest, data=b"", name=name, isolation=isolation), app)


@dataclass(frozen=True)
class _Resident:
    host: Host
    activation_id: str
    digest: str


_resident: OrderedDict[str, _Resident] = OrderedDict()
_activating: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
"""Held by whoever is finding the session just now."""


class InProcessHost:
    """A host in this process: :class:`retinue.client.HostPort` and :class:`retinue.following.FeedPort`."""

    def __init__(self, host: Host) -> None:
        self._host = host

    async def start(self, activation_id: str, start: StartRun) -> RunStatus:
        return await self._host.start(activation_id, start)

    async def send(self, activation_id: str, sent: SendInput) -> Receipt:
        return self._host.send(activation_id, sent)

    async def reply(self, activation_id: str, reply: ReplyInput) -> Receipt:
        return self._host.reply(activation_id, reply)

    async def decide(self, activation_id: str, decision: DecideRequest) -> StoredApproval:
        return await self._host.decide(activation_id, decision)

    async def cancel(self, activation_id: str, run_id: str, reason: str) -> Receipt | None:
        return self._host.cancel(activation_id, run_id, reason)

    async def result(self, activation_id: str, run_id: str) -> Settled:
        return await self._host.result(activation_id, run_id)

    async def events(self, activation_id: str, run_id: str, after: int, limit: int) -> EventPageReply:
        return await self._host.events(activation_id, run_id, after, limit)

    async def status(self, activation_id: str, run_id: str) -> RunStatus:
        return self._host.status(activation_id, run_id)

    async def next_batch(self, subscriber: str, number: int, changes: FeedChanges | None) -> FeedBatch:
        return await self._host.feeds.next_batch(subscriber, number, changes)

    async def update_feed(self, subscriber: str, changes: FeedChanges) -> None:
        self._host.feeds.update(subscriber, changes)

    async def usage_report(self, activation_id: str, run_id: str) -> UsageReport:
        return self._host.usage_report(activation_id, run_id)

    async def read(self, activation_id: str) -> StoredSession:
        return await self._host.read(activation_id)

    async def import_legacy(self, activation_id: str, messages: Sequence[Message]) -> None:
        await self._host.import_legacy(activation_id, messages)

    async def fork(self, activation_id: str, fork: Fork) -> Forked:
        return await self._host.fork(activation_id, fork)

    async def mark_replayable(self, activation_id: str, vouched: VouchFor) -> int:
        return await self._host.mark_replayable(activation_id, vouched)

    async def delete(self, activation_id: str) -> None:
        await self._host.delete(activation_id)

    async def close_resources(self, activation_id: str) -> list[str]:
        return await self._host.close_resources(activation_id)


class InProcessBackend:
    """Sessions of one runtime in this process.

    Args:
        engine: the store.
        owns_engine: close it at the end; an engine that others may use too is left open.
        holder: this runtime, as leases describe it.
        app: what its runs run.
        idle_timeout: seconds without use after which a session leaves memory.
    """

    remote = False

    def __init__(
        self,
        engine: StoreEngine,
        *,
        owns_engine: bool,
        holder: Holder,
        app: LocalApp,
        idle_timeout: float = IDLE_TIMEOUT,
    ) -> None:
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
        self._looks = Looks(self.client)
        self._idle_timeout = idle_timeout
        self._idling: asyncio.Task[None] | None = None
        self._closed = False
        before_exit(self.close)

    async def client(self) -> SessionClient:
        return self._client

    def peek(self, handle: RunHandle) -> RunStatus | None:
        identity, run_id = handle.identity, handle.run_id
        found = _resident.get(_key(self._client.address(identity, handle.session_id)))
        # Another runtime of this process may have the session; one that is leaving is in no table any more.
        hosts = (self._host,) if found is None else (found.host, self._host)
        for host in hosts:
            if (status := host.peek(identity, run_id)) is not None:
                return status
        # It has left memory since it was heard of: its record knows how it ended.
        return None if handle.last_status is None else self._looks.peek(handle)

    async def locate(self, address: SessionAddress) -> Located:
        key = _key(address)
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
                if self._idling is None:
                    self._idling = asyncio.ensure_future(self._passivate_idle())
                await _make_room()
        if key in _resident:
            _resident.move_to_end(key)
        return _located(found)

    async def resident(self, address: SessionAddress) -> Located | None:
        found = _resident.get(_key(address))
        return None if found is None else _located(found)

    async def _move(self, key: str, address: SessionAddress, found: _Resident) -> None:
        if not await found.host.passivate(found.activation_id, "migrating"):
            raise SessionConflict(
                f"session {address.session_id!r} is in use by another app of this process, or holds resources"
                " there; wait for its run, or close its resources"
            )
        _resident.pop(key, None)

    async def _passivate_idle(self) -> None:
        """Let sessions leave that nobody used for long, while there are any."""
        while idle := self._host.idle():
            longest = max((seconds for seconds in idle.values() if seconds is not None), default=0.0)
            await asyncio.sleep(max(self._idle_timeout - longest, _IDLE_POLL))
            known = {each.activation_id: (key, each) for key, each in _resident.items()}
            for activation_id, seconds in self._host.idle().items():
                if seconds is None or seconds < self._idle_timeout:
                    continue
                if activation_id in known:
                    await _ask_to_leave(*known[activation_id], "idle")
                else:  # a client has forgotten it
                    await self._host.passivate(activation_id, "idle")
        self._idling = None

    def forget(self, address: SessionAddress, located: Located) -> None:
        key = _key(address)
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
        if self._idling is not None:
            self._idling.cancel()
        self._looks.close()
        await self._host.close("the runtime is closed")
        for key, resident in list(_resident.items()):
            if resident.host is self._host:
                del _resident[key]
        await self._workers.stopped()
        if self._owns_engine:
            await self._store.close()


def _key(address: SessionAddress) -> str:
    return f"{address.store_id}:{address.session_key}"


def _located(found: _Resident) -> Located:
    return Located(InProcessHost(found.host), found.host.holder.holder_id, found.activation_id)


async def _make_room() -> None:
    for key, resident in list(_resident.items()):
        if len(_resident) <= MAX_RESIDENT:
            return
        await _ask_to_leave(key, resident, "memory_pressure")


async def _ask_to_leave(key: str, resident: _Resident, reason: DeactivationReason) -> None:
    """Let a session leave, unless it must stay or somebody is finding it just now."""
    lock = _activating.setdefault(key, asyncio.Lock())
    if lock.locked():
        return
    async with lock:
        left = await resident.host.passivate(resident.activation_id, reason)
        if left and _resident.get(key) is resident:
            del _resident[key]
