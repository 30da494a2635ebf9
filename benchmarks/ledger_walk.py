"""One random interleaving of a ledger, from a seed, for ``make soak``; and the same in short for the tests.

Up to five participants with limits of their own, and in any order: slots and calls of two roles, three kinds
and five models; tool attempts in batches; settlements that are exact, estimated, unknown, early and late;
repeats of all of it; participants that are lost; runs that end and go on with a top-up. Every answer is
compared with that of the books (:mod:`benchmarks.ledger_audit`), and at every third step and at the end so
are all totals.
"""

from __future__ import annotations

import random
from decimal import Decimal

from benchmarks.ledger_audit import Audit
from benchmarks.ledger_books import CHARGED, Call, Key
from retinue.budgets import Budgets, CallKind, RoleLimits, Usage
from retinue.prices import Price, PriceTable

ROLES = ("main", "judge")
KINDS: tuple[CallKind, ...] = ("task", "task", "control", "finishing")
TOOLS = ("look", "pay")
MODELS = ("cheap", "dear", "talkative", "free", "unpriced")
PRICES = PriceTable(
    version="walk",
    models={
        "cheap": Price(input=Decimal("0.3"), output=Decimal(1), cached_input=Decimal("0.45")),
        "dear": Price(input=Decimal(3), output=Decimal(15), cached_input=Decimal("0.3701")),
        "talkative": Price(input=Decimal(7), output=Decimal(0)),
        "free": Price(input=Decimal(0), output=Decimal(0)),
    },
)
STEPS = 14


