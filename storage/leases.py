"""The lease rule: when a session's lease may be taken from another holder.

Both engines ask one :class:`LeaseWatch`, inside the transaction that would take the lease. Safety does not
rest on it: a wrong takeover costs the old holder its runs, but the epoch still lets only one writer commit.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

import msgspec

from retinue.errors import SessionConflict
from retinue.ids import SessionAddress
from retinue.storage.holders import provably_gone
from retinue.store import LEASE_PERIOD, Holder

MAX_OBSERVED = 4096
"""Contended leases remembered; beyond it the one not asked for longest is forgotten, and waited for anew."""


class Observation(msgspec.Struct, frozen=True):
    """A lease as this engine saw it at a contender's attempt."""

    epoch: int
    renewals: int
    since: float
    """Reading of this engine's monotonic clock, in seconds, when it first saw these numbers."""


class LeaseWatch:
    """What one engine has seen of the leases that contenders asked for.

    Args:
        clock: monotonic seconds; injected by tests.
        gone: whether a holder's process has certainly ended; injected by tests.
        period: seconds for which a renewal counter must stand still.
    """

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.monotonic,
        gone: Callable[[Holder], bool] = provably_gone,
        period: float = LEASE_PERIOD,
    ) -> None:
        self._clock = clock
        self._gone = gone
        self._period = period
        self._seen: OrderedDict[SessionAddress, Observation] = OrderedDict()

    def admit(
        self, address: SessionAddress, epoch: int, renewals: int, holder: Holder, contender: Holder
    ) -> None:
        """Return when ``contender`` may take the lease that ``holder`` has; count the attempt otherwise.

        Raises:
            SessionConflict: the holder may live. ``holder`` is its id, ``retry_after`` the seconds after
                which the lease can be taken, if it is not renewed until then.
        """
        if holder.holder_id == contender.holder_id or self._gone(holder):
            self._seen.pop(address, None)
            return
        now = self._clock()
        seen = self._seen.get(address)
        if seen is None or (seen.epoch, seen.renewals) != (epoch, renewals):
            seen = Observation(epoch, renewals, now)
            self._seen[address] = seen
        self._seen.move_to_end(address)
        if len(self._seen) > MAX_OBSERVED:
            self._seen.popitem(last=False)
        wait = self._period - (now - seen.since)
        if wait <= 0:
            del self._seen[address]
            return
        raise SessionConflict(
            f"session {address.session_id!r} is held by {holder.holder_id} (process {holder.pid}), which may "
            f"be alive; wait for it, or try again in {wait:.1f} s, when its lease is taken over unless "
            "renewed",
            holder=holder.holder_id,
            retry_after=wait,
        )

    def forget(self, address: SessionAddress) -> None:
        """Drop what was seen of a session that is deleted."""
        self._seen.pop(address, None)
