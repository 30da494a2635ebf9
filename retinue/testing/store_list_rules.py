"""Rules of the lists that operators and users page through."""

from __future__ import annotations

import msgspec

from retinue.store import (
    PAGE_LIMIT,
    FinishRun,
    ListRuns,
    ListSessions,
    OpenRun,
    RunRecord,
    SessionSummary,
)
from retinue.testing.store_trial import (
    Trial,
    commit_of,
    expect,
    expect_equal,
    expect_refused,
    outcome_of,
    record_of,
    rule,
)

TRIPLES = [
    ("A", "u", "s"), ("a", "u", "s"), ("a", "u", "s\0"), ("a", "u", "s\0a"), ("a", "u", "t"),
    ("a", "u\0", "a"), ("a", "é", "a"), ("a\0", "u", "s"), ("ab", "u", "s"),
    ("\uffff", "u", "s"), ("😀", "u", "s"),
]  # fmt: skip
"""Tenants, users and sessions in their order, which is that of Unicode's numbers."""

Triple = tuple[str, str, str]


@rule
async def sessions_are_listed_in_order(trial: Trial) -> None:
    """Sessions come in the order of tenant, user and session id, each once, page by page, and end."""
    for tenant, user, session in reversed(TRIPLES):
        await trial.acquire("holder", trial.address(session, tenant, user))
    for limit in (1, 3, len(TRIPLES), 100):
        expect_equal(await _triples(trial, ListSessions(limit=limit)), TRIPLES, f"pages of {limit}")
    of_tenant = [triple for triple in TRIPLES if triple[0] == "a"]
    of_user = [triple for triple in of_tenant if triple[1] == "u"]
    for limit in (1, 100):
        question = ListSessions(tenant_id="a", limit=limit)
        expect_equal(await _triples(trial, question), of_tenant, f"a tenant's in pages of {limit}")
        question = ListSessions(tenant_id="a", user_id="u", limit=limit)
        expect_equal(await _triples(trial, question), of_user, f"a user's in pages of {limit}")
    scope = ListSessions(tenant_id="a", user_id="u")
    afters = {("A", "z", "z"): of_user, ("a", "t", "z"): of_user, ("a", "u", "s"): of_user[1:],
              ("a", "v", ""): [], ("b", "", ""): []}  # fmt: skip
    for after, wanted in afters.items():
        question = msgspec.structs.replace(scope, after=after)
        expect_equal(await _triples(trial, question), wanted, f"a user's after {after}")
    for limit in (0, -1):
        found = await trial.store.list_sessions(ListSessions(limit=limit))
        expect_equal(found, [], f"a page of {limit}")
    expect_equal(await _triples(trial, ListSessions(tenant_id="nobody")), [], "an unknown tenant's")
    for bad in (
        ListSessions(user_id="u"),
        ListSessions(tenant_id=""),
        ListSessions(tenant_id="a", user_id=""),
    ):
        await expect_refused("invalid_input", trial.store.list_sessions(bad), repr(bad))


async def _triples(trial: Trial, question: ListSessions) -> list[Triple]:
    """All that a question finds, page by page."""
    found: list[Triple] = []
    while True:
        page = await trial.store.list_sessions(question)
        expect(len(page) <= max(question.limit, 0), f"a page of {question.limit} has {len(page)}")
        found += [(entry.tenant_id, entry.user_id, entry.session_id) for entry in page]
        if len(page) < question.limit:
            return found
        question = msgspec.structs.replace(question, after=found[-1])


@rule
async def a_listed_session_is_summed_up(trial: Trial) -> None:
    """A list tells revision, messages, runs and holder of a session as they are, without its content."""
    lease = await trial.lease()
    for run_id in ("ended", "open", "also open"):
        await trial.run(lease, run_id)
    await trial.store.commit(
        commit_of(
            lease,
            0,
            messages=[b"1", b"2"],
            conversations={"e": [b"3"]},
            replayable=False,
            outcome=outcome_of("ended"),
        )
    )
    wanted = SessionSummary(
        tenant_id="tenant",
        user_id="user",
        session_id="session",
        revision=1,
        replayable=False,
        messages=2,
        runs=3,
        open_runs=2,
        holder_id="holder",
    )
    expect_equal(await trial.store.list_sessions(ListSessions()), [wanted], "a session that is held")
    await trial.store.release(lease)
    wanted = msgspec.structs.replace(wanted, holder_id=None)
    question = ListSessions(tenant_id="tenant", user_id="user")
    expect_equal(await trial.store.list_sessions(question), [wanted], "a session that nobody holds")
    empty = (await trial.acquire("reader", trial.address("empty", tenant="t2"))).lease
    wanted = SessionSummary(
        tenant_id="t2",
        user_id="user",
        session_id="empty",
        revision=0,
        replayable=True,
        messages=0,
        runs=0,
        open_runs=0,
        holder_id="reader",
    )
    question = ListSessions(tenant_id=empty.address.tenant_id)
    expect_equal(await trial.store.list_sessions(question), [wanted], "a session without anything")


