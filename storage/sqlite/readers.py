"""Reads beside the writer: a few threads, each with a read-only connection of its own."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from retinue.storage.operations import Operations, refusal_of
from retinue.storage.sqlite.connections import StoreFile
from retinue.storage.sqlite.failures import refusal_of_row, unavailable
from retinue.storage.sqlite.rows import SQLiteRows
from retinue.store import Refused, StoreOperation, StoreReply

READERS = 2
"""Threads that read: what is being read is in memory as a rule, and Python runs one thread at a time."""


class Readers:
    """Answers lists of reads, each list from one snapshot of the file.

    Args:
        file: to read.
        store_id: of the file.
        operations: the rules.
    """

    def __init__(self, file: StoreFile, store_id: str, operations: Operations) -> None:
        self._file = file
        self._store_id = store_id
        self._operations = operations
        self._threads = ThreadPoolExecutor(max_workers=READERS, thread_name_prefix="retinue-store-reader")
        self._lock = threading.Lock()
        self._idle: list[sqlite3.Connection] = []
        """Connections without a reader now; there are as many as reads ran at once, at most."""
        self.reads = 0

    async def read(self, operations: Sequence[StoreOperation]) -> Sequence[StoreReply]:
        """The replies.

        Raises:
            StoreUnavailable: the file cannot be read, or the store is closed.
        """
        try:
            answering = asyncio.get_running_loop().run_in_executor(self._threads, self._answer, operations)
        except RuntimeError:  # shut down
            raise self._file.closed() from None
        return await answering

    def close(self) -> None:
        """End the threads and their connections. Blocks."""
        self._threads.shutdown(wait=True)
        with self._lock:
            while self._idle:
                self._idle.pop().close()

    # --- in a thread ---

    def _answer(self, operations: Sequence[StoreOperation]) -> Sequence[StoreReply]:
        self._file.check()
        try:
            with self._lock:
                connection = self._idle.pop() if self._idle else None
            if connection is None:
                connection = self._file.open_reader()
            try:
                replies = self._file.retry(lambda: self._snapshot(connection, operations))
            except BaseException:
                connection.close()
                raise
        except sqlite3.Error as error:
            raise unavailable(self._file.url, error, waited=self._file.busy_limit) from error
        with self._lock:
            self._idle.append(connection)
            self.reads += len(operations)
        return replies

    def _snapshot(
        self, connection: sqlite3.Connection, operations: Sequence[StoreOperation]
    ) -> Sequence[StoreReply]:
        rows = SQLiteRows(connection, self._store_id, self._file.url)
        connection.execute("BEGIN")
        try:
            return [self._reply(rows, operation) for operation in operations]
        finally:
            if connection.in_transaction:
                connection.execute("ROLLBACK")

    def _reply(self, rows: SQLiteRows, operation: StoreOperation) -> StoreReply:
        try:
            return self._operations.perform(rows, operation)
        except sqlite3.Error as error:
            refusal = refusal_of_row(error)
            if refusal is None:
                raise
            return Refused(error=refusal.to_payload())
        except Exception as error:
            return Refused(error=refusal_of(operation, error).to_payload())
