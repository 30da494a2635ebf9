"""Rules of runs, their events, and artifacts."""

from __future__ import annotations

import msgspec

from retinue.ids import Identity
from retinue.store import (
    FinishRun,
    StoredArtifact,
    StoredEvent,
)
from retinue.testing.store_trial import (
    OWNER,
    STRANGER,
    WRITES_OF_A_RUN,
    Trial,
    artifact_of,
    commit_of,
    expect,
    expect_equal,
    expect_refused,
    outcome_of,
    record_of,
    rule,
    writes_under,
)


@rule
async def opening_a_run_twice_is_once(trial: Trial) -> None:
    """A repeat of a run's opening gives back what stands, its outcome included."""
    lease = await trial.lease()
    record = await trial.run(lease)
    expect_equal(record, record_of(lease.address, "run"), "the first answer")
    later = msgspec.structs.replace(record, input=b'"changed"', app="changed")
    expect_equal(await trial.store.open_run(lease, later), record, "the answer to a repeat")
    await trial.store.finish_run(FinishRun(lease=lease, outcome=outcome_of()))
    ended = msgspec.structs.replace(record, outcome=outcome_of().outcome, final_cursor=5)
    expect_equal(await trial.store.open_run(lease, later), ended, "the answer to a repeat after the end")
    expect_equal(await trial.store.read_run(OWNER, "run"), ended, "the record")


@rule
async def a_run_belongs_to_one_session(trial: Trial) -> None:
    """A run is written through its own session only, and read by its own identity only."""
    lease, other = await trial.lease(), await trial.lease("other session")
    stranger = (await trial.acquire(address=trial.address(tenant="other"))).lease
    await trial.run(lease)
    await expect_refused(
        "invalid_input",
        trial.store.open_run(other, record_of(lease.address, "x")),
        "a record of another session",
    )
    await expect_refused("invalid_input", trial.run(other), "a run id that another session has")
    expect_equal((await trial.run(stranger)).tenant_id, "other", "the same run id of another tenant")
    await trial.store.append_events(stranger, "run", [StoredEvent(1, b"theirs")])
    calls = writes_under(trial, other)
    for what in WRITES_OF_A_RUN:
        await expect_refused("not_found", calls[what](), f"{what} of another session's run")
    expect_equal(
        (await trial.store.read_session(other.address)).revision, 0, "revision after a refused commit"
    )
    expect_equal(await trial.store.read_events(OWNER, "run", 0, 10), [], "events of the run")
    expect_equal(
        await trial.store.read_events(STRANGER, "run", 0, 10), [StoredEvent(1, b"theirs")], "the others"
    )
    nobody = Identity(tenant_id="tenant", user_id="nobody")
    expect_equal(await trial.store.read_run(nobody, "run"), None, "another user's view")
    expect_equal(await trial.store.read_events(nobody, "run", 0, 10), [], "events of another user's view")


@rule
async def an_outcome_ends_a_run(trial: Trial) -> None:
    """An outcome comes with a commit or alone, replaces an earlier one, and makes the run no open one."""
    lease = await trial.lease()
    for run_id in ("first", "second", "third"):
        await trial.run(lease, run_id)
    await trial.store.commit(
        commit_of(
            lease,
            0,
            events=[StoredEvent(2, b"b"), StoredEvent(1, b"a")],
            outcome=outcome_of("first", cursor=3),
        )
    )
    await trial.store.finish_run(FinishRun(lease=lease, outcome=outcome_of("third", b"1")))
    open_runs = await trial.store.read_open_runs(lease.address)
    expect_equal([record.run_id for record in open_runs], ["second"], "the open runs")
    expect_equal((await trial.store.read_session(lease.address)).revision, 1, "the revision")
    replaced = FinishRun(
        lease=lease, outcome=outcome_of("first", b'"late cancel"', cursor=4), events=[StoredEvent(3, b"c")]
    )
    for _ in range(2):
        await trial.store.finish_run(replaced)
    record = await trial.store.read_run(OWNER, "first")
    expect(record is not None and record.outcome == b'"late cancel"', "the outcome was not replaced")
    expect(record is not None and record.final_cursor == 4, "the final cursor was not replaced")
    wanted = [StoredEvent(1, b"a"), StoredEvent(2, b"b"), StoredEvent(3, b"c")]
    expect_equal(await trial.store.read_events(OWNER, "first", 0, 10), wanted, "the events")
    await expect_refused(
        "invalid_input",
        trial.store.commit(commit_of(lease, 1, events=[StoredEvent(1, b"x")])),
        "a commit of events without their run",
    )


