"""Channels on the plain class: order, batching, repeats, the other end's death."""

from __future__ import annotations

import asyncio

from retinue.actors.channel import MAX_BATCH, Inbox, Outbox
from retinue.client import HostGone


async def test_what_comes_while_a_batch_is_on_the_wire_goes_with_the_next() -> None:
    arrived: list[list[int]] = []
    gate = asyncio.Event()

    async def send(number: int, batch: list[int]) -> None:
        arrived.append(batch)
        assert number == len(arrived)
        await gate.wait()

    outbox: Outbox[int] = Outbox(send, lambda why: None)
    outbox.post(0)
    await asyncio.sleep(0)
    for value in range(1, 1200):
        outbox.post(value)
    gate.set()
    while sum(map(len, arrived)) < 1200:
        await asyncio.sleep(0)
    assert [len(batch) for batch in arrived] == [1, MAX_BATCH, MAX_BATCH, 1199 - 2 * MAX_BATCH]
    assert [value for batch in arrived for value in batch] == list(range(1200))


async def test_a_dead_end_is_told_once_and_later_posts_are_dropped() -> None:
    told: list[str] = []

    async def send(number: int, batch: list[int]) -> None:
        raise HostGone("killed")

    outbox: Outbox[int] = Outbox(send, told.append)
    outbox.post(1)
    outbox.post(2)
    while not told:
        await asyncio.sleep(0)
    outbox.post(3)
    outbox.close("again")
    await asyncio.sleep(0)
    assert (told, outbox.gone) == (["killed"], True)


def test_a_repeated_batch_is_answered_as_before() -> None:
    inbox = Inbox()
    assert inbox.repeated(1) is None
    inbox.answered(1, b"one")
    assert inbox.repeated(1) == b"one"
    assert inbox.repeated(2) is None
    inbox.answered(2, b"two")
    assert inbox.repeated(1) == b""  # older still: nobody waits for that answer any more
    assert inbox.repeated(2) == b"two"
