"""Following runs of a cluster without an app of one's own: for the command line."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from retinue.actors.backend import Connection, RayBackend
from retinue.actors.deployment import Deployment
from retinue.apps import AppSpec
from retinue.client import Located
from retinue.errors import NotFound
from retinue.ids import SessionAddress

PATIENCE = 15.0
"""Seconds for which a run that is in no process is waited for: its host may just have died."""
_POLL = 0.25
_NO_APP = AppSpec(kind="name", digest="", data=b"", name="viewer")


class ViewerBackend(RayBackend):
    """Brings no pool and no session to life: it reads, and follows what is there."""

    def __init__(self, store_url: str | None, connect: Callable[[], Connection]) -> None:
        super().__init__(_NO_APP, store_url, connect)

    async def _introduce(self, deployed: Deployment) -> None:
        """Nothing: there is no app to keep hosts for."""

    async def locate(self, address: SessionAddress) -> Located:
        """Where the session lives already.

        Raises:
            NotFound: in no process of this cluster.
        """
        for _ in range(int(PATIENCE / _POLL)):
            found = await self.resident(address)
            if found is not None:
                return found
            await asyncio.sleep(_POLL)
        raise NotFound(
            f"session {address.session_id!r} is in no process of this cluster; whoever has it may be another "
            "cluster or a program of its own, or will come back when its app starts a run there",
            session_id=address.session_id,
        )
