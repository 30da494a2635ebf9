"""Limits, usage and the snapshots that people see; the arithmetic is in ledger.py."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Literal

import msgspec

from retinue.errors import ValidationFailed

UsageQuality = Literal["exact", "estimated", "unknown"]
"""How well a call's usage is known: reported whole by its provider; worked out from what came of an answer
that broke off; not at all. Calls that are not ``exact`` are charged with their reservation."""
Resource = Literal["model_calls", "tool_calls", "tokens", "money"]
CallKind = Literal["task", "control", "finishing"]
"""``task``: the work itself. ``control``: a policy's. ``finishing``: may use what is kept back for the
end."""


@dataclass(frozen=True, kw_only=True)
class RoleLimits:
    """Limits of the calls under one model role, beside those of the run. ``None`` is unlimited."""

    max_model_calls: int | None = None
    max_tokens: int | None = None
    max_cost: Decimal | None = None
    """In the currency of the app's price table."""

    def __post_init__(self) -> None:
        for name in ("max_model_calls", "max_tokens"):
            _check_count(f"budgets.roles.{name}", getattr(self, name), optional=True)
        object.__setattr__(self, "max_cost", _checked_cost("budgets.roles.max_cost", self.max_cost))


@dataclass(frozen=True, kw_only=True)
class Budgets:
    """Limits over a whole tree: a run and all its delegates (contract section 8). ``None`` is unlimited."""

    max_model_calls: int | None = None
    """Model calls, task, control and finishing calls together."""
    max_tool_calls: int | None = None
    """Tool attempts, counted once the gate let them through."""
    max_tokens: int | None = None
    """Input and output tokens together."""
    max_revisions: int = 0
    """Times that a completion policy may send the work back; of the run as a whole, never reset."""
    max_cost: Decimal | None = None
    """Money, in the currency of the app's price table; an ``int``, a ``str`` and a ``float`` are taken
    too."""
    finishing_model_calls: int = 0
    """Of ``max_model_calls``, kept back for ``services.finish_model``."""
    finishing_tokens: int = 0
    """Of ``max_tokens``, kept back for ``services.finish_model``."""
    tools: Mapping[str, int] = field(default_factory=dict)
    """Attempts of single tools, by name, beside ``max_tool_calls``."""
    roles: Mapping[str, RoleLimits] = field(default_factory=dict)
    """Limits of single model roles."""

    def __post_init__(self) -> None:
        for each in ("max_model_calls", "max_tool_calls", "max_tokens"):
            _check_count(f"budgets.{each}", getattr(self, each), optional=True)
        for each in ("max_revisions", "finishing_model_calls", "finishing_tokens"):
            _check_count(f"budgets.{each}", getattr(self, each), optional=False)
        object.__setattr__(self, "max_cost", _checked_cost("budgets.max_cost", self.max_cost))
        for kept, total in (("finishing_model_calls", "max_model_calls"), ("finishing_tokens", "max_tokens")):
            limit = getattr(self, total)
            if limit is not None and getattr(self, kept) > limit:
                raise ValidationFailed(
                    f"budgets.{kept} ({getattr(self, kept)}) is kept back from budgets.{total}, "
                    f"and cannot be more than it ({limit})",
                    path=f"budgets.{kept}",
                )
        for name, members, kind in (("tools", self.tools, int), ("roles", self.roles, RoleLimits)):
            object.__setattr__(self, name, _checked_map(f"budgets.{name}", members, kind))


def _checked_map(path: str, value: object, kind: type) -> dict[str, object]:
    if not isinstance(value, Mapping):
        raise ValidationFailed(f"{path} must map names to limits, not be {value!r:.80}", path=path)
    for key, limit in value.items():
        if not isinstance(key, str) or not key:
            raise ValidationFailed(f"{path} has {key!r:.80}, which is no name", path=path)
        if kind is int:
            _check_count(f"{path}.{key}", limit, optional=False)
        elif not isinstance(limit, kind):
            raise ValidationFailed(
                f"{path}.{key} must be a {kind.__name__}, not {limit!r:.80}", path=f"{path}.{key}"
            )
    return dict(value)


def _check_count(path: str, value: object, *, optional: bool) -> None:
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        or_none = " or None (unlimited)" if optional else ""
        raise ValidationFailed(f"{path} must be a nonnegative integer{or_none}, not {value!r}", path=path)


def _checked_cost(path: str, value: object) -> Decimal | None:
    if value is None:
        return None
    try:
        if isinstance(value, bool) or not isinstance(value, int | float | str | Decimal):
            raise ValueError
        cost = Decimal(str(value))
        if not cost.is_finite() or cost < 0:
            raise ValueError
    except (ValueError, ArithmeticError):
        raise ValidationFailed(
            f"{path} must be a nonnegative amount or None (unlimited), not {value!r:.80}", path=path
        ) from None
    return cost


