"""Running a driver with its services, on a user loop: the same for a run's root and for a delegate.

    bind abilities ──> turn ──> completion policy ──> follow-up? ──> ... ──> release
                        ^───── revision, follow-up ─────┘

A root may take several turns; a delegate has one. What a turn started has settled before the next.
"""

from __future__ import annotations

import asyncio
import copy
import dataclasses
from typing import Any

import msgspec

from retinue.abilities import BoundAbilities
from retinue.agents import Agent
from retinue.completion import CompletionCandidate, CompletionDecision
from retinue.current_work import Work, working
from retinue.drivers import ExecutionDriver, RunRequest
from retinue.errors import RetinueError
from retinue.json_values import encode_json
from retinue.messages import Content, check_structure
from retinue.protocol import (
    Began,
    EndTurn,
    Finished,
    NextTurn,
    PrepareRun,
    Revise,
    Revision,
    TakenInput,
    decode_output,
    encode_output,
)
from retinue.results import DriverOutput, Reason, error_payload
from retinue.services import ExecutionServices


class DriverExecution:
    """One execution of a driver. Create and run it on a user loop; cancel it from there too."""

    def __init__(
        self, work: Agent | ExecutionDriver, request: RunRequest, services: ExecutionServices
    ) -> None:
        self._work = work
        self._request = request
        self._services = services
        self._driving: asyncio.Task[bytes] | None = None
        self._bound: BoundAbilities | None = None
        self._revision = 0

    async def run(self) -> Finished:
        """Run to the end, owned work included. Never raises: what escaped is in the message."""
        with working(Work.of(self._request), self._request.trace):
            self._services.telemetry.run_started()
            return await self._run()

    async def _run(self) -> Finished:
        services = self._services
        state_before = msgspec.json.encode(services.state)
        self._driving = asyncio.ensure_future(self._drive())
        if services.cancelled:
            self._driving.cancel()
        await asyncio.wait([self._driving])
        cancelled, services.cancelled = services.cancelled, True
        # Outside of the task that cancel() interrupts, so that nothing is left however the driver ended.
        await services.owned.cancel()
        services.owned.end()
        return self._with_state(self._outcome(self._driving, cancelled=cancelled), state_before)

    def cancel(self) -> None:
        """Tell tools that the run is ending, and interrupt the driver at its next await. Once is enough."""
        if self._services.cancelled:
            return
        self._services.cancelled = True
        if self._driving is not None:
            self._driving.cancel()

    async def _drive(self) -> bytes:
        """The last turn's output, encoded, once the work that it owns has settled."""
        services = self._services
        work = self._work
        if isinstance(work, Agent):
            from retinue.agent_driver import agent_driver

            work = agent_driver(work)
        if services.participant == "":
            await self._bind()
            if services.config.controller is not None:
                await services.ask(PrepareRun())
            services.tell(Began())
        request = self._request
        while True:
            output = await self._turn(work, request)
            if services.participant != "" or output.status != "completed":
                return _encoded(output, work.id)
            following = await self._judge(output)
            if isinstance(following, DriverOutput):
                return _encoded(following, work.id)
            if following is None and "follow_up" in work.capabilities.controls:
                following = await self._follow_up()
            if following is None:
                return _encoded(output, work.id)
            request = msgspec.structs.replace(request, input=following)

    async def _bind(self) -> None:
        """Bind the app's abilities, once per run, before the driver."""
        abilities = self._services.config.abilities
        if abilities:
            self._bound = BoundAbilities(abilities, self._services)
            await self._bound.bind()

    async def _turn(self, work: ExecutionDriver, request: RunRequest) -> DriverOutput:
        try:
            output = await work.start(request, self._services)
        except (SystemExit, KeyboardInterrupt) as error:
            # asyncio would let these out of the loop that all drivers share.
            raise RetinueError(
                f"driver {work.id} raised {type(error).__name__}: {error}", code="execution_failed"
            ) from None
        if not isinstance(output, DriverOutput):
            raise RetinueError(
                f"driver {work.id} returned {type(output).__name__}; it must return a DriverOutput",
                code="execution_failed",
            )
        if problem := output.problem():
            raise RetinueError(f"driver {work.id} returned a bad output: {problem}", code="execution_failed")
        _encoded(output, work.id)
        self._extend_history(output)
        await self._services.owned.settle()
        return output

    async def _judge(self, output: DriverOutput) -> Content | DriverOutput | None:
        """What the completion policy makes of a turn: nothing, the input of a revision, or how it ends."""
        services = self._services
        policy = services.config.completion_policy
        if policy is None:
            return None
        services.tell(EndTurn())
        candidate = CompletionCandidate(
            text=output.text, structured=copy.deepcopy(output.structured), revision=self._revision
        )
        try:
            with services.observed("controller", services.next_call_id(), operation="completion") as told:
                decision = _checked_decision(await policy.evaluate(candidate, services))
                told.add(decision=decision.action)
        except (SystemExit, KeyboardInterrupt) as error:
            # asyncio would let these out of the loop that all drivers share.
            raise RetinueError(
                f"the completion policy raised {type(error).__name__}: {error}", code="execution_failed"
            ) from None
        await services.owned.settle()
        revision = await services.ask(Revise(action=decision.action, reason=decision.reason))
        assert isinstance(revision, Revision)
        match decision.action:
            case "accept":
                return None
            case "revise" if revision.allowed:
                self._revision += 1
                return decision.instruction
            case "revise":
                limit = services.config.budgets.max_revisions
                reason = Reason("revision_limit", f"sent back more than {limit} times: {decision.reason}")
                return dataclasses.replace(output, status="stopped", reason=reason)
            case "await_input":
                reason = Reason("await_input", decision.reason)
                return dataclasses.replace(output, status="awaiting_input", reason=reason)
            case _:
                return dataclasses.replace(output, status="stopped", reason=Reason("stop", decision.reason))

    async def _follow_up(self) -> Content | None:
        taken = await self._services.ask(NextTurn())
        assert isinstance(taken, TakenInput)
        return taken.input

    @property
    def holds_something(self) -> bool:
        """Whether :meth:`release` has something to do."""
        return self._bound is not None or self._services.resources.held > 0

    async def release(self) -> list[str]:
        """Let go of what the run used, after its commit; diagnostics of what failed (contract section 1)."""
        diagnostics = await self._services.resources.release()
        if self._bound is not None:
            diagnostics += await self._bound.dispose()
        return diagnostics

    def _extend_history(self, output: DriverOutput) -> None:
        if output.history is None:
            return
        current = self._services.history
        returned = list(output.history)
        if returned[: len(current)] != current:
            raise RetinueError(
                "the history that the driver returned does not extend the session's", code="execution_failed"
            )
        added = returned[len(current) :]
        try:
            check_structure(added)
        except (ValueError, AttributeError) as error:
            raise RetinueError(f"the driver's history is broken: {error}", code="execution_failed") from None
        self._services.append(added)

    def _outcome(self, driving: asyncio.Task[bytes], *, cancelled: bool) -> Finished:
        if cancelled:
            if not driving.cancelled():
                driving.exception()  # what a driver raises on its way out is nobody's any more
            return self._finished(cancelled=True)
        if driving.cancelled():
            return self._failed("the driver was cancelled from inside")
        error = driving.exception()
        if error is not None:
            return self._finished(error=error_payload(error))
        return self._finished(output=driving.result())

    def _failed(self, why: str) -> Finished:
        return self._finished(error={"code": "execution_failed", "message": why})

    def _finished(
        self, *, output: bytes | None = None, error: dict[str, Any] | None = None, cancelled: bool = False
    ) -> Finished:
        return Finished(
            participant=self._services.participant,
            output=output,
            error=error,
            cancelled=cancelled,
            transcript=() if self._services.participant == "" else tuple(self._services.transcript.recorded),
        )

    def _with_state(self, finished: Finished, before: bytes) -> Finished:
        state: object = self._services.state
        try:
            if not isinstance(state, dict):
                raise TypeError(f"it is {type(state).__name__}, not a dict")
            after = encode_json(state)
        except Exception as error:
            problem = f"the session state cannot be written as JSON: {error}"
            return finished if finished.error or finished.cancelled else self._failed(problem)
        return finished if after == before else msgspec.structs.replace(finished, state=after)


def _checked_decision(decision: object) -> CompletionDecision:
    if not isinstance(decision, CompletionDecision):
        raise RetinueError(
            f"the completion policy returned {type(decision).__name__}, not a CompletionDecision",
            code="execution_failed",
        )
    return decision


def _encoded(output: DriverOutput, driver_id: str) -> bytes:
    """The output as its reader gets it; members of a wrong type are found here, with the driver's name."""
    try:
        encode_json(output.structured)
        encoded = encode_output(output)
        decode_output(encoded)
    except Exception as error:
        raise RetinueError(
            f"driver {driver_id} returned a bad output: {error}", code="execution_failed"
        ) from None
    return encoded
