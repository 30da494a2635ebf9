"""Sessions through the front door: one writer, revisions, what is committed and what is not."""

from __future__ import annotations

import asyncio

import pytest

from retinue import DriverOutput, ExecutionServices, Identity, Message, RunRequest, SessionSnapshot
from retinue.errors import InputError, RetinueError, SessionConflict, StoreUnavailable
from retinue.ids import session_key
from retinue.loop import client_loop
from retinue.messages import assistant, tool_result, user
from retinue.protocol import Settled
from retinue.results import ArtifactReference, Reason
from retinue.session_content import SessionContent
from retinue.storage.memory import MemoryEngine
from retinue.store import OpenRun, StoreOperation, StoreReply
from tests.conftest import MakeLocalRuntime
from tests.support import (
    Flag,
    all_events,
    backend_of,
    code_of,
    driver,
    flag,
    nothing_is_left,
    soon,
    trivial,
    why,
)


def texts(snapshot: SessionSnapshot) -> list[tuple[str, str]]:
    return [(message.role, message.text) for message in snapshot.history]


@driver
async def remembers(request: RunRequest, services: ExecutionServices) -> DriverOutput:
    """Appends what it is asked."""
    services.append([user(request.input)])
    return DriverOutput(text="kept")


@driver
async def appends_and_raises(request: RunRequest, services: ExecutionServices) -> DriverOutput:
    services.append([user(request.input)])
    raise ValueError("no more")


@driver
async def held(request: RunRequest, services: ExecutionServices) -> DriverOutput:
    """Says that it runs, and goes on when it is let go."""
    flag(f"{request.run_id} runs").set()
    await flag(f"{request.run_id} go").wait()
    return DriverOutput(text="done")


