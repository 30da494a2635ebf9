"""Progress of one tool call: what a generator yields, as ``tool.progress`` events, not too many of them."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Any

import msgspec

from retinue.json_values import encode_json
from retinue.messages import escape_surrogates

INTERVAL = 0.1
"""Seconds between two events of one call; what comes faster is replaced by what comes after it."""
MAX_PROGRESS_BYTES = 32_768
"""JSON of one value at most; of a larger one, the beginning of its text is reported."""
_SHOWN = 2_000


def progress_data(value: Any) -> Any:
    """A copy of ``value`` as JSON data, or its text where it cannot be that."""
    try:
        encoded = encode_json(value)
        if len(encoded) <= MAX_PROGRESS_BYTES:
            return msgspec.json.decode(encoded)
        text = value if isinstance(value, str) else encoded.decode()
    except Exception:
        text = _text(value)
    text = escape_surrogates(text)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}… ({len(text):,} characters)"


def _text(value: object) -> str:
    try:
        return str(value)
    except Exception:
        return f"<{type(value).__name__}>"


class Progress:
    """Gathers what one call reports: the first at once, then the newest now and then, the last always.

    Belongs to the loop that it is made on; :meth:`report` may be called in any thread.

    Args:
        emit: takes one value's JSON data, on that loop.
    """

    def __init__(self, emit: Callable[[Any], None]) -> None:
        self._emit = emit
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._held: list[Any] = []
        """The newest value that was not emitted, if there is one."""
        self._scheduled = False
        self._due = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    def report(self, value: Any) -> None:
        """Take a value; nothing happens once it is closed."""
        data = progress_data(value)
        with self._lock:
            self._held = [data]
            if self._scheduled or self._closed:
                return
            self._scheduled = True
        with contextlib.suppress(RuntimeError):  # the loop was closed, and its process is ending
            self._loop.call_soon_threadsafe(self._wait_until_due)

    def close(self, *, flush: bool) -> None:
        """Emit what is held, if wanted, and nothing after it. On the loop."""
        if flush:
            self._send()
        with self._lock:
            self._closed = True
            self._held = []
        if self._timer is not None:
            self._timer.cancel()

    def _wait_until_due(self) -> None:
        if self._due <= self._loop.time():
            self._send()
        elif not self._closed:
            self._timer = self._loop.call_at(self._due, self._send)

    def _send(self) -> None:
        with self._lock:
            self._scheduled = False
            held, self._held = self._held, []
            if self._closed or not held:
                return
            self._due = self._loop.time() + INTERVAL
        self._emit(held[0])
