"""Going on where a run ran out of budget: the same session, the limits topped up, nothing spent forgotten."""

from __future__ import annotations

from decimal import Decimal

import msgspec

from retinue.budgets import Budgets, BudgetSnapshot, MoneySnapshot, ResourceSnapshot, RoleSnapshot
from retinue.errors import InputError, NotFound
from retinue.events import RunTerminal, decode_event
from retinue.protocol import StartRun
from retinue.results import RunResult
from retinue.run_queue import QueuedRun, record_input
from retinue.store import RunRecord


def resumed(start: StartRun, record: RunRecord | None) -> StartRun:
    """The start of a run that goes on with another: with that one's input, grants, mode and spending.

    Args:
        record: of the run that is to go on.

    Raises:
        NotFound: there is no such run in this session.
        InputError: it has not run out of budget, or the top-up does not reach what was refused.
    """
    assert start.resumes is not None
    run_id, top_up = start.resumes.run_id, start.resumes.top_up
    if record is None or record.session_id != start.session_id:
        raise NotFound(f"session {start.session_id!r} has no run {run_id!r} to go on with", run_id=run_id)
    result = _result(record)
    if result is None or result.reason is None or result.reason.code != "budget_exhausted":
        how = "still works" if result is None else f"ended {result.status}"
        raise InputError(
            f"run {run_id} {how}; only a run that ran out of budget can be resumed", run_id=run_id
        )
    assert result.budget is not None
    _check_reach(result, top_up)
    carried = topped_up(result.budget, top_up)
    before = _started_with(record)
    return msgspec.structs.replace(
        start,
        input=record_input(record),
        grants=before.grants,
        run_mode=before.run_mode,
        parent_run_id=before.parent_run_id,
        resumes=msgspec.structs.replace(start.resumes, carried=carried),
    )


def topped_up(snapshot: BudgetSnapshot, top_up: Budgets) -> BudgetSnapshot:
    """The snapshot under higher limits; what is unlimited stays so."""
    return msgspec.structs.replace(
        snapshot,
        model_calls=_raised(snapshot.model_calls, top_up.max_model_calls),
        tool_calls=_raised(snapshot.tool_calls, top_up.max_tool_calls),
        tokens=_raised(snapshot.tokens, top_up.max_tokens),
        money=_raised_money(snapshot.money, top_up.max_cost),
        tools={name: _raised(tool, top_up.tools.get(name)) for name, tool in snapshot.tools.items()},
        roles={name: _raised_role(role, name, top_up) for name, role in snapshot.roles.items()},
    )


def _raised(resource: ResourceSnapshot, more: int | None) -> ResourceSnapshot:
    if resource.limit is None or not more:
        return resource
    limit = resource.limit + more
    remaining = max(0, limit - resource.used - resource.reserved)
    return msgspec.structs.replace(resource, limit=limit, remaining=remaining)


def _raised_money(money: MoneySnapshot | None, more: Decimal | None) -> MoneySnapshot | None:
    if money is None or money.limit is None or not more:
        return money
    limit = money.limit + more
    remaining = max(Decimal(0), limit - money.used - money.reserved)
    return msgspec.structs.replace(money, limit=limit, remaining=remaining)


def _raised_role(role: RoleSnapshot, name: str, top_up: Budgets) -> RoleSnapshot:
    more = top_up.roles.get(name)
    if more is None:
        return role
    return msgspec.structs.replace(
        role,
        model_calls=_raised(role.model_calls, more.max_model_calls),
        tokens=_raised(role.tokens, more.max_tokens),
        money=_raised_money(role.money, more.max_cost),
    )


def _check_reach(result: RunResult, top_up: Budgets) -> None:
    """Raise ``InputError`` for a top-up with which the run would stop at once again."""
    refused = (result.reason.data if result.reason else None) or {}
    field = {"model_calls": "max_model_calls", "tokens": "max_tokens", "money": "max_cost"}.get(
        str(refused.get("resource"))
    )
    if refused.get("scope") == "run" and field is not None and not getattr(top_up, field):
        raise InputError(
            f"run {result.run_id} ran out of {refused['resource']}, and the top-up has no {field}",
            field=f"top_up.{field}",
            run_id=result.run_id,
        )


def _started_with(record: RunRecord) -> StartRun:
    try:
        return msgspec.json.decode(record.start, type=QueuedRun).start
    except (msgspec.DecodeError, msgspec.ValidationError):
        raise InputError(
            f"the record of run {record.run_id} does not say what it was started with; start a new run in "
            f"its "
            "session",
            run_id=record.run_id,
        ) from None


def _result(record: RunRecord) -> RunResult | None:
    if record.outcome is None:
        return None
    payload = decode_event(record.outcome).payload
    return payload.result if isinstance(payload, RunTerminal) else None
