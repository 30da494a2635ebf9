"""The budget ledger of one tree: admission before, settlement after, exact under any interleaving.

    [slot] ──> admitted ──> settled: exact | estimated | unknown | released
       └─────────────────> released

One ledger stands beside the root of a run, on the control loop, and is the only place that says yes to a
call of the run or of any of its delegates (contract section 8). Admission *is* the reservation: after it,
``used + reserved <= limit`` holds for every account on the way up to the root, for the run as a whole, for
the role and for the tool. Reserve and settle carry (participant, call id) and are idempotent: a message that
arrives twice has one effect and one answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from retinue.accounts import Account, Bucket, Figures
from retinue.admission import affordable, attempt_refusal, check_calls, output_cap
from retinue.budgets import (
    Budgets,
    BudgetSnapshot,
    CallKind,
    ParticipantUsage,
    Spending,
    Usage,
    UsageReport,
)
from retinue.errors import BudgetExhausted, RetinueError, Unsupported
from retinue.prices import Price, PriceTable

FiguresChange = Callable[[Figures], None]

ROOT = ""
"""Participant name of the root of a tree."""


@dataclass(frozen=True, kw_only=True)
class ModelGrant:
    """An admitted model call: at most ``max_tokens`` of output, ``None`` when nothing bounds it."""

    max_tokens: int | None


@dataclass
class _Slot:
    """A call that is reserved while a controller or a context policy speaks."""

    account: Account
    role: str
    kind: CallKind


@dataclass
class _ModelCall:
    account: Account
    role: str
    kind: CallKind
    price: Price | None
    tokens: int
    """Charged when nobody knows the usage: projected input and output cap."""
    money: int
    """The same in money."""
    grant: ModelGrant
    state: Literal["reserved", "exact", "estimated", "unknown", "released"] = "reserved"
    estimate: Usage | None = None

    def buckets(self) -> Iterator[tuple[Account, tuple[Bucket, Bucket]]]:
        """All that it counts in, innermost account first."""
        for level in self.account.chain():
            yield level, level.buckets(self.role)


class BudgetLedger:
    """The ledger of a tree. Not thread-safe: it belongs to one event loop, and no method awaits.

    Args:
        budgets: of the run.
        prices: of models; without them nothing is counted in money.
        carried: the final snapshot of a run that this one goes on with: what that one has used is used here,
            and ``budgets`` are the limits with the top-up. The report begins at zero.

    Raises:
        Unsupported: what was spent before is in another currency than the price table.
    """

    def __init__(
        self,
        budgets: Budgets,
        *,
        prices: PriceTable | None = None,
        carried: BudgetSnapshot | None = None,
    ) -> None:
        self._prices = prices
        self._root = Account("", None, budgets, prices, ROOT)
        self._accounts: dict[str, Account] = {ROOT: self._root}
        self._slots: dict[tuple[str, str], _Slot] = {}
        self._model_calls: dict[tuple[str, str], _ModelCall] = {}
        self._refusals: dict[tuple[str, str], RetinueError] = {}
        self._attempts: dict[tuple[str, str], BudgetExhausted | None] = {}
        self._roles: dict[str, Figures] = {}
        self._tools: dict[str, int] = {}
        self.model_calls_started = 0
        """Model calls that reached a provider: when 0, the driver's own usage figure stands."""
        self.usage = Usage()
        """What providers reported, over the whole tree."""
        if carried is not None:
            spent = carried.money
            if prices is not None and spent is not None and spent.currency != prices.currency:
                raise Unsupported(
                    f"the run before this one has spent {spent.currency}, and the price table is in "
                    f"{prices.currency}; go on under a table in {spent.currency}",
                    operation="resume",
                )
            self._root.carry(carried)

    # --- participants -------------------------------------------------------------------------------------

    def open_account(self, participant: str, parent: str, budgets: Budgets | None, *, name: str = "") -> None:
        """Let a delegate spend, within its parent's accounts and its own limits, if any."""
        if participant not in self._accounts:
            above = self._account(parent)
            self._accounts[participant] = Account(
                name or participant, above, budgets or Budgets(), self._prices, participant
            )

    def close_account(self, participant: str) -> None:
        """The participant has ended: its figures are final, but for settlements that are still to come."""
        self._account(participant).open = False

    def lose(self, participant: str) -> None:
        """Charge what a lost participant had reserved as unknown usage; what it did not use is free again."""
        account = self._account(participant)
        for call_id in list(account.open_slots):
            self.release_slot(participant, call_id)
        for call_id in list(account.open_calls):
            self.settle_model(participant, call_id, None)

    def limits_tokens(self, participant: str) -> bool:
        """Whether a limit of tokens or money bounds this participant, its own or one above it."""
        return any(level.limits_tokens for level in self._account(participant).chain())

    def usage_of(self, participant: str) -> Usage:
        """What providers reported for one participant, without its delegates."""
        return self._account(participant).own.usage

    # --- slots --------------------------------------------------------------------------------------------

    def reserve_slot(self, participant: str, call_id: str, role: str, *, kind: CallKind = "task") -> None:
        """Reserve one model call, ahead of its tokens; a repeat changes nothing.

        Raises:
            BudgetExhausted: no call is left.
        """
        key = (participant, call_id)
        if key in self._slots or key in self._model_calls:
            return
        if key in self._refusals:
            raise self._refusals[key]
        account = self._account(participant)
        try:
            check_calls(account, role, kind)
        except BudgetExhausted as refusal:
            self._refusals[key] = refusal
            raise
        self._take_slot(key, _Slot(account, role, kind))

    def move_slot(self, participant: str, call_id: str, role: str) -> None:
        """The call will be made under another role: its slot counts there.

        Raises:
            BudgetExhausted: no call is left under that role; the slot is free again then.
        """
        key = (participant, call_id)
        slot = self._slots.get(key)
        if slot is None or slot.role == role:
            return
        self.release_slot(participant, call_id)
        self.reserve_slot(participant, call_id, role, kind=slot.kind)

    def release_slot(self, participant: str, call_id: str) -> None:
        """Give a call back that was reserved and not admitted; harmless where there is none."""
        slot = self._slots.pop((participant, call_id), None)
        if slot is None:
            return
        slot.account.open_slots.discard(call_id)
        for level in slot.account.chain():
            for bucket in level.buckets(slot.role):
                bucket.calls.settle(1, 0, slot.kind)
            level.show_role(slot.role)

    def _take_slot(self, key: tuple[str, str], slot: _Slot) -> None:
        self._slots[key] = slot
        slot.account.open_slots.add(key[1])
        for level in slot.account.chain():
            for bucket in level.buckets(slot.role):
                bucket.calls.reserve(1, slot.kind)
            level.show_role(slot.role)

    # --- model calls --------------------------------------------------------------------------------------

    def admit_model(
        self,
        participant: str,
        call_id: str,
        projected_input: int,
        requested_output: int | None,
        *,
        role: str = "main",
        kind: CallKind = "task",
        provider_id: str = "",
        model_id: str = "",
    ) -> ModelGrant:
        """Reserve one call, the projected input and the output cap, or refuse and reserve nothing.

        Args:
            participant: who asks.
            call_id: unique for the participant; a repeat gets the first answer. Its slot, if it has one, is
                the call that is taken.
            projected_input: tokens that the request is estimated to have.
            requested_output: tokens of output that the caller wants at most; ``None`` asks for all that is
                left, or for no bound where tokens and money are unlimited.
            role: whose limits count, beside the run's.
            kind: finishing calls may use what is kept back for them.
            provider_id, model_id: for the price.

        Raises:
            BudgetExhausted: no call left, or no token or money left after the projected input.
            Unsupported: a limit in money, and no price for this model.
        """
        key = (participant, call_id)
        known = self._model_calls.get(key)
        if known is not None:
            return known.grant
        if key in self._refusals:
            raise self._refusals[key]
        account = self._account(participant)
        price = None if self._prices is None else self._prices.find(provider_id, model_id)
        slot = self._slots.get(key)
        if slot is not None and (slot.role, slot.kind) != (role, kind):
            self.release_slot(participant, call_id)
            slot = None
        try:
            if slot is None:
                check_calls(account, role, kind)
            cap = output_cap(account, role, kind, projected_input, requested_output)
            model = f"{provider_id}/{model_id}" if provider_id else model_id or "a model without an id"
            cap = affordable(account, role, price, projected_input, cap, model=model, prices=self._prices)
        except RetinueError as refusal:
            self.release_slot(participant, call_id)
            self._refusals[key] = refusal
            raise
        if slot is None:
            self._take_slot(key, _Slot(account, role, kind))
        return self._commit(key, account, role, kind, price, projected_input, cap)

    def _commit(
        self,
        key: tuple[str, str],
        account: Account,
        role: str,
        kind: CallKind,
        price: Price | None,
        projected_input: int,
        cap: int | None,
    ) -> ModelGrant:
        """The slot becomes a call, and its tokens and money are reserved."""
        del self._slots[key]
        account.open_slots.discard(key[1])
        money = 0 if price is None else price.bound(projected_input, cap or 0)
        call = _ModelCall(
            account, role, kind, price, projected_input + (cap or 0), money, ModelGrant(max_tokens=cap)
        )
        self._model_calls[key] = call
        account.open_calls.add(key[1])
        for figures in (account.own, self._role(role)):
            figures.open_calls += 1
        for level, buckets in call.buckets():
            level.unsettled += 1
            for bucket in buckets:
                bucket.calls.settle(1, 1, kind)
                bucket.tokens.reserve(call.tokens, kind)
                bucket.money.reserve(call.money, kind)
                bucket.unpriced += self._prices is not None and price is None
            level.show_role(role)
        return call.grant

    def settle_model(
        self,
        participant: str,
        call_id: str,
        usage: Usage | None,
        *,
        started: bool = True,
        estimated: Usage | None = None,
    ) -> None:
        """Turn a reservation into what was used.

        Known usage replaces the projection, also when it comes late; a started call without it is charged
        with the projection, whatever can be estimated of it; one that never started is given back whole.
        Repeats change nothing.
        """
        call = self._model_calls.get((participant, call_id))
        if call is None:
            raise RetinueError(f"model call {call_id!r} of {participant or 'the root'!r} was never admitted")
        if call.state in ("exact", "released") or (call.state != "reserved" and usage is None):
            return
        if call.state == "reserved":
            call.account.open_calls.discard(call_id)
            for level, _ in call.buckets():
                level.unsettled -= 1
            self._tell(call, lambda figures: _count(figures, "open_calls", -1))
            if started or usage is not None:
                self.model_calls_started += 1
            before_tokens, before_money = 0, 0
            reserved_tokens, reserved_money = call.tokens, call.money
        else:  # a late report replaces the charge
            before_tokens, before_money = call.tokens, call.money
            reserved_tokens, reserved_money = 0, 0
            self._take_back(call)
        if usage is not None:
            call.state = "exact"
        elif started:
            call.state = "unknown" if estimated is None else "estimated"
            call.estimate = estimated
        else:
            call.state = "released"
        tokens, money = self._charge(call, usage)
        for level, buckets in call.buckets():
            for bucket in buckets:
                bucket.tokens.settle(reserved_tokens, tokens - before_tokens, call.kind)
                bucket.money.settle(reserved_money, money - before_money, call.kind)
                if call.state == "released":
                    bucket.calls.settle(0, -1, call.kind)
                    bucket.unpriced -= self._prices is not None and call.price is None
            level.unknown += call.state in ("unknown", "estimated")
            level.estimated += call.state == "estimated"
            level.show_role(call.role)
        self._tell(call, lambda figures: _record(figures, call, usage, tokens, money))
        if usage is not None:
            self.usage += usage

    @staticmethod
    def _charge(call: _ModelCall, usage: Usage | None) -> tuple[int, int]:
        """Tokens and money that a settled call counts for."""
        if usage is not None:
            return usage.total_tokens, 0 if call.price is None else call.price.cost(usage)
        return (0, 0) if call.state == "released" else (call.tokens, call.money)

    def _take_back(self, call: _ModelCall) -> None:
        """What was said of a call whose usage was not known."""
        for level, _ in call.buckets():
            level.unknown -= 1
            level.estimated -= call.state == "estimated"

        def forget(figures: Figures) -> None:
            _count(figures, f"{call.state}_calls", -1)
            figures.tokens -= call.tokens
            figures.money -= call.money
            if call.estimate is not None:
                figures.estimated = _minus(figures.estimated, call.estimate)

        self._tell(call, forget)

    def _tell(self, call: _ModelCall, change: FiguresChange) -> None:
        change(call.account.own)
        change(self._role(call.role))

    def _role(self, role: str) -> Figures:
        return self._roles.setdefault(role, Figures())

    # --- tool attempts ------------------------------------------------------------------------------------

    def admit_tools(
        self, participant: str, attempts: Sequence[tuple[str, str]], *, all_or_nothing: bool = False
    ) -> list[BudgetExhausted | None]:
        """Count a batch of tool attempts in one step; for each ``None``, or why it is refused.

        Args:
            attempts: (attempt id, tool name); a repeat of an id gets the first answer and counts no second
                time.
            all_or_nothing: where one does not fit, none of the new ones is counted; else those that fit, in
                their order.
        """
        account = self._account(participant)
        counted: dict[str, str] = {}
        for attempt_id, tool in attempts:
            key = (participant, attempt_id)
            if key in self._attempts:
                continue
            self._attempts[key] = attempt_refusal(account, tool)
            if self._attempts[key] is None:
                self._count_attempt(account, tool, 1)
                counted[attempt_id] = tool
        answers = [self._attempts[participant, attempt_id] for attempt_id, _ in attempts]
        first = next((refusal for refusal in answers if refusal is not None), None)
        if not all_or_nothing or first is None:
            return answers
        for attempt_id, tool in counted.items():
            self._count_attempt(account, tool, -1)
            self._attempts[participant, attempt_id] = BudgetExhausted(
                f"the batch does not fit as a whole: {first.message}", **first.data
            )
        return [self._attempts[participant, attempt_id] for attempt_id, _ in attempts]

    def admit_tool(self, participant: str, attempt_id: str, tool: str) -> BudgetExhausted | None:
        """One attempt: see :meth:`admit_tools`."""
        return self.admit_tools(participant, [(attempt_id, tool)])[0]

    def _count_attempt(self, account: Account, tool: str, count: int) -> None:
        for level in account.chain():
            level.tool_calls.used += count
            level.tool(tool).used += count
            level.show_tool(tool)
        account.own.attempts += count
        self._tools[tool] = self._tools.get(tool, 0) + count

    # --- views --------------------------------------------------------------------------------------------

    @property
    def open_reservations(self) -> int:
        """Model calls that are reserved, or admitted and not settled."""
        return len(self._slots) + sum(len(account.open_calls) for account in self._accounts.values())

    @property
    def spending(self) -> Spending:
        """What this tree used so far, without what a run before it did."""
        refused = sum(isinstance(error, BudgetExhausted) for error in self._refusals.values())
        return Spending(
            model_calls=self.model_calls_started,
            tool_calls=sum(self._tools.values()),
            refusals=refused + sum(refusal is not None for refusal in self._attempts.values()),
            input_tokens=self.usage.input_tokens,
            output_tokens=self.usage.output_tokens,
        )

    def snapshot(self, participant: str = ROOT) -> BudgetSnapshot:
        """The totals of a participant with everything below it; of the whole tree by default."""
        return self._account(participant).snapshot()

    def report(self, root_run_id: str = ROOT) -> UsageReport:
        """What the tree used, by participant, role and tool.

        Args:
            root_run_id: how the root is called; delegates are called as their accounts are.
        """
        subtrees = {participant: Figures() for participant in self._accounts}
        for account in reversed(self._accounts.values()):  # children come after their parents
            subtree = subtrees[account.participant]
            subtree.add(account.own)
            if account.parent is not None:
                subtrees[account.parent.participant].add(subtree)

        def named(account: Account) -> str:
            return account.participant or root_run_id

        return UsageReport(
            complete=not self.open_reservations
            and not any(account.open for account in self._accounts.values()),
            tree=subtrees[ROOT].shown(self._prices),
            participants=tuple(
                ParticipantUsage(
                    run_id=named(account),
                    name=account.name,
                    parent_run_id=None if account.parent is None else named(account.parent),
                    open=account.open,
                    own=account.own.shown(self._prices),
                    subtree=subtrees[account.participant].shown(self._prices),
                )
                for account in self._accounts.values()
            ),
            roles={role: figures.shown(self._prices) for role, figures in self._roles.items()},
            tools={tool: count for tool, count in self._tools.items() if count},
        )

    def _account(self, participant: str) -> Account:
        try:
            return self._accounts[participant]
        except KeyError:
            raise RetinueError(f"participant {participant!r} has no account in this ledger") from None


def _record(figures: Figures, call: _ModelCall, usage: Usage | None, tokens: int, money: int) -> None:
    """A call has its state: it counts in these figures."""
    if call.state == "released":
        return
    _count(figures, f"{call.state}_calls", 1)
    figures.tokens += tokens
    figures.money += money
    if usage is not None:
        figures.usage += usage
    elif call.estimate is not None:
        figures.estimated += call.estimate


def _count(figures: Figures, name: str, by: int) -> None:
    setattr(figures, name, getattr(figures, name) + by)


def _minus(whole: Usage, part: Usage) -> Usage:
    return Usage(**{name: getattr(whole, name) - getattr(part, name) for name in whole.__struct_fields__})
