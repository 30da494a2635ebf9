"""Rules of requests for approval: stored before they are shown, settled once."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from retinue.ids import Identity
from retinue.store import ApprovalStands, DeleteSession, FinishRun, ListApprovals
from retinue.testing.store_trial import (
    OWNER,
    STRANGER,
    Trial,
    approval_of,
    commit_of,
    expect,
    expect_equal,
    expect_refused,
    fork_of,
    outcome_of,
    rule,
)


@rule
async def a_request_for_approval_is_kept_as_it_is(trial: Trial) -> None:
    """A request is stored once and read by its user; a repeat gives what stands, another one is refused."""
    lease = await trial.lease()
    await trial.run(lease)
    approval = approval_of(lease.address, "run:1")
    for _ in range(2):
        expect_equal(await trial.store.open_approval(lease, approval), approval, "the opened request")
    expect_equal(await trial.store.read_approval(OWNER, "run:1"), approval, "the request")
    neighbour = Identity(tenant_id=OWNER.tenant_id, user_id="other")
    for identity, approval_id in ((OWNER, "run:2"), (STRANGER, "run:1"), (neighbour, "run:1")):
        expect_equal(
            await trial.store.read_approval(identity, approval_id), None, "what nobody has asked of them"
        )
    new = msgspec.structs.replace(approval, approval_id="run:3")
    for code, wrong in (
        ("invalid_input", msgspec.structs.replace(approval, request=b"{}")),
        ("invalid_input", msgspec.structs.replace(approval, digest="e" * 64)),
        ("invalid_input", msgspec.structs.replace(approval, session_id="other")),
        ("invalid_input", msgspec.structs.replace(new, state="approved")),
        ("invalid_input", msgspec.structs.replace(new, decided_at=1.0)),
        ("invalid_input", msgspec.structs.replace(new, by="somebody")),
        ("invalid_input", msgspec.structs.replace(new, approval_id="")),
        ("invalid_input", msgspec.structs.replace(new, tool_name="")),
        ("invalid_input", msgspec.structs.replace(new, digest="")),
        ("invalid_input", msgspec.structs.replace(new, expires_at=float("nan"))),
        ("not_found", approval_of(lease.address, "run:4", "none")),
    ):
        await expect_refused(code, trial.store.open_approval(lease, wrong), f"a request that is {code}")
    found = await trial.store.list_approvals(ListApprovals())
    expect_equal(found.approvals, [approval], "the requests after those that were refused")
    settled = await trial.store.settle_approval(lease, "run:1", "approved", by="ann", reason="fine", at=2.5)
    wanted = msgspec.structs.replace(approval, state="approved", by="ann", reason="fine", decided_at=2.5)
    expect_equal(settled, ApprovalStands(approval=wanted, changed=True), "the settled request")
    expect_equal(await trial.store.open_approval(lease, approval), wanted, "a repeat after the settlement")


@rule
async def a_request_belongs_to_one_session(trial: Trial) -> None:
    """A request is settled through its own session only; another user's of the same id is another one."""
    lease, other = await trial.lease(), await trial.lease("other session")
    stranger = (await trial.acquire(address=trial.address(tenant="other"))).lease
    await trial.run(lease)
    await trial.run(other, "other run")
    await trial.run(stranger)
    await trial.store.open_approval(lease, approval_of(lease.address, "run:1"))
    taken = approval_of(other.address, "run:1", "other run")
    await expect_refused(
        "invalid_input", trial.store.open_approval(other, taken), "an id that another session's request has"
    )
    await trial.store.open_approval(stranger, approval_of(stranger.address, "run:1"))
    await expect_refused(
        "not_found",
        trial.store.settle_approval(other, "run:1", "approved", at=1.0),
        "a settlement of another session's request",
    )
    await trial.store.settle_approval(stranger, "run:1", "approved", by="theirs", at=1.0)
    mine = await trial.store.read_approval(OWNER, "run:1")
    theirs = await trial.store.read_approval(STRANGER, "run:1")
    expect_equal(mine and (mine.state, mine.by), ("pending", ""), "the request that nobody settled")
    expect_equal(theirs and (theirs.state, theirs.by), ("approved", "theirs"), "the other tenant's")


