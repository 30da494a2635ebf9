"""A process that sessions live in: activations, the leases that they hold, the user code that they run.

The same class serves in-process, and inside a Ray actor behind a thin shell.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections import Counter
from collections.abc import Coroutine, Sequence
from typing import Any

import msgspec

from retinue.apps import AppSpec, load_app
from retinue.budgets import Spending, UsageReport
from retinue.config import RuntimeConfig
from retinue.errors import NotFound, RetinueError, StoreUnavailable
from retinue.feeds import Feeds, FeedStatistics
from retinue.hooks import DeactivationReason, HookCalls, SessionInfo
from retinue.ids import Identity, SessionAddress
from retinue.lease_watch import LeaseWatch
from retinue.local_root import LocalRoot
from retinue.messages import Message
from retinue.protocol import (
    DecideRequest,
    EventPageReply,
    Fork,
    Forked,
    Receipt,
    ReplyInput,
    RunStatus,
    SendInput,
    Settled,
    StartRun,
    VouchFor,
)
from retinue.recovery import end_interrupted_runs
from retinue.runs import RunEnvironment
from retinue.session_content import SessionContent
from retinue.sessions import Session
from retinue.store import (
    LEASE_PERIOD,
    LEASE_RENEWAL,
    Holder,
    Lease,
    Store,
    StoredApproval,
    StoredSession,
)
from retinue.tree import ChildLauncher
from retinue.workers import Workers

IDLE_TIMEOUT = 900.0
"""Seconds without use after which a session leaves memory, unless told otherwise."""
GRACE = 1.0
"""Seconds in which a session that has just come to life makes no room: its first message is on the way."""


class ResidentSession(msgspec.Struct, frozen=True, kw_only=True):
    """A session that lives in this process."""

    store_id: str
    tenant_id: str
    user_id: str
    session_id: str
    activation_id: str
    idle: float | None
    """Seconds since it was used last; ``None`` while it must stay: it is busy, or holds a resource."""
    active_run: str | None
    """Id of the run that has it, or in words what else has."""
    runs_started: int
    """By this activation."""


class HostStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """What one session host holds and did."""

    host_id: str
    pid: int
    sessions: Sequence[ResidentSession]
    active_runs: int
    runs_started: int
    activations: int
    passivations: dict[DeactivationReason, int]
    """Sessions that left, by reason."""
    feeds: FeedStatistics
    """What client processes follow here."""
    spent: Spending
    """What the runs here used, with their delegates."""


class Host:
    """Sessions of one process. Belongs to its control loop.

    Args:
        holder: this process, as leases describe it.
        launcher: places delegates.
        stores_events: write events to the store, so that they outlive this process.
    """

    def __init__(
        self, *, holder: Holder, workers: Workers, launcher: ChildLauncher, stores_events: bool
    ) -> None:
        self.holder = holder
        self._workers = workers
        self._environment = RunEnvironment(
            launcher=launcher,
            launch_root=lambda run: LocalRoot(run, workers, asyncio.get_running_loop()),
            on_user_loop=lambda work: asyncio.wrap_future(workers.submit(work)),
            stores_events=stores_events,
        )
        self._sessions: dict[str, Session] = {}
        self._expected: dict[str, float] = {}
        """Activations that had no message yet, and since when."""
        self._activating: dict[str, asyncio.Task[None]] = {}
        self._configs: dict[str, RuntimeConfig] = {}
        self._loading: dict[str, asyncio.Task[RuntimeConfig]] = {}
        self._hooks = HookCalls(workers)
        self._renewal: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self.activations = 0
        """Sessions that came to life here so far."""
        self._passivations: Counter[DeactivationReason] = Counter()
        self._runs_before = 0
        self._spent_before = Spending()
        self.feeds = Feeds(self)
        """What client processes follow here."""

    # --- activations --------------------------------------------------------------------------------------

    async def activate(self, address: SessionAddress, activation_id: str, store: Store, app: AppSpec) -> None:
        """Bring a session into this process: take its lease, end what a dead process left open, load it.

        Raises:
            SessionConflict: another process has its lease; ``retry_after`` says for how long at most.
            ValidationFailed: the app cannot be loaded here.
        """
        if activation_id in self._sessions:
            return
        if activation_id in self._activating:
            await asyncio.shield(self._activating[activation_id])
            return
        activating = asyncio.ensure_future(self._activate(address, activation_id, store, app))
        self._activating[activation_id] = activating
        try:
            await asyncio.shield(activating)
        finally:
            self._activating.pop(activation_id, None)

    async def _activate(
        self, address: SessionAddress, activation_id: str, store: Store, app: AppSpec
    ) -> None:
        config = await self.load(app)
        asked_at = time.monotonic()
        grant = await store.acquire(address, self.holder)
        try:
            stored, queued = await end_interrupted_runs(store, grant, app.digest)
        except BaseException:
            await _give_back(store, grant.lease)
            raise
        self._leave_lost()
        session = Session(
            activation_id=activation_id,
            store=store,
            grant=msgspec.structs.replace(grant, session=stored, open_runs=queued),
            config=config,
            environment=self._environment,
            app=app.name,
            app_digest=app.digest,
            watch=LeaseWatch(asked_at),
        )
        session.on_leaving = functools.partial(self._deactivating, session)
        self._sessions[activation_id] = session
        self._expected[activation_id] = time.monotonic()
        self.activations += 1
        self._hooks.activated(config.hooks, _info(session))
        if self._renewal is None:
            self._renewal = asyncio.ensure_future(self._renew())

    async def _deactivating(self, session: Session, reason: DeactivationReason) -> None:
        await self._hooks.deactivating(_info(session), reason)

    def _leave_lost(self) -> None:
        """Activations that were fenced leave: nobody asks for them by name again."""
        for activation_id, session in list(self._sessions.items()):
            if session.fenced and not session.busy:
                self._background(session.passivate("duplicate"))
                self._forget(activation_id)

    def _background(self, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def provide(self, app: AppSpec, config: RuntimeConfig) -> None:
        """Use this configuration for the app: it is already in this process."""
        self._configs[app.digest] = config

    async def load(self, app: AppSpec) -> RuntimeConfig:
        """The app's configuration, made once in this process, on a user loop."""
        config = self._configs.get(app.digest)
        if config is not None:
            return config
        loading = self._loading.get(app.digest)
        if loading is None:
            loading = self._loading[app.digest] = asyncio.ensure_future(self._load(app))
            loading.add_done_callback(lambda _: self._loading.pop(app.digest, None))
        return await asyncio.shield(loading)

    async def _load(self, app: AppSpec) -> RuntimeConfig:
        config = await asyncio.wrap_future(self._workers.submit(_load(app)))
        self._configs[app.digest] = config
        return config

    def session(self, activation_id: str) -> Session:
        """A resident activation. Raises :class:`NotFound` for one that is not, or no longer, here."""
        session = self._sessions.get(activation_id)
        if session is None or session.closing is not None:
            raise NotFound(f"activation {activation_id} is not in this process", activation_id=activation_id)
        self._expected.pop(activation_id, None)
        return session

    def has(self, activation_id: str) -> bool:
        """Whether the activation is resident here."""
        return activation_id in self._sessions

    async def passivate(self, activation_id: str, reason: DeactivationReason) -> bool:
        """Let an activation leave; false when it must stay.

        It stays while it is busy or holds a resource (see :attr:`Session.idle_since`), and makes no room
        while its first message is on the way.
        """
        session = self._sessions.get(activation_id)
        if session is None or session.fenced:
            return True
        if reason in ("idle", "memory_pressure") and self._is_expected(activation_id):
            return False
        if not await session.passivate(reason):
            return False
        self._forget(activation_id)
        return True

    def _is_expected(self, activation_id: str) -> bool:
        since = self._expected.get(activation_id)
        return since is not None and time.monotonic() - since < GRACE

    def idle(self) -> dict[str, float | None]:
        """The activations here, and for how many seconds each has been idle; ``None`` for those that stay."""
        return {
            activation_id: self._idle_seconds(session)
            for activation_id, session in self._sessions.items()
            if session.busy or not session.fenced
        }

    def _idle_seconds(self, session: Session) -> float | None:
        since = session.idle_since
        if since is None or session.closing is not None or self._is_expected(session.activation_id):
            return None
        return max(0.0, time.monotonic() - since)

    def addresses(self) -> list[tuple[SessionAddress, str]]:
        """Address and activation id of each session that lives here."""
        return [
            (session.address, activation_id)
            for activation_id, session in self._sessions.items()
            if not session.fenced
        ]

    def _forget(self, activation_id: str) -> None:
        session = self._sessions.pop(activation_id, None)
        self._expected.pop(activation_id, None)
        if session is not None:
            self._runs_before += session.runs_started
            self._spent_before += session.spent
            self._passivations[session.closing or "duplicate"] += 1

    async def close(self, reason: str) -> None:
        """Cancel every run, wait for the ends, release every lease."""
        self._leave_lost()
        await asyncio.gather(*(session.close(reason) for session in self._sessions.values()))
        if self._renewal is not None:
            self._renewal.cancel()
            self._renewal = None
        for activation_id in list(self._sessions):
            self._forget(activation_id)
        if self._tasks:
            await asyncio.wait(self._tasks)
        self.feeds.close()

    # --- leases -------------------------------------------------------------------------------------------

    async def _renew(self) -> None:
        """Renew all leases in one message for each store; fence what did not stand.

        While a store does not answer, its sessions admit nothing (:class:`LeaseWatch`) and write nothing
        (their operations wait for it); should a lease have been taken meanwhile, the next answer says so.
        """
        while True:
            await asyncio.sleep(LEASE_RENEWAL)
            by_store: dict[str, list[Session]] = {}
            for session in self._sessions.values():
                if not session.fenced:
                    by_store.setdefault(session.address.store_id, []).append(session)
            await asyncio.gather(*(self._renew_at(sessions) for sessions in by_store.values()))
            self._leave_lost()

    async def _renew_at(self, sessions: Sequence[Session]) -> None:
        sent_at = time.monotonic()
        try:
            async with asyncio.timeout(LEASE_PERIOD):
                standing = await sessions[0].store.renew([session.lease for session in sessions])
        except (RetinueError, TimeoutError):
            for session in sessions:
                session.store_silent()
            return
        for session, stands in zip(sessions, standing, strict=True):
            if stands:
                session.watch.renewed(sent_at)
            else:
                session.fence()

    # --- messages for sessions ----------------------------------------------------------------------------

    async def start(self, activation_id: str, start: StartRun) -> RunStatus:
        session = self.session(activation_id)
        try:
            return await session.start(start)
        except StoreUnavailable:
            # The record may stand all the same. The next activation looks, and ends what nobody runs.
            with contextlib.suppress(RetinueError):
                await session.close_resources()  # they would keep it
            await self.passivate(activation_id, "application")
            raise

    def send(self, activation_id: str, sent: SendInput) -> Receipt:
        return self._with_run(activation_id, sent.run_id).send(sent)

    def reply(self, activation_id: str, reply: ReplyInput) -> Receipt:
        return self._with_run(activation_id, reply.run_id).reply(reply)

    async def decide(self, activation_id: str, decision: DecideRequest) -> StoredApproval:
        return await self._with_run(activation_id, decision.run_id).decide(decision)

    def cancel(self, activation_id: str, run_id: str, reason: str) -> Receipt | None:
        return self._with_run(activation_id, run_id).cancel(run_id, reason)

    async def result(self, activation_id: str, run_id: str) -> Settled:
        return await self._with_run(activation_id, run_id).result(run_id)

    async def events(self, activation_id: str, run_id: str, after: int, limit: int) -> EventPageReply:
        return await self._with_run(activation_id, run_id).events(run_id, after, limit)

    def status(self, activation_id: str, run_id: str) -> RunStatus:
        return self._with_run(activation_id, run_id).run(run_id).status()

    def usage_report(self, activation_id: str, run_id: str) -> UsageReport:
        return self._with_run(activation_id, run_id).run(run_id).usage_report()

    async def read(self, activation_id: str) -> StoredSession:
        return await self._content(activation_id).read()

    async def import_legacy(self, activation_id: str, messages: Sequence[Message]) -> None:
        await self._content(activation_id).import_legacy(messages)

    async def fork(self, activation_id: str, fork: Fork) -> Forked:
        return await self._content(activation_id).fork(fork)

    async def mark_replayable(self, activation_id: str, vouched: VouchFor) -> int:
        return await self._content(activation_id).mark_replayable(vouched)

    async def delete(self, activation_id: str) -> None:
        session = self.session(activation_id)
        await SessionContent(session).delete()
        self._background(session.passivate("application"))  # for its hook: of the session nothing is left
        self._forget(activation_id)

    def _content(self, activation_id: str) -> SessionContent:
        return SessionContent(self.session(activation_id))

    async def close_resources(self, activation_id: str) -> list[str]:
        return await self.session(activation_id).close_resources()

    def _with_run(self, activation_id: str, run_id: str) -> Session:
        """The activation that a message for a run is for; one that is leaving still has its runs."""
        session = self._sessions.get(activation_id)
        if session is not None and session.knows(run_id):
            return session
        return self.session(activation_id)

    def peek(self, identity: Identity, run_id: str) -> RunStatus | None:
        """A run of this identity as it is now, if it is in memory; may be called from any thread."""
        for session in list(self._sessions.values()):
            if session.address.identity == identity and session.knows(run_id):
                with contextlib.suppress(NotFound):  # it has left memory just now
                    return session.run(run_id).status()
        return None

    def statistics(self) -> HostStatistics:
        sessions = self._sessions.values()
        return HostStatistics(
            host_id=self.holder.holder_id,
            pid=self.holder.pid,
            sessions=[self._describe(session) for session in sessions],
            active_runs=sum(session.busy for session in sessions),
            runs_started=self._runs_before + sum(session.runs_started for session in sessions),
            activations=self.activations,
            passivations=dict(self._passivations),
            feeds=self.feeds.statistics(),
            spent=sum((session.spent for session in sessions), self._spent_before),
        )

    def _describe(self, session: Session) -> ResidentSession:
        address = session.address
        return ResidentSession(
            store_id=address.store_id,
            tenant_id=address.tenant_id,
            user_id=address.user_id,
            session_id=address.session_id,
            activation_id=session.activation_id,
            idle=self._idle_seconds(session),
            active_run=session.in_use_by,
            runs_started=session.runs_started,
        )


def _info(session: Session) -> SessionInfo:
    return SessionInfo(
        identity=session.address.identity,
        session_id=session.address.session_id,
        activation_id=session.activation_id,
        revision=session.revision,
    )


async def _give_back(store: Store, lease: Lease) -> None:
    with contextlib.suppress(RetinueError):  # it runs out by itself
        await store.release(lease)


async def _load(app: AppSpec) -> RuntimeConfig:
    return load_app(app)
