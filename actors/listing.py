"""The runtime's actors on a cluster, one row each."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec
import ray

from retinue.actors.names import (
    CHILD_HOST_PREFIX,
    DIRECTORY,
    HOST_PREFIX,
    KEEPER_PREFIX,
    NAMESPACE,
    REGISTRY,
    STORE_PREFIX,
)
from retinue.actors.reports import ActorReport, ActorState, Role
from retinue.actors.wire import decode
from retinue.host import ResidentSession

ANSWER_LIMIT = 3.0
"""Seconds that an actor has to say what it is; then its state is ``silent``."""


class ActorRow(msgspec.Struct, frozen=True, kw_only=True):
    """An actor of the runtime; see :class:`retinue.actors.reports.ActorReport`."""

    name: str
    roles: Sequence[Role]
    state: ActorState
    pid: int | None
    node_id: str | None
    apps: Sequence[str]
    store: str | None
    delegates: int | None
    sessions: Sequence[ResidentSession]


class ActorPage(msgspec.Struct, frozen=True, kw_only=True):
    """Actors in the order of their names."""

    actors: Sequence[ActorRow]
    next: str | None
    """``after`` of the next page; ``None`` after the last."""


async def list_actors(namespace: str = NAMESPACE, *, after: str | None = None, limit: int = 100) -> ActorPage:
    """The runtime's actors of this protocol version, and the registry. They are asked all at once.

    Args:
        namespace: Ray namespace of the actors.
        after: name of the last one that was seen.
        limit: most actors of the page.
    """
    names = [name for name in await actor_names(namespace) if after is None or name > after]
    page = names[:limit]
    rows = await asyncio.gather(*(_row(name, namespace) for name in page))
    return ActorPage(
        actors=[row for row in rows if row is not None],
        next=page[-1] if page and len(names) > len(page) else None,
    )


async def actor_names(namespace: str = NAMESPACE) -> list[str]:
    """Names of the runtime's actors, in order."""
    named = await asyncio.to_thread(ray.util.list_named_actors, True)
    return sorted(each["name"] for each in named if each["namespace"] == namespace and _role(each["name"]))


async def _row(name: str, namespace: str) -> ActorRow | None:
    try:
        handle: Any = await asyncio.to_thread(ray.get_actor, name, namespace)
        async with asyncio.timeout(ANSWER_LIMIT):
            report = decode(await handle.report.remote(name), ActorReport)
    except ValueError:
        return None  # it has just ended
    except (TimeoutError, ray.exceptions.ActorUnavailableError, AttributeError):
        return _silent(name)  # the last: it runs code from before there were reports
    except ray.exceptions.RayActorError:
        return None
    return ActorRow(name=name, **msgspec.structs.asdict(report))


def _silent(name: str) -> ActorRow:
    return ActorRow(
        name=name,
        roles=[role] if (role := _role(name)) else [],
        state="silent",
        pid=None,
        node_id=None,
        apps=[],
        store=None,
        delegates=None,
        sessions=[],
    )


def _role(name: str) -> Role | None:
    """The role, or the first one, of an actor of this name; ``None`` for a stranger's."""
    prefixes: dict[str, Role] = {
        REGISTRY: "registry",
        DIRECTORY: "directory",
        KEEPER_PREFIX: "keeper",
        STORE_PREFIX: "store",
        HOST_PREFIX: "session host",
        CHILD_HOST_PREFIX: "child host",
    }
    return next((role for prefix, role in prefixes.items() if name.startswith(prefix)), None)
