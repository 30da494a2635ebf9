"""The client's side of sessions, the same for every backend: find the host, ask it, else ask the store.

A run that is in a process is answered by that process; one that is not is answered by its record. A host
that died is waited for until its runs were ended, then the record answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar, cast
from weakref import WeakValueDictionary

from retinue.budgets import UsageReport
from retinue.ended_runs import (
    cancel_receipt,
    record_settled,
    record_status,
    stored_decision,
    stored_events,
    stored_usage,
    unknown_status,
)
from retinue.errors import (
    InputError,
    LeaseLost,
    NotFound,
    Overloaded,
    RetinueError,
    SessionConflict,
)
from retinue.feeds import STATUS_PERIOD
from retinue.ids import Identity, SessionAddress
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
from retinue.store import RunRecord, Store, StoredApproval, StoredArtifact, StoredSession

if TYPE_CHECKING:
    from retinue.following import HostFeed

T = TypeVar("T")

PAGE = 256
"""Events asked for at once."""
_ATTEMPTS = 6
_PAUSE = 0.02
"""Seconds before asking again about a run that is neither in memory nor ended."""
_REMEMBERED = 4096
"""Runs for which it is remembered that the store has the answers."""


class HostGone(Exception):
    """The process that the message was for has died; whether it acted on it is unknown."""


class HostPort(Protocol):
    """A session host, near or far; see :class:`retinue.host.Host`. May raise :class:`HostGone`."""

    async def start(self, activation_id: str, start: StartRun) -> RunStatus: ...

    async def send(self, activation_id: str, sent: SendInput) -> Receipt: ...

    async def reply(self, activation_id: str, reply: ReplyInput) -> Receipt: ...

    async def decide(self, activation_id: str, decision: DecideRequest) -> StoredApproval: ...

    async def cancel(self, activation_id: str, run_id: str, reason: str) -> Receipt | None: ...

    async def result(self, activation_id: str, run_id: str) -> Settled: ...

    async def events(self, activation_id: str, run_id: str, after: int, limit: int) -> EventPageReply: ...

    async def status(self, activation_id: str, run_id: str) -> RunStatus: ...

    async def usage_report(self, activation_id: str, run_id: str) -> UsageReport: ...

    async def read(self, activation_id: str) -> StoredSession: ...

    async def import_legacy(self, activation_id: str, messages: Sequence[Message]) -> None: ...

    async def close_resources(self, activation_id: str) -> list[str]: ...

    async def fork(self, activation_id: str, fork: Fork) -> Forked: ...

    async def mark_replayable(self, activation_id: str, vouched: VouchFor) -> int: ...

    async def delete(self, activation_id: str) -> None: ...


@dataclass(frozen=True)
class Located:
    """Where a session lives now."""

    host: HostPort
    host_id: str
    activation_id: str
    feed: HostFeed | None = None
    """All that this process follows on that host; ``None`` where the host is in this process."""


class Router(Protocol):
    """Finds the host of a session."""

    async def locate(self, address: SessionAddress) -> Located:
        """Where the session lives; brings it to life where it does not.

        Raises:
            SessionConflict: another process, or a busy activation of another app, has it.
            Overloaded: there is no room.
        """
        ...

    async def resident(self, address: SessionAddress) -> Located | None:
        """Where the session lives, whatever its app; nothing is brought to life."""
        ...

    def forget(self, address: SessionAddress, located: Located) -> None:
        """That place was wrong: ask again next time."""
        ...

    async def host_lost(self, address: SessionAddress, located: Located) -> None:
        """The host died: return once its runs have been ended."""
        ...


def _ignore(located: Located) -> None:
    """Nobody wants to know where a start goes."""


class SessionClient:
    """Sessions and runs of one store, through a router. Belongs to one event loop."""

    def __init__(self, store: Store, router: Router) -> None:
        self.store = store
        self._router = router
        self._in_store: set[tuple[Identity, str]] = set()
        """Runs whose records have the answers, because no process has them any more."""
        self._queueing: WeakValueDictionary[SessionAddress, asyncio.Lock] = WeakValueDictionary()
        """Held by whoever is starting a run that may queue."""

    def address(self, identity: Identity, session_id: str) -> SessionAddress:
        return SessionAddress(
            store_id=self.store.store_id,
            tenant_id=identity.tenant_id,
            user_id=identity.user_id,
            session_id=session_id,
        )

    # --- runs ---------------------------------------------------------------------------------------------

    async def start(self, start: StartRun, on_sent: Callable[[Located], None] = _ignore) -> RunStatus:
        """Start a run; returns when its record is stored. Safe to repeat, also when the run has ended.

        ``on_sent`` is told where the message goes, when it goes: what is sent there in a later step of the
        event loop travels behind it.

        Starts that queue in one session are sent one after the other: messages that are under way together
        may overtake each other, and their order is what a queue is for.
        """
        if start.if_busy != "queue":
            return await self._start_or_find(start, on_sent)
        address = self.address(start.identity, start.session_id)
        async with self._queueing.setdefault(address, asyncio.Lock()):
            return await self._start_or_find(start, on_sent)

    async def _start_or_find(self, start: StartRun, on_sent: Callable[[Located], None]) -> RunStatus:
        try:
            return await self._start(start, on_sent)
        except (SessionConflict, InputError):
            record = await self._ended(start.identity, start.run_id)
            if record is None or record.session_id != start.session_id:
                raise
            return record_status(record)

    async def _start(self, start: StartRun, on_sent: Callable[[Located], None]) -> RunStatus:
        address = self.address(start.identity, start.session_id)
        for _ in range(_ATTEMPTS):
            located = await self._router.locate(address)
            on_sent(located)
            try:
                return await located.host.start(located.activation_id, start)
            except (NotFound, LeaseLost):
                self._router.forget(address, located)
            except HostGone:
                await self._router.host_lost(address, located)
                record = await self.store.read_run(start.identity, start.run_id)
                if record is not None:
                    return record_status(record)
        raise Overloaded(f"session {start.session_id!r} keeps moving between processes; try again later")

    async def send(self, identity: Identity, session_id: str, sent: SendInput) -> Receipt:
        """Live input for a run; a repeat of its id has no second effect.

        Raises:
            InputError, Unsupported, Overloaded: it was refused, and why; ``run_finished`` after the end.
            NotFound: there is no such run of this user.
        """

        async def send(located: Located) -> Receipt:
            return await located.host.send(located.activation_id, sent)

        return await self.at_run(identity, session_id, sent.run_id, send, _too_late)

    async def reply(self, identity: Identity, session_id: str, reply: ReplyInput) -> Receipt:
        """An answer to a run's question; a repeat of its id gives the first receipt.

        Raises:
            InputError: it was refused, and why; ``run_finished`` after the end.
            NotFound: there is no such run of this user.
        """

        async def send(located: Located) -> Receipt:
            return await located.host.reply(located.activation_id, reply)

        return await self.at_run(identity, session_id, reply.run_id, send, _too_late)

    async def decide(self, identity: Identity, session_id: str, decision: DecideRequest) -> StoredApproval:
        """A decision about a call that waits for approval; the same one again gives the same outcome.

        Raises:
            InputError: ``input_already_resolved``: it was settled otherwise; ``state`` and ``by`` say how.
            NotFound: this user has no such run, or that run has no such request.
        """

        async def send(located: Located) -> StoredApproval | NotFound:
            try:
                return await located.host.decide(located.activation_id, decision)
            except NotFound as error:
                if "approval_id" in error.data:  # the run is there, so nobody needs to look elsewhere
                    return error
                raise

        async def stored(record: RunRecord) -> StoredApproval | NotFound:
            return await stored_decision(self.store, identity, decision)

        answer = await self.at_run(identity, session_id, decision.run_id, send, stored)
        if isinstance(answer, NotFound):
            raise answer
        return answer

    async def cancel(self, identity: Identity, session_id: str, run_id: str, reason: str) -> Receipt:
        """Cancel a run; nothing happens to one that has ended."""
        address = self.address(identity, session_id)
        for _ in range(_ATTEMPTS):
            located = await self._router.resident(address)
            try:
                # Memory first: while its outcome is being stored, a run can still be cancelled.
                receipt = await _cancel_at(located, run_id, reason)
                if receipt is not None:
                    return receipt
                record = await self._ended(identity, run_id)
                if record is not None:
                    return cancel_receipt("returned", record_status(record))
                # Not started yet: whoever will start it must know.
                located = await self._router.locate(address)
                receipt = await _cancel_at(located, run_id, reason)
                return receipt or cancel_receipt("deferred", unknown_status(run_id, "cancelling"))
            except (NotFound, LeaseLost):
                assert located is not None
                self._router.forget(address, located)
            except HostGone:
                assert located is not None
                await self._router.host_lost(address, located)
        raise Overloaded(f"session {session_id!r} keeps moving between processes; try again later")

    async def result_of_start(self, located: Located, run_id: str) -> Settled | None:
        """The one result of a run whose start is on its way to the same host.

        ``None`` where that began nothing, or this message overtook it: :meth:`result` tells then.
        """
        try:
            return await located.host.result(located.activation_id, run_id)
        except (RetinueError, HostGone):
            return None

    async def result(self, identity: Identity, session_id: str, run_id: str) -> Settled:
        """The one result, waiting for it."""

        async def ask(located: Located) -> Settled:
            return await located.host.result(located.activation_id, run_id)

        async def settled(record: RunRecord) -> Settled:
            return record_settled(record)

        return await self.at_run(identity, session_id, run_id, ask, settled)

    async def events(
        self, identity: Identity, session_id: str, run_id: str, after: int, limit: int = PAGE
    ) -> EventPageReply:
        """Events after a cursor, waiting for one; empty and closed when there are no more.

        A :class:`retinue.viewers.RunViewer` reads page after page.

        Raises:
            EventGap: they are kept nowhere.
            InputError: the cursor is ahead of the run.
        """

        async def ask(located: Located) -> EventPageReply:
            return await located.host.events(located.activation_id, run_id, after, limit)

        async def stored(record: RunRecord) -> EventPageReply:
            return await stored_events(self.store, record, after, limit)

        return await self.at_run(identity, session_id, run_id, ask, stored)

    async def status(self, identity: Identity, session_id: str, run_id: str) -> RunStatus:
        """How a run is."""

        async def ask(located: Located) -> RunStatus:
            return await located.host.status(located.activation_id, run_id)

        async def ended(record: RunRecord) -> RunStatus:
            return record_status(record)

        return await self.at_run(identity, session_id, run_id, ask, ended)

    async def usage_report(self, identity: Identity, session_id: str, run_id: str) -> UsageReport | None:
        """What a run used so far, or in all; ``None`` for one whose ledger was lost with its process."""

        async def ask(located: Located) -> UsageReport | None:
            return await located.host.usage_report(located.activation_id, run_id)

        async def ended(record: RunRecord) -> UsageReport | None:
            address = self.address(identity, record.session_id)
            return await stored_usage(self.store, address, record)

        return await self.at_run(identity, session_id, run_id, ask, ended)

    async def watch(
        self, identity: Identity, session_id: str, run_id: str, hear: Callable[[RunStatus], None]
    ) -> None:
        """Tell how a run is, now and whenever that has changed; returns when the run has ended."""

        async def follow(located: Located) -> None:
            if located.feed is not None:
                await located.feed.watch(located.activation_id, run_id, hear)
                return
            while True:  # in this process, and in memory: it costs nothing
                status = await located.host.status(located.activation_id, run_id)
                hear(status)
                if status.state == "finished":
                    return
                await asyncio.sleep(STATUS_PERIOD)

        async def ended(record: RunRecord) -> None:
            hear(record_status(record))

        await self.at_run(identity, session_id, run_id, follow, ended)

    async def at_run(
        self,
        identity: Identity,
        session_id: str,
        run_id: str,
        ask: Callable[[Located], Awaitable[T]],
        read: Callable[[RunRecord], Awaitable[T]],
    ) -> T:
        """Ask a run where it lives, or read its record when it has ended and is in no process any more.

        Args:
            ask: asked again where the run has moved, or its host has died; so it must be safe to repeat.
            read: given the record of the ended run.

        Raises:
            NotFound: there is no such run of this user.
        """
        address = self.address(identity, session_id)
        while True:
            located = await self._located_run(address, run_id)
            if located is None:
                return await read(await self._record(identity, run_id))
            try:
                return await ask(located)
            except (NotFound, LeaseLost) as error:
                await self._not_there(address, located, run_id, error)
            except HostGone:
                await self._router.host_lost(address, located)

    async def find_run(self, identity: Identity, run_id: str) -> RunRecord:
        """The record of a run of this identity. Raises :class:`NotFound`."""
        return await self._record(identity, run_id)

    async def _record(self, identity: Identity, run_id: str) -> RunRecord:
        record = await self.store.read_run(identity, run_id)
        if record is None:
            raise NotFound(f"there is no run {run_id} of this user", run_id=run_id)
        return record

    async def _ended(self, identity: Identity, run_id: str) -> RunRecord | None:
        record = await self.store.read_run(identity, run_id)
        return record if record is not None and record.outcome is not None else None

    async def _located_run(self, address: SessionAddress, run_id: str) -> Located | None:
        """Where to ask about a run; ``None`` when its record has the answer."""
        if (address.identity, run_id) in self._in_store:
            return None
        # Memory first: it may have events that no store keeps. Nothing comes to life to tell of what ended.
        resident = await self._router.resident(address)
        if resident is not None:
            return resident
        if await self._ended(address.identity, run_id) is not None:
            self._answered_by_store(address.identity, run_id)
            return None
        return await self._router.locate(address)

    async def _not_there(
        self, address: SessionAddress, located: Located, run_id: str, error: RetinueError
    ) -> None:
        """The activation does not know the run: its record has the answer, or the activation is gone.

        An activation that is there and is just accepting the run must not be forgotten: another one would
        take its lease.
        """
        if await self._ended(address.identity, run_id) is not None:
            self._answered_by_store(address.identity, run_id)
            return
        await self._record(address.identity, run_id)
        if isinstance(error, LeaseLost) or "activation_id" in error.data:
            self._router.forget(address, located)
        await asyncio.sleep(_PAUSE)

    def _answered_by_store(self, identity: Identity, run_id: str) -> None:
        if len(self._in_store) >= _REMEMBERED:
            self._in_store.clear()
        self._in_store.add((identity, run_id))

    # --- sessions -----------------------------------------------------------------------------------------

    async def read(self, identity: Identity, session_id: str) -> StoredSession:
        """The session, exclusively: conflicts with a run."""
        return await self.at_session(
            identity, session_id, lambda located: located.host.read(located.activation_id)
        )

    async def latest(self, identity: Identity, session_id: str) -> StoredSession:
        """The last commit, without disturbing anybody."""
        return await self.store.read_session(self.address(identity, session_id))

    async def import_legacy(self, identity: Identity, session_id: str, messages: Sequence[Message]) -> None:
        """Replace the session by display-only history: conflicts with a run."""
        await self.at_session(
            identity,
            session_id,
            lambda located: located.host.import_legacy(located.activation_id, messages),
        )

    async def fork(self, identity: Identity, session_id: str, fork: Fork) -> Forked:
        """Begin another session with the first turns of this one. A repeat of its id changes nothing."""
        return await self.at_session(
            identity, session_id, lambda located: located.host.fork(located.activation_id, fork)
        )

    async def mark_replayable(self, identity: Identity, session_id: str, vouched: VouchFor) -> int:
        """Call a partial transcript replayable; the revision then. Conflicts with a run."""
        return await self.at_session(
            identity, session_id, lambda located: located.host.mark_replayable(located.activation_id, vouched)
        )

    async def delete(self, identity: Identity, session_id: str) -> None:
        """Remove all that is kept of the session. Conflicts with a run."""

        async def delete(located: Located) -> None:
            await located.host.delete(located.activation_id)
            self._router.forget(self.address(identity, session_id), located)

        await self.at_session(identity, session_id, delete)

    async def close_resources(self, identity: Identity, session_id: str) -> list[str]:
        """Dispose of what runs of the session share; ids of what failed. Brings nothing to life."""
        closed = await self._at_session(
            self._router.resident,
            self.address(identity, session_id),
            lambda located: located.host.close_resources(located.activation_id),
        )
        return closed or []

    async def at_session(
        self, identity: Identity, session_id: str, ask: Callable[[Located], Awaitable[T]]
    ) -> T:
        """Ask a session where it lives, bringing it to life where it does not.

        Args:
            ask: asked again where the session has moved, or its host has died; so it must be safe to repeat.
        """
        answer = await self._at_session(self._router.locate, self.address(identity, session_id), ask)
        return cast(T, answer)

    async def _at_session(
        self,
        find: Callable[[SessionAddress], Awaitable[Located | None]],
        address: SessionAddress,
        ask: Callable[[Located], Awaitable[T]],
    ) -> T | None:
        for _ in range(_ATTEMPTS):
            located = await find(address)
            if located is None:
                return None
            try:
                return await ask(located)
            except (NotFound, LeaseLost):
                self._router.forget(address, located)
            except HostGone:
                await self._router.host_lost(address, located)
        raise Overloaded(f"session {address.session_id!r} keeps moving between processes; try again later")

    async def read_artifact(
        self, identity: Identity, session_id: str, artifact_id: str
    ) -> StoredArtifact | None:
        return await self.store.read_artifact(self.address(identity, session_id), artifact_id)


async def _cancel_at(located: Located | None, run_id: str, reason: str) -> Receipt | None:
    if located is None:
        return None
    return await located.host.cancel(located.activation_id, run_id, reason)


async def _too_late(record: RunRecord) -> Receipt:
    raise InputError(
        f"run {record.run_id} has ended and takes no input; start another run in session "
        f"{record.session_id!r}",
        code="run_finished",
        run_id=record.run_id,
    )
