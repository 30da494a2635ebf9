"""Whatever interrupts a run, what is committed is a history that providers accept, byte for byte."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from retinue import Budgets, DriverOutput, ExecutionServices, Grants, Identity, Message, RunRequest, Runtime
from retinue.errors import InputError
from retinue.messages import ToolCall, assistant, check_structure, user
from retinue.testing import ScriptedModel
from tests.conftest import MakeLocalRuntime
from tests.support import code_of, driver, flag, soon, user_text

CALLS = [ToolCall("a", "look", {}), ToolCall("b", "touch", {"where": "here"})]


@driver
async def interrupted(request: RunRequest, services: ExecutionServices) -> DriverOutput:
    """Records a turn with two open calls, then ends as its input says."""
    services.append([user(request.input), assistant("working on it", CALLS)])
    flag(f"{request.run_id} runs").set()
    match user_text(request.input):
        case "error":
            raise ValueError("in the middle")
        case "limit":
            model = ScriptedModel(["one", "two"])
            for _ in range(2):
                await services.model(model, [user("x")])
        case "return":
            return DriverOutput(text="left them open")
        case _:
            await flag("never").wait()
    raise AssertionError("unreachable")


async def _end(runtime: Runtime, how: str, identity: Identity, session_id: str) -> tuple[str, str | None]:
    deadline = time.time() + 0.2 if how == "deadline" else None
    handle = runtime.start(how, identity=identity, session_id=session_id, deadline=deadline)
    await flag(f"{handle.run_id} runs").wait()
    if how == "cancel":
        await handle.cancel()
    result = await soon(handle.result())
    return result.status, code_of(result)


@pytest.mark.parametrize(
    ("how", "ends", "replayable"),
    [
        ("error", ("failed", "execution_failed"), False),
        ("limit", ("stopped", "budget_exhausted"), False),
        ("cancel", ("cancelled", "cancelled"), False),
        ("deadline", ("cancelled", "deadline_exceeded"), False),
        ("return", ("completed", None), True),
    ],
)
async def test_no_call_is_committed_without_its_result(
    local_runtime: MakeLocalRuntime,
    identity: Identity,
    session_id: str,
    how: str,
    ends: tuple[str, str | None],
    replayable: bool,
) -> None:
    runtime = local_runtime(driver=interrupted, budgets=Budgets(max_model_calls=1))
    assert await _end(runtime, how, identity, session_id) == ends
    snapshot = await runtime.sessions.read(identity, session_id)
    check_structure(snapshot.history)
    assert snapshot.replayable is replayable
    results = {message.tool_call_id: message.text for message in snapshot.history if message.role == "tool"}
    assert set(results) == {"a", "b"}
    assert all("no result" in text and "run ended" in text for text in results.values())


async def test_a_runtime_that_is_closed_in_the_middle_leaves_a_whole_history(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str, tmp_path: Path
) -> None:
    url = f"sqlite:///{tmp_path / 'store.db'}"
    runtime = local_runtime(driver=interrupted, store=url)
    handle = runtime.start("close", identity=identity, session_id=session_id)
    await flag(f"{handle.run_id} runs").wait()
    await asyncio.to_thread(runtime.close)
    after = local_runtime(driver=interrupted, store=url)
    result = await soon(after.attach(handle.run_id, identity=identity).result())
    assert (result.status, code_of(result)) == ("cancelled", "cancelled")
    snapshot = await after.sessions.read(identity, session_id)
    check_structure(snapshot.history)
    assert [message.role for message in snapshot.history] == ["user", "assistant", "tool", "tool"]


NUL = "before\x00after"
LONE = "half a pair: \ud83d"


@driver
async def echoes(request: RunRequest, services: ExecutionServices) -> DriverOutput:
    services.append([user(request.input)])
    services.state[user_text(request.input)] = user_text(request.input)
    services.emit_text(user_text(request.input))
    return DriverOutput(text=user_text(request.input), structured={"said": user_text(request.input)})


@pytest.mark.parametrize("store", ["memory:", "sqlite"])
async def test_nul_is_carried_through_every_boundary_unchanged(
    local_runtime: MakeLocalRuntime, tmp_path: Path, store: str
) -> None:
    url = store if store == "memory:" else f"sqlite:///{tmp_path / 'store.db'}"
    who = Identity(tenant_id=f"t{NUL}", user_id=f"u{NUL}")
    runtime = local_runtime(driver=echoes, store=url)
    handle = runtime.start(NUL, identity=who, session_id=f"s{NUL}", run_id=f"r{NUL}")
    result = await soon(handle.result())
    assert (result.text, result.structured) == (NUL, {"said": NUL})
    snapshot = await runtime.sessions.read(who, f"s{NUL}")
    assert [message.content for message in snapshot.history] == [NUL]
    assert snapshot.state == {NUL: NUL}
    assert (await runtime.sessions.latest(who, "s")).revision == 0  # another session, not a prefix
    (run,) = (await runtime.sessions.export(who, f"s{NUL}")).runs
    assert (run.run_id, run.input) == (f"r{NUL}", NUL)


async def test_a_lone_surrogate_is_refused_at_the_door_by_name(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    runtime = local_runtime(driver=echoes)
    doors: dict[str, Callable[[], object]] = {
        "the input": lambda: runtime.start(LONE, identity=identity, session_id=session_id),
        "session_id": lambda: runtime.start("x", identity=identity, session_id=LONE),
        "run_id": lambda: runtime.start("x", identity=identity, session_id=session_id, run_id=LONE),
        "identity.tenant_id": lambda: runtime.start(
            "x", identity=Identity(tenant_id=LONE, user_id="u"), session_id=session_id
        ),
    }
    for name, door in doors.items():
        with pytest.raises(InputError) as refused:
            door()
        assert name in refused.value.message
        assert "surrogate" in refused.value.message
    with pytest.raises(InputError) as refused:
        await runtime.sessions.import_legacy(identity, session_id, [Message(role="user", content=LONE)])
    assert "surrogate" in refused.value.message
    assert (await runtime.sessions.latest(identity, session_id)).revision == 0


async def test_a_lone_surrogate_from_inside_ends_the_run_with_its_place_named(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    @driver
    async def says(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        services.append([user("fine so far")])
        match user_text(request.input):
            case "text":
                return DriverOutput(text=LONE)
            case "history":
                services.append([user(LONE)])
            case "state":
                services.state["x"] = LONE
            case "event":
                services.emit({"type": "custom", "name": "x", "data": LONE})
        return DriverOutput(text="done")

    runtime = local_runtime(driver=says, grants=Grants())
    for where in ("text", "history", "state", "event"):
        result = await soon(runtime.run(where, identity=identity, session_id=f"{session_id} {where}"))
        assert result.status == "failed", where
        assert result.reason is not None
        assert "surrogate" in result.reason.message, (where, result.reason.message)
        snapshot = await runtime.sessions.read(identity, f"{session_id} {where}")
        assert [message.text for message in snapshot.history] == ["fine so far"]
