"""Step controllers: what an application says to each model call before it is made (contract section 9)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from retinue.context_policies import ContextPolicy
    from retinue.policy_context import PolicyContext


@dataclass(frozen=True, kw_only=True)
class StepOverrides:
    """What a controller changes. What a step says replaces what the run says, key by key."""

    active_tool_ids: Sequence[str] | None = None
    """Tools that the model may be offered; all that are offered and granted by default."""
    model_role: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the call, such as ``temperature``; each must be on the list of the role's binding."""
    context_policy: ContextPolicy | None = None
    stop: str | None = None
    """Why the run must end here: ``stopped`` with ``budget_exhausted`` and this as its message."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """A task model call that is about to be made."""

    index: int
    """0 for the first one of this participant."""
    tools: Sequence[str]
    """Names of the tools that the driver offers."""


@runtime_checkable
class StepController(Protocol):
    """Has a say before the run and before each task model call of the run and its delegates, at the root,
    once.

    Both may return ``None``, which changes nothing.
    """

    async def prepare_run(self, ctx: PolicyContext) -> StepOverrides | None: ...

    async def prepare_step(self, step: Step, ctx: PolicyContext) -> StepOverrides | None: ...
