"""The examples on a real Ray: two on this session's, two as the programs that they are."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from examples import custom_driver, live_input, questions, team
from retinue import Identity
from tests.ray.conftest import MakeRuntime

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
LIMIT = 90


def test_the_team_runs_in_child_hosts(
    cluster: str, store_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    result = team.main(store=store_url)
    assert result.status == "completed"
    assert "Two ships waited" in result.text
    assert result.budget is not None
    assert (result.budget.tool_calls.used, result.budget.tokens.reserved) == (3, 0)
    assert "child.finished" in capsys.readouterr().out


def test_the_custom_driver_keeps_its_state(
    cluster: str, store_url: str, make_runtime: MakeRuntime, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        assert custom_driver.main(store=store_url).structured == {"answers": 2}
    runtime = make_runtime(driver=custom_driver.EachQuestion(reader=team.member("harbour")))
    who = Identity(tenant_id="acme", user_id="ann")
    snapshot = asyncio.run(runtime.sessions.latest(who, "bridge"))
    assert (snapshot.state, snapshot.revision) == ({"questions": 4}, 2)


def test_a_question_is_answered_and_a_run_is_given_more_while_it_works(
    cluster: str, store_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert questions.main(store=store_url).text == "- The room is booked for Monday."
    assert "second answer: True" in capsys.readouterr().out
    assert [result.text for result in live_input.main(store=store_url)] == ["the cellar", "the roof"]
    assert "second run: queued at 1" in capsys.readouterr().out


def run(name: str, home: Path) -> str:
    """Run an example as its reader would, on a Ray of its own; what it printed."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("RAY_", "RETINUE_"))}
    environment = {
        **kept,
        "HOME": str(home),
        "RETINUE_HOME": str(home / "retinue"),
        "RETINUE_ADDRESS": "local",
        "PYTHONPATH": str(EXAMPLES.parent),
    }
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name)],
        env=environment,
        cwd=home,
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def test_the_program_of_the_readme(tmp_path: Path) -> None:
    assert run("ten_lines.py", tmp_path) == "- Record 42 was approved on Monday.\n"
    assert (tmp_path / "retinue" / "retinue.db").exists()


def test_a_second_process_attaches_and_reads_every_event(tmp_path: Path) -> None:
    lines = run("attach.py", tmp_path).splitlines()
    assert lines == [
        "second process: 1 run.started",
        *(f"second process: {number} custom" for number in range(2, 7)),
        "second process: 7 run.terminal",
        "second process: completed done",
        "first process:  completed done",
    ]
