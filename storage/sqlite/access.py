"""Statements on one connection to the file, and what is said of rows that cannot be read."""

from __future__ import annotations

import sqlite3
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from retinue.ids import Identity, SessionAddress
from retinue.storage.sqlite.failures import damaged, damaged_row, is_damage

Parameters = Mapping[str, Any]
Kept = TypeVar("Kept")

CHANGED = "its checksum does not match"
FLAGS = {0: False, 1: True}
"""What a column means that is true or false; anything else in it is damage."""


class Access:
    """Runs statements.

    Args:
        connection: in autocommit mode, used by one thread at a time.
        store_id: of the file.
        url: of the store, for errors.
    """

    def __init__(self, connection: sqlite3.Connection, store_id: str, url: str) -> None:
        self._connection = connection
        self._store_id = store_id
        self._url = url

    def _one(self, sql: str, parameters: Parameters) -> Any:
        """The only row, or ``None``."""
        rows = self._all(sql, parameters)
        return rows[0] if rows else None

    def _all(self, sql: str, parameters: Parameters) -> list[Any]:
        try:
            return self._connection.execute(sql, parameters).fetchall()
        except sqlite3.Error as error:
            raise self._failed(error, sql, parameters) from error

    def _write(self, sql: str, parameters: Parameters) -> sqlite3.Cursor:
        try:
            return self._connection.execute(sql, parameters)
        except sqlite3.Error as error:
            raise self._failed(error, sql, parameters) from error

    def _write_many(self, sql: str, parameters: Sequence[Parameters]) -> None:
        try:
            self._connection.executemany(sql, parameters)
        except sqlite3.Error as error:
            raise self._failed(error, sql, parameters[0]) from error

    def _failed(self, error: sqlite3.Error, sql: str, parameters: Parameters) -> Exception:
        """Damage is refused where it is, without what SQLite quotes of the content; all else goes on."""
        if is_damage(error):
            return damaged(sql, parameters, self._url, "SQLite finds its page or text damaged")
        return error

    def _intact(self, body: Any, checksum: Any, table: str, key: Parameters) -> bytes:
        """The content of a row, if it is what was stored."""
        if not isinstance(body, bytes) or zlib.crc32(body) != checksum:
            raise damaged_row(table, key, self._url, CHANGED)
        return body

    def _decoded(self, body: Any, checksum: Any, type_: type[Kept], table: str, key: Parameters) -> Kept:
        """A row's content, which this code itself has encoded as JSON."""
        try:
            return msgspec.json.decode(self._intact(body, checksum, table, key), type=type_)
        except msgspec.DecodeError as error:
            raise damaged_row(table, key, self._url, str(error)) from error


def by_session(address: SessionAddress) -> dict[str, str]:
    """The parameters that name a session."""
    return {
        "tenant_id": address.tenant_id,
        "user_id": address.user_id,
        "session_id": address.session_id,
    }


def by_run(identity: Identity, run_id: str) -> dict[str, str]:
    """The parameters that name a run."""
    return {"tenant_id": identity.tenant_id, "user_id": identity.user_id, "run_id": run_id}


def content(body: bytes) -> dict[str, Any]:
    """The parameters of a content column and its checksum."""
    return {"body": body, "checksum": zlib.crc32(body)}
