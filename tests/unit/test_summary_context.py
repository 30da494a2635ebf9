"""Summaries of older groups: what stays, what is summarised, what is told, and when it fails."""

from __future__ import annotations

import asyncio
import json
import pickle
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retinue import (
    Conversation,
    Message,
    ModelBinding,
    ModelRequest,
    Provenance,
    ToolCall,
    summary_context_policy,
)
from retinue.errors import BudgetExhausted, CompactionFailed, ModelFailed, ValidationFailed
from retinue.events import CompactionCompleted, CompactionStarted
from retinue.events import CompactionFailed as CompactionFailedEvent
from retinue.grouping import SOURCE, Grouping, check_projection
from retinue.messages import assistant, system, tool_result, user
from retinue.models import ModelClient
from retinue.summary_context import ROOM, SummaryContextPolicy
from retinue.tokens import estimate_messages
from tests.support import FunctionModel
from tests.unit.policy_world import PolicyServices

RULES = system("rules")
OLD = [user("old question"), assistant("old answer " * 100)]
NEW = [user("new question"), assistant("", [ToolCall("2", "look", {})]), tool_result("2", "saw")]


def round_of(number: int, size: int = 200) -> list[Message]:
    """A round of one tool, with data of its provider."""
    called = ToolCall(f"call-{number}", "look", {"number": number})
    return [
        Message(role="assistant", tool_calls=(called,), extras={"signature": "secret"}),
        tool_result(called.id, f"result {number} " + "x" * size),
    ]


def policy(max_context_tokens: int = 200, **options: Any) -> SummaryContextPolicy:
    return summary_context_policy(model_role="judge", max_context_tokens=max_context_tokens, **options)


async def sent(
    policy: SummaryContextPolicy, history: Sequence[Message], services: PolicyServices
) -> list[Message]:
    """The projection, which is a legal one; its provenance has one line for the conversation."""
    projection = await policy.project(Conversation(history=list(history)), services.context)
    check_projection(history, projection.messages, policy.grouping)
    return list(projection.messages)


def summary(text: str) -> Message:
    return user(f'{{"kind":"historical_summary","trust":"source","text":"{text}"}}')


async def test_what_fits_is_sent_whole_and_nobody_is_asked() -> None:
    services = PolicyServices()
    history = [RULES, *OLD, *NEW]
    tokens = estimate_messages(history)
    projection = await policy(tokens).project(Conversation(history=history), services.context)
    assert projection.messages == history
    assert projection.provenance == [Provenance(source_id="history", included=True)]
    assert (services.asked, services.told) == ([], [])
    with pytest.raises(CompactionFailed, match="nothing that could"):
        await sent(policy(tokens - 1, keep_recent_turns=2), history, services)


async def test_older_groups_become_one_message_behind_the_system_messages() -> None:
    services = PolicyServices("in short")
    history = [RULES, *OLD, *NEW]
    assert await sent(policy(), history, services) == [RULES, summary("in short"), *NEW]
    ((role, (told, shown), max_tokens, _),) = services.asked
    required = estimate_messages([RULES, *NEW])
    assert (role, max_tokens) == ("judge", 200 - required - ROOM)
    assert told.role == "system"
    assert json.loads(shown.text) == [
        {"role": "user", "content": OLD[0].text},
        {"role": "assistant", "content": OLD[1].text},
    ]
    begun, done = services.told
    assert isinstance(begun, CompactionStarted)
    assert isinstance(done, CompactionCompleted)
    assert begun.compaction_id == done.compaction_id
    assert begun.policy_id == done.policy_id == "retinue/summary-context"
    assert (begun.before_tokens, done.before_tokens) == (estimate_messages(history),) * 2
    assert done.after_tokens == estimate_messages([RULES, summary("in short"), *NEW])


async def test_a_summary_gets_no_more_than_it_may_use() -> None:
    services = PolicyServices("in short")
    await sent(policy(summary_max_tokens=9), [RULES, *OLD, *NEW], services)
    assert services.asked[0][2] == 9


async def test_so_many_turns_stay_as_they_are() -> None:
    turns = [user("a" * 300), user("b" * 300), user("c"), user("d")]
    for keep in (1, 2):
        services = PolicyServices("in short")
        messages = await sent(policy(keep_recent_turns=keep), turns, services)
        assert messages == [summary("in short"), *turns[-keep:]]


