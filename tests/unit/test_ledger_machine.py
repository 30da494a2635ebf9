"""The ledger under any interleaving that hypothesis finds, against books that add up every call anew."""

from __future__ import annotations

from decimal import Decimal
from typing import NamedTuple

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, precondition, rule

from benchmarks.ledger_audit import Audit
from benchmarks.ledger_books import Grant, Key
from benchmarks.ledger_walk import MODELS, PRICES, ROLES, TOOLS, walk
from retinue import Budgets, RoleLimits, Usage
from retinue.budgets import CallKind
from retinue.ledger import ROOT

amounts = st.integers(50_000, 400_000).map(lambda billionths: Decimal(billionths).scaleb(-9))
roles = st.sampled_from(ROLES)
kinds: st.SearchStrategy[CallKind] = st.sampled_from(("task", "control", "finishing"))
usages = st.builds(
    Usage,
    input_tokens=st.integers(0, 40),
    output_tokens=st.integers(0, 40),
    cached_tokens=st.integers(0, 50),  # more than the input, where a provider counts strangely
)


class Order(NamedTuple):
    """A model call that somebody wants to make."""

    role: str
    kind: CallKind
    model: str
    projected: int
    requested: int | None


orders = st.builds(
    Order,
    roles,
    kinds,
    st.sampled_from(MODELS),
    st.integers(0, 15),
    st.integers(1, 30) | st.none(),
)


class Ending(NamedTuple):
    """How a call ended: exact, estimated, unknown or never started."""

    usage: Usage | None
    started: bool
    estimated: Usage | None


endings = st.builds(
    Ending,
    usages | st.none(),
    st.sampled_from((True, True, False)),
    st.none() | st.just(Usage(output_tokens=1)),
)


