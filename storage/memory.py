"""The memory store: everything in dictionaries of one process, gone with it."""

from __future__ import annotations

import bisect
import threading
import time
import uuid
from collections.abc import Callable, Sequence

import msgspec

from retinue.errors import StoreUnavailable
from retinue.ids import Identity, SessionAddress
from retinue.storage.holders import provably_gone
from retinue.storage.leases import LeaseWatch
from retinue.storage.operations import Operations, only_reads, refusal_of
from retinue.storage.rows import HISTORY, RunRow, SessionRow, conversations_of
from retinue.store import (
    Committed,
    Guarantees,
    Holder,
    Refused,
    RunOutcome,
    RunRecord,
    StoredArtifact,
    StoredEvent,
    StoredSession,
    StoreOperation,
    StoreReply,
    StoreStatistics,
)

MEMORY_URL = "memory:"


class _Session:
    """A session with all that belongs to it but its runs."""

    def __init__(self, key: int, address: SessionAddress) -> None:
        self.row = SessionRow(
            key=key, revision=0, commit_id=None, commit_revision=0, epoch=0, renewals=0, holder=None
        )
        self.address = address
        self.replayable = True
        self.messages: dict[str, list[bytes]] = {}
        """By execution id; canonical history under :data:`HISTORY`."""
        self.state = b"{}"
        self.artifacts: dict[str, StoredArtifact] = {}
        self.runs: list[_Run] = []


class _Run:
    """A run's record and events."""

    def __init__(self, row: RunRow, record: RunRecord) -> None:
        self.row = row
        self.record = record
        self.events: dict[int, StoredEvent] = {}
        self.sequences: list[int] = []
        """The numbers in ``events``, ascending."""


class MemoryRows:
    """:class:`retinue.storage.rows.Rows` over dictionaries."""

    def __init__(self) -> None:
        self._sessions: list[_Session] = []
        self._by_address: dict[SessionAddress, _Session] = {}
        self._runs: list[_Run] = []
        self._by_run_id: dict[tuple[Identity, str], _Run] = {}
        self._fenced: set[str] = set()

    # sessions and leases

    def find_session(self, address: SessionAddress) -> SessionRow | None:
        session = self._by_address.get(address)
        return None if session is None else session.row

    def add_session(self, address: SessionAddress) -> SessionRow:
        session = _Session(len(self._sessions), address)
        self._sessions.append(session)
        self._by_address[address] = session
        return session.row

    def set_lease(self, session_key: int, epoch: int, holder: Holder) -> None:
        session = self._sessions[session_key]
        session.row = msgspec.structs.replace(session.row, epoch=epoch, renewals=0, holder=holder)

    def renew_lease(self, address: SessionAddress, epoch: int) -> bool:
        session = self._by_address.get(address)
        if session is None or session.row.holder is None or session.row.epoch != epoch:
            return False
        session.row = msgspec.structs.replace(session.row, renewals=session.row.renewals + 1)
        return True

    def end_lease(self, session_key: int) -> None:
        session = self._sessions[session_key]
        session.row = msgspec.structs.replace(session.row, holder=None)

    def fence_holder(self, holder_id: str) -> Sequence[SessionAddress]:
        self._fenced.add(holder_id)
        held = [
            session
            for session in self._sessions
            if session.row.holder is not None and session.row.holder.holder_id == holder_id
        ]
        for session in held:
            self.end_lease(session.row.key)
        return tuple(session.address for session in held)

    def is_fenced(self, holder_id: str) -> bool:
        return holder_id in self._fenced

    # what a session keeps

    def read_session(self, address: SessionAddress) -> StoredSession:
        session = self._by_address.get(address)
        if session is None:
            return StoredSession()
        history, conversations = conversations_of(session.messages)
        return StoredSession(
            revision=session.row.revision,
            replayable=session.replayable,
            messages=history,
            conversations=conversations,
            state=session.state,
        )

    def advance_session(self, session_key: int, revision: int, commit_id: str, replayable: bool) -> None:
        session = self._sessions[session_key]
        session.row = msgspec.structs.replace(
            session.row, revision=revision, commit_id=commit_id, commit_revision=revision
        )
        session.replayable = replayable

    def append_messages(self, session_key: int, execution_id: str, messages: Sequence[bytes]) -> None:
        self._sessions[session_key].messages.setdefault(execution_id, []).extend(messages)

    def set_state(self, session_key: int, state: bytes) -> None:
        self._sessions[session_key].state = state

    def clear_session(self, session_key: int) -> None:
        session = self._sessions[session_key]
        session.row = msgspec.structs.replace(session.row, revision=0)
        session.replayable = False
        session.messages = {HISTORY: []}
        session.state = b"{}"

    def add_artifacts(self, session_key: int, artifacts: Sequence[StoredArtifact]) -> None:
        kept = self._sessions[session_key].artifacts
        for artifact in artifacts:
            kept.setdefault(artifact.artifact_id, artifact)

    def read_artifact(self, address: SessionAddress, artifact_id: str) -> StoredArtifact | None:
        session = self._by_address.get(address)
        return None if session is None else session.artifacts.get(artifact_id)

    # runs and events

    def find_run(self, identity: Identity, run_id: str) -> RunRow | None:
        run = self._by_run_id.get((identity, run_id))
        return None if run is None else run.row

    def read_run(self, identity: Identity, run_id: str) -> RunRecord | None:
        run = self._by_run_id.get((identity, run_id))
        return None if run is None else run.record

    def read_open_runs(self, address: SessionAddress) -> Sequence[RunRecord]:
        session = self._by_address.get(address)
        runs = () if session is None else session.runs
        return tuple(run.record for run in runs if run.record.outcome is None)

    def add_run(self, session_key: int, record: RunRecord) -> None:
        session = self._sessions[session_key]
        run = _Run(RunRow(key=len(self._runs), session_key=session_key), record)
        self._runs.append(run)
        session.runs.append(run)
        self._by_run_id[session.address.identity, record.run_id] = run

    def finish_run(self, run_key: int, outcome: RunOutcome) -> None:
        run = self._runs[run_key]
        run.record = msgspec.structs.replace(
            run.record, outcome=outcome.outcome, final_cursor=outcome.final_cursor
        )

    def reserve_events(self, run_key: int, reserve_to: int) -> None:
        run = self._runs[run_key]
        reserved_to = max(run.record.reserved_to, reserve_to)
        run.record = msgspec.structs.replace(run.record, reserved_to=reserved_to)

    def add_events(self, run_key: int, events: Sequence[StoredEvent]) -> None:
        run = self._runs[run_key]
        for event in events:
            if event.sequence not in run.events:
                run.events[event.sequence] = event
                bisect.insort(run.sequences, event.sequence)

    def read_events(self, identity: Identity, run_id: str, after: int, limit: int) -> Sequence[StoredEvent]:
        run = self._by_run_id.get((identity, run_id))
        if run is None:
            return ()
        first = bisect.bisect_right(run.sequences, after)
        return tuple(run.events[sequence] for sequence in run.sequences[first : first + limit])


