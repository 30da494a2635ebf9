"""One run: from its stored record to its one terminal result (contract section 6).

    [queued] ──> drive ──> settle delegates ──> commit ──> release ──> confirm ──> terminal event
                   ^ cancel, clocks, send, reply

A run lives on the control loop; its driver runs on a user loop and reaches it through a port.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from retinue.approval_desk import ApprovalDesk
from retinue.approval_records import unknown_approval
from retinue.approvals import ApprovalRequest
from retinue.artifacts import SessionArtifacts
from retinue.budgets import UsageReport
from retinue.clocks import RunClocks
from retinue.config import RuntimeConfig
from retinue.current_work import Work, working
from retinue.drivers import RunRequest
from retinue.errors import LeaseLost, NotFound, RetinueError, Unsupported
from retinue.events import Control, Payload
from retinue.gate import PoliciesStopped
from retinue.grants import Grants
from retinue.ids import new_id
from retinue.inbox import RunInbox
from retinue.messages import escape_surrogates
from retinue.participants import Participant
from retinue.protocol import (
    DecideRequest,
    Finished,
    Receipt,
    ReplyInput,
    RunState,
    RunStatus,
    SendInput,
    Settled,
    StartRun,
)
from retinue.resources import SessionResources
from retinue.results import Reason, RunResult, error_text
from retinue.reviews import ArgumentsChanged
from retinue.run_ending import Ending, RunEnding, SessionState, status_of_cancel
from retinue.run_events import EventSource, RunEvents
from retinue.run_policies import RunPolicies
from retinue.store import StoredApproval
from retinue.tree import ChildLauncher, Tree

logger = logging.getLogger(__name__)

SHOWN_APPROVALS = 16
"""Requests that a status shows, the oldest; it comes with every page of events."""


class RootExecution(Protocol):
    """A root driver at work on a user loop."""

    async def wait(self) -> Finished:
        """How it ended, once what it owns has settled."""
        ...

    def cancel(self) -> None: ...

    def ended(self, result: RunResult) -> None:
        """The run has its result: tell whoever observes it."""
        ...

    async def release(self) -> list[str]:
        """Let go of what the run used; diagnostics of what failed."""
        ...


@dataclass(frozen=True, kw_only=True)
class RunEnvironment:
    """What the host lends to its sessions and runs."""

    launcher: ChildLauncher
    launch_root: Callable[[Run], RootExecution]
    on_user_loop: Callable[[Coroutine[Any, Any, Any]], Awaitable[Any]]
    """Runs code of the application, or what belongs to it."""
    stores_events: bool
    wall_clock: Callable[[], float] = time.time


class Run:
    """A run of a session. Make it, call :meth:`execute` once, read :attr:`settled`.

    Args:
        queued: another run has the session; this one waits for :meth:`execute`.
        session_resources: what runs of this session share.
    """

    def __init__(
        self,
        start: StartRun,
        session: SessionState,
        config: RuntimeConfig,
        environment: RunEnvironment,
        *,
        queued: bool = False,
        session_resources: SessionResources | None = None,
    ) -> None:
        config.check_clocks()
        self.start = start
        self.session = session
        self.config = config
        self.session_resources = session_resources
        self.request = RunRequest(
            input=start.input,
            identity=start.identity,
            session_id=start.session_id,
            run_id=start.run_id,
            attempt_id=new_id("attempt"),
            parent_run_id=start.parent_run_id,
            root_run_id=start.root_run_id or start.run_id,
            deadline=start.deadline,
            grants=config.grants.narrowed(start.grants),
            run_mode=start.run_mode,
            resumes=None if start.resumes is None else start.resumes.run_id,
            trace=start.trace,
        )
        self.settled: asyncio.Future[RunResult] = asyncio.get_running_loop().create_future()
        self.settled.add_done_callback(_seen)
        self.queue_position: int | None = 1 if queued else None
        """1 is next; ``None`` once the run has begun."""
        self.on_cancel: Callable[[], None] | None = None
        """Called when the run is cancelled, while it is queued."""
        self.events = RunEvents(
            session_id=start.session_id,
            root_run_id=self.request.root_run_id,
            source=EventSource(
                run_id=start.run_id,
                attempt_id=self.request.attempt_id,
                parent_run_id=start.parent_run_id,
            ),
            capacity=config.event_capacity,
            store=session.store if environment.stores_events else None,
            lease=session.lease,
            on_failure=self._events_failed,
        )
        self.events.store_first = queued
        self.clocks = RunClocks(
            deadline=start.deadline,
            active_timeout=config.active_timeout,
            input_timeout=config.input_timeout,
            expired=lambda code, text: self._cancel(text, code),
            wall_clock=environment.wall_clock,
        )
        self.inbox = RunInbox(
            start.run_id,
            config.driver.capabilities.controls,
            self.events.emit,
            on_wait=self.clocks.wait,
            on_resume=self.clocks.work,
        )
        self.desk: ApprovalDesk | None = None
        """Where approvals are asked for and decided; ``None`` where nobody can be asked."""
        if config.approvals is not None:
            self.desk = ApprovalDesk(
                self.request,
                config.approvals,
                store=session.store,
                lease=session.lease,
                emit=self.events.emit,
                notify=self._notify,
                wall_clock=environment.wall_clock,
            )
        self.tree = Tree(
            self.request,
            config,
            environment.launcher,
            self._emit,
            inbox=self.inbox,
            artifacts=SessionArtifacts(session.store, session.lease),
            room=self._room,
            activation_id=session.activation_id,
            desk=self.desk,
            carried=None if start.resumes is None else start.resumes.carried,
        )
        self._notified: set[asyncio.Task[None]] = set()
        self.hops = 0
        """Remote calls awaited before the run began, on its critical path."""
        self._environment = environment
        self._cancelled: Reason | None = None
        self._execution: RootExecution | None = None
        self._policies: RunPolicies | None = None
        self._ending = RunEnding(start, session, self.tree, self.events, lambda: self._cancelled)

    # --- what others ask ----------------------------------------------------------------------------------

    @property
    def run_id(self) -> str:
        return self.start.run_id

    @property
    def grants(self) -> Grants:
        return self.request.grants

    @property
    def fenced(self) -> bool:
        """Another writer has the session: nothing of this run can be stored any more."""
        return self._ending.fenced

    @property
    def state(self) -> RunState:
        if self.settled.done() and self.settled.exception() is None:
            return "finished"
        if self._cancelled is not None:
            return "cancelling"
        if self.queue_position is not None:
            return "queued"
        return "running" if self.inbox.pending is None else "awaiting_input"

    def status(self) -> RunStatus:
        """The run as it is now; may be called from any thread."""
        return RunStatus(
            run_id=self.run_id,
            state=self.state,
            cursor=self.events.log.last,
            budget=self.tree.budget,
            hops=self.hops + self._ending.hops + self.tree.hops,
            pending_input=self.inbox.pending,
            queue_position=self.queue_position,
            pending_approvals=() if self.desk is None else self.desk.pending[:SHOWN_APPROVALS],
        )

    def usage_report(self) -> UsageReport:
        """What the tree used so far."""
        return self.tree.ledger.report(self.run_id)

    async def result(self) -> Settled:
        """The result once there is one, with the final figures.

        Raises:
            NotFound: the session left this process while the run was queued.
        """
        result = await asyncio.shield(self.settled)
        return Settled(result=result, status=self.status())

    # --- control ------------------------------------------------------------------------------------------

    def send(self, sent: SendInput) -> Receipt:
        """Take live input. Raises what :meth:`RunInbox.send` does, and :class:`Unsupported` while queued."""
        if self.queue_position is not None:
            raise Unsupported(
                f"run {self.run_id} is still queued and takes no input; send it when the run works",
                operation=f"{sent.mode} of a queued run",
            )
        applied = self.inbox.send(sent) == "applied"
        steer = sent.mode == "steer"
        over = self.settled.done() and not applied
        return Receipt(
            id=sent.input_id,
            action="steer" if steer else "follow_up",
            outcome="delivered" if applied else "returned" if over else "deferred",
            boundary="model_call" if steer else "turn",
            status=self.status(),
        )

    def reply(self, reply: ReplyInput) -> Receipt:
        """Answer the question that waits. Raises what :meth:`RunInbox.reply` does."""
        self.inbox.reply(reply)
        return Receipt(
            id=reply.request_id,
            action="reply",
            outcome="delivered",
            boundary="question",
            status=self.status(),
        )

    async def decide(self, decision: DecideRequest) -> StoredApproval:
        """Approve or deny a call that waits. Raises what :meth:`ApprovalDesk.decide` does."""
        if self.desk is None:
            raise unknown_approval(decision.approval_id)
        return await self.desk.decide(decision)

    @property
    def policies(self) -> RunPolicies | None:
        """What the application has to say; there from the moment that the driver starts."""
        return self._policies

    @policies.setter
    def policies(self, policies: RunPolicies) -> None:
        self._policies = self.tree.gate.policies = policies

    def _notify(self, request: ApprovalRequest) -> None:
        """Tell the application of a request for approval; what it answers may decide it."""
        if self.config.approvals is None or self.config.approvals.on_request is None:
            return
        telling = asyncio.ensure_future(self._tell(request))
        self._notified.add(telling)
        telling.add_done_callback(self._notified.discard)

    async def _tell(self, request: ApprovalRequest) -> None:
        assert self._policies is not None
        assert self.desk is not None
        why = ""
        try:
            answer = await self._policies.decide(request)
        except PoliciesStopped:
            return
        except ArgumentsChanged as error:
            answer, why = False, str(error)
        except Exception as error:
            logger.warning("Approvals.on_request failed for %s: %s", request.id, error_text(error))
            return
        await self.desk.decided_by_callback(request.id, answer, why)

    def cancel(self, reason: str) -> Receipt:
        """Stop the run with everything below it. Only the first call counts; none does after the end."""
        ended = self.settled.done()
        self._cancel(reason)
        return self.cancel_receipt("returned" if ended else "delivered")

    def cancel_receipt(self, outcome: Literal["delivered", "returned"]) -> Receipt:
        return Receipt(id=self.run_id, action="cancel", outcome=outcome, boundary="run", status=self.status())

    def _cancel(self, reason: str, code: str = "cancelled") -> None:
        if self._cancelled is not None or self.settled.done():
            return
        reason = escape_surrogates(reason)
        self._cancelled = Reason(code, reason)
        self.events.emit(Control("cancel", reason))
        self.tree.stop(reason)
        if self._execution is not None:
            self._execution.cancel()
        if self.on_cancel is not None:
            self.on_cancel()

    def interrupt(self, reason: str, code: str) -> None:
        """The session or its store is lost: stop, and end ``failed`` with this code."""
        self._cancel(reason, code)

    def fence(self) -> None:
        """Another writer has the session: end as soon as possible, without writing."""
        if not self._ending.fenced:
            self._ending.fenced = True
            if not self._ending.committed:
                self._cancel("another process has taken this session over", "interrupted")

    def abandon(self, activation_id: str) -> None:
        """The session leaves with this run still queued: whoever waits here must ask elsewhere."""
        self.clocks.stop()
        gone = NotFound(f"activation {activation_id} is not in this process", activation_id=activation_id)
        if not self.settled.done():
            self.settled.set_exception(gone)
        self.events.abandon(gone)

    def _events_failed(self, error: RetinueError) -> None:
        if isinstance(error, LeaseLost):
            self.fence()
        else:
            self._cancel(error.message, error.code)

    # --- life ---------------------------------------------------------------------------------------------

    async def execute(self) -> None:
        """Live from acceptance to the terminal event. Ends in exactly one result, whatever happens."""
        with working(Work.of(self.request), self.request.trace):
            await self._execute()

    async def _execute(self) -> None:
        self.queue_position = None
        if self._cancelled is None:
            self.events.store_first = False
        try:
            ending = await self._drive()
        except Exception as error:  # a defect of ours must not leave callers waiting
            ending = Ending("failed", reason=Reason.of(error), partial=True)
        self.tree.stop("the run ended")
        await self.tree.settled()
        if self._notified:
            await asyncio.wait(self._notified)
        self.tree.close()
        try:
            result = await self._ending.commit(ending)
            await self._release()
            result = await self._ending.confirm(result)
        except Exception as error:
            await self.events.pause()
            result = self._ending.result(Ending("failed", reason=Reason.of(error), partial=True))
        self.clocks.stop()
        self.events.terminal(self._ending.terminal_body(result))
        if self._execution is not None:
            self._execution.ended(result)
        self.settled.set_result(result)

    async def _drive(self) -> Ending:
        self.clocks.watch_deadline()
        if self._cancelled is not None:
            status = status_of_cancel(self._cancelled)
            return Ending(status, reason=self._cancelled, partial=True, entered=False)
        self.clocks.work()
        try:
            self._execution = self._environment.launch_root(self)
        except RetinueError as error:
            return Ending("failed", reason=Reason.of(error), partial=True)
        return Ending.of(await self._execution.wait(), self._cancelled)

    async def _release(self) -> None:
        if self._execution is not None:
            self._ending.add_diagnostics(await self._execution.release())

    def _room(self) -> Awaitable[None] | None:
        """``None`` while participants may be answered: the event log takes more, and the lease stands."""
        if not self.events.has_room:
            return self.events.room()
        return self.session.watch.room()

    def _emit(self, payload: Payload, participant: Participant) -> None:
        self.events.emit(
            payload,
            EventSource(
                run_id=participant.run_id,
                attempt_id=participant.attempt_id,
                parent_run_id=participant.parent.run_id if participant.parent else self.start.parent_run_id,
                participant=participant.name,
            ),
        )


def _seen(settled: asyncio.Future[RunResult]) -> None:
    if not settled.cancelled():
        settled.exception()
