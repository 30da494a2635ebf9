"""Agents: a model, instructions and tools. The loop that runs one is in agent_loop.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from retinue.errors import ValidationFailed
from retinue.models import ModelClient
from retinue.tools import IDENTIFIER, Tool, check_kind, check_tools

DEFAULT_MAX_OUTPUT_TOKENS = 1024
"""What an agent asks for at most in one call under a token limit, so that siblings are not starved."""
DEFAULT_TOOL_ROUNDTRIPS = 10
"""Rounds of tool calls that one agent run may take (contract section 5)."""
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
    max_tool_roundtrips: int = DEFAULT_TOOL_ROUNDTRIPS
    temperature: float | None = None

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
        check_kind(f"{path}.max_tool_roundtrips", self.max_tool_roundtrips, int)
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
