"""Policies, controllers and drivers for sessions that are actors, where other processes can import them."""

from __future__ import annotations

import os
from dataclasses import dataclass

from retinue import (
    Budgets,
    CallUnderReview,
    Conversation,
    Decision,
    DriverOutput,
    ExecutionServices,
    ModelRequest,
    ModelResponse,
    PolicyContext,
    Projection,
    Provenance,
    RunRequest,
    Step,
    StepOverrides,
    ToolCall,
    Usage,
    tool,
)
from retinue.messages import user
from tests.ray.drivers import Driver


@tool
async def look(item: str) -> str:
    """Look at an item."""
    return f"saw {item} in {os.getpid()}"


class Counting:
    """An execution policy, a controller and a context policy with one counter: it shows that there is one."""

    id = "test/counting"

    def __init__(self, most: int) -> None:
        self.most = most
        self.asked = 0
        self.steps = 0

    async def decide(self, call: CallUnderReview, ctx: PolicyContext) -> Decision:
        self.asked += 1
        said = f"{self.asked} of {self.most} in {os.getpid()} for {ctx.participant}"
        return Decision(action="allow" if self.asked <= self.most else "deny", reason=said)

    async def prepare_run(self, ctx: PolicyContext) -> StepOverrides | None:
        return None

    async def prepare_step(self, step: Step, ctx: PolicyContext) -> StepOverrides | None:
        self.steps += 1
        return StepOverrides(stop="enough steps") if self.steps > 6 else None

    async def project(self, conversation: Conversation, ctx: PolicyContext) -> Projection:
        told = [*conversation.history, user(f"seen by {os.getpid()}")]
        return Projection(messages=told, provenance=[Provenance(source_id="history", included=True)])


class Echo:
    """Answers with the last message of its request."""

    provider_id = "test"
    model_id = "echo"

    async def generate(self, request: ModelRequest) -> ModelResponse:
        usage = Usage(input_tokens=4, output_tokens=1)
        return ModelResponse(text=request.messages[-1].text, usage=usage)


@dataclass(frozen=True)
class Looks(Driver):
    """One model call and one tool call, where it runs."""

    async def start(self, request: RunRequest, services: ExecutionServices) -> DriverOutput:
        answer = await services.model(Echo(), [user("hello")], tools=[look.schema])
        result = await services.dispatch(ToolCall("1", "look", {"item": "x"}), tools=[look])
        return DriverOutput(text=f"{answer.text} | {result.text} | {os.getpid()}")


@dataclass(frozen=True)
class Delegates(Driver):
    """Looks itself, and starts as many delegates that look, one after the other."""

    count: int = 1
    budgets: Budgets | None = None

    async def start(self, request: RunRequest, services: ExecutionServices) -> DriverOutput:
        texts = [(await Looks().start(request, services)).text]
        for number in range(self.count):
            child = await services.delegate(Looks(), "go", name=f"child-{number}", budgets=self.budgets)
            texts.append((await child.result()).text)
        report = await services.usage_report()
        return DriverOutput(text=str(os.getpid()), structured=[texts, report.complete])
