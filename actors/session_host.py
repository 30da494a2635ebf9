"""A session host as a Ray actor: a thin shell over :class:`retinue.host.Host`."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from retinue.actors.background import Background
from retinue.actors.hosts import HostReference
from retinue.actors.messages import Activate, Down, HostDescription, Up
from retinue.actors.metrics import Reporter, host_samples
from retinue.actors.pooled_children import PooledChildren
from retinue.actors.reports import own_report
from retinue.actors.store_actor import RemoteEngine
from retinue.actors.tool_tasks import RayTasks
from retinue.actors.wire import NOTHING, answered, call, decode, encode, on_loop
from retinue.apps import AppSpec
from retinue.budgets import UsageReport
from retinue.client import HostGone
from retinue.feeds import FeedChanges
from retinue.hooks import DeactivationReason
from retinue.host import Host
from retinue.ids import new_id
from retinue.logs import LogOptions, configure_process
from retinue.messages import Message
from retinue.protocol import (
    DecideRequest,
    Fork,
    Receipt,
    ReplyInput,
    RunStatus,
    SendInput,
    StartRun,
    VouchFor,
)
from retinue.storage import this_process
from retinue.store import Store
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
        self._background = Background("session host")

    # --- control ------------------------------------------------------------------------------------------

    async def ready(
        self, own_handle: Any, app: bytes, acquaintances: list[Any], log_options: bytes = NOTHING
    ) -> None:
        """Come to life on the control loop, and load the app ahead of the first session.

        A first call to an actor takes some 20 ms, for its class and for the connection, so the actors that
        sessions need are met now.
        """
        configure_process(decode(log_options, LogOptions | None))
        self._loop = asyncio.get_running_loop()
        self._links = RemoteChildHosts(self._host_id, own_handle)
        self._children = PooledChildren(self._links)
        self._host = Host(
            holder=this_process(self._host_id, self._cluster_id),
            workers=Workers(tasks=RayTasks()),
            launcher=self._children,
            stores_events=True,
        )
        spec = decode(app, AppSpec)
        self._app = spec
        await self._host.load(spec)
        self._background.run(Reporter(lambda: host_samples(self.host.statistics())).run())
        for each in acquaintances:
            with contextlib.suppress(HostGone):
                await call(each.ping)

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

    @property
    def host(self) -> Host:
        assert self._host is not None, "ready() comes first"
        return self._host

    async def start(self, data: bytes) -> bytes:
        activation_id, start = decode(data, tuple[str, StartRun])
        return await answered(self.host.start(activation_id, start))

    async def send(self, data: bytes) -> bytes:
        return await answered(self._send(*decode(data, tuple[str, SendInput])))

    async def _send(self, activation_id: str, sent: SendInput) -> Receipt:
        return self.host.send(activation_id, sent)

    async def reply(self, data: bytes) -> bytes:
        return await answered(self._reply(*decode(data, tuple[str, ReplyInput])))

    async def _reply(self, activation_id: str, reply: ReplyInput) -> Receipt:
        return self.host.reply(activation_id, reply)

    async def decide(self, data: bytes) -> bytes:
        return await answered(self.host.decide(*decode(data, tuple[str, DecideRequest])))

    async def cancel(self, activation_id: str, run_id: str, reason: str) -> bytes:
        return await answered(self._cancel(activation_id, run_id, reason))

    async def _cancel(self, activation_id: str, run_id: str, reason: str) -> Receipt | None:
        return self.host.cancel(activation_id, run_id, reason)

    async def update_feed(self, data: bytes) -> bytes:
        return await answered(self._update_feed(*decode(data, tuple[str, FeedChanges])))

    async def _update_feed(self, subscriber: str, changes: FeedChanges) -> None:
        self.host.feeds.update(subscriber, changes)

    async def status(self, activation_id: str, run_id: str) -> bytes:
        return await answered(self._status(activation_id, run_id))

    async def _status(self, activation_id: str, run_id: str) -> RunStatus:
        return self.host.status(activation_id, run_id)

    async def usage_report(self, activation_id: str, run_id: str) -> bytes:
        return await answered(self._usage_report(activation_id, run_id))

    async def _usage_report(self, activation_id: str, run_id: str) -> UsageReport:
        return self.host.usage_report(activation_id, run_id)

    async def read(self, activation_id: str) -> bytes:
        return await answered(self.host.read(activation_id))

    async def import_legacy(self, data: bytes) -> bytes:
        activation_id, messages = decode(data, tuple[str, list[Message]])
        return await answered(self.host.import_legacy(activation_id, messages))

    async def close_resources(self, activation_id: str) -> bytes:
        return await answered(self.host.close_resources(activation_id))

    async def fork(self, data: bytes) -> bytes:
        activation_id, fork = decode(data, tuple[str, Fork])
        return await answered(self.host.fork(activation_id, fork))

    async def mark_replayable(self, data: bytes) -> bytes:
        activation_id, vouched = decode(data, tuple[str, VouchFor])
        return await answered(self.host.mark_replayable(activation_id, vouched))

    async def delete(self, activation_id: str) -> bytes:
        return await answered(self.host.delete(activation_id))

    async def passivate(self, activation_id: str, reason: DeactivationReason) -> bytes:
        return await answered(self.host.passivate(activation_id, reason))

    async def child_messages(self, data: bytes) -> bytes:
        assert self._children is not None
        host_id, number, messages = decode(data, tuple[str, int, list[Up]])
        return self._children.receive(host_id, number, messages)

    async def statistics(self) -> bytes:
        """What is here; ``null`` before the host is ready."""
        return encode(self._host.statistics() if self._host is not None else None)

    async def report(self, name: str) -> bytes:
        """What this actor is, for listings."""
        if self._app is None or self._host is None:
            return own_report("session host", state="starting")
        sessions = self._host.statistics().sessions
        state = "serving" if sessions else "empty" if self._host.activations else "spare"
        return own_report("session host", state=state, apps=[self._app.name], sessions=sessions)

    async def describe(self) -> bytes:
        """What is here, for a directory that restarted; ``null`` before the host is ready."""
        if self._app is None or self._host is None:
            return encode(None)
        description = HostDescription(
            host_id=self._host_id,
            app=self._app,
            sessions=self._host.addresses(),
            activations=self._host.activations,
        )
        return encode(description)

    async def leave(self) -> None:
        """Cancel what runs, release every lease."""
        await self.host.close("the session host is leaving")
        assert self._children is not None
        self._children.close()

    async def ping(self) -> bytes:
        """Which activations are here, and for how many seconds each has been idle."""
        return encode(self.host.idle())

    # --- waits --------------------------------------------------------------------------------------------

    async def result(self, activation_id: str, run_id: str) -> bytes:
        return await answered(self._on_control(self.host.result(activation_id, run_id)))

    async def events(self, activation_id: str, run_id: str, after: int, limit: int) -> bytes:
        return await answered(self._on_control(self.host.events(activation_id, run_id, after, limit)))

    async def next_batch(self, data: bytes) -> bytes:
        subscriber, number, changes = decode(data, tuple[str, int, FeedChanges | None])
        batch = self.host.feeds.next_batch(subscriber, number, changes)
        return await answered(self._on_control(batch))

    async def watch(self) -> None:
        """Never returns while the process lives."""
        await asyncio.Event().wait()

    async def _on_control(self, work: Any) -> Any:
        assert self._loop is not None
        return await on_loop(self._loop, work)
