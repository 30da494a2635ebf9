"""One run: from its stored record to its one terminal result (contract section 6).

    accept ──> drive ──> settle delegates ──> commit ──> [late change: store again] ──> terminal event
                 ^ cancel, deadline

A run lives on the control loop; its driver runs on a user loop and reaches it through a port.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from retinue.config import RuntimeConfig
from retinue.drivers import RunRequest
from retinue.errors import Interrupted, LeaseLost, RetinueError, StoreUnavailable
from retinue.events import Control, Payload, RunStarted
from retinue.grants import Grants
from retinue.ids import new_id
from retinue.lease_watch import LeaseWatch
from retinue.messages import close_open_calls, decode_message, encode_message, escape_surrogates
from retinue.protocol import (
    Finished,
    RunState,
    RunStatus,
    Settled,
    StartRun,
    decode_output,
)
from retinue.results import (
    MAX_RESULT_BYTES,
    DriverOutput,
    Reason,
    RunResult,
    Status,
    encode_result,
)
from retinue.run_events import EventSource, RunEvents
from retinue.store import CommitSession, FinishRun, Lease, RunOutcome, Store, StoredArtifact
from retinue.store_wait import until_stored
from retinue.tree import ChildLauncher, Participant, Tree

MAX_TIMER = 86_400.0
"""Seconds that one timer is set for; longer deadlines re-arm."""


class SessionState(Protocol):
    """What a run needs of its session: the committed state, and to be told of a commit."""

    activation_id: str
    store: Store
    lease: Lease
    revision: int
    replayable: bool
    history: list[bytes]
    state: bytes
    watch: LeaseWatch

    def committed(
        self, revision: int, messages: Sequence[bytes], state: bytes | None, replayable: bool
    ) -> None: ...


@dataclass(frozen=True)
class _Ending:
    """How the work ended, before anything is stored."""

    status: Status
    output: DriverOutput | None = None
    reason: Reason | None = None
    partial: bool = False
    """An error or a cancellation cut the work: what is committed is no complete replay state."""
    state: bytes | None = None
    entered: bool = True
    """The driver was started; otherwise the session is left as it was."""


@dataclass(frozen=True, kw_only=True)
class RunEnvironment:
    """What the host lends to its runs."""

    launcher: ChildLauncher
    launch_root: Callable[[Run], RootExecution]
    stores_events: bool
    wall_clock: Callable[[], float] = time.time


class RootExecution(Protocol):
    """A root driver at work on a user loop."""

    async def wait(self) -> Finished: ...

    def cancel(self) -> None: ...


class Run:
    """A run of a session. Make it, call :meth:`execute` once, read :attr:`settled`."""

    def __init__(
        self,
        start: StartRun,
        session: SessionState,
        config: RuntimeConfig,
        environment: RunEnvironment,
    ) -> None:
        self.start = start
        self.session = session
        self.config = config
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
        )
        self.settled: asyncio.Future[RunResult] = asyncio.get_running_loop().create_future()
        self.fenced = False
        """Another writer has the session: nothing of this run can be stored any more."""
        self.events = RunEvents(
            session_id=start.session_id,
            root_run_id=start.root_run_id or start.run_id,
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
        self.tree = Tree(
            self.request, config, environment.launcher, self._emit, self._room, session.activation_id
        )
        self.hops = 0
        """Remote calls awaited for this run here, on its critical path."""
        self._environment = environment
        self._cancelled: Reason | None = None
        self._execution: RootExecution | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._diagnostics: list[str] = []
        self._committed = False
        """The outcome is stored: it stands, whoever takes the session over now."""
        self._terminal: tuple[RunResult, bytes] | None = None

    # --- what others ask ----------------------------------------------------------------------------------

    @property
    def run_id(self) -> str:
        return self.start.run_id

    @property
    def grants(self) -> Grants:
        return self.request.grants

    @property
    def state(self) -> RunState:
        if self.settled.done():
            return "finished"
        return "running" if self._cancelled is None else "cancelling"

    def status(self) -> RunStatus:
        """The run as it is now; may be called from any thread."""
        return RunStatus(
            run_id=self.run_id,
            state=self.state,
            cursor=self.events.log.last,
            budget=self.tree.budget,
            hops=self.hops + self.tree.hops,
        )

    async def result(self) -> Settled:
        """The result once there is one, with the final figures."""
        result = await asyncio.shield(self.settled)
        return Settled(result=result, status=self.status())

    def cancel(self, reason: str, code: str = "cancelled") -> None:
        """Stop the run with everything below it. Only the first call counts; none does after the end."""
        if self._cancelled is not None or self.settled.done():
            return
        reason = escape_surrogates(reason)
        self._cancelled = Reason(code, reason)
        self.events.emit(Control("cancel", reason))
        self.tree.stop(reason)
        if self._execution is not None:
            self._execution.cancel()

    def fence(self) -> None:
        """Another writer has the session: end as soon as possible, without writing."""
        if not self.fenced:
            self.fenced = True
            if not self._committed:
                self.cancel("another process has taken this session over", "interrupted")

    def _events_failed(self, error: RetinueError) -> None:
        if isinstance(error, LeaseLost):
            self.fence()
        else:
            self.cancel(error.message, error.code)

    # --- life ---------------------------------------------------------------------------------------------

    async def execute(self) -> None:
        """Live from acceptance to the terminal event. Ends in exactly one result, whatever happens."""
        try:
            self._arm_deadline()
            ending = await self._drive()
        except Exception as error:  # a defect of ours must not leave callers waiting
            ending = _Ending("failed", reason=Reason.of(error), partial=True)
        self.tree.stop("the run ended")
        await self.tree.settled()
        self.tree.close()
        try:
            result = await self._confirm(await self._commit(ending))
        except Exception as error:
            await self.events.pause()
            ending = _Ending("failed", reason=Reason.of(error), partial=True)
            result = self._result(ending, self.events.next_number)
        if self._deadline is not None:
            self._deadline.cancel()
        self.events.terminal(self._terminal_body(result))
        self.settled.set_result(result)

    def _arm_deadline(self) -> None:
        if self.start.deadline is None:
            return
        left = self.start.deadline - self._environment.wall_clock()
        if left <= 0:
            self.cancel("the deadline has passed", "deadline_exceeded")
            return
        loop = asyncio.get_running_loop()
        self._deadline = loop.call_later(min(left, MAX_TIMER), self._arm_deadline)

    async def _drive(self) -> _Ending:
        if self._cancelled is not None:
            status = _cancel_status(self._cancelled)
            return _Ending(status, reason=self._cancelled, partial=True, entered=False)
        self.events.emit(RunStarted(self.config.driver.id))
        try:
            self._execution = self._environment.launch_root(self)
        except RetinueError as error:
            return _Ending("failed", reason=Reason.of(error), partial=True)
        return self._ending(await self._execution.wait())

    def _ending(self, finished: Finished) -> _Ending:
        if self._cancelled is not None or finished.cancelled:
            reason = self._cancelled or Reason("cancelled", "the driver was cancelled")
            return _Ending(_cancel_status(reason), reason=reason, partial=True, state=finished.state)
        if finished.error is not None:
            reason = Reason(str(finished.error["code"]), str(finished.error["message"]))
            status: Status = "stopped" if reason.code == "budget_exhausted" else "failed"
            return _Ending(status, reason=reason, partial=True, state=finished.state)
        output = decode_output(finished.output or b"")
        return _Ending(output.status, output=output, reason=output.reason, state=finished.state)

    # --- commit -------------------------------------------------------------------------------------------

    async def _commit(self, ending: _Ending) -> RunResult:
        """Store the delta and the outcome in one transaction; what cannot be stored is not reported done."""
        await self.events.room()
        session = self.session
        result, artifacts = self._bounded(self._result(ending, self.events.next_number))
        if self.fenced:
            return result
        if not ending.entered:
            await self._store_outcome(result, artifacts)
            return result
        messages = _closed(self.tree.canonical)
        replayable = session.replayable and not ending.partial
        events = self.events.unstored
        commit = CommitSession(
            lease=session.lease,
            commit_id=self.run_id,
            base_revision=session.revision,
            messages=messages,
            conversations={key: _closed(value) for key, value in self.tree.conversations.items()},
            state=ending.state,
            replayable=replayable,
            events=events,
            artifacts=artifacts,
            outcome=self._outcome(result),
        )
        self.hops += 1
        try:
            revision = await until_stored(lambda: session.store.commit(commit))
        except Exception as error:
            return await self._commit_failed(ending, error)
        self._committed = True
        self.events.stored(events)
        session.committed(revision, messages, ending.state, replayable)
        return result

    async def _commit_failed(self, ending: _Ending, error: Exception) -> RunResult:
        if isinstance(error, LeaseLost):
            self.fenced = True
            error = Interrupted("another process has taken this session over")
        if ending.partial:
            self._diagnostics.append("partial_history_commit_failed")
        else:
            ending = _Ending("failed", reason=Reason.of(error), partial=True)
        result, artifacts = self._bounded(self._result(ending, self.events.next_number))
        if not self.fenced and not isinstance(error, StoreUnavailable):
            await self._store_outcome(result, artifacts)
        return result

    async def _confirm(self, result: RunResult) -> RunResult:
        """Let a cancellation that came while the outcome was being stored win, and store that first.

        Nothing is awaited between the last look and the terminal event.
        """
        while True:
            await self.events.pause()
            cancelled = self._cancelled
            if cancelled is not None and not _says(result, cancelled):
                result = msgspec.structs.replace(result, status=_cancel_status(cancelled), reason=cancelled)
            elif result.final_cursor == self.events.next_number:
                return result
            await self.events.room()
            result, artifacts = self._bounded(
                msgspec.structs.replace(result, final_cursor=self.events.next_number)
            )
            if not self.fenced:
                await self._store_outcome(result, artifacts)

    async def _store_outcome(self, result: RunResult, artifacts: Sequence[StoredArtifact]) -> None:
        events = self.events.unstored
        finish = FinishRun(
            lease=self.session.lease, outcome=self._outcome(result), events=events, artifacts=artifacts
        )
        self.hops += 1
        try:
            await until_stored(lambda: self.session.store.finish_run(finish))
        except Exception as error:
            self.fenced = self.fenced or isinstance(error, LeaseLost)
            return
        self._committed = True
        self.events.stored(events)

    def _outcome(self, result: RunResult) -> RunOutcome:
        return RunOutcome(
            run_id=self.run_id, outcome=self._terminal_body(result), final_cursor=result.final_cursor
        )

    def _terminal_body(self, result: RunResult) -> bytes:
        """The terminal event, encoded once for the store and for readers."""
        if self._terminal is None or self._terminal[0] != result:
            self._terminal = (result, self.events.encode_terminal(result))
        return self._terminal[1]

    def _result(self, ending: _Ending, final_cursor: int) -> RunResult:
        output = ending.output
        ledger = self.tree.ledger
        usage = ledger.usage
        if ledger.model_calls_started == 0 and output is not None and output.usage is not None:
            usage = output.usage
        reason = ending.reason
        if reason is not None:
            reason = Reason(escape_surrogates(reason.code), escape_surrogates(reason.message))
        return RunResult(
            status=ending.status,
            text=output.text if output else "",
            structured=output.structured if output else None,
            reason=reason,
            usage=usage,
            budget=ledger.snapshot(),
            artifacts=tuple(output.artifacts) if output else (),
            run_id=self.run_id,
            session_id=self.start.session_id,
            final_cursor=final_cursor,
            cleanup_diagnostics=tuple(self._diagnostics),
        )

    def _bounded(self, result: RunResult) -> tuple[RunResult, Sequence[StoredArtifact]]:
        """The result as an event can carry it, and the whole one as an artifact where it is cut."""
        whole = encode_result(result)
        if len(whole) <= MAX_RESULT_BYTES:
            return result, ()
        artifact_id = f"{self.run_id}:result"
        artifact = StoredArtifact(artifact_id=artifact_id, mime_type="application/json", data=whole)
        return result.shortened(artifact_id), (artifact,)

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


_LOST_CODES = ("interrupted", "store_unavailable")


def _cancel_status(reason: Reason) -> Status:
    """A run that loses its session or its store is cancelled like any other, and has failed."""
    return "failed" if reason.code in _LOST_CODES else "cancelled"


def _says(result: RunResult, cancelled: Reason) -> bool:
    return (
        result.status == _cancel_status(cancelled)
        and result.reason is not None
        and result.reason.code == cancelled.code
    )


def _closed(messages: Sequence[bytes]) -> list[bytes]:
    """The messages with a stated result for each call that they leave open."""
    if not any(b'"tool_calls"' in body for body in messages):
        return list(messages)
    missing = close_open_calls([decode_message(body) for body in messages], "the run ended before it")
    return [*messages, *(encode_message(message) for message in missing)]
