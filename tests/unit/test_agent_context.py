"""What an agent's model is told before the conversation, and what the app says about it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from retinue import Agent, Identity, RuntimeConfig, agent_driver
from retinue.agent_context import MAX_CONTEXT_BYTES, MAX_DESCRIPTION, MAX_SKILLS_BYTES, AgentContext
from retinue.agent_defaults import AgentDefaults, Limits
from retinue.agent_driver import completed
from retinue.errors import Unsupported, ValidationFailed
from tests.conftest import MakeLocalRuntime
from tests.support import FunctionModel, answering, code_of, soon, trivial, why


def write(path: Path, text: str | bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())


def skill(folder: Path, name: str, front: str) -> None:
    write(folder / name / "SKILL.md", f"---\n{front}\n---\nTHE BODY of {name}\n")


def read(root: Path, **options: Any) -> str:
    return AgentContext(project_root=str(root), **options).read()


# --- context files ----------------------------------------------------------------------------------------


def test_instructions_come_first_then_the_files_of_the_project(tmp_path: Path) -> None:
    write(tmp_path / "AGENTS.md", "Use tabs.\n")
    write(tmp_path / "CONTEXT.md", "We sell ships.\n")
    write(tmp_path / "notes" / "today.txt", "It rains.")
    write(tmp_path / "README.md", "not for agents")
    text = read(tmp_path, instructions="Be brief.", context_files=[".", "notes/today.txt"])
    assert text == (
        "Be brief.\n\n# AGENTS.md\n\nUse tabs.\n\n# CONTEXT.md\n\nWe sell ships.\n\n"
        "# notes/today.txt\n\nIt rains."
    )
    assert read(tmp_path, instructions="Be brief.") == "Be brief."
    assert read(tmp_path / "notes", context_files=["."]) == ""  # a folder without any


def test_all_files_share_one_limit_and_are_cut_between_characters(tmp_path: Path) -> None:
    write(tmp_path / "big.md", "é" * MAX_CONTEXT_BYTES)
    write(tmp_path / "more.md", "more")
    write(tmp_path / "odd.md", "x" + "é" * MAX_CONTEXT_BYTES)
    big = read(tmp_path, context_files=["big.md", "more.md"])
    assert big.startswith("# big.md\n\n" + "é" * 10)
    assert big.count("é") == MAX_CONTEXT_BYTES // 2
    assert f"[cut: {MAX_CONTEXT_BYTES} of {2 * MAX_CONTEXT_BYTES} bytes]" in big
    assert big.endswith("# more.md\n\n\n[cut: 0 of 4 bytes]")
    odd = read(tmp_path, context_files=["odd.md"])
    assert odd.count("é") == MAX_CONTEXT_BYTES // 2 - 1
    assert odd.endswith(f"[cut: {MAX_CONTEXT_BYTES - 1} of {2 * MAX_CONTEXT_BYTES + 1} bytes]")


def test_a_file_that_was_named_must_be_readable(tmp_path: Path) -> None:
    write(tmp_path / "binary.md", b"\xff\xfe\x00")
    for given, said in (("nothing.md", "is not there"), ("binary.md", "is not UTF-8")):
        with pytest.raises(ValidationFailed, match=said):
            read(tmp_path, context_files=[given])
    with pytest.raises(ValidationFailed, match="project_root"):
        AgentContext(context_files=["relative.md"]).read()
    write(tmp_path / "absolute.md", "fine")
    given = str(tmp_path / "absolute.md")
    assert AgentContext(context_files=[given]).read().endswith("fine")


# --- skills -----------------------------------------------------------------------------------------------


def test_skills_are_listed_by_name_and_description_without_their_bodies(tmp_path: Path) -> None:
    skills = tmp_path / "skills"
    skill(skills, "sailing", "name: sail\ndescription: >\n  How to\n  sail.\nlicense: MIT")
    skill(skills, "rowing", "name: row\ndescription: Use it when: there is no wind")  # no YAML
    skill(skills, "mooring", "[]")
    write(skills / "broken" / "SKILL.md", "no front matter\nTHE BODY\n")
    write(skills / "open" / "SKILL.md", "---\nname: never closed\n")
    write(tmp_path / "one" / "SKILL.md", "---\nname: one\n---\nTHE BODY")
    text = read(tmp_path, skill_dirs=["skills", "one", "skills"])
    assert text == (
        "# Skills\n\nEach of them is explained in its file.\n\n"
        "- broken (skills/broken/SKILL.md)\n"
        "- mooring (skills/mooring/SKILL.md)\n"
        "- open (skills/open/SKILL.md)\n"
        "- row (skills/rowing/SKILL.md): Use it when: there is no wind\n"
        "- sail (skills/sailing/SKILL.md): How to sail.\n"
        "- one (one/SKILL.md)"
    )
    (tmp_path / "empty").mkdir()
    assert read(tmp_path, skill_dirs=["empty"]) == ""
    with pytest.raises(ValidationFailed, match=r"folder of skills .*nothing is not there"):
        read(tmp_path, skill_dirs=["nothing"])


def test_a_long_list_of_skills_is_cut_and_says_so(tmp_path: Path) -> None:
    for number in range(40):
        skill(tmp_path, f"s{number:02}", f"description: {'x' * 2 * MAX_DESCRIPTION}")
    text = read(tmp_path, skill_dirs=["."])
    assert len(text.encode()) < MAX_SKILLS_BYTES + 200
    assert text.endswith("\n- [cut: there are more skills]")
    assert f"- s00 (s00/SKILL.md): {'x' * MAX_DESCRIPTION}\n" in text


# --- what the app says ------------------------------------------------------------------------------------


def test_c41_limits_are_whole_numbers_from_zero_on() -> None:
    assert Limits(tool_roundtrips=0, max_child_depth=3) == Limits(tool_roundtrips=0, max_child_depth=3)
    assert Limits().empty
    assert not Limits(tool_roundtrips=3).empty
    for wrong in (-1, 1.5, float("inf"), True, "3"):
        for name in ("tool_roundtrips", "max_child_depth"):
            with pytest.raises(ValidationFailed) as refused:
                Limits(**{name: wrong})  # type: ignore[arg-type]
            assert refused.value.path == f"config.limits.{name}"


def test_defaults_that_mean_nothing_here_are_refused_by_name() -> None:
    for name in ("workspace", "filesystem", "file_memory", "search_past_sessions"):
        assert AgentDefaults(**{name: False}) != AgentDefaults()  # type: ignore[arg-type]
        for value in (True, {"path": ".", "mode": "read"}):
            with pytest.raises(Unsupported, match=f"config.defaults.{name} cannot be") as refused:
                AgentDefaults(**{name: value})  # type: ignore[arg-type]
            assert refused.value.operation == f"defaults.{name}"
    for name, wrong in (
        ("skill_dirs", True),
        ("skill_dirs", "skills"),
        ("skill_dirs", [""]),
        ("skill_dirs", [3]),
        ("context_files", "AGENTS.md"),
        ("context_files", ["AGENTS.md"]),
        ("subagents", 1),
    ):
        with pytest.raises(ValidationFailed) as invalid:
            AgentDefaults(**{name: wrong})  # type: ignore[arg-type]
        assert invalid.value.path == f"config.defaults.{name}"
    assert AgentDefaults(skill_dirs=["a", "b", "a"]).skill_dirs == ("a", "b")
    assert AgentDefaults().empty
    assert not AgentDefaults(skill_dirs=False).empty


@pytest.mark.parametrize(
    ("member", "wrong"),
    [
        ("skill_dirs", True),
        ("skill_dirs", "skills"),
        ("context_files", "AGENTS.md"),
        ("context_files", [None]),
        ("subagents", "helper"),
        ("subagents", [None]),
        ("max_child_depth", -1),
        ("max_tool_roundtrips", -1),
        ("max_tool_roundtrips", True),
        ("on_close", "close"),
    ],
)
def test_an_agent_refuses_what_it_cannot_be(member: str, wrong: Any) -> None:
    with pytest.raises(ValidationFailed) as refused:
        Agent(name="a", model=FunctionModel(), **{member: wrong})
    assert refused.value.path.startswith(f"agent.a.{member}")


def test_c95_what_an_agent_says_beats_the_defaults_false_too() -> None:
    defaults = AgentDefaults(skill_dirs=["skills"], context_files=True, subagents=True)
    silent = completed(Agent(name="a", model=FunctionModel()), defaults)
    assert (silent.skill_dirs, silent.context_files, silent.subagents) == (("skills",), True, True)
    explicit = Agent(
        name="a", model=FunctionModel(), skill_dirs=False, context_files=["x.md"], subagents=False
    )
    assert completed(explicit, defaults) == explicit
    empty = Agent(name="a", model=FunctionModel(), skill_dirs=[], context_files=[], subagents=[])
    assert completed(empty, defaults) == empty


def test_the_project_root_is_absolute_and_there_where_it_matters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = FunctionModel()
    plain = RuntimeConfig(driver=agent_driver(Agent(name="a", model=model)))
    assert plain.project_root is None  # the same app from whatever folder
    assert RuntimeConfig(driver=trivial, project_root="/srv/app").project_root == "/srv/app"
    for driver in (
        agent_driver(Agent(name="a", model=model, context_files=True)),
        agent_driver(lambda: Agent(name="a", model=model), name="a"),
    ):
        assert RuntimeConfig(driver=driver).project_root == str(tmp_path)
    for wrong in ("relative", 3):
        with pytest.raises(ValidationFailed) as refused:
            RuntimeConfig(driver=trivial, project_root=wrong)  # type: ignore[arg-type]
        assert refused.value.path == "config.project_root"


async def test_an_agents_own_files_are_read_once_for_each_run_where_it_runs(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str, tmp_path: Path
) -> None:
    model = answering("ok")
    agent = Agent(name="a", model=model, instructions="Be brief.", context_files=["facts.md"])
    runtime = local_runtime(RuntimeConfig(driver=agent_driver(agent), project_root=str(tmp_path)))
    result = await soon(runtime.run("x", identity=identity, session_id=session_id))
    assert (result.status, code_of(result)) == ("failed", "invalid_harness")
    assert "facts.md is not there" in why(result)
    assert model.requests == []
    for fact in ("Ships float.", "Stones do not."):
        write(tmp_path / "facts.md", fact)
        result = await soon(runtime.run("x", identity=identity, session_id=session_id))
        assert result.status == "completed"
        assert model.requests[-1].messages[0].text == f"Be brief.\n\n# facts.md\n\n{fact}"