async def test_c1_a_session_in_use_conflicts_and_is_free_afterwards(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    runtime = local_runtime(driver=held)
    running = runtime.start("x", identity=identity, session_id=session_id, run_id="c1")
    await flag("c1 runs").wait()
    with pytest.raises(SessionConflict) as refused:
        await runtime.sessions.read(identity, session_id)
    assert refused.value.code == "session_conflict"
    assert refused.value.run_id == "c1"
    flag("c1 go").set()
    assert (await soon(running.result())).status == "completed"
    assert (await runtime.sessions.read(identity, session_id)).revision == 1


async def test_c2_tenants_do_not_share_a_session(local_runtime: MakeLocalRuntime, session_id: str) -> None:
    runtime = local_runtime(driver=remembers)
    ann_of_a = Identity(tenant_id="a", user_id="ann")
    ann_of_b = Identity(tenant_id="b", user_id="ann")
    results = await asyncio.gather(
        runtime.run("from a", identity=ann_of_a, session_id=session_id),
        runtime.run("from b", identity=ann_of_b, session_id=session_id),
    )
    assert [result.status for result in results] == ["completed", "completed"]
    await runtime.run("more from a", identity=ann_of_a, session_id=session_id)
    seen_by_a = await runtime.sessions.read(ann_of_a, session_id)
    seen_by_b = await runtime.sessions.read(ann_of_b, session_id)
    assert (texts(seen_by_a), seen_by_a.revision) == ([("user", "from a"), ("user", "more from a")], 2)
    assert (texts(seen_by_b), seen_by_b.revision) == ([("user", "from b")], 1)


async def test_c4_an_unknown_session_reads_as_empty(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    runtime = local_runtime(driver=trivial)
    snapshot = await runtime.sessions.read(identity, session_id)
    assert list(snapshot.history) == []
    assert snapshot.state == {}
    assert snapshot.revision == 0
    assert snapshot.replayable is True
    assert snapshot.conversations == {}


async def test_c5_each_commit_adds_one_to_the_revision(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    runtime = local_runtime(driver=remembers)
    revisions = []
    for number in range(2):
        await runtime.run(f"question {number}", identity=identity, session_id=session_id)
        revisions.append((await runtime.sessions.latest(identity, session_id)).revision)
    assert revisions == [1, 2]


async def test_c7_a_released_activation_refuses_and_its_late_release_frees_nobody(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    engine = MemoryEngine()
    first, second = local_runtime(driver=remembers, store=engine), local_runtime(driver=held, store=engine)
    await first.run("x", identity=identity, session_id=session_id)
    (left,) = backend_of(first)._host._sessions.values()
    running = second.start("y", identity=identity, session_id=session_id, run_id="c7")
    await flag("c7 runs").wait()

    async def use_what_was_released() -> None:
        with pytest.raises(RetinueError):
            await SessionContent(left).read()
        with pytest.raises(RetinueError):
            await SessionContent(left).import_legacy([user("mine")])
        assert await left.passivate("idle")  # a second release is harmless

    from retinue.loop import on_client_loop

    await asyncio.wrap_future(on_client_loop(use_what_was_released()))
    flag("c7 go").set()
    assert (await soon(running.result())).status == "completed"
    assert (await first.sessions.read(identity, session_id)).revision == 2


async def test_c8_legacy_history_is_for_display_only(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    runtime = local_runtime(driver=remembers)
    await runtime.run("will be replaced", identity=identity, session_id=session_id)
    await runtime.sessions.import_legacy(identity, session_id, [user("from before")])
    snapshot = await runtime.sessions.read(identity, session_id)
    assert texts(snapshot) == [("user", "from before")]
    assert snapshot.state == {}
    assert snapshot.revision == 0
    assert snapshot.replayable is False
    # The activation that was resident goes on from what was imported.
    await runtime.run("next", identity=identity, session_id=session_id)
    snapshot = await runtime.sessions.read(identity, session_id)
    assert texts(snapshot) == [("user", "from before"), ("user", "next")]
    assert (snapshot.revision, snapshot.replayable) == (1, False)


async def test_an_import_conflicts_with_a_run_and_closes_open_calls(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    from retinue import ToolCall

    runtime = local_runtime(driver=held)
    running = runtime.start("x", identity=identity, session_id=session_id, run_id="import")
    await flag("import runs").wait()
    with pytest.raises(SessionConflict):
        await runtime.sessions.import_legacy(identity, session_id, [user("y")])
    flag("import go").set()
    await soon(running.result())
    asked = [user("q"), assistant("", [ToolCall("1", "lookup"), ToolCall("2", "lookup")])]
    await runtime.sessions.import_legacy(identity, session_id, [*asked, tool_result("1", "found")])
    history = (await runtime.sessions.latest(identity, session_id)).history
    assert [message.tool_call_id for message in history if message.role == "tool"] == ["1", "2"]
    for broken in ([tool_result("9", "orphan")], [{"role": "user"}], [Message(role="robot")]):  # type: ignore[arg-type]
        with pytest.raises(InputError):
            await runtime.sessions.import_legacy(identity, session_id, broken)  # type: ignore[arg-type]
    assert len((await runtime.sessions.latest(identity, session_id)).history) == 4


async def test_c11_ids_that_would_collide_when_joined_are_apart(local_runtime: MakeLocalRuntime) -> None:
    runtime = local_runtime(driver=remembers)
    one, other = Identity(tenant_id="a", user_id="b:c"), Identity(tenant_id="a:b", user_id="c")
    await runtime.run("one", identity=one, session_id="s")
    assert texts(await runtime.sessions.read(other, "s")) == []
    nasty = [
        (Identity(tenant_id='a","b', user_id="c"), "s"),
        (Identity(tenant_id="a", user_id='b","c'), "s"),
        (Identity(tenant_id="a", user_id="b"), 'c","s'),
    ]
    assert len({session_key(*address) for address in nasty}) == 3
    assert session_key(one, "s") == '["a","b:c","s"]'


async def test_c12_second_run_conflicts(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    runtime = local_runtime(driver=held)
    first = runtime.start("x", identity=identity, session_id=session_id, run_id="c12 first")
    await flag("c12 first runs").wait()
    second = runtime.start("y", identity=identity, session_id=session_id, run_id="c12 second")
    refused = await soon(second.result())
    assert (refused.status, code_of(refused)) == ("failed", "session_conflict")
    assert refused.final_cursor == 0
    assert second.state == "finished"
    with pytest.raises(SessionConflict):
        await second.accepted()
    assert await all_events(second) == []
    assert not flag("c12 second runs").is_set
    flag("c12 first go").set()
    assert (await soon(first.result())).status == "completed"
    assert (await runtime.sessions.latest(identity, session_id)).revision == 1


async def test_c14_what_a_failed_driver_appended_is_kept_and_marked(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    runtime = local_runtime(driver=appends_and_raises)
    result = await runtime.run("keep me", identity=identity, session_id=session_id)
    assert (result.status, result.reason) == ("failed", Reason("execution_failed", "no more"))
    snapshot = await runtime.sessions.read(identity, session_id)
    assert texts(snapshot) == [("user", "keep me")]
    assert (snapshot.replayable, snapshot.revision) == (False, 1)


async def test_c15_a_session_that_is_not_replayable_stays_so(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    engine = MemoryEngine()
    await local_runtime(driver=appends_and_raises, store=engine).run(
        "one", identity=identity, session_id=session_id
    )
    runtime = local_runtime(driver=remembers, store=engine)
    assert (await runtime.run("two", identity=identity, session_id=session_id)).status == "completed"
    snapshot = await runtime.sessions.read(identity, session_id)
    assert (snapshot.revision, snapshot.replayable) == (2, False)
    assert texts(snapshot) == [("user", "one"), ("user", "two")]


async def test_a_returned_bad_status_commits_as_normal(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    @driver
    async def stops(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        services.append([user("x")])
        return DriverOutput(text="half", status="stopped", reason=Reason("stop", "enough"))

    runtime = local_runtime(driver=stops)
    result = await runtime.run("x", identity=identity, session_id=session_id)
    assert (result.status, result.text, result.reason) == ("stopped", "half", Reason("stop", "enough"))
    snapshot = await runtime.sessions.read(identity, session_id)
    assert (snapshot.replayable, snapshot.revision) == (True, 1)


async def test_state_is_carried_from_run_to_run(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    @driver
    async def counts(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        services.state["count"] = services.state.get("count", 0) + 1
        return DriverOutput(text=str(services.state["count"]))

    runtime = local_runtime(driver=counts)
    results = [await runtime.run("x", identity=identity, session_id=session_id) for _ in range(2)]
    assert [result.text for result in results] == ["1", "2"]
    assert (await runtime.sessions.read(identity, session_id)).state == {"count": 2}


@pytest.mark.parametrize("bad", [{"x": object()}, ["no", "object"], {("a", "b"): 1}])
async def test_state_that_cannot_be_stored_fails_the_run_and_is_not_committed(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str, bad: object
) -> None:
    @driver
    async def spoils(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        services.append([user("x")])
        services.state = bad if request.input == "spoil" else {"fine": True}  # type: ignore[assignment]
        return DriverOutput(text="ok")

    runtime = local_runtime(driver=spoils)
    await runtime.run("set", identity=identity, session_id=session_id)
    result = await runtime.run("spoil", identity=identity, session_id=session_id)
    assert result.status == "failed"
    assert result.reason is not None
    assert "session state" in why(result)
    snapshot = await runtime.sessions.read(identity, session_id)
    assert (snapshot.state, snapshot.revision, snapshot.replayable) == ({"fine": True}, 2, False)


async def test_state_that_refers_to_itself_fails_the_run(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    @driver
    async def loops(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        services.state["self"] = services.state
        return DriverOutput(text="ok")

    runtime = local_runtime(driver=loops)
    result = await soon(runtime.run("x", identity=identity, session_id=session_id))
    assert (result.status, code_of(result)) == ("failed", "execution_failed")


# --- history ----------------------------------------------------------------------------------------------


async def test_no_open_call_is_ever_committed(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    from retinue import ToolCall

    @driver
    async def asks(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        services.append([user("q"), assistant("", [ToolCall("1", "a"), ToolCall("2", "b")])])
        services.append([tool_result("2", "there")])
        if request.input == "fail":
            raise ValueError
        return DriverOutput(text="ok")

    runtime = local_runtime(driver=asks)
    for number, asked in enumerate(("finish", "fail")):
        await runtime.run(asked, identity=identity, session_id=f"{session_id}-{number}")
        history = (await runtime.sessions.read(identity, f"{session_id}-{number}")).history
        results = {message.tool_call_id: message.text for message in history if message.role == "tool"}
        assert results["2"] == "there"
        assert results["1"].startswith("[no result: ")
        assert len(history) == 4


async def test_an_orphaned_result_is_refused_and_nothing_of_it_is_kept(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    from retinue import ToolCall

    refusals = []

    @driver
    async def tries(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        call = assistant("", [ToolCall("1", "a")])
        for messages in (
            [user("a"), tool_result("9", "orphan")],
            [call, user("between")],
            [call, tool_result("1", "x"), tool_result("1", "again")],
            [assistant("", [ToolCall("", "a")])],
            [assistant("", [ToolCall("1", "a"), ToolCall("1", "a")])],
            [Message(role="user", content=5)],  # type: ignore[arg-type]
            [Message(role="user", content="\ud800")],
            [{"role": "user", "content": "x"}],
        ):
            try:
                services.record_conversation(messages)  # type: ignore[arg-type]
            except (InputError, AttributeError) as error:
                refusals.append(error)
        services.record_conversation([user("good"), call, tool_result("1", "x"), assistant("bye")])
        return DriverOutput(text=str(len(services.history)))

    runtime = local_runtime(driver=tries)
    result = await runtime.run("x", identity=identity, session_id=session_id)
    assert [type(error) for error in refusals] == [InputError] * 8
    assert "lone surrogate" in str(refusals[6])
    assert (result.status, result.text) == ("completed", "4")
    snapshot = await runtime.sessions.read(identity, session_id)
    assert [message.role for message in snapshot.history] == ["user", "assistant", "tool", "assistant"]
    assert snapshot.conversations == {result.run_id: snapshot.history}


@pytest.mark.parametrize("change", ["shorter", "other", "broken"])
async def test_returned_history_must_extend_the_canonical_one(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str, change: str
) -> None:
    @driver
    async def returns(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        history = [*services.history, user(request.input)]
        if request.input == "bad":
            if change == "shorter":
                history = history[:1]
            elif change == "other":
                history[0] = user("was something else")
            else:
                history.append(tool_result("1", "orphan"))
        return DriverOutput(text="ok", history=history)

    runtime = local_runtime(driver=returns)
    for text in ("one", "two"):
        assert (await runtime.run(text, identity=identity, session_id=session_id)).status == "completed"
    result = await runtime.run("bad", identity=identity, session_id=session_id)
    assert (result.status, code_of(result)) == ("failed", "execution_failed")
    assert texts(await runtime.sessions.read(identity, session_id)) == [("user", "one"), ("user", "two")]


async def test_what_is_read_is_a_copy(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    @driver
    async def spoils(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        services.append([user("kept")])
        services.history.clear()
        services.state["list"] = [1]
        return DriverOutput(text="ok", structured={"list": [1]})

    runtime = local_runtime(driver=spoils)
    handle = runtime.start("x", identity=identity, session_id=session_id)
    result = await handle.result()
    result.structured["list"].append(2)
    assert (await handle.result()).structured == {"list": [1]}
    assert (await runtime.attach(handle.run_id, identity=identity).result()).structured == {"list": [1]}
    snapshot = await runtime.sessions.read(identity, session_id)
    snapshot.state["list"].append(2)
    assert (await runtime.sessions.read(identity, session_id)).state == {"list": [1]}


# --- results that are too large ---------------------------------------------------------------------------


async def test_a_large_result_is_cut_and_kept_whole_for_its_session_alone(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    from retinue.results import decode_result

    @driver
    async def floods(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        return DriverOutput(
            text="é" * 40_000,
            structured={"much": "x" * 100},
            status="stopped",
            reason=Reason("c" * 200, "m" * 3_000),
            artifacts=(ArtifactReference("mine"),),
        )

    runtime = local_runtime(driver=floods)
    handle = runtime.start("x", identity=identity, session_id=session_id)
    result = await handle.result()
    assert result.text == "é" * 4_096
    assert result.structured is None
    assert result.reason is not None
    assert (len(result.reason.code), len(result.reason.message)) == (128, 2_048)
    (reference,) = result.artifacts
    assert reference.mime_type == "application/json"
    kept = await runtime.get_artifact(identity, session_id, reference.id)
    assert kept is not None
    whole = decode_result(kept.data)
    assert (whole.text, whole.structured) == ("é" * 40_000, {"much": "x" * 100})
    assert whole.artifacts == (ArtifactReference("mine"),)
    (terminal,) = [event for event in await all_events(handle) if event.type == "run.terminal"]
    assert terminal.payload.result == result  # type: ignore[union-attr]
    for other, session in (
        (Identity(tenant_id="other", user_id=identity.user_id), session_id),
        (Identity(tenant_id=identity.tenant_id, user_id="other"), session_id),
        (identity, "other"),
    ):
        assert await runtime.get_artifact(other, session, reference.id) is None


async def test_a_result_of_exactly_the_limit_is_not_cut(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    from retinue.results import MAX_RESULT_BYTES, encode_result

    @driver
    async def fills(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        return DriverOutput(text="x" * int(str(request.input)))

    runtime = local_runtime(driver=fills)
    small = await runtime.run("100000", identity=identity, session_id=session_id, run_id="run_aaa")
    assert small.artifacts  # far above the limit
    empty = await runtime.run("0", identity=identity, session_id=session_id, run_id="run_bbb")
    room = MAX_RESULT_BYTES - len(encode_result(empty)) - len(',"text":""')
    fits = await runtime.run(str(room), identity=identity, session_id=session_id, run_id="run_ccc")
    assert (len(fits.text), len(encode_result(fits))) == (room, MAX_RESULT_BYTES)
    cut = await runtime.run(str(room + 1), identity=identity, session_id=session_id, run_id="run_ddd")
    assert len(cut.text) == 4_096


# --- a store that fails -----------------------------------------------------------------------------------


class FailingEngine(MemoryEngine):
    """A store that forgets to answer: once, after it stored the record of a run."""

    def __init__(self) -> None:
        super().__init__()
        self.failing = True

    async def execute(self, operations: list[StoreOperation]) -> list[StoreReply]:  # type: ignore[override]
        replies = list(await super().execute(operations))
        if self.failing and isinstance(operations[0], OpenRun):
            self.failing = False
            raise StoreUnavailable("the answer was lost")
        return replies


async def test_a_start_whose_answer_was_lost_leaves_no_run_open(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    runtime = local_runtime(driver=remembers, store=FailingEngine())
    lost = runtime.start("lost", identity=identity, session_id=session_id)
    assert code_of(await soon(lost.result())) == "store_unavailable"
    next_one = runtime.start("next", identity=identity, session_id=session_id)
    assert (await soon(next_one.result())).status == "completed"
    # The record of the lost start stands, and the next activation has ended it.
    attached = runtime.attach(lost.run_id, identity=identity)
    result = await soon(attached.result())
    assert (result.status, code_of(result)) == ("failed", "interrupted")
    history = texts(await runtime.sessions.read(identity, session_id))
    assert history == [("user", "lost"), ("user", "next")]
    await nothing_is_left(runtime, next_one)


class SlowEngine(MemoryEngine):
    """A store that waits before it stores the record of a run."""

    def __init__(self) -> None:
        super().__init__()
        self.opening, self.go_on = Flag(), Flag()

    async def execute(self, operations: list[StoreOperation]) -> list[StoreReply]:  # type: ignore[override]
        if isinstance(operations[0], OpenRun):
            self.opening.set()
            await self.go_on.wait()
        return list(await super().execute(operations))


async def test_a_result_is_asked_for_while_the_start_is_on_its_way(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, asked = SlowEngine(), Flag()
    runtime = local_runtime(driver=remembers, store=engine)
    await soon(asyncio.wrap_future(client_loop().submit(runtime._backend.client())))
    host = backend_of(runtime)._host
    plain = host.result

    async def result(activation_id: str, run_id: str) -> Settled:
        asked.set()
        return await plain(activation_id, run_id)

    monkeypatch.setattr(host, "result", result)
    handle = runtime.start("x", identity=identity, session_id=session_id)
    waiting = asyncio.ensure_future(handle.result())
    await engine.opening.wait()
    await asked.wait()
    assert not waiting.done(), "nothing is told before the record stands"
    engine.go_on.set()
    assert (await soon(waiting)).text == "kept"
    await soon(handle.accepted())


async def test_a_result_that_was_asked_for_early_tells_of_a_refused_start(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    runtime = local_runtime(driver=held)
    first = runtime.start("x", identity=identity, session_id=session_id, run_id="first")
    await flag("first runs").wait()
    result = await soon(runtime.run("y", identity=identity, session_id=session_id))
    assert (result.status, code_of(result)) == ("failed", "session_conflict")
    flag("first go").set()
    assert (await soon(first.result())).status == "completed"


async def test_flags_of_this_suite_are_heard_across_threads() -> None:
    heard = Flag()
    await asyncio.to_thread(heard.set, "x")
    assert await heard.wait() == "x"
