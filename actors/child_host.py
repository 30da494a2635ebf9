"""A process that delegates run in: many children of many trees, each with its own conversation."""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from dataclasses import dataclass, field
from typing import Any

import msgspec

from retinue.actors.background import Background
from retinue.actors.channel import Inbox, Outbox
from retinue.actors.messages import Down, KeepAlive, LateReply, RunChild, StopChild, Up, UpAnswer
from retinue.actors.metrics import Reporter, child_host_samples
from retinue.actors.reports import own_report
from retinue.actors.tool_tasks import RayTasks
from retinue.actors.wire import NOTHING, call, decode, encode
from retinue.apps import AppSpec, load_app
from retinue.budgets import BudgetSnapshot
from retinue.children import ChildExecution
from retinue.client import HostGone
from retinue.config import RuntimeConfig
from retinue.ended_runs import empty_budget
from retinue.logs import LogOptions, configure_process
from retinue.protocol import ChildOrder, Finished, ParticipantMessage, Rejected, RootReply, SettleModel
from retinue.results import error_payload
from retinue.workers import Workers

SILENCE = 20.0
"""Seconds without a word from a session host after which its children are cancelled."""


class ChildHostStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """What a child host holds and did."""

    host_id: str
    pid: int
    app_digest: str
    children: int
    finished: int
    roots: int


@dataclass
class _Root:
    """A session host whose delegates are here."""

    host_id: str
    handle: Any
    outbox: Outbox[Up]
    inbox: Inbox = field(default_factory=Inbox)
    starting: set[str] = field(default_factory=set)
    """Children that came and were not stopped."""
    children: dict[str, ChildExecution] = field(default_factory=dict)
    asked: dict[int, ChildPort] = field(default_factory=dict)
    heard: float = field(default_factory=time.monotonic)
    watching: asyncio.Task[None] | None = None


class ChildPort:
    """The way from one delegate, on the user loop, to the root of its tree in another process."""

    def __init__(self, core: ChildHostCore, root: _Root, order: ChildOrder) -> None:
        self._core = core
        self._root = root
        self.tree_id = order.tree_id
        self._activation_id = order.activation_id
        self._answers: dict[int, asyncio.Future[RootReply]] = {}
        self.budget: BudgetSnapshot = empty_budget()
        self.hops = 0

    steer_waits = False
    """Live input is the root's."""

    async def ask(self, message: ParticipantMessage) -> RootReply:
        ask_id = next(self._core.ask_ids)
        answer: asyncio.Future[RootReply] = asyncio.get_running_loop().create_future()
        self._answers[ask_id] = answer
        self.hops += 1
        up = self.up(message, ask_id)
        self._core.loop.call_soon_threadsafe(self._core.post, self._root, up, self)
        try:
            return await answer
        finally:
            self._answers.pop(ask_id, None)

    def tell(self, message: ParticipantMessage) -> None:
        up = self.up(message)
        self._core.loop.call_soon_threadsafe(self._core.post, self._root, up, None)

    async def settle(self, message: SettleModel) -> None:
        self.tell(message)  # the budget is heard with the next answer: no remote call for it alone

    def up(self, message: ParticipantMessage, ask_id: int = 0) -> Up:
        """A message of the delegate, addressed to the root of its tree."""
        return Up(activation_id=self._activation_id, tree_id=self.tree_id, ask_id=ask_id, message=message)

    def answer(self, ask_id: int, reply: RootReply) -> None:
        """A reply has come; from the control loop."""
        self._core.workers.loop.call_soon_threadsafe(self._set, ask_id, reply)

    def _set(self, ask_id: int, reply: RootReply) -> None:
        answer = self._answers.get(ask_id)
        if answer is not None and not answer.done():
            answer.set_result(reply)


