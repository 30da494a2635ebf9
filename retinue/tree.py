"""The root's side of a tree: the gate, the ledger and the delegates of one run, on the control loop.

Every participant, the root driver included, sends its requests here. Model and tool admissions are checked
and counted in one step without an await, so nothing can change between the look and the count.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from retinue.budgets import BudgetSnapshot
from retinue.config import RuntimeConfig
from retinue.drivers import RunRequest
from retinue.errors import AccessDenied, ChildLost, RetinueError
from retinue.events import (
    ChildFinished,
    ChildStarted,
    Completion,
    ModelComplete,
    Payload,
    RunStarted,
    ToolComplete,
)
from retinue.ids import new_id
from retinue.inbox import RunInbox
from retinue.ledger import ROOT, BudgetLedger
from retinue.protocol import (
    Acknowledged,
    AdmitModel,
    AdmitTool,
    ArtifactRead,
    AskInput,
    AwaitChild,
    Began,
    CancelChild,
    ChildEnded,
    ChildOrder,
    Emit,
    EndTurn,
    Finished,
    GetArtifact,
    ModelAdmitted,
    NextTurn,
    ParticipantMessage,
    PutArtifact,
    Record,
    Rejected,
    Revise,
    Revision,
    RootReply,
    SettleModel,
    Spawn,
    Spawned,
    TakeInput,
    ToolAdmitted,
    ToolDone,
    WithdrawInput,
    decode_output,
)
from retinue.results import Reason, Status
from retinue.store import StoredArtifact


class ChildLauncher(Protocol):
    """Finds a place for delegates and hands them over."""

    async def launch(self, order: ChildOrder, tree: Tree) -> None:
        """Place the child and send it there. Its messages then come to ``tree.handle``; should its process
        die, ``tree.child_lost`` is called. Cancelled when the child is, before it was handed over."""
        ...

    def cancel(self, child_run_id: str, reason: str) -> None:
        """Ask the child's process to stop it; its ``Finished`` acknowledges."""
        ...


@dataclass(eq=False)
class Participant:
    """A member of the tree."""

    run_id: str
    name: str
    parent: Participant | None
    attempt_id: str
    launching: asyncio.Task[None] | None = None
    ended: asyncio.Future[ChildEnded] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    stopped: str | None = None
    """Why nothing more is admitted for it, once it is being cancelled."""
    hops: int = 0
    children: list[Participant] = field(default_factory=list)

    @property
    def depth(self) -> int:
        """Participants above this one."""
        return 0 if self.parent is None else self.parent.depth + 1

    @property
    def account(self) -> str:
        return ROOT if self.parent is None else self.run_id

    def below(self) -> Iterator[Participant]:
        """Its delegates and theirs, at any depth."""
        for child in self.children:
            yield child
            yield from child.below()


EmitPayload = Callable[[Payload, Participant], None]
Room = Callable[[], Awaitable[None] | None]


class Artifacts(Protocol):
    """What a session keeps beside its history."""

    async def put(self, artifact: StoredArtifact) -> None: ...

    async def get(self, artifact_id: str) -> StoredArtifact | None: ...


