"""``make soak``: many sessions through one shared pool, with passivation. Are actors and memory flat?

Every session has one run and is never used again: it comes to life, is committed, and leaves by itself
after the idle timeout, or earlier when its host is full. Whatever is kept for it after that shows in the
samples as growth. Exit status: 0 when they are flat, 1 when not.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import ray
from rich.console import Console
from rich.table import Table

from benchmarks.measure import InstantModel, unshared_mb
from retinue import Agent, Identity, Runtime, agent_driver, connect
from retinue.actors import deployment
from retinue.actors.listing import actor_names, list_actors
from retinue.actors.reports import Role

SESSIONS = 2_000
AT_ONCE = 16
"""Runs at once."""
HOSTS = 2
"""Session hosts in use at once: the pool must make room again and again."""
IDLE_TIMEOUT = 5.0
"""Seconds; short, so that sessions leave while others come."""
SAMPLES = 24
WARM_UP = 0.4
"""Part of the sessions during which everything may grow to its size."""
GROWTH_LIMIT = 1.5
"""KB for each session, of all processes of the runtime together: beyond it something is kept of each. A bare
actor of Ray's own grows by 0.2 to 0.4 KB for each call."""
NOISE_MB = 8.0
"""Growth that says nothing: allocators and garbage collectors take and give this much."""
REPORT = Path("build/soak.json")


@dataclass(frozen=True, kw_only=True)
class Sample:
    """The cluster after so many sessions."""

    sessions: int
    seconds: float
    actors: int
    processes: int
    resident: int
    passivations: int
    hosts_mb: float
    """Unshared memory of the session hosts."""
    control_mb: float
    """Of registry, directory and keeper."""
    store_mb: float
    """Of the store actor."""
    client_mb: float

    @property
    def runtime_mb(self) -> float:
        return self.hosts_mb + self.control_mb + self.store_mb


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What the samples after the warm-up say."""

    actors: tuple[int, int]
    """Fewest and most."""
    processes: tuple[int, int]
    growth_mb: float
    """Of the runtime's processes, between the first and the last third of the samples."""
    kb_per_session: float
    client_kb_per_session: float
    per_s: float
    flat: bool


