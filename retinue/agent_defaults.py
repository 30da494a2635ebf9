"""What an app says about the agents that its driver makes: defaults and limits (contract sections 3 and 5).

Defaults complete an agent where it says nothing itself; limits bound what it says. Both are for agents that
a run owns, ``agent_driver(factory)``. An agent that the application made, ``agent_driver(Agent(...))``, is
complete as it is: its runs fail in an app with defaults or limits, instead of going on as if there were
none. Delegates and members of teams keep within the limits, and take no defaults.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

from retinue.errors import Unsupported, ValidationFailed

_NOT_OFFERED = {
    "workspace": "agents have no workspace",
    "filesystem": "agents have no tools for files; give them your own",
    "file_memory": "agents keep no memory in files; a session's history is in its store",
    "search_past_sessions": "agents cannot search other sessions",
}


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Upper bounds of what agents may say of themselves; ``None`` bounds nothing."""

    tool_roundtrips: int | None = None
    """Rounds of tools of one agent run; 0 allows none."""
    max_child_depth: int | None = None
    """Levels of agents that the ``task`` tool may make below the root; 0 disables it."""

    def __post_init__(self) -> None:
        for name in ("tool_roundtrips", "max_child_depth"):
            check_count(f"config.limits.{name}", getattr(self, name))

    @property
    def empty(self) -> bool:
        return self == Limits()


@dataclass(frozen=True, kw_only=True)
class AgentDefaults:
    """What an owned agent has where it does not say; ``False`` disables, ``None`` says nothing.

    What this version does not offer may be disabled, but not asked for (``Unsupported``).
    """

    skill_dirs: Sequence[str] | Literal[False] | None = None
    """Folders whose skills (``SKILL.md``) are listed to the model, absolute or below the project root."""
    context_files: bool | None = None
    """True puts the project root's context files before the model."""
    subagents: bool | None = None
    """True gives the agent the ``task`` tool, with a fresh copy of itself to ask."""
    workspace: Literal[False] | None = None
    filesystem: Literal[False] | None = None
    file_memory: Literal[False] | None = None
    search_past_sessions: Literal[False] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(
            self, "skill_dirs", check_skill_dirs("config.defaults.skill_dirs", self.skill_dirs)
        )
        for name in ("context_files", "subagents"):
            _check_switch(f"config.defaults.{name}", getattr(self, name))
        for name, why in _NOT_OFFERED.items():
            value: object = getattr(self, name)
            if value is None or value is False:
                continue
            raise Unsupported(
                f"config.defaults.{name} cannot be {value!r:.80}: {why} in this version. Leave it out or say "
                "False",
                operation=f"defaults.{name}",
            )

    @property
    def empty(self) -> bool:
        return all(getattr(self, field.name) is None for field in fields(self))


def check_count(path: str, value: object) -> None:
    """Raise ``ValidationFailed`` unless ``value`` is ``None`` or an integer of at least 0."""
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValidationFailed(f"{path} must be an integer of at least 0, not {value!r:.80}", path=path)


def check_paths(path: str, value: object) -> tuple[str, ...]:
    """``value`` as a tuple of paths without repeats; ``ValidationFailed`` for anything but a list of them."""
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        given = [str(item) if isinstance(item, str | Path) else "" for item in value]
        if all(given):
            return tuple(dict.fromkeys(given))
    raise ValidationFailed(f"{path} must be a list of nonempty strings, not {value!r:.80}", path=path)


def check_skill_dirs(path: str, value: object) -> tuple[str, ...] | Literal[False] | None:
    """``value`` as :attr:`AgentDefaults.skill_dirs` takes it, or ``ValidationFailed``."""
    if value is None:
        return None
    return False if value is False else check_paths(path, value)


def _check_switch(path: str, value: object) -> None:
    if value is not None and not isinstance(value, bool):
        raise ValidationFailed(f"{path} must be True, False or None, not {value!r:.80}", path=path)


def check_project_root(value: object) -> str | None:
    """An absolute path as a string, or ``None``; anything else is ``ValidationFailed``."""
    if value is None:
        return None
    if not isinstance(value, str | Path) or not Path(value).is_absolute():
        raise ValidationFailed(
            f"config.project_root must be an absolute path, not {value!r:.80}; relative paths of agents "
            "are looked up below it",
            path="config.project_root",
        )
    return str(value)
