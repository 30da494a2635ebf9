"""The gate of a tree: what every model call, tool call and effect must pass (contract sections 7 and 8).

    1. at once      active? granted? offered? revision? ──> counted or reserved
    2. off the loop controller, context policy, execution policy, approval; nothing is locked meanwhile
    3. at once      still active? still allowed? ──> the answer

Step 1 has no await, so nothing changes between the look and the count. A call about which nobody else has a
say is answered there. Belongs to the control loop; what the application wrote runs elsewhere.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol

from retinue.approval_desk import ApprovalDesk
from retinue.budgets import BudgetSnapshot
from retinue.config import RuntimeConfig
from retinue.drivers import RunRequest
from retinue.errors import AccessDenied, RetinueError
from retinue.events import ModelComplete, Payload
from retinue.inbox import RunInbox
from retinue.ledger import BudgetLedger
from retinue.participants import Participant
from retinue.policies import PolicyAction
from retinue.protocol import (
    Acknowledged,
    AdmitModel,
    AdmitTools,
    AwaitVerdict,
    ModelAdmitted,
    ModelPrepared,
    PrepareModel,
    Rejected,
    ReleaseModel,
    RootReply,
    SettleModel,
    ToolAttempt,
    ToolsAdmitted,
    ToolVerdict,
)
from retinue.results import error_payload
from retinue.reviews import Judgement, planned

ALLOWED = ToolVerdict(allowed=True)


class PoliciesStopped(Exception):
    """The run or the delegate is ending: what its policies were asked will not be answered."""


class Policies(Protocol):
    """What the application has to say, on a user loop; see :class:`retinue.run_policies.RunPolicies`.

    Each method returns at once; the answer comes to the loop of the caller. A policy that raises makes the
    awaiting raise, and :class:`PoliciesStopped` comes where :meth:`stop` was called meanwhile.
    """

    def prepare_run(self, revision: int) -> Awaitable[None]: ...

    def prepare(
        self, asker: RunRequest, message: PrepareModel, index: int, revision: int
    ) -> Awaitable[ModelPrepared]: ...

    def review(self, asker: RunRequest, attempt: ToolAttempt, revision: int) -> Awaitable[Judgement]: ...

    def stop(self, run_id: str | None = None) -> None:
        """Cancel what is asked for a participant, or for all."""
        ...


class Gate:
    """Says yes or no to the calls of one tree.

    Args:
        request: of the root.
        config: the app.
        ledger: of the tree.
        inbox: of the run; while it waits for an answer no model call begins.
        desk: where approvals are asked for; ``None`` where nobody can be asked.
        emit: adds an event of a participant to the run's log.
    """

    def __init__(
        self,
        request: RunRequest,
        config: RuntimeConfig,
        ledger: BudgetLedger,
        inbox: RunInbox,
        desk: ApprovalDesk | None,
        emit: Callable[[Payload, Participant], None],
    ) -> None:
        self._request = request
        self._config = config
        self._ledger = ledger
        self._inbox = inbox
        self._desk = desk
        self._emit = emit
        self.policies: Policies | None = None
        """Set before the driver starts, where the app has policies."""
        self.revision = 0
        """How often a completion policy sent the work back; of the run as a whole."""
        self.stopped: str | None = None
        """Why nothing more is admitted for anybody."""
        self.budget: BudgetSnapshot = ledger.snapshot()
        """Published for other threads: replaced as a whole, never changed."""
        self._reviews: dict[tuple[str, str], asyncio.Task[ToolVerdict]] = {}
        """Attempts about which somebody else is asked, by account and attempt id, until the verdict was
        given."""
        self._tasks: set[asyncio.Task[RootReply]] = set()

    # --- who may still do something -----------------------------------------------------------------------

    def stopping(self, participant: Participant) -> str | None:
        """Why nothing more is admitted for a participant."""
        ended = "it has ended" if participant.ended.done() else None
        return self.stopped or participant.stopped or ended

    def stop_reply(self, participant: Participant) -> Rejected:
        why = self.stopping(participant) or "the run has ended"
        return Rejected(error={"code": "cancelled", "message": why}, cancelled=True)

    def stop(self, reason: str) -> None:
        """Admit nothing any more, and ask nobody any more."""
        self.stopped = self.stopped or reason
        if self._desk is not None:
            self._desk.cancel(reason)
        if self.policies is not None:
            self.policies.stop()

    def leave(self, participant: Participant, reason: str) -> None:
        """A delegate has ended, or is being cancelled: nobody needs an answer for it any more."""
        if self._desk is not None:
            self._desk.cancel(reason, participant.run_id)
        if self.policies is not None:
            self.policies.stop(participant.run_id)

    async def settled(self) -> None:
        """Wait until nobody is asked any more."""
        while waiting := [*self._tasks, *(each for each in self._reviews.values() if not each.done())]:
            await asyncio.wait(waiting)
        self._reviews.clear()
        if self._desk is not None:
            await self._desk.closed()

    def publish(self) -> None:
        self.budget = self._ledger.snapshot()

    # --- model calls --------------------------------------------------------------------------------------

    def prepare_run(self, participant: Participant) -> RootReply | Awaitable[RootReply]:
        """Let the controller speak before the run, and reply when it has."""
        assert self.policies is not None
        return self._later(self._prepare_run(participant, self.policies))

    async def _prepare_run(self, participant: Participant, policies: Policies) -> RootReply:
        await policies.prepare_run(self.revision)
        return Acknowledged() if self.stopping(participant) is None else self.stop_reply(participant)

    def prepare_model(
        self, participant: Participant, message: PrepareModel
    ) -> RootReply | Awaitable[RootReply]:
        """Reserve one call; the reply comes when the controller and the context policy have spoken."""
        if self.stopping(participant) is not None:
            return self.stop_reply(participant)
        self._inbox.check_not_waiting()
        assert self.policies is not None
        self._ledger.reserve_slot(participant.account, message.call_id, message.role)
        self.publish()
        index = participant.steps
        participant.steps += 1
        return self._later(self._prepare_model(participant, message, index, self.policies))

    async def _prepare_model(
        self, participant: Participant, message: PrepareModel, index: int, policies: Policies
    ) -> RootReply:
        account, kept = participant.account, False
        try:
            prepared = await policies.prepare(participant.request, message, index, self.revision)
            if self.stopping(participant) is not None:
                return self.stop_reply(participant)
            if prepared.role != message.role:
                self._ledger.move_slot(account, message.call_id, prepared.role)
            kept = True
            return prepared
        except PoliciesStopped:
            return self.stop_reply(participant)
        finally:
            if not kept:
                self._ledger.release_slot(account, message.call_id)
            self.publish()

    def release_model(self, participant: Participant, message: ReleaseModel) -> None:
        self._ledger.release_slot(participant.account, message.call_id)
        self.publish()

    def admit_model(self, participant: Participant, message: AdmitModel) -> RootReply:
        try:
            if self.stopping(participant) is not None:
                self._ledger.release_slot(participant.account, message.call_id)
                return self.stop_reply(participant)
            if message.role not in self._request.grants.model_roles:
                raise AccessDenied(
                    f"model role {message.role!r} is not granted to this run", role=message.role
                )
            self._inbox.check_not_waiting()
            grant = self._ledger.admit_model(
                participant.account,
                message.call_id,
                message.projected_input,
                message.requested_output,
                role=message.role,
                kind=message.kind,
                provider_id=message.provider_id,
                model_id=message.model_id,
            )
        except RetinueError:
            self._ledger.release_slot(participant.account, message.call_id)
            raise
        finally:
            self.publish()
        if message.tools is not None:
            participant.offered = frozenset(message.tools)
        return ModelAdmitted(max_tokens=grant.max_tokens)

    def settle_model(self, participant: Participant, message: SettleModel) -> None:
        self._ledger.settle_model(
            participant.account,
            message.call_id,
            message.usage,
            started=message.started,
            estimated=message.estimated,
        )
        self.publish()
        if message.answered and self.stopping(participant) is None:
            self._emit(ModelComplete(message.provider_id, message.model_id, message.usage), participant)

    # --- tools and effects --------------------------------------------------------------------------------

    def admit_tools(self, participant: Participant, message: AdmitTools) -> RootReply | Awaitable[RootReply]:
        """The verdicts about a batch. One that takes longer is replied to late where it is the only one, and
        ``pending`` where there are more."""
        if self.stopping(participant) is not None:
            return self.stop_reply(participant)
        counted = self._count(participant, message)
        verdicts = [
            counted.get(attempt.id) or self._judge(participant, attempt) for attempt in message.attempts
        ]
        if None not in verdicts:
            return ToolsAdmitted(verdicts=[verdict for verdict in verdicts if verdict is not None])
        reviews = [
            None if verdict else self._review(participant, attempt)
            for verdict, attempt in zip(verdicts, message.attempts, strict=True)
        ]
        if len(reviews) == 1 and reviews[0] is not None:
            return self._later(self._verdict((participant.account, message.attempts[0].id)))
        return ToolsAdmitted(verdicts=[verdict or ToolVerdict(pending=True) for verdict in verdicts])

    def await_verdict(self, participant: Participant, message: AwaitVerdict) -> Awaitable[RootReply]:
        key = participant.account, message.attempt_id
        if key not in self._reviews:
            raise RetinueError(f"nothing is asked about attempt {message.attempt_id!r}", code="not_found")
        return self._later(self._verdict(key))

    def _count(self, participant: Participant, message: AdmitTools) -> dict[str, ToolVerdict]:
        """The refusals of the runtime's own gate by attempt id; what is not in it has been counted."""
        refused = {
            attempt.id: refusal
            for attempt in message.attempts
            if (refusal := self._refusal(participant, attempt)) is not None
        }
        passed = [attempt for attempt in message.attempts if attempt.id not in refused]
        answers = self._ledger.admit_tools(
            participant.account,
            [(attempt.id, attempt.tool_name) for attempt in passed],
            all_or_nothing=self._config.tool_batches == "all_or_nothing",
        )
        for attempt, exhausted in zip(passed, answers, strict=True):
            if exhausted is not None:
                refused[attempt.id] = ToolVerdict(denial="budget", reason=exhausted.message)
        self.publish()
        return refused

    def _refusal(self, participant: Participant, attempt: ToolAttempt) -> ToolVerdict | None:
        """What the runtime itself has against an attempt, before it is counted."""
        name = attempt.tool_name
        if name not in self._request.grants.tool_ids:
            return ToolVerdict(denial="grant", reason=f"{name} is not granted to this run")
        if not attempt.driver and participant.offered is not None and name not in participant.offered:
            return ToolVerdict(denial="grant", reason=f"{name} was not offered with the last model call")
        return self._revision_refusal()

    def _revision_refusal(self) -> ToolVerdict | None:
        if self.revision and not self._config.allow_revision_effects:
            return ToolVerdict(
                denial="revision", reason="revisions may call no tools (allow_revision_effects)"
            )
        return None

    def _judge(self, participant: Participant, attempt: ToolAttempt) -> ToolVerdict | None:
        """The verdict where nobody has to be asked."""
        if self._config.execution_policy is not None or (participant.account, attempt.id) in self._reviews:
            return None
        return self._applied(self._judgement(attempt), attempt)

    def _judgement(self, attempt: ToolAttempt, judged: Judgement | None = None) -> Judgement:
        """The decision about an attempt, of the policy where there is one, as the mode of the run has it."""
        return planned(judged or Judgement(action="allow", effect=attempt.effect), self._request.run_mode)

    def _applied(self, judged: Judgement, attempt: ToolAttempt) -> ToolVerdict | None:
        """What follows from a decision; ``None`` where a person must approve."""
        if judged.action == "deny":
            return ToolVerdict(denial="policy", reason=judged.reason or f"{attempt.tool_name} is not allowed")
        if not self._asks(judged.action, attempt):
            return ALLOWED
        if self._desk is None:
            why = _asked_because(judged, attempt) or f"{attempt.tool_name} needs an approval"
            return ToolVerdict(
                denial="approval_required", reason=f"{why}; nobody can be asked (config.approvals)"
            )
        return None

    def _asks(self, action: PolicyAction, attempt: ToolAttempt) -> bool:
        if action == "ask" or attempt.ask is not None:
            return True
        if attempt.requires_approval is not None:
            return attempt.requires_approval
        approvals = self._config.approvals
        return approvals is not None and approvals.requires(attempt.tool_name)

    def _review(self, participant: Participant, attempt: ToolAttempt) -> asyncio.Task[ToolVerdict]:
        key = participant.account, attempt.id
        review = self._reviews.get(key)
        if review is None:
            review = self._reviews[key] = asyncio.ensure_future(self._reviewed(participant, attempt))
            review.add_done_callback(_seen)
        return review

    async def _reviewed(self, participant: Participant, attempt: ToolAttempt) -> ToolVerdict:
        judged = None
        if self._config.execution_policy is not None:
            assert self.policies is not None
            try:
                judged = await self.policies.review(participant.request, attempt, self.revision)
            except PoliciesStopped:
                return self._cancelled(participant)
        judged = self._judgement(attempt, judged)
        verdict = self._applied(judged, attempt)
        if verdict is None and self.stopping(participant) is None:
            verdict = await self._approved(participant, attempt, _asked_because(judged, attempt))
        if self.stopping(participant) is not None:
            return self._cancelled(participant)
        assert verdict is not None
        return (self._revision_refusal() or verdict) if verdict.allowed else verdict

    async def _approved(self, participant: Participant, attempt: ToolAttempt, reason: str) -> ToolVerdict:
        assert self._desk is not None
        outcome = await self._desk.ask(
            run_id=participant.run_id,
            agent_name=participant.name,
            tool_name=attempt.tool_name,
            arguments=attempt.arguments,
            reason=reason,
        )
        if outcome.state == "approved":
            return ALLOWED
        if outcome.state == "cancelled":
            return ToolVerdict(denial="cancelled", reason=outcome.reason)
        return ToolVerdict(denial="approval_denied", reason=outcome.reason)

    def _cancelled(self, participant: Participant) -> ToolVerdict:
        return ToolVerdict(denial="cancelled", reason=self.stopping(participant) or "the run is ending")

    async def _verdict(self, key: tuple[str, str]) -> RootReply:
        review = self._reviews[key]
        try:
            return ToolsAdmitted(verdicts=[await asyncio.shield(review)])
        finally:
            self._reviews.pop(key, None)  # it was kept until somebody asked for it

    # --- answers that come later --------------------------------------------------------------------------

    def _later(self, work: Awaitable[RootReply]) -> Awaitable[RootReply]:
        task = asyncio.ensure_future(_answered(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _asked_because(judged: Judgement, attempt: ToolAttempt) -> str:
    """Why a person is asked: as the app's policy says, or the agent's, or a plan; empty where a rule wants
    it."""
    return (judged.reason if judged.action == "ask" else "") or attempt.ask or ""


def _seen(review: asyncio.Task[ToolVerdict]) -> None:
    """Whoever asks for the verdict is told of an error; where nobody does any more, nobody misses it."""
    if not review.cancelled():
        review.exception()


async def _answered(work: Awaitable[RootReply]) -> RootReply:
    try:
        return await work
    except PoliciesStopped:
        return Rejected(error={"code": "cancelled", "message": "the run is ending"}, cancelled=True)
    except Exception as error:  # whatever a policy of the application raises fails its run
        return Rejected(error=error_payload(error))
