"""Completion policies: whoever decides whether a turn is good enough (contract section 9)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, get_args, runtime_checkable

from retinue.errors import ValidationFailed
from retinue.events import CompletionAction

if TYPE_CHECKING:
    from retinue.services import ExecutionServices

COMPLETION_ACTIONS: tuple[CompletionAction, ...] = get_args(CompletionAction)


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
    reason: str
    """Why, in words that people can read; the reason of a run that ends with it. Not blank."""
    instruction: str | None = None
    """For ``revise`` only, and needed there."""
    evidence: Sequence[str] = ()
    """What it rests on: quotes, addresses, findings."""

    def __post_init__(self) -> None:
        if self.action not in COMPLETION_ACTIONS:
            raise ValidationFailed(
                f"a completion decision is one of {', '.join(COMPLETION_ACTIONS)}, not {self.action!r:.80}",
                path="decision.action",
            )
        _check_text("reason", self.reason)
        if self.instruction is not None or self.action == "revise":
            _check_text("instruction", self.instruction)
        if self.action != "revise" and self.instruction is not None:
            raise ValidationFailed(
                "an instruction belongs to 'revise', and to nothing else", path="decision.instruction"
            )
        evidence: object = self.evidence
        if isinstance(evidence, str) or not isinstance(evidence, Sequence):
            raise ValidationFailed(
                f"evidence is a list of strings, not {evidence!r:.80}", path="decision.evidence"
            )
        for index, item in enumerate(evidence):
            if not isinstance(item, str):
                raise ValidationFailed(
                    f"evidence is a list of strings; item {index} is {item!r:.80}",
                    path=f"decision.evidence[{index}]",
                )
        object.__setattr__(self, "evidence", tuple(evidence))


def _check_text(name: str, value: object) -> None:
    if not isinstance(value, str) or not value.strip():
        raise ValidationFailed(
            f"{name} must be a string that is not blank, not {value!r:.80}", path=f"decision.{name}"
        )
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValidationFailed(
            f"{name} holds a lone surrogate, which no store can carry", path=f"decision.{name}"
        ) from None


@runtime_checkable
class CompletionPolicy(Protocol):
    """Judges turns whose driver says ``completed``. It may ask models through the services."""

    async def evaluate(
        self, candidate: CompletionCandidate, services: ExecutionServices
    ) -> CompletionDecision: ...
