"""Identities, addresses and ids: who a session belongs to and what things are called."""

from __future__ import annotations

import json
import uuid

import msgspec

from retinue.errors import InputError

PROTOCOL_VERSION = 3
"""Version of the messages between processes; part of every versioned actor name."""

SAFE_INTEGER = 2**53 - 1
"""Largest integer that survives JSON in every language (contract section 0)."""


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """Who a session belongs to, as verified by the application's authentication (contract section 1).

    Never taken from model output or from a caller's payload.
    """

    tenant_id: str
    user_id: str


class SessionAddress(msgspec.Struct, frozen=True, kw_only=True):
    """Where a session lives: one store, one tenant, one user, one session id."""

    store_id: str
    tenant_id: str
    user_id: str
    session_id: str

    @property
    def session_key(self) -> str:
        """The triple as a JSON array, so that no choice of ids can collide (contract section 1)."""
        return session_key(Identity(tenant_id=self.tenant_id, user_id=self.user_id), self.session_id)

    @property
    def identity(self) -> Identity:
        return Identity(tenant_id=self.tenant_id, user_id=self.user_id)


def session_key(identity: Identity, session_id: str) -> str:
    """``["tenant","user","session"]`` as compact JSON (contract section 1)."""
    return json.dumps(
        [identity.tenant_id, identity.user_id, session_id], ensure_ascii=False, separators=(",", ":")
    )


def session_label(session_id: str, name: str) -> str:
    """What a delegate's session is called; a label, never a session that can be opened."""
    return f"{session_id}:{name}"


def new_id(prefix: str) -> str:
    """A fresh unique id: ``<prefix>_<32 hex digits>``."""
    return f"{prefix}_{uuid.uuid4().hex}"


def check_identity(identity: Identity, session_id: str) -> None:
    """Raise :class:`InputError` unless tenant, user and session id are nonempty, encodable strings."""
    if not isinstance(identity, Identity):
        raise InputError(f"identity must be a retinue.Identity, not {type(identity).__name__}")
    for name, value in (
        ("identity.tenant_id", identity.tenant_id),
        ("identity.user_id", identity.user_id),
        ("session_id", session_id),
    ):
        check_id(name, value)


def check_id(name: str, value: object) -> None:
    """Raise :class:`InputError` unless ``value`` is a nonempty string that UTF-8 can carry."""
    if not isinstance(value, str) or not value:
        raise InputError(f"{name} must be a nonempty string, not {value!r:.80}", field=name)
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InputError(
            f"{name} holds a lone surrogate, which no store can carry; give valid Unicode text", field=name
        ) from None
