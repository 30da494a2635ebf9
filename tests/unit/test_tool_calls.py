"""Calls of tools: cancel tokens, timeouts, progress, results that are too large."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Generator, Iterator, Sequence
from typing import Any

import pytest

from retinue import (
    Agent,
    DriverOutput,
    ExecutionServices,
    Grants,
    Identity,
    RunRequest,
    Runtime,
    TaskContext,
    Tool,
    ToolCall,
    ToolContext,
    agent_driver,
    tool,
)
from retinue import tool_execution as executions
from retinue.events import Event, ToolProgress
from retinue.testing import ScriptedModel, tool_calls
from retinue.tools import ToolResult
from tests.conftest import MakeLocalRuntime
from tests.support import (
    LIMIT,
    Flag,
    all_events,
    driver,
    flag,
    nothing_is_left,
    soon,
    spent,
    types,
)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that timed out is soon given up."""
    monkeypatch.setattr(executions, "LEAVING_GRACE", 0.1)


def agent_of(model: ScriptedModel, tools: Sequence[Tool]) -> dict[str, Any]:
    """Options of a runtime whose agent has these tools, granted."""
    return {
        "driver": agent_driver(Agent(name="a", model=model, tools=tools)),
        "grants": Grants(tool_ids=[item.name for item in tools]),
    }


def results_of(model: ScriptedModel) -> list[str]:
    """The tool results that the last request showed to the model, oldest first."""
    return [message.text for message in model.requests[-1].messages if message.role == "tool"]


def progress_of(events: Sequence[Event]) -> list[Any]:
    return [event.payload.data for event in events if isinstance(event.payload, ToolProgress)]


