"""Tasks of the in-process backend: each call in a new process of this machine, which can be killed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

from retinue.tool_output import ToolOutput
from retinue.tool_tasks import (
    CANCEL_GRACE,
    RunningTask,
    TaskFailed,
    TaskOrder,
    TaskOutcome,
    TaskProgress,
    decode_message,
)
from retinue.tool_worker import CANCEL, LENGTH

_PROGRAM = (
    "import sys; descriptor, sys.path[:], sys.argv[1:] = int(sys.argv[1]), sys.argv[2:], []; "
    "from retinue.tool_worker import serve; serve(descriptor)"
)
"""It imports from where this process does, and looks to the tool like an interpreter without a script."""


class LocalTasks:
    """The :class:`TaskRunner` without a cluster. The resources that tools ask for are ignored."""

    def start(self, order: TaskOrder, progress: Callable[[Any], None]) -> RunningTask:
        return LocalTask(order, progress)


class LocalTask:
    """One call and the process that is made for it. Raises ``OSError`` when there can be none."""

    def __init__(self, order: TaskOrder, progress: Callable[[Any], None]) -> None:
        self._progress = progress
        ours, theirs = socket.socketpair()
        with contextlib.ExitStack() as undo, theirs:
            undo.callback(ours.close)
            self.process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, str(theirs.fileno()), *sys.path],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
            undo.pop_all()
        self._exited = _exit_of(self.process)
        self._writer: asyncio.StreamWriter | None = None
        """Set once the order was sent."""
        self._running = asyncio.ensure_future(self._run(ours, order))

    async def outcome(self) -> TaskOutcome:
        return await asyncio.shield(self._running)

    async def end(self, grace: float) -> None:
        if self._writer is None:
            self._kill()
        else:
            _send(self._writer, CANCEL)
            await asyncio.wait([self._running], timeout=grace)
            self._kill()
        await asyncio.wait([self._running])

    async def _run(self, ours: socket.socket, order: TaskOrder) -> TaskOutcome:
        """What the call gave; the process is gone when this ends."""
        reading: asyncio.Task[TaskOutcome | None] | None = None
        try:
            reader, self._writer = await asyncio.open_connection(sock=ours)
            _send(self._writer, order.data)
            reading = asyncio.ensure_future(self._read(reader))
            both: list[asyncio.Future[Any]] = [reading, self._exited]
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            # Either may hold up the other for ever: a thread that the tool left, a fork that has the socket.
            await asyncio.wait(both, timeout=CANCEL_GRACE)
        finally:
            self._kill()
            await asyncio.wait([self._exited])
            if reading is not None:
                reading.cancel()
            if self._writer is not None:
                self._writer.close()
        if reading.done() and (outcome := reading.result()) is not None:
            return outcome
        return TaskFailed(f"the tool's process ended without a result: {_said(self._exited.result())}")

    async def _read(self, reader: asyncio.StreamReader) -> TaskOutcome | None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                (size,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
                message = decode_message(await reader.readexactly(size))
                if isinstance(message, ToolOutput | TaskFailed):
                    return message
                assert isinstance(message, TaskProgress)
                self._progress(message.data)
        return None

    def _kill(self) -> None:
        """Kill the process and what it started; nothing once it has ended."""
        if not self._exited.done():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)


def _send(writer: asyncio.StreamWriter, message: bytes) -> None:
    with contextlib.suppress(ConnectionError):
        writer.write(LENGTH.pack(len(message)) + message)


def _exit_of(process: subprocess.Popen[bytes]) -> asyncio.Future[int]:
    """Done with the exit code when the process has ended.

    Not by asyncio's own means, which do not bear to be cancelled while they start a process. The process is
    reaped on the loop, so that nobody there kills another one with its number.
    """
    loop = asyncio.get_running_loop()
    exited: asyncio.Future[int] = loop.create_future()

    def wait() -> None:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        with contextlib.suppress(RuntimeError):  # the loop was closed
            loop.call_soon_threadsafe(lambda: exited.set_result(process.wait()))

    threading.Thread(target=wait, name=f"retinue-wait-{process.pid}", daemon=True).start()
    return exited


def _said(code: int) -> str:
    if code >= 0:
        return f"it exited with status {code}"
    return f"it was ended by {signal.Signals(-code).name}"
