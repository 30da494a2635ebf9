"""What can travel to another process, and what is said about what cannot."""

from __future__ import annotations

import pickle
import threading
from dataclasses import dataclass, field
from typing import Any

import pytest

from retinue import Agent, Runtime, RuntimeConfig, Team, Tool, agent_driver, team_driver
from retinue.apps import app_by_name, app_by_value, load_app
from retinue.delegates import pickle_value, pickle_work
from retinue.errors import NotShippable, ValidationFailed
from retinue.testing import ScriptedModel
from tests.support import trivial


class Client:
    """Holds a connection, which cannot travel."""

    def __init__(self) -> None:
        self.options = {"pool": [threading.Lock()]}

    def lookup(self, id: str) -> str:
        """Read a record."""
        return id


def fine(a: int) -> int:
    """Nothing special."""
    return a


def with_client() -> Tool:
    client = Client()

    def lookup(id: str) -> str:
        return client.lookup(id)

    return Tool(lookup)


def app(tool: Tool) -> RuntimeConfig:
    tools = [Tool(fine), Tool(fine, name="fine2"), tool]
    return RuntimeConfig(driver=agent_driver(Agent(name="a", model=ScriptedModel(), tools=tools)))


def test_the_member_at_fault_is_named_with_its_path() -> None:
    with pytest.raises(NotShippable) as refused:
        app_by_value(app(with_client()))
    assert refused.value.path == "config.driver.agent.tools[2].function:client.options['pool'][0]"
    assert "lock" in str(refused.value)
    assert "cannot be sent to another process" in str(refused.value)


def test_the_object_behind_a_method_is_looked_into() -> None:
    with pytest.raises(NotShippable) as refused:
        app_by_value(app(Tool(Client().lookup)))
    assert refused.value.path.startswith("config.driver.agent.tools[2].function")


def test_a_ray_runtime_refuses_at_construction() -> None:
    with pytest.raises(NotShippable) as refused:
        Runtime(app(with_client()))
    assert refused.value.path.startswith("config.driver.agent.tools[2]")
    member = Agent(name="m", model=ScriptedModel(), tools=[with_client()])
    team = Team(name="t", members=[member], coordinator=Agent(name="c", model=ScriptedModel()))
    with pytest.raises(NotShippable) as refused:
        Runtime(driver=team_driver(team))
    assert refused.value.path.startswith("config.driver.team.members[0].tools[0]")


@dataclass
class Loop:
    """Refers to itself, and to something that cannot travel."""

    me: Any = None
    lock: Any = field(default_factory=threading.Lock)


def test_a_cycle_is_no_trap() -> None:
    loop = Loop()
    loop.me = loop
    with pytest.raises(NotShippable) as refused:
        pickle_value(loop, "loop")
    assert refused.value.path.startswith("loop.")


def test_only_agents_and_drivers_are_work() -> None:
    for wrong in ("text", None, Client()):
        with pytest.raises(ValidationFailed) as refused:
            pickle_work(wrong, "child")
        assert refused.value.path == "child"
    assert pickle.loads(pickle_work(trivial, "child")) == trivial


# --- apps -------------------------------------------------------------------------------------------------


def make_config() -> RuntimeConfig:
    return RuntimeConfig(driver=trivial, name="made")


def fails() -> RuntimeConfig:
    raise ZeroDivisionError("no settings")


def gives_something_else() -> str:
    return "no config"


def refuses() -> RuntimeConfig:
    raise ValidationFailed("wrong", path="there")


def test_an_app_by_value_is_addressed_by_its_bytes() -> None:
    config = RuntimeConfig(driver=trivial, name="named")
    one, same, other = app_by_value(config), app_by_value(config), app_by_value(make_config())
    assert one == same
    assert one.digest != other.digest
    assert (one.kind, one.name) == ("value", "named")
    assert load_app(one) == config
    assert app_by_value(RuntimeConfig(driver=trivial)).name.startswith("by-value:")


def test_an_app_by_name_is_made_where_it_is_loaded() -> None:
    spec = app_by_name("tests.unit.test_delegates:make_config")
    assert (spec.kind, spec.name) == ("name", "tests.unit.test_delegates:make_config")
    assert spec.digest == app_by_name("tests.unit.test_delegates:make_config").digest
    assert load_app(spec).name == "made"


@pytest.mark.parametrize("target", ["", "module", ":factory", "module:"])
def test_the_name_of_an_app_has_two_parts(target: str) -> None:
    with pytest.raises(ValidationFailed, match="module:factory"):
        app_by_name(target)


@pytest.mark.parametrize(
    ("target", "why"),
    [
        ("no_such_module_here:make", "cannot be imported"),
        ("tests.unit.test_delegates:nothing", "cannot be imported"),
        ("tests.unit.test_delegates:fails", "raised ZeroDivisionError: no settings"),
        ("tests.unit.test_delegates:gives_something_else", "gave str, not a RuntimeConfig"),
        ("tests.unit.test_delegates:refuses", "wrong"),
    ],
)
def test_an_app_that_cannot_be_made_says_why(target: str, why: str) -> None:
    with pytest.raises(ValidationFailed, match=why):
        load_app(app_by_name(target))


def test_bytes_that_are_no_app_say_what_to_do() -> None:
    spec = app_by_value(make_config())
    from msgspec.structs import replace

    with pytest.raises(ValidationFailed, match="must be installed"):
        load_app(replace(spec, data=b"cno_such_module_here\nthing\n."))
    with pytest.raises(ValidationFailed):
        load_app(replace(spec, data=pickle.dumps("not a config")))
