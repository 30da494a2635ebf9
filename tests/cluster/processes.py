"""Real processes for tests: programs of their own, heads of their own, and waiting for their end."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from retinue.cluster.head import start_head, stop_head
from retinue.cluster.record import ClusterRecord

LIMIT = 60.0
"""Seconds after which a process counts as hanging."""


def clean_environment(home: Path, extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's environment, with a home of the test's own and nothing that leads to another cluster."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "RETINUE_"))}
    return {**kept, "HOME": str(home), "RETINUE_HOME": str(home / "retinue"), **(extra or {})}


@dataclass(frozen=True)
class Done:
    """A program that has ended."""

    status: int
    output: str
    errors: str


def run_program(source: str, environment: Mapping[str, str], *, limit: float = LIMIT) -> Done:
    """Run Python source in a process of its own."""
    return _finish(start_program(source, environment), limit)


def run_retinue(*arguments: str, environment: Mapping[str, str], limit: float = LIMIT) -> Done:
    """Run the command line."""
    return _finish(start_retinue(*arguments, environment=environment), limit)


def start_retinue(*arguments: str, environment: Mapping[str, str]) -> subprocess.Popen[str]:
    """Start the command line."""
    return _start([sys.executable, "-m", "retinue", *arguments], environment)


def start_program(source: str, environment: Mapping[str, str]) -> subprocess.Popen[str]:
    """Start Python source in a process of its own."""
    return _start([sys.executable, "-c", textwrap.dedent(source)], environment)


def _start(command: list[str], environment: Mapping[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command,
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _finish(process: subprocess.Popen[str], limit: float) -> Done:
    with process:
        try:
            output, errors = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            process.kill()
            output, errors = process.communicate()
            raise AssertionError(f"still running after {limit} s:\n{output}\n{errors}") from None
    return Done(process.returncode, output, errors)


def wait_until_gone(pids: Iterable[int], *, limit: float = 20.0) -> list[int]:
    """Wait for the end of processes; those that are still there after that time."""
    deadline = time.monotonic() + limit
    left = list(pids)
    while left and time.monotonic() < deadline:
        left = [pid for pid in left if _is_running(pid)]
        time.sleep(0.05)
    return left


def _is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@contextmanager
def running_head(environment: Mapping[str, str]) -> Iterator[ClusterRecord]:
    """A real ``ray start --head``, started with this environment."""
    before = dict(os.environ)
    os.environ.clear()
    os.environ.update(environment)
    try:
        record = start_head(namespace="retinue", num_cpus=1)
    finally:
        os.environ.clear()
        os.environ.update(before)
    try:
        yield record
    finally:
        stop_head(record)
