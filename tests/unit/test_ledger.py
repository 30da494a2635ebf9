"""The ledger's answers, one by one; random interleavings are in test_ledger_machine.py."""

from __future__ import annotations

from decimal import Decimal

import pytest

from retinue import Budgets, Price, PriceTable, RoleLimits, Usage
from retinue.errors import BudgetExhausted, RetinueError, Unsupported
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
        ledger.admit_tool("stranger", "1", "look")


def test_ids_of_one_participant_are_not_those_of_another() -> None:
    ledger = BudgetLedger(Budgets(max_tool_calls=2, max_model_calls=2))
    ledger.open_account("child", ROOT, None)
    for name in (ROOT, "child"):
        ledger.admit_model(name, "same", 1, 1)
        assert ledger.admit_tool(name, "same", "look") is None
    snapshot = ledger.snapshot()
    assert (snapshot.model_calls.used, snapshot.tool_calls.used) == (2, 2)
    assert ledger.admit_tool(ROOT, "other", "look") is not None


def test_c165_a_fresh_ledger_shows_what_is_kept_back() -> None:
    ledger = BudgetLedger(
        Budgets(max_model_calls=12, max_tokens=80_000, finishing_model_calls=1, finishing_tokens=6_000)
    )
    tokens, calls = ledger.snapshot().tokens, ledger.snapshot().model_calls
    assert (tokens.limit, tokens.used, tokens.reserved, tokens.remaining) == (80_000, 0, 0, 80_000)
    assert (tokens.finishing_reserved, tokens.ordinary_remaining) == (6_000, 74_000)
    assert calls.ordinary_remaining == 11


def test_c167_a_started_call_without_usage_is_charged_with_all_that_was_reserved() -> None:
    ledger = BudgetLedger(Budgets(max_tokens=1000))
    ledger.admit_model(ROOT, "1", 100, 500)
    ledger.settle_model(ROOT, "1", None, started=True)
    snapshot = ledger.snapshot()
    assert (snapshot.tokens.used, snapshot.tokens.reserved, snapshot.unknown_usage_calls) == (600, 0, 1)
    assert snapshot.estimated_usage_calls == 0
    assert ledger.usage.total_tokens == 0


def test_an_estimate_is_evidence_beside_the_charge() -> None:
    ledger = BudgetLedger(Budgets(max_tokens=1000))
    ledger.admit_model(ROOT, "1", 100, 500)
    ledger.settle_model(ROOT, "1", None, estimated=Usage(input_tokens=100, output_tokens=7))
    snapshot = ledger.snapshot()
    assert (snapshot.tokens.used, snapshot.unknown_usage_calls, snapshot.estimated_usage_calls) == (600, 1, 1)
    assert ledger.usage == Usage()
    assert ledger.report().tree.estimated.total_tokens == 107


@pytest.mark.parametrize(("projected", "cap"), [(0, 10), (4, 6)])
def test_c168_the_output_cap_is_what_is_left_after_the_input(projected: int, cap: int) -> None:
    ledger = BudgetLedger(Budgets(max_tokens=10))
    assert ledger.admit_model(ROOT, "1", projected, 999) == ModelGrant(max_tokens=cap)
    assert (ledger.snapshot().tokens.reserved, ledger.snapshot().tokens.remaining) == (10, 0)


def test_c177_usage_above_the_limit_is_recorded_whole_and_closes_the_budget() -> None:
    ledger = BudgetLedger(Budgets(max_tokens=10))
    ledger.admit_model(ROOT, "1", 0, 10)
    ledger.settle_model(ROOT, "1", Usage(input_tokens=10, output_tokens=20))
    assert (ledger.snapshot().tokens.used, ledger.snapshot().tokens.remaining) == (30, 0)
    with pytest.raises(BudgetExhausted) as refused:
        ledger.admit_model(ROOT, "2", 0, 1)
    assert refused.value.data == {
        "resource": "tokens", "scope": "run", "limit": 10, "remaining": 0, "needed": 1,
    }  # fmt: skip