class Usage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Tokens of one or more model calls, as providers reported them."""

    input_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0
    cached_tokens: int = 0
    audio_input_tokens: int = 0
    audio_output_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        return self.input_tokens + self.output_tokens

    def __add__(self, other: Usage) -> Usage:
        return Usage(**{name: getattr(self, name) + getattr(other, name) for name in self.__struct_fields__})

    def problem(self) -> str | None:
        """What is wrong with these numbers, or ``None``: each must be a finite nonnegative integer."""
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                return f"usage.{name} is {value!r}, not an integer"
            if not math.isfinite(value) or value < 0:
                return f"usage.{name} is {value!r}, not a nonnegative number"
        return None


# --- snapshots --------------------------------------------------------------------------------------------


class ResourceSnapshot(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One resource of a ledger. ``limit`` and ``remaining`` are ``None`` when unlimited."""

    limit: int | None
    used: int
    reserved: int
    remaining: int | None
    finishing_reserved: int = 0
    """Of ``remaining``, kept back for finishing calls; always 0 for tool attempts."""
    finishing_used: int = 0
    """Of ``used`` and ``reserved``: by finishing calls."""

    @property
    def ordinary_remaining(self) -> int | None:
        """What task and control calls may still use."""
        return None if self.remaining is None else self.remaining - self.finishing_reserved


class MoneySnapshot(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Money of a ledger, in ``currency``. ``limit`` and ``remaining`` are ``None`` when unlimited."""

    currency: str
    prices: str
    """Version of the price table."""
    limit: Decimal | None
    used: Decimal
    reserved: Decimal
    remaining: Decimal | None
    unpriced_calls: int = 0
    """Calls of models that the table has no price for; none of them is in ``used``."""


class RoleSnapshot(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The calls under one model role."""

    model_calls: ResourceSnapshot
    tokens: ResourceSnapshot
    money: MoneySnapshot | None = None


class BudgetSnapshot(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a tree has spent and may still spend; used + reserved ≤ limit held at every admission."""

    model_calls: ResourceSnapshot
    tool_calls: ResourceSnapshot
    tokens: ResourceSnapshot
    unknown_usage_calls: int = 0
    """Calls charged with their reservation, because nobody knows exactly what they used."""
    estimated_usage_calls: int = 0
    """Of those, calls for which something is known: see :class:`UsageReport`."""
    open_calls: int = 0
    """Model calls that are admitted and not settled: the totals are not final."""
    money: MoneySnapshot | None = None
    """``None`` where the app has no price table."""
    tools: dict[str, ResourceSnapshot] = msgspec.field(default_factory=dict)
    """Single tools, those that were used or have a limit."""
    roles: dict[str, RoleSnapshot] = msgspec.field(default_factory=dict)
    """Single model roles, those that were used or have a limit."""


# --- reports ----------------------------------------------------------------------------------------------


class UsageFigures(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What some calls used."""

    usage: Usage = msgspec.field(default_factory=Usage)
    """What providers reported: of the ``exact`` calls."""
    estimated: Usage = msgspec.field(default_factory=Usage)
    """What came of answers that broke off; beside ``usage``, not in it."""
    charged_tokens: int = 0
    """What the ledger counts as used: the total of exact calls, the reservation of all others."""
    exact_calls: int = 0
    estimated_calls: int = 0
    unknown_calls: int = 0
    open_calls: int = 0
    """Admitted and not settled."""
    tool_attempts: int = 0
    cost: Decimal | None = None
    """Charged money; ``None`` where the app has no price table."""


class ParticipantUsage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one participant of a tree used."""

    run_id: str
    name: str = ""
    """Empty for the root."""
    parent_run_id: str | None = None
    open: bool = False
    """It still works."""
    own: UsageFigures
    subtree: UsageFigures
    """With everything below it."""


class UsageReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a tree used, by participant, role and tool."""

    complete: bool
    """No call and no delegate is open: these figures are final."""
    tree: UsageFigures
    participants: tuple[ParticipantUsage, ...]
    """The root first, then delegates in the order of their start."""
    roles: dict[str, UsageFigures] = msgspec.field(default_factory=dict)
    tools: dict[str, int] = msgspec.field(default_factory=dict)
    """Attempts by tool."""


class Spending(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What trees used in this process, for metrics: counts that only grow."""

    model_calls: int = 0
    """Calls that reached a provider."""
    tool_calls: int = 0
    """Attempts that were admitted."""
    refusals: int = 0
    """Model calls and tool attempts that a budget had no room for."""
    input_tokens: int = 0
    """As providers reported them, like those that follow."""
    output_tokens: int = 0

    def __add__(self, other: Spending) -> Spending:
        return Spending(
            **{name: getattr(self, name) + getattr(other, name) for name in self.__struct_fields__}
        )
