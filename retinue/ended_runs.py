"""What can be said of a run without its process: from its record, or from nothing at all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, cast

import msgspec

from retinue.approval_records import check_same, unknown_approval
from retinue.budgets import (
    BudgetSnapshot,
    ParticipantUsage,
    ResourceSnapshot,
    UsageFigures,
    UsageReport,
)
from retinue.errors import EventGap, InputError
from retinue.events import EventsLost, RunTerminal, decode_event
from retinue.ids import Identity, SessionAddress
from retinue.protocol import DecideRequest, EventPageReply, Receipt, RunState, RunStatus, Settled
from retinue.store import RunRecord, Store, StoredApproval


def record_settled(record: RunRecord) -> Settled:
    """The result of a run that has ended."""
    assert record.outcome is not None
    payload = decode_event(record.outcome).payload
    assert isinstance(payload, RunTerminal)
    return Settled(result=payload.result, status=record_status(record))


def record_status(record: RunRecord) -> RunStatus:
    """The status of a run that has ended, or of one that is in no process that is known."""
    if record.outcome is None:
        return unknown_status(record.run_id, "queued" if record.queued else "running")
    payload = decode_event(record.outcome).payload
    budget = payload.result.budget if isinstance(payload, RunTerminal) else None
    return RunStatus(
        run_id=record.run_id,
        state="finished",
        cursor=record.final_cursor or 0,
        budget=budget or empty_budget(),
    )


async def stored_events(store: Store, record: RunRecord, after: int, limit: int) -> EventPageReply:
    """Events of an ended run after a cursor.

    Raises:
        EventGap: the store does not keep them any more.
        InputError: the cursor is ahead of the run.
    """
    final = record.final_cursor or 0
    status = record_status(record)
    if after > final:
        raise InputError(f"cursor {after} is ahead of the run, whose last event is {final}")
    if after == final:
        return EventPageReply(events=(), closed=True, status=status)
    identity = Identity(tenant_id=record.tenant_id, user_id=record.user_id)
    page = await store.read_events(identity, record.run_id, after, limit)
    events = [(event.sequence, event.body) for event in page]
    following = events[0][0] if events else final
    if following != after + 1 and not _covered(events, after):
        raise EventGap(
            f"the events after {after} are no longer kept; the oldest cursor is {following - 1}",
            earliest_cursor=following - 1,
        )
    closed = len(page) < limit
    if closed:
        events.append((final, cast(bytes, record.outcome)))
    return EventPageReply(events=events, closed=closed, status=status)


def _covered(events: Sequence[tuple[int, bytes]], after: int) -> bool:
    """Whether the first event names the numbers after the cursor as lost."""
    if not events:
        return False
    payload = decode_event(events[0][1]).payload
    return isinstance(payload, EventsLost) and payload.first <= after + 1


async def stored_decision(store: Store, identity: Identity, decision: DecideRequest) -> StoredApproval:
    """What a decision about a call of an ended run gives: the outcome that stands.

    Raises:
        NotFound: that run had no such request.
        InputError: ``input_already_resolved``: it was settled in another way.
    """
    stands = await store.read_approval(identity, decision.approval_id)
    if stands is None or stands.run_id != decision.run_id:
        raise unknown_approval(decision.approval_id)
    check_same(stands, decision)
    return stands


async def stored_usage(store: Store, address: SessionAddress, record: RunRecord) -> UsageReport | None:
    """What an ended run used: its own report where it had delegates, else what its result says.

    ``None`` for a run whose ledger was lost with its process: unknown is not zero.
    """
    kept = await store.read_artifact(address, usage_artifact(record.run_id))
    if kept is not None:
        return msgspec.json.decode(kept.data, type=UsageReport)
    result = record_settled(record).result
    budget = result.budget
    if budget is None:
        return None
    unknown = budget.unknown_usage_calls - budget.estimated_usage_calls
    figures = UsageFigures(
        usage=result.usage,
        charged_tokens=budget.tokens.used,
        exact_calls=budget.model_calls.used - budget.unknown_usage_calls,
        estimated_calls=budget.estimated_usage_calls,
        unknown_calls=unknown,
        tool_attempts=budget.tool_calls.used,
        cost=None if budget.money is None else budget.money.used,
    )
    root = ParticipantUsage(run_id=record.run_id, own=figures, subtree=figures)
    return UsageReport(
        complete=True,
        tree=figures,
        participants=(root,),
        tools={name: tool.used for name, tool in budget.tools.items() if tool.used},
    )


def usage_artifact(run_id: str) -> str:
    """Id of the artifact with the :class:`retinue.budgets.UsageReport` of a run that had delegates."""
    return f"{run_id}:usage"


def cancel_receipt(outcome: Literal["deferred", "returned"], status: RunStatus) -> Receipt:
    """``deferred``: a run that was not started yet will start cancelled; ``returned``: it had ended."""
    return Receipt(id=status.run_id, action="cancel", outcome=outcome, boundary="run", status=status)


def unknown_status(run_id: str, state: RunState) -> RunStatus:
    """The status of a run that has done nothing that anybody knows of."""
    return RunStatus(run_id=run_id, state=state, cursor=0, budget=empty_budget())


def empty_budget() -> BudgetSnapshot:
    """Nothing spent, nothing limited: what a handle shows before it heard of its run."""
    nothing = ResourceSnapshot(limit=None, used=0, reserved=0, remaining=None)
    return BudgetSnapshot(model_calls=nothing, tool_calls=nothing, tokens=nothing)
