"""Connecting this process to Ray: to the cluster that is there, or to one of its own."""

from __future__ import annotations

import ctypes
import logging
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import psutil

from retinue.cluster.authentication import MODE, TOKEN, Environment, new_token, token_source
from retinue.cluster.probe import Probe
from retinue.cluster.record import read_record
from retinue.errors import ClusterUnreachable

NAMESPACE = "retinue"
"""The Ray namespace of the runtime's actors, unless told otherwise."""
ADDRESS_VARIABLE = "RETINUE_ADDRESS"
_RAY_ADDRESS_VARIABLE = "RAY_ADDRESS"
LOCAL = "local"
AUTO = "auto"
_AGENT_NAMES = ("ray::DashboardA", "ray::RuntimeEnv")
"""How the names of Ray's agents begin: the system keeps 15 characters."""

Mode = Literal["ephemeral", "standing"]
"""``ephemeral``: the cluster ends with the process that started it. ``standing``: it goes on."""


@dataclass(frozen=True)
class Connection:
    """This process's connection to a Ray cluster."""

    address: str
    """``host:port`` of the head."""
    mode: Mode
    namespace: str
    """The Ray namespace of the runtime's actors."""
    started_here: bool
    """Whether this call started the cluster."""
    node_id: str
    """The Ray node that this process is attached to."""
    opened_here: bool = field(default=False, repr=False)
    """Whether this call connected the process; otherwise it was connected already."""

    def close(self) -> None:
        """Undo what this ``connect()`` did, and no more. Harmless when repeated.

        A cluster that it started ends, with every process of it; from a cluster that it attached to it
        disconnects; where Ray had been initialised before, nothing happens.
        """
        with _lock:
            if self.opened_here and _state.opened is self:
                _close()


@dataclass(frozen=True)
class _Target:
    """Where to connect, and why there."""

    address: str | None
    """``host:port``, or ``None`` for a Ray of our own."""
    hint: str = ""
    environment: Mapping[str, str | None] = field(default_factory=dict)


class _State:
    """What this process has done to itself."""

    def __init__(self) -> None:
        self.opened: Connection | None = None
        self.environment = Environment()
        self.sweeper: subprocess.Popen[bytes] | None = None


_state = _State()
_lock = threading.RLock()


def connect(
    address: str | None = None,
    *,
    namespace: str = NAMESPACE,
    start: bool = True,
    log_to_driver: bool = False,
    ray_options: Mapping[str, Any] | None = None,
) -> Connection:
    """Connect this process to Ray. Idempotent: what is connected already is used as it is.

    In this order: a Ray that this process has initialised; ``address``; the variables ``RETINUE_ADDRESS`` and
    ``RAY_ADDRESS``; the cluster that ``retinue up`` left, if it lives; else a local Ray that lives as long as
    this process. Signal handlers stay as they are, and the calling thread may end: Ray is started from a
    thread that stays.

    Args:
        address: ``host:port`` of a cluster's head; ``"auto"`` for a cluster on this machine (that of
            ``retinue up``, else the last of ``ray start``); ``"local"`` for a Ray of this process's own.
        namespace: the Ray namespace of the runtime's actors.
        start: whether to start a local Ray where no cluster is found.
        log_to_driver: whether to print what workers print.
        ray_options: further arguments of ``ray.init``, such as ``num_cpus`` for a local Ray.

    Raises:
        ClusterUnreachable: nothing answers at the address, it refuses the token, it has another version, this
            process is connected to another cluster already, or (with ``start=False``) there is no cluster.
    """
    with _lock:
        here = _already_connected(address, namespace)
        if here is not None:
            return here
        target = _find_target(address, start)
        options = {
            "namespace": namespace,
            "log_to_driver": log_to_driver,
            "configure_logging": False,
            **(ray_options or {}),
        }
        if target.address is None:
            _start_local(options)
        else:
            _attach(target, options)
        started = target.address is None
        connection = Connection(
            address=_gcs_address(),
            mode="ephemeral" if started else "standing",
            namespace=namespace,
            started_here=started,
            node_id=_node_id(),
            opened_here=True,
        )
        _state.opened = connection
        return connection


