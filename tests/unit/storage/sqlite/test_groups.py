"""The writer: commits in groups, neighbours that fail alone, transactions that fail whole."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from retinue.errors import LeaseLost, RetinueError, StoreUnavailable
from retinue.storage.sqlite import writer
from retinue.storage.sqlite.engine import SQLiteEngine
from retinue.storage.sqlite.rows import SQLiteRows
from retinue.store import Lease, Store
from retinue.testing.store_trial import commit_of, live_holder
from tests.unit.storage.sqlite.process import address
from tests.unit.storage.world import World


@contextmanager
def locked(file: Path) -> Iterator[sqlite3.Connection]:
    """Keep the file's write lock, as another process would."""
    connection = sqlite3.connect(file, isolation_level=None)
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield connection
    finally:
        connection.close()


async def _leases(store: Store, count: int) -> list[Lease]:
    return [
        (await store.acquire(address(store, f"session {number}"), live_holder("holder"))).lease
        for number in range(count)
    ]


async def test_what_arrives_meanwhile_shares_a_transaction(sqlite: SQLiteEngine, world: World) -> None:
    store = Store(sqlite)
    leases = await _leases(store, 64)
    before = store.statistics()
    with locked(world.path()):
        commits = [asyncio.ensure_future(store.commit(commit_of(lease, 0))) for lease in leases]
        await asyncio.sleep(0)
        assert store.statistics().queued >= 1, "the first waits for the lock, the others for the first"
    assert await asyncio.gather(*commits) == [1] * 64
    after = store.statistics()
    assert after.commits - before.commits == after.writes - before.writes == 64
    assert after.transactions - before.transactions <= 2
    assert after.queued == 0


async def test_groups_are_bounded(
    sqlite: SQLiteEngine, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "GROUP_LIMIT", 4)
    store = Store(sqlite)
    leases = await _leases(store, 16)
    before = store.statistics().transactions
    with locked(world.path()):
        commits = [asyncio.ensure_future(store.commit(commit_of(lease, 0))) for lease in leases]
        await asyncio.sleep(0)
    assert await asyncio.gather(*commits) == [1] * 16
    assert store.statistics().transactions - before >= 4


async def test_a_refused_operation_leaves_its_group_alone(
    sqlite: SQLiteEngine, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(sqlite)
    leases = await _leases(store, 6)
    lost = Lease(address=leases[1].address, epoch=leases[1].epoch - 1)
    real = SQLiteRows.set_state

    def half_way(rows: SQLiteRows, session_key: int, state: bytes) -> None:
        real(rows, session_key, state)
        if state == b"fail":
            raise ValueError("half way through a commit")

    monkeypatch.setattr(SQLiteRows, "set_state", half_way)
    parts: list[Any] = [
        commit_of(leases[0], 0, messages=[b"0"]),
        commit_of(lost, 0, messages=[b"1"]),
        commit_of(leases[2], 0, messages=["not bytes"]),
        commit_of(leases[3], 0, messages=[b"3"], state=b"fail"),
        commit_of(leases[4], 0, state=object()),
        commit_of(leases[5], 0, messages=[b"5"]),
    ]
    with locked(world.path()):
        calls = [asyncio.ensure_future(store.commit(part)) for part in parts]
        await asyncio.sleep(0)
    replies = await asyncio.gather(*calls, return_exceptions=True)
    assert replies[0] == replies[5] == 1
    assert isinstance(replies[1], LeaseLost)
    for reply in replies[2:5]:
        assert isinstance(reply, RetinueError)
        assert "CommitSession" in str(reply)
    revisions = [(await store.read_session(lease.address)).revision for lease in leases]
    assert revisions == [1, 0, 0, 0, 0, 1]
    for lease in leases:
        session = await store.read_session(lease.address)
        assert len(session.messages) == session.revision
        assert session.state == b"{}"


async def test_numbers_out_of_range_are_refused_alone(sqlite: SQLiteEngine) -> None:
    store = Store(sqlite)
    (lease,) = await _leases(store, 1)
    with pytest.raises(RetinueError) as caught:
        await store.commit(commit_of(lease, 0, messages=[b"x"], replayable=2**70))
    assert caught.value.code == "invalid_input"
    assert await store.commit(commit_of(lease, 0)) == 1


async def test_a_locked_file_fails_the_whole_transaction_and_is_tried_again(world: World) -> None:
    store = Store(world.sqlite(busy_limit=0.2))
    leases = await _leases(store, 5)
    with locked(world.path()):
        replies = await asyncio.gather(
            *(store.commit(commit_of(lease, 0)) for lease in leases), return_exceptions=True
        )
        assert (await store.read_session(leases[0].address)).revision == 0, "readers need no lock"
    for reply in replies:
        assert isinstance(reply, StoreUnavailable)
        assert reply.reason == "locked"
        assert str(world.path()) in str(reply)
    assert await asyncio.gather(*(store.commit(commit_of(lease, 0)) for lease in leases)) == [1] * 5


async def test_a_failing_commit_stores_nothing(
    sqlite: SQLiteEngine, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(sqlite)
    leases = await _leases(store, 2)
    real = SQLiteRows.append_messages

    def broken(rows: SQLiteRows, session_key: int, execution_id: str, messages: Any) -> None:
        real(rows, session_key, execution_id, messages)
        if messages == [b"break"]:
            error = sqlite3.OperationalError("disk I/O error")
            error.sqlite_errorcode = sqlite3.SQLITE_IOERR
            raise error

    monkeypatch.setattr(SQLiteRows, "append_messages", broken)
    with locked(world.path()):
        calls = [
            asyncio.ensure_future(store.commit(commit_of(lease, 0, messages=[body])))
            for lease, body in zip(leases, (b"fine", b"break"), strict=True)
        ]
        await asyncio.sleep(0)
    replies = await asyncio.gather(*calls, return_exceptions=True)
    assert isinstance(replies[1], StoreUnavailable)
    assert replies[1].reason == "io_error"
    # Its neighbour was either in the same transaction, and failed with it, or in the one before.
    neighbour = (await store.read_session(leases[0].address)).revision
    assert neighbour == (0 if isinstance(replies[0], StoreUnavailable) else 1)
    assert (await store.read_session(leases[1].address)).revision == 0
    assert await store.commit(commit_of(leases[1], 0, messages=[b"fine"])) == 1


async def test_a_caller_on_an_ended_loop_does_no_harm(sqlite: SQLiteEngine, world: World) -> None:
    store = Store(sqlite)
    (lease,) = await _leases(store, 1)

    def leave() -> None:
        loop = asyncio.new_event_loop()
        call = loop.create_task(store.commit(commit_of(lease, 0)))
        loop.run_until_complete(asyncio.sleep(0))
        call.cancel()
        loop.run_until_complete(asyncio.wait([call]))
        loop.close()

    with locked(world.path()):
        await asyncio.to_thread(leave)
    assert await store.renew([lease]) == [True]
    assert (await store.read_session(lease.address)).revision == 1


async def test_close_finishes_what_was_accepted(sqlite: SQLiteEngine, world: World) -> None:
    store = Store(sqlite)
    leases = await _leases(store, 8)
    with locked(world.path()):
        calls = [asyncio.ensure_future(store.commit(commit_of(lease, 0))) for lease in leases]
        await asyncio.sleep(0)
        closing = asyncio.ensure_future(store.close())
        await asyncio.sleep(0)
    await closing
    assert await asyncio.gather(*calls) == [1] * 8
    again = Store(world.sqlite())
    assert (await again.read_session(leases[7].address)).revision == 1
