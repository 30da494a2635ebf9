"""Runs on a standing cluster outlive their clients: SIGKILL the client, attach from another process."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.processes import Done, clean_environment, run_program, run_retinue, start_program

START = """
import sys
from retinue import Identity, Runtime
from tests.ray.drivers import Ticker
me = Identity(tenant_id="acme", user_id="ann")
runtime = Runtime(driver=Ticker(gate={gate!r}), event_capacity=8)
handle = runtime.start("go", identity=me, session_id="s", run_id="run-outlives")
for event in handle.iter_events():
    print(event.sequence, event.event_id, event.type, flush=True)
"""

FOLLOW = """
import json
from retinue import Identity, Runtime
from tests.ray.drivers import Ticker
me = Identity(tenant_id="acme", user_id="ann")
runtime = Runtime(driver=Ticker(gate={gate!r}), event_capacity=8)
handle = runtime.attach("run-outlives", identity=me)
open({gate!r}, "w").close()
numbers = [event.sequence for event in handle.iter_events({after})]
result = handle.wait(60)
print(json.dumps({{"numbers": numbers, "status": result.status, "final": result.final_cursor,
                   "ticks": result.structured["ticks"], "state": handle.state}}))
"""

START_AND_END = """
from retinue import Identity, Runtime
from tests.ray.drivers import Ticker
runtime = Runtime(driver=Ticker(events=2))
me = Identity(tenant_id="acme", user_id="ann")
runtime.start("x", identity=me, session_id="flushed", run_id="run-flushed")
"""

FIND = """
from retinue import Identity, Runtime
from tests.ray.drivers import Ticker
runtime = Runtime(driver=Ticker(events=2))
print(runtime.attach("run-flushed", identity=Identity(tenant_id="acme", user_id="ann")).wait(60).status)
"""

CONFLICT = """
from retinue import Identity, Runtime
from tests.ray.drivers import Ticker
runtime = Runtime(driver=Ticker(events=1))
result = runtime.run_blocking("x", identity=Identity(tenant_id="acme", user_id="ann"), session_id="s")
print(result.status, result.reason and result.reason.code, result.reason and result.reason.message)
"""

WRONG_VERSION = """
import retinue.ids
retinue.ids.PROTOCOL_VERSION = 99
from retinue import Identity, Runtime
from tests.ray.drivers import Ticker
runtime = Runtime(driver=Ticker(events=1))
result = runtime.run_blocking("x", identity=Identity(tenant_id="acme", user_id="ann"), session_id="s")
print(result.reason.code, result.reason.message)
"""


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[dict[str, str]]:
    """A standing cluster of the test's own; down afterwards whatever happens."""
    made = clean_environment(tmp_path, {"PYTHONPATH": str(Path(__file__).parents[2])})
    assert run_retinue("up", environment=made).status == 0
    yield made
    run_retinue("down", environment=made)


def answer(done: Done) -> dict[str, object]:
    assert done.status == 0, done.errors
    said: dict[str, object] = json.loads(done.output.splitlines()[-1])
    return said


def read_lines(process: subprocess.Popen[str], count: int) -> list[str]:
    assert process.stdout is not None
    return [process.stdout.readline() for _ in range(count)]


def test_a_run_goes_on_when_its_client_is_killed_and_is_read_to_the_end_without_a_gap(
    environment: dict[str, str], tmp_path: Path
) -> None:
    gate = str(tmp_path / "gate")
    client = start_program(START.format(gate=gate), environment)
    with client:
        seen = read_lines(client, 25)
        client.send_signal(signal.SIGKILL)
    assert [int(line.split()[0]) for line in seen] == list(range(1, 26))

    busy = run_program(CONFLICT, environment)  # the run has the session still
    assert busy.output.startswith("failed session_conflict"), busy.errors
    assert "busy in the app by-value:" in busy.output  # this program brought another configuration

    wrong = run_program(WRONG_VERSION, environment)
    assert wrong.output.startswith("version_mismatch"), wrong.errors
    assert "99" in wrong.output

    followed = answer(run_program(FOLLOW.format(gate=gate, after=25), environment))
    assert followed["status"] == "completed"
    assert followed["state"] == "finished"
    final = followed["final"]
    assert isinstance(final, int)
    assert followed["numbers"] == list(range(26, final + 1))  # nothing is missing, nothing came twice
    assert followed["ticks"] == final - 2

    # A third process reads all of it again, most of it from the store: the window has 8 events.
    again = answer(run_program(FOLLOW.format(gate=gate, after=0), environment))
    assert again["numbers"] == list(range(1, final + 1))

    # A program that ends right after its last start has started it.
    assert run_program(START_AND_END, environment).status == 0
    assert run_program(FIND, environment).output.strip() == "completed"

    status = json.loads(run_retinue("status", "--json", environment=environment).output)
    assert "1" in json.dumps(status)
    down = run_retinue("down", environment=environment)
    assert down.status == 0
