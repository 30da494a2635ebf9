"""The tool ``task``: an agent asks another one, which works as a delegate (contract section 5)."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, Literal

from retinue.agents import DEFAULT_CHILD_ROUNDTRIPS, Agent
from retinue.errors import RetinueError
from retinue.policies import ExecutionPolicy
from retinue.reviews import inherited
from retinue.tool_context import ToolContext
from retinue.tool_options import ToolOptions
from retinue.tools import Tool

TASK_TOOL = "task"
"""Name of the tool, for grants."""


def task_tool(
    agents: Sequence[Agent],
    *,
    roundtrips: int,
    depth: int,
    max_depth: int,
    policy: ExecutionPolicy | None = None,
    app_policy: ExecutionPolicy | None = None,
) -> Tool:
    """The tool for one agent run.

    Args:
        agents: who can be asked, at least one. They ask nobody themselves.
        roundtrips: cap of the agent that asks, which those that it asks keep within.
        depth: of the agent that asks; 0 for the root of a run.
        max_depth: the deepest that an agent may be.
        policy: of the agent that asks, which binds those that it asks.
        app_policy: of the app, which the root asks.
    """
    children = {
        agent.name: _child(agent, roundtrips, inherited(policy, agent.execution_policy, app_policy))
        for agent in agents
    }
    numbers = {name: itertools.count(1) for name in children}

    async def task(ctx: ToolContext, agent: str, task: str) -> str:
        if depth >= max_depth:
            return (
                f"No agent can be asked here: agents may be {max_depth} levels deep (max_child_depth), and "
                f"this one is at level {depth}. Do the task yourself."
            )
        number = next(numbers[agent])
        label = agent if number == 1 else f"{agent}-{number}"
        above = ctx.services.request.participant
        try:
            child = await ctx.delegate(children[agent], task, name=f"{above}/{label}" if above else label)
            output = await child.result()
        except RetinueError as error:
            return f"{agent} failed ({error.code}): {error.message}"
        if output.status == "completed":
            return output.text
        reason = f": {output.reason.message}" if output.reason is not None else ""
        return f"{agent} ended {output.status}{reason}\n\n{output.text}".rstrip()

    # The schema lists the names, so that a wrong one is refused before the gate.
    names: Any = tuple(children)
    task.__annotations__["agent"] = Literal[names]
    # What those agents do passes the gate itself, in the mode of the run.
    reads = ToolOptions(effect="read")
    return Tool(task, name=TASK_TOOL, description=_description(agents), options=reads)


def _child(agent: Agent, roundtrips: int, policy: ExecutionPolicy | None) -> Agent:
    wanted = agent.max_tool_roundtrips
    return dataclasses.replace(
        agent,
        max_tool_roundtrips=min(DEFAULT_CHILD_ROUNDTRIPS if wanted is None else wanted, roundtrips),
        subagents=False,
        execution_policy=policy,
        on_close=None,  # whoever made it closes it, in the process where it was made
    )


def _description(agents: Sequence[Agent]) -> str:
    lines = [f"- {agent.name}: {agent.description}".rstrip(": ") for agent in agents]
    what = (
        "Give a task to an agent that works on it in a conversation of its own: it knows what the task says "
        "and nothing else. Its answer is the result."
    )
    return "\n".join([what, "", "Agents:", *lines])
