"""``retinue up``, ``status`` and ``down`` for real: what they start, who finds it, and what is left."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from retinue.cluster.record import ClusterRecord
from retinue.ids import PROTOCOL_VERSION
from tests.cluster.processes import (
    Done,
    clean_environment,
    run_program,
    run_retinue,
    wait_until_gone,
)

ATTACH = """
import json
from retinue.cluster.connection import connect
connection = connect(start=False)
import ray
print(json.dumps({"address": connection.address, "mode": connection.mode, "nodes": len(ray.nodes())}))
"""


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[dict[str, str]]:
    """An environment of the test's own, whose cluster is down afterwards whatever happens."""
    made = clean_environment(tmp_path)
    yield made
    run_retinue("down", environment=made)


def said(done: Done) -> dict[str, object]:
    assert "Traceback" not in done.errors
    answer: dict[str, object] = json.loads(done.output)
    return answer


def members_of(pid: int) -> list[int]:
    """All processes of the session that the head leads."""
    found = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == pid:
                found.append(process.pid)
        except ProcessLookupError:
            continue
    return found


def test_up_attach_status_down(environment: dict[str, str]) -> None:
    before = run_retinue("status", "--json", environment=environment)
    assert before.status == 1
    assert said(before)["up"] is False

    up = said(run_retinue("up", "--json", "--num-cpus", "1", environment=environment))
    assert (up["started"], up["already"], up["auth"]) == (True, False, "token")
    pid = up["pid"]
    assert isinstance(pid, int)
    members = members_of(pid)
    assert len(members) > 3

    attached = run_program(ATTACH, environment)
    assert json.loads(attached.output) == {"address": up["address"], "mode": "standing", "nodes": 1}
    assert attached.errors == ""
    assert members_of(pid), "the cluster must go on when a client has ended"

    again = said(run_retinue("up", "--json", environment=environment))
    assert (again["started"], again["already"], again["pid"]) == (False, True, pid)

    status = run_retinue("status", "--json", environment=environment)
    assert status.status == 0
    report = said(status)
    assert (report["up"], report["nodes"], report["namespace"]) == (True, 1, "retinue")
    assert isinstance(report["statistics"], dict)
    assert report["statistics"]["versions"] == [str(PROTOCOL_VERSION)]

    members = members_of(pid)
    down = run_retinue("down", "--json", environment=environment)
    assert down.status == 0
    assert said(down)["address"] == up["address"]
    assert wait_until_gone(members, limit=0.5) == [], "down returns when all is gone"
    assert not Path(str(up["temp_dir"])).exists()
    assert not Path(str(up["token_path"])).exists()

    after = run_retinue("status", environment=environment)
    assert after.status == 1
    assert "No cluster is up" in after.output
    nothing = run_retinue("down", environment=environment)
    assert nothing.status == 0
    assert "No cluster is up" in nothing.output


def test_a_head_that_was_killed_is_told_and_cleared_away(environment: dict[str, str]) -> None:
    up = said(run_retinue("up", "--json", "--num-cpus", "1", environment=environment))
    pid = up["pid"]
    assert isinstance(pid, int)
    members = members_of(pid)
    os.kill(pid, signal.SIGKILL)
    assert wait_until_gone([pid]) == []

    status = run_retinue("status", environment=environment)
    assert status.status == 1
    assert "has ended" in status.errors

    nobody = run_program(ATTACH, environment)
    assert "no cluster is up" in nobody.errors

    down = said(run_retinue("down", "--json", environment=environment))
    assert down["trouble"] == "its process had ended already"
    assert wait_until_gone(members, limit=5) == [], "Ray's agents outlive a killed head by a minute"
    assert not Path(str(up["temp_dir"])).exists()


def test_a_given_cluster_is_used_and_left_running(
    environment: dict[str, str], unguarded: ClusterRecord
) -> None:
    up = said(run_retinue("up", "--address", unguarded.address, "--json", environment=environment))
    assert (up["started"], up["address"], up["pid"]) == (False, unguarded.address, None)

    other = run_retinue("up", "--address", "127.0.0.1:1", environment=environment)
    assert other.status == 2
    assert other.errors.count("\n") == 1
    assert "127.0.0.1:1 does not answer" in other.errors

    down = said(run_retinue("down", "--json", environment=environment))
    assert (down["left_running"], down["processes"]) == (True, 0)
    assert unguarded.process() is not None


def test_a_head_that_cannot_start_is_one_message(environment: dict[str, str]) -> None:
    done = run_retinue("up", environment={**environment, "RAY_OVERRIDE_RESOURCES": "not json"})
    assert done.status == 2
    assert done.errors.count("\n") == 1
    assert "Expecting value" in done.errors
    assert "[cluster_unreachable]" in done.errors
    assert run_retinue("status", environment=environment).status == 1
