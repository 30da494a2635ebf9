"""Tool calls and effects: check the arguments, ask the gate, run, tell (contract section 7).

    known? ──> schema ──> snapshot ──> the agent's own policy ──> the gate of the tree ──> unchanged?
        ──> repeated? ──> cached? ──> run ──> large? an artifact ──> result

Whatever goes wrong before the gate uses no attempt. A call is always answered by a result; what is refused is
one that says why.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from retinue.agents import TOOL_CONCURRENCY
from retinue.current_work import current_trace
from retinue.errors import ModelFailed, RetinueError, ToolFailed
from retinue.events import ToolProgress
from retinue.messages import ToolCall, escape_surrogates
from retinue.policies import CallUnderReview, DenialKind, ExecutionPolicy
from retinue.policy_context import PolicyContext
from retinue.protocol import AdmitTools, AwaitVerdict, ToolAttempt, ToolDone, ToolsAdmitted, ToolVerdict
from retinue.results import error_text
from retinue.reviews import Judgement, graver, planned, raised, review, said
from retinue.telemetry import TelemetryContent
from retinue.tool_arguments import snapshot
from retinue.tool_execution import ToolExecution
from retinue.tool_output import ToolOutput, ToolProblem
from retinue.tool_progress import Progress
from retinue.tools import Tool, ToolArgumentError, ToolResult

if TYPE_CHECKING:
    from retinue.root_port import RootPort
    from retinue.services import ExecutionServices

T = TypeVar("T")

_Key = tuple[Tool, bytes, bytes]
"""A tool, the arguments as it takes them, and as the model gave them: reviewers need not see all of them."""

SHOWN = 2_000
"""Characters of a result that was too large, which the model gets with the id of the artifact."""


@dataclass(frozen=True, kw_only=True)
class CallRules:
    """What an agent adds to the rules of its app."""

    tools: Sequence[Tool] = ()
    """Beside the app's own."""
    policy: ExecutionPolicy | None = None
    max_repeats: int | None = None
    """Times that one call may be made with the same arguments, one after the other."""


@dataclass(frozen=True)
class _Overdue:
    """A call that timed out and goes on all the same: a thread that does not look at its token."""

    tool: str
    arguments: Mapping[str, Any]
    execution: ToolExecution


@dataclass(frozen=True)
class _Ready:
    """A call that may be asked for."""

    call: ToolCall
    tool: Tool
    arguments: dict[str, Any]
    attempt: ToolAttempt
    snapshot: bytes | None
    """Of the arguments, where somebody reviews or compares them."""
    key: _Key | None
    """What this call has in common with one that is the same, where the two can be told to be."""


@dataclass
class _Repeats:
    """How often the last call was made in a row."""

    what: _Key | None = None
    times: int = 0

    def note(self, what: _Key | None) -> int:
        self.times = self.times + 1 if what is not None and what == self.what else 1
        self.what = what
        return self.times


