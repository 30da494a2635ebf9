"""The way from a user loop to the root of its tree in the same process."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable

from retinue.budgets import BudgetSnapshot
from retinue.protocol import ParticipantMessage, RootReply, SettleModel
from retinue.tree import Tree


class LocalPort:
    """Carries messages between a user loop and the control loop; replies in the order things happen."""

    def __init__(
        self, tree: Tree, control: asyncio.AbstractEventLoop, user: asyncio.AbstractEventLoop
    ) -> None:
        self._tree = tree
        self._control = control
        self._user = user
        self._later: set[asyncio.Future[RootReply]] = set()
        """Requests that wait for something; kept so that none is collected half done."""

    async def ask(self, message: ParticipantMessage) -> RootReply:
        answer: asyncio.Future[RootReply] = self._user.create_future()
        self._control.call_soon_threadsafe(self._serve, message, answer)
        return await answer

    def tell(self, message: ParticipantMessage) -> None:
        self._control.call_soon_threadsafe(self._take, message)

    async def settle(self, message: SettleModel) -> None:
        await self.ask(message)

    @property
    def budget(self) -> BudgetSnapshot:
        return self._tree.budget

    @property
    def steer_waits(self) -> bool:
        return self._tree.inbox.steer_waits

    def _take(self, message: ParticipantMessage) -> None:
        reply = self._tree.handle(message)
        if isinstance(reply, Awaitable):  # it waits for room in the event log
            self._wait_for(reply)

    def _serve(self, message: ParticipantMessage, answer: asyncio.Future[RootReply]) -> None:
        reply = self._tree.handle(message)
        if isinstance(reply, Awaitable):
            self._wait_for(reply).add_done_callback(lambda done: self._answer_later(done, answer))
        else:
            self._answer(reply, answer)

    def _wait_for(self, reply: Awaitable[RootReply]) -> asyncio.Future[RootReply]:
        waiting = asyncio.ensure_future(reply)
        self._later.add(waiting)
        waiting.add_done_callback(self._later.discard)
        return waiting

    def _answer_later(self, done: asyncio.Future[RootReply], answer: asyncio.Future[RootReply]) -> None:
        if not done.cancelled():
            self._answer(done.result(), answer)

    def _answer(self, reply: RootReply, answer: asyncio.Future[RootReply]) -> None:
        with contextlib.suppress(RuntimeError):  # the user loop was stopped: nobody waits there any more
            self._user.call_soon_threadsafe(_set, answer, reply)


def _set(answer: asyncio.Future[RootReply], reply: RootReply) -> None:
    if not answer.done():
        answer.set_result(reply)
