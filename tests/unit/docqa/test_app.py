"""The team for a folder: names, the granted tool, and a whole run of it in this process."""

from __future__ import annotations

import pickle
import re
from pathlib import Path
from typing import Any

import pytest

from retinue import Budgets, Grants, Identity, Runtime, team_driver
from retinue.docqa.app import READ_PART, PartReader, PartUnreadable, build_team, estimate_input_tokens
from retinue.docqa.documents import Part, plan_parts, read_folder
from retinue.errors import InputError
from retinue.messages import user
from retinue.models import ModelRequest
from retinue.providers.extractive import ExtractiveModel
from retinue.providers.openai_chat import OpenAIChatModel
from retinue.results import RunResult
from retinue.teams import Team
from retinue.tokens import estimate_messages
from retinue.tools import Tool

MODEL = ExtractiveModel()
YOU = Identity(tenant_id="demo", user_id="you")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "leases.md").write_text(
        "# Leases\n\nA lease keeps two writers apart. It lasts 15 s.\n\n"
        "Its holder renews the lease every 5 s.\n"
    )
    (tmp_path / "budgets.md").write_text(
        "# Budgets\n\nEvery call is admitted by the ledger of its tree.\nA refused call is never made.\n"
    )
    (tmp_path / "harbour.md").write_text("# Harbour\n\nThe harbour opens at nine.\n")
    return tmp_path


def team_of(folder: Path, delegates: int = 3) -> Team:
    return build_team(plan_parts(read_folder(folder).documents, delegates), MODEL)


def reader(folder: Path, *names: str) -> Tool:
    parts = [part for group in plan_parts(read_folder(folder).documents, 9) for part in group]
    return Tool(PartReader(tuple(part for part in parts if part.document in names)), name=READ_PART)


async def run(
    folder: Path, question: str, *, session: str = "s", store: Runtime | None = None, **limits: Any
) -> RunResult:
    runtime = store or runtime_for(folder, **limits)
    return await runtime.run(question, identity=YOU, session_id=session)


def runtime_for(folder: Path, **limits: Any) -> Runtime:
    return runtime_with(folder, Budgets(**limits))


def runtime_with(folder: Path, limits: Budgets) -> Runtime:
    return Runtime(
        driver=team_driver(team_of(folder)),
        grants=Grants(tool_ids=[READ_PART]),
        budgets=limits,
        estimate_input_tokens=estimate_input_tokens,
        backend="inprocess",
    )


# --- the team ---------------------------------------------------------------------------------------------


def test_members_are_named_by_their_parts(folder: Path) -> None:
    (folder / "sub").mkdir()
    (folder / "sub" / "Größe & mehr.md").write_text("Text.\n")
    (folder / "_x.md").write_text("Text.\n")
    team = team_of(folder, 9)
    assert [member.name for member in team.members] == [
        "x.md:1-1",
        "budgets.md:1-4",
        "harbour.md:1-3",
        "leases.md:1-5",
        "sub/Gr-e-mehr.md:1-1",
    ]
    assert (team.mode, team.parallel, team.on_member_error) == ("coordinate", True, "continue")
    (several,) = team_of(folder, 1).members
    assert several.name == "x.md-and-4-more"


def test_names_that_become_the_same_stay_apart(tmp_path: Path) -> None:
    parts = [(Part("/d", name, 1, 2, 9, "x"),) for name in ("ä.md", "ö.md", "\u65e5", "\u672c")]
    names = [member.name for member in build_team(parts, MODEL).members]
    assert len(set(names)) == 4
    assert all(re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._:/-]*", name) for name in names)


def test_a_member_can_read_its_own_parts_only(folder: Path) -> None:
    for member in team_of(folder).members:
        (read,) = member.tools
        assert read.name == READ_PART
        own = re.findall(r"^part: (.*)$", member.description, re.MULTILINE)
        assert own == re.findall(r"^part: (.*)$", member.instructions, re.MULTILINE)
        assert all(read(part).startswith("file: ") for part in own)
        with pytest.raises(PartUnreadable, match="none of your parts"):
            read("other.md:1-2")


def test_many_parts_are_not_repeated_in_the_plan(tmp_path: Path) -> None:
    for number in range(40):
        (tmp_path / f"{number:02}.md").write_text("Text.\n")
    (member,) = team_of(tmp_path, 1).members
    assert "part:" not in member.description
    assert member.instructions.count("\npart: ") == 40


def test_a_team_needs_parts() -> None:
    with pytest.raises(InputError, match="at least one member"):
        build_team([], MODEL)


# --- the tool ---------------------------------------------------------------------------------------------


def test_a_part_is_exactly_its_lines_with_their_numbers(folder: Path) -> None:
    part = Part(str(folder), "budgets.md", 3, 4, 1, read_folder(folder).documents[0].digest)
    assert PartReader((part,))("budgets.md:3-4") == (
        "file: budgets.md\n3| Every call is admitted by the ledger of its tree.\n"
        "4| A refused call is never made."
    )


@pytest.mark.parametrize("written", [" leases.md:1-5 ", "`leases.md:1-5`", '"leases.md:1-5"'])
def test_a_part_may_be_written_with_quotes(folder: Path, written: str) -> None:
    assert reader(folder, "leases.md")(written).startswith("file: leases.md\n1| # Leases")