class Tree:
    """One run's participants. Belongs to the control loop.

    Args:
        request: of the root driver.
        config: the app.
        launcher: places delegates.
        emit: adds an event of a participant to the run's log.
        inbox: what people send to the run.
        artifacts: of the session.
        room: ``None`` while the event log takes more, else something to await (back-pressure).
    """

    def __init__(
        self,
        request: RunRequest,
        config: RuntimeConfig,
        launcher: ChildLauncher,
        emit: EmitPayload,
        *,
        inbox: RunInbox,
        artifacts: Artifacts,
        room: Room = lambda: None,
        activation_id: str = "",
    ) -> None:
        self.activation_id = activation_id
        """Of the session that the run is in."""
        self.inbox = inbox
        self.revision = 0
        """How often a completion policy sent the work back; of the run as a whole."""
        self._artifacts = artifacts
        self.ledger = BudgetLedger(config.budgets)
        self.root = Participant(request.run_id, "", None, request.attempt_id)
        self.canonical: list[bytes] = []
        """Messages for history, not committed yet."""
        self.conversations: dict[str, list[bytes]] = {}
        """Messages by execution id, not committed yet."""
        self.budget: BudgetSnapshot = self.ledger.snapshot()
        """Published for other threads: replaced as a whole, never changed."""
        self.config = config
        self._request = request
        self._launcher = launcher
        self._emit = emit
        self._room = room
        self._closed = False
        self._participants: dict[str, Participant] = {ROOT: self.root}
        self._stopped: str | None = None
        self._held = 0
        """Messages that wait for room in the event log; later ones wait behind them."""
        self._line = asyncio.Lock()

    # --- requests of participants -------------------------------------------------------------------------

    def handle(self, message: ParticipantMessage) -> RootReply | Awaitable[RootReply]:
        """The reply to a participant's message; an awaitable where it takes until something happens."""
        room = self._room()
        if room is None and not self._held:
            return self._handle_now(message)
        self._held += 1
        return self._handle_later(message, room)

    async def _handle_later(self, message: ParticipantMessage, room: Awaitable[None] | None) -> RootReply:
        try:
            async with self._line:
                while room is not None:
                    await room
                    room = self._room()
                reply = self._handle_now(message)
        finally:
            self._held -= 1
        return await reply if isinstance(reply, Awaitable) else reply

    def _handle_now(self, message: ParticipantMessage) -> RootReply | Awaitable[RootReply]:
        if self._closed:
            return Rejected(error={"code": "run_finished", "message": "the run has ended"}, cancelled=True)
        participant = self._participants.get(getattr(message, "participant", ROOT))
        if participant is None:
            return Rejected(
                error={"code": "run_finished", "message": "this tree does not know the participant"}
            )
        if participant.ended.done() and not isinstance(message, SettleModel | Finished):
            return self._stop_reply(participant)
        try:
            return self._handle(participant, message)
        except RetinueError as error:
            return Rejected(error=error.to_payload())
        except Exception as error:  # a defect of ours must not leave the participant waiting
            return Rejected(error={"code": "execution_failed", "message": f"{type(error).__name__}: {error}"})

    def _handle(
        self, participant: Participant, message: ParticipantMessage
    ) -> RootReply | Awaitable[RootReply]:
        match message:
            case AdmitModel():
                return self._admit_model(participant, message)
            case SettleModel():
                self._settle_model(participant, message)
            case AdmitTool():
                return self._admit_tool(participant, message)
            case ToolDone():
                self._emit(ToolComplete(message.tool_name, message.call_id, message.error), participant)
            case Record():
                self.canonical.extend(message.canonical)
                self._converse(message.execution_id, message.conversation)
            case Emit():
                self._emit(message.payload, participant)
            case Spawn():
                return self._spawn(participant, message)
            case AwaitChild():
                return asyncio.shield(self._child(message.child_run_id).ended)
            case CancelChild():
                self._cancel(self._child(message.child_run_id), message.reason)
            case Began():
                self._emit(RunStarted(self.config.driver.id), self.root)
            case TakeInput():
                if self._stopped is not None:  # a cancelled run applies nothing any more
                    return self._stop_reply(self.root)
                return self.inbox.take_steer(close=message.close)
            case EndTurn():
                self.inbox.end_turn()
            case NextTurn():
                return self._next_turn()
            case Revise():
                return self._revise(message)
            case AskInput():
                return self._ask_input(participant, message)
            case WithdrawInput():
                self.inbox.withdraw(message.participant)
            case PutArtifact():
                if self._stopping(participant) is not None:
                    return self._stop_reply(participant)
                return self._answered(self._put(message.artifact))
            case GetArtifact():
                return self._answered(self._get(message.artifact_id))
            case Finished():
                self._finish(participant, message)
        return Acknowledged()

    def _admit_model(self, participant: Participant, message: AdmitModel) -> RootReply:
        if self._stopping(participant) is not None:
            return self._stop_reply(participant)
        if message.role not in self._request.grants.model_roles:
            raise AccessDenied(f"model role {message.role!r} is not granted to this run", role=message.role)
        self.inbox.check_not_waiting()
        grant = self.ledger.admit_model(
            participant.account, message.call_id, message.projected_input, message.requested_output
        )
        self._publish()
        return ModelAdmitted(max_tokens=grant.max_tokens)

    def _settle_model(self, participant: Participant, message: SettleModel) -> None:
        self.ledger.settle_model(participant.account, message.call_id, message.usage, started=message.started)
        self._publish()
        if message.answered and self._stopping(participant) is None:
            self._emit(ModelComplete(message.provider_id, message.model_id, message.usage), participant)

    def _admit_tool(self, participant: Participant, message: AdmitTool) -> RootReply:
        if self._stopping(participant) is not None:
            return self._stop_reply(participant)
        if message.tool_name not in self._request.grants.tool_ids:
            return ToolAdmitted(allowed=False, reason=f"{message.tool_name} is not granted to this run")
        if self.revision and not self.config.allow_revision_effects:
            return ToolAdmitted(allowed=False, reason="a revision may call no tools (allow_revision_effects)")
        allowed = self.ledger.admit_tool(participant.account, message.call_id)
        self._publish()
        if not allowed:
            return ToolAdmitted(allowed=False, reason="the tool call budget is exhausted")
        if self._request.run_mode == "plan":
            # Contract section 7: an effect that nobody declared is "unknown", which asks, and nobody answers.
            why = f"approval_required: {message.tool_name} may have effects, and this run only plans"
            return ToolAdmitted(allowed=False, reason=why)
        return ToolAdmitted(allowed=True)

    def _next_turn(self) -> RootReply:
        if self._stopped is not None:
            return self._stop_reply(self.root)
        return self.inbox.next_turn()

    def _revise(self, message: Revise) -> RootReply:
        self._emit(Completion(message.action, message.reason), self.root)
        allowed = message.action == "revise" and self.revision < self.config.budgets.max_revisions
        if allowed:
            self.revision += 1
            self.inbox.revise()
        return Revision(allowed=allowed)

    def _ask_input(self, participant: Participant, message: AskInput) -> RootReply | Awaitable[RootReply]:
        if self._stopping(participant) is not None:
            return self._stop_reply(participant)
        return self.inbox.ask(
            message.participant, participant.run_id, message.question, message.choices, message.timeout
        )

    async def _put(self, artifact: StoredArtifact) -> RootReply:
        await self._artifacts.put(artifact)
        return Acknowledged()

    async def _get(self, artifact_id: str) -> RootReply:
        return ArtifactRead(artifact=await self._artifacts.get(artifact_id))

    async def _answered(self, work: Awaitable[RootReply]) -> RootReply:
        try:
            return await work
        except RetinueError as error:
            return Rejected(error=error.to_payload())

    def _stopping(self, participant: Participant) -> str | None:
        """Why nothing more is admitted for a participant."""
        ended = "it has ended" if participant.ended.done() else None
        return self._stopped or participant.stopped or ended

    def _stop_reply(self, participant: Participant) -> Rejected:
        why = self._stopping(participant) or "the run has ended"
        return Rejected(error={"code": "cancelled", "message": why}, cancelled=True)

    def _publish(self) -> None:
        self.budget = self.ledger.snapshot()

    def _converse(self, execution_id: str, messages: Sequence[bytes]) -> None:
        if messages:
            self.conversations.setdefault(execution_id, []).extend(messages)

    # --- delegates ----------------------------------------------------------------------------------------

    @property
    def children(self) -> int:
        """Delegates started so far, at any depth."""
        return len(self._participants) - 1

    @property
    def hops(self) -> int:
        """Remote calls on the longest path through a delegate."""
        return max(child.hops for child in list(self._participants.values()))

    def _spawn(self, parent: Participant, message: Spawn) -> RootReply:
        if message.child_run_id in self._participants:
            return Spawned()
        if self._stopping(parent) is not None:
            return self._stop_reply(parent)
        child = Participant(message.child_run_id, message.name, parent, new_id("attempt"))
        self._participants[child.run_id] = child
        parent.children.append(child)
        self.ledger.open_account(child.account, parent.account, message.budgets)
        request = self._request
        order = ChildOrder(
            activation_id=self.activation_id,
            tree_id=self.root.run_id,
            root_run_id=request.root_run_id,
            run_id=child.run_id,
            parent_run_id=parent.run_id,
            attempt_id=child.attempt_id,
            participant=child.name,
            depth=child.depth,
            identity=request.identity,
            session_id=request.session_id,
            input=message.input,
            grants=request.grants,
            run_mode=request.run_mode,
            deadline=request.deadline,
            work=message.work,
            token_limited=self.ledger.limits_tokens(child.account),
        )
        child.launching = asyncio.ensure_future(self._launcher.launch(order, self))
        child.launching.add_done_callback(lambda launching: self._launched(child, launching))
        return Spawned()

    def _launched(self, child: Participant, launching: asyncio.Task[None]) -> None:
        child.launching = None
        # A task that is cancelled before its first step runs none of its code: hence a callback.
        if launching.cancelled():
            self._end(child, Finished(participant=child.run_id, cancelled=True))
        elif (error := launching.exception()) is not None:
            failure = error if isinstance(error, RetinueError) else ChildLost(f"{child.name}: {error}")
            self._end(child, Finished(participant=child.run_id, error=failure.to_payload()))

    def _child(self, run_id: str) -> Participant:
        child = self._participants.get(run_id)
        if child is None:
            raise RetinueError(f"no delegate {run_id!r} in this run", code="not_found")
        return child

    def child_placed(self, child_run_id: str) -> None:
        """The launcher found a place for the child and is about to hand it over."""
        child = self._child(child_run_id)
        self._emit(ChildStarted(child.name), child)

    def child_lost(self, child_run_id: str, why: str) -> None:
        """The process of a delegate died: charge what it had reserved, stop what is below it."""
        child = self._participants.get(child_run_id)
        if child is None or child.ended.done():
            return
        error = ChildLost(f"delegate {child.name} was lost: {why}", run_id=child.run_id)
        self._end(child, Finished(participant=child.run_id, error=error.to_payload()))

    def _finish(self, participant: Participant, message: Finished) -> None:
        if participant is self.root:
            raise RetinueError("the root's end is not a message", code="unsupported")
        self._end(participant, message)

    def _end(self, child: Participant, finished: Finished) -> None:
        if child.ended.done():
            return
        child.hops = finished.hops
        self.ledger.lose(child.account)
        self.inbox.withdraw(child.account)
        self._publish()
        self._converse(child.run_id, finished.transcript)
        usage = self.ledger.usage_of(child.account)
        error = finished.error
        if finished.cancelled:
            error = {"code": "cancelled", "message": f"delegate {child.name} was cancelled"}
        ended = ChildEnded(output=finished.output, error=error, cancelled=finished.cancelled, usage=usage)
        child.ended.set_result(ended)
        status, reason = _status_of(ended)
        self._emit(ChildFinished(child.name, status, reason, usage), child)
        for other in child.children:
            self._cancel(other, f"its parent {child.name} ended")

    def _live_children(self) -> list[Participant]:
        return [
            child
            for child in self._participants.values()
            if child is not self.root and not child.ended.done()
        ]

    def _cancel(self, child: Participant, reason: str) -> None:
        for target in (child, *child.below()):
            if target.ended.done():
                continue
            target.stopped = target.stopped or reason
            if target.launching is not None:
                target.launching.cancel()
            self._launcher.cancel(target.run_id, reason)

    # --- the end ------------------------------------------------------------------------------------------

    def stop(self, reason: str) -> None:
        """Admit nothing any more and cancel every delegate."""
        self._stopped = self._stopped or reason
        self.inbox.close(reason, cancelled=True)
        for child in self._live_children():
            self._cancel(child, reason)

    def close(self) -> None:
        """Refuse every later message: the run has its result."""
        self._closed = True

    async def settled(self) -> None:
        """Wait until every delegate is gone and every message was taken in."""
        while self._held or self._live_children():
            if live := self._live_children():
                await asyncio.wait([child.ended for child in live])
            async with self._line:
                await asyncio.sleep(0)
        self.ledger.lose(ROOT)
        self._publish()


def _status_of(ended: ChildEnded) -> tuple[Status, Reason | None]:
    if ended.cancelled:
        return "cancelled", Reason("cancelled", "cancelled with its run")
    if ended.error is not None:
        reason = Reason(str(ended.error["code"]), str(ended.error["message"]))
        return ("stopped" if reason.code == "budget_exhausted" else "failed"), reason
    output = decode_output(ended.output or b"")
    return output.status, output.reason
