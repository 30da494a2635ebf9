"""Sweeps up after a local Ray when the process that started it is killed. A script: it outlives that process.

When a process ends without an orderly shutdown, Linux ends the parts of Ray that it started, and workers
notice within seconds. Ray's two agents do not: they first try for a minute to tell a head that is gone.

Usage: ``python sweep.py PID:STARTED ...`` for each agent, STARTED as psutil tells it. Standard input is a
pipe whose other end only the owner has.
"""

from __future__ import annotations

import contextlib
import os
import sys

import psutil


def main() -> None:
    os.chdir("/")
    sys.stdin.buffer.read()  # ends when the owner does
    for agent in sys.argv[1:]:
        pid, _, started = agent.partition(":")
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(int(pid))
            if str(process.create_time()) == started:
                process.kill()


if __name__ == "__main__":
    main()
