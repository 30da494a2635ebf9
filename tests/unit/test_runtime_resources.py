"""Resources end to end: through services, sessions and the runtime."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import pytest

from retinue import (
    Agent,
    DriverOutput,
    ExecutionServices,
    Grants,
    Identity,
    Resource,
    RunRequest,
    Runtime,
    ToolContext,
    agent_driver,
    tool,
)
from retinue.errors import InputError, SessionConflict
from retinue.testing import ScriptedModel, reply, tool_calls
from tests.conftest import MakeLocalRuntime
from tests.support import Flag, FunctionDriver, backend_of, code_of, driver, nothing_is_left, soon, why

SESSION: Literal["session"] = "session"


class Connections:
    """Counts what is opened and closed."""

    def __init__(self) -> None:
        self.opened = 0
        self.closed: list[str] = []

    def opening(self, name: str, **options: Any) -> Any:
        async def initialize() -> Resource[str]:
            self.opened += 1
            return Resource(
                value=f"{name} {self.opened}", dispose=lambda: self.closed.append(name), **options
            )

        return initialize


@pytest.fixture
def connections() -> Connections:
    return Connections()


def using(connections: Connections, scope: Any, *names: str) -> FunctionDriver:
    """A driver that acquires these and answers with the last value."""

    @driver
    async def uses(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        values = [await services.resource(name, scope, connections.opening(name)) for name in names]
        return DriverOutput(text=values[-1])

    return uses


async def run(runtime: Runtime, identity: Identity, session_id: str) -> Any:
    return await soon(runtime.run("go", identity=identity, session_id=session_id))


async def test_c21_runs_of_a_session_share_what_another_tenant_has_for_itself(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str, connections: Connections
) -> None:
    runtime = local_runtime(driver=using(connections, SESSION, "db"))
    assert [(await run(runtime, identity, session_id)).text for _ in range(3)] == ["db 1"] * 3
    other = Identity(tenant_id="other", user_id=identity.user_id)
    assert (await run(runtime, other, session_id)).text == "db 2"
    assert connections.closed == []
    assert await runtime.resources.close_session(other, session_id) == []
    assert connections.closed == ["db"]
    assert (await run(runtime, identity, session_id)).text == "db 1"


async def test_c24_closing_during_a_run_disposes_of_nothing(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str, connections: Connections
) -> None:
    acquired, go = Flag(), Flag()

    @driver
    async def waits(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        await services.resource("db", SESSION, connections.opening("db"))
        acquired.set()
        await go.wait()
        return DriverOutput(text="done")

    runtime = local_runtime(driver=waits)
    handle = runtime.start("go", identity=identity, session_id=session_id)
    await acquired.wait()
    with pytest.raises(SessionConflict) as refused:
        await runtime.resources.close_session(identity, session_id)
    assert refused.value.code == "session_conflict"
    assert connections.closed == []
    go.set()
    assert (await soon(handle.result())).status == "completed"
    assert await runtime.resources.close_session(identity, session_id) == []
    assert connections.closed == ["db"]


async def test_c25_closing_while_one_is_being_made_disposes_of_nothing(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str, connections: Connections
) -> None:
    making, go = Flag(), Flag()

    async def slow() -> Resource[str]:
        making.set()
        await go.wait()
        return Resource(value="made", dispose=lambda: connections.closed.append("slow"))

    @driver
    async def waits(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        return DriverOutput(text=await services.resource("slow", SESSION, slow))

    runtime = local_runtime(driver=waits)
    handle = runtime.start("go", identity=identity, session_id=session_id)
    await making.wait()
    with pytest.raises(SessionConflict):
        await runtime.resources.close_session(identity, session_id)
    go.set()
    assert (await soon(handle.result())).text == "made"
    assert await runtime.resources.close_session(identity, session_id) == []
    assert connections.closed == ["slow"]


async def test_c27_c31_host_owned_and_unknown(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str, connections: Connections
) -> None:
    @driver
    async def borrows(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        initialize = connections.opening("theirs", ownership="host")
        return DriverOutput(text=await services.resource("theirs", SESSION, initialize))

    runtime = local_runtime(driver=borrows)
    assert await runtime.resources.close_session(identity, session_id) == []
    assert backend_of(runtime)._host.statistics().activations == 0  # nothing came to life for it
    await run(runtime, identity, session_id)
    assert await runtime.resources.close_session(identity, session_id) == []
    assert connections.closed == []
    assert (await run(runtime, identity, session_id)).text == "theirs 2"


async def test_c32_history_and_artifacts_outlive_the_resources(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str, connections: Connections
) -> None:
    @driver
    async def works(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        from retinue.messages import user

        await services.resource("db", SESSION, connections.opening("db"))
        await services.put_artifact("kept", artifact_id="file")
        services.append([user("said")])
        return DriverOutput(text="done")

    runtime = local_runtime(driver=works)
    await run(runtime, identity, session_id)
    assert await runtime.resources.close_session(identity, session_id) == []
    assert connections.closed == ["db"]
    assert [message.text for message in (await runtime.sessions.read(identity, session_id)).history] == [
        "said"
    ]
    found = await runtime.get_artifact(identity, session_id, "file")
    assert found is not None
    assert found.data == b"kept"


def test_the_blocking_twin(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str, connections: Connections
) -> None:
    runtime = local_runtime(driver=using(connections, SESSION, "a", "b"))
    runtime.run_blocking("go", identity=identity, session_id=session_id)
    assert runtime.resources.close_session_blocking(identity, session_id) == []
    assert connections.closed == ["b", "a"]


async def test_bad_addresses_are_refused(local_runtime: MakeLocalRuntime, identity: Identity) -> None:
    runtime = local_runtime(driver=using(Connections(), "run", "x"))
    with pytest.raises(InputError):
        await runtime.resources.close_session(identity, "")


async def test_run_resources_end_after_the_run_in_reverse(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str, connections: Connections
) -> None:
    runtime = local_runtime(driver=using(connections, "run", "a", "b"))
    handle = runtime.start("go", identity=identity, session_id=session_id)
    result = await soon(handle.result())
    assert (result.status, result.cleanup_diagnostics) == ("completed", ())
    assert connections.closed == ["b", "a"]
    await nothing_is_left(runtime, handle)
    assert await runtime.resources.close_session(identity, session_id) == []
    assert connections.closed == ["b", "a"]


async def test_run_resources_end_after_owned_work_has_settled(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    order = []

    @driver
    async def works(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        await services.resource(
            "db", "run", lambda: Resource(value=1, dispose=lambda: order.append("closed"))
        )

        async def later() -> None:
            await asyncio.sleep(0.02)
            order.append("used")

        services.run_owned(later())
        return DriverOutput(text="done")

    await run(local_runtime(driver=works), identity, session_id)
    assert order == ["used", "closed"]


async def test_a_failing_release_is_a_diagnostic_and_not_the_result(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str, connections: Connections
) -> None:
    def fail() -> None:
        raise OSError("does not close")

    @driver
    async def works(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        await services.resource("first", "run", connections.opening("first"))
        await services.resource("bad", "run", lambda: Resource(value=1, dispose=fail))
        return DriverOutput(text="done")

    runtime = local_runtime(driver=works)
    handle = runtime.start("go", identity=identity, session_id=session_id)
    result = await soon(handle.result())
    assert (result.status, result.text) == ("completed", "done")
    assert result.cleanup_diagnostics == ("resource_release_failed",)
    assert connections.closed == ["first"]
    assert (await runtime.sessions.latest(identity, session_id)).replayable


async def test_an_initialiser_that_fails_is_the_primary_failure(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    disposed = []

    def failing_dispose() -> None:
        disposed.append("first")
        raise OSError("secondary")

    async def fail() -> Resource[str]:
        raise OSError("primary")

    @driver
    async def works(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        await services.resource("first", "run", lambda: Resource(value=1, dispose=failing_dispose))
        await services.resource("second", "run", fail)
        return DriverOutput(text="done")

    result = await run(local_runtime(driver=works), identity, session_id)
    assert result.status == "failed"
    assert why(result) == "primary"
    assert result.cleanup_diagnostics == ("resource_release_failed",)
    assert disposed == ["first"]


@pytest.mark.parametrize("scope", ["run", SESSION])
async def test_a_cancelled_run_waits_for_its_initialiser_and_leaves_nothing(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str, scope: Any
) -> None:
    """One that cannot be interrupted: what it makes all the same is disposed of when its time is over."""
    making, go = Flag(), Flag()
    closed: list[str] = []
    refusals: list[str] = []

    async def stubborn() -> Resource[str]:
        making.set()
        waiting = asyncio.ensure_future(go.wait())
        while not waiting.done():
            try:
                await asyncio.shield(waiting)
            except asyncio.CancelledError:
                continue
        return Resource(value="late", dispose=lambda: closed.append("late"))

    @driver
    async def works(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        try:
            await services.resource("late", scope, stubborn)
        finally:
            try:
                await services.resource("later", scope, lambda: Resource(value=1))
            except asyncio.CancelledError:
                refusals.append("later")
        return DriverOutput(text="done")

    runtime = local_runtime(driver=works)
    handle = runtime.start("go", identity=identity, session_id=session_id)
    await making.wait()
    await handle.cancel("enough")
    assert handle.state == "cancelling"
    go.set()
    result = await soon(handle.result())
    assert result.status == "cancelled"
    assert refusals == ["later"]
    await nothing_is_left(runtime, handle)
    assert closed == (["late"] if scope == "run" else [])
    assert await runtime.resources.close_session(identity, session_id) == []
    assert closed == ["late"]


async def test_services_that_outlive_their_run_acquire_nothing(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str, connections: Connections
) -> None:
    kept: list[ExecutionServices] = []

    @driver
    async def keeps(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        kept.append(services)
        return DriverOutput(text="done")

    await run(local_runtime(driver=keeps), identity, session_id)
    with pytest.raises(InputError) as refused:
        await kept[0].resource("late", "run", connections.opening("late"))
    assert refused.value.code == "run_finished"
    assert connections.opened == 0


async def test_a_tool_uses_a_session_resource(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str, connections: Connections
) -> None:
    @tool
    async def query(ctx: ToolContext) -> str:
        return await ctx.services.resource("db", SESSION, connections.opening("db"))

    model = ScriptedModel([tool_calls(("query", {}), ("query", {})), reply("one"), reply("two")])
    runtime = local_runtime(
        driver=agent_driver(Agent(name="a", model=model, tools=[query])), grants=Grants(tool_ids=["query"])
    )
    await run(runtime, identity, session_id)
    await run(runtime, identity, session_id)
    history = (await runtime.sessions.latest(identity, session_id)).history
    assert [message.text for message in history if message.role == "tool"] == ["db 1", "db 1"]
    assert await runtime.resources.close_session(identity, session_id) == []
    assert connections.closed == ["db"]


closed_in_delegates: list[str] = []


async def _delegate(request: RunRequest, services: ExecutionServices) -> DriverOutput:
    scope: Any = request.input
    made = Resource(value="mine", dispose=lambda: closed_in_delegates.append(request.run_id))
    return DriverOutput(text=await services.resource("x", scope, lambda: made))


using_delegate = FunctionDriver(_delegate)


async def test_a_delegate_has_run_resources_and_no_session_resources(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    seen = []

    @driver
    async def parent(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        child = await services.delegate(using_delegate, "run")
        text = (await child.result()).text
        seen.append((child.run_id in closed_in_delegates, text))
        other = await services.delegate(using_delegate, SESSION)
        return DriverOutput(text=(await other.result()).text)

    result = await run(local_runtime(driver=parent), identity, session_id)
    assert seen == [(True, "mine")]
    assert code_of(result) == "unsupported"


async def test_a_session_that_leaves_memory_disposes_of_its_resources(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str, connections: Connections
) -> None:
    runtime = local_runtime(driver=using(connections, SESSION, "a", "b"))
    await run(runtime, identity, session_id)
    runtime.close()
    assert connections.closed == ["b", "a"]
