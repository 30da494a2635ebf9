"""The host's side of following: one call for each client process carries all that it follows here.

A subscriber is one client process. It keeps one :meth:`Feeds.next_batch` outstanding, which returns as soon
as there is something for it. What it follows is told in :class:`FeedChanges`, with that call or in between:

- a :class:`Want` is answered once, with the next page of a run's events after a cursor. Whoever reads on
  wants again, so a viewer that does not read costs nothing and delays nobody;
- a :class:`Look` is answered with the status of a run now, and again whenever it has changed, until dropped.

Batches and changes are numbered, so that a repeat of either is harmless.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec

from retinue.errors import NotFound, RetinueError
from retinue.protocol import EventPageReply, RunStatus

PAGE_EVENTS = 256
"""Most events of one page."""
PAGE_BYTES = 1_000_000
"""A page has no further event, and a batch no further page, once it has so many bytes of events."""
STATUS_PERIOD = 0.5
"""Seconds between looks at the runs of which a subscriber wants the status only."""
POLL_WAIT = 20.0
"""Seconds after which a call is answered though there is nothing: it shows that the subscriber lives."""
SILENCE = 60.0
"""Seconds without a call after which a subscriber is forgotten."""


class Want(msgspec.Struct, frozen=True, kw_only=True):
    """The next page of a run's events, once."""

    number: int
    """Of this want; no want or look of the subscriber has it too."""
    activation_id: str
    run_id: str
    after: int
    """Cursor."""


class Look(msgspec.Struct, frozen=True, kw_only=True):
    """The status of a run, now and whenever it has changed; until it has ended."""

    number: int
    """Of this look; no want or look of the subscriber has it too."""
    activation_id: str
    run_id: str


class FeedChanges(msgspec.Struct, frozen=True, kw_only=True):
    """What a subscriber follows from now on, and what no longer."""

    number: int
    """1, 2, 3, ... in one subscription. Changes are taken in this order, each once, however they arrive."""
    wants: Sequence[Want] = ()
    looks: Sequence[Look] = ()
    dropped: Sequence[int] = ()
    """Numbers of wants and looks."""


