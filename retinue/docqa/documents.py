"""Folders of documents: what is in them, and how it is split among delegates."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from retinue.errors import InputError

SUFFIXES = (".md", ".markdown", ".txt", ".rst")
"""What is read, whatever the case of its letters."""
MAX_FILE_BYTES = 2_000_000
"""Larger files are reported and skipped."""
MAX_PART_CHARACTERS = 48_000
"""A longer document is read in parts, so that one fits beside a question into a usual model context."""
MIN_SHARD_CHARACTERS = 2_000
"""A document is not split into shards smaller than this for the sake of balance."""

_HEADING = re.compile(r" {0,3}(#{1,6})\s+\S")
_UNDERLINE = re.compile(r"([=\-~^])\1{2,}\s*\Z")
_FENCE = re.compile(r"\s*(?:`{3,}|~{3,})")


@dataclass(frozen=True)
class Document:
    """A readable document: its name relative to the folder, and its text as lines without their ends."""

    folder: str
    """Absolute path of the folder."""
    name: str
    lines: tuple[str, ...]
    digest: str
    """SHA-256 of the file's bytes, by which a later reader sees that nothing has changed."""

    @property
    def characters(self) -> int:
        return sum(len(line) + 1 for line in self.lines)


@dataclass(frozen=True)
class Skipped:
    """A file that is not read, and why."""

    name: str
    reason: str


@dataclass(frozen=True)
class Folder:
    """A folder as read: documents in the order of their names, and what was skipped."""

    path: Path
    documents: tuple[Document, ...]
    skipped: tuple[Skipped, ...]

    @property
    def characters(self) -> int:
        return sum(document.characters for document in self.documents)


@dataclass(frozen=True)
class Part:
    """Lines ``first`` to ``last`` of a document, both included, counted from 1."""

    folder: str
    document: str
    first: int
    last: int
    characters: int
    digest: str

    @property
    def id(self) -> str:
        """``guide.md:1-120``."""
        return f"{self.document}:{self.first}-{self.last}"


# --- reading ----------------------------------------------------------------------------------------------


def read_folder(folder: Path) -> Folder:
    """The documents below a folder, hidden files and folders left out.

    Raises:
        InputError: there is no such folder, it is a file, it cannot be listed, or it has nothing to read.
    """
    if not folder.exists():
        raise InputError(
            f"there is no folder {folder}; give one with documents: --folder DIR", field="folder"
        )
    if not folder.is_dir():
        raise InputError(
            f"{folder} is a file; give the folder that it is in: --folder {folder.parent}", field="folder"
        )
    root = folder.resolve()
    documents: list[Document] = []
    skipped: list[Skipped] = []
    for path in _files(root, root, frozenset({root}), skipped):
        found = _read_document(root, path)
        if isinstance(found, Document):
            documents.append(found)
        else:
            skipped.append(found)
    if not documents:
        why = "; ".join(f"{one.name}: {one.reason}" for one in skipped[:5])
        more = f" and {len(skipped) - 5} more" if len(skipped) > 5 else ""
        raise InputError(
            f"{folder} has no document to read ({', '.join(SUFFIXES)})"
            + (f"; skipped: {why}{more}" if skipped else "; give another folder: --folder DIR"),
            field="folder",
        )
    return Folder(root, tuple(documents), tuple(skipped))


def _files(root: Path, folder: Path, above: frozenset[Path], skipped: list[Skipped]) -> Iterator[Path]:
    """Files to read, depth first in order of their names; links are followed inside the root only."""
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError as error:
        if folder == root:
            raise InputError(f"{folder} cannot be listed: {error.strerror}", field="folder") from None
        skipped.append(Skipped(_name(root, folder), f"cannot be listed: {error.strerror}"))
        return
    for entry in entries:
        path = folder / entry.name
        wanted = path.suffix.lower() in SUFFIXES
        if entry.name.startswith("."):
            continue
        try:
            target = path.resolve(strict=True)
            is_folder = entry.is_dir()
        except (OSError, RuntimeError):
            if wanted:
                skipped.append(Skipped(_name(root, path), "a link that leads nowhere"))
            continue
        if entry.is_symlink() and not target.is_relative_to(root):
            if wanted or is_folder:
                skipped.append(Skipped(_name(root, path), "a link that leads out of the folder"))
        elif is_folder:
            if target not in above:
                yield from _files(root, path, above | {target}, skipped)
        elif wanted:
            yield path


def _read_document(root: Path, path: Path) -> Document | Skipped:
    name = _name(root, path)
    if not name.isprintable() or "�" in name:
        return Skipped(name, "its name has characters that cannot be shown")
    try:
        if not path.is_file():
            return Skipped(name, "no regular file")
        size = path.stat().st_size
        if size > MAX_FILE_BYTES:
            return Skipped(name, f"too large: {size:,} bytes, more than {MAX_FILE_BYTES:,}")
        data = path.read_bytes()
    except OSError as error:
        return Skipped(name, f"cannot be read: {error.strerror}")
    if b"\0" in data:
        return Skipped(name, f"not text: a NUL byte at offset {data.index(0)}")
    try:
        lines = text_lines(data)
    except UnicodeDecodeError as error:
        return Skipped(name, f"not UTF-8: byte 0x{data[error.start]:02x} at offset {error.start}")
    if not any(line.strip() for line in lines):
        return Skipped(name, "empty")
    return Document(str(root), name, tuple(lines), digest(data))


