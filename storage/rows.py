"""What the store operations need of a database: one transaction's view of its rows.

:mod:`retinue.storage.operations` has the rules once; an engine brings an implementation of :class:`Rows`.
A session is found by its full address, a run by its identity and id. Writing methods take the keys that
such a search gave in the same transaction, so that nothing can be reached without naming whose it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from retinue.ids import Identity, SessionAddress
from retinue.store import (
    Attestation,
    Holder,
    ListApprovals,
    ListRuns,
    ListSessions,
    Origin,
    RunOutcome,
    RunRecord,
    SessionSummary,
    SettleApproval,
    StoredApproval,
    StoredArtifact,
    StoredEvent,
    StoredSession,
)

HISTORY = ""
"""The execution id under which canonical history is kept; those of callers are never empty."""


class SessionRow(msgspec.Struct, frozen=True):
    """A session's place, its last commit and its lease."""

    key: int
    revision: int
    commit_id: str | None
    """Id of the last commit, ``None`` before the first."""
    commit_revision: int
    """What the last commit was answered; an import has set ``revision`` back since, perhaps."""
    fork_id: str | None
    """Id of the fork that made the session, if one did."""
    epoch: int
    """Of the lease that was given last; it stays when the lease ends."""
    renewals: int
    holder: Holder | None
    """Who has the lease now."""


class RunRow(msgspec.Struct, frozen=True):
    """A run's place."""

    key: int
    session_key: int


class ListedRun(msgspec.Struct, frozen=True):
    """A run in a list."""

    key: int
    """Runs opened later have higher ones."""
    record: RunRecord


class ApprovalRow(msgspec.Struct, frozen=True, kw_only=True):
    """A request for approval and its place."""

    key: int
    """Requests opened later have higher ones."""
    session_key: int
    approval: StoredApproval


class Rows(Protocol):
    """One transaction. Methods raise :class:`retinue.errors.DamagedRecord` for what cannot be read."""

    # sessions and leases

    def find_session(self, address: SessionAddress) -> SessionRow | None: ...

    def add_session(self, address: SessionAddress) -> SessionRow:
        """A new session with the defaults of an unknown one, at the epoch floor, without a holder."""
        ...

    def raise_epoch_floor(self, epoch: int) -> None:
        """See that sessions added later begin at this epoch or a higher one."""
        ...

    def delete_session(self, session_key: int) -> None:
        """Remove a session with all that it keeps, its runs and their events; its ids are nowhere then."""
        ...

    def list_sessions(self, question: ListSessions) -> Sequence[SessionSummary]:
        """A page; ``after`` is set, and not before the tenant and user in question."""
        ...

    def set_lease(self, session_key: int, epoch: int, holder: Holder) -> None:
        """Give the lease; its renewal counter starts at 0."""
        ...

    def renew_lease(self, address: SessionAddress, epoch: int) -> bool:
        """Add one to the renewal counter, if the lease is held with this epoch; whether it was."""
        ...

    def end_lease(self, session_key: int) -> None:
        """Leave the session without a holder; its epoch stays."""
        ...

    def fence_holder(self, holder_id: str) -> Sequence[SessionAddress]:
        """End all leases of the holder and remember that it is fenced; the addresses that it held."""
        ...

    def is_fenced(self, holder_id: str) -> bool: ...

    # what a session keeps

    def read_session(self, address: SessionAddress) -> StoredSession: ...

    def advance_session(self, session_key: int, revision: int, commit_id: str, replayable: bool) -> None: ...

    def append_messages(self, session_key: int, execution_id: str, messages: Sequence[bytes]) -> None: ...

    def set_state(self, session_key: int, state: bytes) -> None: ...

    def clear_session(self, session_key: int) -> None:
        """Drop history, conversations, state, attestations and origin: revision 0, not replayable. The last
        commit stays known, and the fork that made the session."""
        ...

    def add_attestation(self, session_key: int, attestation: Attestation) -> None: ...

    def history_size(self, session_key: int) -> int:
        """Messages of canonical history."""
        ...

    def is_blank(self, session_key: int) -> bool:
        """Whether nothing was ever written to a session, but leases."""
        ...

    def fork_session(self, session_key: int, target_key: int, fork_id: str, origin: Origin) -> None:
        """Make a blank session a fork: revision 1, ``replayable`` of the session that it is forked from, and
        the first ``origin.messages`` messages of its history."""
        ...

    def copy_state(self, session_key: int, target_key: int) -> None:
        """Give a blank session the state of another."""
        ...

    def add_artifacts(self, session_key: int, artifacts: Sequence[StoredArtifact]) -> None:
        """Keep artifacts; an id that stands already is left alone."""
        ...

    def read_artifact(self, address: SessionAddress, artifact_id: str) -> StoredArtifact | None: ...

    def list_artifacts(self, address: SessionAddress) -> Sequence[str]:
        """The ids, in order."""
        ...

    # runs and events

    def find_run(self, identity: Identity, run_id: str) -> RunRow | None: ...

    def read_run(self, identity: Identity, run_id: str) -> RunRecord | None: ...

    def read_open_runs(self, address: SessionAddress) -> Sequence[RunRecord]:
        """Records without an outcome, in the order in which they were opened."""
        ...

    def add_run(self, session_key: int, record: RunRecord) -> None: ...

    def begin_run(self, run_key: int) -> None:
        """Clear ``queued``."""
        ...

    def finish_run(self, run_key: int, outcome: RunOutcome) -> None: ...

    def list_runs(self, question: ListRuns) -> Sequence[ListedRun]:
        """A page, highest key first; what is asked for is valid."""
        ...

    def reserve_events(self, run_key: int, reserve_to: int) -> None:
        """Raise the run's reserved event numbers; never lowers them."""
        ...

    def add_events(self, run_key: int, events: Sequence[StoredEvent]) -> None:
        """Store events; a number that stands already is left alone."""
        ...

    def read_events(
        self, identity: Identity, run_id: str, after: int, limit: int
    ) -> Sequence[StoredEvent]: ...

    # approvals

    def find_approval(self, identity: Identity, approval_id: str) -> ApprovalRow | None: ...

    def add_approval(self, session_key: int, run_key: int, approval: StoredApproval) -> None: ...

    def settle_approval(self, approval_key: int, settlement: SettleApproval) -> None:
        """Move a request that is pending to the settlement's state."""
        ...

    def cancel_approvals(self, run_key: int, reason: str) -> None:
        """Move those of a run that are pending to ``cancelled``."""
        ...

    def list_approvals(self, question: ListApprovals) -> Sequence[ApprovalRow]:
        """A page, lowest key first; what is asked for is valid."""
        ...


def new_session(key: int, epoch: int) -> SessionRow:
    """The row of a session that was just added."""
    return SessionRow(
        key=key,
        revision=0,
        commit_id=None,
        commit_revision=0,
        fork_id=None,
        epoch=epoch,
        renewals=0,
        holder=None,
    )


def conversations_of(
    messages: Mapping[str, Sequence[bytes]],
) -> tuple[tuple[bytes, ...], dict[str, tuple[bytes, ...]]]:
    """Split what is kept by execution id into canonical history and the others, as copies."""
    others = {name: tuple(bodies) for name, bodies in messages.items() if name != HISTORY}
    return tuple(messages.get(HISTORY, ())), others
