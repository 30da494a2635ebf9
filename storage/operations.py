"""The rules of the store operations, the same for every engine.

Each operation first checks everything that it depends on and only then writes, so that a refusal has left
nothing behind even where the engine cannot undo.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import msgspec

from retinue.errors import InputError, LeaseLost, NotFound, RetinueError, SessionConflict
from retinue.ids import check_id
from retinue.storage.checks import (
    Checks,
    check_approval,
    check_artifacts,
    check_attestation,
    check_record,
    check_settlement,
    run_of,
    standing,
    stands,
)
from retinue.storage.leases import LeaseWatch
from retinue.storage.reading import Reading
from retinue.storage.rows import HISTORY, Rows, SessionRow
from retinue.store import (
    AcquireLease,
    AppendEvents,
    ApprovalStands,
    BeginRun,
    CommitSession,
    Committed,
    DeleteSession,
    Done,
    Fenced,
    FenceHolder,
    FinishRun,
    ForkSession,
    Lease,
    LeaseGrant,
    MarkReplayable,
    OpenApproval,
    OpenRun,
    Origin,
    PutArtifacts,
    ReleaseLease,
    Renewed,
    RenewLeases,
    ReplaceSession,
    SettleApproval,
    StoredRun,
    StoreOperation,
    StoreReply,
)

logger = logging.getLogger(__name__)


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
        self._checks = Checks(store_id)
        self._watch = watch
        self._methods: dict[type[Any], Callable[[Rows, Any], StoreReply]] = {
            AcquireLease: self._acquire,
            RenewLeases: self._renew,
            ReleaseLease: self._release,
            FenceHolder: self._fence,
            OpenRun: self._open_run,
            BeginRun: self._begin_run,
            CommitSession: self._commit,
            ReplaceSession: self._replace,
            AppendEvents: self._append_events,
            FinishRun: self._finish_run,
            PutArtifacts: self._put_artifacts,
            ForkSession: self._fork,
            MarkReplayable: self._mark_replayable,
            DeleteSession: self._delete,
            OpenApproval: self._open_approval,
            SettleApproval: self._settle_approval,
            **Reading(self._checks).methods,
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
        self._checks.check_address(address)
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
                self._checks.is_here(lease.address) and rows.renew_lease(lease.address, lease.epoch)
                for lease in operation.leases
            ]
        )

    def _release(self, rows: Rows, operation: ReleaseLease) -> Done:
        lease = operation.lease
        row = rows.find_session(lease.address) if self._checks.is_here(lease.address) else None
        if row is not None and stands(row, lease):
            rows.end_lease(row.key)
        return Done()

    def _fence(self, rows: Rows, operation: FenceHolder) -> Fenced:
        check_id("holder_id", operation.holder_id)
        return Fenced(addresses=rows.fence_holder(operation.holder_id))

    # --- a session as a whole ---

    def _commit(self, rows: Rows, operation: CommitSession) -> Committed:
        lease, outcome = operation.lease, operation.outcome
        check_id("commit_id", operation.commit_id)
        self._checks.check_lease(lease)
        row = rows.find_session(lease.address)
        if row is not None and row.commit_id == operation.commit_id:
            # A repeat, whose first answer was lost: it was committed, whoever has the lease by now.
            return Committed(revision=row.commit_revision)
        row = standing(row, lease)
        _check_revision(row, lease, operation.base_revision)
        if operation.events and outcome is None:
            raise InputError("a commit with events must name their run in its outcome")
        for execution_id in operation.conversations:
            check_id("an execution id of a conversation", execution_id)
        check_artifacts(operation.artifacts)
        run = None if outcome is None else run_of(rows, row, lease.address, outcome.run_id)

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
            rows.cancel_approvals(run.key, outcome.approvals)
        return Committed(revision=revision)

    def _replace(self, rows: Rows, operation: ReplaceSession) -> Done:
        row = self._checks.leased(rows, operation.lease)
        rows.clear_session(row.key)
        if operation.messages:
            rows.append_messages(row.key, HISTORY, operation.messages)
        return Done()

    def _put_artifacts(self, rows: Rows, operation: PutArtifacts) -> Done:
        row = self._checks.leased(rows, operation.lease)
        check_artifacts(operation.artifacts)
        if operation.artifacts:
            rows.add_artifacts(row.key, operation.artifacts)
        return Done()

    def _fork(self, rows: Rows, operation: ForkSession) -> Committed:
        lease, address, target = operation.lease, operation.lease.address, operation.target
        check_id("commit_id", operation.commit_id)
        self._checks.check_lease(lease)
        if not self._checks.is_here(target) or target.identity != address.identity:
            raise InputError(
                f"session {address.session_id!r} can only be forked within its store and its user's "
                "sessions; name a target of the same store, tenant and user",
                field="target",
            )
        check_id("target.session_id", target.session_id)
        existing = rows.find_session(target)
        if existing is not None and existing.fork_id == operation.commit_id:
            return Committed(revision=1)  # a repeat, as in a commit
        row = standing(rows.find_session(address), lease)
        _check_revision(row, lease, operation.base_revision)
        size = rows.history_size(row.key)
        if not 0 <= operation.keep_messages <= size:
            raise InputError(
                f"session {address.session_id!r} has {size} messages, of which {operation.keep_messages} "
                "cannot be taken over",
                field="keep_messages",
            )
        if existing is not None and (existing.holder is not None or not rows.is_blank(existing.key)):
            raise SessionConflict(
                f"session {target.session_id!r} exists already; fork to a new one, or delete it first"
            )

        made = existing or rows.add_session(target)
        origin = Origin(
            session_id=address.session_id, revision=row.revision, messages=operation.keep_messages
        )
        rows.fork_session(row.key, made.key, operation.commit_id, origin)
        if operation.keep_state:
            rows.copy_state(row.key, made.key)
        return Committed(revision=1)

    def _mark_replayable(self, rows: Rows, operation: MarkReplayable) -> Committed:
        lease, attestation = operation.lease, operation.attestation
        check_id("commit_id", operation.commit_id)
        check_attestation(attestation)
        self._checks.check_lease(lease)
        row = rows.find_session(lease.address)
        if row is not None and row.commit_id == operation.commit_id:
            return Committed(revision=row.commit_revision)  # a repeat, as in a commit
        row = standing(row, lease)
        _check_revision(row, lease, attestation.revision)

        rows.advance_session(row.key, row.revision + 1, operation.commit_id, True)
        rows.add_attestation(row.key, attestation)
        return Committed(revision=row.revision + 1)

    def _delete(self, rows: Rows, operation: DeleteSession) -> Done:
        lease = operation.lease
        self._checks.check_lease(lease)
        row = rows.find_session(lease.address)
        if row is None:
            return Done()  # a repeat
        standing(row, lease)

        # No row is left to remember the epoch in, not even the session's ids: all new sessions begin above.
        rows.raise_epoch_floor(row.epoch)
        rows.delete_session(row.key)
        self._watch.forget(lease.address)
        return Done()

    # --- runs ---

    def _open_run(self, rows: Rows, operation: OpenRun) -> StoredRun:
        record, address = operation.record, operation.lease.address
        check_record(record, address)
        row = self._checks.leased(rows, operation.lease)
        found = rows.read_run(address.identity, record.run_id)
        if found is None:
            rows.add_run(row.key, record)
            return StoredRun(record=record)
        if found.session_id != record.session_id:
            raise InputError(
                f"run id {record.run_id!r} is taken, in session {found.session_id!r}; give each its own",
                run_id=record.run_id,
            )
        return StoredRun(record=found)

    def _begin_run(self, rows: Rows, operation: BeginRun) -> Done:
        row = self._checks.leased(rows, operation.lease)
        rows.begin_run(run_of(rows, row, operation.lease.address, operation.run_id).key)
        return Done()

    def _append_events(self, rows: Rows, operation: AppendEvents) -> Done:
        row = self._checks.leased(rows, operation.lease)
        run = run_of(rows, row, operation.lease.address, operation.run_id)
        if operation.reserve_to is not None:
            rows.reserve_events(run.key, operation.reserve_to)
        if operation.events:
            rows.add_events(run.key, operation.events)
        return Done()

    def _finish_run(self, rows: Rows, operation: FinishRun) -> Done:
        row = self._checks.leased(rows, operation.lease)
        run = run_of(rows, row, operation.lease.address, operation.outcome.run_id)
        check_artifacts(operation.artifacts)
        if operation.events:
            rows.add_events(run.key, operation.events)
        if operation.artifacts:
            rows.add_artifacts(row.key, operation.artifacts)
        rows.finish_run(run.key, operation.outcome)
        rows.cancel_approvals(run.key, operation.outcome.approvals)
        return Done()

    # --- approvals ---

    def _open_approval(self, rows: Rows, operation: OpenApproval) -> ApprovalStands:
        approval, address = operation.approval, operation.lease.address
        check_approval(approval, address)
        row = self._checks.leased(rows, operation.lease)
        known = rows.find_approval(address.identity, approval.approval_id)
        if known is not None:
            asked = msgspec.structs.replace(
                known.approval, state="pending", decided_at=None, by="", reason=""
            )
            if asked != approval:
                raise InputError(
                    f"approval id {approval.approval_id!r} is taken; give each request its own",
                    approval_id=approval.approval_id,
                )
            return ApprovalStands(approval=known.approval, changed=False)
        run = run_of(rows, row, address, approval.run_id)
        record = rows.read_run(address.identity, approval.run_id)
        if record is not None and record.outcome is not None:  # nobody waits for it any more
            approval = msgspec.structs.replace(approval, state="cancelled", reason="the run ended")
        rows.add_approval(row.key, run.key, approval)
        return ApprovalStands(approval=approval, changed=True)

    def _settle_approval(self, rows: Rows, operation: SettleApproval) -> ApprovalStands:
        check_settlement(operation)
        row = self._checks.leased(rows, operation.lease)
        address = operation.lease.address
        known = rows.find_approval(address.identity, operation.approval_id)
        if known is None or known.session_key != row.key:
            raise NotFound(
                f"session {address.session_id!r} has no request for approval {operation.approval_id!r}",
                approval_id=operation.approval_id,
            )
        if known.approval.state != "pending":
            return ApprovalStands(approval=known.approval, changed=False)
        rows.settle_approval(known.key, operation)
        settled = msgspec.structs.replace(
            known.approval,
            state=operation.state,
            decided_at=operation.at,
            by=operation.by,
            reason=operation.reason,
        )
        return ApprovalStands(approval=settled, changed=True)


def _check_revision(row: SessionRow, lease: Lease, base_revision: int) -> None:
    """Raise :class:`SessionConflict` unless the stored revision is the one that a change was made from."""
    if row.revision != base_revision:
        raise SessionConflict(
            f"session {lease.address.session_id!r} is at revision {row.revision}, and this change was "
            f"made from {base_revision}; read the session again",
            revision=row.revision,
        )
