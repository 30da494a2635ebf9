"""The operations on a store and the replies to them: their docstrings are the rules that engines keep.

Every writing operation names the lease it acts under, and is refused with ``lease_lost`` once a newer epoch
stands.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from retinue.approvals import ApprovalState
from retinue.ids import Identity, SessionAddress
from retinue.stored import (
    Attestation,
    Holder,
    Lease,
    RunOutcome,
    RunRecord,
    StoredApproval,
    StoredArtifact,
    StoredEvent,
    StoredSession,
)

PAGE_LIMIT = 1000
"""Most entries of one page of a list."""


# --- operations -------------------------------------------------------------------------------------------


class AcquireLease(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Take the session's lease, with a new epoch, and read it.

    Refused with ``session_conflict`` while another holder has it, unless that holder is provably gone
    (same ``boot_id``, and no process with its pid and start time), is this same ``holder_id``, or was seen
    by this engine with an unchanged renewal counter for a whole :data:`LEASE_PERIOD` of its own monotonic
    clock, beginning with the first refusal. The refusal's data has ``holder`` (its id) and ``retry_after``
    (seconds). A holder that was fenced is refused with ``lease_lost``. Reply: :class:`LeaseGrant`.
    """

    address: SessionAddress
    holder: Holder


class RenewLeases(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Add one to the renewal counter of each lease that still stands. Reply: :class:`Renewed`."""

    leases: Sequence[Lease]


class ReleaseLease(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Give a lease back. Harmless when it is not (or no longer) held. Reply: :class:`Done`."""

    lease: Lease


class FenceHolder(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """End every lease of a holder whose death is confirmed: nothing it sends is accepted any more.

    That includes an ``AcquireLease`` that is still on its way: the holder id can hold no lease ever again,
    and a process that goes on all the same must take a new one. Reply: :class:`Fenced` with the addresses
    that it held, none at a repeat.
    """

    holder_id: str


class OpenRun(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Store the record of a new run. A repeat (same run id) gives back what stands.

    Refused with ``invalid_input`` when the record names another session than the lease, or its run id is
    taken in another session of this identity. Reply: :class:`StoredRun`.
    """

    lease: Lease
    record: RunRecord


class CommitSession(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """One transaction: a delta of the session, events and an outcome. Reply: :class:`Committed`.

    Refused with ``lease_lost`` when the epoch is not current, with ``session_conflict`` when the stored
    revision is not ``base_revision``, and with ``not_found`` when this session has no run of the outcome's
    id. A repeat of the session's last ``commit_id`` gives the first answer, even once the lease is lost: so
    the fate of a commit whose answer was lost can be looked up.
    """

    lease: Lease
    commit_id: str
    base_revision: int
    messages: Sequence[bytes] = ()
    """To append to history."""
    conversations: Mapping[str, Sequence[bytes]] = msgspec.field(default_factory=dict)
    """To append, by execution id, which is never empty."""
    state: bytes | None = None
    """New state; ``None`` leaves it."""
    replayable: bool = True
    events: Sequence[StoredEvent] = ()
    """Events of the run in ``outcome`` not stored yet; refused with ``invalid_input`` without an outcome."""
    artifacts: Sequence[StoredArtifact] = ()
    """To keep; an id that stands already is left alone."""
    outcome: RunOutcome | None = None


class ReplaceSession(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Overwrite a session with display-only history: revision 0, not replayable, no state (contract
    section 1, ``import_legacy``). Reply: :class:`Done`."""

    lease: Lease
    messages: Sequence[bytes]


class AppendEvents(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Store events of a run, written behind; numbers that stand already are left alone.

    ``reserve_to`` raises the record's reserved numbers, and never lowers them. Refused with ``not_found``
    when this session has no such run. Reply: :class:`Done`.
    """

    lease: Lease
    run_id: str
    events: Sequence[StoredEvent]
    reserve_to: int | None = None


class FinishRun(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Set or replace the outcome of a run, without a session commit.

    Refused with ``not_found`` when this session has no such run. Reply: :class:`Done`.
    """

    lease: Lease
    outcome: RunOutcome
    events: Sequence[StoredEvent] = ()
    artifacts: Sequence[StoredArtifact] = ()


class BeginRun(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A queued run leaves the queue: clear ``queued`` of its record. A repeat is harmless.

    Refused with ``not_found`` when this session has no such run. Reply: :class:`Done`.
    """

    lease: Lease
    run_id: str


class PutArtifacts(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Keep artifacts beside the session now, whatever becomes of the run; an id that stands already is left
    alone. Reply: :class:`Done`."""

    lease: Lease
    artifacts: Sequence[StoredArtifact]


class OpenApproval(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Store a request for approval, before it is shown. A repeat (same id) gives back what stands.

    Refused with ``invalid_input`` when it names another session than the lease, says that it was decided, or
    its id is taken by another request, and with ``not_found`` when this session has no such run. A request of
    a run that has its outcome is stored as ``cancelled``. Reply: :class:`ApprovalStands`.
    """

    lease: Lease
    approval: StoredApproval


class SettleApproval(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Move a request out of ``pending``: a compare-and-set.

    Where it is not pending any more nothing changes, and the reply shows what stands. Refused with
    ``not_found`` when this session has no such request. Reply: :class:`ApprovalStands`.
    """

    lease: Lease
    approval_id: str
    state: ApprovalState
    """Not ``pending``."""
    by: str = ""
    reason: str = ""
    at: float
    """Epoch seconds."""


class ForkSession(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Begin another session of the same store and identity with a prefix of this one's history.

    The new session has revision 1, this one's ``replayable``, an :class:`Origin`, no conversations, no
    artifacts, no attestations, no requests for approval, and this one's state or none. Refused with
    ``lease_lost``, with ``session_conflict`` when the stored revision is not ``base_revision``, with
    ``invalid_input`` when ``target`` is of another tenant, user or store, or ``keep_messages`` is more than
    there are; and with ``session_conflict`` when the target exists already. One that was only looked at,
    never written and that nobody holds, does not exist yet. A repeat of the ``commit_id`` that made the
    target gives the first answer, even once the lease is lost. Reply: :class:`Committed` with revision 1.
    """

    lease: Lease
    commit_id: str
    base_revision: int
    target: SessionAddress
    keep_messages: int
    """Of the history, from its beginning."""
    keep_state: bool = True


class MarkReplayable(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Somebody vouches for the history: ``replayable`` becomes true, the attestation is kept, and the
    revision goes up by one.

    Refused with ``lease_lost``, and with ``session_conflict`` when the stored revision is not the
    attestation's. Repeats as those of :class:`CommitSession`. Reply: :class:`Committed`.
    """

    lease: Lease
    commit_id: str
    attestation: Attestation


class DeleteSession(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Remove everything that is kept of a session: history, conversations, state, artifacts, runs with their
    events and requests for approval, attestations and the session itself.

    The lease ends with it; a later session of this address begins with a higher epoch than any before, so
    that nothing late is accepted. Refused with ``lease_lost``, unless the session is gone already (a
    repeat). Reply: :class:`Done`.
    """

    lease: Lease


class ListSessions(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Sessions in the order of (tenant, user, session id). Reply: :class:`SessionPage`.

    Refused with ``invalid_input`` for a user without a tenant.
    """

    tenant_id: str | None = None
    """``None`` lists every tenant: for operators."""
    user_id: str | None = None
    """Only with a tenant."""
    after: tuple[str, str, str] | None = None
    """(tenant, user, session id) of the last one that was seen."""
    limit: int = 100
    """At most :data:`PAGE_LIMIT`, whatever is asked; zero and less give an empty page."""


class ListRuns(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Runs, those opened last first. Reply: :class:`RunPage`.

    Refused with ``invalid_input`` for a user without a tenant, or a session without a user.
    """

    tenant_id: str | None = None
    user_id: str | None = None
    """Only with a tenant."""
    session_id: str | None = None
    """Only with a user."""
    open_only: bool = False
    """Those without an outcome."""
    before: int | None = None
    """``RunPage.next`` of the page before."""
    limit: int = 100
    """As in :class:`ListSessions`."""


class ListApprovals(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Requests for approval, oldest first. Reply: :class:`ApprovalPage`.

    Refused with ``invalid_input`` for a user without a tenant, a session without a user, or a run without a
    session.
    """

    tenant_id: str | None = None
    """``None`` lists every tenant: for operators."""
    user_id: str | None = None
    session_id: str | None = None
    run_id: str | None = None
    state: ApprovalState | None = None
    after: int | None = None
    """``ApprovalPage.next`` of the page before."""
    limit: int = 100
    """As in :class:`ListSessions`."""


class ReadApproval(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A request for approval of this identity. Reply: :class:`FoundApproval`."""

    identity: Identity
    approval_id: str


class ListArtifacts(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The ids of a session's artifacts, in order. Reply: :class:`ArtifactIds`."""

    address: SessionAddress


class ReadSession(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The last commit, without a lease. Reply: :class:`FoundSession`."""

    address: SessionAddress


class ReadRun(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The record of a run of this identity. Reply: :class:`FoundRun`."""

    identity: Identity
    run_id: str


class ReadOpenRuns(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The records of a session without an outcome, oldest first. Reply: :class:`OpenRuns`."""

    address: SessionAddress


class ReadEvents(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Stored events of a run with ``sequence > after``, in order. Reply: :class:`EventPage`."""

    identity: Identity
    run_id: str
    after: int
    limit: int


class ReadArtifact(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """An artifact of exactly this session. Reply: :class:`FoundArtifact`."""

    address: SessionAddress
    artifact_id: str


StoreOperation = (
    AcquireLease | RenewLeases | ReleaseLease | FenceHolder | OpenRun | BeginRun | CommitSession
    | ReplaceSession | AppendEvents | FinishRun | PutArtifacts | ForkSession | MarkReplayable
    | DeleteSession | ReadSession | ReadRun | ReadOpenRuns | ReadEvents | ReadArtifact | ListSessions
    | ListRuns | ListArtifacts | OpenApproval | SettleApproval | ListApprovals | ReadApproval
)  # fmt: skip


# --- replies ----------------------------------------------------------------------------------------------


class LeaseGrant(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    lease: Lease
    session: StoredSession
    open_runs: Sequence[RunRecord]
    """Runs of earlier activations that never ended: the new holder ends them first."""


class Renewed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    standing: Sequence[bool]
    """For each lease of the request, whether it still stands."""


class Done(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    pass


class Fenced(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    addresses: Sequence[SessionAddress]


class Committed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    revision: int


class StoredRun(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    record: RunRecord


class FoundRun(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    record: RunRecord | None


class OpenRuns(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    records: Sequence[RunRecord]


class FoundSession(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    session: StoredSession


class EventPage(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    events: Sequence[StoredEvent]


class FoundArtifact(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    artifact: StoredArtifact | None


class SessionSummary(msgspec.Struct, frozen=True, kw_only=True):
    """A session in a list, without its content."""

    tenant_id: str
    user_id: str
    session_id: str
    revision: int
    replayable: bool
    messages: int
    """Of its history."""
    runs: int
    open_runs: int
    holder_id: str | None
    """The process that has its lease."""


class SessionPage(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    sessions: Sequence[SessionSummary]


class RunPage(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    records: Sequence[RunRecord]
    next: int | None
    """``before`` of the next page; ``None`` after the last."""


class ApprovalStands(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A request as it stands after the operation."""

    approval: StoredApproval
    changed: bool
    """This operation made it so."""


class FoundApproval(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    approval: StoredApproval | None


class ApprovalPage(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    approvals: Sequence[StoredApproval]
    next: int | None
    """``after`` of the next page; ``None`` after the last."""


class ArtifactIds(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    ids: Sequence[str]


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The operation failed, alone: others of the same list are not touched by it."""

    error: dict[str, Any]
    """:meth:`retinue.errors.RetinueError.to_payload`."""


StoreReply = (
    LeaseGrant | Renewed | Done | Fenced | Committed | StoredRun | FoundRun | OpenRuns | FoundSession
    | EventPage | FoundArtifact | SessionPage | RunPage | ArtifactIds | ApprovalStands | FoundApproval
    | ApprovalPage | Refused
)  # fmt: skip