@rule
async def a_request_is_settled_once(trial: Trial) -> None:
    """The first settlement counts, whoever comes later; each is answered with what stands."""
    lease = await trial.lease()
    await trial.run(lease)
    await trial.store.open_approval(lease, approval_of(lease.address, "run:1"))
    answers = await asyncio.gather(
        *(
            trial.store.settle_approval(
                lease, "run:1", "approved" if number % 2 else "denied", by=str(number), at=float(number)
            )
            for number in range(12)
        )
    )
    winners = [answer.approval for answer in answers if answer.changed]
    expect_equal(len(winners), 1, "how many settlements changed it")
    expect(all(answer.approval == winners[0] for answer in answers), "an answer does not show what stands")
    again = await trial.store.settle_approval(lease, "run:1", winners[0].state, by="late", at=99.0)
    expect_equal(again, ApprovalStands(approval=winners[0], changed=False), "the same answer again")
    expect_equal(await trial.store.read_approval(OWNER, "run:1"), winners[0], "the request")
    await expect_refused(
        "not_found", trial.store.settle_approval(lease, "run:9", "denied", at=1.0), "an unknown request"
    )
    state: Any
    for state in ("pending", "maybe", None):
        await expect_refused(
            "invalid_input", trial.store.settle_approval(lease, "run:1", state, at=1.0), f"state {state!r}"
        )


@rule
async def requests_are_fenced_like_everything_else(trial: Trial) -> None:
    """Neither a request nor a settlement of a lost lease is taken."""
    lease = await trial.lease()
    await trial.run(lease)
    await trial.store.open_approval(lease, approval_of(lease.address, "run:1"))
    await trial.store.release(lease)
    newer = await trial.lease()
    await expect_refused(
        "lease_lost", trial.store.open_approval(lease, approval_of(lease.address, "run:2")), "a late request"
    )
    await expect_refused(
        "lease_lost", trial.store.settle_approval(lease, "run:1", "approved", at=1.0), "a late settlement"
    )
    settled = await trial.store.settle_approval(newer, "run:1", "denied", at=2.0)
    expect(settled.changed, "the new holder could not settle")


@rule
async def requests_end_with_their_run(trial: Trial) -> None:
    """With a run's outcome its pending requests are cancelled, and no others; later ones are at once."""
    lease = await trial.lease()
    for run_id in ("run", "next", "other"):
        await trial.run(lease, run_id)
        for number in (1, 2):
            await trial.store.open_approval(lease, approval_of(lease.address, f"{run_id}:{number}", run_id))
        await trial.store.settle_approval(lease, f"{run_id}:1", "approved", by="ann", at=2.0)
    ended = msgspec.structs.replace(outcome_of("run"), approvals="the run ended completed")
    commit = commit_of(lease, 0, outcome=ended)
    await expect_refused(
        "session_conflict", trial.store.commit(commit_of(lease, 7, outcome=ended)), "a commit from elsewhere"
    )
    unsettled = await trial.store.read_approval(OWNER, "run:2")
    expect_equal(unsettled and unsettled.state, "pending", "a request after a commit that was refused")
    await trial.store.commit(commit)
    repeated = msgspec.structs.replace(commit, outcome=outcome_of("other"))  # known by its id alone
    expect_equal(await trial.store.commit(repeated), 1, "what a repeat of the commit is answered")
    lost = msgspec.structs.replace(outcome_of("next"), approvals="interrupted")
    await trial.store.finish_run(FinishRun(lease=lease, outcome=lost))
    found = await trial.store.list_approvals(ListApprovals())
    expect_equal(
        [(entry.approval_id, entry.state, entry.reason, entry.by) for entry in found.approvals],
        [
            ("run:1", "approved", "", "ann"),
            ("run:2", "cancelled", "the run ended completed", ""),
            ("next:1", "approved", "", "ann"),
            ("next:2", "cancelled", "interrupted", ""),
            ("other:1", "approved", "", "ann"),
            ("other:2", "pending", "", ""),
        ],
        "the requests",
    )
    late = await trial.store.open_approval(lease, approval_of(lease.address, "run:3"))
    expect_equal(late.state, "cancelled", "the state of a request that came after its run")


