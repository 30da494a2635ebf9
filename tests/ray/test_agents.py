"""Owned agents, abilities, subagents and steers where the session lives in another process."""

from __future__ import annotations

import os
import time
from pathlib import Path

from retinue import AgentDefaults, Grants, Identity, agent_driver
from retinue.messages import Message
from retinue.testing import ScriptedModel, tool_calls
from tests.ray.agent_parts import Log, MakeAgent, Notes
from tests.ray.conftest import MakeRuntime

TIMEOUT = 60


def texts(messages: list[Message], role: str) -> list[str]:
    return [message.text for message in messages if message.role == role]


def test_c91_c134_an_owned_agent_is_made_steered_and_closed_in_the_sessions_process(
    make_runtime: MakeRuntime, identity: Identity, tmp_path: Path
) -> None:
    (tmp_path / "AGENTS.md").write_text("We sell ships.")
    log = Log(f"{tmp_path}/log")
    model = ScriptedModel(
        {
            "": [
                tool_calls(("hold", {}), ("where", {})),
                tool_calls(("task", {"agent": "helper", "task": "where are you?"})),
                "draft",
                "followed up",
            ],
            "helper": [tool_calls(("where", {})), "I am elsewhere"],
        }
    )
    runtime = make_runtime(
        driver=agent_driver(MakeAgent(log, model), name="a", stream=True),
        abilities=[Notes(log)],
        defaults=AgentDefaults(context_files=True),
        project_root=str(tmp_path),
        grants=Grants(tool_ids=["hold", "where", "task"]),
    )
    handle = runtime.start("go", identity=identity, session_id="s")
    deadline = time.monotonic() + TIMEOUT
    while not log.has("holding"):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    handle.send_blocking("one more thing", mode="steer")
    handle.send_blocking("and then?", mode="follow_up")
    log.write("go")
    result = handle.wait(TIMEOUT)
    assert (result.status, result.text, result.cleanup_diagnostics) == ("completed", "followed up", ())

    home = log.lines()[0].split()[1]
    assert int(home) != os.getpid()
    assert log.lines() == [
        f"bind {home}",
        f"open {home}",
        "holding",
        "go",
        f"close {home}",
        f"dispose {home}",
    ]
    first, second, *_, last = model.requests_of("")
    assert texts(list(first.messages), "system") == ["Say where you are.", "# AGENTS.md\n\nWe sell ships."]
    assert texts(list(second.messages), "tool") == ["held", home]
    assert texts(list(second.messages), "user") == ["go", "one more thing"]
    assert texts(list(last.messages), "tool")[-1] == "I am elsewhere"
    assert texts(list(last.messages), "user")[-1] == "and then?"
    # The delegate ran in a third process, and had its own tool there, but not what belongs to the run.
    asked = model.requests_of("helper")
    assert texts(list(asked[0].messages), "system") == []
    assert texts(list(asked[1].messages), "tool")[0] not in (home, str(os.getpid()))
