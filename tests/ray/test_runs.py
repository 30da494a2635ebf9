"""Runs on a real local Ray: events, results, sessions, apps, caps."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from retinue import Agent, Budgets, Grants, Identity, Runtime, Team, agent_driver, team_driver, tool
from retinue.errors import (
    EventGap,
    InputError,
    NotFound,
    NotShippable,
    SessionConflict,
    StoreUnavailable,
    ValidationFailed,
)
from retinue.events import Custom, RunTerminal
from retinue.testing import ScriptedModel, reply, tool_calls
from tests.ray.conftest import MakeRuntime, child_hosts, session_hosts
from tests.ray.drivers import EchoModel, Pids, Ticker

TIMEOUT = 60


@tool
async def lookup(id: str) -> str:
    """Read a record."""
    return f"record {id}"


def test_a_run_is_streamed_settled_and_stored(make_runtime: MakeRuntime, identity: Identity) -> None:
    model = ScriptedModel([tool_calls(("lookup", {"id": "42"})), "it is 42"])
    runtime = make_runtime(
        driver=agent_driver(Agent(name="reader", model=model, tools=[lookup])),
        grants=Grants(tool_ids=["lookup"]),
        budgets=Budgets(max_model_calls=2, max_tokens=5000),
    )
    handle = runtime.start("Read 42", identity=identity, session_id="s")
    events = list(handle.iter_events())
    result = handle.wait(TIMEOUT)

    assert [event.sequence for event in events] == list(range(1, len(events) + 1))
    assert [event.type for event in events] == [
        "run.started",
        "model.complete",
        "tool.complete",
        "model.complete",
        "message.started",
        "message.delta",
        "message.completed",
        "text.delta",
        "run.terminal",
    ]
    terminal = events[-1].payload
    assert isinstance(terminal, RunTerminal)
    assert terminal.result == result
    assert (result.status, result.text, result.final_cursor) == ("completed", "it is 42", len(events))
    assert result.usage.total_tokens == 30
    assert result.budget is not None
    assert (result.budget.tokens.used, result.budget.tokens.reserved) == (30, 0)
    assert handle.budget == result.budget
    assert len(model.requests) == 2  # recorded in the host's process
    assert [message.role for message in model.requests[1].messages] == ["user", "assistant", "tool"]

    snapshot = asyncio.run(runtime.sessions.read(identity, "s"))
    assert [message.role for message in snapshot.history] == ["user", "assistant", "tool", "assistant"]
    assert (snapshot.revision, snapshot.replayable) == (1, True)


def test_c12_second_run_conflicts_across_clients(
    make_runtime: MakeRuntime, identity: Identity, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    first = make_runtime(driver=Pids(gate=str(gate)))
    a = first.start("a", identity=identity, session_id="s")
    next(a.iter_events())
    # Another client process would bring the same app bytes: the same session, through its own backend.
    second = make_runtime(driver=Pids(gate=str(gate)))
    b = second.start("b", identity=identity, session_id="s")
    refused = b.wait(TIMEOUT)
    assert refused.status == "failed"
    assert refused.reason is not None
    assert refused.reason.code == "session_conflict"
    assert a.run_id in refused.reason.message
    with pytest.raises(SessionConflict) as caught:
        asyncio.run(b.accepted())
    assert caught.value.run_id == a.run_id
    gate.touch()
    assert a.wait(TIMEOUT).status == "completed"
    assert second.run_blocking("c", identity=identity, session_id="s").status == "completed"


def test_two_clients_racing_for_one_session_have_one_winner(
    make_runtime: MakeRuntime, identity: Identity, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    runtimes = [make_runtime(driver=Pids(gate=str(gate))) for _ in range(2)]
    handles = [
        runtime.start(str(index), identity=identity, session_id="race")
        for index, runtime in enumerate(runtimes * 4)
    ]
    settled: dict[str, str] = {}

    def settle(handle_index: int) -> None:
        handle = handles[handle_index]
        result = handle.wait(TIMEOUT)
        settled[handle.run_id] = result.reason.code if result.reason else result.status

    threads = [threading.Thread(target=settle, args=(index,)) for index in range(len(handles))]
    for thread in threads:
        thread.start()
    for handle in handles:
        try:
            asyncio.run(handle.accepted())
        except SessionConflict:
            continue
    gate.touch()
    for thread in threads:
        thread.join(TIMEOUT)
    assert sorted(settled.values()) == ["completed"] + ["session_conflict"] * 7


def test_start_is_idempotent_by_run_id(make_runtime: MakeRuntime, identity: Identity) -> None:
    runtime = make_runtime(driver=Ticker(events=3))
    first = runtime.start("x", identity=identity, session_id="s", run_id="run-fixed")
    result = first.wait(TIMEOUT)
    again = runtime.start("x", identity=identity, session_id="s", run_id="run-fixed")
    assert again.wait(TIMEOUT) == result
    assert asyncio.run(runtime.sessions.latest(identity, "s")).revision == 1


def test_attach_finds_a_run_only_for_its_identity(make_runtime: MakeRuntime, identity: Identity) -> None:
    runtime = make_runtime(driver=Ticker(events=3))
    handle = runtime.start("x", identity=identity, session_id="s")
    result = handle.wait(TIMEOUT)
    attached = runtime.attach(handle.run_id, identity=identity)
    assert attached.wait(TIMEOUT) == result
    assert [event.sequence for event in attached.iter_events(after=2)] == [3, 4, 5]
    other = runtime.attach(handle.run_id, identity=Identity(tenant_id="other", user_id=identity.user_id))
    with pytest.raises(NotFound):
        asyncio.run(other.accepted())


def test_a_run_is_followed_and_cancelled_from_a_runtime_of_another_app(
    make_runtime: MakeRuntime, identity: Identity, tmp_path: Path
) -> None:
    handle = make_runtime(driver=Ticker(gate=str(tmp_path / "never"))).start(
        "x", identity=identity, session_id="s"
    )
    asyncio.run(handle.accepted())
    other = make_runtime(driver=agent_driver(Agent(name="viewer", model=EchoModel())))
    attached = other.attach(handle.run_id, identity=identity)
    events = attached.iter_events()
    assert [next(events).sequence for _ in range(5)] == [1, 2, 3, 4, 5]
    attached.cancel_blocking("seen enough")
    result = handle.wait(TIMEOUT)
    assert (result.status, result.reason and result.reason.message) == ("cancelled", "seen enough")
    assert attached.wait(TIMEOUT) == result
    # A start of the other app goes to a host of its own app, not to the one that was followed.
    assert other.run_blocking("hi", identity=identity, session_id="s").text == "echo: hi"


def test_a_reader_that_fell_out_of_the_window_goes_on_from_the_store(
    make_runtime: MakeRuntime, identity: Identity
) -> None:
    runtime = make_runtime(driver=Ticker(events=3000), event_capacity=4)
    handle = runtime.start("x", identity=identity, session_id="s")
    result = handle.wait(TIMEOUT)
    assert result.final_cursor == 3002  # two blocks of event numbers and some
    assert [event.sequence for event in handle.iter_events()] == list(range(1, 3003))
    ticks = [event.payload.data for event in handle.iter_events(2990) if isinstance(event.payload, Custom)]
    assert ticks == list(range(2990, 3001))


def test_cursor_checks(make_runtime: MakeRuntime, identity: Identity) -> None:
    runtime = make_runtime(driver=Ticker(events=1))
    handle = runtime.start("x", identity=identity, session_id="s")
    final = handle.wait(TIMEOUT).final_cursor
    assert list(handle.iter_events(final)) == []
    with pytest.raises(InputError):
        list(handle.iter_events(final + 1))
    for wrong in (-1, 1.5, True, "1"):
        with pytest.raises(InputError):
            handle.events(wrong)  # type: ignore[arg-type]


def test_app_by_name_runs_in_the_hosts(make_runtime: MakeRuntime, identity: Identity) -> None:
    runtime = make_runtime("tests.ray.drivers:echo_app")
    assert runtime.run_blocking("hi", identity=identity, session_id="s").text == "echo: hi"


def test_app_that_is_not_there_is_one_clear_error(make_runtime: MakeRuntime, identity: Identity) -> None:
    result = make_runtime("no.such.module:app").run_blocking("hi", identity=identity, session_id="s")
    assert result.status == "failed"
    assert result.reason is not None
    assert "no.such.module:app" in result.reason.message


def test_what_cannot_be_pickled_is_named_at_construction(make_runtime: MakeRuntime) -> None:
    class Locked(EchoModel):
        def __init__(self) -> None:
            self.lock = threading.Lock()

    with pytest.raises(NotShippable) as caught:
        make_runtime(driver=agent_driver(Agent(name="a", model=Locked())))
    assert caught.value.path == "config.driver.agent.model.lock"


def test_a_store_that_cannot_be_opened_is_one_clear_error(
    make_runtime: MakeRuntime, identity: Identity, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("no folder")
    runtime = make_runtime(driver=Ticker(events=1), store=f"sqlite:///{tmp_path}/file/x.db")
    handle = runtime.start("x", identity=identity, session_id="s")
    with pytest.raises(StoreUnavailable, match=r"file/x\.db"):
        asyncio.run(handle.accepted())
    result = handle.wait(TIMEOUT)
    assert result.reason is not None
    assert (result.status, result.reason.code) == ("failed", "store_unavailable")


def test_an_engine_object_cannot_be_a_store_on_ray() -> None:
    from retinue.storage.memory import MemoryEngine

    with pytest.raises(NotShippable, match="URL"):
        Runtime(driver=Ticker(), store=MemoryEngine())


def test_wrong_driver_is_refused_at_construction(make_runtime: MakeRuntime) -> None:
    with pytest.raises(ValidationFailed):
        make_runtime(driver="no driver")


def test_memory_store_has_no_durability_and_says_so(make_runtime: MakeRuntime, identity: Identity) -> None:
    runtime = make_runtime(driver=Ticker(events=2), store="memory:")
    guarantees = asyncio.run(runtime.store_guarantees())
    assert (guarantees.durable, guarantees.compare_and_swap) == (False, True)
    assert guarantees.single_writer == "distributed"
    assert runtime.run_blocking("x", identity=identity, session_id="s").status == "completed"


def test_team_members_run_in_child_hosts_under_one_ledger(
    make_runtime: MakeRuntime, identity: Identity
) -> None:
    plan = '[{"member_id": "left", "task": "do left"}, {"member_id": "right", "task": "do right"}]'
    model = ScriptedModel(
        {
            "": [plan, "both done"],
            "left": [tool_calls(("lookup", {"id": "L"})), "left done"],
            "right": ["right done"],
        }
    )
    members = [
        Agent(name="left", model=model, tools=[lookup]),
        Agent(name="right", model=model, tools=[lookup]),
    ]
    team = Team(name="pair", members=members, coordinator=Agent(name="lead", model=model), parallel=True)
    runtime = make_runtime(
        driver=team_driver(team),
        grants=Grants(tool_ids=["lookup"]),
        budgets=Budgets(max_model_calls=5, max_tool_calls=1, max_tokens=50_000),
    )
    handle = runtime.start("go", identity=identity, session_id="s")
    events = list(handle.iter_events())
    result = handle.wait(TIMEOUT)
    assert (result.status, result.text) == ("completed", "both done")
    assert result.budget is not None
    assert (result.budget.model_calls.used, result.budget.tool_calls.used) == (5, 1)
    assert result.budget.tokens.used == result.usage.total_tokens == 75
    assert len(model.requests_of("left")) == 2
    assert {event.participant for event in events if event.type == "child.finished"} == {"left", "right"}
    assert {event.root_run_id for event in events} == {handle.run_id}
    children = {event.run_id for event in events if event.participant}
    assert len(children) == 2
    assert handle.run_id not in children
    snapshot = asyncio.run(runtime.sessions.latest(identity, "s"))
    assert set(snapshot.conversations) == children | {handle.run_id}


def test_one_exact_budget_over_many_processes(make_runtime: MakeRuntime, identity: Identity) -> None:
    """Forty delegates want two calls each, the tree has 25: exactly 25 reach the model."""
    model = ScriptedModel({"*": [reply(f"answer {index}") for index in range(100)]})
    members = [Agent(name=f"m{index}", model=model) for index in range(40)]
    team = Team(
        name="many",
        members=members,
        coordinator=Agent(name="lead", model=model),
        parallel=True,
        on_member_error="continue",
    )
    runtime = make_runtime(driver=team_driver(team), budgets=Budgets(max_model_calls=25))
    result = runtime.run_blocking("go", identity=identity, session_id="s")
    assert result.status == "stopped"
    assert result.reason is not None
    assert result.reason.code == "budget_exhausted"
    assert len(model.requests) == 25
    assert result.budget is not None
    assert (result.budget.model_calls.used, result.budget.model_calls.reserved) == (25, 0)


def test_event_gap_is_not_raised_where_the_store_has_the_events(
    make_runtime: MakeRuntime, identity: Identity
) -> None:
    runtime = make_runtime(driver=Ticker(events=50), event_capacity=2)
    handle = runtime.start("x", identity=identity, session_id="s")
    handle.wait(TIMEOUT)
    try:
        assert len(list(handle.iter_events())) == 52
    except EventGap:
        pytest.fail("the store has every event")


def test_hosts_hold_what_the_statistics_say(make_runtime: MakeRuntime, identity: Identity) -> None:
    import ray

    from retinue.actors.child_host import ChildHostStatistics
    from retinue.actors.wire import decode
    from retinue.host import HostStatistics

    runtime = make_runtime(driver=Ticker(events=1))
    runtime.run_blocking("x", identity=identity, session_id="counted")
    hosts = [decode(ray.get(host.statistics.remote()), HostStatistics | None) for host in session_hosts()]
    mine = [host for host in hosts if host and "counted" in {session.session_id for session in host.sessions}]
    assert [(host.active_runs, host.runs_started) for host in mine] == [(0, 1)]
    for host in child_hosts():
        statistics: ChildHostStatistics | None = decode(
            ray.get(host.statistics.remote()), ChildHostStatistics | None
        )
        assert statistics is None or statistics.children == 0
