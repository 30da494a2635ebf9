"""The host's side of following: batches, changes, repeats, bounds, subscribers that vanish."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retinue import feeds as feeds_module
from retinue.ended_runs import unknown_status
from retinue.errors import EventGap, NotFound, RetinueError
from retinue.event_log import EventLog
from retinue.feeds import FeedBatch, FeedChanges, FeedPage, Feeds, FeedStatus, Look, Want
from retinue.protocol import EventPageReply, RunStatus
from tests.support import soon

ACTIVATION = "activation"


class Source:
    """Runs as a host answers for them: real event logs, and statuses that the test sets."""

    def __init__(self, capacity: int = 10_000) -> None:
        self._capacity = capacity
        self.logs: dict[str, EventLog] = {}
        self.statuses: dict[str, RunStatus] = {}
        self.reads = 0
        self.looks = 0

    def log(self, run_id: str = "run") -> EventLog:
        if run_id not in self.logs:
            self.logs[run_id] = EventLog(self._capacity)
            self.statuses[run_id] = unknown_status(run_id, "running")
        return self.logs[run_id]

    def emit(self, count: int = 1, run_id: str = "run", *, body: bytes = b"event") -> None:
        for _ in range(count):
            self.log(run_id).append(body)

    def finish(self, run_id: str = "run") -> None:
        if not self.log(run_id).closed:
            self.log(run_id).append(b"end", terminal=True)
            self.set(run_id, state="finished")

    def set(self, run_id: str = "run", **changed: Any) -> None:
        self.log(run_id)
        self.statuses[run_id] = msgspec.structs.replace(self.statuses[run_id], **changed)

    async def events(self, activation_id: str, run_id: str, after: int, limit: int) -> EventPageReply:
        self._check(activation_id, run_id)
        self.reads += 1
        log = self.logs[run_id]
        events = await log.read(after, limit)
        last = events[-1][0] if events else after
        return EventPageReply(
            events=events, closed=log.closed and last == log.last, status=self.statuses[run_id]
        )

    def status(self, activation_id: str, run_id: str) -> RunStatus:
        self._check(activation_id, run_id)
        self.looks += 1
        return self.statuses[run_id]

    def _check(self, activation_id: str, run_id: str) -> None:
        if activation_id != ACTIVATION:
            raise NotFound("gone", activation_id=activation_id)
        if run_id not in self.logs:
            raise NotFound("unknown", run_id=run_id)


def wants(*pairs: tuple[int, int], run_id: str = "run", changes: int = 1) -> FeedChanges:
    """Changes that want pages: (number, after)."""
    asked = [
        Want(number=number, activation_id=ACTIVATION, run_id=run_id, after=after) for number, after in pairs
    ]
    return FeedChanges(number=changes, wants=asked)


def looks(*numbers: int, run_id: str = "run", changes: int = 1) -> FeedChanges:
    asked = [Look(number=number, activation_id=ACTIVATION, run_id=run_id) for number in numbers]
    return FeedChanges(number=changes, looks=asked)


def sequences(page: FeedPage) -> list[int]:
    assert page.page is not None, page.error
    return [number for number, _ in page.page.events]


async def turn() -> None:
    """Let everything that can go on go on."""
    for _ in range(20):
        await asyncio.sleep(0)


@pytest.fixture
def source() -> Source:
    return Source()


@pytest.fixture
async def feeds(source: Source) -> AsyncIterator[Feeds]:
    made = Feeds(source)
    yield made
    made.close()
    await turn()


async def test_one_call_carries_the_pages_of_all_viewers(source: Source, feeds: Feeds) -> None:
    source.emit(3, "one")
    source.emit(2, "two")
    both = FeedChanges(
        number=1, wants=[*wants((1, 0), (2, 2), run_id="one").wants, *wants((3, 1), run_id="two").wants]
    )
    batch = await soon(feeds.next_batch("client", 1, both))
    assert {page.number: sequences(page) for page in batch.pages} == {1: [1, 2, 3], 2: [3], 3: [2]}
    assert feeds.statistics().wants == 0


async def test_a_call_waits_until_there_is_something_and_then_returns_at_once(
    source: Source, feeds: Feeds
) -> None:
    source.log()
    waiting = asyncio.ensure_future(feeds.next_batch("client", 1, wants((1, 0))))
    await turn()
    assert not waiting.done()
    statistics = feeds.statistics()
    assert (statistics.subscribers, statistics.calls, statistics.wants) == (1, 1, 1)
    source.emit()
    assert [sequences(page) for page in (await soon(waiting)).pages] == [[1]]
    assert feeds.statistics().calls == 0


async def test_changes_can_come_while_a_call_is_outstanding(source: Source, feeds: Feeds) -> None:
    source.emit(2)
    waiting = asyncio.ensure_future(feeds.next_batch("client", 1, None))
    await turn()
    assert not waiting.done()
    feeds.update("client", wants((1, 1)))
    assert [sequences(page) for page in (await soon(waiting)).pages] == [[2]]


async def test_a_repeated_call_gets_the_same_batch_and_takes_nothing_twice(
    source: Source, feeds: Feeds
) -> None:
    source.emit()
    first = await soon(feeds.next_batch("client", 1, wants((1, 0))))
    source.emit()
    assert await soon(feeds.next_batch("client", 1, wants((1, 0)))) == first
    assert source.reads == 1
    # The number after it says that it has arrived; its pages do not come again.
    waiting = asyncio.ensure_future(feeds.next_batch("client", 2, wants((2, 1), changes=2)))
    again = asyncio.ensure_future(feeds.next_batch("client", 2, wants((2, 1), changes=2)))
    second = await soon(waiting)
    assert await soon(again) == second
    assert [(page.number, sequences(page)) for page in second.pages] == [(2, [2])]
    assert source.reads == 2


async def test_changes_that_overtake_each_other_are_taken_in_order_and_once(
    source: Source, feeds: Feeds
) -> None:
    source.emit()
    drop = FeedChanges(number=2, dropped=[1])
    feeds.update("client", drop)
    feeds.update("client", wants((2, 0), changes=3))
    batch = asyncio.ensure_future(feeds.next_batch("client", 1, None))
    await turn()
    assert source.reads == 0  # the first changes are still on their way
    feeds.update("client", wants((1, 0), changes=1))
    feeds.update("client", wants((1, 0), changes=1))
    feeds.update("client", drop)
    assert [page.number for page in (await soon(batch)).pages] == [2]
    assert feeds.statistics().wants == 0


async def test_a_dropped_want_is_answered_no_more(source: Source, feeds: Feeds) -> None:
    source.log()
    waiting = asyncio.ensure_future(feeds.next_batch("client", 1, wants((1, 0), (2, 0))))
    await turn()
    feeds.update("client", FeedChanges(number=2, dropped=[1]))
    source.emit()
    assert [page.number for page in (await soon(waiting)).pages] == [2]
    # Ready, but not fetched: dropped all the same.
    feeds.update("client", wants((3, 0), (4, 0), changes=3))
    await turn()
    feeds.update("client", FeedChanges(number=4, dropped=[3]))
    assert [page.number for page in (await soon(feeds.next_batch("client", 2, None))).pages] == [4]


async def test_what_cannot_be_read_is_said_for_that_viewer_only(feeds: Feeds) -> None:
    source = Source(capacity=2)
    feeds = Feeds(source)
    source.emit(5)
    asked = [*wants((1, 0), (2, 3), (3, 9)).wants, *wants((4, 0), run_id="nobody").wants]
    batch = await soon(feeds.next_batch("client", 1, FeedChanges(number=1, wants=asked)))
    answers = {page.number: page for page in batch.pages}
    assert sequences(answers[2]) == [4, 5]
    errors = {number: page.error for number, page in answers.items() if page.error}
    assert {number: error["code"] for number, error in errors.items()} == {
        1: EventGap.code,
        3: "invalid_input",
        4: NotFound.code,
    }
    assert errors[1]["data"] == {"earliest_cursor": 3}
    assert errors[4]["data"] == {"run_id": "nobody"}
    feeds.close()


async def test_a_defect_of_the_source_does_not_leave_a_viewer_waiting(
    source: Source, feeds: Feeds, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(*arguments: object) -> EventPageReply:
        raise KeyError("a defect")

    monkeypatch.setattr(source, "events", broken)
    batch = await soon(feeds.next_batch("client", 1, wants((1, 0))))
    assert batch.pages[0].error is not None
    assert (batch.pages[0].error["code"], "a defect" in batch.pages[0].error["message"]) == (
        RetinueError.code,
        True,
    )


# --- bounds -----------------------------------------------------------------------------------------------


async def test_pages_are_bounded_in_events_and_bytes_and_batches_in_bytes(
    source: Source, feeds: Feeds, monkeypatch: pytest.MonkeyPatch
) -> None:
    source.emit(300, "many")
    batch = await soon(feeds.next_batch("client", 1, wants((1, 0), run_id="many")))
    assert sequences(batch.pages[0]) == list(range(1, 257))
    monkeypatch.setattr(feeds_module, "PAGE_BYTES", 1000)
    source.emit(10, "big", body=b"x" * 400)
    source.emit(1, "huge", body=b"x" * 5000)
    source.finish("huge")
    asked = [
        *wants((2, 0), (3, 0), (4, 8), run_id="big").wants,
        *wants((5, 0), run_id="huge").wants,
    ]
    first = await soon(feeds.next_batch("client", 2, FeedChanges(number=2, wants=asked)))
    assert [(page.number, sequences(page)) for page in first.pages] == [(2, [1, 2, 3])]
    second = await soon(feeds.next_batch("client", 3, None))
    assert [(page.number, sequences(page)) for page in second.pages] == [(3, [1, 2, 3])]
    third = await soon(feeds.next_batch("client", 4, None))
    # One event is always given, however large; what it cut off is not called the end.
    assert [(page.number, sequences(page)) for page in third.pages] == [(4, [9, 10]), (5, [1])]
    assert third.pages[1].page is not None
    assert third.pages[1].page.closed is False
    rest = await soon(feeds.next_batch("client", 5, wants((6, 1), run_id="huge", changes=3)))
    assert rest.pages[0].page is not None
    assert (sequences(rest.pages[0]), rest.pages[0].page.closed) == ([2], True)


async def test_a_viewer_that_does_not_read_delays_nobody(source: Source, feeds: Feeds) -> None:
    source.log("idle")
    changes = FeedChanges(
        number=1, wants=[*wants((1, 0), run_id="idle").wants, *wants((2, 0), run_id="busy").wants]
    )
    source.emit(1, "busy")
    for number in range(1, 20):
        batch = await soon(feeds.next_batch("client", number, changes))
        assert [sequences(page) for page in batch.pages] == [[number]]
        source.emit(1, "busy")
        changes = wants((number + 2, number), run_id="busy", changes=number + 1)
    assert feeds.statistics().wants == 1


async def test_a_call_is_answered_now_and_then_though_there_is_nothing(
    source: Source, feeds: Feeds, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feeds_module, "POLL_WAIT", 0.01)
    source.log()
    batch = await soon(feeds.next_batch("client", 1, wants((1, 0))))
    assert (batch.number, batch.pages, batch.statuses) == (1, [], [])
    source.emit()
    assert [page.number for page in (await soon(feeds.next_batch("client", 2, None))).pages] == [1]


# --- subscribers ------------------------------------------------------------------------------------------


async def test_a_subscriber_that_does_not_call_any_more_is_forgotten(
    source: Source, feeds: Feeds, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feeds_module, "SILENCE", 0.02)
    source.emit()
    await soon(feeds.next_batch("client", 1, wants((1, 0), (2, 1))))
    assert feeds.statistics().subscribers == 1
    waiting = asyncio.ensure_future(feeds.next_batch("patient", 1, wants((1, 1))))
    await turn()
    while feeds.statistics().subscribers > 1:
        await asyncio.sleep(0.005)
    assert feeds.statistics().wants == 1
    with pytest.raises(NotFound, match="begin another"):
        await soon(feeds.next_batch("client", 2, wants((3, 1), changes=2)))
    await asyncio.sleep(0.05)
    assert not waiting.done()  # a call that waits is no silence
    source.emit()
    assert [sequences(page) for page in (await soon(waiting)).pages] == [[2]]


async def test_subscribers_do_not_disturb_each_other(source: Source, feeds: Feeds) -> None:
    source.emit()
    both = await asyncio.gather(
        *(soon(feeds.next_batch(name, 1, wants((1, 0)))) for name in ("first", "second"))
    )
    assert [sequences(batch.pages[0]) for batch in both] == [[1], [1]]
    assert feeds.statistics().subscribers == 2


async def test_a_call_out_of_turn_is_refused(source: Source, feeds: Feeds) -> None:
    source.log()
    for number in (0, 2, 7):
        with pytest.raises(NotFound):
            await soon(feeds.next_batch("client", number, None))
    waiting = asyncio.ensure_future(feeds.next_batch("client", 1, wants((1, 0))))
    await turn()
    with pytest.raises(NotFound):
        await soon(feeds.next_batch("client", 2, None))
    source.emit()
    assert [sequences(page) for page in (await soon(waiting)).pages] == [[1]]


async def test_closing_answers_who_waits_and_leaves_nothing(source: Source) -> None:
    feeds = Feeds(source)
    source.log()
    before = asyncio.all_tasks()
    waiting = asyncio.ensure_future(feeds.next_batch("client", 1, wants((1, 0))))
    looking = asyncio.ensure_future(feeds.next_batch("other", 1, looks(1)))
    await turn()
    feeds.close()
    assert (await soon(waiting)).pages == []
    assert [status.number for status in (await soon(looking)).statuses] == [1]
    await turn()
    assert asyncio.all_tasks() == before
    assert feeds.statistics().subscribers == 0


# --- statuses ---------------------------------------------------------------------------------------------


def told(statuses: Sequence[FeedStatus]) -> list[tuple[int, int]]:
    """Numbers and cursors."""
    return [(each.number, each.status.cursor) for each in statuses if each.status is not None]


async def test_a_look_is_told_at_once_and_then_of_changes_only(
    source: Source, feeds: Feeds, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feeds_module, "STATUS_PERIOD", 0.01)
    source.set(cursor=3)
    first = await soon(feeds.next_batch("client", 1, looks(1)))
    assert told(first.statuses) == [(1, 3)]
    waiting = asyncio.ensure_future(feeds.next_batch("client", 2, None))
    seen = source.looks
    while source.looks < seen + 3:
        await asyncio.sleep(0.005)
    assert not waiting.done()
    source.set(cursor=4)
    assert told((await soon(waiting)).statuses) == [(1, 4)]
    dropped = FeedChanges(number=2, dropped=[1])
    waiting = asyncio.ensure_future(feeds.next_batch("client", 3, dropped))
    source.set(cursor=5)
    await asyncio.sleep(0.05)
    assert not waiting.done()
    assert feeds.statistics().looks == 0


async def test_a_busy_run_tells_its_status_twice_a_second_at_most(source: Source, feeds: Feeds) -> None:
    source.set(cursor=0)
    await soon(feeds.next_batch("client", 1, looks(1)))
    source.emit(1)
    changes = wants((2, 0), changes=2)
    for number in range(2, 30):  # far less than half a second
        source.set(cursor=number)
        batch = await soon(feeds.next_batch("client", number, changes))
        assert batch.pages
        assert told(batch.statuses) == []
        source.emit(1)
        changes = wants((number + 1, number - 1), changes=number + 1)
    # A new look is told at once all the same.
    batch = await soon(feeds.next_batch("client", 30, looks(99, changes=30)))
    assert (99, 29) in told(batch.statuses)


async def test_a_run_that_is_not_here_ends_its_look(source: Source, feeds: Feeds) -> None:
    batch = await soon(feeds.next_batch("client", 1, looks(1, run_id="nobody")))
    (status,) = batch.statuses
    assert status.error is not None
    assert status.error["data"] == {"run_id": "nobody"}
    assert feeds.statistics().looks == 0


# --- any order --------------------------------------------------------------------------------------------


class Client:
    """A subscriber whose changes are lost in the post for a while, and come twice."""

    def __init__(self, feeds: Feeds) -> None:
        self.feeds = feeds
        self.number = 0
        self.calls: list[asyncio.Task[FeedBatch]] = []
        """The outstanding call and its repeats."""
        self.last: FeedBatch | None = None
        self.sent: FeedChanges | None = None
        self.post: list[FeedChanges] = []
        self.delivered: list[FeedChanges] = []
        self.changes = 0
        self.wanted: list[Want] = []
        self.dropped: list[int] = []
        self.wants = 0
        self.viewer_of: dict[int, int] = {}
        self.seen: list[list[int]] = []
        self.after: list[int] = []
        self.run_of: list[str] = []
        self.open: list[bool] = []

    def view(self, run_id: str, after: int) -> None:
        self.seen.append([])
        self.after.append(after)
        self.run_of.append(run_id)
        self.open.append(True)
        self.want(len(self.seen) - 1)

    def want(self, viewer: int) -> None:
        self.wants += 1
        after = (self.seen[viewer] or [self.after[viewer]])[-1]
        run_id = self.run_of[viewer]
        self.wanted.append(Want(number=self.wants, activation_id=ACTIVATION, run_id=run_id, after=after))
        self.viewer_of[self.wants] = viewer

    def close(self, viewer: int) -> None:
        self.open[viewer] = False
        gone = [number for number, owner in self.viewer_of.items() if owner == viewer]
        for number in gone:
            del self.viewer_of[number]
        self.dropped.extend(gone)

    def take_changes(self) -> FeedChanges | None:
        if not self.wanted and not self.dropped:
            return None
        self.changes += 1
        made = FeedChanges(number=self.changes, wants=self.wanted, dropped=self.dropped)
        self.wanted, self.dropped = [], []
        return made

    def call(self) -> None:
        if not self.calls:
            self.number += 1
            self.sent = self.take_changes()
            self.repeat()

    def repeat(self) -> None:
        if self.number:
            batch = self.feeds.next_batch("client", self.number, self.sent)
            self.calls.append(asyncio.ensure_future(batch))

    def receive(self) -> None:
        """Take what has arrived; a repeat of what arrived before says the same."""
        if not self.calls or not all(call.done() for call in self.calls):
            return
        batches = [call.result() for call in self.calls]
        self.calls.clear()
        assert all(batch == batches[0] for batch in batches)
        if self.last is not None and self.last.number == batches[0].number:
            assert batches[0] == self.last
            return
        self.last = batches[0]
        for page in self.last.pages:
            viewer = self.viewer_of.pop(page.number, None)
            if viewer is None:
                continue
            self.seen[viewer].extend(sequences(page))
            assert page.page is not None
            if not page.page.closed:
                self.want(viewer)


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("emit"), st.integers(0, 2), st.integers(1, 5)),
        st.tuples(st.just("finish"), st.integers(0, 2), st.just(0)),
        st.tuples(st.just("view"), st.integers(0, 2), st.integers(0, 3)),
        st.tuples(st.just("close"), st.integers(0, 9), st.just(0)),
        st.tuples(st.sampled_from(["call", "repeat", "turn", "receive", "post"]), st.just(0), st.just(0)),
        st.tuples(st.sampled_from(["deliver", "twice"]), st.integers(0, 9), st.just(0)),
    ),
    max_size=60,
)


@settings(max_examples=200, deadline=None)
@given(STEPS)
def test_in_whatever_order_every_viewer_gets_every_event_once_and_in_order(
    steps: list[tuple[str, int, int]],
) -> None:
    asyncio.run(_run(steps))


async def _run(steps: list[tuple[str, int, int]]) -> None:
    source = Source()
    feeds = Feeds(source)
    client = Client(feeds)
    for run in range(3):
        source.log(f"run-{run}")
    for what, which, count in steps:
        run_id = f"run-{which}"
        if what == "emit" and not source.logs[run_id].closed:
            source.emit(count, run_id)
        elif what == "finish":
            source.finish(run_id)
        elif what == "view" and count <= source.logs[run_id].last:
            client.view(run_id, count)
        elif what == "close" and which < len(client.seen) and client.open[which]:
            client.close(which)
        elif what == "call":
            client.call()
        elif what == "repeat":
            client.repeat()
        elif what == "turn":
            await asyncio.sleep(0)
        elif what == "receive":
            await turn()
            client.receive()
        elif what == "post" and (changes := client.take_changes()) is not None:
            client.post.append(changes)
        elif what == "deliver" and client.post:
            delivered = client.post.pop(which % len(client.post))
            feeds.update("client", delivered)
            client.delivered.append(delivered)
        elif what == "twice" and client.delivered:
            feeds.update("client", client.delivered[which % len(client.delivered)])
    for changes in reversed(client.post):
        feeds.update("client", changes)
    for run in range(3):
        source.finish(f"run-{run}")
    for _ in range(500):
        if not client.viewer_of and not client.wanted:
            break
        client.call()
        if (changes := client.take_changes()) is not None:
            feeds.update("client", changes)
        await turn()
        client.receive()
    for viewer, seen in enumerate(client.seen):
        last = source.logs[client.run_of[viewer]].last
        whole = list(range(client.after[viewer] + 1, last + 1))
        assert seen == (whole if client.open[viewer] else whole[: len(seen)])
    if (changes := client.take_changes()) is not None:
        feeds.update("client", changes)
    assert feeds.statistics().wants == 0
    feeds.close()
    await turn()
