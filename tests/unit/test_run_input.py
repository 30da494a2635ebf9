"""Inputs and questions that are checked before a run sees them."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from retinue import (
    RUN_INPUT_LIMITS,
    Agent,
    Identity,
    Runtime,
    agent_driver,
    parse_run_input,
    validate_run_input,
)
from retinue.errors import InputError
from retinue.messages import AudioPart, FilePart, ImagePart, TextPart
from retinue.run_input import check_question
from tests.conftest import MakeLocalRuntime
from tests.support import HeldModel, soon, trivial

SOMEBODY = Identity(tenant_id="acme", user_id="ann")


@pytest.fixture(scope="module")
def echoing() -> Iterator[Runtime]:
    """Answers with its input."""
    with Runtime(driver=trivial, backend="inprocess") as runtime:
        yield runtime


texts = st.text()  # lone surrogates are not among them
parts = st.one_of(
    st.builds(TextPart, texts),
    st.builds(
        ImagePart, texts, st.sampled_from([None, "image/png", "image/jpeg", "image/gif", "image/webp"])
    ),
    st.builds(AudioPart, texts, st.sampled_from([None, "audio/mp3", "audio/wav", "audio/ogg", "audio/webm"])),
    st.builds(FilePart, texts, texts, st.none() | texts),
)
contents = texts | st.lists(parts, min_size=1, max_size=5)
hostile_texts = st.text(st.characters(exclude_categories=()))
"""Lone surrogates are among them."""
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | hostile_texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(hostile_texts, inner, max_size=4),
    max_leaves=12,
)
almost_parts = st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "image", "audio", "file", "reply"]) | json_values},
    optional=dict.fromkeys(("text", "data", "mime_type", "filename", "more"), json_values),
)


def refused(call: Any, *arguments: Any) -> InputError:
    with pytest.raises(InputError) as error:
        call(*arguments)
    assert error.value.code == "invalid_input"
    return error.value


# --- content ----------------------------------------------------------------------------------------------


def test_c231_the_longest_plain_text_has_65534_characters() -> None:
    assert validate_run_input("x" * 65_534) == "x" * 65_534
    refused(validate_run_input, "x" * 65_535)
    encoded = json.dumps("x" * 65_534)
    assert len(encoded) == RUN_INPUT_LIMITS.max_encoded_bytes
    assert parse_run_input(encoded) == "x" * 65_534


@pytest.mark.parametrize("as_bytes", [False, True])
def test_c232_white_space_counts_and_is_not_parsed_first(as_bytes: bool) -> None:
    at_the_limit, over = '"x"'.ljust(65_536), '"x"'.ljust(65_537)
    assert parse_run_input(at_the_limit.encode() if as_bytes else at_the_limit) == "x"
    error = refused(parse_run_input, over.encode() if as_bytes else over)
    assert "65536 bytes" in str(error)
    # Not even JSON: whoever parses first says so instead.
    assert "65536 bytes" in str(refused(parse_run_input, "{" * 65_537))
    # Few characters, many bytes.
    assert "65536 bytes" in str(refused(parse_run_input, '"' + "漢" * 21_846 + '"'))


@pytest.mark.parametrize(
    "encoded",
    [
        "",
        "x",
        '"x',
        "'x'",
        '"x" "y"',
        "NaN",
        '[{"type": "text", "text": NaN}]',
        "-Infinity",
        b'"\xff"',
        b'"\xed\xa0\x80"',
        '"x"'.encode("utf-16"),
        b'\xef\xbb\xbf"x"',
        '"\ud800"',
        '"\\ud800"',
        '"a\nb"',
        "1" * 5_000,
        "1e999",
        "[" * 60_000,
        '{"a":' * 10_000,
        '[{"type": "text", "text": "a", "text": "b"}]',
        '[{"type": "text", "type": "image", "text": "a"}]',
    ],
)
def test_c232_what_is_no_json_is_invalid_input(encoded: str | bytes) -> None:
    refused(parse_run_input, encoded)


@pytest.mark.parametrize("encoded", [None, 5, bytearray(b'"x"'), {"type": "text"}])
def test_only_text_is_parsed(encoded: object) -> None:
    refused(parse_run_input, encoded)


def test_c234_the_envelope_of_a_reply_is_no_content() -> None:
    refused(parse_run_input, '{"request_id": "run_1:a", "input": "yes"}')
    refused(validate_run_input, {"request_id": "run_1:a", "input": "yes"})


def test_c235_a_copy_is_returned() -> None:
    part = {"type": "text", "text": "before"}
    given = [part]
    validated = validate_run_input(given)
    part["text"] = "after"
    given.append(part)
    assert validated == [TextPart("before")]
    mine = [TextPart("x")]
    assert validate_run_input(mine) is not mine


async def test_c235_checking_claims_no_question(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    """A run that waits for its model goes on as if nothing had been checked beside it."""
    model = HeldModel("done")
    runtime = local_runtime(driver=agent_driver(Agent(name="a", model=model)))
    handle = runtime.start("hello", identity=identity, session_id=session_id)
    await soon(model.asked.wait())
    assert validate_run_input("yes") == "yes"
    assert handle.pending_input is None
    model.go.set()
    assert (await soon(handle.result())).text == "done"


@pytest.mark.parametrize(
    "text", [b"bytes", bytearray(b"x"), memoryview(b"x"), datetime(2026, 1, 1, tzinfo=UTC), 10**400]
)
def test_values_inside_parts_do_not_become_text_that_nobody_wrote(text: object) -> None:
    refused(validate_run_input, [{"type": "text", "text": text}])
    refused(validate_run_input, [TextPart(text)])  # type: ignore[arg-type]


@given(contents)
@example("")
@example("\x00")
def test_valid_content_survives_as_it_is(content: Any) -> None:
    validated = validate_run_input(copy.deepcopy(content))
    assert validated == content
    assert validate_run_input(validated) == validated
    encoded = msgspec.json.encode(validated)
    assert parse_run_input(encoded) == validated
    assert parse_run_input(encoded.decode()) == validated


@settings(max_examples=40)
@given(contents)
def test_what_is_validated_is_what_the_driver_gets(echoing: Runtime, content: Any) -> None:
    validated = validate_run_input(content)
    result = echoing.run_blocking(validated, identity=SOMEBODY, session_id="s")
    assert result.text == str(content)


def checked(check: Any, value: Any) -> Any:
    """The content, or ``None`` where it was refused as it should be; what else it raises is a failure."""
    try:
        return check(value)
    except InputError as error:
        if error.code != "invalid_input":
            raise
        str(error).encode()  # must be able to travel
        return None


@given(json_values | st.lists(almost_parts, max_size=3))
def test_arbitrary_json_is_content_or_invalid_input(value: Any) -> None:
    content = checked(validate_run_input, value)
    if content is not None:
        assert validate_run_input(content) == content
        assert len(msgspec.json.encode(content)) <= RUN_INPUT_LIMITS.max_normalized_bytes
    # NaN aside, which is no JSON, the text says the same as the value.
    assert checked(parse_run_input, json.dumps(value)) == content


@given(hostile_texts | st.binary())
def test_arbitrary_text_is_content_or_invalid_input(encoded: str | bytes) -> None:
    content = checked(parse_run_input, encoded)
    assert content is None or validate_run_input(content) == content


def test_the_limits_are_those_of_the_contract_and_frozen() -> None:
    assert msgspec.structs.astuple(RUN_INPUT_LIMITS) == (65_536, 65_536, 32_768, 100)
    with pytest.raises(AttributeError):
        RUN_INPUT_LIMITS.max_choices = 200  # type: ignore[misc]


# --- questions --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("question", "choices", "timeout"),
    [
        ("", None, None),
        (" \n\t", None, None),
        (None, None, None),
        (5, None, None),
        ("\ud800", None, None),
        ("q", [], None),
        ("q", "yes", None),
        ("q", b"yes", None),
        ("q", {"yes": 1}, None),
        ("q", 5, None),
        ("q", ["yes", ""], None),
        ("q", ["yes", 5], None),
        ("q", ["\udfff"], None),
        ("q", [str(number) for number in range(101)], None),
        ("q", None, 0),
        ("q", None, -1),
        ("q", None, "5"),
        ("q", None, True),
        ("q", None, math.nan),
        ("q", None, math.inf),
        ("q", None, 10**400),
        ("q" * 32_769, None, None),
        ("q", ["c" * 4_000] * 9, None),
    ],
)
def test_c124_a_question_that_cannot_be_asked(question: object, choices: object, timeout: object) -> None:
    refused(check_question, question, choices, timeout)


def test_c124_a_question_that_can_be_asked() -> None:
    choices = [str(number) for number in range(100)]
    assert check_question(" Which? \n", choices, 1.5) == ("Which?", tuple(choices), 1.5)
    assert check_question("漢", None, None) == ("漢", None, None)
    assert check_question("q", ("a", "a"), 2) == ("q", ("a", "a"), 2.0)


def test_the_size_of_a_question_is_bytes_of_compact_json() -> None:
    room = 32_768 - len('{"question":""}')
    assert check_question("é" * (room // 2), None, None)[0] == "é" * (room // 2)
    refused(check_question, "é" * (room // 2 + 1), None, None)
