"""The first run of a session that no process has yet, with a spare host warm: from start to result."""

from __future__ import annotations

import asyncio

from benchmarks.measure import IDENTITY, InstantModel, Row, bare_hop_ms, p50_ms, timed
from retinue import Agent, Runtime, agent_driver

SESSIONS = 12
SPARE_SECONDS = 3.0
"""Seconds for the pool to start the next spare in peace."""


def measure(store: str) -> Row:
    runtime = Runtime(driver=agent_driver(Agent(name="cold", model=InstantModel())), store=store)
    asyncio.run(_first_run(runtime, 0))  # connects
    before = bare_hop_ms()
    times: list[float] = []
    hops = 0
    for number in range(1, SESSIONS + 1):
        asyncio.run(asyncio.sleep(SPARE_SECONDS))
        seconds, hops = asyncio.run(_first_run(runtime, number))
        times.append(seconds)
    hop = (before + bare_hop_ms()) / 2
    p50 = p50_ms(times)
    return {"p50_ms": p50, "hop_ms": hop, "ratio": p50 / hop, "hops": hops}


async def _first_run(runtime: Runtime, number: int) -> tuple[float, int]:
    handle = runtime.start("hello", identity=IDENTITY, session_id=f"cold-{number}")
    seconds = await timed(handle.result())
    return seconds, handle.hops
