"""Tools: schemas from signatures, arguments that are checked, and the way into another process."""

from __future__ import annotations

import functools
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import cloudpickle  # type: ignore[import-untyped]
import pytest
from pydantic import BaseModel, Field

from retinue import Agent, RuntimeConfig, Tool, ToolContext, agent_driver, tool
from retinue.errors import ValidationFailed
from retinue.tool_output import ToolOutput
from retinue.tools import ToolArgumentError
from tests.support import answering, trivial


class Filter(BaseModel):
    field: str
    above: float = 0.0


@tool
def search(
    words: Annotated[list[str], Field(min_length=1)],
    where: Literal["docs", "code"] = "docs",
    limit: int = 10,
    only: Filter | None = None,
    *,
    ctx: ToolContext,
) -> str:
    """Search for words.

    More about it.
    """
    return f"{words} {where} {limit} {only} {ctx.call_id}"


@tool(name="other:name", description="Told otherwise")
async def renamed(schema: int, _private: str = "x", model_config: str = "y", self: str = "z") -> str:
    """Not this."""
    return f"{schema}{_private}{model_config}{self}"


def test_the_schema_comes_from_hints_and_docstring() -> None:
    schema = search.schema
    assert (schema.name, schema.description) == ("search", "Search for words.\n\nMore about it.")
    properties = schema.parameters["properties"]
    assert list(properties) == ["words", "where", "limit", "only"]
    assert properties["words"] == {
        "items": {"type": "string"},
        "minItems": 1,
        "title": "Words",
        "type": "array",
    }
    assert properties["where"]["enum"] == ["docs", "code"]
    assert schema.parameters["required"] == ["words"]
    assert schema.parameters["type"] == "object"
    assert schema.parameters["additionalProperties"] is False
    assert "Filter" in schema.parameters["$defs"]
    assert search.takes_context
    assert not search.is_async


def test_arguments_arrive_as_the_function_takes_them() -> None:
    arguments = search.validate({"words": ["a"], "only": {"field": "f"}, "limit": "7"})
    assert arguments == {"words": ["a"], "where": "docs", "limit": 7, "only": Filter(field="f")}


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({}, "words: Field required"),
        ({"words": []}, "words: "),
        ({"words": ["a"], "where": "mars"}, "where: "),
        ({"words": ["a"], "limit": "many"}, "limit: "),
        ({"words": ["a"], "only": {"field": "f", "above": "x"}}, "only.above: "),
        ({"words": ["a"], "what": 1}, "what: Extra inputs are not permitted"),
        ({"words": ["a"], "ctx": 1}, "ctx: Extra inputs are not permitted"),
        ({"words": ["a"], "p1": "docs"}, "p1: Extra inputs are not permitted"),
    ],
)
def test_wrong_arguments_are_named(arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(ToolArgumentError) as wrong:
        search.validate(arguments)
    assert str(wrong.value).startswith("invalid arguments for search: ")
    assert named in str(wrong.value)


def test_defaults_are_not_shared_between_calls() -> None:
    def collect(into: list[int] = []) -> list[int]:  # noqa: B006 - a tool may be written like this
        return into

    made = Tool(collect)
    made.validate({})["into"].append(1)
    assert made.validate({}) == {"into": []}


async def test_names_that_a_model_class_could_not_have_are_fine() -> None:
    assert (renamed.name, renamed.description, renamed.is_async) == ("other:name", "Told otherwise", True)
    assert list(renamed.schema.parameters["properties"]) == ["schema", "_private", "model_config", "self"]
    assert await renamed(**renamed.validate({"schema": 1, "_private": "p"})) == "1pyz"


def test_a_tool_is_still_its_function() -> None:
    @tool
    def add(a: int, b: int) -> int:
        return a + b

    assert add(1, b=2) == 3
    assert repr(add) == "<Tool add>"


class CallableObject:
    """An object that can be called."""

    async def __call__(self, a: int) -> int:
        return a


class Owner:
    def method(self, a: int) -> int:
        """A method."""
        return a


def test_objects_and_methods_can_be_tools() -> None:
    assert Tool(CallableObject(), name="object").is_async
    assert list(Tool(CallableObject(), name="object").parameters["properties"]) == ["a"]
    assert Tool(Owner().method).schema.description == "A method."
    assert list(Tool(functools.partial(Owner().method), name="part").parameters["properties"]) == ["a"]


class Arbitrary:
    pass


def test_what_has_no_schema_is_refused_with_the_tools_name() -> None:
    def positional(a: int, /) -> None: ...
    def anything(*args: int) -> None: ...
    def keywords(**kwargs: int) -> None: ...
    def arbitrary(a: Arbitrary) -> None: ...
    def function(a: Callable[[int], int]) -> None: ...
    def unresolved(a: Nowhere) -> None: ...  # type: ignore[name-defined]  # noqa: F821

    for function_ in (positional, anything, keywords, arbitrary, function, unresolved):
        with pytest.raises(ValidationFailed, match=f"tool {function_.__name__}: "):
            tool(function_)


@pytest.mark.parametrize("name", ["-x", "has space", "ünicode", "x\n", ".x"])
def test_names_follow_the_contract(name: str) -> None:
    with pytest.raises(ValidationFailed, match="tool name"):
        Tool(lambda: None, name=name)
    assert Tool(lambda: None, name="a.b_c:d/e-f9").name == "a.b_c:d/e-f9"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("x", "x"),
        (None, ""),
        ({"a": [1, None]}, '{"a":[1,null]}'),
        (True, "true"),
        (1.5, "1.5"),
        ({1}, "[1]"),
    ],
)
def test_results_become_text(value: object, text: str) -> None:
    assert ToolOutput.of(value, "t").text == text


