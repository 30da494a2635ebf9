"""Metrics of this cluster for Ray: what ``statistics()`` reports, as gauges and counters named ``retinue_*``.

Each process reports what it has, every few seconds, from its control loop. Ray adds the worker and the node,
and exports to Prometheus where the cluster has a metrics agent (``ray[default]``); elsewhere nothing is
recorded. No metric has a tenant, a user or a session: their number has no bound.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

import ray

if TYPE_CHECKING:  # whose actors import this
    from retinue.actors.child_host import ChildHostStatistics
    from retinue.actors.directory import DirectoryStatistics
    from retinue.actors.pool import PoolStatistics
    from retinue.host import HostStatistics
    from retinue.store import StoreStatistics

_log = logging.getLogger(__name__)

INTERVAL = 5.0
"""Seconds between two reports of a process."""

Kind = Literal["gauge", "counter"]


@dataclass(frozen=True)
class Sample:
    """One figure of now. A counter's value is its total since the process began."""

    name: str
    kind: Kind
    value: float
    tags: Mapping[str, str] = field(default_factory=dict)


class Instrument(Protocol):
    """Where one metric is recorded."""

    def record(self, value: float, tags: Mapping[str, str]) -> None: ...


class Reporter:
    """Reports the figures of one process. Belongs to its control loop.

    Args:
        read: gives the figures of now; must be cheap, and must not wait.
        make: makes the instrument of a metric: name, kind, description, names of its tags.
    """

    def __init__(
        self,
        read: Callable[[], Iterable[Sample]],
        make: Callable[[str, Kind, str, tuple[str, ...]], Instrument] | None = None,
    ) -> None:
        self._read = read
        self._make = make or ray_instrument
        self._instruments: dict[str, Instrument] = {}
        self._told: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
        """Totals of counters that were told already."""

    async def run(self, interval: float = INTERVAL) -> None:
        """Report for ever; returns at once where Ray exports no metrics."""
        await asyncio.sleep(interval)  # not while the process is coming to life
        if not await asyncio.to_thread(metrics_are_exported):
            return
        while True:
            self.report()
            await asyncio.sleep(interval)

    def report(self) -> None:
        """Record what is there now. A figure that cannot be had is logged and left out."""
        try:
            samples = list(self._read())
        except Exception as error:
            _log.warning("metrics of this process cannot be read: %r", error)
            return
        for sample in samples:
            instrument = self._instruments.get(sample.name)
            if instrument is None:
                about = DESCRIPTIONS[sample.name]
                made = self._make(sample.name, sample.kind, about, tuple(sample.tags))
                instrument = self._instruments[sample.name] = made
            if sample.kind == "gauge":
                instrument.record(sample.value, sample.tags)
                continue
            key = sample.name, tuple(sorted(sample.tags.items()))
            more = sample.value - self._told.get(key, 0.0)
            if more > 0:
                self._told[key] = sample.value
                instrument.record(more, sample.tags)


def metrics_are_exported() -> bool:
    """Whether this node has an agent that metrics go to; asks the cluster, so call it in a thread."""
    try:
        here = ray.get_runtime_context().get_node_id()
        nodes = ray.nodes()  # type: ignore[no-untyped-call]
        return any(node["NodeID"] == here and node["MetricsExportPort"] > 0 for node in nodes)
    except Exception as error:  # of a cluster that is just ending, or a Ray that says it otherwise
        _log.debug("whether metrics are exported is not known: %r", error)
        return False


class RayInstrument:
    """A metric of Ray's."""

    def __init__(self, name: str, kind: Kind, description: str, tags: tuple[str, ...]) -> None:
        from ray.util.metrics import Counter, Gauge

        self._record: Callable[[float, dict[str, str]], None]
        if kind == "gauge":
            self._record = Gauge(name, description, tag_keys=tags).set
        else:
            self._record = Counter(name, description, tag_keys=tags).inc

    def record(self, value: float, tags: Mapping[str, str]) -> None:
        self._record(value, dict(tags))


def ray_instrument(name: str, kind: Kind, description: str, tags: tuple[str, ...]) -> Instrument:
    return RayInstrument(name, kind, description, tags)


# --- what is reported -------------------------------------------------------------------------------------

