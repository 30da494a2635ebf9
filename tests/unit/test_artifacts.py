"""Artifacts that drivers and tools keep beside a session."""

from __future__ import annotations

from typing import Any

import pytest

from retinue import (
    Agent,
    DriverOutput,
    ExecutionServices,
    Grants,
    Identity,
    RunRequest,
    ToolContext,
    agent_driver,
    tool,
)
from retinue.artifacts import MAX_ARTIFACT_BYTES, check_artifact
from retinue.errors import InputError
from retinue.store import StoredArtifact
from retinue.testing import ScriptedModel, reply, tool_calls
from tests.conftest import MakeLocalRuntime
from tests.support import FunctionDriver, code_of, driver, soon


@driver
async def keeps_and_reads(request: RunRequest, services: ExecutionServices) -> DriverOutput:
    """Keeps its input, and reads whatever the input names."""
    if str(request.input).startswith("artifact_"):
        found = await services.get_artifact(str(request.input))
        return DriverOutput(text=found.data.decode() if found else "nothing")
    reference = await services.put_artifact(str(request.input))
    return DriverOutput(text=reference.id, artifacts=[reference])


async def test_c111_artifacts_are_read_with_the_whole_address_only(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    runtime = local_runtime(driver=keeps_and_reads)
    kept = await soon(runtime.run("secret", identity=identity, session_id=session_id))
    (reference,) = kept.artifacts
    assert reference.mime_type == "text/plain"
    owners = await runtime.get_artifact(identity, session_id, reference.id)
    assert owners == StoredArtifact(artifact_id=reference.id, mime_type="text/plain", data=b"secret")
    others = [
        (Identity(tenant_id="other", user_id=identity.user_id), session_id),
        (Identity(tenant_id=identity.tenant_id, user_id="other"), session_id),
        (identity, f"{session_id}-2"),
    ]
    for who, where in others:
        assert await runtime.get_artifact(who, where, reference.id) is None
        # A run of theirs cannot read it either.
        result = await soon(runtime.run(reference.id, identity=who, session_id=where))
        assert result.text == "nothing"
    again = await soon(runtime.run(reference.id, identity=identity, session_id=session_id))
    assert again.text == "secret"


async def test_an_artifact_is_kept_at_once_whatever_becomes_of_the_run(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    @driver
    async def fails(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        await services.put_artifact(b"\x00\xff", mime_type="image/png", artifact_id="picture")
        assert await services.get_artifact("picture") is not None
        raise OSError("afterwards")

    runtime = local_runtime(driver=fails)
    assert (await soon(runtime.run("x", identity=identity, session_id=session_id))).status == "failed"
    found = await runtime.get_artifact(identity, session_id, "picture")
    assert found == StoredArtifact(artifact_id="picture", mime_type="image/png", data=b"\x00\xff")


async def test_an_id_is_used_once_and_a_repeat_is_harmless(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    @driver
    async def repeats(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        first = await services.put_artifact("one", artifact_id="report")
        assert await services.put_artifact("one", artifact_id="report") == first
        await services.put_artifact(str(request.input), artifact_id="report")
        return DriverOutput(text="kept")

    runtime = local_runtime(driver=repeats)
    refused = await soon(runtime.run("two", identity=identity, session_id=session_id))
    assert code_of(refused) == "invalid_input"
    found = await runtime.get_artifact(identity, session_id, "report")
    assert found is not None
    assert found.data == b"one"
    # Another session has ids of its own.
    assert (await soon(runtime.run("one", identity=identity, session_id=f"{session_id}-2"))).text == "kept"


async def test_a_tool_keeps_artifacts_and_reads_those_of_earlier_runs(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    @tool
    async def remember(text: str, ctx: ToolContext) -> str:
        return (await ctx.services.put_artifact(text, artifact_id="memory")).id

    @tool
    async def recall(ctx: ToolContext) -> str:
        found = await ctx.services.get_artifact("memory")
        return found.data.decode() if found else "nothing"

    model = ScriptedModel(
        [
            tool_calls(("remember", {"text": "42"})),
            reply("kept"),
            tool_calls(("recall", {})),
            reply("read"),
        ]
    )
    runtime = local_runtime(
        driver=agent_driver(Agent(name="a", model=model, tools=[remember, recall])),
        grants=Grants(tool_ids=["remember", "recall"]),
    )
    for _ in range(2):
        result = await soon(runtime.run("go", identity=identity, session_id=session_id))
        assert result.status == "completed"
    history = (await runtime.sessions.latest(identity, session_id)).history
    assert [message.text for message in history if message.role == "tool"] == ["memory", "42"]


async def _keep_in_a_delegate(request: RunRequest, services: ExecutionServices) -> DriverOutput:
    await services.put_artifact("from the delegate", artifact_id="note")
    found = await services.get_artifact("note")
    assert found is not None
    return DriverOutput(text=found.data.decode())


keeps_in_a_delegate = FunctionDriver(_keep_in_a_delegate)


async def test_a_delegate_keeps_artifacts_in_the_session_of_its_run(
    local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    @driver
    async def delegates(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        child = await services.delegate(keeps_in_a_delegate, "go")
        return DriverOutput(text=(await child.result()).text)

    runtime = local_runtime(driver=delegates)
    assert (
        await soon(runtime.run("x", identity=identity, session_id=session_id))
    ).text == "from the delegate"
    found = await runtime.get_artifact(identity, session_id, "note")
    assert found is not None
    assert found.data == b"from the delegate"


@pytest.mark.parametrize(
    ("data", "mime_type", "artifact_id", "field"),
    [
        (None, "text/plain", None, "data"),
        (bytearray(b"x"), "text/plain", None, "data"),
        ({"a": 1}, "application/json", None, "data"),
        ("\ud800", "text/plain", None, "data"),
        ("x", "", None, "mime_type"),
        ("x", None, None, "mime_type"),
        ("x", "text/plain", "", "artifact_id"),
        ("x", "text/plain", 5, "artifact_id"),
        ("x", "text/plain", "\ud800", "artifact_id"),
        (bytes(MAX_ARTIFACT_BYTES + 1), "text/plain", None, "data"),
        ("x" * (MAX_ARTIFACT_BYTES + 1), "text/plain", None, "data"),
        ("é" * (MAX_ARTIFACT_BYTES // 2 + 1), "text/plain", None, "data"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_cannot_be_kept_is_refused(data: Any, mime_type: Any, artifact_id: Any, field: str) -> None:
    with pytest.raises(InputError) as refused:
        check_artifact(data, mime_type, artifact_id)
    assert (refused.value.code, refused.value.field) == ("invalid_input", field)


def test_text_is_kept_as_utf8_and_ids_are_made_up() -> None:
    first, second = check_artifact("é", "text/plain", None), check_artifact("é", "text/plain", None)
    assert first.data == "é".encode()
    assert first.artifact_id != second.artifact_id
    assert check_artifact(bytes(MAX_ARTIFACT_BYTES), "x/y", "mine").artifact_id == "mine"
