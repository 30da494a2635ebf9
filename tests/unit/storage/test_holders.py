"""Telling a dead process from a live one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import msgspec
import psutil
import pytest

from retinue.storage import holders
from retinue.storage.holders import provably_gone, this_process


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    """A process that waits until its input ends."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as running:
        yield running
        running.kill()


def test_a_live_process_is_not_gone(process: subprocess.Popen[bytes]) -> None:
    started_at = psutil.Process(process.pid).create_time() - psutil.boot_time()
    other = msgspec.structs.replace(this_process("h", "c"), pid=process.pid, started_at=started_at)
    assert not provably_gone(this_process("h", "c"))
    assert not provably_gone(other)
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert psutil.Process(process.pid).status() == psutil.STATUS_ZOMBIE
    assert provably_gone(other), "a zombie runs no more"
    process.wait()
    assert provably_gone(other)


def test_a_reused_pid_is_another_process() -> None:
    me = this_process("h", "c")
    assert provably_gone(msgspec.structs.replace(me, started_at=me.started_at - 60.0))


def test_nothing_is_known_of_another_machine(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    elsewhere = msgspec.structs.replace(this_process("h", "c"), pid=process.pid, boot_id="another boot")
    assert not provably_gone(elsewhere)


def test_a_clock_change_kills_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    me = this_process("h", "c")
    boot, start = psutil.boot_time(), psutil.Process().create_time()
    # The kernel derives both times of day from the clock: set that, and both readings move.
    monkeypatch.setattr(psutil, "boot_time", lambda: boot + 3600.0)
    monkeypatch.setattr(psutil.Process, "create_time", lambda _: start + 3600.0)
    assert not provably_gone(me)


def test_a_process_that_may_not_be_looked_at_is_not_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    me = this_process("h", "c")

    def hidden(pid: int) -> psutil.Process:
        raise psutil.NoSuchProcess(pid)  # what psutil says where /proc hides the processes of others

    def denied(pid: int) -> psutil.Process:
        raise psutil.AccessDenied(pid)

    for behaviour in (hidden, denied):
        monkeypatch.setattr(psutil, "Process", behaviour)
        assert not provably_gone(me)


def test_a_kernel_without_boot_id_leaves_nobody_provably_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Missing:
        def __init__(self, path: str) -> None:
            self._path = path

        def read_text(self, encoding: str) -> str:
            raise FileNotFoundError(self._path, encoding)

    monkeypatch.setattr(holders, "Path", Missing)
    holders.boot_id.cache_clear()
    try:
        unknown = holders.boot_id()
        assert unknown.startswith("unknown:")
        assert unknown == holders.boot_id()
    finally:
        holders.boot_id.cache_clear()
    monkeypatch.undo()
    assert not provably_gone(msgspec.structs.replace(this_process("h", "c"), pid=2**22, boot_id=unknown))
