"""The rules of the store operations, the same for every engine.

Each operation first checks everything that it depends on and only then writes, so that a refusal has left
nothing behind even where the engine cannot undo.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from retinue.errors import (
    InputError,
    LeaseLost,
    NotFound,
    RetinueError,
    SessionConflict,
    StoreUnavailable,
)
from retinue.ids import Identity, SessionAddress, check_id, check_identity
from retinue.storage.leases import LeaseWatch
from retinue.storage.rows import HISTORY, Rows, RunRow, SessionRow
from retinue.store import (
    AcquireLease,
    AppendEvents,
    CommitSession,
    Committed,
    Done,
    EventPage,
    Fenced,
    FenceHolder,
    FinishRun,
    FoundArtifact,
    FoundRun,
    FoundSession,
    Lease,
    LeaseGrant,
    OpenRun,
    OpenRuns,
    ReadArtifact,
    ReadEvents,
    ReadOpenRuns,
    ReadRun,
    ReadSession,
    ReleaseLease,
    Renewed,
    RenewLeases,
    ReplaceSession,
    StoredRun,
    StoreOperation,
    StoreReply,
)

logger = logging.getLogger(__name__)

READS = (ReadSession, ReadRun, ReadOpenRuns, ReadEvents, ReadArtifact)
"""Operations that change nothing and need no lease."""


def only_reads(operations: Sequence[StoreOperation]) -> bool:
    """Whether a list may be answered beside the writer."""
    return all(isinstance(operation, READS) for operation in operations)


def refusal_of(operation: StoreOperation, error: Exception) -> RetinueError:
    """What a failed operation is answered with; only that operation is touched by it."""
    if isinstance(error, RetinueError):
        return error
    name = type(operation).__name__
    if isinstance(error, UnicodeEncodeError | OverflowError):
        return InputError(f"{name} holds a value that no store can carry: {error}")
    logger.error("a store operation failed: %s", name, exc_info=error)
    return RetinueError(f"{name} could not be executed: {type(error).__name__}: {error}")


class Operations:
    """Performs operations on the rows of one transaction.

    Args:
        store_id: of this store; addresses of another are refused.
        watch: the lease rule, with what this engine has seen.
    """

    def __init__(self, store_id: str, watch: LeaseWatch) -> None:
        self._store_id = store_id
        self._watch = watch
        self._methods: dict[type[Any], Callable[[Rows, Any], StoreReply]] = {
            AcquireLease: self._acquire,
            RenewLeases: self._renew,
            ReleaseLease: self._release,
            FenceHolder: self._fence,
            OpenRun: self._open_run,
            CommitSession: self._commit,
            ReplaceSession: self._replace,
            AppendEvents: self._append_events,
            FinishRun: self._finish_run,
            ReadSession: self._read_session,
            ReadRun: self._read_run,
            ReadOpenRuns: self._read_open_runs,
            ReadEvents: self._read_events,
            ReadArtifact: self._read_artifact,
        }

    def perform(self, rows: Rows, operation: StoreOperation) -> StoreReply:
        """The reply to one operation; raises the :class:`RetinueError` that refuses it."""
        method = self._methods.get(type(operation))
        if method is None:
            raise InputError(f"{type(operation).__name__} is not a store operation")
        return method(rows, operation)

    # --- leases ---

    def _acquire(self, rows: Rows, operation: AcquireLease) -> LeaseGrant:
        address, holder = operation.address, operation.holder
        self._check_address(address)
        check_id("holder.holder_id", holder.holder_id)
        if rows.is_fenced(holder.holder_id):
            raise LeaseLost(
                f"holder {holder.holder_id} was fenced, its death confirmed: it can hold no lease any more; "
                "a process that goes on all the same must take a new holder id"
            )
        row = rows.find_session(address)
        if row is None:
            row = rows.add_session(address)
        elif row.holder is not None:
            self._watch.admit(address, row.epoch, row.renewals, row.holder, holder)
        rows.set_lease(row.key, row.epoch + 1, holder)
        return LeaseGrant(
            lease=Lease(address=address, epoch=row.epoch + 1),
            session=rows.read_session(address),
            open_runs=rows.read_open_runs(address),
        )

    def _renew(self, rows: Rows, operation: RenewLeases) -> Renewed:
        return Renewed(
            standing=[
                lease.address.store_id == self._store_id and rows.renew_lease(lease.address, lease.epoch)
                for lease in operation.leases
            ]
        )

    def _release(self, rows: Rows, operation: ReleaseLease) -> Done:
        lease = operation.lease
        row = rows.find_session(lease.address) if lease.address.store_id == self._store_id else None
        if row is not None and _stands(row, lease):
            rows.end_lease(row.key)
        return Done()

    def _fence(self, rows: Rows, operation: FenceHolder) -> Fenced:
        check_id("holder_id", operation.holder_id)
        return Fenced(addresses=rows.fence_holder(operation.holder_id))

    # --- writing under a lease ---

    def _open_run(self, rows: Rows, operation: OpenRun) -> StoredRun:
        record, address = operation.record, operation.lease.address
        if (record.tenant_id, record.user_id, record.session_id) != (
            address.tenant_id,
            address.user_id,
            address.session_id,
        ):
            raise InputError(f"the record of run {record.run_id!r} names another session than its lease")
        check_id("run_id", record.run_id)
        row = self._leased(rows, operation.lease)
        standing = rows.read_run(address.identity, record.run_id)
        if standing is None:
            rows.add_run(row.key, record)
            return StoredRun(record=record)
        if standing.session_id != record.session_id:
            raise InputError(
                f"run id {record.run_id!r} is taken, in session {standing.session_id!r}; give each its own",
                run_id=record.run_id,
            )
        return StoredRun(record=standing)

    def _commit(self, rows: Rows, operation: CommitSession) -> Committed:
        lease, outcome = operation.lease, operation.outcome
        check_id("commit_id", operation.commit_id)
        self._check_lease(lease)
        row = rows.find_session(lease.address)
        if row is not None and row.commit_id == operation.commit_id:
            # A repeat, whose first answer was lost: it was committed, whoever has the lease by now.
            return Committed(revision=row.commit_revision)
        row = _require(row, lease)
        if row.revision != operation.base_revision:
            raise SessionConflict(
                f"session {lease.address.session_id!r} is at revision {row.revision}, and this commit was "
                f"made from {operation.base_revision}; read the session again",
                revision=row.revision,
            )
        if operation.events and outcome is None:
            raise InputError("a commit with events must name their run in its outcome")
        if HISTORY in operation.conversations:
            raise InputError("an execution id of a conversation must not be empty")
        run = None if outcome is None else _run_of(rows, row, lease.address, outcome.run_id)

        revision = row.revision + 1
        rows.advance_session(row.key, revision, operation.commit_id, operation.replayable)
        if operation.messages:
            rows.append_messages(row.key, HISTORY, operation.messages)
        for execution_id, messages in operation.conversations.items():
            rows.append_messages(row.key, execution_id, messages)
        if operation.state is not None:
            rows.set_state(row.key, operation.state)
        if operation.artifacts:
            rows.add_artifacts(row.key, operation.artifacts)
        if run is not None and outcome is not None:
            if operation.events:
                rows.add_events(run.key, operation.events)
            rows.finish_run(run.key, outcome)
        return Committed(revision=revision)

    def _replace(self, rows: Rows, operation: ReplaceSession) -> Done:
        row = self._leased(rows, operation.lease)
        rows.clear_session(row.key)
        if operation.messages:
            rows.append_messages(row.key, HISTORY, operation.messages)
        return Done()

    def _append_events(self, rows: Rows, operation: AppendEvents) -> Done:
        row = self._leased(rows, operation.lease)
        run = _run_of(rows, row, operation.lease.address, operation.run_id)
        if operation.reserve_to is not None:
            rows.reserve_events(run.key, operation.reserve_to)
        if operation.events:
            rows.add_events(run.key, operation.events)
        return Done()

    def _finish_run(self, rows: Rows, operation: FinishRun) -> Done:
        row = self._leased(rows, operation.lease)
        run = _run_of(rows, row, operation.lease.address, operation.outcome.run_id)
        if operation.events:
            rows.add_events(run.key, operation.events)
        if operation.artifacts:
            rows.add_artifacts(row.key, operation.artifacts)
        rows.finish_run(run.key, operation.outcome)
        return Done()

    # --- reading ---

    def _read_session(self, rows: Rows, operation: ReadSession) -> FoundSession:
        self._check_address(operation.address)
        return FoundSession(session=rows.read_session(operation.address))

    def _read_run(self, rows: Rows, operation: ReadRun) -> FoundRun:
        _check_run(operation.identity, operation.run_id)
        return FoundRun(record=rows.read_run(operation.identity, operation.run_id))

    def _read_open_runs(self, rows: Rows, operation: ReadOpenRuns) -> OpenRuns:
        self._check_address(operation.address)
        return OpenRuns(records=rows.read_open_runs(operation.address))

    def _read_events(self, rows: Rows, operation: ReadEvents) -> EventPage:
        _check_run(operation.identity, operation.run_id)
        if operation.limit <= 0:
            return EventPage(events=())
        return EventPage(
            events=rows.read_events(operation.identity, operation.run_id, operation.after, operation.limit)
        )

    def _read_artifact(self, rows: Rows, operation: ReadArtifact) -> FoundArtifact:
        self._check_address(operation.address)
        return FoundArtifact(artifact=rows.read_artifact(operation.address, operation.artifact_id))

    # --- checks ---

    def _check_address(self, address: SessionAddress) -> None:
        check_identity(address.identity, address.session_id)
        if address.store_id != self._store_id:
            raise StoreUnavailable(
                f"the address of session {address.session_id!r} belongs to store {address.store_id}, and "
                f"this is {self._store_id}; open the store that the session is in",
                reason="other_store",
            )

    def _leased(self, rows: Rows, lease: Lease) -> SessionRow:
        """The session's row, if the lease stands."""
        self._check_lease(lease)
        return _require(rows.find_session(lease.address), lease)

    def _check_lease(self, lease: Lease) -> None:
        """A memory store that was restarted is another store: what its leases allowed ended with it."""
        check_identity(lease.address.identity, lease.address.session_id)
        if lease.address.store_id != self._store_id:
            raise LeaseLost(
                f"the lease of session {lease.address.session_id!r} was given by store "
                f"{lease.address.store_id}, and this is {self._store_id}"
            )


