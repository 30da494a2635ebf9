"""What JSON cannot carry is refused, never written as null."""

from __future__ import annotations

import math

import pytest

from retinue import DriverCapabilities, DriverOutput, ExecutionServices, Identity, RunRequest, Runtime
from retinue.errors import InputError
from retinue.events import Control, Custom, ModelComplete, ToolComplete, check_payload
from retinue.json_values import encode_json

ME = Identity(tenant_id="t", user_id="u")


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite_are_named_where_they_stand(number: float) -> None:
    with pytest.raises(ValueError, match=r"value\['a'\]\[1\] is"):
        encode_json({"a": [1.0, number]})
    with pytest.raises(InputError, match="JSON cannot carry"):
        check_payload(Custom("measured", {"loss": number}))


def test_finite_values_pass() -> None:
    assert encode_json({"a": [1, 2.5, None, "é\0"]}) == '{"a":[1,2.5,null,"é\\u0000"]}'.encode()


class Measures:
    """Returns a number that JSON cannot carry, as its output or as session state."""

    id = "measures"
    version = 1
    capabilities = DriverCapabilities()

    def __init__(self, where: str) -> None:
        self.where = where

    async def start(self, request: RunRequest, services: ExecutionServices) -> DriverOutput:
        if self.where == "state":
            services.state["loss"] = math.nan
        return DriverOutput(text="done", structured={"loss": math.nan} if self.where == "output" else None)


@pytest.mark.parametrize("where", ["output", "state"])
def test_a_run_says_so_instead_of_storing_null(where: str) -> None:
    with Runtime(driver=Measures(where), backend="inprocess") as runtime:
        result = runtime.run_blocking("x", identity=ME, session_id="s")
    assert result.status == "failed"
    assert result.reason is not None
    assert "is nan, which JSON cannot carry" in result.reason.message


@pytest.mark.parametrize(
    "payload", [ModelComplete("p", "m"), ToolComplete("t", "c"), Control("cancel"), {"type": "run.started"}]
)
def test_what_the_runtime_tells_nobody_else_may_tell(payload: object) -> None:
    with pytest.raises(InputError, match=r"by the runtime only|not an event payload"):
        check_payload(payload)
