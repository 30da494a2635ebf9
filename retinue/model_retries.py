"""Asking a model again, where its provider could not answer (contract section 5).

Each attempt is a model call of the run: admitted by the ledger before, settled after. So retries end with the
budget at the latest, and what they cost is seen.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

import stamina

from retinue.errors import ModelFailed

T = TypeVar("T")

# Python prints warnings of loggers that nobody configured. An application that configures logging has these.
logging.getLogger("stamina").addHandler(logging.NullHandler())

DEFAULT_RETRIES = 2
"""Attempts after the first one."""
FIRST_WAIT = 0.5
"""Seconds before the first retry; each later one waits twice as long."""
LONGEST_WAIT = 30.0
"""Seconds that are waited at most, whatever a provider asks for."""


async def retried(
    attempt: Callable[[], Awaitable[T]],
    retries: int,
    *,
    may_repeat: Callable[[], bool] = lambda: True,
) -> T:
    """Call ``attempt`` until it succeeds, or fails in a way that another one does not help.

    Args:
        attempt: makes one call of the model.
        retries: attempts after the first one.
        may_repeat: asked after a failure; false where people have seen something of the answer already.

    Raises:
        ModelFailed: of the last attempt.
        BudgetExhausted: and whatever else an attempt raises that is no failure of its provider.
    """

    def waits(error: Exception) -> bool | float:
        """Whether to try again, or in how many seconds the provider wants to be asked."""
        if not isinstance(error, ModelFailed) or not error.retryable or not may_repeat():
            return False
        asked = error.retry_after
        # A little later than asked: all who were told the same would come at once.
        return True if asked is None else min(float(asked), LONGEST_WAIT) + random.uniform(0, FIRST_WAIT)

    async for one in stamina.retry_context(
        on=waits,
        attempts=retries + 1,
        timeout=None,
        wait_initial=FIRST_WAIT,
        wait_max=LONGEST_WAIT,
        wait_jitter=FIRST_WAIT,
    ):
        with one:
            return await attempt()
    raise AssertionError("stamina gives the value or raises")
