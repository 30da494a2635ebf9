"""Messages between the actors themselves."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from retinue.actors.store_actor import StoreDescription
from retinue.apps import AppSpec
from retinue.budgets import BudgetSnapshot
from retinue.ids import PROTOCOL_VERSION, SessionAddress
from retinue.protocol import ChildOrder, ParticipantMessage, RootReply


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    """A client introduces itself to the directory."""

    version: int = PROTOCOL_VERSION
    app_digest: str
    store_url: str | None
    """Absolute; ``None`` for the cluster's own."""
    relative_to_node: str | None = None
    """The client's node, when the URL was made absolute there."""


class Welcome(msgspec.Struct, frozen=True, kw_only=True):
    """What a client needs to know; the store actor's handle comes beside it."""

    store: StoreDescription
    app_known: bool
    """The app has a pool; otherwise the client must make its keeper."""


class Activate(msgspec.Struct, frozen=True, kw_only=True):
    """Bring a session to life in a host. The store actor's and the keeper's handles come beside it."""

    address: SessionAddress
    activation_id: str
    app: AppSpec
    store: StoreDescription


class Whereabouts(msgspec.Struct, frozen=True, kw_only=True):
    """Where a session lives; the host's handle comes beside it."""

    host_id: str
    activation_id: str


class HostDescription(msgspec.Struct, frozen=True, kw_only=True):
    """What a host says of itself to a directory that restarted."""

    host_id: str
    app: AppSpec
    sessions: Sequence[tuple[SessionAddress, str]]
    """Address and activation id of each resident session."""
    activations: int
    """Sessions that came to life here so far; 0 for a spare."""


# --- session host to child host ---------------------------------------------------------------------------


class RunChild(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    order: ChildOrder


class StopChild(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    run_id: str
    reason: str


class LateReply(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The answer to a question that could not be answered at once."""

    ask_id: int
    reply: RootReply


class KeepAlive(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    pass


Down = RunChild | StopChild | LateReply | KeepAlive


# --- child host to session host ---------------------------------------------------------------------------


class Up(msgspec.Struct, frozen=True, kw_only=True):
    """A participant's message to the root of its tree."""

    activation_id: str
    tree_id: str
    ask_id: int
    """0 when no reply is wanted."""
    message: ParticipantMessage


class UpAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The replies that were there at once, and the budgets of the trees that were spoken to."""

    replies: Sequence[tuple[int, RootReply]]
    budgets: dict[str, BudgetSnapshot]
