"""The driver that runs an agent: model, tools, model again, until it answers (contract section 5)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from retinue.agents import TOOL_CONCURRENCY, Agent
from retinue.drivers import DriverCapabilities, RunRequest
from retinue.errors import ModelFailed, RetinueError, ValidationFailed
from retinue.messages import Message, ToolCall, system, tool_result, user
from retinue.models import ModelResponse
from retinue.results import DriverOutput
from retinue.services import ExecutionServices
from retinue.tools import ToolResult


@dataclass(frozen=True)
class AgentDriver:
    """Runs one agent. Made by :func:`agent_driver`."""

    agent: Agent

    @property
    def id(self) -> str:
        return f"agent:{self.agent.name}"

    @property
    def version(self) -> int:
        return 1

    @property
    def capabilities(self) -> DriverCapabilities:
        return DriverCapabilities()

    async def start(self, request: RunRequest, services: ExecutionServices) -> DriverOutput:
        agent = self.agent
        self._check_names(services)
        question = user(request.input)
        conversation = [*services.history, question]
        services.record_conversation([question])
        rounds = 0
        while True:
            response = await self._ask(services, conversation)
            if not response.tool_calls:
                services.record_conversation([_answer(response)])
                services.emit_text(response.text)
                return DriverOutput(text=response.text)
            if response.finish_reason != "tool_calls":
                raise ModelFailed(
                    f"agent {agent.name}: the model asked for tools but finished with "
                    f"{response.finish_reason!r}; no tool was run"
                )
            check_batch(response.tool_calls)
            rounds += 1
            if rounds > agent.max_tool_roundtrips:
                raise RetinueError(
                    f"agent {agent.name} asked for more than {agent.max_tool_roundtrips} rounds of tools "
                    "(Agent.max_tool_roundtrips)",
                    code="execution_failed",
                )
            # A call and its results are recorded together: history never holds a call left open.
            results = await self._run_tools(services, response.tool_calls)
            turn = [_answer(response), *(tool_result(result.call_id, result.text) for result in results)]
            services.record_conversation(turn)
            conversation.extend(turn)

    def _check_names(self, services: ExecutionServices) -> None:
        twice = {item.name for item in self.agent.tools} & {item.name for item in services.tools}
        if twice:
            raise ValidationFailed(
                f"agent {self.agent.name} and the app both have a tool named {', '.join(sorted(twice))}",
                path=f"agent.{self.agent.name}.tools",
            )

    async def _ask(self, services: ExecutionServices, conversation: Sequence[Message]) -> ModelResponse:
        agent = self.agent
        instructions = [system(agent.instructions)] if agent.instructions else []
        granted = services.request.grants.tool_ids
        offered = [item.schema for item in (*agent.tools, *services.tools) if item.name in granted]
        return await services.model(
            agent.model,
            [*instructions, *conversation],
            tools=offered,
            max_tokens=agent.max_output_tokens if services.token_limited else None,
            temperature=agent.temperature,
        )

    async def _run_tools(
        self, services: ExecutionServices, calls: Sequence[ToolCall]
    ) -> Sequence[ToolResult]:
        results: list[ToolResult] = []
        for start in range(0, len(calls), TOOL_CONCURRENCY):
            async with asyncio.TaskGroup() as group:
                batch = [
                    group.create_task(services.dispatch(call, tools=self.agent.tools))
                    for call in calls[start : start + TOOL_CONCURRENCY]
                ]
            results.extend(task.result() for task in batch)
        return results


def agent_driver(agent: Agent) -> AgentDriver:
    """A driver that runs ``agent``; its tools must be granted (``Grants(tool_ids=[...])``)."""
    return AgentDriver(agent)


def check_batch(calls: Sequence[ToolCall]) -> None:
    """Raise ``ModelFailed`` unless the ids of a batch are nonempty and unique; nothing is run then."""
    ids = [call.id for call in calls]
    if not all(ids) or len(set(ids)) != len(ids):
        raise ModelFailed(f"the model gave tool calls with empty or repeated ids: {ids}")


def _answer(response: ModelResponse) -> Message:
    return Message(
        role="assistant", content=response.text, tool_calls=response.tool_calls, extras=response.extras
    )
