"""From a cancel to the result: the request, the end of the work, the commit, the answer."""

from __future__ import annotations

import asyncio
import time

from benchmarks.measure import IDENTITY, Row, bare_hop_ms, p50_ms
from benchmarks.time_to_first_event import Waits
from retinue import Runtime

RUNS = 200
WARM_UP = 20
"""Runs that do not count."""
SPARE_SECONDS = 3.0
"""Seconds for the next spare host to start in peace: a process that starts takes a core of two."""


def measure(store: str) -> Row:
    runtime = Runtime(driver=Waits(), store=store)
    asyncio.run(_runs(runtime, WARM_UP))
    time.sleep(SPARE_SECONDS)
    before = bare_hop_ms()
    receipts, results = asyncio.run(_runs(runtime, RUNS))
    hop = (before + bare_hop_ms()) / 2
    return {
        "p50_ms": p50_ms(results),
        "hop_ms": hop,
        "ratio": p50_ms(results) / hop,
        "receipt_p50_ms": p50_ms(receipts),
        "receipt_ratio": p50_ms(receipts) / hop,
    }


async def _runs(runtime: Runtime, count: int) -> tuple[list[float], list[float]]:
    """Seconds from each cancel to its receipt, and to the result."""
    receipts, results = [], []
    for _ in range(count):
        handle = runtime.start("x", identity=IDENTITY, session_id="cancelled")
        async for event in handle.events():
            assert event.type == "run.started", event
            break
        waiting = asyncio.ensure_future(handle.result())
        await asyncio.sleep(0)
        began = time.perf_counter()
        receipt = await handle.cancel("measured")
        receipts.append(time.perf_counter() - began)
        result = await waiting
        results.append(time.perf_counter() - began)
        assert (receipt.outcome, result.status) == ("delivered", "cancelled")
    return receipts, results
