"""What a driver or a tool is given: the one way to models, tools, delegates and history.

Services run beside the user's code, on a user loop. Whatever counts is asked of the root of the tree
through a :class:`RootPort`; nothing here decides about budgets or grants.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import itertools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Executor
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

import msgspec

from retinue.budgets import Budgets, BudgetSnapshot
from retinue.delegates import Delegate, pickle_work
from retinue.drivers import ExecutionDriver, RunRequest
from retinue.errors import (
    InputError,
    Unsupported,
    ValidationFailed,
    error_from_payload,
)
from retinue.events import MAX_DELTA, Payload, TextDelta, check_payload
from retinue.ids import check_id, new_id, session_key
from retinue.messages import (
    Content,
    Message,
    ToolCall,
    ToolPairing,
    check_content,
    decode_message,
    encode_message,
)
from retinue.model_calls import ModelCalls
from retinue.models import ModelClient, ModelResponse, ToolSchema
from retinue.owned_work import OwnedWork
from retinue.protocol import (
    Emit,
    ParticipantMessage,
    Record,
    Rejected,
    RootReply,
    SettleModel,
    Spawn,
)
from retinue.tool_calls import ToolCalls
from retinue.tools import Tool, ToolResult

if TYPE_CHECKING:
    from retinue.agents import Agent
    from retinue.config import RuntimeConfig

T = TypeVar("T")


class RootPort(Protocol):
    """The way to the root of the tree: a thread away for the root driver, a process away for a delegate."""

    async def ask(self, message: ParticipantMessage) -> RootReply:
        """Send and wait for the reply."""
        ...

    def tell(self, message: ParticipantMessage) -> None:
        """Send, in order with everything else sent here; arrives before any later ``ask``."""
        ...

    async def settle(self, message: SettleModel) -> None:
        """Send at once, as ``tell`` does; return when ``budget`` shows it, if no remote call is needed."""
        ...

    @property
    def budget(self) -> BudgetSnapshot:
        """The tree's budget as last heard."""
        ...


class ExecutionServices:
    """The services of one execution: the root driver of a run, or one delegate."""

    def __init__(
        self,
        *,
        request: RunRequest,
        config: RuntimeConfig,
        port: RootPort,
        threads: Executor,
        history: Sequence[bytes] = (),
        state: bytes = b"{}",
        token_limited: bool = False,
    ) -> None:
        self.request = request
        self.config = config
        self.token_limited = token_limited
        """The tree has a token limit, so callers should say how much output they want."""
        self.state: dict[str, Any] = msgspec.json.decode(state)
        """Application state of the session; a delegate has none of its own."""
        self.cancelled = False
        self.transcript: list[bytes] = []
        """Encoded messages of this execution, as recorded."""
        self._port = port
        self._history = list(history)
        self.owned = OwnedWork()
        """What must be done before the execution has ended."""
        self._pairing = ToolPairing()
        self._call_ids = itertools.count(1)
        self._models = ModelCalls(self, port)
        self._tools = ToolCalls(self, port, threads)

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
        return [decode_message(body) for body in self._history]

    @property
    def budget(self) -> BudgetSnapshot:
        """What the whole tree has spent, reserved and left."""
        return self._port.budget

    def next_call_id(self) -> str:
        return f"call-{next(self._call_ids)}"

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
    ) -> ModelResponse:
        """One task model call, admitted by the ledger first.

        Args:
            provider: the model to ask, unless the app binds one to ``role``.
            messages: the whole request, oldest first.
            tools: schemas of the tools that the model may call.
            max_tokens: output tokens wanted at most; the ledger may grant fewer.
            temperature: passed to the provider as it is.
            role: a granted model role.

        Raises:
            BudgetExhausted: the ledger refused; nothing was sent.
            AccessDenied: the role is not granted.
            Unsupported: ``max_tokens`` is not a positive integer.
            ModelFailed: the provider failed, or reported impossible usage.
        """
        return await self.run_owned(
            self._models.task(provider, messages, tools, max_tokens, temperature, role)
        )

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
        return await self.run_owned(self._models.control(role, messages, max_tokens, temperature))

    # --- tools and effects --------------------------------------------------------------------------------

    @property
    def tools(self) -> Sequence[Tool]:
        """The tools of the app."""
        return self.config.tools

    async def dispatch(self, call: ToolCall, *, tools: Sequence[Tool] = ()) -> ToolResult:
        """Run one tool through the gate. Always a result: errors and denials are results too.

        Args:
            call: name, id and arguments; arguments that do not fit the schema use no attempt.
            tools: tools beside the app's own, such as an agent's.
        """
        return await self.run_owned(self._tools.dispatch(call, tools))

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
            work=pickle_work(work, label),
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

    # --- history, events, owned work ----------------------------------------------------------------------

    def append(self, messages: Sequence[Message]) -> None:
        """Add messages to the canonical conversation (of a delegate: to its transcript).

        Raises:
            InputError: not a message, text that no store can carry, or a tool result without its call.
                Nothing was added then.
        """
        self._record(messages, conversation=not self._is_root)

    def record_conversation(self, messages: Sequence[Message]) -> None:
        """Add messages to this execution's conversation, and for the root to canonical history too.

        Raises:
            InputError: as for :meth:`append`.
        """
        self._record(messages, conversation=True)

    def _record(self, messages: Sequence[Message], *, conversation: bool) -> None:
        bodies = [encode_message(message) for message in messages]
        pairing = copy.deepcopy(self._pairing)
        for index, message in enumerate(messages):
            try:
                pairing.add(message)
            except ValueError as error:
                raise InputError(f"messages[{index}] {error}") from None
        if self._is_root:
            self.tell(
                Record(
                    canonical=bodies,
                    conversation=bodies if conversation else (),
                    execution_id=self.request.run_id,
                )
            )
            self._history.extend(bodies)
        if conversation:
            self.transcript.extend(bodies)
        self._pairing = pairing

    @property
    def _is_root(self) -> bool:
        return self.participant == ""

    def emit(self, payload: Payload | Mapping[str, Any]) -> None:
        """Add an event of the application, such as ``Custom(name, data)``; at most 65,536 bytes of JSON.

        Raises:
            InputError: not a payload, too large, or of a type that only the runtime emits.
        """
        self.tell(Emit(participant=self.participant, payload=check_payload(payload)))

    def emit_text(self, text: str) -> None:
        """Add ``text.delta`` events, of at most 8,192 characters each; a delegate's text stays inside."""
        if not self._is_root:
            return
        for start in range(0, len(text), MAX_DELTA):
            self.emit(TextDelta(text[start : start + MAX_DELTA]))

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
