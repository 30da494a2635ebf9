"""The root driver of a run, at work on a user loop of the process that its session lives in."""

from __future__ import annotations

import asyncio
import contextlib

from retinue.execution import DriverExecution
from retinue.ports import LocalPort
from retinue.protocol import Finished
from retinue.results import RunResult
from retinue.run_policies import RunPolicies
from retinue.runs import Run
from retinue.services import ExecutionServices
from retinue.workers import Workers


class LocalRoot:
    """:class:`retinue.runs.RootExecution` over a thread of this process."""

    def __init__(self, run: Run, workers: Workers, control: asyncio.AbstractEventLoop) -> None:
        config = run.config
        port = LocalPort(run.tree, control, workers.loop)
        services = ExecutionServices(
            request=run.request,
            config=config,
            port=port,
            threads=workers.threads,
            tasks=workers.tasks,
            history=run.session.history,
            state=run.session.state,
            token_limited=run.tree.budget.tokens.limit is not None,
            session_resources=run.session_resources,
        )
        run.policies = RunPolicies(
            run.request,
            workers,
            lambda request: ExecutionServices(
                request=request,
                config=config,
                port=port,
                threads=workers.threads,
                tasks=workers.tasks,
                call_prefix="policy",
                telemetry=services.telemetry if request.run_id == run.run_id else None,
            ),
        )
        self._telemetry = services.telemetry
        self._workers = workers
        self._execution = DriverExecution(config.driver, run.request, services)
        self._running = workers.submit(self._execution.run())

    async def wait(self) -> Finished:
        return await asyncio.wrap_future(self._running)

    def cancel(self) -> None:
        self._workers.loop.call_soon_threadsafe(self._execution.cancel)

    def ended(self, result: RunResult) -> None:
        if not self._telemetry.observed:
            return
        with contextlib.suppress(RuntimeError):  # the loop was stopped: nobody observes any more
            self._workers.loop.call_soon_threadsafe(
                self._telemetry.run_completed, result.status, result.reason, result.usage
            )

    async def release(self) -> list[str]:
        if not self._execution.holds_something:
            return []
        return await asyncio.wrap_future(self._workers.submit(self._execution.release()))
