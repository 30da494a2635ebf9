"""Approvals through the front door: asked by a run, listed by tenant, decided from anywhere, once."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Any

import pytest

from retinue import (
    Approval,
    ApprovalRequest,
    Approvals,
    DriverOutput,
    ExecutionServices,
    Grants,
    Identity,
    RunHandle,
    RunRequest,
    Runtime,
)
from retinue.errors import InputError, NotFound, RetinueError, ToolFailed
from retinue.events import ApprovalRequested, ApprovalResolved
from retinue.storage.memory import MemoryEngine
from retinue.store import StoreEngine
from tests.conftest import MakeLocalRuntime
from tests.support import (
    Flag,
    all_events,
    code_of,
    driver,
    event_of,
    nothing_is_left,
    run_of,
    soon,
    user_text,
    why,
)

ALL = Approvals(require="all")
PAY = Grants(tool_ids=["pay"])


@driver
async def pays(request: RunRequest, services: ExecutionServices) -> DriverOutput:
    """Pays what its input says, at once; gives what was paid and what was refused, in order."""

    async def pay(amount: int) -> str:
        async def execute(arguments: dict[str, Any]) -> str:
            return f"paid {arguments['amount']}"

        try:
            return await services.dispatch_effect("pay", {"amount": amount}, execute)
        except ToolFailed as error:
            return error.message

    amounts = [int(word) for word in user_text(request.input).split()]
    return DriverOutput(text="; ".join(await asyncio.gather(*map(pay, amounts))))


async def asked(handle: RunHandle, count: int = 1) -> list[ApprovalRequest]:
    """The first requests of the run."""
    found = []
    async with contextlib.aclosing(handle.events(types=["tool.approval.request"])) as events:
        async for event in events:
            assert isinstance(event.payload, ApprovalRequested)
            found.append(event.payload.request)
            if len(found) == count:
                break
    return found


async def conflict(work: Any) -> RetinueError:
    with pytest.raises(InputError) as refused:
        await soon(work)
    assert refused.value.code == "input_already_resolved"
    return refused.value


@pytest.fixture
def paying(local_runtime: MakeLocalRuntime) -> Runtime:
    return local_runtime(driver=pays, grants=PAY, approvals=ALL)


# --- from the handle --------------------------------------------------------------------------------------


async def test_an_approved_call_runs_and_a_denied_one_does_not(
    paying: Runtime, identity: Identity, session_id: str
) -> None:
    handle = paying.start("1 2", identity=identity, session_id=session_id)
    requests = await soon(asked(handle, 2))
    assert list(handle.pending_approvals) == requests
    assert handle.state == "running"
    first = await soon(handle.approve(requests[0].id))
    assert isinstance(first, Approval)
    assert (first.request, first.state, first.by) == (requests[0], "approved", identity.user_id)
    assert first.decided_at is not None
    assert [each.id for each in handle.pending_approvals] == [requests[1].id]
    denied = await soon(handle.deny(requests[1].id, by="carol", reason="too much"))
    assert (denied.state, denied.by, denied.reason) == ("denied", "carol", "too much")
    result = await soon(handle.result())
    paid, refused = result.text.split("; ")
    assert paid == "paid 1"
    assert "too much" in refused
    assert "carol" not in refused
    assert handle.pending_approvals == ()
    resolved = [
        (each.payload.state, each.payload.by)
        for each in await all_events(handle)
        if isinstance(each.payload, ApprovalResolved)
    ]
    assert resolved == [("approved", identity.user_id), ("denied", "carol")]
    await nothing_is_left(paying, handle)


def test_the_blocking_twins_decide(paying: Runtime, identity: Identity, session_id: str) -> None:
    handle = paying.start("1 2", identity=identity, session_id=session_id)
    requests = [
        event.payload.request
        for _, event in zip(range(2), handle.iter_events(types=["tool.approval.request"]), strict=False)
        if isinstance(event.payload, ApprovalRequested)
    ]
    assert handle.approve_blocking(requests[0].id).state == "approved"
    assert handle.deny_blocking(requests[1].id, reason="no").state == "denied"
    assert handle.wait().text.startswith("paid 1; ")
    other = paying.start("3 4", identity=identity, session_id=session_id)
    for _, event in zip(range(2), other.iter_events(types=["tool.approval.request"]), strict=False):
        assert event.run_id == other.run_id
    listed = paying.approvals.list_blocking(identity)
    assert [each.request.arguments for each in listed] == [{"amount": 3}, {"amount": 4}]
    assert paying.approvals.get_blocking(listed[0].id, identity=identity) == listed[0]
    paying.approvals.deny_blocking(listed[0].id, identity=identity, by="eve", reason="no")
    paying.approvals.approve_blocking(listed[1].id, identity=identity, by="eve")
    assert other.wait().text.endswith("; paid 4")


async def test_a_decision_can_be_repeated_and_contradicting_it_is_a_conflict(
    paying: Runtime, identity: Identity, session_id: str
) -> None:
    handle = paying.start("1 2", identity=identity, session_id=session_id)
    one, two = await soon(asked(handle, 2))
    decided = await soon(handle.approve(one.id, by="bob"))
    # While the run goes on, and from its record when it has ended and left this process.
    for over in (False, True):
        assert await soon(handle.approve(one.id, by="eve")) == decided
        refused = await conflict(handle.deny(one.id, by="eve"))
        assert (refused.state, refused.by, refused.approval_id) == ("approved", "bob", one.id)
        again = paying.attach(handle.run_id, identity=identity)
        assert await soon(again.approve(one.id)) == decided
        if not over:
            await soon(handle.deny(two.id))
            await soon(handle.result())
            await leave(paying)


async def leave(runtime: Runtime) -> None:
    """Let every session of an in-process runtime leave memory."""
    from retinue.inprocess import _resident
    from retinue.loop import on_client_loop
    from tests.support import backend_of

    host = backend_of(runtime)._host

    async def passivate() -> None:
        for activation_id in list(host._sessions):
            session = host._sessions[activation_id]
            while session.busy:
                await asyncio.sleep(0)
            assert await host.passivate(activation_id, "application")
        for key, resident in list(_resident.items()):
            if resident.host is host:
                del _resident[key]

    await asyncio.wrap_future(on_client_loop(passivate()))


async def test_of_many_deciders_at_once_one_wins_and_the_run_hears_of_that_one(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    engine = MemoryEngine()
    runtimes = [local_runtime(driver=pays, grants=PAY, approvals=ALL, store=engine) for _ in range(3)]
    handle = runtimes[0].start("7", identity=identity, session_id=session_id)
    (request,) = await soon(asked(handle))
    decisions = [
        (each.approvals.approve if number % 2 else each.approvals.deny)(
            request.id, identity=identity, by=f"decider {number}"
        )
        for number, each in enumerate(runtimes * 4)
    ]
    answers = await soon(asyncio.gather(*decisions, return_exceptions=True))
    winners = {(each.state, each.by) for each in answers if isinstance(each, Approval)}
    assert len(winners) == 1
    (won,) = winners
    lost = [each for each in answers if isinstance(each, InputError)]
    assert len(lost) == 6
    assert {(each.state, each.by) for each in lost} == winners
    resolved = (await event_of(handle, "tool.approval.resolved")).payload
    assert isinstance(resolved, ApprovalResolved)
    assert (resolved.state, resolved.by) == won
    assert ((await soon(handle.result())).text == "paid 7") == (won[0] == "approved")


async def test_ids_that_are_not_of_the_run_are_not_found(
    paying: Runtime, local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    handle = paying.start("1", identity=identity, session_id=session_id)
    (request,) = await soon(asked(handle))
    other = paying.start("1", identity=identity, session_id=f"{session_id} too")
    (others,) = await soon(asked(other))
    stranger = Identity(tenant_id="other", user_id=identity.user_id)
    for unknown in (others.id, f"{handle.run_id}:none", "nonsense"):
        with pytest.raises(NotFound):
            await soon(handle.approve(unknown))
    for unknown in (f"{handle.run_id}:none", "nobody:1", "nonsense"):
        with pytest.raises(NotFound):
            await soon(paying.approvals.approve(unknown, identity=identity, by="bob"))
    for work in (
        paying.approvals.get(request.id, identity=stranger),
        paying.approvals.deny(request.id, identity=stranger, by="bob"),
    ):
        with pytest.raises(NotFound):
            await soon(work)
    assert [each.id for each in handle.pending_approvals] == [request.id]
    for each in (handle, other):
        await soon(each.cancel())
        await soon(each.result())
    # A run that can ask nobody answers at once too.
    silent = local_runtime(driver=pays, grants=PAY)
    done = silent.start("1", identity=identity, session_id=session_id)
    assert "approvals" not in (await soon(done.result())).text
    with pytest.raises(NotFound):
        await soon(done.approve(f"{done.run_id}:none"))


@pytest.mark.parametrize(
    ("approval_id", "options", "field"),
    [("", {}, "approval_id"), ("r:1", {"by": ""}, "by"), ("r:1", {"reason": "x" * 2_000}, "reason")],
)
async def test_a_decision_that_cannot_be_kept_is_refused_at_once(
    paying: Runtime, identity: Identity, session_id: str, approval_id: str, options: Any, field: str
) -> None:
    handle = paying.attach("r", identity=identity)
    with pytest.raises(InputError) as refused:
        await handle.approve(approval_id, **options)
    assert refused.value.field == field
    with pytest.raises(InputError):
        await paying.approvals.deny(approval_id, identity=identity, **{"by": "bob", **options})


# --- across sessions --------------------------------------------------------------------------------------


async def test_c157_requests_are_listed_by_tenant_across_sessions(local_runtime: MakeLocalRuntime) -> None:
    runtime = local_runtime(driver=pays, grants=PAY, approvals=ALL)
    ann, bob = Identity(tenant_id="a", user_id="ann"), Identity(tenant_id="a", user_id="bob")
    eve = Identity(tenant_id="b", user_id="ann")
    handles = {}
    for who, session, amount in ((ann, "one", 1), (ann, "two", 2), (bob, "one", 3), (eve, "one", 4)):
        handle = runtime.start(str(amount), identity=who, session_id=session)
        await soon(asked(handle))
        handles[amount] = handle

    async def amounts(*identity: Identity, **options: Any) -> list[int]:
        found = await soon(runtime.approvals.list(*identity, **options))
        assert all(each.request.tool_name == "pay" for each in found)
        return [each.request.arguments["amount"] for each in found]

    assert await amounts(tenant_id="a") == [1, 2, 3]
    assert await amounts(tenant_id="b") == [4]
    assert await amounts(tenant_id="c") == []
    assert await amounts(ann) == [1, 2]
    assert await amounts(tenant_id="a", user_id="bob") == [3]
    assert await amounts(ann, session_id="two") == [2]
    assert await amounts(ann, run_id=handles[2].run_id) == [2]
    assert await amounts(ann, session_id="one", run_id=handles[2].run_id) == []
    assert await amounts(bob, run_id=handles[2].run_id) == []
    assert await amounts(tenant_id="a", limit=2) == [1, 2]
    (one,) = await asked(handles[1])
    await soon(handles[1].approve(one.id))
    await soon(handles[1].result())
    await soon(handles[2].cancel())
    await soon(handles[2].result())
    assert await amounts(tenant_id="a") == [3]
    assert await amounts(tenant_id="a", state="approved") == [1]
    assert await amounts(tenant_id="a", state="cancelled") == [2]
    assert await amounts(tenant_id="a", state=None) == [1, 2, 3]


async def test_more_requests_than_a_page_are_listed(
    paying: Runtime, identity: Identity, session_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("retinue.runtime_approvals.PAGE_LIMIT", 2)
    handle = paying.start("1 2 3 4 5", identity=identity, session_id=session_id)
    await soon(asked(handle, 5))
    for limit, count in ((1, 1), (4, 4), (5, 5), (100, 5)):
        assert len(await soon(paying.approvals.list(identity, limit=limit))) == count


@pytest.mark.parametrize(
    "question",
    [
        {},
        {"user_id": "ann"},
        {"tenant_id": "a", "session_id": "s"},
        {"tenant_id": "a", "run_id": "r"},
        {"tenant_id": "a", "user_id": ""},
        {"tenant_id": ""},
        {"tenant_id": "a", "state": "open"},
        {"tenant_id": "a", "limit": 0},
        {"tenant_id": "a", "limit": True},
        {"identity": Identity(tenant_id="a", user_id="b"), "tenant_id": "a"},
    ],
)
async def test_a_question_about_nobody_is_refused(paying: Runtime, question: Any) -> None:
    with pytest.raises(InputError):
        await soon(paying.approvals.list(**question))


# --- the end ----------------------------------------------------------------------------------------------


async def test_a_cancelled_run_takes_its_requests_with_it(
    paying: Runtime, identity: Identity, session_id: str
) -> None:
    handle = paying.start("1", identity=identity, session_id=session_id)
    (request,) = await soon(asked(handle))
    await soon(handle.cancel("enough"))
    result = await soon(handle.result())
    assert (result.status, handle.pending_approvals) == ("cancelled", ())
    await nothing_is_left(paying, handle)
    stands = await soon(paying.approvals.get(request.id, identity=identity))
    assert stands.state == "cancelled"
    for work in (handle.approve(request.id), handle.deny(request.id)):
        assert (await conflict(work)).state == "cancelled"
    await leave(paying)
    assert (await conflict(handle.approve(request.id))).state == "cancelled"


async def test_c154_an_approval_that_cancels_the_run_runs_nothing(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    handles: list[RunHandle] = []

    async def approve(request: ApprovalRequest) -> bool:
        await handles[0].cancel("on second thoughts")
        return True

    runtime = local_runtime(driver=pays, grants=PAY, approvals=Approvals(require="all", on_request=approve))
    handles.append(runtime.start("1", identity=identity, session_id=session_id))
    result = await soon(handles[0].result())
    assert (result.status, why(result)) == ("cancelled", "on second thoughts")
    assert "paid" not in result.text
    (stands,) = await soon(runtime.approvals.list(identity, state=None))
    assert stands.state == "cancelled"


@pytest.mark.parametrize(
    ("answer", "state"), [(True, "approved"), (False, "denied"), ("yes", "denied"), (None, "pending")]
)
@pytest.mark.parametrize("later", [False, True])
async def test_the_application_may_answer_itself(
    local_runtime: MakeLocalRuntime,
    identity: Identity,
    session_id: str,
    answer: Any,
    state: str,
    later: bool,
) -> None:
    def at_once(request: ApprovalRequest) -> Any:
        if answer is not True:  # that would approve another call
            request.arguments["amount"] = 1_000_000  # a copy
        return answer

    async def in_a_while(request: ApprovalRequest) -> Any:
        await asyncio.sleep(0)
        return answer

    approvals = Approvals(require=["pay"], on_request=in_a_while if later else at_once)
    runtime = local_runtime(driver=pays, grants=PAY, approvals=approvals)
    handle = runtime.start("5", identity=identity, session_id=session_id)
    (request,) = await soon(asked(handle))
    if state == "pending":
        await soon(handle.approve(request.id))
        assert (await soon(handle.result())).text == "paid 5"
        return
    text = (await soon(handle.result())).text
    assert (text == "paid 5") == (state == "approved")
    stands = await soon(runtime.approvals.get(request.id, identity=identity))
    assert (stands.state, stands.by, stands.request.arguments) == (state, "application", {"amount": 5})


async def test_what_on_request_does_to_its_copy_nobody_sees(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    spoiled = Flag()

    def spoil(request: ApprovalRequest) -> None:
        request.arguments["to"].append("eve")
        request.arguments["more"] = True
        spoiled.set()

    @driver
    async def sends(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        async def send(arguments: dict[str, Any]) -> str:
            return ",".join(arguments["to"])

        return DriverOutput(text=await services.dispatch_effect("pay", {"to": ["bob"]}, send))

    runtime = local_runtime(driver=sends, grants=PAY, approvals=Approvals(require="all", on_request=spoil))
    handle = runtime.start("x", identity=identity, session_id=session_id)
    await spoiled.wait()
    (pending,) = handle.pending_approvals
    assert pending.arguments == {"to": ["bob"]}
    await soon(handle.approve(pending.id))
    assert (await soon(handle.result())).text == "bob"


async def test_an_on_request_that_raises_is_no_answer_and_is_logged(
    local_runtime: MakeLocalRuntime,
    identity: Identity,
    session_id: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def breaks(request: ApprovalRequest) -> bool:
        raise RuntimeError("no network")

    approvals = Approvals(require="all", on_request=breaks)
    runtime = local_runtime(driver=pays, grants=PAY, approvals=approvals)
    with caplog.at_level(logging.WARNING):
        handle = runtime.start("5", identity=identity, session_id=session_id)
        (request,) = await soon(asked(handle))
        await soon(handle.approve(request.id))
        assert (await soon(handle.result())).text == "paid 5"
    assert "no network" in caplog.text


async def test_c155_a_run_whose_request_times_out_goes_on_without_the_call(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    runtime = local_runtime(driver=pays, grants=PAY, approvals=Approvals(require="all", timeout=0.05))
    handle = runtime.start("5", identity=identity, session_id=session_id)
    result = await soon(handle.result())
    assert result.status == "completed"
    assert "timed out" in result.text
    (stands,) = await soon(runtime.approvals.list(identity, state="expired"))
    assert (await conflict(handle.approve(stands.id))).state == "expired"
    await nothing_is_left(runtime, handle)


async def test_c155_a_run_whose_request_times_out_can_fail(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    approvals = Approvals(require="all", timeout=0.05, timeout_action="raise")
    runtime = local_runtime(driver=raises, grants=PAY, approvals=approvals)
    handle = runtime.start("5", identity=identity, session_id=session_id)
    result = await soon(handle.result())
    assert (result.status, code_of(result)) == ("failed", "tool_failed")
    assert "timed out" in why(result)
    await nothing_is_left(runtime, handle)


@driver
async def raises(request: RunRequest, services: ExecutionServices) -> DriverOutput:
    async def execute(arguments: dict[str, Any]) -> str:
        raise AssertionError("nobody approved it")

    return DriverOutput(text=await services.dispatch_effect("pay", {"amount": 1}, execute))


async def test_a_delegate_that_ends_takes_its_request_with_it(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    @driver
    async def boss(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        child = await services.delegate(pays, "5", name="helper")
        (request_id,) = await wait_for_request(child_asked)
        child.cancel("not needed")
        with contextlib.suppress(Exception):
            await child.result()
        return DriverOutput(text=request_id)

    child_asked: asyncio.Queue[str] = asyncio.Queue()

    def remember(request: ApprovalRequest) -> None:
        assert (request.agent_name, request.root_run_id) == ("helper", run_ids[0])
        assert request.run_id != request.root_run_id
        child_asked.put_nowait(request.id)  # on the same user loop

    runtime = local_runtime(driver=boss, grants=PAY, approvals=Approvals(require="all", on_request=remember))
    run_ids: list[str] = [f"run {session_id}"]
    handle = runtime.start("x", identity=identity, session_id=session_id, run_id=run_ids[0])
    result = await soon(handle.result())
    assert result.status == "completed", result.reason
    stands = await soon(runtime.approvals.get(result.text, identity=identity))
    assert (stands.state, stands.reason) == ("cancelled", "not needed")


async def wait_for_request(queue: asyncio.Queue[str]) -> list[str]:
    return [await queue.get()]


async def test_what_a_run_asks_is_kept_without_ray_too(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    engine: StoreEngine = MemoryEngine()
    runtime = local_runtime(driver=pays, grants=PAY, approvals=ALL, store=engine)
    handle = runtime.start("5", identity=identity, session_id=session_id)
    (request,) = await soon(asked(handle))
    assert run_of(runtime, handle).desk is not None
    runtime.close()
    # Another program, later: the request was settled with its run.
    later = local_runtime(driver=pays, grants=PAY, approvals=ALL, store=engine)
    stands = await soon(later.approvals.get(request.id, identity=identity))
    assert stands.state == "cancelled"
    refused = await conflict(later.approvals.approve(request.id, identity=identity, by="bob"))
    assert refused.state == "cancelled"
