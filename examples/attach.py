"""A second process follows a run by its id.

    python examples/attach.py

The first process starts a run and hands its id to a second one, which reads every event from the first to the
last and gets the same result. On a cluster that stands (`retinue up`) the first process may end meanwhile.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from dataclasses import dataclass

from retinue import (
    DriverCapabilities,
    DriverOutput,
    ExecutionServices,
    Identity,
    RunRequest,
    Runtime,
    connect,
)
from retinue.events import Custom

WHO = Identity(tenant_id="acme", user_id="ann")


@dataclass(frozen=True)
class Countdown:
    """Takes a few seconds, so that there is something to attach to."""

    id: str = "countdown"
    version: int = 1
    capabilities: DriverCapabilities = DriverCapabilities()

    async def start(self, request: RunRequest, services: ExecutionServices) -> DriverOutput:
        for left in range(int(str(request.input)), 0, -1):
            services.emit(Custom("left", left))
            await asyncio.sleep(0.3)
        return DriverOutput(text="done")


def main() -> None:
    connection = connect()  # the cluster that stands, or one that lives as long as this process
    handle = Runtime(driver=Countdown()).start("5", identity=WHO, session_id="countdown")
    asyncio.run(handle.accepted())  # its record is stored: from here on the run can be found
    second = [sys.executable, __file__, handle.run_id]
    subprocess.run(second, env={**os.environ, "RETINUE_ADDRESS": connection.address}, check=True)
    result = handle.wait()
    print("first process: ", result.status, result.text)


def follow(run_id: str) -> None:
    """What the second process does. A run is found by its id together with its identity."""
    handle = Runtime(driver=Countdown()).attach(run_id, identity=WHO)
    for event in handle.iter_events():  # from the first event on, however late we come
        print("second process:", event.sequence, event.type)
    result = handle.wait()
    print("second process:", result.status, result.text)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        follow(sys.argv[1])
    else:
        main()
