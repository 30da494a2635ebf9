"""The three clocks of a run, on a loop whose time the test moves."""

from __future__ import annotations

import asyncio
import heapq
import math

import pytest

from retinue.clocks import MAX_TIMER, RunClocks, Stopwatch, check_seconds
from retinue.errors import InputError


class TestTime:
    """Replaces a loop's clock and timers: nothing waits, :meth:`pass_` moves time."""

    __test__ = False

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1_000.0
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        loop = asyncio.get_running_loop()
        monkeypatch.setattr(loop, "time", lambda: self.now)
        monkeypatch.setattr(loop, "call_later", self._call_later)

    def _call_later(self, delay: float, callback: object, *arguments: object) -> asyncio.TimerHandle:
        loop = asyncio.get_running_loop()
        handle = asyncio.TimerHandle(self.now + delay, callback, arguments, loop)  # type: ignore[arg-type]
        heapq.heappush(self._timers, (self.now + delay, len(self._timers), handle))
        return handle

    @property
    def waiting(self) -> int:
        return sum(not handle.cancelled() for _, _, handle in self._timers)

    def pass_(self, seconds: float) -> None:
        end = self.now + seconds
        while self._timers and self._timers[0][0] <= end:
            self.now, _, handle = heapq.heappop(self._timers)
            if not handle.cancelled():
                handle._run()
        self.now = end


def clocks_of(
    expired: list[str],
    *,
    deadline: float | None = None,
    active: float | None = None,
    waits: float | None = None,
    time: TestTime,
) -> RunClocks:
    return RunClocks(
        deadline=deadline,
        active_timeout=active,
        input_timeout=waits,
        expired=lambda code, text: expired.append(code),
        wall_clock=lambda: time.now,
    )


async def test_c125_the_active_clock_stands_still_while_a_question_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    time, expired = TestTime(monkeypatch), list[str]()
    clocks = clocks_of(expired, active=0.1, time=time)
    clocks.work()
    time.pass_(0.04)
    clocks.wait(None)
    time.pass_(0.5)
    clocks.work()
    time.pass_(0.059)
    assert expired == []
    time.pass_(0.011)
    assert expired == ["active_timeout"]
    assert time.waiting == 0


async def test_c104_a_deadline_months_ahead_is_set_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    time, expired = TestTime(monkeypatch), list[str]()
    clocks = clocks_of(expired, deadline=time.now + 3_000_000, time=time)
    clocks.watch_deadline()
    time.pass_(2_999_999)
    assert expired == []
    assert time.waiting == 1
    time.pass_(1)
    assert expired == ["deadline_exceeded"]


async def test_c104_a_deadline_that_has_passed_is_over_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    time, expired = TestTime(monkeypatch), list[str]()
    clocks = clocks_of(expired, deadline=time.now - 1, active=5.0, time=time)
    clocks.watch_deadline()
    clocks.work()
    assert expired == ["deadline_exceeded"]
    assert time.waiting == 0


async def test_c128_a_questions_own_limit_comes_before_the_runtimes(monkeypatch: pytest.MonkeyPatch) -> None:
    time, expired = TestTime(monkeypatch), list[str]()
    clocks = clocks_of(expired, waits=10.0, time=time)
    clocks.work()
    clocks.wait(0.02)
    time.pass_(0.021)
    assert expired == ["input_timeout"]


async def test_c127_whichever_ends_first_is_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    time, expired = TestTime(monkeypatch), list[str]()
    clocks = clocks_of(expired, waits=0.1, deadline=time.now + 0.05, time=time)
    clocks.watch_deadline()
    clocks.work()
    clocks.wait(None)
    time.pass_(1)
    assert expired == ["deadline_exceeded"]
    assert time.waiting == 0


async def test_an_answer_ends_the_wait_and_the_next_one_has_the_whole_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    time, expired = TestTime(monkeypatch), list[str]()
    clocks = clocks_of(expired, waits=1.0, time=time)
    for _ in range(3):
        clocks.wait(None)
        time.pass_(0.9)
        clocks.work()
    assert (expired, time.waiting) == ([], 0)


async def test_nothing_is_left_after_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    time, expired = TestTime(monkeypatch), list[str]()
    clocks = clocks_of(expired, waits=1.0, active=1.0, deadline=time.now + 1, time=time)
    clocks.watch_deadline()
    clocks.work()
    clocks.wait(None)
    clocks.stop()
    clocks.work()
    clocks.wait(0.1)
    clocks.watch_deadline()
    assert time.waiting == 0
    time.pass_(5)
    assert expired == []


async def test_a_stopwatch_longer_than_a_timer_keeps_what_it_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    time, expired = TestTime(monkeypatch), list[str]()
    watch = Stopwatch(MAX_TIMER * 2.5, lambda: expired.append("over"))
    watch.go()
    time.pass_(MAX_TIMER * 1.5)
    watch.stand()
    time.pass_(MAX_TIMER * 10)
    watch.go()
    time.pass_(MAX_TIMER * 0.99)
    assert expired == []
    time.pass_(MAX_TIMER * 0.02)
    assert expired == ["over"]


@pytest.mark.parametrize("value", [0, -1, math.nan, math.inf, "1", True])
def test_c132_a_timeout_is_a_positive_number(value: object) -> None:
    with pytest.raises(InputError) as refused:
        check_seconds("config.active_timeout", value)
    assert (refused.value.code, refused.value.field) == ("invalid_input", "config.active_timeout")
