"""The tool with which a model asks the people who follow its run."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from retinue.clocks import check_seconds
from retinue.tool_context import ToolContext
from retinue.tool_options import ToolOptions
from retinue.tools import Tool

NAME = "request_input"
DESCRIPTION = (
    "Ask the person who follows this work, and wait for the answer. Use it when something only they know is "
    "missing. Give choices where there are a few likely answers; they may answer something else."
)


@dataclass(frozen=True)
class _RequestInput:
    timeout: float | None

    async def __call__(self, question: str, ctx: ToolContext, choices: list[str] | None = None) -> str:
        reply = await ctx.services.request_input(question, choices=choices, timeout=self.timeout)
        return msgspec.json.encode(reply.input).decode()


def request_input_tool(
    *, name: str = NAME, description: str = DESCRIPTION, timeout: float | None = None
) -> Tool:
    """A tool that asks and gives the answer as JSON text; it must be granted, and each use is an attempt.

    Args:
        name: the tool id that grants name.
        description: what the model reads of it.
        timeout: seconds to wait for an answer, instead of the runtime's ``input_timeout``.

    Raises:
        InputError: ``timeout`` is not a positive number.
    """
    check_seconds("timeout", timeout)
    reads = ToolOptions(effect="read")  # asking changes nothing
    return Tool(_RequestInput(timeout), name=name, description=description, options=reads)
