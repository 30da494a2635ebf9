"""Abilities: tools and prompts that come to life with a run and end with it (contract section 3).

    bind 0 ──> bind 1 ──> ... ──> driver ──> ... ──> dispose 1 ──> dispose 0

They are bound on the user loop of the run's root, one after the other, once per run whatever its turns.
Delegates run in other processes and have neither the tools nor the prompts: a delegate's call of such a tool
gets an error result.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import msgspec

from retinue.errors import RetinueError, ValidationFailed
from retinue.messages import Message, escape_surrogates, system
from retinue.tools import IDENTIFIER, Tool, check_tools

if TYPE_CHECKING:
    from retinue.services import ExecutionServices

logger = logging.getLogger(__name__)

Dispose = Callable[[], Awaitable[None] | None]


@dataclass(frozen=True, kw_only=True)
class PromptFragment:
    """A system message before everything else of each model request of the run's root."""

    id: str
    """Unique among all abilities of the app."""
    text: str


@dataclass(frozen=True, kw_only=True)
class AbilityBinding:
    """What an ability gives to one run. Checked when it is bound, so that ``dispose`` is called even where
    the rest is wrong."""

    tools: Sequence[Tool] = ()
    """Must be granted like any tool."""
    prompt_fragments: Sequence[PromptFragment] = ()
    dispose: Dispose | None = None
    """Called once, after the run's work and its resources."""


@runtime_checkable
class Ability(Protocol):
    """Something that a run can do, as plain data that can be copied into the run's process."""

    @property
    def instance_id(self) -> str:
        """Unique in the app: letters, digits and ``. _ : / -``."""
        ...

    async def bind(self, services: ExecutionServices) -> AbilityBinding:
        """Come to life for the run of ``services``; what it raises fails the run before its driver."""
        ...


class CleanupDiagnostic(msgspec.Struct, frozen=True, kw_only=True):
    """A cleanup that failed. The text of the error is not repeated: it may hold anything."""

    code: str = "cleanup_failed"
    path: str
    """``abilities[<index>]``."""
    severity: str = "warning"


