"""The policies of the application at the root of a run: asked on the user loop, one instance for the tree."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import msgspec

from retinue.approvals import ApprovalRequest
from retinue.current_work import Trace, Work, working
from retinue.drivers import RunRequest
from retinue.errors import RetinueError
from retinue.gate import PoliciesStopped
from retinue.policies import CallUnderReview
from retinue.policy_context import PolicyContext
from retinue.protocol import ModelPrepared, PrepareModel, ToolAttempt
from retinue.reviews import CHANGED, ArgumentsChanged, Judgement, review
from retinue.services import ExecutionServices
from retinue.steps import StepPreparation
from retinue.workers import Workers

T = TypeVar("T")


class RunPolicies:
    """:class:`retinue.gate.Policies` over the user loop of this process.

    Args:
        request: of the root.
        make_services: gives services that act for a participant, for what its policies do in its name.
    """

    def __init__(
        self, request: RunRequest, workers: Workers, make_services: Callable[[RunRequest], ExecutionServices]
    ) -> None:
        self._request = request
        self._workers = workers
        self._make_services = make_services
        self._services: dict[str, ExecutionServices] = {}
        """By the run id of whoever is judged."""
        self._asked: dict[asyncio.Task[Any], str] = {}
        """What is under way, and for whom."""
        self._steps: StepPreparation | None = None

    # --- from the control loop ----------------------------------------------------------------------------

    def prepare_run(self, revision: int) -> Awaitable[None]:
        return self._submit(self._prepare_run(revision), self._request)

    def prepare(
        self, asker: RunRequest, message: PrepareModel, index: int, revision: int
    ) -> Awaitable[ModelPrepared]:
        return self._submit(self._prepare(asker, message, index, revision), asker, message.trace)

    def review(self, asker: RunRequest, attempt: ToolAttempt, revision: int) -> Awaitable[Judgement]:
        return self._submit(self._review(asker, attempt, revision), asker, attempt.trace)

    def decide(self, request: ApprovalRequest) -> Awaitable[bool | None]:
        """What the application's ``Approvals.on_request`` says."""
        return self._submit(self._decide(request), self._request, asked_by=request.run_id)

    def stop(self, run_id: str | None = None) -> None:
        self._workers.loop.call_soon_threadsafe(self._stop, run_id)

    def _submit(
        self,
        work: Coroutine[Any, Any, T],
        asker: RunRequest,
        trace: Trace | None = None,
        *,
        asked_by: str | None = None,
    ) -> Awaitable[T]:
        tracked = self._tracked(work, asker, trace, asked_by or asker.run_id)
        return asyncio.wrap_future(self._workers.submit(tracked))

    # --- on the user loop ---------------------------------------------------------------------------------

    async def _tracked(
        self, work: Coroutine[Any, Any, T], asker: RunRequest, trace: Trace | None, run_id: str
    ) -> T:
        with working(Work.of(asker), trace or self._services_for(asker).telemetry.trace):
            task = asyncio.ensure_future(_contained(work))
        self._asked[task] = run_id
        try:
            await asyncio.wait([task])
        finally:
            del self._asked[task]
        if task.cancelled():
            raise PoliciesStopped
        return task.result()

    def _stop(self, run_id: str | None) -> None:
        for key, services in self._services.items():
            if run_id in (None, key):
                services.cancelled = True
        for task, asker in list(self._asked.items()):
            if run_id in (None, asker):
                task.cancel()

    def _context(self, asker: RunRequest, revision: int) -> PolicyContext:
        return PolicyContext(self._services_for(asker), revision)

    def _services_for(self, asker: RunRequest) -> ExecutionServices:
        services = self._services.get(asker.run_id)
        if services is None:
            services = self._services[asker.run_id] = self._make_services(asker)
        return services

    async def _prepare_run(self, revision: int) -> None:
        await self._preparation().prepare_run(self._context(self._request, revision))

    async def _prepare(
        self, asker: RunRequest, message: PrepareModel, index: int, revision: int
    ) -> ModelPrepared:
        return await self._preparation().prepare(message, index, self._context(asker, revision))

    def _preparation(self) -> StepPreparation:
        if self._steps is None:
            self._steps = StepPreparation(self._context(self._request, 0).config)
        return self._steps

    async def _review(self, asker: RunRequest, attempt: ToolAttempt, revision: int) -> Judgement:
        context = self._context(asker, revision)
        call = CallUnderReview(
            tool_name=attempt.tool_name,
            call_id=attempt.call_id,
            arguments=msgspec.json.decode(attempt.arguments),
            effect=attempt.effect,
        )
        return await review(context.config.execution_policy, call, context, asker.run_mode)

    async def _decide(self, request: ApprovalRequest) -> bool | None:
        approvals = self._context(self._request, 0).config.approvals
        if approvals is None or approvals.on_request is None:
            return None
        shown = copy.deepcopy(request)
        answer = approvals.on_request(shown)
        if isinstance(answer, Awaitable):
            answer = await answer
        if answer is True and shown.arguments != request.arguments:
            raise ArgumentsChanged(CHANGED)
        return answer


async def _contained(work: Coroutine[Any, Any, T]) -> T:
    try:
        return await work
    except (SystemExit, KeyboardInterrupt) as error:
        # asyncio would let these out of the loop that all policies and drivers share.
        raise RetinueError(
            f"a policy raised {type(error).__name__}: {error}", code="execution_failed"
        ) from None
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise RetinueError("a policy cancelled itself", code="execution_failed") from None
