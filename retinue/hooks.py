"""Hooks of an application into the life of a session in a process."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, fields
from inspect import isawaitable
from typing import Any, Literal

import msgspec

from retinue.errors import ValidationFailed
from retinue.ids import Identity
from retinue.workers import Workers

logger = logging.getLogger(__name__)

HOOK_LIMIT = 5.0
"""Seconds that one call of a hook may take; then it is cancelled, and the session goes on."""

DeactivationReason = Literal[
    "idle",  # nobody used it for the idle timeout
    "memory_pressure",  # another session needs the room
    "migrating",  # a run of another app wants it
    "duplicate",  # another process has the session: what was here is only a copy
    "shutting_down",  # the process, the runtime or the cluster ends
    "application",  # it was deleted, or its store did not say whether a run was accepted
]
"""Why a session leaves a process."""


class SessionInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A session that is, or was, resident in this process."""

    identity: Identity
    session_id: str
    activation_id: str
    revision: int


@dataclass(frozen=True, kw_only=True)
class SessionHooks:
    """Coroutine functions that run on a user loop of the session's process.

    Each call has :data:`HOOK_LIMIT` seconds. What they raise is logged and changes nothing. Where the process
    dies, nothing is called.
    """

    activated: Callable[[SessionInfo], Awaitable[None]] | None = None
    """After the session came to life, beside its first run."""
    deactivating: Callable[[SessionInfo, DeactivationReason], Awaitable[None]] | None = None
    """Before the session leaves the process. Its runs have ended and its resources are gone by then; its
    lease is still held, unless the reason is ``duplicate`` or it was deleted."""

    def __post_init__(self) -> None:
        for field in fields(self):
            hook = getattr(self, field.name)
            if hook is not None and not callable(hook):
                path = f"config.hooks.{field.name}"
                raise ValidationFailed(f"{path} is {hook!r:.80}, not a coroutine function", path=path)


class HookCalls:
    """Calls the hooks of the sessions of one process. Belongs to its control loop."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self._hooks: dict[str, SessionHooks] = {}
        """Of each resident activation that has any."""
        self._activated: dict[str, asyncio.Task[None]] = {}
        """Calls under way."""

    def activated(self, hooks: SessionHooks, info: SessionInfo) -> None:
        """A session came to life; nobody waits for its hook, only :meth:`deactivating` does."""
        if hooks == SessionHooks():
            return
        self._hooks[info.activation_id] = hooks
        if hooks.activated is not None:
            calling = asyncio.ensure_future(self._call("activated", hooks.activated, info))
            self._activated[info.activation_id] = calling
            calling.add_done_callback(lambda _: self._activated.pop(info.activation_id, None))

    async def deactivating(self, info: SessionInfo, reason: DeactivationReason) -> None:
        """A session is about to leave: returns when its hook has returned, or was given up."""
        hooks = self._hooks.pop(info.activation_id, None)
        if hooks is None:
            return
        if (before := self._activated.get(info.activation_id)) is not None:
            await asyncio.wait([before])
        if hooks.deactivating is not None:
            await self._call("deactivating", hooks.deactivating, info, reason)

    async def _call(self, name: str, hook: Callable[..., Awaitable[None]], *arguments: Any) -> None:
        try:
            async with asyncio.timeout(HOOK_LIMIT):
                await asyncio.wrap_future(self._workers.submit(_on_user_loop(hook, arguments)))
        except TimeoutError:
            logger.error("the hook %s of %s took longer than %.0f s", name, arguments[0], HOOK_LIMIT)
        except Exception:
            logger.exception("the hook %s of %s raised", name, arguments[0])


async def _on_user_loop(hook: Callable[..., Awaitable[None]], arguments: tuple[Any, ...]) -> None:
    try:
        answer: object = hook(*arguments)
        if isawaitable(answer):
            await answer
    except (asyncio.CancelledError, SystemExit, KeyboardInterrupt) as error:
        task = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
            raise  # from outside: it took too long
        # These would end the loop that waits for the hook.
        raise RuntimeError(f"it raised {type(error).__name__}") from error
