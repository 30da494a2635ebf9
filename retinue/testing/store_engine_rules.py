"""Rules of the engine itself: lists, event loops, statistics, opening and closing."""

from __future__ import annotations

import asyncio
import threading

import msgspec

from retinue.errors import StoreUnavailable
from retinue.store import (
    AcquireLease,
    Committed,
    Lease,
    OpenRun,
    PutArtifacts,
    ReadArtifact,
    ReadSession,
    ReleaseLease,
    RenewLeases,
    Store,
    StoredArtifact,
    StoredEvent,
    StoredSession,
)
from retinue.testing.store_trial import (
    OWNER,
    Trial,
    artifact_of,
    commit_of,
    expect,
    expect_equal,
    expect_refused,
    fork_of,
    live_holder,
    mark_of,
    outcome_of,
    record_of,
    refused_code,
    rule,
    writes_under,
)


@rule
async def a_list_is_done_in_order(trial: Trial) -> None:
    """Replies come in order; an operation sees what those before it wrote; a refused one touches no other."""
    lease = await trial.lease()
    replies = await trial.replies(
        OpenRun(lease=lease, record=record_of(lease.address, "run")),
        commit_of(lease, 0, messages=[b"1"], outcome=outcome_of()),
        commit_of(lease, 0, messages=[b"stale"]),
        ReadSession(address=lease.address),
        commit_of(lease, 1, messages=[b"2"], outcome=outcome_of("no such run")),
        commit_of(lease, 1, messages=[b"2"]),
        AcquireLease(address=lease.address, holder=live_holder("other")),
        ReleaseLease(lease=lease),
        RenewLeases(leases=[lease]),
        AcquireLease(address=lease.address, holder=live_holder("other")),
    )
    codes = [refused_code(reply) for reply in replies]
    wanted = [None, None, "session_conflict", None, "not_found", None, "session_conflict", None, None, None]
    expect_equal(codes, wanted, "the refusals")
    expect_equal(replies[5], Committed(revision=2), "the commit after two refused ones")
    session = await trial.store.read_session(lease.address)
    expect_equal(session.messages, [b"1", b"2"], "history")
    expect_equal(await trial.replies(), [], "the replies to no operation")


@rule
async def nonsense_is_refused_alone(trial: Trial) -> None:
    """Ids that no store can carry are refused as invalid, and nothing else with them."""
    lease = await trial.lease()
    bad = [trial.address("\ud800"), trial.address(tenant="\udfff"), trial.address(user=""), trial.address("")]
    replies = await trial.replies(
        *(AcquireLease(address=address, holder=live_holder("x")) for address in bad),
        *(ReadSession(address=address) for address in bad),
        commit_of(lease, 0, commit_id=""),
        commit_of(lease, 0, conversations={"": [b"x"]}),
        commit_of(lease, 0, conversations={"\ud800": [b"x"]}),
        commit_of(lease, 0, artifacts=[artifact_of("\ud800")]),
        PutArtifacts(lease=lease, artifacts=[artifact_of("fine"), artifact_of("")]),
        OpenRun(lease=lease, record=msgspec.structs.replace(record_of(lease.address, "r"), app="\ud800")),
        fork_of(lease, 0, "\ud800", 0),
        mark_of(lease, 0, why="\ud800"),
        mark_of(lease, 0, at=float("nan")),
        commit_of(lease, 0, messages=[b"1"]),
    )
    wanted = ["invalid_input"] * (len(replies) - 1) + [None]
    expect_equal([refused_code(reply) for reply in replies], wanted, "the refusals")
    expect_equal(await trial.store.list_artifacts(lease.address), [], "artifacts of refused operations")
    for address in bad:
        await expect_refused("invalid_input", trial.store.read_session(address), "a read of a bad address")
    expect_equal((await trial.store.read_session(lease.address)).revision, 1, "the revision")


@rule
async def another_store_is_told_apart(trial: Trial) -> None:
    """An address of another store is refused as unavailable, a lease of another store as lost."""
    address = msgspec.structs.replace(trial.address(), store_id="another store")
    lease = Lease(address=address, epoch=1)
    await trial.lease()
    for what, call in writes_under(trial, lease).items():
        await expect_refused("lease_lost", call(), f"{what} under another store's lease")
    await trial.store.release(lease)
    await expect_refused("store_unavailable", trial.acquire(address=address), "an acquire in another store")
    await expect_refused("store_unavailable", trial.store.read_session(address), "a read of another store")
    replies = await trial.replies(ReadArtifact(address=address, artifact_id="a"))
    expect_equal(refused_code(replies[0]), "store_unavailable", "an artifact of another store")


