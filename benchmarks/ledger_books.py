"""The books of a clerk who adds up every single call each time that he is asked.

They say what a ledger has to say, worked out from a plain list of calls and attempts by the rules of contract
section 8, with no running total. :mod:`benchmarks.ledger_audit` compares a ledger with them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from typing import Literal, NamedTuple

from retinue.budgets import (
    Budgets,
    BudgetSnapshot,
    CallKind,
    MoneySnapshot,
    ParticipantUsage,
    ResourceSnapshot,
    RoleLimits,
    RoleSnapshot,
    Usage,
    UsageFigures,
    UsageReport,
)
from retinue.ledger import ROOT
from retinue.prices import PriceTable

State = Literal["slot", "free", "refused", "open", "exact", "estimated", "unknown", "released"]
HELD: tuple[State, ...] = ("slot", "open")
CHARGED: tuple[State, ...] = ("exact", "estimated", "unknown")
COUNTED: tuple[State, ...] = ("open", *CHARGED)
UNLIMITED = RoleLimits()
Key = tuple[str, str]
"""A participant, and an id that it made."""


class Grant(NamedTuple):
    """Yes, with so many tokens of output at most."""

    cap: int | None


class Refusal(NamedTuple):
    """No, and what the error tells about it."""

    resource: str
    scope: str = ""
    limit: Decimal | None = None
    remaining: Decimal | None = None
    needed: Decimal | None = None


@dataclass(eq=False)
class Call:
    """One model call, in whatever state it is."""

    owner: str
    role: str
    kind: CallKind
    model: str = ""
    state: State = "free"
    answer: Grant | Refusal | None = None
    tokens: int = 0
    """Projected, or charged."""
    money: int = 0
    """The same, in billionths."""
    usage: Usage = field(default_factory=Usage)
    estimate: Usage = field(default_factory=Usage)


@dataclass
class Member:
    """A participant."""

    name: str
    budgets: Budgets
    path: tuple[str, ...]
    """From itself up to the root."""
    scope: str
    open: bool = True


@dataclass(slots=True)
class Sums:
    """What some calls come to. Money is in billionths."""

    calls: int = 0
    slots: int = 0
    finishing: int = 0
    """Calls and slots."""
    charged: int = 0
    """Tokens, as those that follow."""
    held: int = 0
    finishing_tokens: int = 0
    spent: int = 0
    promised: int = 0
    """Money of calls that are open."""
    unpriced: int = 0
    unknown: int = 0
    estimated: int = 0
    open: int = 0

    def add(self, call: Call, priced: bool) -> None:
        ends = call.kind == "finishing"
        self.finishing += ends
        if call.state == "slot":
            self.slots += 1
            return
        self.calls += 1
        self.unpriced += not priced
        self.finishing_tokens += call.tokens * ends
        if call.state == "open":
            self.open += 1
            self.held += call.tokens
            self.promised += call.money
        else:
            self.unknown += call.state != "exact"
            self.estimated += call.state == "estimated"
            self.charged += call.tokens
            self.spent += call.money


class Totals(NamedTuple):
    """An account, or the calls of one role under it."""

    scope: str
    calls: ResourceSnapshot
    tokens: ResourceSnapshot
    money_limit: int | None
    sums: Sums

    @property
    def money_left(self) -> int | None:
        limit = self.money_limit
        return None if limit is None else max(0, limit - self.sums.spent - self.sums.promised)


class Books:
    """What a ledger has to say."""

    def __init__(self, budgets: Budgets, prices: PriceTable | None) -> None:
        self.prices = prices
        self.members = {ROOT: Member(ROOT, budgets, (ROOT,), "run")}
        self.calls: dict[Key, Call] = {}
        self.attempts: dict[Key, tuple[str, Refusal | None]] = {}
        self.calls_before: list[Call] = []
        """Of the runs that this one goes on with."""
        self.attempts_before: list[str] = []
        self._added_up: dict[tuple[str, str | None], Sums] | None = None
        """Until something happens."""

    def open_account(self, name: str, parent: str, budgets: Budgets | None) -> None:
        path = (name, *self.members[parent].path)
        self.members[name] = Member(name, budgets or Budgets(), path, f"delegate:{name}")

    def go_on(self, budgets: Budgets) -> None:
        """The run has ended, and another one goes on under these limits."""
        for call in self.calls.values():
            if call.state in CHARGED:
                call.owner = ROOT
                self.calls_before.append(call)
        self.attempts_before += [tool for tool, refusal in self.attempts.values() if refusal is None]
        self._added_up = None
        self.calls, self.attempts = {}, {}
        self.members = {ROOT: Member(ROOT, budgets, (ROOT,), "run")}

    # --- what happens -------------------------------------------------------------------------------------

    def reserve(self, key: Key, role: str, kind: CallKind) -> Refusal | None:
        self._added_up = None
        known = self.calls.get(key)
        if known is not None and known.state != "free":
            return known.answer if isinstance(known.answer, Refusal) else None
        refusal = self._calls_refusal(key[0], role, kind)
        self._added_up = None
        state: State = "slot" if refusal is None else "refused"
        self.calls[key] = Call(key[0], role, kind, state=state, answer=refusal)
        return refusal

    def release(self, key: Key) -> None:
        self._added_up = None
        if self.calls[key].state == "slot":
            self.calls[key].state = "free"

    def move(self, key: Key, role: str) -> Refusal | None:
        call = self.calls[key]
        if call.state != "slot" or call.role == role:
            return None
        self._added_up = None
        call.state = "free"
        return self.reserve(key, role, call.kind)

    def admit(
        self, key: Key, role: str, kind: CallKind, model: str, projected: int, requested: int | None
    ) -> Grant | Refusal:
        known = self.calls.get(key)
        if known is not None and known.answer is not None:
            return known.answer
        slotted = known is not None and known.state == "slot" and (known.role, known.kind) == (role, kind)
        self.calls.pop(key, None)
        self._added_up = None
        refusal = self._calls_refusal(key[0], role, kind)
        answer = refusal or self._grant(key[0], role, kind, model, projected, requested)
        if slotted and refusal is not None:
            raise AssertionError(f"the call that {key} had reserved is not there: {refusal}")
        self._added_up = None
        call = self.calls[key] = Call(key[0], role, kind, model, "refused", answer)
        if isinstance(answer, Grant):
            call.state = "open"
            call.tokens = projected + (answer.cap or 0)
            call.money = self._most(model, projected, answer.cap or 0)
        return answer

    def settle(self, key: Key, usage: Usage | None, started: bool, estimated: Usage | None) -> None:
        self._added_up = None
        call = self.calls[key]
        if call.state in ("exact", "released") or (usage is None and call.state != "open"):
            return
        if usage is not None:
            call.state, call.usage, call.tokens = "exact", usage, usage.input_tokens + usage.output_tokens
            call.money = self._cost(call.model, usage)
        elif not started:
            call.state = "released"
        elif estimated is not None:
            call.state, call.estimate = "estimated", estimated
        else:
            call.state = "unknown"

    def lose(self, name: str) -> None:
        self._added_up = None
        for call in self.calls.values():
            if call.owner == name and call.state in HELD:
                call.state = "free" if call.state == "slot" else "unknown"

    def attempt(self, owner: str, batch: Sequence[tuple[str, str]], whole: bool) -> list[Refusal | None]:
        new = []
        for attempt_id, tool in batch:
            key = owner, attempt_id
            if key not in self.attempts:
                self.attempts[key] = tool, self._attempt_refusal(owner, tool)
                new.append(key)
        refusals = [self.attempts[owner, attempt_id][1] for attempt_id, _ in batch]
        first = next((refusal for refusal in refusals if refusal is not None), None)
        if whole and first is not None:
            for key in new:
                tool, refusal = self.attempts[key]
                self.attempts[key] = tool, refusal or first
        return [self.attempts[owner, attempt_id][1] for attempt_id, _ in batch]

    # --- the rules ----------------------------------------------------------------------------------------

    def _way(self, owner: str, role: str) -> list[Totals]:
        """Every account that a call counts in, innermost first."""
        path = self.members[owner].path
        return [self.totals(name, under) for name in path for under in (None, role)]

    def _calls_refusal(self, owner: str, role: str, kind: CallKind) -> Refusal | None:
        for each in self._way(owner, role):
            if (free := _free(each.calls, kind)) is not None and free < 1:
                return refused("model_calls", each.scope, each.calls.limit, each.calls.remaining, 1)
        return None

    def _grant(
        self, owner: str, role: str, kind: CallKind, model: str, projected: int, requested: int | None
    ) -> Grant | Refusal:
        caps = [] if requested is None else [requested]
        way = self._way(owner, role)
        for each in way:
            if (free := _free(each.tokens, kind)) is not None:
                if free <= projected:
                    return refused(
                        "tokens", each.scope, each.tokens.limit, each.tokens.remaining, projected + 1
                    )
                caps.append(free - projected)
        for each in way:
            if (left := each.money_left) is None:
                continue
            assert each.money_limit is not None
            if self.prices is None or model not in self.prices.models:
                return Refusal("unsupported")
            price = self.prices.models[model].output * 1000  # a million tokens to one, a unit to billionths
            rest = left - self._most(model, projected, 0)
            if rest < 0 or rest < price:
                needed = _amount(self._most(model, projected, 1))
                return refused("money", each.scope, _amount(each.money_limit), _amount(left), needed)
            if price > 0:
                caps.append(int(rest // price))
        return Grant(min(caps) if caps else None)

    def _attempt_refusal(self, owner: str, tool: str) -> Refusal | None:
        for name in self.members[owner].path:
            member = self.members[name]
            every, single = self.attempts_of(name), self.attempts_of(name, tool)
            for counted, scope in ((every, member.scope), (single, f"{member.scope}/tool:{tool}")):
                if counted.remaining == 0:
                    return refused("tool_calls", scope, counted.limit, 0, 1)
        return None

    def _most(self, model: str, sent: int, got: int) -> int:
        """What a call of this size costs where nothing is in a cache, or where that is dearer."""
        if self.prices is None or model not in self.prices.models:
            return 0
        price = self.prices.models[model]
        dearest = max(price.input, price.input if price.cached_input is None else price.cached_input)
        return _up(dearest * sent + price.output * got)

    def _cost(self, model: str, usage: Usage) -> int:
        if self.prices is None or model not in self.prices.models:
            return 0
        price = self.prices.models[model]
        hits = min(usage.cached_tokens, usage.input_tokens)
        hit = price.input if price.cached_input is None else price.cached_input
        return _up(
            price.input * (usage.input_tokens - hits) + hit * hits + price.output * usage.output_tokens
        )

    # --- totals -------------------------------------------------------------------------------------------

    def _sums(self) -> dict[tuple[str, str | None], Sums]:
        """Every account, added up from every call; with a role, its calls under that role."""
        if self._added_up is None:
            self._added_up = found = dict[tuple[str, str | None], Sums]()
            for call in (*self.calls_before, *self.calls.values()):
                if call.state == "slot" or call.state in COUNTED:
                    priced = self.prices is None or call.model in self.prices.models
                    for name in self.members[call.owner].path:
                        for under in (None, call.role):
                            found.setdefault((name, under), Sums()).add(call, priced)
        return self._added_up

    def totals(self, name: str, role: str | None = None) -> Totals:
        member, sums = self.members[name], self._sums().get((name, role)) or Sums()
        budgets = member.budgets
        limits = budgets if role is None else budgets.roles.get(role, UNLIMITED)
        cost = limits.max_cost
        return Totals(
            member.scope if role is None else f"{member.scope}/role:{role}",
            _resource(
                limits.max_model_calls,
                sums.calls,
                sums.slots,
                kept=budgets.finishing_model_calls if role is None else 0,
                ends=sums.finishing,
            ),
            _resource(
                limits.max_tokens,
                sums.charged,
                sums.held,
                kept=budgets.finishing_tokens if role is None else 0,
                ends=sums.finishing_tokens,
            ),
            None if cost is None else int(cost.scaleb(9).to_integral_value(ROUND_FLOOR)),
            sums,
        )

    def _money(self, totals: Totals) -> MoneySnapshot | None:
        if self.prices is None:
            return None
        left = totals.money_left
        return MoneySnapshot(
            currency=self.prices.currency,
            prices=self.prices.version,
            limit=None if totals.money_limit is None else _amount(totals.money_limit),
            used=_amount(totals.sums.spent),
            reserved=_amount(totals.sums.promised),
            remaining=None if left is None else _amount(left),
            unpriced_calls=totals.sums.unpriced,
        )

    def attempts_of(self, name: str, tool: str | None = None) -> ResourceSnapshot:
        budgets = self.members[name].budgets
        below = [
            used
            for (owner, _), (used, refusal) in self.attempts.items()
            if refusal is None and name in self.members[owner].path
        ]
        taken = [*(self.attempts_before if name == ROOT else ()), *below]
        limit = budgets.max_tool_calls if tool is None else budgets.tools.get(tool)
        return _resource(limit, len(taken) if tool is None else taken.count(tool), 0)

    def snapshot(self, name: str) -> BudgetSnapshot:
        budgets, whole = self.members[name].budgets, self.totals(name)
        used = {tool for tool, _ in self.attempts.values()} | set(self.attempts_before)
        tools = {tool: self.attempts_of(name, tool) for tool in {*used, *budgets.tools}}
        seen = {role for at, role in self._sums() if at == name and role is not None}
        roles = {role: self.totals(name, role) for role in {*budgets.roles, *seen}}
        return BudgetSnapshot(
            model_calls=whole.calls,
            tool_calls=self.attempts_of(name),
            tokens=whole.tokens,
            unknown_usage_calls=whole.sums.unknown,
            estimated_usage_calls=whole.sums.estimated,
            open_calls=whole.sums.open,
            money=self._money(whole),
            tools={tool: each for tool, each in tools.items() if each.used or tool in budgets.tools},
            roles={
                role: RoleSnapshot(model_calls=each.calls, tokens=each.tokens, money=self._money(each))
                for role, each in roles.items()
            },
        )

    def figures(self, owners: Iterable[str], role: str | None = None) -> UsageFigures:
        """What the calls of some participants came to in this run."""
        whose = set(owners)
        calls = [call for call in self.calls.values() if call.owner in whose and role in (None, call.role)]
        charged = [call for call in calls if call.state in CHARGED]
        attempts = [refusal for (owner, _), (_, refusal) in self.attempts.items() if owner in whose]
        return UsageFigures(
            usage=sum((call.usage for call in calls if call.state == "exact"), Usage()),
            estimated=sum((call.estimate for call in calls if call.state == "estimated"), Usage()),
            charged_tokens=sum(call.tokens for call in charged),
            exact_calls=sum(call.state == "exact" for call in calls),
            estimated_calls=sum(call.state == "estimated" for call in calls),
            unknown_calls=sum(call.state == "unknown" for call in calls),
            open_calls=sum(call.state == "open" for call in calls),
            tool_attempts=attempts.count(None) if role is None else 0,
            cost=None if self.prices is None else _amount(sum(call.money for call in charged)),
        )

    def report(self, root: str) -> UsageReport:
        tools = [tool for tool, refusal in self.attempts.values() if refusal is None]
        below = {
            name: [each.name for each in self.members.values() if name in each.path] for name in self.members
        }
        roles = {call.role for call in self.calls.values() if isinstance(call.answer, Grant)}
        return UsageReport(
            complete=not any(call.state in HELD for call in self.calls.values())
            and not any(member.open for member in self.members.values()),
            tree=self.figures(self.members),
            participants=tuple(
                ParticipantUsage(
                    run_id=member.name or root,
                    name=member.name,
                    parent_run_id=None if member.name == ROOT else member.path[1] or root,
                    open=member.open,
                    own=self.figures([member.name]),
                    subtree=self.figures(below[member.name]),
                )
                for member in self.members.values()
            ),
            roles={role: self.figures(self.members, role) for role in roles},
            tools={tool: tools.count(tool) for tool in set(tools)},
        )


def _resource(
    limit: int | None, used: int, reserved: int, *, kept: int = 0, ends: int = 0
) -> ResourceSnapshot:
    remaining = None if limit is None else max(0, limit - used - reserved)
    return ResourceSnapshot(
        limit=limit,
        used=used,
        reserved=reserved,
        remaining=remaining,
        finishing_reserved=0 if remaining is None else min(max(0, kept - ends), remaining),
        finishing_used=ends,
    )


def _free(resource: ResourceSnapshot, kind: CallKind) -> int | None:
    return resource.remaining if kind == "finishing" else resource.ordinary_remaining


def _up(millionths: Decimal) -> int:
    """Billionths."""
    return int((millionths * 1000).to_integral_value(ROUND_CEILING))


def _amount(billionths: int) -> Decimal:
    return Decimal(billionths).scaleb(-9)


def refused(resource: str, scope: str, *figures: int | Decimal | None) -> Refusal:
    return Refusal(resource, scope, *(None if each is None else Decimal(each) for each in figures))
