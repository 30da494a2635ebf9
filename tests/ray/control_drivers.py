"""Drivers that are steered, asked and answered, at module level so that other processes can import them."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass, field
from pathlib import Path

from retinue import DriverCapabilities, DriverOutput, ExecutionServices, RunRequest
from retinue.events import Custom
from retinue.messages import content_text, user
from tests.ray.drivers import Driver


async def until_exists(path: str) -> None:
    while path and not Path(path).exists():
        await asyncio.sleep(0.01)


@dataclass(frozen=True)
class Steered(Driver):
    """Says where it runs, waits for a file, takes its steers, and answers with all that it heard."""

    gate: str = ""
    capabilities: DriverCapabilities = field(
        default_factory=lambda: DriverCapabilities(controls=("steer", "follow_up"))
    )

    async def start(self, request: RunRequest, services: ExecutionServices) -> DriverOutput:
        services.append([user(request.input)])
        services.emit(Custom("pid", os.getpid()))
        await until_exists(self.gate)
        heard = [content_text(request.input)]
        while (content := await services.take_input()) is not None:
            heard.append(content_text(content))
        return DriverOutput(text=" ".join(heard))


@dataclass(frozen=True)
class Asks(Driver):
    """Asks its input, and answers with the reply."""

    async def start(self, request: RunRequest, services: ExecutionServices) -> DriverOutput:
        services.emit(Custom("pid", os.getpid()))
        reply = await services.request_input(content_text(request.input))
        return DriverOutput(text=content_text(reply.input))
