"""The store seam: what is kept, the operations on it, and the typed client over an engine.

An *engine* (memory, SQLite, ...) executes lists of operations; :class:`Store` is the typed client that
everything else uses, over an engine in this process or over a store actor. Every writing operation names
the lease it acts under and is refused with :class:`LeaseLost` once a newer epoch stands: that check, inside
the engine's transaction, is what makes a session single-writer (design: fencing).

The records are in :mod:`retinue.stored`, the operations and replies in :mod:`retinue.store_operations`; all
can be imported from here.

What crosses is already encoded: messages, events, state and results are JSON bytes, so an engine never
needs to understand them, and bytes are fixed before the first await of a commit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, cast

import msgspec

from retinue.approvals import ApprovalState
from retinue.errors import error_from_payload
from retinue.ids import Identity, SessionAddress
from retinue.store_operations import (
    PAGE_LIMIT,
    AcquireLease,
    AppendEvents,
    ApprovalPage,
    ApprovalStands,
    ArtifactIds,
    BeginRun,
    CommitSession,
    Committed,
    DeleteSession,
    Done,
    EventPage,
    Fenced,
    FenceHolder,
    FinishRun,
    ForkSession,
    FoundApproval,
    FoundArtifact,
    FoundRun,
    FoundSession,
    LeaseGrant,
    ListApprovals,
    ListArtifacts,
    ListRuns,
    ListSessions,
    MarkReplayable,
    OpenApproval,
    OpenRun,
    OpenRuns,
    PutArtifacts,
    ReadApproval,
    ReadArtifact,
    ReadEvents,
    ReadOpenRuns,
    ReadRun,
    ReadSession,
    Refused,
    ReleaseLease,
    Renewed,
    RenewLeases,
    ReplaceSession,
    RunPage,
    SessionPage,
    SessionSummary,
    SettleApproval,
    StoredRun,
    StoreOperation,
    StoreReply,
)
from retinue.stored import (
    EVENT_BLOCK,
    LEASE_PERIOD,
    LEASE_RENEWAL,
    Attestation,
    Guarantees,
    Holder,
    Lease,
    Origin,
    RunOutcome,
    RunRecord,
    StoredApproval,
    StoredArtifact,
    StoredEvent,
    StoredSession,
)

__all__ = [
    "EVENT_BLOCK",
    "LEASE_PERIOD",
    "LEASE_RENEWAL",
    "PAGE_LIMIT",
    "AcquireLease",
    "AppendEvents",
    "ApprovalPage",
    "ApprovalStands",
    "ArtifactIds",
    "Attestation",
    "BeginRun",
    "CommitSession",
    "Committed",
    "DeleteSession",
    "Done",
    "EventPage",
    "FenceHolder",
    "Fenced",
    "FinishRun",
    "ForkSession",
    "FoundApproval",
    "FoundArtifact",
    "FoundRun",
    "FoundSession",
    "Guarantees",
    "Holder",
    "Lease",
    "LeaseGrant",
    "ListApprovals",
    "ListArtifacts",
    "ListRuns",
    "ListSessions",
    "MarkReplayable",
    "OpenApproval",
    "OpenRun",
    "OpenRuns",
    "Origin",
    "PutArtifacts",
    "ReadApproval",
    "ReadArtifact",
    "ReadEvents",
    "ReadOpenRuns",
    "ReadRun",
    "ReadSession",
    "Refused",
    "ReleaseLease",
    "RenewLeases",
    "Renewed",
    "ReplaceSession",
    "RunOutcome",
    "RunPage",
    "RunRecord",
    "SessionPage",
    "SessionSummary",
    "SettleApproval",
    "Store",
    "StoreEngine",
    "StoreOperation",
    "StoreReply",
    "StoreStatistics",
    "StoredApproval",
    "StoredArtifact",
    "StoredEvent",
    "StoredRun",
    "StoredSession",
]  # fmt: skip


class StoreStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine did since it was opened."""

    url: str
    """Without credentials."""
    writes: int
    transactions: int
    """Fewer than writes: writes that arrive together share one."""
    reads: int
    commits: int
    queued: int
    """Writes waiting now."""


class StoreEngine(Protocol):
    """An implementation of the store seam. ``execute`` may be called from any event loop, concurrently."""

    @property
    def store_id(self) -> str: ...

    @property
    def guarantees(self) -> Guarantees: ...

    async def execute(self, operations: Sequence[StoreOperation]) -> Sequence[StoreReply]:
        """Reply to each operation, in order: an operation sees what those before it in the list wrote.

        A failed one is answered :class:`Refused`; this raises only
        :class:`retinue.errors.StoreUnavailable`, when nothing could be done at all, and after ``close``.
        An address of another store is refused with ``store_unavailable``, a lease of another store with
        ``lease_lost``. A caller that is cancelled may find its operations done.
        """
        ...

    def statistics(self) -> StoreStatistics: ...

    async def close(self) -> None:
        """Do what was accepted, then end; a second time changes nothing."""
        ...