def _already_connected(address: str | None, namespace: str) -> Connection | None:
    import ray

    if not ray.is_initialized():
        _forget()
        return None
    current = _gcs_address()
    if address is not None and not _is_current(address, current):
        raise ClusterUnreachable(
            f"this process is connected to the Ray cluster at {current}, and Ray knows one cluster in a "
            f"process; to reach {address}, close that connection first, or use another process",
            address=address,
        )
    return Connection(
        address=current,
        mode="ephemeral" if _is_own_head() else "standing",
        namespace=namespace,
        started_here=False,
        node_id=_node_id(),
    )


def _is_current(address: str, current: str) -> bool:
    if address == AUTO:
        return True
    if address == LOCAL:
        return _is_own_head()
    return _resolved(address) == current


def _find_target(address: str | None, start: bool) -> _Target:
    """Where to connect. See :func:`connect` for the order."""
    if address is not None:
        return _named_target(address, "")
    for variable in (ADDRESS_VARIABLE, _RAY_ADDRESS_VARIABLE):
        value = os.environ.get(variable, "").strip()
        if value:
            return _named_target(value, f" ({variable})")
    standing = _standing_target()
    if standing is not None:
        return standing
    if not start:
        raise ClusterUnreachable("no cluster is up; `retinue up` starts one on this machine")
    return _Target(address=None)


def _named_target(address: str, hint: str) -> _Target:
    if address == LOCAL:
        return _Target(address=None)
    standing = _standing_target()
    if address == AUTO:
        return standing or _Target(address=_last_of_ray_start(hint), hint=hint)
    if standing is not None and standing.address is not None and standing.address == _resolved(address):
        return standing  # so that it finds its token
    return _Target(address=address, hint=hint)


def _standing_target() -> _Target | None:
    record = read_record()
    if record is None or not record.stands():
        return None
    return _Target(address=record.address, hint=" (`retinue up`)", environment=record.environment())


def _last_of_ray_start(hint: str) -> str:
    from ray._private import services

    found = services.find_bootstrap_address(None)
    if found is None:
        raise ClusterUnreachable(
            f"no cluster was found on this machine ('auto'{hint}); `retinue up` starts one", address=AUTO
        )
    return str(found)


def _attach(target: _Target, options: dict[str, Any]) -> None:
    assert target.address is not None
    _state.environment.set(target.environment)
    try:
        answer = Probe(target.address, hint=target.hint).answer()
        _state.environment.set({MODE: answer.mode})
        _init(address=answer.address, **options)
    except ClusterUnreachable:
        _forget()
        raise
    except BaseException as error:
        _forget()
        if not isinstance(error, Exception):
            raise  # interrupted
        raise ClusterUnreachable(
            f"the Ray cluster at {target.address}{target.hint} answers, but this process cannot join it: "
            f"{_first_line(error)}; it must run on a machine of that cluster (`ray start --address=...`)",
            address=target.address,
        ) from error


def _start_local(options: dict[str, Any]) -> None:
    environment: dict[str, str | None] = {MODE: os.environ.get(MODE)}  # Ray will set it: note what it was
    if os.environ.get(MODE, "token").lower() == "token" and token_source(os.environ) is None:
        # Known to this process and its children only, where Ray would write a file that everybody can read.
        environment[TOKEN] = new_token()
    _state.environment.set(environment)
    try:
        _init(address=LOCAL, include_dashboard=False, **options)
        _state.sweeper = _start_sweeper()
    except BaseException as error:
        _forget()
        if not isinstance(error, Exception):
            raise  # interrupted
        raise ClusterUnreachable(
            f"a local Ray could not be started: {_first_line(error)}; Ray's logs are under "
            f"{Path(tempfile.gettempdir()) / 'ray' / 'session_latest' / 'logs'}",
            address=LOCAL,
        ) from error


def _init(**options: Any) -> None:
    """``ray.init`` from the thread that stays, without its notes, and leaving the process's signals alone."""

    import ray

    def run() -> None:
        with _signals_kept(), _quiet("ray"):
            ray.init(**options)

    _keeper().run(run, undo=lambda: ray.shutdown(wait_for_processes=True))