DESCRIPTIONS = {
    "retinue_directory_sessions": "Sessions that live in a host.",
    "retinue_directory_hosts": "Session hosts in use.",
    "retinue_directory_hosts_limit": "Session hosts that may be in use at once.",
    "retinue_directory_shared_hosts": "Session hosts in use that hold sessions of a shared app.",
    "retinue_directory_lost_hosts_total": "Session hosts that died.",
    "retinue_directory_activations_total": "Sessions that were brought to life.",
    "retinue_directory_passivations_total": "Sessions that left memory, by reason.",
    "retinue_pool_session_spares": "Session hosts that wait for their first session, by app.",
    "retinue_pool_child_hosts": "Processes for delegates, by app.",
    "retinue_pool_delegates": "Places for delegates that are taken, by app.",
    "retinue_pool_waiting": "Delegates that wait for a place, by app.",
    "retinue_host_sessions": "Sessions in this session host.",
    "retinue_host_active_runs": "Sessions here that are in use.",
    "retinue_host_feed_subscribers": "Client processes that follow runs here.",
    "retinue_host_runs_total": "Runs that were started here.",
    "retinue_host_activations_total": "Sessions that came to life here.",
    "retinue_host_passivations_total": "Sessions that left this host, by reason.",
    "retinue_host_model_calls_total": "Model calls that were admitted and begun, with those of delegates.",
    "retinue_host_tool_calls_total": "Tool attempts that were admitted, with those of delegates.",
    "retinue_host_refusals_total": "Model calls and tool attempts that a budget had no room for.",
    "retinue_host_tokens_total": "Tokens that providers reported, by type.",
    "retinue_child_host_delegates": "Delegates at work in this process.",
    "retinue_child_host_session_hosts": "Session hosts whose delegates are here.",
    "retinue_child_host_finished_total": "Delegates that ended here.",
    "retinue_store_queued": "Writes that wait.",
    "retinue_store_writes_total": "Writes, by store.",
    "retinue_store_transactions_total": "Transactions, by store; writes share them.",
    "retinue_store_reads_total": "Reads, by store.",
    "retinue_store_commits_total": "Commits of runs, by store.",
}
"""Every metric there is."""


def directory_samples(told: DirectoryStatistics) -> Iterator[Sample]:
    yield Sample("retinue_directory_sessions", "gauge", told.resident)
    yield Sample("retinue_directory_hosts", "gauge", told.hosts)
    yield Sample("retinue_directory_hosts_limit", "gauge", told.max_resident)
    yield Sample("retinue_directory_shared_hosts", "gauge", told.shared_hosts)
    yield Sample("retinue_directory_lost_hosts_total", "counter", told.lost_hosts)
    yield Sample("retinue_directory_activations_total", "counter", told.activations)
    for reason, count in told.passivations.items():
        yield Sample("retinue_directory_passivations_total", "counter", count, {"reason": reason})


def pool_samples(told: PoolStatistics) -> Iterator[Sample]:
    app = {"app": told.app}
    yield Sample("retinue_pool_session_spares", "gauge", told.session_spares, app)
    yield Sample("retinue_pool_child_hosts", "gauge", told.child_hosts, app)
    yield Sample("retinue_pool_delegates", "gauge", told.children, app)
    yield Sample("retinue_pool_waiting", "gauge", told.waiting, app)


def host_samples(told: HostStatistics) -> Iterator[Sample]:
    yield Sample("retinue_host_sessions", "gauge", len(told.sessions))
    yield Sample("retinue_host_active_runs", "gauge", told.active_runs)
    yield Sample("retinue_host_feed_subscribers", "gauge", told.feeds.subscribers)
    yield Sample("retinue_host_runs_total", "counter", told.runs_started)
    yield Sample("retinue_host_activations_total", "counter", told.activations)
    for reason, count in told.passivations.items():
        yield Sample("retinue_host_passivations_total", "counter", count, {"reason": reason})
    spent = told.spent
    yield Sample("retinue_host_model_calls_total", "counter", spent.model_calls)
    yield Sample("retinue_host_tool_calls_total", "counter", spent.tool_calls)
    yield Sample("retinue_host_refusals_total", "counter", spent.refusals)
    yield Sample("retinue_host_tokens_total", "counter", spent.input_tokens, {"type": "input"})
    yield Sample("retinue_host_tokens_total", "counter", spent.output_tokens, {"type": "output"})


def child_host_samples(told: ChildHostStatistics) -> Iterator[Sample]:
    yield Sample("retinue_child_host_delegates", "gauge", told.children)
    yield Sample("retinue_child_host_session_hosts", "gauge", told.roots)
    yield Sample("retinue_child_host_finished_total", "counter", told.finished)


def store_samples(told: StoreStatistics) -> Iterator[Sample]:
    store = {"store": told.url}
    yield Sample("retinue_store_queued", "gauge", told.queued, store)
    yield Sample("retinue_store_writes_total", "counter", told.writes, store)
    yield Sample("retinue_store_transactions_total", "counter", told.transactions, store)
    yield Sample("retinue_store_reads_total", "counter", told.reads, store)
    yield Sample("retinue_store_commits_total", "counter", told.commits, store)
