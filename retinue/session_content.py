"""What a session keeps, apart from its runs: reading, importing, forking, vouching for and deleting it.

Everything here goes through the activation, so that it keeps its place among the runs (contract section 1).
Only a fork does not wait for them: it copies the last commit.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec

from retinue.errors import InputError, LeaseLost, SessionConflict
from retinue.messages import Message, check_structure, close_open_calls, encode_message
from retinue.protocol import Fork, Forked, VouchFor
from retinue.sessions import Session
from retinue.store import Attestation, ForkSession, MarkReplayable, StoredSession
from retinue.turns import messages_of_turns

_FORK_ATTEMPTS = 4
"""Commits of runs that a fork may meet."""


class SessionContent:
    """The content of one activation's session. Belongs to the control loop."""

    def __init__(self, session: Session) -> None:
        self._session = session

    async def read(self) -> StoredSession:
        """The session as committed, exclusively: conflicts with a run."""
        session = self._session
        return await session.exclusively("a read", lambda: session.store.read_session(session.address))

    async def import_legacy(self, messages: Sequence[Message]) -> None:
        """Replace everything by display-only history. Conflicts with a run."""
        session = self._session
        bodies = [encode_message(message) for message in messages]
        try:
            check_structure(messages)
        except (ValueError, AttributeError) as error:
            raise InputError(f"the history to import is broken: {error}") from None
        missing = close_open_calls(messages, "the imported conversation ended before it")
        bodies.extend(encode_message(message) for message in missing)

        async def replace() -> None:
            await session.store.replace(session.lease, bodies)
            session.revision, session.replayable = 0, False
            session.history, session.state = bodies, b"{}"

        await session.exclusively("an import", replace)

    async def fork(self, fork: Fork) -> Forked:
        """Begin another session with the first turns of the last commit; a run here goes on.

        Raises:
            InputError: there are not so many turns.
            SessionConflict: the other session exists already.
        """
        session = self._session
        for attempt in range(1, _FORK_ATTEMPTS + 1):
            session.check_open()
            revision, kept = session.revision, messages_of_turns(session.history, fork.turns)
            try:
                await session.store.fork(
                    ForkSession(
                        lease=session.lease,
                        commit_id=fork.fork_id,
                        base_revision=revision,
                        target=msgspec.structs.replace(session.address, session_id=fork.target_session_id),
                        keep_messages=kept,
                        keep_state=fork.keep_state,
                    )
                )
            except SessionConflict:
                # A run has committed meanwhile, perhaps: its turn counts now.
                if session.revision == revision or attempt == _FORK_ATTEMPTS:
                    raise
                continue
            except LeaseLost:
                session.fence()
                raise
            return Forked(session_id=fork.target_session_id, revision=1, messages=kept, of_revision=revision)
        raise AssertionError("unreachable")

    async def mark_replayable(self, vouched: VouchFor) -> int:
        """Somebody vouches for the history: it is replayable from now on. Conflicts with a run.

        Returns:
            The new revision; that of now where the session is replayable already.
        """
        session = self._session

        async def mark() -> int:
            if session.replayable:
                return session.revision
            attestation = Attestation(
                by=vouched.by, why=vouched.why, revision=session.revision, at=time.time()
            )
            session.revision = await session.store.mark_replayable(
                MarkReplayable(lease=session.lease, commit_id=vouched.mark_id, attestation=attestation)
            )
            session.replayable = True
            return session.revision

        return await session.exclusively("an attestation", mark)

    async def delete(self) -> None:
        """Remove everything that is kept of the session; its activation is over with that.

        Raises:
            SessionConflict: a run has the session, or uses a resource of it.
        """
        session = self._session

        async def delete() -> None:
            await session.close_resources()
            await session.store.delete(session.lease)
            session.end_deleted()

        await session.exclusively("a deletion", delete)
