"""Tool calls and effects: check the arguments, ask the gate, run, tell (contract section 7)."""

from __future__ import annotations

import copy
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from retinue.errors import RetinueError, ToolFailed
from retinue.events import ToolProgress
from retinue.messages import ToolCall, escape_surrogates
from retinue.protocol import AdmitTool, ToolAdmitted, ToolDone
from retinue.results import error_text
from retinue.tool_execution import ToolExecution
from retinue.tool_output import ToolOutput, ToolProblem
from retinue.tool_progress import Progress
from retinue.tools import Tool, ToolArgumentError, ToolResult

if TYPE_CHECKING:
    from retinue.root_port import RootPort
    from retinue.services import ExecutionServices

T = TypeVar("T")

SHOWN = 2_000
"""Characters of a result that was too large, which the model gets with the id of the artifact."""


@dataclass(frozen=True)
class _Overdue:
    """A call that timed out and goes on all the same: a thread that does not look at its token."""

    tool: str
    arguments: Mapping[str, Any]
    execution: ToolExecution


class ToolCalls:
    """Runs the tools of one execution, every call admitted before."""

    def __init__(self, services: ExecutionServices, port: RootPort) -> None:
        self._services = services
        self._port = port
        self._overdue: list[_Overdue] = []

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
        if self._runs_still(call):
            why = "an earlier call with these arguments timed out and is still running"
            return self._done(call, f"{call.name} was not called: {why}", error=True)
        verdict = await self._admit(call.name, call.id)
        if not verdict.allowed:
            return self._done(call, f"[denied] {verdict.reason}", error=True, denied=True)
        try:
            output = await self._run(found, arguments, call)
            text, artifact_id = await self._kept(found, output)
        except ToolProblem as problem:
            return self._done(call, _cut(str(problem), found), error=True)
        return self._done(call, text, artifact_id=artifact_id)

    async def _run(self, tool: Tool, arguments: Mapping[str, Any], call: ToolCall) -> ToolOutput:
        services = self._services
        execution = ToolExecution(
            tool,
            arguments,
            call.id,
            services=services,
            progress=Progress(lambda data: services.emit(ToolProgress(tool.name, call.id, data))),
        )
        asked = copy.deepcopy(call.arguments)  # the tool may change what it was given
        try:
            return await execution.run()
        finally:
            if execution.is_running:
                self._overdue.append(_Overdue(tool.name, asked, execution))
                services.run_owned(execution.gone())

    def _runs_still(self, call: ToolCall) -> bool:
        self._overdue = [overdue for overdue in self._overdue if overdue.execution.is_running]
        return any(
            overdue.tool == call.name and overdue.arguments == call.arguments for overdue in self._overdue
        )

    async def _kept(self, tool: Tool, output: ToolOutput) -> tuple[str, str | None]:
        """A result as the model reads it, and the artifact that has all of it where that is too much."""
        text, size = output.text, len(output.data)
        if text is not None and size <= tool.options.max_result_bytes:
            return text, None
        try:
            kept = await self._services.put_artifact(output.data, mime_type=output.mime_type)
        except RetinueError as error:
            raise ToolProblem(
                f"{tool.name} gave {size:,} bytes, which could not be kept as an artifact: {error.message}"
            ) from None
        named = f"[{size:,} bytes of {output.mime_type}, kept as artifact {kept.id}]"
        return (named if text is None else f"{text[:SHOWN]}\n{named}"), kept.id

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
            self._tell_done(call_id, name, error=failed)

    async def _admit(self, name: str, call_id: str) -> ToolAdmitted:
        # The model chooses call ids and may repeat one in a later round, so attempts have ids of their own.
        attempt = f"{self._services.next_call_id()}:{call_id}"
        reply = await self._services.ask(
            AdmitTool(participant=self._services.participant, call_id=attempt, tool_name=name)
        )
        assert isinstance(reply, ToolAdmitted)
        return reply

    def _done(
        self,
        call: ToolCall,
        text: str,
        *,
        error: bool = False,
        denied: bool = False,
        artifact_id: str | None = None,
    ) -> ToolResult:
        self._tell_done(call.id, call.name, error)
        return ToolResult(
            call_id=call.id,
            tool_name=call.name,
            text=escape_surrogates(text),  # the text of an error may hold anything
            error=error,
            denied=denied,
            artifact_id=artifact_id,
        )

    def _tell_done(self, call_id: str, name: str, error: bool) -> None:
        participant = self._services.participant
        self._port.tell(ToolDone(participant=participant, call_id=call_id, tool_name=name, error=error))


def _cut(text: str, tool: Tool) -> str:
    """The text of an error, which is never an artifact."""
    if len(text.encode(errors="replace")) <= tool.options.max_result_bytes:
        return text
    return f"{text[:SHOWN]}\n[cut: {len(text):,} characters]"
