"""Rules of sessions as a whole: forks, attestations, deletion."""

from __future__ import annotations

import msgspec

from retinue.store import (
    DeleteSession,
    ListRuns,
    ListSessions,
    Origin,
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
    mark_of,
    outcome_of,
    rule,
    writes_under,
)

HISTORY = (b"1", b'"a\\u0000b"', b"\x00\xff", b"4")


@rule
async def a_fork_begins_with_a_prefix(trial: Trial) -> None:
    """A fork has a prefix of the history, the state or none, an origin, and nothing else; then both go on."""
    lease = await trial.lease()
    await trial.run(lease)
    await trial.store.commit(
        commit_of(
            lease,
            0,
            messages=HISTORY,
            conversations={"run": [b"c"]},
            state=b'{"n":1}',
            replayable=False,
            artifacts=[artifact_of()],
        )
    )
    before = await trial.store.read_session(lease.address)
    with_state = fork_of(lease, 1, "with state", 3)
    await trial.store.fork(with_state)
    await trial.store.fork(fork_of(lease, 1, "empty", 0, keep_state=False))
    await trial.store.fork(fork_of(lease, 1, "whole", 4))
    forked = StoredSession(
        revision=1,
        replayable=False,
        messages=HISTORY[:3],
        state=b'{"n":1}',
        origin=Origin(session_id="session", revision=1, messages=3),
    )
    expect_equal(await trial.store.read_session(with_state.target), forked, "a fork with state")
    empty = StoredSession(
        revision=1, replayable=False, origin=Origin(session_id="session", revision=1, messages=0)
    )
    expect_equal(await trial.store.read_session(trial.address("empty")), empty, "a fork without anything")
    whole = await trial.store.read_session(trial.address("whole"))
    expect_equal(whole.messages, HISTORY, "the history of a whole fork")
    expect_equal(await trial.store.list_artifacts(with_state.target), [], "artifacts of a fork")
    expect_equal(await trial.store.read_session(lease.address), before, "the session that was forked")

    grant = await trial.acquire("heir", with_state.target)
    expect_equal((grant.session, grant.open_runs), (forked, []), "what the fork's first holder gets")
    await trial.store.commit(commit_of(lease, 1, messages=[b"there"]))
    expect_equal(await trial.store.commit(commit_of(grant.lease, 1, messages=[b"here"])), 2, "its revision")
    session = await trial.store.read_session(with_state.target)
    expect_equal(session.messages, [*HISTORY[:3], b"here"], "its history")
    expect_equal(session.origin, forked.origin, "its origin after a commit")
    await trial.store.fork(fork_of(grant.lease, 2, "of a fork", 4))
    second = await trial.store.read_session(trial.address("of a fork"))
    wanted = Origin(session_id="with state", revision=2, messages=4)
    expect_equal((second.messages, second.origin), (session.messages, wanted), "a fork of a fork")


@rule
async def a_fork_is_refused_whole(trial: Trial) -> None:
    """A fork stays with its user, takes what there is, from the revision that stands, to a new session."""
    lease = await trial.lease()
    await trial.store.commit(commit_of(lease, 0, messages=HISTORY))
    good = fork_of(lease, 1, "fork", 2)
    targets = {
        "another tenant": msgspec.structs.replace(good.target, tenant_id="other"),
        "another user": msgspec.structs.replace(good.target, user_id="other"),
        "another store": msgspec.structs.replace(good.target, store_id="other"),
        "no name": msgspec.structs.replace(good.target, session_id=""),
    }
    for what, target in targets.items():
        fork = msgspec.structs.replace(good, target=target)
        await expect_refused("invalid_input", trial.store.fork(fork), f"a fork to {what}")
    for count in (5, -1):
        fork = msgspec.structs.replace(good, keep_messages=count)
        await expect_refused("invalid_input", trial.store.fork(fork), f"a fork of {count} messages of 4")
    for base in (0, 2):
        fork = msgspec.structs.replace(good, base_revision=base)
        await expect_refused("session_conflict", trial.store.fork(fork), f"a fork from revision {base} of 1")
    expect_equal(await trial.store.read_session(good.target), StoredSession(), "what was refused")

    taken = {name: await trial.lease(name) for name in ("committed", "imported", "ran", "filed")}
    await trial.store.commit(commit_of(taken["committed"], 0))
    await trial.store.replace(taken["imported"], [])
    await trial.run(taken["ran"])
    await trial.store.put_artifacts(taken["filed"], [artifact_of()])
    for other in taken.values():
        await trial.store.release(other)
    held = await trial.lease("held")
    for name in [*taken, "held", "session"]:
        await expect_refused("session_conflict", trial.store.fork(fork_of(lease, 1, name, 1)), f"to {name!r}")
    await trial.store.release(held)
    await trial.store.fork(fork_of(lease, 1, "held", 1))
    session = await trial.store.read_session(held.address)
    expect_equal(session.messages, HISTORY[:1], "a fork to a session that was only looked at")
    late = trial.store.commit(commit_of(held, 0))
    await expect_refused("lease_lost", late, "a commit of who looked at the fork's name before")
    again = (await trial.acquire(address=held.address)).lease
    expect(again.epoch > held.epoch, "the fork's epoch is not higher than of who looked before")


