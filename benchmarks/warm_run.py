"""A warm run: one model call of no latency, durable commit in SQLite, from start to result."""

from __future__ import annotations

import asyncio

from benchmarks.measure import IDENTITY, InstantModel, Row, bare_hop_ms, p50_ms, timed
from retinue import Agent, Runtime, agent_driver

SESSIONS = 4
RUNS = 60
"""Runs of each session: few, so that the conversation stays short."""
WARM_UP = 10
"""Runs of each session that do not count."""
SPARE_SECONDS = 3.0
"""Seconds for the next spare host to start in peace: a process that starts takes a core of two."""


def measure(store: str) -> Row:
    runtime = Runtime(driver=agent_driver(Agent(name="warm", model=InstantModel())), store=store)
    asyncio.run(_runs(runtime, 1))  # connects
    before = bare_hop_ms()
    times, hops = asyncio.run(_runs(runtime, SESSIONS))
    hop = (before + bare_hop_ms()) / 2
    p50 = p50_ms(times)
    return {"p50_ms": p50, "hop_ms": hop, "ratio": p50 / hop, "hops": hops, "per_s": 1000 / p50}


async def _runs(runtime: Runtime, sessions: int) -> tuple[list[float], float]:
    times: list[float] = []
    hops = 0
    for number in range(sessions):
        for index in range(RUNS):
            handle = None

            async def run(session_id: str = f"warm-{number}") -> None:
                nonlocal handle
                handle = runtime.start("hello", identity=IDENTITY, session_id=session_id)
                result = await handle.result()
                assert result.status == "completed", result.reason

            seconds = await timed(run())
            if index >= WARM_UP:
                times.append(seconds)
            elif index == WARM_UP - 1:
                await asyncio.sleep(SPARE_SECONDS)
            assert handle is not None
            hops = handle.hops
    return times, hops
