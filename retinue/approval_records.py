"""Requests for approval as records: making one, what stands of it, whether a decision agrees with that."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable
from typing import Any

import msgspec

from retinue.approvals import Approval, ApprovalRequest, ApprovalState
from retinue.drivers import RunRequest
from retinue.errors import DamagedRecord, InputError, NotFound
from retinue.ids import check_id
from retinue.messages import escape_surrogates
from retinue.protocol import DecideRequest
from retinue.stored import StoredApproval
from retinue.tool_arguments import canonical, digest

SHOWN_BYTES = 16_384
"""Bytes of JSON of the arguments that a request shows at most; its digest is of all of them."""
_CUTS = (4_096, 1_024, 256, 64)
"""Characters of a text, and members of a list or object, that are tried until the whole fits."""
MAX_REASON = 1_024
"""Characters of why an approval is asked, of who decides, and of why."""

# --- making one -------------------------------------------------------------------------------------------


def new_request(
    root: RunRequest,
    *,
    run_id: str,
    agent_name: str,
    tool_name: str,
    arguments: bytes,
    reason: str,
    timeout: float,
    wall_clock: Callable[[], float] = time.time,
) -> ApprovalRequest:
    """A request that nobody has seen yet.

    Args:
        root: of the root run.
        run_id, agent_name: of the run or delegate that asks.
        arguments: of the call, as JSON.
        reason: why it is asked.
        timeout: seconds until it expires.
    """
    now = wall_clock()
    whole = json.loads(arguments)
    return ApprovalRequest(
        id=f"{root.run_id}:{uuid.uuid4()}",
        tenant_id=root.identity.tenant_id,
        user_id=root.identity.user_id,
        session_id=root.session_id,
        root_run_id=root.run_id,
        run_id=run_id,
        agent_name=agent_name,
        tool_name=tool_name,
        arguments=shown_arguments(whole),
        digest=digest(canonical(whole)),
        reason=escape_surrogates(reason)[:MAX_REASON],
        requested_at=now,
        expires_at=now + timeout,
    )


def record_of(request: ApprovalRequest) -> StoredApproval:
    """A request as it is stored first."""
    return StoredApproval(
        approval_id=request.id,
        tenant_id=request.tenant_id,
        user_id=request.user_id,
        session_id=request.session_id,
        run_id=request.root_run_id,
        tool_name=request.tool_name,
        digest=request.digest,
        request=msgspec.json.encode(request),
        requested_at=request.requested_at,
        expires_at=request.expires_at,
    )


def shown_arguments(whole: Any) -> dict[str, Any]:
    """The arguments as a request shows them: whole where they fit, else with long texts and lists cut."""
    shown = whole if isinstance(whole, dict) else {"value": whole}
    size = len(msgspec.json.encode(shown))
    if size <= SHOWN_BYTES:
        return shown
    for most in _CUTS:
        cut = _cut(shown, most)
        if len(msgspec.json.encode(cut)) <= SHOWN_BYTES:
            return {**cut}
    text = msgspec.json.encode(shown).decode()
    return {"…": f"{text[: SHOWN_BYTES // 8]}… ({size:,} bytes of JSON)"}


def _cut(value: Any, most: int) -> Any:
    if isinstance(value, str) and len(value) > most:
        return f"{value[:most]}… ({len(value) - most:,} more characters)"
    if isinstance(value, dict):
        kept = {key: _cut(member, most) for key, member in list(value.items())[:most]}
        return {**kept, "…": f"{len(value) - most:,} more"} if len(value) > most else kept
    if isinstance(value, list):
        members = [_cut(member, most) for member in value[:most]]
        return [*members, f"… {len(value) - most:,} more"] if len(value) > most else members
    return value


# --- what stands ------------------------------------------------------------------------------------------


def approval_of(stored: StoredApproval) -> Approval:
    """A record as applications see it. Raises :class:`DamagedRecord` where it cannot be read."""
    try:
        request = msgspec.json.decode(stored.request, type=ApprovalRequest)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise DamagedRecord(
            f"request {stored.approval_id} for approval cannot be read: {error}; its bytes are kept. Restore "
            "the store from a copy",
            place=f"approval {stored.approval_id}: request",
        ) from None
    return Approval(
        request=request,
        state=stored.state,
        decided_at=stored.decided_at,
        by=stored.by,
        reason=stored.reason,
    )


def run_of(approval_id: str) -> str:
    """Id of the root run that a request belongs to. Raises :class:`NotFound` where the id is none of ours."""
    run_id, separator, _ = approval_id.rpartition(":")
    if not separator or not run_id:
        raise unknown_approval(approval_id)
    return run_id


def check_decision(approval_id: str, by: str, reason: str) -> None:
    """Raise :class:`InputError` unless a decision can be stored: who decides, and at most so much of why."""
    check_id("approval_id", approval_id)
    check_id("by", by)
    if not isinstance(reason, str):
        raise InputError(f"reason is text, not {type(reason).__name__}", field="reason")
    if reason:
        check_id("reason", reason)
    for name, value in (("by", by), ("reason", reason)):
        if len(value) > MAX_REASON:
            raise InputError(
                f"{name} has {len(value):,} characters, more than {MAX_REASON:,}; keep the rest elsewhere",
                field=name,
            )


def check_same(approval: StoredApproval, decision: DecideRequest) -> None:
    """Raise :class:`InputError` where a request was settled in another way than this decision wants."""
    wanted: ApprovalState = "approved" if decision.approve else "denied"
    if approval.state == wanted:
        return
    by = f" by {approval.by}" if approval.by else ""
    why = f" ({approval.reason})" if approval.reason else ""
    raise InputError(
        f"request {approval.approval_id} cannot be {wanted}: it is {approval.state}{by} already{why}",
        code="input_already_resolved",
        approval_id=approval.approval_id,
        state=approval.state,
        by=approval.by,
        reason=approval.reason,
    )


def unknown_approval(approval_id: str) -> NotFound:
    """There is no such request for whoever asks."""
    return NotFound(f"there is no request for approval {approval_id!r:.200} here", approval_id=approval_id)


def told(approval: StoredApproval) -> str:
    """Why a call may run or not, for a model to read: without who decided."""
    return approval.reason or {"denied": "somebody denied it", "expired": "it timed out"}.get(
        approval.state, approval.state
    )
