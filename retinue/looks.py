"""Looking at runs on hosts: what ``handle.state`` and its like are answered from.

Whoever looks at a handle makes this process follow the run's status, with everything else that it follows
on that host; when nobody has looked for a while, it stops. What the host tells meanwhile is at most a second
old.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from retinue.client import SessionClient
from retinue.handles import RunHandle
from retinue.loop import client_loop
from retinue.protocol import RunStatus

LOOKED_FOR = 10.0
"""Seconds for which a run's status is followed after somebody looked."""
FRESH = 1.0
"""Seconds for which what was heard of a run that is not followed is fresh enough to show."""
FIRST_LOOK = 0.2
"""Seconds that the first look after a while waits for the host to tell, at most."""


@dataclass
class _Looked:
    """A handle that somebody looked at."""

    until: float
    """When it stops being followed, on the loop's clock."""
    limit: asyncio.Timeout | None = None
    told: list[concurrent.futures.Future[None]] = field(default_factory=list)
    """Looks that wait until something was heard."""


class Looks:
    """The handles of one runtime that somebody looks at.

    Args:
        connect: gives the client, on the client loop.
    """

    def __init__(self, connect: Callable[[], Awaitable[SessionClient]]) -> None:
        self._connect = connect
        self._looked: dict[RunHandle, _Looked] = {}
        """Changed on the client loop only."""
        self._tasks: set[asyncio.Task[None]] = set()

    def peek(self, handle: RunHandle) -> RunStatus | None:
        """What is known of a run, from any thread.

        Waits only for the first look after a while, :data:`FIRST_LOOK` seconds at most and usually one hop,
        because what was heard before may be hours old.
        """
        status = handle.last_status
        if handle.over:
            return status
        stale = status is not None and time.monotonic() - handle.heard_at > FRESH
        told: concurrent.futures.Future[None] = concurrent.futures.Future()
        waits = stale and handle not in self._looked and not client_loop().is_current
        client_loop().loop.call_soon_threadsafe(self._look, handle, told if waits else None)
        if waits:
            with contextlib.suppress(TimeoutError):
                told.result(FIRST_LOOK)
        return handle.last_status

    def _look(self, handle: RunHandle, told: concurrent.futures.Future[None] | None) -> None:
        looked = self._looked.get(handle)
        until = asyncio.get_running_loop().time() + LOOKED_FOR
        if looked is None:
            looked = self._looked[handle] = _Looked(until)
            task = asyncio.ensure_future(self._follow(handle, looked))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        looked.until = until
        if looked.limit is not None and not looked.limit.expired():
            looked.limit.reschedule(until)
        if told is not None:
            looked.told.append(told)

    async def _follow(self, handle: RunHandle, looked: _Looked) -> None:
        def hear(status: RunStatus) -> None:
            handle.heard(status)
            _tell(looked)

        try:
            # Whoever waits for the run is told of what fails; a look at it is not worth more.
            with contextlib.suppress(Exception):
                async with asyncio.timeout_at(looked.until) as looked.limit:
                    await handle.accepted()
                    client = await self._connect()
                    await client.watch(handle.identity, handle.session_id, handle.run_id, hear)
        finally:
            del self._looked[handle]
            _tell(looked)

    def close(self) -> None:
        """Follow nothing any more; the next look begins again."""
        for task in self._tasks:
            task.cancel()


def _tell(looked: _Looked) -> None:
    told, looked.told = looked.told, []
    for waiting in told:
        waiting.set_result(None)
