"""Everything that is kept of a session, as one document that people can take away."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from retinue.approval_records import approval_of
from retinue.approvals import Approval
from retinue.events import Event, decode_event
from retinue.ids import Identity, SessionAddress
from retinue.messages import Content
from retinue.snapshots import SessionSnapshot, decode_session
from retinue.store import PAGE_LIMIT, ListApprovals, ListRuns, RunRecord, Store

EXPORT_VERSION = 1


class ExportedRun(msgspec.Struct, frozen=True, kw_only=True):
    """A run as its record and its stored events tell of it."""

    run_id: str
    root_run_id: str
    parent_run_id: str | None
    app: str
    created_at: float
    """Epoch seconds."""
    input: Content
    events: Sequence[Event]
    """What retention has kept of them; the terminal event last, where the run has ended."""


class ExportedArtifact(msgspec.Struct, frozen=True, kw_only=True):
    """An artifact; ``data`` is base64 in JSON."""

    artifact_id: str
    mime_type: str
    data: bytes


class SessionExport(msgspec.Struct, frozen=True, kw_only=True):
    """All that a store keeps of one session: conversation, state, runs with events, artifacts, approvals."""

    version: int = EXPORT_VERSION
    tenant_id: str
    user_id: str
    session_id: str
    session: SessionSnapshot
    runs: Sequence[ExportedRun]
    """Oldest first."""
    artifacts: Sequence[ExportedArtifact]
    approvals: Sequence[Approval] = ()
    """Requests for approval and what became of them, oldest first."""

    def to_json(self) -> bytes:
        """The document as JSON, in UTF-8."""
        return msgspec.json.encode(self)


async def export_session(store: Store, address: SessionAddress) -> SessionExport:
    """Read a session from its store; takes no lease, so that a run that is going on is not disturbed.

    What a run commits meanwhile may be in one part and not yet in another.
    """
    stored = await store.read_session(address)
    records: list[RunRecord] = []
    before: int | None = None
    while True:
        page = await store.list_runs(
            ListRuns(
                tenant_id=address.tenant_id,
                user_id=address.user_id,
                session_id=address.session_id,
                before=before,
                limit=PAGE_LIMIT,
            )
        )
        records.extend(page.records)
        before = page.next
        if before is None:
            break
    artifacts = []
    for artifact_id in await store.list_artifacts(address):
        artifact = await store.read_artifact(address, artifact_id)
        if artifact is not None:
            artifacts.append(
                ExportedArtifact(artifact_id=artifact_id, mime_type=artifact.mime_type, data=artifact.data)
            )
    return SessionExport(
        tenant_id=address.tenant_id,
        user_id=address.user_id,
        session_id=address.session_id,
        session=decode_session(stored),
        runs=[await _exported(store, address.identity, record) for record in reversed(records)],
        artifacts=artifacts,
        approvals=await _approvals(store, address),
    )


async def _approvals(store: Store, address: SessionAddress) -> Sequence[Approval]:
    question = ListApprovals(
        tenant_id=address.tenant_id,
        user_id=address.user_id,
        session_id=address.session_id,
        limit=PAGE_LIMIT,
    )
    approvals: list[Approval] = []
    while True:
        page = await store.list_approvals(question)
        approvals.extend(approval_of(stored) for stored in page.approvals)
        if page.next is None:
            return approvals
        question = msgspec.structs.replace(question, after=page.next)


async def _exported(store: Store, identity: Identity, record: RunRecord) -> ExportedRun:
    events: list[Event] = []
    last = 0
    while page := await store.read_events(identity, record.run_id, last, PAGE_LIMIT):
        last = page[-1].sequence
        events.extend(decode_event(stored.body) for stored in page)
    if record.outcome is not None:
        events.append(decode_event(record.outcome))
    content: Any = msgspec.json.decode(record.input, type=Content)
    return ExportedRun(
        run_id=record.run_id,
        root_run_id=record.root_run_id,
        parent_run_id=record.parent_run_id,
        app=record.app,
        created_at=record.created_at,
        input=content,
        events=events,
    )
