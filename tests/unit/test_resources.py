"""Resources of runs and sessions: who makes them, who shares them, when they are disposed of."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Literal

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from retinue.errors import InputError, RetinueError, SessionConflict, Unsupported, ValidationFailed
from retinue.resources import Resource, RunResources, SessionResources
from tests.support import soon


class Made:
    """Resources that say what became of them."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        """Names, in the order in which they were asked for."""
        self.disposed: list[str] = []

    def __call__(
        self, name: str, *, ownership: Literal["runtime", "host"] = "runtime", failing: bool = False
    ) -> Callable[[], Resource[str]]:
        async def dispose() -> None:
            self.disposed.append(name)
            if failing:
                raise RuntimeError(f"{name} does not close")

        def initialize() -> Resource[str]:
            self.calls.append(name)
            return Resource(value=f"{name} {len(self.calls)}", ownership=ownership, dispose=dispose)

        return initialize

    def held(self, name: str) -> tuple[Callable[[], Awaitable[Resource[str]]], asyncio.Event, asyncio.Event]:
        """An initialiser that waits, the event that it has begun, and the one that lets it go on."""
        begun, go = asyncio.Event(), asyncio.Event()

        async def initialize() -> Resource[str]:
            begun.set()
            await go.wait()
            return self(name)()

        return initialize, begun, go


@pytest.fixture
def made() -> Made:
    return Made()


async def acquiring(pool: SessionResources, name: str, initialize: Any) -> asyncio.Task[Any]:
    """A task that waits for this resource by now."""
    task = asyncio.ensure_future(pool.acquire(name, initialize))
    await asyncio.sleep(0)
    return task


def uninterrupted(
    initialize: Callable[[], Awaitable[Resource[str]]],
) -> Callable[[], Awaitable[Resource[str]]]:
    """An initialiser that goes on when it is cancelled."""

    async def going_on() -> Resource[str]:
        making = asyncio.ensure_future(initialize())
        try:
            return await asyncio.shield(making)
        except asyncio.CancelledError:
            return await making

    return going_on


def figures(pool: SessionResources) -> tuple[int, bool, float | None]:
    return pool.held, pool.in_use, pool.idle_since


# --- of a session -----------------------------------------------------------------------------------------


async def test_c21_a_session_resource_is_made_once(made: Made) -> None:
    pool = SessionResources()
    first = await pool.acquire("db", made("db"))
    pool.release("db")
    assert await pool.acquire("db", made("db")) is first
    assert made.calls == ["db"]
    # Another session, such as that of another tenant, has a pool of its own.
    assert await SessionResources().acquire("db", made("db")) != first
    assert made.calls == ["db", "db"]
    assert made.disposed == []


async def test_c22_concurrent_first_acquisitions_share_one_initialiser(made: Made) -> None:
    pool = SessionResources()
    initialize, _, go = made.held("db")
    waiting = [await acquiring(pool, "db", initialize) for _ in range(10)]
    go.set()
    values = await soon(asyncio.gather(*waiting))
    assert made.calls == ["db"]
    assert values == ["db 1"] * 10


async def test_c24_closing_while_a_lease_is_held_disposes_of_nothing(made: Made) -> None:
    pool = SessionResources()
    for name in ("unused", "used"):
        await pool.acquire(name, made(name))
    pool.release("unused")
    with pytest.raises(SessionConflict, match="'used'") as refused:
        await pool.close()
    assert refused.value.code == "session_conflict"
    assert made.disposed == []
    pool.release("used")
    assert await pool.close() == []
    assert made.disposed == ["used", "unused"]


async def test_a_lease_for_each_user_keeps_the_resource(made: Made) -> None:
    pool = SessionResources()
    for _ in range(2):
        await pool.acquire("db", made("db"))
    pool.release("db")
    with pytest.raises(SessionConflict):
        await pool.close()
    pool.release("db")
    assert await pool.close() == []


async def test_c25_closing_while_an_initialiser_is_pending_disposes_of_nothing(made: Made) -> None:
    pool = SessionResources()
    await pool.acquire("old", made("old"))
    pool.release("old")
    initialize, _, go = made.held("new")
    waiting = await acquiring(pool, "new", initialize)
    with pytest.raises(SessionConflict, match="'new'"):
        await pool.close()
    assert made.disposed == []
    go.set()
    assert await soon(waiting) == "new 2"
    with pytest.raises(SessionConflict):
        await pool.close()


async def test_c27_what_the_host_owns_is_never_disposed_of(made: Made) -> None:
    pool = SessionResources()
    await pool.acquire("theirs", made("theirs", ownership="host"))
    await pool.acquire("ours", made("ours"))
    pool.release("theirs")
    pool.release("ours")
    assert await pool.close() == []
    assert made.disposed == ["ours"]
    # It has left the pool all the same.
    assert await pool.acquire("theirs", made("theirs")) == "theirs 3"


async def test_c31_an_empty_pool_closes() -> None:
    assert await SessionResources().close() == []


async def test_failing_disposals_are_named_and_the_others_go_on(
    made: Made, caplog: pytest.LogCaptureFixture
) -> None:
    pool = SessionResources()

    def exits() -> None:
        raise SystemExit(3)

    async def cancelled_inside() -> None:
        inner = asyncio.ensure_future(asyncio.sleep(60))
        inner.cancel()
        await inner

    await pool.acquire("a", made("a"))
    await pool.acquire("b", made("b", failing=True))
    await pool.acquire("c", lambda: Resource(value=1, dispose=exits))
    await pool.acquire("d", lambda: Resource(value=1, dispose=cancelled_inside))
    await pool.acquire("e", made("e"))
    for name in "abcde":
        pool.release(name)
    with caplog.at_level(logging.WARNING):
        assert await soon(pool.close()) == ["d", "c", "b"]
    assert made.disposed == ["e", "b", "a"]
    assert "b does not close" in caplog.text
    # All-or-nothing at the check, best effort after it: nothing is left to try again.
    assert await pool.close() == []


async def test_what_another_resource_was_made_with_is_disposed_of_after_it(made: Made) -> None:
    pool = SessionResources()

    async def outer() -> Resource[str]:
        await pool.acquire("connection", made("connection"))
        return made("cursor")()

    await pool.acquire("cursor", outer)
    pool.release("cursor")
    pool.release("connection")
    await pool.close()
    assert made.disposed == ["cursor", "connection"]


async def test_a_failed_initialiser_fails_all_who_wait_and_leaves_nothing(made: Made) -> None:
    pool = SessionResources()
    go = asyncio.Event()

    async def fail() -> Resource[str]:
        await go.wait()
        raise OSError("no database")

    waiting = [await acquiring(pool, "db", fail) for _ in range(3)]
    go.set()
    failures = await soon(asyncio.gather(*waiting, return_exceptions=True))
    assert [str(failure) for failure in failures] == ["no database"] * 3
    assert (pool.held, pool.in_use) == (0, False)
    assert await pool.close() == []
    assert await pool.acquire("db", made("db")) == "db 1"


@pytest.mark.parametrize("error", [SystemExit(1), KeyboardInterrupt()])
async def test_an_initialiser_that_exits_ends_no_loop(error: BaseException) -> None:
    def exits() -> Resource[str]:
        raise error

    for acquire in (SessionResources().acquire("x", exits), RunResources().acquire("x", "run", exits)):
        with pytest.raises(RetinueError, match=type(error).__name__) as refused:
            await acquire
        assert refused.value.code == "execution_failed"


async def test_the_others_get_what_a_cancelled_first_one_had_begun(made: Made) -> None:
    pool = SessionResources()
    initialize, _, go = made.held("db")
    first = await acquiring(pool, "db", initialize)
    second = await acquiring(pool, "db", made("another"))
    first.cancel()
    await asyncio.wait([first])
    assert first.cancelled()
    go.set()
    assert await soon(second) == "db 1"
    assert made.calls == ["db"]
    pool.release("db")
    assert await pool.close() == []


async def test_with_the_last_one_the_initialiser_is_cancelled_and_waited_for(made: Made) -> None:
    pool = SessionResources()
    begun, gone, may_go = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def initialize() -> Resource[str]:
        try:
            begun.set()
            await asyncio.Event().wait()
        finally:
            gone.set()
            await may_go.wait()
        raise AssertionError

    both = [await acquiring(pool, "db", initialize) for _ in range(2)]
    await soon(begun.wait())
    for task in both:
        task.cancel()
    await soon(gone.wait())
    assert pool.in_use
    # Cancelling again, as the end of a run does, leaves nothing behind either.
    both[1].cancel()
    newcomer = await acquiring(pool, "db", made("db"))
    assert not both[1].done()
    may_go.set()
    assert await soon(newcomer) == "db 1"
    await asyncio.wait(both)
    assert all(task.cancelled() for task in both)
    pool.release("db")
    assert await pool.close() == []
    assert made.disposed == ["db"]


@pytest.mark.parametrize("turns", range(1, 8))
async def test_whoever_comes_while_an_initialiser_is_cancelled_gets_a_new_one(made: Made, turns: int) -> None:
    pool = SessionResources()
    initialize, begun, _ = made.held("db")
    only = await acquiring(pool, "db", initialize)
    await soon(begun.wait())
    only.cancel()
    for _ in range(turns):
        await asyncio.sleep(0)
    assert await pool.acquire("db", made("db")) == "db 1"
    await asyncio.wait([only])
    pool.release("db")
    assert await pool.close() == []
    assert made.disposed == ["db"]


async def test_a_resource_that_is_made_in_spite_of_the_cancellation_is_kept(made: Made) -> None:
    pool = SessionResources()
    initialize, begun, go = made.held("db")

    only = await acquiring(pool, "db", uninterrupted(initialize))
    await soon(begun.wait())
    only.cancel()
    await asyncio.sleep(0)
    assert not only.done()
    go.set()
    await asyncio.wait([only])
    assert only.cancelled()
    assert (pool.held, pool.in_use) == (1, False)
    assert await pool.close() == []
    assert made.disposed == ["db"]


async def test_an_initialiser_that_cancels_itself_has_failed() -> None:
    async def cancels() -> Resource[str]:
        raise asyncio.CancelledError

    with pytest.raises(RetinueError, match="cancelled from inside"):
        await soon(SessionResources().acquire("db", cancels))


async def test_the_figures_that_other_threads_read(made: Made) -> None:
    now = 100.0
    pool = SessionResources(clock=lambda: now)
    assert figures(pool) == (0, False, None)
    initialize, _, go = made.held("a")
    waiting = await acquiring(pool, "a", initialize)
    assert figures(pool) == (0, True, None)
    go.set()
    await soon(waiting)
    assert figures(pool) == (1, True, None)
    pool.release("a")
    assert figures(pool) == (1, False, 100.0)
    now = 105.0
    await pool.acquire("b", made("b"))
    assert figures(pool) == (2, True, None)
    now = 110.0
    pool.release("b")
    assert figures(pool) == (2, False, 110.0)
    await pool.close()
    assert figures(pool) == (0, False, None)


actions = st.lists(
    st.tuples(
        st.sampled_from(["acquire", "cancel", "finish", "fail", "release", "close", "turn"]),
        st.sampled_from(["a", "b"]),
        st.integers(0, 3),
    ),
    max_size=40,
)


@given(actions)
@example([(action, "a", 0) for action in ("acquire", "turn", "finish", "cancel", "turn", "close")])
def test_nothing_is_made_twice_disposed_of_twice_or_in_use(steps: list[tuple[str, str, int]]) -> None:
    """Whatever the order of acquisitions, cancellations, failures, releases and closings."""
    asyncio.run(_play(steps))


async def _play(steps: list[tuple[str, str, int]]) -> None:
    pool = SessionResources()
    alive: dict[str, int] = {"a": 0, "b": 0}
    """Made and not disposed of."""
    making: dict[str, list[asyncio.Future[None]]] = {"a": [], "b": []}
    tasks: dict[str, list[asyncio.Task[Any]]] = {"a": [], "b": []}

    def leases(name: str) -> list[asyncio.Task[Any]]:
        return [task for task in tasks[name] if task.done() and not task.cancelled() and not task.exception()]

    def initialise(name: str) -> Any:
        async def initialize() -> Resource[str]:
            gate: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            assert not making[name], "two initialisers at once"
            assert alive[name] == 0, "made although it stands"
            making[name].append(gate)
            try:
                await gate
            finally:
                making[name].remove(gate)
            alive[name] += 1
            return Resource(value=name, dispose=lambda: dispose(name))

        return initialize

    def dispose(name: str) -> None:
        assert alive[name] == 1
        alive[name] -= 1

    for action, name, number in steps:
        if action == "acquire":
            tasks[name].append(asyncio.ensure_future(pool.acquire(name, initialise(name))))
        elif action == "cancel" and number < len(tasks[name]):
            tasks[name][number].cancel()
        elif action in ("finish", "fail") and making[name] and not making[name][0].done():
            gate = making[name][0]
            gate.set_exception(OSError("failed")) if action == "fail" else gate.set_result(None)
        elif action == "release" and (held := leases(name)):
            tasks[name].remove(held[0])
            pool.release(name)
        elif action == "close":
            in_use = [each for each in "ab" if leases(each) or making[each]]
            before = dict(alive)
            try:
                assert await pool.close() == []
            except SessionConflict:  # also in the moment when a resource is made and not noted yet
                assert alive == before
            else:
                assert not in_use
                assert alive == {"a": 0, "b": 0}
        else:
            await asyncio.sleep(0)
    everybody = [task for each in tasks.values() for task in each]
    for task in everybody:
        task.cancel()
    async with asyncio.timeout(5):
        await asyncio.gather(*everybody, return_exceptions=True)
    for name in "ab":
        for _ in leases(name):
            pool.release(name)
    assert not pool.in_use
    assert await pool.close() == []
    assert alive == {"a": 0, "b": 0}
    assert asyncio.all_tasks() == {asyncio.current_task()}


# --- of a run ---------------------------------------------------------------------------------------------


async def test_run_resources_are_made_on_every_acquisition_and_released_once_in_reverse(made: Made) -> None:
    run = RunResources()
    values = [await run.acquire(name, "run", made(name)) for name in ("a", "b", "a")]
    assert values == ["a 1", "b 2", "a 3"]
    assert run.held == 3
    assert await run.release() == []
    assert made.disposed == ["a", "b", "a"]
    assert await run.release() == []
    assert made.disposed == ["a", "b", "a"]
    assert run.held == 0


async def test_a_failing_release_is_a_diagnostic_and_the_others_go_on(made: Made) -> None:
    run = RunResources()
    await run.acquire("a", "run", made("a"))
    await run.acquire("b", "run", made("b", failing=True))
    await run.acquire("c", "run", made("c", ownership="host"))
    await run.acquire("d", "run", lambda: Resource(value=1))
    await run.acquire("e", "run", made("e", failing=True))
    assert await run.release() == ["resource_release_failed", "resource_release_failed"]
    assert made.disposed == ["e", "b", "a"]


async def test_the_runs_lease_of_a_session_resource_is_one_and_ends_with_the_run(made: Made) -> None:
    pool = SessionResources()
    run = RunResources(pool)
    values = await asyncio.gather(*(run.acquire("db", "session", made("db")) for _ in range(5)))
    values.append(await run.acquire("db", "session", made("db")))
    assert values == ["db 1"] * 6
    assert run.held == 1
    with pytest.raises(SessionConflict):
        await pool.close()
    assert await run.release() == []
    assert made.disposed == []
    following = RunResources(pool)
    assert await following.acquire("db", "session", made("db")) == "db 1"
    await following.release()
    assert await pool.close() == []
    assert made.disposed == ["db"]


async def test_leases_are_released_in_reverse_of_what_was_acquired_whatever_their_scope(made: Made) -> None:
    pool = SessionResources()
    run = RunResources(pool)
    seen = []

    def look() -> None:
        seen.append(pool.in_use)

    await run.acquire("before", "run", lambda: Resource(value=1, dispose=look))
    await run.acquire("shared", "session", made("shared"))
    await run.acquire("after", "run", lambda: Resource(value=1, dispose=look))
    await run.release()
    assert seen == [True, False]


async def test_a_second_resource_that_fails_leaves_the_first_to_be_released(made: Made) -> None:
    run = RunResources()
    await run.acquire("first", "run", made("first", failing=True))

    async def fail() -> Resource[str]:
        raise OSError("primary")

    with pytest.raises(OSError, match="primary"):
        await run.acquire("second", "run", fail)
    assert await run.release() == ["resource_release_failed"]
    assert made.disposed == ["first"]


async def test_a_run_resource_that_is_made_after_the_cancellation_is_released(made: Made) -> None:
    run = RunResources()
    initialize, begun, go = made.held("slow")

    acquiring = asyncio.ensure_future(run.acquire("slow", "run", uninterrupted(initialize)))
    await soon(begun.wait())
    acquiring.cancel()
    await asyncio.sleep(0)
    go.set()
    await asyncio.wait([acquiring])
    assert await run.release() == []
    assert made.disposed == ["slow"]


@pytest.mark.parametrize("scope", ["run", "session", "host"])
async def test_nothing_is_acquired_after_the_end(made: Made, scope: Any) -> None:
    run = RunResources(SessionResources())
    await run.release()
    with pytest.raises(InputError) as refused:
        await run.acquire("late", scope, made("late"))
    assert refused.value.code == "run_finished"
    assert made.calls == []


@pytest.mark.parametrize("scope", ["run", "session"])
async def test_what_ends_up_made_after_the_end_does_not_stay(made: Made, scope: Any) -> None:
    pool = SessionResources()
    run = RunResources(pool)
    initialize, begun, go = made.held("slow")
    acquiring = asyncio.ensure_future(run.acquire("slow", scope, initialize))
    await soon(begun.wait())
    assert await run.release() == []
    go.set()
    with pytest.raises(InputError) as refused:
        await soon(acquiring)
    assert refused.value.code == "run_finished"
    assert await pool.close() == []
    assert made.disposed == ["slow"]


async def test_c28_scope_host_is_of_external_ownership(made: Made) -> None:
    run = RunResources()
    for failing in (False, True):
        with pytest.raises(InputError, match="external"):
            await run.acquire("client", "host", made("client", failing=failing))
    assert made.disposed == ["client", "client"]
    assert await run.release() == []
    assert made.disposed == ["client", "client"]


async def test_scope_host_is_not_pooled_and_never_disposed_of(made: Made) -> None:
    run = RunResources()
    values = [await run.acquire("c", "host", made("c", ownership="host", failing=True)) for _ in range(2)]
    assert values == ["c 1", "c 2"]
    assert await run.release() == []
    assert made.disposed == []


async def test_delegates_have_no_session_resources(made: Made) -> None:
    with pytest.raises(Unsupported, match="delegates") as refused:
        await RunResources().acquire("db", "session", made("db"))
    assert refused.value.code == "unsupported"
    assert made.calls == []


@pytest.mark.parametrize(
    ("id", "scope", "initialize"),
    [
        ("", "run", lambda: Resource(value=1)),
        (5, "run", lambda: Resource(value=1)),
        ("x", "runs", lambda: Resource(value=1)),
        ("x", "run", None),
        ("x", "run", lambda: None),
        ("x", "session", lambda: {"value": 1}),
        ("x", "host", lambda: 1),
    ],
)
async def test_bad_arguments_are_named(id: Any, scope: Any, initialize: Any) -> None:
    pool = SessionResources()
    with pytest.raises(InputError) as refused:
        await RunResources(pool).acquire(id, scope, initialize)
    assert refused.value.code == "invalid_input"
    assert pool.held == 0


@pytest.mark.parametrize(
    ("options", "path"),
    [({"ownership": "mine"}, "resource.ownership"), ({"dispose": 5}, "resource.dispose")],
)
def test_a_wrong_resource_is_refused_when_it_is_made(options: Any, path: str) -> None:
    with pytest.raises(ValidationFailed) as refused:
        Resource(value=1, **options)
    assert refused.value.path == path
