"""The programs in the documentation are complete: they run as they are, and print what the page says."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])

FENCE = re.compile(r"^```(?P<kind>\w*)(?P<mark>[^\n]*)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)
CONCEPTS = (
    "sessions",
    "runs",
    "controls",
    "questions",
    "approvals",
    "events",
    "resources",
    "agents",
    "tools",
)
"""Pages that begin with a program."""
NEEDS_RAY = "needs Ray"
"""Mark of programs that are only compiled here: ````python title="needs Ray"``."""


@dataclass(frozen=True)
class Program:
    """A program in a page."""

    page: Path
    line: int
    body: str
    mark: str
    shown: str | None
    """What the page says that it prints: a text block after it, with at most one line in between."""

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"

    def compiled(self) -> CodeType:
        """As code whose tracebacks name the page and its lines."""
        return compile("\n" * self.line + self.body, str(self.page), "exec", dont_inherit=True)


def programs(page: Path) -> Iterator[Program]:
    text = page.read_text("utf-8")
    fences = list(FENCE.finditer(text))
    for index, fence in enumerate(fences):
        if fence["kind"] != "python":
            continue
        shown = None
        if index + 1 < len(fences) and (following := fences[index + 1])["kind"] == "text":
            between = text[fence.end() : following.start()].strip()
            if "\n" not in between and not between.startswith("#"):
                shown = following["body"]
        line = text[: fence.start()].count("\n") + 1
        yield Program(page, line, fence["body"], fence["mark"], shown)


ALL = [program for page in PAGES for program in programs(page)]
RUN = [program for program in ALL if NEEDS_RAY not in program.mark]


@pytest.mark.parametrize("program", RUN, ids=str)
def test_a_program_runs_and_prints_what_the_page_shows(
    program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RETINUE_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    # As a script of its own, so that what it defines travels to delegates by value.
    exec(program.compiled(), {"__name__": "__main__"})
    printed = capsys.readouterr()
    assert printed.err == ""
    if program.shown is not None:
        assert printed.out == program.shown


@pytest.mark.parametrize("program", [each for each in ALL if each not in RUN], ids=str)
def test_a_program_that_needs_ray_compiles(program: Program) -> None:
    program.compiled()


def test_every_output_that_a_page_shows_is_compared() -> None:
    shown = sum(
        fence["kind"] == "text" for page in PAGES for fence in FENCE.finditer(page.read_text("utf-8"))
    )
    assert shown == sum(program.shown is not None for program in RUN) > 8


def test_only_few_programs_are_not_run() -> None:
    assert len(ALL) - len(RUN) <= 3


@pytest.mark.parametrize("name", CONCEPTS)
def test_a_concept_begins_with_a_program_that_runs(name: str) -> None:
    (page,) = [each for each in PAGES if each.stem == name]
    first = next(each for each in RUN if each.page == page)
    assert first.line < 40, "what it is for, a program, then the rules"