async def soak(runtime: Runtime, sessions: int, at_once: int) -> list[Sample]:
    began = time.monotonic()
    samples: list[Sample] = []
    gate = asyncio.Semaphore(at_once)
    every = max(1, sessions // SAMPLES)

    async def one(number: int) -> None:
        async with gate:
            identity = Identity(tenant_id="soak", user_id=f"user-{number % 100}")
            result = await runtime.run("hello", identity=identity, session_id=f"session-{number}")
            assert result.status == "completed", result.reason

    for first in range(0, sessions, every):
        batch = range(first, min(first + every, sessions))
        await asyncio.gather(*(one(number) for number in batch))
        sample = await _look(batch.stop, time.monotonic() - began)
        samples.append(sample)
        print(_line(sample), file=sys.stderr, flush=True)
    return samples


async def _look(sessions: int, seconds: float) -> Sample:
    page = await list_actors(limit=1000)
    directory = await asyncio.to_thread(_directory)

    def memory(role: Role) -> float:
        return sum(unshared_mb(row.pid) or 0.0 for row in page.actors if role in row.roles and row.pid)

    return Sample(
        sessions=sessions,
        seconds=seconds,
        actors=len(await actor_names()),
        processes=len(psutil.Process().children(recursive=True)),
        resident=directory["resident"],
        passivations=sum(directory["passivations"].values()),
        hosts_mb=memory("session host"),
        control_mb=memory("directory"),
        store_mb=memory("store"),
        client_mb=unshared_mb(psutil.Process().pid) or 0.0,
    )


def _directory() -> dict[str, Any]:
    return dict(deployment.statistics()["directory"])


def judge(samples: Sequence[Sample]) -> Verdict:
    """Whether anything went on growing after the warm-up."""
    total = samples[-1].sessions
    settled = [sample for sample in samples if sample.sessions > WARM_UP * total]
    third = max(1, len(settled) // 3)
    first, last = settled[:third], settled[-third:]
    sessions = _mean(last, "sessions") - _mean(first, "sessions")
    growth = _mean(last, "runtime_mb") - _mean(first, "runtime_mb")
    client = _mean(last, "client_mb") - _mean(first, "client_mb")
    each = growth * 1024 / max(1.0, sessions)
    actors = [sample.actors for sample in settled]
    processes = [sample.processes for sample in settled]
    earlier = max(sample.actors for sample in samples if sample not in settled)
    flat = max(actors) <= earlier and (growth <= NOISE_MB or each <= GROWTH_LIMIT)
    return Verdict(
        actors=(min(actors), max(actors)),
        processes=(min(processes), max(processes)),
        growth_mb=growth,
        kb_per_session=each,
        client_kb_per_session=client * 1024 / max(1.0, sessions),
        per_s=total / samples[-1].seconds,
        flat=flat,
    )


def _mean(samples: Sequence[Sample], figure: str) -> float:
    return statistics.fmean(getattr(sample, figure) for sample in samples)


def _line(sample: Sample) -> str:
    return (
        f"{sample.sessions:>7} sessions, {sample.seconds:6.1f} s: {sample.actors} actors, "
        f"{sample.processes} processes, {sample.resident} resident, {sample.runtime_mb:.0f} MB"
    )


def _print(samples: Sequence[Sample], verdict: Verdict) -> None:
    table = Table(title="One shared pool")
    columns = ("sessions", "seconds", "actors", "processes", "resident", "left", "hosts MB")
    for column in (*columns, "control MB", "store MB", "client MB"):
        table.add_column(column, justify="right")
    for each in samples:
        memory = (f"{mb:.1f}" for mb in (each.hosts_mb, each.control_mb, each.store_mb, each.client_mb))
        counts = (each.actors, each.processes, each.resident, each.passivations)
        table.add_row(str(each.sessions), f"{each.seconds:.0f}", *map(str, counts), *memory)
    console = Console(width=None if sys.stdout.isatty() else 110)
    console.print(table)
    console.print(
        f"{'flat' if verdict.flat else 'NOT FLAT'}: after the warm-up {verdict.actors[0]} to "
        f"{verdict.actors[1]} actors, {verdict.processes[0]} to {verdict.processes[1]} processes, "
        f"{verdict.growth_mb:+.1f} MB, {verdict.kb_per_session:+.2f} KB for each session "
        f"(the client {verdict.client_kb_per_session:+.2f} KB); {verdict.per_s:.0f} sessions/s",
        highlight=False,
    )


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="make soak", description=__doc__)
    parser.add_argument("--sessions", type=int, default=SESSIONS, help="how many (default %(default)s)")
    parser.add_argument("--at-once", type=int, default=AT_ONCE, help="runs at once (default %(default)s)")
    parser.add_argument(
        "--hosts", type=int, default=HOSTS, help="session hosts at most (default %(default)s)"
    )
    parser.add_argument(
        "--idle-timeout", type=float, default=IDLE_TIMEOUT, help="seconds (default %(default)s)"
    )
    options = parser.parse_args(arguments)
    connect()
    deployment.attach(
        ephemeral=True,
        options=deployment.default_options(
            ephemeral=True, max_resident=options.hosts, idle_timeout=options.idle_timeout
        ),
    )
    with tempfile.TemporaryDirectory(prefix="retinue-soak-") as folder:
        runtime = Runtime(
            driver=agent_driver(Agent(name="soaked", model=InstantModel())),
            isolation="shared",
            store=f"sqlite:///{folder}/soak.db",
        )
        samples = asyncio.run(soak(runtime, options.sessions, options.at_once))
    verdict = judge(samples)
    _print(samples, verdict)
    REPORT.parent.mkdir(exist_ok=True)
    report = {"ray": ray.__version__, "samples": [asdict(each) for each in samples], **asdict(verdict)}
    REPORT.write_text(json.dumps(report, indent=2) + "\n")
    print(f"written to {REPORT}", file=sys.stderr)
    return 0 if verdict.flat else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
