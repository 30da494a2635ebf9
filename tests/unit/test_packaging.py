"""What is built is what is here: a forgotten package would be missed only by those who install the wheel."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
FLOORS = ("storage", "actors", "serve", "cluster")


@pytest.fixture(scope="module")
def setuptools() -> dict[str, Any]:
    settings: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"][
        "setuptools"
    ]
    return settings


def folder_of(package: str) -> Path:
    _, *rest = package.split(".")
    return ROOT.joinpath(*rest) if rest and rest[0] in FLOORS else ROOT.joinpath("retinue", *rest)


def test_every_package_is_listed(setuptools: dict[str, Any]) -> None:
    found = set()
    for folder in ("retinue", *FLOORS):
        for init in (ROOT / folder).rglob("__init__.py"):
            parts = init.parent.relative_to(ROOT).parts
            found.add(".".join(parts if parts[0] == "retinue" else ("retinue", *parts)))
    assert set(setuptools["packages"]) == found


def test_every_floor_is_mapped(setuptools: dict[str, Any]) -> None:
    expected = {f"retinue.{floor}": floor for floor in FLOORS} | {"retinue": "retinue"}
    assert setuptools["package-dir"] == expected


def test_every_file_that_is_no_module_is_packaged(setuptools: dict[str, Any]) -> None:
    packaged: set[Path] = set()
    for package, patterns in setuptools["package-data"].items():
        for pattern in patterns:
            packaged |= set(folder_of(package).glob(pattern))
    for folder in ("retinue", *FLOORS):
        for path in (ROOT / folder).rglob("*"):
            if path.is_file() and path.suffix not in {".py", ".pyc"}:
                assert path in packaged, f"{path.relative_to(ROOT)} would be missing from the wheel"


def test_constraints_pin_everything_and_name_no_host() -> None:
    lines = (ROOT / "constraints.txt").read_text("utf-8").split()
    assert lines
    for line in lines:
        name, _, version = line.partition("==")
        assert name
        assert version, line
        assert "/" not in line
        assert "@" not in line
