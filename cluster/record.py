"""The standing cluster that ``retinue up`` left behind: ``cluster.json`` under RETINUE_HOME."""

from __future__ import annotations

import json
import os
import socket
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from retinue.cluster.authentication import MODE, TOKEN, TOKEN_PATH
from retinue.errors import ClusterUnreachable
from retinue.storage.opening import home_folder

SCHEMA = 1
_FILE = "cluster.json"
_SAME_START = 1.0
"""Seconds by which two readings of one process's start time may differ."""


@dataclass(frozen=True, kw_only=True)
class ClusterRecord:
    """What a later command must know of the cluster that stands."""

    address: str
    """``host:port`` of the head."""
    namespace: str
    """Ray namespace of the runtime's actors."""
    host: str
    """The machine that wrote this: processes are looked for only there."""
    since: float
    """When it came up, in epoch seconds."""
    pid: int | None = None
    """The head's process, where ``retinue up`` started it; ``None`` where it attached."""
    pid_started: float | None = None
    """Start time of that process, in epoch seconds: a pid alone may be somebody else's by now."""
    token_path: str | None = None
    """The file that has the token, where we made one."""
    auth: str = "disabled"
    """``token`` or ``disabled``."""
    temp_dir: str | None = None
    """Ray's folder of sockets and logs, where we made it."""
    log: str | None = None
    """What the head's process printed."""

    @property
    def started_here(self) -> bool:
        """Whether ``retinue up`` started the cluster, and so may stop it."""
        return self.pid is not None

    def process(self) -> psutil.Process | None:
        """The head's process, if it is ours and lives."""
        if self.pid is None or self.host != socket.gethostname():
            return None
        try:
            process = psutil.Process(self.pid)
            same = abs(process.create_time() - (self.pid_started or 0.0)) < _SAME_START
            return process if same and process.status() != psutil.STATUS_ZOMBIE else None
        except psutil.Error:
            return None

    def stands(self) -> bool:
        """Whether there is reason to expect the cluster: its process lives, or it is not ours to know."""
        if self.host != socket.gethostname():
            return False
        return not self.started_here or self.process() is not None

    def environment(self) -> dict[str, str | None]:
        """The variables with which Ray lets a client in; ``None`` removes one."""
        if self.auth != "token":
            return {MODE: "disabled"} if self.started_here else {}
        if self.token_path is None:
            return {MODE: "token"}
        return {MODE: "token", TOKEN_PATH: self.token_path, TOKEN: None}


def record_path() -> Path:
    """Where the record lies."""
    return home_folder() / _FILE


def read_record() -> ClusterRecord | None:
    """The record, or ``None`` where there is none.

    Raises:
        ClusterUnreachable: it cannot be read, or a newer Retinue wrote it.
    """
    path = record_path()
    try:
        values: Any = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise _unreadable(path, str(error)) from None
    if not isinstance(values, dict):
        raise _unreadable(path, "it is not a JSON object")
    schema = values.pop("schema", None)
    if schema != SCHEMA:
        raise _unreadable(path, f"it has schema {schema!r}, and this Retinue knows {SCHEMA}")
    try:
        return ClusterRecord(**values)
    except TypeError as error:
        raise _unreadable(path, str(error)) from None


def write_record(record: ClusterRecord) -> None:
    """Put the record in place, whole or not at all."""
    path = record_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(prefix=_FILE, dir=path.parent)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        json.dump({"schema": SCHEMA, **asdict(record)}, file, indent=2)
        file.write("\n")
    Path(name).replace(path)


def remove_record() -> None:
    """Forget the cluster."""
    record_path().unlink(missing_ok=True)


def _unreadable(path: Path, why: str) -> ClusterUnreachable:
    return ClusterUnreachable(
        f"{path}, the record of the standing cluster, cannot be used: {why}; if no cluster is up, remove it"
    )
