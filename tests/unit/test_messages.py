"""Run inputs and messages: limits in bytes, text that stores can carry, calls that pair up."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from retinue import Message, ToolCall
from retinue.errors import InputError
from retinue.messages import (
    MAX_INPUT_BYTES,
    FilePart,
    ImagePart,
    TextPart,
    ToolPairing,
    assistant,
    check_content,
    check_structure,
    close_open_calls,
    decode_message,
    encode_message,
    escape_surrogates,
    system,
    tool_result,
    user,
)

# --- inputs -----------------------------------------------------------------------------------------------


def test_c231_the_limit_is_bytes_of_compact_json() -> None:
    assert check_content("x" * 65_534) == "x" * 65_534
    with pytest.raises(InputError) as refused:
        check_content("x" * 65_535)
    assert refused.value.code == "invalid_input"
    assert "65537 bytes" in str(refused.value)


@pytest.mark.parametrize(
    ("character", "size"), [("é", 2), ("漢", 3), ("\U0001f600", 4), ('"', 2), ("\x00", 6)]
)
def test_characters_count_as_utf8_without_ascii_escapes(character: str, size: int) -> None:
    fits = (MAX_INPUT_BYTES - 2) // size
    assert check_content(character * fits) == character * fits
    with pytest.raises(InputError):
        check_content(character * (fits + 1))


@pytest.mark.parametrize("value", ["\ud800", "x\udfff", [{"type": "text", "text": "\ud83d"}]])
def test_lone_surrogates_are_refused_by_name(value: Any) -> None:
    with pytest.raises(InputError, match="lone surrogate"):
        check_content(value)


def test_nul_is_carried() -> None:
    assert check_content("a\x00b") == "a\x00b"
    assert decode_message(encode_message(user("a\x00b"))).text == "a\x00b"


@pytest.mark.parametrize(
    "value",
    [
        None,
        5,
        b"bytes",
        datetime(2026, 1, 1, tzinfo=UTC),
        {"type": "text", "text": "x"},
        [],
        ["text"],
        [{"type": "reply", "text": "x"}],
        [{"type": "text"}],
        [{"type": "text", "text": "x", "more": 1}],
        [{"type": "image", "data": "x", "mime_type": "image/tiff"}],
        [{"type": "text", "text": object()}],
    ],
)
def test_what_is_no_content_is_refused(value: Any) -> None:
    with pytest.raises(InputError):
        check_content(value)


def test_content_is_a_checked_copy() -> None:
    parts = [
        {"type": "text", "text": "x"},
        ImagePart("data", "image/png"),
        FilePart("d", "text/csv", "a.csv"),
    ]
    content = check_content(parts)
    parts.clear()
    assert content == [TextPart("x"), ImagePart("data", "image/png"), FilePart("d", "text/csv", "a.csv")]
    assert user(content).text == "x"


# --- messages ---------------------------------------------------------------------------------------------

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
calls = st.builds(ToolCall, texts, texts, st.dictionaries(texts, st.integers() | texts, max_size=2))
messages = st.builds(
    Message,
    role=st.sampled_from(["system", "user", "assistant", "tool"]),
    content=texts | st.lists(st.builds(TextPart, texts), max_size=2),
    tool_calls=st.lists(calls, max_size=2).map(tuple),
    tool_call_id=st.none() | texts,
    extras=st.none() | st.dictionaries(texts, st.booleans() | texts, max_size=2),
)


@given(messages)
def test_a_message_survives_its_store(message: Message) -> None:
    assert decode_message(encode_message(message)) == message


@pytest.mark.parametrize(
    "message",
    [
        Message(role="robot"),  # type: ignore[arg-type]
        Message(role="user", content=None),  # type: ignore[arg-type]
        Message(role="user", content=[5]),  # type: ignore[list-item]
        Message(role="assistant", tool_calls=(5,)),  # type: ignore[arg-type]
        Message(role="assistant", tool_calls=(ToolCall("1", "a", [1]),)),  # type: ignore[arg-type]
        Message(role="user", extras={"x": object()}),
        {"role": "user", "content": "x"},
    ],
)
def test_what_could_not_be_read_again_is_refused(message: Any) -> None:
    with pytest.raises(InputError):
        encode_message(message)


@pytest.mark.parametrize("field", ["content", "tool_call_id"])
def test_a_message_with_a_lone_surrogate_is_refused_by_name(field: str) -> None:
    with pytest.raises(InputError, match="lone surrogate"):
        encode_message(msgspec.structs.replace(user("x"), **{field: "\udc80"}))


@given(st.text())
def test_escaped_text_can_be_carried_and_good_text_is_left_alone(text: str) -> None:
    escaped = escape_surrogates(text)
    escaped.encode()
    try:
        text.encode()
    except UnicodeEncodeError:
        assert escaped != text
    else:
        assert escaped == text


# --- calls and results ------------------------------------------------------------------------------------


def asks(*ids: str) -> Message:
    return assistant("", [ToolCall(call_id, "tool") for call_id in ids])


@pytest.mark.parametrize(
    "history",
    [
        [],
        [user("q"), asks("1", "2"), tool_result("2", ""), tool_result("1", ""), assistant("a"), user("q")],
        [user("q"), asks("1"), tool_result("1", ""), asks("2"), tool_result("2", "")],
        [asks("1"), system("in between"), tool_result("1", "")],
        [user("q"), asks("1", "2"), tool_result("1", "")],
    ],
)
def test_good_structures(history: list[Message]) -> None:
    check_structure(history)


@pytest.mark.parametrize(
    ("history", "index"),
    [
        ([user("q"), tool_result("1", "")], 1),
        ([asks("1"), tool_result("1", ""), tool_result("1", "")], 2),
        ([asks("1"), user("q")], 1),
        ([asks("1"), asks("2")], 1),
        ([asks("1", "1")], 0),
        ([asks("")], 0),
        ([asks("1"), tool_result("1", ""), asks("1")], 2),
        ([asks("1"), Message(role="tool", content="x")], 1),
    ],
)
def test_broken_structures_name_the_place(history: list[Message], index: int) -> None:
    with pytest.raises(ValueError, match=rf"^messages\[{index}\]"):
        check_structure(history)


def test_a_pairing_that_refused_goes_on_as_before() -> None:
    pairing = ToolPairing()
    pairing.add(asks("1"))
    for wrong in (user("q"), tool_result("2", ""), asks("3")):
        with pytest.raises(ValueError):
            pairing.add(wrong)
    assert pairing.open_calls == {"1"}
    pairing.add(tool_result("1", ""))
    pairing.add(asks("1"))  # a model may count from one again in the next round


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 3)), max_size=12))
def test_closing_makes_every_followable_history_whole(steps: list[tuple[bool, int]]) -> None:
    pairing, history, count = ToolPairing(), [], 0
    for answers, number in steps:
        if answers and pairing.open_calls:
            message = tool_result(min(pairing.open_calls), "there")
        else:
            message = asks(*(f"{count}-{index}" for index in range(number))) if number else user("q")
            count += 1
        try:
            pairing.add(message)
        except ValueError:
            continue
        history.append(message)
    closing = close_open_calls(history, "it ended")
    assert {message.tool_call_id for message in closing} == pairing.open_calls
    assert all(message.text == "[no result: it ended]" for message in closing)
    check_structure([*history, *closing, user("next")])
