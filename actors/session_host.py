"""A session host as a Ray actor: a thin shell over :class:`retinue.host.Host`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from retinue.actors.directory import HostReference
from retinue.actors.messages import Activate, Down, HostDescription, Up
from retinue.actors.pooled_children import PooledChildren
from retinue.actors.store_actor import RemoteEngine
from retinue.actors.wire import answered, call, decode, encode, on_loop, read_reply
from retinue.apps import AppSpec
from retinue.client import HostGone
from retinue.host import Host
from retinue.ids import SessionAddress, new_id
from retinue.messages import Message
from retinue.protocol import EventPageReply, RunStatus, Settled, StartRun
from retinue.sessions import DeactivationReason
from retinue.storage import this_process
from retinue.store import Store, StoredSession
from retinue.workers import Workers


class RemoteChildHosts:
    """Child hosts and keepers as a session host reaches them."""

    def __init__(self, host_id: str, own_handle: Any) -> None:
        self._host_id = host_id
        self._own_handle = own_handle
        self.keeper: Any = None
        """The keeper actor of this host's app."""
        self.digest = ""
        self._releases: dict[str, int] = {}
        self._releasing: asyncio.Task[None] | None = None

    async def assign(self, count: int, nested: bool) -> list[tuple[HostReference, int]]:
        request_id = new_id("request")
        places = await call(self.keeper.assign, request_id, self.digest, self._host_id, count, nested)
        return [(HostReference(host_id, handle), given) for host_id, handle, given in places]

    def release(self, host_id: str, count: int) -> None:
        self._releases[host_id] = self._releases.get(host_id, 0) + count
        if self._releasing is None:
            self._releasing = asyncio.ensure_future(self._release())

    async def _release(self) -> None:
        """Give places back, together with those that come back at the same moment."""
        await asyncio.sleep(0.002)
        releases, self._releases, self._releasing = self._releases, {}, None
        await call(self.keeper.release, new_id("request"), self.digest, self._host_id, releases)

    async def deliver(self, host: HostReference, number: int, messages: list[Down]) -> None:
        data = encode((number, messages))
        if not await call(host.handle.deliver, self._host_id, self._own_handle, data):
            raise HostGone("it heard nothing of this session host for too long and stopped its delegates")

    async def watch(self, host: HostReference) -> None:
        await call(host.handle.watch)


