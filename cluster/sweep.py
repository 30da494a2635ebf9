"""Sweeps up after a local Ray when the process that started it is killed. A script: it outlives that process.

When a process ends without an orderly shutdown, Linux ends the parts of Ray that it started, and workers notice
within seconds. Ray's two agents do not: they first try for a minute to tell a head that is gone.

Usage: ``python sweep.py PID_OF_THE_RAYLET``, with a pipe as standard input whose other end only the owner has.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time

import psutil

_PATIENCE = 5.0
"""Seconds in which workers end by themselves."""
_POLL = 0.2
_AGENTS = ("ray::DashboardA", "ray::RuntimeEnv")
"""What the names of the agents begin with; the system cuts names off at 15 characters."""


def main() -> None:
    raylet = sys.argv[1]
    os.chdir("/")
    sys.stdin.buffer.read()  # ends when the owner does
    began = time.monotonic()
    while left := descendants(raylet):
        for process in left:
            with contextlib.suppress(psutil.Error):
                if time.monotonic() - began > _PATIENCE or process.name().startswith(_AGENTS):
                    process.kill()
        time.sleep(_POLL)


def descendants(raylet: str) -> list[psutil.Process]:
    """The processes that this raylet started: they carry its process id in their environment."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get("RAY_RAYLET_PID") == raylet:
                found.append(process)
    return found


if __name__ == "__main__":
    main()
