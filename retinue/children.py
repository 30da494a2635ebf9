"""A delegate where it runs: an execution with its own conversation and its own account."""

from __future__ import annotations

import asyncio
import logging
import pickle
from collections.abc import Awaitable

from retinue.config import RuntimeConfig
from retinue.drivers import RunRequest
from retinue.errors import NotShippable
from retinue.execution import DriverExecution
from retinue.ids import session_label
from retinue.ports import LocalPort
from retinue.protocol import ChildOrder, Finished, RootReply
from retinue.root_port import RootPort
from retinue.services import ExecutionServices
from retinue.tree import Tree, status_of
from retinue.workers import Workers

logger = logging.getLogger(__name__)


class ChildExecution:
    """One delegate in this process, made from its order. Run and cancel it on a user loop."""

    def __init__(self, order: ChildOrder, config: RuntimeConfig, port: RootPort, workers: Workers) -> None:
        self.order = order
        request = RunRequest(
            input=order.input,
            identity=order.identity,
            session_id=session_label(order.session_id, order.participant),
            run_id=order.run_id,
            attempt_id=order.attempt_id,
            parent_run_id=order.parent_run_id,
            root_run_id=order.root_run_id,
            participant=order.participant,
            depth=order.depth,
            deadline=order.deadline,
            grants=order.grants,
            run_mode=order.run_mode,
            trace=order.trace,
        )
        self._request = request
        self._services = ExecutionServices(
            request=request,
            config=config,
            port=port,
            threads=workers.threads,
            tasks=workers.tasks,
            token_limited=order.token_limited,
        )
        self._execution: DriverExecution | None = None

    async def run(self) -> Finished:
        """Run to the end. Never raises."""
        try:
            # May run code of the application, hence on a user loop. The bytes are this tree's own, made by a
            # participant; nothing that was stored or came over HTTP is unpickled.
            work = pickle.loads(self.order.work)  # noqa: S301
        except Exception as error:
            problem = NotShippable(
                f"delegate {self.order.participant} cannot be loaded where it runs: {type(error).__name__}: "
                f"{error}. Modules that it imports must be installed there",
                path=self.order.participant,
            )
            return Finished(participant=self.order.run_id, error=problem.to_payload())
        self._execution = DriverExecution(work, self._request, self._services)
        finished = await self._execution.run()
        for diagnostic in await self._execution.release():
            logger.warning("delegate %s: %s", self.order.participant, diagnostic)
        self._services.telemetry.run_completed(*status_of(finished))
        return finished

    def cancel(self) -> None:
        if self._execution is None:
            self._services.cancelled = True
        else:
            self._execution.cancel()


class LocalChildren:
    """Places delegates on the user loop of this process: the in-process backend's launcher.

    Work still travels pickled, so what a real child could not do is refused here too.
    """

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self._running: dict[str, ChildExecution] = {}
        self._ending: set[asyncio.Future[RootReply]] = set()

    async def launch(self, order: ChildOrder, tree: Tree) -> None:
        port = LocalPort(tree, asyncio.get_running_loop(), self._workers.loop)
        child = ChildExecution(order, tree.config, port, self._workers)
        self._running[order.run_id] = child
        tree.child_placed(order.run_id)
        finishing = asyncio.wrap_future(self._workers.submit(child.run()))
        finishing.add_done_callback(lambda done: self._finish(order.run_id, done, tree))

    def _finish(self, run_id: str, done: asyncio.Future[Finished], tree: Tree) -> None:
        self._running.pop(run_id, None)
        if done.cancelled() or done.exception() is not None:
            tree.child_lost(run_id, "its loop ended")
            return
        reply = tree.handle(done.result())
        if isinstance(reply, Awaitable):  # it waits for room in the event log
            waiting = asyncio.ensure_future(reply)
            self._ending.add(waiting)
            waiting.add_done_callback(self._ending.discard)

    def cancel(self, child_run_id: str, reason: str) -> None:
        child = self._running.get(child_run_id)
        if child is not None:
            self._workers.loop.call_soon_threadsafe(child.cancel)
