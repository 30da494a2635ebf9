"""The seam between a runtime and where its sessions live."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from retinue.client import SessionClient
from retinue.protocol import RunStatus

if TYPE_CHECKING:
    from retinue.handles import RunHandle


class Backend(Protocol):
    """Where sessions live: in this process, or on a cluster."""

    @property
    def remote(self) -> bool:
        """True where a message to a session is a remote call."""
        ...

    async def client(self) -> SessionClient:
        """The client of this backend, connected on first use; on the client loop.

        Raises:
            ClusterUnreachable, VersionMismatch, StoreUnavailable: it cannot be had; what to do is said.
        """
        ...

    def peek(self, handle: RunHandle) -> RunStatus | None:
        """What is known of a run now, without waiting; at most a second old."""
        ...

    async def close(self) -> None:
        """Give up what this process holds; on the client loop. Runs on a cluster go on."""
        ...
