"""Sessions as people read them: copies of what was committed (contract section 1)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from retinue.messages import Message, decode_message
from retinue.store import Attestation, Origin, StoredSession


class SessionSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """A copy of a session."""

    history: Sequence[Message] = ()
    conversations: dict[str, Sequence[Message]] = msgspec.field(default_factory=dict)
    """Messages by execution id: each root run, and each delegate."""
    state: dict[str, Any] = msgspec.field(default_factory=dict)
    revision: int = 0
    replayable: bool = True
    attestations: Sequence[Attestation] = ()
    """Who called a partial transcript replayable, and why."""
    origin: Origin | None = None
    """Where a forked session came from."""


def decode_session(stored: StoredSession) -> SessionSnapshot:
    """A stored session as people read it."""
    return SessionSnapshot(
        history=[decode_message(body) for body in stored.messages],
        conversations={
            key: [decode_message(body) for body in bodies] for key, bodies in stored.conversations.items()
        },
        state=msgspec.json.decode(stored.state),
        revision=stored.revision,
        replayable=stored.replayable,
        attestations=stored.attestations,
        origin=stored.origin,
    )
