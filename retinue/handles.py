"""Run handles: follow, steer, answer, cancel and await a run from a script, a notebook or another process."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import copy
import time
from collections.abc import Generator, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from retinue.approval_records import approval_of, check_decision
from retinue.approvals import Approval, ApprovalRequest
from retinue.budgets import BudgetSnapshot, UsageReport
from retinue.client import Located, SessionClient
from retinue.drivers import ControlMode
from retinue.ended_runs import cancel_receipt, empty_budget, unknown_status
from retinue.errors import InputError
from retinue.event_log import check_cursor
from retinue.event_streams import EventFilter, EventStream, blocking_events
from retinue.events import Event, InputRequest
from retinue.ids import Identity, check_id, new_id
from retinue.loop import awaited, blocking, finish_before_exit, on_client_loop
from retinue.messages import Content, check_content, escape_surrogates
from retinue.protocol import DecideRequest, Receipt, ReplyInput, RunState, RunStatus, SendInput, StartRun
from retinue.results import Reason, RunResult

if TYPE_CHECKING:
    from retinue.backend import Backend


class RunHandle:
    """One run, wherever it is. Made by ``runtime.start`` and ``runtime.attach``; safe in any thread.

    Every awaitable has a blocking twin: ``events`` / ``iter_events``, ``result`` / ``wait``, ``send`` /
    ``send_blocking`` and so on.

    A start with ``if_busy="steer"`` that found the session busy follows the run which took the input:
    ``run_id`` is that run's once ``accepted()`` has returned.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        run_id: str,
        identity: Identity,
        session_id: str | None,
        start: StartRun | None,
    ) -> None:
        self.run_id = run_id
        self.identity = identity
        self._backend = backend
        self._session_id = session_id
        self._may_steer = start is not None and start.if_busy == "steer"
        self._status: RunStatus | None = None
        self.heard_at = 0.0
        """When something was heard of the run last, on the monotonic clock."""
        self._local_result: RunResult | None = None
        self._client_hops = 0
        self._attached = start is None
        self._sent: concurrent.futures.Future[Located | None] = concurrent.futures.Future()
        """Where the start is on its way to; ``None`` where nothing should be asked before its answer."""
        self._accepting = on_client_loop(self._accept(start))
        if start is not None:
            finish_before_exit(self._accepting)  # a script may end right after its last start
        self._settling: concurrent.futures.Future[RunResult] | None = None

    # --- acceptance ---------------------------------------------------------------------------------------

    async def _accept(self, start: StartRun | None) -> None:
        try:
            client = await self._backend.client()
            if start is None:
                record = await client.find_run(self.identity, self.run_id)
                self._session_id = record.session_id
                status = await client.status(self.identity, record.session_id, self.run_id)
            else:
                self._client_hops += 1
                status = await client.start(start, self._start_sent)
                self.run_id = status.run_id
            self.heard(status)
        except Exception as error:
            self._local_result = RunResult(
                status="failed",
                reason=Reason.of(error),
                budget=empty_budget(),
                run_id=self.run_id,
                session_id=self._session_id or "",
                final_cursor=0,
            )
            raise

    def _start_sent(self, located: Located) -> None:
        if not self._sent.done():
            self._sent.set_result(None if self._may_steer else located)

    async def accepted(self) -> None:
        """Return once the run is stored, or the input was taken by the run that has the session.

        Raises:
            SessionConflict, Overloaded, StoreUnavailable, ...: it was refused, and nothing was stored.
            Unsupported: the run that has the session cannot be steered.
            NotFound: an attached run does not exist for this identity.
        """
        await awaited(self._accepting)

    def accepted_blocking(self) -> None:
        """The blocking twin of :meth:`accepted`."""
        blocking(self._accepting)

    @property
    def attached(self) -> bool:
        """Whether the run was started by somebody else, or earlier."""
        return self._attached

    # --- what is known ------------------------------------------------------------------------------------

    @property
    def session_id(self) -> str:
        """The session; empty until an attached run was found."""
        return self._session_id or ""

    @property
    def state(self) -> RunState:
        """``queued``, ``running``, ``awaiting_input``, ``cancelling`` or ``finished``; at most a second old,
        and never older than the last event or receipt of this handle."""
        if self._local_result is not None:
            return "finished"
        status = self._backend.peek(self)
        return status.state if status is not None else "running"

    @property
    def over(self) -> bool:
        """Whether the end is known here. For backends: asks nobody."""
        ended = self._status is not None and self._status.state == "finished"
        return ended or self._local_result is not None

    @property
    def budget(self) -> BudgetSnapshot:
        """What the run with all its delegates has spent and left; at most a second old."""
        status = self._backend.peek(self)
        return status.budget if status is not None else empty_budget()

    @property
    def pending_input(self) -> InputRequest | None:
        """A copy of the question that the run waits with; at most a second old."""
        status = None if self.over else self._backend.peek(self)
        return None if status is None else copy.deepcopy(status.pending_input)

    @property
    def pending_approvals(self) -> tuple[ApprovalRequest, ...]:
        """Copies of the requests that wait for approval, oldest first; at most a second old."""
        status = None if self.over else self._backend.peek(self)
        return () if status is None else tuple(copy.deepcopy(status.pending_approvals))

    @property
    def queue_position(self) -> int | None:
        """How many runs a queued run waits for, itself included: 1 is next. At most a second old."""
        status = None if self.over else self._backend.peek(self)
        return None if status is None else status.queue_position

    @property
    def hops(self) -> int:
        """Remote calls awaited for this run, by this client and by the session host; 0 in-process."""
        if not self._backend.remote:
            return 0
        return self._client_hops + (self._status.hops if self._status is not None else 0)

    @property
    def last_status(self) -> RunStatus | None:
        """What was heard of the run last."""
        return self._status

    def heard(self, status: RunStatus) -> None:
        """Take over what was heard of the run, unless more is known. For backends and event streams."""
        self.heard_at = time.monotonic()
        known = self._status
        if known is None or (known.state != "finished" and status.cursor >= known.cursor):
            self._status = status

    async def client(self) -> SessionClient:
        """The client of this handle's backend. For event streams; on the client loop."""
        return await self._backend.client()

    # --- result -------------------------------------------------------------------------------------------

    async def result(self) -> RunResult:
        """The one result; a refused run has a local one, with status ``failed``. Each call gives a copy."""
        return copy.deepcopy(await awaited(self._settled()))

    def wait(self, timeout: float | None = None) -> RunResult:
        """The one result, blocking; ``TimeoutError`` after ``timeout`` seconds, the run goes on."""
        return copy.deepcopy(blocking(self._settled(), timeout))

    def __await__(self) -> Generator[Any, None, RunResult]:
        return self.result().__await__()

    def _settled(self) -> concurrent.futures.Future[RunResult]:
        # A failure to ask is no result: the next call asks again.
        if self._settling is None or _has_failed(self._settling):
            self._settling = on_client_loop(self._settle())
        return self._settling

    async def _settle(self) -> RunResult:
        if (result := await self._settle_behind_start()) is not None:
            return result
        try:
            await asyncio.wrap_future(self._accepting)
        except Exception:
            assert self._local_result is not None
            return self._local_result
        client = await self._backend.client()
        self._client_hops += 1
        settled = await client.result(self.identity, self.session_id, self.run_id)
        self.heard(settled.status)
        return settled.result

    async def _settle_behind_start(self) -> RunResult | None:
        """The result, asked for while the start is on its way: one round trip less. ``None`` where that told
        nothing."""
        accepting: asyncio.Future[Any] = asyncio.wrap_future(self._accepting)
        sent: asyncio.Future[Any] = asyncio.wrap_future(self._sent)
        await asyncio.wait([accepting, sent], return_when=asyncio.FIRST_COMPLETED)
        located: Located | None = sent.result() if sent.done() else None
        if accepting.done() or located is None:
            return None
        client = await self._backend.client()
        settled = await client.result_of_start(located, self.run_id)
        if settled is None:
            return None
        with contextlib.suppress(Exception):  # the run is there, whatever became of this answer
            await accepting
        self.heard(settled.status)
        return settled.result

    # --- events -------------------------------------------------------------------------------------------

    def events(
        self,
        after: int = 0,
        *,
        types: Iterable[str] | None = None,
        children: bool | Iterable[str] = True,
    ) -> EventStream:
        """Events after a cursor, to the terminal one; ``async for event in handle.events()``.

        Args:
            after: sequence of the last event that was seen; 0 reads from the first.
            types: only events of these types, such as ``["text.delta", "tool.complete"]``.
            children: events of delegates too; or only of those with these names, beside the run's own.

        What is filtered out keeps its number, and the terminal event always comes.

        Raises:
            InputError: at once for a wrong type or range; while reading, for a cursor ahead of the run.
            EventGap: while reading, when events after the cursor are no longer kept; the stream then ends.
        """
        return EventStream(self, check_cursor(after), EventFilter.of(types, children))

    def iter_events(
        self,
        after: int = 0,
        *,
        types: Iterable[str] | None = None,
        children: bool | Iterable[str] = True,
    ) -> Iterator[Event]:
        """The blocking twin of :meth:`events`."""
        return blocking_events(self.events(after, types=types, children=children))

    async def usage_report(self) -> UsageReport | None:
        """What the run used so far, or in all: by participant, model role and tool.

        ``None`` for a run whose ledger was lost with its process; ``complete`` says whether the figures are
        final. Of an ended run without delegates that is in no process any more, roles are told by
        ``result.budget``.

        Raises:
            What :meth:`accepted` raises.
        """
        return await awaited(on_client_loop(self._usage_report()))

    def usage_report_blocking(self) -> UsageReport | None:
        """The blocking twin of :meth:`usage_report`."""
        return blocking(on_client_loop(self._usage_report()))

    async def _usage_report(self) -> UsageReport | None:
        await self.accepted()
        client = await self._backend.client()
        return await client.usage_report(self.identity, self.session_id, self.run_id)

    # --- control ------------------------------------------------------------------------------------------

    async def send(
        self, input: Content, *, mode: ControlMode = "steer", input_id: str | None = None
    ) -> Receipt:
        """Give the run more input while it works.

        Args:
            input: as for ``start``.
            mode: ``steer`` reaches the work before its next model call; ``follow_up`` is the next turn, after
                one that completed.
            input_id: chosen by the caller, so that repeating the call is harmless; made up when left out.

        Raises:
            InputError: bad content; or code ``run_finished``: the run takes no such input any more.
            Unsupported: the driver does not take this kind of input.
            Overloaded: 32 inputs wait already.
        """
        return await awaited(self._sending(input, mode, input_id))

    def send_blocking(
        self, input: Content, *, mode: ControlMode = "steer", input_id: str | None = None
    ) -> Receipt:
        """The blocking twin of :meth:`send`."""
        return blocking(self._sending(input, mode, input_id))

    def _sending(
        self, input: Content, mode: ControlMode, input_id: str | None
    ) -> concurrent.futures.Future[Receipt]:
        if mode not in ("steer", "follow_up", "replace"):
            raise InputError(f"mode is 'steer' or 'follow_up', not {mode!r:.80}", field="mode")
        input_id = new_id("input") if input_id is None else input_id
        check_id("input_id", input_id)
        return on_client_loop(self._send(input_id, check_content(input), mode))

    async def _send(self, input_id: str, input: Content, mode: ControlMode) -> Receipt:
        client = await self._taking_input()
        sent = SendInput(run_id=self.run_id, input_id=input_id, input=input, mode=mode)
        return self._received(await client.send(self.identity, self.session_id, sent))

    async def reply(self, request_id: str, input: Content, *, reply_id: str | None = None) -> Receipt:
        """Answer the question that the run waits with; the first answer wins.

        Args:
            request_id: ``handle.pending_input.id``, or that of the ``input.requested`` event.
            input: as for ``start``.
            reply_id: chosen by the caller, so that repeating the very same reply is harmless.

        Raises:
            InputError: bad content; or code ``run_finished``, ``input_already_resolved``,
                ``input_not_pending`` or ``input_mismatch``.
        """
        return await awaited(self._replying(request_id, input, reply_id))

    def reply_blocking(self, request_id: str, input: Content, *, reply_id: str | None = None) -> Receipt:
        """The blocking twin of :meth:`reply`."""
        return blocking(self._replying(request_id, input, reply_id))

    def _replying(
        self, request_id: str, input: Content, reply_id: str | None
    ) -> concurrent.futures.Future[Receipt]:
        check_id("request_id", request_id)
        reply_id = new_id("reply") if reply_id is None else reply_id
        check_id("reply_id", reply_id)
        return on_client_loop(self._reply(request_id, reply_id, check_content(input)))

    async def _reply(self, request_id: str, reply_id: str, input: Content) -> Receipt:
        client = await self._taking_input()
        reply = ReplyInput(run_id=self.run_id, request_id=request_id, reply_id=reply_id, input=input)
        return self._received(await client.reply(self.identity, self.session_id, reply))

    async def approve(self, approval_id: str, *, by: str | None = None, reason: str = "") -> Approval:
        """Let a call run that waits for approval; the first decision wins, and a repeat is harmless.

        Args:
            approval_id: of one of :attr:`pending_approvals`, or of the ``tool.approval.request`` event.
            by: who decides, in the application's words; the run's user when left out.
            reason: kept with the decision.

        Raises:
            InputError: code ``input_already_resolved``: it was settled in another way, also by time or by the
                end of the run; ``state`` and ``by`` say how.
            NotFound: the run has no such request.
        """
        return await awaited(self._deciding(approval_id, True, by, reason))

    def approve_blocking(self, approval_id: str, *, by: str | None = None, reason: str = "") -> Approval:
        """The blocking twin of :meth:`approve`."""
        return blocking(self._deciding(approval_id, True, by, reason))

    async def deny(self, approval_id: str, *, by: str | None = None, reason: str = "") -> Approval:
        """Refuse a call that waits for approval: the model reads ``reason``. Otherwise as :meth:`approve`."""
        return await awaited(self._deciding(approval_id, False, by, reason))

    def deny_blocking(self, approval_id: str, *, by: str | None = None, reason: str = "") -> Approval:
        """The blocking twin of :meth:`deny`."""
        return blocking(self._deciding(approval_id, False, by, reason))

    def _deciding(
        self, approval_id: str, approve: bool, by: str | None, reason: str
    ) -> concurrent.futures.Future[Approval]:
        by = self.identity.user_id if by is None else by
        check_decision(approval_id, by, reason)
        return on_client_loop(self._decide(approval_id, approve, by, reason))

    async def _decide(self, approval_id: str, approve: bool, by: str, reason: str) -> Approval:
        client = await self._taking_input()
        decision = DecideRequest(
            run_id=self.run_id, approval_id=approval_id, approve=approve, by=by, reason=reason
        )
        return approval_of(await client.decide(self.identity, self.session_id, decision))

    async def cancel(self, reason: str = "cancelled by the caller") -> Receipt:
        """Stop the run with everything below it; returns when the request has arrived.

        The run is ``cancelling`` until all its work is gone; ``result()`` then gives status ``cancelled``.
        Repeats, and cancels of a finished run, change nothing.
        """
        return await awaited(self._cancelling(reason))

    def cancel_blocking(self, reason: str = "cancelled by the caller") -> Receipt:
        """The blocking twin of :meth:`cancel`."""
        return blocking(self._cancelling(reason))

    def _cancelling(self, reason: str) -> concurrent.futures.Future[Receipt]:
        return on_client_loop(self._cancel(escape_surrogates(str(reason))))

    async def _cancel(self, reason: str) -> Receipt:
        if self._session_id is None:
            await self.accepted()
        elif self._may_steer:  # which run it is depends on how the start is answered
            with contextlib.suppress(Exception):
                await self.accepted()
        if self.over:
            known = self._status if self._local_result is None else None
            return cancel_receipt("returned", known or unknown_status(self.run_id, "finished"))
        client = await self._backend.client()
        return self._received(await client.cancel(self.identity, self.session_id, self.run_id, reason))

    async def _taking_input(self) -> SessionClient:
        """The client, when the run is there to take input."""
        try:
            await self.accepted()
        except Exception as error:
            if self._session_id is None:
                raise
            raise InputError(
                f"run {self.run_id} takes no input: its start was refused ({error})",
                code="run_finished",
                run_id=self.run_id,
            ) from None
        return await self._backend.client()

    def _received(self, receipt: Receipt) -> Receipt:
        self.heard(receipt.status)
        return receipt

    def __repr__(self) -> str:
        return f"<RunHandle {self.run_id} {self.state}>"


def _has_failed(future: concurrent.futures.Future[RunResult]) -> bool:
    return future.done() and (future.cancelled() or future.exception() is not None)
