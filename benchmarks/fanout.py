"""A thousand pooled delegates under one ledger, each with one model call and one tool call."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

import ray

from benchmarks.measure import IDENTITY, Row, bare_hop_ms, unshared_mb
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
from retinue.actors.child_host import ChildHostStatistics
from retinue.actors.names import CHILD_HOST_PREFIX
from retinue.actors.pool import CHILDREN_PER_HOST
from retinue.actors.wire import decode

CHILDREN = 1000
WARM = 10


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

        response = await services.model(
            InstantAnswer(), [user(request.input)], tools=[look.schema], max_tokens=64
        )
        result = await services.dispatch(ToolCall("call-1", "look", {"item": "x"}), tools=[look])
        return DriverOutput(text=response.text + result.text)


@dataclass(frozen=True)
class FanOut:
    """Starts as many delegates as its input says, and waits for all."""

    id: str = "fan-out"
    version: int = 1
    capabilities: DriverCapabilities = field(default_factory=DriverCapabilities)

    async def start(self, request: RunRequest, services: ExecutionServices) -> DriverOutput:
        work = OneOfEach()

        async def one(number: int) -> None:
            child = await services.delegate(work, "look", name=f"child-{number}")
            await child.result()

        start = time.perf_counter()
        await asyncio.gather(*(one(number) for number in range(int(str(request.input)))))
        return DriverOutput(text=str(time.perf_counter() - start))


def measure(store: str) -> Row:
    runtime = Runtime(
        driver=FanOut(),
        grants=Grants(tool_ids=["look"]),
        budgets=Budgets(max_model_calls=CHILDREN, max_tool_calls=CHILDREN, max_tokens=10_000_000),
        store=store,
    )
    # A small run first: the pool has its child hosts then, and memory is counted from there.
    warm = runtime.run_blocking(str(WARM), identity=IDENTITY, session_id="fanout")
    assert warm.status == "completed", warm.reason
    hosts = _ChildHosts()
    deadline = time.monotonic() + 20
    while len(child_host_pids()) < 2 and time.monotonic() < deadline:
        time.sleep(0.2)
    hosts.look()
    before = bare_hop_ms()
    handle = runtime.start(str(CHILDREN), identity=IDENTITY, session_id="fanout")
    while handle.state != "finished":
        hosts.look()
        time.sleep(0.05)
    result = handle.wait()
    assert result.status == "completed", result.reason
    assert result.budget is not None
    assert result.budget.model_calls.used == result.budget.tool_calls.used == CHILDREN
    seconds = float(result.text)
    hop = (before + bare_hop_ms()) / 2
    at_once = min(CHILDREN, CHILDREN_PER_HOST * max(1, hosts.count))
    return {
        "per_s": CHILDREN / seconds,
        "p50_ms": seconds * 1000 / CHILDREN,
        "hop_ms": hop,
        "ratio": seconds * 1000 / CHILDREN / hop,
        "hops": handle.hops,
        "mb_each": hosts.grown_mb / at_once,
        "child_hosts": hosts.count,
    }


class _ChildHosts:
    """The child hosts of this cluster, and how much each grew since it was first seen."""

    def __init__(self) -> None:
        self._first: dict[int, float] = {}
        self._most: dict[int, float] = {}

    def look(self) -> None:
        for pid in child_host_pids() if not self._first else list(self._first):
            mb = unshared_mb(pid)
            if mb is not None:
                self._first.setdefault(pid, mb)
                self._most[pid] = max(self._most.get(pid, mb), mb)

    @property
    def count(self) -> int:
        return len(self._first)

    @property
    def grown_mb(self) -> float:
        return sum(self._most[pid] - first for pid, first in self._first.items())


def child_host_pids() -> list[int]:
    """Process ids of the live child hosts."""
    pids = []
    for entry in ray.util.list_named_actors(all_namespaces=True):
        if entry["name"].startswith(CHILD_HOST_PREFIX):
            actor: Any = ray.get_actor(entry["name"], entry["namespace"])
            found: ChildHostStatistics | None = decode(
                ray.get(actor.statistics.remote()), ChildHostStatistics | None
            )
            if found is not None:
                pids.append(found.pid)
    return pids
