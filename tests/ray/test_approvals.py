"""Approvals where sessions are actors: asked in a child host, decided elsewhere, over when processes die."""

from __future__ import annotations

import asyncio

import pytest

from retinue import Approval, ApprovalRequest, Approvals, Grants, Identity, RunHandle, Runtime
from retinue.errors import InputError, NotFound
from retinue.events import ApprovalRequested, ApprovalResolved
from tests.ray.approval_drivers import Pays
from tests.ray.conftest import MakeRuntime
from tests.ray.drivers import Parent, Ticker
from tests.ray.test_faults import kill, pids, until

TIMEOUT = 60
ASKS = {"grants": Grants(tool_ids=["pay"]), "approvals": Approvals(require="all")}


def requests_of(handle: RunHandle, count: int) -> list[ApprovalRequest]:
    found: list[ApprovalRequest] = []
    for event in handle.iter_events(types=["tool.approval.request"]):
        assert isinstance(event.payload, ApprovalRequested)
        found.append(event.payload.request)
        if len(found) == count:
            return sorted(found, key=lambda request: request.agent_name)
    pytest.fail(f"the run ended with {len(found)} requests")


@pytest.fixture
def elsewhere(make_runtime: MakeRuntime) -> Runtime:
    """Another app, as another process has it: who decides needs no app of the run."""
    return make_runtime(driver=Ticker(events=1))


def test_a_delegates_call_is_listed_and_decided_from_elsewhere(
    make_runtime: MakeRuntime, elsewhere: Runtime, identity: Identity
) -> None:
    runtime = make_runtime(driver=Parent(delegates=((Pays(), "1"), (Pays(), "2"))), **ASKS)
    handle = runtime.start("go", identity=identity, session_id="s")
    where = pids(handle, 3)
    assert where[""] not in (where["child-0"], where["child-1"])
    asked = requests_of(handle, 2)
    assert [(each.agent_name, each.arguments) for each in asked] == [
        ("child-0", {"amount": "1"}),
        ("child-1", {"amount": "2"}),
    ]
    assert handle.run_id not in {each.run_id for each in asked}
    until(lambda: len(handle.pending_approvals) == 2, "the handle hears of both")
    listed = elsewhere.approvals.list_blocking(tenant_id="acme", user_id=identity.user_id)
    assert {each.id: each.request for each in listed} == {each.id: each for each in asked}

    first = elsewhere.approvals.approve_blocking(asked[0].id, identity=identity, by="bob")
    assert (first.state, first.by) == ("approved", "bob")
    attached = elsewhere.attach(handle.run_id, identity=identity)
    denied = attached.deny_blocking(asked[1].id, by="carol", reason="too much")
    assert (denied.state, denied.by) == ("denied", "carol")
    result = handle.wait(TIMEOUT)
    assert isinstance(result.structured, list)
    paid, refused = result.structured
    assert paid == "paid 1"
    assert "too much" in refused
    assert elsewhere.approvals.list_blocking(identity) == []
    assert elsewhere.approvals.get_blocking(asked[0].id, identity=identity) == first
    # The run has ended: the same answer is as good as ever, another one is not.
    assert elsewhere.approvals.approve_blocking(asked[0].id, identity=identity, by="dave") == first
    with pytest.raises(InputError) as conflict:
        attached.approve_blocking(asked[1].id)
    assert (conflict.value.state, conflict.value.by) == ("denied", "carol")
    with pytest.raises(NotFound):
        attached.approve_blocking(f"{handle.run_id}:none")


def test_of_many_deciders_at_once_one_wins(
    make_runtime: MakeRuntime, elsewhere: Runtime, identity: Identity
) -> None:
    runtime = make_runtime(driver=Pays(), **ASKS)
    handle = runtime.start("7", identity=identity, session_id="s")
    (request,) = requests_of(handle, 1)

    async def decide() -> list[object]:
        deciding = [
            (approvals.approve if number % 2 else approvals.deny)(
                request.id, identity=identity, by=f"decider {number}"
            )
            for number, approvals in enumerate([runtime.approvals, elsewhere.approvals] * 6)
        ]
        return list(await asyncio.gather(*deciding, return_exceptions=True))

    answers = asyncio.run(decide())
    won = {(each.state, each.by) for each in answers if isinstance(each, Approval)}
    assert len(won) == 1
    lost = [each for each in answers if isinstance(each, InputError)]
    assert len(lost) == 6
    assert {(each.state, each.by) for each in lost} == won
    result = handle.wait(TIMEOUT)
    resolved = [
        (event.payload.state, event.payload.by)
        for event in handle.iter_events()
        if isinstance(event.payload, ApprovalResolved)
    ]
    assert set(resolved) == won
    assert len(resolved) == 1
    assert (result.text == "paid 7") == (resolved[0][0] == "approved")


def test_a_request_whose_session_host_was_killed_is_cancelled_and_a_decision_says_so(
    make_runtime: MakeRuntime, elsewhere: Runtime, identity: Identity
) -> None:
    runtime = make_runtime(driver=Pays(), **ASKS)
    handle = runtime.start("7", identity=identity, session_id="s")
    host = pids(handle, 1)[""]
    (request,) = requests_of(handle, 1)
    kill(host)
    # At once: whoever decides waits until the run of the dead process was ended.
    with pytest.raises(InputError) as conflict:
        elsewhere.approvals.approve_blocking(request.id, identity=identity, by="bob")
    assert (conflict.value.code, conflict.value.state) == ("input_already_resolved", "cancelled")
    assert "interrupted" in conflict.value.message
    with pytest.raises(InputError):
        handle.deny_blocking(request.id)
    result = handle.wait(TIMEOUT)
    assert (result.status, result.reason and result.reason.code) == ("failed", "interrupted")
    assert handle.pending_approvals == ()
    stands = elsewhere.approvals.get_blocking(request.id, identity=identity)
    assert (stands.state, stands.reason, stands.by) == ("cancelled", "interrupted", "")


def test_a_request_whose_child_host_was_killed_is_cancelled_and_the_run_goes_on(
    make_runtime: MakeRuntime, identity: Identity
) -> None:
    runtime = make_runtime(driver=Parent(delegates=((Pays(), "1"),)), **ASKS)
    handle = runtime.start("go", identity=identity, session_id="s")
    victim = pids(handle, 2)["child-0"]
    (request,) = requests_of(handle, 1)
    kill(victim)
    result = handle.wait(TIMEOUT)
    assert result.status == "completed"
    assert result.structured == ["child_lost"]
    assert runtime.approvals.get_blocking(request.id, identity=identity).state == "cancelled"
    with pytest.raises(InputError):
        handle.approve_blocking(request.id)
