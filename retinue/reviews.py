"""What an execution policy says of one call, and what plan mode makes of it (contract section 7)."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any, cast, get_args

import msgspec

from retinue.drivers import RunMode
from retinue.json_values import encode_json
from retinue.policies import CallUnderReview, Decision, Effect, ExecutionPolicy, PolicyAction
from retinue.policy_context import PolicyContext
from retinue.results import error_text

_STRICTNESS: dict[PolicyAction, int] = {"allow": 0, "ask": 1, "deny": 2}


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """What was decided of a call, before plan mode and approvals."""

    action: PolicyAction
    reason: str = ""
    effect: Effect = "unknown"


async def review(
    policy: ExecutionPolicy | None, call: CallUnderReview, ctx: PolicyContext, run_mode: RunMode
) -> Judgement:
    """Ask a policy; on a user loop. What cannot be taken for a decision denies.

    Args:
        run_mode: in plan mode the effect matters, so the policy is asked for it, if it can tell.
    """
    if policy is None:
        return Judgement(action="allow", effect=call.effect)
    before = encode_json(call.arguments)
    try:
        decision = await _settled(policy.decide(call, ctx))
        effect = await _effect(policy, call, ctx) if run_mode == "plan" else call.effect
        if _encoded(call.arguments) != before:
            return _denied("the arguments were changed while they were reviewed")
        if not isinstance(decision, Decision) or decision.action not in get_args(PolicyAction):
            return _denied(f"the execution policy gave {decision!r:.80}, which is no decision")
        return Judgement(action=decision.action, reason=str(decision.reason), effect=effect)
    except Exception as error:
        return _denied(f"the execution policy raised {type(error).__name__}: {error_text(error)}")


async def _effect(policy: ExecutionPolicy, call: CallUnderReview, ctx: PolicyContext) -> Effect:
    """What the call does to the world: as the policy says, where it can tell, else as the tool declares."""
    resolve = getattr(policy, "resolve_effect", None)
    if resolve is None:
        return call.effect
    effect = await _settled(resolve(call, ctx))
    return cast(Effect, effect) if effect in get_args(Effect) else "unknown"


async def _settled(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


def _encoded(arguments: object) -> bytes:
    try:
        return encode_json(arguments)
    except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError):
        return b""


def _denied(reason: str) -> Judgement:
    return Judgement(action="deny", reason=reason)


def plan_mode(action: PolicyAction, effect: Effect) -> tuple[PolicyAction, str]:
    """What a decision becomes where a run only plans: only what reads may run as decided.

    Returns:
        The action, and why where it is another one.
    """
    if action == "deny" or effect == "read":
        return action, ""
    if effect == "unknown":
        return "ask", "it may have effects, and this run only plans"
    return "deny", f"its effect is {effect!r}, and this run only plans"


def stricter(one: Judgement, other: Judgement) -> Judgement:
    """The decision of two policies: deny over ask over allow; of the effects, one that is no ``read``."""
    first, second = (one, other) if _STRICTNESS[one.action] >= _STRICTNESS[other.action] else (other, one)
    effect = second.effect if first.effect == "read" else first.effect
    return Judgement(action=first.action, reason=first.reason, effect=effect)
