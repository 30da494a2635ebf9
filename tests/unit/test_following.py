"""The client's side of following: one call for everything on a host, whatever happens to it."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from typing import Any

import pytest

from retinue import DriverOutput, ExecutionServices, Identity, RunRequest, Runtime, inprocess
from retinue import following as following_module
from retinue import looks as looks_module
from retinue.client import HostGone, Located
from retinue.errors import EventGap, NotFound, RetinueError
from retinue.events import Custom
from retinue.feeds import FeedBatch, FeedChanges, Feeds
from retinue.following import FeedViewer, HostFeed, following, host_feed
from retinue.handles import RunHandle
from retinue.inprocess import InProcessBackend, InProcessHost
from retinue.looks import Looks
from retinue.loop import client_loop, on_client_loop
from retinue.protocol import RunStatus
from retinue.storage.memory import MemoryEngine
from tests.conftest import MakeLocalRuntime
from tests.support import all_events, driver, flag, soon, trivial, types
from tests.unit.test_feeds import ACTIVATION, Source, turn


class Port:
    """A host that counts calls, and can be cut off."""

    def __init__(self, source: Source) -> None:
        self.feeds = Feeds(source)
        self.calls = 0
        self.updates = 0
        self.outstanding = 0
        self.most = 0
        self.broken: Exception | None = None
        self._cut: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def cut(self, error: Exception) -> None:
        """Every call fails from now on, those that wait too."""
        self.broken = error
        self._cut.set_result(None)

    async def next_batch(self, subscriber: str, number: int, changes: FeedChanges | None) -> FeedBatch:
        self.calls += 1
        self.outstanding += 1
        self.most = max(self.most, self.outstanding)
        call = asyncio.ensure_future(self.feeds.next_batch(subscriber, number, changes))
        try:
            either: list[asyncio.Future[Any]] = [call, self._cut]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if self.broken is not None:
                raise self.broken
            return await call
        finally:
            self.outstanding -= 1

    async def update_feed(self, subscriber: str, changes: FeedChanges) -> None:
        self.updates += 1
        if self.broken is not None:
            raise self.broken
        self.feeds.update(subscriber, changes)


@pytest.fixture
def source() -> Source:
    return Source()


@pytest.fixture
async def port(source: Source) -> AsyncIterator[Port]:
    made = Port(source)
    yield made
    made.feeds.close()
    await turn()


async def read(viewer: FeedViewer) -> list[int]:
    """Every sequence to the end."""
    seen: list[int] = []
    while True:
        page = await soon(viewer.page())
        seen.extend(number for number, _ in page.events)
        if page.closed:
            return seen


async def test_two_hundred_viewers_use_one_call(source: Source, port: Port) -> None:
    feed = HostFeed(port)
    viewers = [feed.viewer(ACTIVATION, f"run-{number % 50}", 0) for number in range(200)]
    for number in range(50):
        source.log(f"run-{number}")
    reading = [asyncio.ensure_future(read(viewer)) for viewer in viewers]
    await turn()
    assert (port.outstanding, port.calls, port.updates) == (1, 1, 0)
    assert port.feeds.statistics().wants == 50  # those who want the same share it
    statistics = feed.statistics()
    assert (statistics.viewers, statistics.calls) == (200, 1)
    for _ in range(3):
        for number in range(50):
            source.emit(2, f"run-{number}")
        await turn()
    for number in range(50):
        source.finish(f"run-{number}")
    assert await asyncio.gather(*reading) == [[1, 2, 3, 4, 5, 6, 7]] * 200
    assert port.most == 1
    assert port.calls < 10  # what came at the same moment came together
    assert feed.statistics().viewers == 0


async def test_a_viewer_that_comes_later_needs_no_call_of_its_own(source: Source, port: Port) -> None:
    feed = HostFeed(port)
    source.log("quiet")
    quiet = asyncio.ensure_future(feed.viewer(ACTIVATION, "quiet", 0).page())
    await turn()
    source.emit(1, "other")
    page = await soon(feed.viewer(ACTIVATION, "other", 0).page())
    assert [number for number, _ in page.events] == [1]
    # One message there, and the answer with the call that was outstanding: one hop.
    assert (feed.statistics().batches, port.updates) == (1, 1)
    source.finish("quiet")
    await soon(quiet)


async def test_what_the_readers_want_next_goes_with_the_next_call(source: Source, port: Port) -> None:
    feed = HostFeed(port)
    source.log()
    seen = asyncio.ensure_future(read(feed.viewer(ACTIVATION, "run", 0)))
    for number in range(20):
        await turn()
        assert port.calls == number + 1
        source.emit()
    await turn()
    source.finish()
    assert await seen == list(range(1, 22))
    assert port.updates == 0


async def test_a_viewer_that_does_not_read_holds_one_page_and_delays_nobody(
    source: Source, port: Port
) -> None:
    feed = HostFeed(port)
    slow, quick = feed.viewer(ACTIVATION, "run", 0), feed.viewer(ACTIVATION, "run", 0)
    source.emit(1000)
    first = await soon(slow.page())
    assert len(first.events) == 256
    await turn()
    reads = source.reads
    source.finish()
    assert await read(quick) == list(range(1, 1002))
    # Nothing more was asked for the slow one than the page ahead of it, which is shared as well.
    assert source.reads - reads <= 4
    assert feed.statistics().viewers == 0
    rest = await read(slow)
    assert rest == list(range(257, 1002))


async def test_a_viewer_that_leaves_is_not_followed_any_more(source: Source, port: Port) -> None:
    feed = HostFeed(port)
    source.log()
    stays, leaves = feed.viewer(ACTIVATION, "run", 0), feed.viewer(ACTIVATION, "run", 0)
    waiting = [asyncio.ensure_future(viewer.page()) for viewer in (stays, leaves)]
    await turn()
    leaves.close()
    waiting[1].cancel()
    await turn()
    assert port.feeds.statistics().wants == 1
    source.emit()
    assert len((await soon(waiting[0])).events) == 1
    await turn()
    assert port.feeds.statistics().wants == 1  # read ahead
    stays.close()
    await turn()
    assert port.feeds.statistics().wants == 0
    assert feed.statistics().viewers == 0
    # Gone before the host was told: it never hears of it.
    updates = port.updates
    brief = feed.viewer(ACTIVATION, "run", 0)
    reading = asyncio.ensure_future(brief.page())
    await asyncio.sleep(0)
    brief.close()
    reading.cancel()
    await turn()
    assert port.updates == updates


async def test_a_viewer_closed_just_as_its_page_arrives_reads_nothing_ahead(
    source: Source, port: Port
) -> None:
    feed = HostFeed(port)
    source.log()
    viewer = feed.viewer(ACTIVATION, "run", 0)
    reading = asyncio.ensure_future(viewer.page())
    await turn()
    source.emit()
    while viewer._answer is None:
        await asyncio.sleep(0)
    assert not reading.done()
    viewer.close()
    await soon(reading)
    assert feed.statistics().viewers == 0


async def test_a_read_that_was_given_up_loses_no_page(source: Source, port: Port) -> None:
    viewer = HostFeed(port).viewer(ACTIVATION, "run", 0)
    source.log()
    for _ in range(3):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(viewer.page(), 0.01)
    source.emit(2)
    await turn()
    source.finish()
    assert await read(viewer) == [1, 2, 3]


async def test_every_viewer_is_told_its_own_error(source: Source, port: Port) -> None:
    feed = HostFeed(port)
    source.log()
    viewers = [feed.viewer(ACTIVATION, "nobody", 0) for _ in range(3)]
    other = asyncio.ensure_future(feed.viewer(ACTIVATION, "run", 0).page())
    errors = await asyncio.gather(*(soon(viewer.page()) for viewer in viewers), return_exceptions=True)
    assert [type(error) for error in errors] == [NotFound] * 3
    assert len({id(error) for error in errors}) == 3
    assert not other.done()
    source.emit()
    assert len((await soon(other)).events) == 1


async def test_a_gap_keeps_its_data(port: Port) -> None:
    source = Source(capacity=2)
    source.emit(5)
    with pytest.raises(EventGap) as gap:
        await soon(HostFeed(Port(source)).viewer(ACTIVATION, "run", 0).page())
    assert gap.value.earliest_cursor == 3


# --- hosts that are lost ----------------------------------------------------------------------------------


async def test_all_that_follow_a_host_are_told_when_it_dies(source: Source, port: Port) -> None:
    feed = HostFeed(port)
    source.log()
    source.log("other")
    heard: list[RunStatus] = []
    following = [
        asyncio.ensure_future(feed.viewer(ACTIVATION, "run", 0).page()),
        asyncio.ensure_future(feed.viewer(ACTIVATION, "other", 0).page()),
        asyncio.ensure_future(feed.watch(ACTIVATION, "run", heard.append)),
    ]
    while not heard:
        await asyncio.sleep(0)
    port.cut(HostGone("it died"))
    errors = await asyncio.gather(*(soon(work) for work in following), return_exceptions=True)
    assert [type(error) for error in errors] == [HostGone] * 3
    assert len({id(error) for error in errors}) == 3
    statistics = feed.statistics()
    assert (statistics.viewers, statistics.looks, statistics.calls) == (0, 0, 0)


async def test_a_page_that_arrived_before_the_death_is_not_lost(source: Source, port: Port) -> None:
    viewer = HostFeed(port).viewer(ACTIVATION, "run", 0)
    source.emit(2)
    assert len((await soon(viewer.page())).events) == 2
    source.emit(3)
    await turn()
    port.cut(HostGone("it died"))
    await turn()
    assert [number for number, _ in (await soon(viewer.page())).events] == [3, 4, 5]
    with pytest.raises(HostGone):
        await soon(viewer.page())


async def test_a_subscription_that_the_host_forgot_is_begun_again_without_a_gap_or_a_repeat(
    source: Source, port: Port, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following_module, "_AGAIN_PAUSE", 0.0)
    feed = HostFeed(port)
    heard: list[RunStatus] = []
    source.emit(2)
    seen = asyncio.ensure_future(read(feed.viewer(ACTIVATION, "run", 0)))
    watching = asyncio.ensure_future(feed.watch(ACTIVATION, "run", heard.append))
    for _ in range(3):
        await turn()
        port.feeds.close()
        source.emit(2)
        await turn()
    source.finish()
    assert await seen == list(range(1, 10))
    await soon(watching)
    assert heard[-1].state == "finished"


async def test_changes_that_cannot_be_told_end_the_subscription_for_all(source: Source, port: Port) -> None:
    feed = HostFeed(port)
    source.log()
    first = asyncio.ensure_future(feed.viewer(ACTIVATION, "run", 0).page())
    await turn()
    port.broken = ValueError("wires crossed")
    second = asyncio.ensure_future(feed.viewer(ACTIVATION, "other", 0).page())
    for reading in (first, second):
        with pytest.raises(RetinueError, match="wires crossed"):
            await soon(reading)
    port.broken = None
    source.emit()
    assert len((await soon(feed.viewer(ACTIVATION, "run", 0).page())).events) == 1


async def test_the_call_ends_when_nothing_is_followed(
    source: Source, port: Port, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("retinue.feeds.POLL_WAIT", 0.01)
    feed = HostFeed(port)
    source.log()
    viewer = feed.viewer(ACTIVATION, "run", 0)
    reading = asyncio.ensure_future(viewer.page())
    await turn()
    viewer.close()
    reading.cancel()
    while feed.statistics().calls:
        await asyncio.sleep(0.005)
    source.emit()
    assert len((await soon(feed.viewer(ACTIVATION, "run", 0).page())).events) == 1


# --- statuses ---------------------------------------------------------------------------------------------


async def test_watchers_of_a_run_share_one_look(
    source: Source, port: Port, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("retinue.feeds.STATUS_PERIOD", 0.01)
    feed = HostFeed(port)
    source.set(cursor=1)
    heard: list[list[int]] = [[], [], []]

    def watch(index: int) -> asyncio.Task[None]:
        work = feed.watch(ACTIVATION, "run", lambda status: heard[index].append(status.cursor))
        return asyncio.ensure_future(work)

    first, second = watch(0), watch(1)
    while not heard[1]:
        await asyncio.sleep(0)
    third = watch(2)  # told what is known at once
    await asyncio.sleep(0)
    assert heard == [[1], [1], [1]]
    assert port.feeds.statistics().looks == 1
    second.cancel()
    source.set(cursor=2)
    while heard[0] != [1, 2]:
        await asyncio.sleep(0.005)
    assert heard == [[1, 2], [1], [1, 2]]
    source.set(cursor=3, state="finished")
    await soon(asyncio.gather(first, third))
    await turn()
    assert feed.statistics().looks == 0
    assert port.feeds.statistics().looks == 0


def test_runtimes_of_one_process_share_the_feed_of_a_host() -> None:
    async def share() -> None:
        port = Port(Source())
        feed = host_feed("host-shared", port)
        assert host_feed("host-shared", port) is feed
        assert host_feed("host-other", port) is not feed
        assert following()["host-shared"].viewers == 0
        del feed
        gc.collect()
        assert "host-shared" not in following()

    on_client_loop(share()).result(10)


# --- handles through a feed -------------------------------------------------------------------------------


@pytest.fixture
def fed_runtime(local_runtime: MakeLocalRuntime, monkeypatch: pytest.MonkeyPatch) -> MakeLocalRuntime:
    """Runtimes of this process whose handles follow their runs as they would on a cluster."""

    def located(found: Any) -> Located:
        host = InProcessHost(found.host)
        host_id = found.host.holder.holder_id
        return Located(host, host_id, found.activation_id, host_feed(host_id, host))

    monkeypatch.setattr(inprocess, "_located", located)
    monkeypatch.setattr(InProcessBackend, "peek", lambda self, handle: self._looks.peek(handle))
    return local_runtime


@driver
async def talks(request: RunRequest, services: ExecutionServices) -> DriverOutput:
    """Says as many things as its input asks for, then waits to be let go."""
    for number in range(int(str(request.input))):
        services.emit(Custom("said", number))
    flag(f"{request.run_id} runs").set()
    await flag(f"{request.run_id} go").wait()
    return DriverOutput(text="done")


async def started(runtime: Runtime, identity: Identity, session_id: str, says: int = 3) -> RunHandle:
    handle = runtime.start(str(says), identity=identity, session_id=session_id)
    await flag(f"{handle.run_id} runs").wait()
    return handle


async def test_handles_read_through_a_feed_what_they_read_without(
    fed_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    runtime = fed_runtime(driver=talks, event_capacity=1000)
    handle = await started(runtime, identity, session_id, 600)
    attached = runtime.attach(handle.run_id, identity=identity)
    readings = [
        asyncio.ensure_future(all_events(each, after)) for each in (handle, attached) for after in (0, 300)
    ]
    viewer = handle.events()
    assert (await soon(viewer.__anext__())).sequence == 1
    flag(f"{handle.run_id} go").set()
    whole, later, again, _ = await asyncio.gather(*readings)
    assert [event.sequence for event in whole] == list(range(1, 603))
    assert (again, later) == (whole, whole[300:])
    assert [event async for event in viewer] == whole[1:]
    assert types(whole)[-1] == "run.terminal"


async def test_a_stream_that_is_dropped_or_closed_is_not_followed_any_more(
    fed_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    runtime = fed_runtime(driver=talks)
    handle = await started(runtime, identity, session_id)

    async def viewers() -> int:
        async def count() -> int:
            return sum(each.viewers for each in following().values())

        return await asyncio.wrap_future(on_client_loop(count()))

    dropped, closed, pending = handle.events(), handle.events(), handle.events(after=4)
    for viewer in (dropped, closed):
        assert [(await soon(viewer.__anext__())).sequence for _ in range(4)] == [1, 2, 3, 4]
    reads = [asyncio.ensure_future(pending.__anext__()) for _ in range(2)]
    while await viewers() < 3:
        await asyncio.sleep(0.005)
    await closed.aclose()
    await pending.aclose()
    assert [type(each) for each in await asyncio.gather(*reads, return_exceptions=True)] == [
        StopAsyncIteration
    ] * 2
    assert await viewers() == 1
    del dropped, viewer
    gc.collect()
    while await viewers():
        await asyncio.sleep(0.005)
    flag(f"{handle.run_id} go").set()
    assert (await soon(handle.result())).status == "completed"


async def test_viewers_of_a_host_that_dies_go_on_from_the_store(
    fed_runtime: MakeLocalRuntime,
    identity: Identity,
    session_id: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The run ends while its host is being lost; each viewer goes on where it was."""
    runtime = fed_runtime(driver=talks, store=MemoryEngine())
    backend = runtime._backend
    assert isinstance(backend, InProcessBackend)
    object.__setattr__(backend._host._environment, "stores_events", True)
    handle = await started(runtime, identity, session_id, 5)
    lost: list[str] = []
    cut = asyncio.Event()

    class Dying(InProcessHost):
        async def next_batch(self, *arguments: Any) -> FeedBatch:
            call = asyncio.ensure_future(super().next_batch(*arguments))
            ending = asyncio.ensure_future(cut.wait())
            await asyncio.wait([call, ending], return_when=asyncio.FIRST_COMPLETED)
            if cut.is_set():
                raise HostGone("it died")
            return await call

    def located(found: Any) -> Located:
        host = Dying(found.host)
        return Located(host, "dying", found.activation_id, host_feed("dying", host))

    async def host_lost(address: object, located: Located) -> None:
        lost.append(located.host_id)
        await backend._host.close("the host died")
        backend.forget(address, located)  # type: ignore[arg-type]

    monkeypatch.setattr(inprocess, "_located", located)
    monkeypatch.setattr(backend, "host_lost", host_lost)
    viewers = [handle.events(after) for after in (0, 2, 4)]
    seen = [[(await soon(viewer.__anext__())).sequence] for viewer in viewers]
    waiting = asyncio.ensure_future(all_events(handle, after=6))
    await asyncio.sleep(0.02)
    client_loop().loop.call_soon_threadsafe(cut.set)
    for viewer, numbers in zip(viewers, seen, strict=True):
        async with asyncio.timeout(10):
            numbers.extend([event.sequence async for event in viewer])
    final = (await soon(handle.result())).final_cursor
    assert seen == [list(range(after + 1, final + 1)) for after in (0, 2, 4)]
    assert [event.sequence for event in await waiting] == list(range(7, final + 1))
    assert set(lost) == {"dying"}


