"""Rows of the memory store: dictionaries."""

from __future__ import annotations

import bisect
import heapq
import itertools
import operator
from collections.abc import Sequence
from typing import Any

import msgspec

from retinue.ids import Identity, SessionAddress
from retinue.storage.rows import (
    HISTORY,
    ApprovalRow,
    ListedRun,
    RunRow,
    SessionRow,
    conversations_of,
    new_session,
)
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


class _Session:
    """A session with all that belongs to it but its runs."""

    def __init__(self, key: int, address: SessionAddress, epoch: int) -> None:
        self.row = new_session(key, epoch)
        self.address = address
        self.replayable = True
        self.messages: dict[str, list[bytes]] = {}
        """By execution id; canonical history under :data:`HISTORY`."""
        self.state = b"{}"
        self.attestations: list[Attestation] = []
        self.origin: Origin | None = None
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
        self.approvals: list[int] = []
        """Keys of its requests for approval, oldest first."""


class MemoryRows:
    """:class:`retinue.storage.rows.Rows` over dictionaries."""

    def __init__(self) -> None:
        self._keys = itertools.count()
        self._epoch_floor = 0
        self._sessions: dict[int, _Session] = {}
        """By key."""
        self._by_address: dict[SessionAddress, _Session] = {}
        self._runs: dict[int, _Run] = {}
        """By key, oldest first."""
        self._by_run_id: dict[tuple[Identity, str], _Run] = {}
        self._fenced: set[str] = set()
        self._approvals: dict[int, ApprovalRow] = {}
        """By key, oldest first."""
        self._approval_keys: dict[tuple[Identity, str], int] = {}

    # sessions and leases

    def find_session(self, address: SessionAddress) -> SessionRow | None:
        session = self._by_address.get(address)
        return None if session is None else session.row

    def add_session(self, address: SessionAddress) -> SessionRow:
        session = _Session(next(self._keys), address, self._epoch_floor)
        self._sessions[session.row.key] = session
        self._by_address[address] = session
        return session.row

    def raise_epoch_floor(self, epoch: int) -> None:
        self._epoch_floor = max(self._epoch_floor, epoch)

    def delete_session(self, session_key: int) -> None:
        session = self._sessions.pop(session_key)
        del self._by_address[session.address]
        for run in session.runs:
            del self._runs[run.row.key]
            del self._by_run_id[session.address.identity, run.record.run_id]
            for approval_key in run.approvals:
                approval = self._approvals.pop(approval_key).approval
                del self._approval_keys[session.address.identity, approval.approval_id]

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
            for session in self._sessions.values()
            if session.row.holder is not None and session.row.holder.holder_id == holder_id
        ]
        for session in held:
            self.end_lease(session.row.key)
        return tuple(session.address for session in held)

    def is_fenced(self, holder_id: str) -> bool:
        return holder_id in self._fenced

    def list_sessions(self, question: ListSessions) -> Sequence[SessionSummary]:
        listed = (
            (_triple(address), session)
            for address, session in self._by_address.items()
            if question.tenant_id in (None, address.tenant_id) and question.user_id in (None, address.user_id)
        )
        after = question.after
        later = (entry for entry in listed if after is None or entry[0] > after)
        page = heapq.nsmallest(question.limit, later, key=operator.itemgetter(0))
        return tuple(_summary(session) for _, session in page)

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
            attestations=tuple(session.attestations),
            origin=session.origin,
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
        session.attestations = []
        session.origin = None

    def add_attestation(self, session_key: int, attestation: Attestation) -> None:
        self._sessions[session_key].attestations.append(attestation)

    def history_size(self, session_key: int) -> int:
        return len(self._sessions[session_key].messages.get(HISTORY, ()))

    def is_blank(self, session_key: int) -> bool:
        session = self._sessions[session_key]
        row = session.row
        never_changed = row.commit_id is None and row.fork_id is None and session.replayable
        return never_changed and not session.runs and not session.artifacts

    def fork_session(self, session_key: int, target_key: int, fork_id: str, origin: Origin) -> None:
        session, target = self._sessions[session_key], self._sessions[target_key]
        target.row = msgspec.structs.replace(target.row, revision=1, fork_id=fork_id)
        target.replayable = session.replayable
        target.messages = {HISTORY: session.messages.get(HISTORY, [])[: origin.messages]}
        target.origin = origin

    def copy_state(self, session_key: int, target_key: int) -> None:
        self._sessions[target_key].state = self._sessions[session_key].state

    def add_artifacts(self, session_key: int, artifacts: Sequence[StoredArtifact]) -> None:
        kept = self._sessions[session_key].artifacts
        for artifact in artifacts:
            kept.setdefault(artifact.artifact_id, artifact)

    def read_artifact(self, address: SessionAddress, artifact_id: str) -> StoredArtifact | None:
        session = self._by_address.get(address)
        return None if session is None else session.artifacts.get(artifact_id)

    def list_artifacts(self, address: SessionAddress) -> Sequence[str]:
        session = self._by_address.get(address)
        return () if session is None else tuple(sorted(session.artifacts))

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
        run = _Run(RunRow(key=next(self._keys), session_key=session_key), record)
        self._runs[run.row.key] = run
        session.runs.append(run)
        self._by_run_id[session.address.identity, record.run_id] = run

    def begin_run(self, run_key: int) -> None:
        run = self._runs[run_key]
        run.record = msgspec.structs.replace(run.record, queued=False)

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

    def list_runs(self, question: ListRuns) -> Sequence[ListedRun]:
        found = (
            ListedRun(run.row.key, run.record)
            for run in reversed(self._runs.values())
            if (question.before is None or run.row.key < question.before)
            and question.tenant_id in (None, run.record.tenant_id)
            and question.user_id in (None, run.record.user_id)
            and question.session_id in (None, run.record.session_id)
            and not (question.open_only and run.record.outcome is not None)
        )
        return tuple(itertools.islice(found, question.limit))

    # approvals

    def find_approval(self, identity: Identity, approval_id: str) -> ApprovalRow | None:
        key = self._approval_keys.get((identity, approval_id))
        return None if key is None else self._approvals[key]

    def add_approval(self, session_key: int, run_key: int, approval: StoredApproval) -> None:
        row = ApprovalRow(key=next(self._keys), session_key=session_key, approval=approval)
        self._approvals[row.key] = row
        self._approval_keys[self._sessions[session_key].address.identity, approval.approval_id] = row.key
        self._runs[run_key].approvals.append(row.key)

    def settle_approval(self, approval_key: int, settlement: SettleApproval) -> None:
        if self._approvals[approval_key].approval.state == "pending":
            self._change_approval(
                approval_key,
                state=settlement.state,
                decided_at=settlement.at,
                by=settlement.by,
                reason=settlement.reason,
            )

    def cancel_approvals(self, run_key: int, reason: str) -> None:
        for key in self._runs[run_key].approvals:
            if self._approvals[key].approval.state == "pending":
                self._change_approval(key, state="cancelled", reason=reason)

    def _change_approval(self, key: int, **changes: Any) -> None:
        row = self._approvals[key]
        approval = msgspec.structs.replace(row.approval, **changes)
        self._approvals[key] = msgspec.structs.replace(row, approval=approval)

    def list_approvals(self, question: ListApprovals) -> Sequence[ApprovalRow]:
        found = (
            row
            for row in self._approvals.values()
            if (question.after is None or row.key > question.after)
            and question.tenant_id in (None, row.approval.tenant_id)
            and question.user_id in (None, row.approval.user_id)
            and question.session_id in (None, row.approval.session_id)
            and question.run_id in (None, row.approval.run_id)
            and question.state in (None, row.approval.state)
        )
        return tuple(itertools.islice(found, question.limit))


def _triple(address: SessionAddress) -> tuple[str, str, str]:
    return address.tenant_id, address.user_id, address.session_id


def _summary(session: _Session) -> SessionSummary:
    row, address = session.row, session.address
    return SessionSummary(
        tenant_id=address.tenant_id,
        user_id=address.user_id,
        session_id=address.session_id,
        revision=row.revision,
        replayable=session.replayable,
        messages=len(session.messages.get(HISTORY, ())),
        runs=len(session.runs),
        open_runs=sum(run.record.outcome is None for run in session.runs),
        holder_id=None if row.holder is None else row.holder.holder_id,
    )
