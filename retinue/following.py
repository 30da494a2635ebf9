"""The client's side of following: everything that this process follows on one host comes in one call.

A :class:`HostFeed` keeps one call to its host outstanding as long as anything is followed there, however
many viewers and looked-at handles there are; see :mod:`retinue.feeds` for what travels. Everything here
belongs to the client loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol
from weakref import WeakValueDictionary

from retinue.client import HostGone
from retinue.errors import NotFound, RetinueError, error_from_payload
from retinue.feeds import FeedBatch, FeedChanges, FeedStatus, Look, Want
from retinue.ids import new_id
from retinue.protocol import EventPageReply, RunStatus

_AGAIN_PAUSE = 0.1
"""Seconds before a subscription that the host has forgotten is begun again."""

Hear = Callable[[RunStatus], None]
Place = tuple[str, str]
"""Activation id and run id."""


class FeedPort(Protocol):
    """A host, near or far, as it is followed; see :class:`retinue.feeds.Feeds`. May raise
    :class:`retinue.client.HostGone`."""

    async def next_batch(self, subscriber: str, number: int, changes: FeedChanges | None) -> FeedBatch: ...

    async def update_feed(self, subscriber: str, changes: FeedChanges) -> None: ...


@dataclass(frozen=True, kw_only=True)
class FollowingStatistics:
    """What this process follows on one host."""

    viewers: int
    """Viewers that wait for events."""
    looks: int
    """Runs whose status is followed."""
    calls: int
    """Calls outstanding that carry all of that: 0 or 1."""
    batches: int
    """Answers that such calls have had."""


class FeedViewer:
    """One viewer of one run on a host. One page is read ahead of the reader, and never more."""

    def __init__(self, feed: HostFeed, activation_id: str, run_id: str, after: int) -> None:
        self.feed = feed
        self.place: Place = (activation_id, run_id)
        self._after = after
        self._answer: EventPageReply | Exception | None = None
        """The page that was read ahead, or why there is none."""
        self._arrived = asyncio.Event()
        self._closed = False

    @property
    def key(self) -> tuple[str, str, int]:
        """What the viewer wants next."""
        return (*self.place, self._after)

    async def page(self) -> EventPageReply:
        """The next events, waiting for one; empty and closed when there are no more.

        Raises:
            NotFound, LeaseLost: the run is not, or no longer, there.
            HostGone: the host has died.
            EventGap, InputError: as in :meth:`retinue.client.SessionClient.events`.
        """
        if self._answer is None:
            self.feed.want(self)
            await self._arrived.wait()
        answer, self._answer = self._answer, None
        self._arrived.clear()
        if not isinstance(answer, EventPageReply):
            assert answer is not None
            raise answer
        if answer.events:
            self._after = answer.events[-1][0]
        if not answer.closed and not self._closed:
            self.feed.want(self)
        return answer

    def arrived(self, answer: EventPageReply | Exception) -> None:
        """What the viewer wanted is there."""
        self._answer = answer
        self._arrived.set()

    def close(self) -> None:
        """Want nothing any more."""
        self._closed = True
        self.feed.unwant(self)


@dataclass
class _Wanted:
    want: Want
    viewers: dict[FeedViewer, None] = field(default_factory=dict)
    """As an ordered set."""


@dataclass(eq=False)
class _Watcher:
    hear: Hear
    ended: asyncio.Future[None]


@dataclass
class _Looking:
    look: Look
    watchers: list[_Watcher] = field(default_factory=list)
    last: RunStatus | None = None


class HostFeed:
    """What this process follows on one host.

    Viewers that want the same page share it. When the host dies, or is lost for this process, every viewer
    and watcher is told, and nothing is followed any more; each finds its run's new place itself.
    """

    def __init__(self, port: FeedPort) -> None:
        self._port = port
        self._numbers = 0
        """The last number given to a want or look."""
        self._wanted: dict[int, _Wanted] = {}
        self._by_key: dict[tuple[str, str, int], int] = {}
        self._looking: dict[int, _Looking] = {}
        self._by_place: dict[Place, int] = {}
        self._subscriber = ""
        self._changes = 0
        """Number of the last changes that were told."""
        self._added: dict[int, Want | Look] = {}
        self._dropped: list[int] = []
        """What the host was not told yet."""
        self._telling = False
        self._following: asyncio.Task[None] | None = None
        self._updates: set[asyncio.Task[None]] = set()
        self._batches = 0

    def viewer(self, activation_id: str, run_id: str, after: int) -> FeedViewer:
        """A viewer of a run; it costs nothing until its first page is asked for."""
        return FeedViewer(self, activation_id, run_id, after)

    async def watch(self, activation_id: str, run_id: str, hear: Hear) -> None:
        """Tell how a run is, now and whenever that has changed; returns when the run has ended.

        Raises:
            NotFound, LeaseLost: the run is not, or no longer, there.
            HostGone: the host has died.
        """
        watcher = _Watcher(hear, asyncio.get_running_loop().create_future())
        place = (activation_id, run_id)
        number = self._look(place, watcher)
        try:
            await watcher.ended
        finally:
            self._unlook(place, number, watcher)

    def statistics(self) -> FollowingStatistics:
        return FollowingStatistics(
            viewers=sum(len(wanted.viewers) for wanted in self._wanted.values()),
            looks=len(self._looking),
            calls=int(self._following is not None),
            batches=self._batches,
        )

    # --- what is followed ---------------------------------------------------------------------------------

    def want(self, viewer: FeedViewer) -> None:
        """Ask for the viewer's next page; does nothing when it was asked for."""
        number = self._by_key.get(viewer.key)
        if number is None:
            activation_id, run_id, after = viewer.key
            number = self._number()
            want = Want(number=number, activation_id=activation_id, run_id=run_id, after=after)
            self._wanted[number] = _Wanted(want)
            self._by_key[viewer.key] = number
            self._tell(want)
        self._wanted[number].viewers[viewer] = None

    def unwant(self, viewer: FeedViewer) -> None:
        """The viewer is gone."""
        number = self._by_key.get(viewer.key)
        if number is None or viewer not in self._wanted[number].viewers:
            return
        del self._wanted[number].viewers[viewer]
        if not self._wanted[number].viewers:
            del self._wanted[number], self._by_key[viewer.key]
            self._tell_dropped(number)

    def _look(self, place: Place, watcher: _Watcher) -> int:
        number = self._by_place.get(place)
        if number is None:
            number = self._number()
            look = Look(number=number, activation_id=place[0], run_id=place[1])
            self._looking[number] = _Looking(look)
            self._by_place[place] = number
            self._tell(look)
        looking = self._looking[number]
        looking.watchers.append(watcher)
        if looking.last is not None:
            _hear(watcher, looking.last)
        return number

    def _unlook(self, place: Place, number: int, watcher: _Watcher) -> None:
        looking = self._looking.get(number)
        if looking is None:
            return
        looking.watchers.remove(watcher)
        if not looking.watchers:
            del self._looking[number], self._by_place[place]
            self._tell_dropped(number)

    def _number(self) -> int:
        self._numbers += 1
        return self._numbers

    # --- telling the host ---------------------------------------------------------------------------------

    def _tell(self, added: Want | Look) -> None:
        self._added[added.number] = added
        self._tell_soon()

    def _tell_dropped(self, number: int) -> None:
        if self._added.pop(number, None) is None:
            self._dropped.append(number)
            self._tell_soon()

    def _tell_soon(self) -> None:
        """With the next call, where none is outstanding; else all changes of this moment together."""
        if self._following is None:
            self._following = asyncio.ensure_future(self._follow())
        elif not self._telling:
            self._telling = True
            asyncio.get_running_loop().call_soon(self._update)

    def _update(self) -> None:
        self._telling = False
        if self._following is None:
            return
        changes = self._take_changes()
        if changes is not None:
            update = asyncio.ensure_future(self._send_update(self._subscriber, changes))
            self._updates.add(update)
            update.add_done_callback(self._updates.discard)

    async def _send_update(self, subscriber: str, changes: FeedChanges) -> None:
        try:
            await self._port.update_feed(subscriber, changes)
        except Exception as error:
            # Changes are missing there now, so this subscription is of no use any more.
            if subscriber == self._subscriber and self._following is not None:
                self._following.cancel()
                self._fail(error)

    def _take_changes(self) -> FeedChanges | None:
        added, self._added = self._added, {}
        dropped, self._dropped = self._dropped, []
        if not added and not dropped:
            return None
        self._changes += 1
        return FeedChanges(
            number=self._changes,
            wants=[each for each in added.values() if isinstance(each, Want)],
            looks=[each for each in added.values() if isinstance(each, Look)],
            dropped=dropped,
        )

    # --- following ----------------------------------------------------------------------------------------

    async def _follow(self) -> None:
        """Keep one call outstanding while anything is followed."""
        number = self._begin()
        while self._wanted or self._looking:
            number += 1
            try:
                batch = await self._port.next_batch(self._subscriber, number, self._take_changes())
            except NotFound:  # no call of ours reached the host for a long time
                await asyncio.sleep(_AGAIN_PAUSE)
                number = self._begin()
                continue
            except Exception as error:
                self._fail(error)
                return
            self._batches += 1
            self._deliver(batch)
            await asyncio.sleep(0)  # what the readers want next goes with the next call
        self._update()  # with what was dropped last
        self._following = None

    def _begin(self) -> int:
        """Begin as a new subscriber, with all that is followed; the number of the last call."""
        self._subscriber = new_id("subscriber")
        self._changes = 0
        self._dropped.clear()
        self._added = {number: wanted.want for number, wanted in self._wanted.items()}
        self._added.update((number, looking.look) for number, looking in self._looking.items())
        return 0

    def _deliver(self, batch: FeedBatch) -> None:
        for answer in batch.pages:
            wanted = self._wanted.pop(answer.number, None)
            if wanted is None:  # dropped meanwhile
                continue
            del self._by_key[wanted.want.activation_id, wanted.want.run_id, wanted.want.after]
            for viewer in wanted.viewers:
                viewer.arrived(answer.page or error_from_payload(answer.error or {}))
        for status in batch.statuses:
            self._deliver_status(status)

    def _deliver_status(self, told: FeedStatus) -> None:
        looking = self._looking.get(told.number)
        if looking is None:
            return
        if told.status is not None:
            looking.last = told.status
            for watcher in looking.watchers:
                _hear(watcher, told.status)
            return
        self._end_look(told.number, lambda: error_from_payload(told.error or {}))

    def _end_look(self, number: int, why: Callable[[], Exception]) -> None:
        looking = self._looking.pop(number)
        del self._by_place[looking.look.activation_id, looking.look.run_id]
        for watcher in looking.watchers:
            if not watcher.ended.done():
                watcher.ended.set_exception(why())

    def _fail(self, error: Exception) -> None:
        """Nothing is followed here any more."""
        self._following = None
        self._added.clear()
        self._dropped.clear()
        wanted, self._wanted = self._wanted, {}
        self._by_key.clear()
        for each in wanted.values():
            for viewer in each.viewers:
                viewer.arrived(_like(error))
        for number in list(self._looking):
            self._end_look(number, lambda: _like(error))


def _hear(watcher: _Watcher, status: RunStatus) -> None:
    if watcher.ended.done():
        return
    watcher.hear(status)
    if status.state == "finished":
        watcher.ended.set_result(None)


def _like(error: Exception) -> Exception:
    """An exception of its own for each of many that are told the same."""
    if isinstance(error, HostGone):
        return HostGone(str(error))
    if isinstance(error, RetinueError):
        return error_from_payload(error.to_payload())
    return RetinueError(f"the session host cannot be followed: {error!r}")


_feeds: WeakValueDictionary[str, HostFeed] = WeakValueDictionary()


def host_feed(host_id: str, port: FeedPort) -> HostFeed:
    """The one feed of this process from that host, whatever the number of its runtimes."""
    feed = _feeds.get(host_id)
    if feed is None:
        feed = _feeds[host_id] = HostFeed(port)
    return feed


def following() -> dict[str, FollowingStatistics]:
    """What this process follows, by host id. On the client loop."""
    return {host_id: feed.statistics() for host_id, feed in sorted(_feeds.items())}
