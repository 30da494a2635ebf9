"""The schema and its versions.

A migration is a file ``<version>_<step>_pre|post_<what>.sql``. ``pre`` steps are applied when a file is
opened: they only add, so that code of the version before can go on beside the new one. ``post`` steps of a
version take away what only older code needed; as at most two neighbouring versions run side by side, they are
applied once code of a later version opens the file.
"""

from __future__ import annotations

import re
import sqlite3
import uuid
from collections.abc import Iterator, Sequence
from functools import lru_cache
from importlib import resources

import msgspec

from retinue.errors import StoreUnavailable

APPLICATION_ID = int.from_bytes(b"Rtnu", "big")
"""Written into the file's header, so that the database of another application is told apart."""

_NAME = re.compile(r"^(?P<version>\d{4})_(?P<step>\d{2})_(?P<when>pre|post)_(?P<what>[a-z0-9_]+)\.sql$")


class Migration(msgspec.Struct, frozen=True, order=True):
    """One step of the schema."""

    version: int
    step: int
    name: str
    post: bool
    sql: str


def parse_migration(name: str, sql: str) -> Migration:
    """A migration from its file; ``ValueError`` for a name that does not follow the rule."""
    match = _NAME.match(name)
    if match is None:
        raise ValueError(f"{name} is not named <version>_<step>_pre|post_<what>.sql")
    return Migration(int(match["version"]), int(match["step"]), name, match["when"] == "post", sql)


@lru_cache(maxsize=1)
def shipped() -> tuple[Migration, ...]:
    """The migrations of this package, in order."""
    folder = resources.files("retinue.storage.sqlite") / "migrations"
    files = (entry for entry in folder.iterdir() if entry.name.endswith(".sql"))
    return tuple(sorted(parse_migration(file.name, file.read_text(encoding="utf-8")) for file in files))


def check_ours(connection: sqlite3.Connection, url: str, migrations: Sequence[Migration]) -> None:
    """Return when the file is new, or a store that this code can use; changes nothing.

    Raises:
        StoreUnavailable: another application's database, or a newer version's store.
        sqlite3.Error: not readable.
    """
    (tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    if tables == 0:
        return
    # Read after the tables: another process may be making them just now, and writes both at once.
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    if application != APPLICATION_ID:
        raise StoreUnavailable(
            f"{url} is the database of another application; name another file", url=url, reason="not_a_store"
        )
    (stored,) = connection.execute("SELECT value FROM meta WHERE name = 'schema_version'").fetchone()
    known = migrations[-1].version
    if int(stored) > known:
        raise StoreUnavailable(
            f"{url} was written by a newer Retinue (schema version {stored}; this one knows up to {known}); "
            "install that version, or name another file",
            url=url,
            reason="newer_schema",
        )


def migrate(connection: sqlite3.Connection, url: str, migrations: Sequence[Migration]) -> str:
    """Bring the file to the newest version, in one transaction; the store's id.

    Raises:
        StoreUnavailable: see :func:`check_ours`.
        sqlite3.Error: it could not be written; nothing was changed then.
    """
    if not any(_due(migrations, _applied(connection))):
        return _store_id(connection)  # without a write: a full disk or another writer are no hindrance
    connection.execute("BEGIN IMMEDIATE")
    try:
        check_ours(connection, url, migrations)
        known = migrations[-1].version
        for migration in _due(migrations, _applied(connection)):
            for sql in split(migration.sql):
                connection.execute(sql)
            connection.execute("INSERT INTO migration (name) VALUES (?)", (migration.name,))
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.execute("INSERT OR REPLACE INTO meta (name, value) VALUES ('schema_version', ?)", (known,))
        connection.execute(
            "INSERT OR IGNORE INTO meta (name, value) VALUES ('store_id', ?)", (str(uuid.uuid4()),)
        )
        store_id = _store_id(connection)
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise
    return store_id


def _store_id(connection: sqlite3.Connection) -> str:
    return str(connection.execute("SELECT value FROM meta WHERE name = 'store_id'").fetchone()[0])


def _applied(connection: sqlite3.Connection) -> set[str]:
    if connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'migration'").fetchone() is None:
        return set()
    return {name for (name,) in connection.execute("SELECT name FROM migration")}


def _due(migrations: Sequence[Migration], applied: set[str]) -> Iterator[Migration]:
    newest = migrations[-1].version
    for migration in migrations:
        if migration.name not in applied and (not migration.post or migration.version < newest):
            yield migration


def split(script: str) -> Iterator[str]:
    """The statements of a script. (``executescript`` would end the transaction that they must share.)"""
    pending = ""
    for line in script.splitlines():
        if not pending and (not line.strip() or line.lstrip().startswith("--")):
            continue
        pending += line + "\n"
        if sqlite3.complete_statement(pending):
            yield pending.strip()
            pending = ""
    if pending.strip():
        raise ValueError(f"the script ends inside of a statement: {pending.strip()[:80]!r}")
