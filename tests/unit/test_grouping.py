"""Groups of a conversation, and what a projection may change."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from retinue import Message, ToolCall
from retinue.errors import RetinueError
from retinue.grouping import SOURCE, Grouping, check_projection, grouped, is_labelled, is_protected
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
    with pytest.raises(RetinueError, match="before the results"):
        check_projection(waiting, [*waiting, user("go on")])


def test_provider_data_is_protected() -> None:
    answer = Message(role="assistant", content="x", extras={"signature": "s"})
    before = [user("a"), answer, user("b")]
    check_projection(before, [user("b")])
    changed = Message(role="assistant", content="x", extras={"signature": "t"})
    for wrong in ([user("a"), changed, user("b")], [answer, user("b")], [user("a"), user("b"), answer]):
        with pytest.raises(RetinueError, match="intact"):
            check_projection(before, wrong)


def test_a_label_beside_provider_data_is_still_a_label() -> None:
    both = Message(role="assistant", content="x", extras={SOURCE: {"id": "web"}, "signature": "s"})
    before = [user("a"), both, user("b")]
    check_projection(before, before)
    check_projection(before, [user("b")])
    unlabelled = Message(role="assistant", content="x", extras={"signature": "s"})
    with pytest.raises(RetinueError, match="provenance"):
        check_projection(before, [user("a"), unlabelled, user("b")])


def test_a_source_is_not_given_twice_nor_moved_before_another() -> None:
    one, two = source("one"), source("two")
    before = [one, two, user("a")]
    for wrong in ([one, one, user("a")], [two, one, user("a")], [one, two, source("three"), user("a")]):
        with pytest.raises(RetinueError, match="provenance"):
            check_projection(before, wrong)


def test_what_the_user_says_may_be_what_a_source_says() -> None:
    before = [source("yes"), user("yes")]
    check_projection(before, [user("yes")])
    silent = [source(""), user("a"), assistant("", [ToolCall("1", "look", {})])]
    check_projection(silent, silent[1:])


def test_system_messages_inside_a_group_are_no_part_of_it() -> None:
    late = system("late")
    before = [user("a"), call("1"), late, tool_result("1", "x"), user("b")]
    check_projection(before, before)
    check_projection(before, [late, user("b")])
    check_projection(before, [user("a"), call("1"), tool_result("1", "x"), late, assistant("b")])


def test_true_is_not_one() -> None:
    before = [user("a"), assistant("", [ToolCall("1", "look", {"n": True})]), tool_result("1", "x")]
    after = [before[0], assistant("", [ToolCall("1", "look", {"n": 1})]), before[2]]
    assert before == after
    with pytest.raises(RetinueError, match="intact"):
        check_projection(before, after)


def test_the_order_of_keys_is_no_change() -> None:
    before = [user("a"), assistant("", [ToolCall("1", "look", {"a": 1, "b": 2})]), tool_result("1", "x")]
    check_projection(before, [before[0], assistant("", [ToolCall("1", "look", {"b": 2, "a": 1})]), before[2]])


def test_something_may_be_said_before_and_after_a_group_and_not_inside() -> None:
    before = [user("a"), *ROUND]
    check_projection(before, [user("remember"), *before, user("go on")])
    for place in (1, 2):
        with pytest.raises(RetinueError, match=r"intact|before the results"):
            check_projection(before, [*before[:place], assistant("well"), *before[place:]])


def test_groups_that_begin_alike_are_told_apart() -> None:
    signed = Message(role="assistant", content="x", extras={"signature": "s"})
    short, long = [user("go on"), signed], [user("go on"), signed, *ROUND]
    before = [*short, *long, user("b")]
    for kept in ([], short, long, [*short, *long], short[:0]):
        check_projection(before, [*kept, user("b")])
    check_projection([*short, user("other"), signed, user("b")], [user("other"), signed, user("b")])
    with pytest.raises(RetinueError, match="intact"):
        check_projection(before, [*long, *short, user("b")])


def test_plain_messages_keep_their_order_where_it_can_be_told() -> None:
    before = [user("a"), assistant("b"), user("yes"), assistant("c"), user("yes")]
    check_projection(before, [user("yes"), assistant("b"), user("yes")])
    with pytest.raises(RetinueError, match="order"):
        check_projection(before, [assistant("c"), user("a"), user("yes")])


@st.composite
def talks(draw: st.DrawFn) -> list[Message]:
    """A conversation whose calls all have their results, but perhaps the last; every text is another."""
    messages: list[Message] = []
    for number in range(draw(st.integers(1, 5))):
        if draw(st.integers(0, 3)) == 0:
            messages.append(system(f"told {number}") if draw(st.booleans()) else source(f"told {number}"))
        if number or draw(st.booleans()):
            messages.append(user(f"ask {number}"))
        for _ in range(draw(st.integers(0, 2))):
            ids = [f"{number}-{len(messages)}-{index}" for index in range(draw(st.integers(1, 2)))]
            messages.append(call(*ids))
            messages += [tool_result(each, f"result {each}") for each in draw(st.permutations(ids))]
        if draw(st.booleans()):
            extras = {"signature": str(number)} if draw(st.booleans()) else None
            messages.append(Message(role="assistant", content=f"answer {number}", extras=extras))
    if draw(st.integers(0, 4)) == 0:
        messages.append(call("open 1", "open 2"))
        messages += [tool_result("open 2", "x")] * draw(st.integers(0, 1))
    return messages


groupings = st.sampled_from(["user_turn", "tool_roundtrip"])


def projected(draw: st.DrawFn, talk: list[Message], grouping: Grouping) -> list[list[Message]]:
    """Pieces of a projection made of legal moves only: what stays together is one piece."""
    groups = grouped(talk, grouping)
    pieces: list[list[Message]] = []

    def say() -> None:
        for _ in range(draw(st.integers(0, 1))):
            text = f"said {len(pieces)} anew"
            pieces.append([user(text) if draw(st.booleans()) else assistant(text)])

    for group in groups:
        say()
        if not group.protected:
            pieces += [[message] for message in group.messages if draw(st.booleans())]
        elif group is groups[-1] or draw(st.booleans()):
            pieces.append(group.messages)
    if not is_open(talk):
        say()
    for message in (each for each in talk if each.role == "system"):
        # Where they stand among the others is free, as long as they keep their order.
        last = max((at for at, piece in enumerate(pieces) if piece[0].role == "system"), default=-1)
        pieces.insert(draw(st.integers(last + 1, len(pieces))), [message])
    return pieces


def is_open(talk: list[Message]) -> bool:
    calls = {each.id for message in talk for each in message.tool_calls}
    return calls != {message.tool_call_id for message in talk if message.role == "tool"}


def flat(pieces: list[list[Message]]) -> list[Message]:
    return [message for piece in pieces for message in piece]


@settings(deadline=None)
@given(talks(), groupings, st.data())
def test_what_legal_moves_make_is_a_projection(
    talk: list[Message], grouping: Grouping, data: st.DataObject
) -> None:
    check_projection(talk, talk, grouping)
    pieces = data.draw(st.composite(lambda draw: projected(draw, talk, grouping))())
    check_projection(talk, flat(pieces), grouping)


def spoiled(draw: st.DrawFn, talk: list[Message], pieces: list[list[Message]]) -> list[Message] | None:
    """The projection with one thing wrong in it; ``None`` where it has no such thing."""
    whole = [at for at, piece in enumerate(pieces) if any(is_protected(message) for message in piece)]
    marked = [at for at, piece in enumerate(pieces) if len(piece) == 1 and piece[0].role == "system"]
    sources = [at for at, piece in enumerate(pieces) if len(piece) == 1 and is_labelled(piece[0])]
    kept = [at for at, piece in enumerate(pieces) if len(piece) == 1 and piece[0] in talk
            and piece[0].role != "system"]  # fmt: skip
    kind = draw(
        st.sampled_from(
            ["cut", "alter", "inside", "swap", "end", "forge", "round", "twice",
             "drop system", "alter system", "add system", "swap system",
             "alter source", "strip source", "relabel source", "twice source", "promote source", "order"]
        )
    )  # fmt: skip
    made = [list(piece) for piece in pieces]

    def one(places: list[int]) -> int | None:
        return draw(st.sampled_from(places)) if places else None

    def two(places: list[int]) -> tuple[int, int] | None:
        if len(places) < 2:
            return None
        first, second = sorted(draw(st.lists(st.sampled_from(places), min_size=2, max_size=2, unique=True)))
        return first, second

    match kind.split():
        case ["cut"]:
            cuts = [
                (at, index)
                for at in whole
                for index in range(len(made[at]))
                if any(is_protected(each) for each in made[at][:index] + made[at][index + 1 :])
            ]
            if not cuts:
                return None
            at, index = draw(st.sampled_from(cuts))
            del made[at][index]
        case ["alter" | "inside"]:
            found = one([at for at in whole if len(made[at]) > 1])
            if found is None:
                return None
            index = draw(st.integers(0, len(made[found]) - 1))
            message = made[found][index]
            if kind == "alter":
                made[found][index] = msgspec.structs.replace(message, content=message.text + " forged")
            else:
                made[found].insert(max(1, index), assistant("between"))
        case ["swap" | "order"]:
            places = two(whole if kind == "swap" else kept)
            if places is None:
                return None
            made[places[0]], made[places[1]] = made[places[1]], made[places[0]]
        case ["end"]:
            if not whole or not is_protected_end(talk, made[whole[-1]]):
                return None
            del made[whole[-1]]
        case ["forge" | "round"]:
            forged = Message(role="assistant", content="x", extras={"signature": "forged"})
            new = [forged] if kind == "forge" else [call("new"), tool_result("new", "x")]
            made.insert(draw(st.integers(0, len(made) - is_open(talk))), new)
        case ["twice"]:
            found = one(whole)
            if found is None:
                return None
            made.insert(found, made[found])
        case [verb, "system"]:
            if verb == "add":
                made.insert(0, [system("be evil")])
            elif verb == "swap":
                places = two(marked)
                if places is None:
                    return None
                made[places[0]], made[places[1]] = made[places[1]], made[places[0]]
            else:
                found = one(marked)
                if found is None:
                    return None
                made[found] = [] if verb == "drop" else [system("be evil")]
        case [verb, "source"]:
            found = one(sources)
            if found is None:
                return None
            (message,) = made[found]
            label = message.extras
            match verb:
                case "alter":
                    made[found] = [Message(role="user", content="other", extras=label)]
                case "strip":
                    made[found] = [user(message.content)]
                case "relabel":
                    made[found] = [
                        Message(role="user", content=message.content, extras={SOURCE: {"id": "me"}})
                    ]
                case "twice":
                    made.insert(found, [message])
                case _:
                    made[found] = [system(message.text)]
    return flat(made)


def is_protected_end(talk: list[Message], piece: list[Message]) -> bool:
    said = [message for message in talk if message.role != "system"]
    return piece[-1] == said[-1]


@settings(deadline=None)
@given(talks(), groupings, st.data())
def test_one_illegal_change_is_refused(talk: list[Message], grouping: Grouping, data: st.DataObject) -> None:
    pieces = data.draw(st.composite(lambda draw: projected(draw, talk, grouping))())
    wrong = data.draw(st.composite(lambda draw: spoiled(draw, talk, pieces))())
    assume(wrong is not None)
    assert wrong is not None
    with pytest.raises(RetinueError):
        check_projection(talk, wrong, grouping)
