"""The rules of the store operations that only read, the same for every engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, get_args

import msgspec

from retinue.approvals import ApprovalState
from retinue.errors import InputError
from retinue.ids import check_id
from retinue.storage.checks import Checks, check_run, check_text
from retinue.storage.rows import Rows
from retinue.store import (
    PAGE_LIMIT,
    ApprovalPage,
    ArtifactIds,
    EventPage,
    FoundApproval,
    FoundArtifact,
    FoundRun,
    FoundSession,
    ListApprovals,
    ListArtifacts,
    ListRuns,
    ListSessions,
    OpenRuns,
    ReadApproval,
    ReadArtifact,
    ReadEvents,
    ReadOpenRuns,
    ReadRun,
    ReadSession,
    RunPage,
    SessionPage,
    StoreOperation,
    StoreReply,
)

READS = (
    ReadSession,
    ReadRun,
    ReadOpenRuns,
    ReadEvents,
    ReadArtifact,
    ListSessions,
    ListRuns,
    ListArtifacts,
    ListApprovals,
    ReadApproval,
)
"""Operations that change nothing and need no lease."""

Question = TypeVar("Question", ListSessions, ListRuns, ListApprovals)


def only_reads(operations: Sequence[StoreOperation]) -> bool:
    """Whether a list may be answered beside the writer."""
    return all(isinstance(operation, READS) for operation in operations)


class Reading:
    """Performs reads on the rows of one transaction.

    Args:
        checks: of this store.
    """

    def __init__(self, checks: Checks) -> None:
        self._checks = checks
        self.methods: dict[type[Any], Callable[[Rows, Any], StoreReply]] = {
            ReadSession: self._read_session,
            ReadRun: self._read_run,
            ReadOpenRuns: self._read_open_runs,
            ReadEvents: self._read_events,
            ReadArtifact: self._read_artifact,
            ListSessions: self._list_sessions,
            ListRuns: self._list_runs,
            ListArtifacts: self._list_artifacts,
            ListApprovals: self._list_approvals,
            ReadApproval: self._read_approval,
        }
        """What answers each operation of :data:`READS`."""

    def _read_session(self, rows: Rows, operation: ReadSession) -> FoundSession:
        self._checks.check_address(operation.address)
        return FoundSession(session=rows.read_session(operation.address))

    def _read_run(self, rows: Rows, operation: ReadRun) -> FoundRun:
        check_run(operation.identity, operation.run_id)
        return FoundRun(record=rows.read_run(operation.identity, operation.run_id))

    def _read_open_runs(self, rows: Rows, operation: ReadOpenRuns) -> OpenRuns:
        self._checks.check_address(operation.address)
        return OpenRuns(records=rows.read_open_runs(operation.address))

    def _read_events(self, rows: Rows, operation: ReadEvents) -> EventPage:
        check_run(operation.identity, operation.run_id)
        if operation.limit <= 0:
            return EventPage(events=())
        return EventPage(
            events=rows.read_events(operation.identity, operation.run_id, operation.after, operation.limit)
        )

    def _read_artifact(self, rows: Rows, operation: ReadArtifact) -> FoundArtifact:
        self._checks.check_address(operation.address)
        check_id("artifact_id", operation.artifact_id)
        return FoundArtifact(artifact=rows.read_artifact(operation.address, operation.artifact_id))

    def _list_sessions(self, rows: Rows, operation: ListSessions) -> SessionPage:
        _check_scope(operation)
        question = _bounded(operation)
        # The place to go on from, within what is listed: so that an engine need not skip what comes before.
        first = (operation.tenant_id or "", operation.user_id or "", "")
        after = first if operation.after is None else max(first, tuple(operation.after))
        for name, part in zip(("tenant", "user", "session"), after, strict=True):
            check_text(f"after, its {name}", part)
        within = (operation.tenant_id or after[0], operation.user_id or after[1])
        if question.limit <= 0 or after[:2] != within:
            return SessionPage(sessions=())
        return SessionPage(sessions=rows.list_sessions(msgspec.structs.replace(question, after=after)))

    def _list_runs(self, rows: Rows, operation: ListRuns) -> RunPage:
        _check_scope(operation)
        if operation.session_id is not None:
            if operation.user_id is None:
                raise InputError("a list of a session's runs needs its user too", field="user_id")
            check_id("session_id", operation.session_id)
        question = _bounded(operation)
        if question.limit <= 0:
            return RunPage(records=(), next=None)
        # One more than asked for tells whether there is another page.
        found = rows.list_runs(msgspec.structs.replace(question, limit=question.limit + 1))
        page = found[: question.limit]
        return RunPage(
            records=tuple(run.record for run in page), next=page[-1].key if len(found) > len(page) else None
        )

    def _list_artifacts(self, rows: Rows, operation: ListArtifacts) -> ArtifactIds:
        self._checks.check_address(operation.address)
        return ArtifactIds(ids=rows.list_artifacts(operation.address))

    def _read_approval(self, rows: Rows, operation: ReadApproval) -> FoundApproval:
        check_id("identity.tenant_id", operation.identity.tenant_id)
        check_id("identity.user_id", operation.identity.user_id)
        check_id("approval_id", operation.approval_id)
        row = rows.find_approval(operation.identity, operation.approval_id)
        return FoundApproval(approval=None if row is None else row.approval)

    def _list_approvals(self, rows: Rows, operation: ListApprovals) -> ApprovalPage:
        _check_scope(operation)
        for name, above in (("session_id", "user_id"), ("run_id", "session_id")):
            if getattr(operation, name) is not None:
                if getattr(operation, above) is None:
                    raise InputError(f"a list narrowed by {name} needs the {above} too", field=above)
                check_id(name, getattr(operation, name))
        if operation.state is not None and operation.state not in get_args(ApprovalState):
            raise InputError(f"{operation.state!r:.80} is no state of a request for approval", field="state")
        question = _bounded(operation)
        if question.limit <= 0:
            return ApprovalPage(approvals=(), next=None)
        found = rows.list_approvals(msgspec.structs.replace(question, limit=question.limit + 1))
        page = found[: question.limit]
        return ApprovalPage(
            approvals=tuple(row.approval for row in page),
            next=page[-1].key if len(found) > len(page) else None,
        )


def _check_scope(operation: ListSessions | ListRuns | ListApprovals) -> None:
    """Raise unless a list names a tenant before it names a user."""
    if operation.tenant_id is not None:
        check_id("tenant_id", operation.tenant_id)
    if operation.user_id is not None:
        if operation.tenant_id is None:
            raise InputError("a list of a user's own needs the tenant too", field="tenant_id")
        check_id("user_id", operation.user_id)


def _bounded(operation: Question) -> Question:
    return msgspec.structs.replace(operation, limit=min(operation.limit, PAGE_LIMIT))
