"""A driver of each kind for the conformance kit, the same on every backend."""

from __future__ import annotations

import json
from collections.abc import Callable

from retinue import (
    Agent,
    DriverOutput,
    ExecutionDriver,
    ExecutionServices,
    RunRequest,
    Team,
    agent_driver,
    team_driver,
)
from retinue.events import Custom
from retinue.testing import ScriptedModel, reply
from tests.support import FunctionDriver


async def _external(request: RunRequest, services: ExecutionServices) -> DriverOutput:
    services.emit(Custom("step", {"number": 1}))
    return DriverOutput(text="external answer")


def custom() -> ExecutionDriver:
    return FunctionDriver(_external)


def agent() -> ExecutionDriver:
    return agent_driver(Agent(name="assistant", model=ScriptedModel([reply("an answer")])))


def streaming_agent() -> ExecutionDriver:
    return agent_driver(Agent(name="assistant", model=ScriptedModel([reply("an answer")])), stream=True)


def owned_agent() -> ExecutionDriver:
    """Made anew for each run, and closed after it."""
    model = ScriptedModel([reply("an answer")])

    def make() -> Agent:
        return Agent(name="assistant", model=model)

    return agent_driver(make, name="assistant")


def team() -> ExecutionDriver:
    """Its members are delegates."""
    plan = json.dumps(
        [{"member_id": "left", "task": "one half"}, {"member_id": "right", "task": "the other"}]
    )
    model = ScriptedModel({"": [plan, "both done"], "left": ["left done"], "right": ["right done"]})
    members = [Agent(name=name, model=model) for name in ("left", "right")]
    return team_driver(Team(name="desk", coordinator=Agent(name="head", model=model), members=members))


DRIVERS: dict[str, Callable[[], ExecutionDriver]] = {
    "custom": custom,
    "agent": agent,
    "streaming agent": streaming_agent,
    "owned agent": owned_agent,
    "team": team,
}
