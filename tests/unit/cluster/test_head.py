"""Ending a tree of processes: all of it, and only it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from retinue.cluster import head
from retinue.cluster.head import stop_head
from retinue.cluster.record import ClusterRecord

STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); os.setpgrp(); time.sleep(60)"
for _ in range(2):
    subprocess.Popen([sys.executable, "-c", child])
# A grandchild whose parent is gone: only the session leads to it.
subprocess.Popen([sys.executable, "-c", "import subprocess, sys; subprocess.Popen([sys.executable, '-c', %r])" % child]).wait()
print("ready", flush=True)
time.sleep(60)
"""  # noqa: E501


def record_of(process: psutil.Process, folder: Path) -> ClusterRecord:
    return ClusterRecord(
        address="10.0.0.1:6379",
        namespace="retinue",
        host=socket.gethostname(),
        since=time.time(),
        pid=process.pid,
        pid_started=process.create_time(),
        temp_dir=str(folder / "ray"),
        token_path=str(folder / "token"),
        auth="token",
    )


def session_of(pid: int) -> set[int]:
    found = set()
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == pid and process.status() != psutil.STATUS_ZOMBIE:
                found.add(process.pid)
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return found


def test_all_of_a_stubborn_tree_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head, "_TERM_SECONDS", 0.3)
    (tmp_path / "ray").mkdir()
    (tmp_path / "token").touch()
    with (
        subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as bystander,
        subprocess.Popen(
            [sys.executable, "-c", STUBBORN], stdout=subprocess.PIPE, text=True, start_new_session=True
        ) as leader,
    ):
        assert leader.stdout is not None
        assert leader.stdout.readline() == "ready\n"
        members = session_of(leader.pid)
        assert len(members) == 4
        ended = stop_head(record_of(psutil.Process(leader.pid), tmp_path))
        assert ended == 4
        assert session_of(leader.pid) == set()
        assert not (tmp_path / "ray").exists()
        assert not (tmp_path / "token").exists()
        assert bystander.poll() is None
        bystander.kill()


def test_a_reused_process_id_is_left_alone(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True
    ) as somebody:
        record = record_of(psutil.Process(somebody.pid), tmp_path)
        older = ClusterRecord(
            address=record.address,
            namespace=record.namespace,
            host=record.host,
            since=0.0,
            pid=somebody.pid,
            pid_started=(record.pid_started or 0.0) - 3600,
        )
        assert stop_head(older) == 0
        assert somebody.poll() is None
        somebody.kill()
