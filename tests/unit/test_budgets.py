"""Limits and usage as values."""

from __future__ import annotations

import math
from decimal import Decimal
from typing import Any

import pytest

from retinue import (
    Budgets,
    DriverOutput,
    ExecutionServices,
    Grants,
    Identity,
    RoleLimits,
    RunRequest,
    RunResult,
    Runtime,
    Usage,
)
from retinue.errors import ValidationFailed
from retinue.messages import user
from retinue.testing import ScriptedModel
from tests.conftest import MakeLocalRuntime
from tests.support import driver, soon, trivial

FIELDS = ("max_model_calls", "max_tool_calls", "max_tokens")
COUNTS = (*FIELDS, "max_revisions", "finishing_model_calls", "finishing_tokens")


@pytest.mark.parametrize("field", COUNTS)
@pytest.mark.parametrize("value", [1.5, -1, True, "8", math.inf])
def test_c185_a_limit_that_is_no_count_is_refused_at_construction(field: str, value: Any) -> None:
    with pytest.raises(ValidationFailed) as refused:
        Budgets(**{field: value})
    assert refused.value.path == f"budgets.{field}"
    assert repr(value) in str(refused.value)


@pytest.mark.parametrize("field", COUNTS[3:])
def test_c185_what_is_kept_back_and_revisions_are_never_unlimited(field: str) -> None:
    with pytest.raises(ValidationFailed, match="must be a nonnegative integer, not None"):
        Budgets(**{field: None})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("limits", "path"),
    [
        ({"max_cost": -1}, "budgets.max_cost"),
        ({"max_cost": "a lot"}, "budgets.max_cost"),
        ({"max_cost": math.nan}, "budgets.max_cost"),
        ({"max_cost": True}, "budgets.max_cost"),
        ({"tools": {"pay": 1.5}}, "budgets.tools.pay"),
        ({"tools": {"": 1}}, "budgets.tools"),
        ({"tools": ["pay"]}, "budgets.tools"),
        ({"roles": {"judge": 3}}, "budgets.roles.judge"),
    ],
)
def test_c185_limits_of_tools_and_roles_and_in_money_are_checked_too(
    limits: dict[str, Any], path: str
) -> None:
    with pytest.raises(ValidationFailed) as refused:
        Budgets(**limits)
    assert refused.value.path == path


@pytest.mark.parametrize(
    ("field", "value"), [("max_model_calls", -1), ("max_tokens", 0.5), ("max_cost", "-0.01")]
)
def test_c185_a_limit_of_a_role_is_checked_where_it_is_made(field: str, value: Any) -> None:
    with pytest.raises(ValidationFailed) as refused:
        RoleLimits(**{field: value})
    assert refused.value.path == f"budgets.roles.{field}"


@pytest.mark.parametrize(
    ("kept", "total"), [("finishing_model_calls", "max_model_calls"), ("finishing_tokens", "max_tokens")]
)
def test_no_more_is_kept_back_than_there_is(kept: str, total: str) -> None:
    with pytest.raises(ValidationFailed, match=r"cannot be more than it \(2\)") as refused:
        Budgets(**{kept: 3, total: 2})  # type: ignore[arg-type]
    assert refused.value.path == f"budgets.{kept}"
    assert getattr(Budgets(**{kept: 2, total: 2}), kept) == 2  # type: ignore[arg-type]
    assert getattr(Budgets(**{kept: 3}), kept) == 3  # type: ignore[arg-type]


@pytest.mark.parametrize("said", [2, "2", 2.0, Decimal(2)])
def test_an_amount_of_money_is_taken_as_any_number(said: Any) -> None:
    assert Budgets(max_cost=said).max_cost == RoleLimits(max_cost=said).max_cost == Decimal(2)


def test_limits_do_not_change_with_the_mapping_that_they_were_made_of() -> None:
    tools = {"pay": 1}
    budgets = Budgets(tools=tools)
    tools["pay"] = 100
    assert budgets.tools == {"pay": 1}


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


async def test_a_topped_up_run_may_do_ordinary_work_where_the_finishing_call_was_made_before(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    @driver
    async def works(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        model = ScriptedModel(["a"] * 5)
        if request.resumes is None:
            await services.model(model, [user("x")], max_tokens=10)
            await services.finish_model("judge", [user("x")], max_tokens=10)
        return DriverOutput(text=(await services.model(model, [user("x")], max_tokens=10)).text)

    runtime = local_runtime(
        driver=works,
        grants=Grants(model_roles=["main", "judge"]),
        models={"judge": ScriptedModel(["the end"])},
        budgets=Budgets(max_model_calls=2, finishing_model_calls=1),
    )
    run = runtime.start("x", identity=identity, session_id=session_id)
    result: RunResult = await soon(run.result())
    assert result.status == "stopped"
    again = await soon(runtime.resume(run, top_up=Budgets(max_model_calls=1)))
    result = await soon(again.result())
    assert (result.status, result.text) == ("completed", "a")
    assert result.budget is not None
    calls = result.budget.model_calls
    assert (calls.limit, calls.used, calls.finishing_used) == (3, 3, 1)