@rule
async def a_repeated_fork_has_no_second_effect(trial: Trial) -> None:
    """A repeat by its id gives the first answer, whatever became of fork and lease; another conflicts."""
    lease = await trial.lease()
    await trial.store.commit(commit_of(lease, 0, messages=HISTORY))
    fork = fork_of(lease, 1, "fork", 2)
    replies = await trial.replies(fork, fork)
    expect_equal(replies[0], replies[1], "a fork and its repeat")
    await expect_refused("session_conflict", trial.store.fork(fork_of(lease, 1, "fork", 2)), "another fork")
    grant = await trial.acquire("heir", fork.target)
    await trial.store.commit(commit_of(grant.lease, 1, messages=[b"more"]))
    await trial.store.commit(commit_of(lease, 1))
    await trial.store.release(lease)
    await trial.store.fork(fork)
    session = await trial.store.read_session(fork.target)
    expect_equal((session.revision, session.messages), (2, [*HISTORY[:2], b"more"]), "the fork")
    new = msgspec.structs.replace(fork, target=trial.address("another"))
    await expect_refused("lease_lost", trial.store.fork(new), "a fork under a released lease")


@rule
async def an_attestation_makes_replayable(trial: Trial) -> None:
    """Who vouches for a history, and why, is kept: across commits, in order, until an import."""
    lease = await trial.lease()
    await trial.store.commit(commit_of(lease, 0, messages=[b"1"], state=b'{"n":1}', replayable=False))
    first = mark_of(lease, 1, by="ann\0", why="naïve 語 😀 \u2028")
    expect_equal(
        [await trial.store.mark_replayable(first), await trial.store.mark_replayable(first)],
        [2, 2],
        "an attestation and its repeat",
    )
    wanted = StoredSession(
        revision=2,
        messages=[b"1"],
        state=b'{"n":1}',
        attestations=[first.attestation],
    )
    expect_equal(await trial.store.read_session(lease.address), wanted, "the session")
    for revision in (1, 3):
        call = trial.store.mark_replayable(mark_of(lease, revision))
        await expect_refused(
            "session_conflict", call, f"an attestation of revision {revision}, where 2 stands"
        )
    await trial.store.commit(commit_of(lease, 2, messages=[b"2"], replayable=False))
    second = mark_of(lease, 3)
    await trial.store.mark_replayable(second)
    await trial.store.release(lease)
    session = (await trial.acquire("next")).session
    expect_equal(session.attestations, [first.attestation, second.attestation], "both attestations")
    expect_equal((session.revision, session.replayable), (4, True), "revision and replayable")
    expect_equal(await trial.store.mark_replayable(second), 4, "a repeat after the lease was lost")
    await expect_refused("lease_lost", trial.store.mark_replayable(mark_of(lease, 4)), "a new one")


@rule
async def an_import_forgets_where_history_came_from(trial: Trial) -> None:
    """A replaced session has no attestations and no origin any more, and is not replayable."""
    lease = await trial.lease()
    await trial.store.commit(commit_of(lease, 0, messages=[b"1"]))
    fork = fork_of(lease, 1, "fork", 1)
    await trial.store.fork(fork)
    forked = (await trial.acquire(address=fork.target)).lease
    await trial.store.mark_replayable(mark_of(forked, 1))
    await trial.store.replace(forked, [b'"imported"'])
    imported = StoredSession(revision=0, replayable=False, messages=[b'"imported"'])
    expect_equal(await trial.store.read_session(forked.address), imported, "the session")
    await trial.store.fork(fork)
    expect_equal(await trial.store.read_session(forked.address), imported, "after a late repeat of the fork")
    await trial.store.mark_replayable(mark_of(forked, 0))
    session = await trial.store.read_session(forked.address)
    expect_equal((session.revision, session.replayable), (1, True), "an import that somebody vouches for")
    expect_equal(len(session.attestations), 1, "its attestations")


