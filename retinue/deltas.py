"""Pieces of text on their way to the events: the first at once, later ones gathered by time and size."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Protocol

from retinue.budgets import BudgetSnapshot
from retinue.errors import InputError
from retinue.events import MAX_DELTA, MessageDelta, TextDelta
from retinue.protocol import ParticipantMessage, RootReply, SettleModel
from retinue.root_port import RootPort

GATHER_SECONDS = 0.025
"""Pieces that come within this time after the last event of their kind wait for its end."""
GATHER_BYTES = 2_000
"""Pieces that together have this many UTF-8 bytes wait no longer."""
_SLACK = 0.001
"""Timers of an event loop are no more exact than this."""

Delta = TextDelta | MessageDelta


class Timer(Protocol):
    """What :meth:`asyncio.AbstractEventLoop.call_later` gives."""

    def cancel(self) -> None: ...


def _later(seconds: float, function: Callable[[], None]) -> Timer | None:
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:  # a thread without a loop, such as a tool's: there is nothing to wait with
        return None
    return loop.call_later(seconds, function)


class Deltas:
    """Gathers the text of one execution into ``text.delta`` and ``message.delta`` events.

    The text and each message are gathered apart from each other. :meth:`flush` comes before any other event
    of the execution, so that order is kept, and what follows it is a first piece again.

    Belongs to the user loop; tools in threads may add and flush too, and their text waits for nothing that
    is not waiting already.

    Args:
        send: sends one event on.
        clock: seconds that only grow.
        later: calls a function after some seconds; ``None`` from where nothing can wait.
    """

    def __init__(
        self,
        send: Callable[[Delta], None],
        *,
        clock: Callable[[], float] = time.monotonic,
        later: Callable[[float, Callable[[], None]], Timer | None] = _later,
    ) -> None:
        self._send = send
        self._clock = clock
        self._later = later
        self._lock = threading.RLock()
        self._waiting: dict[str | None, list[str]] = {}
        """Pieces by message id; ``None`` is the text."""
        self._waiting_bytes = 0
        self._sent: dict[str | None, float] = {}
        """When each had its last event, since the last :meth:`flush`."""
        self._timer: Timer | None = None
        self._closed = False

    def add(self, text: str, message_id: str | None = None) -> None:
        """Take a piece of the text, or of a message.

        Raises:
            InputError: it is no text, or text that UTF-8 cannot carry. Nothing of it is sent then.
        """
        size = text_size(text)
        if not size:
            return
        with self._lock:
            self._waiting.setdefault(message_id, []).append(text)
            self._waiting_bytes += size
            rest = GATHER_SECONDS - (self._clock() - self._sent.get(message_id, float("-inf")))
            if self._closed or rest <= 0 or self._waiting_bytes >= GATHER_BYTES:
                self._send_all()
            elif self._timer is None:
                self._timer = self._later(rest, self._due)
                if self._timer is None:
                    self._send_all()

    def flush(self) -> None:
        """Send what waits: another event follows, or the text has ended."""
        if not self._waiting and not self._sent:
            return
        with self._lock:
            self._send_all()
            self._sent.clear()

    def close(self) -> None:
        """Send what waits and leave no timer; later pieces wait for nothing."""
        with self._lock:
            self._closed = True
            self.flush()
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

    def _due(self) -> None:
        with self._lock:
            self._timer = None
            if not self._waiting:
                return
            # It was set for an event that another one may have followed.
            last = max((self._sent.get(key, float("-inf")) for key in self._waiting), default=0.0)
            rest = GATHER_SECONDS - (self._clock() - last)
            if rest > _SLACK:
                self._timer = self._later(rest, self._due)
            if self._timer is None:
                self._send_all()

    def _send_all(self) -> None:
        waiting, self._waiting, self._waiting_bytes = self._waiting, {}, 0
        now = self._clock()
        for message_id, pieces in waiting.items():
            text = "".join(pieces)
            self._sent[message_id] = now
            for start in range(0, len(text), MAX_DELTA):
                piece = text[start : start + MAX_DELTA]
                self._send(TextDelta(piece) if message_id is None else MessageDelta(message_id, piece))


class OrderedPort:
    """The way to the root, with text that waits sent before anything else."""

    def __init__(self, port: RootPort, deltas: Deltas) -> None:
        self._port = port
        self._flush = deltas.flush

    async def ask(self, message: ParticipantMessage) -> RootReply:
        self._flush()
        return await self._port.ask(message)

    def tell(self, message: ParticipantMessage) -> None:
        self._flush()
        self._port.tell(message)

    async def settle(self, message: SettleModel) -> None:
        self._flush()
        await self._port.settle(message)

    @property
    def budget(self) -> BudgetSnapshot:
        return self._port.budget

    @property
    def steer_waits(self) -> bool:
        return self._port.steer_waits


def text_size(text: object) -> int:
    """UTF-8 bytes of a text; raises ``InputError`` for what is none or cannot be carried."""
    if not isinstance(text, str):
        raise InputError(f"a piece of text must be a string, not {type(text).__name__}")
    try:
        return len(text.encode())
    except UnicodeEncodeError:
        raise InputError("the text holds a lone surrogate, which no store can carry") from None
