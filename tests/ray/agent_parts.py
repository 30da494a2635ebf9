"""Agents, factories and abilities at module level, so that other processes can import them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from retinue import AbilityBinding, Agent, ExecutionServices, PromptFragment, Tool, ToolContext, tool
from retinue.testing import ScriptedModel


@tool
async def where() -> str:
    """The process that this runs in."""
    return str(os.getpid())


@dataclass(frozen=True)
class Log:
    """A file that processes write lines to."""

    path: str

    def write(self, line: str) -> None:
        with Path(self.path).open("a") as file:
            file.write(f"{line}\n")

    def lines(self) -> list[str]:
        path = Path(self.path)
        return path.read_text().splitlines() if path.exists() else []

    def has(self, line: str) -> bool:
        return line in self.lines()


@dataclass(frozen=True)
class Notes:
    """An ability with a tool and a prompt."""

    log: Log
    instance_id: str = "notes"

    async def bind(self, services: ExecutionServices) -> AbilityBinding:
        self.log.write(f"bind {os.getpid()}")
        return AbilityBinding(
            tools=[where],
            prompt_fragments=[PromptFragment(id="notes", text="Say where you are.")],
            dispose=lambda: self.log.write(f"dispose {os.getpid()}"),
        )


@dataclass(frozen=True)
class MakeAgent:
    """A factory; the agent that it makes has another one to ask, and a tool that holds."""

    log: Log
    model: ScriptedModel

    @asynccontextmanager
    async def __call__(self) -> AsyncIterator[Agent]:
        self.log.write(f"open {os.getpid()}")
        helper = Agent(name="helper", model=self.model, tools=[where])
        yield Agent(name="a", model=self.model, tools=[self.hold()], subagents=[helper])
        self.log.write(f"close {os.getpid()}")

    def hold(self) -> Tool:
        log = self.log

        @tool
        async def hold(ctx: ToolContext) -> str:
            """Wait until the file says go."""
            log.write("holding")
            while not log.has("go"):
                await asyncio.sleep(0.02)
            return "held"

        return hold