@rule
async def requests_are_listed_by_whom_they_concern(trial: Trial) -> None:
    """Requests come oldest first, page by page, of all or of a tenant, user, session or run, by state."""
    asked: list[tuple[str, str]] = []
    for tenant, user, session in (("a", "u", "s"), ("a", "u", "t"), ("a", "v", "s"), ("b", "u", "s")):
        grant = await trial.acquire("holder", trial.address(session, tenant, user))
        run_id = f"run {session}"
        await trial.run(grant.lease, run_id)
        for number in (1, 2):
            approval_id = f"{tenant}{user}{session}:{number}"
            await trial.store.open_approval(
                grant.lease, approval_of(grant.lease.address, approval_id, run_id)
            )
            asked.append((tenant, approval_id))
        await trial.store.settle_approval(grant.lease, asked[-1][1], "denied", at=1.0)
    everything = [approval_id for _, approval_id in asked]
    for question, wanted in (
        (ListApprovals(), everything),
        (ListApprovals(tenant_id="a"), [approval_id for tenant, approval_id in asked if tenant == "a"]),
        (ListApprovals(tenant_id="a", user_id="u"), everything[:4]),
        (ListApprovals(tenant_id="a", user_id="u", session_id="t"), everything[2:4]),
        (ListApprovals(tenant_id="b", user_id="u", session_id="s", run_id="run s"), everything[6:]),
        (ListApprovals(state="pending"), everything[::2]),
        (ListApprovals(tenant_id="a", state="denied"), everything[1:6:2]),
        (ListApprovals(tenant_id="a", user_id="u", session_id="s", run_id="run t"), []),
        (
            ListApprovals(tenant_id="a", user_id="u", session_id="t", run_id="run t", state="denied"),
            everything[3:4],
        ),
        (ListApprovals(tenant_id="a", user_id="u", session_id="t", state="pending"), everything[2:3]),
        (ListApprovals(tenant_id="a", state="pending"), everything[:5:2]),
        (ListApprovals(tenant_id="a", user_id="u", state="pending"), everything[:4:2]),
        (ListApprovals(tenant_id="a", user_id="u", state="denied"), everything[1:4:2]),
        (ListApprovals(tenant_id="a", user_id="v", state="approved"), []),
        (ListApprovals(state="denied"), everything[1::2]),
        (ListApprovals(tenant_id="nobody"), []),
        (ListApprovals(limit=0), []),
    ):
        for limit in {question.limit, min(question.limit, 3), min(question.limit, 1)}:
            found: list[str] = []
            page = msgspec.structs.replace(question, limit=limit)
            while True:
                reply = await trial.store.list_approvals(page)
                expect(len(reply.approvals) <= max(0, limit), "a page is longer than was asked")
                found += [entry.approval_id for entry in reply.approvals]
                if reply.next is None:
                    break
                page = msgspec.structs.replace(page, after=reply.next)
            expect_equal(found, wanted, f"{question} in pages of {limit}")
    no_state: Any = "maybe"
    for wrong in (
        ListApprovals(user_id="u"),
        ListApprovals(tenant_id="a", session_id="s"),
        ListApprovals(tenant_id="a", user_id="u", run_id="run"),
        ListApprovals(state=no_state),
    ):
        await expect_refused("invalid_input", trial.store.list_approvals(wrong), f"{wrong}")


@rule
async def requests_are_deleted_with_their_session(trial: Trial) -> None:
    """Nothing of a deleted session's requests is left, and a later session may use their ids."""
    lease = await trial.lease()
    await trial.run(lease)
    await trial.store.open_approval(lease, approval_of(lease.address, "run:1"))
    other = (await trial.acquire("holder", trial.address("other"))).lease
    await trial.run(other, "kept")
    await trial.store.open_approval(other, approval_of(other.address, "kept:1", "kept"))
    await trial.replies(DeleteSession(lease=lease))
    expect_equal(await trial.store.read_approval(OWNER, "run:1"), None, "a deleted session's request")
    found = await trial.store.list_approvals(ListApprovals())
    expect_equal([entry.approval_id for entry in found.approvals], ["kept:1"], "what is left")
    again = await trial.lease()
    await trial.run(again)
    reopened = await trial.store.open_approval(again, approval_of(again.address, "run:1"))
    expect_equal(reopened.state, "pending", "a new session's request")


@rule
async def a_fork_has_no_requests(trial: Trial) -> None:
    """A fork takes no request along, and what becomes of it does not touch the other's."""
    lease = await trial.lease()
    await trial.run(lease)
    await trial.store.open_approval(lease, approval_of(lease.address, "run:1"))
    await trial.store.commit(commit_of(lease, 0, messages=[b"1"]))
    fork = fork_of(lease, 1, "fork", 1)
    await trial.store.fork(fork)
    scope = ListApprovals(tenant_id=OWNER.tenant_id, user_id=OWNER.user_id)
    of_fork = msgspec.structs.replace(scope, session_id="fork")
    expect_equal((await trial.store.list_approvals(of_fork)).approvals, [], "a fork's requests")
    grant = await trial.acquire("heir", fork.target)
    await trial.store.delete(grant.lease)
    left = (await trial.store.list_approvals(scope)).approvals
    expect_equal([(entry.approval_id, entry.state) for entry in left], [("run:1", "pending")], "what is left")
