"""Commands that look at sessions, runs and actors. The store is a real file; the cluster is played."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from retinue import DriverOutput, ExecutionServices, Identity, RunRequest, RuntimeConfig
from retinue.actors import listing
from retinue.actors.listing import ActorPage, ActorRow
from retinue.apps import app_by_value
from retinue.children import LocalChildren
from retinue.cluster import view
from retinue.cluster.cli import app
from retinue.cluster.connection import Connection
from retinue.cluster.run_lines import event_line, shown
from retinue.errors import ClusterUnreachable
from retinue.events import ChildFinished, Custom, Event, TextDelta
from retinue.host import Host, ResidentSession
from retinue.ids import SessionAddress
from retinue.messages import assistant, user
from retinue.protocol import StartRun
from retinue.results import Reason
from retinue.storage import open_store, this_process
from retinue.store import Store
from retinue.workers import Workers
from tests.support import driver, trivial

ANN, BOB = Identity(tenant_id="acme", user_id="ann"), Identity(tenant_id="acme", user_id="bob")


@driver
async def speaks(request: RunRequest, services: ExecutionServices) -> DriverOutput:
    services.append([user(request.input), assistant("first line\nsecond \x1b[31mline")])
    services.state["topic"] = "trains"
    services.emit(Custom("mark", {"at": 1}))
    if request.input == "fail":
        raise RuntimeError("it broke")
    return DriverOutput(text="spoken")


@pytest.fixture
def runner() -> CliRunner:
    return CliRunner(env={"COLUMNS": "240", "TERM": "dumb", "NO_COLOR": "1"})


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A home without a cluster and without a store."""
    monkeypatch.setenv("RETINUE_HOME", str(tmp_path))
    monkeypatch.delenv("RETINUE_ADDRESS", raising=False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return tmp_path


@pytest.fixture
def filled(home: Path) -> Path:
    """The default store, with three sessions: two of Ann, one of which is resident, and one of Bob."""
    asyncio.run(_fill(home / "retinue.db"))
    return home


async def _fill(path: Path) -> None:
    engine = open_store(f"sqlite:///{path}")
    store = Store(engine)
    workers = Workers("listing")
    host = Host(
        holder=this_process("host_here", "test"),
        workers=workers,
        launcher=LocalChildren(workers),
        stores_events=True,
    )
    spec = app_by_value(RuntimeConfig(driver=trivial, name="talker"))
    host.provide(spec, RuntimeConfig(driver=speaks))
    for who, session_id, inputs in (
        (ANN, "s1", ("one", "two")),
        (ANN, "s2", ("fail",)),
        (BOB, "s1", ("one",)),
    ):
        address = SessionAddress(
            store_id=store.store_id, tenant_id=who.tenant_id, user_id=who.user_id, session_id=session_id
        )
        activation_id = f"{who.user_id}-{session_id}"
        await host.activate(address, activation_id, store, spec)
        for number, text in enumerate(inputs):
            run_id = f"run-{activation_id}-{number}"
            start = StartRun(run_id=run_id, identity=who, session_id=session_id, input=text)
            await host.start(activation_id, start)
            await host.result(activation_id, run_id)
        if session_id != "s2":
            assert await host.passivate(activation_id, "application")
    # The lease of Ann's s2 stays, as after a crash.
    await store.close()
    await workers.stopped()


def as_json(runner: CliRunner, *arguments: str) -> Any:
    done = runner.invoke(app, [*arguments, "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def said(runner: CliRunner, *arguments: str) -> str:
    done = runner.invoke(app, list(arguments))
    assert done.exit_code == 0, done.output
    return done.stdout


# --- sessions ---------------------------------------------------------------------------------------------


def test_sessions_are_listed_in_order_and_in_pages(runner: CliRunner, filled: Path) -> None:
    page = as_json(runner, "sessions", "list", "--limit", "2")
    ids = [(each["user_id"], each["session_id"], each["messages"]) for each in page["sessions"]]
    assert ids == [("ann", "s1", 4), ("ann", "s2", 2)]
    assert page["next"] == ["acme", "ann", "s2"]
    rest = as_json(runner, "sessions", "list", "--limit", "2", "--after", *page["next"])
    assert [(each["user_id"], each["runs"], each["open_runs"]) for each in rest["sessions"]] == [
        ("bob", 1, 0)
    ]
    assert rest["next"] is None
    assert [
        each["session_id"]
        for each in as_json(runner, "sessions", "list", "--tenant", "acme", "--user", "bob")["sessions"]
    ] == ["s1"]
    text = said(runner, "sessions", "list", "--limit", "2")
    assert "More: --after acme ann s2" in text
    assert "host_here, not of this cluster" in text
    assert "2 sessions" in text


def test_a_session_is_shown_as_last_committed(runner: CliRunner, filled: Path) -> None:
    whose = ("--tenant", "acme", "--user", "ann", "--session", "s1")
    text = said(runner, "sessions", "show", *whose, "--messages", "2")
    for part in (
        "revision     2",
        "topic",
        "the last 2 of 4",
        '"two"',
        "run-ann-s1-1",
        "talker",
        "completed",
    ):
        assert part in text
    assert '"one"' not in text
    assert "\x1b" not in text
    assert "first line\\nsecond \\x1b[31mline" in text
    shown_as_json = as_json(runner, "sessions", "show", *whose)
    assert shown_as_json["state"] == {"topic": "trains"}
    assert [message["role"] for message in shown_as_json["messages"]] == ["user", "assistant"] * 2
    assert [run["run_id"] for run in shown_as_json["runs"]] == ["run-ann-s1-1", "run-ann-s1-0"]


def test_a_session_of_somebody_else_is_not_there(runner: CliRunner, filled: Path) -> None:
    done = runner.invoke(app, ["sessions", "show", "--tenant", "acme", "--user", "bob", "--session", "s2"])
    assert done.exit_code == 2
    assert "there is no session 's2' of user 'bob'" in done.stderr


def test_a_user_without_a_tenant_is_refused(runner: CliRunner, filled: Path) -> None:
    done = runner.invoke(app, ["sessions", "list", "--user", "ann"])
    assert done.exit_code == 2
    assert "tenant" in done.stderr


# --- runs -------------------------------------------------------------------------------------------------


def test_runs_are_listed_newest_first_with_their_ends(runner: CliRunner, filled: Path) -> None:
    page = as_json(runner, "runs", "list", "--limit", "2")
    assert [(run["run_id"], run["state"], run["reason"]) for run in page["runs"]] == [
        ("run-bob-s1-0", "completed", None),
        ("run-ann-s2-0", "failed", "execution_failed"),
    ]
    rest = as_json(runner, "runs", "list", "--before", str(page["next"]))
    assert [run["run_id"] for run in rest["runs"]] == ["run-ann-s1-1", "run-ann-s1-0"]
    assert rest["next"] is None
    one = as_json(runner, "runs", "list", "--tenant", "acme", "--user", "ann", "--session", "s2")
    assert [run["run_id"] for run in one["runs"]] == ["run-ann-s2-0"]
    assert as_json(runner, "runs", "list", "--open")["runs"] == []
    text = said(runner, "runs", "list", "--limit", "1")
    assert f"More: --before {as_json(runner, 'runs', 'list', '--limit', '1')['next']}" in text
    assert "failed: execution_failed" in said(runner, "runs", "list")


def test_an_ended_run_is_watched_from_its_record(runner: CliRunner, filled: Path) -> None:
    whose = ("--tenant", "acme", "--user", "ann")
    lines = said(runner, "runs", "watch", "run-ann-s1-0", *whose).splitlines()
    assert [line.split()[1] for line in lines] == ["1", "2", "3"]
    assert "run.started  test" in lines[0]
    assert 'custom  mark "{"at":1}"' in lines[1]
    assert 'run.terminal  completed, 0 tokens  "spoken"' in lines[2]
    raw = runner.invoke(app, ["runs", "watch", "run-ann-s1-0", *whose, "--after", "1", "--json"])
    events = [json.loads(line) for line in raw.stdout.splitlines()]
    assert [(event["sequence"], event["payload"]["type"]) for event in events] == [
        (2, "custom"),
        (3, "run.terminal"),
    ]
    for nobody in (("--tenant", "acme", "--user", "bob"), ("--tenant", "other", "--user", "ann")):
        done = runner.invoke(app, ["runs", "watch", "run-ann-s1-0", *nobody])
        assert done.exit_code == 2
        assert "[not_found]" in done.stderr


def test_an_interrupt_leaves_the_run_alone(
    runner: CliRunner, filled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any, **__: Any) -> Iterator[Event]:
        raise KeyboardInterrupt

    monkeypatch.setattr("retinue.cluster.run_lines._events", interrupted)
    done = runner.invoke(app, ["runs", "watch", "run-ann-s1-0", "--tenant", "acme", "--user", "ann"])
    assert (done.exit_code, done.stderr) == (130, "retinue: interrupted\n")


def test_lines_of_events_are_one_line_and_harmless() -> None:
    def line(payload: Any, participant: str = "") -> str:
        event = Event(
            event_id="e",
            sequence=7,
            timestamp=0.0,
            session_id="s",
            run_id="r",
            attempt_id="a",
            root_run_id="r",
            participant=participant,
            payload=payload,
        )
        return event_line(event)

    hostile = line(TextDelta("a\r\n\x1b]0;title\x07\x9b1mb\u202e" + "x" * 500))
    assert hostile.isprintable()
    assert len(hostile) < 200
    assert "    7  reader: child.finished  failed: child_lost, it died, 0 tokens" in line(
        ChildFinished("reader", "failed", Reason("child_lost", "it died")), "reader"
    )
    assert shown("é\u2028") == "é\\u2028"


# --- where the store is -----------------------------------------------------------------------------------


def test_without_a_store_nothing_is_created(runner: CliRunner, home: Path) -> None:
    done = runner.invoke(app, ["sessions", "list"])
    assert done.exit_code == 2
    assert "no cluster is up, and no --store was given" in done.stderr
    done = runner.invoke(app, ["runs", "list", "--store", f"sqlite:///{home}/other.db"])
    assert f"there is no store at sqlite:///{home}/other.db [store_unavailable]" in done.stderr
    done = runner.invoke(app, ["runs", "list", "--store", "memory:"])
    assert "only where it is" in done.stderr
    assert list(home.iterdir()) == []


def test_a_store_is_named_by_its_url(runner: CliRunner, filled: Path, tmp_path: Path) -> None:
    (filled / "retinue.db").rename(filled / "moved.db")
    page = as_json(runner, "sessions", "list", "--store", f"sqlite:///{filled}/moved.db")
    assert len(page["sessions"]) == 3


# --- actors -----------------------------------------------------------------------------------------------


def actor(name: str, **more: Any) -> ActorRow:
    members: dict[str, Any] = {
        "roles": ["registry"],
        "state": "ready",
        "pid": 7,
        "node_id": "0123456789abcdef",
        "apps": [],
        "store": None,
        "delegates": None,
        "sessions": [],
    }
    return ActorRow(name=name, **{**members, **more})


def lives(session_id: str, idle: float | None, run: str | None = None) -> ResidentSession:
    return ResidentSession(
        store_id="store",
        tenant_id="acme",
        user_id="ann",
        session_id=session_id,
        activation_id=f"activation-{session_id}",
        idle=idle,
        active_run=run,
        runs_started=1,
    )


@pytest.fixture
def played_cluster(monkeypatch: pytest.MonkeyPatch, home: Path) -> list[tuple[str, str | None, int]]:
    """A cluster with one page of actors; what was asked."""
    asked: list[tuple[str, str | None, int]] = []
    shared = [lives(f"s{number}", float(number)) for number in range(8)]
    page = ActorPage(
        actors=[
            actor("retinue.registry"),
            actor("retinue.v1.child.1", roles=["child host"], delegates=12),
            actor(
                "retinue.v1.host.1",
                roles=["session host"],
                state="serving",
                apps=["desk"],
                sessions=[lives("c-42", None, "run_9")],
            ),
            actor("retinue.v1.host.2", roles=["session host"], state="serving", sessions=shared),
            actor("retinue.v1.host.3", roles=["session host"], state="silent", pid=None, node_id=None),
            actor("retinue.v1.store.1", roles=["store"], store="sqlite:////data/retinue.db"),
        ],
        next="retinue.v1.store.1",
    )

    @contextlib.contextmanager
    def cluster(address: str | None, namespace: str | None) -> Iterator[Connection]:
        yield Connection(
            address="10.0.0.1:6379", mode="standing", namespace="team", started_here=False, node_id="n"
        )

    async def list_actors(namespace: str, *, after: str | None, limit: int) -> ActorPage:
        asked.append((namespace, after, limit))
        return page

    monkeypatch.setattr(view, "cluster_that_is_up", cluster)
    monkeypatch.setattr(listing, "list_actors", list_actors)
    return asked


def test_actors_are_listed_with_whose_sessions_they_have(
    runner: CliRunner, played_cluster: list[tuple[str, str | None, int]]
) -> None:
    text = said(runner, "actors", "list", "--after", "retinue.registry", "--limit", "6")
    assert played_cluster == [("team", "retinue.registry", 6)]
    for part in (
        "acme/ann/c-42: run_9",
        "acme/ann/s4: idle 4 s",
        "and 3 more sessions",
        "12 delegates",
        "01234567 ",
        "sqlite:////data/retinue.db",
        "silent",
        "6 actors",
        "More: --after retinue.v1.store.1",
    ):
        assert part in text
    assert "acme/ann/s5" not in text
    page = as_json(runner, "actors", "list")
    assert [len(row["sessions"]) for row in page["actors"]] == [0, 0, 1, 8, 0, 0]
    assert page["actors"][2]["sessions"][0]["activation_id"] == "activation-c-42"


def test_without_a_cluster_there_are_no_actors(runner: CliRunner, home: Path) -> None:
    done = runner.invoke(app, ["actors", "list"])
    assert done.exit_code == 1
    assert "No cluster is up" in done.stderr


@pytest.mark.parametrize("command", ["actors list", "sessions list", "runs list"])
def test_a_cluster_that_does_not_answer_is_one_message(
    runner: CliRunner, home: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    def connect(*_: Any, **__: Any) -> Connection:
        raise ClusterUnreachable("nothing answers at 10.0.0.1:1", address="10.0.0.1:1")

    monkeypatch.setattr(view, "connect", connect)
    done = runner.invoke(app, [*command.split(), "--address", "10.0.0.1:1"])
    assert done.exit_code == 2
    assert done.stderr == "retinue: nothing answers at 10.0.0.1:1 [cluster_unreachable]\n"


@pytest.mark.parametrize("command", ["actors", "sessions", "runs"])
def test_every_command_explains_itself(runner: CliRunner, command: str) -> None:
    assert "list" in runner.invoke(app, [command, "--help"]).stdout
    shown_help = runner.invoke(app, [command, "list", "--help"]).stdout
    for option in ("--json", "--limit", "--address", "--namespace"):
        assert option in shown_help
