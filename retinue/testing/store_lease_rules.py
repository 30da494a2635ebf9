"""Rules of sessions and their leases: who may write, and who no longer."""

from __future__ import annotations

import asyncio

import msgspec

from retinue.errors import RetinueError
from retinue.store import (
    LEASE_PERIOD,
    Lease,
    StoredSession,
)
from retinue.testing.store_trial import (
    Trial,
    commit_of,
    expect,
    expect_equal,
    expect_refused,
    outcome_of,
    rule,
    writes_under,
)


@rule
async def c1_second_acquire_conflicts(trial: Trial) -> None:
    """One lease held, a second acquire of the same session is refused; after release it succeeds."""
    first = await trial.acquire("first")
    error = await expect_refused("session_conflict", trial.acquire("second"), "a second acquire")
    expect_equal(error.data.get("holder"), "first", "the refusal's holder")
    wait = error.data.get("retry_after")
    expect(isinstance(wait, float) and 0 < wait <= LEASE_PERIOD, f"retry_after is {wait!r}")
    await trial.store.release(first.lease)
    second = await trial.acquire("second")
    expect(second.lease.epoch > first.lease.epoch, "the epoch did not rise after a release")


@rule
async def c2_tenants_are_separate(trial: Trial) -> None:
    """The same user and session id under two tenants are two sessions; the one does not see the other."""
    here = await trial.acquire("here")
    there = await trial.acquire("there", trial.address(tenant="other"))
    await trial.store.commit(commit_of(here.lease, 0, messages=[b'"mine"'], state=b'{"a":1}'))
    expect_equal(
        await trial.store.read_session(there.lease.address), StoredSession(), "the other tenant's session"
    )
    expect_equal(await trial.store.commit(commit_of(there.lease, 0)), 1, "the other tenant's revision")


@rule
async def c4_unknown_session_has_defaults(trial: Trial) -> None:
    """An unknown session reads as no history, empty state, revision 0, replayable, no conversations."""
    for session in (await trial.store.read_session(trial.address()), (await trial.acquire()).session):
        expect_equal(session.messages, (), "history")
        expect_equal(session.conversations, {}, "conversations")
        expect_equal(session.state, b"{}", "state")
        expect_equal((session.revision, session.replayable), (0, True), "revision and replayable")


@rule
async def c5_commits_count_up(trial: Trial) -> None:
    """Two commits have revisions 1 and 2."""
    lease = await trial.lease()
    expect_equal(await trial.store.commit(commit_of(lease, 0)), 1, "the first commit")
    expect_equal(await trial.store.commit(commit_of(lease, 1)), 2, "the second commit")
    expect_equal((await trial.store.read_session(lease.address)).revision, 2, "what stands")


@rule
async def c7_released_lease_is_spent(trial: Trial) -> None:
    """A released lease writes nothing more; a second release does nothing, also to a newer holder."""
    old = (await trial.acquire("old")).lease
    await trial.run(old)
    await trial.store.release(old)
    for what, call in writes_under(trial, old).items():
        await expect_refused("lease_lost", call(), f"{what} under a released lease")
    newer = (await trial.acquire("newer")).lease
    for what, call in writes_under(trial, old).items():
        await expect_refused("lease_lost", call(), f"{what} under a lease that a newer one followed")
    await trial.store.release(old)
    await expect_refused("session_conflict", trial.acquire("third"), "an acquire after the second release")
    expect_equal(await trial.store.commit(commit_of(newer, 0)), 1, "the newer holder's commit")


@rule
async def c8_replaced_history_is_for_display(trial: Trial) -> None:
    """A replaced session has that history, no state, revision 0, and is not replayable; then it goes on."""
    lease = await trial.lease()
    full = commit_of(lease, 0, messages=[b'"old"'], conversations={"e": [b'"old"']}, state=b'{"a":1}')
    await trial.store.commit(full)
    await trial.store.replace(lease, [b'"imported"'])
    imported = StoredSession(revision=0, replayable=False, messages=[b'"imported"'])
    expect_equal(await trial.store.read_session(lease.address), imported, "the imported session")
    expect_equal(await trial.store.commit(full), 1, "the answer to a late repeat of the commit before it")
    revision = await trial.store.commit(commit_of(lease, 0, messages=[b'"new"'], replayable=False))
    expect_equal(revision, 1, "the revision after an import")
    session = await trial.store.read_session(lease.address)
    expect_equal(session.messages, [b'"imported"', b'"new"'], "history after an import")


