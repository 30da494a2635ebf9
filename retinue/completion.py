"""Completion policies: whoever decides whether a turn is good enough (contract section 9)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from retinue.errors import ValidationFailed
from retinue.events import CompletionAction

if TYPE_CHECKING:
    from retinue.services import ExecutionServices

_ACTIONS = ("accept", "revise", "await_input", "stop")


@dataclass(frozen=True, kw_only=True)
class CompletionCandidate:
    """What a turn would give."""

    text: str
    structured: Any = None
    revision: int = 0
    """How often the run was sent back before."""


@dataclass(frozen=True, kw_only=True)
class CompletionDecision:
    """What becomes of a turn.

    ``accept`` keeps it; ``revise`` starts the driver again with ``instruction`` as its input;
    ``await_input`` and ``stop`` end the run with that status.
    """

    action: CompletionAction
    reason: str = ""
    instruction: str | None = None
    """For ``revise`` only, and needed there."""
    evidence: Sequence[str] = field(default=())

    def __post_init__(self) -> None:
        if self.action not in _ACTIONS:
            raise ValidationFailed(
                f"a completion decision is one of {', '.join(_ACTIONS)}, not {self.action!r:.80}",
                path="decision.action",
            )
        if (self.action == "revise") != (self.instruction is not None):
            raise ValidationFailed(
                "an instruction belongs to 'revise', and to nothing else", path="decision.instruction"
            )


@runtime_checkable
class CompletionPolicy(Protocol):
    """Judges turns whose driver says ``completed``. It may ask models through the services."""

    async def evaluate(
        self, candidate: CompletionCandidate, services: ExecutionServices
    ) -> CompletionDecision: ...