def test_a_result_that_is_no_json_is_still_text() -> None:
    assert (ToolOutput.of(Arbitrary(), "t").text or "").startswith("<")


# --- pickling ---------------------------------------------------------------------------------------------


def test_a_decorated_function_of_a_module_travels_by_name() -> None:
    for dumps in (pickle.dumps, cloudpickle.dumps):
        data = dumps(search)
        assert len(data) < 200
        assert pickle.loads(data) is search


def test_other_tools_travel_by_value() -> None:
    secret = "from the closure"

    @tool(name="inner", description="d")
    def inner(a: int) -> str:
        return f"{a} {secret}"

    again = pickle.loads(cloudpickle.dumps(inner))
    assert (again.name, again.description, again(1)) == ("inner", "d", "1 from the closure")
    assert again.schema == inner.schema
    method = pickle.loads(cloudpickle.dumps(Tool(Owner().method)))
    assert method(3) == 3


def test_a_tool_of_a_script_reaches_another_process(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, cloudpickle\n"
        "from retinue import tool\n"
        "FACTOR = 3\n"
        "@tool\n"
        "def triple(a: int) -> int:\n"
        "    return a * FACTOR\n"
        "sys.stdout.buffer.write(cloudpickle.dumps(triple))\n"
    )
    root = Path(__file__).resolve().parents[2]
    made = subprocess.run(
        [sys.executable, str(script)], capture_output=True, timeout=60, env={"PYTHONPATH": str(root)}
    )
    assert made.returncode == 0, made.stderr.decode()
    again = pickle.loads(made.stdout)
    assert (again.name, again(a=2), again.validate({"a": "5"})) == ("triple", 6, {"a": 5})


# --- collections of tools ---------------------------------------------------------------------------------


def test_lists_of_tools_are_checked_where_they_are_given() -> None:
    with pytest.raises(ValidationFailed) as refused:
        Agent(name="a", model=answering(), tools=[search, lambda: None])  # type: ignore[list-item]
    assert refused.value.path == "agent.a.tools[1]"
    with pytest.raises(ValidationFailed, match="two tools named search"):
        Agent(name="a", model=answering(), tools=[search, search])
    with pytest.raises(ValidationFailed) as refused:
        RuntimeConfig(driver=trivial, tools=["search"])  # type: ignore[list-item]
    assert refused.value.path == "config.tools[0]"


def test_an_agents_shape_is_checked() -> None:
    for name in ("", "has space", 5):
        with pytest.raises(ValidationFailed) as refused:
            Agent(name=name, model=answering())  # type: ignore[arg-type]
        assert refused.value.path == "agent.name"
    with pytest.raises(ValidationFailed) as refused:
        Agent(name="a", model="gpt")  # type: ignore[arg-type]
    assert refused.value.path == "agent.a.model"
    given = [search]
    agent = Agent(name="a", model=answering(), tools=given)
    given.clear()
    assert agent.tools == (search,)
    assert agent_driver(agent).id == "agent:a"
