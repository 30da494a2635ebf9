"""From a start on a warm session to its first event, and from a new viewer of a running run to its first."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

from benchmarks.measure import IDENTITY, Row, bare_hop_ms, p50_ms
from retinue import DriverCapabilities, DriverOutput, ExecutionServices, RunHandle, RunRequest, Runtime

RUNS = 200
WARM_UP = 20
"""Runs that do not count."""
SPARE_SECONDS = 3.0
"""Seconds for the next spare host to start in peace: a process that starts takes a core of two."""


@dataclass(frozen=True)
class Waits:
    """Works until it is cancelled."""

    id: str = "waits"
    version: int = 1
    capabilities: DriverCapabilities = field(default_factory=DriverCapabilities)

    async def start(self, request: RunRequest, services: ExecutionServices) -> DriverOutput:
        await asyncio.Event().wait()
        raise AssertionError("unreachable")


def measure(store: str) -> Row:
    runtime = Runtime(driver=Waits(), store=store)
    asyncio.run(_runs(runtime, WARM_UP))
    time.sleep(SPARE_SECONDS)
    before = bare_hop_ms()
    starts, viewers = asyncio.run(_runs(runtime, RUNS))
    hop = (before + bare_hop_ms()) / 2
    return {
        "p50_ms": p50_ms(starts),
        "hop_ms": hop,
        "ratio": p50_ms(starts) / hop,
        "viewer_p50_ms": p50_ms(viewers),
        "viewer_ratio": p50_ms(viewers) / hop,
    }


async def _runs(runtime: Runtime, count: int) -> tuple[list[float], list[float]]:
    """Seconds to the first event after a start, and to that of a second viewer of the same run."""
    starts, viewers = [], []
    for _ in range(count):
        began = time.perf_counter()
        handle = runtime.start("x", identity=IDENTITY, session_id="first-event")
        await _first_event(handle)
        starts.append(time.perf_counter() - began)
        began = time.perf_counter()
        await _first_event(handle)
        viewers.append(time.perf_counter() - began)
        await handle.cancel()
        await handle.result()
    return starts, viewers


async def _first_event(handle: RunHandle) -> None:
    stream = handle.events()
    event = await anext(stream)
    assert event.type == "run.started", event
    await stream.aclose()
