"""Turns of a conversation: a user message with all that follows, up to the next one (contract section 9)."""

from __future__ import annotations

from collections.abc import Sequence

from retinue.errors import InputError
from retinue.messages import Content, decode_message


def turn_starts(messages: Sequence[bytes]) -> list[int]:
    """Where each turn of an encoded history begins. What comes before the first belongs to no turn."""
    return [index for index, body in enumerate(messages) if decode_message(body).role == "user"]


def messages_of_turns(messages: Sequence[bytes], turns: int | None) -> int:
    """How many messages the first ``turns`` turns have; all for ``None``; negative counts from the end.

    Raises:
        InputError: there are not so many turns.
    """
    if turns is None:
        return len(messages)
    starts = turn_starts(messages)
    count = _position(turns, len(starts), len(starts) + 1)
    return len(messages) if count == len(starts) else starts[count]


def input_of_turn(messages: Sequence[bytes], turn: int) -> tuple[int, Content]:
    """The number of a turn, counted from 0, and what the user said in it; negative counts from the end.

    Raises:
        InputError: there is no such turn.
    """
    starts = turn_starts(messages)
    number = _position(turn, len(starts), len(starts))
    return number, decode_message(messages[starts[number]]).content


def _position(wanted: object, turns: int, end: int) -> int:
    if isinstance(wanted, bool) or not isinstance(wanted, int):
        raise InputError(f"a turn is counted by an integer, not {wanted!r:.80}", field="turn")
    position = wanted + turns if wanted < 0 else wanted
    if not 0 <= position < end:
        raise InputError(f"there is no turn {wanted}: the conversation has {turns}", field="turn")
    return position