@dataclass
class ToolCalls:
    """Runs the tools of one execution, every call admitted before."""

    services: ExecutionServices
    port: RootPort
    _overdue: list[_Overdue] = field(default_factory=list)
    _cache: dict[_Key, ToolResult] = field(default_factory=dict)
    """An execution is of one run of one session of one user."""
    _repeats: _Repeats = field(default_factory=_Repeats)

    async def dispatch(self, call: ToolCall, rules: CallRules) -> ToolResult:
        """One call."""
        ready = await self._ready(call, rules)
        if isinstance(ready, ToolResult):
            return ready
        (verdict,) = await self._admit([ready.attempt])
        return await self._go(ready, verdict, rules)

    async def dispatch_batch(self, calls: Sequence[ToolCall], rules: CallRules) -> list[ToolResult]:
        """The calls of one answer: admitted together, run a few at a time, results in their order."""
        check_batch(calls)
        prepared = [await self._ready(call, rules) for call in calls]
        asked = [ready for ready in prepared if isinstance(ready, _Ready)]
        verdicts = iter(await self._admit([ready.attempt for ready in asked]) if asked else ())
        work = [(ready, next(verdicts) if isinstance(ready, _Ready) else None) for ready in prepared]
        results: list[ToolResult] = []
        for start in range(0, len(work), TOOL_CONCURRENCY):
            # What fails a call fails the run, as the error that it is, when the others of its slice are done.
            outcomes = await asyncio.gather(
                *(
                    self._one(ready, verdict, rules)
                    for ready, verdict in work[start : start + TOOL_CONCURRENCY]
                ),
                return_exceptions=True,
            )
            for outcome in outcomes:
                if isinstance(outcome, BaseException):
                    raise outcome
                results.append(outcome)
        return results

    async def _one(
        self, ready: _Ready | ToolResult, verdict: ToolVerdict | None, rules: CallRules
    ) -> ToolResult:
        if isinstance(ready, ToolResult):
            return ready
        assert verdict is not None
        return await self._go(ready, verdict, rules)

    # --- before the gate ----------------------------------------------------------------------------------

    async def _ready(self, call: ToolCall, rules: CallRules) -> _Ready | ToolResult:
        """The call with its arguments checked; or the result that says what is wrong with it."""
        found = next((item for item in (*rules.tools, *self.services.tools) if item.name == call.name), None)
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
        if self.services.cancelled:
            return self._denied(call, "cancelled", "the run is being cancelled")
        return await self._reviewed(call, found, arguments, rules)

    async def _reviewed(
        self, call: ToolCall, tool: Tool, arguments: dict[str, Any], rules: CallRules
    ) -> _Ready | ToolResult:
        """The call as the gate is asked about it, once the agent's own policy has had its say."""
        taken: bytes | None = None
        key: _Key | None = None
        is_compared = tool.options.cache or rules.max_repeats is not None
        if is_compared or self._is_reviewed(tool, rules):
            try:
                taken = snapshot(arguments)
                key = (tool, taken, snapshot(call.arguments)) if is_compared else None
            except (TypeError, ValueError, RecursionError) as error:
                if self._is_reviewed(tool, rules):
                    why = f"its arguments cannot be reviewed: {error_text(error)}"
                    return self._denied(call, "policy", why)
        try:
            required = await _required(tool, taken)
        except Exception as error:
            return self._denied(call, "policy", f"requires_approval raised {raised(error)}")
        judged = await self._local(call, tool, taken, rules)
        if judged.action == "deny":
            return self._denied(call, "policy", judged.reason or f"{call.name} is not allowed")
        attempt = ToolAttempt(
            # The model chooses call ids and may repeat one in a later round, so attempts have ids of their
            # own.
            id=f"{self.services.next_call_id()}:{call.id}",
            call_id=call.id,
            tool_name=call.name,
            arguments=b"{}" if taken is None else taken,
            effect=judged.effect,
            requires_approval=required,
            ask=(judged.reason or "the agent's policy asks") if judged.action == "ask" else None,
            trace=current_trace(),
        )
        return _Ready(call, tool, arguments, attempt, taken, key)

    def _is_reviewed(self, tool: Tool, rules: CallRules) -> bool:
        config = self.services.config
        return (
            config.execution_policy is not None
            or config.approvals is not None
            or rules.policy is not None
            or tool.options.requires_approval is not None
        )

    async def _local(self, call: ToolCall, tool: Tool, taken: bytes | None, rules: CallRules) -> Judgement:
        """What the agent's own policy says, where it is another one than the app's."""
        effect = tool.options.effect
        if rules.policy is None or rules.policy is self.services.config.execution_policy or taken is None:
            return Judgement(action="allow", effect=effect)
        under_review = CallUnderReview(
            tool_name=call.name, call_id=call.id, arguments=_decoded(taken), effect=effect
        )
        mode = self.services.request.run_mode
        judged = planned(await review(rules.policy, under_review, PolicyContext(self.services), mode), mode)
        # At the root the tool's own word counts too; a policy of an agent can only say worse.
        return Judgement(action=judged.action, reason=judged.reason, effect=graver(effect, judged.effect))

    # --- the gate -----------------------------------------------------------------------------------------

    async def _admit(self, attempts: Sequence[ToolAttempt]) -> Sequence[ToolVerdict]:
        participant = self.services.participant
        reply = await self.services.ask(AdmitTools(participant=participant, attempts=attempts))
        assert isinstance(reply, ToolsAdmitted)
        return reply.verdicts

    async def _decided(self, attempt: ToolAttempt, verdict: ToolVerdict) -> ToolVerdict:
        if not verdict.pending:
            return verdict
        message = AwaitVerdict(participant=self.services.participant, attempt_id=attempt.id)
        reply = await self.services.ask(message)
        assert isinstance(reply, ToolsAdmitted)
        return reply.verdicts[0]

    # --- after it -----------------------------------------------------------------------------------------

    async def _go(self, ready: _Ready, verdict: ToolVerdict, rules: CallRules) -> ToolResult:
        call, tool = ready.call, ready.tool
        verdict = await self._decided(ready.attempt, verdict)
        if not verdict.allowed:
            return self._denied(call, verdict.denial or "policy", verdict.reason)
        if self.services.cancelled:
            return self._denied(call, "cancelled", "the run is being cancelled")
        if ready.snapshot is not None and _taken_again(ready.arguments) != ready.snapshot:
            return self._denied(call, "policy", "its arguments were changed after they were reviewed")
        times = self._repeats.note(ready.key)
        if rules.max_repeats is not None and times > rules.max_repeats:
            why = f"{call.name} was called with these arguments {rules.max_repeats} times in a row already"
            return self._done(call, f"{why}; it was not called again. Go on in another way", error=True)
        key = ready.key if tool.options.cache else None
        if key is not None and (known := self._cache.get(key)) is not None:
            return self._done(call, known.text, artifact_id=known.artifact_id)
        try:
            output = await self._observed(ready)
            text, artifact_id = await self._kept(tool, output)
        except ToolProblem as problem:
            return self._done(call, _cut(str(problem), tool), error=True)
        result = self._done(call, text, artifact_id=artifact_id)
        if key is not None:
            self._cache[key] = result
        return result

    async def _observed(self, ready: _Ready) -> ToolOutput:
        """Run it, with whoever observes the run told of it."""
        telemetry, call = self.services.telemetry, ready.call
        told = self.services.observed("tool", ready.attempt.id, tool_name=call.name, tool_call_id=call.id)
        if telemetry.wants_content:
            told.content = TelemetryContent(arguments=call.arguments)
        told.error_code = ToolFailed.code
        with told:
            output = await self._run(ready.tool, ready.arguments, call)
            if telemetry.wants_content:
                told.content = TelemetryContent(output=output.text)
        return output

    async def _run(self, tool: Tool, arguments: Mapping[str, Any], call: ToolCall) -> ToolOutput:
        services = self.services
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
            kept = await self.services.put_artifact(output.data, mime_type=output.mime_type)
        except RetinueError as error:
            raise ToolProblem(
                f"{tool.name} gave {size:,} bytes, which could not be kept as an artifact: {error.message}"
            ) from None
        named = f"[{size:,} bytes of {output.mime_type}, kept as artifact {kept.id}]"
        return (named if text is None else f"{text[:SHOWN]}\n{named}"), kept.id

    # --- effects ------------------------------------------------------------------------------------------

    async def effect(
        self, name: str, arguments: Mapping[str, Any], execute: Callable[[dict[str, Any]], Awaitable[T]]
    ) -> T:
        """A trusted callback of the driver, under a tool id of its own."""
        call_id = self.services.next_call_id()
        given = copy.deepcopy(dict(arguments))
        attempt = ToolAttempt(
            id=f"{self.services.next_call_id()}:{call_id}",
            call_id=call_id,
            tool_name=name,
            arguments=self._effect_arguments(name, given),
            driver=True,
            trace=current_trace(),
        )
        verdict = await self._decided(attempt, (await self._admit([attempt]))[0])
        if verdict.allowed and self.services.cancelled:
            verdict = ToolVerdict(denial="cancelled", reason="the run is being cancelled")
        if not verdict.allowed:
            self._tell_done(call_id, name, error=True)
            raise ToolFailed(
                f"{name} was denied: {verdict.denial}: {verdict.reason}",
                operation=name,
                denial=verdict.denial,
            )
        failed = True
        try:
            with self.services.observed("tool", attempt.id, tool_name=name, tool_call_id=call_id):
                value = await execute(given)
            failed = False
            return value
        finally:
            self._tell_done(call_id, name, error=failed)

    def _effect_arguments(self, name: str, arguments: dict[str, Any]) -> bytes:
        config = self.services.config
        try:
            return snapshot(arguments)
        except (TypeError, ValueError, RecursionError) as error:
            if config.execution_policy is None and config.approvals is None:
                return b"{}"  # nobody reviews them
            raise ToolFailed(
                f"{name} was denied: policy: its arguments cannot be reviewed: {error_text(error)}",
                operation=name,
                denial="policy",
            ) from None

    # --- results ------------------------------------------------------------------------------------------

    def _denied(self, call: ToolCall, kind: DenialKind, reason: str) -> ToolResult:
        return self._done(call, f"[denied] {kind}: {reason}", error=True, denial=kind)

    def _done(
        self,
        call: ToolCall,
        text: str,
        *,
        error: bool = False,
        denial: DenialKind | None = None,
        artifact_id: str | None = None,
    ) -> ToolResult:
        self._tell_done(call.id, call.name, error)
        return ToolResult(
            call_id=call.id,
            tool_name=call.name,
            text=escape_surrogates(text),  # the text of an error may hold anything
            error=error,
            denied=denial is not None,
            denial=denial,
            artifact_id=artifact_id,
        )

    def _tell_done(self, call_id: str, name: str, error: bool) -> None:
        participant = self.services.participant
        self.port.tell(ToolDone(participant=participant, call_id=call_id, tool_name=name, error=error))


