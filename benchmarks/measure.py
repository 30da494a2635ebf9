"""What every benchmark uses: a bare hop, an instant model, percentiles, memory."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Awaitable, Sequence
from typing import Any

import psutil
import ray

from retinue import Identity, ModelRequest, ModelResponse, Usage

IDENTITY = Identity(tenant_id="bench", user_id="bench")
Row = dict[str, float]
"""One benchmark's figures by name: p50_ms, hop_ms, ratio, hops, per_s, mb_each, as they apply."""


class InstantModel:
    """A model of no latency: what is measured is the runtime around it."""

    provider_id = "bench"
    model_id = "instant"

    async def generate(self, request: ModelRequest) -> ModelResponse:
        return ModelResponse(text="done", usage=Usage(input_tokens=10, output_tokens=1))


class _Echo:
    async def echo(self, data: bytes) -> bytes:
        return data


def bare_hop_ms(calls: int = 400) -> float:
    """Median milliseconds of one awaited call to a warm async actor with a few bytes, there and back."""
    actor: Any = ray.remote(_Echo).options(num_cpus=0).remote()
    times = asyncio.run(_hops(actor, calls + 50))[50:]
    ray.kill(actor)
    return statistics.median(times) * 1000


async def _hops(actor: Any, calls: int) -> list[float]:
    return [await timed(actor.echo.remote(b"x" * 200)) for _ in range(calls)]


async def timed(work: Awaitable[Any]) -> float:
    """Seconds that an awaitable took."""
    start = time.perf_counter()
    await work
    return time.perf_counter() - start


def p50_ms(seconds: Sequence[float]) -> float:
    return statistics.median(seconds) * 1000


def unshared_mb(pid: int) -> float | None:
    """Unshared memory of a process in MB; ``None`` when it is gone."""
    try:
        return float(psutil.Process(pid).memory_full_info().uss) / 2**20
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return None
