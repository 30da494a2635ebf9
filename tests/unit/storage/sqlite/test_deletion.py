"""Deleting sessions: what stays in the file, and who is refused afterwards."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from retinue.errors import LeaseLost
from retinue.storage.sqlite.connections import StoreFile
from retinue.storage.sqlite.migrations import shipped
from retinue.store import Lease, Store, StoredSession
from retinue.testing.store_trial import approval_of, commit_of, live_holder, record_of
from tests.unit.storage.sqlite.process import address
from tests.unit.storage.world import World


async def test_epochs_rise_across_deletion_and_opening(world: World) -> None:
    """A holder from before a deletion stays refused, whoever has the file open since."""
    given = []
    for number in range(4):
        store = Store(world.sqlite())
        lease = (await store.acquire(address(store, "session"), live_holder(f"holder {number}"))).lease
        given.append(lease.epoch)
        await store.delete(lease)
        await store.close()
    assert given == [1, 2, 3, 4]
    store = Store(world.sqlite())
    held = (await store.acquire(address(store, "session"), live_holder("last"))).lease
    for epoch in given:
        late = Lease(address=held.address, epoch=epoch)
        with pytest.raises(LeaseLost):
            await store.commit(commit_of(late, 0, messages=[b"late"]))
        with pytest.raises(LeaseLost):
            await store.delete(late)
    assert await store.commit(commit_of(held, 0)) == 1


async def test_a_lower_epoch_lets_the_floor_stand(world: World) -> None:
    store = Store(world.sqlite())
    young = (await store.acquire(address(store, "young"), live_holder("holder"))).lease
    old = young
    for _ in range(5):
        old = (await store.acquire(address(store, "old"), live_holder("holder"))).lease
    await store.delete(old)
    await store.delete(young)
    for name in ("old", "young", "unseen"):
        grant = await store.acquire(address(store, name), live_holder("holder"))
        assert grant.lease.epoch == 6


async def test_nothing_of_a_deleted_session_stays_in_the_file(world: World) -> None:
    """Neither content nor ids, in the file or its log, while the store is open and once it is closed."""
    store = Store(world.sqlite())
    kept = (await store.acquire(address(store, "kept"), live_holder("holder"))).lease
    await store.commit(commit_of(kept, 0, messages=[b"kept-content"]))
    secret = b"correct-horse-battery-staple"
    lease = (await store.acquire(address(store, "private-session-name"), live_holder("holder"))).lease
    await store.open_run(lease, record_of(lease.address, "private-run-name"))
    request = b'{"arguments":"private-arguments"}'
    asked = approval_of(lease.address, "private-approval", "private-run-name", request=request)
    await store.open_approval(lease, asked)
    for revision in range(20):  # what commits put in the place of older content goes as well
        state = b'{"%s":%d}' % (secret * (600 - 20 * revision), revision)
        await store.commit(commit_of(lease, revision, messages=[secret], state=state))
    traces = (
        secret, b"private-session-name", b"private-run-name", b"private-approval", b"private-arguments",
    )  # fmt: skip
    assert all(trace in _all_bytes(world.path()) for trace in traces)
    await store.delete(lease)
    for _ in range(2):
        left = _all_bytes(world.path())
        assert [trace for trace in traces if trace in left] == []
        assert b"kept-content" in left
        await store.close()


def test_every_build_of_sqlite_overwrites_what_is_deleted(tmp_path: Path) -> None:
    connection, _ = StoreFile(tmp_path / "store.db", "sqlite:///x", 1.0).open_writer(shipped())
    assert connection.execute("PRAGMA secure_delete").fetchone() == (1,)
    connection.close()


async def test_a_reader_of_the_log_does_not_hinder_a_deletion(world: World) -> None:
    store = Store(world.sqlite(busy_limit=0.1))
    lease = (await store.acquire(address(store, "session"), live_holder("holder"))).lease
    await store.commit(commit_of(lease, 0, messages=[b"1"]))
    reader = sqlite3.connect(world.path(), isolation_level=None)
    reader.execute("BEGIN")
    assert reader.execute("SELECT count(*) FROM message").fetchone() == (1,)
    await store.delete(lease)
    assert reader.execute("SELECT count(*) FROM message").fetchone() == (1,), "its own snapshot"
    reader.close()
    assert await store.read_session(lease.address) == StoredSession()
    await store.acquire(lease.address, live_holder("next"))


def _all_bytes(path: Path) -> bytes:
    """Of the file and of all that SQLite keeps beside it."""
    return b"".join(file.read_bytes() for file in sorted(path.parent.glob(f"{path.name}*")))
