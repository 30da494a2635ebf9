"""The command line: what it passes on, what it prints, how it ends."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from retinue.cluster import demo, standing
from retinue.cluster.cli import app
from retinue.cluster.demo import DemoOptions
from retinue.cluster.record import ClusterRecord
from retinue.cluster.standing import DownReport, StatusReport, UpReport
from retinue.errors import ClusterUnreachable

RECORD = ClusterRecord(
    address="10.0.0.1:6379",
    namespace="retinue",
    host="here",
    since=1.0,
    pid=42,
    pid_started=1.0,
    auth="token",
    token_path="/home/ann/cluster.token",
    log="/home/ann/ray.log",
)


@pytest.fixture
def runner() -> CliRunner:
    return CliRunner(env={"COLUMNS": "200", "TERM": "dumb", "NO_COLOR": "1"})


def raising(error: BaseException) -> Any:
    def call(*_: Any, **__: Any) -> Any:
        raise error

    return call


def test_demo_passes_everything_on(
    runner: CliRunner, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    given: list[DemoOptions] = []

    def run(options: DemoOptions) -> int:
        given.append(options)
        return 3

    monkeypatch.setattr(demo, "run", run)
    wanted = DemoOptions(
        folder=tmp_path,
        question="why?",
        delegates=7,
        max_tokens=1234,
        max_model_calls=5,
        max_tool_calls=6,
        model="openai:tiny",
        base_url="http://localhost:1/v1",
        session="s-1",
        store="memory:",
        json=True,
    )
    arguments = ["demo"]
    for field in fields(DemoOptions):
        option = "--" + field.name.replace("_", "-")
        arguments += [option] if field.name == "json" else [option, str(getattr(wanted, field.name))]
    assert runner.invoke(app, arguments).exit_code == 3
    assert runner.invoke(app, ["demo"]).exit_code == 3
    assert given == [wanted, DemoOptions()]


@pytest.mark.parametrize("command", ["up", "down", "status", "demo"])
def test_an_error_is_one_message(runner: CliRunner, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    error = ClusterUnreachable("nothing answers at 10.0.0.1:6379; run `retinue up`", address="10.0.0.1:6379")
    monkeypatch.setattr(demo, "run", raising(error))
    for name in ("up", "down", "status"):
        monkeypatch.setattr(standing, name, raising(error))
    done = runner.invoke(app, [command])
    assert done.exit_code == 2
    assert done.stderr == f"retinue: {error.message} [cluster_unreachable]\n"


@pytest.mark.parametrize("command", ["up", "down", "status"])
def test_an_interrupt_ends_with_130(runner: CliRunner, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    monkeypatch.setattr(standing, command, raising(KeyboardInterrupt()))
    done = runner.invoke(app, [command])
    assert done.exit_code == 130
    assert done.stderr == "retinue: interrupted\n"


def test_up_says_where_it_is_and_how_to_stop_it(runner: CliRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []

    def up(address: str | None, **options: Any) -> UpReport:
        calls.append((address, options))
        return UpReport(record=RECORD, started=True, already=False)

    monkeypatch.setattr(standing, "up", up)
    given = "--address 10.0.0.1:6379 --namespace team --num-cpus 3 --max-resident 7 --idle-timeout 60"
    done = runner.invoke(app, ["up", *given.split()])
    assert done.exit_code == 0
    options = {"namespace": "team", "num_cpus": 3, "max_resident": 7, "idle_timeout": 60.0}
    assert calls == [("10.0.0.1:6379", options)]
    assert runner.invoke(app, ["up", "--idle-timeout", "0"]).exit_code == 2
    for part in (RECORD.address, "a token", "/home/ann/cluster.token", "/home/ann/ray.log", "retinue down"):
        assert part in done.stdout
    as_json = runner.invoke(app, ["up", "--json"])
    said = json.loads(as_json.stdout)
    assert (said["address"], said["started"], said["pid"]) == (RECORD.address, True, 42)


def test_a_cluster_without_tokens_is_warned_of(runner: CliRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    open_to_all = ClusterRecord(
        address="10.0.0.1:1", namespace="n", host="h", since=1.0, pid=1, pid_started=1.0
    )
    report = UpReport(record=open_to_all, started=True, already=False)
    monkeypatch.setattr(standing, "up", lambda *_, **__: report)
    assert (
        "Whoever reaches this address over the network can run code here" in runner.invoke(app, ["up"]).stdout
    )


def test_down_says_what_it_did(runner: CliRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    report = DownReport(address="10.0.0.1:6379", sessions=("a", "b"), processes=9)
    monkeypatch.setattr(standing, "down", lambda: report)
    done = runner.invoke(app, ["down"])
    assert done.exit_code == 0
    assert "2 sessions released." in done.stdout
    assert "10.0.0.1:6379 is down (9 processes ended)." in done.stdout
    monkeypatch.setattr(standing, "down", lambda: DownReport(address="10.0.0.1:6379", left_running=True))
    assert "which stays up" in runner.invoke(app, ["down"]).stdout
    monkeypatch.setattr(standing, "down", lambda: DownReport(address=None))
    assert runner.invoke(app, ["down"]).stdout.endswith("No cluster is up.\n")


def test_status_tells_by_its_exit_status(runner: CliRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    report = StatusReport(
        up=True,
        address="10.0.0.1:6379",
        namespace="retinue",
        started_here=True,
        pid=42,
        since=1.0,
        auth="token",
        nodes=2,
        resources={"CPU": 8.0, "memory": 3 * 2**30},
        statistics={"versions": ["1"], "directory": {"resident": 3}, "pools": [{"app": "x"}], "stores": []},
    )
    monkeypatch.setattr(standing, "status", lambda *_, **__: report)
    done = runner.invoke(app, ["status"])
    assert done.exit_code == 0
    for part in ("10.0.0.1:6379 is up", "nodes", "3.0 GiB", "resident: 3", "app: x", "stores: none"):
        assert part in done.stdout
    assert (
        json.loads(runner.invoke(app, ["status", "--json"]).stdout)["statistics"]["directory"]["resident"]
        == 3
    )

    gone = StatusReport(up=False, address="10.0.0.1:6379", namespace="retinue", trouble="it is gone")
    monkeypatch.setattr(standing, "status", lambda *_, **__: gone)
    done = runner.invoke(app, ["status"])
    assert done.exit_code == 1
    assert "does not answer" in done.stdout
    assert done.stderr == "it is gone\n"
    monkeypatch.setattr(standing, "status", lambda *_, **__: StatusReport(up=False))
    assert "No cluster is up" in runner.invoke(app, ["status"]).stdout


def test_help_names_every_command_and_version_every_part(runner: CliRunner) -> None:
    shown = runner.invoke(app, ["--help"]).stdout
    assert all(command in shown for command in ("demo", "up", "down", "status", "--version"))
    assert runner.invoke(app, []).exit_code == 2
    shown = runner.invoke(app, ["demo", "--help"]).stdout
    assert all("--" + field.name.replace("_", "-") in shown for field in fields(DemoOptions))
    assert "pip install 'retinue[openai]'" in " ".join(shown.replace("│", " ").split())
    version = runner.invoke(app, ["--version"]).stdout
    assert version.startswith("retinue ")
    assert "Ray" in version


def test_help_does_not_wait_for_ray() -> None:
    program = (
        "import sys; from retinue.cluster import cli\n"
        "try: cli.app(['demo', '--help'], prog_name='retinue')\n"
        "except SystemExit: pass\n"
        "print([name for name in ('ray', 'openai', 'sqlite3') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "[]", done.stdout + done.stderr


def test_python_dash_m_is_the_command_line() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "retinue", "--version"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0
    assert done.stdout.startswith("retinue ")
