"""Which process holds a lease, and whether it is certainly gone.

A process is told apart by the boot of its machine, its process-id namespace, its pid and its start time.
Only a process of the same boot and namespace can be looked up here: about any other the answer is always
"perhaps alive", and the lease rule then waits for its renewals (see :mod:`retinue.storage.leases`).
"""

from __future__ import annotations

import os
import uuid
from functools import lru_cache
from pathlib import Path

import psutil

from retinue.store import Holder

START_TOLERANCE = 2.0
"""Seconds by which two readings of one start time may differ: the kernel rounds the boot time, which psutil
adds, to whole seconds. A pid is not reused that fast, and a mistake here only means waiting."""


@lru_cache(maxsize=1)
def boot_id() -> str:
    """Name of this boot of the machine and of this process-id namespace.

    Where the kernel does not say (no ``/proc``), a name that no other process has: nobody then takes this
    process for dead because of a pid that means something else.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        namespace = Path("/proc/self/ns/pid").stat().st_ino
    except OSError:
        return f"unknown:{uuid.uuid4()}"
    return f"{boot}:{namespace}"


def this_process(holder_id: str, cluster_id: str) -> Holder:
    """The holder that this process is.

    Args:
        holder_id: unique per activation host, and never used again once fenced.
        cluster_id: the cluster that the host belongs to.
    """
    return Holder(
        holder_id=holder_id,
        cluster_id=cluster_id,
        boot_id=boot_id(),
        pid=os.getpid(),
        started_at=_started_at(psutil.Process()),
    )


def provably_gone(holder: Holder) -> bool:
    """Whether the holder's process has certainly ended; ``False`` whenever that cannot be known.

    True when this is the same boot and namespace, and no process has the holder's pid and start time. A
    zombie counts as gone: it runs no more, it only was not waited for.
    """
    if holder.boot_id != boot_id():
        return False
    if not _pid_exists(holder.pid):
        return True
    try:
        process = psutil.Process(holder.pid)
        if abs(_started_at(process) - holder.started_at) > START_TOLERANCE:
            return True
        return process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.AccessDenied:
        return False
    except psutil.NoSuchProcess:
        # It ended just now, or /proc hides the processes of other users: the kernel knows which.
        return not _pid_exists(holder.pid)


def _pid_exists(pid: int) -> bool:
    """Whether the kernel knows this pid. (psutil asks /proc too, which may be mounted with ``hidepid``.)"""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def _started_at(process: psutil.Process) -> float:
    """Seconds after boot at which the process started: unlike the time of day, no clock change moves it."""
    return process.create_time() - psutil.boot_time()
