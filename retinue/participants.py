"""Who takes part in a tree: the root of a run, and its delegates at any depth."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field

from retinue.drivers import RunRequest
from retinue.ledger import ROOT
from retinue.protocol import ChildEnded


@dataclass(eq=False)
class Participant:
    """A member of a tree. Belongs to the control loop."""

    request: RunRequest
    """What it was asked to do."""
    parent: Participant | None
    launching: asyncio.Task[None] | None = None
    ended: asyncio.Future[ChildEnded] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    stopped: str | None = None
    """Why nothing more is admitted for it, once it is being cancelled."""
    offered: frozenset[str] | None = None
    """Tools that its last task model call offered; ``None`` before the first."""
    steps: int = 0
    """Task model calls that were prepared."""
    hops: int = 0
    children: list[Participant] = field(default_factory=list)

    @property
    def run_id(self) -> str:
        return self.request.run_id

    @property
    def name(self) -> str:
        """Empty for the root."""
        return self.request.participant

    @property
    def attempt_id(self) -> str:
        return self.request.attempt_id

    @property
    def depth(self) -> int:
        """Participants above this one."""
        return 0 if self.parent is None else self.parent.depth + 1

    @property
    def account(self) -> str:
        """Its name in the ledger."""
        return ROOT if self.parent is None else self.run_id

    def below(self) -> Iterator[Participant]:
        """Its delegates and theirs, at any depth."""
        for child in self.children:
            yield child
            yield from child.below()
