"""Where the calls of one run wait for a person (contract section 7).

    ask ──> stored ──> shown ──> decided: compare-and-set in the store ──> told
                          └────> expired, or cancelled with whoever asked

A request is a record before anybody sees it, and its decision is a record before anybody acts on it: so it
outlives this process, and of two deciders one wins. Belongs to the control loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from retinue.approval_records import check_same, new_request, record_of, run_of, told, unknown_approval
from retinue.approvals import ApprovalRequest, Approvals, ApprovalState
from retinue.clocks import Stopwatch
from retinue.drivers import RunRequest
from retinue.errors import NotFound, RetinueError, ToolFailed
from retinue.events import ApprovalRequested, ApprovalResolved, Payload
from retinue.messages import escape_surrogates
from retinue.protocol import DecideRequest
from retinue.store import Lease, Store, StoredApproval
from retinue.store_wait import until_stored

logger = logging.getLogger(__name__)

T = TypeVar("T")

APPLICATION = "application"
"""Who decides where ``Approvals.on_request`` does."""
TIMEOUT = "timeout"
"""Who approves where ``Approvals.timeout_action`` does."""


@dataclass(frozen=True, kw_only=True)
class ApprovalOutcome:
    """What became of a request."""

    state: ApprovalState
    reason: str = ""
    by: str = ""


@dataclass(eq=False)
class _Asked:
    """A request whose record is not known to be settled."""

    request: ApprovalRequest
    outcome: asyncio.Future[ApprovalOutcome]
    """Set once: by what the store says, or by a cancellation, which does not wait for the store."""
    timer: Stopwatch | None = None
    shown: bool = False
    told: bool = False
    """The event that ends it was emitted."""
    writes: int = 0
    """Compare-and-sets under way."""

    @property
    def waits(self) -> bool:
        return self.shown and not self.outcome.done()

    @property
    def given_up(self) -> str | None:
        """Why nobody waits for it any more, although its record says nothing yet."""
        if not self.outcome.done():
            return None
        error = self.outcome.exception()
        return self.outcome.result().reason if error is None else str(error)

    def settle(self, outcome: ApprovalOutcome | Exception) -> None:
        if self.timer is not None:
            self.timer.stand()
        if self.outcome.done():
            return
        if isinstance(outcome, Exception):
            self.outcome.set_exception(outcome)
        else:
            self.outcome.set_result(outcome)


class ApprovalDesk:
    """The requests of one run.

    Args:
        request: of the root.
        approvals: the app's rules.
        store, lease: where requests are kept, and the right to write there.
        emit: adds an event to the run's log.
        notify: tells the application of a request; must return at once.
        on_change: called when :attr:`pending` has changed.
        wall_clock: gives epoch seconds.
    """

    def __init__(
        self,
        request: RunRequest,
        approvals: Approvals,
        *,
        store: Store,
        lease: Lease,
        emit: Callable[[Payload], None],
        notify: Callable[[ApprovalRequest], None] = lambda request: None,
        on_change: Callable[[], None] = lambda: None,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._root = request
        self._approvals = approvals
        self._store = store
        self._lease = lease
        self._emit = emit
        self._notify = notify
        self._on_change = on_change
        self._wall_clock = wall_clock
        self._asked: dict[str, _Asked] = {}
        """By approval id, oldest first."""
        self._stopped: str | None = None
        """Why nothing is asked any more."""
        self._left: dict[str, str] = {}
        """Why participants that have ended ask nothing any more, by run id."""
        self._tasks: set[asyncio.Task[Any]] = set()
        self.pending: tuple[ApprovalRequest, ...] = ()
        """Oldest first. Published for other threads: replaced as a whole, never changed."""

    # --- who asks -----------------------------------------------------------------------------------------

    async def ask(
        self, *, run_id: str, agent_name: str, tool_name: str, arguments: bytes, reason: str
    ) -> ApprovalOutcome:
        """Store a request, show it, and wait until it is settled.

        Whoever stops waiting takes its request back.

        Args:
            run_id: of the run or delegate that asks.
            agent_name: of the delegate; empty for the root.
            arguments: of the call, as JSON.
            reason: why it is asked.

        Raises:
            ToolFailed: nobody decided in time, and ``timeout_action`` is ``raise``.
            StoreUnavailable, LeaseLost: it could not be stored, and nobody has seen it; or its time is over
                and nobody can tell what stands.
        """
        why = self._stopped or self._left.get(run_id)
        if why is not None:
            return ApprovalOutcome(state="cancelled", reason=why)
        request = new_request(
            self._root,
            run_id=run_id,
            agent_name=agent_name,
            tool_name=tool_name,
            arguments=arguments,
            reason=reason,
            timeout=self._approvals.timeout,
            wall_clock=self._wall_clock,
        )
        asked = _Asked(request, asyncio.get_running_loop().create_future())
        asked.outcome.add_done_callback(_seen)
        self._asked[request.id] = asked
        self._own(self._open(asked))
        try:
            outcome = await asyncio.shield(asked.outcome)
        except asyncio.CancelledError:
            self._take_back(asked, "nobody waits for it any more")
            raise
        if outcome.state == "expired" and self._approvals.timeout_action == "raise":
            raise ToolFailed(
                f"request {request.id} for {tool_name} {outcome.reason}; ask again, or give people more time "
                "(config.approvals.timeout)",
                approval_id=request.id,
                tool_name=tool_name,
                timeout=self._approvals.timeout,
            )
        return outcome

    async def _open(self, asked: _Asked) -> None:
        """Store a request, then show it, unless nobody waits for it any more."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        record = record_of(asked.request)
        try:
            stands = await until_stored(lambda: self._store.open_approval(self._lease, record))
        except Exception as error:
            del self._asked[asked.request.id]
            asked.settle(error)
            return
        if stands.state != "pending":  # the run has its outcome
            self._settled(asked, stands)
        elif (why := asked.given_up) is not None:
            await self._cancel_record(asked, why)
        else:
            asked.shown = True
            left = self._approvals.timeout - (loop.time() - began)
            asked.timer = Stopwatch(left, lambda: self._time_is_up(asked))
            asked.timer.go()
            self._publish()
            self._emit(ApprovalRequested(asked.request))
            self._notify(asked.request)

    # --- who decides --------------------------------------------------------------------------------------

    async def decide(self, decision: DecideRequest) -> StoredApproval:
        """Approve or deny. The same decision again gives the outcome that stands.

        Raises:
            InputError: ``input_already_resolved``: it was settled otherwise; ``state`` and ``by`` say how.
            NotFound: this run has no such request.
            StoreUnavailable: the decision is not stored, and the call goes on waiting.
        """
        approval_id = decision.approval_id
        if run_of(approval_id) != self._root.run_id:
            raise unknown_approval(approval_id)
        asked = self._asked.get(approval_id)
        gone = self._stopped if asked is None else asked.given_up or self._stopped
        if gone is not None:  # what somebody was told of as cancelled must not be approved in the store
            settling = self._settle(approval_id, "cancelled", "", gone)
        else:
            state: ApprovalState = "approved" if decision.approve else "denied"
            settling = self._settle(approval_id, state, decision.by, decision.reason)
        # Whoever asked is told what was stored, even where this decider does not wait for it.
        stands = await asyncio.shield(settling)
        check_same(stands, decision)
        return stands

    async def decided_by_callback(self, approval_id: str, answer: object, why: str = "") -> None:
        """What ``Approvals.on_request`` said: only ``True`` approves, and ``None`` leaves it to others.

        Args:
            why: the reason that is stored with it.
        """
        asked = self._asked.get(approval_id)
        if answer is None or asked is None or not asked.waits:
            return
        state: ApprovalState = "approved" if answer is True else "denied"
        reason = why if isinstance(answer, bool) else f"on_request gave {answer!r:.80}, not True or False"
        try:
            await asyncio.shield(self._settle(approval_id, state, APPLICATION, reason))
        except RetinueError as error:
            logger.warning("what on_request said of approval %s is lost: %s", approval_id, error)

    def _time_is_up(self, asked: _Asked) -> None:
        self._own(self._expire(asked))

    async def _expire(self, asked: _Asked) -> None:
        """Settle a request that nobody decided in time; a decision that came first stands."""
        approves = self._approvals.timeout_action == "approve"
        reason = f"timed out: nobody decided within {self._approvals.timeout:g} s"
        state: ApprovalState = "approved" if approves else "expired"
        try:
            await self._settle(asked.request.id, state, TIMEOUT if approves else "", reason)
        except Exception as error:  # nobody can tell what stands, so nothing is approved
            asked.settle(error)
            self._publish()

    def _settle(
        self, approval_id: str, state: ApprovalState, by: str, reason: str
    ) -> asyncio.Task[StoredApproval]:
        """Settle a request in the store unless it is settled; then whoever waits is told what stands."""
        asked = self._asked.get(approval_id)
        if asked is not None:
            asked.writes += 1
        return self._own(self._compare_and_set(approval_id, asked, state, by, reason))

    async def _compare_and_set(
        self, approval_id: str, asked: _Asked | None, state: ApprovalState, by: str, reason: str
    ) -> StoredApproval:
        at = self._wall_clock()
        try:
            settled = await until_stored(
                lambda: self._store.settle_approval(
                    self._lease, approval_id, state, by=by, reason=reason, at=at
                )
            )
        except NotFound:
            raise unknown_approval(approval_id) from None
        finally:
            if asked is not None:
                asked.writes -= 1
        if asked is not None:
            self._settled(asked, settled.approval)
        return settled.approval

    def _settled(self, asked: _Asked, stands: StoredApproval) -> None:
        """The record is settled: tell whoever waits, and those who look on."""
        if self._asked.pop(stands.approval_id, None) is None:
            return
        asked.settle(ApprovalOutcome(state=stands.state, reason=told(stands), by=stands.by))
        self._publish()
        self._tell(asked, ApprovalResolved(stands.approval_id, stands.state, stands.by, stands.reason))

    def _tell(self, asked: _Asked, resolved: ApprovalResolved) -> None:
        if asked.shown and not asked.told:
            asked.told = True
            self._emit(resolved)

    # --- the end ------------------------------------------------------------------------------------------

    def cancel(self, reason: str, run_id: str | None = None) -> None:
        """Settle what waits as cancelled, of one participant or of all, which then ask nothing any more.

        Whoever waits is told at once. The records of a participant are settled here, those of the whole run
        with its outcome, in one transaction.
        """
        reason = escape_surrogates(reason)
        if run_id is None:
            self._stopped = self._stopped or reason
        else:
            self._left.setdefault(run_id, reason)
        for asked in list(self._asked.values()):
            if run_id in (None, asked.request.run_id):
                self._take_back(asked, reason)

    def _take_back(self, asked: _Asked, reason: str) -> None:
        if asked.outcome.done():
            return
        asked.settle(ApprovalOutcome(state="cancelled", reason=reason))
        self._publish()
        if not asked.shown or asked.writes:
            return  # what is under way settles the record, and tells what stands then
        if self._stopped is None:
            self._own(self._cancel_record(asked, reason))
        else:
            self._tell(asked, ApprovalResolved(asked.request.id, "cancelled", "", reason))

    async def _cancel_record(self, asked: _Asked, reason: str) -> None:
        if self._stopped is not None:
            return  # the run's outcome settles it
        try:
            await self._settle(asked.request.id, "cancelled", "", reason)
        except RetinueError as error:
            logger.warning("approval %s is cancelled only when its run ends: %s", asked.request.id, error)

    async def closed(self) -> None:
        """Wait until nothing of it runs any more, and leave nobody who looks on without an end."""
        while self._tasks:
            await asyncio.wait(self._tasks)
        for asked in self._asked.values():
            if (why := asked.given_up) is not None:  # the store could not say what stands
                self._tell(asked, ApprovalResolved(asked.request.id, "cancelled", "", why))

    def _own(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(_seen)
        return task

    def _publish(self) -> None:
        pending = tuple(asked.request for asked in self._asked.values() if asked.waits)
        if pending != self.pending:
            self.pending = pending
            self._on_change()


def _seen(future: asyncio.Future[Any]) -> None:
    """An error is for whoever waits; where nobody does any more, nobody misses it."""
    if not future.cancelled():
        future.exception()
