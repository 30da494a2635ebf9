"""The conformance kit of the driver seam (contract section 18): what every driver must do, ours and yours.

It needs no test framework::

    asyncio.run(check_driver_contract(my_driver))

One run is started, followed and checked. Give a ``runtime`` that was made with the driver to check it on
another backend.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from retinue.config import RuntimeConfig
from retinue.drivers import ExecutionDriver
from retinue.errors import ValidationFailed
from retinue.events import SCHEMA_VERSION, Event, RunTerminal
from retinue.handles import RunHandle
from retinue.ids import Identity, new_id
from retinue.messages import Content
from retinue.results import RunResult
from retinue.runtime import Runtime

FIXTURE = Identity(tenant_id="fixture", user_id="fixture")
"""Who the run is for."""
PATIENCE = 10.0
"""Seconds that something may take which has nothing to wait for."""
_CAPACITY = 65_536
"""Events kept by a runtime that is made here, so that even a driver that is faster than its reader leaves no
gap."""


class DriverRuleBroken(AssertionError):
    """A driver, or the runtime under it, does not do what the contract says."""


@dataclass(frozen=True, kw_only=True)
class DriverContractReport:
    """What the checked run did."""

    result: RunResult
    event_count: int
    """Events of the run, which is the number of the last one."""


async def check_driver_contract(
    driver: ExecutionDriver,
    *,
    config: RuntimeConfig | None = None,
    runtime: Runtime | None = None,
    input: Content = "Check the driver contract.",
) -> DriverContractReport:
    """Run the driver once, for the identity fixture/fixture in a session of its own, and check the run.

    The session's resources are closed in any case. When the run fails, that is the error, whatever becomes of
    its resources; when all is well with the run, a resource that cannot be closed is.

    Args:
        driver: what is checked.
        config: grants, budgets, tools and models to run it with; the driver in it is replaced. By default no
            tools are granted, and the model role ``main``.
        runtime: where to run it, instead of an in-process runtime that is made and closed here. It must have
            been made with the driver, and stays open.
        input: what the driver is asked.

    Raises:
        DriverRuleBroken: the text names the rule that is not kept.
        ValidationFailed: both a config and a runtime were given, or a runtime with another driver.
        Unsupported: the driver declares what cannot be kept.
    """
    if runtime is None:
        config = dataclasses.replace(config, driver=driver) if config else RuntimeConfig(driver=driver)
        capacity = max(config.event_capacity, _CAPACITY)
        made = Runtime(dataclasses.replace(config, event_capacity=capacity), backend="inprocess")
        try:
            return await _check(made, input)
        finally:
            await asyncio.to_thread(made.close)
    if config is not None:
        raise ValidationFailed("give either a config or a runtime, which has one", path="runtime")
    if runtime._config is not None and runtime._config.driver is not driver:
        raise ValidationFailed("the runtime was made with another driver", path="runtime")
    return await _check(runtime, input)


async def _check(runtime: Runtime, input: Content) -> DriverContractReport:
    session_id = new_id("contract")
    handle = runtime.start(input, identity=FIXTURE, session_id=session_id)
    try:
        report = await _follow(runtime, handle)
    except BaseException:
        with contextlib.suppress(Exception):  # the first failure is the one to tell
            async with asyncio.timeout(PATIENCE):
                await handle.cancel("the contract check has failed")
                await handle.result()
                await runtime.resources.close_session(FIXTURE, session_id)
        raise
    if failed := await runtime.resources.close_session(FIXTURE, session_id):
        raise DriverRuleBroken(f"resources of the session could not be closed: {', '.join(failed)}")
    return report


async def _follow(runtime: Runtime, handle: RunHandle) -> DriverContractReport:
    events = [event async for event in handle.events(0)]
    result = await handle.result()
    if result.status == "failed":
        reason = f"{result.reason.code}: {result.reason.message}" if result.reason else "no reason is given"
        raise DriverRuleBroken(f"the run failed: {reason}")
    _check_events(events, handle.run_id)
    terminal = events[-1].payload
    assert isinstance(terminal, RunTerminal)
    _expect(terminal.result == result, "the terminal event carries another result than result() gives")
    _expect(
        result.final_cursor == len(events),
        f"final_cursor is {result.final_cursor}, and the last event is {len(events)}",
    )
    await _check_end(handle, result)
    await handle.cancel("too late")
    attached = runtime.attach(handle.run_id, identity=FIXTURE)
    for found in (await handle.result(), await attached.result()):
        _expect(found == result, "a cancel after the end has changed the result")
    return DriverContractReport(result=result, event_count=len(events))


def _check_events(events: Sequence[Event], run_id: str) -> None:
    terminals = [event.sequence for event in events if isinstance(event.payload, RunTerminal)]
    _expect(len(terminals) == 1, f"there must be one terminal event, and there are {len(terminals)}")
    _expect(terminals == [events[-1].sequence], "an event comes after the terminal event")
    sequences = [event.sequence for event in events]
    _expect(sequences == list(range(1, len(events) + 1)), f"events are not numbered 1, 2, 3: {sequences}")
    for event in events:
        own_run = event.run_id == run_id or event.participant != ""
        _expect(own_run, f"event {event.sequence} has the run id {event.run_id}, not {run_id}")
        _expect(event.root_run_id == run_id, f"event {event.sequence} names {event.root_run_id} as its root")
        _expect(
            event.schema_version == SCHEMA_VERSION,
            f"event {event.sequence} has the schema version {event.schema_version}",
        )


async def _check_end(handle: RunHandle, result: RunResult) -> None:
    stream = handle.events(result.final_cursor)
    try:
        async with asyncio.timeout(PATIENCE):
            following = await anext(stream, None)
    except TimeoutError:
        raise DriverRuleBroken("events after the final cursor are waited for, and none can come") from None
    finally:
        await stream.aclose()
    _expect(following is None, "there is an event after the final cursor")


def _expect(holds: bool, otherwise: str) -> None:
    if not holds:
        raise DriverRuleBroken(otherwise)
