"""Options of tools: what goes together, and what is refused when the tool is made."""

from __future__ import annotations

import pickle
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
import pytest

from retinue import TaskContext, Tool, ToolContext, tool
from retinue.errors import ValidationFailed
from retinue.tool_options import MAX_RESULT_BYTES, ToolOptions


def sync() -> str:
    return "x"


async def coroutine() -> str:
    return "x"


def generator() -> Iterator[int]:
    yield 1


async def async_generator() -> AsyncIterator[int]:
    yield 1


@pytest.mark.parametrize(
    ("function", "place"),
    [(sync, "thread"), (generator, "thread"), (coroutine, "loop"), (async_generator, "loop")],
)
def test_a_tool_runs_where_its_function_can_unless_told(function: Callable[..., Any], place: str) -> None:
    assert Tool(function).run_in == place
    assert tool(run_in="task")(function).run_in == "task"
    assert Tool(function).options == ToolOptions()


@pytest.mark.parametrize(
    ("function", "options", "path"),
    [
        (sync, {"run_in": "loop"}, "run_in"),
        (generator, {"run_in": "loop"}, "run_in"),
        (coroutine, {"run_in": "thread"}, "run_in"),
        (sync, {"run_in": "process"}, "run_in"),
        (sync, {"num_cpus": 1}, "num_cpus"),
        (coroutine, {"num_gpus": 0}, "num_gpus"),
        (sync, {"memory": 1}, "memory"),
        (sync, {"run_in": "thread", "resources": {"tpu": 1}}, "resources"),
        (sync, {"run_in": "task", "num_cpus": -1}, "num_cpus"),
        (sync, {"run_in": "task", "num_cpus": True}, "num_cpus"),
        (sync, {"run_in": "task", "num_gpus": float("inf")}, "num_gpus"),
        (sync, {"run_in": "task", "num_gpus": "1"}, "num_gpus"),
        (sync, {"run_in": "task", "memory": 1.5}, "memory"),
        (sync, {"run_in": "task", "memory": 0}, "memory"),
        (sync, {"run_in": "task", "resources": {"CPU": 1}}, "resources"),
        (sync, {"run_in": "task", "resources": {"": 1}}, "resources"),
        (sync, {"run_in": "task", "resources": {"tpu": None}}, "resources"),
        (sync, {"run_in": "task", "resources": [("tpu", 1)]}, "resources"),
        (sync, {"timeout": 0}, "timeout"),
        (sync, {"timeout": float("nan")}, "timeout"),
        (sync, {"timeout": "1"}, "timeout"),
        (sync, {"max_result_bytes": 0}, "max_result_bytes"),
        (sync, {"max_result_bytes": 1e3}, "max_result_bytes"),
    ],
)
def test_what_cannot_be_is_refused_when_the_tool_is_made(
    function: Callable[..., Any], options: dict[str, Any], path: str
) -> None:
    with pytest.raises(ValidationFailed) as refused:
        tool(**options)(function)
    assert refused.value.path == f"{function.__name__}.{path}"
    assert str(refused.value).startswith(f"tool {function.__name__}: {path} ")


def test_a_task_has_no_services_and_its_context_says_so() -> None:
    def wants_services(ctx: ToolContext) -> None: ...

    def looks_at_its_token(ctx: TaskContext) -> None: ...

    with pytest.raises(ValidationFailed, match="TaskContext") as refused:
        tool(run_in="task")(wants_services)
    assert refused.value.path == "wants_services.ctx"
    assert tool(run_in="task")(looks_at_its_token).takes_context
    assert Tool(looks_at_its_token).takes_context  # what a thread gets is one, and more


@tool(
    name="everything",
    run_in="task",
    num_cpus=0.5,
    num_gpus=1,
    memory=1_000_000,
    resources={"tpu": 2},
    timeout=1.5,
    max_result_bytes=10,
)
def named() -> str:
    """By name."""
    return "x"


def test_every_option_travels_with_the_tool() -> None:
    options = ToolOptions(
        run_in="task",
        num_cpus=0.5,
        num_gpus=1,
        memory=1_000_000,
        resources={"tpu": 2},
        timeout=1.5,
        max_result_bytes=10,
    )
    assert named.options == options
    inner = Tool(lambda: None, name="inner", options=options)
    for again in (pickle.loads(pickle.dumps(named)), pickle.loads(cloudpickle.dumps(inner))):
        assert again.options == options
        assert again.run_in == "task"


def test_options_are_a_copy_of_what_was_given() -> None:
    resources = {"tpu": 1.0}
    made = tool(run_in="task", resources=resources)(sync)
    resources["tpu"] = -1
    assert made.options.resources == {"tpu": 1.0}
    assert made.options.max_result_bytes == MAX_RESULT_BYTES
