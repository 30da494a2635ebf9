"""Files that older versions wrote: everything in them is there, and all that is new can be done with it."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from retinue.errors import LeaseLost
from retinue.ids import Identity
from retinue.storage.sqlite.migrations import APPLICATION_ID, shipped
from retinue.store import (
    Lease,
    ListRuns,
    ListSessions,
    RunRecord,
    Store,
    StoredEvent,
    StoredSession,
)
from retinue.testing.store_trial import commit_of, fork_of, live_holder, mark_of, record_of
from tests.unit.storage.sqlite.process import address
from tests.unit.storage.world import World

RECORDED = Path(__file__).parent / "recorded"
OWNER = Identity(tenant_id="t", user_id="u")

HELD = StoredSession(
    revision=2,
    replayable=False,
    messages=(b'"one"', b'"two"', b'"a\\u0000b"', b'"three"'),
    conversations={"ended": (b'"one"',), "child": (b'"c"',)},
    state=b'{"n":1}',
)


@pytest.fixture
def old_file(world: World) -> Path:
    """A file of the first schema, with all that it could hold."""
    connection = sqlite3.connect(world.path())
    connection.executescript((RECORDED / "0001.sql").read_text(encoding="utf-8"))
    connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    connection.execute("PRAGMA journal_mode = WAL")
    connection.close()
    return world.path()


def _old_run(store: Store, run_id: str) -> RunRecord:
    return record_of(address(store, "held"), run_id)


@pytest.mark.usefixtures("old_file")
async def test_a_file_of_the_first_schema_has_all_that_it_had(world: World) -> None:
    store = Store(world.sqlite())
    assert store.store_id == "1765c641-8c3f-4657-a6e9-5aa8d01008a8"
    held = Lease(address=address(store, "held"), epoch=1)
    assert await store.read_session(held.address) == HELD
    assert await store.renew([held]) == [True], "its lease goes on"
    artifact = await store.read_artifact(held.address, "a")
    assert artifact is not None
    assert artifact.data == b"\x00data"
    (open_run,) = await store.read_open_runs(held.address)
    assert (open_run.run_id, open_run.reserved_to, open_run.queued, open_run.start) == (
        "open",
        2048,
        False,
        b"",
    )
    ended = await store.read_run(OWNER, "ended")
    assert ended is not None
    assert (ended.outcome, ended.final_cursor) == (b'{"status":"completed"}', 3)
    events = await store.read_events(OWNER, "ended", 0, 9)
    assert events == (StoredEvent(1, b'"event 1"'), StoredEvent(2, b'"event 2"'))
    sessions = await store.list_sessions(ListSessions())
    assert [(entry.session_id, entry.revision, entry.runs, entry.holder_id) for entry in sessions] == [
        ("fenced", 0, 0, None),
        ("held", 2, 2, "holder"),
        ("released", 0, 0, None),
    ]
    runs = await store.list_runs(ListRuns(open_only=True))
    assert runs.records == (open_run,)
    with pytest.raises(LeaseLost, match="fenced"):
        await store.acquire(held.address, live_holder("dead"))


@pytest.mark.usefixtures("old_file")
async def test_a_session_of_the_first_schema_can_do_all_that_is_new(world: World) -> None:
    store = Store(world.sqlite())
    lease = Lease(address=address(store, "held"), epoch=1)
    assert await store.mark_replayable(mark_of(lease, 2)) == 3
    await store.fork(fork_of(lease, 3, "fork", 3))
    fork = await store.read_session(address(store, "fork"))
    assert fork.messages == HELD.messages[:3]
    assert fork.replayable
    await store.begin_run(lease, "open")
    await store.delete(lease)
    assert await store.read_session(lease.address) == StoredSession()
    assert (await store.list_runs(ListRuns())).records == ()
    assert (await store.acquire(lease.address, live_holder("next"))).lease.epoch == 2


async def test_the_version_before_can_go_on_beside_this_one(world: World, old_file: Path) -> None:
    older = sqlite3.connect(old_file, isolation_level=None)
    older.execute("PRAGMA foreign_keys = ON")
    assert older.execute("SELECT count(*) FROM session").fetchone() == (3,)
    store = Store(world.sqlite())
    older.execute(
        "INSERT INTO run (session_key, tenant_id, user_id, run_id, root_run_id, parent_run_id, app, input,"
        " checksum, created_at, reserved_to, final_cursor, outcome, outcome_checksum)"
        " SELECT session_key, tenant_id, user_id, 'newer', 'newer', parent_run_id, app, input, checksum,"
        " created_at, 1024, NULL, NULL, NULL FROM run WHERE run_id = 'open'"
    )
    older.execute("INSERT INTO session (tenant_id, user_id, session_id) VALUES ('t', 'u', 'newer')")
    older.close()
    assert await store.read_run(OWNER, "newer") == _old_run(store, "newer")
    grant = await store.acquire(address(store, "newer"), live_holder("holder"))
    assert grant.session == StoredSession()
    assert await store.commit(commit_of(grant.lease, 0)) == 1


async def test_an_upgrade_is_done_once(world: World, old_file: Path) -> None:
    for _ in range(2):
        store = Store(world.sqlite())
        lease = (await store.acquire(address(store, "passing"), live_holder("holder"))).lease
        await store.delete(lease)
        await store.close()
    connection = sqlite3.connect(old_file)
    applied = [name for (name,) in connection.execute("SELECT name FROM migration ORDER BY name")]
    floor = connection.execute("SELECT value FROM meta WHERE name = 'epoch_floor'").fetchone()
    connection.close()
    assert applied == [migration.name for migration in shipped()]
    assert floor == ("2",), "a later opening does not set the floor back"