@st.composite
def budgets(draw: st.DrawFn, *, priced: bool) -> Budgets:
    """Limits of every kind; most of them are not there, and few are so low that nothing happens."""

    def limit(*some: int) -> int | None:
        return draw(st.sampled_from((None, None, None, *some)))

    def cost() -> Decimal | None:
        return draw(st.none() | amounts) if priced else None

    calls, tokens = limit(3, 6, 12), limit(40, 120, 300)
    return Budgets(
        max_model_calls=calls,
        max_tokens=tokens,
        max_tool_calls=limit(0, 3, 6),
        max_cost=cost(),
        finishing_model_calls=draw(st.sampled_from((0, 3 if calls is None else calls // 2))),
        finishing_tokens=draw(st.sampled_from((0, 60 if tokens is None else tokens // 2))),
        tools={tool: number for tool in TOOLS if (number := limit(0, 1, 3)) is not None},
        roles={
            role: RoleLimits(max_model_calls=limit(1, 3, 5), max_tokens=limit(30, 80, 150), max_cost=cost())
            for role in ROLES
            if draw(st.booleans())
        },
    )


def more(limit: int | None, by: int) -> int | None:
    return None if limit is None else limit + by


class LedgerMachine(RuleBasedStateMachine):
    """Several participants of a tree, each with limits of its own, and messages in any order."""

    names: Bundle[str] = Bundle("names")

    @initialize(target=names, data=st.data(), priced=st.sampled_from((True, True, False)))
    def open(self, data: st.DataObject, priced: bool) -> str:
        self.priced, self.count = priced, 0
        self.limits = data.draw(budgets(priced=priced))
        self.audit = Audit(self.limits, PRICES if priced else None)
        return ROOT

    def fresh(self, what: str) -> str:
        self.count += 1
        return f"{what}-{self.count}"

    def owner(self, name: str) -> str:
        """A participant that is still there: runs that went on have left theirs behind."""
        return name if name in self.audit.books.members else ROOT

    def known(self, data: st.DataObject) -> Key | None:
        """A call in any state: from a slot, refused, settled long ago."""
        calls = self.audit.books.calls
        return data.draw(st.sampled_from(list(calls))) if calls else None

    # --- participants ---

    @rule(target=names, parent=names, data=st.data(), own=st.booleans())
    def spawn(self, parent: str, data: st.DataObject, own: bool) -> str:
        name = self.fresh("child")
        limits = data.draw(budgets(priced=self.priced)) if own else None
        self.audit.open_account(name, self.owner(parent), limits)
        return name

    @rule(name=names)
    def lose(self, name: str) -> None:
        """Its process died."""
        for _ in range(2):
            self.audit.lose(self.owner(name))

    @rule()
    def close(self) -> None:
        """All have ended, as far as anybody knows; calls may still be open."""
        for name in self.audit.books.members:
            self.audit.close(name)
        self.audit.check_report()

    # --- model calls ---

    @rule(name=names, wanted=st.lists(orders, min_size=1, max_size=4))
    def admit(self, name: str, wanted: list[Order]) -> None:
        for order in wanted:
            self.audit.admit((self.owner(name), self.fresh("call")), *order)

    @rule(
        name=names,
        order=orders,
        role=roles,
        kind=kinds,
        then=st.sampled_from(("wait", "move and admit", "admit as another")),
    )
    def reserve(self, name: str, order: Order, role: str, kind: CallKind, then: str) -> None:
        """And what is admitted for the slot may be another call than it was reserved for."""
        key = self.owner(name), self.fresh("call")
        for _ in range(2):
            self.audit.reserve(key, role, kind if then == "admit as another" else order.kind)
        if then == "move and admit":
            self.audit.move(key, order.role)
        if then != "wait":
            self.audit.admit(key, *order)

    @rule(data=st.data(), role=roles, kind=kinds)
    def reserve_again(self, data: st.DataObject, role: str, kind: CallKind) -> None:
        if key := self.known(data):
            self.audit.reserve(key, role, kind)

    @rule(data=st.data(), role=roles | st.none())
    def move_or_release(self, data: st.DataObject, role: str | None) -> None:
        if key := self.known(data):
            if role is None:
                self.audit.release(key)
            else:
                self.audit.move(key, role)

    @rule(data=st.data(), order=orders, same=st.sampled_from((True, True, False)))
    def admit_known(self, data: st.DataObject, order: Order, same: bool) -> None:
        """From a slot, or a repeat; mostly under the role and of the kind that the call has."""
        if key := self.known(data):
            call = self.audit.books.calls[key]
            self.audit.admit(key, *(order._replace(role=call.role, kind=call.kind) if same else order))

    @rule(data=st.data(), ends=st.lists(endings, min_size=1, max_size=4))
    def settle(self, data: st.DataObject, ends: list[Ending]) -> None:
        """The first, a late or a repeated message."""
        admitted = [key for key, call in self.audit.books.calls.items() if isinstance(call.answer, Grant)]
        for ending in ends if admitted else ():
            usage, started, estimated = ending
            key = data.draw(st.sampled_from(admitted))
            self.audit.settle(key, usage, started=started, estimated=estimated)

    # --- tool attempts ---

    @rule(name=names, numbers=st.lists(st.integers(0, 15), min_size=1, max_size=4), whole=st.booleans())
    def attempt(self, name: str, numbers: list[int], whole: bool) -> None:
        """So few ids that many are repeats, also in one batch."""
        batch = [(f"attempt-{number}", TOOLS[number % len(TOOLS)]) for number in numbers]
        self.audit.attempt(self.owner(name), batch, whole=whole)

    # --- the whole run ---

    @precondition(lambda self: len(self.audit.books.calls) > 3)
    @rule(data=st.data(), by=st.integers(0, 4))
    def go_on(self, data: st.DataObject, by: int) -> None:
        """It ends, and another run goes on with a top-up."""
        limits = self.limits
        self.limits = Budgets(
            max_model_calls=more(limits.max_model_calls, by),
            max_tokens=more(limits.max_tokens, by * 20),
            max_tool_calls=more(limits.max_tool_calls, by),
            max_cost=None if limits.max_cost is None else limits.max_cost + data.draw(amounts),
            finishing_model_calls=limits.finishing_model_calls,
            finishing_tokens=limits.finishing_tokens,
            tools={tool: limit + by for tool, limit in limits.tools.items()},
            roles=limits.roles,
        )
        self.audit.go_on(self.limits)

    @rule()
    def read_the_report(self) -> None:
        self.audit.check_report()

    @invariant()
    def the_ledger_says_what_the_books_say(self) -> None:
        self.audit.check()

    def teardown(self) -> None:
        if hasattr(self, "audit"):
            self.audit.end()


LedgerMachine.TestCase.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
TestLedgerMachine = LedgerMachine.TestCase


@pytest.mark.parametrize("first", range(0, 1_000, 250))
def test_random_interleavings_neither_overshoot_nor_leak(first: int) -> None:
    """A short part of what ``make soak`` walks a million times."""
    admitted, refused = walk(first, 250)
    assert admitted > 250
    assert refused > 250
