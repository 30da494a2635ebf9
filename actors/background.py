"""Background tasks with an owner."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable
from typing import Any

_log = logging.getLogger("retinue.actors")


class Background:
    """The background tasks of one part: kept alive, logged when they fail, ended with their owner.

    Belongs to one event loop.
    """

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self._tasks: set[asyncio.Future[Any]] = set()

    def run(self, work: Awaitable[Any]) -> None:
        """Let it run; nobody waits for it."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Future[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("%s: a background task failed: %r", self._owner, error)

    def close(self) -> None:
        """Cancel what still runs."""
        for task in list(self._tasks):
            task.cancel()
