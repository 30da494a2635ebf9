"""The loop of an agent: model, tools, model again, until it answers (contract sections 5 and 6).

    steers? ──> model ──> tool calls ──> all results ──┐
       ^ ^─────────────────────────────────────────────┘
       └──── commentary only, or a steer that came last ──── answer ──> done

What was said to the agent is recorded with the model's answer to it. A turn that fails before leaves it out,
so that asking again does not ask twice; one that is stopped (cancelled, out of time or budget) keeps it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from retinue.agent_context import AgentContext
from retinue.agents import DEFAULT_CHILD_DEPTH, DEFAULT_TOOL_ROUNDTRIPS, Agent
from retinue.errors import BudgetExhausted, ModelFailed, RetinueError, ValidationFailed
from retinue.events import PublicMessage
from retinue.messages import Content, Message, ToolCall, system, tool_result, user
from retinue.model_retries import retried
from retinue.models import ModelResponse, TextPiece
from retinue.results import DriverOutput
from retinue.services import ExecutionServices
from retinue.task_tool import task_tool
from retinue.tool_calls import CallRules, check_batch
from retinue.tools import Tool, ToolResult
from retinue.workers import in_thread

MAX_COMMENTARY = 10
"""Answers of one agent run that are nothing but commentary, and so ask for another model call."""


@dataclass(eq=False, kw_only=True)
class AgentRun:
    """An agent in one execution, through all its turns: what it was given, and how far it may still go."""

    agent: Agent
    services: ExecutionServices
    stream: bool
    instructions: Sequence[Message]
    tools: Sequence[Tool]
    """Its own and ``task``; those of the app come from the services."""
    max_roundtrips: int
    rounds: int = 0
    commentaries: int = 0

    @classmethod
    async def begin(cls, agent: Agent, services: ExecutionServices, *, stream: bool) -> AgentRun:
        """Raises ``ValidationFailed`` for tools that share a name, or files that are not there."""
        limits = services.config.limits
        roundtrips = _within(agent.max_tool_roundtrips, DEFAULT_TOOL_ROUNDTRIPS, limits.tool_roundtrips)
        tools = [*agent.tools]
        if agent.subagents:
            tools.append(
                task_tool(
                    [agent] if agent.subagents is True else agent.subagents,
                    roundtrips=roundtrips,
                    depth=services.request.depth,
                    max_depth=_within(agent.max_child_depth, DEFAULT_CHILD_DEPTH, limits.max_child_depth),
                    policy=agent.execution_policy,
                    app_policy=services.config.execution_policy,
                )
            )
        _check_names(agent, tools, services)
        told = await _told(agent, services)
        return cls(
            agent=agent,
            services=services,
            stream=stream,
            instructions=[system(told)] if told else [],
            tools=tools,
            max_roundtrips=roundtrips,
        )

    async def ask(self, conversation: Sequence[Message]) -> tuple[ModelResponse, Sequence[PublicMessage]]:
        """One answer of the model; the whole of it, and what people saw of it.

        A provider that cannot answer now is asked again, unless people have seen a part of the answer.
        """
        seen: list[TextPiece] = []
        return await retried(
            lambda: self._ask(conversation, seen),
            self.agent.model_retries,
            may_repeat=lambda: not seen and not self.services.cancelled,
        )

    async def _ask(
        self, conversation: Sequence[Message], seen: list[TextPiece]
    ) -> tuple[ModelResponse, Sequence[PublicMessage]]:
        services, agent = self.services, self.agent
        granted = services.request.grants.tool_ids
        offered = [item.schema for item in (*self.tools, *services.tools) if item.name in granted]
        messages = [*self.instructions, *conversation]
        max_tokens = agent.max_output_tokens if services.token_limited else None
        if not self.stream:
            response = await services.model(
                agent.model, messages, tools=offered, max_tokens=max_tokens, temperature=agent.temperature
            )
            check_answer(agent.name, response)
            return response, await services.publish_response(response)
        stream = services.stream_model(
            agent.model,
            messages,
            tools=offered,
            max_tokens=max_tokens,
            temperature=agent.temperature,
            publish=True,
        )
        async with stream:
            async for chunk in stream:
                if isinstance(chunk, TextPiece) and chunk.text:
                    seen.append(chunk)
                    if chunk.phase != "reasoning_summary":
                        services.emit_text(chunk.text)
        response = stream.response
        check_answer(agent.name, response)
        emitted = "".join(chunk.text for chunk in seen if chunk.phase != "reasoning_summary")
        if response.text != emitted and response.text.startswith(emitted):  # the rest came with the finish
            services.emit_text(response.text[len(emitted) :])
        return response, stream.messages

    async def run_tools(self, calls: Sequence[ToolCall]) -> Sequence[ToolResult]:
        """The results of a batch, in the order of its calls, once all are there."""
        rules = CallRules(
            tools=self.tools, policy=self.agent.execution_policy, max_repeats=self.agent.max_repeated_calls
        )
        return await self.services.dispatch_batch(calls, rules=rules)

    def count_round(self) -> None:
        """One more round of tools, or the error that ends the run before any of them runs."""
        self.rounds += 1
        if self.rounds > self.max_roundtrips:
            raise RetinueError(
                f"agent {self.agent.name} asked for more than {self.max_roundtrips} rounds of tools in one "
                "run (Agent.max_tool_roundtrips, Limits.tool_roundtrips)",
                code="execution_failed",
            )

    def count_commentary(self) -> None:
        self.commentaries += 1
        if self.commentaries > MAX_COMMENTARY:
            raise RetinueError(
                f"agent {self.agent.name} gave more than {MAX_COMMENTARY} answers that were nothing but "
                "commentary",
                code="execution_failed",
            )


class Turn:
    """One input of an agent run, up to the answer."""

    def __init__(self, run: AgentRun, input: Content) -> None:
        self._run = run
        self._services = run.services
        self._conversation = self._services.history
        self._unrecorded: list[Message] = []
        """What was said to the agent and not answered yet."""
        said_before = self._services.request.resumes is not None and user(input) in self._conversation
        if not said_before:
            self._hear(input)

    async def go(self) -> DriverOutput:
        try:
            return await self._work()
        except (asyncio.CancelledError, BudgetExhausted):
            self._keep()
            raise

    async def _work(self) -> DriverOutput:
        run, services = self._run, self._services
        final: str | None = None
        if (answered := self._answered_before()) is not None:
            return DriverOutput(text=answered)
        while True:
            while (steer := await services.take_input()) is not None:
                self._hear(steer)
            response, messages = await run.ask(self._conversation)
            self._keep()
            final = next((item.text for item in reversed(messages) if item.phase == "final"), final)
            answer = Message(
                role="assistant",
                content=response.text,
                tool_calls=response.tool_calls,
                extras=response.extras,
            )
            if response.tool_calls:
                run.count_round()
                results = await run.run_tools(response.tool_calls)
                # A call and its results are recorded together: history never holds a call left open.
                self._record([answer, *(tool_result(result.call_id, result.text) for result in results)])
                continue
            self._record([answer])
            if is_commentary(messages):
                run.count_commentary()
            elif await services.finish_input():
                break
        text = response.text if final is None else final
        if not run.stream:
            services.emit_text(text)
        return DriverOutput(text=text)

    def _answered_before(self) -> str | None:
        """The answer of the run that this one goes on with, where only what came after it is missing."""
        last = self._conversation[-1] if self._conversation else None
        resumes = self._services.request.resumes is not None and not self._unrecorded
        if not resumes or last is None or last.role != "assistant" or last.tool_calls:
            return None
        return last.text

    def _hear(self, content: Content) -> None:
        message = user(content)
        self._conversation.append(message)
        self._unrecorded.append(message)

    def _keep(self) -> None:
        """Record what was said to the agent."""
        heard, self._unrecorded = self._unrecorded, []
        self._services.record_conversation(heard)

    def _record(self, messages: Sequence[Message]) -> None:
        self._services.record_conversation(messages)
        self._conversation.extend(messages)


def check_answer(name: str, response: ModelResponse) -> None:
    """Raise ``ModelFailed`` for tool calls that may not run: of a cut answer, or with ids that repeat."""
    if response.tool_calls and response.finish_reason != "tool_calls":
        raise ModelFailed(
            f"agent {name}: the model asked for tools but finished with {response.finish_reason!r}; no tool "
            "was run"
        )
    check_batch(response.tool_calls)


def is_commentary(messages: Sequence[PublicMessage]) -> bool:
    """Whether an answer was commentary and nothing more, so that the work goes on."""
    phases = {message.phase for message in messages}
    return "commentary" in phases and "final" not in phases


def _within(value: int | None, default: int, limit: int | None) -> int:
    wanted = default if value is None else value
    return wanted if limit is None else min(wanted, limit)


def _check_names(agent: Agent, tools: Sequence[Tool], services: ExecutionServices) -> None:
    names = [item.name for item in (*tools, *services.tools)]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise ValidationFailed(
            f"agent {agent.name} and the app both have a tool named {', '.join(sorted(twice))}, or the agent "
            "has two",
            path=f"agent.{agent.name}.tools",
        )


async def _told(agent: Agent, services: ExecutionServices) -> str:
    """The agent's system message; its files are read in a thread."""
    files = ["."] if agent.context_files is True else agent.context_files
    context = AgentContext(
        instructions=agent.instructions,
        skill_dirs=agent.skill_dirs or (),
        context_files=files or (),
        project_root=services.config.project_root,
    )
    if not context.reads_files:
        return agent.instructions
    return await services.run_owned(in_thread(services.threads, context.read))
