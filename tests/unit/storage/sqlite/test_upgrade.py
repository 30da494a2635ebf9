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
    ListApprovals,
    ListRuns,
    ListSessions,
    Origin,
    RunRecord,
    Store,
    StoredEvent,
    StoredSession,
)
from retinue.testing.store_trial import (
    approval_of,
    commit_of,
    fork_of,
    live_holder,
    mark_of,
    outcome_of,
    record_of,
)
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


def _recorded(name: str, path: Path) -> Path:
    connection = sqlite3.connect(path)
    connection.executescript((RECORDED / name).read_text(encoding="utf-8"))
    connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    connection.execute("PRAGMA journal_mode = WAL")
    connection.close()
    return path


@pytest.fixture
def old_file(world: World) -> Path:
    """A file of the first schema, with all that it could hold."""
    return _recorded("0001.sql", world.path())


@pytest.fixture
def second_file(world: World) -> Path:
    """A file of the second schema, with what the first could not hold."""
    return _recorded("0002.sql", world.path())


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


@pytest.mark.usefixtures("second_file")
async def test_a_file_of_the_second_schema_has_all_that_it_had(world: World) -> None:
    store = Store(world.sqlite())
    assert store.store_id == "70293ffa-e27d-4e49-99d1-5379ae51275c"
    held = Lease(address=address(store, "held"), epoch=3)
    assert await store.renew([held]) == [True], "its lease goes on"
    session = await store.read_session(held.address)
    assert (session.revision, session.replayable, session.messages) == (2, True, (b'"one"', b'"two"'))
    assert [(entry.by, entry.revision) for entry in session.attestations] == [("a reviewer", 1)]
    fork = await store.read_session(address(store, "fork"))
    assert fork.messages == (b'"one"',)
    assert fork.origin == Origin(session_id="held", revision=2, messages=1)
    ended, going_on, waiting = (await store.list_runs(ListRuns())).records[::-1]
    assert (ended.run_id, ended.final_cursor, ended.outcome) == ("ended", 2, b'{"status":"completed"}')
    assert (going_on.run_id, going_on.reserved_to, going_on.queued) == ("open", 2048, False)
    assert (waiting.run_id, waiting.queued, waiting.start) == ("waiting", True, b'{"if_busy":"queue"}')
    assert await store.read_open_runs(held.address) == (going_on, waiting)
    assert (await store.list_approvals(ListApprovals())).approvals == ()
    deleted = await store.acquire(address(store, "gone"), live_holder("late"))
    assert deleted.lease.epoch == 3, "above the epochs of the one that was deleted"


@pytest.mark.parametrize(
    ("name", "epoch", "revision"), [("0001.sql", 1, 2), ("0002.sql", 3, 2)], ids=["first", "second"]
)
async def test_runs_of_older_files_can_ask_for_approval(
    world: World, name: str, epoch: int, revision: int
) -> None:
    _recorded(name, world.path())
    store = Store(world.sqlite())
    lease = Lease(address=address(store, "held"), epoch=epoch)
    for number in (1, 2):
        request = approval_of(lease.address, f"open:{number}", "open")
        assert await store.open_approval(lease, request) == request
    late = await store.open_approval(lease, approval_of(lease.address, "ended:1", "ended"))
    assert late.state == "cancelled"
    assert (await store.settle_approval(lease, "open:1", "approved", by="ann", at=2.0)).changed
    await store.commit(commit_of(lease, revision, outcome=outcome_of("open")))
    found = (await store.list_approvals(ListApprovals())).approvals
    assert [(entry.approval_id, entry.state) for entry in found] == [
        ("open:1", "approved"),
        ("open:2", "cancelled"),
        ("ended:1", "cancelled"),
    ]


async def test_the_version_before_deletes_sessions_that_have_requests(
    world: World, second_file: Path
) -> None:
    older = sqlite3.connect(second_file, isolation_level=None)
    older.execute("PRAGMA foreign_keys = ON")
    store = Store(world.sqlite())
    lease = Lease(address=address(store, "held"), epoch=3)
    await store.open_approval(lease, approval_of(lease.address, "open:1", "open"))
    for sql in (
        "DELETE FROM event WHERE run_key IN (SELECT run_key FROM run WHERE session_key = 1)",
        "DELETE FROM run WHERE session_key = 1",
        "DELETE FROM artifact WHERE session_key = 1",
        "DELETE FROM conversation WHERE session_key = 1",
        "DELETE FROM state WHERE session_key = 1",
        "DELETE FROM attestation WHERE session_key = 1",
        "DELETE FROM session WHERE session_key = 1",
    ):
        older.execute(sql)
    older.close()
    assert await store.read_approval(OWNER, "open:1") is None
    assert (await store.list_approvals(ListApprovals())).approvals == ()
