"""One session as it lives in a process: a single writer over its stored conversation.

An activation holds the store lease while it is resident; its run slot is what makes runs and exclusive
reads of the session conflict (contract section 1). Who comes while the slot is taken is refused, waits in
the queue, steers the run or ends it, as its start says. Everything here happens on the control loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import msgspec

from retinue.approval_records import unknown_approval
from retinue.budgets import Spending
from retinue.config import RuntimeConfig
from retinue.errors import InputError, LeaseLost, NotFound, RetinueError, SessionConflict, StoreUnavailable
from retinue.hooks import DeactivationReason
from retinue.ids import SessionAddress
from retinue.lease_watch import LeaseWatch
from retinue.protocol import (
    DecideRequest,
    EventPageReply,
    Receipt,
    ReplyInput,
    RunStatus,
    SendInput,
    Settled,
    StartRun,
)
from retinue.resources import SessionResources
from retinue.resumption import resumed
from retinue.run_queue import QueuedRun, RunQueue
from retinue.runs import Run, RunEnvironment
from retinue.store import Lease, LeaseGrant, RunRecord, Store, StoredApproval
from retinue.store_wait import STORE_WAIT, until_stored

T = TypeVar("T")

FINISHED_RUNS = 8
"""Finished runs that stay readable from memory; older ones are read from the store."""
TOMBSTONES = 256
"""Cancellations remembered that overtook their start, and starts that became steers."""


class Session:
    """An activation of a session.

    Args:
        activation_id: changes with every activation; messages for another one are refused.
        grant: the lease, and the session as stored. Runs that it shows as open are queued ones that this app
            can take up; all others must have been ended.
        app, app_digest: what the records name as the app.
        watch: knows when the lease was renewed last.
    """

    def __init__(
        self,
        *,
        activation_id: str,
        store: Store,
        grant: LeaseGrant,
        config: RuntimeConfig,
        environment: RunEnvironment,
        app: str,
        app_digest: str = "",
        watch: LeaseWatch | None = None,
    ) -> None:
        self.activation_id = activation_id
        self.watch = watch or LeaseWatch(time.monotonic())
        self.store = store
        self.lease: Lease = grant.lease
        self.revision = grant.session.revision
        self.replayable = grant.session.replayable
        self.history = list(grant.session.messages)
        self.state = grant.session.state
        self.closing: DeactivationReason | None = None
        self.on_leaving: Callable[[DeactivationReason], Awaitable[None]] | None = None
        """Called on the way out: nothing runs any more, and the lease is still held."""
        self.runs_started = 0
        self._spent = Spending()
        """By the runs that have ended."""
        self.resources = SessionResources()
        self._config = config
        self._environment = environment
        self._app = app
        self._app_digest = app_digest
        self._slot: str | None = None
        """Id of the run that has the session, or what else does."""
        self._free = asyncio.Event()
        """Nothing has the slot."""
        self._free.set()
        self._free_since = time.monotonic()
        self._leaving: asyncio.Task[None] | None = None
        self._running: Run | None = None
        self._queue = RunQueue()
        self._tasks: set[asyncio.Task[None]] = set()
        self._runs: OrderedDict[str, Run] = OrderedDict()
        self._accepting: dict[str, asyncio.Future[RunStatus]] = {}
        self._cancelled_ahead: OrderedDict[str, str] = OrderedDict()
        self._steered: OrderedDict[str, str] = OrderedDict()
        """Runs that took the input of a start, by the start's run id."""
        self._fenced = False
        self._take_up(grant.open_runs)

    @property
    def address(self) -> SessionAddress:
        return self.lease.address

    @property
    def busy(self) -> bool:
        return self._slot is not None or len(self._queue) > 0

    @property
    def in_use_by(self) -> str | None:
        """Id of the run that has it, or in words what else does."""
        return self._slot

    @property
    def idle_since(self) -> float | None:
        """When it last had something to do, on the monotonic clock; ``None`` while it must stay in memory:
        it is busy, or holds a resource that is in use or has no idle limit."""
        if self.busy or self._accepting:
            return None
        if self.resources.held == 0:
            return self._free_since
        limit, unused_since = self._config.resource_idle_limit, self.resources.idle_since
        if limit is None or unused_since is None or time.monotonic() - unused_since < limit:
            return None
        return max(self._free_since, unused_since)

    # --- starting -----------------------------------------------------------------------------------------

    async def start(self, start: StartRun) -> RunStatus:
        """Accept a run: take the slot, store its record, begin. A repeat gives the first answer.

        Where another run has the session, ``start.if_busy`` says what happens. With ``steer`` the status is
        that of the run which took the input.

        Raises:
            SessionConflict: another run has the session; ``run_id`` names it.
            Overloaded: the queue is full, or the run takes no more input.
            Unsupported: the driver cannot be steered.
            LeaseLost: another process has the session; this activation is over.
            StoreUnavailable: nobody knows whether the record was stored; nothing was started.
        """
        if start.run_id in self._runs:
            return self._runs[start.run_id].status()
        if start.run_id in self._accepting:
            return await asyncio.shield(self._accepting[start.run_id])
        if start.run_id in self._steered:
            return self._steered_run(self._steered[start.run_id]).status()
        self.check_open()
        if self.busy and start.if_busy == "steer":
            return await self._steer(start)
        queued = self.busy and start.if_busy in ("queue", "cancel")
        if queued:
            self._queue.check_room(self._slot)
        else:
            self._take_slot(start.run_id)
        return await self._accept(start, queued=queued)

    async def _accept(self, start: StartRun, *, queued: bool) -> RunStatus:
        accepting: asyncio.Future[RunStatus] = asyncio.get_running_loop().create_future()
        accepting.add_done_callback(_seen)
        self._accepting[start.run_id] = accepting
        run: Run | None = None
        try:
            if start.resumes is not None:
                known = await self.store.read_run(start.identity, start.resumes.run_id)
                start = resumed(start, known)
            run = self._make(start, queued=queued)
            if queued:  # its place counts, and is in order, from this moment on
                self._queue.add(run, first=start.if_busy == "cancel")
            await self._record(run, queued=queued)
        except BaseException as error:
            if not queued:
                self._free_slot()
            elif run is not None:
                self._queue.remove(run)
                self._next_if_free()
            accepting.set_exception(error if isinstance(error, Exception) else RetinueError("interrupted"))
            self._check_fenced(error)
            raise
        finally:
            del self._accepting[start.run_id]
        if queued:
            self._queued(run, takes_over=start.if_busy == "cancel")
        else:
            self._begin(run)
        status = run.status()
        accepting.set_result(status)
        return status

    def _make(self, start: StartRun, *, queued: bool) -> Run:
        return Run(
            start, self, self._config, self._environment, queued=queued, session_resources=self.resources
        )

    async def _record(self, run: Run, *, queued: bool) -> None:
        start = run.start
        # The input is in the record already.
        kept = start if queued else msgspec.structs.replace(start, input="")
        what = QueuedRun(start=kept, app_digest=self._app_digest)
        record = RunRecord(
            tenant_id=start.identity.tenant_id,
            user_id=start.identity.user_id,
            session_id=start.session_id,
            run_id=start.run_id,
            root_run_id=start.root_run_id or start.run_id,
            parent_run_id=start.parent_run_id,
            app=self._app,
            input=msgspec.json.encode(start.input),
            created_at=time.time(),
            queued=queued,
            start=msgspec.json.encode(what),
        )
        run.hops += 1
        stored = await self.store.open_run(self.lease, record)
        if stored.outcome is not None:
            raise InputError(
                f"run {start.run_id} has already ended", code="run_finished", run_id=start.run_id
            )

    def _begin(self, run: Run) -> None:
        self.runs_started += 1
        self._remember(run)
        self._running = run
        run.on_cancel = None
        if (reason := self._cancelled_ahead.pop(run.run_id, None)) is not None:
            run.cancel(reason)
        elif self.closing is not None:
            run.cancel(f"the session is being closed ({self.closing})")
        self._background(self._execute(run))

    def _remember(self, run: Run) -> None:
        self._runs[run.run_id] = run
        finished = [run_id for run_id, known in self._runs.items() if known.settled.done()]
        for run_id in finished[: max(0, len(finished) - FINISHED_RUNS)]:
            del self._runs[run_id]

    async def _execute(self, run: Run) -> None:
        try:
            await run.execute()
        finally:
            self._running = None
            self._spent += run.tree.ledger.spending
            if run.fenced:
                self._fenced = True
            self._free_slot()

    def _background(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # --- overlap ------------------------------------------------------------------------------------------

    async def _steer(self, start: StartRun) -> RunStatus:
        """Give the input to the run that has the session."""
        assert self._slot is not None or len(self._queue) > 0
        if self._slot in self._accepting:
            await asyncio.shield(self._accepting[self._slot])
        run = self._running
        if run is None:
            raise self._conflict()
        if start.grants is not None or start.deadline is not None or start.run_mode != run.start.run_mode:
            raise InputError(
                f"run {run.run_id} has the session, and a steer cannot change its grants, deadline or run "
                "mode; leave them out, or use another if_busy",
                field="if_busy",
                run_id=run.run_id,
            )
        run.send(SendInput(run_id=run.run_id, input_id=start.run_id, input=start.input, mode="steer"))
        self._steered[start.run_id] = run.run_id
        if len(self._steered) > TOMBSTONES:
            self._steered.popitem(last=False)
        return run.status()

    def _steered_run(self, run_id: str) -> Run:
        run = self._runs.get(run_id)
        if run is None:
            raise InputError(
                f"run {run_id}, which took this input, has ended", code="run_finished", run_id=run_id
            )
        return run

    def _queued(self, run: Run, *, takes_over: bool = False) -> None:
        """The record is stored; the run waits for the slot, which may be free by now."""
        self._remember(run)
        if self.closing is not None or self._fenced:  # it left memory meanwhile; its record waits
            run.abandon(self.activation_id)
            return
        self._queue.ready(run)
        run.on_cancel = lambda: self._cancelled_in_queue(run)
        run.clocks.watch_deadline()
        if (reason := self._cancelled_ahead.pop(run.run_id, None)) is not None:
            run.cancel(reason)
        elif takes_over and self._slot is not None and self._is_run(self._slot):
            self.cancel(self._slot, f"run {run.run_id} takes its place")
        self._next_if_free()

    def _is_run(self, holder: str) -> bool:
        return holder in self._runs or holder in self._accepting

    def _next_if_free(self) -> None:
        if self._slot is None:
            self._next()

    def _cancelled_in_queue(self, run: Run) -> None:
        """It ends at once, without the slot: it never entered, so it changes nothing of the session."""
        if self._queue.remove(run):
            self._background(run.execute())

    def _next(self) -> None:
        """The slot is free: the first of the queue takes it."""
        if self._fenced or self.closing is not None:
            return
        run = self._queue.take()
        if run is not None:
            self._slot = run.run_id
            self._free.clear()
            self._background(self._begin_queued(run))

    async def _begin_queued(self, run: Run) -> None:
        try:
            await until_stored(lambda: self.store.begin_run(self.lease, run.run_id))
        except RetinueError as error:
            self._check_fenced(error)
            run.interrupt(f"the queued run could not be begun: {error.message}", error.code)
        self._begin(run)

    def _take_up(self, records: Sequence[RunRecord]) -> None:
        """Runs that waited in the queue of an earlier activation."""
        # In the order in which they were accepted, whatever order their records arrived in.
        for record in sorted(records, key=lambda record: record.created_at):
            start = msgspec.json.decode(record.start, type=QueuedRun).start
            run = self._make(start, queued=True)
            self._queue.add(run, first=False)
            self._queued(run)

    # --- the slot -----------------------------------------------------------------------------------------

    def check_open(self) -> None:
        """Raise :class:`LeaseLost` where nothing may be begun here any more."""
        if self._fenced:
            raise LeaseLost("another process has taken this session over")
        if self.closing is not None:
            raise LeaseLost(f"this activation is being closed ({self.closing})")

    def _take_slot(self, holder: str) -> None:
        self.check_open()
        if self.busy:
            raise self._conflict()
        self._slot = holder
        self._free.clear()

    def _conflict(self) -> SessionConflict:
        holder = self._slot or self._queue.first_id
        return SessionConflict(
            f"session {self.address.session_id!r} is in use by {holder}; wait for it, cancel it, or start "
            "with if_busy",
            run_id=holder,
        )

    def _free_slot(self) -> None:
        self._slot = None
        self._free_since = time.monotonic()
        self._next()
        if self._slot is None:
            self._free.set()

    def _check_fenced(self, error: BaseException) -> None:
        if isinstance(error, LeaseLost):
            self.fence()

    def committed(
        self, revision: int, messages: Sequence[bytes], state: bytes | None, replayable: bool
    ) -> None:
        """Take over what was just committed."""
        self.revision = revision
        self.history.extend(messages)
        self.state = self.state if state is None else state
        self.replayable = replayable

    # --- messages for runs --------------------------------------------------------------------------------

    def run(self, run_id: str) -> Run:
        """A run that is in memory. Raises :class:`NotFound`: its record may still be in the store."""
        run = self._runs.get(run_id)
        if run is None:
            raise NotFound(f"run {run_id} is not in this process", run_id=run_id)
        return run

    def knows(self, run_id: str) -> bool:
        """Whether the run is in memory."""
        return run_id in self._runs

    def send(self, sent: SendInput) -> Receipt:
        """Live input for a run. Raises :class:`NotFound`, and what :meth:`RunInbox.send` does."""
        return self.run(sent.run_id).send(sent)

    def reply(self, reply: ReplyInput) -> Receipt:
        """An answer for a run. Raises :class:`NotFound`, and what :meth:`RunInbox.reply` does."""
        return self.run(reply.run_id).reply(reply)

    async def decide(self, decision: DecideRequest) -> StoredApproval:
        """A decision about a call. Raises :class:`NotFound`, and what :meth:`ApprovalDesk.decide` does."""
        run = self.run(decision.run_id)
        if run.desk is None:  # the run is here, so nobody needs to look elsewhere
            raise unknown_approval(decision.approval_id)
        return await run.decide(decision)

    def cancel(self, run_id: str, reason: str) -> Receipt | None:
        """Cancel a run; one that was not started yet is remembered, and starts cancelled."""
        run = self._runs.get(run_id)
        if run is not None:
            return run.cancel(reason)
        self._cancelled_ahead[run_id] = reason
        if len(self._cancelled_ahead) > TOMBSTONES:
            self._cancelled_ahead.popitem(last=False)
        return None

    async def result(self, run_id: str) -> Settled:
        """The result of a run that is in memory or being accepted. Raises :class:`NotFound`."""
        if (accepting := self._accepting.get(run_id)) is not None:
            await asyncio.wait([accepting])
        return await self.run(run_id).result()

    async def events(self, run_id: str, after: int, limit: int) -> EventPageReply:
        """Events after a cursor; waits for one. Raises :class:`EventGap` and :class:`InputError`."""
        run = self.run(run_id)
        events = await run.events.log.read(after, limit)
        last = events[-1][0] if events else after
        return EventPageReply(
            events=events,
            closed=run.events.log.closed and last >= run.events.log.last,
            status=run.status(),
        )

    # --- the session itself -------------------------------------------------------------------------------

    async def close_resources(self) -> list[str]:
        """Dispose what runs of this session share; the ids of those that failed (contract section 2).

        Raises:
            SessionConflict: a run uses one, or one is being made; nothing was disposed.
        """
        closed: list[str] = await self._environment.on_user_loop(self.resources.close())
        self._free_since = time.monotonic()
        return closed

    async def exclusively(self, what: str, operation: Callable[[], Awaitable[T]]) -> T:
        """Do something that conflicts with runs, under the slot.

        Raises:
            SessionConflict: a run has the session.
            LeaseLost: another process has it; this activation is over.
        """
        self._take_slot(what)
        try:
            return await operation()
        except LeaseLost:
            self.fence()
            raise
        finally:
            self._free_slot()

    # --- leaving ------------------------------------------------------------------------------------------

    async def passivate(self, reason: DeactivationReason) -> bool:
        """Leave memory, unless something keeps it: give the lease back, refuse what comes later."""
        if self.idle_since is None and not self._fenced:
            return False
        await self._leave(reason)
        return True

    async def close(self, reason: str) -> None:
        """Refuse what comes, cancel what runs, wait until it is gone, and leave. The queue stays stored."""
        self.closing = self.closing or "shutting_down"
        if self._running is not None:
            self._running.cancel(reason)
        if self._slot is not None:
            await self._free.wait()
        await self._leave("shutting_down")

    async def _leave(self, reason: DeactivationReason) -> None:
        self.closing = self.closing or reason
        if self._leaving is None:
            self._leaving = asyncio.ensure_future(self._release())
        await asyncio.shield(self._leaving)

    async def _release(self) -> None:
        while (run := self._queue.take_any()) is not None:
            run.abandon(self.activation_id)
        if self.resources.held:
            with contextlib.suppress(RetinueError):  # one is in use by work that is on its way out
                await self._environment.on_user_loop(self.resources.close())
        if self.on_leaving is not None:
            await self.on_leaving(self.closing or "application")
        if not self._fenced:
            with contextlib.suppress(RetinueError):  # it runs out by itself
                await self.store.release(self.lease)

    def end_deleted(self) -> None:
        """All of the session was removed, its lease included: nothing is written from here any more."""
        self.closing = self.closing or "application"
        self.fence()

    def fence(self) -> None:
        """Another process has the session: nothing more is written from here."""
        self._fenced = True
        while (run := self._queue.take_any()) is not None:
            run.abandon(self.activation_id)
        if self._running is not None:
            self._running.fence()
        self.watch.over()

    def store_silent(self) -> None:
        """The store did not answer a renewal; after :data:`STORE_WAIT` seconds of that a run is given up."""
        if self.watch.silence > STORE_WAIT and self._running is not None:
            why = f"the store has not answered for {STORE_WAIT:.0f} s"
            self._running.interrupt(why, StoreUnavailable.code)
            self.watch.over()

    @property
    def spent(self) -> Spending:
        """What the runs of this activation used so far."""
        return self._spent if self._running is None else self._spent + self._running.tree.ledger.spending

    @property
    def fenced(self) -> bool:
        return self._fenced


def _seen(future: asyncio.Future[RunStatus]) -> None:
    if not future.cancelled():
        future.exception()


__all__ = ["DeactivationReason", "Session"]