def check_batch(calls: Sequence[ToolCall]) -> None:
    """Raise ``ModelFailed`` unless the ids of a batch are nonempty and unique; nothing is run then."""
    ids = [call.id for call in calls]
    if not all(ids) or len(set(ids)) != len(ids):
        raise ModelFailed(f"the model gave tool calls with empty or repeated ids: {ids}")


async def _required(tool: Tool, taken: bytes | None) -> bool | None:
    """Whether the tool itself wants an approval; ``None`` where it does not say."""
    rule = tool.options.requires_approval
    if rule is None or isinstance(rule, bool):
        return rule
    assert taken is not None
    predicate, arguments = rule, _decoded(taken)
    answer: object = await said(lambda: predicate(arguments))
    if not isinstance(answer, bool):
        raise TypeError(f"it gave {answer!r:.80}, not a bool")
    return answer


def _decoded(taken: bytes) -> dict[str, Any]:
    return msgspec.json.decode(taken, type=dict[str, Any])


def _taken_again(arguments: dict[str, Any]) -> bytes | None:
    try:
        return snapshot(arguments)
    except (TypeError, ValueError, RecursionError):
        return None


def _cut(text: str, tool: Tool) -> str:
    """The text of an error, which is never an artifact."""
    if len(text.encode(errors="replace")) <= tool.options.max_result_bytes:
        return text
    return f"{text[:SHOWN]}\n[cut: {len(text):,} characters]"