@rule
async def a_queued_run_waits_until_it_begins(trial: Trial) -> None:
    """A queued run keeps what it was started with; it is open, in the order of opening, until it ends."""
    lease = await trial.lease()
    queued = [
        msgspec.structs.replace(record_of(lease.address, run_id), queued=True, start=start)
        for run_id, start in (("z", b'{"if_busy":"queue"}'), ("a", bytes(range(256))), ("m", b""))
    ]
    await trial.run(lease)
    for record in queued:
        expect_equal(await trial.store.open_run(lease, record), record, "the record of a queued run")
    for _ in range(2):
        await trial.store.begin_run(lease, "z")
    begun = msgspec.structs.replace(queued[0], queued=False)
    expect_equal(
        await trial.store.open_run(lease, queued[0]), begun, "a repeat of its opening, once it began"
    )
    expect_equal(await trial.store.read_run(OWNER, "z"), begun, "the run that began")
    await trial.store.release(lease)
    grant = await trial.acquire("next")
    wanted = [record_of(lease.address, "run"), begun, *queued[1:]]
    expect_equal(grant.open_runs, wanted, "the open runs")
    cancelled = FinishRun(lease=grant.lease, outcome=outcome_of("a", b'"cancelled in the queue"', cursor=2))
    await trial.store.finish_run(cancelled)
    await trial.store.begin_run(grant.lease, "m")
    wanted = [record_of(lease.address, "run"), begun, msgspec.structs.replace(queued[2], queued=False)]
    expect_equal(await trial.store.read_open_runs(lease.address), wanted, "what is open after a cancel")
    await expect_refused(
        "not_found", trial.store.begin_run(grant.lease, "none"), "the begin of an unknown run"
    )


@rule
async def an_event_is_stored_once(trial: Trial) -> None:
    """A number that stands is left alone; reserved numbers only rise; pages are in order and end."""
    lease = await trial.lease()
    await trial.run(lease)
    await trial.store.append_events(
        lease, "run", [StoredEvent(number, b"%d" % number) for number in (3, 1, 2)], 2048
    )
    await trial.store.append_events(lease, "run", [StoredEvent(2, b"again"), StoredEvent(5, b"5")], 100)
    await trial.store.append_events(lease, "run", [])
    record = await trial.store.read_run(OWNER, "run")
    expect_equal(record and record.reserved_to, 2048, "the reserved numbers")
    wanted = [StoredEvent(number, b"%d" % number) for number in (1, 2, 3, 5)]
    expect_equal(await trial.store.read_events(OWNER, "run", 0, 100), wanted, "all events")
    expect_equal(await trial.store.read_events(OWNER, "run", 1, 2), wanted[1:3], "a page")
    expect_equal(await trial.store.read_events(OWNER, "run", 3, 2), wanted[3:], "the last page")
    expect_equal(await trial.store.read_events(OWNER, "run", 5, 2), [], "a page after the last")
    expect_equal(await trial.store.read_events(OWNER, "run", 0, 0), [], "a page of no events")
    expect_equal(await trial.store.read_events(OWNER, "no such run", 0, 9), [], "events of an unknown run")


@rule
async def an_artifact_is_its_sessions_own(trial: Trial) -> None:
    """An artifact is read with its full address only, and stays as it was first stored."""
    lease = await trial.lease()
    await trial.run(lease)
    first = StoredArtifact(artifact_id="a", mime_type="text/plain", data=b"first")
    second = StoredArtifact(artifact_id="b", mime_type="text/plain", data=b"second")
    await trial.store.commit(commit_of(lease, 0, artifacts=[first]))
    changed = StoredArtifact(artifact_id="a", mime_type="text/html", data=b"changed")
    await trial.store.finish_run(FinishRun(lease=lease, outcome=outcome_of(), artifacts=[changed, second]))
    expect_equal(await trial.store.read_artifact(lease.address, "a"), first, "the first")
    expect_equal(await trial.store.read_artifact(lease.address, "b"), second, "the second")
    for other in (trial.address("other"), trial.address(tenant="other"), trial.address(user="other")):
        expect_equal(await trial.store.read_artifact(other, "a"), None, f"what {other.session_key} sees")
    await trial.store.put_artifacts(lease, [changed, artifact_of("c"), artifact_of("0"), artifact_of("é\0")])
    await trial.store.put_artifacts(lease, [])
    expect_equal(await trial.store.read_artifact(lease.address, "c"), artifact_of("c"), "one put beside")
    expect_equal((await trial.store.read_session(lease.address)).revision, 1, "the revision")
    await trial.store.replace(lease, [])
    expect_equal(await trial.store.read_artifact(lease.address, "a"), first, "the first, after an import")
    ids = ["0", "a", "b", "c", "é\0"]
    expect_equal(await trial.store.list_artifacts(lease.address), ids, "the ids")
    expect_equal(await trial.store.list_artifacts(trial.address("other")), [], "another session's ids")
