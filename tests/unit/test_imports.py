"""The floors import each other only as the table in CONTRIBUTING.md says."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FLOORS = ("storage", "actors", "serve", "cluster")


def lint_imports(root: Path) -> subprocess.CompletedProcess[str]:
    program = (
        "import sys; from importlinter.cli import lint_imports_command; sys.exit(lint_imports_command())"
    )
    return subprocess.run(
        [sys.executable, "-c", program, "--no-cache", "--config", "pyproject.toml"],
        cwd=root,
        env={"PYTHONPATH": str(root), "PATH": "", "COLUMNS": "200", "PYTHONUTF8": "1"},
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.fixture
def copied_house(tmp_path: Path) -> Path:
    """A copy of the sources, so that a test can break a rule in it."""
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    ignore = shutil.ignore_patterns("__pycache__", "*.pyc")
    shutil.copytree(ROOT / "retinue", tmp_path / "retinue", symlinks=True, ignore=ignore)
    for floor in FLOORS:
        shutil.copytree(ROOT / floor, tmp_path / floor, ignore=ignore)
    return tmp_path


def test_every_import_keeps_to_the_table() -> None:
    done = lint_imports(ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 broken" in done.stdout


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("retinue/budgets.py", "import retinue.actors"),
        ("retinue/budgets.py", "import ray"),
        ("retinue/budgets.py", "import sqlite3"),
        ("retinue/budgets.py", "import httpx"),
        ("storage/__init__.py", "import retinue.actors"),
        ("storage/__init__.py", "import ray"),
        ("actors/__init__.py", "import retinue.serve"),
        ("actors/__init__.py", "import sqlite3"),
        ("serve/__init__.py", "import retinue.cluster"),
    ],
)
def test_a_wrong_import_is_found(copied_house: Path, module: str, line: str) -> None:
    path = copied_house / module
    path.write_text(path.read_text("utf-8") + f"\n{line}\n", "utf-8")
    done = lint_imports(copied_house)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "1 broken" in done.stdout


def test_links_lead_to_the_floors() -> None:
    for floor in FLOORS:
        link = ROOT / "retinue" / floor
        assert link.is_symlink(), f"{link} must be a link: checkers skip what they cannot see"
        assert link.resolve() == (ROOT / floor).resolve()


def test_importing_retinue_brings_neither_ray_nor_a_database() -> None:
    program = (
        "import sys, retinue, retinue.errors;"
        "print([m for m in ('ray', 'sqlite3', 'fastapi', 'openai', 'retinue.actors') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
