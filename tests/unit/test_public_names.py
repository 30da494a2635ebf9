"""The public surface is the recorded one: a change of it shows in the diff of public_names.txt."""

from __future__ import annotations

from pathlib import Path

import pytest

import retinue
import retinue.errors
import retinue.events
import retinue.testing

RECORDED = Path(__file__).with_name("public_names.txt")


def current() -> list[str]:
    names = [f"retinue.{name}" for name in retinue.__all__]
    names += [f"retinue.errors.{name}" for name in retinue.errors.__all__]
    names += [f"retinue.testing.{name}" for name in retinue.testing.__all__]
    return sorted(names)


def test_the_public_names_are_the_recorded_ones() -> None:
    assert current() == RECORDED.read_text().split()


@pytest.mark.parametrize("module", [retinue, retinue.errors, retinue.testing])
def test_every_public_name_exists_and_is_listed_once_in_order(module: object) -> None:
    names = module.__all__  # type: ignore[attr-defined]
    assert len(set(names)) == len(names)
    for name in names:
        if name != "connect":  # brings Ray
            assert getattr(module, name) is not None


def test_other_names_are_refused() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = retinue.Nothing
