"""The arguments of a tool call as those who review it see them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

import pydantic_core


def snapshot(arguments: Mapping[str, Any]) -> bytes:
    """Canonical JSON of parsed arguments: keys sorted, no white space, no escapes.

    Raises:
        TypeError, ValueError: they are no JSON, so nobody could review them.
    """
    for name, value in arguments.items():
        if isinstance(value, Iterator):
            raise TypeError(f"{name} can be read only once; annotate it as a list")
    plain = pydantic_core.to_jsonable_python(dict(arguments), inf_nan_mode="constants")
    return canonical(plain)


def canonical(plain: object) -> bytes:
    """JSON values as canonical JSON; :class:`ValueError` where they are none."""
    text = json.dumps(plain, sort_keys=True, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.encode()


def digest(arguments: bytes) -> str:
    """SHA-256 of canonical arguments, in hex."""
    return hashlib.sha256(arguments).hexdigest()
