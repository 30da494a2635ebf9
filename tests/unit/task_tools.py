"""Tools that tests run in processes of their own, which import them from here."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Generator
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from retinue import TaskContext, tool


class Point(BaseModel):
    x: int
    y: int = 0


@tool(run_in="task")
def describe(point: Point, ctx: TaskContext) -> dict[str, Any]:
    """Tells where it runs, for whom, and with what."""
    sys.stdout.flush()
    return {
        "pid": os.getpid(),
        "main": threading.current_thread() is threading.main_thread(),
        "user": ctx.identity.user_id,
        "call": ctx.call_id,
        "cancelled": ctx.cancelled,
        "waited": ctx.wait(0.001),
        "point": [point.x, point.y],
        "argv": sys.argv[1:],
    }


@tool(run_in="task")
async def describe_async(ctx: TaskContext) -> str:
    """The same in a coroutine."""
    await asyncio.sleep(0)
    return f"{os.getpid()} {ctx.call_id}"


@tool(run_in="task")
def counts(to: int) -> Generator[int, None, str]:
    """Reports how far it is."""
    yield from range(to)
    return "counted"


@tool(run_in="task")
async def counts_async(to: int) -> AsyncIterator[int]:
    """The same in a coroutine, with nothing to say at the end."""
    for number in range(to):
        await asyncio.sleep(0)
        yield number


@tool(run_in="task")
def halfway(gate: str) -> Generator[str, None, str]:
    """Says something, then waits for a file."""
    yield "half done"
    while not Path(gate).exists():
        time.sleep(0.01)
    return "done"


@tool(run_in="task")
def misbehaves(how: str) -> Any:
    """Ends in an unusual way."""
    match how:
        case "raise":
            raise ValueError("bad \ud800")
        case "exit":
            sys.exit(3)
        case "vanish":
            os._exit(3)
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "surrogate":
            return "\ud800"
        case "unpicklable":
            return threading.Lock()
        case "bytes":
            return b"\x00\xff"
        case "cancelled":
            raise asyncio.CancelledError
        case "stop":
            return next(iter(()))
        case "prints":
            sys.stdout.buffer.write(b"\x00" * 100)
            return "printed"
        case "thread":
            threading.Thread(target=time.sleep, args=(100,)).start()
            return "left a thread"
        case "fork":
            multiprocessing.get_context("fork").Process(target=time.sleep, args=(100,)).start()
            os._exit(0)
    return how


def _beat(path: str, ends: Any) -> str:
    with Path(path).open("a") as log:
        try:
            while not ends():
                log.write("beat\n")
                log.flush()
                time.sleep(0.01)
            time.sleep(0.3)
            log.write("left\n")
        finally:
            log.write("cleaned\n")
    return "left"


@tool(run_in="task")
def beats(path: str) -> str:
    """Writes to a file until it is interrupted."""
    return _beat(path, lambda: False)


@tool(run_in="task")
def beats_and_looks(path: str, ctx: TaskContext) -> str:
    """Writes to a file until it is told to leave."""
    return _beat(path, lambda: ctx.cancelled)


@tool(run_in="task")
def beats_and_ignores(path: str, ctx: TaskContext) -> str:
    """Writes to a file, whatever happens."""
    return _beat(path, lambda: False)


@tool(run_in="task")
async def beats_async(path: str, ctx: TaskContext) -> str:
    """Writes to a file until it is cancelled, and cleans up."""
    with Path(path).open("a") as log:
        try:
            while True:
                log.write("beat\n")
                log.flush()
                await asyncio.sleep(0.01)
        finally:
            await asyncio.sleep(0.1)
            log.write(f"cleaned {ctx.cancelled}\n")


@tool(run_in="task")
def beats_and_yields(path: str) -> Generator[int, None, None]:
    """Writes to a file between progress, until it is closed."""
    with Path(path).open("a") as log:
        try:
            for number in range(1_000_000):
                log.write("beat\n")
                log.flush()
                time.sleep(0.01)
                yield number
        finally:
            log.write("cleaned\n")


@tool(run_in="task")
def blocks(path: str) -> None:
    """Is in a call of the system, which only a signal interrupts."""
    Path(path).write_text("beat\n")
    try:
        time.sleep(1000)
    finally:
        Path(path).write_text("beat\ncleaned\n")


@tool(run_in="task")
def starts_another(path: str, ctx: TaskContext) -> None:
    """Starts a process, and does not care about it."""
    program = f"import time\nwhile True:\n open({path!r}, 'a').write('beat\\n')\n time.sleep(0.01)"
    with contextlib.suppress(KeyboardInterrupt):
        subprocess.run([sys.executable, "-c", program])


@tool(run_in="task", timeout=0.5)
def beats_too_long(path: str, ctx: TaskContext) -> str:
    """Writes to a file, whatever happens, but not for long."""
    return _beat(path, lambda: False)
