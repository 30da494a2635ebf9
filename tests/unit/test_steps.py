"""What a controller and a context policy make of a call, rule by rule, without a run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest

from retinue import (
    Conversation,
    Grants,
    Message,
    ModelBinding,
    PolicyContext,
    Projection,
    Provenance,
    Step,
    StepOverrides,
    ToolCall,
)
from retinue.errors import AccessDenied, BudgetExhausted, RetinueError, Unsupported
from retinue.grouping import SOURCE
from retinue.messages import assistant, decode_message, system, tool_result, user
from retinue.protocol import ModelPrepared
from retinue.steps import StepPreparation, check_required
from tests.support import FunctionModel
from tests.unit.policy_world import GRANTED, PolicyServices, asking

BOUND = {"judge": ModelBinding(client=FunctionModel(), options=["temperature", "max_tokens", "top_p"])}
SIGNED = Message(role="assistant", content="before", extras={"signature": "s"})
SOURCED = Message(role="user", content="from the web", extras={SOURCE: {"id": "web"}})


class Says:
    """A controller that says what it was made with, before the run and step by step; sync or async."""

    def __init__(self, run: object = None, *steps: object) -> None:
        self.run = run
        self.steps = list(steps)
        self.seen: list[Step] = []

    def prepare_run(self, ctx: PolicyContext) -> Any:
        return self.run

    async def prepare_step(self, step: Step, ctx: PolicyContext) -> Any:
        self.seen.append(step)
        said = self.steps.pop(0) if self.steps else None
        if isinstance(said, BaseException):
            raise said
        return said


class Gives:
    """A context policy made of a function of the conversation."""

    id = "test/gives"

    def __init__(self, give: Any, grouping: Any = "user_turn") -> None:
        self.give = give
        self.grouping = grouping
        self.shown: list[Conversation] = []

    def project(self, conversation: Conversation, ctx: PolicyContext) -> Any:
        self.shown.append(conversation)
        return self.give(conversation)


def projection(messages: Any, provenance: Any = ()) -> Projection:
    return Projection(messages=messages, provenance=provenance)


class World:
    """One run's preparation, with whoever asks it."""

    def __init__(self, controller: Says | None = None, *, grants: Grants = GRANTED, **config: Any) -> None:
        self.config = {"controller": controller, "models": BOUND, **config}
        self.grants = grants
        self.steps = StepPreparation(self.services().config)

    def services(self, **options: Any) -> PolicyServices:
        return PolicyServices(grants=self.grants, **{**self.config, **options})

    async def begin(self) -> None:
        await self.steps.prepare_run(self.services().context)

    async def ask(
        self,
        messages: Sequence[Message] = (),
        *,
        index: int = 0,
        participant: str = "",
        run_id: str = "run",
        role: str = "main",
        tools: Sequence[str] = (),
    ) -> ModelPrepared:
        services = self.services(participant=participant, run_id=run_id)
        return await self.steps.prepare(asking(messages, role=role, tools=tools), index, services.context)


async def test_without_a_say_a_call_stays_as_it_is_and_offers_what_is_granted() -> None:
    world = World()
    await world.begin()
    prepared = await world.ask([user("x")], tools=["look", "secret"])
    assert prepared == ModelPrepared(role="main", tools=["look"], options={}, messages=None)


async def test_a_step_replaces_what_the_run_says_key_by_key() -> None:
    controller = Says(
        StepOverrides(model_role="judge", active_tool_ids=["look"], options={"temperature": 1, "top_p": 0.5}),
        StepOverrides(options={"temperature": 0}),
        StepOverrides(active_tool_ids=[]),
    )
    world = World(controller)
    await world.begin()
    first = await world.ask(tools=["look", "write"], index=4)
    assert (first.role, first.tools, first.options) == ("judge", ["look"], {"temperature": 0, "top_p": 0.5})
    second = await world.ask(tools=["look", "write"])
    assert (second.role, second.tools, second.options) == ("judge", [], {"temperature": 1, "top_p": 0.5})
    assert controller.seen[0] == Step(index=4, tools=("look", "write"))


async def test_stop_is_an_exhausted_budget_with_the_reason_as_its_message() -> None:
    world = World(Says(StepOverrides(stop="not today")))
    with pytest.raises(BudgetExhausted, match=r"^not today$"):
        await world.begin()
    world = World(Says(None, StepOverrides(stop="enough", model_role="nobody")))
    await world.begin()
    with pytest.raises(BudgetExhausted, match=r"^enough$"):
        await world.ask()


WRONG: list[tuple[dict[str, Any], type[RetinueError], str]] = [
    ({"model_role": "critic"}, AccessDenied, "critic"),
    ({"model_role": "unbound"}, Unsupported, "no model bound"),
    ({"active_tool_ids": ["forbidden"]}, AccessDenied, "forbidden"),
    ({"active_tool_ids": ["look", "look"]}, RetinueError, "twice"),
    ({"active_tool_ids": ["write"]}, RetinueError, "does not offer"),
    ({"active_tool_ids": []}, RetinueError, "required tool look"),
    ({"options": {"seed": 1}}, Unsupported, "seed"),
    ({"model_role": "judge"}, RetinueError, "cannot go on from"),
    ({"context_policy": Gives(lambda shown: None)}, RetinueError, "not a Projection"),
]
"""What a step may say wrongly, in the order in which it is looked at."""


