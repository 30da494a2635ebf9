"""Delegates as their parent sees them, and how their work is copied into another process."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from retinue.drivers import ExecutionDriver
from retinue.errors import NotShippable, ValidationFailed, error_from_payload
from retinue.policies import ExecutionPolicy
from retinue.protocol import AwaitChild, CancelChild, ChildEnded, decode_output
from retinue.results import DriverOutput

if TYPE_CHECKING:
    from retinue.services import ExecutionServices

T = TypeVar("T")


class Delegate:
    """A child that was started; ``await child.result()`` gives its output or raises its error."""

    def __init__(self, services: ExecutionServices, run_id: str, name: str) -> None:
        self.run_id = run_id
        self.name = name
        self._services = services
        self._following: asyncio.Task[DriverOutput] | None = None

    async def result(self) -> DriverOutput:
        """The child's output.

        Raises:
            ChildLost: the child's process died.
            RetinueError: what ended the child, under its own code (``budget_exhausted`` and so on).
        """
        assert self._following is not None
        return await asyncio.shield(self._following)

    def cancel(self, reason: str = "cancelled by its parent") -> None:
        """Ask the child and everything below it to stop; ``result()`` then raises."""
        self._services.tell(
            CancelChild(participant=self._services.participant, child_run_id=self.run_id, reason=reason)
        )

    def follow(self, task: asyncio.Task[DriverOutput]) -> None:
        """Take the task that waits for the outcome."""
        self._following = task
        task.add_done_callback(_seen)

    async def wait(self) -> DriverOutput:
        reply = await self._services.ask(
            AwaitChild(participant=self._services.participant, child_run_id=self.run_id)
        )
        assert isinstance(reply, ChildEnded)
        if reply.output is None:
            raise error_from_payload(reply.error or {})
        return decode_output(reply.output)


def _seen(task: asyncio.Task[DriverOutput]) -> None:
    if not task.cancelled():
        task.exception()


def without_policy(work: T, policy: ExecutionPolicy | None) -> T:
    """An agent, and those that it can ask, without a policy of their own that is the app's: the root asks
    that one, and it need not travel. Anything else as it is."""
    from retinue.agents import Agent

    if not isinstance(work, Agent) or policy is None:
        return work
    own = None if work.execution_policy is policy else work.execution_policy
    asked = work.subagents
    if asked is not None and not isinstance(asked, bool):
        asked = [without_policy(agent, policy) for agent in asked]
    return dataclasses.replace(work, execution_policy=own, subagents=asked)


def pickle_work(work: object, name: str) -> bytes:
    """An agent or driver as bytes for another process.

    Raises:
        ValidationFailed: it is neither.
        NotShippable: something in it cannot be pickled; ``path`` names it.
    """
    from retinue.agents import Agent

    if not isinstance(work, Agent | ExecutionDriver):
        raise ValidationFailed(f"a delegate is an Agent or an ExecutionDriver, not {work!r:.80}", path=name)
    return pickle_value(work, name)


def pickle_value(value: object, path: str) -> bytes:
    """``value`` pickled; :class:`NotShippable` names the innermost member that cannot be."""
    import cloudpickle  # type: ignore[import-untyped]

    try:
        return bytes(cloudpickle.dumps(value))
    except Exception as error:
        culprit, why = _find_culprit(value, path, error)
        raise NotShippable(
            f"{culprit} cannot be sent to another process: {why}. Create it where it is used (inside the "
            'tool or the driver), or name the app: Runtime("module:factory")',
            path=culprit,
        ) from None


def _find_culprit(value: object, path: str, error: Exception, depth: int = 0) -> tuple[str, str]:
    import cloudpickle

    if depth < 12:
        for member_path, member in _members(value, path):
            try:
                cloudpickle.dumps(member)
            except Exception as inner:
                return _find_culprit(member, member_path, inner, depth + 1)
    return path, f"{type(value).__name__}: {error}"


def _members(value: object, path: str) -> Iterator[tuple[str, object]]:
    if isinstance(value, Mapping):
        yield from ((f"{path}[{key!r}]", member) for key, member in value.items())
    elif isinstance(value, list | tuple | set | frozenset):
        yield from ((f"{path}[{index}]", member) for index, member in enumerate(value))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from (
            (f"{path}.{field.name}", getattr(value, field.name)) for field in dataclasses.fields(value)
        )
    else:
        members: dict[str, Any] = getattr(value, "__dict__", {}) if not isinstance(value, type) else {}
        yield from ((f"{path}.{name}", member) for name, member in members.items())
        for index, cell in enumerate(getattr(value, "__closure__", None) or ()):
            names = value.__code__.co_freevars  # type: ignore[attr-defined]
            yield f"{path}:{names[index]}", cell.cell_contents
