"""Giving a run more while it works: a steer, a follow-up, and a second run that waits its turn.

    python examples/live_input.py

The driver here says itself where a steer fits. An agent takes steers before each of its model calls.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from retinue import (
    DriverCapabilities,
    DriverOutput,
    ExecutionServices,
    Identity,
    RunHandle,
    RunRequest,
    RunResult,
    Runtime,
)
from retinue.events import Custom

WHO = Identity(tenant_id="acme", user_id="ann")


@dataclass(frozen=True)
class Guard:
    """Watches a place until it is told "enough"; any other steer sends it to another place."""

    id: str = "guard"
    version: int = 1
    capabilities: DriverCapabilities = DriverCapabilities(controls=("steer", "follow_up"))

    async def start(self, request: RunRequest, services: ExecutionServices) -> DriverOutput:
        places = [str(request.input)]
        services.emit(Custom("watching", places[-1]))
        enough = False
        # False from finish_input() says that a steer has just come: it is heard before the end.
        while not enough or not await services.finish_input():
            while (said := await services.take_input()) is not None:
                if said == "enough":
                    enough = True
                    continue
                places.append(str(said))
                services.emit(Custom("watching", places[-1]))
            await asyncio.sleep(0.05)
        return DriverOutput(text=" and ".join(places))


async def watching(handle: RunHandle, place: str) -> None:
    """Return when the guard is there."""
    async for event in handle.events(types=["custom"]):
        if event.payload == Custom("watching", place):
            return


async def talk(runtime: Runtime) -> Sequence[RunResult]:
    first = runtime.start("the hall", identity=WHO, session_id="night")
    await watching(first, "the hall")

    steer = await first.send("the stairs", mode="steer")
    print("steer:    ", steer.outcome, "to the next", steer.boundary)
    later = await first.send("the cellar", mode="follow_up")
    print("follow-up:", later.outcome, "to the next", later.boundary)
    second = runtime.start("the roof", identity=WHO, session_id="night", if_busy="queue")
    await second.accepted()
    print("second run:", second.state, "at", second.queue_position)

    await first.send("enough")  # the first turn ends, and the follow-up begins the next one
    await watching(first, "the cellar")
    await first.send("enough")
    await watching(second, "the roof")
    await second.send("enough")
    return [await first.result(), await second.result()]


def main(**options: Any) -> Sequence[RunResult]:
    results = asyncio.run(talk(Runtime(driver=Guard(), **options)))
    for result in results:
        print(result.status, "| last turn:", result.text)
    return results


if __name__ == "__main__":
    main()
