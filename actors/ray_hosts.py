"""Session and child hosts as Ray actors: how they are started, activated, watched and ended."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Mapping
from typing import Any

import ray

from retinue.actors.child_host import ChildHostActor
from retinue.actors.hosts import HostReference
from retinue.actors.messages import Activate
from retinue.actors.names import child_host_name, host_name
from retinue.actors.session_host import SessionHostActor
from retinue.actors.store_actor import StoreDescription
from retinue.actors.wire import call, decode, encode, read_reply
from retinue.apps import AppSpec
from retinue.hooks import DeactivationReason
from retinue.ids import SessionAddress
from retinue.logs import configured

CONTROL_CALLS = 10_000
"""Calls at once in the group that owns state; none of them runs user code."""
WAITING_CALLS = 100_000
"""Calls at once that wait for something."""
_WAITING_METHODS = {"watch", "result", "events", "next_batch"}


class RayHosts:
    """The directory's way to session hosts: :class:`retinue.actors.directory.HostControl`."""

    def __init__(self, apps: dict[str, AppSpec]) -> None:
        self._apps = apps
        self.keepers: dict[str, Any] = {}
        """Keeper actors by app digest."""
        self.stores: dict[str, tuple[StoreDescription, Any]] = {}
        """Open stores by id, with their actors."""

    async def activate(
        self, host: HostReference, address: SessionAddress, activation_id: str, digest: str
    ) -> None:
        description, store = self.stores[address.store_id]
        message = Activate(
            address=address, activation_id=activation_id, app=self._apps[digest], store=description
        )
        data = await call(host.handle.activate, encode(message), store, self.keepers[digest])
        read_reply(data, None)

    async def passivate(self, host: HostReference, activation_id: str, reason: DeactivationReason) -> bool:
        return read_reply(await call(host.handle.passivate, activation_id, reason), bool)

    async def leave(self, host: HostReference) -> None:
        try:
            await call(host.handle.leave)
        finally:
            ray.kill(host.handle)

    async def watch(self, host: HostReference) -> None:
        await call(host.handle.watch)

    async def ping(self, host: HostReference) -> Mapping[str, float | None]:
        return decode(await call(host.handle.ping), dict[str, float | None])

    def end(self, host: HostReference) -> None:
        ray.kill(host.handle)


class RayHostFactory:
    """Starts the processes of one app, in the runtime environment of the process that this runs in."""

    def __init__(
        self, namespace: str, cluster_id: str, app: AppSpec, acquaintances: Callable[[], list[Any]]
    ) -> None:
        self._namespace = namespace
        self._cluster_id = cluster_id
        self._app = app
        self._acquaintances = acquaintances
        """Actors that every session host will talk to: it meets them while it is a spare."""
        self._log_options = encode(configured())

    async def start_session_host(self, host_id: str) -> Any:
        options = actor_options(host_name(host_id), self._namespace)
        handle = await _started(SessionHostActor, options, host_id, self._cluster_id)
        return await _ready(handle, handle, encode(self._app), self._acquaintances(), self._log_options)

    async def start_child_host(self, host_id: str) -> Any:
        options = actor_options(child_host_name(host_id), self._namespace)
        options["scheduling_strategy"] = "SPREAD"
        handle = await _started(ChildHostActor, options, host_id, encode(self._app))
        return await _ready(handle, self._log_options)

    async def watch_child_host(self, handle: Any) -> None:
        await call(handle.watch)

    def stop(self, handle: Any) -> None:
        ray.kill(handle)


async def _started(cls: type, options: dict[str, Any], *arguments: Any) -> Any:
    """A handle of a new actor. Ray registers a named one with the cluster before it returns: in a thread."""
    return await asyncio.to_thread(lambda: _actor_class(cls).options(**options).remote(*arguments))


async def _ready(handle: Any, *arguments: Any) -> Any:
    """The actor, once it is ready; one that cannot get there is ended."""
    try:
        await call(handle.ready, *arguments)
    except BaseException:
        ray.kill(handle)
        raise
    return handle


@functools.cache
def _actor_class(cls: type) -> Any:
    """The class as a Ray actor, with one group for state and one for calls that wait.

    Made once in a process: Ray pickles and registers every such object anew.
    """
    for name, member in vars(cls).items():
        if asyncio.iscoroutinefunction(member) and not name.startswith("_"):
            group = "waits" if name in _WAITING_METHODS else "control"
            setattr(cls, name, ray.method(concurrency_group=group)(member))
    groups = {"control": CONTROL_CALLS, "waits": WAITING_CALLS}
    return ray.remote(concurrency_groups=groups)(cls)  # type: ignore[call-overload]  # missing in Ray's stubs


def actor_options(name: str, namespace: str) -> dict[str, Any]:
    """Options of every actor that must outlive its creator; without restarts, unless told otherwise."""
    return {"name": name, "namespace": namespace, "lifetime": "detached", "num_cpus": 0, "max_restarts": 0}
