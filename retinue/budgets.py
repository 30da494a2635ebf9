"""Limits, usage and the snapshots that people see; the arithmetic is in ledger.py."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Literal

import msgspec

from retinue.errors import ValidationFailed

UsageQuality = Literal["exact", "estimated", "unknown"]
Resource = Literal["model_calls", "tool_calls", "tokens"]


@dataclass(frozen=True, kw_only=True)
class Budgets:
    """Limits over a whole tree: a run and all its delegates (contract section 8). ``None`` is unlimited."""

    max_model_calls: int | None = None
    """Model calls, task and control calls together."""
    max_tool_calls: int | None = None
    """Tool attempts, counted once the gate let them through."""
    max_tokens: int | None = None
    """Input and output tokens together."""
    max_revisions: int = 0
    """Times that a completion policy may send the work back; of the run as a whole, never reset."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is None and field.name != "max_revisions":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                or_none = "" if field.name == "max_revisions" else " or None (unlimited)"
                raise ValidationFailed(
                    f"budgets.{field.name} must be a nonnegative integer{or_none}, not {value!r}",
                    path=f"budgets.{field.name}",
                )


class Usage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Tokens of one or more model calls, as providers reported them."""

    input_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0
    cached_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        return self.input_tokens + self.output_tokens

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            input_tokens=self.input_tokens + other.input_tokens,
            output_tokens=self.output_tokens + other.output_tokens,
            reasoning_tokens=self.reasoning_tokens + other.reasoning_tokens,
            cached_tokens=self.cached_tokens + other.cached_tokens,
        )

    def problem(self) -> str | None:
        """What is wrong with these numbers, or ``None``: each must be a finite nonnegative integer."""
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                return f"usage.{name} is {value!r}, not an integer"
            if not math.isfinite(value) or value < 0:
                return f"usage.{name} is {value!r}, not a nonnegative number"
        return None


class ResourceSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """One resource of a ledger. ``limit`` and ``remaining`` are ``None`` when unlimited."""

    limit: int | None
    used: int
    reserved: int
    remaining: int | None


class BudgetSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """What a tree has spent and may still spend; used + reserved ≤ limit held at every admission."""

    model_calls: ResourceSnapshot
    tool_calls: ResourceSnapshot
    tokens: ResourceSnapshot
    unknown_usage_calls: int = 0
    """Calls charged with their reservation, because nobody knows what they used."""
