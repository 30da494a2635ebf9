"""Opening the file: its folder, its permissions, its settings."""

from __future__ import annotations

import errno
import os
import random
import sqlite3
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from retinue.errors import StoreUnavailable
from retinue.storage.sqlite.failures import is_busy, unavailable
from retinue.storage.sqlite.migrations import Migration, check_ours, migrate

Result = TypeVar("Result")

BUSY_STEP = 1.0
"""Seconds that SQLite itself waits for a lock, before the whole transaction is tried again."""
CHECKPOINT_PAGES = 4000
"""Pages in the write-ahead log after which it is copied into the file: 16 MB."""


class StoreFile:
    """The database file of one store.

    Args:
        path: absolute.
        url: of the store, for errors.
        busy_limit: seconds to wait for another process's lock before giving up.
    """

    def __init__(self, path: Path, url: str, busy_limit: float) -> None:
        self.path = path
        self.url = url
        self.busy_limit = busy_limit
        self._inode: tuple[int, int] | None = None

    def prepare(self) -> None:
        """See that the file can be written; create it, and its folder if only that is missing.

        Both are made readable for this user alone: conversations are private.
        """
        folder = self.path.parent
        try:
            if not folder.exists():
                if not folder.parent.exists():
                    raise self._refusal("no_folder", f"the folder {folder} does not exist; create it")
                folder.mkdir(mode=0o700, exist_ok=True)
            if not folder.is_dir():
                raise self._refusal("no_folder", f"{folder} is not a folder; name a file in one")
            if self.path.is_dir():
                raise self._refusal("is_folder", "that is a folder; name a file in it")
            if not os.access(folder, os.W_OK | os.X_OK):
                raise self._refusal(
                    "not_writable", f"the folder {folder} is not writable; change its permissions"
                )
            try:
                os.close(os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
            except FileExistsError:
                if not os.access(self.path, os.R_OK | os.W_OK):
                    raise self._refusal(
                        "not_writable", "the file is not writable; change its permissions"
                    ) from None
        except OSError as error:
            reason = {errno.ENOSPC: "disk_full", errno.EDQUOT: "disk_full", errno.ENOTDIR: "no_folder"}.get(
                error.errno or 0, "not_writable"
            )
            raise self._refusal(
                reason, f"{folder} cannot be written: {error.strerror}; choose another"
            ) from error

    def open_writer(self, migrations: Sequence[Migration]) -> tuple[sqlite3.Connection, str]:
        """The writing connection and the store's id, the schema brought to the newest version.

        Raises:
            StoreUnavailable: the file cannot be used, and why.
        """
        self.prepare()
        connection = self._connect("rw")
        try:
            store_id = self.retry(lambda: self._set_up(connection, migrations))
        except sqlite3.Error as error:
            connection.close()
            raise unavailable(self.url, error, waited=self.busy_limit) from error
        except BaseException:
            connection.close()
            raise
        status = self.path.stat()
        self._inode = (status.st_dev, status.st_ino)
        return connection, store_id

    def open_reader(self) -> sqlite3.Connection:
        """A connection that cannot write."""
        connection = self._connect("ro")
        connection.execute("PRAGMA query_only = ON")
        connection.execute("PRAGMA trusted_schema = OFF")
        return connection

    def check(self) -> None:
        """Raise :class:`StoreUnavailable` once the file was moved, deleted or replaced.

        SQLite would go on writing to the file that has no name any more, and lose everything with it.
        """
        try:
            status = self.path.stat()
        except OSError:
            raise self._refusal(
                "moved",
                "the file was moved or deleted while it was open; put it back, or restart with another",
            ) from None
        if (status.st_dev, status.st_ino) != self._inode:
            raise self._refusal(
                "moved", "the file was replaced while it was open; restart to use the new one"
            )

    def retry(self, action: Callable[[], Result]) -> Result:
        """Do ``action``, a whole transaction; again while another process has the lock, up to the limit."""
        give_up = time.monotonic() + self.busy_limit
        while True:
            try:
                return action()
            except sqlite3.Error as error:
                if not is_busy(error) or time.monotonic() >= give_up:
                    raise
            # Some locks are refused at once, without SQLite's own wait.
            time.sleep(random.uniform(0.001, 0.02))

    def closed(self) -> StoreUnavailable:
        """The error of whoever uses the store after its end."""
        return self._refusal("closed", "the store is closed")

    def _connect(self, mode: str) -> sqlite3.Connection:
        try:
            return sqlite3.connect(
                f"{self.path.as_uri()}?mode={mode}",
                uri=True,
                timeout=min(BUSY_STEP, self.busy_limit),
                isolation_level=None,
                check_same_thread=False,
            )
        except sqlite3.Error as error:
            raise unavailable(self.url, error) from error

    def _set_up(self, connection: sqlite3.Connection, migrations: Sequence[Migration]) -> str:
        check_ours(connection, self.url, migrations)  # before anything in the file is changed
        (mode,) = connection.execute("PRAGMA journal_mode = WAL").fetchone()
        if mode != "wal":
            raise self._refusal(
                "no_wal", "its file system does not support a write-ahead log; put the file on a local disk"
            )
        connection.execute("PRAGMA synchronous = FULL")  # a commit is on the disk when it is answered
        connection.execute("PRAGMA foreign_keys = ON")
        connection.execute("PRAGMA trusted_schema = OFF")
        connection.execute("PRAGMA cell_size_check = ON")
        connection.execute("PRAGMA secure_delete = ON")  # what a user deletes is not left in free pages
        connection.execute(f"PRAGMA wal_autocheckpoint = {CHECKPOINT_PAGES}")
        connection.execute(f"PRAGMA journal_size_limit = {4 * CHECKPOINT_PAGES * 4096}")
        return migrate(connection, self.url, migrations)

    def _refusal(self, reason: str, text: str) -> StoreUnavailable:
        return StoreUnavailable(f"{self.url}: {text}", url=self.url, reason=reason)
