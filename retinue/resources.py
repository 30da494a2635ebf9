"""Resources: what a run, or all runs of a session in a process, use and close again (contract section 2).

    scope    made                                  disposed, when ownership is "runtime"
    run      on every acquisition                  after the run, in reverse order of acquisition
    session  once for each id, by whoever is first when the session's resources are closed, in reverse order
    host     on every acquisition                  never; its ownership must be "host"

Both pools live on the user loop, where initialisers and disposers run. Other threads may read the figures of
:class:`SessionResources`.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

from retinue.errors import InputError, RetinueError, SessionConflict, Unsupported, ValidationFailed
from retinue.ids import check_id

T = TypeVar("T")

logger = logging.getLogger(__name__)

ResourceScope = Literal["run", "session", "host"]
RELEASE_FAILED = "resource_release_failed"
"""Diagnostic of a run whose resource could not be disposed of."""


@dataclass(frozen=True, kw_only=True)
class Resource(Generic[T]):
    """What an initialiser gives: a value, and how it ends.

    Raises:
        ValidationFailed: ``ownership`` is something else, or ``dispose`` cannot be called.
    """

    value: T
    ownership: Literal["runtime", "host"] = "runtime"
    """``runtime``: Retinue disposes of it. ``host``: the application does; ``dispose`` is never called."""
    dispose: Callable[[], Awaitable[None] | None] | None = None
    """Closes the value. It runs on the user loop: what takes long there is a coroutine function."""

    def __post_init__(self) -> None:
        if self.ownership not in ("runtime", "host"):
            raise ValidationFailed(
                f"ownership is 'runtime' or 'host', not {self.ownership!r:.80}", path="resource.ownership"
            )
        if self.dispose is not None and not callable(self.dispose):
            raise ValidationFailed(
                f"dispose must be a function, not {self.dispose!r:.80}", path="resource.dispose"
            )

    async def close(self) -> None:
        """Dispose of it, if that is Retinue's to do. Raises what ``dispose`` raised."""
        if self.ownership == "runtime" and self.dispose is not None:
            await _called(self.dispose)


Initialize = Callable[[], Awaitable[Resource[T]] | Resource[T]]


async def _called(function: Callable[[], Any]) -> Any:
    """The result of a function of the application, awaited where it is awaitable."""
    try:
        result = function()
        return await result if inspect.isawaitable(result) else result
    except (SystemExit, KeyboardInterrupt) as error:
        # asyncio would let these out of the loop that all drivers share.
        raise RetinueError(f"{type(error).__name__} was raised: {error}", code="execution_failed") from None


async def _initialized(id: str, initialize: Initialize[Any]) -> Resource[Any]:
    made: object = await _called(initialize)
    if not isinstance(made, Resource):
        raise InputError(
            f"the initialiser of resource {id!r} must give a retinue.Resource, not {type(made).__name__}"
        )
    return made


async def _closed(id: str, resource: Resource[Any]) -> bool:
    """Dispose of it; false, and a line in the log, when that failed."""
    try:
        await resource.close()
    except asyncio.CancelledError:
        if _being_cancelled():
            raise
        logger.warning("disposing of resource %r was cancelled from inside", id)
        return False
    except Exception:
        logger.warning("resource %r could not be disposed of", id, exc_info=True)
        return False
    return True


def _being_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


# --- of a session -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ResourceUse:
    """What a session's pool holds, for other threads."""

    held: int = 0
    """Resources in the pool."""
    in_use: bool = False
    """A run uses one, or one is being made."""
    idle_since: float | None = None
    """``time.monotonic()`` of the end of the last use; ``None`` when in use, and when nothing is held."""


class _Entry:
    """A resource of a session's pool, from the start of its initialiser."""

    def __init__(self, making: asyncio.Task[Resource[Any]]) -> None:
        self.making = making
        self.users = 0
        """Runs that hold a lease, and acquisitions that wait."""
        self.abandoned = False
        """Everybody who waited was cancelled, and then the initialiser."""


