"""The client's own event loop: one background thread for all runtimes of a process.

Handles can be awaited from any loop, or not at all, because their work happens here; nobody's loop is
patched, and a notebook's top-level ``await`` works like a script's blocking call.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures.thread
import contextlib
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from retinue.workers import LoopThread

T = TypeVar("T")

EXIT_PATIENCE = 10.0
"""Seconds that the end of the process waits for what must still be sent or released."""

_lock = threading.Lock()
_thread: LoopThread | None = None
_unfinished: set[concurrent.futures.Future[Any]] = set()
_at_exit: list[Callable[[], Coroutine[Any, Any, None]]] = []


def client_loop() -> LoopThread:
    """The background loop, started on first use."""
    global _thread
    with _lock:
        if _thread is None:
            _thread = LoopThread("retinue-client")
            # Before the pools of concurrent.futures end, which is before atexit: stores and tools use them.
            getattr(threading, "_register_atexit", atexit.register)(_exit)
        return _thread


def before_exit(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run this on the client loop when the process ends, within :data:`EXIT_PATIENCE` seconds."""
    _at_exit.append(work)


def not_before_exit(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Forget what :func:`before_exit` was given: it has been done."""
    with contextlib.suppress(ValueError):
        _at_exit.remove(work)


def finish_before_exit(work: concurrent.futures.Future[Any]) -> None:
    """Let the end of the process wait for this, within :data:`EXIT_PATIENCE` seconds."""
    _unfinished.add(work)
    work.add_done_callback(_unfinished.discard)


def on_client_loop(work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
    return client_loop().submit(work)


async def awaited(future: concurrent.futures.Future[T]) -> T:
    """Await work of the client loop from any loop; cancelling the waiting does not cancel the work."""
    return await asyncio.shield(asyncio.wrap_future(future))


def blocking(future: concurrent.futures.Future[T], timeout: float | None = None) -> T:
    """Wait for work of the client loop in a plain thread.

    Raises:
        TimeoutError: not done after ``timeout`` seconds; the work goes on.
        RuntimeError: called on the client loop itself, which would wait for ever.
    """
    if client_loop().is_current:
        raise RuntimeError("a blocking call on Retinue's own loop would never return; await it instead")
    return future.result(timeout)


def _exit() -> None:
    thread = _thread
    if thread is None:
        return
    concurrent.futures.wait(list(_unfinished), EXIT_PATIENCE)
    for work in reversed(_at_exit):
        # Whatever fails, the process is ending: leases run out by themselves.
        with contextlib.suppress(Exception):
            thread.submit(work()).result(EXIT_PATIENCE)
    thread.stop()
