"""What an operator looks at: the actors of the cluster that is up, and what its store, or a file, keeps."""

from __future__ import annotations

import contextlib
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from retinue.backend import Backend
from retinue.client import Located, Router, SessionClient
from retinue.cluster.connection import NAMESPACE, Connection, connect
from retinue.cluster.record import read_record
from retinue.cluster.standing import address_from_environment
from retinue.errors import ClusterUnreachable, NotFound, StoreUnavailable
from retinue.handles import RunHandle
from retinue.ids import Identity, SessionAddress
from retinue.loop import blocking, on_client_loop
from retinue.protocol import RunStatus
from retinue.storage.memory import MEMORY_URL
from retinue.storage.opening import default_url, normalise_url, open_store
from retinue.store import Store, StoreEngine

T = TypeVar("T")
_FILE = "sqlite:///"


class ViewingBackend(Backend, Router, Protocol):
    """A backend that also says where sessions live."""


@dataclass(frozen=True)
class View:
    """A store, and the cluster that uses it, if one is up. Calls block."""

    backend: ViewingBackend
    cluster: Connection | None

    def ask(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of a coroutine that uses the store."""
        return blocking(on_client_loop(work))

    async def client(self) -> SessionClient:
        return await self.backend.client()

    def places(self) -> dict[str, str]:
        """Names of the session host actors, by the holder id that leases name."""
        if self.cluster is None:
            return {}
        from retinue.actors.listing import actor_names
        from retinue.actors.names import HOST_PREFIX

        names = self.ask(actor_names(self.cluster.namespace))
        return {name.removeprefix(HOST_PREFIX): name for name in names if name.startswith(HOST_PREFIX)}

    def follow(self, run_id: str, identity: Identity) -> RunHandle:
        """The handle of a run, as :meth:`retinue.Runtime.attach` gives it."""
        return RunHandle(self.backend, run_id=run_id, identity=identity, session_id=None, start=None)


@contextlib.contextmanager
def cluster_that_is_up(address: str | None, namespace: str | None) -> Iterator[Connection | None]:
    """A connection to the cluster that is meant, for as long as it is used; ``None`` where none is up.

    In this order: the address; that of the environment; the cluster that ``retinue up`` left. Starts nothing.

    Raises:
        ClusterUnreachable: it does not answer, or the runtime does not stand there.
    """
    address = address or address_from_environment()
    if address is None:
        record = read_record()
        if record is None or not record.stands():
            yield None
            return
        address, namespace = record.address, namespace or record.namespace
    connection = connect(address, namespace=namespace or NAMESPACE, start=False)
    try:
        from retinue.actors import deployment

        if deployment.find(connection.namespace) is None:
            raise ClusterUnreachable(
                f"the runtime does not stand on the cluster at {connection.address}, namespace "
                f"{connection.namespace!r}; `retinue up --address {connection.address}` puts it there",
                address=connection.address,
            )
        yield connection
    finally:
        connection.close()


@contextlib.contextmanager
def open_view(address: str | None, namespace: str | None, store_url: str | None) -> Iterator[View]:
    """The store of the cluster that is up, or the one at ``store_url``; without a cluster, a file of this
    machine, opened here: reading needs no lease, and disturbs nobody.

    Raises:
        ClusterUnreachable: the cluster does not answer.
        StoreUnavailable: there is no such store.
    """
    with cluster_that_is_up(address, namespace) as connection:
        if connection is None:
            engine = _open_here(store_url)
            view = View(FileBackend(engine), None)
        else:
            from retinue.actors.viewer import ViewerBackend

            view = View(ViewerBackend(store_url, lambda: connection), connection)
        try:
            yield view
        finally:
            view.ask(view.backend.close())


def _open_here(store_url: str | None) -> StoreEngine:
    url = normalise_url(store_url or default_url())
    if url == MEMORY_URL:
        raise StoreUnavailable("a memory store can be read only where it is: no cluster is up", url=url)
    if not Path(url.removeprefix(_FILE)).exists():
        where = "" if store_url else " (no cluster is up, and no --store was given)"
        raise StoreUnavailable(f"there is no store at {url}{where}", url=url, reason="no_file")
    return open_store(url)


class FileBackend:
    """A store without a cluster: runs that ended can be read, and nothing can be started."""

    remote = False

    def __init__(self, engine: StoreEngine) -> None:
        self._client = SessionClient(Store(engine), self)

    async def client(self) -> SessionClient:
        return self._client

    def peek(self, handle: RunHandle) -> RunStatus | None:
        return handle.last_status

    async def close(self) -> None:
        await self._client.store.close()

    async def locate(self, address: SessionAddress) -> Located:
        raise NotFound(
            f"session {address.session_id!r} cannot be asked: no cluster is up here. If a program has it, "
            "look again when its run has ended",
            session_id=address.session_id,
        )

    async def resident(self, address: SessionAddress) -> Located | None:
        return None

    def forget(self, address: SessionAddress, located: Located) -> None:
        """Nothing is remembered."""

    async def host_lost(self, address: SessionAddress, located: Located) -> None:
        """Nothing is remembered."""
