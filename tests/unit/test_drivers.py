"""The driver contract: what is refused at construction, and what a driver's return must keep."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from retinue import DriverCapabilities, DriverOutput, ExecutionServices, Identity, RunRequest, Runtime
from retinue.errors import Unsupported, ValidationFailed
from retinue.messages import assistant, user
from tests.conftest import MakeLocalRuntime
from tests.support import FunctionDriver, code_of, driver, flag, soon, trivial, why


@pytest.mark.parametrize(
    ("declared", "operation"),
    [
        ({"durable": True}, "durable"),
        ({"policy_coverage": "remote"}, "policy_coverage"),
        ({"policy_coverage": "none"}, "policy_coverage"),
        ({"controlled_execution": False}, "controlled_execution"),
        ({"controls": ("steer", "replace")}, "replace"),
    ],
)
def test_c84_promises_that_cannot_be_kept_are_refused(declared: dict[str, Any], operation: str) -> None:
    promising = FunctionDriver(trivial.function, capabilities=DriverCapabilities(**declared))
    with pytest.raises(Unsupported) as refused:
        Runtime(driver=promising, backend="inprocess")
    assert (refused.value.code, refused.value.operation) == ("unsupported", operation)


@pytest.mark.parametrize(
    "bad",
    [
        None,
        "agent",
        FunctionDriver(trivial.function, id=""),
        FunctionDriver(trivial.function, version=0),
        FunctionDriver(trivial.function, version=True),
    ],
)
def test_c85_what_is_no_driver_is_refused(bad: Any) -> None:
    with pytest.raises(ValidationFailed) as refused:
        Runtime(driver=bad, backend="inprocess")
    assert refused.value.path.startswith("config.driver")


async def test_c87_a_history_that_does_not_extend_the_session_fails_the_run(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    @driver
    async def rewrites(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        if not services.history:
            return DriverOutput(text="ok", history=[user("one"), assistant("two")])
        return DriverOutput(text="ok", history=[user("other"), assistant("two"), user("three")])

    runtime = local_runtime(driver=rewrites)
    assert (await soon(runtime.run("x", identity=identity, session_id=session_id))).status == "completed"
    result = await soon(runtime.run("x", identity=identity, session_id=session_id))
    assert (result.status, code_of(result)) == ("failed", "execution_failed")
    snapshot = await runtime.sessions.read(identity, session_id)
    assert [message.text for message in snapshot.history] == ["one", "two"]


async def test_c88_pending_work_is_waited_for_and_its_failure_is_the_runs(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    gone = asyncio.Event()

    @driver
    async def leaves_work(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        async def work() -> None:
            flag(f"{request.run_id} works").set()
            await flag(f"{request.run_id} go").wait()
            gone.set()
            raise ValueError("what was left went wrong")

        services.run_owned(work())
        return DriverOutput(text="done already")

    handle = local_runtime(driver=leaves_work).start("x", identity=identity, session_id=session_id)
    await flag(f"{handle.run_id} works").wait()
    assert handle.state == "running"
    flag(f"{handle.run_id} go").set()
    result = await soon(handle.result())
    assert result.status == "failed"
    assert "what was left went wrong" in why(result)
    assert gone.is_set()
