"""Tool calls and effects: check the arguments, ask the gate, run, tell (contract section 7)."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Executor
from typing import TYPE_CHECKING, Any, TypeVar

from retinue.delegates import Delegate
from retinue.drivers import ExecutionDriver
from retinue.errors import ToolFailed
from retinue.ids import Identity
from retinue.messages import Content, ToolCall, escape_surrogates
from retinue.protocol import AdmitTool, ToolAdmitted, ToolDone
from retinue.results import error_text
from retinue.tools import Tool, ToolArgumentError, ToolResult, result_text
from retinue.workers import in_thread

if TYPE_CHECKING:
    from retinue.agents import Agent
    from retinue.services import ExecutionServices, RootPort

T = TypeVar("T")


class ToolContext:
    """What a tool's ``ctx`` parameter receives."""

    def __init__(self, services: ExecutionServices, call_id: str) -> None:
        self.services = services
        self.call_id = call_id

    @property
    def identity(self) -> Identity:
        return self.services.request.identity

    @property
    def cancelled(self) -> bool:
        """True once the run is being cancelled or has no use for the result: a tool in a thread should
        return soon."""
        return self.services.cancelled

    async def delegate(self, work: Agent | ExecutionDriver, input: Content, **options: Any) -> Delegate:
        """See :meth:`ExecutionServices.delegate`."""
        return await self.services.delegate(work, input, **options)


class ToolCalls:
    """Runs the tools of one execution, every call admitted before."""

    def __init__(self, services: ExecutionServices, port: RootPort, threads: Executor) -> None:
        self._services = services
        self._port = port
        self._threads = threads

    async def dispatch(self, call: ToolCall, tools: Sequence[Tool]) -> ToolResult:
        found = next((item for item in (*tools, *self._services.tools) if item.name == call.name), None)
        if found is None:
            return self._done(call, f"there is no tool {call.name!r}", error=True)
        try:
            arguments = found.validate(call.arguments)
        except ToolArgumentError as error:
            return self._done(call, str(error), error=True)
        except Exception as error:  # a validator of the application's own
            return self._done(call, f"invalid arguments for {call.name}: {error_text(error)}", error=True)
        verdict = await self._admit(call.name, call.id)
        if not verdict.allowed:
            return self._done(call, f"[denied] {verdict.reason}", error=True, denied=True)
        try:
            text = result_text(await self._call(found, arguments, call.id))
        except asyncio.CancelledError as error:
            if self._services.cancelled or _being_cancelled():
                raise
            return self._done(call, f"the tool was cancelled from inside: {error}", error=True)
        except BaseException as error:  # whatever a tool raises is its result
            return self._done(call, f"{type(error).__name__}: {error_text(error)}", error=True)
        if escape_surrogates(text) != text:
            return self._done(call, f"{call.name} gave text with a lone surrogate", error=True)
        return self._done(call, text)

    async def effect(
        self, name: str, arguments: Mapping[str, Any], execute: Callable[[dict[str, Any]], Awaitable[T]]
    ) -> T:
        call_id = self._services.next_call_id()
        verdict = await self._admit(name, call_id)
        if not verdict.allowed:
            self._tell_done(call_id, name, error=True)
            raise ToolFailed(f"{name} was denied: {verdict.reason}", operation=name)
        failed = True
        try:
            value = await execute(dict(arguments))
            failed = False
            return value
        finally:
            self._port.tell(
                ToolDone(
                    participant=self._services.participant, call_id=call_id, tool_name=name, error=failed
                )
            )

    async def _admit(self, name: str, call_id: str) -> ToolAdmitted:
        # The model chooses call ids and may repeat one in a later round, so attempts have ids of their own.
        attempt = f"{self._services.next_call_id()}:{call_id}"
        reply = await self._services.ask(
            AdmitTool(participant=self._services.participant, call_id=attempt, tool_name=name)
        )
        assert isinstance(reply, ToolAdmitted)
        return reply

    async def _call(self, found: Tool, arguments: dict[str, Any], call_id: str) -> Any:
        if found.takes_context:
            arguments = {**arguments, "ctx": ToolContext(self._services, call_id)}
        if found.is_async:
            return await found.function(**arguments)
        value = await in_thread(self._threads, functools.partial(found.function, **arguments))
        return await value if inspect.isawaitable(value) else value

    def _done(self, call: ToolCall, text: str, *, error: bool = False, denied: bool = False) -> ToolResult:
        self._port.tell(
            ToolDone(
                participant=self._services.participant, call_id=call.id, tool_name=call.name, error=error
            )
        )
        text = escape_surrogates(text)  # the text of an error may hold anything
        return ToolResult(call_id=call.id, tool_name=call.name, text=text, error=error, denied=denied)

    def _tell_done(self, call_id: str, name: str, error: bool) -> None:
        participant = self._services.participant
        self._port.tell(ToolDone(participant=participant, call_id=call_id, tool_name=name, error=error))


def _being_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