# --- looks ------------------------------------------------------------------------------------------------


async def test_looking_at_a_handle_follows_its_run_for_a_while(
    fed_runtime: MakeLocalRuntime, identity: Identity, session_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(looks_module, "LOOKED_FOR", 0.1)
    monkeypatch.setattr("retinue.feeds.STATUS_PERIOD", 0.01)
    runtime = fed_runtime(driver=talks)
    handle = await started(runtime, identity, session_id)
    looks = runtime._backend._looks  # type: ignore[attr-defined]
    followed = False
    while not followed or handle.last_status is None or handle.last_status.cursor < 4:
        assert handle.state == "running"
        followed = followed or bool(looks._looked)
        await asyncio.sleep(0.005)
    while looks._looked:
        await asyncio.sleep(0.005)
    # Nobody looked for a while. What was heard then is not shown as if it were new.
    monkeypatch.setattr(looks_module, "FRESH", 0.0)
    flag(f"{handle.run_id} go").set()
    attached = runtime.attach(handle.run_id, identity=identity)
    assert (await soon(attached.result())).status == "completed"
    assert handle.last_status.state == "running"
    assert await asyncio.to_thread(lambda: handle.state) == "finished"
    assert handle.budget == attached.budget
    while looks._looked:
        await asyncio.sleep(0.005)


async def test_a_look_does_not_wait_for_a_host_that_does_not_answer(
    fed_runtime: MakeLocalRuntime, identity: Identity, session_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(looks_module, "FIRST_LOOK", 0.01)
    monkeypatch.setattr(looks_module, "FRESH", 0.0)
    handle = await started(fed_runtime(driver=talks), identity, session_id)
    never = asyncio.Event()

    async def watch(*arguments: Any) -> None:
        await never.wait()

    monkeypatch.setattr(HostFeed, "watch", watch)
    states = [handle.state]
    flag(f"{handle.run_id} go").set()
    assert (await soon(handle.result())).status == "completed"
    assert [*states, handle.state] == ["running", "finished"]


async def test_a_look_that_fails_is_no_more_than_a_look(
    fed_runtime: MakeLocalRuntime, identity: Identity, session_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = await started(fed_runtime(driver=talks), identity, session_id)
    looks = Looks(handle.client)

    async def watch(*arguments: Any) -> None:
        raise RetinueError("no")

    monkeypatch.setattr(HostFeed, "watch", watch)
    monkeypatch.setattr(looks_module, "FRESH", 0.0)
    seen = looks.peek(handle)
    assert seen is not None
    assert seen.state == "running"
    while looks._looked:
        await asyncio.sleep(0.005)
    flag(f"{handle.run_id} go").set()
    await soon(handle.result())


def test_a_handle_that_was_never_looked_at_is_not_followed(
    fed_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    runtime = fed_runtime(driver=trivial)
    handle = runtime.start("x", identity=identity, session_id=session_id)
    assert handle.wait(10).status == "completed"
    assert handle.state == "finished"
    assert runtime._backend._looks._looked == {}  # type: ignore[attr-defined]
