"""Streams and public messages where the session, its delegates and the reader are in different processes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec
import pytest

from retinue import Identity, RunHandle, Usage, UsagePiece
from retinue.events import (
    Event,
    MessageCompleted,
    MessageDelta,
    MessageFailed,
    MessageStarted,
    PublicMessage,
    TextDelta,
)
from retinue.testing import ScriptedModel, stream
from tests.ray.conftest import MakeRuntime
from tests.ray.stream_drivers import Speaker

TIMEOUT = 60
USAGE = Usage(input_tokens=3, output_tokens=4)


def messages(events: Sequence[Event]) -> list[tuple[str, str, str]]:
    """Participant, phase and text of each message, its start and its deltas having been seen."""
    started: dict[str, str] = {}
    found: list[tuple[str, str, str]] = []
    for event in events:
        match event.payload:
            case MessageStarted(id):
                started[id] = ""
            case MessageDelta(id, text):
                started[id] += text
            case MessageCompleted(message, None):
                assert started.pop(message.id) == message.text
                found.append((event.participant, message.phase, message.text))
    assert started == {}
    return found


def text(events: Sequence[Event]) -> str:
    return "".join(event.payload.text for event in events if isinstance(event.payload, TextDelta))


def events_of(handle: RunHandle) -> list[Event]:
    return list(handle.iter_events())


@pytest.mark.parametrize("child_text", [False, True])
def test_c142_commentary_then_final_of_a_root_and_of_a_delegate(
    make_runtime: MakeRuntime, identity: Identity, child_text: bool
) -> None:
    script = [stream("Let ", "me see.", phase="commentary"), stream("It is ", "42.", phase="final")]
    model = ScriptedModel({"": script, "helper": script})
    runtime = make_runtime(driver=Speaker(model), child_text=child_text)
    expected = [("commentary", "Let me see."), ("final", "It is 42.")]
    for question, speaker in (("direct", ""), ("delegate", "helper")):
        handle = runtime.start(question, identity=identity, session_id="s")
        result = handle.wait(TIMEOUT)
        assert (result.status, result.text) == ("completed", "It is 42."), result.reason
        events = events_of(handle)
        heard = not speaker or child_text
        assert messages(events) == ([(speaker, *message) for message in expected] if heard else [])
        assert text(events) == ("Let me see.It is 42." if heard else "")
        assert len(model.requests_of(speaker)) == 2
        assert all(request.streamed for request in model.requests_of(speaker))


def test_c144_a_large_message_of_a_session_elsewhere_is_an_artifact(
    make_runtime: MakeRuntime, identity: Identity
) -> None:
    large = "é" * 40_000
    runtime = make_runtime(driver=Speaker(ScriptedModel([stream(large)])))
    handle = runtime.start("go", identity=identity, session_id="s")
    assert handle.wait(TIMEOUT).status == "completed"
    events = events_of(handle)
    (completed,) = [event.payload for event in events if isinstance(event.payload, MessageCompleted)]
    assert (completed.message.phase, completed.message.text) == ("final", "")
    assert completed.artifact_id is not None
    kept = asyncio.run(runtime.get_artifact(identity, "s", completed.artifact_id))
    assert kept is not None
    assert msgspec.json.decode(kept.data, type=PublicMessage) == PublicMessage(
        completed.message.id, "final", large
    )
    assert text(events) == large


def test_c115_a_broken_stream_of_a_delegate_fails_it_and_its_usage_counts(
    make_runtime: MakeRuntime, identity: Identity
) -> None:
    broken = stream("Hel", UsagePiece(USAGE), UsagePiece(USAGE), usage=None)
    unfinished = stream("Hel", usage=None, finish=False)
    runtime = make_runtime(
        driver=Speaker(ScriptedModel([broken, unfinished])),
        child_text=True,
        estimate_input_tokens=five,
    )
    for hint, charged in (("twice", 7), ("without a finish", 25)):
        handle = runtime.start("delegate", identity=identity, session_id="s")
        result = handle.wait(TIMEOUT)
        assert (result.status, result.reason and result.reason.code) == ("failed", "model_failed")
        assert hint in str(result.reason)
        assert result.budget is not None
        assert (result.budget.tokens.used, result.budget.tokens.reserved) == (charged, 0)
        failed = [event.payload for event in events_of(handle) if isinstance(event.payload, MessageFailed)]
        assert [event.reason for event in failed] == ["interrupted"]


def five(request: object, client: object) -> int:
    return 5