def test_c178_without_limits_there_is_none_and_the_caller_has_the_cap_that_it_asked_for() -> None:
    ledger = BudgetLedger(Budgets())
    assert ledger.admit_model(ROOT, "1", 7, None) == ModelGrant(max_tokens=None)
    assert ledger.admit_model(ROOT, "2", 7, 99) == ModelGrant(max_tokens=99)
    snapshot = ledger.snapshot()
    for resource in (snapshot.model_calls, snapshot.tokens, snapshot.tool_calls):
        assert (resource.limit, resource.remaining, resource.ordinary_remaining) == (None, None, None)
    assert (snapshot.model_calls.used, snapshot.tokens.reserved) == (2, 113)


def test_c187_after_an_error_of_the_provider_nothing_is_reserved_and_the_rest_is_there() -> None:
    ledger = BudgetLedger(Budgets(max_model_calls=3, max_tokens=100))
    ledger.admit_model(ROOT, "never there", 10, 20)
    ledger.settle_model(ROOT, "never there", None, started=False)
    assert (ledger.snapshot().tokens.used, ledger.snapshot().model_calls.used) == (0, 0)
    ledger.admit_model(ROOT, "broke", 10, 20)
    ledger.settle_model(ROOT, "broke", None)
    tokens = ledger.snapshot().tokens
    assert (tokens.used, tokens.reserved, tokens.remaining) == (30, 0, 70)
    assert ledger.admit_model(ROOT, "next", 10, None) == ModelGrant(max_tokens=60)
    assert ledger.open_reservations == 1


def test_c188_the_snapshots_of_all_who_look_agree_and_none_changes_afterwards() -> None:
    ledger = BudgetLedger(Budgets(max_tokens=100, roles={"main": RoleLimits(max_tokens=80)}))
    ledger.open_account("child", ROOT, None)
    before = ledger.snapshot()
    ledger.admit_model("child", "1", 10, 20)
    during = ledger.snapshot()
    ledger.admit_tool("child", "1", "look")
    ledger.settle_model("child", "1", Usage(input_tokens=10, output_tokens=5))
    after = ledger.snapshot()
    assert after == ledger.snapshot(ROOT)
    assert after.tokens.used == ledger.snapshot("child").tokens.used == 15
    assert (after.open_calls, during.open_calls) == (0, 1)
    assert (during.roles["main"].tokens.reserved, after.roles["main"].tokens.used) == (30, 15)
    assert (before.roles["main"].tokens.remaining, before.tokens.remaining) == (80, 100)
    assert (during.tools, after.tools["look"].used) == ({}, 1)


def test_finishing_calls_take_what_is_kept_back_first_and_give_back_what_they_leave() -> None:
    ledger = BudgetLedger(Budgets(max_tokens=100, finishing_tokens=40))
    assert ledger.admit_model(ROOT, "task", 10, None) == ModelGrant(max_tokens=50)
    with pytest.raises(BudgetExhausted, match="0 tokens are left but the 40 kept back for finishing calls"):
        ledger.admit_model(ROOT, "more", 0, 1)
    assert ledger.admit_model(ROOT, "end", 10, 20, kind="finishing") == ModelGrant(max_tokens=20)
    assert ledger.snapshot().tokens.finishing_reserved == 10
    ledger.settle_model(ROOT, "end", Usage(input_tokens=5))
    assert ledger.snapshot().tokens.finishing_reserved == 35
    ledger.settle_model(ROOT, "task", Usage(input_tokens=80))  # more than was reserved
    tokens = ledger.snapshot().tokens
    assert (tokens.used, tokens.remaining, tokens.finishing_reserved) == (85, 15, 15)
    with pytest.raises(BudgetExhausted):
        ledger.admit_model(ROOT, "late", 0, 1)
    assert ledger.admit_model(ROOT, "end again", 0, None, kind="finishing") == ModelGrant(max_tokens=15)