class ChildHostCore:
    """The logic of a child host. Belongs to its control loop; knows session hosts only as handles."""

    def __init__(self, host_id: str, app: AppSpec) -> None:
        self.host_id = host_id
        self.loop = asyncio.get_running_loop()
        self.workers = Workers("retinue-child", tasks=RayTasks())
        self.ask_ids = itertools.count(1)
        self._app = app
        self._config: RuntimeConfig | None = None
        self._loading = asyncio.Lock()
        self._roots: dict[str, _Root] = {}
        self._finished_children = 0
        self._background = Background("child host")
        self._background.run(self._watch_silence())

    async def deliver(self, root_id: str, handle: Any, number: int, messages: list[Down]) -> bool:
        """A batch from a session host; false when its children were given up here, and it must know."""
        root = self._roots.get(root_id)
        if root is None:
            if number > 1:  # it goes on with a conversation that ended here: see _watch_silence
                return False
            root = self._add_root(root_id, handle)
        root.heard = time.monotonic()
        if root.inbox.repeated(number) is not None:
            return True
        root.inbox.answered(number, b"")
        for message in messages:
            match message:
                case RunChild():
                    # Known from this moment on: a stop may come in the same batch.
                    root.starting.add(message.order.run_id)
                    self._background.run(self._run_child(root, message))
                case StopChild():
                    self._stop_child(root, message.run_id)
                case LateReply():
                    port = root.asked.pop(message.ask_id, None)
                    if port is not None:
                        port.answer(message.ask_id, message.reply)
                case KeepAlive():
                    pass
        return True

    def _add_root(self, root_id: str, handle: Any) -> _Root:
        async def send(number: int, batch: list[Up]) -> None:
            data = await call(handle.child_messages, encode((self.host_id, number, batch)))
            self._take_answer(root, decode(data, UpAnswer))

        root = _Root(root_id, handle, Outbox(send, lambda why: self._root_gone(root_id, why)))
        self._roots[root_id] = root
        self._background.run(self._watch_root(root))
        return root

    # --- children -----------------------------------------------------------------------------------------

    async def _run_child(self, root: _Root, message: RunChild) -> None:
        order = message.order
        port = ChildPort(self, root, order)
        try:
            finished = await self._finished(root, message, port)
        except Exception as error:
            finished = Finished(participant=order.run_id, error=error_payload(error))
        root.starting.discard(order.run_id)
        root.children.pop(order.run_id, None)
        self._finished_children += 1
        finished = msgspec.structs.replace(finished, hops=port.hops + 2)
        self.post(root, port.up(finished), None)

    async def _finished(self, root: _Root, message: RunChild, port: ChildPort) -> Finished:
        order = message.order
        config = await self.load()
        if order.run_id not in root.starting:  # stopped before it began
            return Finished(participant=order.run_id, cancelled=True)
        child = ChildExecution(order, config, port, self.workers)
        root.children[order.run_id] = child
        return await asyncio.wrap_future(self.workers.submit(child.run()))

    async def load(self) -> RuntimeConfig:
        """The app, made once in this process, on the user loop."""
        async with self._loading:
            if self._config is None:
                self._config = await asyncio.wrap_future(self.workers.submit(_load(self._app)))
        return self._config

    def _stop_child(self, root: _Root, run_id: str) -> None:
        root.starting.discard(run_id)
        child = root.children.get(run_id)
        if child is not None:
            self.workers.loop.call_soon_threadsafe(child.cancel)

    # --- messages up --------------------------------------------------------------------------------------

    def post(self, root: _Root, up: Up, port: ChildPort | None) -> None:
        """Send a delegate's message to its root; ``port`` gets the reply."""
        if port is not None:
            if root.outbox.gone:
                port.answer(up.ask_id, _root_is_gone())
                return
            root.asked[up.ask_id] = port
        root.outbox.post(up)

    def _take_answer(self, root: _Root, answer: UpAnswer) -> None:
        root.heard = time.monotonic()
        for ask_id, reply in answer.replies:
            port = root.asked.pop(ask_id, None)
            if port is not None:
                budget = answer.budgets.get(port.tree_id)
                if budget is not None:
                    port.budget = budget
                port.answer(ask_id, reply)

    # --- roots that die -----------------------------------------------------------------------------------

    async def _watch_root(self, root: _Root) -> None:
        try:
            await call(root.handle.watch)
            why = "the session host has left"
        except HostGone as error:
            why = str(error)
        root.outbox.close(why)

    async def _watch_silence(self) -> None:
        while True:
            await asyncio.sleep(SILENCE / 4)
            for root in list(self._roots.values()):
                if root.children and time.monotonic() - root.heard > SILENCE:
                    self.give_up(root.host_id, "nothing was heard of the session host")

    def give_up(self, root_id: str, why: str) -> None:
        """Stop the children of a session host that cannot be reached."""
        root = self._roots.get(root_id)
        if root is not None:
            root.outbox.close(why)

    def _root_gone(self, root_id: str, why: str) -> None:
        """Cancel the children of a session host that is gone, and whoever waits for its answer."""
        root = self._roots.pop(root_id, None)
        if root is None:
            return
        root.starting.clear()
        for child in root.children.values():
            self.workers.loop.call_soon_threadsafe(child.cancel)
        for ask_id, port in list(root.asked.items()):
            port.answer(ask_id, _root_is_gone())
        root.asked.clear()

    def close(self) -> None:
        """End what runs here, for tests: a process that ends needs no such thing."""
        self._background.close()
        self.workers.stop()

    def statistics(self) -> ChildHostStatistics:
        return ChildHostStatistics(
            host_id=self.host_id,
            pid=os.getpid(),
            app_digest=self._app.digest,
            children=sum(len(root.children) for root in self._roots.values()),
            finished=self._finished_children,
            roots=len(self._roots),
        )


class ChildHostActor:
    """The shell around a child host."""

    def __init__(self, host_id: str, app: bytes) -> None:
        self._host_id = host_id
        self._app = decode(app, AppSpec)
        self._core: ChildHostCore | None = None
        self._background = Background("child host")

    async def ready(self, log_options: bytes = NOTHING) -> None:
        """Come to life on the control loop, and load the app ahead of the first child."""
        if self._core is None:
            configure_process(decode(log_options, LogOptions | None))
            core = self._core = ChildHostCore(self._host_id, self._app)
            await core.load()
            self._background.run(Reporter(lambda: child_host_samples(core.statistics())).run())

    async def deliver(self, root_id: str, root: Any, data: bytes) -> bool:
        assert self._core is not None
        number, messages = decode(data, tuple[int, list[Down]])
        return await self._core.deliver(root_id, root, number, messages)

    async def statistics(self) -> bytes:
        """What is here; ``null`` before the host is ready."""
        return encode(self._core.statistics() if self._core is not None else None)

    async def report(self, name: str) -> bytes:
        """What this actor is, for listings."""
        if self._core is None:
            return own_report("child host", state="starting", apps=[self._app.name])
        return own_report("child host", apps=[self._app.name], delegates=self._core.statistics().children)

    async def watch(self) -> None:
        """Never returns while the process lives."""
        await asyncio.Event().wait()


async def _load(app: AppSpec) -> RuntimeConfig:
    return load_app(app)


def _root_is_gone() -> Rejected:
    error = {"code": "interrupted", "message": "the session host of this run has died"}
    return Rejected(error=error, cancelled=True)
