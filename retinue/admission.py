"""What the accounts of a ledger have room for, and how a refusal says what they have not.

Nothing here changes an account. Each check goes from the innermost account up to the root, in each of them
through the account as a whole and then the role or tool, and raises for the first that has no room.
"""

from __future__ import annotations

from retinue.accounts import Account, Bucket, Counter
from retinue.budgets import CallKind, Resource
from retinue.errors import BudgetExhausted, Unsupported
from retinue.prices import Price, PriceTable, amount_of, shown_amount


def check_calls(account: Account, role: str, kind: CallKind) -> None:
    """Raise ``BudgetExhausted`` where no model call is left."""
    for level in account.chain():
        for bucket in level.buckets(role):
            if not bucket.calls.fits(1, kind):
                why = f"no model call is left{_but(bucket.calls, kind)}"
                raise _refusal("model_calls", bucket, bucket.calls, why, needed=1)


def output_cap(
    account: Account, role: str, kind: CallKind, projected_input: int, requested: int | None
) -> int | None:
    """Tokens of output that every account on the way can bear, ``requested`` at most; ``None`` is no bound.

    Raises:
        BudgetExhausted: no token is left after the input.
    """
    cap = requested
    for level in account.chain():
        for bucket in level.buckets(role):
            available = bucket.tokens.available(kind)
            if available is None:
                continue
            if available <= projected_input:
                left = f"{available} tokens are left{_but(bucket.tokens, kind)}"
                why = f"{left} and the input alone needs {projected_input}"
                raise _refusal("tokens", bucket, bucket.tokens, why, needed=projected_input + 1)
            cap = available - projected_input if cap is None else min(available - projected_input, cap)
    return cap


def affordable(
    account: Account,
    role: str,
    price: Price | None,
    projected_input: int,
    cap: int | None,
    *,
    model: str,
    prices: PriceTable | None,
) -> int | None:
    """The output cap that every limit in money can bear too.

    Args:
        price: of the model; ``None`` where it has none.
        cap: tokens of output at most.
        model: its name, for the refusal.

    Raises:
        BudgetExhausted: no money is left for one token after the input.
        Unsupported: a limit in money, and no price.
    """
    for level in account.chain():
        for bucket in level.buckets(role):
            left = bucket.money.remaining
            if left is None:
                continue
            if price is None:
                raise _unpriced(bucket, model, prices)
            output = price.output_for(left, projected_input)
            if output is not None and output < 1:
                needed = amount_of(price.bound(projected_input, 1))
                why = (
                    f"{shown_amount(amount_of(left))} is left and {model} needs {shown_amount(needed)} "
                    f"for the input and one token of output"
                )
                raise _refusal("money", bucket, bucket.money, why, needed=shown_amount(needed))
            cap = output if cap is None else cap if output is None else min(cap, output)
    return cap


def attempt_refusal(account: Account, tool: str) -> BudgetExhausted | None:
    """Why one more attempt of a tool does not fit, or ``None``."""
    for level in account.chain():
        if not level.tool_calls.fits(1):
            return _tool_refusal(level.scope, "the tool call budget is exhausted", level.tool_calls, tool)
        if not (counter := level.tool(tool)).fits(1):
            why = f"the budget of {tool} is exhausted"
            return _tool_refusal(f"{level.scope}/tool:{tool}", why, counter, tool)
    return None


def _but(counter: Counter, kind: CallKind) -> str:
    """What is there, and not for this call."""
    kept = 0 if kind == "finishing" else counter.protected
    return f" but the {kept} kept back for finishing calls" if kept else ""


def _unpriced(bucket: Bucket, model: str, prices: PriceTable | None) -> Unsupported:
    if prices is None:
        why = "there is no price table; give one as config.prices"
    else:
        why = f"table {prices.version!r} has no price for {model}; add it to config.prices"
    return Unsupported(
        f"the limit in money of {bucket.scope} cannot be kept for {model}: {why}", operation="max_cost"
    )


def _tool_refusal(scope: str, why: str, counter: Counter, tool: str) -> BudgetExhausted:
    return BudgetExhausted(
        f"{why} (limit {counter.limit}, used {counter.used}; {scope})",
        resource="tool_calls",
        scope=scope,
        tool=tool,
        limit=counter.limit,
        remaining=counter.remaining,
        needed=1,
    )


def _refusal(
    resource: Resource, bucket: Bucket, counter: Counter, why: str, *, needed: int | str
) -> BudgetExhausted:
    limit, used, reserved, remaining = (
        shown_amount(amount_of(each)) if resource == "money" and each is not None else each
        for each in (counter.limit, counter.used, counter.reserved, counter.remaining)
    )
    _, _, role = bucket.scope.partition("/role:")
    return BudgetExhausted(
        f"budget exhausted: {why} (limit {limit}, used {used}, reserved {reserved}; {bucket.scope})",
        resource=resource,
        scope=bucket.scope,
        role=role or None,
        limit=limit,
        remaining=remaining,
        needed=needed,
    )