class SessionHostActor:
    """The shell. Group ``control`` owns all state; ``waits`` holds calls that wait for something."""

    def __init__(self, host_id: str, cluster_id: str) -> None:
        self._host_id = host_id
        self._cluster_id = cluster_id
        self._loop: asyncio.AbstractEventLoop | None = None
        self._host: Host | None = None
        self._children: PooledChildren | None = None
        self._links: RemoteChildHosts | None = None
        self._stores: dict[str, Store] = {}
        self._app: AppSpec | None = None
        self._addresses: dict[str, SessionAddress] = {}

    # --- control ------------------------------------------------------------------------------------------

    async def ready(self, own_handle: Any, app: bytes) -> None:
        """Come to life on the control loop, and load the app ahead of the first session."""
        self._loop = asyncio.get_running_loop()
        self._links = RemoteChildHosts(self._host_id, own_handle)
        self._children = PooledChildren(self._links)
        self._host = Host(
            holder=this_process(self._host_id, self._cluster_id),
            workers=Workers(),
            launcher=self._children,
            stores_events=True,
        )
        spec = decode(app, AppSpec)
        self._app = spec
        await self._host.load(spec)

    async def activate(self, data: bytes, store: Any, keeper: Any) -> bytes:
        message = decode(data, Activate)
        return await answered(self._activate(message, store, keeper))

    async def _activate(self, message: Activate, store: Any, keeper: Any) -> None:
        assert self._links is not None
        self._links.keeper, self._links.digest = keeper, message.app.digest
        client = self._stores.get(message.store.store_id)
        if client is None:
            client = self._stores[message.store.store_id] = Store(RemoteEngine(store, message.store))
        await self.host.activate(message.address, message.activation_id, client, message.app)
        self._addresses[message.activation_id] = message.address

    @property
    def host(self) -> Host:
        assert self._host is not None, "ready() comes first"
        return self._host

    async def start(self, data: bytes) -> bytes:
        activation_id, start = decode(data, tuple[str, StartRun])
        return await answered(self.host.start(activation_id, start))

    async def cancel(self, activation_id: str, run_id: str, reason: str) -> bytes:
        return await answered(self._cancel(activation_id, run_id, reason))

    async def _cancel(self, activation_id: str, run_id: str, reason: str) -> RunStatus | None:
        return self.host.cancel(activation_id, run_id, reason)

    async def status(self, activation_id: str, run_id: str) -> bytes:
        return await answered(self._status(activation_id, run_id))

    async def _status(self, activation_id: str, run_id: str) -> RunStatus:
        return self.host.status(activation_id, run_id)

    async def read(self, activation_id: str) -> bytes:
        return await answered(self.host.read(activation_id))

    async def import_legacy(self, data: bytes) -> bytes:
        activation_id, messages = decode(data, tuple[str, list[Message]])
        return await answered(self.host.import_legacy(activation_id, messages))

    async def passivate(self, activation_id: str, reason: DeactivationReason) -> bytes:
        return await answered(self.host.passivate(activation_id, reason))

    async def child_messages(self, data: bytes) -> bytes:
        assert self._children is not None
        host_id, number, messages = decode(data, tuple[str, int, list[Up]])
        return self._children.receive(host_id, number, messages)

    async def statistics(self) -> bytes:
        """What is here; ``null`` before the host is ready."""
        return encode(self._host.statistics() if self._host is not None else None)

    async def describe(self) -> bytes:
        """What is here, for a directory that restarted; ``null`` before the host is ready."""
        if self._app is None or self._host is None:
            return encode(None)
        sessions = [
            (address, activation_id)
            for activation_id, address in self._addresses.items()
            if self.host.has(activation_id)
        ]
        return encode(HostDescription(host_id=self._host_id, app=self._app, sessions=sessions))

    async def leave(self) -> None:
        """Cancel what runs, release every lease."""
        await self.host.close("the session host is leaving")
        assert self._children is not None
        self._children.close()

    async def ping(self) -> None:
        """Answer."""

    # --- waits --------------------------------------------------------------------------------------------

    async def result(self, activation_id: str, run_id: str) -> bytes:
        return await answered(self._on_control(self.host.result(activation_id, run_id)))

    async def events(self, activation_id: str, run_id: str, after: int, limit: int) -> bytes:
        return await answered(self._on_control(self.host.events(activation_id, run_id, after, limit)))

    async def watch(self) -> None:
        """Never returns while the process lives."""
        await asyncio.Event().wait()

    async def _on_control(self, work: Any) -> Any:
        assert self._loop is not None
        return await on_loop(self._loop, work)


class RemoteHost:
    """A session host as a client reaches it: :class:`retinue.client.HostPort` over an actor handle."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    async def start(self, activation_id: str, start: StartRun) -> RunStatus:
        return read_reply(await call(self._handle.start, encode((activation_id, start))), RunStatus)

    async def cancel(self, activation_id: str, run_id: str, reason: str) -> RunStatus | None:
        data = await call(self._handle.cancel, activation_id, run_id, reason)
        return read_reply(data, RunStatus | None)

    async def result(self, activation_id: str, run_id: str) -> Settled:
        return read_reply(await call(self._handle.result, activation_id, run_id), Settled)

    async def events(self, activation_id: str, run_id: str, after: int, limit: int) -> EventPageReply:
        data = await call(self._handle.events, activation_id, run_id, after, limit)
        return read_reply(data, EventPageReply)

    async def status(self, activation_id: str, run_id: str) -> RunStatus:
        return read_reply(await call(self._handle.status, activation_id, run_id), RunStatus)

    async def read(self, activation_id: str) -> StoredSession:
        return read_reply(await call(self._handle.read, activation_id), StoredSession)

    async def import_legacy(self, activation_id: str, messages: Sequence[Message]) -> None:
        data = await call(self._handle.import_legacy, encode((activation_id, list(messages))))
        read_reply(data, None)
