"""The small roles of a cluster as one Ray actor class: registry, directory, pool keeper.

Which roles a process has is wiring: on an ephemeral Ray one process has all three; on a standing cluster
the registry, the directory and the keeper of each app are actors of their own.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any, TypeVar

import msgspec
import ray

from retinue.actors.background import Background
from retinue.actors.child_host import ChildHostStatistics
from retinue.actors.directory import Directory
from retinue.actors.hosts import HostReference
from retinue.actors.messages import Hello, HostDescription, Welcome, Whereabouts
from retinue.actors.metrics import Reporter, Sample, directory_samples, pool_samples
from retinue.actors.names import (
    CHILD_HOST_PREFIX,
    DIRECTORY,
    HOST_PREFIX,
    KEEPER_PREFIX,
    REGISTRY,
    STORE_PREFIX,
    store_name,
)
from retinue.actors.pool import POOL_IDLE, PoolKeeper, PoolOptions
from retinue.actors.ray_hosts import CONTROL_CALLS, RayHostFactory, RayHosts, actor_options
from retinue.actors.reports import Role, own_report
from retinue.actors.store_actor import RemoteEngine, StoreDescription, start_store_actor
from retinue.actors.wire import accepted, answered, call, decode, encode, read_reply, refused
from retinue.apps import AppSpec, Isolation
from retinue.client import HostGone
from retinue.errors import (
    LeaseLost,
    Overloaded,
    RetinueError,
    SessionConflict,
    StoreUnavailable,
    VersionMismatch,
)
from retinue.host import IDLE_TIMEOUT
from retinue.ids import PROTOCOL_VERSION, SessionAddress, new_id
from retinue.logs import LogOptions, configure_process, configured
from retinue.recovery import end_interrupted_runs, queued_app
from retinue.storage import this_process
from retinue.store import Store
from retinue.store_wait import until_stored

_log = logging.getLogger(__name__)

REMEMBERED_ANSWERS = 1_000
"""Answers kept for requests that come twice."""
T = TypeVar("T")


class DeployOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How a cluster's runtime is set up."""

    max_resident: int
    """Session hosts in use at once: dedicated sessions, and shared hosts whatever they hold."""
    spread: int = 1
    """Processes over which the sessions of a shared app are spread before one is filled."""
    idle_timeout: float = IDLE_TIMEOUT
    """Seconds without use after which a session leaves memory."""
    pool: PoolOptions = msgspec.field(default_factory=PoolOptions)
    versions: dict[str, str] = msgspec.field(default_factory=dict)
    """What a registry knows from the start, and again after a restart."""
    app: AppSpec | None = None
    """What a keeper keeps, from the start and again after a restart."""
    logs: LogOptions | None = None
    """How the actors log, where their environment does not say."""