@rule
async def any_event_loop_may_call(trial: Trial) -> None:
    """Calls may come from several event loops in several threads at once."""
    failures: list[BaseException] = []

    def elsewhere(number: int) -> None:
        async def work() -> None:
            store = Store(trial.engine)
            grant = await store.acquire(trial.address(f"loop {number}"), live_holder(f"loop {number}"))
            for base in range(5):
                await store.commit(commit_of(grant.lease, base, messages=[b"x"]))
            session = await store.read_session(grant.lease.address)
            expect_equal(len(session.messages), 5, "messages of another loop")

        try:
            asyncio.run(work())
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=elsewhere, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        await asyncio.to_thread(thread.join)
    expect(not failures, f"calls from another loop failed: {failures}")


@rule
async def a_cancelled_caller_leaves_the_store_whole(trial: Trial) -> None:
    """A caller that is cancelled may find its commit done or not, but never half of it, and others go on."""
    lease = await trial.lease()
    commit = commit_of(lease, 0, messages=[b"1", b"2"], state=b'{"n":2}')
    call = asyncio.ensure_future(trial.store.commit(commit))
    await asyncio.sleep(0)
    call.cancel()
    await asyncio.wait([call])
    expect_equal(await trial.store.commit(commit), 1, "the commit, repeated by its id")
    wanted = StoredSession(revision=1, messages=[b"1", b"2"], state=b'{"n":2}')
    expect_equal(await trial.store.read_session(lease.address), wanted, "the session")


@rule
async def statistics_count(trial: Trial) -> None:
    """Statistics count writes, commits and reads, and name the store without credentials."""
    lease = await trial.lease()
    await trial.store.commit(commit_of(lease, 0))
    await expect_refused("session_conflict", trial.store.commit(commit_of(lease, 0)), "a stale commit")
    await trial.store.read_session(lease.address)
    found = trial.store.statistics()
    expect_equal((found.writes, found.commits, found.reads, found.queued), (3, 1, 1, 0), "the counts")
    expect(
        1 <= found.transactions <= found.writes,
        f"{found.transactions} transactions for {found.writes} writes",
    )
    expect(bool(found.url) and "@" not in found.url, f"the url {found.url!r}")


@rule
async def a_closed_store_says_so(trial: Trial) -> None:
    """Closing finishes what was accepted; twice is fine; later calls raise that the store is unavailable."""
    lease = await trial.lease()
    pending = [asyncio.ensure_future(trial.store.commit(commit_of(lease, 0)))]
    await asyncio.sleep(0)
    await asyncio.gather(trial.close(), trial.close())
    await trial.close()
    expect_equal(await pending[0], 1, "the commit that was accepted before")
    await expect_refused(
        "store_unavailable", trial.store.commit(commit_of(lease, 1)), "a commit after the end"
    )
    await expect_refused("store_unavailable", trial.store.read_session(lease.address), "a read after the end")
    try:
        await trial.replies(ReadSession(address=lease.address))
    except StoreUnavailable:
        return
    expect(False, "execute must raise StoreUnavailable once closed, not answer")


@rule
async def guarantees_are_true(trial: Trial) -> None:
    """A durable store has everything, and its id, when it is opened again; one that forgot has a new id."""
    guarantees = trial.engine.guarantees
    expect(
        guarantees.single_writer in ("process", "distributed"),
        f"single_writer is {guarantees.single_writer!r}",
    )
    lease = await trial.lease()
    await trial.run(lease)
    await trial.run(lease, "open run")
    artifact = StoredArtifact(artifact_id="a", mime_type="text/plain", data=b"kept")
    last = commit_of(
        lease,
        0,
        messages=[b"1", b"2"],
        conversations={"e": [b"3"]},
        state=b'{"n":1}',
        replayable=False,
        events=[StoredEvent(1, b"one")],
        artifacts=[artifact],
        outcome=outcome_of(),
    )
    await trial.store.commit(last)
    before = await trial.store.read_session(lease.address)
    store_id = trial.engine.store_id
    await trial.close()
    await trial.open()
    if not guarantees.durable:
        expect(trial.engine.store_id != store_id, "a store that forgot everything has its old id")
        return
    expect_equal(trial.engine.store_id, store_id, "the id after opening again")
    expect_equal(await trial.store.read_session(lease.address), before, "the session after opening again")
    expect_equal(await trial.store.read_artifact(lease.address, "a"), artifact, "an artifact")
    expect_equal(await trial.store.read_events(OWNER, "run", 0, 9), [StoredEvent(1, b"one")], "events")
    expect_equal(await trial.store.commit(last), 1, "the last commit, repeated")
    await expect_refused("session_conflict", trial.acquire("other"), "an acquire of a session still held")
    expect_equal(await trial.store.renew([lease]), [True], "the lease")
    await trial.store.release(lease)
    grant = await trial.acquire("other")
    expect(grant.lease.epoch > lease.epoch, "the epoch did not rise")
    expect_equal([record.run_id for record in grant.open_runs], ["open run"], "the open runs")
