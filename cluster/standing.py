"""The standing cluster: bringing it up, telling how it is, taking it down."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from retinue.cluster.connection import ADDRESS_VARIABLE, NAMESPACE, Connection, connect
from retinue.cluster.head import start_head, stop_head
from retinue.cluster.record import ClusterRecord, read_record, remove_record, write_record
from retinue.errors import ClusterUnreachable, RetinueError
from retinue.storage.opening import home_folder

_LOCK_SECONDS = 90.0
"""How long to wait for another ``up`` or ``down`` of this user."""
_POLL = 0.1


@dataclass(frozen=True, kw_only=True)
class UpReport:
    """What ``up()`` did."""

    record: ClusterRecord
    started: bool
    """Whether it started a cluster; otherwise it attached to one."""
    already: bool
    """Whether the cluster was up before."""


@dataclass(frozen=True, kw_only=True)
class DownReport:
    """What ``down()`` did."""

    address: str | None
    """The cluster's address; ``None`` where none was up."""
    sessions: tuple[str, ...] = ()
    """The sessions that were resident and have been released."""
    processes: int = 0
    """How many processes ended."""
    left_running: bool = False
    """Whether the cluster goes on, because ``up`` only attached to it."""
    trouble: str | None = None
    """Why the actors could not be asked to release their sessions, where they could not."""


@dataclass(frozen=True, kw_only=True)
class StatusReport:
    """How the standing cluster is."""

    up: bool
    """Whether it answers."""
    address: str | None = None
    namespace: str | None = None
    started_here: bool = False
    """Whether ``retinue up`` started it, and ``retinue down`` will stop it."""
    pid: int | None = None
    since: float | None = None
    """When it came up, in epoch seconds."""
    auth: str | None = None
    """``token`` or ``disabled``."""
    log: str | None = None
    nodes: int = 0
    resources: dict[str, float] = field(default_factory=dict)
    """What the cluster has in all: CPU, GPU, memory in bytes."""
    statistics: dict[str, Any] = field(default_factory=dict)
    """What the runtime's actors say of themselves."""
    trouble: str | None = None
    """Why it does not answer."""


def up(
    address: str | None = None,
    *,
    namespace: str = NAMESPACE,
    num_cpus: int | None = None,
    max_resident: int | None = None,
    idle_timeout: float | None = None,
) -> UpReport:
    """Have the runtime's actors stand on a cluster. Harmless when repeated.

    Args:
        address: the cluster to attach to, ``host:port`` or ``"auto"``; without it, the one in
            ``RETINUE_ADDRESS`` or ``RAY_ADDRESS``, else the one that is up, else a new one-machine cluster in
            the background.
        namespace: the Ray namespace of the actors.
        num_cpus: CPUs of a new cluster; as many as the machine has, when left out.
        max_resident: session hosts in use at once; as many as fit into a quarter of the memory, when left
            out.
        idle_timeout: seconds without use after which a session leaves memory; 900, when left out.

    Raises:
        ClusterUnreachable: the cluster does not answer or could not be started, or another one is up.
        VersionMismatch: another version of Retinue stands there.
    """
    address = address or address_from_environment()
    if address == "local":
        raise ClusterUnreachable("a cluster of one process cannot stand; leave the address out to start one")
    with _alone():
        record = _current()
        if record is not None:
            return _up_again(record, address, namespace, max_resident, idle_timeout)
        if address is not None:
            with _connected(address, namespace) as connection:
                record = _attached_record(connection)
                _deploy(namespace, max_resident, idle_timeout)
            write_record(record)
            return UpReport(record=record, started=False, already=False)
        record = start_head(namespace=namespace, num_cpus=num_cpus)
        write_record(record)  # before anything can fail: down() must find it
        try:
            with _connected(record.address, namespace):
                _deploy(namespace, max_resident, idle_timeout)
        except BaseException:
            stop_head(record)
            remove_record()
            raise
        return UpReport(record=record, started=True, already=False)


def down() -> DownReport:
    """Release every session, end the runtime's actors, and stop the cluster if ``up()`` started it.

    Returns when all its processes are gone. A cluster that ``up()`` attached to goes on.
    """
    with _alone():
        record = read_record()
        if record is None:
            return DownReport(address=None)
        if record.host != socket.gethostname():
            raise ClusterUnreachable(
                f"the cluster at {record.address} was brought up on {record.host}; run `retinue down` there",
                address=record.address,
            )
        if record.started_here and record.process() is None:
            stop_head(record)
            remove_record()
            return DownReport(address=record.address, trouble="its process had ended already")
        sessions: list[str] = []
        trouble = None
        try:
            with _connected(record.address, record.namespace):
                sessions = _withdraw(record.namespace)
        except RetinueError as error:
            if not record.started_here:
                raise
            trouble = error.message
        processes = stop_head(record)
        remove_record()
        return DownReport(
            address=record.address,
            sessions=tuple(sessions),
            processes=processes,
            left_running=not record.started_here,
            trouble=trouble,
        )


