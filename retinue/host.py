"""A process that sessions live in: activations, the leases that they hold, the user code that they run.

The same class serves in-process, and inside a Ray actor behind a thin shell.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence

import msgspec

from retinue.apps import AppSpec, load_app
from retinue.config import RuntimeConfig
from retinue.errors import NotFound, RetinueError, StoreUnavailable
from retinue.execution import DriverExecution
from retinue.ids import Identity, SessionAddress
from retinue.lease_watch import LeaseWatch
from retinue.messages import Message
from retinue.ports import LocalPort
from retinue.protocol import EventPageReply, Finished, RunStatus, Settled, StartRun
from retinue.recovery import end_interrupted_runs
from retinue.runs import Run, RunEnvironment
from retinue.services import ExecutionServices
from retinue.sessions import DeactivationReason, Session
from retinue.store import LEASE_PERIOD, LEASE_RENEWAL, Holder, Lease, Store, StoredSession
from retinue.tree import ChildLauncher
from retinue.workers import Workers


class HostStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """What one session host holds and did."""

    host_id: str
    pid: int
    sessions: Sequence[str]
    """Session keys of the resident activations."""
    active_runs: int
    runs_started: int
    activations: int


class LocalRoot:
    """A root driver on a user loop of this process."""

    def __init__(self, run: Run, workers: Workers, control: asyncio.AbstractEventLoop) -> None:
        config = run.config
        services = ExecutionServices(
            request=run.request,
            config=config,
            port=LocalPort(run.tree, control, workers.loop),
            threads=workers.threads,
            history=run.session.history,
            state=run.session.state,
            token_limited=config.budgets.max_tokens is not None,
        )
        self._workers = workers
        self._execution = DriverExecution(config.driver, run.request, services)
        self._running = workers.submit(self._execution.run())

    async def wait(self) -> Finished:
        return await asyncio.wrap_future(self._running)

    def cancel(self) -> None:
        self._workers.loop.call_soon_threadsafe(self._execution.cancel)


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
            stores_events=stores_events,
        )
        self._sessions: dict[str, Session] = {}
        self._activating: dict[str, asyncio.Task[None]] = {}
        self._configs: dict[str, RuntimeConfig] = {}
        self._renewal: asyncio.Task[None] | None = None
        self._activations = 0
        self._runs_before = 0

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
            stored = await end_interrupted_runs(store, grant)
        except BaseException:
            await _give_back(store, grant.lease)
            raise
        self._forget_dead()
        self._sessions[activation_id] = Session(
            activation_id=activation_id,
            store=store,
            grant=msgspec.structs.replace(grant, session=stored, open_runs=()),
            config=config,
            environment=self._environment,
            app=app.name,
            watch=LeaseWatch(asked_at),
        )
        self._activations += 1
        if self._renewal is None:
            self._renewal = asyncio.ensure_future(self._renew())

    def _forget_dead(self) -> None:
        """Drop activations that were fenced: nobody asks for them by name again."""
        for activation_id, session in list(self._sessions.items()):
            if session.fenced and not session.busy:
                self._forget(activation_id)

    def provide(self, app: AppSpec, config: RuntimeConfig) -> None:
        """Use this configuration for the app: it is already in this process."""
        self._configs[app.digest] = config

    async def load(self, app: AppSpec) -> RuntimeConfig:
        """The app's configuration, made once in this process, on a user loop."""
        config = self._configs.get(app.digest)
        if config is None:
            config = await asyncio.wrap_future(self._workers.submit(_load(app)))
            self._configs[app.digest] = config
        return config

    def session(self, activation_id: str) -> Session:
        """A resident activation. Raises :class:`NotFound` for one that is not, or no longer, here."""
        session = self._sessions.get(activation_id)
        if session is None or session.closing is not None:
            raise NotFound(f"activation {activation_id} is not in this process", activation_id=activation_id)
        return session

    def has(self, activation_id: str) -> bool:
        """Whether the activation is resident here."""
        return activation_id in self._sessions

    async def passivate(self, activation_id: str, reason: DeactivationReason) -> bool:
        """Let an idle activation leave; false when it is busy."""
        session = self._sessions.get(activation_id)
        if session is None:
            return True
        if not await session.passivate(reason):
            return False
        self._forget(activation_id)
        return True

    def _forget(self, activation_id: str) -> None:
        session = self._sessions.pop(activation_id, None)
        if session is not None:
            self._runs_before += session.runs_started

    async def close(self, reason: str) -> None:
        """Cancel every run, wait for the ends, release every lease."""
        if self._renewal is not None:
            self._renewal.cancel()
            self._renewal = None
        await asyncio.gather(*(session.close(reason) for session in self._sessions.values()))
        for activation_id in list(self._sessions):
            self._forget(activation_id)

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
                if session.closing is None and not session.fenced:
                    by_store.setdefault(session.address.store_id, []).append(session)
            await asyncio.gather(*(self._renew_at(sessions) for sessions in by_store.values()))

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
        try:
            return await self.session(activation_id).start(start)
        except StoreUnavailable:
            # The record may stand all the same. The next activation looks, and ends what nobody runs.
            await self.passivate(activation_id, "application")
            raise

    def cancel(self, activation_id: str, run_id: str, reason: str) -> RunStatus | None:
        return self.session(activation_id).cancel(run_id, reason)

    async def result(self, activation_id: str, run_id: str) -> Settled:
        return await self._with_run(activation_id, run_id).result(run_id)

    async def events(self, activation_id: str, run_id: str, after: int, limit: int) -> EventPageReply:
        return await self._with_run(activation_id, run_id).events(run_id, after, limit)

    def status(self, activation_id: str, run_id: str) -> RunStatus:
        return self._with_run(activation_id, run_id).run(run_id).status()

    async def read(self, activation_id: str) -> StoredSession:
        return await self.session(activation_id).read()

    async def import_legacy(self, activation_id: str, messages: Sequence[Message]) -> None:
        await self.session(activation_id).import_legacy(messages)

    def _with_run(self, activation_id: str, run_id: str) -> Session:
        """The activation to read a run from; one that is leaving still has its runs."""
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
            sessions=[session.address.session_key for session in sessions],
            active_runs=sum(session.busy for session in sessions),
            runs_started=self._runs_before + sum(session.runs_started for session in sessions),
            activations=self._activations,
        )


async def _give_back(store: Store, lease: Lease) -> None:
    with contextlib.suppress(RetinueError):  # it runs out by itself
        await store.release(lease)


async def _load(app: AppSpec) -> RuntimeConfig:
    return load_app(app)
