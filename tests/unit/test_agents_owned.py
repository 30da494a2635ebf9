"""Agents that a run makes and closes, and agents that it borrows (contract section 5)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from retinue import (
    Agent,
    DriverOutput,
    ExecutionServices,
    Grants,
    Identity,
    RunRequest,
    RuntimeConfig,
    agent_driver,
    tool,
)
from retinue.abilities import AbilityBinding
from retinue.agent_defaults import AgentDefaults, Limits
from retinue.errors import ValidationFailed
from retinue.testing import ScriptedModel, tool_calls
from tests.conftest import MakeLocalRuntime
from tests.support import (
    Flag,
    FunctionModel,
    HeldModel,
    answering,
    code_of,
    driver,
    nothing_is_left,
    soon,
    spent,
    why,
)

log: list[str] = []


@pytest.fixture(autouse=True)
def empty_log() -> None:
    log.clear()


class Notes:
    """An ability that writes its end down."""

    instance_id = "notes"

    async def bind(self, services: ExecutionServices) -> AbilityBinding:
        return AbilityBinding(dispose=lambda: log.append("ability disposed"))


class Storage:
    """Something of the application's that its agent uses."""

    def __init__(self) -> None:
        self.data = {"a": 1}
        self.sessions: dict[str, Any] = {}
        self.closed = False

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize("stream", [False, True])
async def test_c91_an_owned_agent_lives_for_a_run_and_knows_its_project(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str, tmp_path: Path, stream: bool
) -> None:
    (tmp_path / "AGENTS.md").write_text("We sell ships.")
    (tmp_path / "skills" / "sail").mkdir(parents=True)
    (tmp_path / "skills" / "sail" / "SKILL.md").write_text(
        "---\nname: sail\ndescription: How to sail.\n---\nTHE BODY"
    )
    storage, model = Storage(), ScriptedModel(["one", "two"])

    def make() -> Agent:
        assert storage.data
        return Agent(
            name="a", model=model, instructions="Be brief.", on_close=lambda: log.append("agent closed")
        )

    runtime = local_runtime(
        RuntimeConfig(
            driver=agent_driver(make, stream=stream),
            abilities=[Notes()],
            defaults=AgentDefaults(skill_dirs=["skills"], context_files=True),
            project_root=str(tmp_path),
        )
    )
    for number, text in enumerate(("one", "two"), start=1):
        handle = runtime.start("x", identity=identity, session_id=session_id)
        result = await soon(handle.result())
        assert (result.status, result.text, result.cleanup_diagnostics) == ("completed", text, ())
        assert log == ["agent closed", "ability disposed"] * number
        await nothing_is_left(runtime, handle)
    assert not storage.closed
    for request in model.requests:
        told = request.messages[0]
        assert told.role == "system"
        for part in ("Be brief.", "We sell ships.", "sail (skills/sail/SKILL.md): How to sail."):
            assert part in told.text
        assert "THE BODY" not in told.text


@pytest.mark.parametrize(
    "app", [{"defaults": AgentDefaults(subagents=False)}, {"limits": Limits(tool_roundtrips=3)}]
)
async def test_c92_a_borrowed_agent_takes_no_defaults_and_no_limits(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str, app: dict[str, Any]
) -> None:
    model = answering()
    agent = Agent(name="a", model=model, on_close=lambda: log.append("closed"))
    runtime = local_runtime(RuntimeConfig(driver=agent_driver(agent), **app))
    result = await soon(runtime.run("x", identity=identity, session_id=session_id))
    assert (result.status, code_of(result)) == ("failed", "invalid_harness")
    assert "give agent_driver() a function that makes it" in why(result)
    assert model.requests == []
    assert log == []


