"""The driver that runs a team: plan, delegate, compose (contract section 14)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from retinue.drivers import DriverCapabilities, RunRequest
from retinue.errors import BudgetExhausted, InputError, RetinueError, error_from_payload
from retinue.messages import Message, assistant, system, user
from retinue.models import ModelResponse
from retinue.results import DriverOutput, Reason
from retinue.services import ExecutionServices
from retinue.team_prompts import MemberOutput, joined_outputs, parse_plan, plan_messages, synthesis_messages
from retinue.teams import Team


@dataclass(frozen=True)
class TeamDriver:
    """Runs one team; every member is a delegate. Made by :func:`team_driver`."""

    team: Team

    @property
    def id(self) -> str:
        return f"team:{self.team.name}"

    @property
    def version(self) -> int:
        return 1

    @property
    def capabilities(self) -> DriverCapabilities:
        return DriverCapabilities(controls=("follow_up",))

    @property
    def reads_files(self) -> bool:
        """Whether the app's project root may matter to a member."""
        return any(member.reads_files for member in self.team.members)

    async def start(self, request: RunRequest, services: ExecutionServices) -> DriverOutput:
        if not isinstance(request.input, str):
            raise InputError("a team takes text input only")
        text = request.input
        history = services.history
        services.record_conversation([user(text)])
        outputs: list[MemberOutput] = []
        try:
            plan = await self._coordinator(services, plan_messages(self.team, history, text))
            await self._run_members(services, self._tasks(plan.text), outputs)
            synthesis = await self._coordinator(
                services, synthesis_messages(self.team, history, text, outputs)
            )
        except BudgetExhausted as refusal:
            # Never an empty message: some providers refuse a history that has one.
            answer = joined_outputs(outputs) or "Nothing was found before the budget was exhausted."
            services.record_conversation([assistant(answer)])
            await services.publish_message(answer)
            services.emit_text(answer)
            return DriverOutput(text=answer, status="stopped", reason=Reason(refusal.code, refusal.message))
        services.record_conversation([assistant(synthesis.text)])
        await services.publish_response(synthesis)  # the plan is nobody's to read
        services.emit_text(synthesis.text)
        return DriverOutput(text=synthesis.text)

    async def _coordinator(self, services: ExecutionServices, messages: Sequence[Message]) -> ModelResponse:
        coordinator = self.team.coordinator
        instructions = [system(coordinator.instructions)] if coordinator.instructions else []
        return await services.model(
            coordinator.model,
            [*instructions, *messages],
            max_tokens=coordinator.max_output_tokens if services.token_limited else None,
            temperature=coordinator.temperature,
        )

    def _tasks(self, plan: str) -> list[tuple[str, str]]:
        parsed = parse_plan(plan, self.team.members)
        return [(member.name, plan) for member in self.team.members] if parsed is None else parsed

    async def _run_members(
        self, services: ExecutionServices, tasks: Sequence[tuple[str, str]], outputs: list[MemberOutput]
    ) -> None:
        """Fill ``outputs`` in the order of the plan.

        A member that the budget stopped ends the work as ``BudgetExhausted``, after the others settled: what
        they found is kept. Any other failure does what ``Team.on_member_error`` says.
        """
        if self.team.parallel:
            settled = await asyncio.gather(*(self._run_member(services, *task) for task in tasks))
            results = list(settled)
            outputs.extend(output for output, _ in results)
        else:
            results = []
            for task in tasks:
                result = await self._run_member(services, *task)
                results.append(result)
                outputs.append(result[0])
                if result[1] is not None and self._ends_the_run(result[1]):
                    break
        errors = [error for _, error in results if error is not None and self._ends_the_run(error)]
        refusals = [error for error in errors if isinstance(error, BudgetExhausted)]
        for error in (*refusals, *errors):
            raise error

    def _ends_the_run(self, error: RetinueError) -> bool:
        return self.team.on_member_error == "fail" or isinstance(error, BudgetExhausted)

    async def _run_member(
        self, services: ExecutionServices, name: str, task: str
    ) -> tuple[MemberOutput, RetinueError | None]:
        member = next(member for member in self.team.members if member.name == name)
        try:
            child = await services.delegate(member, task, name=name)
            output = await child.result()
        except RetinueError as error:
            return MemberOutput(name=name, text="", error=error.message), error
        if output.status == "completed":
            return MemberOutput(name=name, text=output.text, error=None), None
        reason = output.reason or Reason("execution_failed", f"the member ended {output.status}")
        failure = error_from_payload({"code": reason.code, "message": reason.message})
        return MemberOutput(name=name, text=output.text, error=reason.message), failure


def team_driver(team: Team) -> TeamDriver:
    """A driver that runs ``team``; the tools of its members must be granted."""
    return TeamDriver(team)
