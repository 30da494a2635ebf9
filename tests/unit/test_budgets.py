"""Limits and usage as values."""

from __future__ import annotations

import math
from typing import Any

import pytest

from retinue import Budgets, Runtime, Usage
from retinue.errors import ValidationFailed
from tests.support import trivial

FIELDS = ("max_model_calls", "max_tool_calls", "max_tokens")


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("value", [1.5, -1, True, "8", math.inf])
def test_c185_a_limit_that_is_no_count_is_refused_at_construction(field: str, value: Any) -> None:
    with pytest.raises(ValidationFailed) as refused:
        Budgets(**{field: value})
    assert refused.value.path == f"budgets.{field}"
    assert repr(value) in str(refused.value)


def test_c185_a_runtime_takes_nothing_but_budgets() -> None:
    with pytest.raises(ValidationFailed) as refused:
        Runtime(driver=trivial, budgets={"max_tokens": 5}, backend="inprocess")  # type: ignore[arg-type]
    assert refused.value.path == "config.budgets"


@pytest.mark.parametrize("field", FIELDS)
def test_zero_and_nothing_are_limits_of_their_own(field: str) -> None:
    assert getattr(Budgets(**{field: 0}), field) == 0  # type: ignore[arg-type]
    assert getattr(Budgets(), field) is None


def test_usage_adds_up_field_by_field() -> None:
    one = Usage(input_tokens=1, output_tokens=2, reasoning_tokens=3, cached_tokens=4)
    assert one + one == Usage(input_tokens=2, output_tokens=4, reasoning_tokens=6, cached_tokens=8)
    assert (one + Usage()).total_tokens == 3
    assert one.problem() is None


@pytest.mark.parametrize("value", [-1, 1.0, math.nan, "1", None, True])
@pytest.mark.parametrize("field", Usage.__struct_fields__)
def test_usage_that_cannot_be_is_named(field: str, value: Any) -> None:
    problem = Usage(**{field: value}).problem()
    assert problem is not None
    assert field in problem