async def test_a_borrowed_agent_is_never_closed(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    agent = Agent(name="a", model=answering("ok"), on_close=lambda: log.append("closed"))
    runtime = local_runtime(driver=agent_driver(agent))
    assert (await soon(runtime.run("x", identity=identity, session_id=session_id))).text == "ok"
    assert log == []


async def test_c94_what_the_caller_owns_is_left_alone(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    storage = Storage()

    @tool
    async def read() -> int:
        """Read the caller's storage."""
        return storage.data["a"]

    def make() -> Agent:
        model = ScriptedModel([tool_calls(("read", {})), "it is 1"])
        return Agent(name="a", model=model, tools=[read], on_close=lambda: log.append("closed"))

    runtime = local_runtime(driver=agent_driver(make), grants=Grants(tool_ids=["read"]))
    result = await soon(runtime.run("x", identity=identity, session_id=session_id))
    assert (result.text, log) == ("it is 1", ["closed"])
    assert (storage.closed, storage.data, storage.sessions) == (False, {"a": 1}, {})
    # What was said is in the session's history, and nowhere else.
    assert len((await runtime.sessions.read(identity, session_id)).history) == 4


@pytest.mark.parametrize(
    ("own", "limit", "rounds"), [(10, 3, 3), (None, 3, 3), (2, 3, 2), (2, None, 2), (5, 0, 0)]
)
async def test_c95_the_smaller_cap_on_rounds_counts(
    local_runtime: MakeLocalRuntime,
    identity: Identity,
    session_id: str,
    own: int | None,
    limit: int | None,
    rounds: int,
) -> None:
    @tool
    async def again() -> str:
        """Does nothing."""
        return "again"

    def make() -> Agent:
        model = ScriptedModel([tool_calls(("again", {}))] * 20)
        return Agent(name="a", model=model, tools=[again], max_tool_roundtrips=own)

    runtime = local_runtime(
        RuntimeConfig(
            driver=agent_driver(make),
            limits=Limits(tool_roundtrips=limit),
            grants=Grants(tool_ids=["again"]),
        )
    )
    result = await soon(runtime.run("x", identity=identity, session_id=session_id))
    assert (result.status, spent(result).tool_calls.used) == ("failed", rounds)
    assert f"more than {rounds} rounds" in why(result)


async def test_limits_hold_for_delegates_too(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    model = ScriptedModel({"helper": [tool_calls(("nothing", {}))] * 3})

    @driver
    async def delegates(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        child = await services.delegate(Agent(name="helper", model=model), "x")
        return await child.result()

    runtime = local_runtime(
        RuntimeConfig(
            driver=delegates, limits=Limits(tool_roundtrips=1), defaults=AgentDefaults(context_files=True)
        )
    )
    result = await soon(runtime.run("x", identity=identity, session_id=session_id))
    assert "agent helper asked for more than 1 rounds" in why(result)


# --- factories --------------------------------------------------------------------------------------------


def made(text: str, **options: Any) -> Agent:
    return Agent(name="made", model=answering(text), **options)


def plain() -> Agent:
    return made("plain")


async def coroutine() -> Agent:
    await asyncio.sleep(0)
    return made("coroutine")


async def with_services(services: ExecutionServices) -> Agent:
    return made(f"for {services.request.identity.tenant_id}")


def optional(services: ExecutionServices | None = None, flavour: str = "optional") -> Agent:
    assert services is not None
    return made(flavour)


@asynccontextmanager
async def held(services: ExecutionServices) -> AsyncIterator[Agent]:
    """Holds a task group, which must be left in the task that entered it."""
    async with asyncio.TaskGroup() as group:
        beating = group.create_task(asyncio.Event().wait())
        async with asyncio.timeout(60):
            try:
                yield made("held", on_close=lambda: log.append("closed"))
            finally:
                beating.cancel()
        log.append("left")


async def gives_a_manager() -> Any:
    return held(None)  # type: ignore[arg-type]


class Factory:
    """A factory that is an object."""

    def __call__(self) -> Agent:
        return made("object")


@pytest.mark.parametrize(
    ("factory", "text", "ending"),
    [
        (plain, "plain", []),
        (coroutine, "coroutine", []),
        (with_services, "for acme", []),
        (optional, "optional", []),
        (held, "held", ["closed", "left"]),
        (gives_a_manager, "held", ["closed", "left"]),
        (Factory(), "object", []),
    ],
)
async def test_a_factory_may_be_written_in_many_ways(
    local_runtime: MakeLocalRuntime,
    identity: Identity,
    session_id: str,
    factory: Any,
    text: str,
    ending: list[str],
) -> None:
    runtime = local_runtime(driver=agent_driver(factory))
    handle = runtime.start("x", identity=identity, session_id=session_id)
    result = await soon(handle.result())
    assert (result.status, result.text, result.cleanup_diagnostics) == ("completed", text, ())
    assert log == ending
    await nothing_is_left(runtime, handle)


def test_the_drivers_id_needs_no_agent() -> None:
    assert agent_driver(plain).id == "agent:plain"
    assert agent_driver(Factory()).id == "agent:Factory"
    assert agent_driver(lambda: made("x"), name="assistant").id == "agent:assistant"
    assert agent_driver(made("x")).id == "agent:made"
    assert set(agent_driver(plain).capabilities.controls) == {"follow_up", "steer"}


def needs_more(services: ExecutionServices, client: object) -> Agent:
    raise AssertionError


@pytest.mark.parametrize(
    ("given", "options", "said"),
    [
        (lambda: made("x"), {}, "needs a name, and '<lambda>'"),
        (plain, {"name": "with space"}, "needs a name"),
        (made("x"), {"name": ""}, "needs a name"),
        (needs_more, {}, "needs the parameter 'client'"),
        ("agent", {}, "give an Agent, or a function"),
        (plain, {"stream": "yes"}, "driver.stream must be a bool"),
    ],
)
def test_what_makes_no_agent_is_refused_when_the_driver_is_made(
    given: Any, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValidationFailed, match=said):
        agent_driver(given, **options)


@asynccontextmanager
async def wrong_manager() -> AsyncIterator[Any]:
    yield "no agent"
    log.append("left")


@asynccontextmanager
async def broken_manager() -> AsyncIterator[Any]:
    if not log:
        raise ZeroDivisionError("not today")
    yield


def wrong() -> Any:
    return "no agent"


def leaves() -> Any:
    raise SystemExit(3)


@pytest.mark.parametrize(
    ("factory", "code", "said", "ending"),
    [
        (wrong, "invalid_harness", "the factory of agent wrong gave str, not an Agent", []),
        (wrong_manager, "invalid_harness", "gave str, not an Agent", ["left"]),
        (broken_manager, "execution_failed", "not today", []),
        (leaves, "execution_failed", "SystemExit", []),
    ],
)
async def test_a_factory_that_fails_fails_its_run(
    local_runtime: MakeLocalRuntime,
    identity: Identity,
    session_id: str,
    factory: Any,
    code: str,
    said: str,
    ending: list[str],
) -> None:
    runtime = local_runtime(driver=agent_driver(factory))
    handle = runtime.start("x", identity=identity, session_id=session_id)
    result = await soon(handle.result())
    assert (result.status, code_of(result), result.cleanup_diagnostics) == ("failed", code, ())
    assert said in why(result)
    assert log == ending
    await nothing_is_left(runtime, handle)


@asynccontextmanager
async def fails_at_its_end() -> AsyncIterator[Agent]:
    yield made("ok", on_close=fail)
    raise SystemExit(4)


async def fail() -> None:
    log.append("closing")
    raise ZeroDivisionError("secret")


async def test_a_close_that_fails_is_a_diagnostic_only(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    for factory in (fails_at_its_end, lambda: made("ok", on_close=fail)):
        runtime = local_runtime(driver=agent_driver(factory, name="a"))
        handle = runtime.start("x", identity=identity, session_id=session_id)
        result = await soon(handle.result())
        assert (result.status, result.text) == ("completed", "ok")
        assert result.cleanup_diagnostics == ("resource_release_failed",)
        assert "secret" not in str(result)
        await nothing_is_left(runtime, handle)
    assert log == ["closing", "closing"]


async def test_an_owned_agent_is_closed_after_the_work_that_it_left(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    model = HeldModel("late")
    agent = agent_driver(lambda: made("soon", on_close=lambda: log.append("closed")), name="a")

    @driver
    async def leaves_work(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        async def later() -> None:
            await model.go.wait()
            log.append("work")

        services.run_owned(later())
        asyncio.get_running_loop().call_soon(model.go.set)
        return await agent.start(request, services)

    runtime = local_runtime(driver=leaves_work)
    result = await soon(runtime.run("x", identity=identity, session_id=session_id))
    assert (result.status, log) == ("completed", ["work", "closed"])


@pytest.mark.parametrize("where", ["factory", "manager", "model"])
async def test_a_run_that_is_cancelled_leaves_no_agent_behind(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str, where: str
) -> None:
    there = Flag()

    async def wait(here: str) -> None:
        if here == where:
            there.set()
            await asyncio.Event().wait()

    async def ask(request: Any) -> Any:
        await wait("model")

    @asynccontextmanager
    async def manager() -> AsyncIterator[Agent]:
        try:
            await wait("manager")
            yield Agent(name="a", model=FunctionModel(ask))
        finally:
            log.append("left")

    async def make() -> Any:
        await wait("factory")
        return manager()

    runtime = local_runtime(driver=agent_driver(make))
    handle = runtime.start("x", identity=identity, session_id=session_id)
    await there.wait()
    await handle.cancel()
    assert (await soon(handle.result())).status == "cancelled"
    assert log == ([] if where == "factory" else ["left"])
    await nothing_is_left(runtime, handle)


async def test_a_delegate_may_own_its_agent(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    @driver
    async def delegates(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        child = await services.delegate(agent_driver(held), "x")
        output = await child.result()
        return DriverOutput(text=output.text, structured=list(log))

    runtime = local_runtime(driver=delegates)
    handle = runtime.start("x", identity=identity, session_id=session_id)
    result = await soon(handle.result())
    assert (result.status, result.text) == ("completed", "held")
    assert log == ["closed", "left"]
    await nothing_is_left(runtime, handle)
