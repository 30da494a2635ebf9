"""Another process on the same file: run as ``python -m tests.unit.storage.sqlite.process WHAT FILE``.

``hold`` takes the lease of one session, opens a run in it, says ``held`` and waits for the end of its input.
``commit`` commits to four sessions as fast as it can, and says ``<session> <revision>`` after each answer.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from retinue.ids import SessionAddress
from retinue.storage.holders import this_process
from retinue.storage.sqlite.engine import SQLiteEngine
from retinue.store import Store
from retinue.testing.store_trial import commit_of, record_of

SESSIONS = 4


def address(store: Store, session_id: str) -> SessionAddress:
    return SessionAddress(store_id=store.store_id, tenant_id="t", user_id="u", session_id=session_id)


async def hold(store: Store) -> None:
    grant = await store.acquire(address(store, "session"), this_process("other process", "trial"))
    await store.open_run(grant.lease, record_of(grant.lease.address, "run"))
    print("held", flush=True)
    await asyncio.to_thread(sys.stdin.read)


async def commit(store: Store) -> None:
    async def endless(session_id: str) -> None:
        lease = (await store.acquire(address(store, session_id), this_process(session_id, "trial"))).lease
        revision = 0
        while True:
            part = commit_of(lease, revision, messages=[b"%d" % revision], state=b'{"n":%d}' % revision)
            revision = await store.commit(part)
            print(session_id, revision, flush=True)

    await asyncio.gather(*(endless(f"session-{number}") for number in range(SESSIONS)))


async def main(what: str, file: str) -> None:
    store = Store(SQLiteEngine(Path(file)))
    await {"hold": hold, "commit": commit}[what](store)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2]))
