"""Sessions that are resident and idle in shared hosts: unshared memory of the hosts for each."""

from __future__ import annotations

import asyncio

from benchmarks.measure import InstantModel, Row, p50_ms, timed, unshared_mb
from retinue import Agent, Identity, Runtime, agent_driver
from retinue.actors.listing import list_actors

WARM_UP = 50
"""Sessions whose hosts have grown to their working size before anything is measured."""
SESSIONS = 400
AT_ONCE = 8


def measure(store: str) -> Row:
    agent = Agent(name="idle", model=InstantModel())
    runtime = Runtime(driver=agent_driver(agent), store=store, isolation="shared")
    return asyncio.run(_measure(runtime))


async def _measure(runtime: Runtime) -> Row:
    await _sessions(runtime, 0, WARM_UP)
    before = await _hosts_mb()
    times = await _sessions(runtime, WARM_UP, SESSIONS)
    after = await _hosts_mb()
    # A host that came meanwhile counts with what a host costs before its first session, which is right:
    # it came for these sessions.
    return {
        "p50_ms": p50_ms(times),
        "per_s": SESSIONS / sum(times) * AT_ONCE,
        "mb_each": (after - before) / SESSIONS,
    }


async def _sessions(runtime: Runtime, first: int, count: int) -> list[float]:
    gate = asyncio.Semaphore(AT_ONCE)

    async def one(number: int) -> float:
        identity = Identity(tenant_id="bench", user_id=f"user-{number}")
        async with gate:
            return await timed(runtime.run("hello", identity=identity, session_id="idle"))

    return list(await asyncio.gather(*(one(number) for number in range(first, first + count))))


async def _hosts_mb() -> float:
    page = await list_actors(limit=1000)
    serving = [row.pid for row in page.actors if row.sessions and row.pid is not None]
    return sum(filter(None, (unshared_mb(pid) for pid in serving)))
