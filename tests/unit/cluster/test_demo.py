"""The demo from its options to its exit status, with the in-process backend in Ray's place."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import retinue.runtime
from retinue.cluster.demo import DemoOptions, continuing_command, default_folder, program, run
from retinue.errors import InputError
from retinue.inprocess import InProcessBackend
from retinue.runtime import Runtime
from tests.unit.providers.chat_server import ChatServer, chat_server

QUESTION = "How long does a lease last?"


@pytest.fixture(autouse=True)
def in_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("RETINUE_HOME", str(tmp_path / "home"))
    made: list[Runtime] = []

    def runtime(**options: Any) -> Runtime:
        made.append(Runtime(**options, backend="inprocess"))
        return made[-1]

    monkeypatch.setattr(retinue.runtime, "Runtime", runtime)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)
    for one in made:
        one.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "notes"
    root.mkdir()
    (root / "leases.md").write_text(
        "# Leases\n\nA lease lasts 15 s.\n\nThe holder renews a lease every 5 s.\n"
    )
    (root / "harbour.md").write_text("# Harbour\n\nThe harbour opens at nine.\n")
    (root / "odd.md").write_bytes(b"\0")
    return root


@pytest.fixture
def server() -> Iterator[ChatServer]:
    with chat_server() as state:
        yield state


def summary_of(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """The last line of standard output, after lines that are all events."""
    *events, last = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [event["sequence"] for event in events] == list(range(1, len(events) + 1))
    assert isinstance(last, dict)
    return last


def test_a_question_is_answered(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(DemoOptions(folder=folder, question=QUESTION, session="s-1")) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("retinue demo: ")
    assert "2 documents" in shown
    assert "skipped   odd.md: not text: a NUL byte at offset 0" in shown
    assert "A lease lasts 15 s. [leases.md:3]" in shown
    assert "stored    session s-1 in memory:" in shown  # where it really is: these tests run in-process
    assert "demo --session s-1 --folder" in shown


def test_json_ends_with_the_summary(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(DemoOptions(folder=folder, question=QUESTION, json=True)) == 0
    summary = summary_of(capsys)
    assert summary["status"] == "completed"
    assert (summary["delegates"], summary["model_calls"], summary["tool_calls"]) == (2, 6, 2)
    assert summary["tokens"]["limit"] == 200_000
    assert 0 < summary["tokens"]["used"] < 3_000
    assert summary["tokens"]["reserved"] == summary["unknown_usage_calls"] == 0
    assert summary["session"].startswith("demo_")
    assert summary["text"].startswith("A lease lasts 15 s. [leases.md:3]")
    assert 0 < summary["wall_s"] < 60


def test_the_same_session_goes_on(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = f"sqlite:///{tmp_path}/demo.db"
    first = DemoOptions(folder=folder, question=QUESTION, session="s-2", store=store, json=True)
    assert run(first) == 0
    assert summary_of(capsys)["store"] == store
    second = DemoOptions(
        folder=folder, question="And how often is it renewed?", session="s-2", store=store, json=True
    )
    assert run(second) == 0
    assert summary_of(capsys)["text"].startswith("The holder renews a lease every 5 s. [leases.md:5]")


@pytest.mark.parametrize("limits", [{"max_tokens": 60}, {"max_tokens": 900}, {"max_model_calls": 3}])
def test_a_budget_too_small_is_no_error(
    folder: Path, capsys: pytest.CaptureFixture[str], limits: dict[str, int]
) -> None:
    assert run(DemoOptions(folder=folder, question=QUESTION, json=True, **limits)) == 3  # type: ignore[arg-type]
    captured = capsys.readouterr()
    summary = json.loads(captured.out.splitlines()[-1])
    assert (summary["status"], summary["reason"]["code"]) == ("stopped", "budget_exhausted")
    assert "Traceback" not in captured.err


def test_a_folder_larger_than_the_budget_is_announced(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(DemoOptions(folder=folder, question=QUESTION, max_tokens=10))
    assert "will probably stop early" in capsys.readouterr().out


def test_any_openai_compatible_server_will_do(
    folder: Path, server: ChatServer, capsys: pytest.CaptureFixture[str]
) -> None:
    options = DemoOptions(
        folder=folder, question=QUESTION, model="openai:small", base_url=server.url, json=True
    )
    assert run(options) == 0
    summary = summary_of(capsys)
    assert summary["text"].startswith("A lease lasts 15 s. [leases.md:3]")
    assert summary["unknown_usage_calls"] == 0
    assert len(server.requests) == summary["model_calls"] == 6


def test_a_server_that_refuses_is_one_clear_message(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = DemoOptions(
        folder=folder, question=QUESTION, model="openai:small", base_url="http://127.0.0.1:9/v1", json=True
    )
    assert run(options) == 1
    captured = capsys.readouterr()
    assert "no server answers at http://127.0.0.1:9/v1" in captured.err
    assert "Traceback" not in captured.err
    summary = json.loads(captured.out.splitlines()[-1])
    assert (summary["status"], summary["reason"]["code"]) == ("failed", "model_failed")


def interrupting(server: ChatServer, times: int) -> Callable[[], None]:
    """Send this process SIGINT once the server has a request, and again."""

    def send() -> None:
        while not server.requests:
            time.sleep(0.01)
        for _ in range(times):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.2)

    return send


@pytest.mark.parametrize("times", [1, 2])
def test_an_interrupt_cancels_and_says_what_was_spent(
    folder: Path, server: ChatServer, capsys: pytest.CaptureFixture[str], times: int
) -> None:
    server.delay = 3.0
    thread = threading.Thread(target=interrupting(server, times))
    thread.start()
    options = DemoOptions(folder=folder, question=QUESTION, model="openai:small", base_url=server.url)
    assert run(options) == 130
    thread.join()
    shown = capsys.readouterr()
    assert "cancelling ..." in shown.out
    assert "cancelled: interrupted by the user" in shown.out
    assert "spent     model calls: 1 used" in shown.out
    assert "Traceback" not in shown.err


def test_a_second_interrupt_waits_for_nothing(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # A cluster that never answers: the run is not even accepted.
    asked = threading.Event()

    async def never(self: InProcessBackend) -> None:
        asked.set()
        await asyncio.Event().wait()

    def interrupt() -> None:
        asked.wait()
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.2)

    monkeypatch.setattr(InProcessBackend, "client", never)
    thread = threading.Thread(target=interrupt)
    thread.start()
    assert run(DemoOptions(folder=folder, question=QUESTION, json=True)) == 130
    thread.join()
    captured = capsys.readouterr()
    assert "ended without waiting" in captured.err
    assert "Traceback" not in captured.err
    summary = json.loads(captured.out.splitlines()[-1])
    assert (summary["status"], summary["tokens"]["used"]) == ("cancelled", None)


@pytest.mark.parametrize(
    ("options", "code", "hint"),
    [
        ({"folder": Path("/no/such/folder"), "question": "x"}, "invalid_input", "there is no folder"),
        ({"question": "  "}, "invalid_input", "--question"),
        ({"question": "x", "delegates": 0}, "invalid_input", "--delegates"),
        ({"question": "x", "delegates": 10_000}, "invalid_input", "--delegates"),
        ({"question": "x", "model": "nonsense"}, "invalid_harness", "extractive"),
        ({"question": "x", "store": "redis://x"}, "store_unavailable", "redis"),
        ({"question": "x", "max_tokens": -1}, "invalid_harness", "max_tokens"),
        ({"question": "x" * 70_000}, "invalid_input", "65536"),
        ({"question": "x", "session": "\ud800"}, "invalid_input", "session_id"),
    ],
)
def test_wrong_options_are_one_message(
    folder: Path, capsys: pytest.CaptureFixture[str], options: dict[str, Any], code: str, hint: str
) -> None:
    assert run(DemoOptions(**{"folder": folder, **options}, json=True)) == 1
    captured = capsys.readouterr()
    summary = json.loads(captured.out.splitlines()[-1])
    assert (summary["status"], summary["reason"]["code"]) == ("failed", code)
    assert hint in summary["reason"]["message"]
    assert "Traceback" not in captured.err


def test_another_folder_needs_a_question(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(DemoOptions(folder=folder)) == 1
    assert "--question" in capsys.readouterr().err


# --- defaults and words -----------------------------------------------------------------------------------


def test_the_docs_of_a_checkout_in_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "retinue"\nversion = "0"\n')
    (tmp_path / "docs").mkdir()
    monkeypatch.chdir(tmp_path)
    assert default_folder() == tmp_path / "docs"


def test_without_a_checkout_the_message_asks_for_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "another"\n')
    (tmp_path / "docs").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InputError, match="--folder DIR"):
        default_folder()


def test_the_command_that_goes_on_repeats_what_was_not_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["retinue"])
    options = DemoOptions(
        folder=Path("my notes"), delegates=2, model="openai:a", base_url="http://h/v1", max_tool_calls=3
    )
    words = shlex.split(continuing_command(options, "s 1"))
    at = words.index("demo")
    assert words[at:-2] == [
        *("demo", "--session", "s 1", "--folder", "my notes", "--delegates", "2", "--max-tool-calls", "3"),
        *("--model", "openai:a", "--base-url", "http://h/v1"),
    ]
    assert words[-2] == "--question"


def test_the_program_is_named_as_it_can_be_called(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    called = tmp_path / ".venv" / "bin" / "retinue"
    called.parent.mkdir(parents=True)
    called.write_text("#!/bin/sh\n")
    called.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/usr/bin")
    monkeypatch.setattr(sys, "argv", [str(called), "demo"])
    assert program() == [".venv/bin/retinue"]
    monkeypatch.setenv("PATH", str(called.parent))
    assert program() == ["retinue"]
    monkeypatch.setattr(sys, "argv", ["-c"])
    assert program() == ["python", "-m", "retinue"]
