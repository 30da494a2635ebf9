"""What cannot be read or written: damaged rows and files, full disks, files that vanish."""

from __future__ import annotations

import asyncio
import json
import os
import sqlite3
import subprocess
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

from retinue.errors import DamagedRecord, RetinueError, StoreUnavailable
from retinue.ids import Identity
from retinue.storage.sqlite.engine import SQLiteEngine
from retinue.store import (
    Lease,
    ListApprovals,
    ListRuns,
    ListSessions,
    Store,
    StoredArtifact,
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
from tests.unit.storage.sqlite.test_groups import locked
from tests.unit.storage.world import World

OWNER = Identity(tenant_id="t", user_id="u")


async def _filled(store: Store, session_id: str = "session") -> Lease:
    """A session with something in every table."""
    lease = (await store.acquire(address(store, session_id), live_holder("holder"))).lease
    await store.open_run(lease, record_of(lease.address, f"run of {session_id}"))
    await store.open_run(lease, record_of(lease.address, f"open run of {session_id}"))
    await store.commit(
        commit_of(
            lease,
            0,
            messages=[b'"one"', b'"two"', b'"three"'],
            conversations={"child": [b'"four"']},
            state=b'{"n":1}',
            events=[StoredEvent(1, b'"event"'), StoredEvent(2, b'"event"')],
            artifacts=[StoredArtifact(artifact_id="a", mime_type="text/plain", data=b"data")],
            outcome=outcome_of(f"run of {session_id}"),
        )
    )
    waiting = record_of(lease.address, f"waiting run of {session_id}")
    await store.open_run(lease, msgspec.structs.replace(waiting, queued=True, start=b'{"if_busy":"queue"}'))
    return lease


def _meddle(file: Path, *statements: str) -> list[Any]:
    """Change the file behind the engine's back; the rows of the last statement."""
    connection = sqlite3.connect(file)
    with connection:
        rows = [connection.execute(sql).fetchall() for sql in statements][-1]
    connection.close()
    return rows


def _place(table: str, **key: object) -> str:
    return f"{table} {json.dumps(key)}"


SESSION = "SELECT session_key FROM session WHERE session_id = 'session'"
HISTORY = (
    "conversation_key = (SELECT conversation_key FROM conversation "
    f"WHERE session_key = ({SESSION}) AND execution_id = '')"
)


@pytest.mark.parametrize(
    ("damage", "table", "key"),
    [
        (f"UPDATE message SET body = x'22' WHERE position = 1 AND {HISTORY}", "message", {"position": 1}),
        (f"UPDATE message SET body = CAST(body AS TEXT) WHERE {HISTORY}", "message", {"position": 0}),
        (f"DELETE FROM message WHERE position = 1 AND {HISTORY}", "message", {"position": 1}),
        (f"DELETE FROM message WHERE position = 2 AND {HISTORY}", "message", {"position": 2}),
        (f"UPDATE state SET body = x'7b7d' WHERE session_key = ({SESSION})", "state", {}),
        (f"UPDATE session SET revision = 'many' WHERE session_key = ({SESSION})", "session", {}),
    ],
)
async def test_a_damaged_session_is_refused_with_its_place(
    sqlite: SQLiteEngine, world: World, damage: str, table: str, key: dict[str, object]
) -> None:
    history = {"execution_id": ""} if table == "message" else {}
    place = _place(table, tenant_id="t", user_id="u", session_id="session", **history, **key)
    store = Store(sqlite)
    lease, healthy = await _filled(store), await _filled(store, "healthy")
    await store.release(lease)
    _meddle(world.path(), damage)
    before = _meddle(world.path(), "SELECT * FROM message", "SELECT * FROM state", "SELECT * FROM session")
    for call in (store.read_session(lease.address), store.acquire(lease.address, live_holder("next"))):
        with pytest.raises(DamagedRecord) as caught:
            await call
        assert caught.value.place == place
        assert place in str(caught.value)
    assert _meddle(world.path(), "SELECT * FROM session") == before, "no lease of what cannot be read"
    session = await store.read_session(healthy.address)
    assert session.messages == (b'"one"', b'"two"', b'"three"')
    assert await store.commit(commit_of(healthy, 1)) == 2


async def test_damaged_runs_events_and_artifacts_are_refused_with_their_place(
    sqlite: SQLiteEngine, world: World
) -> None:
    store = Store(sqlite)
    lease = await _filled(store)
    of_run = {"tenant_id": "t", "user_id": "u", "run_id": "run of session"}
    of_open = {**of_run, "run_id": "open run of session"}
    of_session = {"tenant_id": "t", "user_id": "u", "session_id": "session"}
    cases: list[tuple[str, Callable[[], Awaitable[object]], str]] = [
        (
            "UPDATE event SET body = x'00' WHERE sequence = 2",
            lambda: store.read_events(OWNER, "run of session", 0, 9),
            _place("event", **of_run, sequence=2),
        ),
        (
            "UPDATE artifact SET body = x'00'",
            lambda: store.read_artifact(lease.address, "a"),
            _place("artifact", **of_session, artifact_id="a"),
        ),
        (
            "UPDATE run SET outcome = x'00' WHERE outcome IS NOT NULL",
            lambda: store.read_run(OWNER, "run of session"),
            _place("run", **of_run),
        ),
        (
            "UPDATE run SET reserved_to = 'x' WHERE outcome IS NULL",
            lambda: store.read_open_runs(lease.address),
            _place("run", **of_open),
        ),
    ]
    for damage, call, place in cases:
        _meddle(world.path(), damage)
        with pytest.raises(DamagedRecord) as caught:
            await call()
        assert caught.value.place == place
    assert await store.read_events(OWNER, "run of session", 0, 1) == (StoredEvent(1, b'"event"'),)


@pytest.mark.parametrize(
    "damage",
    ["start = x'00'", "start_checksum = NULL", "queued = 'x'", "queued = 2", "input = CAST(input AS TEXT)"],
)
async def test_a_damaged_queued_run_is_refused_with_its_place(
    sqlite: SQLiteEngine, world: World, damage: str
) -> None:
    store = Store(sqlite)
    lease = await _filled(store)
    _meddle(world.path(), f"UPDATE run SET {damage} WHERE run_id = 'waiting run of session'")
    place = _place("run", tenant_id="t", user_id="u", run_id="waiting run of session")
    for call in (
        store.read_open_runs(lease.address),
        store.list_runs(ListRuns()),
        store.list_runs(ListRuns(tenant_id="t", user_id="u", session_id="session", open_only=True)),
    ):
        with pytest.raises(DamagedRecord) as caught:
            await call
        assert caught.value.place == place
    assert await store.read_run(OWNER, "run of session") is not None


@pytest.mark.parametrize(
    "damage",
    [
        "request = x'00'",
        "request = CAST(request AS TEXT)",
        "checksum = checksum + 1",
        "state = 'maybe'",
        "expires_at = 'late'",
        "decided_at = x'00'",
    ],
)
async def test_a_damaged_request_for_approval_is_refused_with_its_place(
    sqlite: SQLiteEngine, world: World, damage: str
) -> None:
    store = Store(sqlite)
    lease = await _filled(store)
    run_id = "open run of session"
    for approval_id in ("damaged", "healthy"):
        await store.open_approval(lease, approval_of(lease.address, approval_id, run_id))
    _meddle(world.path(), f"UPDATE approval SET {damage} WHERE approval_id = 'damaged'")
    before = _meddle(world.path(), "SELECT * FROM approval")
    place = _place("approval", tenant_id="t", user_id="u", approval_id="damaged")
    for call in (
        store.read_approval(OWNER, "damaged"),
        store.list_approvals(ListApprovals(tenant_id="t")),
        store.open_approval(lease, approval_of(lease.address, "damaged", run_id)),
        store.settle_approval(lease, "damaged", "approved", at=2.0),
    ):
        with pytest.raises(DamagedRecord) as caught:
            await call
        assert caught.value.place == place
    assert _meddle(world.path(), "SELECT * FROM approval") == before, "its bytes are kept"
    assert (await store.settle_approval(lease, "healthy", "denied", at=2.0)).changed
    assert await store.commit(commit_of(lease, 1, outcome=outcome_of(run_id))) == 2, "its run can end"


@pytest.mark.parametrize(
    ("damage", "table", "key"),
    [
        ("UPDATE origin SET body = x'7b7d'", "origin", {}),
        ("UPDATE origin SET body = x'7b7d', checksum = 2745614147", "origin", {}),
        ("UPDATE attestation SET body = x'00' WHERE position = 1", "attestation", {"position": 1}),
        ("DELETE FROM attestation WHERE position = 0", "attestation", {"position": 1}),
    ],
)
async def test_damage_of_where_a_session_came_from_is_refused_with_its_place(
    sqlite: SQLiteEngine, world: World, damage: str, table: str, key: dict[str, object]
) -> None:
    store = Store(sqlite)
    lease = await _filled(store)
    await store.fork(fork_of(lease, 1, "fork", 2))
    fork = (await store.acquire(address(store, "fork"), live_holder("holder"))).lease
    for revision in (1, 2):
        await store.mark_replayable(mark_of(fork, revision))
    await store.release(fork)
    _meddle(world.path(), damage)
    for call in (store.read_session(fork.address), store.acquire(fork.address, live_holder("next"))):
        with pytest.raises(DamagedRecord) as caught:
            await call
        assert caught.value.place == _place(table, tenant_id="t", user_id="u", session_id="fork", **key)
    assert await store.commit(commit_of(lease, 1)) == 2


async def test_damage_is_not_forked(sqlite: SQLiteEngine, world: World) -> None:
    """A fork that cannot have all its messages is refused whole; a changed one is noticed when it is read."""
    store = Store(sqlite)
    lease = await _filled(store)
    _meddle(world.path(), f"UPDATE message SET body = x'22' WHERE position = 0 AND {HISTORY}")
    await store.fork(fork_of(lease, 1, "changed", 1))
    with pytest.raises(DamagedRecord) as caught:
        await store.read_session(address(store, "changed"))
    key = {"tenant_id": "t", "user_id": "u", "session_id": "changed", "execution_id": "", "position": 0}
    assert caught.value.place == _place("message", **key)
    _meddle(world.path(), f"DELETE FROM message WHERE position = 1 AND {HISTORY}")
    with pytest.raises(DamagedRecord, match="some are missing"):
        await store.fork(fork_of(lease, 1, "short", 3))
    assert await store.read_session(address(store, "short")) == StoredSession()
    _meddle(world.path(), f"UPDATE conversation SET size = 'x' WHERE {HISTORY}")
    with pytest.raises(DamagedRecord) as caught:
        await store.fork(fork_of(lease, 1, "unsized", 3))
    assert caught.value.place.startswith("conversation ")


@pytest.mark.parametrize("damage", ["UPDATE meta SET value = 'x' WHERE name = 'epoch_floor'",
                                    "DELETE FROM meta WHERE name = 'epoch_floor'"])  # fmt: skip
async def test_no_epoch_is_given_without_the_floor(sqlite: SQLiteEngine, world: World, damage: str) -> None:
    store = Store(sqlite)
    lease = await _filled(store)
    _meddle(world.path(), damage)
    for call in (store.acquire(address(store, "new"), live_holder("holder")), store.delete(lease)):
        with pytest.raises(DamagedRecord) as caught:
            await call
        assert caught.value.place == _place("meta", name="epoch_floor")
    assert await store.commit(commit_of(lease, 1)) == 2, "sessions that there are go on"


async def test_a_damaged_session_is_refused_in_a_list(sqlite: SQLiteEngine, world: World) -> None:
    store = Store(sqlite)
    await _filled(store)
    _meddle(world.path(), "UPDATE session SET replayable = 7")
    with pytest.raises(DamagedRecord) as caught:
        await store.list_sessions(ListSessions())
    assert caught.value.place == _place("session", tenant_id="t", user_id="u", session_id="session")


async def test_text_that_is_not_utf8_is_damage_and_not_quoted(sqlite: SQLiteEngine, world: World) -> None:
    store = Store(sqlite)
    lease = await _filled(store)
    _meddle(world.path(), "UPDATE artifact SET mime_type = CAST(x'736563726574ff' AS TEXT)")
    with pytest.raises(DamagedRecord) as caught:
        await store.read_artifact(lease.address, "a")
    assert "artifact" in caught.value.place
    assert "secret" not in str(caught.value.to_payload())


async def test_a_damaged_page_is_refused_and_the_bytes_are_kept(world: World) -> None:
    store = Store(world.sqlite())
    lease = await _filled(store)
    for revision in range(1, 40):
        await store.commit(commit_of(lease, revision, messages=[b"x" * 3000]))
    await store.close()
    page: int = _meddle(world.path(), "SELECT rootpage FROM sqlite_master WHERE name = 'message'")[0][0]
    size = 4096
    with world.path().open("r+b") as file:
        file.seek((page - 1) * size)
        file.write(b"\xff" * size)
    content = world.path().read_bytes()
    store = Store(world.sqlite())
    with pytest.raises(DamagedRecord) as caught:
        await store.read_session(address(store, "session"))
    assert caught.value.place.startswith("session ") or caught.value.place.startswith("message ")
    healthy = (await store.acquire(address(store, "healthy"), live_holder("holder"))).lease
    with locked(world.path()):  # so that the two are in one transaction, which the damage ends
        calls = [
            asyncio.ensure_future(store.commit(part))
            for part in (commit_of(healthy, 0), commit_of(lease, 40, messages=[b"x"]), commit_of(healthy, 1))
        ]
        await asyncio.sleep(0)
    replies = await asyncio.gather(*calls, return_exceptions=True)
    assert [replies[0], replies[2]] == [1, 2], "only those fail that need the damaged page"
    assert isinstance(replies[1], DamagedRecord)
    assert replies[1].place.startswith("message ")
    assert await store.read_run(OWNER, "run of session") is not None, "the other tables are readable"
    await store.close()
    kept = slice((page - 1) * size, page * size)
    assert world.path().read_bytes()[kept] == content[kept]


async def test_a_file_cut_short_is_refused(world: World) -> None:
    store = Store(world.sqlite())
    await _filled(store)
    await store.close()
    content = world.path().read_bytes()
    world.path().write_bytes(content[: len(content) // 2 + 100])

    async def use() -> None:
        store = Store(world.sqlite())
        await store.read_session(address(store, "session"))

    with pytest.raises((StoreUnavailable, DamagedRecord)) as caught:
        await use()
    assert str(world.path()) in str(caught.value)
    assert world.path().read_bytes()[:1000] == content[:1000]


async def test_a_file_that_vanishes_takes_no_more_commits(sqlite: SQLiteEngine, world: World) -> None:
    store = Store(sqlite)
    lease = await _filled(store)
    away = world.path("away")
    world.path().rename(away)
    for _ in range(2):
        for call in (store.commit(commit_of(lease, 1)), store.read_session(lease.address)):
            with pytest.raises(StoreUnavailable) as caught:
                await call
            assert caught.value.reason == "moved"
        world.path().touch()  # another file of that name is not it either
    away.rename(world.path())
    assert await store.commit(commit_of(lease, 1)) == 2


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one megabyte."""
    if os.geteuid() != 0:
        pytest.skip("only root may mount a small file system")
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], capture_output=True, text=True
    )
    if mounted.returncode != 0:
        pytest.skip(f"no small file system can be mounted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


async def test_a_full_disk_loses_nothing_and_recovers(small_disk: Path) -> None:
    store = Store(SQLiteEngine(small_disk / "store.db"))
    lease = (await store.acquire(address(store, "session"), live_holder("holder"))).lease
    filler = small_disk / "filler"
    filler.write_bytes(b"x" * 300_000)
    revision = 0

    async def fill() -> None:
        nonlocal revision
        while revision < 1000:
            revision = await store.commit(commit_of(lease, revision, messages=[b"x" * 5000]))

    with pytest.raises(StoreUnavailable) as caught:
        await fill()
    assert caught.value.reason == "disk_full"
    assert revision > 5
    for _ in range(3):
        with pytest.raises(StoreUnavailable, match="disk is full"):
            await store.commit(commit_of(lease, revision, messages=[b"x" * 50_000]))
    session = await store.read_session(lease.address)
    assert (session.revision, len(session.messages)) == (revision, revision)
    filler.unlink()
    for _ in range(5):
        revision = await store.commit(commit_of(lease, revision, messages=[b"x" * 5000]))
    await store.close()
    store = Store(SQLiteEngine(small_disk / "store.db"))
    session = await store.read_session(lease.address)
    assert (session.revision, len(session.messages)) == (revision, revision)
    await store.close()


async def test_a_store_cannot_be_made_on_a_full_disk(small_disk: Path) -> None:
    with suppress(OSError), (small_disk / "filler").open("wb", buffering=0) as filler:
        while True:
            filler.write(b"x" * 4096)
    with pytest.raises(StoreUnavailable) as caught:
        SQLiteEngine(small_disk / "store.db")
    assert caught.value.reason == "disk_full"
    (small_disk / "filler").unlink()
    await SQLiteEngine(small_disk / "store.db").close()


async def test_a_closed_store_is_not_mistaken_for_another_failure(sqlite: SQLiteEngine) -> None:
    store = Store(sqlite)
    await store.close()
    with pytest.raises(RetinueError) as caught:
        await store.read_session(address(store, "session"))
    assert (caught.value.code, caught.value.reason) == ("store_unavailable", "closed")
