"""The one writer of an engine: a thread with a connection, committing in groups.

All requests that arrive while one transaction is being written go into the next, so that one wait for the
disk serves them all. Each operation has a savepoint of its own: one that is refused leaves its neighbours
alone. When the transaction itself fails, nothing of it is stored and all of it fails. Two failures are tried
again: a file that was locked, with the same transaction; and a damaged page, which SQLite lets no transaction
survive, with each request alone, so that only those fail that need that page.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec

from retinue.errors import DamagedRecord, StoreUnavailable
from retinue.storage.operations import Operations, refusal_of
from retinue.storage.sqlite.connections import StoreFile
from retinue.storage.sqlite.failures import is_damage, refusal_of_row, unavailable
from retinue.storage.sqlite.rows import SQLiteRows
from retinue.store import Committed, DeleteSession, Refused, StoreOperation, StoreReply

logger = logging.getLogger(__name__)

GROUP_LIMIT = 512
"""Most requests in one transaction: bounds what one failure takes along, and how long the first one waits."""

Replies = Sequence[StoreReply]
Outcome = Replies | StoreUnavailable
"""What a request comes to: a reply to each of its operations, or nothing of it was done."""


class Counts(msgspec.Struct):
    """What the writer did since it was opened."""

    writes: int = 0
    transactions: int = 0
    commits: int = 0


class _Request:
    """A list of operations and who waits for it."""

    __slots__ = ("future", "loop", "operations")

    def __init__(self, operations: Sequence[StoreOperation]) -> None:
        self.operations = operations
        self.loop = asyncio.get_running_loop()
        self.future: asyncio.Future[Replies] = self.loop.create_future()


class Writer:
    """Executes requests in order of arrival.

    Args:
        connection: to write with; closed by :meth:`close`.
        file: that it is open on.
        store_id: of the file.
        operations: the rules.
    """

    def __init__(
        self, connection: sqlite3.Connection, file: StoreFile, store_id: str, operations: Operations
    ) -> None:
        self._connection = connection
        self._file = file
        self._rows = SQLiteRows(connection, store_id, file.url)
        self._operations = operations
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="retinue-store-writer")
        self._lock = threading.Lock()
        self._queue: deque[_Request] = deque()
        self._draining = False
        self._closed = False
        self._damage: DamagedRecord | None = None
        """The last damage that an operation of the current transaction met."""
        self.counts = Counts()

    @property
    def queued(self) -> int:
        """Operations waiting, without those of the transaction being written."""
        with self._lock:
            return sum(len(request.operations) for request in self._queue)

    async def write(self, operations: Sequence[StoreOperation]) -> Replies:
        """The replies, once they are on the disk.

        A caller that is cancelled meanwhile may find its operations done: repeat them by their ids.

        Raises:
            StoreUnavailable: the transaction failed, or the store is closed.
        """
        request = _Request(operations)
        with self._lock:
            if self._closed:
                raise self._file.closed()
            if not self._draining:
                try:
                    self._thread.submit(self._drain)
                except RuntimeError:  # the interpreter is shutting down
                    raise self._file.closed() from None
                self._draining = True
            self._queue.append(request)
        return await request.future

    def close(self) -> None:
        """Write what was accepted, then end the thread and the connection. Blocks."""
        with self._lock:
            self._closed = True
        self._thread.shutdown(wait=True)
        self._connection.close()

    # --- in the thread ---

    def _drain(self) -> None:
        while True:
            with self._lock:
                if not self._queue:
                    self._draining = False
                    return
                group = [self._queue.popleft() for _ in range(min(len(self._queue), GROUP_LIMIT))]
            _deliver(list(zip(group, self._outcomes(group), strict=True)))

    def _outcomes(self, group: Sequence[_Request]) -> Sequence[Outcome]:
        """What each request of a group is answered; raises nothing."""
        try:
            self._file.check()
            return self._file.retry(lambda: self._transaction(group))
        except StoreUnavailable as error:
            return [error] * len(group)
        except sqlite3.Error as error:
            if is_damage(error) and len(group) > 1:
                return [outcome for request in group for outcome in self._outcomes([request])]
            if is_damage(error) and self._damage is not None:
                refusal = Refused(error=self._damage.to_payload())
                return [[refusal] * len(request.operations) for request in group]
            return [unavailable(self._file.url, error, waited=self._file.busy_limit)] * len(group)
        except Exception as error:
            logger.exception("the store's writer failed")
            what = f"{self._file.url}: the writer failed: {type(error).__name__}: {error}"
            return [StoreUnavailable(what, url=self._file.url, reason="failed")] * len(group)

    def _transaction(self, group: Sequence[_Request]) -> Sequence[Replies]:
        self._damage = None
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            replies: list[Replies] = [
                [self._reply(operation) for operation in request.operations] for request in group
            ]
            self._connection.execute("COMMIT")
        except BaseException:
            self._roll_back()
            raise
        self.counts.transactions += 1
        for request, answers in zip(group, replies, strict=True):
            self.counts.writes += len(request.operations)
            self.counts.commits += sum(isinstance(reply, Committed) for reply in answers)
        if any(isinstance(operation, DeleteSession) for request in group for operation in request.operations):
            self._empty_log()
        return replies

    def _empty_log(self) -> None:
        """Copy the write-ahead log into the file and cut it: what was deleted would stay readable in it.

        A reader of another process may keep SQLite from it; then the next deletion or the end does it.
        """
        try:
            self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        except sqlite3.Error:
            logger.warning("%s: the log could not be emptied after a deletion", self._file.url, exc_info=True)

    def _roll_back(self) -> None:
        if not self._connection.in_transaction:
            return  # SQLite has done it by itself
        try:
            self._connection.execute("ROLLBACK")
        except sqlite3.Error:
            logger.exception("%s: a failed transaction could not be rolled back", self._file.url)

    def _reply(self, operation: StoreOperation) -> StoreReply:
        """One operation in its savepoint; raises ``sqlite3.Error`` when the transaction failed with it."""
        self._connection.execute("SAVEPOINT operation")
        try:
            reply = self._operations.perform(self._rows, operation)
        except Exception as error:
            if isinstance(error, sqlite3.Error):
                refusal = refusal_of_row(error)
                if refusal is None or not self._connection.in_transaction:
                    raise
            else:
                refusal = refusal_of(operation, error)
            if isinstance(refusal, DamagedRecord):
                self._damage = refusal
            self._connection.execute("ROLLBACK TO operation")
            reply = Refused(error=refusal.to_payload())
        self._connection.execute("RELEASE operation")
        return reply


def _deliver(outcomes: Sequence[tuple[_Request, Outcome]]) -> None:
    """Hand outcomes to those who wait, waking each event loop once."""
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[_Request, Outcome]]] = {}
    for outcome in outcomes:
        by_loop.setdefault(outcome[0].loop, []).append(outcome)
    for loop, theirs in by_loop.items():
        try:
            loop.call_soon_threadsafe(_settle, theirs)
        except RuntimeError:
            logger.debug("an event loop ended before its store replies came")


def _settle(outcomes: Sequence[tuple[_Request, Outcome]]) -> None:
    for request, outcome in outcomes:
        if request.future.done():
            continue  # whoever waited was cancelled
        if isinstance(outcome, StoreUnavailable):
            request.future.set_exception(StoreUnavailable(outcome.message, **outcome.data))
        else:
            request.future.set_result(outcome)
