"""The launcher of a session host: places delegates in child hosts and carries their messages."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable
from dataclasses import dataclass, field
from inspect import isawaitable
from typing import Protocol

from retinue.actors.background import Background
from retinue.actors.channel import Inbox, Outbox
from retinue.actors.hosts import HostReference
from retinue.actors.messages import Down, KeepAlive, LateReply, RunChild, StopChild, Up, UpAnswer
from retinue.actors.wire import encode
from retinue.client import HostGone
from retinue.protocol import ChildOrder, Finished, Rejected, RootReply
from retinue.tree import Tree

KEEP_ALIVE = 5.0
"""Seconds between signs of life to child hosts."""


class ChildHosts(Protocol):
    """How child hosts and their keeper are reached."""

    async def assign(self, count: int, nested: bool) -> list[tuple[HostReference, int]]:
        """Places for delegates."""
        ...

    def release(self, host_id: str, count: int) -> None:
        """Those delegates have ended; needs no answer."""
        ...

    async def deliver(self, host: HostReference, number: int, messages: list[Down]) -> None:
        """Carry a batch to a child host. Raises :class:`HostGone`."""
        ...

    async def watch(self, host: HostReference) -> None:
        """Return when the child host left; raise :class:`HostGone` when it died."""
        ...


@dataclass
class _Child:
    run_id: str
    tree: Tree


@dataclass
class _Link:
    host: HostReference
    outbox: Outbox[Down]
    inbox: Inbox = field(default_factory=Inbox)
    children: dict[str, _Child] = field(default_factory=dict)


@dataclass
class _Asking:
    answer: asyncio.Future[HostReference]


class PooledChildren:
    """Delegates of the runs of one session host. Belongs to its control loop."""

    def __init__(self, child_hosts: ChildHosts) -> None:
        self._child_hosts = child_hosts
        self._links: dict[str, _Link] = {}
        self._where: dict[str, _Link] = {}
        self._trees: dict[str, tuple[Tree, int]] = {}
        """Trees with live delegates, by the root's run id, and how many."""
        self._asking: dict[bool, deque[_Asking]] = {}
        """Delegates without a place yet, nested ones apart."""
        self._background = Background("delegates")

    # --- launching ----------------------------------------------------------------------------------------

    async def launch(self, order: ChildOrder, tree: Tree) -> None:
        host = await self._place(nested=order.parent_run_id != order.tree_id)
        link = self._link(host)
        if link.outbox.gone:
            self._child_hosts.release(host.host_id, 1)
            raise HostGone(f"child host {host.host_id} died before the delegate got there")
        link.children[order.run_id] = _Child(order.run_id, tree)
        self._where[order.run_id] = link
        known = self._trees.get(order.tree_id)
        self._trees[order.tree_id] = (tree, (known[1] if known else 0) + 1)
        tree.child_placed(order.run_id)
        link.outbox.post(RunChild(order=order))

    async def _place(self, *, nested: bool) -> HostReference:
        """A place for one delegate; those that ask at the same moment share one request."""
        asking = _Asking(asyncio.get_running_loop().create_future())
        queue = self._asking.get(nested)
        if queue is None:
            queue = self._asking[nested] = deque()
            self._background.run(self._ask_for_places(nested, queue))
        queue.append(asking)
        try:
            return await asking.answer
        except asyncio.CancelledError:
            if asking.answer.done() and not asking.answer.cancelled() and not asking.answer.exception():
                self._child_hosts.release(asking.answer.result().host_id, 1)
            raise

    async def _ask_for_places(self, nested: bool, queue: deque[_Asking]) -> None:
        await asyncio.sleep(0)  # let those of the same moment come in
        while queue:
            while queue and queue[0].answer.done():
                queue.popleft()
            if not queue:
                break
            try:
                places = await self._child_hosts.assign(len(queue), nested)
            except Exception as error:
                while queue:
                    answer = queue.popleft().answer
                    if not answer.done():
                        answer.set_exception(error)
                break
            for host, count in places:
                self._hand_out(host, count, queue)
        del self._asking[nested]

    def _hand_out(self, host: HostReference, count: int, queue: deque[_Asking]) -> None:
        while count and queue:
            answer = queue.popleft().answer
            if not answer.done():
                answer.set_result(host)
                count -= 1
        if count:
            self._child_hosts.release(host.host_id, count)

    def _link(self, host: HostReference) -> _Link:
        link = self._links.get(host.host_id)
        if link is None:
            outbox: Outbox[Down] = Outbox(
                lambda number, batch: self._child_hosts.deliver(host, number, batch),
                lambda why: self._host_gone(host.host_id, why),
            )
            link = self._links[host.host_id] = _Link(host, outbox)
            self._background.run(self._watch(link))
            self._background.run(self._keep_alive(link))
        return link

    # --- messages -----------------------------------------------------------------------------------------

    def receive(self, host_id: str, number: int, messages: list[Up]) -> bytes:
        """A batch from a child host; the answer has the replies that are there at once."""
        link = self._links.get(host_id)
        if link is None:
            return encode(UpAnswer(replies=[(up.ask_id, _unknown()) for up in messages], budgets={}))
        if (answer := link.inbox.repeated(number)) is not None:
            return answer
        replies: list[tuple[int, RootReply]] = []
        for up in messages:
            reply = self._handle(link, up)
            if isawaitable(reply):
                self._background.run(self._reply_later(link, up.ask_id, reply))
            elif up.ask_id:
                replies.append((up.ask_id, reply))
        trees = {up.tree_id: self._trees[up.tree_id][0] for up in messages if up.tree_id in self._trees}
        answer = encode(
            UpAnswer(replies=replies, budgets={tree_id: tree.budget for tree_id, tree in trees.items()})
        )
        link.inbox.answered(number, answer)
        return answer

    def _handle(self, link: _Link, up: Up) -> RootReply | Awaitable[RootReply]:
        known = self._trees.get(up.tree_id)
        if known is None or known[0].activation_id != up.activation_id:
            return _unknown()
        reply = known[0].handle(up.message)
        if isinstance(up.message, Finished):
            self._ended(link, up.message.participant)
        return reply

    async def _reply_later(self, link: _Link, ask_id: int, reply: Awaitable[RootReply]) -> None:
        answer = await reply
        if ask_id:
            link.outbox.post(LateReply(ask_id=ask_id, reply=answer))

    def _ended(self, link: _Link, run_id: str) -> None:
        child = link.children.pop(run_id, None)
        if child is None:
            return
        self._where.pop(run_id, None)
        self._child_hosts.release(link.host.host_id, 1)
        tree_id = child.tree.root.run_id
        tree, count = self._trees[tree_id]
        if count > 1:
            self._trees[tree_id] = (tree, count - 1)
        else:
            del self._trees[tree_id]

    def cancel(self, child_run_id: str, reason: str) -> None:
        link = self._where.get(child_run_id)
        if link is not None:
            link.outbox.post(StopChild(run_id=child_run_id, reason=reason))

    # --- life and death of child hosts --------------------------------------------------------------------

    async def _watch(self, link: _Link) -> None:
        try:
            await self._child_hosts.watch(link.host)
            why = "its process was ended"
        except HostGone as error:
            why = str(error).splitlines()[0] if str(error) else "its process died"
        link.outbox.close(why)

    def _host_gone(self, host_id: str, why: str) -> None:
        link = self._links.pop(host_id, None)
        if link is None:
            return
        for run_id, child in list(link.children.items()):
            self._ended(link, run_id)
            child.tree.child_lost(run_id, why)

    async def _keep_alive(self, link: _Link) -> None:
        while not link.outbox.gone:
            await asyncio.sleep(KEEP_ALIVE)
            if link.children:
                link.outbox.post(KeepAlive())

    @property
    def live(self) -> int:
        """Delegates that are placed and have not ended."""
        return len(self._where)

    def close(self) -> None:
        self._background.close()


def _unknown() -> Rejected:
    return Rejected(error={"code": "run_finished", "message": "the run has ended"}, cancelled=True)