class Walk:
    """One random interleaving."""

    def __init__(self, seed: int, *, steps: int = STEPS) -> None:
        self.random = random.Random(seed)
        self.steps = steps
        self.prices = PRICES if self.random.random() < 0.5 else None
        self.budgets = self._budgets()
        """Of the root."""
        self.audit = Audit(self.budgets, self.prices)
        self.made = 0
        """Ids that were made up, of any kind."""

    def run(self) -> Audit:
        """Walk to the end. Raises ``AssertionError`` for an overshoot, a leak or a wrong sum."""
        for step in range(self.steps):
            self._step()
            if step % 3 == 0:
                self.audit.check()
        self.audit.end()
        return self.audit

    def _step(self) -> None:
        draw, calls = self.random, self.audit.books.calls
        held = [key for key, call in calls.items() if call.state in ("slot", "open")]
        late = [key for key, call in calls.items() if call.state in CHARGED]
        names = list(self.audit.books.members)
        what = draw.random()
        if what < 0.12 and len(names) < 5:
            own = self._budgets() if draw.random() < 0.5 else None
            self.audit.open_account(self._id("child"), draw.choice(names), own)
        elif what < 0.5 or not held:
            self._begin(draw.choice(names))
        elif what < 0.83:
            key = draw.choice(held)
            self._go_on(key, calls[key])
        elif what < 0.89 and late:
            self._settle(draw.choice(late), self._usage())
        elif what < 0.95:
            self._attempt(draw.choice(names))
        elif what < 0.99:
            self.audit.lose(draw.choice(names))
        else:
            self.budgets = self._topped_up(self.budgets)
            self.audit.go_on(self.budgets)

    def _begin(self, owner: str) -> None:
        draw = self.random
        key, role = (owner, self._id("call")), draw.choice(ROLES)
        kind = draw.choice(KINDS)
        if draw.random() < 0.4:
            for _ in range(draw.choice((1, 1, 2))):
                self.audit.reserve(key, role, kind)
        else:
            self._admit(key, Call(owner, role, kind))

    def _go_on(self, key: Key, call: Call) -> None:
        what = self.random.random()
        if call.state == "open":
            usage = self._usage() if what < 0.6 else None
            self._settle(key, usage, started=self.random.random() < 0.7)
        elif what < 0.6:
            self._admit(key, call)
        elif what < 0.8:
            self.audit.move(key, self.random.choice(ROLES))
        else:
            self.audit.release(key)

    def _admit(self, key: Key, call: Call) -> None:
        draw = self.random
        role = call.role if draw.random() < 0.9 else draw.choice(ROLES)
        kind = call.kind if draw.random() < 0.9 else draw.choice(KINDS)
        model = draw.choice(MODELS)
        projected, wanted = draw.randrange(20), draw.choice((None, draw.randrange(1, 40)))
        for _ in range(draw.choice((1, 1, 2))):
            self.audit.admit(key, role, kind, model, projected, wanted)

    def _settle(self, key: Key, usage: Usage | None, *, started: bool = True) -> None:
        estimated = Usage(output_tokens=3) if usage is None and self.random.random() < 0.3 else None
        for _ in range(self.random.choice((1, 1, 2))):
            self.audit.settle(key, usage, started=started, estimated=estimated)

    def _attempt(self, owner: str) -> None:
        draw = self.random
        batch = [(self._id("attempt"), draw.choice(TOOLS)) for _ in range(draw.randrange(1, 4))]
        whole = draw.random() < 0.4
        self.audit.attempt(owner, batch, whole=whole)
        if draw.random() < 0.5:
            self.audit.attempt(owner, batch, whole=not whole)

    # --- what is drawn ------------------------------------------------------------------------------------

    def _id(self, what: str) -> str:
        self.made += 1
        return f"{what}-{self.made}"

    def _usage(self) -> Usage:
        draw = self.random.randrange
        return Usage(input_tokens=draw(30), output_tokens=draw(30), cached_tokens=draw(10))

    def _maybe(self, most: int) -> int | None:
        return self.random.randrange(most) if self.random.random() < 0.4 else None

    def _money(self, most: int, share: float) -> Decimal | None:
        if self.prices is None or self.random.random() >= share:
            return None
        return Decimal(self.random.randrange(most)) / 10**6

    def _budgets(self) -> Budgets:
        draw = self.random
        calls, tokens = self._maybe(8), self._maybe(160)
        return Budgets(
            max_model_calls=calls,
            max_tokens=tokens,
            max_tool_calls=self._maybe(5),
            max_cost=self._money(900, 0.3),
            finishing_model_calls=draw.randrange(calls + 1) // 2 if calls else 0,
            finishing_tokens=draw.randrange(tokens + 1) // 2 if tokens else 0,
            tools={tool: draw.randrange(3) for tool in TOOLS if draw.random() < 0.3},
            roles={
                role: RoleLimits(
                    max_model_calls=self._maybe(5), max_tokens=self._maybe(90), max_cost=self._money(500, 0.2)
                )
                for role in ROLES
                if draw.random() < 0.3
            },
        )

    def _topped_up(self, budgets: Budgets) -> Budgets:
        draw = self.random.randrange
        return Budgets(
            max_model_calls=_more(budgets.max_model_calls, draw(4)),
            max_tokens=_more(budgets.max_tokens, draw(60)),
            max_tool_calls=_more(budgets.max_tool_calls, draw(3)),
            max_cost=None if budgets.max_cost is None else budgets.max_cost + Decimal(draw(500)) / 10**6,
            finishing_model_calls=budgets.finishing_model_calls,
            finishing_tokens=budgets.finishing_tokens,
            tools={tool: limit + draw(2) for tool, limit in budgets.tools.items()},
            roles=budgets.roles,
        )


def _more(limit: int | None, by: int) -> int | None:
    return None if limit is None else limit + by


def walk(first: int, count: int) -> tuple[int, int]:
    """``count`` walks, with the seeds from ``first`` on; the calls that were admitted and refused.

    Raises:
        AssertionError: what is wrong, with the seed of the walk.
    """
    admitted = refused = 0
    for seed in range(first, first + count):
        try:
            audit = Walk(seed).run()
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error!r}") from error
        admitted += audit.admitted
        refused += audit.refused
    return admitted, refused