async def dispatched(
    make: MakeLocalRuntime, identity: Identity, found: Tool, calls: int = 1
) -> tuple[list[ToolResult], Runtime]:
    """The results of these many calls of a tool, one after the other, in one run."""
    results: list[ToolResult] = []

    @driver
    async def calling(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        results.extend(
            [await services.dispatch(ToolCall(f"c{number}", found.name, {})) for number in range(calls)]
        )
        return DriverOutput(text="done")

    runtime = make(driver=calling, tools=[found], grants=Grants(tool_ids=[found.name]))
    handle = runtime.start("x", identity=identity, session_id="s")
    assert (await soon(handle.result())).status == "completed"
    await nothing_is_left(runtime, handle)
    return results, runtime


# --- progress ---------------------------------------------------------------------------------------------


@tool
def counts(to: int) -> Generator[dict[str, int], None, str]:
    """Tells how far it is."""
    for number in range(to):
        yield {"at": number}
    return "counted"


@tool
def counts_only(to: int) -> Iterator[int]:
    """Has nothing to say but how far it is."""
    yield from range(to)


@tool
async def counts_on_the_loop(to: int) -> AsyncIterator[int]:
    """The same in a coroutine."""
    for number in range(to):
        await asyncio.sleep(0)
        yield number


@pytest.mark.parametrize(
    ("found", "result", "last"),
    [(counts, "counted", {"at": 2}), (counts_only, "2", 2), (counts_on_the_loop, "2", 2)],
)
async def test_what_a_generator_yields_is_progress_and_its_end_the_result(
    local_runtime: MakeLocalRuntime, identity: Identity, found: Tool, result: str, last: object
) -> None:
    model = ScriptedModel([tool_calls(ToolCall("c1", found.name, {"to": 3})), "done"])
    runtime = local_runtime(**agent_of(model, [found]))
    handle = runtime.start("x", identity=identity, session_id="s")
    events = await all_events(handle)
    assert results_of(model) == [result]
    assert progress_of(events)[-1] == last
    names = types(events)
    assert names.index("tool.progress") < names.index("tool.complete")
    assert "tool.progress" not in names[names.index("tool.complete") :]
    told = next(event.payload for event in events if isinstance(event.payload, ToolProgress))
    assert (told.tool_name, told.tool_call_id) == (found.name, "c1")
    await nothing_is_left(runtime, handle)


async def test_a_generator_that_yields_nothing_gives_what_it_returns(
    local_runtime: MakeLocalRuntime, identity: Identity
) -> None:
    found = [counts, counts_only, counts_on_the_loop]
    model = ScriptedModel([tool_calls(*((item.name, {"to": 0}) for item in found)), "x"])
    runtime = local_runtime(**agent_of(model, found))
    handle = runtime.start("x", identity=identity, session_id="s")
    assert progress_of(await all_events(handle)) == []
    assert results_of(model) == ["counted", "", ""]


async def test_progress_is_seen_while_the_tool_works(
    local_runtime: MakeLocalRuntime, identity: Identity
) -> None:
    seen = threading.Event()

    @tool
    def waits() -> Iterator[str]:
        yield "half done"
        if seen.wait(LIMIT):
            yield "done"

    model = ScriptedModel([tool_calls(("waits", {})), "x"])
    runtime = local_runtime(**agent_of(model, [waits]))
    handle = runtime.start("x", identity=identity, session_id="s")
    async with asyncio.timeout(LIMIT):
        async for event in handle.events():
            if isinstance(event.payload, ToolProgress):
                assert event.payload.data == "half done"
                break
    seen.set()
    await soon(handle.result())
    assert results_of(model) == ["done"]


async def test_progress_of_a_delegate_carries_its_name(
    local_runtime: MakeLocalRuntime, identity: Identity
) -> None:
    model = ScriptedModel({"worker": [tool_calls(("counts", {"to": 1})), "done"]})

    @driver
    async def root(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        child = await services.delegate(Agent(name="worker", model=model, tools=[counts]), "go")
        return await child.result()

    runtime = local_runtime(driver=root, grants=Grants(tool_ids=["counts"]))
    events = await all_events(runtime.start("x", identity=identity, session_id="s"))
    told = [event.participant for event in events if event.type == "tool.progress"]
    assert told == ["worker"]


@pytest.mark.parametrize("run_in", ["loop", "thread"])
async def test_a_generator_that_is_cancelled_is_closed(
    local_runtime: MakeLocalRuntime, identity: Identity, run_in: str
) -> None:
    began, cleaned, go = Flag(), Flag(), threading.Event()

    @tool
    def endless() -> Iterator[int]:
        try:
            for number in range(1_000_000):
                yield number
                began.set()
                go.wait(0.001)
        finally:
            cleaned.set()

    @tool(name="endless")
    async def endless_on_the_loop() -> AsyncIterator[int]:
        try:
            for number in range(1_000_000):
                yield number
                began.set()
                await asyncio.sleep(0)
        finally:
            cleaned.set()

    model = ScriptedModel([tool_calls(("endless", {})), "never"])
    found = endless if run_in == "thread" else endless_on_the_loop
    assert found.run_in == run_in
    runtime = local_runtime(**agent_of(model, [found]))
    handle = runtime.start("x", identity=identity, session_id="s")
    await began.wait()
    await handle.cancel("enough")
    assert (await soon(handle.result())).status == "cancelled"
    assert cleaned.is_set
    await nothing_is_left(runtime, handle)


# --- cancel tokens ----------------------------------------------------------------------------------------


async def test_a_thread_that_waits_with_its_context_is_woken_by_a_cancel(
    local_runtime: MakeLocalRuntime, identity: Identity
) -> None:
    began, left = Flag(), Flag()

    @tool
    def waits(ctx: TaskContext) -> str:
        first = ctx.wait(0.001)
        began.set()
        left.set((first, ctx.wait(1000), ctx.wait(1000)))
        return "left"

    model = ScriptedModel([tool_calls(("waits", {})), "never"])
    runtime = local_runtime(**agent_of(model, [waits]))
    handle = runtime.start("x", identity=identity, session_id="s")
    await began.wait()
    await handle.cancel()
    assert (await soon(handle.result())).status == "cancelled"
    assert await left.wait() == (False, True, True)
    await nothing_is_left(runtime, handle)


async def test_a_cancelled_thread_can_leave_through_whatever_catches_exceptions(
    local_runtime: MakeLocalRuntime, identity: Identity
) -> None:
    began, left = Flag(), Flag()

    @tool
    def insists(ctx: ToolContext) -> str:
        ctx.raise_if_cancelled()
        began.set()
        try:
            while True:
                try:
                    ctx.wait(0.01)
                    ctx.raise_if_cancelled()
                except Exception:  # as many tools do
                    continue
        except asyncio.CancelledError as error:
            left.set(str(error))
            raise

    model = ScriptedModel([tool_calls(("insists", {})), "never"])
    runtime = local_runtime(**agent_of(model, [insists]))
    handle = runtime.start("x", identity=identity, session_id="s")
    await began.wait()
    await handle.cancel()
    assert (await soon(handle.result())).status == "cancelled"
    assert await left.wait() == "the run is being cancelled"


async def test_a_thread_that_leaves_as_if_it_were_cancelled_fails_its_call_only(
    local_runtime: MakeLocalRuntime, identity: Identity
) -> None:
    @tool
    def pretends() -> str:
        raise asyncio.CancelledError

    results, _ = await dispatched(local_runtime, identity, pretends)
    assert [(result.error, result.text) for result in results] == [
        (True, "the tool was cancelled from inside")
    ]


async def test_a_wait_that_would_block_the_loop_is_refused(
    local_runtime: MakeLocalRuntime, identity: Identity
) -> None:
    @tool
    async def blocks(ctx: ToolContext) -> bool:
        return ctx.wait(1000)

    results, _ = await dispatched(local_runtime, identity, blocks)
    assert results[0].text.startswith("RuntimeError: ctx.wait() would block the event loop")


async def test_one_call_that_timed_out_does_not_cancel_another(
    local_runtime: MakeLocalRuntime, identity: Identity
) -> None:
    both = threading.Barrier(2, timeout=LIMIT)
    first_left = threading.Event()

    @tool(timeout=0.05)
    def short(ctx: ToolContext) -> None:
        both.wait()
        ctx.wait(LIMIT)
        first_left.set()

    @tool
    def other(ctx: ToolContext) -> bool:
        both.wait()
        first_left.wait(LIMIT)
        return ctx.cancelled

    model = ScriptedModel([tool_calls(("short", {}), ("other", {})), "done"])
    runtime = local_runtime(**agent_of(model, [short, other]))
    await soon(runtime.run("x", identity=identity, session_id="s"))
    assert results_of(model) == ["short timed out after 0.05 s", "false"]


# --- timeouts ---------------------------------------------------------------------------------------------


async def test_a_coroutine_that_takes_too_long_is_cancelled(
    local_runtime: MakeLocalRuntime, identity: Identity
) -> None:
    cleaned = Flag()

    @tool(timeout=0.05)
    async def slow(ctx: ToolContext) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cleaned.set(ctx.cancelled)

    results, _ = await dispatched(local_runtime, identity, slow)
    assert [(result.error, result.denied, result.text) for result in results] == [
        (True, False, "slow timed out after 0.05 s")
    ]
    assert await cleaned.wait() is True


async def test_a_result_that_comes_too_late_is_not_a_result(
    local_runtime: MakeLocalRuntime, identity: Identity
) -> None:
    @tool(timeout=0.05)
    async def stubborn() -> str:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return "too late"
        raise AssertionError

    results, _ = await dispatched(local_runtime, identity, stubborn)
    assert results[0].text == "stubborn timed out after 0.05 s"


async def test_a_tool_that_is_fast_enough_has_its_result(
    local_runtime: MakeLocalRuntime, identity: Identity
) -> None:
    @tool(timeout=LIMIT)
    def fast() -> str:
        return "fast"

    results, _ = await dispatched(local_runtime, identity, fast)
    assert (results[0].text, results[0].error) == ("fast", False)


async def test_a_thread_that_timed_out_is_not_called_again_while_it_runs(
    local_runtime: MakeLocalRuntime, identity: Identity
) -> None:
    calls: list[str] = []
    release, told = threading.Event(), Flag()

    @tool(timeout=0.05)
    def deaf(what: str) -> str:
        calls.append(what)
        if what == "hold" and len(calls) == 1:
            release.wait(LIMIT)
        return what

    @driver
    async def calling(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        async def call(what: str) -> str:
            return (await services.dispatch(ToolCall("c", "deaf", {"what": what}))).text

        texts = [await call("hold"), await call("hold"), await call("other")]
        told.set(texts)
        return DriverOutput(text="done", structured=texts)

    runtime = local_runtime(driver=calling, tools=[deaf], grants=Grants(tool_ids=["deaf"]))
    handle = runtime.start("x", identity=identity, session_id="s")
    assert await told.wait() == [
        "deaf timed out after 0.05 s, and is still running",
        "deaf was not called: an earlier call with these arguments timed out and is still running",
        "other",
    ]
    assert calls == ["hold", "other"]
    assert handle.state == "running"  # the driver has returned, and the run owns the thread
    release.set()
    result = await soon(handle.result())
    assert (result.status, spent(result).tool_calls.used) == ("completed", 2)
    await nothing_is_left(runtime, handle)
    again = await soon(runtime.run("x", identity=identity, session_id="s"))
    assert again.structured == ["hold", "hold", "other"]


async def test_a_model_may_ask_the_same_twice_at_once(
    local_runtime: MakeLocalRuntime, identity: Identity
) -> None:
    both = threading.Barrier(2, timeout=LIMIT)

    @tool(timeout=LIMIT)
    def meets() -> str:
        both.wait()
        return "met"

    model = ScriptedModel([tool_calls(("meets", {}), ("meets", {})), "done"])
    runtime = local_runtime(**agent_of(model, [meets]))
    await soon(runtime.run("x", identity=identity, session_id="s"))
    assert results_of(model) == ["met", "met"]


async def test_a_cancelled_run_waits_for_a_thread_that_timed_out_before(
    local_runtime: MakeLocalRuntime, identity: Identity
) -> None:
    release, returned = threading.Event(), Flag()

    @tool(timeout=0.05)
    def deaf() -> None:
        release.wait(LIMIT)
        returned.set()

    model = ScriptedModel([tool_calls(("deaf", {})), tool_calls(("waits", {})), "never"])

    @tool
    async def waits() -> None:
        flag("deaf timed out").set()
        await asyncio.Event().wait()

    runtime = local_runtime(**agent_of(model, [deaf, waits]))
    handle = runtime.start("x", identity=identity, session_id="s")
    await flag("deaf timed out").wait()
    await handle.cancel()
    assert handle.state == "cancelling"
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.shield(asyncio.ensure_future(handle.result())), 0.1)
    assert handle.state == "cancelling"
    release.set()
    assert (await soon(handle.result())).status == "cancelled"
    assert returned.is_set
    await nothing_is_left(runtime, handle)


# --- results that are too large -----------------------------------------------------------------------------


async def test_a_result_that_is_too_large_is_kept_whole_and_shown_in_part(
    local_runtime: MakeLocalRuntime, identity: Identity
) -> None:
    whole = "ä" * 40_000

    @tool
    def writes() -> str:
        return whole

    results, runtime = await dispatched(local_runtime, identity, writes)
    (result,) = results
    assert result.artifact_id is not None
    assert result.text == (
        f"{whole[:2_000]}\n[80,000 bytes of text/plain, kept as artifact {result.artifact_id}]"
    )
    assert not result.error
    kept = await runtime.get_artifact(identity, "s", result.artifact_id)
    assert kept is not None
    assert (kept.data.decode(), kept.mime_type) == (whole, "text/plain")


async def test_the_limit_counts_bytes_of_what_the_model_would_read(
    local_runtime: MakeLocalRuntime, identity: Identity
) -> None:
    @tool(max_result_bytes=10)
    def writes() -> str:
        return "1234567890"

    @tool(max_result_bytes=10)
    def counts() -> list[int]:
        return [1, 2, 3, 4, 5]

    (fits,), _ = await dispatched(local_runtime, identity, writes)
    assert (fits.text, fits.artifact_id) == ("1234567890", None)
    (large,), runtime = await dispatched(local_runtime, identity, counts)
    assert large.artifact_id is not None
    assert large.text.startswith("[1,2,3,4,5]\n[11 bytes of application/json, kept as artifact ")
    kept = await runtime.get_artifact(identity, "s", large.artifact_id)
    assert kept is not None
    assert (kept.data, kept.mime_type) == (b"[1,2,3,4,5]", "application/json")


@pytest.mark.parametrize("value", [b"\x00\xff", bytearray(b"\x00\xff"), memoryview(b"\x00\xff")])
async def test_bytes_are_always_an_artifact(
    local_runtime: MakeLocalRuntime, identity: Identity, value: object
) -> None:
    @tool
    async def draws() -> object:
        return value

    (result,), runtime = await dispatched(local_runtime, identity, draws)
    assert result.artifact_id is not None
    assert result.text == f"[2 bytes of application/octet-stream, kept as artifact {result.artifact_id}]"
    kept = await runtime.get_artifact(identity, "s", result.artifact_id)
    assert kept is not None
    assert kept.data == b"\x00\xff"


async def test_what_no_store_keeps_is_an_error_and_the_run_goes_on(
    local_runtime: MakeLocalRuntime, identity: Identity
) -> None:
    @tool
    def huge() -> bytes:
        return bytes(17 * 1024 * 1024)

    (result,), _ = await dispatched(local_runtime, identity, huge)
    assert (result.error, result.artifact_id) == (True, None)
    assert result.text.startswith("huge gave 17,825,792 bytes, which could not be kept as an artifact: ")


async def test_an_error_that_is_too_long_is_cut(local_runtime: MakeLocalRuntime, identity: Identity) -> None:
    @tool
    def shouts() -> None:
        raise ValueError("x" * 100_000)

    (result,), _ = await dispatched(local_runtime, identity, shouts)
    assert (result.error, result.artifact_id) == (True, None)
    assert result.text == "ValueError: " + "x" * 1_988 + "\n[cut: 100,012 characters]"


async def test_text_with_nul_is_unchanged(local_runtime: MakeLocalRuntime, identity: Identity) -> None:
    @tool
    def writes() -> str:
        return "a\0b"

    model = ScriptedModel([tool_calls(("writes", {})), "done"])
    runtime = local_runtime(**agent_of(model, [writes]))
    await soon(runtime.run("x", identity=identity, session_id="s"))
    assert results_of(model) == ["a\0b"]
    history = (await runtime.sessions.read(identity, "s")).history
    assert [message.text for message in history if message.role == "tool"] == ["a\0b"]
