"""What a driver or a tool is given: the one way to models, tools, delegates and history.

Services run beside the user's code, on a user loop. Whatever counts is asked of the root of the tree
through a :class:`RootPort`; nothing here decides about budgets or grants.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Executor
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

import msgspec

from retinue.artifacts import check_artifact
from retinue.budgets import Budgets, BudgetSnapshot, UsageReport
from retinue.current_work import current_trace
from retinue.delegates import Delegate, pickle_work, without_policy
from retinue.deltas import Deltas, OrderedPort, text_size
from retinue.drivers import ExecutionDriver, RunRequest
from retinue.errors import (
    InputError,
    Unsupported,
    ValidationFailed,
    error_from_payload,
)
from retinue.events import MessagePhase, Payload, PublicMessage, check_payload
from retinue.ids import check_id, new_id, session_key
from retinue.messages import (
    Content,
    Message,
    ToolCall,
    check_content,
)
from retinue.model_calls import ModelCalls
from retinue.model_stream import ModelStream
from retinue.models import ModelClient, ModelResponse, ToolSchema
from retinue.owned_work import OwnedWork
from retinue.protocol import (
    ArtifactRead,
    AskInput,
    Emit,
    GetArtifact,
    InputReply,
    ParticipantMessage,
    PutArtifact,
    ReadUsage,
    Rejected,
    RootReply,
    Spawn,
    TakeInput,
    TakenInput,
    UsageRead,
    WithdrawInput,
)
from retinue.publishing import MessagePublisher, is_text_event
from retinue.resources import Initialize, ResourceScope, RunResources, SessionResources
from retinue.results import ArtifactReference
from retinue.root_port import RootPort
from retinue.run_input import check_question
from retinue.store import StoredArtifact
from retinue.telemetry import Operation, OperationKind, TelemetryBus
from retinue.tool_calls import CallRules, ToolCalls
from retinue.tool_tasks import TaskRunner
from retinue.tools import Tool, ToolResult
from retinue.transcripts import Transcript

if TYPE_CHECKING:
    from retinue.agents import Agent
    from retinue.config import RuntimeConfig

T = TypeVar("T")


class ExecutionServices:
    """The services of one execution: the root driver of a run, or one delegate."""

    def __init__(
        self,
        *,
        request: RunRequest,
        config: RuntimeConfig,
        port: RootPort,
        threads: Executor,
        tasks: TaskRunner,
        history: Sequence[bytes] = (),
        state: bytes = b"{}",
        token_limited: bool = False,
        session_resources: SessionResources | None = None,
        call_prefix: str = "call",
        telemetry: TelemetryBus | None = None,
    ) -> None:
        self.request = request
        self.config = config
        self.token_limited = token_limited
        """The tree has a token limit, so callers should say how much output they want."""
        self.state: dict[str, Any] = msgspec.json.decode(state)
        """Application state of the session; a delegate has none of its own."""
        self.cancelled = False
        self._deltas = Deltas(lambda delta: port.tell(Emit(participant=self.participant, payload=delta)))
        self._port = OrderedPort(port, self._deltas)
        self.transcript = Transcript(history, run_id=request.run_id, is_root=self._is_root, tell=self.tell)
        """What was said, as recorded."""
        self.owned = OwnedWork(at_end=self._deltas.close)
        """What must be done before the execution has ended."""
        self.resources = RunResources(session_resources)
        """What is released after its end."""
        self._call_ids = itertools.count(1)
        self._call_prefix = call_prefix
        self.threads = threads
        """For code that blocks; see :func:`retinue.workers.in_thread`."""
        self.tasks = tasks
        """For tools with ``run_in="task"``."""
        self.scratch: dict[str, Any] = {}
        """What a driver keeps from one turn of this execution to the next; never stored."""
        self.ability_tools: Sequence[Tool] = ()
        """Tools of the abilities that were bound for this run; a delegate has none."""
        self.prompts: Sequence[Message] = ()
        """System messages of those abilities, before everything else of each task model request."""
        self._taken: list[TakenInput] = []
        """A steer that was there when the driver wanted to finish, for its next look."""
        self.telemetry = telemetry or TelemetryBus(
            config.telemetry,
            request,
            agent_name=request.participant or config.driver.id,
        )
        """Tells whoever observes the app."""
        self._models = ModelCalls(self, self._port)
        self._publisher = MessagePublisher(self, self._deltas)
        self._tools = ToolCalls(self, self._port)

    # --- data ---------------------------------------------------------------------------------------------

    @property
    def participant(self) -> str:
        """Id of this execution in the ledger: empty for the root, the run id for a delegate."""
        return self.request.run_id if self.request.participant else ""

    @property
    def session_key(self) -> str:
        return session_key(self.request.identity, self.request.session_id)

    @property
    def history(self) -> list[Message]:
        """A fresh copy of the canonical conversation; a delegate starts with none."""
        return self.transcript.history

    @property
    def budget(self) -> BudgetSnapshot:
        """What the whole tree has spent, reserved and left."""
        return self._port.budget

    async def usage_report(self) -> UsageReport:
        """What the whole tree used so far, by participant, model role and tool."""
        reply = await self.ask(ReadUsage(participant=self.participant))
        assert isinstance(reply, UsageRead)
        return reply.report

    def next_call_id(self) -> str:
        """An id that no other call of this execution has."""
        return f"{self._call_prefix}-{next(self._call_ids)}"

    def observed(self, kind: OperationKind, call_id: str, **fields: Any) -> Operation:
        """A call of a model, a controller or a tool, as observers are told of it; make it in ``with``."""
        return self.telemetry.begin(kind, call_id, cancelled=lambda: self.cancelled, **fields)

    # --- models -------------------------------------------------------------------------------------------

    async def model(
        self,
        provider: ModelClient,
        messages: Sequence[Message],
        *,
        tools: Sequence[ToolSchema] = (),
        max_tokens: int | None = None,
        temperature: float | None = None,
        role: str = "main",
        publish: bool = False,
    ) -> ModelResponse:
        """One task model call, admitted by the ledger first.

        Args:
            provider: the model to ask, unless the app binds one to ``role``.
            messages: the whole request, oldest first.
            tools: schemas of the tools that the model may call.
            max_tokens: output tokens wanted at most; the ledger may grant fewer.
            temperature: passed to the provider as it is.
            role: a granted model role.
            publish: publish the answer, as :meth:`publish_response` does.

        Raises:
            BudgetExhausted: the ledger refused; nothing was sent.
            AccessDenied: the role is not granted.
            Unsupported: ``max_tokens`` is not a positive integer.
            ModelFailed: the provider failed, or reported impossible usage.
        """
        call = self._models.plan(provider, messages, tools, max_tokens, temperature, role)
        response = await self.run_owned(self._models.task(call))
        if publish:
            await self.publish_response(response)
        return response

    def stream_model(
        self,
        provider: ModelClient,
        messages: Sequence[Message],
        *,
        tools: Sequence[ToolSchema] = (),
        max_tokens: int | None = None,
        temperature: float | None = None,
        role: str = "main",
        publish: bool = False,
    ) -> ModelStream:
        """One task model call whose answer comes piece by piece: see :class:`retinue.ModelStream`.

        Takes what :meth:`model` takes. Admission, settlement and errors are the same, and come when the
        stream is iterated. A client that cannot stream is asked for the whole, which comes in few pieces.

        Args:
            publish: publish the answer's public messages as they come.
        """
        call = self._models.plan(provider, messages, tools, max_tokens, temperature, role)
        return self._models.stream(call, self._publisher if publish else None)

    async def publish_response(self, response: ModelResponse) -> list[PublicMessage]:
        """Publish what an answer has for people, as ``message.*`` events.

        A delegate's messages become events only under ``RuntimeConfig(child_text=True)``.

        Returns:
            The messages, each with its phase: items as their provider gave them, else the text as one.
        """
        return await self._publisher.response(response)

    async def publish_message(self, text: str, phase: MessagePhase = "final") -> PublicMessage:
        """Publish a message of the driver's own.

        Args:
            text: what people see; not empty.
            phase: ``commentary``, ``final`` or ``reasoning_summary``.

        Raises:
            InputError: another phase, or a text that cannot be sent.
        """
        return await self._publisher.message(text, phase)

    async def control_model(
        self,
        role: str,
        messages: Sequence[Message],
        *,
        max_tokens: int | None = None,
        temperature: float | None = None,
    ) -> ModelResponse:
        """One policy call to the model that the app binds to ``role``; no tools, plain messages only.

        Raises:
            Unsupported: the role has no binding, an option is not allowlisted, or a message is not plain.
            ModelFailed: the answer calls tools or is cut; its usage has been counted.
            BudgetExhausted, AccessDenied: as for :meth:`model`.
        """
        return await self.run_owned(self._models.policy("control", role, messages, max_tokens, temperature))

    async def finish_model(
        self, role: str, messages: Sequence[Message], *, max_tokens: int | None = None
    ) -> ModelResponse:
        """One call to bring the work to its end: it may use what ``Budgets.finishing_model_calls`` and
        ``finishing_tokens`` keep back, beside what is left. Plain messages, no tools.

        Raises:
            What :meth:`control_model` raises.
        """
        return await self.run_owned(self._models.policy("finishing", role, messages, max_tokens))

    # --- tools and effects --------------------------------------------------------------------------------

    @property
    def tools(self) -> Sequence[Tool]:
        """The tools of the app, and of its abilities."""
        return (*self.config.tools, *self.ability_tools)

    async def dispatch(
        self, call: ToolCall, *, tools: Sequence[Tool] = (), rules: CallRules | None = None
    ) -> ToolResult:
        """Run one tool through the gate. Always a result: errors and denials are results too.

        Args:
            call: name, id and arguments; arguments that do not fit the schema use no attempt.
            tools: tools beside the app's own, such as an agent's.
            rules: what an agent adds to the rules of its app, its tools among it.
        """
        return await self.run_owned(self._tools.dispatch(call, rules or CallRules(tools=tools)))

    async def dispatch_batch(
        self, calls: Sequence[ToolCall], *, tools: Sequence[Tool] = (), rules: CallRules | None = None
    ) -> list[ToolResult]:
        """Run the tool calls of one answer, admitted together; the results in the order of the calls.

        Of a batch over the limit the first that fit run, or none: see ``RuntimeConfig.tool_batches``.

        Raises:
            ModelFailed: ids that are empty or repeated; nothing is run then.
        """
        return await self.run_owned(self._tools.dispatch_batch(calls, rules or CallRules(tools=tools)))

    async def dispatch_effect(
        self, name: str, arguments: Mapping[str, Any], execute: Callable[[dict[str, Any]], Awaitable[T]]
    ) -> T:
        """Run a trusted callback through the gate, under the tool id ``name``.

        Raises:
            ToolFailed: it was denied. What ``execute`` raises passes through.
        """
        return await self.run_owned(self._tools.effect(name, arguments, execute))

    # --- delegates ----------------------------------------------------------------------------------------

    async def delegate(
        self,
        work: Agent | ExecutionDriver,
        input: Content,
        *,
        name: str | None = None,
        placement: Literal["pooled"] = "pooled",
        budgets: Budgets | None = None,
    ) -> Delegate:
        """Start a child: an agent or a driver with a conversation, a cancellation and an account of its own.

        Args:
            work: copied into the child's process, so it must be picklable.
            input: what the child is asked.
            name: label in events; the agent's name or the driver's id when left out.
            placement: ``pooled`` packs children into few processes.
            budgets: limits of the child and everything below it, within those of this execution.

        Raises:
            NotShippable: ``work`` cannot be copied; ``path`` names the member at fault.
            Unsupported: another placement.
            ValidationFailed: ``work`` or ``budgets`` is something else.
            InputError: the input or the name cannot be sent.
        """
        if placement != "pooled":
            raise Unsupported(
                f"placement {placement!r} is not supported; use 'pooled'", operation=f"placement={placement}"
            )
        _check_budgets(budgets)
        label = str(name or getattr(work, "name", None) or getattr(work, "id", None) or "delegate")
        check_id("name", label)
        spawn = Spawn(
            participant=self.participant,
            child_run_id=new_id("run"),
            name=label,
            input=check_content(input),
            budgets=budgets,
            placement=placement,
            work=pickle_work(without_policy(work, self.config.execution_policy), label),
            trace=current_trace(),
        )
        child = Delegate(self, spawn.child_run_id, spawn.name)
        try:
            await self.run_owned(self._spawn(spawn, child))
        except asyncio.CancelledError:
            with contextlib.suppress(InputError):  # the run has ended, and the child with it
                child.cancel("nobody waits for it")  # it may have been started all the same
            raise
        return child

    async def _spawn(self, spawn: Spawn, child: Delegate) -> None:
        await self.ask(spawn)
        child.follow(self.run_owned(child.wait()))

    # --- live input ---------------------------------------------------------------------------------------

    async def take_input(self) -> Content | None:
        """The oldest steer that waits, applied with that; ``None`` when none does, and in delegates.

        A driver that declares the control ``steer`` calls this at boundaries where new instructions fit.
        """
        if not self._is_root or not (self._taken or self._port.steer_waits):
            return None
        return (await self._take(TakeInput())).input

    async def finish_input(self) -> bool:
        """Close steering at the end of the work; false when a steer waits: take it and go on.

        Steering opens again with the next turn.
        """
        if not self._is_root:
            return True
        taken = await self._take(TakeInput(close=True))
        if taken.input_id is None:
            return True
        self._taken.append(taken)
        return False

    async def _take(self, message: TakeInput) -> TakenInput:
        if self._taken:
            return self._taken.pop()
        reply = await self.ask(message)
        assert isinstance(reply, TakenInput)
        return reply

    async def request_input(
        self, question: str, *, choices: Sequence[str] | None = None, timeout: float | None = None
    ) -> InputReply:
        """Ask whoever follows the run, and wait for ``handle.reply(request_id, ...)``.

        The run is ``awaiting_input`` meanwhile: its active clock stands still and no model call may start;
        what runs already goes on.

        Args:
            question: text, not blank.
            choices: 1 to 100 suggestions, shown to whoever answers; the answer may be something else.
            timeout: seconds, instead of the runtime's ``input_timeout``; then the run is cancelled.

        Returns:
            ``request_id`` and ``input``, the answer's content.

        Raises:
            InputError: ``invalid_input``, or ``input_pending`` while another question waits.
        """
        text, checked, seconds = check_question(question, choices, timeout)
        asked = AskInput(participant=self.participant, question=text, choices=checked, timeout=seconds)
        return await self.run_owned(self._request_input(asked))

    async def _request_input(self, message: AskInput) -> InputReply:
        try:
            reply = await self.ask(message)
        except asyncio.CancelledError:
            self._port.tell(WithdrawInput(participant=self.participant))
            raise
        assert isinstance(reply, InputReply)
        return reply

    # --- resources and artifacts --------------------------------------------------------------------------

    async def resource(self, id: str, scope: ResourceScope, initialize: Initialize[T]) -> T:
        """The value of a resource, which the runtime closes when its time is over (contract section 2).

        Args:
            id: names it; in the scope ``session`` whoever gives the same id shares it.
            scope: ``run``: made here and now, disposed of after the run. ``session``: made once, kept for
                later runs until ``runtime.resources.close_session(...)``. ``host``: made here and now, never
                disposed of; its ownership must be ``host``.
            initialize: function that gives a :class:`retinue.Resource`, on the user loop; awaited if it is a
                coroutine function.

        Raises:
            InputError: a bad argument, or no ``Resource``.
            Unsupported: scope ``session`` in a delegate.
            Exception: what ``initialize`` raised; nothing is kept then.
        """
        self.owned.check_running()
        if self.cancelled:
            raise asyncio.CancelledError("the run is being cancelled")
        return cast(T, await self.run_owned(self.resources.acquire(id, scope, initialize)))

    async def put_artifact(
        self, data: bytes | str, *, mime_type: str = "text/plain", artifact_id: str | None = None
    ) -> ArtifactReference:
        """Keep something beside the session at once, whatever becomes of the run.

        Args:
            data: at most 16 MiB; text is kept as UTF-8.
            mime_type: what it is.
            artifact_id: unique in the session; made up when left out.

        Raises:
            InputError: it cannot be kept, or the id already names something else.
        """
        artifact = check_artifact(data, mime_type, artifact_id)
        return await self.run_owned(self._put_artifact(artifact, chosen=artifact_id is not None))

    async def _put_artifact(self, artifact: StoredArtifact, *, chosen: bool) -> ArtifactReference:
        await self.ask(PutArtifact(participant=self.participant, artifact=artifact))
        # What stands is left alone, so that a repeat is harmless; whoever chose the id must hear of it.
        if chosen and await self._get_artifact(artifact.artifact_id) != artifact:
            raise InputError(
                f"artifact {artifact.artifact_id!r} exists and holds something else; give another id",
                field="artifact_id",
            )
        return ArtifactReference(artifact.artifact_id, artifact.mime_type)

    async def get_artifact(self, artifact_id: str) -> StoredArtifact | None:
        """An artifact of this session, also of an earlier run; ``None`` where there is none.

        Raises:
            InputError: the id is no id.
        """
        check_id("artifact_id", artifact_id)
        return await self.run_owned(self._get_artifact(artifact_id))

    async def _get_artifact(self, artifact_id: str) -> StoredArtifact | None:
        reply = await self.ask(GetArtifact(participant=self.participant, artifact_id=artifact_id))
        assert isinstance(reply, ArtifactRead)
        return reply.artifact

    # --- history, events, owned work ----------------------------------------------------------------------

    def append(self, messages: Sequence[Message]) -> None:
        """Add messages to the canonical conversation (of a delegate: to its transcript).

        Raises:
            InputError: not a message, text that no store can carry, or a tool result without its call.
                Nothing was added then.
        """
        self.transcript.append(messages)

    def record_conversation(self, messages: Sequence[Message], *, execution_id: str | None = None) -> None:
        """Add messages to this execution's conversation, and for the root to canonical history too.

        Args:
            execution_id: of another conversation, which a root driver keeps of its own; it is committed
                beside the history, in ``conversations``, and is no part of it.

        Raises:
            InputError: as for :meth:`append`.
            Unsupported: a delegate names another conversation than its own.
        """
        self.transcript.record(messages, execution_id)

    @property
    def _is_root(self) -> bool:
        return self.participant == ""

    def emit(self, payload: Payload | Mapping[str, Any]) -> None:
        """Add an event of the application, such as ``Custom(name, data)``; at most 65,536 bytes of JSON.

        Raises:
            InputError: not a payload, too large, or of a type that only the runtime emits.
        """
        checked = check_payload(payload)
        if self.speaks or not is_text_event(checked):
            self.tell(Emit(participant=self.participant, payload=checked))

    @property
    def speaks(self) -> bool:
        """Whether text and messages of this execution are events: a delegate's stay inside by default."""
        return self._is_root or self.config.child_text

    def emit_text(self, text: str) -> None:
        """Add text to the ``text.delta`` events, of at most 8,192 characters each.

        The first piece is sent at once; those that follow within 25 ms are sent together, or as soon as
        they are 2 kB. A delegate's text stays inside unless ``RuntimeConfig.child_text`` says otherwise.

        Raises:
            InputError: no string, or one that UTF-8 cannot carry.
        """
        self.owned.check_running()
        text_size(text)
        if self.speaks:
            self._deltas.add(text)

    def run_owned(self, work: Awaitable[T]) -> asyncio.Task[T]:
        """Register work that the run must wait for; what it raises after the driver returned fails the run.

        Every call of a model, a tool or a delegate is registered by itself.
        """
        return self.owned.run(work)

    async def ask(self, message: ParticipantMessage) -> RootReply:
        """Ask the root; a rejection is raised as its error, or as cancellation when the run is ending."""
        self.owned.check_running()
        reply = await self._port.ask(message)
        if isinstance(reply, Rejected):
            if reply.cancelled:
                self.cancelled = True  # the root says so before its cancellation gets here
                raise asyncio.CancelledError("the run is being cancelled")
            raise error_from_payload(reply.error)
        return reply

    def tell(self, message: ParticipantMessage) -> None:
        self.owned.check_running()
        self._port.tell(message)


def _check_budgets(budgets: object) -> None:
    if budgets is not None and not isinstance(budgets, Budgets):
        raise ValidationFailed(
            f"budgets must be a retinue.Budgets, not {type(budgets).__name__}", path="budgets"
        )
