"""A channel between two actors: messages in order, in batches, each delivered once.

Batching is by demand: what is posted while one batch is on the wire goes with the next, so a quiet channel
has the latency of one call and a busy one few, fat calls. A batch that is repeated (because its call failed
without saying whether it arrived) is recognised by its number and answered as before.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from retinue.client import HostGone

M = TypeVar("M")

MAX_BATCH = 512
"""Messages in one call."""


class Outbox(Generic[M]):
    """The sending end. Belongs to one event loop.

    Args:
        send: carries (number, messages) across; raises :class:`HostGone` when the other end has died.
        on_gone: called once with the reason, when the other end is gone; later posts are dropped.
    """

    def __init__(
        self,
        send: Callable[[int, list[M]], Awaitable[None]],
        on_gone: Callable[[str], None],
    ) -> None:
        self._send = send
        self._on_gone = on_gone
        self._waiting: deque[M] = deque()
        self._pump: asyncio.Task[None] | None = None
        self._number = 0
        self.gone = False

    def post(self, message: M) -> None:
        """Send soon, after everything that was posted before."""
        if self.gone:
            return
        self._waiting.append(message)
        if self._pump is None:
            self._pump = asyncio.ensure_future(self._run())

    async def _run(self) -> None:
        try:
            while self._waiting:
                count = min(len(self._waiting), MAX_BATCH)
                batch = [self._waiting.popleft() for _ in range(count)]
                self._number += 1
                await self._send(self._number, batch)
        except HostGone as error:
            self.close(str(error))
        finally:
            self._pump = None

    def close(self, why: str) -> None:
        """The other end is gone."""
        if not self.gone:
            self.gone = True
            self._waiting.clear()
            self._on_gone(why)


class Inbox:
    """The receiving end's memory of what it has had: the number of the last batch, and its answer."""

    def __init__(self) -> None:
        self._last = 0
        self._answer = b""

    def repeated(self, number: int) -> bytes | None:
        """The answer to a batch that was here before; ``None`` for a new one."""
        if number > self._last:
            return None
        return self._answer if number == self._last else b""

    def answered(self, number: int, answer: bytes) -> None:
        self._last, self._answer = number, answer
