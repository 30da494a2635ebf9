"""The schema: versions, migrations, settings, and statements that say whose rows they touch."""

from __future__ import annotations

import re
import sqlite3
import threading
from pathlib import Path

import pytest

from retinue.errors import StoreUnavailable
from retinue.storage.sqlite import approval_rows, content_rows, run_rows, session_rows, statements
from retinue.storage.sqlite.connections import StoreFile
from retinue.storage.sqlite.engine import SQLiteEngine
from retinue.storage.sqlite.migrations import Migration, parse_migration, shipped, split
from retinue.store import Store
from retinue.testing.store_trial import commit_of, live_holder
from tests.unit.storage.sqlite.process import address


def _step(name: str, sql: str) -> Migration:
    return parse_migration(name, sql)


NEXT = (
    *shipped(),
    _step("0003_02_post_tidy.sql", "CREATE TABLE tidied (x);"),
    _step("0004_01_pre_notes.sql", "CREATE TABLE note (x);\n-- and\nCREATE INDEX note_body ON note (x);"),
    _step("0004_02_post_drop.sql", "CREATE TABLE dropped (x);"),
)  # fmt: skip


def _tables(file: Path) -> set[str]:
    connection = sqlite3.connect(file)
    found = {name for (name,) in connection.execute("SELECT name FROM sqlite_master")}
    connection.close()
    return found


async def test_a_newer_file_is_refused_and_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "store.db"
    await SQLiteEngine(file, migrations=NEXT).close()
    content = file.read_bytes()
    with pytest.raises(StoreUnavailable) as caught:
        SQLiteEngine(file)
    assert caught.value.reason == "newer_schema"
    assert "schema version 4; this one knows up to 3" in str(caught.value)
    assert file.read_bytes() == content


async def test_an_older_file_is_brought_up_with_all_it_has(tmp_path: Path) -> None:
    file = tmp_path / "store.db"
    store = Store(SQLiteEngine(file))
    lease = (await store.acquire(address(store, "session"), live_holder("holder"))).lease
    await store.commit(commit_of(lease, 0, messages=[b"1"]))
    await store.close()
    for _ in range(2):
        newer = Store(SQLiteEngine(file, migrations=NEXT))
        assert newer.store_id == store.store_id
        assert (await newer.read_session(lease.address)).messages == (b"1",)
        assert await newer.renew([lease]) == [True]
        await newer.close()
    tables = _tables(file)
    assert {"note", "note_body", "tidied"} <= tables
    assert "dropped" not in tables, "the newest version's last steps wait until no older code can be there"


async def test_a_failing_migration_changes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "store.db"
    await SQLiteEngine(file).close()
    before = _tables(file)
    broken = (
        *shipped(),
        _step("0004_01_pre_x.sql", "CREATE TABLE note (x);"),
        _step("0004_02_pre_y.sql", "NONSENSE;"),
    )
    with pytest.raises(StoreUnavailable, match="syntax error"):
        SQLiteEngine(file, migrations=broken)
    assert _tables(file) == before
    await SQLiteEngine(file).close()


async def test_engines_that_open_a_new_file_at_once_agree(tmp_path: Path) -> None:
    engines: list[SQLiteEngine] = []
    start = threading.Barrier(8)

    def opening() -> None:
        start.wait()
        engines.append(SQLiteEngine(tmp_path / "store.db"))

    threads = [threading.Thread(target=opening) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(engines) == 8
    assert len({engine.store_id for engine in engines}) == 1
    for engine in engines:
        await engine.close()


async def test_two_files_are_two_stores(tmp_path: Path) -> None:
    one, two = SQLiteEngine(tmp_path / "one.db"), SQLiteEngine(tmp_path / "two.db")
    assert one.store_id != two.store_id
    await one.close()
    await two.close()


def test_a_commit_waits_for_the_disk(tmp_path: Path) -> None:
    connection, _ = StoreFile(tmp_path / "store.db", "sqlite:///x", 1.0).open_writer(shipped())
    settings = {
        name: connection.execute(f"PRAGMA {name}").fetchone()[0]
        for name in ("journal_mode", "synchronous", "foreign_keys", "busy_timeout")
    }
    connection.close()
    assert settings == {"journal_mode": "wal", "synchronous": 2, "foreign_keys": 1, "busy_timeout": 1000}


def test_readers_cannot_write(tmp_path: Path) -> None:
    file = StoreFile(tmp_path / "store.db", "sqlite:///x", 1.0)
    writer, _ = file.open_writer(shipped())
    reader = file.open_reader()
    with pytest.raises(sqlite3.OperationalError, match="readonly"):
        reader.execute("DELETE FROM session")
    reader.close()
    writer.close()


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT body FROM message",
        "SELECT body FROM state WHERE session_key = 1",
        "SELECT * FROM session WHERE user_id = :user_id AND session_id = :session_id",
        "SELECT * FROM session WHERE tenant_id = :tenant_id AND user_id = :user_id",
        "SELECT * FROM run WHERE run_id = :run_id",
        "UPDATE run SET outcome = NULL",
        "DELETE FROM conversation",
        "INSERT INTO run (run_id) VALUES (:run_id)",
    ],
)
def test_a_statement_must_say_whose_rows_it_touches(sql: str) -> None:
    with pytest.raises(ValueError, match="whose rows"):
        statements.parse(f"-- name: careless\n{sql};\n")
    assert statements.parse(f"-- name: careful (across tenants: a reason)\n{sql};\n") == {"careful": sql}