def _check_run(identity: Identity, run_id: str) -> None:
    check_id("identity.tenant_id", identity.tenant_id)
    check_id("identity.user_id", identity.user_id)
    check_id("run_id", run_id)


def _stands(row: SessionRow, lease: Lease) -> bool:
    return row.holder is not None and row.epoch == lease.epoch


def _require(row: SessionRow | None, lease: Lease) -> SessionRow:
    """The row, if the lease stands; raises :class:`LeaseLost` otherwise."""
    if row is not None and _stands(row, lease):
        return row
    session_id = lease.address.session_id
    if row is None:
        raise LeaseLost(f"session {session_id!r} has no lease: this store has never given one")
    if row.epoch == lease.epoch:
        raise LeaseLost(
            f"the lease of session {session_id!r} with epoch {lease.epoch} was released, or its holder fenced"
        )
    raise LeaseLost(
        f"the lease of session {session_id!r} with epoch {lease.epoch} was lost: epoch {row.epoch} stands",
        epoch=row.epoch,
    )


def _run_of(rows: Rows, row: SessionRow, address: SessionAddress, run_id: str) -> RunRow:
    """The run's place, if it belongs to this session."""
    run = rows.find_run(address.identity, run_id)
    if run is None or run.session_key != row.key:
        raise NotFound(
            f"session {address.session_id!r} has no run {run_id!r}; open it before writing to it",
            run_id=run_id,
        )
    return run
