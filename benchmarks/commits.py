"""Durable commits through the store actor: 64 sessions at once, from as many writers as there are hosts."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import ray

from benchmarks.measure import IDENTITY, Row, bare_hop_ms, p50_ms
from retinue.actors.store_actor import RemoteEngine, StoreDescription, start_store_actor
from retinue.actors.wire import read_reply
from retinue.ids import SessionAddress
from retinue.messages import assistant, encode_message, user
from retinue.storage import this_process
from retinue.store import CommitSession, Store

SESSIONS = 64
COMMITS = 60
"""Commits of each session."""
WRITERS = 2
"""Processes that write, each with its share of the sessions."""


class Writer:
    """A process with sessions, as a host with shared isolation has them."""

    async def run(
        self, handle: object, description: StoreDescription, sessions: int, name: str
    ) -> list[float]:
        store = Store(RemoteEngine(handle, description))
        times: list[list[float]] = await asyncio.gather(
            *(self._session(store, f"{name}-{number}") for number in range(sessions))
        )
        return [seconds for each in times for seconds in each]

    async def _session(self, store: Store, session_id: str) -> list[float]:
        address = SessionAddress(
            store_id=store.store_id,
            tenant_id=IDENTITY.tenant_id,
            user_id=IDENTITY.user_id,
            session_id=session_id,
        )
        grant = await store.acquire(address, this_process(f"bench-{session_id}", "bench"))
        revision = grant.session.revision
        messages = [encode_message(user("question " * 20)), encode_message(assistant("answer " * 60))]
        times = []
        for number in range(COMMITS):
            start = time.perf_counter()
            revision = await store.commit(
                CommitSession(
                    lease=grant.lease,
                    commit_id=f"{session_id}:{number}",
                    base_revision=revision,
                    messages=messages,
                )
            )
            times.append(time.perf_counter() - start)
        await store.release(grant.lease)
        return times


def measure(store: str) -> Row:
    from retinue.storage import normalise_url

    node_id = ray.get_runtime_context().get_node_id()
    handle = start_store_actor("bench.store", "retinue", normalise_url(store), node_id)
    description: StoreDescription = read_reply(ray.get(handle.describe.remote()), StoreDescription)
    writers: list[Any] = [ray.remote(Writer).options(num_cpus=0).remote() for _ in range(WRITERS)]
    share = SESSIONS // WRITERS
    start = time.perf_counter()
    parts = ray.get(
        [
            writer.run.remote(handle, description, share, f"commits-{number}")
            for number, writer in enumerate(writers)
        ]
    )
    seconds = time.perf_counter() - start
    times = [each for part in parts for each in part]
    for writer in writers:
        ray.kill(writer)
    ray.get(handle.close.remote())
    ray.kill(handle)
    hop = bare_hop_ms()
    return {
        "per_s": len(times) / seconds,
        "p50_ms": p50_ms(times),
        "hop_ms": hop,
        "ratio": p50_ms(times) / hop,
    }
