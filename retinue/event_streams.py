"""Event streams: viewers of a run, from any loop or thread, and what they let through."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, get_args

from retinue.errors import InputError, RetinueError
from retinue.events import Event, Payload, RunTerminal, decode_event
from retinue.loop import awaited, blocking, client_loop, on_client_loop
from retinue.viewers import RunViewer

if TYPE_CHECKING:
    from retinue.handles import RunHandle

EVENT_TYPES = tuple(sorted(str(payload.__struct_config__.tag) for payload in get_args(Payload)))
"""Every type that an event can have."""


@dataclass(frozen=True)
class EventFilter:
    """Which events a viewer gets. Numbers are never changed by it, and the terminal event always comes."""

    types: frozenset[str] | None = None
    """``None`` for all."""
    children: frozenset[str] | None = None
    """Names of the delegates whose events come beside the run's own; ``None`` for all."""

    @classmethod
    def of(cls, types: Iterable[str] | None, children: bool | Iterable[str]) -> EventFilter:
        """The filter that ``handle.events`` was asked for.

        Raises:
            InputError: an unknown type, or not a list of names.
        """
        wanted = None if types is None else _names("types", types)
        unknown = sorted((wanted or frozenset()) - set(EVENT_TYPES))
        if unknown:
            raise InputError(
                f"there are no events of type {', '.join(unknown)}; there are {', '.join(EVENT_TYPES)}",
                field="types",
            )
        if isinstance(children, bool):
            return cls(wanted, None if children else frozenset())
        return cls(wanted, _names("children", children))

    def passes(self, event: Event) -> bool:
        if isinstance(event.payload, RunTerminal):
            return True
        if self.types is not None and event.type not in self.types:
            return False
        return self.children is None or not event.participant or event.participant in self.children


def _names(field: str, given: object) -> frozenset[str]:
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise InputError(f"{field} must be a list of names, not {given!r:.80}", field=field)
    names = list(given)
    if not all(isinstance(name, str) for name in names):
        raise InputError(f"{field} must be a list of names, not {names!r:.80}", field=field)
    return frozenset(names)


class EventStream(AsyncIterator[Event]):
    """One viewer of a run. Concurrent reads are answered in order; closing it never touches the run."""

    def __init__(self, handle: RunHandle, after: int, only: EventFilter) -> None:
        self._handle = handle
        self._cursor = after
        self._only = only
        self._viewer: RunViewer | None = None
        self._buffer: deque[Event] = deque()
        self._abandoned: deque[concurrent.futures.Future[Event | None]] = deque()
        """Reads whose reader stopped waiting; the next readers take them, so that no event is lost."""
        self._ended = False
        self._turn: asyncio.Lock | None = None
        self._reading: asyncio.Task[None] | None = None

    @property
    def cursor(self) -> int:
        """Where to go on from: sequence of the last event that was delivered, or filtered out."""
        return self._cursor

    def __aiter__(self) -> EventStream:
        return self

    async def __anext__(self) -> Event:
        read = self._abandoned.popleft() if self._abandoned else on_client_loop(self.next_event())
        try:
            event = await awaited(read)
        except asyncio.CancelledError:
            if not read.cancelled():
                self._abandoned.append(read)
            raise
        if event is None:
            raise StopAsyncIteration
        return event

    async def next_event(self) -> Event | None:
        """The next event, or ``None`` at the end; on the client loop."""
        if self._turn is None:
            self._turn = asyncio.Lock()
        async with self._turn:
            while True:
                while self._buffer:
                    event = self._buffer.popleft()
                    self._cursor = event.sequence
                    if self._only.passes(event):
                        return event
                if self._ended:
                    return None
                await self._next_page()

    async def _next_page(self) -> None:
        self._reading = asyncio.ensure_future(self._read())
        try:
            await self._reading
        except asyncio.CancelledError:
            if not self._ended:
                raise
        except RetinueError:
            self._ended = True
            raise
        finally:
            self._reading = None

    async def _read(self) -> None:
        handle = self._handle
        try:
            await handle.accepted()
        except Exception:
            self._ended = True
            if handle.attached:  # a run that is not there is no run without events
                raise
            return
        if self._viewer is None:
            client = await handle.client()
            self._viewer = RunViewer(client, handle.identity, handle.session_id, handle.run_id, self._cursor)
            # A viewer that was dropped without being closed must not be followed for ever.
            weakref.finalize(self, _later, self._viewer.close).atexit = False
        page = await self._viewer.page()
        handle.heard(page.status)
        self._buffer.extend(decode_event(body) for _, body in page.events)
        self._ended = page.closed or not page.events

    async def aclose(self) -> None:
        """End this viewer: pending reads end, later ones too."""

        async def close() -> None:
            self._close()

        await awaited(on_client_loop(close()))

    def close(self) -> None:
        """The blocking twin of :meth:`aclose`; returns at once."""
        _later(self._close)

    def _close(self) -> None:
        self._ended = True
        self._buffer.clear()
        if self._reading is not None:
            self._reading.cancel()
        if self._viewer is not None:
            self._viewer.close()


def blocking_events(stream: EventStream) -> Iterator[Event]:
    """The events of a stream, in a plain thread; leaving the iteration closes the stream."""
    try:
        while (event := blocking(on_client_loop(stream.next_event()))) is not None:
            yield event
    finally:
        stream.close()


def _later(close: Callable[[], None]) -> None:
    """On the client loop, from whatever thread: the collector calls this too, and the end of the process."""
    with contextlib.suppress(RuntimeError):  # the loop has ended, and all viewers with it
        client_loop().loop.call_soon_threadsafe(close)