class MemoryEngine:
    """A store that lives as long as its process.

    Args:
        distributed: whether this engine serves several processes, as in a store actor. It then is the one
            place where leases are decided and may promise it; in a user's process it promises what the
            contract says of the default store.
        clock: monotonic seconds, for the lease rule.
        gone: whether a holder's process has certainly ended, for the lease rule.
    """

    def __init__(
        self,
        *,
        distributed: bool = False,
        clock: Callable[[], float] = time.monotonic,
        gone: Callable[[Holder], bool] = provably_gone,
    ) -> None:
        self._store_id = f"memory-{uuid.uuid4()}"
        self._distributed = distributed
        self._operations = Operations(self._store_id, LeaseWatch(clock=clock, gone=gone))
        self._rows = MemoryRows()
        self._lock = threading.Lock()
        self._closed = False
        self._writes = self._transactions = self._reads = self._commits = 0

    @property
    def store_id(self) -> str:
        """A new one for each engine: what another process's memory kept is not here."""
        return self._store_id

    @property
    def guarantees(self) -> Guarantees:
        return Guarantees(
            durable=False,
            compare_and_swap=self._distributed,
            single_writer="distributed" if self._distributed else "process",
        )

    async def execute(self, operations: Sequence[StoreOperation]) -> Sequence[StoreReply]:
        """Reply to each operation, in order; see :class:`retinue.store.StoreEngine`."""
        with self._lock:
            if self._closed:
                raise StoreUnavailable("the memory store is closed", url=MEMORY_URL, reason="closed")
            replies = [self._reply(operation) for operation in operations]
            if only_reads(operations):
                self._reads += len(operations)
            else:
                self._writes += len(operations)
                self._transactions += 1
                self._commits += sum(isinstance(reply, Committed) for reply in replies)
            return replies

    def _reply(self, operation: StoreOperation) -> StoreReply:
        # The rules check before they write (see Operations), so there is nothing to undo.
        try:
            return self._operations.perform(self._rows, operation)
        except Exception as error:
            return Refused(error=refusal_of(operation, error).to_payload())

    def statistics(self) -> StoreStatistics:
        return StoreStatistics(
            url=MEMORY_URL,
            writes=self._writes,
            transactions=self._transactions,
            reads=self._reads,
            commits=self._commits,
            queued=0,
        )

    async def close(self) -> None:
        """Forget everything. A second time changes nothing."""
        with self._lock:
            self._closed = True
            self._rows = MemoryRows()
