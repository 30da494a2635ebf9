"""The examples run as they are, and the documentation says what the code has."""

from __future__ import annotations

import re
import typing
from pathlib import Path

import pytest

from examples import custom_driver, in_process_test, live_input, questions, team
from retinue import errors
from retinue.budgets import Budgets, ResourceSnapshot, Usage
from retinue.events import Event, Payload
from retinue.ledger import BudgetLedger

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])


def test_a_team_reads_every_log_under_one_budget(capsys: pytest.CaptureFixture[str]) -> None:
    result = team.main(backend="inprocess")
    assert result.status == "completed"
    assert "Two ships waited" in result.text
    assert result.budget is not None
    assert (result.budget.model_calls.used, result.budget.tool_calls.used) == (8, 3)
    assert result.budget.tokens.used == result.usage.total_tokens
    shown = capsys.readouterr().out
    for place in team.LOGS:
        assert re.search(rf"\d+ {place} +child.finished +completed", shown), shown


def test_a_driver_of_ones_own_gives_each_question_to_a_delegate(capsys: pytest.CaptureFixture[str]) -> None:
    result = custom_driver.main(backend="inprocess")
    assert (result.status, result.structured) == ("completed", {"answers": 2})
    assert "1931" in result.text
    assert "40 km/h" in result.text
    assert result.budget is not None
    assert result.budget.tool_calls.used == 1  # the effect
    assert result.text in capsys.readouterr().out


def test_a_question_is_answered_from_another_handle_and_only_once(capsys: pytest.CaptureFixture[str]) -> None:
    result = questions.main(backend="inprocess")
    assert (result.status, result.text) == ("completed", "- The room is booked for Monday.")
    assert capsys.readouterr().out.splitlines() == [
        "The room costs 40 euros on Monday. Book it? ['yes', 'no'] (awaiting_input)",
        "answer: delivered",
        "second answer: True",
        "completed - The room is booked for Monday.",
    ]


def test_a_run_is_steered_and_followed_up_and_another_waits(capsys: pytest.CaptureFixture[str]) -> None:
    first, second = live_input.main(backend="inprocess")
    assert [first.status, second.status] == ["completed", "completed"]
    assert capsys.readouterr().out.splitlines() == [
        "steer:     deferred to the next model_call",
        "follow-up: deferred to the next turn",
        "second run: queued at 1",
        "completed | last turn: the cellar",
        "completed | last turn: the roof",
    ]


def test_the_example_tests_pass() -> None:
    in_process_test.test_the_agent_reads_the_record_before_it_answers()
    in_process_test.test_a_budget_that_is_too_small_gives_what_was_found_so_far()


def test_the_program_in_the_readme_is_the_one_that_is_tested() -> None:
    readme = (ROOT / "README.md").read_text("utf-8")
    (program,) = re.findall(r"^```python[^\n]*\n(.*?)^```$", readme, re.MULTILINE | re.DOTALL)
    assert program == (ROOT / "examples" / "ten_lines.py").read_text("utf-8")
    assert len([line for line in program.splitlines() if line.strip()]) <= 10


def test_every_link_leads_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\((?!https?://)([^)#]+)", page.read_text("utf-8")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_every_file_that_the_architecture_names_is_there() -> None:
    named = re.findall(
        r"`((?:retinue|storage|actors|cluster|examples)/[\w/]+\.py)`",
        "\n".join(page.read_text("utf-8") for page in PAGES),
    )
    assert len(named) > 30
    assert [name for name in sorted(set(named)) if not (ROOT / name).is_file()] == []


def test_the_architecture_says_what_every_module_of_the_lowest_floor_is_for() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    modules = sorted(path.name for path in (ROOT / "retinue").glob("[!_]*.py"))
    assert [name for name in modules if f"{name}`" not in text] == []


def test_every_function_that_the_architecture_follows_is_there() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    source = "\n".join(
        path.read_text("utf-8")
        for folder in ("retinue", "storage", "actors", "cluster")
        for path in (ROOT / folder).rglob("*.py")
    )
    followed = set(re.findall(r"`([A-Z]\w+)\.(\w+)`", text))
    assert len(followed) > 30
    for owner, member in sorted(followed):
        (body,) = re.findall(rf"^class {owner}\b.*?(?=^\S|\Z)", source, re.MULTILINE | re.DOTALL) or [""]
        assert re.search(rf"\bdef {member}\(", body), f"{owner}.{member}"


def test_every_error_code_is_explained() -> None:
    text = (ROOT / "docs" / "failures.md").read_text("utf-8")
    for name in errors.__all__:
        found = getattr(errors, name)
        if isinstance(found, type) and issubclass(found, errors.RetinueError):
            for code in found.codes:
                assert f"| `{code}` | `{name}` |" in text


def test_every_event_and_its_fields_are_explained() -> None:
    text = (ROOT / "docs" / "events.md").read_text("utf-8")
    rows = {row.split("`")[1]: row for row in text.splitlines() if row.startswith("| `")}
    for field in Event.__struct_fields__:
        assert field in rows
    for payload in typing.get_args(Payload):
        row = rows[payload.__struct_config__.tag]
        for field in payload.__struct_fields__:
            assert f"`{field}`" in row, row


def test_the_figures_of_the_budget_example_are_the_ledgers() -> None:
    ledger = BudgetLedger(Budgets(max_model_calls=6, max_tokens=5000))
    for name in "ABCD":
        ledger.open_account(name, "", None)
    seen: list[ResourceSnapshot] = []

    def look() -> None:
        seen.append(ledger.snapshot().tokens)

    ledger.admit_model("", "1", 200, 1024)
    look()
    ledger.settle_model("", "1", Usage(input_tokens=180, output_tokens=300))
    look()
    for name in "ABC":
        ledger.admit_model(name, "1", 500, 1024)
        look()
    with pytest.raises(errors.BudgetExhausted):
        ledger.admit_model("D", "1", 500, 1024)
    look()
    ledger.settle_model("A", "1", Usage(input_tokens=480, output_tokens=120))
    look()
    ledger.lose("B")
    look()
    ledger.settle_model("C", "1", Usage(input_tokens=500, output_tokens=1200))
    look()

    text = (ROOT / "docs" / "budgets.md").read_text("utf-8")
    rows = re.findall(r"^\| \d \| .* \| (\d+) \| (\d+) \| (\d+) \|$", text, re.MULTILINE)
    assert [tuple(map(int, row)) for row in rows] == [
        (tokens.used, tokens.reserved, tokens.remaining) for tokens in seen
    ]
