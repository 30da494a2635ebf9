"""A session host as a client reaches it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from retinue.actors.wire import call, encode, read_reply
from retinue.budgets import UsageReport
from retinue.feeds import FeedBatch, FeedChanges
from retinue.messages import Message
from retinue.protocol import (
    DecideRequest,
    EventPageReply,
    Fork,
    Forked,
    Receipt,
    ReplyInput,
    RunStatus,
    SendInput,
    Settled,
    StartRun,
    VouchFor,
)
from retinue.store import StoredApproval, StoredSession


class RemoteHost:
    """A session host over an actor handle: :class:`retinue.client.HostPort` and
    :class:`retinue.following.FeedPort`."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    async def start(self, activation_id: str, start: StartRun) -> RunStatus:
        return read_reply(await call(self._handle.start, encode((activation_id, start))), RunStatus)

    async def send(self, activation_id: str, sent: SendInput) -> Receipt:
        return read_reply(await call(self._handle.send, encode((activation_id, sent))), Receipt)

    async def reply(self, activation_id: str, reply: ReplyInput) -> Receipt:
        return read_reply(await call(self._handle.reply, encode((activation_id, reply))), Receipt)

    async def decide(self, activation_id: str, decision: DecideRequest) -> StoredApproval:
        data = await call(self._handle.decide, encode((activation_id, decision)))
        return read_reply(data, StoredApproval)

    async def cancel(self, activation_id: str, run_id: str, reason: str) -> Receipt | None:
        data = await call(self._handle.cancel, activation_id, run_id, reason)
        return read_reply(data, Receipt | None)

    async def result(self, activation_id: str, run_id: str) -> Settled:
        return read_reply(await call(self._handle.result, activation_id, run_id), Settled)

    async def events(self, activation_id: str, run_id: str, after: int, limit: int) -> EventPageReply:
        data = await call(self._handle.events, activation_id, run_id, after, limit)
        return read_reply(data, EventPageReply)

    async def status(self, activation_id: str, run_id: str) -> RunStatus:
        return read_reply(await call(self._handle.status, activation_id, run_id), RunStatus)

    async def next_batch(self, subscriber: str, number: int, changes: FeedChanges | None) -> FeedBatch:
        data = await call(self._handle.next_batch, encode((subscriber, number, changes)))
        return read_reply(data, FeedBatch)

    async def update_feed(self, subscriber: str, changes: FeedChanges) -> None:
        read_reply(await call(self._handle.update_feed, encode((subscriber, changes))), None)

    async def usage_report(self, activation_id: str, run_id: str) -> UsageReport:
        return read_reply(await call(self._handle.usage_report, activation_id, run_id), UsageReport)

    async def read(self, activation_id: str) -> StoredSession:
        return read_reply(await call(self._handle.read, activation_id), StoredSession)

    async def import_legacy(self, activation_id: str, messages: Sequence[Message]) -> None:
        data = await call(self._handle.import_legacy, encode((activation_id, list(messages))))
        read_reply(data, None)

    async def close_resources(self, activation_id: str) -> list[str]:
        return read_reply(await call(self._handle.close_resources, activation_id), list[str])

    async def fork(self, activation_id: str, fork: Fork) -> Forked:
        return read_reply(await call(self._handle.fork, encode((activation_id, fork))), Forked)

    async def mark_replayable(self, activation_id: str, vouched: VouchFor) -> int:
        return read_reply(await call(self._handle.mark_replayable, encode((activation_id, vouched))), int)

    async def delete(self, activation_id: str) -> None:
        read_reply(await call(self._handle.delete, activation_id), None)