def _name(root: Path, path: Path) -> str:
    """The name relative to the root; bytes that are no UTF-8 show as replacement characters."""
    return os.fsencode(path.relative_to(root).as_posix()).decode("utf-8", "replace")


def text_lines(data: bytes) -> list[str]:
    """The lines of a file, as an editor counts them; raises ``UnicodeDecodeError``."""
    lines = data.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n").split("\n")
    if lines[-1] == "":
        lines.pop()
    return lines


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


# --- splitting --------------------------------------------------------------------------------------------


def plan_parts(documents: Sequence[Document], delegates: int) -> list[tuple[Part, ...]]:
    """The parts of each delegate: every line of every document exactly once, about equally much for each.

    With more documents than delegates one delegate gets several, next to each other in order; with fewer,
    long documents are split into shards at headings and paragraphs.

    Args:
        documents: what is to be read.
        delegates: how many may read, at least 1; fewer groups are returned when there is not enough to split.

    Raises:
        InputError: ``delegates`` is below 1.
    """
    if delegates < 1:
        raise InputError(f"delegates must be at least 1, not {delegates}", field="delegates")
    target = max(1, sum(document.characters for document in documents) // delegates)
    shards: list[Part] = []
    for document in documents:
        size = document.characters
        wanted = round(size / max(target, MIN_SHARD_CHARACTERS)) if len(documents) < 2 * delegates else 1
        shards.extend(_shards(document, max(1, wanted, -(-size // MAX_PART_CHARACTERS))))
    return [tuple(_merged(group)) for group in _balanced(shards, delegates)]


def _shards(document: Document, count: int) -> Iterator[Part]:
    """A document in ``count`` parts or fewer, cut where it hurts least near the even places."""
    lines = document.lines
    ends = [0]
    for line in lines:
        ends.append(ends[-1] + len(line) + 1)
    total = ends[-1]
    penalties = _cut_penalties(lines)
    cuts = [0]
    for number in range(1, count):
        ideal, reach = total * number / count, total / count * 0.4
        candidates = [index for index in range(cuts[-1] + 1, len(lines)) if abs(ends[index] - ideal) <= reach]
        if candidates:
            cuts.append(min(candidates, key=lambda at: penalties[at] + abs(ends[at] - ideal) / reach))
    for first, end in zip(cuts, [*cuts[1:], len(lines)], strict=True):
        yield _part(document, first + 1, end, ends[end] - ends[first])


def _cut_penalties(lines: Sequence[str]) -> list[float]:
    """How bad it is to begin a part at each line: little at headings, more at paragraphs, most in code."""
    penalties: list[float] = []
    in_fence = False
    for index, line in enumerate(lines):
        after_blank = index == 0 or not lines[index - 1].strip()
        heading = None if in_fence else _HEADING.match(line)
        underlined = index + 1 < len(lines) and line.strip() and _UNDERLINE.match(lines[index + 1])
        if heading:
            penalties.append(0.1 * len(heading[1]))
        elif underlined and after_blank and not in_fence:
            penalties.append(0.2)
        elif in_fence:
            penalties.append(4.0)
        elif not line.strip():
            penalties.append(2.5)
        else:
            penalties.append(1.0 if after_blank else 3.0)
        if _FENCE.match(line):
            in_fence = not in_fence
    return penalties


def _part(document: Document, first: int, last: int, characters: int) -> Part:
    return Part(document.folder, document.name, first, last, characters, document.digest)


def _balanced(parts: Sequence[Part], groups: int) -> list[list[Part]]:
    """The parts in order in at most ``groups`` runs, so that the longest run is as short as can be."""
    low = max((part.characters for part in parts), default=0)
    high = sum(part.characters for part in parts)
    while low < high:
        middle = (low + high) // 2
        if len(_runs(parts, middle)) <= groups:
            high = middle
        else:
            low = middle + 1
    runs = _runs(parts, low)
    while len(runs) < groups and any(len(run) > 1 for run in runs):
        # A delegate would be left without work: halve the longest run that can be.
        longest = max((run for run in runs if len(run) > 1), key=_size)
        at = min(range(1, len(longest)), key=lambda cut: abs(_size(longest[:cut]) - _size(longest[cut:])))
        place = runs.index(longest)
        runs[place : place + 1] = [longest[:at], longest[at:]]
    return runs


def _runs(parts: Sequence[Part], capacity: int) -> list[list[Part]]:
    runs: list[list[Part]] = []
    room = 0
    for part in parts:
        if not runs or part.characters > room:
            runs.append([])
            room = capacity
        runs[-1].append(part)
        room -= part.characters
    return runs


def _size(parts: Sequence[Part]) -> int:
    return sum(part.characters for part in parts)


def _merged(parts: Sequence[Part]) -> list[Part]:
    """Neighbouring shards of one document as one part, where that is not too long."""
    merged: list[Part] = []
    for part in parts:
        last = merged[-1] if merged else None
        if (
            last is not None
            and last.document == part.document
            and last.characters + part.characters <= MAX_PART_CHARACTERS
        ):
            merged[-1] = Part(
                part.folder,
                part.document,
                last.first,
                part.last,
                last.characters + part.characters,
                part.digest,
            )
        else:
            merged.append(part)
    return merged
