"""The driver that runs an agent: one that it borrows, or one that each run makes (contract section 5)."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass

from retinue.agent_defaults import AgentDefaults
from retinue.agent_loop import AgentRun, Turn
from retinue.agents import Agent
from retinue.drivers import DriverCapabilities, RunRequest
from retinue.errors import ValidationFailed
from retinue.owned_agents import AgentFactory, check_factory, make_agent
from retinue.results import DriverOutput
from retinue.services import ExecutionServices
from retinue.tools import IDENTIFIER, check_kind


@dataclass(frozen=True, kw_only=True)
class AgentDriver:
    """Runs one agent. Made by :func:`agent_driver`."""

    name: str
    agent: Agent | None = None
    """A borrowed one: whoever made it closes what it uses."""
    factory: AgentFactory | None = None
    """Makes one for each run, which the run closes."""
    stream: bool = False

    @property
    def id(self) -> str:
        return f"agent:{self.name}"

    @property
    def version(self) -> int:
        return 1

    @property
    def capabilities(self) -> DriverCapabilities:
        return DriverCapabilities(controls=("follow_up", "steer"))

    @property
    def reads_files(self) -> bool:
        """Whether the app's project root may matter to it."""
        return self.agent is None or self.agent.reads_files

    async def start(self, request: RunRequest, services: ExecutionServices) -> DriverOutput:
        # An execution's later turns come here again. The driver is kept with its run, so that no other one
        # gets its address meanwhile.
        key = f"agent_driver:{id(self)}"
        if key not in services.scratch:
            services.scratch[key] = self, await self._begin(services)
        _, run = services.scratch[key]
        return await Turn(run, request.input).go()

    async def _begin(self, services: ExecutionServices) -> AgentRun:
        config = services.config
        if self.agent is None:
            assert self.factory is not None
            make = functools.partial(make_agent, self.factory, services, f"the factory of agent {self.name}")
            made: Agent = await services.resource(self.id, "run", make)
            agent = completed(made, config.defaults)
        else:
            agent = self.agent
            if services.participant == "" and not (config.defaults.empty and config.limits.empty):
                raise ValidationFailed(
                    f"agent {agent.name} was made by the application, and the app's defaults and limits "
                    "cannot apply to it; give agent_driver() a function that makes it",
                    path="config.limits" if config.defaults.empty else "config.defaults",
                )
        return await AgentRun.begin(agent, services, stream=self.stream)


def agent_driver(
    agent: Agent | AgentFactory, *, stream: bool = False, name: str | None = None
) -> AgentDriver:
    """A driver that runs an agent; its tools must be granted (``Grants(tool_ids=[...])``).

    Args:
        agent: an :class:`Agent`, which the driver borrows: nothing that it uses is closed by a run. Or a
            function that makes one for each run, in the run's process; the run owns it, uses it for all its
            turns, and closes it once when its work has settled: ``Agent.on_close`` is called, and an async
            context manager that gave the agent is left. A failure there is the diagnostic
            ``resource_release_failed`` and nothing else. The function takes nothing or ``services``, and may
            be a coroutine function.
        stream: text is emitted as it arrives, instead of as a whole at the end of the turn.
        name: of the agent in the driver's id, ``agent:<name>``; the agent's or the function's own by default.

    Raises:
        ValidationFailed: ``agent`` is neither, or the name cannot be one.
    """
    check_kind("driver.stream", stream, bool)
    if not isinstance(agent, Agent):
        check_factory(agent, "the factory of an agent driver")
    own = agent.name if isinstance(agent, Agent) else getattr(agent, "__name__", type(agent).__name__)
    called: object = own if name is None else name
    if not isinstance(called, str) or not IDENTIFIER.match(called):
        raise ValidationFailed(
            f"the agent driver needs a name, and {called!r} is none; give agent_driver(..., name='helper')",
            path="driver.name",
        )
    if isinstance(agent, Agent):
        return AgentDriver(name=called, agent=agent, stream=stream)
    return AgentDriver(name=called, factory=agent, stream=stream)


def completed(agent: Agent, defaults: AgentDefaults) -> Agent:
    """An owned agent with the app's defaults where it says nothing; what it says stands, ``False`` too."""
    names = [name for name in ("skill_dirs", "context_files", "subagents") if getattr(agent, name) is None]
    return dataclasses.replace(agent, **{name: getattr(defaults, name) for name in names})
