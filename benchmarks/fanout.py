"""A thousand pooled delegates under one ledger, each with one model call and one tool call."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

from benchmarks.measure import IDENTITY, Row, bare_hop_ms, resident_mb
from retinue import (
    Budgets,
    DriverCapabilities,
    DriverOutput,
    ExecutionServices,
    Grants,
    ModelRequest,
    ModelResponse,
    RunRequest,
    Runtime,
    ToolCall,
    Usage,
    tool,
)
from retinue.actors.pool import CHILDREN_PER_HOST

CHILDREN = 1000


@tool
async def look(item: str) -> str:
    """Look at an item."""
    return f"seen {item}"


class InstantAnswer:
    """Answers at once."""

    provider_id = "bench"
    model_id = "one-tool"

    async def generate(self, request: ModelRequest) -> ModelResponse:
        usage = Usage(input_tokens=10, output_tokens=1)
        return ModelResponse(text="done", usage=usage)


@dataclass(frozen=True)
class OneOfEach:
    """A delegate: one model call, one tool call."""

    id: str = "one-of-each"
    version: int = 1
    capabilities: DriverCapabilities = field(default_factory=DriverCapabilities)

    async def start(self, request: RunRequest, services: ExecutionServices) -> DriverOutput:
        from retinue.messages import user

        response = await services.model(InstantAnswer(), [user(request.input)], max_tokens=64)
        result = await services.dispatch(ToolCall("call-1", "look", {"item": "x"}), tools=[look])
        return DriverOutput(text=response.text + result.text)


@dataclass(frozen=True)
class FanOut:
    """Starts the delegates and waits for all."""

    children: int
    id: str = "fan-out"
    version: int = 1
    capabilities: DriverCapabilities = field(default_factory=DriverCapabilities)

    async def start(self, request: RunRequest, services: ExecutionServices) -> DriverOutput:
        work = OneOfEach()

        async def one(number: int) -> None:
            child = await services.delegate(work, "look", name=f"child-{number}")
            await child.result()

        start = time.perf_counter()
        await asyncio.gather(*(one(number) for number in range(self.children)))
        return DriverOutput(text=str(time.perf_counter() - start))


def measure(store: str) -> Row:
    runtime = Runtime(
        driver=FanOut(CHILDREN),
        grants=Grants(tool_ids=["look"]),
        budgets=Budgets(max_model_calls=CHILDREN, max_tool_calls=CHILDREN, max_tokens=10_000_000),
        store=store,
    )
    warm = Runtime(driver=FanOut(2), grants=Grants(tool_ids=["look"]), store=store)
    warm.run_blocking("warm up", identity=IDENTITY, session_id="fanout-warm")
    peak = _Peak()
    start = time.perf_counter()
    handle = runtime.start("go", identity=IDENTITY, session_id="fanout")
    while handle.state != "finished":
        peak.look()
        time.sleep(0.2)
    result = handle.wait()
    seconds = time.perf_counter() - start
    assert result.status == "completed", result.reason
    assert result.budget is not None
    assert result.budget.model_calls.used == CHILDREN
    assert result.budget.tool_calls.used == CHILDREN
    hop = bare_hop_ms()
    own = float(result.text)
    grown = max(0.0, peak.mb - peak.base)
    at_once = min(CHILDREN, CHILDREN_PER_HOST * max(1, len(peak.first)))
    return {
        "per_s": CHILDREN / own,
        "p50_ms": own * 1000 / CHILDREN,
        "hop_ms": hop,
        "ratio": own * 1000 / CHILDREN / hop,
        "mb_each": grown / at_once,
        "first_run_s": seconds - own,
        "child_hosts": float(len(peak.first)),
    }


class _Peak:
    """Highest growth of the child hosts' memory over what they had when first seen."""

    def __init__(self) -> None:
        self.first: dict[int, float] = {}
        self.mb = 0.0

    def look(self) -> None:
        now = resident_mb("ChildHost")
        for pid, mb in now.items():
            self.first.setdefault(pid, mb)
        self.mb = max(self.mb, sum(now.values()))

    @property
    def base(self) -> float:
        return sum(self.first.values())