def test_a_slot_is_a_call_until_it_is_admitted_or_given_back() -> None:
    ledger = BudgetLedger(Budgets(max_model_calls=1))
    for _ in range(2):
        ledger.reserve_slot(ROOT, "1", "main")
    assert (ledger.snapshot().model_calls.reserved, ledger.snapshot().model_calls.used) == (1, 0)
    with pytest.raises(BudgetExhausted):
        ledger.reserve_slot(ROOT, "2", "main")
    for _ in range(2):
        ledger.release_slot(ROOT, "1")
    ledger.reserve_slot(ROOT, "3", "main")
    assert ledger.admit_model(ROOT, "3", 5, None) == ModelGrant(max_tokens=None)
    assert (ledger.snapshot().model_calls.reserved, ledger.snapshot().model_calls.used) == (0, 1)
    ledger.release_slot(ROOT, "3")  # too late: it is a call by now
    assert ledger.snapshot().model_calls.used == 1


def test_roles_have_limits_of_their_own_and_a_slot_can_move() -> None:
    ledger = BudgetLedger(
        Budgets(max_model_calls=5, roles={"judge": RoleLimits(max_model_calls=1, max_tokens=20)})
    )
    ledger.reserve_slot(ROOT, "1", "main")
    ledger.move_slot(ROOT, "1", "judge")
    assert ledger.admit_model(ROOT, "1", 5, 100, role="judge") == ModelGrant(max_tokens=15)
    ledger.reserve_slot(ROOT, "2", "main")
    with pytest.raises(BudgetExhausted) as refused:
        ledger.move_slot(ROOT, "2", "judge")
    assert (refused.value.scope, refused.value.role) == ("run/role:judge", "judge")
    assert ledger.snapshot().model_calls.reserved == 0
    assert ledger.admit_model(ROOT, "3", 5, 100) == ModelGrant(max_tokens=100)
    shown = ledger.snapshot().roles
    assert (shown["judge"].model_calls.used, shown["main"].model_calls.used) == (1, 1)


PRICES = PriceTable(
    version="2026-12",
    models={
        "p/m": Price(input=Decimal(2), output=Decimal(10)),
        "other": Price(input=Decimal(0), output=Decimal(0)),
    },
)


def test_money_is_reserved_and_settled_exactly_and_bounds_the_output() -> None:
    ledger = BudgetLedger(Budgets(max_cost="0.001"), prices=PRICES)  # type: ignore[arg-type]
    grant = ledger.admit_model(ROOT, "1", 100, None, provider_id="p", model_id="m")
    assert grant == ModelGrant(max_tokens=80)  # 0.0002 for the input leaves 0.0008, at 0.00001 a token
    money = ledger.snapshot().money
    assert money is not None
    assert (money.currency, money.prices) == ("USD", "2026-12")
    assert (money.reserved, money.remaining) == (Decimal("0.001"), Decimal(0))
    with pytest.raises(BudgetExhausted) as refused:
        ledger.admit_model(ROOT, "2", 1, 1, provider_id="p", model_id="m")
    assert refused.value.resource == "money"
    ledger.settle_model(ROOT, "1", Usage(input_tokens=90, output_tokens=7))
    money = ledger.snapshot().money
    assert money is not None
    assert (money.used, money.reserved) == (Decimal("0.00025"), Decimal(0))
    assert ledger.report().tree.cost == Decimal("0.00025")
    assert ledger.admit_model(ROOT, "free", 10**6, None, model_id="other") == ModelGrant(max_tokens=None)


def test_a_model_without_a_price_is_refused_under_a_limit_and_counted_without() -> None:
    limited = BudgetLedger(Budgets(max_cost=1), prices=PRICES)  # type: ignore[arg-type]
    with pytest.raises(Unsupported, match=r"'2026-12' has no price for p/unknown; add it to config\.prices"):
        limited.admit_model(ROOT, "1", 1, 1, provider_id="p", model_id="unknown")
    assert limited.snapshot().model_calls.used == 0
    free = BudgetLedger(Budgets(), prices=PRICES)
    free.admit_model(ROOT, "1", 1, 1, provider_id="p", model_id="unknown")
    money = free.snapshot().money
    assert money is not None
    assert (money.unpriced_calls, money.reserved) == (1, Decimal(0))


