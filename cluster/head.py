"""The head of a one-machine cluster: a ``ray start`` in the background, known by its process id.

Never ``ray stop``: on a shared machine that ends everybody's Ray.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

import psutil

from retinue.cluster.authentication import MODE, TOKEN, TOKEN_PATH, new_token, read_token, write_token
from retinue.cluster.record import ClusterRecord
from retinue.errors import ClusterUnreachable
from retinue.storage.opening import home_folder

START_SECONDS = 60.0
"""How long a head may take to come up; 3 s on an idle machine."""
_TERM_SECONDS = 10.0
_KILL_SECONDS = 10.0
_POLL = 0.05


def start_head(*, namespace: str, num_cpus: int | None = None) -> ClusterRecord:
    """Start a head and wait until it takes clients.

    Tokens are demanded of clients unless ``RAY_AUTH_MODE`` says otherwise: a head listens on the network.
    The token is the one that the environment has, else a new one; it lies in a file of this user's.

    Raises:
        ClusterUnreachable: it ended, or did not come up in time; the message has the last line it printed.
    """
    home = home_folder()
    home.mkdir(parents=True, exist_ok=True)
    log = home / "logs" / f"ray-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{os.getpid()}.log"
    log.parent.mkdir(exist_ok=True)
    # Ray puts sockets there, whose paths may have 107 characters: RETINUE_HOME can be too deep. A folder of
    # its own also keeps this head's address out of the file that a bare ray.init() elsewhere looks into.
    temp_dir = Path(tempfile.mkdtemp(prefix="retinue-ray-", dir="/tmp"))
    environment, token_path = _environment(home)
    try:
        process = _start_detached(_command(temp_dir, num_cpus), environment=environment, folder=home, log=log)
        address = _wait_for_address(process, temp_dir / "ray_current_cluster", log)
    except BaseException:
        shutil.rmtree(temp_dir, ignore_errors=True)
        raise
    return ClusterRecord(
        address=address,
        namespace=namespace,
        host=socket.gethostname(),
        since=time.time(),
        pid=process.pid,
        pid_started=process.create_time(),
        token_path=str(token_path) if token_path else None,
        auth="token" if token_path else "disabled",
        temp_dir=str(temp_dir),
        log=str(log),
    )


def stop_head(record: ClusterRecord) -> int:
    """End the head and everything that it started, and wait until all of it is gone.

    Returns:
        How many processes ended.
    """
    process = record.process()
    ended = _end_orphans(record) if process is None else _end_tree(process)
    if record.temp_dir is not None:
        shutil.rmtree(record.temp_dir, ignore_errors=True)
    if record.token_path is not None:
        Path(record.token_path).unlink(missing_ok=True)
    return ended


def _environment(home: Path) -> tuple[dict[str, str], Path | None]:
    environment = {
        **os.environ,
        "RAY_USAGE_STATS_ENABLED": "0",
        # On SIGTERM a head waits up to 30 s for actors to end by themselves; ours have been released by then.
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
    }
    environment.pop("RAY_ADDRESS", None)
    if environment.get(MODE, "token").lower() != "token":
        return environment, None
    token_path = home / "cluster.token"
    write_token(token_path, read_token(environment) or new_token())
    environment.pop(TOKEN, None)
    environment |= {MODE: "token", TOKEN_PATH: str(token_path)}
    return environment, token_path


def _command(temp_dir: Path, num_cpus: int | None) -> list[str]:
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--port=0"]
    command += ["--include-dashboard=false", "--disable-usage-stats", "--log-style=record"]
    command += [f"--temp-dir={temp_dir}", "--dashboard-agent-listen-port=0"]
    if find_spec("grpc") is not None:
        # Where Ray Client can be served it is, on 10001, and somebody else may have that port. (Without grpc,
        # naming a port is an error.)
        command.append(f"--ray-client-server-port={_free_port()}")
    if num_cpus is not None:
        command.append(f"--num-cpus={num_cpus}")
    return command


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("", 0))
        return int(free.getsockname()[1])


def _start_detached(
    command: list[str], *, environment: dict[str, str], folder: Path, log: Path
) -> psutil.Process:
    """Start it in a session of its own and as nobody's child: it outlives the terminal, its Ctrl-C and us.

    (As our child it would stay in the process table after its end until we look, and a ``retinue down``
    elsewhere that waits for its end would wait for us.)
    """
    launched = subprocess.run(
        [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(log), *command],
        env=environment,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return psutil.Process(int(launched.stdout))


_LAUNCHER = """
import subprocess, sys
with open(sys.argv[1], "wb") as log:
    process = subprocess.Popen(
        sys.argv[2:], stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
    )
print(process.pid)
process.returncode = 0
"""


def _wait_for_address(process: psutil.Process, file: Path, log: Path) -> str:
    """The address, which ``ray start`` writes as the last thing it does."""
    deadline = time.monotonic() + START_SECONDS
    try:
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                if address := file.read_text("utf-8").strip():
                    return address
            if _ended(process):
                raise ClusterUnreachable(f"the head of a new cluster ended at once: {_last_line(log)}")
            time.sleep(_POLL)
        raise ClusterUnreachable(
            f"the head of a new cluster was not up in {START_SECONDS:.0f} s: {_last_line(log)}"
        )
    except BaseException:
        _end_tree(process)
        raise


def _last_line(log: Path) -> str:
    lines = log.read_text("utf-8", errors="replace").splitlines()
    last = next((line.strip() for line in reversed(lines) if line.strip()), "it printed nothing")
    return f"{last} (all that it printed is in {log})"


def _end_tree(head: psutil.Process) -> int:
    """SIGTERM to the head, which ends its own; SIGKILL to what is left of them after a while."""
    tree = _members(head)
    with contextlib.suppress(psutil.NoSuchProcess):
        head.terminate()
    if _wait([head], _TERM_SECONDS):
        tree |= _members(head)
        _kill([head])
    left = _wait(tree, _TERM_SECONDS)
    _kill(left)
    left = _wait(left, _KILL_SECONDS)
    if left:
        pids = ", ".join(str(each.pid) for each in left)
        raise ClusterUnreachable(f"these processes of the cluster do not end, not even by SIGKILL: {pids}")
    return len(tree)


def _members(head: psutil.Process) -> set[psutil.Process]:
    """The head and all that it started: its session, in which they stay when they lose their parents."""
    members = {head}
    for process in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if os.getsid(process.pid) == head.pid:
                members.add(process)
    with contextlib.suppress(psutil.Error):
        members.update(head.children(recursive=True))
    return members


def _end_orphans(record: ClusterRecord) -> int:
    """End what outlives a head that was killed, as Ray's agents do by a minute: they are in its session."""
    orphans = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ProcessLookupError, PermissionError):
            if (
                os.getsid(process.pid) == record.pid
                and process.create_time() >= (record.pid_started or 0.0)
                and process.name().startswith("ray::")
            ):
                orphans.append(process)
    _kill(orphans)
    _wait(orphans, _KILL_SECONDS)
    return len(orphans)


def _wait(processes: Iterable[psutil.Process], seconds: float) -> list[psutil.Process]:
    """Wait for their end; those that are still there after that time."""
    deadline = time.monotonic() + seconds
    left = [process for process in processes if not _ended(process)]
    while left and time.monotonic() < deadline:
        time.sleep(_POLL)
        left = [process for process in left if not _ended(process)]
    return left


def _ended(process: psutil.Process) -> bool:
    """Whether it does nothing any more: it may still be listed, where its parent does not look."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _kill(processes: Iterable[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
