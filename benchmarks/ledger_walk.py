"""Random interleavings of a ledger, offline: no overshoot, no leak.

One walk is one tree: a few participants, each with limits of its own, whose calls begin, wait, fail, are
lost, repeated and settled late, in an order that a seed gives. After every step what is used and reserved is
compared with every limit; at the end everybody is lost, and what is left is compared with a recount of every
call.
"""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Literal

from retinue.budgets import (
    Budgets,
    BudgetSnapshot,
    CallKind,
    ResourceSnapshot,
    RoleLimits,
    RoleSnapshot,
    Usage,
)
from retinue.errors import BudgetExhausted, Unsupported
from retinue.ledger import ROOT, BudgetLedger
from retinue.prices import Price, PriceTable, units_of

ROLES = ("main", "judge")
TOOLS = ("look", "pay")
MODELS = ("cheap", "dear", "unpriced")
PRICES = PriceTable(
    version="walk",
    models={
        "cheap": Price(input=Decimal("0.3"), output=Decimal(1)),
        "dear": Price(input=3, output=15, cached_input=Decimal("0.37")),  # type: ignore[arg-type]
    },
)


@dataclass(eq=False)
class Call:
    """One model call, as a bookkeeper of its own writes it down."""

    owner: str
    call_id: str
    role: str
    kind: CallKind
    model: str
    state: Literal["slot", "open", "exact", "estimated", "unknown", "gone"] = "slot"
    tokens: int = 0
    """Projected, or charged."""
    money: int = 0