class Store:
    """The typed client of a store: what sessions, runs and the directory call."""

    def __init__(self, engine: StoreEngine) -> None:
        self._engine = engine
        self.calls = 0
        """Operations awaited through this client: hops, when the engine is behind an actor."""

    @property
    def store_id(self) -> str:
        return self._engine.store_id

    @property
    def guarantees(self) -> Guarantees:
        return self._engine.guarantees

    async def _one(self, operation: StoreOperation) -> Any:
        self.calls += 1
        (reply,) = await self._engine.execute([operation])
        if isinstance(reply, Refused):
            raise error_from_payload(reply.error)
        return reply

    async def acquire(self, address: SessionAddress, holder: Holder) -> LeaseGrant:
        return cast(LeaseGrant, await self._one(AcquireLease(address=address, holder=holder)))

    async def renew(self, leases: Sequence[Lease]) -> Sequence[bool]:
        return cast(Renewed, await self._one(RenewLeases(leases=leases))).standing

    async def release(self, lease: Lease) -> None:
        await self._one(ReleaseLease(lease=lease))

    async def fence(self, holder_id: str) -> Sequence[SessionAddress]:
        return cast(Fenced, await self._one(FenceHolder(holder_id=holder_id))).addresses

    async def open_run(self, lease: Lease, record: RunRecord) -> RunRecord:
        return cast(StoredRun, await self._one(OpenRun(lease=lease, record=record))).record

    async def commit(self, commit: CommitSession) -> int:
        """Commit a delta; the new revision."""
        return cast(Committed, await self._one(commit)).revision

    async def begin_run(self, lease: Lease, run_id: str) -> None:
        await self._one(BeginRun(lease=lease, run_id=run_id))

    async def put_artifacts(self, lease: Lease, artifacts: Sequence[StoredArtifact]) -> None:
        await self._one(PutArtifacts(lease=lease, artifacts=artifacts))

    async def fork(self, fork: ForkSession) -> None:
        await self._one(fork)

    async def mark_replayable(self, mark: MarkReplayable) -> int:
        """The new revision."""
        return cast(Committed, await self._one(mark)).revision

    async def delete(self, lease: Lease) -> None:
        await self._one(DeleteSession(lease=lease))

    async def list_sessions(self, question: ListSessions) -> Sequence[SessionSummary]:
        return cast(SessionPage, await self._one(question)).sessions

    async def list_runs(self, question: ListRuns) -> RunPage:
        return cast(RunPage, await self._one(question))

    async def list_artifacts(self, address: SessionAddress) -> Sequence[str]:
        return cast(ArtifactIds, await self._one(ListArtifacts(address=address))).ids

    async def open_approval(self, lease: Lease, approval: StoredApproval) -> StoredApproval:
        """Store a request for approval; what stands of it."""
        opened = await self._one(OpenApproval(lease=lease, approval=approval))
        return cast(ApprovalStands, opened).approval

    async def settle_approval(
        self,
        lease: Lease,
        approval_id: str,
        state: ApprovalState,
        *,
        by: str = "",
        reason: str = "",
        at: float,
    ) -> ApprovalStands:
        settlement = SettleApproval(
            lease=lease, approval_id=approval_id, state=state, by=by, reason=reason, at=at
        )
        return cast(ApprovalStands, await self._one(settlement))

    async def list_approvals(self, question: ListApprovals) -> ApprovalPage:
        return cast(ApprovalPage, await self._one(question))

    async def read_approval(self, identity: Identity, approval_id: str) -> StoredApproval | None:
        found = await self._one(ReadApproval(identity=identity, approval_id=approval_id))
        return cast(FoundApproval, found).approval

    async def replace(self, lease: Lease, messages: Sequence[bytes]) -> None:
        await self._one(ReplaceSession(lease=lease, messages=messages))

    async def append_events(
        self, lease: Lease, run_id: str, events: Sequence[StoredEvent], reserve_to: int | None = None
    ) -> None:
        await self._one(AppendEvents(lease=lease, run_id=run_id, events=events, reserve_to=reserve_to))

    async def finish_run(self, finish: FinishRun) -> None:
        await self._one(finish)

    async def read_session(self, address: SessionAddress) -> StoredSession:
        return cast(FoundSession, await self._one(ReadSession(address=address))).session

    async def read_run(self, identity: Identity, run_id: str) -> RunRecord | None:
        return cast(FoundRun, await self._one(ReadRun(identity=identity, run_id=run_id))).record

    async def read_open_runs(self, address: SessionAddress) -> Sequence[RunRecord]:
        return cast(OpenRuns, await self._one(ReadOpenRuns(address=address))).records

    async def read_events(
        self, identity: Identity, run_id: str, after: int, limit: int
    ) -> Sequence[StoredEvent]:
        page = await self._one(ReadEvents(identity=identity, run_id=run_id, after=after, limit=limit))
        return cast(EventPage, page).events

    async def read_artifact(self, address: SessionAddress, artifact_id: str) -> StoredArtifact | None:
        found = await self._one(ReadArtifact(address=address, artifact_id=artifact_id))
        return cast(FoundArtifact, found).artifact

    def statistics(self) -> StoreStatistics:
        return self._engine.statistics()

    async def close(self) -> None:
        await self._engine.close()
