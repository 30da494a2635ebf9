"""How actors talk: one argument of bytes in, bytes out, msgpack of typed structs inside.

Bytes are what Ray carries cheapest (no pickling), and a reply that is an error keeps its code and data. A
call to an actor that died raises :class:`retinue.client.HostGone`; one that is unreachable for a moment is
repeated, which is harmless because every message carries an id.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar, overload

import msgspec
import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayTaskError

from retinue.client import HostGone
from retinue.errors import ClusterUnreachable, RetinueError, error_from_payload

T = TypeVar("T")

_OK, _ERROR = b"\x00", b"\x01"
UNAVAILABLE_PAUSES = (0.05, 0.2, 0.5, 1.0, 2.0)
"""Seconds between repeats of a call to an actor that does not answer."""

encode = msgspec.msgpack.Encoder().encode
NOTHING = encode(None)
"""An argument that is left out."""


@overload
def decode(data: bytes, kind: type[T]) -> T: ...
@overload
def decode(data: bytes, kind: object) -> Any: ...
def decode(data: bytes, kind: object) -> Any:
    """A value from msgpack; ``kind`` is a class, or any type that msgspec knows."""
    return msgspec.msgpack.decode(data, type=kind)


async def answered(work: Awaitable[Any]) -> bytes:
    """The result of ``work`` as reply bytes; an error of ours becomes an error reply."""
    try:
        return accepted(await work)
    except RetinueError as error:
        return refused(error)


def accepted(value: object) -> bytes:
    """Reply bytes that carry a value."""
    return _OK + encode(value)


def refused(error: RetinueError) -> bytes:
    """Reply bytes that carry an error."""
    return _ERROR + encode(error.to_payload())


@overload
def read_reply(data: bytes, kind: type[T]) -> T: ...
@overload
def read_reply(data: bytes, kind: object) -> Any: ...
def read_reply(data: bytes, kind: object) -> Any:
    """The value of reply bytes, or the error that they carry, raised."""
    if data[:1] == _ERROR:
        raise error_from_payload(msgspec.msgpack.decode(data[1:]))
    return decode(data[1:], kind)


async def call(method: Callable[..., Any], *arguments: Any) -> Any:
    """Await one remote call, repeated while its actor is only unavailable.

    Raises:
        HostGone: the actor died, or stayed unavailable; whether it acted is unknown.
        ClusterUnreachable: this process is not connected any more.
    """
    for pause in (*UNAVAILABLE_PAUSES, None):
        if not ray.is_initialized():  # Ray would start another cluster for this call
            raise ClusterUnreachable("this process is no longer connected to the cluster")
        try:
            return await method.remote(*arguments)  # type: ignore[attr-defined]
        except ActorUnavailableError as error:
            if pause is None:
                raise HostGone(str(error)) from None
            await asyncio.sleep(pause)
        except RayActorError as error:
            raise HostGone(str(error)) from None
        except RayTaskError as error:
            if isinstance(error.cause, RetinueError):
                raise error.cause from None
            raise RetinueError(f"a process of the runtime failed: {error.cause!r}") from None
    raise AssertionError("unreachable")


async def on_loop(loop: asyncio.AbstractEventLoop, work: Any) -> Any:
    """Await a coroutine on another loop of this process; cancelling the waiting cancels it there."""
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, loop))
