"""A tool's call inside the process that was given to it: :func:`perform` on a cluster, :func:`serve` here.

The call runs in the main thread, and SIGINT says that nobody wants its result any more. Ray sends it when a
task is cancelled, and :func:`serve` when the host says so.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import pickle
import signal
import socket
import struct
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from types import FrameType
from typing import Any, Self, TypeVar

from retinue.current_work import trace_in_environment, working
from retinue.logs import configure_process
from retinue.messages import escape_surrogates
from retinue.results import error_text
from retinue.tool_context import CancelToken, TaskContext
from retinue.tool_output import ToolOutput, ToolProblem
from retinue.tool_progress import INTERVAL, progress_data
from retinue.tool_tasks import (
    TaskFailed,
    TaskMessage,
    TaskOutcome,
    TaskProgress,
    encode_message,
)
from retinue.tools import Tool

T = TypeVar("T")

BURST = 20
"""Values that are reported at once, however fast they come; then one in :data:`INTERVAL` seconds."""

LENGTH = struct.Struct(">Q")
"""What precedes every message between :func:`serve` and its host: its length."""
CANCEL = b"cancel"
"""The one message that follows the order."""


def perform(data: bytes, *, cancelled: Callable[[], bool] = lambda: False) -> Iterator[bytes]:
    """Carry out an order, in the main thread of a process that has nothing else to do.

    Args:
        data: of a :class:`TaskOrder`.
        cancelled: whether SIGINT came already, before this could take it.

    Yields:
        Encoded :class:`TaskProgress`, and at last a :class:`ToolOutput` or a :class:`TaskFailed`.
    """
    try:
        # Code, from whoever started this process; nothing that was stored or came over HTTP.
        tool, arguments, identity, call_id, around = pickle.loads(data)  # noqa: S301
    except Exception as error:
        why = f"the tool cannot be loaded in its process: {_said(error)}. Modules that it imports must be"
        yield encode_message(TaskFailed(f"{why} installed there"))
        return
    configure_process(around.logs)
    with (
        working(around.work, around.trace),
        trace_in_environment(around.trace),
        Interrupts(raises=not tool.takes_context) as interrupts,
    ):
        if cancelled():
            interrupts.interrupt()
        if tool.takes_context:
            arguments = {**arguments, "ctx": TaskContext(identity, call_id, interrupts.token)}
        call = _Call(tool, arguments, interrupts)
        limit = _Limit()
        while True:
            message = call.step()
            if isinstance(message, TaskProgress):
                if limit.passes(message):
                    yield encode_message(message)
                continue
            if limit.held is not None:
                yield encode_message(limit.held)
            yield encode_message(message)
            return


class Interrupts:
    """What SIGINT does while a call runs: it sets the call's token, and interrupts what cannot look at it.

    An async function is cancelled. A sync one without ``ctx`` gets a ``KeyboardInterrupt``, once, so that its
    ``finally`` clauses can run; one with ``ctx`` is expected to look.
    """

    def __init__(self, *, raises: bool) -> None:
        self.token = CancelToken()
        self._raises = raises
        self._inside = False
        """Code of the application runs just now."""
        self._task: asyncio.Task[Any] | None = None
        self._before: Any = None

    def __enter__(self) -> Self:
        self._before = signal.getsignal(signal.SIGINT)
        signal.signal(signal.SIGINT, self.interrupt)
        return self

    def __exit__(self, *error: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Code of the application runs in here."""
        self._inside = True
        try:
            yield
        finally:
            self._inside = False

    async def cancellable(self, work: Awaitable[T]) -> T:
        """Await ``work``; it is cancelled once the token is set."""
        loop = asyncio.get_running_loop()
        self._task = task = asyncio.current_task()
        assert task is not None
        # A handler of the loop's own wakes the loop up, which a plain one does not.
        loop.add_signal_handler(signal.SIGINT, self.interrupt)
        if self.token.is_set:
            task.cancel()
        try:
            return await work
        finally:
            self._task = None
            loop.remove_signal_handler(signal.SIGINT)
            signal.signal(signal.SIGINT, self.interrupt)

    def interrupt(self, number: int = 0, frame: FrameType | None = None) -> None:
        """The signal handler; a second signal changes nothing."""
        if self.token.is_set:
            return
        self.token.set("nobody wants the result of this call any more")
        if self._task is not None:
            self._task.cancel()
        elif self._raises and self._inside:
            raise KeyboardInterrupt(self.token.why)