class FeedPage(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a want: a page, or a :meth:`RetinueError.to_payload`."""

    number: int
    page: EventPageReply | None = None
    error: dict[str, Any] | None = None


class FeedStatus(msgspec.Struct, frozen=True, kw_only=True):
    """An answer to a look: a status, or a :meth:`RetinueError.to_payload`, which ends the look."""

    number: int
    status: RunStatus | None = None
    error: dict[str, Any] | None = None


class FeedBatch(msgspec.Struct, frozen=True, kw_only=True):
    """What there is for a subscriber; empty when nothing happened for :data:`POLL_WAIT` seconds."""

    number: int
    pages: Sequence[FeedPage] = ()
    statuses: Sequence[FeedStatus] = ()


class FeedStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """What client processes follow on one host."""

    subscribers: int
    """Client processes."""
    calls: int
    """Calls of theirs that wait here now."""
    wants: int
    """Pages of events that are waited for or ready."""
    looks: int
    """Runs whose status is wanted, counted for each subscriber."""


class FeedSource(Protocol):
    """Where runs are asked: a :class:`retinue.host.Host`."""

    async def events(self, activation_id: str, run_id: str, after: int, limit: int) -> EventPageReply: ...

    def status(self, activation_id: str, run_id: str) -> RunStatus: ...


class Feeds:
    """The subscribers of one host. Belongs to the control loop."""

    def __init__(self, source: FeedSource) -> None:
        self._source = source
        self._feeds: dict[str, Feed] = {}

    async def next_batch(self, subscriber: str, number: int, changes: FeedChanges | None) -> FeedBatch:
        """What there is for a subscriber, waiting for something.

        Args:
            subscriber: chosen by the client, unique.
            number: 1, 2, 3, ... in one subscription. A repeat gets the same batch; the next number says that
                the batch before has arrived.
            changes: what has changed since the call or update before.

        Raises:
            NotFound: the subscriber is not known any more: it begins again, as another one.
        """
        feed = self._feeds.get(subscriber) or self._add(subscriber)
        return await feed.next_batch(number, changes)

    def update(self, subscriber: str, changes: FeedChanges) -> None:
        """Take changes in while a call of the subscriber is outstanding, or before its first one arrives."""
        feed = self._feeds.get(subscriber) or self._add(subscriber)
        feed.update(changes)

    def _add(self, subscriber: str) -> Feed:
        feed = self._feeds[subscriber] = Feed(self._source, lambda: self._drop(subscriber))
        return feed

    def _drop(self, subscriber: str) -> None:
        self._feeds.pop(subscriber).close()

    def statistics(self) -> FeedStatistics:
        feeds = self._feeds.values()
        return FeedStatistics(
            subscribers=len(feeds),
            calls=sum(feed.waiting for feed in feeds),
            wants=sum(feed.wants for feed in feeds),
            looks=sum(feed.looks for feed in feeds),
        )

    def close(self) -> None:
        """Forget all subscribers; calls that wait get what is ready."""
        for subscriber in list(self._feeds):
            self._drop(subscriber)


class Feed:
    """What one subscriber follows.

    Args:
        source: where runs are asked.
        on_silence: called when the subscriber has not called for :data:`SILENCE` seconds.
    """

    def __init__(self, source: FeedSource, on_silence: Callable[[], None]) -> None:
        self._source = source
        self._on_silence = on_silence
        self._changes = 0
        """Number of the last changes that were taken in."""
        self._early: dict[int, FeedChanges] = {}
        """Changes that overtook others."""
        self._reading: dict[int, asyncio.Task[None]] = {}
        self._ready: dict[int, FeedPage] = {}
        """Pages for the next batch, oldest first."""
        self._looks: dict[int, Look] = {}
        self._known: dict[int, RunStatus] = {}
        """What each look was told last."""
        self._new_looks: set[int] = set()
        self._look_at = 0.0
        """When to look at all runs again, on the loop's clock."""
        self._stirred = asyncio.Event()
        """Something may be there for a batch."""
        self._number = 0
        self._batch: asyncio.Task[FeedBatch] | None = None
        """The last batch, kept until the next is asked for."""
        self._closed = False
        self._silence = asyncio.get_running_loop().call_later(SILENCE, on_silence)

    @property
    def waiting(self) -> bool:
        """Whether a call is outstanding."""
        return self._batch is not None and not self._batch.done()

    @property
    def wants(self) -> int:
        return len(self._reading) + len(self._ready)

    @property
    def looks(self) -> int:
        return len(self._looks)

    # --- what is followed ---------------------------------------------------------------------------------

    def update(self, changes: FeedChanges | None) -> None:
        """Take changes in, each once and in the order of their numbers."""
        if changes is None or changes.number <= self._changes:
            return
        self._early[changes.number] = changes
        while (following := self._early.pop(self._changes + 1, None)) is not None:
            self._changes += 1
            self._take_in(following)
        self._stirred.set()

    def _take_in(self, changes: FeedChanges) -> None:
        for want in changes.wants:
            self._reading[want.number] = asyncio.ensure_future(self._read(want))
        for look in changes.looks:
            self._looks[look.number] = look
            self._new_looks.add(look.number)
        for number in changes.dropped:
            self._ready.pop(number, None)
            reading = self._reading.pop(number, None)
            if reading is not None:
                reading.cancel()
            self._forget_look(number)

    def _forget_look(self, number: int) -> None:
        self._looks.pop(number, None)
        self._known.pop(number, None)
        self._new_looks.discard(number)

    async def _read(self, want: Want) -> None:
        page, error = None, None
        try:
            page = await self._source.events(want.activation_id, want.run_id, want.after, PAGE_EVENTS)
        except RetinueError as refused:
            error = refused.to_payload()
        except Exception as defect:  # of ours: the viewer must not wait for ever
            error = RetinueError(f"the events of run {want.run_id} cannot be read: {defect!r}").to_payload()
        del self._reading[want.number]
        bounded = None if page is None else _bounded(page)
        self._ready[want.number] = FeedPage(number=want.number, page=bounded, error=error)
        self._stirred.set()

    # --- batches ------------------------------------------------------------------------------------------

    async def next_batch(self, number: int, changes: FeedChanges | None) -> FeedBatch:
        """See :meth:`Feeds.next_batch`."""
        if number == self._number + 1 and not self.waiting and not self._closed:
            self._number = number
            self._silence.cancel()
            self._batch = asyncio.ensure_future(self._gather(number))
            self._batch.add_done_callback(self._answered)
        elif number != self._number or self._batch is None:
            raise NotFound("this subscription is not known here any more; begin another one")
        self.update(changes)
        return await asyncio.shield(self._batch)

    def _answered(self, batch: asyncio.Task[FeedBatch]) -> None:
        if not self._closed and not batch.cancelled():
            self._silence = asyncio.get_running_loop().call_later(SILENCE, self._on_silence)

    async def _gather(self, number: int) -> FeedBatch:
        loop = asyncio.get_running_loop()
        give_up = loop.time() + POLL_WAIT
        while True:
            self._stirred.clear()
            statuses = self._changed_statuses()
            if self._ready or statuses or self._closed or loop.time() >= give_up:
                return FeedBatch(number=number, pages=self._ready_pages(), statuses=statuses)
            until = min(give_up, self._look_at) if self._looks else give_up
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(until):
                    await self._stirred.wait()

    def _ready_pages(self) -> list[FeedPage]:
        """The oldest pages; what does not fit comes with the next batch."""
        pages: list[FeedPage] = []
        size = 0
        while self._ready and size < PAGE_BYTES:
            done = self._ready.pop(next(iter(self._ready)))
            pages.append(done)
            size += 0 if done.page is None else sum(len(body) for _, body in done.page.events)
        return pages

    def _changed_statuses(self) -> list[FeedStatus]:
        now = asyncio.get_running_loop().time()
        if now >= self._look_at:
            self._look_at = now + STATUS_PERIOD
            numbers = list(self._looks)
        else:
            numbers = list(self._new_looks)
        self._new_looks.clear()
        statuses = (self._look(self._looks[number]) for number in numbers)
        return [changed for changed in statuses if changed is not None]

    def _look(self, look: Look) -> FeedStatus | None:
        try:
            status = self._source.status(look.activation_id, look.run_id)
        except RetinueError as error:
            self._forget_look(look.number)
            return FeedStatus(number=look.number, error=error.to_payload())
        if status == self._known.get(look.number):
            return None
        self._known[look.number] = status
        if status.state == "finished":
            self._forget_look(look.number)
        return FeedStatus(number=look.number, status=status)

    def close(self) -> None:
        """Follow nothing any more; a call that waits gets what is ready."""
        self._closed = True
        self._silence.cancel()
        for reading in self._reading.values():
            reading.cancel()
        self._reading.clear()
        self._looks.clear()
        self._stirred.set()


def _bounded(page: EventPageReply) -> EventPageReply:
    """The beginning of a page: at least one event, and no further one after :data:`PAGE_BYTES`."""
    size = 0
    for index, (_, body) in enumerate(page.events):
        size += len(body)
        if size >= PAGE_BYTES and index + 1 < len(page.events):
            return EventPageReply(events=page.events[: index + 1], closed=False, status=page.status)
    return page
