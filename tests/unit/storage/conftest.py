"""Engines of every kind, in a world whose clock and deaths the test decides."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from retinue.storage.sqlite.engine import SQLiteEngine
from retinue.store import Store, StoreEngine
from tests.unit.storage.world import KINDS, World


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """Each kind of engine."""
    return str(request.param)


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    """Where engines are opened; all are closed at the end."""
    world = World(tmp_path)
    yield world
    await world.close()


@pytest.fixture
async def engine(world: World, kind: str) -> StoreEngine:
    """An engine of each kind, on an empty store."""
    return world.open(kind)


@pytest.fixture
async def store(engine: StoreEngine) -> Store:
    """The client of that engine."""
    return Store(engine)


@pytest.fixture
async def sqlite(world: World) -> SQLiteEngine:
    """An SQLite engine on an empty file."""
    return world.sqlite()
