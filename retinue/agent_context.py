"""What an agent's model is told before the conversation: instructions, project files, and which skills exist.

Files are read once per run, where the run is, in a thread. A skill is a folder with a ``SKILL.md``: the
front matter's name and description are listed, its body is for whoever opens the file.
"""

from __future__ import annotations

import codecs
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from retinue.errors import ValidationFailed

logger = logging.getLogger(__name__)

CONTEXT_FILES = ("AGENTS.md", "CONTEXT.md")
"""Read from a folder that is given as context, each where it is there."""
MAX_CONTEXT_BYTES = 65_536
"""Text of all context files of an agent, in UTF-8 bytes; the rest is cut off, and the model is told."""
MAX_SKILLS_BYTES = 16_384
"""The list of skills; the rest is left out, and the model is told."""
MAX_DESCRIPTION = 1_024
"""Characters of one skill's description."""
_MAX_FRONT_MATTER = 16_384
"""Bytes of a SKILL.md that are read."""


@dataclass(frozen=True, kw_only=True)
class AgentContext:
    """Where an agent's context comes from. Relative paths are below ``project_root``."""

    instructions: str = ""
    skill_dirs: Sequence[str] = ()
    context_files: Sequence[str] = ()
    """Files, or folders of which :data:`CONTEXT_FILES` are read; ``"."`` is the project root."""
    project_root: str | None = None

    @property
    def reads_files(self) -> bool:
        return bool(self.skill_dirs or self.context_files)

    def read(self) -> str:
        """The system message; reads files, so call it in a thread.

        Raises:
            ValidationFailed: a path that was named is not there or cannot be read; ``path`` is it.
        """
        parts = [self.instructions, *self._project_files(), *self._skills()]
        return "\n\n".join(part for part in parts if part)

    def _project_files(self) -> Iterator[str]:
        left = MAX_CONTEXT_BYTES
        for given in self.context_files:
            for path in self._files(given):
                text, size = _text(path, left)
                shown = len(text.encode())
                left -= shown
                cut = f"\n[cut: {shown} of {size} bytes]" if shown < size else ""
                yield f"# {self._shown(path)}\n\n{text.strip()}{cut}"

    def _files(self, given: str) -> list[Path]:
        path = self._path(given)
        if path.is_dir():
            return [path / name for name in CONTEXT_FILES if (path / name).is_file()]
        if not path.is_file():
            raise ValidationFailed(f"the context file {path} is not there", path=given)
        return [path]

    def _skills(self) -> Iterator[str]:
        lines: list[str] = []
        left = MAX_SKILLS_BYTES
        for path in self._skill_files():
            line = self._skill_line(path)
            left -= len(line.encode()) + 1
            if left < 0:
                lines.append("- [cut: there are more skills]")
                break
            lines.append(line)
        if lines:
            yield "\n".join(["# Skills", "", "Each of them is explained in its file.", "", *lines])

    def _skill_files(self) -> Iterator[Path]:
        seen: set[Path] = set()
        for given in self.skill_dirs:
            folder = self._path(given)
            if not folder.is_dir():
                raise ValidationFailed(f"the folder of skills {folder} is not there", path=given)
            for path in [folder / "SKILL.md", *sorted(folder.glob("*/SKILL.md"))]:
                if path.is_file() and path not in seen:
                    seen.add(path)
                    yield path

    def _skill_line(self, path: Path) -> str:
        front = _front_matter(path)
        name = _one_line(front.get("name")) or path.parent.name
        description = _one_line(front.get("description"))[:MAX_DESCRIPTION]
        return f"- {name} ({self._shown(path)}){': ' if description else ''}{description}"

    def _path(self, given: str) -> Path:
        if self.project_root is None and not Path(given).is_absolute():
            raise ValidationFailed(
                f"the relative path {given!r} of an agent needs RuntimeConfig(project_root=...)", path=given
            )
        return Path(self.project_root or "/", given).resolve()

    def _shown(self, path: Path) -> str:
        """The path as the model reads it: relative to the project root where it is below."""
        root = Path(self.project_root or "/").resolve()
        return str(path.relative_to(root)) if path.is_relative_to(root) else str(path)


def _text(path: Path, limit: int) -> tuple[str, int]:
    """At most ``limit`` bytes of a file, cut between two characters, and its size in bytes."""
    try:
        with path.open("rb") as file:
            data = file.read(limit)
        size = max(path.stat().st_size, len(data))
        return codecs.getincrementaldecoder("utf-8")().decode(data, final=len(data) == size), size
    except UnicodeDecodeError as error:
        why = f"is not UTF-8: {error.reason}"
    except OSError as error:
        why = f"cannot be read: {error.strerror}"
    raise ValidationFailed(f"the context file {path} {why}", path=str(path))


def _front_matter(path: Path) -> Mapping[Any, Any]:
    """The YAML between the first two lines ``---``; empty, and logged, where there is none."""
    import yaml  # type: ignore[import-untyped]

    try:
        with path.open("rb") as file:
            lines = file.read(_MAX_FRONT_MATTER).decode(errors="replace").splitlines()
    except OSError as error:
        logger.warning("the skill %s cannot be read: %s", path, error.strerror)
        return {}
    ends = [index for index, line in enumerate(lines) if line.strip() == "---"][:2]
    if len(ends) < 2 or ends[0] != 0:
        logger.warning("the skill %s has no front matter", path)
        return {}
    written = lines[1 : ends[1]]
    try:
        front = yaml.safe_load("\n".join(written))
    except yaml.YAMLError:
        # Many write "description: Use it when: ..." without quotes.
        front = {key.strip(): value for key, _, value in (line.partition(":") for line in written)}
    return front if isinstance(front, dict) else {}


def _one_line(value: object) -> str:
    return " ".join(str(value).split()) if isinstance(value, str | int | float) else ""
