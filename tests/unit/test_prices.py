"""What models cost, exactly."""

from __future__ import annotations

import math
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retinue import Price, PriceTable, Usage
from retinue.errors import ValidationFailed
from retinue.prices import UNIT, amount_of, shown_amount, units_of

prices = st.decimals(min_value=0, max_value=1000, places=4)
tokens = st.integers(0, 10**7)


@given(prices, prices, st.none() | prices, tokens, tokens, tokens)
def test_a_cost_is_the_exact_amount_rounded_up_to_a_unit_and_within_its_bound(
    input: Decimal, output: Decimal, cached: Decimal | None, sent: int, hits: int, got: int
) -> None:
    price = Price(input=input, output=output, cached_input=cached)
    hits = min(hits, sent)
    exact = (input * (sent - hits) + (input if cached is None else cached) * hits + output * got) / 10**6
    cost = price.cost(Usage(input_tokens=sent, output_tokens=got, cached_tokens=hits))
    assert exact <= cost * UNIT < exact + UNIT
    assert cost <= price.bound(sent, got)


@given(prices, prices, tokens, st.integers(0, 10**12))
def test_the_output_that_an_amount_pays_for_is_the_most_that_it_does(
    input: Decimal, output: Decimal, sent: int, units: int
) -> None:
    price = Price(input=input, output=output)
    cap = price.output_for(units, sent)
    if cap is None:
        assert output == 0
    elif cap < 0:
        assert price.bound(sent, 0) > units
    else:
        assert price.bound(sent, cap) <= units
        more = math.ceil(2 / (output * 1000)) + 1  # rounding up leaves less than one unit twice
        assert price.bound(sent, cap + more) > units


def test_a_model_is_found_by_its_provider_first() -> None:
    table = PriceTable(version="1", models={"p/m": Price(input=1, output=1), "m": Price(input=2, output=2)})  # type: ignore[arg-type]
    found = table.find("p", "m"), table.find("q", "m"), table.find("p", "x")
    assert [price and price.input for price in found] == [1, 2, None]


@given(st.integers(0, 10**30))
def test_amounts_survive_the_units(units: int) -> None:
    assert units_of(amount_of(units)) == units


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("0.0", "0"),
        ("0.000000001", "0.000000001"),
        ("100.00", "100"),
        ("12.50", "12.5"),
        ("0.0000000019", "0.000000001"),
    ],
)
def test_amounts_are_shown_in_plain_digits_and_a_limit_never_above_what_was_said(
    said: str, shown: str
) -> None:
    assert shown_amount(amount_of(units_of(Decimal(said)))) == shown


@pytest.mark.parametrize("said", [2, "2", 2.0, Decimal(2), "2e0"])
def test_a_price_is_taken_as_any_number_and_is_exact(said: Any) -> None:
    price = Price(input=said, output="0.1", cached_input=0.1)  # type: ignore[arg-type]
    assert (price.input, price.output, price.cached_input) == (Decimal(2), Decimal("0.1"), Decimal("0.1"))


@pytest.mark.parametrize(
    ("make", "path"),
    [
        (lambda: Price(input=-1, output=1), "price.input"),  # type: ignore[arg-type]
        (lambda: Price(input=1, output=float("nan")), "price.output"),  # type: ignore[arg-type]
        (lambda: Price(input=True, output=1), "price.input"),  # type: ignore[arg-type]
        (lambda: Price(input=None, output=1), "price.input"),  # type: ignore[arg-type]
        (lambda: Price(input=1, output=1, cached_input="free"), "price.cached_input"),  # type: ignore[arg-type]
        (lambda: PriceTable(version="1", currency=""), "prices.currency"),
        (lambda: PriceTable(version=""), "prices.version"),
        (lambda: PriceTable(version="1", models={"m": 3}), "prices.models.m"),  # type: ignore[dict-item]
        (lambda: PriceTable(version="1", models=[]), "prices.models"),  # type: ignore[arg-type]
    ],
)
def test_what_is_no_price_is_named(make: Any, path: str) -> None:
    with pytest.raises(ValidationFailed) as refused:
        make()
    assert refused.value.path == path
