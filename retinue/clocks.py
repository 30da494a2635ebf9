"""The three clocks of a run (contract section 6).

    deadline        absolute; counts whatever the run does, also while it is queued
    active timeout  counts while the run works; stands still while a question waits
    input timeout   counts one wait for an answer

The first that runs out cancels the run, with its own code. Nothing is left of them after ``stop``.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from retinue.errors import InputError
from retinue.ids import SAFE_INTEGER

MAX_TIMER = 86_400.0
"""Seconds that one timer of the loop is set for; what takes longer is set again."""

_PRECISION = 0.001
"""Seconds; what is left below this is rounding."""

_TEXTS = {
    "deadline_exceeded": "the deadline has passed",
    "active_timeout": "the run worked longer than its active timeout",
    "input_timeout": "nobody answered the question in time",
}


def check_seconds(name: str, value: object) -> None:
    """Raise :class:`InputError` unless ``value`` is ``None`` or a positive finite number of seconds."""
    if value is None:
        return
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 < value <= SAFE_INTEGER / 1000:  # type: ignore[operator]  # is_number
        raise InputError(f"{name} must be a positive number of seconds, not {value!r:.80}", field=name)


class Stopwatch:
    """Counts seconds down; can stand still and go on. Belongs to the loop that it is started on."""

    def __init__(self, seconds: float, expired: Callable[[], None]) -> None:
        self._left = seconds
        self._expired = expired
        self._handle: asyncio.TimerHandle | None = None
        self._since = 0.0

    def go(self) -> None:
        """Count on from where it stands."""
        if self._handle is None:
            loop = asyncio.get_running_loop()
            self._since = loop.time()
            self._handle = loop.call_later(min(max(self._left, 0.0), MAX_TIMER), self._fired)

    def stand(self) -> None:
        """Stand still."""
        if self._handle is not None:
            self._handle.cancel()
            self._count()

    def _count(self) -> None:
        self._handle = None
        self._left -= asyncio.get_running_loop().time() - self._since

    def _fired(self) -> None:
        self._count()
        if self._left > _PRECISION:
            self.go()
        else:
            self._expired()


class RunClocks:
    """The clocks of one run. Belongs to the control loop.

    Args:
        deadline: epoch seconds, or ``None``.
        active_timeout, input_timeout: seconds, or ``None``.
        expired: called once, with the code and text of the clock that ran out.
        wall_clock: epoch seconds now.
    """

    def __init__(
        self,
        *,
        deadline: float | None,
        active_timeout: float | None,
        input_timeout: float | None,
        expired: Callable[[str, str], None],
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._deadline = deadline
        self._input_timeout = input_timeout
        self._expired = expired
        self._wall_clock = wall_clock
        self._running = True
        self._until_deadline: Stopwatch | None = None
        self._working: Stopwatch | None = None
        if active_timeout is not None:
            self._working = Stopwatch(active_timeout, lambda: self._over("active_timeout"))
        self._waiting: Stopwatch | None = None

    def watch_deadline(self) -> None:
        """Count towards the deadline; one that has passed is over here and now."""
        if self._deadline is None or not self._running or self._until_deadline is not None:
            return
        left = self._deadline - self._wall_clock()
        if left <= 0:
            self._over("deadline_exceeded")
            return
        self._until_deadline = Stopwatch(left, self._look_again)
        self._until_deadline.go()

    def _look_again(self) -> None:
        # The wall clock decides: it may have been set meanwhile.
        self._until_deadline = None
        self.watch_deadline()

    def work(self) -> None:
        """The run works, or works again after an answer."""
        if self._waiting is not None:
            self._waiting.stand()
            self._waiting = None
        if self._working is not None and self._running:
            self._working.go()

    def wait(self, timeout: float | None) -> None:
        """The run waits for an answer: ``timeout`` seconds, or the runtime's own limit."""
        if self._working is not None:
            self._working.stand()
        limit = self._input_timeout if timeout is None else timeout
        if limit is not None and self._running:
            self._waiting = Stopwatch(limit, lambda: self._over("input_timeout"))
            self._waiting.go()

    def stop(self) -> None:
        """No clock counts any more."""
        self._running = False
        for clock in (self._until_deadline, self._working, self._waiting):
            if clock is not None:
                clock.stand()

    def _over(self, code: str) -> None:
        if self._running:
            self.stop()
            self._expired(code, _TEXTS[code])
