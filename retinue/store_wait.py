"""Waiting out a store that does not answer."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

import stamina

from retinue.errors import StoreUnavailable

T = TypeVar("T")

# Python prints warnings of loggers that nobody configured. An application that configures logging has these.
logging.getLogger("stamina").addHandler(logging.NullHandler())

STORE_WAIT = 60.0
"""Seconds for which a run waits for its store before it fails with ``store_unavailable``."""


async def until_stored(operation: Callable[[], Awaitable[T]]) -> T:
    """Repeat an idempotent store operation until the store answers, at most :data:`STORE_WAIT` seconds.

    Raises:
        StoreUnavailable: it did not answer in that time.
    """
    try:
        return await operation()
    except StoreUnavailable:
        pass
    retrying = stamina.AsyncRetryingCaller(
        attempts=None, timeout=STORE_WAIT, wait_initial=0.1, wait_max=2.0, wait_jitter=0.1
    )
    return await retrying(StoreUnavailable, operation)
