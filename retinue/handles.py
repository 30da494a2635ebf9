"""Run handles: follow, cancel and await a run from a script, a notebook or another process."""

from __future__ import annotations

import asyncio
import concurrent.futures
import copy
from collections import deque
from collections.abc import AsyncIterator, Generator, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from retinue.budgets import BudgetSnapshot
from retinue.client import SessionClient, empty_budget
from retinue.errors import RetinueError
from retinue.event_log import check_cursor
from retinue.events import Event, decode_event
from retinue.ids import Identity
from retinue.loop import awaited, blocking, finish_before_exit, on_client_loop
from retinue.messages import escape_surrogates
from retinue.protocol import RunState, RunStatus, StartRun
from retinue.results import Reason, RunResult

if TYPE_CHECKING:
    from retinue.backend import Backend

T = TypeVar("T")


class RunHandle:
    """One run, wherever it is. Made by ``runtime.start`` and ``runtime.attach``; safe in any thread.

    Every awaitable has a blocking twin: ``events`` / ``iter_events``, ``result`` / ``wait``.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        run_id: str,
        identity: Identity,
        session_id: str | None,
        start: StartRun | None,
    ) -> None:
        self.run_id = run_id
        self.identity = identity
        self._backend = backend
        self._session_id = session_id
        self._status: RunStatus | None = None
        self._local_result: RunResult | None = None
        self._client_hops = 0
        self._accepting = on_client_loop(self._accept(start))
        if start is not None:
            finish_before_exit(self._accepting)  # a script may end right after its last start
        self._settling: concurrent.futures.Future[RunResult] | None = None

    # --- acceptance ---------------------------------------------------------------------------------------

    async def _accept(self, start: StartRun | None) -> None:
        try:
            client = await self._backend.client()
            if start is None:
                record = await client.find_run(self.identity, self.run_id)
                self._session_id = record.session_id
                self._heard(await client.status(self.identity, record.session_id, self.run_id))
            else:
                self._client_hops += 1
                self._heard(await client.start(start))
        except Exception as error:
            self._local_result = RunResult(
                status="failed",
                reason=Reason.of(error),
                budget=empty_budget(),
                run_id=self.run_id,
                session_id=self._session_id or "",
                final_cursor=0,
            )
            raise

    async def accepted(self) -> None:
        """Return once the run is stored.

        Raises:
            SessionConflict, Overloaded, StoreUnavailable, ...: it was refused, and nothing was stored.
            NotFound: an attached run does not exist for this identity.
        """
        await awaited(self._accepting)

    # --- what is known ------------------------------------------------------------------------------------

    @property
    def session_id(self) -> str:
        """The session; empty until an attached run was found."""
        return self._session_id or ""

    @property
    def state(self) -> RunState:
        """``running``, ``cancelling`` or ``finished``; at most a second old."""
        if self._local_result is not None:
            return "finished"
        status = self._backend.peek(self)
        return status.state if status is not None else "running"

    @property
    def over(self) -> bool:
        """Whether the end is known here. For backends: asks nobody."""
        ended = self._status is not None and self._status.state == "finished"
        return ended or self._local_result is not None

    @property
    def budget(self) -> BudgetSnapshot:
        """What the run with all its delegates has spent and left; at most a second old."""
        status = self._backend.peek(self)
        return status.budget if status is not None else empty_budget()

    @property
    def hops(self) -> int:
        """Remote calls awaited for this run, by this client and by the session host; 0 in-process."""
        if not self._backend.remote:
            return 0
        return self._client_hops + (self._status.hops if self._status is not None else 0)

    @property
    def last_status(self) -> RunStatus | None:
        """What was heard of the run last."""
        return self._status

    def _heard(self, status: RunStatus | None) -> None:
        if status is None:
            return
        known = self._status
        if known is None or known.state != "finished" or status.state == "finished":
            self._status = status

    async def refresh(self, client: SessionClient) -> None:
        """Ask how the run is. For backends."""
        if self._accepting.done() and self._local_result is None:
            self._heard(await client.status(self.identity, self.session_id, self.run_id))

    # --- result -------------------------------------------------------------------------------------------

    async def result(self) -> RunResult:
        """The one result; a refused run has a local one, with status ``failed``. Each call gives a copy."""
        return copy.deepcopy(await awaited(self._settled()))

    def wait(self, timeout: float | None = None) -> RunResult:
        """The one result, blocking; ``TimeoutError`` after ``timeout`` seconds, the run goes on."""
        return copy.deepcopy(blocking(self._settled(), timeout))

    def __await__(self) -> Generator[Any, None, RunResult]:
        return self.result().__await__()

    def _settled(self) -> concurrent.futures.Future[RunResult]:
        # A failure to ask is no result: the next call asks again.
        if self._settling is None or _has_failed(self._settling):
            self._settling = on_client_loop(self._settle())
        return self._settling

    async def _settle(self) -> RunResult:
        try:
            await asyncio.wrap_future(self._accepting)
        except Exception:
            assert self._local_result is not None
            return self._local_result
        client = await self._backend.client()
        self._client_hops += 1
        settled = await client.result(self.identity, self.session_id, self.run_id)
        self._heard(settled.status)
        return settled.result

    # --- events -------------------------------------------------------------------------------------------

    def events(self, after: int = 0) -> EventStream:
        """Events after a cursor, to the terminal one; ``async for event in handle.events()``.

        Args:
            after: sequence of the last event that was seen; 0 reads from the first.

        Raises:
            InputError: at once for a wrong type or range; while reading, for a cursor ahead of the run.
            EventGap: while reading, when events after the cursor are no longer kept; the stream then ends.
        """
        return EventStream(self, check_cursor(after))

    def iter_events(self, after: int = 0) -> Iterator[Event]:
        """The blocking twin of :meth:`events`."""
        return _blocking_events(self.events(after))

    # --- control ------------------------------------------------------------------------------------------

    async def cancel(self, reason: str = "cancelled by the caller") -> None:
        """Stop the run with everything below it; returns when the request has arrived.

        The run is ``cancelling`` until all its work is gone; ``result()`` then gives status ``cancelled``.
        Repeats, and cancels of a finished run, change nothing.
        """
        await awaited(self._cancelling(reason))

    def cancel_blocking(self, reason: str = "cancelled by the caller") -> None:
        """The blocking twin of :meth:`cancel`."""
        blocking(self._cancelling(reason))

    def _cancelling(self, reason: str) -> concurrent.futures.Future[None]:
        return on_client_loop(self._cancel(reason))

    async def _cancel(self, reason: str) -> None:
        if self._session_id is None:
            await asyncio.wrap_future(self._accepting)
        if self._local_result is not None or self.state == "finished":
            return
        client = await self._backend.client()
        await client.cancel(self.identity, self.session_id, self.run_id, escape_surrogates(str(reason)))

    def __repr__(self) -> str:
        return f"<RunHandle {self.run_id} {self.state}>"


class EventStream(AsyncIterator[Event]):
    """One viewer of a run. Concurrent reads are answered in order; closing it never touches the run."""

    def __init__(self, handle: RunHandle, after: int) -> None:
        self._handle = handle
        self._cursor = after
        self._buffer: deque[Event] = deque()
        self._abandoned: deque[concurrent.futures.Future[Event | None]] = deque()
        """Reads whose reader stopped waiting; the next readers take them, so that no event is lost."""
        self._ended = False
        self._turn: asyncio.Lock | None = None
        self._reading: asyncio.Task[None] | None = None

    @property
    def cursor(self) -> int:
        """Sequence of the last event that was delivered: where to go on from."""
        return self._cursor

    def __aiter__(self) -> EventStream:
        return self

    async def __anext__(self) -> Event:
        read = self._abandoned.popleft() if self._abandoned else on_client_loop(self.next_event())
        try:
            event = await awaited(read)
        except asyncio.CancelledError:
            if not read.cancelled():
                self._abandoned.append(read)
            raise
        if event is None:
            raise StopAsyncIteration
        return event

    async def next_event(self) -> Event | None:
        """The next event, or ``None`` at the end; on the client loop."""
        if self._turn is None:
            self._turn = asyncio.Lock()
        async with self._turn:
            while not self._buffer and not self._ended:
                self._reading = asyncio.ensure_future(self._read())
                try:
                    await self._reading
                except asyncio.CancelledError:
                    if not self._ended:
                        raise
                except RetinueError:
                    self._ended = True
                    raise
                finally:
                    self._reading = None
            if self._ended and not self._buffer:
                return None
            event = self._buffer.popleft()
            self._cursor = event.sequence
            return event

    async def _read(self) -> None:
        handle = self._handle
        try:
            await asyncio.wrap_future(handle._accepting)
        except Exception:
            self._ended = True
            return
        client = await handle._backend.client()
        page = await client.events(handle.identity, handle.session_id, handle.run_id, self._cursor)
        handle._heard(page.status)
        self._buffer.extend(decode_event(body) for _, body in page.events)
        self._ended = page.closed or not page.events

    async def aclose(self) -> None:
        """End this viewer: pending reads end, later ones too."""
        await awaited(on_client_loop(self._close()))

    def close(self) -> None:
        """The blocking twin of :meth:`aclose`; returns at once."""
        on_client_loop(self._close())

    async def _close(self) -> None:
        self._ended = True
        self._buffer.clear()
        if self._reading is not None:
            self._reading.cancel()


def _blocking_events(stream: EventStream) -> Iterator[Event]:
    try:
        while (event := blocking(on_client_loop(stream.next_event()))) is not None:
            yield event
    finally:
        stream.close()


def _has_failed(future: concurrent.futures.Future[RunResult]) -> bool:
    return future.done() and (future.cancelled() or future.exception() is not None)