def status(address: str | None = None, *, namespace: str = NAMESPACE) -> StatusReport:
    """How the standing cluster is, or the one at ``address``.

    Starts nothing, and does not raise because none is up: the report says it.
    """
    record = None
    address = address or address_from_environment()
    if address is None:
        record = read_record()
        if record is None:
            return StatusReport(up=False, trouble="no cluster is up")
        known = StatusReport(
            up=False,
            address=record.address,
            namespace=record.namespace,
            started_here=record.started_here,
            pid=record.pid,
            since=record.since,
            auth=record.auth,
            log=record.log,
        )
        if record.host != socket.gethostname():
            return replace(known, trouble=f"it was brought up on {record.host}")
        if not record.stands():
            return replace(known, trouble=f"its process {record.pid} has ended; `retinue up` starts another")
        address, namespace = record.address, record.namespace
    else:
        known = StatusReport(up=False, address=address, namespace=namespace)
    try:
        with _connected(address, namespace) as connection:
            nodes, resources = _resources()
            statistics = _statistics(namespace)
    except RetinueError as error:
        return replace(known, trouble=error.message)
    return replace(
        known,
        up=True,
        address=connection.address,
        auth=known.auth or _auth_now(),
        nodes=nodes,
        resources=resources,
        statistics=statistics,
    )


def _up_again(
    record: ClusterRecord,
    address: str | None,
    namespace: str,
    max_resident: int | None,
    idle_timeout: float | None,
) -> UpReport:
    if namespace != record.namespace:
        raise ClusterUnreachable(
            f"the cluster at {record.address} is up with namespace {record.namespace!r}, not {namespace!r}; "
            "`retinue down` first",
            address=record.address,
        )
    with _connected(address or record.address, namespace) as connection:
        if connection.address != record.address:
            raise ClusterUnreachable(
                f"another cluster is up, at {record.address}; first `retinue down`, then "
                f"`retinue up --address {address}`",
                address=address,
            )
        _deploy(namespace, max_resident, idle_timeout)
    return UpReport(record=record, started=False, already=True)


def _current() -> ClusterRecord | None:
    """The record of a cluster that is there; one whose process has ended is cleared away."""
    record = read_record()
    if record is None:
        return None
    if record.host != socket.gethostname():
        raise ClusterUnreachable(
            f"the cluster at {record.address} was brought up on {record.host}, with the same RETINUE_HOME; "
            "run `retinue down` there, or use another RETINUE_HOME here",
            address=record.address,
        )
    if record.stands():
        return record
    stop_head(record)
    remove_record()
    return None


def _attached_record(connection: Connection) -> ClusterRecord:
    return ClusterRecord(
        address=connection.address,
        namespace=connection.namespace,
        host=socket.gethostname(),
        since=time.time(),
        auth=_auth_now(),
    )


def _auth_now() -> str:
    return "token" if os.environ.get("RAY_AUTH_MODE", "").lower() == "token" else "disabled"


def address_from_environment() -> str | None:
    """The cluster that ``RETINUE_ADDRESS`` or ``RAY_ADDRESS`` names."""
    for variable in (ADDRESS_VARIABLE, "RAY_ADDRESS"):
        if value := os.environ.get(variable, "").strip():
            return value
    return None


# --- calls on the cluster -----------------------------------------------------------------------------------


@contextlib.contextmanager
def _connected(address: str, namespace: str) -> Iterator[Connection]:
    connection = connect(address, namespace=namespace, start=False)
    try:
        yield connection
    finally:
        connection.close()


def _deploy(namespace: str, max_resident: int | None, idle_timeout: float | None) -> None:
    from retinue.actors import deployment

    with _ray_errors("the runtime's actors could not be started"):
        deployment.deploy(namespace, max_resident=max_resident, idle_timeout=idle_timeout)


def _withdraw(namespace: str) -> list[str]:
    from retinue.actors import deployment

    with _ray_errors("the runtime's actors could not be asked to release their sessions"):
        return deployment.withdraw(namespace)


def _statistics(namespace: str) -> dict[str, Any]:
    from retinue.actors import deployment

    with _ray_errors("the runtime's actors do not answer"):
        return deployment.statistics(namespace)


def _resources() -> tuple[int, dict[str, float]]:
    import ray

    with _ray_errors("the cluster does not answer"):
        alive = [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
        return len(alive), {
            name: value
            for name, value in ray.cluster_resources().items()  # type: ignore[no-untyped-call]
            if not name.startswith("node:") and name != "object_store_memory"
        }


@contextlib.contextmanager
def _ray_errors(what: str) -> Iterator[None]:
    """Errors of Ray as one of ours: the command line shows those as a message."""
    from ray.exceptions import RayError

    try:
        yield
    except RetinueError:
        raise
    except RayError as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ClusterUnreachable(f"{what}: {first}") from error


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """One ``up`` or ``down`` at a time for each user."""
    home = home_folder()
    home.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + _LOCK_SECONDS
    with (home / "cluster.lock").open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ClusterUnreachable(
                        f"another `retinue up` or `retinue down` has been at work for {_LOCK_SECONDS:.0f} s "
                        f"(it holds {file.name})"
                    ) from None
                time.sleep(_POLL)
        yield
