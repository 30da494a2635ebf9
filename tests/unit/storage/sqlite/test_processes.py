"""Several processes on one file: who may write, who is taken for dead, and what a kill leaves."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pytest

from retinue.errors import LeaseLost, SessionConflict
from retinue.ids import Identity
from retinue.storage.holders import this_process
from retinue.storage.sqlite.engine import SQLiteEngine
from retinue.store import LEASE_PERIOD, Store
from retinue.testing.store_trial import approval_of, commit_of, live_holder, record_of
from tests.unit.storage.sqlite.process import SESSIONS, address
from tests.unit.storage.world import World

ROOT = Path(__file__).parents[4]


@contextmanager
def other_process(what: str, file: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process on the same file, killed at the end if it still runs."""
    command = [sys.executable, "-m", "tests.unit.storage.sqlite.process", what, str(file)]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def _output(process: subprocess.Popen[str]) -> IO[str]:
    assert process.stdout is not None
    return process.stdout


async def test_two_engines_on_one_file_have_one_writer(world: World) -> None:
    one, two = Store(world.sqlite()), Store(world.sqlite())
    assert one.store_id == two.store_id
    lease = (await one.acquire(address(one, "session"), live_holder("one"))).lease
    with pytest.raises(SessionConflict):
        await two.acquire(address(two, "session"), live_holder("two"))
    assert await one.commit(commit_of(lease, 0, messages=[b"1"])) == 1
    assert (await two.read_session(lease.address)).messages == (b"1",)
    world.gone.add("one")
    taken = (await two.acquire(address(two, "session"), live_holder("two"))).lease
    with pytest.raises(LeaseLost):
        await one.commit(commit_of(lease, 1, messages=[b"late"]))
    assert await one.renew([lease]) == [False]
    assert await two.commit(commit_of(taken, 1, messages=[b"2"])) == 2
    assert (await one.read_session(lease.address)).messages == (b"1", b"2")


async def test_each_engine_watches_for_itself(world: World) -> None:
    one, two, three = (Store(world.sqlite()) for _ in range(3))
    lease = (await one.acquire(address(one, "session"), live_holder("one"))).lease
    with pytest.raises(SessionConflict):
        await two.acquire(lease.address, live_holder("two"))
    world.now += LEASE_PERIOD
    with pytest.raises(SessionConflict):
        await three.acquire(lease.address, live_holder("three"))
    assert (await two.acquire(lease.address, live_holder("two"))).lease.epoch == lease.epoch + 1


async def test_a_request_is_settled_once_through_many_connections(world: World) -> None:
    stores = [Store(world.sqlite()) for _ in range(4)]
    one = stores[0]
    lease = (await one.acquire(address(one, "session"), live_holder("holder"))).lease
    await one.open_run(lease, record_of(lease.address, "run"))
    owner = Identity(tenant_id="t", user_id="u")
    for number in range(8):
        approval_id = f"run:{number}"
        await one.open_approval(lease, approval_of(lease.address, approval_id))
        answers = await asyncio.gather(
            *(
                store.settle_approval(
                    lease, approval_id, "approved" if who % 2 else "denied", by=f"{who}", at=float(who)
                )
                for who, store in enumerate(stores * 4)
            )
        )
        (winner,) = (answer.approval for answer in answers if answer.changed)
        assert all(answer.approval == winner for answer in answers)
        for store in stores:
            assert await store.read_approval(owner, approval_id) == winner


async def test_a_killed_process_is_fenced_at_once(tmp_path: Path) -> None:
    file = tmp_path / "store.db"
    store = Store(SQLiteEngine(file))
    with other_process("hold", file) as process:
        assert _output(process).readline() == "held\n"
        with pytest.raises(SessionConflict) as caught:
            await store.acquire(address(store, "session"), this_process("me", "trial"))
        assert caught.value.holder == "other process"
        assert 0 < caught.value.retry_after <= LEASE_PERIOD
        process.send_signal(signal.SIGKILL)
        process.wait()
    grant = await store.acquire(address(store, "session"), this_process("me", "trial"))
    assert grant.lease.epoch == 2
    assert [record.run_id for record in grant.open_runs] == ["run"]
    await store.close()


async def test_no_acknowledged_commit_is_lost_by_a_kill(tmp_path: Path) -> None:
    file = tmp_path / "store.db"
    acknowledged: dict[str, int] = {}
    with other_process("commit", file) as process:
        for count, line in enumerate(_output(process), start=1):
            session_id, number = line.split()
            acknowledged[session_id] = int(number)
            if count == 400:
                process.send_signal(signal.SIGKILL)
        process.wait()
    assert sum(acknowledged.values()) >= 400
    assert len(acknowledged) == SESSIONS
    store = Store(SQLiteEngine(file))
    for session_id, revision in acknowledged.items():
        grant = await store.acquire(address(store, session_id), this_process("me", "trial"))
        session = grant.session
        assert revision <= session.revision <= revision + 1, "one more may have been written, not answered"
        assert list(session.messages) == [b"%d" % number for number in range(session.revision)]
        assert session.state == b'{"n":%d}' % (session.revision - 1)
        assert await store.commit(commit_of(grant.lease, session.revision)) == session.revision + 1
    await store.close()


async def test_processes_commit_side_by_side(tmp_path: Path) -> None:
    file = tmp_path / "store.db"
    store = Store(SQLiteEngine(file))
    with other_process("commit", file) as process:
        assert _output(process).readline()
        lease = (await store.acquire(address(store, "mine"), this_process("me", "trial"))).lease
        for revision in range(50):
            assert await store.commit(commit_of(lease, revision)) == revision + 1
        before = (await store.read_session(address(store, "session-0"))).revision
        for line in _output(process):
            if line.startswith("session-0 ") and int(line.split()[1]) > before:
                break
        else:
            pytest.fail("the other process stopped committing")
    await store.close()
