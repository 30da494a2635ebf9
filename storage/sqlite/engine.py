"""The SQLite engine: one file, one writer, a few readers."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from retinue.storage.holders import provably_gone
from retinue.storage.leases import LeaseWatch
from retinue.storage.operations import Operations
from retinue.storage.reading import only_reads
from retinue.storage.sqlite.connections import StoreFile
from retinue.storage.sqlite.migrations import Migration, shipped
from retinue.storage.sqlite.readers import Readers
from retinue.storage.sqlite.writer import Writer
from retinue.store import Guarantees, Holder, StoreOperation, StoreReply, StoreStatistics

BUSY_LIMIT = 10.0
"""Seconds to wait for another process that has the file locked."""


class SQLiteEngine:
    """A store in one SQLite file, on a local disk. Opening it blocks.

    Several processes may open the same file: each transaction checks lease, epoch and revision in the file
    itself, so one of them writes a session at a time.

    Args:
        path: of the file; made absolute.
        clock: monotonic seconds, for the lease rule.
        gone: whether a holder's process has certainly ended, for the lease rule.
        busy_limit: seconds to wait for another process's lock.
        migrations: of the schema, in order; the package's own.

    Raises:
        StoreUnavailable: the file cannot be used; ``reason`` says why in a word.
    """

    def __init__(
        self,
        path: Path,
        *,
        clock: Callable[[], float] = time.monotonic,
        gone: Callable[[Holder], bool] = provably_gone,
        busy_limit: float = BUSY_LIMIT,
        migrations: Sequence[Migration] | None = None,
    ) -> None:
        path = path.absolute()
        self._url = f"sqlite:///{path}"
        self._file = StoreFile(path, self._url, busy_limit)
        connection, self._store_id = self._file.open_writer(migrations or shipped())
        operations = Operations(self._store_id, LeaseWatch(clock=clock, gone=gone))
        self._writer = Writer(connection, self._file, self._store_id, operations)
        self._readers = Readers(self._file, self._store_id, operations)
        self._closing = threading.Lock()
        self._closed = False

    @property
    def store_id(self) -> str:
        """A uuid kept in the file: a copy of the file has the same, another file never."""
        return self._store_id

    @property
    def guarantees(self) -> Guarantees:
        return Guarantees(durable=True, compare_and_swap=True, single_writer="distributed")

    async def execute(self, operations: Sequence[StoreOperation]) -> Sequence[StoreReply]:
        """Reply to each operation, in order; see :class:`retinue.store.StoreEngine`.

        A list of reads only is answered beside the writer, from the last commit. A list with a write goes to
        the writer as a whole, so that its reads see the writes before them.
        """
        if only_reads(operations):
            return await self._readers.read(operations)
        return await self._writer.write(operations)

    def statistics(self) -> StoreStatistics:
        counts = self._writer.counts
        return StoreStatistics(
            url=self._url,
            writes=counts.writes,
            transactions=counts.transactions,
            reads=self._readers.reads,
            commits=counts.commits,
            queued=self._writer.queued,
        )

    async def close(self) -> None:
        """Write what was accepted, then end all threads and connections. A second time changes nothing."""
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        with self._closing:
            if self._closed:
                return
            self._readers.close()
            self._writer.close()  # last: SQLite then copies its log into the file
            self._closed = True
