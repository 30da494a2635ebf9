"""The way from an execution to the root of its tree, whatever lies between."""

from __future__ import annotations

from typing import Protocol

from retinue.budgets import BudgetSnapshot
from retinue.protocol import ParticipantMessage, RootReply, SettleModel


class RootPort(Protocol):
    """The way to the root of the tree: a thread away for the root driver, a process away for a delegate."""

    async def ask(self, message: ParticipantMessage) -> RootReply:
        """Send and wait for the reply."""
        ...

    def tell(self, message: ParticipantMessage) -> None:
        """Send, in order with everything else sent here; arrives before any later ``ask``."""
        ...

    async def settle(self, message: SettleModel) -> None:
        """Send at once, as ``tell`` does; return when ``budget`` shows it, if no remote call is needed."""
        ...

    @property
    def budget(self) -> BudgetSnapshot:
        """The tree's budget as last heard."""
        ...

    @property
    def steer_waits(self) -> bool:
        """Whether live input waits for the root; never for a delegate."""
        ...
