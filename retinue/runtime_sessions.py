"""``runtime.sessions``: the conversations of a runtime's store."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from retinue.client import SessionClient
from retinue.errors import InputError
from retinue.exports import SessionExport, export_session
from retinue.ids import Identity, check_id, check_identity, new_id
from retinue.loop import awaited, on_client_loop
from retinue.messages import Content, Message
from retinue.protocol import Fork, Forked, VouchFor
from retinue.snapshots import SessionSnapshot, decode_session
from retinue.store import PAGE_LIMIT, ListSessions, SessionSummary
from retinue.turns import input_of_turn

if TYPE_CHECKING:
    from retinue.backend import Backend

T = TypeVar("T")


class Sessions:
    """Sessions of a runtime: read, list, fork, export and delete them, and seed them from another system."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    async def _ask(self, work: Callable[[SessionClient], Awaitable[T]]) -> T:
        async def ask() -> T:
            return await work(await self._backend.client())

        return await awaited(on_client_loop(ask()))

    # --- reading ------------------------------------------------------------------------------------------

    async def read(self, identity: Identity, session_id: str) -> SessionSnapshot:
        """The session, exclusively. Raises :class:`SessionConflict` while a run has it."""
        check_identity(identity, session_id)
        return decode_session(await self._ask(lambda client: client.read(identity, session_id)))

    async def latest(self, identity: Identity, session_id: str) -> SessionSnapshot:
        """The session as last committed, without disturbing a run."""
        check_identity(identity, session_id)
        return decode_session(await self._ask(lambda client: client.latest(identity, session_id)))

    async def list(
        self, identity: Identity, *, after: str | None = None, limit: int = 100
    ) -> Sequence[SessionSummary]:
        """The sessions of a user in the order of their ids, without their content.

        Args:
            after: id of the last session of the page before.
            limit: sessions of a page, at most 1,000.
        """
        check_identity(identity, "any")
        question = ListSessions(
            tenant_id=identity.tenant_id,
            user_id=identity.user_id,
            after=None if after is None else (identity.tenant_id, identity.user_id, after),
            limit=limit,
        )
        return await self._ask(lambda client: client.store.list_sessions(question))

    async def export(self, identity: Identity, session_id: str) -> SessionExport:
        """Everything that is kept of a session: conversation, state, runs with events, artifacts, approvals.

        It is read without disturbing a run; what is committed meanwhile may be in one part only.
        """
        check_identity(identity, session_id)
        return await self._ask(
            lambda client: export_session(client.store, client.address(identity, session_id))
        )

    async def export_user(self, identity: Identity) -> AsyncIterator[SessionExport]:
        """Everything that is kept of a user, session by session; see :meth:`export`."""
        async for session_id in self._ids(identity):
            yield await self.export(identity, session_id)

    async def _ids(self, identity: Identity) -> AsyncIterator[str]:
        after: str | None = None
        while page := await self.list(identity, after=after, limit=PAGE_LIMIT):
            for summary in page:
                yield summary.session_id
            after = page[-1].session_id

    # --- changing -----------------------------------------------------------------------------------------

    async def import_legacy(self, identity: Identity, session_id: str, messages: Sequence[Message]) -> None:
        """Replace the session by display-only history: no state, revision 0, not replayable.

        Raises:
            SessionConflict: a run has the session.
            InputError: tool calls and results do not pair up.
        """
        check_identity(identity, session_id)
        await self._ask(lambda client: client.import_legacy(identity, session_id, messages))

    async def fork(
        self,
        identity: Identity,
        session_id: str,
        *,
        at: int | None = None,
        new_session_id: str | None = None,
        keep_state: bool = True,
    ) -> Forked:
        """Begin another session of the same user with the first turns of this one's last commit.

        A turn is a message of the user with all that follows, up to the next one. This session stays as it
        is, and a run in it goes on.

        Args:
            at: turns that the new session begins with; a negative number leaves so many out. All by default.
            new_session_id: made up when left out; the answer has it.
            keep_state: copy the application state, as it is now; otherwise the new session has none.

        Raises:
            InputError: there are not so many turns.
            SessionConflict: the new session exists already.
        """
        check_identity(identity, session_id)
        target = new_id("session") if new_session_id is None else new_session_id
        check_id("new_session_id", target)
        if target == session_id:
            raise InputError("a fork needs a session id of its own", field="new_session_id")
        if at is not None and (isinstance(at, bool) or not isinstance(at, int)):
            raise InputError(f"at is a number of turns, not {at!r:.80}", field="at")
        fork = Fork(fork_id=new_id("fork"), target_session_id=target, turns=at, keep_state=keep_state)
        return await self._ask(lambda client: client.fork(identity, session_id, fork))

    async def fork_before_turn(
        self, identity: Identity, session_id: str, turn: int, *, new_session_id: str | None = None
    ) -> tuple[Forked, Content]:
        """A fork that ends before a turn, and what the user said in that turn: to say it again, or better.

        Args:
            turn: counted from 0; a negative number counts from the end.
        """
        stored = await self._ask(lambda client: client.latest(identity, session_id))
        number, content = input_of_turn(stored.messages, turn)
        return await self.fork(identity, session_id, at=number, new_session_id=new_session_id), content

    async def mark_replayable(self, identity: Identity, session_id: str, *, by: str, why: str) -> int:
        """Say that somebody has checked a partial transcript, so that runs may build on it.

        A session is not replayable once an error, a cancellation or a crash cut a run, or its history was
        imported; nothing else ever takes that mark away. Who vouched, and why, is kept with the session.

        Returns:
            The session's revision then.

        Raises:
            SessionConflict: a run has the session.
            InputError: nobody, or no reason, is named.
        """
        check_identity(identity, session_id)
        check_id("by", by)
        check_id("why", why)
        vouched = VouchFor(mark_id=new_id("mark"), by=by, why=why)
        return await self._ask(lambda client: client.mark_replayable(identity, session_id, vouched))

    async def delete(self, identity: Identity, session_id: str) -> None:
        """Remove everything that is kept of a session: conversation, state, runs, events and artifacts.

        Its resources are closed first. Deleting a session that does not exist does nothing.

        Raises:
            SessionConflict: a run has the session: cancel it first.
        """
        check_identity(identity, session_id)
        await self._ask(lambda client: client.delete(identity, session_id))

    async def delete_user(self, identity: Identity) -> Sequence[str]:
        """Delete every session of a user; the ids of those that were there.

        Raises:
            SessionConflict: a run has one of them. Those before it are gone; call again.
        """
        deleted = [session_id async for session_id in self._ids(identity)]
        for session_id in deleted:
            await self.delete(identity, session_id)
        return deleted
