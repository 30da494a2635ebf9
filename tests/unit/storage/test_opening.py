"""Store URLs, and what is said when a store cannot be opened."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path

import pytest

from retinue.errors import StoreUnavailable
from retinue.ids import SessionAddress
from retinue.storage import default_url, normalise_url, open_store
from retinue.store import ReadSession


def _refused(url: str) -> StoreUnavailable:
    with pytest.raises(StoreUnavailable) as caught:
        open_store(url)
    return caught.value


async def test_a_memory_store_opens() -> None:
    alone, shared = open_store("memory:"), open_store("memory:", shared=True)
    assert alone.guarantees.single_writer == "process"
    assert shared.guarantees.single_writer == "distributed"
    assert normalise_url("memory:") == alone.statistics().url == "memory:"
    await alone.close()
    await shared.close()


async def test_a_relative_file_is_in_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    engine = open_store("sqlite:///notes.db")
    address = SessionAddress(store_id=engine.store_id, tenant_id="t", user_id="u", session_id="s")
    await engine.execute([ReadSession(address=address)])
    assert engine.statistics().url == normalise_url("sqlite:///notes.db") == f"sqlite:///{tmp_path}/notes.db"
    await engine.close()
    assert [entry.name for entry in tmp_path.iterdir()] == ["notes.db"], (
        "the log is copied and removed at the end"
    )


async def test_files_and_folders_are_private(tmp_path: Path) -> None:
    engine = open_store(f"sqlite:///{tmp_path}/new folder/ä %41 #1.db")
    folder = tmp_path / "new folder"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {entry.stat().st_mode & 0o777 for entry in folder.iterdir()} == {0o600}
    assert (folder / "ä %41 #1.db").exists()
    await engine.close()


def test_all_names_of_a_file_are_one_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "link").symlink_to(tmp_path)
    names = ["sqlite:///a.db", "sqlite:///./x/../a.db", f"sqlite:///{tmp_path}/a.db", "sqlite:///link/a.db",
             "sqlite:///~/a.db"]  # fmt: skip
    assert {normalise_url(name) for name in names} == {f"sqlite:///{tmp_path}/a.db"}
    assert normalise_url("sqlite:///~a.db") == f"sqlite:///{tmp_path}/~a.db"


async def test_the_default_is_in_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RETINUE_HOME", str(tmp_path / "deep" / "home"))
    assert default_url() == f"sqlite:///{tmp_path}/deep/home/retinue.db"
    engine = open_store(default_url())  # all of the path is made, unlike for a folder that a user names
    await engine.close()
    assert (tmp_path / "deep" / "home" / "retinue.db").exists()
    monkeypatch.setenv("RETINUE_HOME", "")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    assert default_url() == f"sqlite:///{tmp_path}/data/retinue/retinue.db"


@pytest.mark.parametrize(
    ("url", "reason", "said"),
    [
        ("postgresql://ann:s3cret@db/x", "unknown_scheme", "'postgresql'"),
        ("redis://:s3cret@db/x", "unknown_scheme", "sqlite:///FILE"),
        ("notes.db", "bad_url", "sqlite:///notes.db"),
        ("", "bad_url", "memory:"),
        ("memory://x", "bad_url", "memory:"),
        ("sqlite:notes.db", "bad_url", "sqlite:///FILE"),
        ("sqlite://notes.db", "bad_url", "sqlite:///FILE"),
        ("sqlite:///", "bad_url", "no file"),
        ("sqlite:///:memory:", "bad_url", "memory:"),
        ("sqlite:///notes.db?mode=ro", "bad_url", "options"),
    ],
)
def test_a_wrong_url_is_explained(url: str, reason: str, said: str) -> None:
    error = _refused(url)
    assert error.reason == reason
    assert said in str(error)
    assert "s3cret" not in f"{error} {error.data}"
    with pytest.raises(StoreUnavailable) as caught:
        normalise_url(url)
    assert caught.value.reason == reason


def test_a_place_that_cannot_hold_a_file_is_explained(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for name, reason, said in [
        ("missing/folder/a.db", "no_folder", f"{tmp_path}/missing/folder does not exist; create it"),
        ("file/a.db", "no_folder", f"{tmp_path}/file is not a folder"),
        ("file/sub/a.db", "no_folder", f"{tmp_path}/file/sub"),
        (".", "is_folder", "that is a folder"),
        ("n" * 300, "not_writable", "File name too long"),
    ]:
        error = _refused(f"sqlite:///{tmp_path}/{name}")
        assert error.reason == reason, name
        assert said in str(error)
        assert error.url == normalise_url(f"sqlite:///{tmp_path}/{name}")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["file"], "a refusal leaves nothing behind"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_may_not_be_written_is_explained(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        error = _refused(f"sqlite:///{tmp_path}/a.db")
    finally:
        tmp_path.chmod(0o700)
    assert error.reason == "not_writable"


def test_a_read_only_file_system_is_explained() -> None:
    error = _refused("sqlite:////proc/a.db")  # also for root
    assert error.reason == "not_writable"
    assert "/proc" in str(error)


def test_another_kind_of_file_is_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    content = b"These are my notes.\n" * 100
    file.write_bytes(content)
    error = _refused(f"sqlite:///{file}")
    assert error.reason == "not_a_database"
    assert str(file) in str(error)
    assert file.read_bytes() == content


def test_another_applications_database_is_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "theirs.db"
    connection = sqlite3.connect(file)
    connection.execute("CREATE TABLE meta (name TEXT, value TEXT)")
    connection.close()
    content = file.read_bytes()
    assert _refused(f"sqlite:///{file}").reason == "not_a_store"
    assert file.read_bytes() == content
