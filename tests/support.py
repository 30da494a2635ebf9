"""Helpers of the unit tests: drivers, models and flags that work across threads and event loops.

Everything is at module level, so that a delegate's work can be pickled by reference.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from retinue import (
    BudgetSnapshot,
    DriverCapabilities,
    DriverOutput,
    ExecutionServices,
    ModelRequest,
    ModelResponse,
    RunHandle,
    RunRequest,
    RunResult,
    Runtime,
    Usage,
)
from retinue.events import ChildFinished, Event, InputRequest, InputRequested
from retinue.inprocess import InProcessBackend
from retinue.loop import on_client_loop
from retinue.messages import Content, content_text
from retinue.models import ModelClient
from retinue.runs import Run

LIMIT = 10.0
"""Seconds after which a test that waits for something has failed."""


class Flag:
    """Something that happens once, in whatever thread, and can be waited for in any loop or thread."""

    def __init__(self) -> None:
        self._future: concurrent.futures.Future[Any] = concurrent.futures.Future()

    def set(self, value: Any = None) -> None:
        if not self._future.done():
            self._future.set_result(value)

    @property
    def is_set(self) -> bool:
        return self._future.done()

    async def wait(self) -> Any:
        """Wait at most :data:`LIMIT` seconds; gives what :meth:`set` was given."""
        async with asyncio.timeout(LIMIT):
            return await asyncio.shield(asyncio.wrap_future(self._future))

    def wait_blocking(self) -> Any:
        return self._future.result(LIMIT)


_flags: dict[str, Flag] = {}


def flag(name: str) -> Flag:
    """The flag of this name: how a test meets a delegate, which is a pickled copy."""
    return _flags.setdefault(name, Flag())


async def soon(work: Awaitable[Any]) -> Any:
    """``work`` within :data:`LIMIT` seconds."""
    return await asyncio.wait_for(work, LIMIT)


Start = Callable[[RunRequest, ExecutionServices], Awaitable[DriverOutput]]


@dataclass(frozen=True)
class FunctionDriver:
    """A driver made of a coroutine function."""

    function: Start
    id: str = "test"
    version: int = 1
    capabilities: DriverCapabilities = field(default_factory=DriverCapabilities)

    async def start(self, request: RunRequest, services: ExecutionServices) -> DriverOutput:
        return await self.function(request, services)


def driver(function: Start) -> FunctionDriver:
    """Decorator: this coroutine function as a driver."""
    return FunctionDriver(function)


async def _echo(request: RunRequest, services: ExecutionServices) -> DriverOutput:
    return DriverOutput(text=str(request.input))


trivial = FunctionDriver(_echo)
"""Answers with its input; travels by reference."""


async def _ask(request: ModelRequest) -> ModelResponse:
    return ModelResponse(text="answer", usage=Usage(input_tokens=1, output_tokens=1))


class FunctionModel:
    """A model made of a coroutine function; keeps the requests that it got."""

    provider_id = "test"
    model_id = "function"

    def __init__(self, function: Callable[[ModelRequest], Awaitable[ModelResponse]] = _ask) -> None:
        self.function = function
        self.requests: list[ModelRequest] = []

    async def generate(self, request: ModelRequest) -> ModelResponse:
        self.requests.append(request)
        return await self.function(request)


def answering(text: str = "answer", usage: Usage | None = None) -> FunctionModel:
    """A model that always gives this answer, by default without saying what it used."""

    async def answer(request: ModelRequest) -> ModelResponse:
        return ModelResponse(text=text, usage=usage)

    return FunctionModel(answer)


def raising(error: BaseException) -> FunctionModel:
    """A model that always fails."""

    async def fail(request: ModelRequest) -> ModelResponse:
        raise error

    return FunctionModel(fail)


class HeldModel(FunctionModel):
    """A model that answers when it is let go."""

    def __init__(self, text: str = "answer", usage: Usage | None = None) -> None:
        super().__init__(self._held)
        self.asked = Flag()
        self.go = Flag()
        self._answer = ModelResponse(text=text, usage=usage)

    async def _held(self, request: ModelRequest) -> ModelResponse:
        self.asked.set()
        await self.go.wait()
        return self._answer


def estimate(tokens: int) -> Callable[[ModelRequest, ModelClient], int]:
    """An estimate of input tokens that is always the same."""
    return lambda request, client: tokens


def user_text(content: Content) -> str:
    """The text of an input."""
    return content_text(content)


def types(events: Sequence[Event]) -> list[str]:
    return [event.type for event in events]


async def event_of(handle: RunHandle, kind: str, after: int = 0) -> Event:
    """The first event of this type after a cursor."""
    async with asyncio.timeout(LIMIT):
        async for event in handle.events(after):
            if event.type == kind:
                return event
    raise AssertionError(f"the run ended without {kind}")


async def question_of(handle: RunHandle, after: int = 0) -> InputRequest:
    """The first question that the run asks after a cursor."""
    payload = (await event_of(handle, "input.requested", after)).payload
    assert isinstance(payload, InputRequested)
    return payload.request


async def all_events(handle: RunHandle, after: int = 0) -> list[Event]:
    async with asyncio.timeout(LIMIT):
        return [event async for event in handle.events(after)]


def code_of(ended: RunResult | ChildFinished) -> str | None:
    """The code of the reason, if there is one."""
    return ended.reason.code if ended.reason is not None else None


def why(result: RunResult) -> str:
    """The message of the reason; a test that asks for it expects one."""
    assert result.reason is not None
    return result.reason.message


def spent(result: RunResult) -> BudgetSnapshot:
    """The budget of a result whose ledger was not lost."""
    assert result.budget is not None
    return result.budget


def tokens(budget: BudgetSnapshot | None) -> tuple[int | None, int, int, int | None]:
    """Limit, used, reserved and remaining tokens."""
    assert budget is not None
    return (budget.tokens.limit, budget.tokens.used, budget.tokens.reserved, budget.tokens.remaining)


def calls(budget: BudgetSnapshot | None) -> tuple[int | None, int, int, int | None]:
    """Limit, used, reserved and remaining model calls."""
    assert budget is not None
    found = budget.model_calls
    return (found.limit, found.used, found.reserved, found.remaining)


def backend_of(runtime: Runtime) -> InProcessBackend:
    """What is behind an in-process runtime, to see that nothing is left there."""
    backend = runtime._backend
    assert isinstance(backend, InProcessBackend)
    return backend


def run_of(runtime: Runtime, handle: RunHandle) -> Run:
    """The run behind a handle, while it is in memory."""
    for session in backend_of(runtime)._host._sessions.values():
        if session.knows(handle.run_id):
            return session.run(handle.run_id)
    raise AssertionError(f"run {handle.run_id} is not in memory")


async def tasks_of_users(runtime: Runtime) -> list[str]:
    """Names of the coroutines that are left on the loop of drivers and tools."""

    async def look() -> list[str]:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        return sorted(str(task.get_coro()) for task in others)

    return await asyncio.wrap_future(backend_of(runtime)._workers.submit(look()))


async def timers_of(runtime: Runtime) -> list[str]:
    """What the loops of an in-process runtime are set to do later: of runs on the control loop (the host's
    own renewals, which sleep, aside), and of user code."""

    async def look() -> list[str]:
        handles = asyncio.get_running_loop()._scheduled  # type: ignore[attr-defined]
        callbacks = [handle._callback for handle in handles if not handle.cancelled()]
        return [str(each) for each in callbacks if "_set_result_unless_cancelled" not in str(each)]

    on_users = await asyncio.wrap_future(backend_of(runtime)._workers.submit(look()))
    on_control = await asyncio.wrap_future(on_client_loop(look()))
    return on_users + on_control


async def nothing_is_left(runtime: Runtime, handle: RunHandle) -> None:
    """Assert invariant 5: after the terminal event, nothing of the run is left."""
    run = run_of(runtime, handle)
    assert run.settled.done()
    assert await tasks_of_users(runtime) == []
    assert run.tree.ledger.open_reservations == 0
    assert run.tree.budget.tokens.reserved == 0
    assert run.tree._live_children() == []
    assert await timers_of(runtime) == []
    assert run.events._writer is None
    assert run.inbox.pending is None
    session = next(each for each in backend_of(runtime)._host._sessions.values() if each.knows(run.run_id))
    assert not session.resources.in_use