@dataclass
class Walk:
    """One random interleaving."""

    seed: int
    steps: int = 14
    random: random.Random = field(init=False)
    calls: list[Call] = field(default_factory=list)
    parents: dict[str, str] = field(default_factory=dict)
    attempts: dict[tuple[str, str], tuple[str, bool]] = field(default_factory=dict)
    admitted: int = 0
    refused: int = 0

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)

    def run(self) -> None:
        """Walk to the end. Raises ``AssertionError`` with the seed for an overshoot or a leak."""
        self.priced = self.random.random() < 0.5
        self.names = [ROOT]
        self.budgets = {ROOT: self._budgets()}
        """Of each participant."""
        self.ledger = BudgetLedger(self.budgets[ROOT], prices=PRICES if self.priced else None)
        for step in range(self.steps):
            self._step()
            self._check(f"after step {step}")
        self._end()

    # --- what happens -------------------------------------------------------------------------------------

    def _budgets(self) -> Budgets:
        draw = self.random

        def maybe(most: int) -> int | None:
            return draw.randrange(most) if draw.random() < 0.6 else None

        calls, tokens = maybe(6), maybe(120)
        roles = {
            role: RoleLimits(
                max_model_calls=maybe(4),
                max_tokens=maybe(80),
                max_cost=Decimal(draw.randrange(400)) / 10**6
                if self.priced and draw.random() < 0.3
                else None,
            )
            for role in ROLES
            if draw.random() < 0.3
        }
        return Budgets(
            max_model_calls=calls,
            max_tokens=tokens,
            max_tool_calls=maybe(5),
            max_cost=Decimal(draw.randrange(900)) / 10**6 if self.priced and draw.random() < 0.4 else None,
            finishing_model_calls=0 if not calls else draw.randrange(calls + 1) // 2,
            finishing_tokens=0 if not tokens else draw.randrange(tokens + 1) // 2,
            tools={tool: draw.randrange(3) for tool in TOOLS if draw.random() < 0.3},
            roles=roles,
        )

    def _step(self) -> None:
        open_calls = [call for call in self.calls if call.state in ("slot", "open")]
        late = [call for call in self.calls if call.state in ("unknown", "estimated")]
        what = self.random.random()
        if what < 0.12 and len(self.names) < 5:
            name, parent = f"child-{len(self.names)}", self.random.choice(self.names)
            own = self._budgets() if self.random.random() < 0.5 else None
            self.ledger.open_account(name, parent, own)
            self.names.append(name)
            self.budgets[name] = own or Budgets()
            self.parents[name] = parent
        elif what < 0.5 or not open_calls:
            self._begin()
        elif what < 0.85:
            self._go_on(self.random.choice(open_calls))
        elif what < 0.9 and late:
            self._settle(self.random.choice(late), Usage(input_tokens=self.random.randrange(40)))
        elif what < 0.95:
            self._tools()
        else:
            self._lose(self.random.choice(self.names))

    def _begin(self) -> None:
        draw = self.random
        call = Call(
            draw.choice(self.names),
            f"call-{len(self.calls)}",
            draw.choice(ROLES),
            draw.choice(("task", "task", "control", "finishing")),
            draw.choice(MODELS),
        )
        self.calls.append(call)
        if draw.random() < 0.4:
            try:
                for _ in range(draw.choice((1, 1, 2))):
                    self.ledger.reserve_slot(call.owner, call.call_id, call.role, kind=call.kind)
            except BudgetExhausted:
                call.state = "gone"
                self.refused += 1
        else:
            self._admit(call)

    def _go_on(self, call: Call) -> None:
        what = self.random.random()
        if call.state == "open":
            usage = Usage(
                input_tokens=self.random.randrange(30),
                output_tokens=self.random.randrange(30),
                cached_tokens=self.random.randrange(10),
            )
            self._settle(call, usage if what < 0.6 else None, started=what < 0.85)
        elif what < 0.6:
            self._admit(call)
        elif what < 0.8:
            role = self.random.choice(ROLES)
            try:
                self.ledger.move_slot(call.owner, call.call_id, role)
                call.role = role
            except BudgetExhausted:
                call.state = "gone"
                self.refused += 1
        else:
            self.ledger.release_slot(call.owner, call.call_id)
            call.state = "gone"

    def _admit(self, call: Call) -> None:
        projected = self.random.randrange(20)
        wanted = self.random.choice((None, self.random.randrange(1, 40)))
        admit = functools.partial(
            self.ledger.admit_model,
            call.owner,
            call.call_id,
            projected,
            wanted,
            role=call.role,
            kind=call.kind,
            model_id=call.model,
        )
        try:
            grant = admit()
            if self.random.random() < 0.3:
                assert admit() == grant, self._says("a repeated admission")
        except (BudgetExhausted, Unsupported):
            call.state = "gone"
            self.refused += 1
            return
        self.admitted += 1
        call.state = "open"
        call.tokens = projected + (grant.max_tokens or 0)
        price = PRICES.models.get(call.model) if self.priced else None
        call.money = 0 if price is None else price.bound(projected, grant.max_tokens or 0)
        self._check_admission(call)

    def _settle(self, call: Call, usage: Usage | None, *, started: bool = True) -> None:
        estimated = Usage(output_tokens=3) if usage is None and self.random.random() < 0.3 else None
        for _ in range(self.random.choice((1, 1, 2))):
            self.ledger.settle_model(call.owner, call.call_id, usage, started=started, estimated=estimated)
        if usage is not None:
            price = PRICES.models.get(call.model) if self.priced else None
            call.state, call.tokens = "exact", usage.total_tokens
            call.money = 0 if price is None else price.cost(usage)
        elif started:
            call.state = "unknown" if estimated is None else "estimated"
        else:
            call.state, call.tokens, call.money = "gone", 0, 0

    def _lose(self, name: str) -> None:
        self.ledger.lose(name)
        for call in self.calls:
            if call.owner == name and call.state in ("slot", "open"):
                call.state = "gone" if call.state == "slot" else "unknown"

    def _tools(self) -> None:
        draw = self.random
        owner = draw.choice(self.names)
        batch = [
            (f"attempt-{len(self.attempts)}-{n}", draw.choice(TOOLS)) for n in range(draw.randrange(1, 4))
        ]
        whole = draw.random() < 0.4
        answers = self.ledger.admit_tools(owner, batch, all_or_nothing=whole)
        assert self.ledger.admit_tools(owner, batch, all_or_nothing=not whole) == answers, self._says(
            "a repeat"
        )
        taken = [answer is None for answer in answers]
        assert not whole or len(set(taken)) == 1, self._says("half a batch")
        for (attempt, tool), counted in zip(batch, taken, strict=True):
            self.attempts[owner, attempt] = (tool, counted)

    # --- what must hold -----------------------------------------------------------------------------------

    def _check(self, when: str) -> None:
        for name in self.names:
            snapshot = self.ledger.snapshot(name)
            self._check_account(name, snapshot, when)

    def _check_account(self, name: str, snapshot: BudgetSnapshot, when: str) -> None:
        """Against a recount. What is used above a limit came from a provider, never from an admission."""
        mine = [call for call in self.calls if self._is_below(call.owner, name)]
        self._check_calls(mine, snapshot.model_calls, snapshot.tokens, f"{name} {when}")
        for role, shown in snapshot.roles.items():
            of_role = [call for call in mine if call.role == role]
            self._check_calls(of_role, shown.model_calls, shown.tokens, f"{name} {role} {when}")
        if snapshot.money is not None:
            used = sum(call.money for call in mine if call.state in ("exact", "estimated", "unknown"))
            held = sum(call.money for call in mine if call.state == "open")
            found = units_of(snapshot.money.used), units_of(snapshot.money.reserved)
            assert found == (used, held), self._says(f"money of {name} {when}: {found}, not {(used, held)}")
        taken = [
            tool
            for (owner, _), (tool, counted) in self.attempts.items()
            if counted and self._is_below(owner, name)
        ]
        assert snapshot.tool_calls.used == len(taken), self._says(f"attempts of {name} {when}")
        for tool, limits in ((None, snapshot.tool_calls), *snapshot.tools.items()):
            used = len(taken) if tool is None else taken.count(tool)
            within = limits.limit is None or used <= limits.limit
            assert limits.used == used, self._says(f"attempts of {tool} {when}")
            assert within, self._says(f"too many attempts of {tool} {when}")

    def _check_admission(self, call: Call) -> None:
        """At this moment no limit on the way up is exceeded, and what is kept back is still there."""
        for name in self.names:
            if not self._is_below(call.owner, name):
                continue
            snapshot = self.ledger.snapshot(name)
            shown: list[BudgetSnapshot | RoleSnapshot] = [snapshot, snapshot.roles[call.role]]
            for each in shown:
                for resource in (each.model_calls, each.tokens):
                    over = resource.limit is not None and resource.used + resource.reserved > resource.limit
                    assert not over, self._says(f"an admission of {name} beyond a limit: {resource}")
                money = each.money
                if money is not None and money.limit is not None:
                    within = money.used + money.reserved <= money.limit
                    assert within, self._says(f"an admission of {name} beyond a limit: {money}")
            if call.kind != "finishing" and call.tokens:
                budgets = self.budgets[name]
                finishing = [each for each in self.calls if each.kind == "finishing" and each.state != "gone"]
                mine = [each for each in finishing if self._is_below(each.owner, name)]
                for kept, resource, used in (
                    (budgets.finishing_model_calls, snapshot.model_calls, len(mine)),
                    (budgets.finishing_tokens, snapshot.tokens, sum(each.tokens for each in mine)),
                ):
                    left = resource.remaining
                    taken = left is not None and left < kept - used
                    assert not taken, self._says(f"an ordinary call of {name} took what is kept back")

    def _check_calls(
        self, calls: list[Call], shown: ResourceSnapshot, tokens: ResourceSnapshot, where: str
    ) -> None:
        used = sum(call.state in ("open", "exact", "estimated", "unknown") for call in calls)
        slots = sum(call.state == "slot" for call in calls)
        assert (shown.used, shown.reserved) == (used, slots), self._says(f"calls of {where}")
        assert shown.limit is None or used + slots <= shown.limit, self._says(f"too many calls: {where}")
        charged = sum(call.tokens for call in calls if call.state in ("exact", "estimated", "unknown"))
        held = sum(call.tokens for call in calls if call.state == "open")
        assert (tokens.used, tokens.reserved) == (charged, held), self._says(f"tokens of {where}")
        ours = sum(call.tokens for call in calls if call.state in ("open", "estimated", "unknown"))
        assert tokens.limit is None or ours <= tokens.limit, self._says(f"too many tokens: {where}")

    def _is_below(self, owner: str, name: str) -> bool:
        at: str | None = owner
        while at is not None and at != name:
            at = self.parents.get(at)
        return at == name

    def _end(self) -> None:
        for name in self.names:
            self._lose(name)
        self._check("at the end")
        assert self.ledger.open_reservations == 0, self._says("a reservation is left")
        report = self.ledger.report()
        for name in self.names:
            self.ledger.close_account(name)
        assert self.ledger.report().complete, self._says("something is open")
        exact = sum(call.state == "exact" for call in self.calls)
        assert report.tree.exact_calls == exact, self._says("the report's exact calls")
        assert report.tree.charged_tokens == self.ledger.snapshot().tokens.used, self._says(
            "the report's tokens"
        )

    def _says(self, what: str) -> str:
        return f"seed {self.seed}: {what}"


def walk(first: int, count: int) -> tuple[int, int]:
    """``count`` walks, with the seeds from ``first`` on; the calls that were admitted and refused.

    Raises:
        AssertionError: an overshoot or a leak, with the seed of the walk.
    """
    admitted = refused = 0
    for seed in range(first, first + count):
        one = Walk(seed)
        one.run()
        admitted += one.admitted
        refused += one.refused
    return admitted, refused
