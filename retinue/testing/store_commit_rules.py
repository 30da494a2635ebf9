"""Rules of commits: deltas, revisions, repeats, contents."""

from __future__ import annotations

import asyncio

import msgspec

from retinue.errors import RetinueError
from retinue.store import (
    StoredArtifact,
    StoredEvent,
    StoredSession,
)
from retinue.testing.store_trial import (
    OWNER,
    Trial,
    commit_of,
    expect,
    expect_equal,
    expect_refused,
    outcome_of,
    record_of,
    rule,
)

AWKWARD = (b"", b"\x00", b'"a\\u0000b"', '"naïve 語 😀 \u2028"'.encode(), bytes(range(256)), b"x" * 1_000_000)
"""Contents that a store may not change, cut or refuse."""


@rule
async def commits_append(trial: Trial) -> None:
    """A commit appends messages to history and conversations, and leaves state alone unless it brings one."""
    lease = await trial.lease()
    first = commit_of(
        lease, 0, messages=[b"1", b"2"], conversations={"root": [b"1"], "child": [b"c"]}, state=b'{"a":1}'
    )
    second = commit_of(lease, 1, messages=[b"3"], conversations={"root": [b"2", b"3"]}, replayable=False)
    third = commit_of(lease, 2, state=b'{"b":2}', replayable=False)
    for commit in (first, second):
        await trial.store.commit(commit)
    wanted = StoredSession(
        revision=2,
        replayable=False,
        messages=[b"1", b"2", b"3"],
        conversations={"root": [b"1", b"2", b"3"], "child": [b"c"]},
        state=b'{"a":1}',
    )
    expect_equal(await trial.store.read_session(lease.address), wanted, "after two commits")
    await trial.store.commit(third)
    wanted = msgspec.structs.replace(wanted, revision=3, state=b'{"b":2}')
    expect_equal(await trial.store.read_session(lease.address), wanted, "after a commit of state alone")


@rule
async def a_stale_commit_is_refused_whole(trial: Trial) -> None:
    """A commit from another revision than stands is refused, and nothing of it is stored."""
    lease = await trial.lease()
    await trial.run(lease)
    await trial.store.commit(commit_of(lease, 0, messages=[b"1"]))
    artifact = StoredArtifact(artifact_id="artifact", mime_type="text/plain", data=b"x")
    for base in (0, 2, -1):
        stale = commit_of(
            lease,
            base,
            messages=[b"stale"],
            conversations={"e": [b"stale"]},
            state=b'{"stale":1}',
            artifacts=[artifact],
            events=[StoredEvent(1, b"stale")],
            outcome=outcome_of(),
        )
        await expect_refused("session_conflict", trial.store.commit(stale), f"a commit from revision {base}")
    wanted = StoredSession(revision=1, messages=[b"1"])
    expect_equal(await trial.store.read_session(lease.address), wanted, "what stands")
    expect_equal(await trial.store.read_artifact(lease.address, "artifact"), None, "a refused artifact")
    expect_equal(await trial.store.read_events(OWNER, "run", 0, 10), [], "refused events")
    record = await trial.store.read_run(OWNER, "run")
    expect(record is not None and record.outcome is None, "a refused commit ended its run")


@rule
async def a_repeated_commit_has_no_second_effect(trial: Trial) -> None:
    """A repeat of the last commit has the first answer, also once the lease is lost; an older conflicts."""
    lease = await trial.lease()
    first, second = commit_of(lease, 0, messages=[b"1"]), commit_of(lease, 1, messages=[b"2"])
    expect_equal(
        [await trial.store.commit(first), await trial.store.commit(first)], [1, 1], "a commit and its repeat"
    )
    expect_equal(await trial.store.commit(second), 2, "the next commit")
    await expect_refused("session_conflict", trial.store.commit(first), "a repeat of an older commit")
    await trial.store.release(lease)
    await trial.acquire("next")
    expect_equal(await trial.store.commit(second), 2, "a repeat after the lease was lost")
    wanted = StoredSession(revision=2, messages=[b"1", b"2"])
    expect_equal(await trial.store.read_session(lease.address), wanted, "what stands")


@rule
async def one_of_many_racers_commits(trial: Trial) -> None:
    """Of commits sent at once from one revision, one is stored; sessions beside each other do not disturb."""
    lease = await trial.lease()

    async def race(number: int) -> bool:
        try:
            return await trial.store.commit(commit_of(lease, 0, messages=[b"%d" % number])) == 1
        except RetinueError as error:
            expect_equal(error.code, "session_conflict", "a loser's refusal")
            return False

    async def own(number: int) -> None:
        mine = await trial.lease(f"session {number}")
        for base in range(5):
            revision = await trial.store.commit(commit_of(mine, base, messages=[b"%d" % base]))
            expect_equal(revision, base + 1, "a revision")
        session = await trial.store.read_session(mine.address)
        expect_equal(session.messages, [b"%d" % base for base in range(5)], "a session's history")

    wins, _ = await asyncio.gather(
        asyncio.gather(*(race(number) for number in range(16))),
        asyncio.gather(*(own(number) for number in range(32))),
    )
    expect_equal(sum(wins), 1, "winners")
    expect_equal(len((await trial.store.read_session(lease.address)).messages), 1, "messages of winners")


@rule
async def any_content_comes_back(trial: Trial) -> None:
    """Contents come back byte for byte: empty ones, NUL, all of Unicode, a megabyte."""
    lease = await trial.lease()
    record = msgspec.structs.replace(
        record_of(lease.address, "run"), input=AWKWARD[4], parent_run_id="pa\0rent", start=AWKWARD[4]
    )
    expect_equal(await trial.store.open_run(lease, record), record, "a record")
    expect_equal(await trial.store.read_run(OWNER, "run"), record, "a record that is read")
    other = await trial.run(lease, "run\0")
    expect_equal(await trial.store.read_run(OWNER, "run\0"), other, "the run whose id ends in a NUL")
    events = [StoredEvent(number, body) for number, body in enumerate(AWKWARD, start=1)]
    artifacts = [
        StoredArtifact(artifact_id=f"artifact {number}", mime_type="a/b", data=body)
        for number, body in enumerate(AWKWARD)
    ]
    for base, state in enumerate(AWKWARD):
        await trial.store.commit(
            commit_of(
                lease,
                base,
                messages=AWKWARD,
                conversations={"exe\0cution": AWKWARD},
                state=state,
                events=events,
                artifacts=artifacts,
                outcome=outcome_of(outcome=state),
            )
        )
        stored = await trial.store.read_session(lease.address)
        expect(stored.state == state, "state changed")
        found = await trial.store.read_run(OWNER, "run")
        expect(found is not None and found.outcome == state, "an outcome changed")
    session = await trial.store.read_session(lease.address)
    expect(tuple(session.messages) == AWKWARD * len(AWKWARD), "history changed")
    expect(tuple(session.conversations["exe\0cution"]) == AWKWARD * len(AWKWARD), "a conversation changed")
    expect(tuple(await trial.store.read_events(OWNER, "run", 0, 100)) == tuple(events), "events changed")
    for artifact in artifacts:
        kept = await trial.store.read_artifact(lease.address, artifact.artifact_id)
        expect(kept == artifact, f"{artifact.artifact_id} changed")