def test_a_limit_in_money_of_a_delegate_needs_a_price_table_too() -> None:
    ledger = BudgetLedger(Budgets())
    ledger.open_account("child", ROOT, Budgets(max_cost=1), name="researcher")  # type: ignore[arg-type]
    with pytest.raises(Unsupported, match="delegate:researcher cannot be kept for p/m: there is no"):
        ledger.admit_model("child", "1", 1, 1, provider_id="p", model_id="m")
    assert ledger.admit_model(ROOT, "1", 1, 1, provider_id="p", model_id="m") == ModelGrant(max_tokens=1)


def test_money_of_a_role_and_of_a_delegate_is_refused_under_its_name_in_plain_digits() -> None:
    ledger = BudgetLedger(Budgets(), prices=PRICES)
    ledger.open_account(
        "c",
        ROOT,
        Budgets(max_cost=100, roles={"judge": RoleLimits(max_cost="0.0000005")}),  # type: ignore[arg-type]
        name="clerk",
    )
    with pytest.raises(BudgetExhausted) as refused:
        ledger.admit_model("c", "1", 0, 5, role="judge", provider_id="p", model_id="m")
    assert refused.value.data == {
        "resource": "money",
        "scope": "delegate:clerk/role:judge",
        "role": "judge",
        "limit": "0.0000005",
        "remaining": "0.0000005",
        "needed": "0.00001",
    }
    assert "0.0000005 is left and p/m needs 0.00001" in str(refused.value)
    ledger.admit_model("c", "2", 0, 5, provider_id="p", model_id="m")
    money = ledger.snapshot("c").money
    assert money is not None
    assert (str(money.limit), str(money.reserved), str(money.remaining)) == ("100", "0.00005", "99.99995")


def test_a_batch_that_repeats_a_refused_attempt_does_not_fit_as_a_whole() -> None:
    ledger = BudgetLedger(Budgets(tools={"pay": 0}))
    assert ledger.admit_tool(ROOT, "1", "pay") is not None
    answers = ledger.admit_tools(ROOT, [("1", "pay"), ("2", "look")], all_or_nothing=True)
    assert None not in answers
    assert (ledger.snapshot().tool_calls.used, set(ledger.snapshot().tools)) == (0, {"pay"})
    assert ledger.report().tools == {}


def test_a_refused_attempt_says_whose_limit_it_was() -> None:
    ledger = BudgetLedger(Budgets(max_tool_calls=1))
    ledger.open_account("c", ROOT, Budgets(tools={"pay": 0}), name="clerk")
    refusal = ledger.admit_tool("c", "1", "pay")
    assert refusal is not None
    assert refusal.data == {
        "resource": "tool_calls",
        "scope": "delegate:clerk/tool:pay",
        "tool": "pay",
        "limit": 0,
        "remaining": 0,
        "needed": 1,
    }
    assert ledger.admit_tool("c", "2", "look") is None
    refusal = ledger.admit_tool("c", "3", "look")
    assert refusal is not None
    assert (refusal.scope, refusal.limit) == ("run", 1)


def test_a_batch_takes_what_fits_or_nothing() -> None:
    for whole, taken in ((False, [True, False, True, False]), (True, [False] * 4)):
        ledger = BudgetLedger(Budgets(max_tool_calls=2, tools={"pay": 1}))
        batch = [("1", "pay"), ("2", "pay"), ("3", "look"), ("4", "look")]
        for _ in range(2):
            answers = ledger.admit_tools(ROOT, batch, all_or_nothing=whole)
            assert [answer is None for answer in answers] == taken
            told = ["as a whole" in answer.message for answer in answers if answer is not None]
            assert any(told) is whole
        assert ledger.snapshot().tool_calls.used == sum(taken)


