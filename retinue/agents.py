"""Agents: a model, instructions and tools. The loop that runs one is in agent_loop.py."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from retinue.agent_defaults import check_count, check_paths, check_skill_dirs
from retinue.errors import ValidationFailed
from retinue.model_retries import DEFAULT_RETRIES
from retinue.models import ModelClient
from retinue.policies import ExecutionPolicy
from retinue.tools import IDENTIFIER, Tool, check_kind, check_tools

DEFAULT_MAX_OUTPUT_TOKENS = 1024
"""What an agent asks for at most in one call under a token limit, so that siblings are not starved."""
DEFAULT_TOOL_ROUNDTRIPS = 10
"""Rounds of tool calls that one agent run may take (contract section 5)."""
DEFAULT_CHILD_ROUNDTRIPS = 8
"""The same for an agent that the ``task`` tool asks."""
DEFAULT_CHILD_DEPTH = 2
"""Levels of agents that the ``task`` tool may make below the root."""
TOOL_CONCURRENCY = 5
"""Tool calls of one batch that run at once (contract section 7)."""


@dataclass(frozen=True, kw_only=True)
class Agent:
    """A model with instructions and tools, as plain data: it is copied into whatever process runs it."""

    name: str
    model: ModelClient
    instructions: str = ""
    """System message, sent before everything else."""
    description: str = ""
    """What the agent is for; a coordinator reads it."""
    tools: Sequence[Tool] = ()
    max_output_tokens: int | None = DEFAULT_MAX_OUTPUT_TOKENS
    """Asked for at each call when the run has a token limit; ``None`` asks for all that is left."""
    max_tool_roundtrips: int | None = None
    """Rounds of tools in one run, with all its turns; :data:`DEFAULT_TOOL_ROUNDTRIPS` where it does not say,
    and :data:`DEFAULT_CHILD_ROUNDTRIPS` for an agent that the ``task`` tool asks."""
    temperature: float | None = None
    model_retries: int = DEFAULT_RETRIES
    """Times that the model is asked again where its provider could not answer (too many requests, a server
    that failed, a broken connection). Each is a model call of the run."""
    skill_dirs: Sequence[str] | Literal[False] | None = None
    """Folders whose skills are listed in the system message, absolute or below the app's project root.
    ``None`` says nothing, so that an owned agent takes the app's defaults; here and in what follows."""
    context_files: Sequence[str] | bool | None = None
    """Files, or folders with :data:`retinue.agent_context.CONTEXT_FILES`, whose text goes into the system
    message; True is the project root."""
    subagents: Sequence[Agent] | bool | None = None
    """Agents that the tool ``task`` can ask, each time in a conversation of its own; True is a copy of this
    one. The tool must be granted."""
    max_child_depth: int | None = None
    """Levels of such agents below the root, :data:`DEFAULT_CHILD_DEPTH` by default; 0 disables the tool."""
    execution_policy: ExecutionPolicy | None = None
    """Decides about this agent's tool calls where it runs, beside the app's policy; the stricter one
    holds."""
    max_repeated_calls: int | None = None
    """Times that the agent may make one tool call with the same arguments in a row; then it is told to go on
    in another way. Unlimited by default."""
    on_close: Callable[[], Awaitable[None] | None] | None = None
    """Called once at the end of a run that owns this agent; see :func:`retinue.agent_driver`."""

    def __post_init__(self) -> None:
        name: object = self.name
        if not isinstance(name, str) or not IDENTIFIER.match(name):
            raise ValidationFailed(
                f"agent name {self.name!r} must start with a letter or digit and go on with letters, digits "
                "and . _ : / -",
                path="agent.name",
            )
        if not isinstance(self.model, ModelClient):
            raise ValidationFailed(
                f"agent {self.name}: model {self.model!r:.80} has no provider_id, model_id and generate()",
                path=f"agent.{self.name}.model",
            )
        path = f"agent.{self.name}"
        check_kind(f"{path}.instructions", self.instructions, str)
        check_kind(f"{path}.description", self.description, str)
        check_kind(f"{path}.model_retries", self.model_retries, int)
        for name in ("model_retries", "max_tool_roundtrips", "max_child_depth", "max_repeated_calls"):
            check_count(f"{path}.{name}", getattr(self, name))
        if self.max_output_tokens is not None:
            check_kind(f"{path}.max_output_tokens", self.max_output_tokens, int)
            if self.max_output_tokens < 1:
                raise ValidationFailed(
                    f"{path}.max_output_tokens must be positive or None, not {self.max_output_tokens}",
                    path=f"{path}.max_output_tokens",
                )
        if self.temperature is not None:
            check_kind(f"{path}.temperature", self.temperature, int | float)
        object.__setattr__(self, "tools", check_tools(self.tools, f"agent.{self.name}.tools"))
        object.__setattr__(self, "skill_dirs", check_skill_dirs(f"{path}.skill_dirs", self.skill_dirs))
        if self.context_files is not None and not isinstance(self.context_files, bool):
            files = check_paths(f"{path}.context_files", self.context_files)
            object.__setattr__(self, "context_files", files)
        if self.subagents is not None and not isinstance(self.subagents, bool):
            object.__setattr__(self, "subagents", _check_subagents(f"{path}.subagents", self.subagents))
        if self.execution_policy is not None:
            check_kind(f"{path}.execution_policy", self.execution_policy, ExecutionPolicy)
        if self.on_close is not None:
            check_kind(f"{path}.on_close", self.on_close, Callable)

    @property
    def reads_files(self) -> bool:
        """Whether its system message depends on files."""
        return bool(self.skill_dirs or self.context_files)


def _check_subagents(path: str, value: object) -> tuple[Agent, ...]:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise ValidationFailed(f"{path} must be a list of agents or a bool, not {value!r:.80}", path=path)
    agents: dict[str, Agent] = {}
    for index, agent in enumerate(value):
        if not isinstance(agent, Agent):
            raise ValidationFailed(f"{path}[{index}] is {agent!r:.80}, no Agent", path=f"{path}[{index}]")
        if agent.name in agents:
            raise ValidationFailed(f"{path} has two agents named {agent.name}", path=path)
        agents[agent.name] = agent
    return tuple(agents.values())
