"""The root driver of a run, at work on a user loop of the process that its session lives in."""

from __future__ import annotations

import asyncio

from retinue.execution import DriverExecution
from retinue.ports import LocalPort
from retinue.protocol import Finished
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
            ),
        )
        self._workers = workers
        self._execution = DriverExecution(config.driver, run.request, services)
        self._running = workers.submit(self._execution.run())

    async def wait(self) -> Finished:
        return await asyncio.wrap_future(self._running)

    def cancel(self) -> None:
        self._workers.loop.call_soon_threadsafe(self._execution.cancel)

    async def release(self) -> list[str]:
        if not self._execution.holds_something:
            return []
        return await asyncio.wrap_future(self._workers.submit(self._execution.release()))