@pytest.mark.parametrize(
    ("across", "sql"),
    [
        ("users", "SELECT * FROM session WHERE user_id = :user_id"),
        ("sessions", "SELECT * FROM session WHERE tenant_id = :tenant_id"),
        ("sessions", "SELECT * FROM run WHERE user_id = :user_id AND session_id = :session_id"),
    ],
)
def test_what_goes_across_users_or_sessions_stays_with_its_tenant_or_user(across: str, sql: str) -> None:
    with pytest.raises(ValueError, match="whose rows"):
        statements.parse(f"-- name: careless (across {across}: a reason)\n{sql};\n")


def test_what_is_copied_must_be_somebodys() -> None:
    copied = "INSERT INTO state (session_key, body) SELECT :target_key, body FROM state"
    with pytest.raises(ValueError, match="whose rows"):
        statements.parse(f"-- name: careless\n{copied};\n")
    assert statements.parse(f"-- name: careful\n{copied} WHERE session_key = :session_key;\n")


def test_only_fencing_lists_and_the_epoch_floor_go_across_tenants() -> None:
    folder = Path(statements.__file__).parent / "statements"
    text = "".join(file.read_text() for file in folder.iterdir())
    across = {line.split()[2] for line in text.splitlines() if "(across tenants" in line}
    fencing = {"held_by", "end_leases_of", "add_fenced", "is_fenced"}
    lists = {"list_sessions", "list_runs", "list_open_runs", "list_approvals", "list_pending_approvals"}
    assert across == fencing | lists | {"read_epoch_floor", "set_epoch_floor"}


def test_every_statement_is_used() -> None:
    used: set[str] = set()
    for module in (session_rows, content_rows, run_rows, approval_rows):
        for name, value in vars(module).items():
            if name.isupper() and isinstance(value, str | tuple):
                used |= {value} if isinstance(value, str) else set(value)
    every = {statements.statement(name) for name in statements._all()}
    assert every <= used


def test_every_statement_finds_its_rows_by_an_index(tmp_path: Path) -> None:
    """But for the lists of operators, which go through what they list."""
    connection, _ = StoreFile(tmp_path / "store.db", "sqlite:///x", 1.0).open_writer(shipped())
    for name in statements._all():
        sql = statements.statement(name)
        parameters = dict.fromkeys(re.findall(r":(\w+)", sql), 1)
        plan = [row[3] for row in connection.execute(f"EXPLAIN QUERY PLAN {sql}", parameters)]
        scans = [
            step for step in plan if step.startswith("SCAN ") and step != "SCAN run USING INDEX run_open"
        ]
        assert scans == [], name
        if "run.outcome IS NULL" in sql:
            assert any("USING INDEX run_open" in step for step in plan), f"{name} reads runs that ended"
        if name.startswith("list_pending"):
            assert len(plan) == 1, f"{name} sorts"
            assert "INDEX approval_by_state (state=? AND approval_key>?)" in plan[0], name
    connection.close()


def test_names_of_migrations_follow_the_rule() -> None:
    for name in (
        "1_01_pre_x.sql",
        "0001_1_pre_x.sql",
        "0001_01_during_x.sql",
        "0001_01_pre_.sql",
        "0001_01_pre_x.txt",
    ):
        with pytest.raises(ValueError, match="is not named"):
            parse_migration(name, "")
    assert [step.name for step in sorted(NEXT)] == [step.name for step in NEXT]


def test_scripts_are_split_where_statements_end() -> None:
    script = (
        "-- a\nCREATE TABLE a (x TEXT DEFAULT ';'); \n\n"
        "CREATE TRIGGER t AFTER INSERT ON a BEGIN\n SELECT 1;\nEND;\n"
    )
    assert [sql.split()[1] for sql in split(script)] == ["TABLE", "TRIGGER"]
    with pytest.raises(ValueError, match="inside of a statement"):
        list(split("CREATE TABLE a (\n"))
