"""How a run ends: one result, stored before anybody is told of it (contract sections 1 and 6).

    commit ──> release ──> confirm: [late change: store again] ──> terminal event

The commit is one transaction with the delta of the session, the events that are left and the outcome. What
comes after it (a late cancel, a resource that cannot be released) changes the outcome, not the commit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from retinue.ended_runs import usage_artifact
from retinue.errors import Interrupted, LeaseLost, StoreUnavailable
from retinue.lease_watch import LeaseWatch
from retinue.messages import close_open_calls, decode_message, encode_message, escape_surrogates
from retinue.protocol import Finished, StartRun, decode_output
from retinue.results import (
    MAX_RESULT_BYTES,
    DriverOutput,
    Reason,
    RunResult,
    Status,
    encode_result,
)
from retinue.run_events import RunEvents
from retinue.store import CommitSession, FinishRun, Lease, RunOutcome, Store, StoredArtifact
from retinue.store_wait import until_stored
from retinue.tree import Tree


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
class Ending:
    """How the work ended, before anything is stored."""

    status: Status
    output: DriverOutput | None = None
    reason: Reason | None = None
    partial: bool = False
    """An error or a cancellation cut the work: what is committed is no complete replay state."""
    state: bytes | None = None
    entered: bool = True
    """The driver was started; otherwise the session is left as it was."""

    @classmethod
    def of(cls, finished: Finished, cancelled: Reason | None) -> Ending:
        """The ending of a driver; ``cancelled`` is why the run is being cancelled, if it is."""
        if cancelled is not None or finished.cancelled:
            reason = cancelled or Reason("cancelled", "the driver was cancelled")
            return cls(status_of_cancel(reason), reason=reason, partial=True, state=finished.state)
        if finished.error is not None:
            reason = Reason.told(finished.error)
            status: Status = "stopped" if reason.code == "budget_exhausted" else "failed"
            return cls(status, reason=reason, partial=True, state=finished.state)
        output = decode_output(finished.output or b"")
        return cls(output.status, output=output, reason=output.reason, state=finished.state)


class RunEnding:
    """Stores how one run ended. Belongs to the control loop.

    Args:
        start, session, tree, events: of the run.
        cancelled: why the run is being cancelled, if it is.
    """

    def __init__(
        self,
        start: StartRun,
        session: SessionState,
        tree: Tree,
        events: RunEvents,
        cancelled: Callable[[], Reason | None],
    ) -> None:
        self.fenced = False
        """Another writer has the session: nothing of this run can be stored any more."""
        self.committed = False
        """The outcome is stored: it stands, whoever takes the session over now."""
        self.hops = 0
        """Store calls awaited here."""
        self._start = start
        self._session = session
        self._tree = tree
        self._events = events
        self._cancelled = cancelled
        self._diagnostics: list[str] = []
        self._stored: RunResult | None = None
        """The outcome that the store has."""
        self._terminal: tuple[RunResult, bytes] | None = None

    async def commit(self, ending: Ending) -> RunResult:
        """Store the delta and the outcome in one transaction; what cannot be stored is not reported done."""
        await self._events.room()
        session = self._session
        result, artifacts = self._bounded(self.result(ending))
        if self.fenced:
            return result
        if not ending.entered:
            await self._store_outcome(result, artifacts)
            return result
        messages = _closed(self._tree.canonical)
        replayable = session.replayable and not ending.partial
        events = self._events.unstored
        commit = CommitSession(
            lease=session.lease,
            commit_id=self._start.run_id,
            base_revision=session.revision,
            messages=messages,
            conversations={key: _closed(value) for key, value in self._tree.conversations.items()},
            state=ending.state,
            replayable=replayable,
            events=events,
            artifacts=[*artifacts, *self._usage_report()],
            outcome=self._outcome(result),
        )
        self.hops += 1
        try:
            revision = await until_stored(lambda: session.store.commit(commit))
        except Exception as error:
            return await self._commit_failed(ending, error)
        self.committed = True
        self._stored = result
        self._events.stored(events)
        session.committed(revision, messages, ending.state, replayable)
        return result

    async def _commit_failed(self, ending: Ending, error: Exception) -> RunResult:
        if isinstance(error, LeaseLost):
            self.fenced = True
            error = Interrupted("another process has taken this session over")
        if ending.partial:
            self._diagnostics.append("partial_history_commit_failed")
        else:
            ending = Ending("failed", reason=Reason.of(error), partial=True)
        result, artifacts = self._bounded(self.result(ending))
        if not self.fenced and not isinstance(error, StoreUnavailable):
            await self._store_outcome(result, artifacts)
        return result

    def add_diagnostics(self, diagnostics: Sequence[str]) -> None:
        """Something could not be cleaned up; the result says so and is otherwise what it was."""
        self._diagnostics.extend(diagnostics)

    async def confirm(self, result: RunResult) -> RunResult:
        """Let what came since the outcome was stored into the result, and store that first.

        A cancellation wins. Nothing is awaited between the last look and the terminal event.
        """
        while True:
            await self._events.pause()
            cancelled = self._cancelled()
            if cancelled is not None and not _says(result, cancelled):
                result = msgspec.structs.replace(result, status=status_of_cancel(cancelled), reason=cancelled)
            elif result.cleanup_diagnostics != tuple(self._diagnostics):
                result = msgspec.structs.replace(result, cleanup_diagnostics=tuple(self._diagnostics))
            elif result.final_cursor == self._events.next_number:
                return result
            await self._events.room()
            result, artifacts = self._bounded(
                msgspec.structs.replace(result, final_cursor=self._events.next_number)
            )
            if self.fenced or not await self._store_outcome(result, artifacts):
                # The store keeps the outcome that it has, so that is the one that is told.
                told = result if self._stored is None else self._stored
                return msgspec.structs.replace(told, final_cursor=self._events.next_number)

    async def _store_outcome(self, result: RunResult, artifacts: Sequence[StoredArtifact]) -> bool:
        """Store an outcome without a commit; whether that succeeded."""
        events = self._events.unstored
        finish = FinishRun(
            lease=self._session.lease, outcome=self._outcome(result), events=events, artifacts=artifacts
        )
        self.hops += 1
        try:
            await until_stored(lambda: self._session.store.finish_run(finish))
        except Exception as error:
            self.fenced = self.fenced or isinstance(error, LeaseLost)
            return False
        self.committed = True
        self._stored = result
        self._events.stored(events)
        return True

    def _outcome(self, result: RunResult) -> RunOutcome:
        lost = result.reason is not None and result.reason.code in _LOST_CODES
        return RunOutcome(
            run_id=self._start.run_id,
            outcome=self.terminal_body(result),
            final_cursor=result.final_cursor,
            approvals="interrupted" if lost else f"the run ended {result.status}",
        )

    def _usage_report(self) -> Sequence[StoredArtifact]:
        """What each participant used, where there is more to tell than the result does."""
        if self._tree.children == 0:
            return ()
        report = self._tree.ledger.report(self._start.run_id)
        return (
            StoredArtifact(
                artifact_id=usage_artifact(self._start.run_id),
                mime_type="application/json",
                data=msgspec.json.encode(report),
            ),
        )

    def terminal_body(self, result: RunResult) -> bytes:
        """The terminal event, encoded once for the store and for readers."""
        if self._terminal is None or self._terminal[0] != result:
            self._terminal = (result, self._events.encode_terminal(result))
        return self._terminal[1]

    def result(self, ending: Ending) -> RunResult:
        """The result of an ending, as it would be numbered now."""
        output = ending.output
        ledger = self._tree.ledger
        usage = ledger.usage
        if ledger.model_calls_started == 0 and output is not None and output.usage is not None:
            usage = output.usage
        reason = ending.reason
        if reason is not None:
            reason = Reason(escape_surrogates(reason.code), escape_surrogates(reason.message), reason.data)
        return RunResult(
            status=ending.status,
            text=output.text if output else "",
            structured=output.structured if output else None,
            reason=reason,
            usage=usage,
            budget=ledger.snapshot(),
            artifacts=tuple(output.artifacts) if output else (),
            run_id=self._start.run_id,
            session_id=self._start.session_id,
            final_cursor=self._events.next_number,
            cleanup_diagnostics=tuple(self._diagnostics),
        )

    def _bounded(self, result: RunResult) -> tuple[RunResult, Sequence[StoredArtifact]]:
        """The result as an event can carry it, and the whole one as an artifact where it is cut."""
        whole = encode_result(result)
        if len(whole) <= MAX_RESULT_BYTES:
            return result, ()
        artifact_id = f"{self._start.run_id}:result"
        artifact = StoredArtifact(artifact_id=artifact_id, mime_type="application/json", data=whole)
        return result.shortened(artifact_id), (artifact,)


_LOST_CODES = ("interrupted", "store_unavailable")


def status_of_cancel(reason: Reason) -> Status:
    """A run that loses its session or its store is cancelled like any other, and has failed."""
    return "failed" if reason.code in _LOST_CODES else "cancelled"


def _says(result: RunResult, cancelled: Reason) -> bool:
    return (
        result.status == status_of_cancel(cancelled)
        and result.reason is not None
        and result.reason.code == cancelled.code
    )


def _closed(messages: Sequence[bytes]) -> list[bytes]:
    """The messages with a stated result for each call that they leave open."""
    if not any(b'"tool_calls"' in body for body in messages):
        return list(messages)
    missing = close_open_calls([decode_message(body) for body in messages], "the run ended before it")
    return [*messages, *(encode_message(message) for message in missing)]
