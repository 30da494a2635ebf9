"""The store actor: the only process on a cluster that opens a database, and the engine that talks to it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec
import ray

from retinue.actors.background import Background
from retinue.actors.metrics import Reporter, store_samples
from retinue.actors.reports import own_report
from retinue.actors.wire import NOTHING, answered, call, decode, encode, read_reply
from retinue.client import HostGone
from retinue.errors import InputError, StoreUnavailable
from retinue.logs import LogOptions, configure_process
from retinue.store import (
    Guarantees,
    Refused,
    StoreEngine,
    StoreOperation,
    StoreReply,
    StoreStatistics,
)

_IN_FLIGHT = 2
"""Calls on the wire at once: one being committed, one gathering behind it."""


class StoreDescription(msgspec.Struct, frozen=True, kw_only=True):
    """An open store, for those who are to use it."""

    url: str
    store_id: str
    guarantees: Guarantees


class StoreActor:
    """A shell around a store engine: bytes in, bytes out."""

    def __init__(self, url: str, log_options: bytes = NOTHING) -> None:
        configure_process(decode(log_options, LogOptions | None))
        self._url = url
        self._background = Background("store actor")
        self._engine: StoreEngine | None = None
        self._opening = asyncio.Lock()

    async def ping(self) -> None:
        """Answer."""

    async def describe(self) -> bytes:
        """Open the store, if need be, and say what it is."""
        return await answered(self._describe())

    async def _describe(self) -> StoreDescription:
        engine = await self._opened()
        return StoreDescription(url=self._url, store_id=engine.store_id, guarantees=engine.guarantees)

    async def _opened(self) -> StoreEngine:
        async with self._opening:
            if self._engine is None:
                from retinue.storage import open_store

                engine = self._engine = await asyncio.to_thread(open_store, self._url, shared=True)
                self._background.run(Reporter(lambda: store_samples(engine.statistics())).run())
        return self._engine

    async def execute(self, data: bytes) -> bytes:
        return await answered(self._execute(data))

    async def _execute(self, data: bytes) -> Sequence[StoreReply]:
        engine = self._engine or await self._opened()
        try:
            operations = decode(data, list[StoreOperation])
        except msgspec.ValidationError:
            return await self._execute_readable(engine, decode(data, list[msgspec.Raw]))
        return await engine.execute(operations)

    async def _execute_readable(
        self, engine: StoreEngine, bodies: Sequence[msgspec.Raw]
    ) -> Sequence[StoreReply]:
        """Refuse those that cannot be read, alone: calls of several sessions share one list."""
        read = [_operation_or_refusal(body) for body in bodies]
        operations = [entry for entry in read if not isinstance(entry, Refused)]
        replies = iter(await engine.execute(operations))
        return [entry if isinstance(entry, Refused) else next(replies) for entry in read]

    async def statistics(self) -> bytes:
        return encode((await self._opened()).statistics())

    async def report(self, name: str) -> bytes:
        """What this actor is, for listings."""
        return own_report("store", store=self._url)

    async def close(self) -> None:
        self._background.close()
        if self._engine is not None:
            await self._engine.close()


def _operation_or_refusal(body: msgspec.Raw) -> StoreOperation | Refused:
    try:
        operation: StoreOperation = decode(bytes(body), StoreOperation)
    except msgspec.ValidationError as error:
        refusal = InputError(f"a store operation holds a value that it cannot have: {error}")
        return Refused(error=refusal.to_payload())
    return operation


def start_store_actor(name: str, namespace: str, url: str, node_id: str, log_options: bytes = NOTHING) -> Any:
    """Start a store actor, pinned to the node that has the file."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return (
        ray.remote(StoreActor)
        .options(
            name=name,
            namespace=namespace,
            lifetime="detached",
            get_if_exists=True,
            num_cpus=0,
            max_restarts=-1,
            max_concurrency=10_000,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
        )
        .remote(url, log_options)
    )


class RemoteEngine:
    """A store engine over a store actor: operations of one moment share a call."""

    def __init__(self, handle: Any, description: StoreDescription) -> None:
        self.handle = handle
        self.description = description
        self._waiting: list[tuple[msgspec.Raw, asyncio.Future[StoreReply]]] = []
        self._in_flight = 0
        self._background = Background("store client")

    @property
    def store_id(self) -> str:
        return self.description.store_id

    @property
    def guarantees(self) -> Guarantees:
        return self.description.guarantees

    async def execute(self, operations: Sequence[StoreOperation]) -> Sequence[StoreReply]:
        futures = [self._post(operation) for operation in operations]
        return await asyncio.gather(*futures)

    def _post(self, operation: StoreOperation) -> asyncio.Future[StoreReply]:
        """Put an operation on the next call, as bytes from this moment on."""
        future: asyncio.Future[StoreReply] = asyncio.get_running_loop().create_future()
        try:
            body = msgspec.Raw(encode(operation))
        except UnicodeEncodeError:
            refusal = InputError("the operation holds a lone surrogate, which no store can carry")
            future.set_result(Refused(error=refusal.to_payload()))
            return future
        self._waiting.append((body, future))
        if self._in_flight < _IN_FLIGHT:
            self._in_flight += 1
            self._background.run(self._send())
        return future

    async def _send(self) -> None:
        try:
            while self._waiting:
                batch, self._waiting = self._waiting, []
                await self._send_batch(batch)
        finally:
            self._in_flight -= 1

    async def _send_batch(self, batch: list[tuple[msgspec.Raw, asyncio.Future[StoreReply]]]) -> None:
        try:
            data = await call(self.handle.execute, encode([body for body, _ in batch]))
            replies: list[StoreReply] = read_reply(data, list[StoreReply])
        except HostGone as error:
            self._fail(batch, StoreUnavailable(f"the store actor does not answer: {error}"))
        except Exception as error:
            self._fail(batch, error)
        else:
            for (_, future), reply in zip(batch, replies, strict=True):
                if not future.done():
                    future.set_result(reply)

    def _fail(self, batch: list[tuple[msgspec.Raw, asyncio.Future[StoreReply]]], error: Exception) -> None:
        if isinstance(error, StoreUnavailable):
            url = self.description.url
            error = StoreUnavailable(f"the store {url} does not answer: {error.message}", url=url)
        for _, future in batch:
            if not future.done():
                future.set_exception(error)

    def statistics(self) -> StoreStatistics:
        """Of this client only: the calls it made."""
        return StoreStatistics(
            url=self.description.url, writes=0, transactions=0, reads=0, commits=0, queued=len(self._waiting)
        )

    async def close(self) -> None:
        """Nothing: the store actor serves others too."""
