"""The store kit over an engine behind a store actor, and what the actor adds: one store for a cluster."""

from __future__ import annotations

import asyncio
import uuid
from pathlib import Path

import pytest
import ray

from retinue.actors.names import NAMESPACE
from retinue.actors.store_actor import RemoteEngine, StoreDescription, start_store_actor
from retinue.actors.wire import read_reply
from retinue.store import StoreEngine
from retinue.testing.store_kit import STORE_RULES


class ActorEngine(RemoteEngine):
    """An engine whose store actor ends with it, as a store that is closed."""

    async def close(self) -> None:
        await self.handle.close.remote()
        ray.kill(self.handle)


async def start(url: str) -> ActorEngine:
    node_id = ray.get_runtime_context().get_node_id()
    handle = start_store_actor(f"kit-{uuid.uuid4().hex}", NAMESPACE, url, node_id)
    return ActorEngine(handle, read_reply(await handle.describe.remote(), StoreDescription))


OF_THE_ENGINE_ITSELF = {
    "any_event_loop_may_call",  # a client of the actor belongs to one loop; the engine behind it does not
    "statistics_count",  # the actor's own method tells what the engine did
    "a_closed_store_says_so",  # nobody closes a store actor but the directory
}


@pytest.mark.usefixtures("cluster")
def test_the_rules_of_the_store_kit_hold_behind_an_actor(tmp_path: Path) -> None:
    async def open_engine(name: str) -> StoreEngine:
        return await start(f"sqlite:///{tmp_path}/{name}.db")

    async def check() -> list[str]:
        checked = [rule for name, rule in STORE_RULES.items() if name not in OF_THE_ENGINE_ITSELF]
        for rule in checked:
            async with asyncio.timeout(30):
                await rule.check(open_engine)
        return [rule.name for rule in checked]

    assert set(asyncio.run(check())) == set(STORE_RULES) - OF_THE_ENGINE_ITSELF
