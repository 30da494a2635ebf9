"""SIGINT and SIGTERM of a command in the foreground: asked twice before anything is abandoned."""

from __future__ import annotations

import asyncio
import atexit
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

INTERRUPTED = 130
"""Exit status of an interrupted command."""
_QUIET_INTERRUPTS = 2
"""Interrupts that the orderly end of the process ignores; one more ends it at once."""


class Interrupts:
    """SIGINT and SIGTERM while the run goes on, and while the process ends in good order after it."""

    def __init__(self) -> None:
        self.count = 0
        self._on_interrupt: Callable[[], None] | None = None
        self._before: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._caught)
            atexit.register(self._end_quietly)

    def watch(self, on_interrupt: Callable[[], None]) -> None:
        """Call this for each interrupt, on the running event loop."""
        loop = asyncio.get_running_loop()

        def notify() -> None:
            loop.call_soon_threadsafe(on_interrupt)

        self._on_interrupt = notify
        if self.count:
            notify()

    def restore(self) -> None:
        """Put back what was there; an interrupted process ends, and keeps ignoring further interrupts."""
        self._on_interrupt = None
        if not self.count:
            for number, handler in self._before.items():
                signal.signal(number, handler)

    def _caught(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        if self._on_interrupt is not None:
            self._on_interrupt()

    def _end_quietly(self) -> None:
        """The end of the process: leases are released and the local Ray ends; it takes a second or two."""
        self.count = 0
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._caught_at_end)

    def _caught_at_end(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        if self.count > _QUIET_INTERRUPTS:
            os._exit(INTERRUPTED)
