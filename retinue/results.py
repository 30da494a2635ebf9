"""How a run ends: the one result, and the driver's output that it is made from."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from retinue.budgets import BudgetSnapshot, Usage
from retinue.errors import BudgetExhausted, RetinueError
from retinue.messages import Message, escape_surrogates

Status = Literal["completed", "failed", "cancelled", "stopped", "awaiting_input"]
STATUSES: tuple[Status, ...] = ("completed", "failed", "cancelled", "stopped", "awaiting_input")

MAX_RESULT_BYTES = 65_536
"""Largest terminal result that an event carries; a larger one is cut and kept whole as an artifact."""
_CUT_TEXT, _CUT_CODE, _CUT_MESSAGE = 4_096, 128, 2_048


def error_text(error: BaseException) -> str:
    """What an error says, or its type where it says nothing or cannot even be asked."""
    try:
        return str(error) or type(error).__name__
    except Exception:
        return type(error).__name__


class Reason(msgspec.Struct, frozen=True, omit_defaults=True):
    """Why a run ended as it did; ``code`` is from a closed list (contract section 6)."""

    code: str
    message: str = ""
    data: dict[str, Any] | None = None
    """Of ``budget_exhausted``: what was refused (see :class:`retinue.errors.BudgetExhausted`)."""

    @classmethod
    def told(cls, payload: Mapping[str, Any]) -> Reason:
        """The reason that :meth:`RetinueError.to_payload` tells of."""
        code = str(payload["code"])
        data = payload.get("data") if code == BudgetExhausted.code else None
        return cls(code, str(payload["message"]), data or None)

    @classmethod
    def of(cls, error: BaseException) -> Reason:
        """The reason of an error that escaped: its own code, or ``execution_failed``."""
        code = error.code if isinstance(error, RetinueError) else "execution_failed"
        data = error.data if isinstance(error, BudgetExhausted) else None
        return cls(code, error_text(error), data or None)


class ArtifactReference(msgspec.Struct, frozen=True, omit_defaults=True):
    """Something kept beside the result; read it with ``runtime.get_artifact``."""

    id: str
    mime_type: str | None = None


class RunResult(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The one result of a run (contract section 6).

    ``usage`` is what providers reported; ``budget.tokens.used`` may be larger, because calls whose usage
    nobody knows are charged with their reservation.
    """

    status: Status
    text: str = ""
    structured: Any = None
    reason: Reason | None = None
    usage: Usage = msgspec.field(default_factory=Usage)
    budget: BudgetSnapshot | None = None
    """``None`` when the ledger was lost with its process: unknown is not zero."""
    artifacts: tuple[ArtifactReference, ...] = ()
    run_id: str
    session_id: str
    final_cursor: int
    """Number of the terminal event; 0 for a run that was refused and has no events."""
    cleanup_diagnostics: tuple[str, ...] = ()

    def shortened(self, artifact_id: str) -> RunResult:
        """This result cut to what an event can carry, with the whole one referred to as an artifact."""
        reason = self.reason and Reason(
            self.reason.code[:_CUT_CODE], self.reason.message[:_CUT_MESSAGE], self.reason.data
        )
        return msgspec.structs.replace(
            self,
            text=self.text[:_CUT_TEXT],
            structured=None,
            reason=reason,
            artifacts=(ArtifactReference(artifact_id, "application/json"),),
        )


@dataclass(frozen=True, kw_only=True)
class DriverOutput:
    """What a driver returns (contract section 5)."""

    text: str
    status: Status = "completed"
    structured: Any = None
    """JSON-serialisable, or ``None``."""
    reason: Reason | None = None
    usage: Usage | None = None
    """The driver's own figure, used only when no model call was made through the services."""
    history: Sequence[Message] | None = None
    """The whole new history; must extend the canonical one."""
    artifacts: Sequence[ArtifactReference] = ()

    def problem(self) -> str | None:
        """What is wrong with this output, or ``None``."""
        text: object = self.text
        if not isinstance(text, str):
            return f"text is {type(text).__name__}, not a string"
        if self.status not in STATUSES:
            return f"status {self.status!r} is not one of {', '.join(STATUSES)}"
        return self.usage.problem() if isinstance(self.usage, Usage) else None


def error_payload(error: BaseException) -> dict[str, Any]:
    """An error that escaped, for another process: its code and text, never its traceback.

    Of a group, the first one counts, so that a refusal in a task group is still a refusal. Text that UTF-8
    cannot carry, or data that is no JSON, must not keep it from arriving.
    """
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    reason = Reason.of(error)
    if isinstance(error, RetinueError):
        with contextlib.suppress(Exception):
            payload = error.to_payload()
            msgspec.json.encode(payload)
            return payload
    return {"code": escape_surrogates(str(reason.code)), "message": escape_surrogates(reason.message)}


def encode_result(result: RunResult) -> bytes:
    return msgspec.json.encode(result)


decode_result = msgspec.json.Decoder(RunResult).decode
