"""A run is steered, answered and cancelled from any process that attaches to the cluster."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.processes import clean_environment, run_program, run_retinue, start_program

START = """
import sys
from retinue import Identity, Runtime
from tests.ray.test_feeds import Asks
me = Identity(tenant_id="acme", user_id="ann")
runtime = Runtime(driver=Asks())
for number in range(2):
    handle = runtime.start("x", identity=me, session_id=f"s{number}", run_id=f"run-{number}")
    next(handle.iter_events(types=["input.requested"]))
print("asked", flush=True)
for number in range(2):
    result = runtime.attach(f"run-{number}", identity=me).wait(60)
    print(result.status, result.text, result.reason and result.reason.message, flush=True)
"""

CONTROL = """
import json
from retinue import Identity, Runtime
from retinue.errors import InputError
from tests.ray.drivers import Ticker
me = Identity(tenant_id="acme", user_id="ann")
runtime = Runtime(driver=Ticker(events=1))  # another app: following and controlling needs no app of the run
asking = runtime.attach("run-0", identity=me)
request = next(asking.iter_events(types=["input.requested"])).payload.request
state, pending = asking.state, asking.pending_input
sent = asking.send_blocking("from afar", input_id="input-1")
replied = asking.reply_blocking(request.id, "that")
result = asking.wait(60)
try:
    late = asking.reply_blocking(request.id, "this").outcome
except InputError as error:
    late = error.code
cancelled = runtime.attach("run-1", identity=me).cancel_blocking("not needed")
print(json.dumps({
    "state": state, "pending": pending.question, "text": result.text, "late": late,
    "sent": [sent.id, sent.action, sent.outcome], "replied": [replied.action, replied.outcome],
    "cancelled": [cancelled.id, cancelled.outcome, cancelled.boundary],
}))
"""


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[dict[str, str]]:
    """A standing cluster of the test's own; down afterwards whatever happens."""
    made = clean_environment(tmp_path, {"PYTHONPATH": str(Path(__file__).parents[2])})
    assert run_retinue("up", environment=made).status == 0
    yield made
    run_retinue("down", environment=made)


def test_a_second_process_sends_replies_and_cancels(environment: dict[str, str]) -> None:
    first = start_program(START, environment)
    with first:
        assert first.stdout is not None
        assert first.stdout.readline() == "asked\n"
        second = run_program(CONTROL, environment)
        assert second.status == 0, second.errors
        said = json.loads(second.output.splitlines()[-1])
        rest, errors = first.communicate(timeout=60)
    assert said == {
        "state": "awaiting_input",
        "pending": "Which?",
        "text": "that from afar",
        "late": "run_finished",
        "sent": ["input-1", "steer", "deferred"],
        "replied": ["reply", "delivered"],
        "cancelled": ["run-1", "delivered", "run"],
    }
    assert rest.splitlines() == ["completed that from afar None", "cancelled  not needed"], errors
