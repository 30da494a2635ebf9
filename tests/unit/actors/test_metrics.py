"""What is recorded for Ray's metrics, and that it adds up."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from retinue import (
    Budgets,
    DriverOutput,
    ExecutionServices,
    Grants,
    Identity,
    RunRequest,
    ToolCall,
    tool,
)
from retinue.actors import metrics
from retinue.actors.child_host import ChildHostStatistics
from retinue.actors.directory import DirectoryStatistics
from retinue.actors.metrics import (
    DESCRIPTIONS,
    Kind,
    Reporter,
    Sample,
    child_host_samples,
    directory_samples,
    host_samples,
    pool_samples,
    store_samples,
)
from retinue.actors.pool import PoolStatistics
from retinue.errors import BudgetExhausted
from retinue.host import HostStatistics
from retinue.loop import awaited, on_client_loop
from retinue.messages import user
from retinue.store import StoreStatistics
from tests.conftest import MakeLocalRuntime
from tests.support import FunctionModel, backend_of, driver, soon


class Recorded:
    """What instruments were made, and what they were told."""

    def __init__(self) -> None:
        self.made: dict[str, tuple[Kind, str, tuple[str, ...]]] = {}
        self.told: list[tuple[str, float, dict[str, str]]] = []

    def make(self, name: str, kind: Kind, description: str, tags: tuple[str, ...]) -> Any:
        assert name not in self.made, "made once"
        self.made[name] = (kind, description, tags)
        recorded = self

        class Instrument:
            def record(self, value: float, tags: Mapping[str, str]) -> None:
                recorded.told.append((name, value, dict(tags)))

        return Instrument()


def test_gauges_are_set_and_counters_grow() -> None:
    now: list[Sample] = []
    recorded = Recorded()
    reporter = Reporter(lambda: now, recorded.make)
    gauge, counter = "retinue_host_sessions", "retinue_host_passivations_total"

    now[:] = [
        Sample(gauge, "gauge", 3),
        Sample(counter, "counter", 2, {"reason": "idle"}),
        Sample(counter, "counter", 1, {"reason": "duplicate"}),
    ]
    reporter.report()
    now[:] = [Sample(gauge, "gauge", 1), Sample(counter, "counter", 5, {"reason": "idle"})]
    reporter.report()
    reporter.report()

    assert recorded.told == [
        (gauge, 3, {}),
        (counter, 2, {"reason": "idle"}),
        (counter, 1, {"reason": "duplicate"}),
        (gauge, 1, {}),
        (counter, 3, {"reason": "idle"}),
        (gauge, 1, {}),
    ]
    assert recorded.made[counter] == ("counter", DESCRIPTIONS[counter], ("reason",))


def test_figures_that_cannot_be_read_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> Iterator[Sample]:
        yield Sample("retinue_host_sessions", "gauge", 1)
        raise RuntimeError("no directory")

    recorded = Recorded()
    with caplog.at_level(logging.WARNING):
        Reporter(broken, recorded.make).report()
    assert recorded.told == []
    assert "no directory" in caplog.text


async def test_nothing_is_recorded_where_nothing_is_exported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "metrics_are_exported", lambda: False)
    recorded = Recorded()
    await soon(Reporter(lambda: [Sample("retinue_host_sessions", "gauge", 1)], recorded.make).run(0))
    assert recorded.made == {}


async def test_it_is_reported_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "metrics_are_exported", lambda: True)
    thrice = asyncio.Event()
    recorded = Recorded()

    def read() -> Iterator[Sample]:
        yield Sample("retinue_host_sessions", "gauge", 1)
        if len(recorded.told) >= 3:
            thrice.set()

    running = asyncio.ensure_future(Reporter(read, recorded.make).run(0))
    await soon(thrice.wait())
    running.cancel()


DIRECTORY = DirectoryStatistics(
    resident=2,
    max_resident=8,
    idle_timeout=900,
    hosts=2,
    shared_hosts=1,
    lost_hosts=1,
    activations=5,
    passivations={"idle": 3},
)
POOL = PoolStatistics(app="app", session_spares=2, child_hosts=1, children=4, waiting=0)
CHILD_HOST = ChildHostStatistics(host_id="h", pid=1, app_digest="d", children=4, finished=9, roots=1)
STORE = StoreStatistics(url="memory:", writes=8, transactions=4, reads=2, commits=1, queued=0)


async def test_every_metric_has_a_description_and_one_kind(local_runtime: MakeLocalRuntime) -> None:
    host = await _spent(local_runtime)
    samples = [
        *directory_samples(DIRECTORY),
        *pool_samples(POOL),
        *host_samples(host),
        *child_host_samples(CHILD_HOST),
        *store_samples(STORE),
    ]

    assert {sample.name for sample in samples} | {"retinue_host_passivations_total"} == set(DESCRIPTIONS)
    for sample in samples:
        assert sample.kind == ("counter" if sample.name.endswith("_total") else "gauge"), sample.name
    assert not {key for sample in samples for key in sample.tags} & {"tenant", "user", "session", "run"}


async def test_a_host_counts_what_its_runs_spent(local_runtime: MakeLocalRuntime) -> None:
    figures = {
        (sample.name, *sample.tags.values()): sample.value
        for sample in host_samples(await _spent(local_runtime))
    }

    assert figures["retinue_host_runs_total",] == 2
    assert figures["retinue_host_model_calls_total",] == 2
    assert figures["retinue_host_tool_calls_total",] == 2
    assert figures["retinue_host_refusals_total",] == 4
    assert figures["retinue_host_tokens_total", "input"] == 2
    assert figures["retinue_host_tokens_total", "output"] == 2


async def _spent(make: MakeLocalRuntime) -> HostStatistics:
    """Two runs in two sessions, one of which has left memory; each with one call and two refusals."""

    @tool
    async def look() -> str:
        """Looks."""
        return "seen"

    async def works(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        calls = [ToolCall(id="a", name="look"), ToolCall(id="b", name="look")]
        results = await services.dispatch_batch(calls)
        assert [result.denial for result in results] == [None, "budget"]
        await services.model(FunctionModel(), [user("hi")])
        with pytest.raises(BudgetExhausted):
            await services.model(FunctionModel(), [user("hi")])
        return DriverOutput(text="x")

    runtime = make(
        driver=driver(works),
        tools=[look],
        grants=Grants(tool_ids=["look"]),
        budgets=Budgets(max_model_calls=1, max_tool_calls=1),
    )
    host = backend_of(runtime)._host
    for number in range(2):
        handle = runtime.start("x", identity=Identity(tenant_id="t", user_id="u"), session_id=f"s{number}")
        result = await soon(handle.result())
        assert result.status == "completed", result.reason
        if number == 0:
            (activation_id,) = host.idle()
            assert await awaited(on_client_loop(host.passivate(activation_id, "application")))
    return host.statistics()
