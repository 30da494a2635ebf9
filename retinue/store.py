"""The store seam: what is kept, the operations on it, and the typed client over an engine.

An *engine* (memory, SQLite, ...) executes lists of operations; :class:`Store` is the typed client that
everything else uses, over an engine in this process or over a store actor. Every writing operation names
the lease it acts under and is refused with :class:`LeaseLost` once a newer epoch stands: that check, inside
the engine's transaction, is what makes a session single-writer (design: fencing).

What crosses is already encoded: messages, events, state and results are JSON bytes, so an engine never
needs to understand them, and bytes are fixed before the first await of a commit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol, cast

import msgspec

from retinue.errors import error_from_payload
from retinue.ids import Identity, SessionAddress

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
    AcquireLease | RenewLeases | ReleaseLease | FenceHolder | OpenRun | CommitSession | ReplaceSession
    | AppendEvents | FinishRun | ReadSession | ReadRun | ReadOpenRuns | ReadEvents | ReadArtifact
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


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The operation failed, alone: others of the same list are not touched by it."""

    error: dict[str, Any]
    """:meth:`retinue.errors.RetinueError.to_payload`."""


StoreReply = (
    LeaseGrant | Renewed | Done | Fenced | Committed | StoredRun | FoundRun | OpenRuns | FoundSession
    | EventPage | FoundArtifact | Refused
)  # fmt: skip


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
