"""Approvals: calls that a person must allow, as records that outlive the process (contract section 7)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import msgspec

from retinue.errors import ValidationFailed
from retinue.ids import SAFE_INTEGER

APPROVAL_TIMEOUT = 300.0
"""Seconds after which a request that nobody decided is settled by ``timeout_action``."""


TimeoutAction = Literal["deny", "approve", "raise"]
ApprovalState = Literal["pending", "approved", "denied", "expired", "cancelled"]
"""Only a person, a policy, time or the end of the run moves a request out of ``pending``."""


class ApprovalRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A call that waits for a decision; ``handle.approve(id)`` and ``handle.deny(id)`` decide."""

    id: str
    """``<id of the root run>:<uuid>``."""
    tenant_id: str
    user_id: str
    session_id: str
    root_run_id: str
    """Id of the run that it belongs to."""
    run_id: str
    """Of the run or delegate that asks."""
    agent_name: str = ""
    """Name of the delegate that asks; empty for the root."""
    tool_name: str
    arguments: dict[str, Any]
    """As they were reviewed; of an argument text that is too long for an event, its beginning."""
    digest: str
    """SHA-256 of the whole arguments as canonical JSON: the approval is good for these and no others."""
    reason: str = ""
    """Why it is asked."""
    requested_at: float
    """Epoch seconds."""
    expires_at: float
    """Epoch seconds."""


@dataclass(frozen=True, kw_only=True)
class Approvals:
    """Who must approve what. Without it, a call that needs an approval is denied: ``approval_required``."""

    require: Literal["none", "all"] | Sequence[str] = "none"
    """``all``, or the names of tools; a tool's own ``requires_approval`` overrides it, and a policy that says
    ``ask`` overrides both."""
    on_request: Callable[[ApprovalRequest], Awaitable[bool | None] | bool | None] | None = None
    """Called on a user loop of the root's process when a request was stored; ``True`` approves, ``False``
    denies, ``None`` leaves it to others."""
    timeout: float = APPROVAL_TIMEOUT
    """Seconds."""
    timeout_action: TimeoutAction = "deny"
    """What becomes of a request that nobody decided in time; ``raise`` fails the run."""

    def __post_init__(self) -> None:
        require: object = self.require
        if require not in ("none", "all"):
            if isinstance(require, str) or not isinstance(require, Sequence):
                raise ValidationFailed(
                    "config.approvals.require must be 'none', 'all' or a list of tool names, not "
                    f"{require!r:.80}",
                    path="config.approvals.require",
                )
            names = tuple(require)
            if not all(isinstance(name, str) and name for name in names):
                raise ValidationFailed(
                    "config.approvals.require must list nonempty names", path="config.approvals.require"
                )
            object.__setattr__(self, "require", names)
        if self.on_request is not None and not callable(self.on_request):
            raise ValidationFailed(
                f"config.approvals.on_request is {self.on_request!r:.80}, no function",
                path="config.approvals.on_request",
            )
        timeout: object = self.timeout
        seconds = isinstance(timeout, int | float) and not isinstance(timeout, bool)
        if not seconds or not 0 < self.timeout <= SAFE_INTEGER / 1000:
            raise ValidationFailed(
                f"config.approvals.timeout must be a positive number of seconds, not {timeout!r:.80}",
                path="config.approvals.timeout",
            )
        if self.timeout_action not in get_args(TimeoutAction):
            raise ValidationFailed(
                f"config.approvals.timeout_action must be one of {', '.join(get_args(TimeoutAction))}, not "
                f"{self.timeout_action!r:.80}",
                path="config.approvals.timeout_action",
            )

    def requires(self, tool_name: str) -> bool:
        """Whether a tool that says nothing itself needs an approval."""
        return self.require == "all" or (self.require != "none" and tool_name in self.require)


class Approval(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A request for approval, and what became of it."""

    request: ApprovalRequest
    state: ApprovalState
    decided_at: float | None = None
    """Epoch seconds."""
    by: str = ""
    """Who decided; empty where time or the end of the run did."""
    reason: str = ""

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def pending(self) -> bool:
        return self.state == "pending"


def run_of(approval_id: str) -> str:
    """Id of the run that a request belongs to."""
    return approval_id.rpartition(":")[0]
