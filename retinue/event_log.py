"""The event log of one run: one writer numbers events, any number of readers follow with cursors.

The last ``capacity`` events are the window in memory. Where events are stored, a reader that falls out of
the window goes on from the store; where they are not, it gets :class:`EventGap` (contract section 6).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import cast

from retinue.errors import EventGap, InputError, RetinueError

DEFAULT_CAPACITY = 256
MIN_CAPACITY = 2
MAX_CAPACITY = 10_000_000

ReadStored = Callable[[int, int], Awaitable[Sequence[tuple[int, bytes]]]]
"""Reads (after, limit) from the store: numbered, encoded events."""


class EventLog:
    """Numbers 1, 2, 3, ... of one run. Belongs to one event loop.

    Args:
        capacity: events kept in memory, at least :data:`MIN_CAPACITY`.
        read_stored: how to read what left the window; ``None`` where events are not stored.
    """

    def __init__(self, capacity: int = DEFAULT_CAPACITY, read_stored: ReadStored | None = None) -> None:
        check_capacity(capacity)
        self._window: deque[tuple[int, bytes]] = deque(maxlen=capacity)
        self._read_stored = read_stored
        self._changed = asyncio.Event()
        self.last = 0
        """Number of the newest event."""
        self.closed = False
        """True once the terminal event is in."""
        self._failure: RetinueError | None = None

    def append(self, body: bytes, *, terminal: bool = False) -> int:
        """Add the next event, already encoded with the number ``last + 1``; returns that number."""
        if self.closed:
            raise RetinueError("the run has its terminal event; nothing can come after it")
        self.last += 1
        self._window.append((self.last, body))
        self.closed = terminal
        self._changed.set()
        self._changed = asyncio.Event()
        return self.last

    def fail(self, error: RetinueError) -> None:
        """Nothing more can be read here: whoever waits, or comes later, is told ``error``."""
        self._failure = error
        self._changed.set()
        self._changed = asyncio.Event()

    @property
    def earliest_cursor(self) -> int:
        """The oldest cursor that the window alone can be read from."""
        return self._window[0][0] - 1 if self._window else self.last

    async def read(self, after: int, limit: int) -> Sequence[tuple[int, bytes]]:
        """The next events after a cursor, at most ``limit``; waits for one; empty when the log is closed.

        Raises:
            InputError: the cursor is above the newest event.
            EventGap: the events after the cursor are kept nowhere.
            RetinueError: what :meth:`fail` was given.
        """
        if after > self.last:
            raise InputError(f"cursor {after} is ahead of the run, whose newest event is {self.last}")
        while after == self.last and not self.closed and self._failure is None:
            await self._changed.wait()
        if self._failure is not None:
            raise self._failure
        if after >= self.earliest_cursor:
            skip = after - self.earliest_cursor
            return [self._window[index] for index in range(skip, min(skip + limit, len(self._window)))]
        return await self._older(after, limit)

    async def _older(self, after: int, limit: int) -> Sequence[tuple[int, bytes]]:
        if self._read_stored is not None:
            stored = await self._read_stored(after, limit)
            if stored and stored[0][0] == after + 1:
                return stored
            if after >= self.earliest_cursor:
                return await self.read(after, limit)
        raise EventGap(
            f"the events after {after} are no longer kept; the oldest cursor is {self.earliest_cursor}",
            earliest_cursor=self.earliest_cursor,
        )


def check_capacity(capacity: object) -> None:
    """Raise ``InputError`` unless ``capacity`` is an integer of at least :data:`MIN_CAPACITY`."""
    is_integer = isinstance(capacity, int) and not isinstance(capacity, bool)
    if not is_integer or not MIN_CAPACITY <= cast(int, capacity) <= MAX_CAPACITY:
        raise InputError(
            f"event_capacity must be an integer from {MIN_CAPACITY} to {MAX_CAPACITY:,}, not {capacity!r:.80}"
        )


def check_cursor(after: object) -> int:
    """``after`` as a cursor; type and range are checked at once, before any waiting."""
    if isinstance(after, bool) or not isinstance(after, int) or after < 0:
        raise InputError(f"an event cursor is an integer of at least 0, not {after!r}")
    return after