class ControlActor:
    """The shell: registry, directory and keeper, as far as this process has those roles."""

    def __init__(self, namespace: str, cluster_id: str, options: bytes) -> None:
        self._namespace = namespace
        self._cluster_id = cluster_id
        self._options = decode(options, DeployOptions)
        configure_process(self._options.logs)
        self._apps: dict[str, AppSpec] = {}
        self._hosts = RayHosts(self._apps)
        self._pools: dict[str, PoolKeeper] = {}
        self._kept: dict[str, AppSpec] = {}
        self._met: dict[str, Any] = {}
        """Store actors that a keeper was told of, by store id."""
        self._directory: Directory | None = None
        self._versions: dict[str, str] = dict(self._options.versions)
        self._stores: dict[str, asyncio.Future[tuple[StoreDescription, Any]]] = {}
        self._rebuilding: asyncio.Task[None] | None = None
        self._background = Background("control actor")
        self._reporting = False
        self._answers: OrderedDict[str, asyncio.Future[Any]] = OrderedDict()

    # --- registry: these two keep their shape for ever ----------------------------------------------------

    async def versions(self) -> bytes:
        """Protocol versions that stand, and the names of their directories, as a JSON object."""
        return msgspec.json.encode(self._versions)

    async def register(self, version: int, directory: str) -> None:
        """A directory of this version stands."""
        self._versions[str(version)] = directory

    async def unregister(self, version: int) -> int:
        """It does no more; how many still stand."""
        self._versions.pop(str(version), None)
        return len(self._versions)

    async def settings(self) -> bytes:
        """How the cluster was set up last, for a directory that restarts."""
        return encode(self._options)

    # --- keeper -------------------------------------------------------------------------------------------

    async def keep(self, data: bytes) -> None:
        """Keep hosts of this app, from now on."""
        app = decode(data, AppSpec)
        if app.digest not in self._pools:
            for other in self._pools.values():
                other.retire()  # the newest app is the one that is worked with: a notebook tries many
            options = self._options.pool
            if app.isolation == "shared":  # one spare has room for many sessions
                options = msgspec.structs.replace(options, session_spares=min(1, options.session_spares))
            factory = RayHostFactory(self._namespace, self._cluster_id, app, self._acquaintances)
            pool = PoolKeeper(app.name, factory, options)
            self._pools[app.digest] = pool
            self._kept[app.digest] = app
            if _restarted():
                await self._adopt_hosts(app.digest, pool)
            self._background.run(self._retire_when_idle(pool))
            self._report_metrics()
        self._pools[app.digest].prepare()

    def _acquaintances(self) -> list[Any]:
        """The actors that the session hosts of this keeper will talk to."""
        return [ray.get_runtime_context().current_actor, *self._met.values()]

    async def meet(self, store_id: str, store: Any) -> None:
        """Sessions may be in this store: hosts that are started from now on meet it ahead of their first."""
        self._met[store_id] = store

    async def _adopt_hosts(self, digest: str, pool: PoolKeeper) -> None:
        """Find the child hosts and the spares of a keeper that was here before."""
        pool.prepare()
        async for handle, data in self._ask_all(HOST_PREFIX, "describe"):
            spare: HostDescription | None = decode(data, HostDescription | None)
            if spare is not None and spare.app.digest == digest and not spare.activations:
                pool.give_back(HostReference(spare.host_id, handle))
        async for handle, data in self._ask_all(CHILD_HOST_PREFIX, "statistics"):
            host: ChildHostStatistics | None = decode(data, ChildHostStatistics | None)
            if host is not None and host.app_digest == digest:
                pool.adopt_child_host(host.host_id, handle)

    async def _pool(self, digest: str) -> PoolKeeper:
        """The pool of an app; a keeper that restarted has its app from its constructor."""
        if digest not in self._pools and self._options.app is not None:
            await self.keep(encode(self._options.app))
        return self._pools[digest]

    async def _retire_when_idle(self, pool: PoolKeeper) -> None:
        while True:
            await asyncio.sleep(POOL_IDLE / 4)
            pool.retire(unused_for=POOL_IDLE)

    async def apps(self) -> list[bytes]:
        """The apps that are kept here."""
        if self._options.app is not None:
            await self._pool(self._options.app.digest)  # after a restart it is kept again from here on
        return [encode(app) for app in self._kept.values()]

    async def take_host(self, request_id: str, digest: str) -> tuple[str, Any]:
        """A session host, with its id, for the caller alone."""
        host = await self._once(request_id, lambda: self._take_from(digest))
        return host.host_id, host.handle

    async def _take_from(self, digest: str) -> HostReference:
        return await (await self._pool(digest)).take_host()

    async def give_back(self, digest: str, host_id: str, handle: Any) -> None:
        """A session host that was taken served nobody."""
        (await self._pool(digest)).give_back(HostReference(host_id, handle))

    async def assign(
        self, request_id: str, digest: str, requester: str, count: int, nested: bool
    ) -> list[tuple[str, Any, int]]:
        """Places for delegates: id and handle of a child host, and how many may go there."""
        places = await self._once(request_id, lambda: self._assign_in(digest, requester, count, nested))
        return [(host.host_id, host.handle, given) for host, given in places]

    async def _assign_in(
        self, digest: str, requester: str, count: int, nested: bool
    ) -> list[tuple[HostReference, int]]:
        return await (await self._pool(digest)).assign(requester, count, nested)

    async def release(self, request_id: str, digest: str, requester: str, counts: dict[str, int]) -> None:
        """Delegates have ended, so many in each child host."""
        await self._once(request_id, lambda: self._release_in(digest, requester, counts))

    async def _release_in(self, digest: str, requester: str, counts: dict[str, int]) -> None:
        pool = await self._pool(digest)
        for host_id, count in counts.items():
            pool.release(requester, host_id, count)

    async def _once(self, request_id: str, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """The answer to a request; a repeat of it (its call failed on the way) gets the first one."""
        known = self._answers.get(request_id)
        if known is None:
            known = self._answers[request_id] = asyncio.ensure_future(work())
            while len(self._answers) > REMEMBERED_ANSWERS:
                self._answers.popitem(last=False)
        answer: T = await asyncio.shield(known)
        return answer

    async def release_all(self, requester: str) -> None:
        """A session host is gone."""
        for pool in self._pools.values():
            pool.release_all(requester)

    async def close_pools(self) -> None:
        """Start nothing more, end the spares and the child hosts."""
        for pool in self._pools.values():
            pool.close()
            spares, children = pool.hosts()
            for host in (*spares, *children):
                ray.kill(host.handle)

    # --- directory ----------------------------------------------------------------------------------------

    async def hello(self, data: bytes) -> tuple[bytes, Any]:
        """A client comes: open its store, say whether its app is known."""
        await self._standing()
        hello = decode(data, Hello)
        try:
            _check_version(hello)
            _refuse_elsewhere(hello)
            description, handle = await self._open_store(hello.store_url)
        except RetinueError as error:
            return refused(error), None
        welcome = Welcome(store=description, app_known=hello.app_digest in self._hosts.keepers)
        return accepted(welcome), handle

    def _start_directory(self) -> Directory:
        if self._directory is None:
            self._report_metrics()
            self._directory = Directory(
                control=self._hosts,
                take_host=self._take_host,
                give_back=self._give_back,
                recover=self._recover,
                max_resident=self._options.max_resident,
                spread=self._options.spread,
                idle_timeout=self._options.idle_timeout,
                app_name=lambda digest: self._apps[digest].name if digest in self._apps else digest[:12],
                isolation=self._isolation,
            )
        return self._directory

    def _isolation(self, digest: str) -> Isolation:
        app = self._apps.get(digest)
        if app is None:
            raise _no_pool()
        return app.isolation

    async def _rebuild(self) -> None:
        """After a restart: find the stores, the keepers and the hosts again. They are all named actors."""
        await self._read_settings()
        directory = self._start_directory()
        own_handle = ray.get_runtime_context().current_actor
        async for handle, data in self._ask_all(STORE_PREFIX, "describe"):
            description: StoreDescription = read_reply(data, StoreDescription)
            self._hosts.stores[description.store_id] = (description, handle)
        async for keeper, apps in self._ask_all(KEEPER_PREFIX, "apps"):
            for data in apps:
                await self.introduce(data, keeper)
        async for handle, data in self._ask_all(HOST_PREFIX, "describe"):
            host: HostDescription | None = decode(data, HostDescription | None)
            if host is None or not host.activations:
                continue  # a spare of its keeper's
            if host.app.digest not in self._hosts.keepers and self._options.versions:  # all roles are here
                await self.keep(encode(host.app))
                await self.introduce(encode(host.app), own_handle)
            self._apps.setdefault(host.app.digest, host.app)
            directory.adopt(HostReference(host.host_id, handle), host.app.digest, list(host.sessions))

    async def _read_settings(self) -> None:
        """The registry may know later limits than this actor's constructor."""
        try:
            registry = await asyncio.to_thread(ray.get_actor, REGISTRY, self._namespace)
            settings = decode(await call(registry.settings), DeployOptions)
            self._options = msgspec.structs.replace(
                self._options, max_resident=settings.max_resident, idle_timeout=settings.idle_timeout
            )
        except (HostGone, ValueError):
            pass

    async def _ask_all(self, prefix: str, method: str) -> AsyncIterator[tuple[Any, Any]]:
        """The answers of the live actors whose names begin so; the dying ones are passed over."""
        for handle in await named_actors(prefix, self._namespace):
            try:
                yield handle, await call(getattr(handle, method))
            except HostGone:
                continue

    async def _standing(self) -> Directory:
        """The directory, rebuilt first where this process is a restarted one."""
        if self._rebuilding is None or (self._rebuilding.done() and self._rebuilding.exception()):
            self._rebuilding = asyncio.ensure_future(self._rebuild() if _restarted() else asyncio.sleep(0))
        await asyncio.shield(self._rebuilding)
        return self._start_directory()

    async def set_limits(self, max_resident: int | None, idle_timeout: float | None) -> None:
        """Change the limits that are given, from now on."""
        options = self._options
        self._options = msgspec.structs.replace(
            options,
            max_resident=options.max_resident if max_resident is None else max_resident,
            idle_timeout=options.idle_timeout if idle_timeout is None else idle_timeout,
        )
        if self._directory is not None:
            self._directory.max_resident = self._options.max_resident
            self._directory.idle_timeout = self._options.idle_timeout

    async def introduce(self, data: bytes, keeper: Any) -> None:
        """This keeper has hosts of this app."""
        app = decode(data, AppSpec)
        self._apps[app.digest] = app
        self._hosts.keepers[app.digest] = keeper
        for store_id, (_, handle) in self._hosts.stores.items():
            self._background.run(_tell_of(keeper, store_id, handle))

    async def locate(self, data: bytes) -> tuple[bytes, Any]:
        """Where a session lives, with the host's handle."""
        address, digest = decode(data, tuple[SessionAddress, str])
        try:
            host, activation_id = await (await self._standing()).locate(address, digest)
        except RetinueError as error:
            return refused(error), None
        whereabouts = Whereabouts(host_id=host.host_id, activation_id=activation_id)
        return accepted(whereabouts), host.handle

    async def resident(self, data: bytes) -> tuple[bytes, Any] | None:
        """Where a session lives, with the host's handle; ``None`` when it is not resident."""
        found = (await self._standing()).resident(decode(data, SessionAddress))
        if found is None:
            return None
        host, activation_id = found
        return encode(Whereabouts(host_id=host.host_id, activation_id=activation_id)), host.handle

    async def forget(self, data: bytes) -> None:
        address, activation_id = decode(data, tuple[SessionAddress, str])
        await (await self._standing()).forget(address, activation_id)

    async def host_lost(self, host_id: str) -> None:
        """Returns once the host is known to live, or its runs were ended."""
        await (await self._standing()).host_lost(host_id)

    async def _take_host(self, digest: str) -> HostReference:
        keeper = self._hosts.keepers.get(digest)
        if keeper is None:
            raise _no_pool()
        host_id, handle = await call(keeper.take_host, new_id("request"), digest)
        return HostReference(host_id, handle)

    async def _give_back(self, digest: str, host: HostReference) -> None:
        with contextlib.suppress(HostGone):
            await call(self._hosts.keepers[digest].give_back, digest, host.host_id, host.handle)

    async def _open_store(self, url: str | None) -> tuple[StoreDescription, Any]:
        from retinue.storage import default_url, normalise_url

        url = normalise_url(url or default_url())
        opening = self._stores.get(url)
        if opening is None:
            opening = self._stores[url] = asyncio.ensure_future(self._start_store(url))
        try:
            return await asyncio.shield(opening)
        except BaseException:
            if opening.done():
                self._stores.pop(url, None)  # the next client may have better luck
            raise

    async def _start_store(self, url: str) -> tuple[StoreDescription, Any]:
        import hashlib

        key = hashlib.sha256(url.encode()).hexdigest()[:24]
        node_id = ray.get_runtime_context().get_node_id()
        name = store_name(key)
        handle = start_store_actor(name, self._namespace, url, node_id, encode(configured()))
        try:
            description = read_reply(await call(handle.describe), StoreDescription)
        except HostGone as error:
            raise StoreUnavailable(f"the store actor for {url} died: {error}", url=url) from None
        except StoreUnavailable:
            ray.kill(handle)
            raise
        self._hosts.stores[description.store_id] = (description, handle)
        for keeper in self._hosts.keepers.values():
            self._background.run(_tell_of(keeper, description.store_id, handle))
        return description, handle

    async def _recover(self, host_id: str) -> None:
        """Fence a dead host in every store, and end the runs that it had."""
        for keeper in self._hosts.keepers.values():
            self._background.run(call(keeper.release_all, host_id))
        await asyncio.gather(
            *(
                self._recover_in(Store(RemoteEngine(handle, description)), host_id)
                for description, handle in list(self._hosts.stores.values())
            )
        )

    async def _recover_in(self, store: Store, host_id: str) -> None:
        """The same in one store; one that does not answer is tried again, beyond the time that runs wait."""
        try:
            addresses = await until_stored(lambda: store.fence(host_id))
        except StoreUnavailable:
            self._background.run(self._recover_in(store, host_id))
            return
        await asyncio.gather(*(self._recover_session(store, address) for address in addresses))

    async def _recover_session(self, store: Store, address: SessionAddress) -> None:
        try:
            await until_stored(functools.partial(self._end_runs, store, address))
        except StoreUnavailable:
            self._background.run(self._recover_session(store, address))
        except RetinueError as error:  # a damaged record: the others of this host must not wait for it
            _log.error("the runs of session %s could not be ended: %s", address.session_key, error)

    async def _end_runs(self, store: Store, address: SessionAddress) -> None:
        holder = this_process(new_id("directory"), self._cluster_id)
        try:
            grant = await store.acquire(address, holder)
            queued = {queued_app(record) for record in grant.open_runs if record.queued}
            digest = next((app for app in queued if app in self._hosts.keepers), None)
            _, kept = await end_interrupted_runs(store, grant, digest)
            await store.release(grant.lease)
        except (SessionConflict, LeaseLost):
            return  # somebody has taken it over already, and ends its runs
        if kept and digest is not None:  # an activation takes up what was queued
            await (await self._standing()).locate(address, digest)

    # --- all ----------------------------------------------------------------------------------------------

    async def withdraw(self) -> list[str]:
        """End every host in good order, then the pools and the stores; the sessions that were resident."""
        released: list[str] = []
        if self._directory is not None:
            released = await self._directory.close()
            self._directory = None
        for keeper in self._hosts.keepers.values():
            try:
                await call(keeper.close_pools)
            except HostGone:
                continue
        for _, handle in self._hosts.stores.values():
            try:
                await call(handle.close)
            except HostGone:
                continue
            ray.kill(handle)
        self._hosts.stores.clear()
        self._stores.clear()
        return released

    async def statistics(self) -> bytes:
        """What this process knows, as JSON."""
        pools = [pool.statistics() for pool in self._pools.values()]
        keeps_only = self._options.app is not None
        directory = None if keeps_only else (await self._standing()).statistics()
        stores = [description.url for description, _ in self._hosts.stores.values()]
        return msgspec.json.encode(
            {"protocol": PROTOCOL_VERSION, "directory": directory, "pools": pools, "stores": stores}
        )

    def _samples(self) -> Iterator[Sample]:
        """The figures of the roles that this process has."""
        if self._directory is not None:
            yield from directory_samples(self._directory.statistics())
        for pool in self._pools.values():
            yield from pool_samples(pool.statistics())

    def _report_metrics(self) -> None:
        if not self._reporting:
            self._reporting = True
            self._background.run(Reporter(self._samples).run())

    async def ping(self) -> bytes:
        self._report_metrics()
        return await answered(asyncio.sleep(0))

    async def report(self, name: str) -> bytes:
        """What this actor is, for listings; ``name`` is its own."""
        roles: list[Role] = []
        if name == REGISTRY:
            roles.append("registry")
        if self._directory is not None or name == DIRECTORY:
            roles.append("directory")
        if self._pools or self._options.app is not None:
            roles.append("keeper")
        return own_report(*roles, apps=[app.name for app in self._kept.values()])


def _no_pool() -> Overloaded:
    return Overloaded("the pool of this app is gone; its program must bring it again", reason="no_pool")


async def _tell_of(keeper: Any, store_id: str, store: Any) -> None:
    with contextlib.suppress(HostGone):  # its hosts meet the store when they need it
        await call(keeper.meet, store_id, store)


async def named_actors(prefix: str, namespace: str) -> list[Any]:
    """Handles of the live actors whose names begin so."""
    handles = []
    for entry in await asyncio.to_thread(ray.util.list_named_actors, True):
        if entry["namespace"] == namespace and entry["name"].startswith(prefix):
            try:
                handles.append(await asyncio.to_thread(ray.get_actor, entry["name"], namespace))
            except ValueError:
                continue  # it has just ended
    return handles


def _check_version(hello: Hello) -> None:
    if hello.version != PROTOCOL_VERSION:
        raise VersionMismatch(
            f"this directory speaks protocol {PROTOCOL_VERSION}, the client {hello.version}; install a "
            "matching package",
            ours=hello.version,
            theirs=[str(PROTOCOL_VERSION)],
        )


def _refuse_elsewhere(hello: Hello) -> None:
    """A relative path means a file of the client's node; the store's files are on this one."""
    here = ray.get_runtime_context().get_node_id()
    if hello.relative_to_node not in (None, here):
        raise StoreUnavailable(
            f"{hello.store_url} was given as a relative path, but this cluster keeps SQLite files on another "
            "node, that of its directory; give the absolute path of a file there",
            url=hello.store_url,
            reason="bad_url",
        )


def _restarted() -> bool:
    """Whether Ray started this actor again after its process died: it has come back empty."""
    return bool(ray.get_runtime_context().was_current_actor_reconstructed)


def control_actor(name: str, namespace: str, cluster_id: str, options: DeployOptions) -> Any:
    """Get or start a control actor of this name. The caller must ping it: it may be one that is dying."""
    return (
        ray.remote(ControlActor)
        .options(
            **{**actor_options(name, namespace), "max_restarts": -1},
            get_if_exists=True,
            max_concurrency=CONTROL_CALLS,
        )
        .remote(namespace, cluster_id, encode(options))
    )
