"""Abilities: bound in order, disposed in reverse, once per run; what a broken one leaves behind."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest

from retinue import (
    Agent,
    DriverOutput,
    ExecutionServices,
    Grants,
    Identity,
    ModelBinding,
    RunRequest,
    RuntimeConfig,
    ToolCall,
    agent_driver,
    tool,
)
from retinue.abilities import (
    AbilityBinding,
    BoundAbilities,
    CleanupDiagnostic,
    PromptFragment,
    check_abilities,
)
from retinue.errors import ValidationFailed
from retinue.messages import system, user
from retinue.resources import Resource
from retinue.testing import ScriptedModel, tool_calls
from tests.conftest import MakeLocalRuntime
from tests.support import Flag, answering, code_of, driver, nothing_is_left, soon, trivial, why

Bind = Callable[[ExecutionServices], Awaitable[Any]]


@tool
async def search(text: str) -> str:
    """Look something up."""
    return f"found {text}"


@tool(name="search")
async def other_search(text: str) -> str:
    """Look something up elsewhere."""
    return f"found {text} elsewhere"


@dataclass
class Bench:
    """Makes abilities that write down what happens to them."""

    log: list[str] = field(default_factory=list)

    def ability(
        self, name: str, *, bind: Bind | None = None, dispose: Any = None, **binding: Any
    ) -> TestAbility:
        async def plain(services: ExecutionServices) -> AbilityBinding:
            self.log.append(f"bind {name}")
            return AbilityBinding(dispose=dispose or self.disposal(name), **binding)

        return TestAbility(name, bind or plain)

    def disposal(self, name: str) -> Callable[[], Awaitable[None]]:
        async def dispose() -> None:
            await asyncio.sleep(0)
            self.log.append(f"dispose {name}")

        return dispose


@dataclass
class TestAbility:
    __test__ = False

    instance_id: str
    function: Bind

    async def bind(self, services: ExecutionServices) -> AbilityBinding:
        return cast(AbilityBinding, await self.function(services))


def services(*tools: Any) -> Any:
    return SimpleNamespace(cancelled=False, config=SimpleNamespace(tools=tools), ability_tools=(), prompts=())


async def test_they_are_bound_in_order_and_disposed_in_reverse_once() -> None:
    bench = Bench()
    given = services()
    bound = BoundAbilities(
        [
            bench.ability(
                "a", tools=[search], prompt_fragments=[PromptFragment(id="p", text="Search first.")]
            ),
            bench.ability("b", prompt_fragments=[PromptFragment(id="q", text="Then answer.")]),
            bench.ability("c", dispose=lambda: bench.log.append("dispose c")),
        ],
        given,
    )
    await bound.bind()
    assert given.ability_tools == (search,)
    assert given.prompts == (system("Search first."), system("Then answer."))
    together = await asyncio.gather(bound.dispose(), bound.dispose())
    assert [*together, await bound.dispose()] == [[], [], []]
    assert bench.log == ["bind a", "bind b", "bind c", "dispose c", "dispose b", "dispose a"]


async def test_a_cleanup_that_fails_is_a_diagnostic_and_stops_no_other() -> None:
    bench = Bench()

    def leave() -> None:
        raise SystemExit(3)

    async def fail() -> None:
        raise RuntimeError("secret")

    bound = BoundAbilities(
        [
            bench.ability("a"),
            bench.ability("b", dispose=fail),
            bench.ability("c", dispose=leave),
            bench.ability("d", dispose="no function"),
        ],
        services(),
    )
    await bound.bind()
    assert await bound.dispose() == ["cleanup_failed"] * 3
    assert await bound.dispose() == ["cleanup_failed"] * 3
    assert bench.log[-1] == "dispose a"
    assert bound.diagnostics == tuple(
        CleanupDiagnostic(code="cleanup_failed", path=f"abilities[{index}]", severity="warning")
        for index in (3, 2, 1)
    )
    assert "secret" not in str(bound.diagnostics)


async def test_whoever_waits_for_the_cleanup_may_be_cancelled_the_cleanup_is_not() -> None:
    bench = Bench()
    going, go = Flag(), Flag()

    async def slow() -> None:
        going.set()
        await go.wait()
        bench.log.append("dispose slow")

    bound = BoundAbilities([bench.ability("a", dispose=slow)], services())
    await bound.bind()
    first = asyncio.create_task(bound.dispose())
    await going.wait()
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    go.set()
    assert await soon(bound.dispose()) == []
    assert bench.log == ["bind a", "dispose slow"]


async def test_c47_a_failing_bind_is_what_is_raised_with_the_diagnostics_of_the_cleanup() -> None:
    bench = Bench()
    primary = ValueError("primary")

    async def fail() -> None:
        raise RuntimeError("cleanup")

    async def bind(given: ExecutionServices) -> AbilityBinding:
        raise primary

    bound = BoundAbilities(
        [bench.ability("a", dispose=fail), bench.ability("b", bind=bind), bench.ability("c")], services()
    )
    with pytest.raises(ValueError, match="primary") as raised:
        await bound.bind()
    assert raised.value is primary
    expected = CleanupDiagnostic(code="cleanup_failed", path="abilities[0]", severity="warning")
    assert raised.value.cleanup_diagnostics == (expected,)  # type: ignore[attr-defined]
    assert bench.log == ["bind a"]  # c never began
    assert await bound.dispose() == ["cleanup_failed"]


class Immutable(Exception):
    def __setattr__(self, name: str, value: object) -> None:
        if not name.startswith("__"):
            raise AttributeError(name)
        super().__setattr__(name, value)


async def test_c48_an_error_that_takes_no_attributes_is_raised_all_the_same() -> None:
    bench = Bench()
    primary = Immutable("primary")

    async def bind(given: ExecutionServices) -> AbilityBinding:
        raise primary

    bound = BoundAbilities([bench.ability("a"), bench.ability("b", bind=bind)], services())
    with pytest.raises(Immutable) as raised:
        await bound.bind()
    assert raised.value is primary
    assert bench.log == ["bind a", "dispose a"]


def prompt(name: str = "p") -> PromptFragment:
    return PromptFragment(id=name, text="x")


@pytest.mark.parametrize(
    ("binding", "path", "said"),
    [
        (AbilityBinding(tools=None), "abilities[1].tools", "must be a list"),  # type: ignore[arg-type]
        (AbilityBinding(tools=[print]), "abilities[1].tools[0]", "decorate it with @tool"),  # type: ignore[list-item]
        (AbilityBinding(tools=[other_search]), "abilities[1].tools", "duplicate"),
        (AbilityBinding(prompt_fragments="x"), "abilities[1].prompt_fragments", "must be a list"),  # type: ignore[arg-type]
        (AbilityBinding(prompt_fragments=["x"]), "abilities[1].prompt_fragments", "no PromptFragment"),  # type: ignore[list-item]
        (AbilityBinding(prompt_fragments=[prompt()]), "abilities[1].prompt_fragments", "duplicate"),
        (AbilityBinding(prompt_fragments=[prompt("?")]), "abilities[1].prompt_fragments.id", "must start"),
        (
            AbilityBinding(prompt_fragments=[PromptFragment(id="q", text="\ud800")]),
            "abilities[1].prompt_fragments",
            "lone surrogate",
        ),
        (SimpleNamespace(), "abilities[1]", "must return an AbilityBinding"),
        ({"tools": []}, "abilities[1]", "must return an AbilityBinding"),
        (None, "abilities[1]", "must return an AbilityBinding"),
    ],
)
async def test_c51_what_is_malformed_or_a_duplicate_fails_and_disposes_everything(
    binding: Any, path: str, said: str
) -> None:
    bench = Bench()

    async def bind(given: ExecutionServices) -> Any:
        dispose = bench.disposal("b")
        if isinstance(binding, AbilityBinding):
            return AbilityBinding(
                tools=binding.tools, prompt_fragments=binding.prompt_fragments, dispose=dispose
            )
        if isinstance(binding, dict):
            return {**binding, "dispose": dispose}
        if isinstance(binding, SimpleNamespace):
            return SimpleNamespace(dispose=dispose)
        bench.log.append("dispose b")  # nothing can be called here
        return binding

    given = services()
    first = bench.ability("a", tools=[search], prompt_fragments=[prompt()])
    with pytest.raises(ValidationFailed, match=said) as refused:
        await BoundAbilities([first, bench.ability("b", bind=bind)], given).bind()
    assert refused.value.path == path
    assert bench.log == ["bind a", "dispose b", "dispose a"]
    assert (given.ability_tools, given.prompts) == ((), ())


async def test_a_plain_function_may_bind_and_what_it_gave_is_disposed() -> None:
    bench = Bench()

    class Plain:
        instance_id = "plain"

        def bind(self, given: ExecutionServices) -> AbilityBinding:
            return AbilityBinding(dispose=bench.disposal("plain"))

    bound = BoundAbilities([Plain()], services())  # type: ignore[list-item]
    await bound.bind()
    await bound.dispose()
    assert bench.log == ["dispose plain"]


async def test_cancellation_is_looked_at_before_and_after_each_bind() -> None:
    bench = Bench()
    given = services()
    given.cancelled = True
    with pytest.raises(asyncio.CancelledError):
        await BoundAbilities([bench.ability("a")], given).bind()
    assert bench.log == []

    given.cancelled = False

    async def cancelled_meanwhile(services: ExecutionServices) -> AbilityBinding:
        given.cancelled = True
        return AbilityBinding(dispose=bench.disposal("b"))

    abilities = [bench.ability("a"), bench.ability("b", bind=cancelled_meanwhile), bench.ability("c")]
    with pytest.raises(asyncio.CancelledError):
        await BoundAbilities(abilities, given).bind()
    assert bench.log == ["bind a", "dispose b", "dispose a"]


def test_abilities_of_an_app_have_ids_of_their_own() -> None:
    bench = Bench()
    a = bench.ability("a")
    assert check_abilities([a], "config.abilities") == (a,)
    for wrong, path in (
        ([a, bench.ability("a")], "config.abilities[1]"),
        ([bench.ability("")], "config.abilities[0].instance_id"),
        ([a, object()], "config.abilities[1]"),
        ("abc", "config.abilities"),
        (a, "config.abilities"),
    ):
        with pytest.raises(ValidationFailed) as refused:
            RuntimeConfig(driver=trivial, abilities=wrong)  # type: ignore[arg-type]
        assert refused.value.path == path


# --- in runs ----------------------------------------------------------------------------------------------


async def test_a_run_has_their_tools_and_prompts_and_ends_after_they_did(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    bench = Bench()
    judge = answering("fine")

    @driver
    async def asks(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        bench.log.append("driver")

        def held() -> Resource[str]:
            return Resource(value="r", dispose=lambda: bench.log.append("dispose resource"))

        await services.resource("r", "run", held)
        model = answering("done")
        await services.model(model, [user("x")], tools=[search.schema])
        await services.control_model("judge", [user("well?")])
        result = await services.dispatch(ToolCall("1", "search", {"text": "it"}))
        plain = [[message.text for message in asked.requests[0].messages] for asked in (model, judge)]
        return DriverOutput(text=result.text, structured=plain)

    ability = bench.ability(
        "a", tools=[search], prompt_fragments=[PromptFragment(id="p", text="Search first.")]
    )
    runtime = local_runtime(
        RuntimeConfig(
            driver=asks,
            abilities=[ability, bench.ability("b")],
            models={"judge": ModelBinding(client=judge)},
            grants=Grants(tool_ids=["search"], model_roles=["main", "judge"]),
        )
    )
    for number in (1, 2):
        handle = runtime.start("x", identity=identity, session_id=session_id)
        result = await soon(handle.result())
        assert (result.status, result.text) == ("completed", "found it")
        # Control calls skip what abilities say (contract section 3).
        assert result.structured == [["Search first.", "x"], ["well?"]]
        assert result.cleanup_diagnostics == ()
        once = ["bind a", "bind b", "driver", "dispose resource", "dispose b", "dispose a"]
        assert bench.log == once * number
        await nothing_is_left(runtime, handle)


async def test_delegates_have_neither_the_tools_nor_the_prompts(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    bench = Bench()
    model = ScriptedModel({"helper": [tool_calls(("search", {"text": "it"})), "gave up"]})
    helper = Agent(name="helper", model=model)

    @driver
    async def delegates(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        child = await services.delegate(helper, "look")
        return await child.result()

    ability = bench.ability("a", tools=[search], prompt_fragments=[PromptFragment(id="p", text="Search.")])
    runtime = local_runtime(
        RuntimeConfig(driver=delegates, abilities=[ability], grants=Grants(tool_ids=["search"]))
    )
    result = await soon(runtime.run("x", identity=identity, session_id=session_id))
    assert (result.status, result.text) == ("completed", "gave up")
    first, last = model.requests
    assert [message.role for message in first.messages] == ["user"]
    assert list(first.tools) == []
    assert last.messages[-1].text == "there is no tool 'search'"
    assert bench.log == ["bind a", "dispose a"]


async def test_c52_a_tool_of_the_app_and_one_of_an_ability_must_not_share_a_name(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    bench = Bench()
    model = answering()
    runtime = local_runtime(
        RuntimeConfig(
            driver=agent_driver(Agent(name="a", model=model)),
            tools=[other_search],
            abilities=[bench.ability("a"), bench.ability("b", tools=[search])],
            grants=Grants(tool_ids=["search"]),
        )
    )
    handle = runtime.start("x", identity=identity, session_id=session_id)
    result = await soon(handle.result())
    assert (result.status, code_of(result)) == ("failed", "invalid_harness")
    assert "a tool named search already" in why(result)
    assert model.requests == []
    assert bench.log == ["bind a", "bind b", "dispose b", "dispose a"]
    assert "run.started" not in [event.type async for event in handle.events()]
    await nothing_is_left(runtime, handle)


async def test_cleanup_that_fails_is_told_and_changes_no_outcome(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    bench = Bench()

    async def fail() -> None:
        raise RuntimeError("secret")

    runtime = local_runtime(RuntimeConfig(driver=trivial, abilities=[bench.ability("a", dispose=fail)]))
    result = await soon(runtime.run("x", identity=identity, session_id=session_id))
    assert (result.status, result.text, result.cleanup_diagnostics) == ("completed", "x", ("cleanup_failed",))

    async def bind(services: ExecutionServices) -> AbilityBinding:
        raise SystemExit("primary")

    runtime = local_runtime(
        RuntimeConfig(
            driver=trivial, abilities=[bench.ability("a", dispose=fail), bench.ability("b", bind=bind)]
        )
    )
    result = await soon(runtime.run("x", identity=identity, session_id=session_id))
    assert (result.status, result.cleanup_diagnostics) == ("failed", ("cleanup_failed",))
    assert why(result) == "ability b raised SystemExit: primary"


async def test_a_run_that_is_cancelled_while_it_binds_disposes_what_it_had(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    bench = Bench()
    binding = Flag()

    async def bind(services: ExecutionServices) -> AbilityBinding:
        binding.set()
        await asyncio.Event().wait()
        raise AssertionError

    abilities = [bench.ability("a"), bench.ability("b", bind=bind), bench.ability("c")]
    runtime = local_runtime(RuntimeConfig(driver=trivial, abilities=abilities))
    handle = runtime.start("x", identity=identity, session_id=session_id)
    await binding.wait()
    await handle.cancel()
    assert (await soon(handle.result())).status == "cancelled"
    assert bench.log == ["bind a", "dispose a"]
    await nothing_is_left(runtime, handle)
