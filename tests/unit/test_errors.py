"""Errors: a stable code each, data as attributes, and no loss on the way between processes."""

from __future__ import annotations

import json
import pickle
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
import pytest

from retinue import errors
from retinue.errors import (
    BudgetExhausted,
    EventGap,
    ModelFailed,
    NotShippable,
    RetinueError,
    SessionConflict,
    error_from_payload,
)

CLASSES = [
    value
    for name in errors.__all__
    if isinstance(value := getattr(errors, name), type) and issubclass(value, RetinueError)
]


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("travel", ["payload", "json", "pickle", "cloudpickle"])
def test_every_error_survives_the_way_between_processes(cls: type[RetinueError], travel: str) -> None:
    for code in cls.codes:
        error = cls(
            "what happened", code=code, run_id="r", remaining=0, path="a[2].b", nested={"x": [1, None]}
        )
        again: Any
        if travel == "payload":
            again = error_from_payload(error.to_payload())
        elif travel == "json":
            again = error_from_payload(json.loads(json.dumps(error.to_payload())))
        else:
            again = pickle.loads(pickle.dumps(error) if travel == "pickle" else cloudpickle.dumps(error))
        assert type(again) is cls
        assert (again.code, again.message, str(again)) == (code, "what happened", "what happened")
        assert (again.run_id, again.remaining, again.path) == ("r", 0, "a[2].b")
        assert again.nested == {"x": [1, None]}
        assert again.data == error.data


@pytest.mark.parametrize("cls", CLASSES)
def test_every_error_has_a_message_of_its_own_and_is_in_the_drawing(cls: type[RetinueError]) -> None:
    assert str(cls()) == (cls.__doc__ or "").strip().splitlines()[0]
    drawn = [line for line in (errors.__doc__ or "").splitlines() if f" {cls.__name__} " in f"{line} "]
    assert len(drawn) == 1
    if cls is not RetinueError:
        assert cls.codes[0] in drawn[0]


def test_codes_are_distinct() -> None:
    codes = [code for cls in CLASSES for code in cls.codes]
    assert len(set(codes)) == len(codes)


def test_a_code_that_nobody_knows_gives_the_base() -> None:
    error = error_from_payload({"code": "from_the_future", "message": "m", "data": {"message": 1, "code": 2}})
    assert (type(error), error.code, error.message) == (RetinueError, "from_the_future", "m")
    assert error.data == {"message": 1, "code": 2}
    assert error_from_payload({}).code == "retinue_error"


def test_a_subclass_of_an_application_takes_over_no_code_and_travels_as_its_base() -> None:
    class Mine(SessionConflict):
        """Mine."""

        def __init__(self, number: int) -> None:
            super().__init__(f"mine {number}", number=number)

    class Other(RetinueError):
        """Other."""

        code = "other"

    assert type(error_from_payload({"code": "session_conflict"})) is SessionConflict
    assert type(error_from_payload({"code": "retinue_error"})) is RetinueError
    again = pickle.loads(pickle.dumps(Mine(5)))
    assert (type(again), again.number, str(again)) == (SessionConflict, 5, "mine 5")
    again = pickle.loads(pickle.dumps(Other("x")))
    assert (type(again), again.code, str(again)) == (RetinueError, "other", "x")


def test_data_are_attributes_and_nothing_else_is() -> None:
    error = BudgetExhausted("no", resource="tokens", remaining=None)
    assert error.resource == "tokens"
    with pytest.raises(AttributeError, match="BudgetExhausted has no attribute 'remaining'"):
        _ = error.remaining
    assert error.to_payload() == {"code": "budget_exhausted", "message": "no", "data": {"resource": "tokens"}}
    assert EventGap("gap").to_payload() == {"code": "event_gap", "message": "gap"}


def test_whether_a_model_call_had_started() -> None:
    assert ModelFailed("x").started is True
    assert ModelFailed("x", started=False).started is False
    assert error_from_payload(ModelFailed("x", started=False).to_payload()).started is False
    assert isinstance(NotShippable("x", path="a"), Exception)