@rule
async def runs_are_listed_newest_first(trial: Trial) -> None:
    """Runs come newest first, page by page, of all, a tenant, a user or a session; open ones alone too."""
    addresses = [
        trial.address("one"), trial.address("two"), trial.address("one", user="other"),
        trial.address("one", tenant="other"),
    ]  # fmt: skip
    leases = [(await trial.acquire(address=address)).lease for address in addresses]
    opened: list[RunRecord] = []
    for number in range(12):
        lease = leases[number % 4]
        record = await trial.run(lease, f"run {number}")
        if number % 3 == 0:
            outcome = outcome_of(record.run_id)
            await trial.store.finish_run(FinishRun(lease=lease, outcome=outcome))
            record = msgspec.structs.replace(
                record, outcome=outcome.outcome, final_cursor=outcome.final_cursor
            )
        opened.insert(0, record)
    scopes = [
        ListRuns(),
        ListRuns(tenant_id="tenant"),
        ListRuns(tenant_id="tenant", user_id="user"),
        ListRuns(tenant_id="tenant", user_id="user", session_id="one"),
        ListRuns(tenant_id="other", user_id="user", session_id="one"),
        ListRuns(tenant_id="other", user_id="user", session_id="none"),
    ]
    for scope in scopes:
        for open_only in (False, True):
            wanted = [
                record
                for record in opened
                if scope.tenant_id in (None, record.tenant_id)
                and scope.user_id in (None, record.user_id)
                and scope.session_id in (None, record.session_id)
                and not (open_only and record.outcome is not None)
            ]
            for limit in (1, 2, 3, 100):
                question = msgspec.structs.replace(scope, open_only=open_only, limit=limit)
                expect_equal(await _runs(trial, question), wanted, f"what {question} finds")
    page = await trial.store.list_runs(ListRuns(limit=0))
    expect_equal((page.records, page.next), ([], None), "a page of none")
    newer = await trial.store.list_runs(ListRuns(limit=4))
    await trial.run(leases[0], "newest")
    older = await trial.store.list_runs(ListRuns(limit=4, before=newer.next))
    expect_equal([*newer.records, *older.records], opened[:8], "two pages with a run opened between them")
    for bad in (
        ListRuns(user_id="user"),
        ListRuns(tenant_id="tenant", session_id="one"),
        ListRuns(session_id="one"),
        ListRuns(tenant_id="tenant", user_id="user", session_id=""),
    ):
        await expect_refused("invalid_input", trial.store.list_runs(bad), repr(bad))


async def _runs(trial: Trial, question: ListRuns) -> list[RunRecord]:
    """All that a question finds, page by page; only the last page is shorter, or has no next."""
    found: list[RunRecord] = []
    while True:
        page = await trial.store.list_runs(question)
        found += page.records
        if page.next is None:
            return found
        expect_equal(len(page.records), question.limit, "the entries of a page that another follows")
        question = msgspec.structs.replace(question, before=page.next)


@rule
async def a_page_is_bounded(trial: Trial) -> None:
    """A page has at most its bound of entries, whatever is asked for, and the rest comes after it."""
    lease = await trial.lease()
    await trial.replies(
        *(
            OpenRun(lease=lease, record=record_of(lease.address, f"run {number}"))
            for number in range(PAGE_LIMIT + 1)
        )
    )
    page = await trial.store.list_runs(ListRuns(limit=10**9))
    expect_equal(len(page.records), PAGE_LIMIT, "entries of one page")
    rest = await trial.store.list_runs(ListRuns(limit=10**9, before=page.next))
    expect_equal([record.run_id for record in rest.records], ["run 0"], "the rest")
    expect_equal(rest.next, None, "what follows the rest")
