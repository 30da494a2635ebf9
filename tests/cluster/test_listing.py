"""What the command line shows of a standing cluster, and of its store when the cluster is down."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.processes import Done, clean_environment, run_program, run_retinue, start_retinue

START = """
from retinue import Identity, Runtime
from tests.ray.drivers import Ticker
me = Identity(tenant_id="acme", user_id="ann")
runtime = Runtime(driver=Ticker(gate={gate!r}), isolation="shared", name="ticking")
handle = runtime.start("go", identity=me, session_id="live", run_id="run-live")
next(handle.iter_events())
ended = Runtime(driver=Ticker(events=2), isolation="shared", name="ticking-twice")
for number in range(3):
    assert ended.run_blocking("x", identity=me, session_id=f"s{{number}}").status == "completed"
"""

ME = ("--tenant", "acme", "--user", "ann")


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[dict[str, str]]:
    """A standing cluster of the test's own; down afterwards whatever happens."""
    made = clean_environment(tmp_path, {"PYTHONPATH": str(Path(__file__).parents[2]), "COLUMNS": "200"})
    assert run_retinue("up", "--idle-timeout", "600", "--max-resident", "8", environment=made).status == 0
    yield made
    run_retinue("down", environment=made)


def said(done: Done) -> Any:
    assert (done.status, done.errors) == (0, "")
    return json.loads(done.output)


def test_what_stands_is_listed_watched_and_left_alone(environment: dict[str, str], tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    started = run_program(START.format(gate=str(gate)), environment)
    assert started.status == 0, started.errors

    status = said(run_retinue("status", "--json", environment=environment))["statistics"]["directory"]
    assert (status["idle_timeout"], status["max_resident"], status["shared_hosts"]) == (600.0, 8, 2)
    pools = said(run_retinue("status", "--json", environment=environment))["statistics"]["pools"]

    page = said(run_retinue("actors", "list", "--json", environment=environment))
    roles = [tuple(row["roles"]) for row in page["actors"]]
    for role in ("registry", "directory", "keeper", "session host", "child host", "store"):
        assert (role,) in roles
    (host,) = [row for row in page["actors"] if "ticking" in row["apps"] and row["state"] == "serving"]
    assert [(each["session_id"], each["active_run"]) for each in host["sessions"]] == [("live", "run-live")]

    sessions = said(run_retinue("sessions", "list", "--json", environment=environment))["sessions"]
    assert [(each["session_id"], each["open_runs"]) for each in sessions] == [
        ("live", 1),
        ("s0", 0),
        ("s1", 0),
        ("s2", 0),
    ]
    assert sessions[0]["actor"] == host["name"]
    shown = said(run_retinue("sessions", "show", *ME, "--session", "live", "--json", environment=environment))
    assert host["name"].endswith(shown["host_id"])
    (run,) = said(run_retinue("runs", "list", "--open", "--json", environment=environment))["runs"]
    assert (run["run_id"], run["state"], run["app"]) == ("run-live", "open", "ticking")

    # A viewer that is interrupted leaves the run alone; looking brought no app and no process.
    watching = start_retinue("runs", "watch", "run-live", *ME, environment=environment)
    with watching:
        assert watching.stdout is not None
        assert "run.started" in watching.stdout.readline()
        watching.send_signal(signal.SIGINT)
        _, errors = watching.communicate(timeout=30)
    assert (watching.returncode, errors) == (130, "retinue: interrupted\n")
    after = said(run_retinue("status", "--json", environment=environment))["statistics"]["pools"]
    assert [pool["app"] for pool in after] == [pool["app"] for pool in pools]

    following = start_retinue("runs", "watch", "run-live", *ME, "--json", environment=environment)
    with following:
        assert following.stdout is not None
        first = json.loads(following.stdout.readline())
        gate.touch()
        rest, errors = following.communicate(timeout=60)
    events = [first, *map(json.loads, rest.splitlines())]
    assert (following.returncode, errors) == (0, "")
    assert [event["sequence"] for event in events] == list(range(1, len(events) + 1))
    assert events[-1]["payload"]["result"]["status"] == "completed"

    assert run_retinue("down", environment=environment).status == 0
    gone = run_retinue("actors", "list", environment=environment)
    assert (gone.status, gone.output) == (1, "")
    # The store's file is read without a cluster.
    sessions = said(run_retinue("sessions", "list", "--json", environment=environment))["sessions"]
    assert [(each["session_id"], each["holder_id"]) for each in sessions] == [
        (name, None) for name in ("live", "s0", "s1", "s2")
    ]
    again = run_retinue(
        "runs", "watch", "run-live", *ME, "--after", str(len(events) - 1), environment=environment
    )
    assert again.status == 0
    assert "run.terminal  completed" in again.output
