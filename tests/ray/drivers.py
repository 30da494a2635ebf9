"""Drivers and tools for the tests, at module level so that other processes can import them."""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from retinue import (
    Agent,
    DriverCapabilities,
    DriverOutput,
    ExecutionServices,
    ModelRequest,
    ModelResponse,
    RunRequest,
    RuntimeConfig,
    ToolCall,
    ToolContext,
    Usage,
    agent_driver,
    tool,
)
from retinue.errors import RetinueError
from retinue.events import Custom
from retinue.hooks import DeactivationReason, SessionHooks, SessionInfo
from retinue.messages import user


@dataclass(frozen=True)
class Notes:
    """Hooks that write a line for each call to a file."""

    path: str

    @property
    def hooks(self) -> SessionHooks:
        return SessionHooks(activated=self.activated, deactivating=self.deactivating)

    async def activated(self, info: SessionInfo) -> None:
        self._write(f"activated {info.session_id} at {info.revision} in {os.getpid()}")

    async def deactivating(self, info: SessionInfo, reason: DeactivationReason) -> None:
        self._write(f"{reason} {info.session_id} at {info.revision} in {os.getpid()}")

    def _write(self, line: str) -> None:
        with Path(self.path).open("a") as file:
            file.write(line + "\n")


class EchoModel:
    """Answers with the last user message."""

    provider_id = "test"
    model_id = "echo"

    async def generate(self, request: ModelRequest) -> ModelResponse:
        text = next(message.text for message in reversed(request.messages) if message.role == "user")
        return ModelResponse(text=f"echo: {text}", usage=Usage(input_tokens=7, output_tokens=3))


def echo_app() -> RuntimeConfig:
    """An app by name."""
    return RuntimeConfig(driver=agent_driver(Agent(name="echo", model=EchoModel())), name="echo-app")


@dataclass(frozen=True)
class Driver:
    """What all drivers here share."""

    id: str = "test"
    version: int = 1
    capabilities: DriverCapabilities = field(default_factory=DriverCapabilities)


@dataclass(frozen=True)
class Pids(Driver):
    """Tells which process it runs in, then waits for a file to appear."""

    gate: str = ""

    async def start(self, request: RunRequest, services: ExecutionServices) -> DriverOutput:
        services.append([user(request.input)])
        services.emit(Custom("pid", os.getpid()))
        while self.gate and not Path(self.gate).exists():
            await asyncio.sleep(0.02)
        return DriverOutput(text=str(os.getpid()))


@dataclass(frozen=True)
class Ticker(Driver):
    """Emits numbered events until a file appears."""

    gate: str = ""
    events: int = 0
    """Stop after so many; 0 goes on until the gate opens."""

    async def start(self, request: RunRequest, services: ExecutionServices) -> DriverOutput:
        number = 0
        while not (self.events and number >= self.events) and not (self.gate and Path(self.gate).exists()):
            number += 1
            services.emit(Custom("tick", number))
            await asyncio.sleep(0 if self.events else 0.01)
        return DriverOutput(text=str(number), structured={"ticks": number})


@tool
async def beat(path: str, ctx: ToolContext) -> str:
    """Write a line again and again, until cancelled."""
    with Path(path).open("a") as log:
        log.write(f"pid {os.getpid()}\n")
        log.flush()
        while True:
            log.write("beat\n")
            log.flush()
            await asyncio.sleep(0.02)


@tool
def beat_in_thread(path: str, ctx: ToolContext) -> str:
    """The same in a thread, which only looks at ``ctx.cancelled``."""
    with Path(path).open("a") as log:
        while not ctx.cancelled:
            log.write("beat\n")
            log.flush()
            time.sleep(0.02)
        log.write("left\n")
    return "left"


@dataclass(frozen=True)
class CallsTool(Driver):
    """A delegate that makes one model call and runs one tool of its own."""

    tool_name: str = "beat"

    async def start(self, request: RunRequest, services: ExecutionServices) -> DriverOutput:
        offered = [beat.schema, beat_in_thread.schema]
        await services.model(EchoModel(), [user(request.input)], tools=offered, max_tokens=50)
        call = ToolCall("call-1", self.tool_name, {"path": str(request.input)})
        result = await services.dispatch(call, tools=[beat, beat_in_thread])
        return DriverOutput(text=result.text)


@dataclass(frozen=True)
class HoldsModelCall(Driver):
    """A delegate that reserves tokens for a call that never ends, after saying where it runs."""

    async def start(self, request: RunRequest, services: ExecutionServices) -> DriverOutput:
        services.emit(Custom("pid", os.getpid()))
        await services.model(NeverModel(), [user("hold")], max_tokens=100)
        return DriverOutput(text="never")


class NeverModel:
    provider_id = "test"
    model_id = "never"

    async def generate(self, request: ModelRequest) -> ModelResponse:
        await asyncio.Event().wait()
        raise AssertionError("unreachable")


@dataclass(frozen=True)
class Answers(Driver):
    """A delegate that makes a model call, waits for a file, and answers."""

    gate: str = ""

    async def start(self, request: RunRequest, services: ExecutionServices) -> DriverOutput:
        response = await services.model(EchoModel(), [user(request.input)], max_tokens=50)
        while self.gate and not Path(self.gate).exists():
            await asyncio.sleep(0.02)
        return DriverOutput(text=response.text)


@dataclass(frozen=True)
class Sleeps(Driver):
    """A delegate that asks for nothing, for a long time."""

    seconds: ClassVar[float] = 40.0

    async def start(self, request: RunRequest, services: ExecutionServices) -> DriverOutput:
        await asyncio.sleep(self.seconds)
        return DriverOutput(text="slept")


@dataclass(frozen=True)
class GivesUp(Driver):
    """Starts delegates, waits as many seconds as its input says, and raises."""

    children: int = 1

    async def start(self, request: RunRequest, services: ExecutionServices) -> DriverOutput:
        for index in range(self.children):
            await services.delegate(Sleeps(), "sleep", name=f"child-{index}")
        await asyncio.sleep(float(str(request.input)))
        raise RuntimeError("gives up")


@dataclass(frozen=True)
class Parent(Driver):
    """Starts these delegates at once and reports how each ended."""

    delegates: tuple[tuple[Driver, str], ...] = ()

    async def start(self, request: RunRequest, services: ExecutionServices) -> DriverOutput:
        services.append([user(request.input)])
        services.emit(Custom("pid", os.getpid()))
        children = [
            await services.delegate(work, text, name=f"child-{index}")  # type: ignore[arg-type]
            for index, (work, text) in enumerate(self.delegates)
        ]
        outcomes = await asyncio.gather(*(child.result() for child in children), return_exceptions=True)
        return DriverOutput(text="", structured=[_outcome(each) for each in outcomes])


def _outcome(outcome: DriverOutput | BaseException) -> str:
    if isinstance(outcome, RetinueError):
        return outcome.code
    return outcome.text if isinstance(outcome, DriverOutput) else repr(outcome)
