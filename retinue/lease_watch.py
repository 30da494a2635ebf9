"""Whether an activation may still believe in its lease.

A lease runs out at others' clocks one period after the last renewal that the store saw. An activation that
could not renew stops admitting anything a little earlier (it is *suspended*), and goes on when the store
answers again and its epoch still stands. Safety does not rest on this (the store checks the epoch of every
write); it keeps models and tools from being called for a session that somebody else may have by then.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from retinue.store import LEASE_PERIOD

SUSPEND_AFTER = LEASE_PERIOD * 0.8
"""Seconds without a renewal after which nothing is admitted."""


class LeaseWatch:
    """Belongs to the control loop of its host.

    Args:
        asked_at: when the lease was asked for, on the clock.
        clock: seconds, never backwards.
    """

    def __init__(self, asked_at: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._renewed_at = asked_at
        self._clock = clock
        self._decided = asyncio.Event()
        """Set when a suspended activation may go on, or is over."""

    @property
    def silence(self) -> float:
        """Seconds since the last renewal that the store acknowledged was sent."""
        return self._clock() - self._renewed_at

    @property
    def suspended(self) -> bool:
        return self.silence > SUSPEND_AFTER

    def renewed(self, sent_at: float) -> None:
        """The store acknowledged a renewal that was sent at this time."""
        self._renewed_at = max(self._renewed_at, sent_at)
        if not self.suspended:
            self._decide()

    def over(self) -> None:
        """The lease is lost, or given up: whoever waits may look for another reason to stop."""
        self._renewed_at = self._clock()
        self._decide()

    def _decide(self) -> None:
        self._decided.set()
        self._decided = asyncio.Event()

    def room(self) -> Awaitable[None] | None:
        """``None`` while the lease is known to stand, else something to await before anything is admitted."""
        return self._wait() if self.suspended else None

    async def _wait(self) -> None:
        while self.suspended:
            await self._decided.wait()