def _close() -> None:
    opened = _state.opened
    _state.opened = None
    try:
        import ray

        if ray.is_initialized() and opened is not None:
            _keeper().run(lambda: ray.shutdown(wait_for_processes=opened.started_here))
    finally:
        _forget()


def _forget() -> None:
    """Nothing is open any more: put the environment back."""
    _state.opened = None
    _state.environment.restore()
    if _state.sweeper is not None:
        _state.sweeper.communicate()  # the end of its input; nothing is left to sweep, so it ends at once
        _state.sweeper = None


def _start_sweeper() -> subprocess.Popen[bytes]:
    """See :mod:`retinue.cluster.sweep`."""
    agents = [
        f"{process.pid}:{process.create_time()}"
        for raylet in psutil.Process().children()
        if raylet.name() == "raylet"
        for process in raylet.children()
        if process.name().startswith(_AGENT_NAMES)
    ]
    return subprocess.Popen(
        [sys.executable, "-P", str(Path(__file__).with_name("sweep.py")), *agents],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # signals to the owner's group are not for it
    )


# --- the thread that stays ----------------------------------------------------------------------------------


class _Keeper:
    """A thread that lives as long as the process and starts Ray.

    Linux ends a process of a local Ray when the *thread* that started it ends (Ray asks for that:
    ``PR_SET_PDEATHSIG``). Started from a thread of a pool, or from one that has done its work, all of Ray
    would be gone a moment later.
    """

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._work: queue.SimpleQueue[tuple[Callable[[], None], Future[None]]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="retinue-ray", daemon=True).start()

    def run(self, work: Callable[[], None], *, undo: Callable[[], None] | None = None) -> None:
        """Run it there, and wait.

        When the wait is interrupted (Ctrl-C), the work cannot stop half-way: it finishes, then ``undo`` runs.
        """
        done = self._put(work)
        try:
            done.result()
        except BaseException:
            if undo is not None and not done.done() and done.exception() is None:
                self._put(undo).result()
            raise

    def _put(self, work: Callable[[], None]) -> Future[None]:
        done: Future[None] = Future()
        self._work.put((work, done))
        return done

    def _run(self) -> None:
        while True:
            work, done = self._work.get()
            try:
                work()
            except BaseException as error:
                done.set_exception(error)
            else:
                done.set_result(None)


_the_keeper: _Keeper | None = None


def _keeper() -> _Keeper:
    global _the_keeper
    if _the_keeper is None or _the_keeper.pid != os.getpid():  # threads do not survive a fork
        _the_keeper = _Keeper()
    return _the_keeper


# --- what Ray does to a process on the way ------------------------------------------------------------------


@contextmanager
def _signals_kept() -> Iterator[None]:
    """Ray installs a SIGTERM handler that prints a native stack; put back the one that was there.

    It does so below Python, and outside the main thread Python may not set handlers: hence the C call.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    before = ctypes.create_string_buffer(1024)  # larger than any struct sigaction
    kept = libc.sigaction(signal.SIGTERM, None, before) == 0
    try:
        yield
    finally:
        if kept:
            libc.sigaction(signal.SIGTERM, before, None)


@contextmanager
def _quiet(name: str) -> Iterator[None]:
    logger = logging.getLogger(name)
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


# --- what Ray has no public name for ------------------------------------------------------------------------


def _gcs_address() -> str:
    import ray

    return str(ray.get_runtime_context().gcs_address)


def _node_id() -> str:
    import ray

    return str(ray.get_runtime_context().get_node_id())


def _is_own_head() -> bool:
    """Whether this process itself started the Ray that it is connected to."""
    from ray._private import worker

    node = getattr(worker, "_global_node", None)
    return bool(node is not None and node.is_head())


def _resolved(address: str) -> str:
    """The address as Ray names it: localhost is replaced by this machine's address."""
    from ray._private import services

    try:
        return str(services.canonicalize_bootstrap_address(address))
    except Exception:
        return address
