"""The resources of a runtime's sessions, as the front door shows them."""

from __future__ import annotations

from retinue.backend import Backend
from retinue.ids import Identity, check_identity
from retinue.loop import awaited, blocking, on_client_loop


class Resources:
    """Session resources of a runtime: close what a session has kept open between its runs."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    async def close_session(self, identity: Identity, session_id: str) -> list[str]:
        """Dispose of what the runs of a session share, the latest first (contract section 2).

        Its history and its artifacts stay. A session that is in no process has nothing to close.

        Returns:
            The ids whose disposal failed; empty when all went well, and when there was nothing.

        Raises:
            SessionConflict: a run uses one, or one is being made; nothing was disposed of then.
            InputError: identity or session id is not valid.
        """
        check_identity(identity, session_id)
        return await awaited(on_client_loop(self._close(identity, session_id)))

    def close_session_blocking(self, identity: Identity, session_id: str) -> list[str]:
        """The blocking twin of :meth:`close_session`."""
        check_identity(identity, session_id)
        return blocking(on_client_loop(self._close(identity, session_id)))

    async def _close(self, identity: Identity, session_id: str) -> list[str]:
        client = await self._backend.client()
        return await client.close_resources(identity, session_id)
