"""Approvals of a run whose program has ended, decided on the command line of a standing cluster."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.processes import Done, clean_environment, run_program, run_retinue

START = """
from retinue import Identity, Runtime
me = Identity(tenant_id="acme", user_id="ann")
runtime = Runtime("tests.ray.approval_drivers:paying_app", isolation="shared")
for number in (1, 2, 3):
    handle = runtime.start(str(number), identity=me, session_id=f"s{number}", run_id=f"run-{number}")
    next(handle.iter_events(types=["tool.approval.request"]))
"""

RESULT = """
import sys
from retinue import Identity, Runtime
me = Identity(tenant_id="acme", user_id="ann")
runtime = Runtime("tests.ray.approval_drivers:paying_app", isolation="shared")
for number in (1, 2):
    print(runtime.attach(f"run-{number}", identity=me).wait(60).text)
handle = runtime.attach("run-3", identity=me)
print(handle.state, len(runtime.approvals.list_blocking(me)))
handle.cancel_blocking()
print(handle.wait(60).status)
"""


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[dict[str, str]]:
    """A standing cluster of the test's own; down afterwards whatever happens."""
    made = clean_environment(tmp_path, {"PYTHONPATH": str(Path(__file__).parents[2]), "COLUMNS": "240"})
    assert run_retinue("up", environment=made).status == 0
    yield made
    run_retinue("down", environment=made)


def said(done: Done) -> Any:
    assert (done.status, done.errors) == (0, "")
    return json.loads(done.output)


def test_what_waits_is_listed_and_decided_from_the_command_line(environment: dict[str, str]) -> None:
    started = run_program(START, environment)
    assert started.status == 0, started.errors

    page = said(run_retinue("approvals", "list", "--tenant", "acme", "--json", environment=environment))
    asked = {row["root_run_id"]: row["approval_id"] for row in page["approvals"]}
    assert [(row["root_run_id"], row["arguments"]) for row in page["approvals"]] == [
        (f"run-{number}", {"amount": str(number)}) for number in (1, 2, 3)
    ]
    approved = run_retinue("approvals", "approve", asked["run-1"], "--by", "carol", environment=environment)
    assert (approved.status, approved.output) == (0, "Approved by carol: pay of run-1\n")
    denied = said(
        run_retinue(
            "approvals",
            "deny",
            asked["run-2"],
            "--reason",
            "too much",
            "--tenant",
            "acme",
            "--user",
            "ann",
            "--json",
            environment=environment,
        )
    )
    assert (denied["state"], denied["reason"]) == ("denied", "too much")
    again = run_retinue("approvals", "approve", asked["run-2"], environment=environment)
    assert (again.status, again.output) == (2, "")
    assert "[input_already_resolved]" in again.errors
    left = run_retinue("approvals", "list", environment=environment)
    assert asked["run-3"] in left.output
    assert "1 request\n" in left.output

    ended = run_program(RESULT, environment)
    assert ended.status == 0, ended.errors
    lines = ended.output.splitlines()
    assert lines[0] == "paid 1"
    assert "too much" in lines[1]
    assert lines[2:] == ["running 1", "cancelled"]
    late = run_retinue("approvals", "approve", asked["run-3"], environment=environment)
    assert late.status == 2
    assert "is cancelled already" in late.errors