@rule
async def c11_ids_never_collide(trial: Trial) -> None:
    """Ids that would be alike if they were joined are separate sessions."""
    triples = [
        ("a", "b:c", "s"), ("a:b", "c", "s"), ("a", "b", "c:s"), ("a/b", "c", "s"), ("a", "b/c", "s"),
        ('a","b', "c", "s"), ("a", 'b","c', "s"), ("a\0b", "c", "s"), ("a", "\0bc", "s"), ("A", "b:c", "s"),
        ("a ", "b:c", "s"), ("é", "u", "s"), ("e\u0301", "u", "s"),
    ]  # fmt: skip
    addresses = [trial.address(session, tenant, user) for tenant, user, session in triples]
    for number, address in enumerate(addresses):
        lease = (await trial.acquire(f"holder {number}", address)).lease
        await trial.store.commit(commit_of(lease, 0, messages=[b"%d" % number]))
    for number, address in enumerate(addresses):
        session = await trial.store.read_session(address)
        expect_equal(session.messages, [b"%d" % number], f"the history of {triples[number]}")


@rule
async def the_epoch_always_rises(trial: Trial) -> None:
    """Every grant has a higher epoch; a holder that acquires again loses its own older lease."""
    first = (await trial.acquire("same")).lease
    second = (await trial.acquire("same")).lease
    expect(second.epoch > first.epoch, "the same holder's second epoch is not higher")
    await expect_refused(
        "lease_lost", trial.store.commit(commit_of(first, 0)), "a commit with the older epoch"
    )
    expect_equal(await trial.store.renew([first, second]), [False, True], "what stands")
    await trial.store.release(first)
    expect_equal(await trial.store.commit(commit_of(second, 0)), 1, "a commit after the older one's release")


@rule
async def a_grant_has_all_that_is_stored(trial: Trial) -> None:
    """A grant brings the session as last committed and the runs that never ended, oldest first."""
    lease = await trial.lease()
    for run_id in ("run z", "run a", "run m"):
        await trial.run(lease, run_id)
    await trial.store.commit(
        commit_of(lease, 0, messages=[b"1"], state=b'{"n":1}', outcome=outcome_of("run a"))
    )
    await trial.store.release(lease)
    grant = await trial.acquire("next")
    expect_equal(grant.session, StoredSession(revision=1, messages=[b"1"], state=b'{"n":1}'), "the session")
    expect_equal([record.run_id for record in grant.open_runs], ["run z", "run m"], "the open runs")


@rule
async def leases_are_renewed_together(trial: Trial) -> None:
    """One message renews many leases and says for each whether it stands."""
    standing = [await trial.lease(f"session {number}") for number in range(3)]
    released = await trial.lease("released")
    await trial.store.release(released)
    unknown = Lease(address=trial.address("unknown"), epoch=1)
    foreign = Lease(address=msgspec.structs.replace(standing[0].address, store_id="another"), epoch=1)
    future = Lease(address=standing[0].address, epoch=standing[0].epoch + 1)
    found = await trial.store.renew(
        [standing[0], released, unknown, standing[1], foreign, future, standing[2]]
    )
    expect_equal(found, [True, False, False, True, False, False, True], "what stands")
    expect_equal(await trial.store.renew([]), [], "a renewal of nothing")


@rule
async def a_fenced_holder_can_do_nothing(trial: Trial) -> None:
    """Fencing ends all leases of a holder, and no other; nothing it sends later is accepted."""
    dead = [(await trial.acquire("dead", trial.address(f"session {number}"))).lease for number in range(3)]
    alive = (await trial.acquire("alive", trial.address("session 3"))).lease
    await trial.run(dead[0])
    fenced = await trial.store.fence("dead")
    expect_equal(
        {address.session_id for address in fenced}, {f"session {number}" for number in range(3)}, "fenced"
    )
    for what, call in writes_under(trial, dead[0]).items():
        await expect_refused("lease_lost", call(), f"{what} of a fenced holder")
    late = trial.acquire("dead", trial.address("session 4"))
    await expect_refused("lease_lost", late, "an acquire of a fenced holder")
    expect_equal(await trial.store.renew([*dead, alive]), [False, False, False, True], "what stands")
    expect_equal(await trial.store.fence("dead"), [], "what a repeat fences")
    expect_equal(await trial.store.fence("never seen"), [], "what an unknown holder had")
    grant = await trial.acquire("heir", dead[0].address)
    expect(grant.lease.epoch > dead[0].epoch, "the heir's epoch is not higher")
    expect_equal([record.run_id for record in grant.open_runs], ["run"], "the runs that the dead left open")


@rule
async def one_of_many_contenders_has_the_lease(trial: Trial) -> None:
    """Of holders that acquire at once, one is granted."""

    async def contend(number: int) -> bool:
        try:
            await trial.acquire(f"holder {number}")
        except RetinueError as error:
            expect_equal(error.code, "session_conflict", "a loser's refusal")
            return False
        return True

    granted = await asyncio.gather(*(contend(number) for number in range(16)))
    expect_equal(sum(granted), 1, "grants")
