"""Progress of a tool call: what is reported, and how seldom."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from retinue import tool_progress
from retinue.tool_progress import MAX_PROGRESS_BYTES, Progress, progress_data
from tests.support import Flag, soon


class Unspeakable:
    def __str__(self) -> str:
        raise RuntimeError("no words")


@pytest.mark.parametrize(
    ("value", "data"),
    [
        (None, None),
        ({"done": 0.5, "of": [1, 2]}, {"done": 0.5, "of": [1, 2]}),
        ("text \0", "text \0"),
        ({1, 2}, [1, 2]),
        (float("nan"), "nan"),
        ({"a": float("inf")}, "{'a': inf}"),
        ("\ud800", "\\ud800"),
        ({"a": "\ud800"}, "{'a': '\\ud800'}"),
        (Unspeakable(), "<Unspeakable>"),
        ("x" * MAX_PROGRESS_BYTES, "x" * 2_000 + "… (32,768 characters)"),
        (list(range(10_000)), str(list(range(1_000))).replace(" ", "")[:2_000] + "… (48,891 characters)"),
    ],
)
def test_a_value_is_reported_as_json_or_as_its_text(value: object, data: object) -> None:
    assert progress_data(value) == data


def test_what_is_reported_is_a_copy() -> None:
    value = {"done": [1]}
    data = progress_data(value)
    value["done"].append(2)
    assert data == {"done": [1]}


@pytest.fixture
def seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the first and the last value come in time."""
    monkeypatch.setattr(tool_progress, "INTERVAL", 1000.0)


@pytest.mark.usefixtures("seldom")
async def test_the_first_is_reported_at_once_and_the_last_always() -> None:
    events: list[Any] = []
    progress = Progress(events.append)
    for number in range(3):
        progress.report(number)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert events == [2]  # they came at the same moment
    for number in range(3, 6):
        progress.report(number)
        await asyncio.sleep(0)
    assert events == [2]
    progress.close(flush=True)
    assert events == [2, 5]


@pytest.mark.usefixtures("seldom")
async def test_nothing_is_reported_after_the_end() -> None:
    events: list[Any] = []
    progress = Progress(events.append)
    progress.report(1)
    await asyncio.sleep(0.01)
    progress.report(2)
    progress.close(flush=False)
    progress.report(3)
    await asyncio.sleep(0.01)
    progress.close(flush=True)
    assert events == [1]
    loop = asyncio.get_running_loop()
    assert [timer for timer in loop._scheduled if not timer.cancelled()] == []  # type: ignore[attr-defined]


async def test_a_value_that_was_held_back_comes_when_it_is_due(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool_progress, "INTERVAL", 0.05)
    events: list[tuple[float, Any]] = []
    third = Flag()
    loop = asyncio.get_running_loop()

    def emit(data: Any) -> None:
        events.append((loop.time(), data))
        if data == 3:
            third.set()

    progress = Progress(emit)
    progress.report(1)
    await asyncio.sleep(0.01)
    progress.report(2)
    progress.report(3)
    await third.wait()  # the tool says nothing more meanwhile
    assert [data for _, data in events] == [1, 3]
    assert events[1][0] - events[0][0] >= 0.05
    progress.close(flush=True)
    assert len(events) == 2


async def test_any_thread_may_report() -> None:
    events: list[Any] = []
    progress = Progress(events.append)
    threads = [threading.Thread(target=progress.report, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        await soon(asyncio.to_thread(thread.join))
    progress.close(flush=True)
    assert events
    assert set(events) <= set(range(8))
