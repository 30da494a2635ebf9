"""Ending the runs of a process that died: whoever takes the session over does it first.

A run that had begun is not taken up (nobody knows what its tools had done); its record ends ``failed`` with
reason ``interrupted``, and with it the requests for approval that it still had pending are ``cancelled`` for
that reason. History is as last committed plus the run's input, and no longer replayable. A run that was still
queued is taken up by an activation of its app; where there is none it ends ``interrupted``
too, and leaves the session as it was.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec

from retinue.budgets import Usage
from retinue.events import Event, EventsLost, ModelComplete, RunTerminal, decode_event, encode_event
from retinue.ids import Identity
from retinue.messages import encode_message, user
from retinue.results import Reason, RunResult
from retinue.run_queue import QueuedRun, record_input
from retinue.store import (
    CommitSession,
    FinishRun,
    LeaseGrant,
    RunOutcome,
    RunRecord,
    Store,
    StoredEvent,
    StoredSession,
)

_PAGE = 512


async def end_interrupted_runs(
    store: Store, grant: LeaseGrant, app_digest: str | None = None
) -> tuple[StoredSession, Sequence[RunRecord]]:
    """End every run that the lease grant shows as still open, except queued ones of this app.

    Returns:
        The session as it is then, and the queued runs to take up, in order.
    """
    session = grant.session
    kept = []
    for record in grant.open_runs:
        if not record.queued:
            session = await _end(store, grant, session, record)
        elif (
            app_digest is not None
            and queued_app(record) == app_digest
            and not await _cancelled(store, record)
        ):
            kept.append(record)
        else:
            await _end_queued(store, grant, record)
    return session, kept


def queued_app(record: RunRecord) -> str | None:
    """Digest of the app that a queued run waits for; ``None`` where the record does not say."""
    try:
        return msgspec.json.decode(record.start, type=QueuedRun).app_digest
    except (msgspec.DecodeError, msgspec.ValidationError):
        return None


async def _cancelled(store: Store, record: RunRecord) -> bool:
    """Whether a queued run has events: its cancellation is the only one that it can have."""
    return bool(await store.read_events(_identity(record), record.run_id, 0, 1))


async def _end_queued(store: Store, grant: LeaseGrant, record: RunRecord) -> None:
    """It never began: no message, no revision."""
    last, _ = await _stored_figures(store, record)
    lost_number = record.reserved_to + 1
    lost = _envelope(record, lost_number, EventsLost(last + 1, record.reserved_to))
    final_cursor = lost_number + 1
    why = "its app is gone" if last == 0 else "it was being cancelled"
    result = RunResult(
        status="failed",
        reason=Reason("interrupted", f"it was still queued when its process died, and {why}"),
        run_id=record.run_id,
        session_id=record.session_id,
        final_cursor=final_cursor,
    )
    outcome = RunOutcome(
        run_id=record.run_id,
        outcome=_envelope(record, final_cursor, RunTerminal(result)),
        final_cursor=final_cursor,
        approvals="interrupted",
    )
    await store.finish_run(
        FinishRun(lease=grant.lease, outcome=outcome, events=[StoredEvent(lost_number, lost)])
    )


async def _end(store: Store, grant: LeaseGrant, session: StoredSession, record: RunRecord) -> StoredSession:
    last, usage = await _stored_figures(store, record)
    lost_number = record.reserved_to + 1
    events = []
    if last < record.reserved_to:
        lost = _envelope(record, lost_number, EventsLost(last + 1, record.reserved_to))
        events = [StoredEvent(lost_number, lost)]
    final_cursor = lost_number + len(events)
    result = RunResult(
        status="failed",
        reason=Reason("interrupted", "the process that ran it died; history is as last committed"),
        usage=usage,
        budget=None,
        run_id=record.run_id,
        session_id=record.session_id,
        final_cursor=final_cursor,
    )
    message = encode_message(user(record_input(record)))
    revision = await store.commit(
        CommitSession(
            lease=grant.lease,
            commit_id=f"{record.run_id}:interrupted",
            base_revision=session.revision,
            messages=[message],
            replayable=False,
            events=events,
            outcome=RunOutcome(
                run_id=record.run_id,
                outcome=_envelope(record, final_cursor, RunTerminal(result)),
                final_cursor=final_cursor,
                approvals="interrupted",
            ),
        )
    )
    return msgspec.structs.replace(
        session, revision=revision, replayable=False, messages=[*session.messages, message]
    )


def _envelope(record: RunRecord, number: int, payload: EventsLost | RunTerminal) -> bytes:
    return encode_event(
        Event(
            event_id=f"{record.run_id}:{number}",
            sequence=number,
            timestamp=time.time(),
            session_id=record.session_id,
            run_id=record.run_id,
            attempt_id="recovery",
            parent_run_id=record.parent_run_id,
            root_run_id=record.root_run_id,
            payload=payload,
        )
    )


async def _stored_figures(store: Store, record: RunRecord) -> tuple[int, Usage]:
    """The last stored event number, and the usage that stored events tell of."""
    identity = _identity(record)
    last, usage = 0, Usage()
    while page := await store.read_events(identity, record.run_id, last, _PAGE):
        last = page[-1].sequence
        for stored in page:
            payload = decode_event(stored.body).payload
            if isinstance(payload, ModelComplete) and payload.usage is not None:
                usage += payload.usage
    return last, usage


def _identity(record: RunRecord) -> Identity:
    return Identity(tenant_id=record.tenant_id, user_id=record.user_id)