async def test_system_messages_stay_where_they_are() -> None:
    late, last = system("late"), system("last")
    history = [RULES, *OLD, late, *NEW, last]
    messages = await sent(policy(), history, PolicyServices("in short"))
    assert messages == [RULES, late, summary("in short"), *NEW, last]


async def test_of_one_task_the_request_and_the_latest_round_stay() -> None:
    services = PolicyServices("looked thrice")
    history = [RULES, *OLD, user("the task"), *round_of(1), *round_of(2), *round_of(3)]
    messages = await sent(policy(400, grouping="tool_roundtrip"), history, services)
    assert messages == [RULES, summary("looked thrice"), user("the task"), *round_of(3)]
    shown = services.asked[0][1][1].text
    assert "result 2" in shown
    assert "old answer" in shown
    assert "secret" not in shown
    assert "the task" not in shown


async def test_a_source_is_no_request_and_its_end_is_told() -> None:
    source = Message(role="user", content="y" * 600, extras={SOURCE: {"id": "web"}})
    history = [user("the task"), *round_of(1), source, *round_of(2), *round_of(3)]
    projection = await policy(300, grouping="tool_roundtrip").project(
        Conversation(history=history), PolicyServices("looked").context
    )
    assert list(projection.messages) == [summary("looked"), history[0], *round_of(3)]
    assert projection.provenance == [
        Provenance(source_id="history", included=False, reason="summarised"),
        Provenance(source_id="web", included=False, reason="summarised"),
    ]


async def test_what_fits_tells_that_its_sources_are_in_it() -> None:
    source = Message(role="user", content="y", extras={SOURCE: {"id": "web"}})
    projection = await policy().project(Conversation(history=[source, *NEW]), PolicyServices().context)
    assert [(each.source_id, each.included) for each in projection.provenance] == [
        ("history", True),
        ("web", True),
    ]


async def test_equal_messages_are_not_taken_for_one_another() -> None:
    """The latest request has the same words as an older one, which goes."""
    history = [user("again"), *round_of(1), user("again"), *round_of(2), *round_of(3)]
    messages = await sent(policy(200, grouping="tool_roundtrip"), history, PolicyServices("looked"))
    assert messages == [summary("looked"), user("again"), *round_of(3)]


REQUIRED = estimate_messages([RULES, *NEW])


@pytest.mark.parametrize(
    ("options", "answer", "why", "asked"),
    [
        ({"max_context_tokens": REQUIRED + ROOM}, "never", "what must stay", 0),
        ({"max_context_tokens": REQUIRED + ROOM + 1}, "", "is empty", 1),
        ({"keep_recent_turns": 2}, "never", "nothing that could", 0),
        ({"max_input_bytes": 100}, "never", "max_input_bytes", 0),
        ({}, " \n", "is empty", 1),
        ({}, "too long " * 100, "max_context_tokens", 1),
        ({"max_context_tokens": 100_000}, "z" * 70_000, "more than 65536", 1),
    ],
)
async def test_what_cannot_be_shortened_is_told_and_raised(
    options: dict[str, Any], answer: str, why: str, asked: int
) -> None:
    services = PolicyServices(answer)
    old = OLD
    if options.get("max_context_tokens") == 100_000:
        old = [user("u" * 60_000)] * 6
        options = {**options, "max_input_bytes": 1_000_000}
    with pytest.raises(CompactionFailed, match=why):
        await sent(policy(**options), [RULES, *old, *NEW], services)
    begun, failed = services.told
    assert isinstance(failed, CompactionFailedEvent)
    assert begun.compaction_id == failed.compaction_id
    assert why in failed.reason
    assert len(services.asked) == asked


@pytest.mark.parametrize(
    "error", [BudgetExhausted("no calls"), ModelFailed("x" * 5000), RuntimeError("\ud800")]
)
async def test_an_error_of_the_call_is_told_in_short_and_passes_on(error: Exception) -> None:
    services = PolicyServices(error)
    with pytest.raises(type(error)):
        await sent(policy(), [*OLD, *NEW], services)
    failed = services.told[-1]
    assert isinstance(failed, CompactionFailedEvent)
    assert 0 < len(failed.reason) <= 1024
    failed.reason.encode()