@pytest.mark.parametrize(
    "wanted", ["../secret.md:1-1", "/etc/passwd", "leases.md", "leases.md:1-4", "", "budgets.md:1-4"]
)
def test_nothing_else_can_be_read(folder: Path, wanted: str) -> None:
    (folder.parent / "secret.md").write_text("secret\n")
    with pytest.raises(PartUnreadable, match=r"they are: leases\.md:1-5"):
        reader(folder, "leases.md")(wanted)


def test_a_changed_file_is_reported_and_not_read(folder: Path) -> None:
    read = reader(folder, "leases.md")
    (folder / "leases.md").write_text("Something else.\n")
    with pytest.raises(PartUnreadable, match=r"leases\.md was changed"):
        read("leases.md:1-5")


def test_a_file_that_is_gone_is_reported(folder: Path) -> None:
    read = reader(folder, "leases.md")
    (folder / "leases.md").unlink()
    with pytest.raises(PartUnreadable, match=r"leases\.md is gone$"):
        read("leases.md:1-5")


def test_a_process_without_the_folder_says_so() -> None:
    read = PartReader((Part("/no/such/folder", "a.md", 1, 2, 9, "x"),))
    with pytest.raises(PartUnreadable, match="this process has no such folder"):
        read("a.md:1-2")


def test_a_file_that_became_a_link_out_is_not_followed(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    read = reader(folder, "leases.md")
    outside = tmp_path_factory.mktemp("outside") / "leases.md"
    (folder / "leases.md").rename(outside)
    (folder / "leases.md").symlink_to(outside)
    with pytest.raises(PartUnreadable, match="leads out of the folder"):
        read("leases.md:1-5")


def test_the_tool_travels_to_other_processes(folder: Path) -> None:
    again = pickle.loads(pickle.dumps(reader(folder, "leases.md")))
    assert again("leases.md:1-5").startswith("file: leases.md")
    assert again.parameters["required"] == ["part"]


# --- whole runs -------------------------------------------------------------------------------------------


async def test_a_question_is_answered_with_sources(folder: Path) -> None:
    result = await run(
        folder, "How long does a lease last?", max_tokens=5000, max_model_calls=8, max_tool_calls=3
    )
    assert result.status == "completed", result.reason
    assert "It lasts 15 s. [leases.md:3]" in result.text
    assert "\n- leases.md:3 (Leases)" in result.text
    assert "harbour" not in result.text
    assert result.budget is not None
    assert (result.budget.model_calls.used, result.budget.tool_calls.used) == (8, 3)
    assert result.budget.tokens.used == result.usage.total_tokens > 0
    assert result.budget.unknown_usage_calls == 0


async def test_the_second_question_refers_to_the_first(folder: Path) -> None:
    with runtime_for(folder) as runtime:
        await run(folder, "How long does a lease last?", store=runtime)
        second = await run(folder, "And how often is it renewed?", store=runtime)
        alone = await run(folder, "And how often is it renewed?", store=runtime, session="other")
    assert second.text.startswith("Its holder renews the lease every 5 s. [leases.md:5]")
    assert second.usage.total_tokens > alone.usage.total_tokens


@pytest.mark.parametrize("limits", [Budgets(max_tokens=50), Budgets(max_model_calls=0)])
async def test_no_budget_at_all_stops_with_nothing(folder: Path, limits: Budgets) -> None:
    result = await run(folder, "How long does a lease last?", store=runtime_with(folder, limits))
    assert result.status == "stopped"
    assert result.reason is not None
    assert result.reason.code == "budget_exhausted"
    assert result.text == "Nothing was found before the budget was exhausted."


async def test_a_small_budget_stops_with_what_was_found(folder: Path) -> None:
    whole = await run(folder, "How long does a lease last?")
    assert whole.budget is not None
    calls = whole.budget.model_calls.used
    result = await run(folder, "How long does a lease last?", max_model_calls=calls - 1)
    assert result.status == "stopped"
    assert result.reason is not None
    assert result.reason.code == "budget_exhausted"
    assert "It lasts 15 s. [leases.md:3]" in result.text
    assert result.budget is not None
    assert result.budget.model_calls.used == calls - 1


@pytest.mark.parametrize("tokens", range(200, 3200, 200))
async def test_no_token_budget_is_ever_exceeded(folder: Path, tokens: int) -> None:
    result = await run(folder, "How long does a lease last?", max_tokens=tokens)
    assert result.status in ("completed", "stopped"), result.reason
    assert result.budget is not None
    assert result.budget.tokens.used <= tokens
    assert result.budget.tokens.reserved == 0


async def test_without_tool_calls_the_answer_says_what_is_missing(folder: Path) -> None:
    result = await run(folder, "How long does a lease last?", max_tool_calls=0)
    assert result.status == "completed"
    assert "leases.md:1-5 ([denied]" in result.text


async def test_a_file_that_vanished_is_named_in_the_answer(folder: Path) -> None:
    runtime = runtime_for(folder)
    (folder / "harbour.md").unlink()
    with runtime:
        result = await run(folder, "How long does a lease last?", store=runtime)
    assert result.status == "completed"
    assert "It lasts 15 s. [leases.md:3]" in result.text
    assert "harbour.md:1-3 (PartUnreadable: harbour.md is gone)" in result.text


def test_the_estimate_is_exact_for_the_embedded_model_and_the_usual_one_for_others() -> None:
    request = ModelRequest(messages=[user("| a | table | of | many | marks |")])
    assert estimate_input_tokens(request, MODEL) == MODEL.count_tokens(request)
    other = OpenAIChatModel("gpt-4")
    assert estimate_input_tokens(request, other) == estimate_messages(request.messages, (), "gpt-4")
