"""Ending the runs of a process that died, before anything else happens to their session."""

from __future__ import annotations

import msgspec
import pytest

from retinue import Identity, Usage
from retinue.events import (
    Control,
    Custom,
    Event,
    EventsLost,
    ModelComplete,
    Payload,
    RunTerminal,
    decode_event,
    encode_event,
)
from retinue.ids import SessionAddress
from retinue.messages import decode_message
from retinue.protocol import StartRun
from retinue.recovery import end_interrupted_runs
from retinue.results import Reason
from retinue.run_queue import QueuedRun
from retinue.storage import this_process
from retinue.storage.memory import MemoryEngine
from retinue.store import (
    EVENT_BLOCK,
    LeaseGrant,
    ListApprovals,
    RunRecord,
    Store,
    StoredEvent,
    StoredSession,
)
from retinue.testing.store_trial import approval_of
from tests.conftest import MakeLocalRuntime
from tests.support import all_events, code_of, soon, trivial, types

WHO = Identity(tenant_id="a", user_id="b")


class Dead:
    """A process that held a session and died in the middle of a run."""

    def __init__(self) -> None:
        self.engine = MemoryEngine()
        self.store = Store(self.engine)
        self.address = SessionAddress(
            store_id=self.store.store_id, tenant_id="a", user_id="b", session_id="s"
        )
        self.holder = this_process("dead-host", "test")

    async def acquire(self) -> LeaseGrant:
        return await self.store.acquire(self.address, self.holder)

    async def open(self, grant: LeaseGrant, run_id: str, **options: object) -> None:
        record = RunRecord(
            tenant_id="a",
            user_id="b",
            session_id="s",
            run_id=run_id,
            root_run_id="root",
            parent_run_id="parent",
            app="app",
            input=msgspec.json.encode(f"input of {run_id}"),
            created_at=0.0,
        )
        await self.store.open_run(grant.lease, msgspec.structs.replace(record, **options))

    async def write(self, grant: LeaseGrant, run_id: str, payloads: list[Payload]) -> None:
        events = [
            StoredEvent(number, encode_event(_event(run_id, number, payload)))
            for number, payload in enumerate(payloads, 1)
        ]
        await self.store.append_events(grant.lease, run_id, events)

    async def dies(self) -> None:
        await self.store.fence(self.holder.holder_id)


def _event(run_id: str, number: int, payload: Payload) -> Event:
    return Event(
        event_id=f"{run_id}:{number}",
        sequence=number,
        timestamp=0.0,
        session_id="s",
        run_id=run_id,
        attempt_id="attempt",
        root_run_id="root",
        payload=payload,
    )


def whole(session: StoredSession) -> tuple[int, bool, list[bytes], bytes]:
    return (session.revision, session.replayable, list(session.messages), session.state)


@pytest.fixture
def dead() -> Dead:
    return Dead()


async def test_an_interrupted_run_fails_and_its_input_is_kept(dead: Dead) -> None:
    grant = await dead.acquire()
    await dead.open(grant, "r")
    used = Usage(input_tokens=4, output_tokens=2)
    await dead.write(grant, "r", [Custom("x"), ModelComplete("p", "m", used), ModelComplete("p", "m", None)])
    await dead.dies()
    dead.holder = this_process("next-host", "test")
    grant = await dead.acquire()
    session, _ = await end_interrupted_runs(dead.store, grant)
    assert (session.revision, session.replayable) == (1, False)
    assert [decode_message(body).text for body in session.messages] == ["input of r"]
    assert whole(session) == whole(await dead.store.read_session(dead.address))
    record = await dead.store.read_run(WHO, "r")
    assert record is not None
    assert record.outcome is not None
    terminal = decode_event(record.outcome)
    assert isinstance(terminal.payload, RunTerminal)
    result = terminal.payload.result
    assert (result.status, code_of(result)) == ("failed", "interrupted")
    assert (result.usage, result.budget) == (used, None)  # nobody knows what was reserved
    assert result.final_cursor == record.final_cursor == terminal.sequence == EVENT_BLOCK + 2
    assert (terminal.parent_run_id, terminal.root_run_id) == ("parent", "root")
    assert await dead.store.read_open_runs(dead.address) == ()


async def test_no_number_is_used_twice_and_what_was_lost_is_named(dead: Dead) -> None:
    grant = await dead.acquire()
    await dead.open(grant, "r")
    await dead.write(grant, "r", [Custom("x")] * 3)
    await dead.store.append_events(grant.lease, "r", (), reserve_to=2 * EVENT_BLOCK)
    await dead.dies()
    dead.holder = this_process("next-host", "test")
    await end_interrupted_runs(dead.store, await dead.acquire())
    stored = await dead.store.read_events(WHO, "r", 0, 100)
    assert [event.sequence for event in stored] == [1, 2, 3, 2 * EVENT_BLOCK + 1]
    assert decode_event(stored[-1].body).payload == EventsLost(4, 2 * EVENT_BLOCK)


async def test_several_runs_are_ended_oldest_first_and_only_once(dead: Dead) -> None:
    grant = await dead.acquire()
    await dead.open(grant, "first")
    await dead.open(grant, "second")
    grant = await dead.acquire()
    assert len(grant.open_runs) == 2
    session, _ = await end_interrupted_runs(dead.store, grant)
    assert [decode_message(body).text for body in session.messages] == ["input of first", "input of second"]
    assert session.revision == 2
    grant = await dead.acquire()
    assert whole((await end_interrupted_runs(dead.store, grant))[0]) == whole(session)


