"""The memory store: everything in dictionaries of one process, gone with it."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Sequence

from retinue.errors import StoreUnavailable
from retinue.storage.holders import provably_gone
from retinue.storage.leases import LeaseWatch
from retinue.storage.memory_rows import MemoryRows
from retinue.storage.operations import Operations, refusal_of
from retinue.storage.reading import only_reads
from retinue.store import (
    Committed,
    Guarantees,
    Holder,
    Refused,
    StoreOperation,
    StoreReply,
    StoreStatistics,
)

MEMORY_URL = "memory:"


class MemoryEngine:
    """A store that lives as long as its process.

    Args:
        distributed: whether this engine serves several processes, as in a store actor. It then is the one
            place where leases are decided and may promise it; in a user's process it promises what the
            contract says of the default store.
        clock: monotonic seconds, for the lease rule.
        gone: whether a holder's process has certainly ended, for the lease rule.
    """

    def __init__(
        self,
        *,
        distributed: bool = False,
        clock: Callable[[], float] = time.monotonic,
        gone: Callable[[Holder], bool] = provably_gone,
    ) -> None:
        self._store_id = f"memory-{uuid.uuid4()}"
        self._distributed = distributed
        self._operations = Operations(self._store_id, LeaseWatch(clock=clock, gone=gone))
        self._rows = MemoryRows()
        self._lock = threading.Lock()
        self._closed = False
        self._writes = self._transactions = self._reads = self._commits = 0

    @property
    def store_id(self) -> str:
        """A new one for each engine: what another process's memory kept is not here."""
        return self._store_id

    @property
    def guarantees(self) -> Guarantees:
        return Guarantees(
            durable=False,
            compare_and_swap=self._distributed,
            single_writer="distributed" if self._distributed else "process",
        )

    async def execute(self, operations: Sequence[StoreOperation]) -> Sequence[StoreReply]:
        """Reply to each operation, in order; see :class:`retinue.store.StoreEngine`."""
        with self._lock:
            if self._closed:
                raise StoreUnavailable("the memory store is closed", url=MEMORY_URL, reason="closed")
            replies = [self._reply(operation) for operation in operations]
            if only_reads(operations):
                self._reads += len(operations)
            else:
                self._writes += len(operations)
                self._transactions += 1
                self._commits += sum(isinstance(reply, Committed) for reply in replies)
            return replies

    def _reply(self, operation: StoreOperation) -> StoreReply:
        # The rules check before they write (see Operations), so there is nothing to undo.
        try:
            return self._operations.perform(self._rows, operation)
        except Exception as error:
            return Refused(error=refusal_of(operation, error).to_payload())

    def statistics(self) -> StoreStatistics:
        return StoreStatistics(
            url=MEMORY_URL,
            writes=self._writes,
            transactions=self._transactions,
            reads=self._reads,
            commits=self._commits,
            queued=0,
        )

    async def close(self) -> None:
        """Forget everything. A second time changes nothing."""
        with self._lock:
            self._closed = True
            self._rows = MemoryRows()