@pytest.mark.parametrize("place", range(len(WRONG)))
async def test_of_several_mistakes_the_first_of_the_contract_is_told(place: int) -> None:
    # Of two that are the same member only one can be made; the others come later and must not be told.
    merged: dict[str, Any] = {}
    for said, _, _ in WRONG[place:]:
        merged = {**said, **merged}
    grants = Grants(
        tool_ids=["look", "write"], required_tool_ids=["look"], model_roles=["main", "judge", "unbound"]
    )
    world = World(Says(None, StepOverrides(**merged)), grants=grants)
    _, kind, says = WRONG[place]
    with pytest.raises(kind, match=says):
        await world.ask([user("a"), SIGNED, user("b")], tools=["look"])


@pytest.mark.parametrize(
    "said",
    [
        {"options": {}},
        StepOverrides(options=["x"]),  # type: ignore[arg-type]
        StepOverrides(active_tool_ids="look"),
        StepOverrides(active_tool_ids=[1]),  # type: ignore[list-item]
        StepOverrides(model_role=1),  # type: ignore[arg-type]
        StepOverrides(stop=True),  # type: ignore[arg-type]
        StepOverrides(context_policy=object()),  # type: ignore[arg-type]
    ],
)
async def test_overrides_of_the_wrong_kind_are_told_before_and_in_a_run(said: Any) -> None:
    world = World(Says(said, said))
    with pytest.raises(RetinueError, match="prepare_run gave"):
        await world.begin()
    with pytest.raises(RetinueError, match="prepare_step gave"):
        await world.ask()


async def test_tools_that_a_driver_offers_twice_are_an_error() -> None:
    with pytest.raises(RetinueError, match="twice"):
        await World().ask(tools=["look", "look"])


def test_required_tools_are_all_named_that_are_missing() -> None:
    grants = Grants(tool_ids=["a", "b", "c"], required_tool_ids=["c", "a", "b"])
    check_required(grants, ["b", "a", "c"])
    with pytest.raises(RetinueError, match="required tool a, c is not offered"):
        check_required(grants, ["b"])


async def test_required_tools_bind_the_root_and_no_delegate() -> None:
    grants = Grants(tool_ids=["look"], required_tool_ids=["look"])
    world = World(grants=grants)
    with pytest.raises(RetinueError, match="required tool look"):
        await world.ask()
    assert (await world.ask(participant="helper", run_id="child")).tools == []


@pytest.mark.parametrize(
    ("name", "value", "fits"),
    [
        ("temperature", 0, True), ("temperature", 1.5, True), ("temperature", None, True),
        ("temperature", -0.1, False), ("temperature", math.nan, False), ("temperature", math.inf, False),
        ("temperature", True, False), ("temperature", "hot", False),
        ("max_tokens", 1, True), ("max_tokens", 0, False), ("max_tokens", 1.0, False),
        ("max_tokens", True, False), ("max_tokens", 2**53, False),
        ("top_p", 0.5, True), ("top_p", {"any": ["JSON"]}, True), ("top_p", math.nan, False),
        ("top_p", object(), False), ("top_p", "\ud800", False),
    ],
)  # fmt: skip
async def test_an_option_must_have_a_value_that_can_be_sent(name: str, value: object, fits: bool) -> None:
    world = World(Says(None, StepOverrides(model_role="judge", options={name: value})))
    if fits:
        assert (await world.ask()).options == {name: value}
    else:
        with pytest.raises(Unsupported, match=name) as failed:
            await world.ask()
        assert failed.value.operation == name


async def test_the_model_of_a_driver_has_no_list_so_no_option_is_allowed() -> None:
    with pytest.raises(Unsupported, match="temperature"):
        await World(Says(None, StepOverrides(options={"temperature": 0}))).ask()


# --- the role and a provider's own data -------------------------------------------------------------------

JUDGE = StepOverrides(model_role="judge")


async def test_a_role_may_change_while_no_provider_left_data_of_its_own() -> None:
    assert (
        await World(Says(None, JUDGE)).ask([user("a"), assistant("b"), SOURCED, user("c")])
    ).role == "judge"


async def test_a_controller_may_go_on_with_the_role_that_it_chose() -> None:
    world = World(Says(JUDGE))
    await world.begin()
    await world.ask([user("a")])
    assert (await world.ask([user("a"), SIGNED, user("b")], index=1)).role == "judge"


async def test_going_back_to_the_drivers_role_is_a_change_too() -> None:
    world = World(Says(None, JUDGE, None))
    await world.ask([user("a")])
    with pytest.raises(RetinueError, match="from 'judge' to 'main'"):
        await world.ask([user("a"), SIGNED, user("b")], index=1)


