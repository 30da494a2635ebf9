"""Tokens: where they come from, who can read them, and what is put back."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from retinue.cluster.authentication import (
    Environment,
    how_to_give_a_token,
    new_token,
    read_token,
    token_source,
    write_token,
)


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "given"
    path.write_text("from the file\n", "utf-8")
    return path


def test_the_variable_comes_before_the_file(tmp_path: Path, token_file: Path) -> None:
    environ = {"HOME": str(tmp_path), "RAY_AUTH_TOKEN": " abc ", "RAY_AUTH_TOKEN_PATH": str(token_file)}
    assert token_source(environ) == "the variable RAY_AUTH_TOKEN"
    assert read_token(environ) == "abc"


def test_the_named_file_comes_before_rays_own(tmp_path: Path, token_file: Path) -> None:
    write_token(tmp_path / ".ray" / "auth_token", "rays own")
    environ = {"HOME": str(tmp_path), "RAY_AUTH_TOKEN_PATH": str(token_file)}
    assert token_source(environ) == f"the file {token_file} (RAY_AUTH_TOKEN_PATH)"
    assert read_token(environ) == "from the file"
    del environ["RAY_AUTH_TOKEN_PATH"]
    assert read_token(environ) == "rays own"


def test_a_named_file_that_is_missing_is_no_token_and_is_said(tmp_path: Path) -> None:
    write_token(tmp_path / ".ray" / "auth_token", "rays own")
    environ = {"HOME": str(tmp_path), "RAY_AUTH_TOKEN_PATH": str(tmp_path / "missing")}
    assert token_source(environ) is None, "Ray does not fall back either: it ends the process"
    assert read_token(environ) is None
    assert str(tmp_path / "missing") in how_to_give_a_token(environ)


def test_nowhere_a_token(tmp_path: Path) -> None:
    environ = {"HOME": str(tmp_path), "RAY_AUTH_TOKEN": "  "}
    assert token_source(environ) is None
    assert str(tmp_path / ".ray" / "auth_token") in how_to_give_a_token(environ)


def test_a_token_file_is_for_its_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "token"
    path.parent.mkdir()
    path.write_text("old", "utf-8")
    path.chmod(0o644)
    write_token(path, "new")
    assert path.read_text("utf-8") == "new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_tokens_are_long_and_differ() -> None:
    assert len({new_token() for _ in range(100)}) == 100
    assert len(new_token()) == 64


def test_variables_are_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RETINUE_TEST_OLD", "old")
    monkeypatch.setenv("RETINUE_TEST_GONE", "was here")
    monkeypatch.delenv("RETINUE_TEST_NEW", raising=False)
    environment = Environment()
    environment.set({"RETINUE_TEST_OLD": "1", "RETINUE_TEST_NEW": "1", "RETINUE_TEST_GONE": None})
    environment.set({"RETINUE_TEST_OLD": "2"})
    assert (os.environ["RETINUE_TEST_OLD"], os.environ["RETINUE_TEST_NEW"]) == ("2", "1")
    assert "RETINUE_TEST_GONE" not in os.environ
    environment.restore()
    assert (os.environ["RETINUE_TEST_OLD"], os.environ["RETINUE_TEST_GONE"]) == ("old", "was here")
    assert "RETINUE_TEST_NEW" not in os.environ
