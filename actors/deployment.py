"""Putting the runtime's actors on a cluster, finding them, and taking them away.

Everything here blocks and is called from plain threads.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import Any

import msgspec
import psutil
import ray
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError

from retinue.actors.control_actor import DeployOptions, control_actor
from retinue.actors.names import DIRECTORY, KEEPER_PREFIX, NAMESPACE, REGISTRY
from retinue.actors.pool import PoolOptions
from retinue.errors import ClusterUnreachable, VersionMismatch
from retinue.host import IDLE_TIMEOUT
from retinue.ids import PROTOCOL_VERSION, new_id
from retinue.logs import configured, from_environment

SESSION_HOST_BYTES = 64 * 2**20
"""Memory of one session host, by which the number of those in use is capped."""
_ATTEMPTS = 20
_PING_SECONDS = 30.0


@dataclass(frozen=True)
class Deployment:
    """The standing actors of a cluster, as a client reaches them."""

    directory: Any
    directory_name: str
    namespace: str
    alone: bool
    """One process has all the roles (ephemeral)."""


def default_options(
    *, ephemeral: bool, max_resident: int | None = None, idle_timeout: float | None = None
) -> DeployOptions:
    """Options by what the machine has: a quarter of its memory for session hosts."""
    memory = psutil.virtual_memory().total // 4
    processors = int(ray.cluster_resources().get("CPU", 1))  # type: ignore[no-untyped-call]
    spares = PoolOptions().session_spares
    return DeployOptions(
        max_resident=max_resident or max(2, int(memory // SESSION_HOST_BYTES)),
        spread=max(1, processors),
        idle_timeout=IDLE_TIMEOUT if idle_timeout is None else idle_timeout,
        logs=configured() or from_environment(),
        pool=PoolOptions(
            session_spares=1 if ephemeral else spares,
            max_child_hosts=max(1, processors),
        ),
    )


def attach(
    namespace: str = NAMESPACE, *, ephemeral: bool, options: DeployOptions | None = None
) -> Deployment:
    """The actors of the cluster that this process is connected to; deployed where there are none.

    Raises:
        VersionMismatch: only other protocol versions stand there.
        ClusterUnreachable: the registry does not come to life.
    """
    standing = find(namespace)
    if standing is not None:
        return standing
    if not ephemeral:
        deploy(namespace, options=options)
        return attach(namespace, ephemeral=False)
    options = options or default_options(ephemeral=True)
    options = msgspec.structs.replace(options, versions={str(PROTOCOL_VERSION): REGISTRY})
    control = _start(REGISTRY, namespace, options)
    return Deployment(control, REGISTRY, namespace, alone=True)


def find(namespace: str = NAMESPACE) -> Deployment | None:
    """The actors that stand on the cluster; ``None`` where there are none. Starts nothing.

    Raises:
        VersionMismatch: only other protocol versions stand there.
        ClusterUnreachable: the registry does not answer.
    """
    registry = _find(REGISTRY, namespace)
    if registry is None:
        return None
    versions = read_versions(registry)
    name = versions.get(str(PROTOCOL_VERSION))
    if name is None:
        raise VersionMismatch(
            f"the cluster runs Retinue protocol {', '.join(sorted(versions)) or 'nothing'}, this package "
            f"speaks {PROTOCOL_VERSION}; install a matching package, or run `retinue down` with the old one "
            "and `retinue up` with this one",
            ours=PROTOCOL_VERSION,
            theirs=sorted(versions),
        )
    directory = registry if name == REGISTRY else _find(name, namespace)
    if directory is None:
        raise ClusterUnreachable(f"the directory {name} is registered but gone; run `retinue up` again")
    return Deployment(directory, name, namespace, alone=name == REGISTRY)


def deploy(
    namespace: str = NAMESPACE,
    *,
    options: DeployOptions | None = None,
    max_resident: int | None = None,
    idle_timeout: float | None = None,
) -> None:
    """Start registry and directory of this version. Harmless where they stand.

    Args:
        namespace: of the actors.
        options: how they are set up, if they do not stand yet.
        max_resident: session hosts in use at once; given, it also changes the cap of a directory that stands.
        idle_timeout: seconds without use after which a session leaves memory; changes likewise.
    """
    options = options or default_options(
        ephemeral=False, max_resident=max_resident, idle_timeout=idle_timeout
    )
    versions = {str(PROTOCOL_VERSION): DIRECTORY}
    registry = _start(REGISTRY, namespace, msgspec.structs.replace(options, versions=versions))
    directory = _start(DIRECTORY, namespace, options)
    if max_resident is not None or idle_timeout is not None:
        # The registry remembers them for a directory that restarts.
        ray.get([each.set_limits.remote(max_resident, idle_timeout) for each in (registry, directory)])
    ray.get(registry.register.remote(PROTOCOL_VERSION, DIRECTORY))


def withdraw(namespace: str = NAMESPACE) -> list[str]:
    """Release every session and end the actors of this version; the session keys that were resident."""
    registry = _find(REGISTRY, namespace)
    if registry is None:
        return []
    name = read_versions(registry).get(str(PROTOCOL_VERSION))
    released: list[str] = []
    directory = _find(name, namespace) if name else None
    if directory is not None:
        released = ray.get(directory.withdraw.remote())
        for entry in ray.util.list_named_actors(all_namespaces=True):
            if entry["namespace"] == namespace and entry["name"].startswith(KEEPER_PREFIX):
                keeper = _find(entry["name"], namespace)
                if keeper is not None:
                    ray.kill(keeper)
        if name != REGISTRY:
            ray.kill(directory)
    if ray.get(registry.unregister.remote(PROTOCOL_VERSION)) == 0:
        ray.kill(registry)
    return released


def statistics(namespace: str = NAMESPACE) -> dict[str, Any]:
    """What stands on the cluster: versions, directory, pools of each app, stores."""
    registry = _find(REGISTRY, namespace)
    if registry is None:
        return {"versions": []}
    versions = read_versions(registry)
    name = versions.get(str(PROTOCOL_VERSION))
    directory = _find(name, namespace) if name else None
    report: dict[str, Any] = {"versions": sorted(versions)}
    if directory is None:
        return report
    report.update(json.loads(ray.get(directory.statistics.remote())))
    for entry in ray.util.list_named_actors(all_namespaces=True):
        if entry["namespace"] == namespace and entry["name"].startswith(KEEPER_PREFIX):
            keeper = _find(entry["name"], namespace)
            if keeper is not None:
                report["pools"].extend(json.loads(ray.get(keeper.statistics.remote()))["pools"])
    return report


def read_versions(registry: Any) -> dict[str, str]:
    """Protocol versions that stand, and their directories' names."""
    for attempt in range(_ATTEMPTS):
        try:
            return dict(json.loads(ray.get(registry.versions.remote(), timeout=_PING_SECONDS)))
        except ActorUnavailableError:
            time.sleep(min(0.1 * 2**attempt, 1.0))  # it is being restarted
        except (RayActorError, GetTimeoutError) as error:
            raise ClusterUnreachable(
                f"the registry of this cluster does not answer: {_cause(error)}"
            ) from None
    raise ClusterUnreachable("the registry of this cluster does not come back; run `retinue up` again")


def _find(name: str, namespace: str) -> Any | None:
    try:
        return ray.get_actor(name, namespace)
    except ValueError:
        return None


def _start(name: str, namespace: str, options: DeployOptions) -> Any:
    """Get or start a control actor that answers: a name may still belong to one that is dying."""
    last: Exception | None = None
    for attempt in range(_ATTEMPTS):
        handle = control_actor(name, namespace, new_id("cluster"), options)
        try:
            ray.get(handle.ping.remote(), timeout=_PING_SECONDS)
            return handle
        except (RayActorError, GetTimeoutError, ValueError) as error:
            last = error
            if "creation task" in str(error):
                break  # it would fail again
            time.sleep(min(0.05 * 2**attempt, 1.0))
    raise ClusterUnreachable(
        f"the actor {name} does not come to life on this cluster: {_cause(last)}. Retinue must be installed "
        "where the cluster's processes run"
    )


def _cause(error: Exception | None) -> str:
    """The last line of what Ray says, which names the cause; before it stands a traceback."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else repr(error)
