"""Groups of a conversation, and what a projection may change."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retinue import Message, ToolCall
from retinue.errors import RetinueError
from retinue.grouping import SOURCE, Grouping, check_projection, grouped
from retinue.messages import assistant, system, tool_result, user

SYSTEM = system("rules")


def call(*ids: str) -> Message:
    return assistant("", [ToolCall(call_id, "look", {}) for call_id in ids])


def source(text: str) -> Message:
    return Message(role="user", content=text, extras={SOURCE: {"id": "web"}})


ROUND = [call("1"), tool_result("1", "a")]


def sizes(messages: list[Message], grouping: Grouping) -> list[int]:
    return [len(group.messages) for group in grouped(messages, grouping)]


def test_a_group_is_a_turn_or_ends_with_a_round() -> None:
    talk = [SYSTEM, user("a"), *ROUND, call("2", "3"), tool_result("3", "c"), tool_result("2", "b"),
            assistant("done"), user("b")]  # fmt: skip
    assert sizes(talk, "user_turn") == [7, 1]
    assert sizes(talk, "tool_roundtrip") == [3, 3, 1, 1]


@pytest.mark.parametrize(
    ("broken", "why"),
    [
        ([tool_result("1", "a")], "not open"),
        ([user("x"), *ROUND, tool_result("1", "again")], "not open"),
        ([user("x"), call("1"), call("2")], "before the results"),
        ([user("x"), call("1"), user("y")], "before the results"),
        ([user("x"), *ROUND, call("1")], "repeated call id"),
        ([user("x"), call("1", "1")], "repeated call id"),
    ],
)
def test_a_broken_structure_is_named(broken: list[Message], why: str) -> None:
    with pytest.raises(RetinueError, match=why):
        grouped(broken)


def test_c68_a_closed_turn_may_go_as_a_whole_unless_it_is_the_last() -> None:
    turn = [user("old"), *ROUND]
    check_projection([SYSTEM, *turn, user("new")], [SYSTEM, user("new")])
    with pytest.raises(RetinueError, match="intact"):
        check_projection([SYSTEM, *turn], [SYSTEM])
    for half in ([user("old"), ROUND[0]], [user("old"), ROUND[1]], [ROUND[0], ROUND[1]]):
        with pytest.raises(RetinueError):
            check_projection([SYSTEM, *turn, user("new")], [SYSTEM, *half, user("new")])


def test_c71_a_message_of_a_source_is_neither_relabelled_nor_stripped() -> None:
    before = [SYSTEM, source("from the web"), user("question")]
    check_projection(before, [SYSTEM, user("question")])
    for wrong in (
        [system("from the web"), SYSTEM, user("question")],
        [SYSTEM, user("from the web"), user("question")],
        [SYSTEM, Message(role="user", content="changed", extras={SOURCE: {"id": "web"}}), user("question")],
        [
            SYSTEM,
            Message(role="user", content="from the web", extras={SOURCE: {"id": "me"}}),
            user("question"),
        ],
    ):
        with pytest.raises(RetinueError, match=r"provenance|system"):
            check_projection(before, wrong)


def test_system_messages_stay_and_plain_ones_may_change() -> None:
    before = [SYSTEM, user("a"), assistant("b"), user("c")]
    check_projection(before, [SYSTEM, user("a summary of it")])
    check_projection([user("a")], [])
    for wrong in ([user("c")], [system("other"), user("c")], [SYSTEM, SYSTEM, user("c")]):
        with pytest.raises(RetinueError, match="system"):
            check_projection(before, wrong)


def test_a_group_whose_calls_wait_must_stay() -> None:
    waiting = [user("a"), call("1")]
    check_projection(waiting, waiting)
    with pytest.raises(RetinueError, match="intact"):
        check_projection(waiting, [user("a")])


def test_provider_data_is_protected() -> None:
    answer = Message(role="assistant", content="x", extras={"signature": "s"})
    before = [user("a"), answer, user("b")]
    check_projection(before, [user("b")])
    changed = Message(role="assistant", content="x", extras={"signature": "t"})
    for wrong in ([user("a"), changed, user("b")], [answer, user("b")], [user("a"), user("b"), answer]):
        with pytest.raises(RetinueError, match="intact"):
            check_projection(before, wrong)


@st.composite
def talks(draw: st.DrawFn) -> list[Message]:
    """A conversation whose calls all have their results, with a distinct text everywhere."""
    messages: list[Message] = [system("rules")] if draw(st.booleans()) else []
    for number in range(draw(st.integers(1, 5))):
        messages.append(user(f"ask {number}"))
        for _ in range(draw(st.integers(0, 2))):
            ids = [f"{number}-{len(messages)}-{index}" for index in range(draw(st.integers(1, 2)))]
            messages.append(call(*ids))
            messages += [tool_result(each, f"result {each}") for each in ids]
        if draw(st.booleans()):
            messages.append(assistant(f"answer {number}"))
    return messages


@given(talks(), st.sampled_from(["user_turn", "tool_roundtrip"]), st.data())
def test_dropping_whole_groups_is_a_projection_and_cutting_one_is_not(
    talk: list[Message], grouping: Grouping, data: st.DataObject
) -> None:
    groups = grouped(talk, grouping)
    kept = [data.draw(st.booleans()) or group is groups[-1] for group in groups]
    told = [message for message in talk if message.role == "system"]
    after = [message for group, keep in zip(groups, kept, strict=True) if keep for message in group.messages]
    check_projection(talk, [*told, *after], grouping)
    tools = [index for index, message in enumerate(after) if message.role == "tool"]
    if tools:
        cut = data.draw(st.sampled_from(tools))
        with pytest.raises(RetinueError):
            check_projection(talk, [*told, *after[:cut], *after[cut + 1 :]], grouping)
        changed = tool_result(after[cut].tool_call_id or "", "forged")
        with pytest.raises(RetinueError):
            check_projection(talk, [*told, *after[:cut], changed, *after[cut + 1 :]], grouping)