class SessionResources:
    """The resources of one activation of a session, shared by id. Belongs to the user loop.

    Args:
        clock: seconds, as ``time.monotonic``.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._making: dict[str, _Entry] = {}
        self._made: dict[str, _Entry] = {}
        """In order of creation. An initialiser that acquires another one ends after it, so that the other
        one is disposed of later."""
        self.use = ResourceUse()
        """Replaced as a whole at every change; may be read from any thread."""

    @property
    def held(self) -> int:
        return self.use.held

    @property
    def in_use(self) -> bool:
        return self.use.in_use

    @property
    def idle_since(self) -> float | None:
        return self.use.idle_since

    async def acquire(self, id: str, initialize: Initialize[Any]) -> Any:
        """The value of this id, made by the first who asks; everybody who comes meanwhile waits for it.

        The caller has a lease then, and gives it back with :meth:`release`. Who is cancelled while the
        initialiser runs leaves it to the others; with the last one it is cancelled, and waited for.

        Raises:
            Exception: what the initialiser raised, for all who waited. Nothing is kept then.
        """
        while True:
            entry = self._made.get(id) or self._making.get(id) or self._begin(id, initialize)
            entry.users += 1
            self._publish()
            try:
                await self._wait(entry)
                if not entry.making.cancelled():
                    return entry.making.result().value
            except BaseException:
                self._leave(entry)
                raise
            self._leave(entry)
            if not entry.abandoned:
                raise RetinueError(
                    f"the initialiser of resource {id!r} was cancelled from inside", code="execution_failed"
                )

    def release(self, id: str) -> None:
        """Give one lease back. The resource stays for the next run."""
        self._leave(self._made[id])

    async def close(self) -> list[str]:
        """Dispose of everything that is Retinue's to dispose of, the latest first; ids of what failed.

        Raises:
            SessionConflict: a run has a lease, or a resource is being made; nothing was disposed of then.
        """
        if (busy := self._busy) is not None:
            raise SessionConflict(
                f"resource {busy!r} of this session is in use; wait for its run, or cancel it"
            )
        closing, self._made = self._made, {}
        self._publish()
        failed = []
        for name, entry in reversed(closing.items()):
            if not await _closed(name, entry.making.result()):
                failed.append(name)
        return failed

    def _begin(self, id: str, initialize: Initialize[Any]) -> _Entry:
        entry = self._making[id] = _Entry(asyncio.ensure_future(_initialized(id, initialize)))
        entry.making.add_done_callback(lambda making: self._end_making(id, entry))
        return entry

    def _end_making(self, id: str, entry: _Entry) -> None:
        del self._making[id]
        if not entry.making.cancelled() and entry.making.exception() is None:
            self._made[id] = entry
        self._publish()

    async def _wait(self, entry: _Entry) -> None:
        """Wait until it is made, and until that is noted here."""
        try:
            await asyncio.wait([entry.making])
        except asyncio.CancelledError:
            if entry.users == 1 and not entry.making.done():
                entry.abandoned = True
                entry.making.cancel()
                while not entry.making.done():
                    with contextlib.suppress(asyncio.CancelledError):
                        await asyncio.wait([entry.making])
            raise

    @property
    def _busy(self) -> str | None:
        """A resource that is being made, or that somebody uses."""
        used = (name for name, entry in self._made.items() if entry.users)
        return next(iter(self._making), None) or next(used, None)

    def _leave(self, entry: _Entry) -> None:
        entry.users -= 1
        self._publish()

    def _publish(self) -> None:
        in_use = self._busy is not None
        idle_since = self._clock() if self._made and not in_use else None
        self.use = ResourceUse(held=len(self._made), in_use=in_use, idle_since=idle_since)


# --- of one execution -------------------------------------------------------------------------------------


class RunResources:
    """The leases of one execution: the root of a run, or a delegate. Belongs to the user loop.

    Args:
        session: the session's pool; a delegate has none.
    """

    def __init__(self, session: SessionResources | None = None) -> None:
        self._session = session
        self._leases: list[tuple[str, Resource[Any] | None]] = []
        """In order of acquisition; ``None`` for one of the session's."""
        self._shared: set[str] = set()
        """Ids of the session's resources in use here: one lease each is enough."""
        self._ended = False

    @property
    def held(self) -> int:
        """Leases that are to be released."""
        return len(self._leases)

    async def acquire(self, id: str, scope: ResourceScope, initialize: Initialize[Any]) -> Any:
        """The value of a resource, with a lease until :meth:`release`.

        Raises:
            InputError: no such scope, a bad id, an initialiser that gives no :class:`Resource`, or scope
                ``host`` without ownership ``host``; ``run_finished`` after the end.
            Unsupported: scope ``session`` in a delegate.
            Exception: what the initialiser raised.
        """
        check_id("resource id", id)
        if not callable(initialize):
            raise InputError(f"initialize must be a function that gives a Resource, not {initialize!r:.80}")
        self._check_running()
        match scope:
            case "run":
                resource = await _initialized(id, initialize)
                if self._ended:  # whoever started it did not wait for it
                    await _closed(id, resource)
                    self._check_running()
                self._leases.append((id, resource))
                return resource.value
            case "session":
                return await self._acquire_shared(id, initialize)
            case "host":
                return await self._make_external(id, initialize)
            case _:
                raise InputError(f"scope is 'run', 'session' or 'host', not {scope!r:.80}", field="scope")

    async def _acquire_shared(self, id: str, initialize: Initialize[Any]) -> Any:
        if self._session is None:
            raise Unsupported(
                f"resource {id!r}: delegates have no session resources, because they may run in another "
                "process; use scope 'run', or acquire it in the session's own driver or tool",
                operation="scope=session",
            )
        value = await self._session.acquire(id, initialize)
        if self._ended or id in self._shared:
            self._session.release(id)
            self._check_running()
        else:
            self._shared.add(id)
            self._leases.append((id, None))
        return value

    async def _make_external(self, id: str, initialize: Initialize[Any]) -> Any:
        resource = await _initialized(id, initialize)
        if resource.ownership != "host":
            await _closed(id, resource)
            raise InputError(
                f"resource {id!r} has scope 'host', so its ownership must be external: return "
                "Resource(ownership='host'), or use scope 'run' or 'session'"
            )
        return resource.value

    def _check_running(self) -> None:
        if self._ended:
            raise InputError("the run has ended; it acquires nothing any more", code="run_finished")

    async def release(self) -> list[str]:
        """Let go of every lease, the latest first, once; a diagnostic for each that failed."""
        self._ended = True
        diagnostics = []
        while self._leases:
            name, resource = self._leases.pop()
            if resource is not None:
                if not await _closed(name, resource):
                    diagnostics.append(RELEASE_FAILED)
            elif self._session is not None:
                self._session.release(name)
        return diagnostics