def test_reports_tell_own_and_whole_figures_and_what_is_open() -> None:
    ledger = BudgetLedger(Budgets())
    ledger.open_account("child", ROOT, None, name="researcher")
    ledger.open_account("grandchild", "child", None)
    for name, tokens in ((ROOT, 1), ("child", 10), ("grandchild", 100)):
        ledger.admit_model(name, "1", 5, 5, role="judge" if name == "child" else "main")
        ledger.settle_model(name, "1", Usage(input_tokens=tokens))
    ledger.admit_model("child", "2", 5, 5)
    ledger.settle_model("child", "2", None, estimated=Usage(output_tokens=3))
    ledger.admit_model("child", "3", 5, 5)
    ledger.admit_tool("child", "t", "look")
    report = ledger.report("root-run")
    root, child, grandchild = report.participants
    assert (root.run_id, child.run_id, child.name, grandchild.parent_run_id) == (
        "root-run", "child", "researcher", "child",
    )  # fmt: skip
    assert [each.own.usage.total_tokens for each in report.participants] == [1, 10, 100]
    assert [each.subtree.usage.total_tokens for each in report.participants] == [111, 110, 100]
    assert (child.own.exact_calls, child.own.estimated_calls, child.own.open_calls) == (1, 1, 1)
    assert (child.own.estimated, child.own.charged_tokens) == (Usage(output_tokens=3), 20)
    assert report.roles["judge"].usage.total_tokens == 10
    assert report.tools == {"look": 1}
    assert report.tree.charged_tokens == ledger.snapshot().tokens.used == 121
    assert not report.complete
    for name in (ROOT, "child", "grandchild"):
        ledger.lose(name)
        ledger.close_account(name)
    assert ledger.report().complete
    ledger.settle_model("child", "2", Usage(output_tokens=4))  # late, and now it is known
    figures = ledger.report().tree
    assert (figures.estimated, figures.estimated_calls, figures.unknown_calls) == (Usage(), 0, 1)


def test_a_run_that_goes_on_begins_with_what_was_spent() -> None:
    before = BudgetLedger(Budgets(max_model_calls=2, max_tokens=50, tools={"look": 1}), prices=PRICES)
    before.admit_model(ROOT, "1", 5, 5, provider_id="p", model_id="m")
    before.settle_model(ROOT, "1", Usage(input_tokens=9))
    before.admit_tool(ROOT, "1", "look")
    spent = before.snapshot()
    after = BudgetLedger(
        Budgets(max_model_calls=3, max_tokens=60, tools={"look": 1}), prices=PRICES, carried=spent
    ).snapshot()
    assert (after.model_calls.used, after.model_calls.remaining) == (1, 2)
    assert (after.tokens.used, after.tokens.remaining) == (9, 51)
    assert after.tools["look"].remaining == 0
    assert after.money == spent.money


def test_what_finishing_calls_have_used_is_not_kept_back_again_after_a_top_up() -> None:
    before = BudgetLedger(Budgets(max_model_calls=2, finishing_model_calls=1))
    before.admit_model(ROOT, "work", 1, 1)
    before.admit_model(ROOT, "end", 1, 1, kind="finishing")
    with pytest.raises(BudgetExhausted):
        before.admit_model(ROOT, "more", 1, 1)
    before.lose(ROOT)
    after = BudgetLedger(Budgets(max_model_calls=3, finishing_model_calls=1), carried=before.snapshot())
    assert after.snapshot().model_calls.ordinary_remaining == 1
    after.admit_model(ROOT, "more", 1, 1)

    unused = BudgetLedger(Budgets(max_model_calls=2, finishing_model_calls=1))
    unused.admit_model(ROOT, "work", 1, 1)
    unused.lose(ROOT)
    again = BudgetLedger(Budgets(max_model_calls=2, finishing_model_calls=1), carried=unused.snapshot())
    assert again.snapshot().model_calls.ordinary_remaining == 0


def test_what_was_spent_in_another_currency_is_not_carried() -> None:
    before = BudgetLedger(Budgets(), prices=PRICES)
    euros = PriceTable(version="1", currency="EUR", models=PRICES.models)
    with pytest.raises(Unsupported, match="has spent USD, and the price table is in EUR"):
        BudgetLedger(Budgets(), prices=euros, carried=before.snapshot())
    newer = PriceTable(version="2027-01", models=PRICES.models)
    money = BudgetLedger(Budgets(), prices=newer, carried=before.snapshot()).snapshot().money
    assert money is not None
    assert money.prices == "2027-01"
