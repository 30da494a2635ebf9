"""Gathering of deltas: nothing lost, nothing late, nothing out of order."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retinue import DriverOutput, ExecutionServices, RunRequest
from retinue.deltas import GATHER_BYTES, GATHER_SECONDS, Delta, Deltas
from retinue.errors import InputError
from retinue.events import MAX_DELTA, Custom, MessageDelta, TextDelta
from tests.unit.fake_root import root


@dataclass
class FakeTimer:
    at: float
    function: Callable[[], None]
    cancelled: bool = False

    def cancel(self) -> None:
        self.cancelled = True


@dataclass
class World:
    """Deltas under a clock that a test moves."""

    now: float = 0.0
    sent: list[tuple[float, Delta]] = field(default_factory=list)
    timers: list[FakeTimer] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.deltas = Deltas(
            lambda delta: self.sent.append((self.now, delta)), clock=lambda: self.now, later=self._later
        )

    def _later(self, seconds: float, function: Callable[[], None]) -> FakeTimer:
        self.timers.append(FakeTimer(self.now + seconds, function))
        return self.timers[-1]

    def wait(self, seconds: float) -> None:
        """Time passes, and timers fire when they are due."""
        until = self.now + seconds
        while due := [timer for timer in self.timers if not timer.cancelled and timer.at <= until]:
            first = min(due, key=lambda timer: timer.at)
            self.timers.remove(first)
            self.now = max(self.now, first.at)
            first.function()
        self.now = until

    @property
    def texts(self) -> list[tuple[float, str]]:
        return [(round(at, 6), delta.text) for at, delta in self.sent]


def test_the_first_piece_is_sent_at_once_and_later_ones_together() -> None:
    world = World()
    for piece in ("Hel", "lo", ", ", "you"):
        world.deltas.add(piece)
        world.wait(0.005)
    assert world.texts == [(0.0, "Hel")]
    world.wait(1.0)
    assert world.texts == [(0.0, "Hel"), (GATHER_SECONDS, "lo, you")]
    world.deltas.add("!")
    assert world.texts[2:] == [(1.02, "!")], "after a pause a piece is a first one again"


def test_a_steady_stream_gives_one_event_for_each_time_of_gathering() -> None:
    world = World()
    for _ in range(1000):
        world.deltas.add("x")
        world.wait(0.001)
    world.deltas.flush()
    times = [at for at, _ in world.texts]
    assert 39 <= len(times) <= 42
    assert all(later - earlier >= GATHER_SECONDS - 0.001 for earlier, later in itertools.pairwise(times[:-1]))
    assert sum(len(text) for _, text in world.texts) == 1000


def test_much_text_does_not_wait() -> None:
    world = World()
    world.deltas.add("a")
    world.deltas.add("é" * (GATHER_BYTES // 2 - 1))
    assert len(world.sent) == 1
    world.deltas.add("bc")  # two bytes more make it enough
    assert [len(text) for _, text in world.texts] == [1, GATHER_BYTES // 2 + 1]
    world.deltas.add("x" * (MAX_DELTA * 2 + 1))
    assert [len(text) for _, text in world.texts[2:]] == [MAX_DELTA, MAX_DELTA, 1]


def test_text_and_messages_are_gathered_apart_and_a_flush_sends_all() -> None:
    world = World()
    world.deltas.add("t1")
    world.deltas.add("m1", "m")
    world.deltas.add("t2")
    world.deltas.add("m2", "m")
    assert [delta for _, delta in world.sent] == [TextDelta("t1"), MessageDelta("m", "m1")]
    world.deltas.flush()
    assert [delta for _, delta in world.sent[2:]] == [TextDelta("t2"), MessageDelta("m", "m2")]
    world.deltas.add("t3")
    assert world.sent[4:] == [(0.0, TextDelta("t3"))], "what follows another event is a first piece"


def test_a_timer_that_is_too_early_waits_on() -> None:
    world = World()
    world.deltas.add("a")
    world.wait(0.02)
    world.deltas.add("b")  # the timer is for 0.025
    world.deltas.flush()
    world.deltas.add("c")
    world.wait(0.001)
    world.deltas.add("d")
    world.wait(0.01)
    assert [text for _, text in world.texts] == ["a", "b", "c"]
    world.wait(0.1)
    assert world.texts[3] == (0.045, "d")


def test_closing_sends_what_waits_and_leaves_no_timer() -> None:
    world = World()
    world.deltas.add("a")
    world.deltas.add("b")
    world.deltas.close()
    assert [text for _, text in world.texts] == ["a", "b"]
    assert all(timer.cancelled for timer in world.timers)
    world.deltas.add("late")
    world.deltas.add("later")
    assert [text for _, text in world.texts[2:]] == ["late", "later"]
    assert all(timer.cancelled for timer in world.timers)


@pytest.mark.parametrize("text", ["\ud800", "fine \udfff", 5, None, b"bytes"])
def test_what_no_store_can_carry_is_refused_by_name(text: object) -> None:
    world = World()
    world.deltas.add("before")
    with pytest.raises(InputError, match="lone surrogate" if isinstance(text, str) else "must be a string"):
        world.deltas.add(text)  # type: ignore[arg-type]
    world.deltas.close()
    assert [text for _, text in world.texts] == ["before"]


Step = tuple[str, str | float | None, str | None]
steps = st.lists(
    st.one_of(
        st.tuples(
            st.just("add"),
            st.text(st.characters(codec="utf-8"), max_size=20)
            | st.integers(0, 30_000).map(lambda size: "é" * size),
            st.sampled_from([None, "a", "b"]),
        ),
        st.tuples(st.just("wait"), st.floats(0, 0.06), st.none()),
        st.tuples(st.just("flush"), st.none(), st.none()),
    ),
    max_size=40,
)


@settings(max_examples=200, deadline=None)
@given(steps)
def test_whatever_the_timing_every_piece_arrives_once_in_order_and_in_time(taken: list[Step]) -> None:
    world = World()
    added: dict[str | None, str] = {None: "", "a": "", "b": ""}
    waiting_since: dict[str | None, float] = {}
    for action, value, key in taken:
        if action == "add":
            assert isinstance(value, str)
            added[key] += value
            world.deltas.add(value, key)
        elif action == "wait":
            assert isinstance(value, float)
            world.wait(value)
        else:
            world.deltas.flush()
            assert _arrived(world) == added
        # Nothing waits longer than it may, and never more than it may.
        for name, text in added.items():
            missing = text[len(_arrived(world)[name]) :]
            assert len(missing.encode()) < GATHER_BYTES
            if not missing:
                waiting_since.pop(name, None)
            elif world.now - waiting_since.setdefault(name, world.now) > GATHER_SECONDS + 0.001:
                raise AssertionError(f"{missing!r} waits for too long")
        assert len([timer for timer in world.timers if not timer.cancelled]) <= 1
    world.deltas.close()
    assert _arrived(world) == added
    assert all(0 < len(delta.text) <= MAX_DELTA for _, delta in world.sent)
    assert all(timer.cancelled for timer in world.timers)


def _arrived(world: World) -> dict[str | None, str]:
    arrived: dict[str | None, str] = {None: "", "a": "", "b": ""}
    for _, delta in world.sent:
        arrived[delta.id if isinstance(delta, MessageDelta) else None] += delta.text
    return arrived


# --- in an execution --------------------------------------------------------------------------------------


async def test_order_with_other_events_is_kept_and_the_end_flushes() -> None:
    world = root()

    async def speaks(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        for text in ("a", "b", "c"):
            services.emit_text(text)
        services.emit(Custom("between"))
        services.emit_text("d")
        services.emit_text("e")
        return DriverOutput(text="ok")

    await world.run(speaks)
    assert world.events == [
        TextDelta("a"), TextDelta("bc"), Custom("between"), TextDelta("d"), TextDelta("e")
    ]  # fmt: skip


async def test_an_execution_leaves_no_timer() -> None:
    loop = asyncio.get_running_loop()
    made: list[asyncio.TimerHandle] = []
    original = loop.call_later

    def call_later(
        delay: float, callback: Callable[..., object], *args: object, **more: object
    ) -> asyncio.TimerHandle:
        made.append(original(delay, callback, *args, **more))  # type: ignore[arg-type]
        return made[-1]

    async def speaks(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        loop.call_later = call_later  # type: ignore[method-assign]
        services.emit_text("a")
        services.emit_text("b")
        loop.call_later = original  # type: ignore[method-assign]
        return DriverOutput(text="ok")

    await root().run(speaks)
    assert len(made) == 1
    assert made[0].cancelled()


async def test_pieces_are_gathered_by_the_loops_own_clock() -> None:
    world = root()

    async def speaks(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        services.emit_text("a")
        services.emit_text("b")
        services.emit_text("c")
        assert world.events == [TextDelta("a")]
        async with asyncio.timeout(5):
            while len(world.events) < 2:
                await asyncio.sleep(0.005)
        return DriverOutput(text="ok")

    await world.run(speaks)
    assert world.events == [TextDelta("a"), TextDelta("bc")]


async def test_a_thread_may_speak_too() -> None:
    world = root()

    async def speaks(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        def speak() -> None:
            for _ in range(200):
                services.emit_text("x")

        threads = [threading.Thread(target=speak) for _ in range(4)]
        for thread in threads:
            thread.start()
        for _ in range(200):
            services.emit_text("y")
            await asyncio.sleep(0)
        for thread in threads:
            await asyncio.to_thread(thread.join)
        return DriverOutput(text="ok")

    await world.run(speaks)
    text = "".join(event.text for event in world.of(TextDelta))
    assert (text.count("x"), text.count("y"), len(text)) == (800, 200, 1000)
