"""The ledger's answers, one by one; random interleavings are in test_ledger_machine.py."""

from __future__ import annotations

import pytest

from retinue import Budgets, Usage
from retinue.errors import BudgetExhausted, RetinueError
from retinue.ledger import ROOT, BudgetLedger, ModelGrant


def test_an_admission_takes_from_every_account_above() -> None:
    ledger = BudgetLedger(Budgets(max_tokens=100, max_model_calls=3))
    ledger.open_account("child", ROOT, Budgets(max_tokens=50))
    ledger.open_account("grandchild", "child", Budgets(max_model_calls=1))
    assert ledger.admit_model("grandchild", "1", 10, 100) == ModelGrant(max_tokens=40)
    assert [ledger.snapshot(name).tokens.reserved for name in (ROOT, "child", "grandchild")] == [50] * 3
    with pytest.raises(BudgetExhausted) as refused:
        ledger.admit_model("grandchild", "2", 0, 1)
    assert (refused.value.resource, refused.value.remaining) == ("model_calls", 0)
    with pytest.raises(BudgetExhausted) as refused:
        ledger.admit_model("child", "1", 0, 1)
    assert (refused.value.resource, refused.value.remaining) == ("tokens", 0)
    assert ledger.admit_model(ROOT, "1", 0, None) == ModelGrant(max_tokens=50)


def test_a_refusal_reserves_nothing_anywhere_and_says_why() -> None:
    ledger = BudgetLedger(Budgets(max_tokens=10))
    ledger.open_account("child", ROOT, Budgets(max_tokens=1000))
    with pytest.raises(BudgetExhausted) as refused:
        ledger.admit_model("child", "1", 10, 1)
    assert "10 tokens are left and the input alone needs 10" in str(refused.value)
    assert "limit 10, used 0, reserved 0" in str(refused.value)
    for name in (ROOT, "child"):
        snapshot = ledger.snapshot(name)
        assert (snapshot.tokens.reserved, snapshot.model_calls.used) == (0, 0)


def test_late_usage_replaces_the_charge_once() -> None:
    ledger = BudgetLedger(Budgets(max_tokens=100))
    ledger.open_account("child", ROOT, None)
    ledger.admit_model("child", "1", 10, 20)
    ledger.lose("child")
    assert (ledger.snapshot().tokens.used, ledger.snapshot().unknown_usage_calls) == (30, 1)
    for _ in range(2):
        ledger.settle_model("child", "1", Usage(input_tokens=11, output_tokens=1))
        assert (ledger.snapshot().tokens.used, ledger.snapshot().unknown_usage_calls) == (12, 0)
    assert ledger.usage_of("child") == ledger.usage == Usage(input_tokens=11, output_tokens=1)
    assert ledger.model_calls_started == 1


def test_what_was_never_admitted_cannot_be_settled() -> None:
    ledger = BudgetLedger(Budgets())
    with pytest.raises(RetinueError, match="never admitted"):
        ledger.settle_model(ROOT, "1", None)
    with pytest.raises(RetinueError, match="no account"):
        ledger.admit_model("stranger", "1", 0, None)
    with pytest.raises(RetinueError, match="no account"):
        ledger.admit_tool("stranger", "1")


def test_ids_of_one_participant_are_not_those_of_another() -> None:
    ledger = BudgetLedger(Budgets(max_tool_calls=2, max_model_calls=2))
    ledger.open_account("child", ROOT, None)
    for name in (ROOT, "child"):
        ledger.admit_model(name, "same", 1, 1)
        assert ledger.admit_tool(name, "same")
    snapshot = ledger.snapshot()
    assert (snapshot.model_calls.used, snapshot.tool_calls.used) == (2, 2)
    assert not ledger.admit_tool(ROOT, "other")
