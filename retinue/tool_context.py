"""What a tool is told about its call: who asks, and whether somebody still wants the result."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from retinue.current_work import current_trace
from retinue.delegates import Delegate
from retinue.drivers import ExecutionDriver
from retinue.ids import Identity
from retinue.messages import Content

if TYPE_CHECKING:
    from retinue.agents import Agent
    from retinue.services import ExecutionServices

_LOOK = 0.05
"""Seconds between two looks of a waiting thread at what it is not woken up for."""


class CancelToken:
    """Tells one call, in whatever thread, that nobody wants its result any more.

    Args:
        also: looked at beside the token itself; true when everything around the call is being cancelled.
    """

    def __init__(self, also: Callable[[], bool] = lambda: False) -> None:
        self._also = also
        self._why: str | None = None

    def set(self, why: str) -> None:
        """From now on the call is cancelled. May be called in a signal handler: no lock is taken."""
        self._why = self._why or why

    @property
    def is_set(self) -> bool:
        return self._why is not None or self._also()

    @property
    def why(self) -> str:
        return self._why or "the run is being cancelled"

    def wait(self, seconds: float) -> bool:
        """Sleep up to ``seconds``, or until it is set; whether it is."""
        until = time.monotonic() + seconds
        while not self.is_set and (left := until - time.monotonic()) > 0:
            time.sleep(min(left, _LOOK))
        return self.is_set


class TaskContext:
    """What a tool's ``ctx`` parameter receives in a task: a process with nothing of the run but this."""

    def __init__(self, identity: Identity, call_id: str, token: CancelToken) -> None:
        self._identity = identity
        self._token = token
        self.call_id = call_id
        """The id that the model gave to the call."""
        self.trace: dict[str, str] = current_trace()
        """W3C trace context of the call, for what it asks of other systems; empty where there is no trace.
        OpenTelemetry's current span is the call's without it."""

    @property
    def identity(self) -> Identity:
        """Who the run works for."""
        return self._identity

    @property
    def cancelled(self) -> bool:
        """True once nobody wants the result of this call: the run is being cancelled, or the call timed out.

        A tool in a thread, which nobody can stop from outside, should return soon.
        """
        return self._token.is_set

    def raise_if_cancelled(self) -> None:
        """Raise :class:`asyncio.CancelledError` if :attr:`cancelled`, in sync tools too.

        It is what interrupts an async tool, and no ``Exception``: ``except Exception`` lets it through.
        """
        if self._token.is_set:
            raise asyncio.CancelledError(self._token.why)

    def wait(self, seconds: float) -> bool:
        """Sleep up to ``seconds``, for sync tools; returns true as soon as the call is cancelled.

        Raises:
            RuntimeError: called on an event loop, which it would block; use ``await asyncio.sleep()`` there.
        """
        if _on_a_loop():
            raise RuntimeError("ctx.wait() would block the event loop; use await asyncio.sleep() here")
        return self._token.wait(seconds)


class ToolContext(TaskContext):
    """What a tool's ``ctx`` parameter receives on the loop and in a thread."""

    def __init__(self, services: ExecutionServices, call_id: str, token: CancelToken) -> None:
        super().__init__(services.request.identity, call_id, token)
        self.services = services
        """The services of the execution that made the call; their coroutines belong to its loop."""

    async def delegate(self, work: Agent | ExecutionDriver, input: Content, **options: Any) -> Delegate:
        """See :meth:`retinue.ExecutionServices.delegate`."""
        return await self.services.delegate(work, input, **options)


def _on_a_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
