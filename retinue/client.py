"""The client's side of sessions, the same for every backend: find the host, ask it, else ask the store.

A run that is in a process is answered by that process; one that is not is answered by its record. A host
that died is waited for until its runs were ended, then the record answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, cast

from retinue.budgets import BudgetSnapshot, ResourceSnapshot
from retinue.errors import (
    EventGap,
    InputError,
    LeaseLost,
    NotFound,
    Overloaded,
    RetinueError,
    SessionConflict,
)
from retinue.events import EventsLost, RunTerminal, decode_event
from retinue.ids import Identity, SessionAddress
from retinue.messages import Message
from retinue.protocol import EventPageReply, RunStatus, Settled, StartRun
from retinue.store import RunRecord, Store, StoredArtifact, StoredSession

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

    async def cancel(self, activation_id: str, run_id: str, reason: str) -> RunStatus | None: ...

    async def result(self, activation_id: str, run_id: str) -> Settled: ...

    async def events(self, activation_id: str, run_id: str, after: int, limit: int) -> EventPageReply: ...

    async def status(self, activation_id: str, run_id: str) -> RunStatus: ...

    async def read(self, activation_id: str) -> StoredSession: ...

    async def import_legacy(self, activation_id: str, messages: Sequence[Message]) -> None: ...


@dataclass(frozen=True)
class Located:
    """Where a session lives now."""

    host: HostPort
    host_id: str
    activation_id: str


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


class SessionClient:
    """Sessions and runs of one store, through a router. Belongs to one event loop."""

    def __init__(self, store: Store, router: Router) -> None:
        self.store = store
        self._router = router
        self._in_store: set[tuple[Identity, str]] = set()
        """Runs whose records have the answers, because no process has them any more."""

    def address(self, identity: Identity, session_id: str) -> SessionAddress:
        return SessionAddress(
            store_id=self.store.store_id,
            tenant_id=identity.tenant_id,
            user_id=identity.user_id,
            session_id=session_id,
        )

    # --- runs ---------------------------------------------------------------------------------------------

    async def start(self, start: StartRun) -> RunStatus:
        """Start a run; returns when its record is stored. Safe to repeat, also when the run has ended."""
        try:
            return await self._start(start)
        except (SessionConflict, InputError):
            record = await self._ended(start.identity, start.run_id)
            if record is None or record.session_id != start.session_id:
                raise
            return _record_status(record)

    async def _start(self, start: StartRun) -> RunStatus:
        address = self.address(start.identity, start.session_id)
        for _ in range(_ATTEMPTS):
            located = await self._router.locate(address)
            try:
                return await located.host.start(located.activation_id, start)
            except (NotFound, LeaseLost):
                self._router.forget(address, located)
            except HostGone:
                await self._router.host_lost(address, located)
                record = await self.store.read_run(start.identity, start.run_id)
                if record is not None:
                    return _record_status(record)
        raise Overloaded(f"session {start.session_id!r} keeps moving between processes; try again later")

    async def cancel(self, identity: Identity, session_id: str, run_id: str, reason: str) -> None:
        """Cancel a run; nothing happens to one that has ended."""
        address = self.address(identity, session_id)
        for _ in range(_ATTEMPTS):
            located = await self._router.resident(address)
            try:
                # Memory first: while its outcome is being stored, a run can still be cancelled.
                if located is not None and await located.host.cancel(located.activation_id, run_id, reason):
                    return
                if await self._ended(identity, run_id) is not None:
                    return
                # Not started yet: whoever will start it must know.
                located = await self._router.locate(address)
                await located.host.cancel(located.activation_id, run_id, reason)
                return
            except (NotFound, LeaseLost):
                assert located is not None
                self._router.forget(address, located)
            except HostGone:
                assert located is not None
                await self._router.host_lost(address, located)
        raise Overloaded(f"session {session_id!r} keeps moving between processes; try again later")

    async def result(self, identity: Identity, session_id: str, run_id: str) -> Settled:
        """The one result, waiting for it."""
        address = self.address(identity, session_id)
        while True:
            located = await self._located_run(address, run_id)
            if located is None:
                return _settled(await self._record(identity, run_id))
            try:
                return await located.host.result(located.activation_id, run_id)
            except (NotFound, LeaseLost) as error:
                await self._not_there(address, located, run_id, error)
            except HostGone:
                await self._router.host_lost(address, located)

    async def events(
        self, identity: Identity, session_id: str, run_id: str, after: int, limit: int = PAGE
    ) -> EventPageReply:
        """Events after a cursor, waiting for one; empty and closed when there are no more.

        Raises:
            EventGap: they are kept nowhere.
            InputError: the cursor is ahead of the run.
        """
        address = self.address(identity, session_id)
        while True:
            located = await self._located_run(address, run_id)
            if located is None:
                return await self._stored_events(await self._record(identity, run_id), after, limit)
            try:
                return await located.host.events(located.activation_id, run_id, after, limit)
            except (NotFound, LeaseLost) as error:
                await self._not_there(address, located, run_id, error)
            except HostGone:
                await self._router.host_lost(address, located)

    async def status(self, identity: Identity, session_id: str, run_id: str) -> RunStatus:
        address = self.address(identity, session_id)
        while True:
            located = await self._located_run(address, run_id)
            if located is None:
                return _record_status(await self._record(identity, run_id))
            try:
                return await located.host.status(located.activation_id, run_id)
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

    async def _stored_events(self, record: RunRecord, after: int, limit: int) -> EventPageReply:
        final = record.final_cursor or 0
        status = _record_status(record)
        if after > final:
            raise InputError(f"cursor {after} is ahead of the run, whose last event is {final}")
        if after == final:
            return EventPageReply(events=(), closed=True, status=status)
        identity = Identity(tenant_id=record.tenant_id, user_id=record.user_id)
        page = await self.store.read_events(identity, record.run_id, after, limit)
        events = [(event.sequence, event.body) for event in page]
        following = events[0][0] if events else final
        if following != after + 1 and not _covered(events, after):
            raise EventGap(
                f"the events after {after} are no longer kept; the oldest cursor is {following - 1}",
                earliest_cursor=following - 1,
            )
        closed = len(page) < limit
        if closed:
            events.append((final, cast(bytes, record.outcome)))
        return EventPageReply(events=events, closed=closed, status=status)

    # --- sessions -----------------------------------------------------------------------------------------

    async def read(self, identity: Identity, session_id: str) -> StoredSession:
        """The session, exclusively: conflicts with a run."""
        address = self.address(identity, session_id)
        for _ in range(_ATTEMPTS):
            located = await self._router.locate(address)
            try:
                return await located.host.read(located.activation_id)
            except (NotFound, LeaseLost):
                self._router.forget(address, located)
            except HostGone:
                await self._router.host_lost(address, located)
        raise Overloaded(f"session {session_id!r} keeps moving between processes; try again later")

    async def latest(self, identity: Identity, session_id: str) -> StoredSession:
        """The last commit, without disturbing anybody."""
        return await self.store.read_session(self.address(identity, session_id))

    async def import_legacy(self, identity: Identity, session_id: str, messages: Sequence[Message]) -> None:
        address = self.address(identity, session_id)
        for _ in range(_ATTEMPTS):
            located = await self._router.locate(address)
            try:
                return await located.host.import_legacy(located.activation_id, messages)
            except (NotFound, LeaseLost):
                self._router.forget(address, located)
            except HostGone:
                await self._router.host_lost(address, located)
        raise Overloaded(f"session {session_id!r} keeps moving between processes; try again later")

    async def read_artifact(
        self, identity: Identity, session_id: str, artifact_id: str
    ) -> StoredArtifact | None:
        return await self.store.read_artifact(self.address(identity, session_id), artifact_id)


def _covered(events: Sequence[tuple[int, bytes]], after: int) -> bool:
    """Whether the first event names the numbers after the cursor as lost."""
    if not events:
        return False
    payload = decode_event(events[0][1]).payload
    return isinstance(payload, EventsLost) and payload.first <= after + 1


def _settled(record: RunRecord) -> Settled:
    assert record.outcome is not None
    payload = decode_event(record.outcome).payload
    assert isinstance(payload, RunTerminal)
    return Settled(result=payload.result, status=_record_status(record))


def _record_status(record: RunRecord) -> RunStatus:
    budget = None
    if record.outcome is not None:
        payload = decode_event(record.outcome).payload
        budget = payload.result.budget if isinstance(payload, RunTerminal) else None
    return RunStatus(
        run_id=record.run_id,
        state="finished" if record.outcome is not None else "running",
        cursor=record.final_cursor or 0,
        budget=budget or empty_budget(),
    )


def empty_budget() -> BudgetSnapshot:
    """Nothing spent, nothing limited: what a handle shows before it heard of its run."""
    nothing = ResourceSnapshot(limit=None, used=0, reserved=0, remaining=None)
    return BudgetSnapshot(model_calls=nothing, tool_calls=nothing, tokens=nothing)