class BoundAbilities:
    """The abilities of one run. Belongs to its user loop."""

    def __init__(self, abilities: Sequence[Ability], services: ExecutionServices) -> None:
        self._abilities = tuple(abilities)
        self._services = services
        self._disposals: list[tuple[int, object]] = []
        self._disposing: asyncio.Task[list[CleanupDiagnostic]] | None = None
        self._tools: list[Tool] = []
        self._prompts: dict[str, Message] = {}

    async def bind(self) -> None:
        """Bind all in order, and give the services their tools and prompts.

        Raises:
            ValidationFailed: a binding is malformed, or two things share a name; ``path`` names the ability.
            BaseException: whatever an ability raised, the same object; what was bound before has been
                disposed then, and ``cleanup_diagnostics`` of the error (where it takes an attribute) names
                what failed in that.
        """
        try:
            for index, ability in enumerate(self._abilities):
                self._check_cancelled()
                given = await self._bind_one(ability)
                self._disposals.append((index, _dispose_of(given)))
                self._check_cancelled()
                self._add(index, ability, given)
        except BaseException as error:
            await self.dispose()
            with contextlib.suppress(Exception):
                error.cleanup_diagnostics = self.diagnostics  # type: ignore[attr-defined]
            raise
        self._services.ability_tools = tuple(self._tools)
        self._services.prompts = tuple(self._prompts.values())

    @property
    def diagnostics(self) -> tuple[CleanupDiagnostic, ...]:
        """What failed in :meth:`dispose`, once that is done."""
        done = self._disposing is not None and self._disposing.done() and not self._disposing.cancelled()
        return tuple(self._disposing.result()) if self._disposing is not None and done else ()

    async def dispose(self) -> list[str]:
        """Dispose what was bound, the last first, each once; codes of what failed.

        Called again, or by several at once, it cleans up once and gives all the same answer.
        """
        if self._disposing is None:
            # A task of its own: whoever awaits it may be cancelled, the cleanup is not.
            self._disposing = asyncio.create_task(self._dispose())
        return [diagnostic.code for diagnostic in await asyncio.shield(self._disposing)]

    async def _dispose(self) -> list[CleanupDiagnostic]:
        diagnostics = []
        for index, dispose in reversed(self._disposals):
            if dispose is None:
                continue
            try:
                value = dispose()  # type: ignore[operator]  # what cannot be called is a failed cleanup
                if inspect.isawaitable(value):
                    await value
            except (Exception, asyncio.CancelledError, SystemExit, KeyboardInterrupt):
                ability = self._abilities[index].instance_id
                logger.warning("ability %s could not be disposed", ability, exc_info=True)
                diagnostics.append(CleanupDiagnostic(path=f"abilities[{index}]"))
        return diagnostics

    def _check_cancelled(self) -> None:
        if self._services.cancelled:
            raise asyncio.CancelledError("the run is being cancelled")

    async def _bind_one(self, ability: Ability) -> object:
        try:
            given: object = ability.bind(self._services)
            return await given if inspect.isawaitable(given) else given
        except (SystemExit, KeyboardInterrupt) as error:
            # asyncio would let these out of the loop that all runs share.
            raise RetinueError(
                f"ability {ability.instance_id} raised {type(error).__name__}: {error}",
                code="execution_failed",
            ) from None

    def _add(self, index: int, ability: Ability, given: object) -> None:
        path = f"abilities[{index}]"
        name = ability.instance_id
        if not isinstance(given, AbilityBinding):
            raise ValidationFailed(
                f"{path} ({name}) gave {type(given).__name__}; bind() must return an AbilityBinding",
                path=path,
            )
        for what in ("tools", "prompt_fragments"):
            if isinstance(getattr(given, what), str) or not isinstance(getattr(given, what), Sequence):
                raise ValidationFailed(f"{path} ({name}): {what} must be a list", path=f"{path}.{what}")
        tools = check_tools(given.tools, f"{path}.tools")
        taken = {item.name for item in (*self._services.config.tools, *self._tools)}
        for item in tools:
            if item.name in taken:
                raise ValidationFailed(
                    f"{path} ({name}): another ability or the app has a tool named {item.name} already; "
                    "a duplicate name would make grants a guess",
                    path=f"{path}.tools",
                )
        self._tools.extend(tools)
        for fragment in given.prompt_fragments:
            self._prompts |= self._prompt(f"{path}.prompt_fragments", name, fragment)

    def _prompt(self, path: str, name: str, fragment: object) -> dict[str, Message]:
        if not isinstance(fragment, PromptFragment) or not isinstance(fragment.text, str):
            raise ValidationFailed(f"{path} ({name}) holds {fragment!r:.80}, no PromptFragment", path=path)
        _check_identifier(f"{path}.id", fragment.id)
        if fragment.id in self._prompts:
            raise ValidationFailed(f"{path} ({name}): duplicate prompt id {fragment.id}", path=path)
        if escape_surrogates(fragment.text) != fragment.text:
            raise ValidationFailed(f"{path} ({name}): {fragment.id} has a lone surrogate", path=path)
        return {fragment.id: system(fragment.text)}


def check_abilities(abilities: object, path: str) -> tuple[Ability, ...]:
    """``abilities`` as a tuple; :class:`ValidationFailed` names what is no ability, or a repeated id."""
    if isinstance(abilities, str) or not isinstance(abilities, Sequence):
        raise ValidationFailed(f"{path} must be a list of abilities, not {abilities!r:.80}", path=path)
    checked: dict[str, Ability] = {}
    for index, ability in enumerate(abilities):
        if not isinstance(ability, Ability):
            raise ValidationFailed(
                f"{path}[{index}] is {ability!r:.80}; an ability has an instance_id and bind(services)",
                path=f"{path}[{index}]",
            )
        _check_identifier(f"{path}[{index}].instance_id", ability.instance_id)
        if ability.instance_id in checked:
            raise ValidationFailed(f"{path} has two abilities {ability.instance_id}", path=f"{path}[{index}]")
        checked[ability.instance_id] = ability
    return tuple(checked.values())


def _check_identifier(path: str, value: object) -> None:
    if not isinstance(value, str) or not IDENTIFIER.match(value):
        raise ValidationFailed(
            f"{path} {value!r:.80} must start with a letter or digit and go on with letters, digits "
            "and . _ : / -",
            path=path,
        )


def _dispose_of(given: Any) -> object:
    """The cleanup of whatever ``bind`` gave; one that is malformed may hold something all the same."""
    if isinstance(given, Mapping):
        return given.get("dispose")
    return getattr(given, "dispose", None)