async def test_a_cancelled_summary_is_told_as_failed() -> None:
    services = PolicyServices(asyncio.CancelledError())
    with pytest.raises(asyncio.CancelledError):
        await sent(policy(), [*OLD, *NEW], services)
    assert [type(each) for each in services.told] == [CompactionStarted, CompactionFailedEvent]


async def test_the_apps_estimate_counts_where_it_binds_the_model() -> None:
    counted: list[tuple[str, str]] = []

    def by_message(request: ModelRequest, client: ModelClient) -> int:
        counted.append((request.role, client.model_id))
        return 100 * len(request.messages)

    bound = {"main": ModelBinding(client=FunctionModel())}
    history = [RULES, *OLD, *NEW]
    services = PolicyServices("in short", models=bound, estimate_input_tokens=by_message)
    messages = await sent(policy(550), history, services)
    assert messages == [RULES, summary("in short"), *NEW]
    assert [(each.before_tokens) for each in services.told] == [600, 600]
    assert set(counted) == {("main", "function")}
    assert services.asked[0][2] == 550 - 400 - ROOM

    unbound = PolicyServices(estimate_input_tokens=by_message)
    assert await sent(policy(550), history, unbound) == history


async def test_the_characters_of_a_token_are_those_of_the_model() -> None:
    history = [user("x" * 3400)]
    fits = Conversation(history=history, model_id="gemini-pro")
    assert (await policy(1006).project(fits, PolicyServices().context)).messages == history
    with pytest.raises(CompactionFailed):
        await policy(1006).project(Conversation(history=history), PolicyServices().context)


@pytest.mark.parametrize(
    ("options", "path"),
    [
        ({"model_role": ""}, "model_role"),
        ({"id": None}, "id"),
        ({"max_context_tokens": 0}, "max_context_tokens"),
        ({"max_context_tokens": 2**53}, "max_context_tokens"),
        ({"keep_recent_turns": True}, "keep_recent_turns"),
        ({"summary_max_tokens": 1.5}, "summary_max_tokens"),
        ({"max_input_bytes": -1}, "max_input_bytes"),
        ({"grouping": "week"}, "grouping"),
    ],
)
def test_options_are_checked(options: dict[str, Any], path: str) -> None:
    with pytest.raises(ValidationFailed) as failed:
        summary_context_policy(**{"model_role": "judge", "max_context_tokens": 1, **options})
    assert failed.value.path == f"summary_context_policy.{path}"


def test_it_travels_and_has_the_defaults_of_the_contract() -> None:
    made = policy()
    assert pickle.loads(pickle.dumps(made)) == made
    assert (made.id, made.keep_recent_turns, made.summary_max_tokens, made.max_input_bytes) == (
        "retinue/summary-context",
        1,
        1024,
        65536,
    )


@st.composite
def talks(draw: st.DrawFn) -> list[Message]:
    """A conversation with turns, rounds, sources and system messages, as long as they come."""
    messages: list[Message] = []
    for number in range(draw(st.integers(1, 5))):
        kind = draw(st.sampled_from(["user", "user", "system", "source"]))
        text = f"{kind} {number} " + "w" * draw(st.sampled_from([0, 50, 500]))
        label = {SOURCE: {"id": str(number)}} if kind == "source" else None
        messages.append(Message(role="system" if kind == "system" else "user", content=text, extras=label))
        for step in range(draw(st.integers(0, 3))):
            messages += round_of(10 * number + step, draw(st.sampled_from([0, 100])))
        if draw(st.booleans()):
            messages.append(assistant(f"answer {number}"))
    return messages


@settings(deadline=None)
@given(
    talks(),
    st.sampled_from(["user_turn", "tool_roundtrip"]),
    st.integers(40, 700),
    st.integers(1, 3),
)
def test_whatever_is_shortened_fits_and_is_a_legal_projection(
    history: list[Message], grouping: Grouping, limit: int, keep: int
) -> None:
    services = PolicyServices("short")
    made = policy(limit, grouping=grouping, keep_recent_turns=keep)
    try:
        messages = asyncio.run(sent(made, history, services))
    except CompactionFailed:
        assert isinstance(services.told[-1], CompactionFailedEvent)
        return
    assert estimate_messages(messages) <= limit
    if services.asked:
        assert sum(message == summary("short") for message in messages) == 1
        requests = [message for message in history if message.role == "user" and not message.extras]
        if grouping == "tool_roundtrip" and requests:
            assert requests[-1] in messages
    else:
        assert messages == history
