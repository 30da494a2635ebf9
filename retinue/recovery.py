"""Ending the runs of a process that died: whoever takes the session over does it first.

A run is not taken up (nobody knows what its tools had done); its record ends ``failed`` with reason
``interrupted``. History is as last committed plus the run's input, and no longer replayable.
"""

from __future__ import annotations

import time

import msgspec

from retinue.budgets import Usage
from retinue.errors import DamagedRecord
from retinue.events import Event, EventsLost, ModelComplete, RunTerminal, decode_event, encode_event
from retinue.ids import Identity
from retinue.messages import Content, encode_message, user
from retinue.results import Reason, RunResult
from retinue.store import CommitSession, LeaseGrant, RunOutcome, RunRecord, Store, StoredEvent, StoredSession

_PAGE = 512


async def end_interrupted_runs(store: Store, grant: LeaseGrant) -> StoredSession:
    """End every run that the lease grant shows as still open; the session as it is then."""
    session = grant.session
    for record in grant.open_runs:
        session = await _end(store, grant, session, record)
    return session


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
    message = encode_message(user(_input(record)))
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
            ),
        )
    )
    return msgspec.structs.replace(
        session, revision=revision, replayable=False, messages=[*session.messages, message]
    )


def _input(record: RunRecord) -> Content:
    try:
        return msgspec.json.decode(record.input, type=Content)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise DamagedRecord(
            f"the input of run {record.run_id} cannot be read: {error}; its bytes are kept. Restore the "
            "store from a copy, or go on in another session",
            place=f"run {record.run_id}: input",
        ) from None


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
    identity = Identity(tenant_id=record.tenant_id, user_id=record.user_id)
    last, usage = 0, Usage()
    while page := await store.read_events(identity, record.run_id, last, _PAGE):
        last = page[-1].sequence
        for stored in page:
            payload = decode_event(stored.body).payload
            if isinstance(payload, ModelComplete) and payload.usage is not None:
                usage += payload.usage
    return last, usage
