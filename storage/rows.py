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
    Holder,
    RunOutcome,
    RunRecord,
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
    epoch: int
    """Of the lease that was given last; it stays when the lease ends."""
    renewals: int
    holder: Holder | None
    """Who has the lease now."""


class RunRow(msgspec.Struct, frozen=True):
    """A run's place."""

    key: int
    session_key: int


class Rows(Protocol):
    """One transaction. Methods raise :class:`retinue.errors.DamagedRecord` for what cannot be read."""

    # sessions and leases

    def find_session(self, address: SessionAddress) -> SessionRow | None: ...

    def add_session(self, address: SessionAddress) -> SessionRow:
        """A new session with the defaults of an unknown one, epoch 0 and no holder."""
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
        """Drop history, conversations and state: revision 0, not replayable. The last commit stays known."""
        ...

    def add_artifacts(self, session_key: int, artifacts: Sequence[StoredArtifact]) -> None:
        """Keep artifacts; an id that stands already is left alone."""
        ...

    def read_artifact(self, address: SessionAddress, artifact_id: str) -> StoredArtifact | None: ...

    # runs and events

    def find_run(self, identity: Identity, run_id: str) -> RunRow | None: ...

    def read_run(self, identity: Identity, run_id: str) -> RunRecord | None: ...

    def read_open_runs(self, address: SessionAddress) -> Sequence[RunRecord]:
        """Records without an outcome, in the order in which they were opened."""
        ...

    def add_run(self, session_key: int, record: RunRecord) -> None: ...

    def finish_run(self, run_key: int, outcome: RunOutcome) -> None: ...

    def reserve_events(self, run_key: int, reserve_to: int) -> None:
        """Raise the run's reserved event numbers; never lowers them."""
        ...

    def add_events(self, run_key: int, events: Sequence[StoredEvent]) -> None:
        """Store events; a number that stands already is left alone."""
        ...

    def read_events(
        self, identity: Identity, run_id: str, after: int, limit: int
    ) -> Sequence[StoredEvent]: ...


def conversations_of(
    messages: Mapping[str, Sequence[bytes]],
) -> tuple[tuple[bytes, ...], dict[str, tuple[bytes, ...]]]:
    """Split what is kept by execution id into canonical history and the others, as copies."""
    others = {name: tuple(bodies) for name, bodies in messages.items() if name != HISTORY}
    return tuple(messages.get(HISTORY, ())), others