class _Call:
    """One call, stepped from one yielded value to the next."""

    def __init__(self, tool: Tool, arguments: dict[str, Any], interrupts: Interrupts) -> None:
        self._tool = tool
        self._arguments = arguments
        self._interrupts = interrupts
        self._runner = asyncio.Runner()
        self._generator: Any = None
        self._last: Any = None

    def step(self) -> TaskMessage:
        """Run to the next value that is yielded, or to the end. Whatever the tool raises is its outcome."""
        try:
            with self._interrupts.inside():
                message = self._step()
        except ToolProblem as problem:
            message = TaskFailed(str(problem))
        except asyncio.CancelledError:
            message = TaskFailed("the tool was cancelled from inside")
        except BaseException as error:
            message = TaskFailed(_said(error))
        if not isinstance(message, TaskProgress):
            self._runner.close()
        return message

    def _step(self) -> TaskMessage:
        if self._interrupts.token.is_set:
            self._close()
            return TaskFailed(self._interrupts.token.why)
        if self._generator is None:
            value = self._settled(self._tool.function(**self._arguments))
            if not (inspect.isgenerator(value) or inspect.isasyncgen(value)):
                return self._output(value)
            self._generator = value
        generator = self._generator
        try:
            if inspect.isasyncgen(generator):
                value = self._settled(anext(generator))
            else:
                value = next(generator)
        except StopAsyncIteration:
            return self._output(self._last)
        except StopIteration as end:
            return self._output(self._last if end.value is None else end.value)
        self._last = value
        return TaskProgress(progress_data(value))

    def _settled(self, value: Any) -> Any:
        """``value``, awaited if it can be."""
        if not inspect.isawaitable(value):
            return value
        return self._runner.run(self._interrupts.cancellable(value))

    def _close(self) -> None:
        if inspect.isasyncgen(self._generator):
            self._runner.run(_awaited(self._generator.aclose()))
        elif self._generator is not None:
            self._generator.close()

    def _output(self, value: Any) -> TaskOutcome:
        return ToolOutput.of(value, self._tool.name)


def _said(error: BaseException) -> str:
    return escape_surrogates(f"{type(error).__name__}: {error_text(error)}")


async def _awaited(work: Awaitable[T]) -> T:
    return await work


class _Limit:
    """Holds values back that come too fast; the newest is kept."""

    def __init__(self) -> None:
        self.held: TaskProgress | None = None
        self._credit = float(BURST)
        self._since = time.monotonic()

    def passes(self, message: TaskProgress) -> bool:
        now = time.monotonic()
        self._credit = min(self._credit + (now - self._since) / INTERVAL, BURST)
        self._since = now
        self.held = message if self._credit < 1 else None
        if self.held is None:
            self._credit -= 1
        return self.held is None


# --- a process of this machine ----------------------------------------------------------------------------


def serve(descriptor: int) -> None:
    """Carry out the one order that comes through a socket, in a process made for it.

    The process ends, with all that it started, as soon as the host's side of the socket is closed.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    host = socket.socket(fileno=descriptor)  # open until the process has ended, which the host waits for
    data = _receive(host)
    if data is None:
        return
    cancelled = threading.Event()
    threading.Thread(target=_listen, args=(host, cancelled), daemon=True).start()
    for message in perform(data, cancelled=cancelled.is_set):
        host.sendall(LENGTH.pack(len(message)) + message)


def _listen(host: socket.socket, cancelled: threading.Event) -> None:
    while (message := _receive(host)) is not None:
        if message == CANCEL:
            cancelled.set()
            main = threading.main_thread().ident
            assert main is not None
            signal.pthread_kill(main, signal.SIGINT)  # to that thread, so that it leaves a call that blocks
    os.killpg(0, signal.SIGKILL)


def _receive(host: socket.socket) -> bytes | None:
    """The next message; ``None`` when the host is gone."""
    header = _read(host, LENGTH.size)
    return None if header is None else _read(host, LENGTH.unpack(header)[0])


def _read(host: socket.socket, size: int) -> bytes | None:
    data = bytearray()
    while len(data) < size:
        try:
            piece = host.recv(min(size - len(data), 1 << 20))
        except OSError:
            return None
        if not piece:
            return None
        data += piece
    return bytes(data)
