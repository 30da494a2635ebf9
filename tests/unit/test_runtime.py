"""The front door: what a runtime and a start refuse at once, and what they pass on."""

from __future__ import annotations

import math
import time
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest

from retinue import (
    Budgets,
    DriverCapabilities,
    DriverOutput,
    ExecutionServices,
    Grants,
    Identity,
    ModelBinding,
    RunRequest,
    Runtime,
    RuntimeConfig,
)
from retinue.drivers import check_driver
from retinue.errors import InputError, RetinueError, Unsupported, ValidationFailed
from retinue.runtime import _check_deadline
from tests.conftest import MakeLocalRuntime
from tests.support import FunctionDriver, answering, code_of, driver, soon, trivial

GRANTS = Grants(tool_ids=["a", "b"], model_roles=["main", "judge"], required_tool_ids=["a"])


@pytest.mark.parametrize(
    "options",
    [
        {"deadline": math.nan},
        {"deadline": math.inf},
        {"deadline": "soon"},
        {"deadline": True},
        {"deadline": datetime(2030, 1, 1)},  # noqa: DTZ001 - it is naive dates that are refused
        {"identity": Identity(tenant_id="", user_id="u")},
        {"identity": Identity(tenant_id="t", user_id="")},
        {"identity": Identity(tenant_id=5, user_id="u")},  # type: ignore[arg-type]
        {"identity": Identity(tenant_id="\ud800", user_id="u")},
        {"identity": ("t", "u")},
        {"identity": None},
        {"session_id": ""},
        {"session_id": None},
        {"session_id": "x\udfff"},
        {"run_mode": "x"},
        {"grants": Grants(tool_ids=["a", "c"], model_roles=["main"])},
        {"grants": Grants(tool_ids=["a"], model_roles=["main", "writer"])},
        {"grants": Grants(tool_ids=["b"], model_roles=["main"])},
        {"grants": Grants(tool_ids=["a"], required_tool_ids=["c"])},
        {"grants": {"tool_ids": ["a"]}},
        {"run_id": "\ud800"},
        {"parent_run_id": ""},
        {"root_run_id": 5},
        {"input": None},
        {"input": "x" * 65_535},
        {"input": "\ud800"},
    ],
)
async def test_c105_a_start_that_cannot_be_is_refused_at_once(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str, options: dict[str, Any]
) -> None:
    seen: list[str] = []

    @driver
    async def watches(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        seen.append(request.run_id)
        return DriverOutput(text="ok")

    runtime = local_runtime(driver=watches, grants=GRANTS)
    arguments: dict[str, Any] = {"identity": identity, "session_id": session_id, **options}
    with pytest.raises(InputError) as refused:
        runtime.start(arguments.pop("input", "x"), **arguments)
    assert refused.value.code == "invalid_input"
    assert (await runtime.sessions.read(identity, session_id)).revision == 0
    assert seen == []


def test_c105_a_duplicate_in_grants_is_refused_where_they_are_made() -> None:
    with pytest.raises(ValidationFailed):
        Grants(tool_ids=["a", "a"])


async def test_narrowed_grants_reach_the_driver(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    @driver
    async def tells(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        grants = request.grants
        return DriverOutput(
            text=request.run_mode,
            structured=[grants.tool_ids, grants.model_roles, grants.required_tool_ids, request.deadline],
        )

    runtime = local_runtime(driver=tells, grants=GRANTS)
    deadline = time.time() + 60
    narrowed = await runtime.run(
        "x",
        identity=identity,
        session_id=session_id,
        grants=Grants(tool_ids=["a"], model_roles=["judge"]),
        run_mode="plan",
        deadline=deadline,
    )
    assert (narrowed.text, narrowed.structured) == ("plan", [["a"], ["judge"], ["a"], deadline])
    whole = await runtime.run("x", identity=identity, session_id=session_id)
    assert (whole.text, whole.structured) == ("execute", [["a", "b"], ["main", "judge"], ["a"], None])


def test_deadlines_are_epoch_seconds_or_aware_datetimes() -> None:
    moment = datetime(2030, 1, 1, 12, tzinfo=timezone(timedelta(hours=2)))
    assert _check_deadline(moment) == datetime(2030, 1, 1, 10, tzinfo=UTC).timestamp()
    assert _check_deadline(5) == 5.0
    assert _check_deadline(None) is None


# --- construction -----------------------------------------------------------------------------------------


def local(**options: Any) -> Runtime:
    return Runtime(backend="inprocess", **options)


def odd_driver(**options: Any) -> FunctionDriver:
    return FunctionDriver(trivial.function, **options)


@pytest.mark.parametrize("wrong", [None, "driver", object(), odd_driver(id=""), odd_driver(version=0)])
def test_a_runtime_needs_a_driver_with_an_id_and_a_version(wrong: Any) -> None:
    with pytest.raises(ValidationFailed) as refused:
        local(driver=wrong)
    assert refused.value.path.startswith("config.driver")
    for version in (True, 1.0, "1"):
        with pytest.raises(ValidationFailed):
            check_driver(odd_driver(version=version))


@pytest.mark.parametrize(
    ("capabilities", "operation"),
    [
        ({"durable": True}, "durable"),
        ({"controls": ["replace"]}, "replace"),
        ({"policy_coverage": "remote"}, "policy_coverage"),
        ({"controlled_execution": False}, "controlled_execution"),
    ],
)
def test_what_a_driver_must_not_promise(capabilities: dict[str, Any], operation: str) -> None:
    with pytest.raises(Unsupported) as refused:
        local(driver=odd_driver(capabilities=DriverCapabilities(**capabilities)))
    assert (refused.value.code, refused.value.operation) == ("unsupported", operation)


@pytest.mark.parametrize(
    ("options", "path"),
    [
        ({"grants": ["a"]}, "config.grants"),
        ({"budgets": {"max_tokens": 1}}, "config.budgets"),
        ({"tools": [len]}, "config.tools[0]"),
        ({"models": {"judge": "gpt"}}, "config.models.judge"),
    ],
)
def test_members_of_the_wrong_kind_are_named(options: dict[str, Any], path: str) -> None:
    with pytest.raises(ValidationFailed) as refused:
        local(driver=trivial, **options)
    assert refused.value.path == path


def test_a_required_tool_must_be_granted() -> None:
    with pytest.raises(RetinueError, match="required tool a"):
        local(driver=trivial, grants=Grants(required_tool_ids=["a"]))


@pytest.mark.parametrize(
    "options",
    [
        {"driver": trivial},
        {"budgets": Budgets(max_tokens=1)},
        {"grants": Grants()},
        {"models": {"main": answering()}},
        {"event_capacity": 10},
        {"estimate_input_tokens": lambda request, client: 1},
        {"name": "x"},
    ],
)
@pytest.mark.parametrize("app", [RuntimeConfig(driver=trivial), "tests.unit.test_delegates:make_config"])
def test_an_app_and_its_members_are_not_given_both(app: Any, options: dict[str, Any]) -> None:
    """A budget that would be ignored is no small matter."""
    with pytest.raises(ValidationFailed, match="not both"):
        Runtime(app, backend="inprocess", **options)


def test_there_are_two_backends() -> None:
    with pytest.raises(Unsupported):
        Runtime(driver=trivial, backend="threads")  # type: ignore[arg-type]


async def test_a_store_engine_cannot_travel_to_a_cluster() -> None:
    from retinue.errors import NotShippable
    from retinue.storage.memory import MemoryEngine

    with pytest.raises(NotShippable) as refused:
        Runtime(driver=trivial, store=MemoryEngine())
    assert refused.value.path == "store"


async def test_an_app_by_name_runs(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    runtime = local_runtime("tests.unit.test_delegates:make_config")
    assert (await soon(runtime.run("x", identity=identity, session_id=session_id))).text == "x"
    broken = local_runtime("tests.unit.test_delegates:fails")
    handle = broken.start("x", identity=identity, session_id=session_id)
    with pytest.raises(ValidationFailed, match="no settings"):
        await handle.accepted()
    assert code_of(await handle.result()) == "invalid_harness"


async def test_configuration_is_a_snapshot(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    model = answering("bound")
    tools: list[Any] = []
    models: dict[str, Any] = {"main": model}

    @driver
    async def asks(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        from retinue.messages import user

        response = await services.model(answering("own"), [user("x")])
        return DriverOutput(text=response.text, structured=len(services.tools))

    runtime = local_runtime(driver=asks, tools=tools, models=models)
    tools.append("late")
    models.clear()
    result = await soon(runtime.run("x", identity=identity, session_id=session_id))
    assert (result.text, result.structured) == ("bound", 0)


def test_lists_that_are_given_are_copied() -> None:
    options, controls = ["max_tokens"], ["steer"]
    binding = ModelBinding(client=answering(), options=options)
    capabilities = DriverCapabilities(controls=controls)  # type: ignore[arg-type]
    options.append("temperature")
    controls.append("follow_up")
    assert (binding.options, capabilities.controls) == (("max_tokens",), ("steer",))


def test_a_model_alone_is_a_binding() -> None:
    model = answering()
    config = RuntimeConfig(driver=trivial, models={"a": model, "b": ModelBinding(client=model, options=())})
    assert config.binding("a") == ModelBinding(client=model, options=("max_tokens", "temperature"))
    assert config.binding("b") == ModelBinding(client=model, options=())
    assert config.binding("c") is None