@rule
async def a_deleted_session_leaves_nothing(trial: Trial) -> None:
    """Deleting removes all that a session keeps, its runs included, and of other sessions nothing."""
    lease, other = await trial.lease(), await trial.lease("other")
    for each, run_id in ((lease, "run"), (other, "other run")):
        await trial.run(each, run_id)
        await trial.store.commit(
            commit_of(
                each,
                0,
                messages=[b"1"],
                conversations={"e": [b"2"]},
                state=b'{"n":1}',
                events=[StoredEvent(1, b"x")],
                artifacts=[artifact_of()],
                outcome=outcome_of(run_id),
            )
        )
        await trial.store.mark_replayable(mark_of(each, 1))
    await trial.run(lease, "open")
    fork = fork_of(lease, 2, "fork", 1)
    await trial.store.fork(fork)
    before = await trial.store.read_session(other.address)
    for _ in range(2):
        await trial.store.delete(lease)
    store = trial.store
    expect_equal(await store.read_session(lease.address), StoredSession(), "the session")
    expect_equal(await store.list_artifacts(lease.address), [], "its artifacts")
    expect_equal(await store.read_artifact(lease.address, "artifact"), None, "an artifact")
    expect_equal(await store.read_open_runs(lease.address), [], "its open runs")
    expect_equal(await store.read_run(OWNER, "run"), None, "its run")
    expect_equal(await store.read_events(OWNER, "run", 0, 9), [], "its events")
    listed = await store.list_sessions(ListSessions())
    expect_equal([session.session_id for session in listed], ["fork", "other"], "the sessions that are left")
    listed_runs = (await store.list_runs(ListRuns())).records
    expect_equal([record.run_id for record in listed_runs], ["other run"], "the runs that are left")
    expect_equal(await store.read_session(other.address), before, "the other session")
    expect_equal(await store.read_events(OWNER, "other run", 0, 9), [StoredEvent(1, b"x")], "its events")
    expect_equal((await store.read_session(fork.target)).messages, [b"1"], "the history of a fork")
    expect_equal(await store.renew([lease, other]), [False, True], "what leases stand")
    grant = await trial.acquire("next")
    expect_equal((grant.session, grant.open_runs), (StoredSession(), []), "a new session of that name")
    await trial.run(grant.lease, "run")
    expect_equal(await store.commit(commit_of(grant.lease, 0)), 1, "its first revision")
    await store.fork(fork_of(other, 2, "again", 1))


@rule
async def nothing_late_reaches_a_new_session(trial: Trial) -> None:
    """A session after a deletion begins above all epochs before: the deleted one's holder is refused."""
    epochs = set()
    old = await trial.lease()
    for number in range(4):
        await trial.store.release(old)
        old = (await trial.acquire(f"holder {number}")).lease
    await trial.run(old)
    late = commit_of(old, 0, messages=[b"late"])
    replies = await trial.replies(DeleteSession(lease=old), late)
    expect(type(replies[0]).__name__ == "Done", f"a deletion was answered {replies[0]!r}")
    for what, call in writes_under(trial, old).items():
        if what != "delete":
            await expect_refused("lease_lost", call(), f"{what} after the deletion")
    new = (await trial.acquire("holder 3")).lease
    expect(new.epoch > old.epoch, f"epoch {new.epoch} was given after {old.epoch} was deleted")
    await trial.run(new)
    for what, call in writes_under(trial, old).items():
        await expect_refused("lease_lost", call(), f"{what} of the deleted one's holder")
    await trial.store.release(old)
    expect_equal(await trial.store.renew([old, new]), [False, True], "what stands")
    expect_equal(await trial.store.read_session(new.address), StoredSession(), "the new session")
    for _ in range(3):
        expect(new.epoch not in epochs, f"epoch {new.epoch} came twice")
        epochs.add(new.epoch)
        await trial.store.delete(new)
        new = await trial.lease()
    await expect_refused("session_conflict", trial.acquire("another"), "an acquire of the new session")