async def test_the_next_user_of_the_session_sees_it_all(local_runtime: MakeLocalRuntime, dead: Dead) -> None:
    grant = await dead.acquire()
    await dead.open(grant, "r")
    await dead.write(grant, "r", [Custom("x", number) for number in range(5)])
    await dead.dies()
    runtime = local_runtime(driver=trivial, store=dead.engine)
    attached = runtime.attach("r", identity=WHO)
    result = await soon(attached.result())
    assert (result.status, result.reason) == (
        "failed",
        Reason("interrupted", "the process that ran it died; history is as last committed"),
    )
    events = await all_events(attached)
    assert types(events) == ["custom"] * 5 + ["events.lost", "run.terminal"]
    lost = events[5].payload
    assert lost == EventsLost(6, EVENT_BLOCK)
    # A cursor inside the lost range is valid: it goes on behind the range.
    for after in (6, 700, EVENT_BLOCK):
        assert types(await all_events(attached, after=after)) == ["events.lost", "run.terminal"]
    assert types(await all_events(attached, after=3)) == ["custom"] * 2 + ["events.lost", "run.terminal"]
    assert types(await all_events(attached, after=EVENT_BLOCK + 1)) == ["run.terminal"]
    assert (await soon(runtime.run("next", identity=WHO, session_id="s"))).status == "completed"
    assert (await runtime.sessions.read(WHO, "s")).replayable is False


def _queued(run_id: str, digest: str) -> dict[str, object]:
    start = StartRun(run_id=run_id, identity=Identity(tenant_id="a", user_id="b"), session_id="s", input="x")
    return {"queued": True, "start": msgspec.json.encode(QueuedRun(start=start, app_digest=digest))}


async def test_queued_runs_are_kept_for_their_app_and_end_without_it() -> None:
    dead = Dead()
    grant = await dead.acquire()
    await dead.open(grant, "running")
    await dead.open(grant, "first", **_queued("first", "mine"))
    await dead.open(grant, "other", **_queued("other", "another app"))
    await dead.open(grant, "second", **_queued("second", "mine"))
    await dead.dies()
    dead.holder = this_process("next-host", "test")
    grant = await dead.acquire()
    session, kept = await end_interrupted_runs(dead.store, grant, "mine")
    assert [record.run_id for record in kept] == ["first", "second"]
    assert [decode_message(body).text for body in session.messages] == ["input of running"]
    assert session.revision == 1  # the one that ran; those in the queue leave no trace
    ended = await dead.store.read_run(dead.address.identity, "other")
    assert ended is not None
    assert ended.outcome is not None
    payload = decode_event(ended.outcome).payload
    assert isinstance(payload, RunTerminal)
    assert payload.result.reason is not None
    assert (payload.result.status, payload.result.reason.code) == ("failed", "interrupted")
    events = await dead.store.read_events(dead.address.identity, "other", 0, 10)
    lost = decode_event(events[0].body).payload
    assert lost == EventsLost(1, ended.reserved_to)
    assert ended.final_cursor == events[0].sequence + 1


async def test_a_queued_record_that_cannot_be_read_ends() -> None:
    dead = Dead()
    grant = await dead.acquire()
    await dead.open(grant, "broken", queued=True, start=b"no json")
    await dead.dies()
    dead.holder = this_process("next-host", "test")
    _, kept = await end_interrupted_runs(dead.store, await dead.acquire(), "mine")
    assert kept == []
    record = await dead.store.read_run(dead.address.identity, "broken")
    assert record is not None
    assert record.outcome is not None


async def test_a_queued_run_that_was_being_cancelled_is_not_taken_up() -> None:
    """It may have shown an event, whose number must not be used again."""
    dead = Dead()
    grant = await dead.acquire()
    await dead.open(grant, "cancelled", **_queued("cancelled", "mine"))
    await dead.write(grant, "cancelled", [Control("cancel", "not needed")])
    await dead.dies()
    dead.holder = this_process("next-host", "test")
    _, kept = await end_interrupted_runs(dead.store, await dead.acquire(), "mine")
    assert kept == []
    record = await dead.store.read_run(WHO, "cancelled")
    assert record is not None
    assert record.outcome is not None
    events = await dead.store.read_events(WHO, "cancelled", 0, 10)
    assert [event.sequence for event in events] == [1, record.reserved_to + 1]
    assert decode_event(events[1].body).payload == EventsLost(2, record.reserved_to)


async def test_requests_of_a_dead_process_are_cancelled_as_interrupted() -> None:
    """Of runs that had begun or were queued; what was decided stays so, and runs that go on keep theirs."""
    dead = Dead()
    grant = await dead.acquire()
    await dead.open(grant, "running")
    await dead.open(grant, "other", **_queued("other", "another app"))
    await dead.open(grant, "kept", **_queued("kept", "mine"))
    for run_id in ("running", "other", "kept"):
        for name in ("decided", "open"):
            request = approval_of(dead.address, f"{run_id}:{name}", run_id)
            await dead.store.open_approval(grant.lease, request)
        await dead.store.settle_approval(grant.lease, f"{run_id}:decided", "denied", by="ann", at=2.0)
    await dead.dies()
    dead.holder = this_process("next-host", "test")
    await end_interrupted_runs(dead.store, await dead.acquire(), "mine")
    found = (await dead.store.list_approvals(ListApprovals())).approvals
    assert [(entry.approval_id, entry.state, entry.reason, entry.by) for entry in found] == [
        ("running:decided", "denied", "", "ann"),
        ("running:open", "cancelled", "interrupted", ""),
        ("other:decided", "denied", "", "ann"),
        ("other:open", "cancelled", "interrupted", ""),
        ("kept:decided", "denied", "", "ann"),
        ("kept:open", "pending", "", ""),
    ]
