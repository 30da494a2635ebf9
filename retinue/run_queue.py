"""Runs of one session that wait for the one before them, in order (``if_busy``); what their records keep."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import msgspec

from retinue.errors import DamagedRecord, Overloaded
from retinue.messages import Content
from retinue.protocol import StartRun
from retinue.store import RunRecord

if TYPE_CHECKING:
    from retinue.runs import Run

MAX_QUEUED_RUNS = 16
"""Runs of one session that may wait."""


class QueuedRun(msgspec.Struct, frozen=True, kw_only=True):
    """What the record of a queued run keeps, so that the next activation can take it up."""

    start: StartRun
    app_digest: str
    """Only an activation of this very app may run it."""


class RunQueue:
    """Belongs to the control loop."""

    def __init__(self) -> None:
        self._runs: deque[Run] = deque()
        self._ready: set[str] = set()

    def __len__(self) -> int:
        return len(self._runs)

    @property
    def first_id(self) -> str | None:
        """Of the run that is next."""
        return self._runs[0].run_id if self._runs else None

    def check_room(self, holder: str | None) -> None:
        """Raise :class:`Overloaded` when no more may wait."""
        if len(self._runs) >= MAX_QUEUED_RUNS:
            raise Overloaded(
                f"{MAX_QUEUED_RUNS} runs of this session wait already; start again when some have ended",
                reason="queue_full",
                run_id=holder,
            )

    def add(self, run: Run, *, first: bool) -> None:
        """Let it wait, as the last one or as the next. It has its place now, and may begin once ready."""
        if first:
            self._runs.appendleft(run)
        else:
            self._runs.append(run)
        self._number()

    def ready(self, run: Run) -> None:
        """Its record is stored."""
        self._ready.add(run.run_id)

    def take(self) -> Run | None:
        """The next one, which waits no longer; ``None`` where it is not ready: nobody overtakes it."""
        if not self._runs or self._runs[0].run_id not in self._ready:
            return None
        return self._pop()

    def take_any(self) -> Run | None:
        """The next one, ready or not: the session leaves."""
        return self._pop() if self._runs else None

    def _pop(self) -> Run:
        run = self._runs.popleft()
        self._ready.discard(run.run_id)
        self._number()
        return run

    def remove(self, run: Run) -> bool:
        """Take this one out; whether it was there."""
        if run not in self._runs:
            return False
        self._runs.remove(run)
        self._ready.discard(run.run_id)
        self._number()
        return True

    def _number(self) -> None:
        for position, run in enumerate(self._runs, start=1):
            run.queue_position = position


def record_input(record: RunRecord) -> Content:
    """What a run was started with, as its record has it; raises :class:`DamagedRecord`."""
    try:
        return msgspec.json.decode(record.input, type=Content)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise DamagedRecord(
            f"the input of run {record.run_id} cannot be read: {error}; its bytes are kept. Restore the "
            "store from a copy, or go on in another session",
            place=f"run {record.run_id}: input",
        ) from None
