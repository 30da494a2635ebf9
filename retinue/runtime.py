"""The runtime: the front door. Starts runs, finds them again, reads sessions."""

from __future__ import annotations

import math
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal, Self, Unpack, get_args

from retinue.apps import AppSpec, Isolation, app_by_name, app_by_value, check_isolation
from retinue.backend import Backend
from retinue.budgets import Budgets
from retinue.config import ConfigMembers, RuntimeConfig
from retinue.current_work import current_trace
from retinue.drivers import RunMode
from retinue.errors import InputError, NotShippable, Unsupported, ValidationFailed
from retinue.event_streams import EventStream
from retinue.grants import Grants
from retinue.handles import RunHandle
from retinue.ids import Identity, check_id, check_identity, new_id
from retinue.loop import awaited, blocking, on_client_loop
from retinue.messages import Content, check_content
from retinue.protocol import IfBusy, Resumption, StartRun
from retinue.results import RunResult
from retinue.runtime_approvals import RuntimeApprovals
from retinue.runtime_resources import Resources
from retinue.runtime_sessions import Sessions
from retinue.store import Guarantees, RunRecord, StoredArtifact, StoreEngine

if TYPE_CHECKING:
    from retinue.inprocess import InProcessBackend

MEMORY = "memory:"


class Runtime:
    """Runs an app: a driver with its grants, budgets, tools and models.

    Args:
        app: a :class:`RuntimeConfig`, or ``"module:factory"`` naming a function that returns one in each
            process that needs it. Or give the members of the configuration as keywords (``driver``,
            ``grants``, ``budgets``, ...): see :class:`RuntimeConfig`.
        isolation: on Ray, ``"dedicated"``: every session has an actor, and so a process, of its own.
            ``"shared"``: up to 256 sessions live in one actor, for services with many conversations. It is
            part of what the app is: a session does not live in both kinds at once. In-process all sessions
            share the process.
        store: URL of the store: ``sqlite:///relative.db``, ``sqlite:////absolute.db`` or ``memory:``. By
            default a SQLite file under RETINUE_HOME on Ray, and memory in-process. In-process it may be an
            engine too, which stays open when the runtime is closed.
        backend: ``"ray"``, or ``"inprocess"``: the same runtime without Ray, for tests.
        address: of the Ray cluster; the standing cluster that is found, or a local one, by default.

    Raises:
        ValidationFailed: a member of the configuration is wrong; ``path`` names it.
        Unsupported: the driver declares what cannot be kept.
        NotShippable: something cannot be sent to the cluster's processes; ``path`` names it.
        StoreUnavailable: an in-process store cannot be opened.
    """

    def __init__(
        self,
        app: RuntimeConfig | str | None = None,
        *,
        isolation: Isolation = "dedicated",
        store: str | StoreEngine | None = None,
        backend: Literal["ray", "inprocess"] = "ray",
        address: str | None = None,
        **members: Unpack[ConfigMembers],
    ) -> None:
        if app is None:
            members.setdefault("driver", None)  # type: ignore[typeddict-item]  # RuntimeConfig says what is missing
            app = RuntimeConfig(**members)
        elif members:
            raise ValidationFailed(
                f"give either an app or its members as keywords ({', '.join(members)}), not both", path="app"
            )
        if not isinstance(app, RuntimeConfig | str):
            raise ValidationFailed(
                f"app must be a RuntimeConfig or 'module:factory', not {type(app).__name__}", path="app"
            )
        check_isolation(isolation)
        self._config = app if isinstance(app, RuntimeConfig) else None
        """The configuration, where it is loaded in this process."""
        self._backend: Backend
        if backend == "inprocess":
            self._backend = _inprocess_backend(app, isolation, store)
        elif backend == "ray":
            self._backend = _ray_backend(_app_spec(app, isolation), store, address)
        else:
            raise Unsupported(f"backend {backend!r} is not 'ray' or 'inprocess'", operation="backend")
        self.sessions = Sessions(self._backend)
        self.resources = Resources(self._backend)
        self.approvals = RuntimeApprovals(self._backend)

    # --- runs ---------------------------------------------------------------------------------------------

    def start(
        self,
        input: Content,
        *,
        identity: Identity,
        session_id: str,
        run_id: str | None = None,
        grants: Grants | None = None,
        deadline: float | datetime | None = None,
        run_mode: RunMode = "execute",
        parent_run_id: str | None = None,
        root_run_id: str | None = None,
        if_busy: IfBusy = "reject",
    ) -> RunHandle:
        """Start a run and return its handle at once, from a script, a notebook or a coroutine alike.

        Args:
            input: text, or a list of content parts; at most 65,536 bytes of JSON.
            identity: who it is for, as verified by the application.
            session_id: the conversation to go on with, or to begin.
            run_id: chosen by the caller, so that repeating the start is harmless; made up when left out.
            grants: narrows the app's grants.
            deadline: epoch seconds, or an aware datetime, at which the run is cancelled.
            run_mode: ``execute`` or ``plan``.
            parent_run_id, root_run_id: labels for the caller's own records, on every event.
            if_busy: what happens where another run has the session. ``reject``: this one is refused with
                ``session_conflict``. ``queue``: it waits its turn; the queue has a bound. ``steer``: its
                input steers the run that is there, and the handle follows that run: read ``handle.run_id``
                after ``accepted()``. ``cancel``: that run is cancelled, and this one is next.

        Raises:
            InputError: an argument is wrong. What only the host can know (a conflict, a full cluster) comes
                with ``accepted()`` or the result.
        """
        check_identity(identity, session_id)
        run_id = new_id("run") if run_id is None else run_id
        for label, value in (
            ("run_id", run_id),
            ("parent_run_id", parent_run_id),
            ("root_run_id", root_run_id),
        ):
            if value is not None:
                check_id(label, value)
        if run_mode not in ("execute", "plan"):
            raise InputError(f"run_mode is 'execute' or 'plan', not {run_mode!r}", field="run_mode")
        if grants is not None and not isinstance(grants, Grants):
            raise InputError(f"grants must be a retinue.Grants, not {type(grants).__name__}", field="grants")
        if if_busy not in get_args(IfBusy):
            raise InputError(
                f"if_busy is one of {', '.join(get_args(IfBusy))}, not {if_busy!r:.80}", field="if_busy"
            )
        if self._config is not None:
            self._config.grants.narrowed(grants)
            self._config.check_clocks()
        start = StartRun(
            run_id=run_id,
            identity=identity,
            session_id=session_id,
            input=check_content(input),
            grants=grants,
            deadline=_check_deadline(deadline),
            run_mode=run_mode,
            parent_run_id=parent_run_id,
            root_run_id=root_run_id,
            if_busy=if_busy,
            trace=current_trace(),
        )
        return RunHandle(self._backend, run_id=run_id, identity=identity, session_id=session_id, start=start)

    async def run(self, input: Content, *, identity: Identity, session_id: str, **options: Any) -> RunResult:
        """Start a run and await its result; the options of :meth:`start`."""
        return await self.start(input, identity=identity, session_id=session_id, **options).result()

    def stream(self, input: Content, *, identity: Identity, session_id: str, **options: Any) -> EventStream:
        """Start a run and follow its events: ``async for event in runtime.stream(...)``; the options of
        :meth:`start`. The last event carries the result."""
        return self.start(input, identity=identity, session_id=session_id, **options).events()

    def run_blocking(
        self, input: Content, *, identity: Identity, session_id: str, **options: Any
    ) -> RunResult:
        """The blocking twin of :meth:`run`."""
        return self.start(input, identity=identity, session_id=session_id, **options).wait()

    async def regenerate(
        self,
        *,
        identity: Identity,
        session_id: str,
        turn: int = -1,
        input: Content | None = None,
        new_session_id: str | None = None,
        **options: Any,
    ) -> RunHandle:
        """Go on from an earlier turn in another way: a fork that ends before it, and a run in the fork.

        The session itself stays as it is; ``handle.session_id`` is the branch, with a revision of its own.

        Args:
            turn: the turn to replace, counted from 0; a negative number counts from the end.
            input: what is said in its place; the same as before when left out.
            new_session_id: of the branch; made up when left out.
            options: those of :meth:`start`.

        Raises:
            InputError: there is no such turn.
            SessionConflict: the branch exists already.
        """
        forked, said = await self.sessions.fork_before_turn(
            identity, session_id, turn, new_session_id=new_session_id
        )
        return self.start(
            said if input is None else input, identity=identity, session_id=forked.session_id, **options
        )

    async def resume(
        self,
        run: RunHandle | str,
        *,
        top_up: Budgets,
        identity: Identity | None = None,
        run_id: str | None = None,
        if_busy: Literal["reject", "queue"] = "reject",
        deadline: float | datetime | None = None,
    ) -> RunHandle:
        """Go on with a run that ended ``budget_exhausted``: in the same session, from its history as it is.

        The new run has an id of its own, the same task, and that run's spending on its ledger, under its
        limits and the top-up together. An agent goes on with the conversation; a driver of your own finds the
        id in ``request.resumes`` and the history in ``services.history``.

        Args:
            run: its handle, or its id together with ``identity``.
            top_up: added to the limits; what is unlimited stays so.
            run_id: of the new run, so that repeating this is harmless; made up when left out.
            if_busy: as for :meth:`start`.
            deadline: of the new run.

        Raises:
            NotFound: there is no such run for this identity.
            InputError: an argument is wrong. That the run did not run out of budget, or that the top-up does
                not reach what was refused, comes with ``accepted()`` or the result.
        """
        if not isinstance(top_up, Budgets):
            raise InputError(f"top_up must be a retinue.Budgets, not {type(top_up).__name__}", field="top_up")
        if isinstance(run, RunHandle):
            identity = run.identity
        elif identity is None:
            raise InputError("a run is found by its id only together with an identity", field="identity")
        check_identity(identity, "any")
        of = run.run_id if isinstance(run, RunHandle) else run
        check_id("run", of)
        found = identity

        async def find() -> RunRecord:
            return await (await self._backend.client()).find_run(found, of)

        record = await awaited(on_client_loop(find()))
        start = StartRun(
            run_id=new_id("run") if run_id is None else run_id,
            identity=identity,
            session_id=record.session_id,
            input="(that of the run)",
            grants=None,
            deadline=_check_deadline(deadline),
            if_busy=if_busy,
            resumes=Resumption(run_id=of, top_up=top_up),
            trace=current_trace(),
        )
        return RunHandle(
            self._backend, run_id=start.run_id, identity=identity, session_id=record.session_id, start=start
        )

    def resume_blocking(
        self,
        run: RunHandle | str,
        *,
        top_up: Budgets,
        identity: Identity | None = None,
        run_id: str | None = None,
        if_busy: Literal["reject", "queue"] = "reject",
        deadline: float | datetime | None = None,
    ) -> RunHandle:
        """The blocking twin of :meth:`resume`."""
        work = self.resume(
            run, top_up=top_up, identity=identity, run_id=run_id, if_busy=if_busy, deadline=deadline
        )
        return blocking(on_client_loop(work))

    def attach(self, run_id: str, *, identity: Identity) -> RunHandle:
        """The handle of a run that was started elsewhere, or earlier.

        ``accepted()`` and ``result()`` tell when there is no such run for this identity (``not_found``).
        """
        check_identity(identity, "any")
        check_id("run_id", run_id)
        return RunHandle(self._backend, run_id=run_id, identity=identity, session_id=None, start=None)

    async def get_artifact(
        self, identity: Identity, session_id: str, artifact_id: str
    ) -> StoredArtifact | None:
        """Something kept beside a result; ``None`` where this session has no such artifact."""
        check_identity(identity, session_id)

        async def read() -> StoredArtifact | None:
            client = await self._backend.client()
            return await client.read_artifact(identity, session_id, artifact_id)

        return await awaited(on_client_loop(read()))

    async def store_guarantees(self) -> Guarantees:
        """What the store promises: durable, compare-and-swap, who may write."""

        async def ask() -> Guarantees:
            return (await self._backend.client()).store.guarantees

        return await awaited(on_client_loop(ask()))

    async def store_url(self) -> str:
        """Where this runtime's sessions are stored, without credentials."""

        async def ask() -> str:
            return (await self._backend.client()).store.statistics().url

        return await awaited(on_client_loop(ask()))

    # --- the end ------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Give up what this process holds for the runtime; done by itself when the process ends.

        In-process: cancels its runs, releases its sessions and closes the store that it opened. On Ray: runs
        and sessions go on.
        """
        blocking(on_client_loop(self._backend.close()))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _check_deadline(deadline: object) -> float | None:
    if deadline is None:
        return None
    if isinstance(deadline, datetime) and deadline.tzinfo is not None:
        return deadline.timestamp()
    if isinstance(deadline, bool) or not isinstance(deadline, int | float) or not math.isfinite(deadline):
        raise InputError(
            f"deadline must be epoch seconds, a finite number, or an aware datetime, not {deadline!r}",
            field="deadline",
        )
    return float(deadline)


def _app_spec(app: RuntimeConfig | str, isolation: Isolation) -> AppSpec:
    return app_by_name(app, isolation) if isinstance(app, str) else app_by_value(app, isolation)


def _inprocess_backend(
    app: RuntimeConfig | str, isolation: Isolation, store: str | StoreEngine | None
) -> InProcessBackend:
    from retinue.inprocess import InProcessBackend, local_app
    from retinue.storage import open_store, this_process

    owned = store is None or isinstance(store, str)
    engine = open_store(store or MEMORY) if store is None or isinstance(store, str) else store
    if not hasattr(engine, "execute"):
        raise ValidationFailed(f"store must be a URL or a store engine, not {store!r:.80}", path="store")
    holder = this_process(new_id("host"), "inprocess")
    return InProcessBackend(engine, owns_engine=owned, holder=holder, app=local_app(app, isolation))


def _ray_backend(app: AppSpec, store: str | StoreEngine | None, address: str | None) -> Backend:
    if store is not None and not isinstance(store, str):
        raise NotShippable(
            "store is an engine object; the cluster's store actor opens stores itself: give a URL",
            path="store",
        )
    from retinue.actors.backend import RayBackend
    from retinue.cluster.connection import connect

    return RayBackend(app, store, lambda: connect(address))
