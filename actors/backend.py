"""The Ray backend: connects on first use, finds sessions through the directory, remembers where they are."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Literal, Protocol
from weakref import WeakValueDictionary

import msgspec
import ray

from retinue.actors import deployment
from retinue.actors.control_actor import control_actor
from retinue.actors.deployment import Deployment
from retinue.actors.messages import Hello, Welcome, Whereabouts
from retinue.actors.names import keeper_name
from retinue.actors.remote_host import RemoteHost
from retinue.actors.store_actor import RemoteEngine
from retinue.actors.wire import call, decode, encode, read_reply
from retinue.apps import AppSpec
from retinue.client import HostGone, Located, SessionClient
from retinue.errors import ClusterUnreachable, Overloaded
from retinue.following import host_feed
from retinue.handles import RunHandle
from retinue.ids import SessionAddress, new_id
from retinue.looks import Looks
from retinue.loop import before_exit
from retinue.protocol import RunStatus
from retinue.storage import is_relative, normalise_url
from retinue.store import Store

REMEMBERED_PLACES = 10_000
"""Sessions whose hosts one runtime remembers; the directory is asked for others."""
_withdrawing: set[str] = set()
"""Ephemeral clusters of this process whose end is already arranged."""


class Connection(Protocol):
    """A connection to Ray, as :func:`retinue.connect` gives it."""

    @property
    def address(self) -> str: ...

    @property
    def mode(self) -> Literal["ephemeral", "standing"]: ...

    @property
    def namespace(self) -> str: ...

    def close(self) -> None: ...


class RayBackend:
    """Sessions of one runtime on a cluster."""

    remote = True

    def __init__(self, app: AppSpec, store_url: str | None, connect: Callable[[], Connection]) -> None:
        self._app = app
        self._store_url = store_url
        self._connect_to_ray = connect
        self._connecting: asyncio.Task[SessionClient] | None = None
        self._deployed: Any = None
        self._directory: Any = None
        self._located: dict[SessionAddress, Located] = {}
        """Activations of this app, where runs can be started."""
        self._followed: dict[SessionAddress, Located] = {}
        """Activations of any app, whose runs are followed."""
        self._hosts: WeakValueDictionary[str, RemoteHost] = WeakValueDictionary()
        """By host id: an actor handle takes 30 kB, and a shared host has many sessions."""
        self._losing: dict[str, asyncio.Task[None]] = {}
        """Host ids of which the directory is just told that they are lost."""
        self._looks = Looks(self.client)

    # --- connecting ---------------------------------------------------------------------------------------

    async def client(self) -> SessionClient:
        """Connected on first use; a failed connection is tried again by the next call."""
        if self._connecting is None or (
            self._connecting.done() and (self._connecting.cancelled() or self._connecting.exception())
        ):
            self._connecting = asyncio.ensure_future(self._connect())
        return await asyncio.shield(self._connecting)

    async def _connect(self) -> SessionClient:
        connection = await asyncio.to_thread(self._connect_to_ray)
        ephemeral = connection.mode == "ephemeral"
        namespace = connection.namespace
        deployed = await asyncio.to_thread(deployment.attach, namespace, ephemeral=ephemeral)
        self._deployed = deployed
        self._directory = deployed.directory
        if ephemeral:
            _withdraw_at_exit(connection, deployed)
        try:
            introduced = asyncio.ensure_future(self._introduce(deployed)) if deployed.alone else None
            hello = await asyncio.to_thread(self._hello)
            data, store = await call(self._directory.hello, encode(hello))
            welcome: Welcome = read_reply(data, Welcome)
            if introduced is not None:
                await introduced
            elif not welcome.app_known:
                await self._introduce(deployed)
        except HostGone as error:
            raise ClusterUnreachable(f"the directory of this cluster has died: {error}") from None
        return SessionClient(Store(RemoteEngine(store, welcome.store)), self)

    def _hello(self) -> Hello:
        url = self._store_url
        if url is None:
            return Hello(app_digest=self._app.digest, store_url=None)
        node = ray.get_runtime_context().get_node_id() if is_relative(url) else None
        return Hello(app_digest=self._app.digest, store_url=normalise_url(url), relative_to_node=node)

    async def _introduce(self, deployed: Deployment) -> None:
        """Make the keeper of this app, from this client's runtime environment, and let it be known."""
        data = encode(self._app)
        if deployed.alone:
            keeper = deployed.directory
        else:
            options = await asyncio.to_thread(deployment.default_options, ephemeral=False)
            options = msgspec.structs.replace(options, app=self._app)
            name = keeper_name(self._app.digest)
            keeper = await asyncio.to_thread(
                control_actor, name, deployed.namespace, new_id("cluster"), options
            )
        await call(keeper.keep, data)
        await call(deployed.directory.introduce, data, keeper)

    # --- finding sessions ---------------------------------------------------------------------------------

    async def locate(self, address: SessionAddress) -> Located:
        known = self._located.get(address)
        if known is not None:
            return known
        question = encode((address, self._app.digest))
        data, handle = await self._ask_directory("locate", question)
        try:
            whereabouts = read_reply(data, Whereabouts)
        except Overloaded as error:
            if error.data.get("reason") != "no_pool":
                raise
            await self._introduce(self._deployed)  # the keeper of this app died with all it knew
            data, handle = await self._ask_directory("locate", question)
            whereabouts = read_reply(data, Whereabouts)
        located = self._place(whereabouts, handle)
        _remember(self._located, address, located)
        return located

    async def resident(self, address: SessionAddress) -> Located | None:
        known = self._located.get(address) or self._followed.get(address)
        if known is not None:
            return known
        found = await self._ask_directory("resident", encode(address))
        if found is None:
            return None
        data, handle = found
        located = self._place(decode(data, Whereabouts), handle)
        _remember(self._followed, address, located)
        return located

    def _place(self, whereabouts: Whereabouts, handle: Any) -> Located:
        host_id = whereabouts.host_id
        host = self._hosts.get(host_id)
        if host is None:
            host = self._hosts[host_id] = RemoteHost(handle)
        return Located(host, host_id, whereabouts.activation_id, host_feed(host_id, host))

    def forget(self, address: SessionAddress, located: Located) -> None:
        for places in (self._located, self._followed):
            if places.get(address) is located:
                del places[address]
        self._directory.forget.remote(encode((address, located.activation_id)))

    async def host_lost(self, address: SessionAddress, located: Located) -> None:
        self._located.pop(address, None)
        self._followed.pop(address, None)
        losing = self._losing.get(located.host_id)
        if losing is None:  # everybody who follows something there comes at the same moment
            losing = self._losing[located.host_id] = asyncio.ensure_future(self._lose(located.host_id))
        await asyncio.shield(losing)

    async def _lose(self, host_id: str) -> None:
        try:
            await self._ask_directory("host_lost", host_id)
        finally:
            del self._losing[host_id]

    async def _ask_directory(self, method: str, argument: object) -> Any:
        try:
            return await call(getattr(self._directory, method), argument)
        except HostGone as error:
            raise ClusterUnreachable(f"the directory of this cluster has died: {error}") from None

    # --- status -------------------------------------------------------------------------------------------

    def peek(self, handle: RunHandle) -> RunStatus | None:
        return self._looks.peek(handle)

    async def close(self) -> None:
        """Runs and sessions go on; only what this process follows ends."""
        self._looks.close()
        self._located.clear()
        self._followed.clear()


def _remember(places: dict[SessionAddress, Located], address: SessionAddress, located: Located) -> None:
    places[address] = located
    if len(places) > REMEMBERED_PLACES:
        del places[next(iter(places))]


def _withdraw_at_exit(connection: Connection, deployed: Deployment) -> None:
    """When this process ends, its ephemeral cluster ends in good order: leases released, no process left."""
    if connection.address in _withdrawing:
        return
    _withdrawing.add(connection.address)

    async def withdraw() -> None:
        try:
            await call(deployed.directory.withdraw)
        finally:
            await asyncio.to_thread(connection.close)

    before_exit(withdraw)
