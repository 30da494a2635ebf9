"""The events of one run: numbered here, shown from memory, written behind to the store.

Numbers are used only inside a block that the run's record has reserved, so none is ever used twice, even
after a crash: what a crash took is the rest of the block. A store that does not answer makes events wait
for the next block, and admissions wait for the events (back-pressure). A question is stored before anybody
sees it, so that it outlives the process that asked.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from retinue.errors import InputError, RetinueError, StoreUnavailable
from retinue.event_log import EventLog
from retinue.events import Event, InputRequested, Payload, RunTerminal, encode_event
from retinue.results import RunResult
from retinue.store import EVENT_BLOCK, Lease, Store, StoredEvent
from retinue.store_wait import until_stored

WRITE_DELAY = 0.1
"""Seconds for which events gather before they are written behind."""


@dataclass(frozen=True, kw_only=True)
class EventSource:
    """Whom an event tells of."""

    run_id: str
    attempt_id: str
    parent_run_id: str | None = None
    participant: str = ""


class RunEvents:
    """Events of one run. Belongs to the control loop.

    Args:
        session_id, root_run_id: for the envelopes.
        source: the root.
        capacity: events kept in memory.
        store, lease: where to write behind, under which lease; ``None`` where events are not stored.
        reserved_to: highest number that the run's record reserves.
        on_failure: called when events cannot be stored: another writer has the session, or the store did not
            answer in time and no number is left.
    """

    def __init__(
        self,
        *,
        session_id: str,
        root_run_id: str,
        source: EventSource,
        capacity: int,
        store: Store | None,
        lease: Lease,
        reserved_to: int = EVENT_BLOCK,
        on_failure: Callable[[RetinueError], None] = lambda error: None,
    ) -> None:
        self.log = EventLog(capacity, self._read_stored if store is not None else None)
        self._session_id = session_id
        self._root_run_id = root_run_id
        self._source = source
        self._store = store
        self._lease = lease
        self._reserved_to = reserved_to
        self._on_failure = on_failure
        self._waiting: list[tuple[Payload, EventSource]] = []
        self._unstored: list[StoredEvent] = []
        self.store_first = False
        """Nobody sees an event before it is stored: of a queued run, which another activation may take up."""
        self._held_back: StoredEvent | None = None
        """An event that nobody sees before it is stored, and nothing after it."""
        self._room = asyncio.Event()
        self._room.set()
        self._wake = asyncio.Event()
        self._writing = asyncio.Lock()
        self._writer: asyncio.Task[None] | None = None

    def emit(self, payload: Payload, source: EventSource | None = None) -> None:
        """Number an event and show it; it waits where the reserved numbers are used up."""
        if self.log.closed:
            return
        self._waiting.append((payload, source or self._source))
        self._number_waiting()

    def _number_waiting(self) -> None:
        # The terminal event always keeps a number: hence the 1.
        while self._waiting and self._held_back is None and self._has_numbers:
            payload, source = self._waiting.pop(0)
            number = self.log.last + 1
            body = self._encode(payload, source, number)
            if self._store is not None:
                self._unstored.append(StoredEvent(number, body))
                if self.store_first or isinstance(payload, InputRequested):
                    self._held_back = StoredEvent(number, body)
                self._start_writer()
            if self._held_back is None:
                self.log.append(body)
        if self._waiting or self._held_back is not None:
            self._room.clear()
        else:
            self._room.set()

    @property
    def _has_numbers(self) -> bool:
        return self._store is None or self.log.last + 1 < self._reserved_to

    def _show_held_back(self) -> None:
        """The event is stored, or cannot be: show it, and what came after it."""
        held_back, self._held_back = self._held_back, None
        if held_back is not None:
            self.log.append(held_back.body)
            self._number_waiting()

    def _encode(self, payload: Payload, source: EventSource, number: int) -> bytes:
        try:
            return encode_event(self._envelope(payload, source, number))
        except UnicodeEncodeError:
            raise InputError("the event holds a lone surrogate, which no store can carry") from None

    def _envelope(self, payload: Payload, source: EventSource, number: int) -> Event:
        return Event(
            event_id=f"{self._source.run_id}:{number}",
            sequence=number,
            timestamp=time.time(),
            session_id=self._session_id,
            run_id=source.run_id,
            attempt_id=source.attempt_id,
            parent_run_id=source.parent_run_id,
            root_run_id=self._root_run_id,
            participant=source.participant,
            payload=payload,
        )

    @property
    def has_room(self) -> bool:
        return self._room.is_set()

    async def room(self) -> None:
        """Wait until every event has its number."""
        await self._room.wait()

    # --- writing behind -----------------------------------------------------------------------------------

    def _start_writer(self) -> None:
        if self._writer is None:
            self._writer = asyncio.ensure_future(self._write_behind())
        if self._needs_block or self._held_back is not None:
            self._wake.set()

    @property
    def _needs_block(self) -> bool:
        return self.log.last > self._reserved_to - EVENT_BLOCK // 2

    async def _write_behind(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), WRITE_DELAY)
            self._wake.clear()
            if not self._unstored and not self._needs_block:
                self._writer = None
                return
            try:
                await self._write()
            except RetinueError as error:
                self._show_held_back()
                if self._waiting:  # for a block that cannot be had: the run must not wait for ever
                    self._waiting.clear()
                    self._room.set()
                    self._on_failure(error)
                elif not isinstance(error, StoreUnavailable):
                    self._on_failure(error)
                    return

    async def _write(self) -> None:
        assert self._store is not None
        async with self._writing:
            events = tuple(self._unstored)
            reserve_to = self._reserved_to + EVENT_BLOCK if self._needs_block else None
            store, lease, run_id = self._store, self._lease, self._source.run_id
            await until_stored(lambda: store.append_events(lease, run_id, events, reserve_to))
            self.stored(events)
            if reserve_to is not None:
                self._reserved_to = reserve_to
            if self._held_back is not None and events and self._held_back.sequence <= events[-1].sequence:
                self._show_held_back()
            self._number_waiting()

    @property
    def unstored(self) -> Sequence[StoredEvent]:
        """The events that a commit should carry; tell :meth:`stored` of them when it has."""
        return tuple(self._unstored)

    def stored(self, events: Sequence[StoredEvent]) -> None:
        """These are in the store. They were kept until now, for readers that fell out of the window."""
        last = events[-1].sequence if events else 0
        self._unstored = [event for event in self._unstored if event.sequence > last]

    async def _read_stored(self, after: int, limit: int) -> Sequence[tuple[int, bytes]]:
        assert self._store is not None
        unstored = [(event.sequence, event.body) for event in self._unstored if event.sequence > after]
        if unstored and unstored[0][0] == after + 1:
            return unstored[:limit]
        page = await self._store.read_events(self._lease.address.identity, self._source.run_id, after, limit)
        return [(event.sequence, event.body) for event in page]

    # --- the end ------------------------------------------------------------------------------------------

    @property
    def next_number(self) -> int:
        """The number of the terminal event, if nothing comes before it."""
        return self.log.last + 1

    def encode_terminal(self, result: RunResult) -> bytes:
        """The last event, as it will be numbered."""
        return self._encode(RunTerminal(result), self._source, result.final_cursor)

    def terminal(self, body: bytes) -> None:
        """Add the last event and close the log."""
        self.log.append(body, terminal=True)

    def abandon(self, error: RetinueError) -> None:
        """The run leaves this process without having begun."""
        self.log.fail(error)

    async def pause(self) -> None:
        """Stop writing behind, until the next event: what is left is the commit's."""
        while (writer := self._writer) is not None:
            async with self._writing:  # not in the middle of a write
                writer.cancel()
            await asyncio.wait([writer])
            if self._writer is writer:
                self._writer = None
