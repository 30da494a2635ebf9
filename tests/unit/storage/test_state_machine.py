"""Leases and commits under any interleaving, against a model: two writers are never accepted in one epoch.

Several holders acquire, renew, release, commit, fork, delete, ask for approval, settle and die in any order,
with leases of any age; the clock moves, and SQLite files are closed and opened. The model is the seam's text
in a few lines; every answer must be its.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Awaitable
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
    run_state_machine_as_test,
)

from retinue.errors import RetinueError
from retinue.ids import SessionAddress
from retinue.store import LEASE_PERIOD, CommitSession, FinishRun, Lease, ListApprovals, Store
from retinue.testing.store_trial import (
    approval_of,
    commit_of,
    fork_of,
    live_holder,
    mark_of,
    outcome_of,
    record_of,
)
from tests.unit.storage.world import KINDS, World

SESSIONS = ("one", "two")
HOLDERS = ("anna", "bert", "cleo", "dora")
FINAL = ("approved", "denied", "expired", "cancelled")


class ModelSession:
    """What the seam says of one session."""

    def __init__(self, epoch: int = 0) -> None:
        self.exists = False
        """Whether it has a row: once it was acquired or made by a fork, until it is deleted."""
        self.written = False
        """Whether there was more than leases."""
        self.epoch = epoch
        self.holder: str | None = None
        self.renewals = 0
        self.seen: tuple[int, int, float] | None = None
        """Epoch and renewals that contenders have met, and since when."""
        self.revision = 0
        self.messages: list[bytes] = []
        self.replayable = True
        self.last: CommitSession | None = None
        self.last_revision = 0
        self.requests: dict[int, str] = {}
        """States of its requests for approval by their number, one for each run."""
        self.writers: dict[int, set[str]] = {}
        """Who was accepted as a writer, by epoch."""

    def stands(self, lease: Lease) -> bool:
        return self.holder is not None and self.epoch == lease.epoch


class StoreMachine(RuleBasedStateMachine):
    """One store, several holders."""

    kind: ClassVar[str]
    leases = Bundle("leases")

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="retinue-machine-"))
        self.runner = asyncio.Runner()
        self.world = World(self.folder)
        self.fenced: set[str] = set()
        self.owners: dict[tuple[str, int], str] = {}
        """Who was given which session's epoch."""
        self.count = 0
        self.floor = 0
        """The highest epoch that went with a deletion."""
        self.buried: list[CommitSession] = []
        """Last commits of deleted sessions."""

    @initialize()
    def begin(self) -> None:
        self.store = Store(self.world.open(self.kind))
        self.sessions = {session_id: ModelSession() for session_id in SESSIONS}

    def teardown(self) -> None:
        self.runner.run(self.world.close())
        self.runner.close()
        shutil.rmtree(self.folder)

    def answer(self, call: Awaitable[Any]) -> Any:
        """The reply, or the code of the refusal."""

        async def called() -> Any:
            try:
                return await call
            except RetinueError as error:
                return error.code

        return self.runner.run(called())

    def address(self, session_id: str) -> SessionAddress:
        return SessionAddress(store_id=self.store.store_id, tenant_id="t", user_id="u", session_id=session_id)

    def of(self, lease: Lease) -> ModelSession:
        return self.sessions[lease.address.session_id]

    def epoch_of(self, session: ModelSession) -> int:
        """The epoch that stands, or that a new session begins with."""
        return session.epoch if session.exists else self.floor

    def next_commit(self, lease: Lease, base_revision: int) -> CommitSession:
        self.count += 1
        return commit_of(
            lease, base_revision, commit_id=f"commit {self.count}", messages=[b"%d" % self.count]
        )

    def expected(self, commit: CommitSession) -> int | str:
        """What the model answers to a commit, having done it."""
        session = self.of(commit.lease)
        if session.last is not None and session.last.commit_id == commit.commit_id:
            return session.last_revision
        if not session.stands(commit.lease):
            return "lease_lost"
        if session.revision != commit.base_revision:
            return "session_conflict"
        session.revision += 1
        session.messages += commit.messages
        session.replayable = commit.replayable
        session.last, session.last_revision = commit, session.revision
        session.written = True
        owner = self.owners[commit.lease.address.session_id, commit.lease.epoch]
        session.writers.setdefault(commit.lease.epoch, set()).add(owner)
        return session.revision

    # --- what may happen ---

    @rule(target=leases, session_id=st.sampled_from(SESSIONS), holder=st.sampled_from(HOLDERS))
    def acquire(self, session_id: str, holder: str) -> Any:
        session = self.sessions[session_id]
        reply = self.answer(self.store.acquire(self.address(session_id), live_holder(holder)))
        if holder in self.fenced:
            assert reply == "lease_lost"
            return multiple()
        if session.holder not in (None, holder) and session.holder not in self.world.gone:
            if session.seen is None or session.seen[:2] != (session.epoch, session.renewals):
                session.seen = (session.epoch, session.renewals, self.world.now)
            if self.world.now - session.seen[2] < LEASE_PERIOD:
                assert reply == "session_conflict"
                return multiple()
        session.epoch = self.epoch_of(session) + 1
        session.exists, session.holder, session.renewals, session.seen = True, holder, 0, None
        assert reply.lease.epoch == session.epoch
        assert reply.session.revision == session.revision
        assert list(reply.session.messages) == session.messages
        assert (session_id, session.epoch) not in self.owners, "an epoch was given twice"
        self.owners[session_id, session.epoch] = holder
        return reply.lease

    @rule(lease=leases)
    def acquire_again(self, lease: Lease) -> None:
        """A message delivered twice: the first reply was lost."""
        holder = self.owners[lease.address.session_id, lease.epoch]
        if holder not in self.fenced and self.of(lease).holder == holder:
            self.acquire(lease.address.session_id, holder)

    @rule(some=st.lists(leases, max_size=4, unique=True))
    def renew(self, some: list[Lease]) -> None:
        standing = self.answer(self.store.renew(some))
        assert list(standing) == [self.of(lease).stands(lease) for lease in some]
        for lease in some:
            self.of(lease).renewals += self.of(lease).stands(lease)

    @rule(lease=leases)
    def release(self, lease: Lease) -> None:
        assert self.answer(self.store.release(lease)) is None
        if self.of(lease).stands(lease):
            self.of(lease).holder = None

    @rule(lease=consumes(leases))
    def forget(self, lease: Lease) -> None:
        """A holder that ends without a word."""
        self.world.gone.add(self.owners[lease.address.session_id, lease.epoch])

    @precondition(lambda self: len(self.fenced) < 2)
    @rule(holder=st.sampled_from(HOLDERS))
    def fence(self, holder: str) -> None:
        fenced = self.answer(self.store.fence(holder))
        self.fenced.add(holder)
        assert {address.session_id for address in fenced} == {
            session_id for session_id, session in self.sessions.items() if session.holder == holder
        }
        for session in self.sessions.values():
            if session.holder == holder:
                session.holder = None

    @rule(seconds=st.sampled_from([1.0, LEASE_PERIOD / 2, LEASE_PERIOD, 10 * LEASE_PERIOD]))
    def wait(self, seconds: float) -> None:
        self.world.now += seconds

    @rule(lease=leases, off=st.sampled_from([0, 0, 0, -1, 1]))
    def commit(self, lease: Lease, off: int) -> None:
        commit = self.next_commit(lease, self.of(lease).revision + off)
        assert self.answer(self.store.commit(commit)) == self.expected(commit)

    @rule(session_id=st.sampled_from(SESSIONS))
    def repeat_commit(self, session_id: str) -> None:
        session = self.sessions[session_id]
        if session.last is not None:
            assert self.answer(self.store.commit(session.last)) == self.expected(session.last)

    @rule(some=st.lists(leases, min_size=2, max_size=6))
    def race(self, some: list[Lease]) -> None:
        """Commits sent at once, old leases and new ones, all from what stands."""
        commits = [self.next_commit(lease, self.of(lease).revision) for lease in some]

        async def all_at_once() -> list[Any]:
            calls = (self.store.commit(commit) for commit in commits)
            replies = await asyncio.gather(*calls, return_exceptions=True)
            return [reply.code if isinstance(reply, RetinueError) else reply for reply in replies]

        # They arrive in the order in which they were sent; what the model does in turn is what must come.
        assert self.runner.run(all_at_once()) == [self.expected(commit) for commit in commits]

    @rule(lease=leases)
    def replace(self, lease: Lease) -> None:
        session = self.of(lease)
        reply = self.answer(self.store.replace(lease, [b"imported"]))
        if not session.stands(lease):
            assert reply == "lease_lost"
            return
        assert reply is None
        session.revision, session.messages, session.replayable = 0, [b"imported"], False
        session.written = True

    @rule(lease=leases)
    def delete(self, lease: Lease) -> None:
        session = self.of(lease)
        reply = self.answer(self.store.delete(lease))
        if session.exists and not session.stands(lease):
            assert reply == "lease_lost"
            return
        assert reply is None
        if session.exists:
            self.floor = max(self.floor, session.epoch)
            if session.last is not None:
                self.buried.append(session.last)
            self.sessions[lease.address.session_id] = ModelSession()

    @precondition(lambda self: self.buried)
    @rule()
    def repeat_commit_of_a_deleted_session(self) -> None:
        late = self.buried[-1]
        assert self.answer(self.store.commit(late)) == "lease_lost"

    @rule(
        lease=leases,
        onto=st.sampled_from(SESSIONS),
        off=st.sampled_from([0, 0, 0, 1]),
        keep=st.integers(0, 3),
    )
    def fork(self, lease: Lease, onto: str, off: int, keep: int) -> None:
        self.count += 1
        source, made = self.of(lease), self.sessions[onto]
        operation = fork_of(lease, source.revision + off, onto, keep, commit_id=f"fork {self.count}")
        reply = self.answer(self.store.fork(operation))
        if not source.stands(lease):
            assert reply == "lease_lost"
        elif off:
            assert reply == "session_conflict"
        elif keep > len(source.messages):
            assert reply == "invalid_input"
        elif made.holder is not None or made.written:
            assert reply == "session_conflict"
        else:
            assert reply is None
            made.epoch, made.exists, made.written = self.epoch_of(made), True, True
            made.revision, made.replayable = 1, source.replayable
            made.messages = source.messages[:keep]
            assert self.answer(self.store.fork(operation)) is None, "a repeat"

    @rule(lease=leases, off=st.sampled_from([0, 0, 0, -1]))
    def mark(self, lease: Lease, off: int) -> None:
        self.count += 1
        session = self.of(lease)
        operation = mark_of(lease, session.revision + off, commit_id=f"mark {self.count}")
        reply = self.answer(self.store.mark_replayable(operation))
        if not session.stands(lease):
            assert reply == "lease_lost"
        elif off:
            assert reply == "session_conflict"
        else:
            session.revision += 1
            session.replayable, session.written, session.last = True, True, None
            assert reply == session.revision

    @rule(lease=leases)
    def ask(self, lease: Lease) -> None:
        """A run begins and asks for approval; both are repeated."""
        self.count += 1
        session, run_id = self.of(lease), f"run {self.count}"
        request = approval_of(lease.address, f"{run_id}:1", run_id)
        for _ in range(2):
            opened = self.answer(self.store.open_run(lease, record_of(lease.address, run_id)))
            asked = self.answer(self.store.open_approval(lease, request))
            if not session.stands(lease):
                assert (opened, asked) == ("lease_lost", "lease_lost")
            else:
                assert asked == request
                session.requests[self.count] = "pending"
                session.written = True

    @rule(
        lease=leases, states=st.lists(st.sampled_from(FINAL), min_size=1, max_size=3), pick=st.integers(0, 9)
    )
    def settle(self, lease: Lease, states: list[Any], pick: int) -> None:
        """Settlements sent at once, of some request of any session."""
        numbers = sorted(number for session in self.sessions.values() for number in session.requests)
        number = numbers[pick % len(numbers)] if numbers else 0
        session = self.of(lease)

        async def all_at_once() -> list[Any]:
            calls = (self.store.settle_approval(lease, f"run {number}:1", state, at=1.0) for state in states)
            replies = await asyncio.gather(*calls, return_exceptions=True)
            return [reply.code if isinstance(reply, RetinueError) else reply for reply in replies]

        for state, reply in zip(states, self.runner.run(all_at_once()), strict=True):
            if not session.stands(lease):
                assert reply == "lease_lost"
            elif number not in session.requests:
                assert reply == "not_found"
            else:
                assert reply.changed == (session.requests[number] == "pending")
                if reply.changed:
                    session.requests[number] = state
                assert reply.approval.state == session.requests[number]

    @rule(lease=leases, pick=st.integers(0, 9), with_commit=st.booleans())
    def end_run(self, lease: Lease, pick: int, with_commit: bool) -> None:
        session = self.of(lease)
        if not session.requests:
            return
        number = sorted(session.requests)[pick % len(session.requests)]
        outcome = outcome_of(f"run {number}")
        if with_commit:
            commit = self.next_commit(lease, session.revision)
            commit = msgspec.structs.replace(commit, outcome=outcome)
            stands = session.stands(lease)
            assert self.answer(self.store.commit(commit)) == self.expected(commit)
        else:
            stands = session.stands(lease)
            reply = self.answer(self.store.finish_run(FinishRun(lease=lease, outcome=outcome)))
            assert reply == (None if stands else "lease_lost")
        if stands and session.requests[number] == "pending":
            session.requests[number] = "cancelled"

    @precondition(lambda self: self.kind == "sqlite")
    @rule()
    def reopen(self) -> None:
        """Another process takes the file over; what the old one had seen of leases is gone."""
        self.runner.run(self.store.close())
        self.store = Store(self.world.open(self.kind))
        for session in self.sessions.values():
            session.seen = None

    # --- what must hold ---

    @invariant()
    def what_is_stored_is_what_was_accepted(self) -> None:
        for session_id, session in self.sessions.items():
            stored = self.answer(self.store.read_session(self.address(session_id)))
            assert stored.revision == session.revision
            assert list(stored.messages) == session.messages
            assert stored.replayable == session.replayable

    @invariant()
    def requests_are_as_they_were_settled(self) -> None:
        wanted = {
            number: (session_id, state)
            for session_id, session in self.sessions.items()
            for number, state in session.requests.items()
        }
        listed = self.answer(self.store.list_approvals(ListApprovals())).approvals
        assert [(entry.session_id, entry.state) for entry in listed] == [
            wanted[number] for number in sorted(wanted)
        ]
        pending = self.answer(self.store.list_approvals(ListApprovals(state="pending"))).approvals
        assert list(pending) == [entry for entry in listed if entry.state == "pending"]

    @invariant()
    def one_writer_an_epoch(self) -> None:
        for session in self.sessions.values():
            assert all(len(writers) == 1 for writers in session.writers.values())


@pytest.mark.parametrize("kind", KINDS)
def test_no_interleaving_lets_two_write(kind: str) -> None:
    machine = type("Machine", (StoreMachine,), {"kind": kind})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=30 if kind == "sqlite" else 60,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow],
        ),
    )
