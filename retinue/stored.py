"""What a store keeps: sessions, runs with their events, artifacts, and who may write.

Messages, events, state and outcomes are JSON bytes here: a store never needs to understand them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from retinue.approvals import ApprovalState
from retinue.ids import SessionAddress

LEASE_PERIOD = 15.0
"""Seconds after which a lease that was not renewed may be taken over."""
LEASE_RENEWAL = 5.0
"""Seconds between renewals."""
EVENT_BLOCK = 1024
"""Event numbers that a run reserves at once."""


class Guarantees(msgspec.Struct, frozen=True, kw_only=True):
    """What a store promises; it must be true (contract section 1)."""

    durable: bool
    compare_and_swap: bool
    single_writer: Literal["process", "distributed"]


class Holder(msgspec.Struct, frozen=True, kw_only=True):
    """The process that holds a lease, described so that others can tell that it is gone."""

    holder_id: str
    """Unique per activation host; also its name in statistics."""
    cluster_id: str
    boot_id: str
    """Boot of the machine and process-id namespace; process ids mean nothing outside of it."""
    pid: int
    started_at: float
    """Start of the process in seconds after boot, so that a reused process id is not mistaken for it."""


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """The right to write one session: valid as long as no newer epoch stands."""

    address: SessionAddress
    epoch: int


class Attestation(msgspec.Struct, frozen=True, kw_only=True):
    """Somebody checked a partial transcript and called it replayable."""

    by: str
    """Who, in the application's words."""
    why: str
    revision: int
    """The revision that was checked."""
    at: float
    """Epoch seconds."""


class Origin(msgspec.Struct, frozen=True, kw_only=True):
    """What a session was forked from."""

    session_id: str
    revision: int
    """The other session's, when it was forked."""
    messages: int
    """Messages taken over from its history."""


class StoredSession(msgspec.Struct, frozen=True, kw_only=True):
    """A session as committed; the defaults are those of an unknown session (contract section 1)."""

    revision: int = 0
    replayable: bool = True
    messages: Sequence[bytes] = ()
    """Canonical history, one JSON document a message, oldest first."""
    conversations: Mapping[str, Sequence[bytes]] = msgspec.field(default_factory=dict)
    """Messages by execution id (the root run and each delegate)."""
    state: bytes = b"{}"
    """Application state, a JSON object."""
    attestations: Sequence[Attestation] = ()
    origin: Origin | None = None
    """``None`` for a session that was not forked from another."""


class RunRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What is kept of a run. ``outcome`` is its terminal event as JSON; a record without one still runs."""

    tenant_id: str
    user_id: str
    session_id: str
    run_id: str
    root_run_id: str
    parent_run_id: str | None = None
    app: str
    """Name of the app or digest of the configuration that ran it."""
    input: bytes
    """The input, a JSON content value."""
    created_at: float
    """Epoch seconds."""
    reserved_to: int = EVENT_BLOCK
    """Highest event number that the run may have used."""
    final_cursor: int | None = None
    outcome: bytes | None = None
    queued: bool = False
    """It waits for the run before it, or ended while it did: nothing of it has begun."""
    start: bytes = b""
    """What it was started with: for the activation that takes a queued run up, and for whoever resumes
    one."""


class StoredApproval(msgspec.Struct, frozen=True, kw_only=True):
    """A request for approval and what became of it. ``request`` never changes."""

    approval_id: str
    tenant_id: str
    user_id: str
    session_id: str
    run_id: str
    """Of the root run."""
    tool_name: str
    digest: str
    """Of the arguments."""
    request: bytes
    """A :class:`retinue.approvals.ApprovalRequest` as JSON."""
    requested_at: float
    """Epoch seconds."""
    expires_at: float
    state: ApprovalState = "pending"
    decided_at: float | None = None
    by: str = ""
    """Who decided; empty where time or the end of the run did."""
    reason: str = ""


class StoredEvent(msgspec.Struct, frozen=True):
    """One event by its number; ``body`` is the whole envelope as JSON. Terminal events are not among
    them: they are the records' outcomes."""

    sequence: int
    body: bytes


class StoredArtifact(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes kept for a session, readable only with its full address."""

    artifact_id: str
    mime_type: str
    data: bytes


class RunOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """How a run ended, as part of a commit: its terminal event as JSON, and that event's number."""

    run_id: str
    outcome: bytes
    final_cursor: int
    approvals: str = "the run ended"
    """Reason with which requests for approval of this run that are still pending become ``cancelled``, in the
    same transaction, with no time: an engine reads no clock."""
