"""Requests for approval in the SQLite store."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import msgspec

from retinue.ids import Identity
from retinue.storage.rows import ApprovalRow
from retinue.storage.sqlite.access import Access
from retinue.storage.sqlite.failures import damaged_row
from retinue.storage.sqlite.statements import statement
from retinue.store import ListApprovals, SettleApproval, StoredApproval

FIND_APPROVAL = statement("find_approval")
ADD_APPROVAL = statement("add_approval")
SETTLE_APPROVAL = statement("settle_approval")
CANCEL_APPROVALS_OF = statement("cancel_approvals_of")
READ_LISTED_APPROVAL = statement("read_listed_approval")
APPROVAL_PAGES = tuple(
    statement(name)
    for name in (
        "list_approvals",
        "list_approvals_of_tenant",
        "list_approvals_of_user",
        "list_approvals_of_session",
        "list_approvals_of_run",
    )
)
"""The keys of a page, by how much a list is narrowed down: not, to a tenant, a user, a session, a run."""
PENDING_PAGES = tuple(
    statement(name)
    for name in (
        "list_pending_approvals",
        "list_pending_approvals_of_tenant",
        "list_pending_approvals_of_user",
    )
)
"""As :data:`APPROVAL_PAGES`, of requests that are pending; a session and a run have few requests at all."""


class ApprovalRows(Access):
    """The part of :class:`retinue.storage.rows.Rows` that is about approvals."""

    def find_approval(self, identity: Identity, approval_id: str) -> ApprovalRow | None:
        row = self._one(
            FIND_APPROVAL,
            {
                "tenant_id": identity.tenant_id,
                "user_id": identity.user_id,
                "approval_id": approval_id,
            },
        )
        return None if row is None else self._approval(row)

    def add_approval(self, session_key: int, run_key: int, approval: StoredApproval) -> None:
        self._write(
            ADD_APPROVAL,
            {
                "session_key": session_key,
                "run_key": run_key,
                "tenant_id": approval.tenant_id,
                "user_id": approval.user_id,
                "approval_id": approval.approval_id,
                "tool_name": approval.tool_name,
                "digest": approval.digest,
                "request": approval.request,
                "checksum": zlib.crc32(approval.request),
                "requested_at": approval.requested_at,
                "expires_at": approval.expires_at,
                "state": approval.state,
                "decided_at": approval.decided_at,
                "decided_by": approval.by,
                "reason": approval.reason,
            },
        )

    def settle_approval(self, approval_key: int, settlement: SettleApproval) -> None:
        self._write(
            SETTLE_APPROVAL,
            {
                "approval_key": approval_key,
                "state": settlement.state,
                "decided_at": settlement.at,
                "decided_by": settlement.by,
                "reason": settlement.reason,
            },
        )

    def cancel_approvals(self, run_key: int, reason: str) -> None:
        self._write(CANCEL_APPROVALS_OF, {"run_key": run_key, "reason": reason})

    def list_approvals(self, question: ListApprovals) -> Sequence[ApprovalRow]:
        narrowed = (question.tenant_id, question.user_id, question.session_id, question.run_id)
        parameters = {
            "tenant_id": question.tenant_id,
            "user_id": question.user_id,
            "session_id": question.session_id,
            "run_id": question.run_id,
            "state": question.state,
            "after": -1 if question.after is None else question.after,
            "limit": question.limit,
        }
        narrowness = sum(part is not None for part in narrowed)
        pending = question.state == "pending" and narrowness < len(PENDING_PAGES)
        page = (PENDING_PAGES if pending else APPROVAL_PAGES)[narrowness]
        keys = [key for (key,) in self._all(page, parameters)]
        return tuple(self._approval(self._one(READ_LISTED_APPROVAL, {"approval_key": key})) for key in keys)

    def _approval(self, row: Sequence[Any]) -> ApprovalRow:
        (
            approval_key, session_key, tenant_id, user_id, session_id, run_id, approval_id, tool_name, digest,
            request, checksum, requested_at, expires_at, state, decided_at, decided_by, reason,
        ) = row  # fmt: skip
        key = {"tenant_id": tenant_id, "user_id": user_id, "approval_id": approval_id}
        try:
            approval = msgspec.convert(
                {
                    "approval_id": approval_id,
                    "tenant_id": tenant_id,
                    "user_id": user_id,
                    "session_id": session_id,
                    "run_id": run_id,
                    "tool_name": tool_name,
                    "digest": digest,
                    "request": self._intact(request, checksum, "approval", key),
                    "requested_at": requested_at,
                    "expires_at": expires_at,
                    "state": state,
                    "decided_at": decided_at,
                    "by": decided_by,
                    "reason": reason,
                },
                StoredApproval,
            )
        except msgspec.ValidationError as error:
            raise damaged_row("approval", key, self._url, str(error)) from error
        return ApprovalRow(key=approval_key, session_key=session_key, approval=approval)
