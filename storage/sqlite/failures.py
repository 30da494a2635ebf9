"""What SQLite's errors mean here, and what the reader can do about them."""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Mapping
from typing import Any

from retinue.errors import DamagedRecord, InputError, RetinueError, StoreUnavailable

_TABLE = re.compile(r"\b(?:INSERT INTO|INSERT OR IGNORE INTO|UPDATE|FROM) (\w+)")

_BUSY = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}
_DAMAGE = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}

_CAUSES: dict[int, tuple[str, str]] = {
    sqlite3.SQLITE_FULL: (
        "disk_full",
        "the disk is full; free some space: nothing that was reported stored is lost",
    ),
    sqlite3.SQLITE_NOTADB: (
        "not_a_database",
        "the file is not an SQLite database; name another file, or move this one away",
    ),
    sqlite3.SQLITE_CORRUPT: (
        "damaged",
        "the file is damaged; keep a copy, and restore a backup, or what `sqlite3 FILE .recover` can read",
    ),
    sqlite3.SQLITE_READONLY: (
        "not_writable",
        "the file or its folder is not writable; change its permissions",
    ),
    sqlite3.SQLITE_PERM: ("not_writable", "the file is not accessible; change its permissions"),
    sqlite3.SQLITE_CANTOPEN: (
        "not_writable",
        "the file cannot be opened; check that it is there and its permissions",
    ),
    sqlite3.SQLITE_IOERR: (
        "io_error",
        "the disk failed to read or write; check the disk and the file system",
    ),
    sqlite3.SQLITE_NOMEM: ("no_memory", "the process has no memory left for it"),
}


def code_of(error: sqlite3.Error) -> int | None:
    """The primary result code, without its extension; ``None`` for an error of the Python module itself."""
    code: int | None = getattr(error, "sqlite_errorcode", None)
    return None if code is None else code & 0xFF


def is_busy(error: sqlite3.Error) -> bool:
    """Whether another process has the lock: the whole transaction may be tried again."""
    return code_of(error) in _BUSY


def is_damage(error: sqlite3.Error) -> bool:
    """Whether what was read makes no sense: a broken page, or text that is not UTF-8."""
    if code_of(error) is None:
        return isinstance(error, sqlite3.OperationalError)
    return code_of(error) in _DAMAGE


def unavailable(url: str, error: sqlite3.Error, *, waited: float = 0.0) -> StoreUnavailable:
    """The store as a whole failed.

    Args:
        url: of the store.
        error: what SQLite said.
        waited: seconds spent waiting for a lock.
    """
    if is_busy(error):
        return StoreUnavailable(
            f"{url} is locked by another process, for {waited:.1f} s now; end that process, or let it finish",
            url=url,
            reason="locked",
        )
    reason, advice = _CAUSES.get(code_of(error) or 0, ("failed", f"SQLite says: {error}"))
    return StoreUnavailable(f"{url}: {advice}", url=url, reason=reason)


def damaged(sql: str, parameters: Mapping[str, Any], url: str, what: str) -> DamagedRecord:
    """A stored row cannot be read; its place is the table and the key that it was looked for with."""
    match = _TABLE.search(sql)
    key = {name: value for name, value in parameters.items() if isinstance(value, str | int)}
    return damaged_row(match[1] if match else "?", key, url, what)


def damaged_row(table: str, key: Mapping[str, Any], url: str, what: str) -> DamagedRecord:
    """A stored row cannot be read.

    Args:
        table: that it is in.
        key: column values that name it.
        url: of the store.
        what: the damage, in words.
    """
    place = f"{table} {json.dumps(key, ensure_ascii=False)}"
    return DamagedRecord(
        f"{place} in {url} cannot be read: {what}; its bytes are kept, restore it from a backup",
        place=place,
        url=url,
    )


def refusal_of_row(error: sqlite3.Error) -> RetinueError | None:
    """What refuses one operation, whose row SQLite did not take; ``None`` when it failed otherwise."""
    if isinstance(error, sqlite3.IntegrityError | sqlite3.DataError | sqlite3.InterfaceError):
        return InputError(f"the store did not take a value: {error}")
    if isinstance(error, sqlite3.ProgrammingError) and code_of(error) is None:
        return InputError(f"the store did not take a value: {error}")
    return None
