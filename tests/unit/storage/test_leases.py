"""Who may take a lease, and when: over both engines, with a clock and deaths that the test decides."""

from __future__ import annotations

import pytest

from retinue.errors import LeaseLost, SessionConflict
from retinue.ids import SessionAddress
from retinue.storage import leases
from retinue.storage.leases import LeaseWatch
from retinue.store import LEASE_PERIOD, Store
from retinue.testing.store_trial import commit_of, live_holder, record_of
from tests.unit.storage.world import World


def _address(store: Store, session_id: str = "session") -> SessionAddress:
    return SessionAddress(store_id=store.store_id, tenant_id="t", user_id="u", session_id=session_id)


async def _conflict(store: Store, holder_id: str = "contender") -> SessionConflict:
    with pytest.raises(SessionConflict) as caught:
        await store.acquire(_address(store), live_holder(holder_id))
    return caught.value


async def test_a_dead_holder_is_fenced_at_once(store: Store, world: World) -> None:
    lease = (await store.acquire(_address(store), live_holder("holder"))).lease
    await store.open_run(lease, record_of(lease.address, "run"))
    await _conflict(store)
    world.gone.add("holder")
    grant = await store.acquire(_address(store), live_holder("contender"))
    assert grant.lease.epoch == lease.epoch + 1
    assert [record.run_id for record in grant.open_runs] == ["run"]
    with pytest.raises(LeaseLost):
        await store.commit(commit_of(lease, 0))


async def test_a_silent_holder_is_taken_over_after_a_whole_period(store: Store, world: World) -> None:
    lease = (await store.acquire(_address(store), live_holder("holder"))).lease
    world.now += 1000.0  # what happened before the first attempt does not count: nobody was looking
    assert (await _conflict(store)).retry_after == LEASE_PERIOD
    world.now += LEASE_PERIOD - 0.5
    error = await _conflict(store, "another contender")
    assert error.retry_after == pytest.approx(0.5)
    assert error.holder == "holder"
    world.now += 0.5
    grant = await store.acquire(_address(store), live_holder("contender"))
    assert grant.lease.epoch == lease.epoch + 1
    assert await store.renew([lease, grant.lease]) == [False, True]


async def test_a_renewal_starts_the_period_anew(store: Store, world: World) -> None:
    lease = (await store.acquire(_address(store), live_holder("holder"))).lease
    for _ in range(5):
        await _conflict(store)
        world.now += LEASE_PERIOD
        assert await store.renew([lease]) == [True]
    assert (await _conflict(store)).retry_after == LEASE_PERIOD
    world.now += LEASE_PERIOD - 0.1
    await _conflict(store)
    assert await store.commit(commit_of(lease, 0)) == 1


async def test_a_new_epoch_starts_the_period_anew(store: Store, world: World) -> None:
    lease = (await store.acquire(_address(store), live_holder("holder"))).lease
    await _conflict(store)
    world.now += LEASE_PERIOD - 0.1
    await store.release(lease)
    await store.acquire(_address(store), live_holder("newer"))
    world.now += LEASE_PERIOD - 0.1
    assert (await _conflict(store)).retry_after == LEASE_PERIOD


async def test_the_same_holder_need_not_wait(store: Store) -> None:
    first = await store.acquire(_address(store), live_holder("holder"))
    await _conflict(store)
    again = await store.acquire(_address(store), live_holder("holder"))
    assert again.lease.epoch == first.lease.epoch + 1


async def test_observations_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "MAX_OBSERVED", 2)
    now = 0.0
    watch = LeaseWatch(clock=lambda: now, gone=lambda _: False)

    def attempt(session_id: str) -> float:
        address = SessionAddress(store_id="s", tenant_id="t", user_id="u", session_id=session_id)
        with pytest.raises(SessionConflict) as caught:
            watch.admit(address, 1, 0, live_holder("holder"), live_holder("contender"))
        return float(caught.value.retry_after)

    for session_id in ("a", "b", "c"):
        attempt(session_id)
    now = 5.0
    assert attempt("b") == LEASE_PERIOD - 5.0
    assert attempt("c") == LEASE_PERIOD - 5.0
    assert attempt("a") == LEASE_PERIOD  # forgotten, so it is waited for anew: slower, never unsafe
