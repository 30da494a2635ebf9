"""What the runtime's actors say of themselves, for listings."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
import ray

from retinue.actors.wire import encode
from retinue.host import ResidentSession

Role = Literal["registry", "directory", "keeper", "store", "session host", "child host"]
ActorState = Literal[
    "starting",  # its process is there, and not ready yet
    "ready",
    "spare",  # a session host that had no session yet
    "serving",  # a session host with sessions
    "empty",  # a session host whose sessions have left
    "silent",  # it did not answer in time
]


class ActorReport(msgspec.Struct, frozen=True, kw_only=True):
    """What an actor says of itself, for listings."""

    roles: Sequence[Role]
    state: ActorState = "ready"
    pid: int
    node_id: str
    """Ray's id of the node."""
    apps: Sequence[str] = ()
    """Names of the apps that it keeps, or runs."""
    store: str | None = None
    """URL, of a store actor."""
    delegates: int | None = None
    """At work, of a child host."""
    sessions: Sequence[ResidentSession] = ()


def own_report(*roles: Role, **more: Any) -> bytes:
    """The report of the actor that this runs in."""
    node_id = ray.get_runtime_context().get_node_id()
    return encode(ActorReport(roles=roles, pid=os.getpid(), node_id=node_id, **more))