async def test_a_role_that_the_driver_itself_asks_for_is_its_own_affair() -> None:
    world = World(Says())
    await world.ask([user("a"), SIGNED, user("b")], role="judge")
    assert (await world.ask([user("a"), SIGNED, user("b")])).role == "main"


async def test_what_one_participant_chose_is_no_change_of_anothers() -> None:
    world = World(Says(None, JUDGE, None))
    await world.ask([user("a")])
    other = await world.ask([user("a"), SIGNED, user("b")], participant="helper", run_id="child")
    assert other.role == "main"


# --- the conversation -------------------------------------------------------------------------------------

TALK = [
    system("rules"),
    SOURCED,
    user("a"),
    assistant("", [ToolCall("1", "look", {"deep": {"er": 1}})]),
    tool_result("1", "saw"),
    user("b"),
]


def drop_all_but_the_last(shown: Conversation) -> Projection:
    return projection([shown.history[0], shown.history[-1]], [Provenance(source_id="web", included=False)])


async def test_a_policy_sees_copies_the_role_and_the_model_and_says_what_is_sent() -> None:
    policy = Gives(drop_all_but_the_last)
    world = World(Says(JUDGE), context_policy=policy)
    await world.begin()
    prepared = await world.ask(TALK)
    assert prepared.messages is not None
    assert [decode_message(body) for body in prepared.messages] == [TALK[0], TALK[-1]]
    (shown,) = policy.shown
    assert (list(shown.history), list(shown.entries)) == (TALK, [SOURCED])
    assert (shown.role, shown.model_id) == ("judge", "function")


async def test_an_unchanged_conversation_is_not_sent_back() -> None:
    world = World(context_policy=Gives(lambda shown: projection(shown.history)))
    assert (await world.ask(TALK)).messages is None


async def test_a_change_inside_a_copy_is_noticed() -> None:
    def forge(shown: Conversation) -> Projection:
        shown.history[3].tool_calls[0].arguments["deep"]["er"] = 2
        return projection(shown.history)

    with pytest.raises(RetinueError, match="intact"):
        await World(context_policy=Gives(forge)).ask(TALK)


async def test_the_grouping_of_the_policy_decides_what_is_whole() -> None:
    task = [
        user("task"),
        assistant("", [ToolCall("1", "look", {})]),
        tool_result("1", "a"),
        assistant("", [ToolCall("2", "look", {})]),
        tool_result("2", "b"),
    ]

    def latest(shown: Conversation) -> Projection:
        return projection([shown.history[0], *shown.history[3:]])

    prepared = await World(context_policy=Gives(latest, "tool_roundtrip")).ask(task)
    assert prepared.messages is not None
    with pytest.raises(RetinueError, match="intact"):
        await World(context_policy=Gives(latest)).ask(task)
    with pytest.raises(RetinueError, match="groups by"):
        await World(context_policy=Gives(latest, "week")).ask(task)


async def test_a_step_may_bring_another_policy_than_the_apps() -> None:
    step = StepOverrides(context_policy=Gives(drop_all_but_the_last))
    world = World(Says(None, step), context_policy=Gives(lambda shown: projection(shown.history)))
    assert len((await world.ask(TALK)).messages or ()) == 2
    assert (await world.ask(TALK, index=1)).messages is None


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (None, "not a Projection"),
        ([], "not a Projection"),
        (projection(None), "no list of messages"),
        (projection("text"), "no list of messages"),
        (projection([{"role": "user", "content": "x"}]), "test/gives"),
        (projection([Message(role="user", content=3)]), "test/gives"),  # type: ignore[arg-type]
        (projection([user("\ud800")]), "surrogate"),
        (projection([], None), "provenance"),
        (projection([], ""), "provenance"),
        (projection([], [{"source_id": "web", "included": True}]), "provenance"),
        (projection([], [Provenance(source_id="", included=True)]), "provenance"),
        (projection([], [Provenance(source_id="web", included=1)]), "provenance"),  # type: ignore[arg-type]
        (
            projection([], [Provenance(source_id="web", included=True, reason=3)]),  # type: ignore[arg-type]
            "provenance",
        ),
    ],
)
async def test_what_is_no_projection_is_told_with_the_policys_name(given: Any, says: str) -> None:
    with pytest.raises(RetinueError, match=says) as failed:
        await World(context_policy=Gives(lambda shown: given)).ask([user("x")])
    assert failed.value.code == "execution_failed"
    assert "test/gives" in failed.value.message


class Odd(Exception):
    """An error of the application's own."""


async def test_what_the_application_raises_comes_with_its_own_type() -> None:
    def fail(shown: Conversation) -> Projection:
        raise Odd

    with pytest.raises(Odd):
        await World(context_policy=Gives(fail)).ask()
    with pytest.raises(Odd):
        await World(Says(None, Odd())).ask()
