"""What JSON can carry: NaN and infinities are refused, where an encoder would silently write null."""

from __future__ import annotations

import math
from typing import Any

import msgspec


def encode_json(value: Any) -> bytes:
    """A value of the application as JSON.

    Raises:
        TypeError, ValueError: it holds something that JSON cannot carry; a number that is not finite is one.
        UnicodeEncodeError: it holds a lone surrogate.
    """
    _check_finite(msgspec.to_builtins(value), "value")
    return msgspec.json.encode(value)


def _check_finite(value: Any, path: str) -> None:
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{path} is {value}, which JSON cannot carry")
    elif isinstance(value, dict):
        for key, member in value.items():
            _check_finite(member, f"{path}[{key!r}]")
    elif isinstance(value, list | tuple):
        for index, member in enumerate(value):
            _check_finite(member, f"{path}[{index}]")
