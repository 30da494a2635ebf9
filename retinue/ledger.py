"""The budget ledger of one tree: admission before, settlement after, exact under any interleaving.

One ledger stands beside the root of a run, on the control loop, and is the only place that says yes to a
call of the run or of any of its delegates (contract section 8). Admission *is* the reservation: after it,
``used + reserved <= limit`` holds for every account on the way up to the root. Reserve and settle carry
(participant, call id) and are idempotent: a message that arrives twice has one effect and one answer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from retinue.budgets import Budgets, BudgetSnapshot, Resource, ResourceSnapshot, Usage
from retinue.errors import BudgetExhausted, RetinueError

ROOT = ""
"""Participant name of the root of a tree."""


@dataclass(frozen=True, kw_only=True)
class ModelGrant:
    """An admitted model call: at most ``max_tokens`` of output, ``None`` when nothing bounds it."""

    max_tokens: int | None


@dataclass
class _Counter:
    limit: int | None
    used: int = 0
    reserved: int = 0

    @property
    def remaining(self) -> int | None:
        return None if self.limit is None else max(0, self.limit - self.used - self.reserved)

    def fits(self, amount: int) -> bool:
        return self.limit is None or self.used + self.reserved + amount <= self.limit

    def snapshot(self) -> ResourceSnapshot:
        return ResourceSnapshot(
            limit=self.limit, used=self.used, reserved=self.reserved, remaining=self.remaining
        )


@dataclass
class _Account:
    """One participant's limits and totals; a delegate's spending counts in every account above it too."""

    parent: _Account | None
    model_calls: _Counter
    tool_calls: _Counter
    tokens: _Counter
    unknown_usage_calls: int = 0
    own_usage: Usage = field(default_factory=Usage)
    """What providers reported for this participant alone."""
    open_calls: set[str] = field(default_factory=set)
    """Its own model calls that are admitted and not settled."""

    def chain(self) -> list[_Account]:
        """This account and those above it, innermost first."""
        accounts: list[_Account] = []
        account: _Account | None = self
        while account is not None:
            accounts.append(account)
            account = account.parent
        return accounts


@dataclass
class _ModelCall:
    account: _Account
    projected: int
    """Tokens charged when nobody knows the usage: projected input and output cap."""
    grant: ModelGrant
    state: Literal["reserved", "exact", "unknown", "released"] = "reserved"
    charged: int = 0


class BudgetLedger:
    """The ledger of a tree. Not thread-safe: it belongs to one event loop, and no method awaits."""

    def __init__(self, budgets: Budgets) -> None:
        self._accounts: dict[str, _Account] = {ROOT: _new_account(budgets, None)}
        self._model_calls: dict[tuple[str, str], _ModelCall] = {}
        self._refusals: dict[tuple[str, str], BudgetExhausted] = {}
        self._tool_calls: dict[tuple[str, str], bool] = {}
        self.model_calls_started = 0
        """Model calls that reached a provider: when 0, the driver's own usage figure stands."""
        self.usage = Usage()
        """What providers reported, over the whole tree."""

    # --- participants -------------------------------------------------------------------------------------

    def open_account(self, participant: str, parent: str, budgets: Budgets | None) -> None:
        """Let a delegate spend, within its parent's accounts and its own limits, if any."""
        if participant not in self._accounts:
            above = self._account(parent)
            self._accounts[participant] = _new_account(budgets or Budgets(), above)

    def lose(self, participant: str) -> None:
        """Charge what a lost participant had reserved as unknown usage."""
        for call_id in list(self._account(participant).open_calls):
            self.settle_model(participant, call_id, None)

    def limits_tokens(self, participant: str) -> bool:
        """Whether a token limit bounds this participant, its own or one above it."""
        return any(level.tokens.limit is not None for level in self._account(participant).chain())

    def usage_of(self, participant: str) -> Usage:
        """What providers reported for one participant, without its delegates."""
        return self._account(participant).own_usage

    # --- model calls --------------------------------------------------------------------------------------

    def admit_model(
        self, participant: str, call_id: str, projected_input: int, requested_output: int | None
    ) -> ModelGrant:
        """Reserve one call, the projected input and the output cap, or refuse and reserve nothing.

        Args:
            participant: who asks.
            call_id: unique for the participant; a repeat gets the first answer.
            projected_input: tokens that the request is estimated to have.
            requested_output: tokens of output that the caller wants at most; ``None`` asks for all that is
                left, or for no bound where tokens are unlimited.

        Raises:
            BudgetExhausted: no call left, or no token left after the projected input.
        """
        key = (participant, call_id)
        known = self._model_calls.get(key)
        if known is not None:
            return known.grant
        if key in self._refusals:
            raise self._refusals[key]
        try:
            account = self._account(participant)
            grant = _model_grant(account, projected_input, requested_output)
        except BudgetExhausted as refusal:
            self._refusals[key] = refusal
            raise
        projected = projected_input + (grant.max_tokens or 0)
        for level in account.chain():
            level.model_calls.used += 1
            level.tokens.reserved += projected
        self._model_calls[key] = _ModelCall(account, projected, grant)
        account.open_calls.add(call_id)
        return grant

    def settle_model(
        self, participant: str, call_id: str, usage: Usage | None, *, started: bool = True
    ) -> None:
        """Turn a reservation into what was used.

        Known usage replaces the projection, also when it comes late; a started call without it is charged
        with the projection; one that never started is given back whole. Repeats change nothing.
        """
        call = self._model_calls.get((participant, call_id))
        if call is None:
            raise RetinueError(f"model call {call_id!r} of {participant or 'the root'!r} was never admitted")
        if call.state in ("exact", "released") or (call.state == "unknown" and usage is None):
            return
        chain = call.account.chain()
        if call.state == "unknown":
            for level in chain:
                level.tokens.used -= call.charged
                level.unknown_usage_calls -= 1
        else:
            call.account.open_calls.discard(call_id)
            for level in chain:
                level.tokens.reserved -= call.projected
            if started or usage is not None:
                self.model_calls_started += 1
        if usage is not None:
            call.state, call.charged = "exact", usage.total_tokens
            call.account.own_usage += usage
            self.usage += usage
        elif started:
            call.state, call.charged = "unknown", call.projected
        else:
            call.state, call.charged = "released", 0
        for level in chain:
            level.tokens.used += call.charged
            if call.state == "unknown":
                level.unknown_usage_calls += 1
            elif call.state == "released":
                level.model_calls.used -= 1

    # --- tool attempts ------------------------------------------------------------------------------------

    def admit_tool(self, participant: str, call_id: str) -> bool:
        """Count one tool attempt, if every account has one left. A repeat gets the first answer."""
        key = (participant, call_id)
        if key not in self._tool_calls:
            chain = self._account(participant).chain()
            fits = all(level.tool_calls.fits(1) for level in chain)
            for level in chain if fits else ():
                level.tool_calls.used += 1
            self._tool_calls[key] = fits
        return self._tool_calls[key]

    # --- views --------------------------------------------------------------------------------------------

    @property
    def open_reservations(self) -> int:
        """Model calls that are admitted and not settled."""
        return sum(len(account.open_calls) for account in self._accounts.values())

    def snapshot(self, participant: str = ROOT) -> BudgetSnapshot:
        """The totals of a participant with everything below it; of the whole tree by default."""
        account = self._account(participant)
        return BudgetSnapshot(
            model_calls=account.model_calls.snapshot(),
            tool_calls=account.tool_calls.snapshot(),
            tokens=account.tokens.snapshot(),
            unknown_usage_calls=account.unknown_usage_calls,
        )

    def _account(self, participant: str) -> _Account:
        try:
            return self._accounts[participant]
        except KeyError:
            raise RetinueError(f"participant {participant!r} has no account in this ledger") from None


def _new_account(budgets: Budgets, parent: _Account | None) -> _Account:
    return _Account(
        parent,
        _Counter(budgets.max_model_calls),
        _Counter(budgets.max_tool_calls),
        _Counter(budgets.max_tokens),
    )


def _model_grant(account: _Account, projected_input: int, requested_output: int | None) -> ModelGrant:
    """What every account on the way up can bear, or the refusal of the innermost that cannot."""
    cap = requested_output
    for level in account.chain():
        if not level.model_calls.fits(1):
            raise _refusal("model_calls", level.model_calls, "no model call is left")
        remaining = level.tokens.remaining
        if remaining is None:
            continue
        if remaining <= projected_input:
            why = f"{remaining} tokens are left and the input alone needs {projected_input}"
            raise _refusal("tokens", level.tokens, why)
        cap = remaining - projected_input if cap is None else min(remaining - projected_input, cap)
    return ModelGrant(max_tokens=cap)


def _refusal(resource: Resource, counter: _Counter, why: str) -> BudgetExhausted:
    return BudgetExhausted(
        f"budget exhausted: {why} (limit {counter.limit}, used {counter.used}, reserved {counter.reserved})",
        resource=resource,
        remaining=counter.remaining,
    )
