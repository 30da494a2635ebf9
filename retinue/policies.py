"""Execution policies: what an application says to a tool call or an effect (contract section 7)."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

if TYPE_CHECKING:
    from retinue.policy_context import PolicyContext

PolicyAction = Literal["allow", "ask", "deny"]
Effect = Literal["read", "write", "execute", "external", "unknown"]
"""What a call does to the world. In plan mode ``read`` may run, ``unknown`` is asked about, all else is
denied."""
DenialKind = Literal[
    "policy", "approval_required", "approval_denied", "cancelled", "budget", "grant", "revision"
]
"""Why a call was denied."""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What a policy says of a call: ``Decision(action="deny", reason="no writes on Sundays")``."""

    action: PolicyAction
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class CallUnderReview:
    """A call that passed the runtime's own gate. The arguments are a copy; changing them denies the call."""

    tool_name: str
    call_id: str
    """As the model knows it."""
    arguments: Mapping[str, Any]
    """As JSON values."""
    effect: Effect = "unknown"
    """As the tool declares it."""


@runtime_checkable
class ExecutionPolicy(Protocol):
    """Decides about every tool call and effect of a run and its delegates, at the root, once; sync or async.

    It may also have ``resolve_effect(call, ctx) -> Effect``, sync or async, which plan mode asks instead of
    what the tool declares. What it raises fails the call as a denial of the kind ``policy``.
    """

    def decide(self, call: CallUnderReview, ctx: PolicyContext) -> Awaitable[Decision] | Decision: ...
