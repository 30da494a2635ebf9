"""What an execution policy says of one call, and what plan mode makes of it (contract section 7)."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast, get_args

import msgspec

from retinue.drivers import RunMode
from retinue.json_values import encode_json
from retinue.messages import escape_surrogates
from retinue.policies import CallUnderReview, Decision, Effect, ExecutionPolicy, PolicyAction
from retinue.policy_context import PolicyContext
from retinue.results import error_text

_STRICTNESS: dict[PolicyAction, int] = {"allow": 0, "ask": 1, "deny": 2}
CHANGED = "the arguments were changed while they were reviewed"


class ArgumentsChanged(Exception):
    """Somebody changed the arguments that they were shown, and approved them."""


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """What was decided of a call, before plan mode and approvals."""

    action: PolicyAction
    reason: str = ""
    effect: Effect = "unknown"


async def review(
    policy: ExecutionPolicy | None, call: CallUnderReview, ctx: PolicyContext, run_mode: RunMode
) -> Judgement:
    """Ask a policy; on a user loop. What cannot be taken for a decision denies, and so does what it raises.

    Args:
        run_mode: in plan mode the effect matters, so the policy is asked for it, if it can tell.
    """
    if policy is None:
        return Judgement(action="allow", effect=call.effect)
    try:
        before = encode_json(call.arguments)
        decision: object = await said(lambda: policy.decide(call, ctx))
        effect = await _effect(policy, call, ctx) if run_mode == "plan" else call.effect
        if _encoded(call.arguments) != before:
            return _denied(CHANGED)
        if not isinstance(decision, Decision) or decision.action not in get_args(PolicyAction):
            return _denied(f"the execution policy gave {decision!r:.80}, which is no decision")
        reason = escape_surrogates(str(decision.reason))
        return Judgement(action=decision.action, reason=reason, effect=effect)
    except Exception as error:
        return _denied(f"the execution policy raised {raised(error)}")


async def _effect(policy: ExecutionPolicy, call: CallUnderReview, ctx: PolicyContext) -> Effect:
    """What the call does to the world: as the policy says, where it can tell, else as the tool declares."""
    resolve = getattr(policy, "resolve_effect", None)
    if resolve is None:
        return call.effect
    effect = await said(lambda: resolve(call, ctx))
    return cast(Effect, effect) if effect in get_args(Effect) else "unknown"


class Broken(Exception):
    """Code of the application left as if the process ended, or the run: that must not reach the loop."""


async def said(ask: Callable[[], object]) -> Any:
    """What code of the application answers, at once or later.

    Raises:
        Exception: whatever it raises; :class:`Broken` for an exit or a cancellation of its own.
    """
    try:
        answer = ask()
        return await answer if inspect.isawaitable(answer) else answer
    except (SystemExit, KeyboardInterrupt) as error:
        raise Broken(raised(error)) from None
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise Broken(raised(error)) from None


def raised(error: BaseException) -> str:
    """An error of the application's code, in a word and what it says."""
    if isinstance(error, Broken):
        return error_text(error)
    text = error_text(error)
    return escape_surrogates(text if text == type(error).__name__ else f"{type(error).__name__}: {text}")


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


def planned(judged: Judgement, run_mode: RunMode) -> Judgement:
    """What a judgement becomes in a run of this mode, with the reason of whoever is stricter."""
    if run_mode != "plan":
        return judged
    action, why = plan_mode(judged.action, judged.effect)
    reason = why if action != judged.action else judged.reason or why
    return Judgement(action=action, reason=reason, effect=judged.effect)


def stricter(one: Judgement, other: Judgement) -> Judgement:
    """The decision of two policies: deny over ask over allow, and of the effects the graver."""
    first = one if _STRICTNESS[one.action] >= _STRICTNESS[other.action] else other
    return Judgement(action=first.action, reason=first.reason, effect=graver(one.effect, other.effect))


def graver(one: Effect, other: Effect) -> Effect:
    """Of two words about one call the one that a plan likes least: ``read`` only where both say so."""
    return max(one, other, key=lambda effect: {"read": 0, "unknown": 1}.get(effect, 2))


@dataclass(frozen=True)
class InheritedPolicy:
    """What binds an agent whom another one asks: its own policy, and the policy of who asks it."""

    outer: ExecutionPolicy
    own: ExecutionPolicy

    async def decide(self, call: CallUnderReview, ctx: PolicyContext) -> Decision:
        outer = await review(self.outer, call, ctx, "execute")
        if outer.action == "deny":
            return Decision(action="deny", reason=outer.reason)
        both = stricter(outer, await review(self.own, call, ctx, "execute"))
        return Decision(action=both.action, reason=both.reason)

    async def resolve_effect(self, call: CallUnderReview, ctx: PolicyContext) -> Effect:
        outer = await _effect(self.outer, call, ctx)
        return graver(outer, await _effect(self.own, call, ctx))


def inherited(
    outer: ExecutionPolicy | None, own: ExecutionPolicy | None, app: ExecutionPolicy | None
) -> ExecutionPolicy | None:
    """The policy of an agent whom another one asks.

    Args:
        outer: of who asks.
        own: of the agent itself.
        app: of the app, which the root asks about every call anyway, and which stays there.
    """
    if outer is None or outer is app or outer is own:
        return None if own is app else own
    if own is None or own is app:
        return outer
    return InheritedPolicy(outer, own)
