"""One session as it lives in a process: a single writer over its stored conversation.

An activation holds the store lease while it is resident; its run slot is what makes runs and exclusive
reads of the session conflict (contract section 1). Everything here happens on the control loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Literal, TypeVar

import msgspec

from retinue.config import RuntimeConfig
from retinue.errors import InputError, LeaseLost, NotFound, RetinueError, SessionConflict, StoreUnavailable
from retinue.ids import SessionAddress
from retinue.lease_watch import LeaseWatch
from retinue.messages import Message, check_structure, close_open_calls, decode_message, encode_message
from retinue.protocol import EventPageReply, RunStatus, Settled, StartRun
from retinue.runs import Run, RunEnvironment
from retinue.store import Lease, LeaseGrant, RunRecord, Store, StoredSession
from retinue.store_wait import STORE_WAIT

T = TypeVar("T")

FINISHED_RUNS = 8
"""Finished runs that stay readable from memory; older ones are read from the store."""
TOMBSTONES = 256
"""Cancellations remembered that overtook their start."""

DeactivationReason = Literal[
    "idle", "memory_pressure", "migrating", "duplicate", "shutting_down", "application"
]


class SessionSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """A copy of a session (contract section 1)."""

    history: Sequence[Message] = ()
    conversations: dict[str, Sequence[Message]] = msgspec.field(default_factory=dict)
    state: dict[str, Any] = msgspec.field(default_factory=dict)
    revision: int = 0
    replayable: bool = True


def decode_session(stored: StoredSession) -> SessionSnapshot:
    """A stored session as people read it."""
    return SessionSnapshot(
        history=[decode_message(body) for body in stored.messages],
        conversations={
            key: [decode_message(body) for body in bodies] for key, bodies in stored.conversations.items()
        },
        state=msgspec.json.decode(stored.state),
        revision=stored.revision,
        replayable=stored.replayable,
    )


class Session:
    """An activation of a session.

    Args:
        activation_id: changes with every activation; messages for another one are refused.
        grant: the lease, and the session as stored. Runs that it shows as open must have been ended.
        app: what the records name as the app.
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
        self.runs_started = 0
        self._config = config
        self._environment = environment
        self._app = app
        self._slot: str | None = None
        """Id of the run that has the session, or what else does."""
        self._free = asyncio.Event()
        """Nothing has the slot."""
        self._leaving: asyncio.Task[None] | None = None
        self._running: Run | None = None
        self._task: asyncio.Task[None] | None = None
        self._runs: OrderedDict[str, Run] = OrderedDict()
        self._accepting: dict[str, asyncio.Future[RunStatus]] = {}
        self._cancelled_ahead: OrderedDict[str, str] = OrderedDict()
        self._fenced = False

    @property
    def address(self) -> SessionAddress:
        return self.lease.address

    @property
    def busy(self) -> bool:
        return self._slot is not None

    # --- runs ---------------------------------------------------------------------------------------------

    async def start(self, start: StartRun) -> RunStatus:
        """Accept a run: take the slot, store its record, begin. A repeat gives the first answer.

        Raises:
            SessionConflict: another run has the session; ``run_id`` names it.
            LeaseLost: another process has the session; this activation is over.
            StoreUnavailable: nobody knows whether the record was stored; nothing was started.
        """
        if start.run_id in self._runs:
            return self._runs[start.run_id].status()
        if start.run_id in self._accepting:
            return await asyncio.shield(self._accepting[start.run_id])
        self._take_slot(start.run_id)
        accepting: asyncio.Future[RunStatus] = asyncio.get_running_loop().create_future()
        accepting.add_done_callback(_seen)
        self._accepting[start.run_id] = accepting
        try:
            run = Run(start, self, self._config, self._environment)
            await self._record(run)
        except BaseException as error:
            self._free_slot()
            accepting.set_exception(error if isinstance(error, Exception) else RetinueError("interrupted"))
            self._check_fenced(error)
            raise
        finally:
            del self._accepting[start.run_id]
        self._begin(run)
        status = run.status()
        accepting.set_result(status)
        return status

    async def _record(self, run: Run) -> None:
        start = run.start
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
        )
        run.hops += 1
        stored = await self.store.open_run(self.lease, record)
        if stored.outcome is not None:
            raise InputError(
                f"run {start.run_id} has already ended", code="run_finished", run_id=start.run_id
            )

    def _begin(self, run: Run) -> None:
        self.runs_started += 1
        self._runs[run.run_id] = run
        while len(self._runs) > FINISHED_RUNS + 1:
            self._runs.popitem(last=False)
        self._running = run
        if (reason := self._cancelled_ahead.pop(run.run_id, None)) is not None:
            run.cancel(reason)
        elif self.closing is not None:
            run.cancel(f"the session is being closed ({self.closing})")
        self._task = asyncio.ensure_future(self._execute(run))

    async def _execute(self, run: Run) -> None:
        try:
            await run.execute()
        finally:
            self._running = None
            self._free_slot()
            if run.fenced:
                self._fenced = True

    def _take_slot(self, holder: str) -> None:
        if self._fenced:
            raise LeaseLost("another process has taken this session over")
        if self.closing is not None:
            raise LeaseLost(f"this activation is being closed ({self.closing})")
        if self._slot is not None:
            raise SessionConflict(
                f"session {self.address.session_id!r} is in use by {self._slot}; wait for it or cancel it",
                run_id=self._slot,
            )
        self._slot = holder
        self._free.clear()

    def _free_slot(self) -> None:
        self._slot = None
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

    def run(self, run_id: str) -> Run:
        """A run that is in memory. Raises :class:`NotFound`: its record may still be in the store."""
        run = self._runs.get(run_id)
        if run is None:
            raise NotFound(f"run {run_id} is not in this process", run_id=run_id)
        return run

    def knows(self, run_id: str) -> bool:
        """Whether the run is in memory."""
        return run_id in self._runs

    def cancel(self, run_id: str, reason: str) -> RunStatus | None:
        """Cancel a run; one that was not started yet is remembered, and starts cancelled."""
        run = self._runs.get(run_id)
        if run is None:
            self._cancelled_ahead[run_id] = reason
            if len(self._cancelled_ahead) > TOMBSTONES:
                self._cancelled_ahead.popitem(last=False)
            return None
        run.cancel(reason)
        return run.status()

    async def result(self, run_id: str) -> Settled:
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

    async def read(self) -> StoredSession:
        """The session as committed, exclusively: conflicts with a run."""
        return await self._exclusively("a read", lambda: self.store.read_session(self.address))

    async def import_legacy(self, messages: Sequence[Message]) -> None:
        """Replace everything by display-only history (contract section 1). Conflicts with a run."""
        bodies = [encode_message(message) for message in messages]
        try:
            check_structure(messages)
        except (ValueError, AttributeError) as error:
            raise InputError(f"the history to import is broken: {error}") from None
        missing = close_open_calls(messages, "the imported conversation ended before it")
        bodies.extend(encode_message(message) for message in missing)
        await self._exclusively("an import", lambda: self.store.replace(self.lease, bodies))
        self.revision, self.replayable, self.history, self.state = 0, False, bodies, b"{}"

    async def _exclusively(self, what: str, operation: Callable[[], Awaitable[T]]) -> T:
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
        """Leave memory, unless something is going on: give the lease back, refuse what comes later."""
        if self.busy:
            return False
        await self._leave(reason)
        return True

    async def close(self, reason: str) -> None:
        """Refuse what comes, cancel what runs, wait until it is gone, and leave."""
        self.closing = self.closing or "shutting_down"
        if self._running is not None:
            self._running.cancel(reason)
        if self.busy:
            await self._free.wait()
        await self._leave("shutting_down")

    async def _leave(self, reason: DeactivationReason) -> None:
        self.closing = self.closing or reason
        if self._leaving is None:
            self._leaving = asyncio.ensure_future(self._release())
        await asyncio.shield(self._leaving)

    async def _release(self) -> None:
        if not self._fenced:
            with contextlib.suppress(RetinueError):  # it runs out by itself
                await self.store.release(self.lease)

    def fence(self) -> None:
        """Another process has the session: nothing more is written from here."""
        self._fenced = True
        if self._running is not None:
            self._running.fence()
        self.watch.over()

    def store_silent(self) -> None:
        """The store did not answer a renewal; after :data:`STORE_WAIT` seconds of that a run is given up."""
        if self.watch.silence > STORE_WAIT and self._running is not None:
            self._running.cancel(f"the store has not answered for {STORE_WAIT:.0f} s", StoreUnavailable.code)
            self.watch.over()

    @property
    def fenced(self) -> bool:
        return self._fenced


def _seen(future: asyncio.Future[RunStatus]) -> None:
    if not future.cancelled():
        future.exception()


def session_label(session_id: str, name: str) -> str:
    """What a delegate's session is called; a label, never a session that can be opened."""
    return f"{session_id}:{name}"


__all__ = ["DeactivationReason", "Session", "SessionSnapshot", "decode_session", "session_label"]
