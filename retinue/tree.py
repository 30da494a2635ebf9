"""The root's side of a tree: what the participants of one run ask, and the delegates, on the control loop.

Every participant, the root driver included, sends its requests here. What calls and counts is decided by the
gate; what people send, by the inbox.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

import msgspec

from retinue.approval_desk import ApprovalDesk
from retinue.budgets import Budgets, BudgetSnapshot, RoleLimits, RoleSnapshot
from retinue.config import RuntimeConfig
from retinue.drivers import RunRequest
from retinue.errors import ChildLost, RetinueError
from retinue.events import (
    ChildFinished,
    ChildStarted,
    Completion,
    Payload,
    RunStarted,
    ToolComplete,
)
from retinue.gate import Gate
from retinue.ids import new_id, session_label
from retinue.inbox import RunInbox
from retinue.ledger import ROOT, BudgetLedger
from retinue.participants import Participant
from retinue.protocol import (
    Acknowledged,
    AdmitModel,
    AdmitTools,
    ArtifactRead,
    AskInput,
    AwaitChild,
    AwaitVerdict,
    Began,
    CancelChild,
    ChildEnded,
    ChildOrder,
    Compacting,
    Emit,
    EndTurn,
    Finished,
    GetArtifact,
    NextTurn,
    ParticipantMessage,
    PrepareModel,
    PrepareRun,
    PutArtifact,
    ReadUsage,
    Record,
    Rejected,
    ReleaseModel,
    Revise,
    Revision,
    RootReply,
    SettleModel,
    Spawn,
    Spawned,
    TakeInput,
    ToolDone,
    UsageRead,
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
        desk: where approvals are asked for; ``None`` where nobody can be asked.
        carried: what the run that this one goes on with has spent, under the limits that hold now.
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
        desk: ApprovalDesk | None = None,
        carried: BudgetSnapshot | None = None,
    ) -> None:
        self.activation_id = activation_id
        """Of the session that the run is in."""
        self.inbox = inbox
        self._artifacts = artifacts
        budgets = config.budgets if carried is None else limits_of(carried, config.budgets)
        self.ledger = BudgetLedger(budgets, prices=config.prices, carried=carried)
        self.gate = Gate(request, config, self.ledger, inbox, desk, emit)
        self.root = Participant(request, None)
        self.canonical: list[bytes] = []
        """Messages for history, not committed yet."""
        self.conversations: dict[str, list[bytes]] = {}
        """Messages by execution id, not committed yet."""
        self.config = config
        self._request = request
        self._launcher = launcher
        self._emit = emit
        self._room = room
        self._closed = False
        self._participants: dict[str, Participant] = {ROOT: self.root}
        self._held = 0
        """Messages that wait for room in the event log; later ones wait behind them."""
        self._line = asyncio.Lock()

    @property
    def budget(self) -> BudgetSnapshot:
        """What the tree has spent and may still spend; may be read from any thread."""
        return self.gate.budget

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
        if participant.ended.done() and not isinstance(message, SettleModel | ReleaseModel | Finished):
            return self.gate.stop_reply(participant)
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
            case PrepareRun():
                return self.gate.prepare_run(participant)
            case PrepareModel():
                return self.gate.prepare_model(participant, message)
            case ReleaseModel():
                self.gate.release_model(participant, message)
            case AdmitModel():
                return self.gate.admit_model(participant, message)
            case SettleModel():
                self.gate.settle_model(participant, message)
            case AdmitTools():
                return self.gate.admit_tools(participant, message)
            case AwaitVerdict():
                return self.gate.await_verdict(participant, message)
            case ReadUsage():
                return UsageRead(report=self.ledger.report(self.root.run_id))
            case Compacting():
                self._emit(message.payload, participant)
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
                if self.gate.stopped is not None:  # a cancelled run applies nothing any more
                    return self.gate.stop_reply(self.root)
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
                if self.gate.stopping(participant) is not None:
                    return self.gate.stop_reply(participant)
                return self._answered(self._put(message.artifact))
            case GetArtifact():
                return self._answered(self._get(message.artifact_id))
            case Finished():
                self._finish(participant, message)
        return Acknowledged()

    def _next_turn(self) -> RootReply:
        if self.gate.stopped is not None:
            return self.gate.stop_reply(self.root)
        return self.inbox.next_turn()

    def _revise(self, message: Revise) -> RootReply:
        self._emit(Completion(message.action, message.reason), self.root)
        allowed = message.action == "revise" and self.gate.revision < self.config.budgets.max_revisions
        if allowed:
            self.gate.revision += 1
            self.inbox.revise()
        return Revision(allowed=allowed)

    def _ask_input(self, participant: Participant, message: AskInput) -> RootReply | Awaitable[RootReply]:
        if self.gate.stopping(participant) is not None:
            return self.gate.stop_reply(participant)
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
        if self.gate.stopping(parent) is not None:
            return self.gate.stop_reply(parent)
        asked = self._request_of(parent, message)
        child = Participant(asked, parent)
        self._participants[child.run_id] = child
        parent.children.append(child)
        self.ledger.open_account(child.account, parent.account, message.budgets, name=child.name)
        order = ChildOrder(
            activation_id=self.activation_id,
            tree_id=self.root.run_id,
            root_run_id=asked.root_run_id,
            run_id=child.run_id,
            parent_run_id=parent.run_id,
            attempt_id=child.attempt_id,
            participant=child.name,
            depth=child.depth,
            identity=asked.identity,
            session_id=self._request.session_id,
            input=message.input,
            grants=asked.grants,
            run_mode=asked.run_mode,
            deadline=asked.deadline,
            work=message.work,
            token_limited=self.ledger.limits_tokens(child.account),
            trace=message.trace,
        )
        child.launching = asyncio.ensure_future(self._launcher.launch(order, self))
        child.launching.add_done_callback(lambda launching: self._launched(child, launching))
        return Spawned()

    def _request_of(self, parent: Participant, message: Spawn) -> RunRequest:
        """What a delegate is asked to do, as its own process will see it."""
        return msgspec.structs.replace(
            self._request,
            input=message.input,
            session_id=session_label(self._request.session_id, message.name),
            run_id=message.child_run_id,
            attempt_id=new_id("attempt"),
            parent_run_id=parent.run_id,
            participant=message.name,
            depth=parent.depth + 1,
            resumes=None,
            trace=message.trace,
        )

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
        self.ledger.close_account(child.account)
        self.inbox.withdraw(child.account)
        self.gate.leave(child, f"{child.name} ended")
        self.gate.publish()
        self._converse(child.run_id, finished.transcript)
        usage = self.ledger.usage_of(child.account)
        error = finished.error
        if finished.cancelled:
            error = {"code": "cancelled", "message": f"delegate {child.name} was cancelled"}
        ended = ChildEnded(output=finished.output, error=error, cancelled=finished.cancelled, usage=usage)
        child.ended.set_result(ended)
        status, reason = status_of(ended)
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
            self.gate.leave(target, reason)
            if target.launching is not None:
                target.launching.cancel()
            self._launcher.cancel(target.run_id, reason)

    # --- the end ------------------------------------------------------------------------------------------

    def stop(self, reason: str) -> None:
        """Admit nothing any more and cancel every delegate."""
        self.gate.stop(reason)
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
        await self.gate.settled()
        self.ledger.lose(ROOT)
        self.ledger.close_account(ROOT)
        self.gate.publish()


def limits_of(carried: BudgetSnapshot, budgets: Budgets) -> Budgets:
    """The limits that a snapshot tells of, in place of those that the app has."""
    money = None if carried.money is None else carried.money.limit
    return dataclasses.replace(
        budgets,
        max_model_calls=carried.model_calls.limit,
        max_tool_calls=carried.tool_calls.limit,
        max_tokens=carried.tokens.limit,
        max_cost=money,
        tools={name: tool.limit for name, tool in carried.tools.items() if tool.limit is not None},
        roles={name: _role_limits(role) for name, role in carried.roles.items()},
    )


def _role_limits(role: RoleSnapshot) -> RoleLimits:
    return RoleLimits(
        max_model_calls=role.model_calls.limit,
        max_tokens=role.tokens.limit,
        max_cost=None if role.money is None else role.money.limit,
    )


def status_of(ended: ChildEnded | Finished) -> tuple[Status, Reason | None]:
    """How a delegate ended, and why."""
    if ended.cancelled:
        return "cancelled", Reason("cancelled", "cancelled with its run")
    if ended.error is not None:
        reason = Reason.told(ended.error)
        return ("stopped" if reason.code == "budget_exhausted" else "failed"), reason
    output = decode_output(ended.output or b"")
    return output.status, output.reason
