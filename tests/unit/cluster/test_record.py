"""What ``retinue up`` writes down, and whom it is believed to be about."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from retinue.cluster.record import ClusterRecord, read_record, record_path, remove_record, write_record
from retinue.errors import ClusterUnreachable


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RETINUE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as running:
        yield running
        running.kill()


def record_of(pid: int, started: float) -> ClusterRecord:
    return ClusterRecord(
        address="10.0.0.1:6379",
        namespace="retinue",
        host=socket.gethostname(),
        since=time.time(),
        pid=pid,
        pid_started=started,
        auth="token",
        token_path="/somewhere/token",
    )


def test_written_and_read_again_by_its_owner_only() -> None:
    assert read_record() is None
    record = record_of(os.getpid(), 1.5)
    write_record(record)
    assert read_record() == record
    assert record_path().stat().st_mode & 0o077 == 0
    assert [path.name for path in record_path().parent.iterdir()] == ["cluster.json"]
    remove_record()
    remove_record()
    assert read_record() is None


def test_a_living_process_stands_and_a_dead_one_does_not(process: subprocess.Popen[bytes]) -> None:
    record = record_of(process.pid, psutil.Process(process.pid).create_time())
    assert record.stands()
    process.kill()
    deadline = time.monotonic() + 10
    while record.stands() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not record.stands(), "a process that nobody has waited for is dead all the same"
    process.wait()
    assert record.process() is None


def test_a_reused_process_id_is_somebody_else(process: subprocess.Popen[bytes]) -> None:
    started = psutil.Process(process.pid).create_time()
    assert record_of(process.pid, started - 3600).process() is None
    assert not record_of(process.pid, started - 3600).stands()


def test_a_record_of_another_machine_says_nothing_about_this_one(process: subprocess.Popen[bytes]) -> None:
    record = record_of(process.pid, psutil.Process(process.pid).create_time())
    assert not replace(record, host="elsewhere").stands()


def test_an_attached_cluster_is_expected_to_be_there() -> None:
    record = replace(record_of(1, 0.0), pid=None, pid_started=None)
    assert not record.started_here
    assert record.stands()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "cannot be used"),
        ("[]", "it is not a JSON object"),
        ('{"schema": 99}', "it has schema 99, and this Retinue knows 1"),
        ('{"schema": 1, "address": "a:1"}', "cannot be used"),
        ('{"schema": 1, "colour": "red"}', "cannot be used"),
    ],
)
def test_what_cannot_be_read_is_refused_and_kept(home: Path, text: str, why: str) -> None:
    home.mkdir()
    record_path().write_text(text, "utf-8")
    with pytest.raises(ClusterUnreachable) as caught:
        read_record()
    assert why in caught.value.message
    assert str(record_path()) in caught.value.message
    assert record_path().read_text("utf-8") == text


def test_the_environment_of_a_client() -> None:
    ours = record_of(1, 0.0)
    assert ours.environment() == {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": "/somewhere/token",
        "RAY_AUTH_TOKEN": None,
    }
    assert replace(ours, auth="disabled", token_path=None).environment() == {"RAY_AUTH_MODE": "disabled"}
    attached = replace(ours, pid=None, token_path=None)
    assert attached.environment() == {"RAY_AUTH_MODE": "token"}
    assert replace(attached, auth="disabled").environment() == {}


def test_the_file_is_json_with_a_schema() -> None:
    write_record(record_of(1, 0.0))
    assert json.loads(record_path().read_text("utf-8"))["schema"] == 1
