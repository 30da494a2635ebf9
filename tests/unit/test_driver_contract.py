"""The conformance kit of the driver seam, over our drivers and over runs that break its rules."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, cast

import msgspec
import pytest

from retinue import (
    DriverOutput,
    ExecutionDriver,
    ExecutionServices,
    Grants,
    Resource,
    RunHandle,
    RunRequest,
    RunResult,
    Runtime,
    RuntimeConfig,
)
from retinue.errors import Unsupported, ValidationFailed
from retinue.events import Custom, Event, RunTerminal
from retinue.testing import DriverRuleBroken, check_driver_contract
from retinue.testing.driver_contract import FIXTURE
from tests.conftest import MakeLocalRuntime
from tests.contract_drivers import DRIVERS
from tests.support import Flag, FunctionDriver, driver, soon, trivial


@driver
async def external(request: RunRequest, services: ExecutionServices) -> DriverOutput:
    return DriverOutput(text="external answer")


# --- drivers that keep the rules --------------------------------------------------------------------------


@pytest.mark.parametrize("make", DRIVERS.values(), ids=DRIVERS)
async def test_our_drivers_keep_the_contract(make: Callable[[], ExecutionDriver]) -> None:
    report = await soon(check_driver_contract(make()))
    assert report.result.status == "completed"
    assert report.event_count == report.result.final_cursor >= 3


async def test_c292_a_deterministic_driver_without_grants() -> None:
    config = RuntimeConfig(driver=trivial, grants=Grants(tool_ids=[], model_roles=[]))
    report = await soon(check_driver_contract(external, config=config))
    assert report.result.text == "external answer"
    assert report.event_count == report.result.final_cursor == 2


async def test_the_run_is_that_of_the_fixture_with_the_default_grants() -> None:
    seen = Flag()

    @driver
    async def looks(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        seen.set(request)
        return DriverOutput(text="")

    await soon(check_driver_contract(looks, input="hello"))
    request = await seen.wait()
    assert (request.identity, request.input) == (FIXTURE, "hello")
    assert (FIXTURE.tenant_id, FIXTURE.user_id) == ("fixture", "fixture")
    assert (request.grants.tool_ids, request.grants.model_roles) == ((), ("main",))


async def test_a_runtime_of_the_callers_stays_open(local_runtime: MakeLocalRuntime) -> None:
    runtime = local_runtime(driver=external)
    first = await soon(check_driver_contract(external, runtime=runtime))
    second = await soon(check_driver_contract(external, runtime=runtime))
    assert first.result.session_id != second.result.session_id
    with pytest.raises(ValidationFailed, match="another driver"):
        await check_driver_contract(trivial, runtime=runtime)
    with pytest.raises(ValidationFailed, match="either"):
        await check_driver_contract(external, runtime=runtime, config=RuntimeConfig(driver=external))


async def test_many_fast_events_are_no_breach() -> None:
    @driver
    async def chatty(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        for number in range(1_000):
            services.emit(Custom("tick", {"number": number}))
        return DriverOutput(text="done")

    assert (await soon(check_driver_contract(chatty))).event_count == 1_002


async def test_a_run_that_stops_is_no_breach() -> None:
    @driver
    async def stops(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        return DriverOutput(text="", status="stopped")

    assert (await soon(check_driver_contract(stops))).result.status == "stopped"


# --- drivers that break them ------------------------------------------------------------------------------


class Fixture:
    """A driver with a session resource."""

    def __init__(self, error: Exception | None = None, *, closes: bool = True) -> None:
        self.error = error
        self.closes = closes
        self.disposed = 0

    @property
    def driver(self) -> FunctionDriver:
        return FunctionDriver(self._run)

    async def _run(self, request: RunRequest, services: ExecutionServices) -> DriverOutput:
        await services.resource("fixture", "session", lambda: Resource(value=1, dispose=self._dispose))
        if self.error is not None:
            raise self.error
        return DriverOutput(text="done")

    def _dispose(self) -> None:
        self.disposed += 1
        if not self.closes:
            raise RuntimeError("does not close")


async def test_c291_success_disposes_of_the_session_resource_once() -> None:
    fixture = Fixture()
    report = await soon(check_driver_contract(fixture.driver))
    assert report.result.status == "completed"
    assert fixture.disposed == 1


async def test_c291_the_primary_failure_wins_over_a_failing_cleanup() -> None:
    fixture = Fixture(ValueError("primary failure"), closes=False)
    with pytest.raises(DriverRuleBroken, match="primary failure"):
        await soon(check_driver_contract(fixture.driver))
    assert fixture.disposed == 1


async def test_c291_a_failing_cleanup_is_the_error_of_a_run_that_is_well(
    local_runtime: MakeLocalRuntime,
) -> None:
    fixture = Fixture(closes=False)
    with pytest.raises(DriverRuleBroken, match="could not be closed: fixture"):
        await soon(check_driver_contract(fixture.driver))
    assert fixture.disposed == 1


@driver
async def gives_no_output(request: RunRequest, services: ExecutionServices) -> DriverOutput:
    return cast(DriverOutput, {"text": "done"})


@driver
async def gives_an_unknown_status(request: RunRequest, services: ExecutionServices) -> DriverOutput:
    return DriverOutput(text="done", status="fine")  # type: ignore[arg-type]


@driver
async def gives_no_json(request: RunRequest, services: ExecutionServices) -> DriverOutput:
    return DriverOutput(text="done", structured=float("nan"))


@driver
async def rewrites_history(request: RunRequest, services: ExecutionServices) -> DriverOutput:
    from retinue.messages import user

    services.append([user("kept")])
    return DriverOutput(text="done", history=[user("other")])


@driver
async def leaves_failing_work(request: RunRequest, services: ExecutionServices) -> DriverOutput:
    async def fail() -> None:
        raise ValueError("left behind")

    services.run_owned(fail())
    return DriverOutput(text="done")


@driver
async def exits(request: RunRequest, services: ExecutionServices) -> DriverOutput:
    raise SystemExit(1)


@driver
async def reports_failure(request: RunRequest, services: ExecutionServices) -> DriverOutput:
    return DriverOutput(text="done", status="failed")


@pytest.mark.parametrize(
    ("broken", "why"),
    [
        (gives_no_output, "must return a DriverOutput"),
        (gives_an_unknown_status, "bad output"),
        (gives_no_json, "bad output"),
        (rewrites_history, "does not extend"),
        (leaves_failing_work, "left behind"),
        (exits, "SystemExit"),
        (reports_failure, "the run failed"),
    ],
)
async def test_a_driver_that_fails_its_run_is_named(broken: FunctionDriver, why: str) -> None:
    with pytest.raises(DriverRuleBroken, match=why):
        await soon(check_driver_contract(broken))


async def test_what_cannot_be_kept_is_refused_as_anywhere() -> None:
    from retinue import DriverCapabilities

    durable = FunctionDriver(external.function, capabilities=DriverCapabilities(durable=True))
    with pytest.raises(Unsupported):
        await check_driver_contract(durable)


async def test_giving_the_check_up_cancels_the_run(local_runtime: MakeLocalRuntime) -> None:
    begun, cancelled = Flag(), Flag()
    disposed = Flag()

    @driver
    async def waits(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        await services.resource("x", "session", lambda: Resource(value=1, dispose=lambda: disposed.set()))
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()
        raise AssertionError

    checking = asyncio.ensure_future(
        check_driver_contract(waits, runtime=local_runtime(driver=waits, event_capacity=2))
    )
    await begun.wait()
    checking.cancel()
    await asyncio.wait([checking], timeout=10)
    assert checking.cancelled()
    assert cancelled.is_set
    assert disposed.is_set


# --- runtimes that break them -----------------------------------------------------------------------------


class ChangedHandle:
    """A handle that tells something else than happened."""

    def __init__(self, handle: RunHandle, breach: str) -> None:
        self._handle = handle
        self._breach = breach
        self._cancelled = False
        self.run_id = handle.run_id

    async def events(self, after: int) -> AsyncIterator[Event]:
        events = [event async for event in self._handle.events(0)]
        if after and self._breach == "waits after the end":
            await asyncio.Event().wait()
        if after and self._breach == "goes on after the end":
            yield events[-1]
        if not after:
            for event in changed(events, self._breach):
                yield event

    async def result(self) -> RunResult:
        result = await self._handle.result()
        if self._breach == "another result" or (self._breach == "a late cancel counts" and self._cancelled):
            return msgspec.structs.replace(result, status="cancelled")
        return result

    async def cancel(self, reason: str) -> None:
        self._cancelled = True
        await self._handle.cancel(reason)


def changed(events: list[Event], breach: str) -> Sequence[Event]:
    first, last = events[0], events[-1]
    replace = msgspec.structs.replace
    match breach:
        case "no terminal event":
            return events[:-1]
        case "two terminal events":
            return [*events, replace(last, sequence=last.sequence + 1)]
        case "an event after the end":
            return [*events, replace(first, sequence=last.sequence + 1)]
        case "a gap":
            return [first, *events[2:]]
        case "not from one":
            return events[1:]
        case "another run's":
            return [replace(first, run_id="run_other"), *events[1:]]
        case "another root's":
            return [replace(first, root_run_id="run_other"), *events[1:]]
        case "another schema":
            return [replace(first, schema_version=2), *events[1:]]
        case "another final cursor":
            assert isinstance(last.payload, RunTerminal)
            return [first, *events[2:-1], replace(last, sequence=last.sequence - 1)]
    return events


class ChangedRuntime:
    """A runtime whose handles are changed, and that does not forget to close resources."""

    _config = None

    def __init__(self, runtime: Runtime, breach: str) -> None:
        self._runtime = runtime
        self._breach = breach
        self.resources = runtime.resources

    def start(self, input: str, **options: Any) -> ChangedHandle:
        return ChangedHandle(self._runtime.start(input, **options), self._breach)

    def attach(self, run_id: str, **options: Any) -> RunHandle:
        return self._runtime.attach(run_id, **options)


@pytest.mark.parametrize(
    ("breach", "why"),
    [
        ("no terminal event", "there are 0"),
        ("two terminal events", "there are 2"),
        ("an event after the end", "after the terminal event"),
        ("a gap", "not numbered"),
        ("not from one", "not numbered"),
        ("another run's", "run id run_other"),
        ("another root's", "as its root"),
        ("another schema", "schema version 2"),
        ("another final cursor", "final_cursor is 3"),
        ("another result", "another result"),
        ("waits after the end", "waited for"),
        ("goes on after the end", "after the final cursor"),
        ("a late cancel counts", "a cancel after the end"),
    ],
)
async def test_a_runtime_that_breaks_a_rule_is_named(
    breach: str, why: str, local_runtime: MakeLocalRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("retinue.testing.driver_contract.PATIENCE", 0.2)
    fixture = Fixture()

    @driver
    async def ticks(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        services.emit(Custom("tick", {}))
        return await fixture.driver.start(request, services)

    runtime = ChangedRuntime(local_runtime(driver=ticks), breach)
    with pytest.raises(DriverRuleBroken, match=why):
        await soon(check_driver_contract(ticks, runtime=cast(Runtime, runtime)))
    assert fixture.disposed == 1


async def test_nothing_changed_is_no_breach(local_runtime: MakeLocalRuntime) -> None:
    runtime = ChangedRuntime(local_runtime(driver=external), "")
    await soon(check_driver_contract(external, runtime=cast(Runtime, runtime)))
