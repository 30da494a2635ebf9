"""Commands that list and decide approvals. The cluster is played by an in-process runtime."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from retinue import ApprovalRequest, Approvals, Grants, Identity, RunHandle, Runtime
from retinue.cluster import approvals_cli, view
from retinue.cluster.cli import app
from retinue.cluster.run_lines import event_line
from retinue.cluster.view import View
from retinue.events import ApprovalRequested
from tests.conftest import MakeLocalRuntime
from tests.support import backend_of
from tests.unit.test_approvals_runtime import pays

ANN, BOB = Identity(tenant_id="acme", user_id="ann"), Identity(tenant_id="acme", user_id="bob")


@pytest.fixture
def runner() -> CliRunner:
    return CliRunner(env={"COLUMNS": "300", "TERM": "dumb", "NO_COLOR": "1"})


@pytest.fixture
def here(local_runtime: MakeLocalRuntime, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Runtime:
    """A runtime that the commands find where they look for the cluster that is up."""
    runtime = local_runtime(
        driver=pays,
        grants=Grants(tool_ids=["pay"]),
        approvals=Approvals(require="all"),
        store=f"sqlite:///{tmp_path}/here.db",
    )

    @contextlib.contextmanager
    def open_view(*_: object) -> Iterator[View]:
        yield View(backend_of(runtime), None)

    monkeypatch.setattr(view, "open_view", open_view)
    return runtime


def asks(runtime: Runtime, who: Identity, amount: int) -> tuple[RunHandle, ApprovalRequest]:
    """A run that waits with a request for approval."""
    handle = runtime.start(str(amount), identity=who, session_id="s")
    event = next(handle.iter_events(types=["tool.approval.request"]))
    assert isinstance(event.payload, ApprovalRequested)
    assert f'pay "{{"amount":{amount}}}" ({event.payload.request.id})' in event_line(event)
    return handle, event.payload.request


def as_json(runner: CliRunner, *arguments: str) -> Any:
    done = runner.invoke(app, ["approvals", *arguments, "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def said(runner: CliRunner, *arguments: str) -> str:
    done = runner.invoke(app, ["approvals", *arguments])
    assert done.exit_code == 0, done.output
    return done.stdout


def refusal(runner: CliRunner, *arguments: str) -> str:
    done = runner.invoke(app, ["approvals", *arguments])
    assert (done.exit_code, done.stdout) == (2, "")
    return done.stderr


def test_what_waits_is_listed_and_decided_by_its_id_alone(runner: CliRunner, here: Runtime) -> None:
    anns, one = asks(here, ANN, 1)
    bobs, two = asks(here, BOB, 2)
    page = as_json(runner, "list")
    assert [(each["user_id"], each["arguments"], each["state"]) for each in page["approvals"]] == [
        ("ann", {"amount": 1}, "pending"),
        ("bob", {"amount": 2}, "pending"),
    ]
    row = page["approvals"][0]
    assert (row["approval_id"], row["root_run_id"], row["digest"]) == (one.id, anns.run_id, one.digest)
    assert datetime.fromisoformat(row["expires_at"]).timestamp() == pytest.approx(one.expires_at)
    assert (row["decided_at"], page["next"]) == (None, None)
    assert [
        each["user_id"] for each in as_json(runner, "list", "--tenant", "acme", "--user", "bob")["approvals"]
    ] == ["bob"]
    assert as_json(runner, "list", "--tenant", "other")["approvals"] == []
    text = said(runner, "list", "--limit", "1")
    assert one.id in text
    assert 'pay {"amount":1}' in text
    assert "1 request\n" in text
    after = as_json(runner, "list", "--limit", "1")["next"]
    assert f"More: --after {after}" in text
    assert as_json(runner, "list", "--after", str(after))["approvals"][0]["approval_id"] == two.id

    assert said(runner, "approve", one.id, "--by", "carol") == f"Approved by carol: pay of {anns.run_id}\n"
    assert anns.wait().text == "paid 1"
    denied = as_json(runner, "deny", two.id, "--reason", "too much", "--tenant", "acme", "--user", "bob")
    assert (denied["state"], denied["by"], denied["reason"]) == (
        "denied",
        approvals_cli._operator(),
        "too much",
    )
    assert "too much" in bobs.wait().text
    assert as_json(runner, "list")["approvals"] == []
    assert [each["state"] for each in as_json(runner, "list", "--state", "all")["approvals"]] == [
        "approved",
        "denied",
    ]
    assert "denied by" in said(runner, "list", "--state", "denied")


def test_the_same_decision_again_is_harmless_and_another_is_an_error(
    runner: CliRunner, here: Runtime
) -> None:
    handle, request = asks(here, ANN, 1)
    whose = ("--tenant", "acme", "--user", "ann")
    said(runner, "approve", request.id, "--by", "carol")
    handle.wait()
    for options in ((), whose, ("--tenant", "acme")):
        assert as_json(runner, "approve", request.id, "--by", "dave", *options)["by"] == "carol"
        error = refusal(runner, "deny", request.id, *options)
        assert "approved by carol already" in error
        assert "[input_already_resolved]" in error


def test_what_was_settled_with_its_run_cannot_be_decided(runner: CliRunner, here: Runtime) -> None:
    handle, request = asks(here, ANN, 1)
    handle.cancel_blocking()
    handle.wait()
    assert "is cancelled already" in refusal(runner, "approve", request.id)


def test_a_request_that_is_not_there_is_named(runner: CliRunner, here: Runtime) -> None:
    _, request = asks(here, ANN, 1)
    for arguments in (
        ("approve", f"{request.root_run_id}:none"),
        ("deny", "nonsense"),
        ("approve", request.id, "--tenant", "acme", "--user", "bob"),
        ("approve", request.id, "--tenant", "other"),
    ):
        assert "[not_found]" in refusal(runner, *arguments)
    assert len(as_json(runner, "list")["approvals"]) == 1


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("list", "--state", "open"), "pending, approved"),
        (("list", "--user", "ann"), "tenant"),
        (("list", "--tenant", "acme", "--session", "s"), "user"),
        (("approve", "r:1", "--reason", "x" * 2_000), "reason"),
    ],
)
def test_wrong_usage_is_said(runner: CliRunner, here: Runtime, arguments: Any, named: str) -> None:
    assert named in refusal(runner, *arguments)


def test_the_file_of_a_store_lists_what_waits_and_decides_nothing_that_runs(
    runner: CliRunner, here: Runtime, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _, request = asks(here, ANN, 1)
    monkeypatch.undo()
    for name in ("RETINUE_ADDRESS", "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RETINUE_HOME", str(tmp_path / "home"))
    store = ("--store", f"sqlite:///{tmp_path}/here.db")
    assert [each["approval_id"] for each in as_json(runner, "list", *store)["approvals"]] == [request.id]
    assert "no cluster is up" in refusal(runner, "approve", request.id, *store)
    assert as_json(runner, "list", *store)["approvals"][0]["state"] == "pending"


def test_text_of_others_is_harmless_for_a_terminal(runner: CliRunner, here: Runtime) -> None:
    handle, request = asks(here, Identity(tenant_id="acme", user_id="\x1b[31mred"), 1)
    assert "\x1b" not in said(runner, "list")
    text = said(runner, "deny", request.id, "--by", "\x1b[2J")
    assert "\x1b" not in text
    assert "\x1b" not in said(runner, "list", "--state", "all")
    handle.wait()
