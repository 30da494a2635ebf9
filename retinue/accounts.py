"""The accounts of a ledger: what one participant, with everything below it, may spend and has spent."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from retinue.budgets import (
    Budgets,
    BudgetSnapshot,
    CallKind,
    MoneySnapshot,
    ResourceSnapshot,
    RoleLimits,
    RoleSnapshot,
    Usage,
    UsageFigures,
)
from retinue.prices import PriceTable, amount_of, units_of


@dataclass
class Counter:
    """One resource: ``used + reserved <= limit`` at every admission."""

    limit: int | None
    kept: int = 0
    """Kept back for finishing calls."""
    used: int = 0
    reserved: int = 0
    finishing: int = 0
    """Of used and reserved: by finishing calls."""

    @property
    def remaining(self) -> int | None:
        return None if self.limit is None else max(0, self.limit - self.used - self.reserved)

    @property
    def touched(self) -> bool:
        """Whether anything of it is used or reserved."""
        return bool(self.used or self.reserved)

    @property
    def protected(self) -> int:
        """What only finishing calls may use: the part of ``kept`` that they have not used."""
        remaining = self.remaining
        return 0 if remaining is None else min(max(0, self.kept - self.finishing), remaining)

    def available(self, kind: CallKind = "task") -> int | None:
        """What a call of this kind may use; ``None`` without a limit."""
        remaining = self.remaining
        if remaining is None or kind == "finishing":
            return remaining
        return remaining - self.protected

    def fits(self, amount: int, kind: CallKind = "task") -> bool:
        available = self.available(kind)
        return available is None or amount <= available

    def reserve(self, amount: int, kind: CallKind) -> None:
        self.reserved += amount
        if kind == "finishing":
            self.finishing += amount

    def settle(self, reserved: int, used: int, kind: CallKind) -> None:
        """What was reserved becomes what was used."""
        self.reserved -= reserved
        self.used += used
        if kind == "finishing":
            self.finishing += used - reserved

    def snapshot(self) -> ResourceSnapshot:
        return ResourceSnapshot(
            limit=self.limit,
            used=self.used,
            reserved=self.reserved,
            remaining=self.remaining,
            finishing_reserved=self.protected,
            finishing_used=self.finishing,
        )

    def carry(self, snapshot: ResourceSnapshot) -> None:
        """Begin with what another ledger had used."""
        self.used = snapshot.used
        self.finishing = snapshot.finishing_used


@dataclass
class Bucket:
    """Model calls, tokens and money, of an account or of one role under it."""

    scope: str
    """Whose limits these are, for people: ``run``, ``delegate:<name>``, or one of them with
    ``/role:<role>``."""
    calls: Counter
    tokens: Counter
    money: Counter
    unpriced: int = 0
    """Calls of models that have no price."""

    def money_snapshot(self, prices: PriceTable | None) -> MoneySnapshot | None:
        if prices is None:
            return None
        money = self.money
        return MoneySnapshot(
            currency=prices.currency,
            prices=prices.version,
            limit=None if money.limit is None else amount_of(money.limit),
            used=amount_of(money.used),
            reserved=amount_of(money.reserved),
            remaining=None if money.remaining is None else amount_of(money.remaining),
            unpriced_calls=self.unpriced,
        )

    def carry_money(self, snapshot: MoneySnapshot | None) -> None:
        if snapshot is not None:
            self.money.used = units_of(snapshot.used)
            self.unpriced = snapshot.unpriced_calls


@dataclass
class Figures:
    """What some calls used, for reports."""

    usage: Usage = field(default_factory=Usage)
    estimated: Usage = field(default_factory=Usage)
    tokens: int = 0
    money: int = 0
    exact_calls: int = 0
    estimated_calls: int = 0
    unknown_calls: int = 0
    open_calls: int = 0
    attempts: int = 0

    def add(self, other: Figures) -> None:
        self.usage += other.usage
        self.estimated += other.estimated
        for name in (
            "tokens", "money", "exact_calls", "estimated_calls", "unknown_calls", "open_calls", "attempts",
        ):  # fmt: skip
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def shown(self, prices: PriceTable | None) -> UsageFigures:
        return UsageFigures(
            usage=self.usage,
            estimated=self.estimated,
            charged_tokens=self.tokens,
            exact_calls=self.exact_calls,
            estimated_calls=self.estimated_calls,
            unknown_calls=self.unknown_calls,
            open_calls=self.open_calls,
            tool_attempts=self.attempts,
            cost=None if prices is None else amount_of(self.money),
        )


class Account:
    """One participant's limits and totals; a delegate's spending counts in every account above it too."""

    def __init__(
        self, name: str, parent: Account | None, budgets: Budgets, prices: PriceTable | None, participant: str
    ) -> None:
        self.participant = participant
        self.name = name
        self.parent = parent
        self.scope = "run" if parent is None else f"delegate:{name}"
        self.open = True
        self._prices = prices
        self._budgets = budgets
        whole = RoleLimits(
            max_model_calls=budgets.max_model_calls,
            max_tokens=budgets.max_tokens,
            max_cost=budgets.max_cost,
        )
        self.total = _bucket(
            self.scope, whole, calls_kept=budgets.finishing_model_calls, tokens_kept=budgets.finishing_tokens
        )
        self.tool_calls = Counter(budgets.max_tool_calls)
        self.tools = {name: Counter(limit) for name, limit in budgets.tools.items()}
        self.roles = {
            role: _bucket(f"{self.scope}/role:{role}", limits) for role, limits in budgets.roles.items()
        }
        self.own = Figures()
        """Without its delegates'."""
        self.open_slots: set[str] = set()
        """Its own calls that are reserved and not admitted."""
        self.open_calls: set[str] = set()
        """Its own calls that are admitted and not settled."""
        self.unsettled = 0
        """Those, and its delegates'."""
        self.unknown = 0
        self.estimated = 0
        self._tools_shown: dict[str, ResourceSnapshot] = {
            name: counter.snapshot() for name, counter in self.tools.items()
        }
        self._roles_shown: dict[str, RoleSnapshot] = {}
        for role in self.roles:
            self.show_role(role)

    def chain(self) -> Iterator[Account]:
        """This account and those above it, innermost first."""
        account: Account | None = self
        while account is not None:
            yield account
            account = account.parent

    def buckets(self, role: str) -> tuple[Bucket, Bucket]:
        """What a call under a role counts in."""
        found = self.roles.get(role)
        if found is None:
            found = self.roles[role] = _bucket(f"{self.scope}/role:{role}", RoleLimits())
        return self.total, found

    def tool(self, name: str) -> Counter:
        found = self.tools.get(name)
        if found is None:
            found = self.tools[name] = Counter(None)
        return found

    @property
    def limits_tokens(self) -> bool:
        """Whether tokens run out here, or money that they cost."""
        buckets = (self.total, *self.roles.values())
        return any(bucket.tokens.limit is not None or bucket.money.limit is not None for bucket in buckets)

    # --- snapshots ----------------------------------------------------------------------------------------
    #
    # One is taken after every admission and settlement, and read by other threads. So it is never changed:
    # what one call touches is made anew, all else is shared.

    def show_role(self, role: str) -> None:
        """The calls under a role have changed."""
        bucket = self.roles[role]
        if not bucket.calls.touched and role not in self._budgets.roles:
            self._roles_shown = {name: each for name, each in self._roles_shown.items() if name != role}
            return
        shown = RoleSnapshot(
            model_calls=bucket.calls.snapshot(),
            tokens=bucket.tokens.snapshot(),
            money=bucket.money_snapshot(self._prices),
        )
        self._roles_shown = {**self._roles_shown, role: shown}

    def show_tool(self, name: str) -> None:
        """The attempts of a tool have changed."""
        counter = self.tools[name]
        if not counter.touched and counter.limit is None:
            self._tools_shown = {tool: each for tool, each in self._tools_shown.items() if tool != name}
            return
        self._tools_shown = {**self._tools_shown, name: counter.snapshot()}

    def snapshot(self) -> BudgetSnapshot:
        return BudgetSnapshot(
            model_calls=self.total.calls.snapshot(),
            tool_calls=self.tool_calls.snapshot(),
            tokens=self.total.tokens.snapshot(),
            unknown_usage_calls=self.unknown,
            estimated_usage_calls=self.estimated,
            open_calls=self.unsettled,
            money=self.total.money_snapshot(self._prices),
            tools=self._tools_shown,
            roles=self._roles_shown,
        )

    def carry(self, snapshot: BudgetSnapshot) -> None:
        """Begin with what another run has spent."""
        self.total.calls.carry(snapshot.model_calls)
        self.total.tokens.carry(snapshot.tokens)
        self.total.carry_money(snapshot.money)
        self.tool_calls.carry(snapshot.tool_calls)
        self.unknown = snapshot.unknown_usage_calls
        self.estimated = snapshot.estimated_usage_calls
        for name, tool in snapshot.tools.items():
            self.tool(name).carry(tool)
            self.show_tool(name)
        for role, spent in snapshot.roles.items():
            _, bucket = self.buckets(role)
            bucket.calls.carry(spent.model_calls)
            bucket.tokens.carry(spent.tokens)
            bucket.carry_money(spent.money)
            self.show_role(role)


def _bucket(scope: str, limits: RoleLimits, *, calls_kept: int = 0, tokens_kept: int = 0) -> Bucket:
    return Bucket(
        scope,
        Counter(limits.max_model_calls, calls_kept),
        Counter(limits.max_tokens, tokens_kept),
        Counter(None if limits.max_cost is None else units_of(limits.max_cost)),
    )
