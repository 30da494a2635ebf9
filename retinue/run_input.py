"""Checking inputs and questions before a run sees them (contract sections 6 and 12).

What is accepted here is accepted by ``start``, ``send`` and ``reply``: all of them use the same check. A
check claims nothing: whether a run still takes the input is decided when it arrives.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NoReturn

import msgspec

from retinue.clocks import check_seconds
from retinue.errors import InputError
from retinue.messages import MAX_INPUT_BYTES, Content, check_content


class RunInputLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes in UTF-8 bytes; JSON is compact and not escaped to ASCII."""

    max_encoded_bytes: int
    """Of the text given to :func:`parse_run_input`; white space counts."""
    max_normalized_bytes: int
    """Of a content value as JSON, quotes and escapes included."""
    max_question_bytes: int
    """Of a question with its choices and its timeout as JSON."""
    max_choices: int
    """Of a question."""


RUN_INPUT_LIMITS = RunInputLimits(
    max_encoded_bytes=65_536,
    max_normalized_bytes=MAX_INPUT_BYTES,
    max_question_bytes=32_768,
    max_choices=100,
)


def validate_run_input(value: object) -> Content:
    """A validated copy of a run input, under the rules of ``start``, ``send`` and ``reply``.

    Args:
        value: a string, or a nonempty list of content parts.

    Raises:
        InputError: ``invalid_input``; the text says what is wrong with it.
    """
    return check_content(value)


def parse_run_input(encoded: str | bytes) -> Content:
    """A run input from its JSON text, which may come from anywhere.

    Args:
        encoded: one content value as JSON, not the envelope of a reply; at most 65,536 UTF-8 bytes, which is
            checked before anything is parsed.

    Raises:
        InputError: ``invalid_input``: too long, no UTF-8, no JSON, a repeated key, or no content.
    """
    text = _bounded_text(encoded)
    try:
        value = json.loads(text, object_pairs_hook=_unique_keys, parse_constant=_refuse_constant)
    except RecursionError:
        raise InputError("the input is nested too deeply") from None
    except ValueError as error:  # JSONDecodeError, and numbers of too many digits
        raise InputError(f"the input is not valid JSON: {error}") from None
    return check_content(value)


def _bounded_text(encoded: object) -> str:
    """The text, if it is short enough; characters are counted first, so that nothing large is copied."""
    if not isinstance(encoded, str | bytes):
        raise InputError(f"the encoded input must be str or bytes, not {type(encoded).__name__}")
    limit = RUN_INPUT_LIMITS.max_encoded_bytes
    try:
        data = encoded if isinstance(encoded, bytes) or len(encoded) > limit else encoded.encode()
        if len(data) > limit:
            raise InputError(f"the encoded input is longer than the {limit} bytes that a run accepts")
        return str(data, "utf-8") if isinstance(data, bytes) else data
    except UnicodeEncodeError:
        raise InputError("the input holds a lone surrogate, which no store can carry") from None
    except UnicodeDecodeError as error:
        raise InputError(f"the encoded input is not UTF-8: byte {error.start} is wrong") from None


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise InputError("the input has an object that repeats a key, so it says two things")
    return found


def _refuse_constant(name: str) -> NoReturn:
    raise InputError(f"the input holds {name}, which is not JSON")


def check_question(
    question: object, choices: object, timeout: object
) -> tuple[str, tuple[str, ...] | None, float | None]:
    """A question as it will be asked: trimmed, its choices copied, its timeout in seconds.

    Args:
        question: what is asked; not blank.
        choices: up to 100 nonempty strings, or ``None``.
        timeout: a positive finite number of seconds, or ``None``.

    Raises:
        InputError: ``invalid_input``, with the member at fault as ``field``.
    """
    if not isinstance(question, str) or not question.strip():
        raise InputError("a question must be a string that is not blank", field="question")
    text = question.strip()
    given = None if choices is None else _check_choices(choices)
    check_seconds("timeout", timeout)
    seconds = None if timeout is None else float(timeout)  # type: ignore[arg-type]  # just checked
    _check_question_size({"question": text, "choices": given, "timeout": seconds})
    return text, given, seconds


def _check_choices(choices: object) -> tuple[str, ...]:
    limit = RUN_INPUT_LIMITS.max_choices
    if not isinstance(choices, Sequence) or isinstance(choices, str | bytes):
        raise InputError(f"choices must be a list of strings, not {type(choices).__name__}", field="choices")
    if not 1 <= len(choices) <= limit:
        raise InputError(f"a question has 1 to {limit} choices, not {len(choices)}", field="choices")
    for index, choice in enumerate(choices):
        if not isinstance(choice, str) or not choice:
            raise InputError(
                f"choices[{index}] must be a nonempty string, not {choice!r:.80}", field=f"choices[{index}]"
            )
    return tuple(choices)


def _check_question_size(parts: dict[str, object]) -> None:
    try:
        size = len(msgspec.json.encode({name: value for name, value in parts.items() if value is not None}))
    except UnicodeEncodeError:
        raise InputError(
            "the question holds a lone surrogate, which no store can carry", field="question"
        ) from None
    limit = RUN_INPUT_LIMITS.max_question_bytes
    if size > limit:
        raise InputError(
            f"the question has {size} bytes of JSON, more than the {limit} that can be asked; "
            "shorten it or its choices",
            field="question",
        )
