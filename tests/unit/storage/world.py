"""A place where tests open engines: with a clock that stands still and processes that die when told to."""

from __future__ import annotations

from pathlib import Path

from retinue.storage.memory import MemoryEngine
from retinue.storage.sqlite.engine import SQLiteEngine
from retinue.store import Holder, StoreEngine

KINDS = ("memory", "shared memory", "sqlite")


class World:
    """Opens engines; all share one clock and one list of the dead."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.now = 1000.0
        """Seconds on the monotonic clock of every engine here."""
        self.gone: set[str] = set()
        """Holders whose processes are certainly dead."""
        self._engines: list[StoreEngine] = []

    def path(self, name: str = "store") -> Path:
        return self.folder / f"{name}.db"

    def open(self, kind: str, name: str = "store") -> StoreEngine:
        """An engine of a kind; for SQLite on the file of this name."""
        if kind == "sqlite":
            return self.sqlite(name)
        engine = MemoryEngine(distributed=kind == "shared memory", clock=self._clock, gone=self._gone)
        self._engines.append(engine)
        return engine

    def sqlite(self, name: str = "store", *, busy_limit: float = 5.0) -> SQLiteEngine:
        """An SQLite engine on the file of this name."""
        engine = SQLiteEngine(self.path(name), clock=self._clock, gone=self._gone, busy_limit=busy_limit)
        self._engines.append(engine)
        return engine

    async def close(self) -> None:
        """Close every engine."""
        for engine in self._engines:
            await engine.close()

    def _clock(self) -> float:
        return self.now

    def _gone(self, holder: Holder) -> bool:
        return holder.holder_id in self.gone
