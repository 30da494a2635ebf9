"""A driver with resources, at module level so that other processes can import it; it writes a log file."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass, field
from pathlib import Path

from retinue import DriverCapabilities, DriverOutput, ExecutionServices, Resource, RunRequest
from retinue.resources import ResourceScope


@dataclass(frozen=True)
class Opener:
    """Acquires a resource and answers with the process and the number of its opening.

    With the input ``wait`` it stays until the file ``go`` is there; with ``delegate`` a delegate does it.
    """

    log: str
    scope: ResourceScope = "session"
    error: str = ""
    closes: bool = True
    id: str = "opener"
    version: int = 1
    capabilities: DriverCapabilities = field(default_factory=DriverCapabilities)

    def lines(self) -> list[str]:
        path = Path(self.log)
        return path.read_text().split() if path.exists() else []

    def _write(self, line: str) -> None:
        with Path(self.log).open("a") as file:
            file.write(f"{line}\n")

    async def _open(self) -> Resource[str]:
        self._write("open")
        return Resource(value=f"{os.getpid()}-{len(self.lines())}", dispose=self._close)

    def _close(self) -> None:
        self._write("close")
        if not self.closes:
            raise OSError("does not close")

    async def start(self, request: RunRequest, services: ExecutionServices) -> DriverOutput:
        if request.input == "delegate":
            child = await services.delegate(self, "go")
            return DriverOutput(text=(await child.result()).text)
        value = await services.resource("x", self.scope, self._open)
        if request.input == "wait":
            self._write("waiting")
            while not Path(f"{self.log}.go").exists():
                await asyncio.sleep(0.05)
        if self.error:
            raise ValueError(self.error)
        await services.put_artifact(value, artifact_id=request.run_id)
        return DriverOutput(text=value)
