"""The ledger under random interleavings, losses and repeats, against a model that recounts everything."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule

from benchmarks.ledger_walk import walk
from retinue import Budgets, BudgetSnapshot, Usage
from retinue.budgets import ResourceSnapshot
from retinue.errors import BudgetExhausted
from retinue.ledger import ROOT, BudgetLedger, ModelGrant

limits = st.none() | st.integers(0, 60)
budgets = st.builds(
    Budgets,
    max_model_calls=st.none() | st.integers(0, 6),
    max_tool_calls=st.none() | st.integers(0, 4),
    max_tokens=limits,
)


@dataclass
class Call:
    """One model call, as a careful bookkeeper sees it."""

    owner: str
    call_id: str
    projected_input: int
    requested: int | None
    grant: ModelGrant | None
    """``None`` when it was refused."""
    refusal: str = ""
    state: Literal["reserved", "exact", "estimated", "unknown", "released", "refused"] = "reserved"
    used: int = 0

    @property
    def projection(self) -> int:
        assert self.grant is not None
        return self.projected_input + (self.grant.max_tokens or 0)


@dataclass
class Member:
    name: str
    parent: str | None
    budgets: Budgets
    tools: dict[str, bool] = field(default_factory=dict)
    usage: Usage = field(default_factory=Usage)


class LedgerMachine(RuleBasedStateMachine):
    """Several participants of a tree, each with limits of its own, and messages in any order."""

    names: Bundle[str] = Bundle("names")
    made: Bundle[tuple[str, str]] = Bundle("made")

    @initialize(target=names, root=budgets)
    def open(self, root: Budgets) -> str:
        self.ledger = BudgetLedger(root)
        self.members = {ROOT: Member(ROOT, None, root)}
        self.calls: dict[tuple[str, str], Call] = {}
        return ROOT

    # --- what the bookkeeper knows ---

    def above(self, name: str) -> list[Member]:
        """The member and those above it, innermost first."""
        chain = []
        at: str | None = name
        while at is not None:
            chain.append(self.members[at])
            at = self.members[at].parent
        return chain

    def calls_below(self, name: str) -> list[Call]:
        return [
            call
            for call in self.calls.values()
            if call.state != "refused" and name in (member.name for member in self.above(call.owner))
        ]

    def tools_below(self, name: str) -> int:
        return sum(
            sum(member.tools.values())
            for member in self.members.values()
            if name in (other.name for other in self.above(member.name))
        )

    def expected(self, name: str) -> BudgetSnapshot:
        calls = self.calls_below(name)
        limit = self.members[name].budgets

        def resource(limit: int | None, used: int, reserved: int) -> ResourceSnapshot:
            remaining = None if limit is None else max(0, limit - used - reserved)
            return ResourceSnapshot(limit=limit, used=used, reserved=reserved, remaining=remaining)

        counted = sum(call.state != "released" for call in calls)
        return BudgetSnapshot(
            model_calls=resource(limit.max_model_calls, counted, 0),
            tool_calls=resource(limit.max_tool_calls, self.tools_below(name), 0),
            tokens=resource(
                limit.max_tokens,
                sum(call.used for call in calls),
                sum(call.projection for call in calls if call.state == "reserved"),
            ),
            unknown_usage_calls=sum(call.state in ("unknown", "estimated") for call in calls),
            estimated_usage_calls=sum(call.state == "estimated" for call in calls),
            open_calls=sum(call.state == "reserved" for call in calls),
        )

    # --- what participants do ---

    @rule(target=names, parent=names, own=st.none() | budgets)
    def spawn(self, parent: str, own: Budgets | None) -> str:
        name = f"child-{len(self.members)}"
        self.ledger.open_account(name, parent, own)
        self.members[name] = Member(name, parent, own or Budgets())
        return name

    @rule(name=names)
    def spawn_again(self, name: str) -> None:
        before = self.ledger.snapshot(name)
        if name != ROOT:
            self.ledger.open_account(name, self.members[name].parent or ROOT, Budgets(max_tokens=10**6))
        assert self.ledger.snapshot(name) == before

    @rule(
        target=made,
        name=names,
        projected=st.integers(0, 20),
        requested=st.none() | st.integers(1, 30),
    )
    def admit_model(self, name: str, projected: int, requested: int | None) -> tuple[str, str]:
        call = Call(name, f"call-{len(self.calls)}", projected, requested, None)
        expected = self.expected_grant(name, projected, requested)
        try:
            call.grant = self.ledger.admit_model(name, call.call_id, projected, requested)
        except BudgetExhausted as refusal:
            call.state, call.refusal = "refused", str(refusal)
            assert expected is None
        else:
            assert call.grant == expected
        self.calls[name, call.call_id] = call
        if call.state != "refused":
            for member in self.above(name):  # invariant 2, at the moment of admission
                tokens = self.ledger.snapshot(member.name).tokens
                assert tokens.limit is None or tokens.used + tokens.reserved <= tokens.limit
                found = self.ledger.snapshot(member.name).model_calls
                assert found.limit is None or found.used + found.reserved <= found.limit
        return (name, call.call_id)

    def expected_grant(self, name: str, projected: int, requested: int | None) -> ModelGrant | None:
        caps = [] if requested is None else [requested]
        for member in self.above(name):
            snapshot = self.expected(member.name)
            if snapshot.model_calls.remaining is not None and snapshot.model_calls.remaining < 1:
                return None
            if snapshot.tokens.remaining is not None:
                if snapshot.tokens.remaining <= projected:
                    return None
                caps.append(snapshot.tokens.remaining - projected)
        return ModelGrant(max_tokens=min(caps) if caps else None)

    @rule(which=made, projected=st.integers(0, 20))
    def admit_again(self, which: tuple[str, str], projected: int) -> None:
        """The message arrives a second time: the first answer, and no second effect."""
        call = self.calls[which]
        before = {name: self.ledger.snapshot(name) for name in self.members}
        if call.state == "refused":
            with pytest.raises(BudgetExhausted, match=re.escape(call.refusal)):
                self.ledger.admit_model(*which, projected, call.requested)
        else:
            assert self.ledger.admit_model(*which, projected, call.requested) == call.grant
        assert {name: self.ledger.snapshot(name) for name in self.members} == before

    @rule(
        which=made,
        usage=st.none() | st.builds(Usage, input_tokens=st.integers(0, 90)),
        started=st.booleans(),
        estimated=st.none() | st.just(Usage(output_tokens=1)),
    )
    def settle(
        self, which: tuple[str, str], usage: Usage | None, started: bool, estimated: Usage | None
    ) -> None:
        """Exact, estimated, unknown or never started; the first, a late or a repeated message."""
        call = self.calls[which]
        if call.state == "refused":
            return
        self.ledger.settle_model(*which, usage, started=started, estimated=estimated)
        if call.state in ("exact", "released") or (call.state != "reserved" and usage is None):
            return
        if usage is not None:
            call.state, call.used = "exact", usage.total_tokens
            self.members[call.owner].usage += usage
        elif started:
            call.state = "unknown" if estimated is None else "estimated"
            call.used = call.projection
        else:
            call.state, call.used = "released", 0

    @rule(name=names)
    def lose(self, name: str) -> None:
        """The participant's process died: what it held is charged."""
        for _ in range(2):
            self.ledger.lose(name)
        for call in self.calls.values():
            if call.owner == name and call.state == "reserved":
                call.state, call.used = "unknown", call.projection

    @rule(name=names)
    def admit_tool(self, name: str) -> None:
        call_id = f"tool-{sum(len(member.tools) for member in self.members.values())}"
        fits = all(
            member.budgets.max_tool_calls is None
            or self.tools_below(member.name) < member.budgets.max_tool_calls
            for member in self.above(name)
        )
        assert (self.ledger.admit_tool(name, call_id, "look") is None) is fits
        self.members[name].tools[call_id] = fits

    @rule(name=names)
    def admit_tool_again(self, name: str) -> None:
        for call_id, first in self.members[name].tools.items():
            assert (self.ledger.admit_tool(name, call_id, "look") is None) is first

    # --- what must always hold ---

    @invariant()
    def every_account_is_as_the_bookkeeper_says(self) -> None:
        for name in self.members:
            # Roles and tools are recounted by the walks of benchmarks/ledger_walk.py.
            snapshot = msgspec.structs.replace(self.ledger.snapshot(name), roles={}, tools={})
            assert snapshot == self.expected(name)

    @invariant()
    def nothing_is_negative(self) -> None:
        for name in self.members:
            snapshot = self.ledger.snapshot(name)
            for resource in (snapshot.model_calls, snapshot.tool_calls, snapshot.tokens):
                assert resource.used >= 0
                assert resource.reserved >= 0
                assert resource.remaining is None or resource.remaining >= 0
            assert snapshot.unknown_usage_calls >= 0

    @invariant()
    def usage_is_the_evidence(self) -> None:
        total = Usage()
        for member in self.members.values():
            assert self.ledger.usage_of(member.name) == member.usage
            total += member.usage
        assert self.ledger.usage == total

    @invariant()
    def open_reservations_are_counted(self) -> None:
        reserved = [call for call in self.calls.values() if call.state == "reserved"]
        assert self.ledger.open_reservations == len(reserved)

    def teardown(self) -> None:
        """When all are lost, nothing is reserved any more, and the sum of what was charged is the total."""
        if not hasattr(self, "ledger"):
            return
        for name in self.members:
            self.lose(name)
        for name in self.members:
            snapshot = self.ledger.snapshot(name)
            assert snapshot.tokens.reserved == 0
            assert snapshot.tokens.used == sum(call.used for call in self.calls_below(name))
        assert self.ledger.open_reservations == 0


LedgerMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestLedgerMachine = LedgerMachine.TestCase


@pytest.mark.parametrize("first", range(0, 2_000, 500))
def test_random_interleavings_neither_overshoot_nor_leak(first: int) -> None:
    """A short part of what ``make soak`` walks a million times."""
    admitted, refused = walk(first, 500)
    assert admitted > 500
    assert refused > 500
