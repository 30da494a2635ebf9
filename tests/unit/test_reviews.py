"""What is made of an execution policy's answer, of plan mode, and of two policies; no run, no gate."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from itertools import product
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retinue import CallUnderReview, Decision, PolicyContext
from retinue.policies import Effect, PolicyAction
from retinue.reviews import InheritedPolicy, Judgement, inherited, plan_mode, planned, review, stricter
from tests.unit.policy_world import PolicyServices

ACTIONS: tuple[PolicyAction, ...] = get_args(PolicyAction)
EFFECTS: tuple[Effect, ...] = get_args(Effect)
STRICTNESS = ["allow", "ask", "deny"]

judgements = st.builds(
    Judgement, action=st.sampled_from(ACTIONS), reason=st.text(max_size=3), effect=st.sampled_from(EFFECTS)
)


def call(**arguments: Any) -> CallUnderReview:
    return CallUnderReview(tool_name="pay", call_id="1", arguments=arguments, effect="write")


class Policy:
    """An execution policy made of a function of the call."""

    def __init__(self, decide: Callable[[CallUnderReview], Any]) -> None:
        self._decide = decide
        self.seen: list[PolicyContext] = []

    def decide(self, call: CallUnderReview, ctx: PolicyContext) -> Any:
        self.seen.append(ctx)
        return self._decide(call)


class Effects(Policy):
    """One that also says what a call does."""

    def __init__(self, decide: Callable[[CallUnderReview], Any], effect: Callable[[], Any]) -> None:
        super().__init__(decide)
        self._effect = effect

    def resolve_effect(self, call: CallUnderReview, ctx: PolicyContext) -> Any:
        return self._effect()


def allows(call: CallUnderReview) -> Decision:
    return Decision(action="allow")


async def later(value: Any) -> Any:
    await asyncio.sleep(0)
    return value


async def judged(policy: Policy | None, mode: Any = "execute", **arguments: Any) -> Judgement:
    return await review(policy, call(**arguments), PolicyServices().context, mode)


@pytest.mark.parametrize("action", ACTIONS)
async def test_a_decision_may_come_at_once_or_later(action: PolicyAction) -> None:
    decision = Decision(action=action, reason="so")
    for policy in (Policy(lambda call: decision), Policy(lambda call: later(decision))):
        assert await judged(policy, amount=1) == Judgement(action=action, reason="so", effect="write")
        (context,) = policy.seen
        assert (context.identity.tenant_id, context.run_id, context.grants.tool_ids) == (
            "t",
            "run",
            ("look", "write"),
        )


async def test_without_a_policy_all_is_allowed() -> None:
    assert await judged(None) == Judgement(action="allow", effect="write")


@pytest.mark.parametrize(
    "answer",
    [None, True, "allow", {"action": "allow"}, Decision(action="perhaps"), Decision(action=None)],  # type: ignore[arg-type]
)
async def test_what_is_no_decision_denies(answer: Any) -> None:
    judgement = await judged(Policy(lambda call: answer))
    assert judgement.action == "deny"
    assert "which is no decision" in judgement.reason


async def test_an_unhashable_action_denies_too() -> None:
    answer = Decision(action=["allow"])  # type: ignore[arg-type]
    assert (await judged(Policy(lambda call: answer))).action == "deny"


async def test_what_a_policy_raises_denies_and_is_told() -> None:
    def raises(call: CallUnderReview) -> Decision:
        raise LookupError("no such rule")

    async def raises_later() -> Decision:
        raise LookupError("no such rule")

    for policy in (Policy(raises), Policy(lambda call: raises_later())):
        assert await judged(policy) == Judgement(
            action="deny", reason="the execution policy raised LookupError: no such rule"
        )


def _deep(arguments: Any) -> None:
    arguments["to"]["name"] = "eve"


def _add(arguments: Any) -> None:
    arguments["more"] = 1


def _unreadable(arguments: Any) -> None:
    arguments["more"] = object()


def _circular(arguments: Any) -> None:
    arguments["more"] = arguments


@pytest.mark.parametrize("change", [_deep, _add, _unreadable, _circular])
@pytest.mark.parametrize("where", ["decide", "resolve_effect"])
async def test_changing_what_is_reviewed_denies(change: Callable[[Any], None], where: str) -> None:
    under: list[Mapping[str, Any]] = []

    def decide(call: CallUnderReview) -> Decision:
        under.append(call.arguments)
        if where == "decide":
            change(call.arguments)
        return Decision(action="allow")

    def effect() -> Effect:
        if where == "resolve_effect":
            change(under[0])
        return "read"

    judgement = await judged(Effects(decide, effect), "plan", to={"name": "bob"})
    assert judgement == Judgement(action="deny", reason="the arguments were changed while they were reviewed")


async def test_only_a_plan_asks_what_a_call_does() -> None:
    asked: list[str] = []

    def effect() -> Any:
        asked.append("effect")
        return later("external")

    policy = Effects(allows, effect)
    assert (await judged(policy)).effect == "write"
    assert asked == []
    assert (await judged(policy, "plan")).effect == "external"
    assert (await judged(Policy(allows), "plan")).effect == "write"  # as the tool declares


@pytest.mark.parametrize("effect", [None, "none", ["read"], 1])
async def test_an_effect_that_there_is_not_is_unknown(effect: Any) -> None:
    assert (await judged(Effects(allows, lambda: effect), "plan")).effect == "unknown"


async def test_an_effect_that_cannot_be_told_denies() -> None:
    def raises() -> Effect:
        raise LookupError("no idea")

    assert (await judged(Effects(allows, raises), "plan")).action == "deny"


@pytest.mark.parametrize(("action", "effect"), list(product(ACTIONS, EFFECTS)))
def test_plan_mode(action: PolicyAction, effect: Effect) -> None:
    becomes, why = plan_mode(action, effect)
    if action == "deny" or effect == "read":
        expected: str = action
    else:
        expected = "ask" if effect == "unknown" else "deny"
    assert becomes == expected
    assert bool(why) is (not (action == "deny" or effect == "read"))
    assert STRICTNESS.index(becomes) >= STRICTNESS.index(action)  # a plan never loosens


@given(judgements, judgements)
def test_of_two_decisions_the_stricter_holds_with_its_reason(one: Judgement, other: Judgement) -> None:
    both = stricter(one, other)
    assert STRICTNESS.index(both.action) == max(STRICTNESS.index(each.action) for each in (one, other))
    assert both.reason in [each.reason for each in (one, other) if each.action == both.action]
    assert both.action == stricter(other, one).action
    assert (both.effect == "read") is (one.effect == other.effect == "read")
    assert both.effect in (one.effect, other.effect)
    assert stricter(one, one) == one


@pytest.mark.parametrize(
    ("action", "effect", "becomes", "reason"),
    [
        ("allow", "read", "allow", "mine"),
        ("allow", "unknown", "ask", "it may have effects, and this run only plans"),
        ("ask", "unknown", "ask", "mine"),
        ("ask", "write", "deny", "its effect is 'write', and this run only plans"),
        ("deny", "write", "deny", "mine"),
    ],
)
def test_the_reason_is_that_of_whoever_is_stricter(
    action: PolicyAction, effect: Effect, becomes: PolicyAction, reason: str
) -> None:
    judged = Judgement(action=action, reason="mine", effect=effect)
    assert planned(judged, "plan") == Judgement(action=becomes, reason=reason, effect=effect)
    assert planned(judged, "execute") == judged


def test_an_agent_inherits_each_policy_once_and_never_the_apps() -> None:
    app, outer, own = Policy(allows), Policy(allows), Policy(allows)
    assert inherited(None, None, None) is None
    assert inherited(outer, None, app) is outer
    assert inherited(None, own, app) is own
    assert inherited(own, own, app) is own
    assert inherited(outer, own, None) == InheritedPolicy(outer, own)
    assert inherited(app, own, app) is own
    assert inherited(outer, app, app) is outer
    assert inherited(app, app, app) is inherited(None, app, app) is inherited(app, None, app) is None


@pytest.mark.parametrize(("outer", "own"), list(product(ACTIONS, ACTIONS)))
async def test_what_was_inherited_holds_beside_what_is_ones_own(
    outer: PolicyAction, own: PolicyAction
) -> None:
    policies = [
        Policy(lambda call, said=said: later(Decision(action=said[0], reason=said[1])))  # type: ignore[misc]
        for said in ((outer, "outer"), (own, "own"))
    ]
    judgement = await judged(InheritedPolicy(*policies))  # type: ignore[arg-type]
    stricter_one = "own" if STRICTNESS.index(own) > STRICTNESS.index(outer) else "outer"
    assert (judgement.action, judgement.reason) == (max(outer, own, key=STRICTNESS.index), stricter_one)
    # Who is denied already asks nobody else.
    assert [len(policy.seen) for policy in policies] == [1, 0 if outer == "deny" else 1]


@pytest.mark.parametrize(
    ("outer", "own", "both"),
    [
        ("read", "read", "read"),
        ("write", "read", "write"),
        ("read", "unknown", "unknown"),
        (None, "read", "write"),
    ],
)
async def test_of_two_effects_the_graver_counts(outer: Any, own: Any, both: Effect) -> None:
    first = Policy(allows) if outer is None else Effects(allows, lambda: outer)  # the tool declares a write
    policy: Any = InheritedPolicy(first, Effects(allows, lambda: later(own)))
    assert (await judged(policy, "plan")).effect == both


async def test_what_is_no_decision_denies_where_it_was_inherited_too() -> None:
    for pair in ((Policy(lambda call: None), Policy(allows)), (Policy(allows), Policy(lambda call: None))):
        policy: Any = InheritedPolicy(*pair)
        assert (await judged(policy)).action == "deny"
