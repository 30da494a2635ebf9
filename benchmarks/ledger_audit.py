"""A ledger beside the books of a clerk: a wrong sum, an overshoot, a leak and a needless refusal all show."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal

from benchmarks.ledger_books import HELD, Books, Call, Grant, Key, Refusal, refused
from retinue.budgets import Budgets, BudgetSnapshot, CallKind, RoleLimits, RoleSnapshot, Usage
from retinue.errors import BudgetExhausted, RetinueError
from retinue.ledger import ROOT, BudgetLedger
from retinue.prices import PriceTable


class Audit:
    """Does everything twice, in a ledger and in the books, and compares each answer.

    Every method raises ``AssertionError`` where they differ, or where the ledger let a limit be exceeded.
    """

    def __init__(self, budgets: Budgets, prices: PriceTable | None = None) -> None:
        self.ledger = BudgetLedger(budgets, prices=prices)
        self.books = Books(budgets, prices)
        self.admitted = 0
        self.refused = 0

    def open_account(self, name: str, parent: str, budgets: Budgets | None) -> None:
        self.ledger.open_account(name, parent, budgets)
        self.ledger.open_account(name, ROOT, Budgets(max_tokens=0))  # a repeat, which changes nothing
        self.books.open_account(name, parent, budgets)
        above = [self.books.members[each].budgets for each in self.books.members[name].path]
        limits = list[Budgets | RoleLimits](above)
        for each in above:
            limits += each.roles.values()
        bounded = any(limit.max_tokens is not None or limit.max_cost is not None for limit in limits)
        _same(f"limits of {name}", self.ledger.limits_tokens(name), bounded)

    def reserve(self, key: Key, role: str, kind: CallKind) -> bool:
        """Whether there was a call left."""
        expected = self.books.reserve(key, role, kind)
        try:
            self.ledger.reserve_slot(*key, role, kind=kind)
            found = None
        except RetinueError as error:
            found = _told(error)
        return self._decided(f"a slot for {key}", found, expected)

    def move(self, key: Key, role: str) -> bool:
        """Whether there was a call left under the other role."""
        expected = self.books.move(key, role)
        try:
            self.ledger.move_slot(*key, role)
            found = None
        except RetinueError as error:
            found = _told(error)
        return self._decided(f"the slot of {key} under {role}", found, expected)

    def release(self, key: Key) -> None:
        self.ledger.release_slot(*key)
        self.books.release(key)

    def admit(
        self, key: Key, role: str, kind: CallKind, model: str, projected: int, requested: int | None
    ) -> bool:
        """Whether the call may be made."""
        repeated = key in self.books.calls and isinstance(self.books.calls[key].answer, Grant)
        expected = self.books.admit(key, role, kind, model, projected, requested)
        try:
            grant = self.ledger.admit_model(*key, projected, requested, role=role, kind=kind, model_id=model)
            found: Grant | Refusal = Grant(grant.max_tokens)
        except RetinueError as error:
            found = _told(error)
        admitted = self._decided(f"the admission of {key}", found, expected)
        if admitted and not repeated:
            self.admitted += 1
            self._within(self.books.calls[key])
        return admitted

    def settle(
        self, key: Key, usage: Usage | None, *, started: bool = True, estimated: Usage | None = None
    ) -> None:
        self.ledger.settle_model(*key, usage, started=started, estimated=estimated)
        self.books.settle(key, usage, started, estimated)

    def lose(self, name: str) -> None:
        self.ledger.lose(name)
        self.books.lose(name)

    def close(self, name: str) -> None:
        self.ledger.close_account(name)
        self.books.members[name].open = False

    def attempt(self, owner: str, batch: Sequence[tuple[str, str]], *, whole: bool) -> None:
        expected = self.books.attempt(owner, batch, whole)
        found = self.ledger.admit_tools(owner, batch, all_or_nothing=whole)
        told = [None if refusal is None else _told(refusal) for refusal in found]
        _same(f"attempts {batch} of {owner!r}", told, expected)

    def go_on(self, budgets: Budgets) -> None:
        """End the run, and go on with another one under these limits."""
        self.end()
        spent = self.ledger.snapshot()
        self.ledger = BudgetLedger(budgets, prices=self.books.prices, carried=spent)
        self.books.go_on(budgets)

    def end(self) -> None:
        """Everybody is lost; nothing is left reserved, and the report is final."""
        for name in self.books.members:
            self.lose(name)
            self.close(name)
        self.check()
        _same("reservations at the end", self.ledger.open_reservations, 0)
        self.check_report()
        assert self.ledger.report().complete, "something is still open"

    # --- what must hold -----------------------------------------------------------------------------------

    def check(self) -> None:
        """Every total of every account."""
        for name in self.books.members:
            _same(f"snapshot of {name!r}", self.ledger.snapshot(name), self.books.snapshot(name))
        held = sum(call.state in HELD for call in self.books.calls.values())
        _same("open reservations", self.ledger.open_reservations, held)

    def check_report(self) -> None:
        """Everything else that the ledger tells."""
        books, ledger = self.books, self.ledger
        _same("report", ledger.report("root"), books.report("root"))
        for name in books.members:
            _same(f"usage of {name!r}", ledger.usage_of(name), books.figures([name]).usage)
        whole = books.figures(books.members)
        _same("usage", ledger.usage, whole.usage)
        started = whole.exact_calls + whole.estimated_calls + whole.unknown_calls
        _same("calls started", ledger.model_calls_started, started)
        answers = [call.answer for call in books.calls.values() if call.state == "refused"]
        answers += [refusal for _, refusal in books.attempts.values()]
        no = sum(isinstance(each, Refusal) and each.resource != "unsupported" for each in answers)
        spending = ledger.spending
        _same("spending", (spending.refusals, spending.tool_calls), (no, whole.tool_attempts))

    def _decided(self, what: str, found: object, expected: object) -> bool:
        _same(what, found, expected)
        self.refused += isinstance(expected, Refusal)
        return not isinstance(expected, Refusal)

    def _within(self, call: Call) -> None:
        """At the moment of an admission no limit on the way is exceeded."""
        for name in self.books.members[call.owner].path:
            snapshot = self.ledger.snapshot(name)
            levels: tuple[BudgetSnapshot | RoleSnapshot, ...] = (snapshot, snapshot.roles[call.role])
            for level in levels:
                for resource in (level.model_calls, level.tokens):
                    taken = resource.used + resource.reserved
                    assert resource.limit is None or taken <= resource.limit, f"too much: {name!r}, {level}"
                money = level.money
                if money is not None and money.limit is not None and call.money:
                    assert money.used + money.reserved <= money.limit, f"too much money: {name!r}, {level}"


def _told(error: RetinueError) -> Refusal:
    if not isinstance(error, BudgetExhausted):
        return Refusal(error.code)
    return refused(error.resource, error.scope, *(Decimal(error.data[each]) for each in Refusal._fields[2:]))


def _same(what: str, found: object, expected: object) -> None:
    assert found == expected, f"{what}: the ledger says {found}, the books {expected}"
