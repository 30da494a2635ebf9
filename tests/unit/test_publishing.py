"""Public messages: what of an answer becomes an event, under which phase, and how it ends."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import msgspec
import pytest

from retinue import (
    DriverOutput,
    ExecutionServices,
    FinishPiece,
    ModelResponse,
    PublicItem,
    RunRequest,
    TextPiece,
    ToolCall,
    ToolCallPiece,
)
from retinue.deltas import GATHER_BYTES
from retinue.errors import InputError, ModelFailed
from retinue.events import (
    MAX_DELTA,
    MAX_EVENT_BYTES,
    MessageCompleted,
    MessageDelta,
    MessageFailed,
    MessageStarted,
    Payload,
    PublicMessage,
    TextDelta,
)
from retinue.messages import user
from retinue.publishing import MAX_INLINE_BYTES
from retinue.testing import ScriptedModel, call_pieces, reply, stream, tool_calls
from tests.conftest import MakeLocalRuntime
from tests.support import all_events, answering, soon
from tests.support import driver as as_driver
from tests.unit.fake_root import FakeRoot, root
from tests.unit.stream_models import HeldStream, read, streaming

QUESTION = [user("x")]
MESSAGES = (MessageStarted, MessageDelta, MessageCompleted, MessageFailed)


def phases(world: FakeRoot) -> list[tuple[str, str]]:
    """Phase and text of the messages that were completed."""
    return [(event.message.phase, event.message.text) for event in world.of(MessageCompleted)]


def story(events: list[Payload]) -> dict[str, list[str]]:
    """What happened to each message, by id: its events in order, deltas joined."""
    told: dict[str, list[str]] = {}
    for event in events:
        match event:
            case MessageStarted(id, phase):
                assert id not in told
                told[id] = [f"started {phase}"]
            case MessageDelta(id, text) if told[id][-1].startswith("delta "):
                told[id][-1] += text
            case MessageDelta(id, text):
                told[id].append(f"delta {text}")
            case MessageCompleted(message):
                told[message.id].append(f"completed {message.phase} {message.text}")
            case MessageFailed(id, reason):
                told[id].append(f"failed {reason}")
    return told


# --- answers that come whole ------------------------------------------------------------------------------


CALL = (ToolCall("c", "f"),)


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        (ModelResponse(text="hi"), [("final", "hi")]),
        (ModelResponse(text="hi", finish_reason="length"), [("final", "hi")]),
        (ModelResponse(text="hi", tool_calls=CALL, finish_reason="tool_calls"), [("commentary", "hi")]),
        (ModelResponse(text="hi", phase="commentary"), [("commentary", "hi")]),
        (ModelResponse(text="hi", tool_calls=CALL, phase="final"), [("final", "hi")]),
        (ModelResponse(text="", tool_calls=CALL), []),
        (ModelResponse(text="", extras={"reasoning": "secret", "signature": "s"}), []),
        (
            ModelResponse(
                text="ab",
                items=(
                    PublicItem(id="1", phase="reasoning_summary", text="why"),
                    PublicItem(id="2", phase="commentary", text="a"),
                    PublicItem(id="3", text=""),
                    PublicItem(id="4", text="b"),
                ),
            ),
            [("reasoning_summary", "why"), ("commentary", "a"), ("final", "b")],
        ),
    ],
)
async def test_what_an_answer_has_for_people_and_under_which_phase(
    response: ModelResponse, expected: list[tuple[str, str]]
) -> None:
    world = root()
    published = await world.services.publish_response(response)
    assert [(message.phase, message.text) for message in published] == expected
    assert phases(world) == expected
    told = list(story(world.events).values())
    assert told == [
        [f"started {phase}", f"delta {text}", f"completed {phase} {text}"] for phase, text in expected
    ]


async def test_ids_of_items_are_unique_in_the_run_whatever_the_provider_calls_them() -> None:
    world = root()
    items = tuple(PublicItem(id=name, text=name) for name in ("msg_0", "msg_0", "2:msg_0", "", ""))
    first = await world.services.publish_response(ModelResponse(items=items))
    second = await world.services.publish_response(ModelResponse(items=items[:1]))
    ids = [message.id for message in (*first, *second)]
    assert len(first) == 3
    assert len(set(ids)) == 4
    assert all(message.id.endswith(message.text) for message in first)
    assert list(story(world.events)) == ids


async def test_c142_commentary_then_final_over_two_calls(
    local_runtime: MakeLocalRuntime, identity: Any, session_id: str
) -> None:
    script = [reply("Let me see.", phase="commentary"), reply("It is 42.", phase="final")]
    model = ScriptedModel([*script, *script])

    @as_driver
    async def asks(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        texts = []
        for _ in range(2):
            if request.input == "streamed":
                async with services.stream_model(model, QUESTION, publish=True) as given:
                    async for _ in given:
                        pass
                texts.append(given.response.text)
            else:
                texts.append((await services.model(model, QUESTION, publish=True)).text)
        return DriverOutput(text=texts[-1])

    runtime = local_runtime(driver=asks)
    for mode in ("whole", "streamed"):
        handle = runtime.start(mode, identity=identity, session_id=session_id)
        result = await soon(handle.result())
        assert (result.status, result.text) == ("completed", "It is 42.")
        events = [event.payload for event in await all_events(handle)]
        started = {"whole": ("commentary", "final"), "streamed": ("pending", "pending")}[mode]
        assert list(story(events).values()) == [
            [f"started {started[0]}", "delta Let me see.", "completed commentary Let me see."],
            [f"started {started[1]}", "delta It is 42.", "completed final It is 42."],
        ]
        completed = [event.message.phase for event in events if isinstance(event, MessageCompleted)]
        assert completed == ["commentary", "final"]
    assert len(model.requests) == 4


async def test_a_call_is_published_only_when_that_is_asked_for() -> None:
    world = root()
    await world.services.model(answering("quiet"), QUESTION)
    await read(world, answering("quiet"))
    await read(world, ScriptedModel([stream("quiet")]))
    assert world.of(*MESSAGES, TextDelta) == []


# --- answers that are streamed ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        ([TextPiece("Hel"), TextPiece("lo")], [["started pending", "delta Hello", "completed final Hello"]]),
        (
            [TextPiece("Hel"), FinishPiece("tool_calls"), ],
            [["started pending", "delta Hel", "completed commentary Hel"]],
        ),
        (
            [TextPiece("Hel"), ToolCallPiece(index=0, id="c", name="f")],
            [["started pending", "delta Hel", "completed commentary Hel"]],
        ),
        (
            [TextPiece("Hel"), FinishPiece("tool_calls", phase="final")],
            [["started pending", "delta Hel", "completed final Hel"]],
        ),
        (
            [TextPiece("a", "1", "commentary"), TextPiece("b", "2", "final"), TextPiece("c", "3")],
            [
                ["started commentary", "delta a", "completed commentary a"],
                ["started final", "delta b", "completed final b"],
                ["started pending", "delta c", "completed final c"],
            ],
        ),
        (
            [TextPiece("a", "1"), TextPiece("b", "1", "commentary")],
            [["started pending", "delta ab", "completed commentary ab"]],
        ),
        (
            [TextPiece("why", phase="reasoning_summary"), TextPiece("so")],
            [
                ["started reasoning_summary", "delta why", "completed reasoning_summary why"],
                ["started pending", "delta so", "completed final so"],
            ],
        ),
        (
            [TextPiece("Hel", "1"), FinishPiece(items=(PublicItem(id="1", phase="final", text="Hello"),))],
            [["started pending", "delta Hello", "completed final Hello"]],
        ),
        ([TextPiece("")], []),
        ([ToolCallPiece(index=0, id="c", name="f")], []),
    ],
)  # fmt: skip
async def test_streamed_items_are_pending_until_their_phase_is_known(
    pieces: list[Any], expected: list[list[str]]
) -> None:
    world = root()
    async with world.services.stream_model(ScriptedModel([stream(*pieces)]), QUESTION, publish=True) as given:
        async for _ in given:
            pass
    assert list(story(world.events).values()) == expected
    assert [(message.id, message.phase) for message in given.messages] == [
        (event.message.id, event.message.phase) for event in world.of(MessageCompleted)
    ]
    # What was spent is known before a message is called complete.
    assert "message.completed" not in world.types[: world.types.index("model.complete")]


async def test_a_client_that_cannot_stream_has_its_messages_published_whole() -> None:
    world = root()
    whole = ScriptedModel([reply(items=[("commentary", "a"), (None, "b")])]).generate

    class Whole:
        provider_id, model_id, generate = "p", "m", staticmethod(whole)

    await read(world, Whole(), publish=True)
    assert [lines[0] for lines in story(world.events).values()] == ["started commentary", "started final"]
    assert phases(world) == [("commentary", "a"), ("final", "b")]


async def test_messages_grow_while_the_stream_runs_even_if_nobody_reads() -> None:
    world = root()
    model = HeldStream(TextPiece("Hel"), TextPiece("lo"), FinishPiece())
    async with world.services.stream_model(model, QUESTION, publish=True) as given:
        await model.asked.wait()
        assert list(story(world.events).values()) == [["started pending", "delta Hel"]]
        assert given.messages == []
        model.go.set()
        async for _ in given:
            pass
    (message,) = given.messages
    assert (message.phase, message.text) == ("final", "Hello")


async def test_rewriting_what_was_streamed_fails_the_call_and_its_messages() -> None:
    world = root()
    pieces = [TextPiece("Hel", "1"), FinishPiece(items=(PublicItem(id="1", text="Hullo"),))]
    with pytest.raises(ModelFailed, match="rewrote the item '1'"):
        await read(world, streaming(*pieces), publish=True)
    assert list(story(world.events).values()) == [["started pending", "delta Hel", "failed interrupted"]]


@pytest.mark.parametrize("end", ["broken", "left", "no finish", "malformed call"])
async def test_a_stream_that_ends_badly_fails_each_open_message_once(end: str) -> None:
    world = root()
    pieces: list[Any] = [TextPiece("a", "1", "commentary"), TextPiece("b", "2"), TextPiece("c", "2")]
    if end == "broken":
        pieces.append(RuntimeError("broke"))
    if end == "malformed call":
        pieces += [ToolCallPiece(index=0, id="c", name="f", arguments="{"), FinishPiece("tool_calls")]
    model = streaming(*pieces, FinishPiece())
    if end == "left":
        model = HeldStream(*pieces, FinishPiece(), before=3)
    if end == "no finish":
        model = streaming(*pieces)
    with contextlib.suppress(RuntimeError, ModelFailed):
        async with world.services.stream_model(model, QUESTION, publish=True) as given:
            for _ in range(3):
                await soon(anext(given))
            if end != "left":
                async for _ in given:
                    pass
                raise AssertionError
    assert [lines[-1] for lines in story(world.events).values()] == ["failed interrupted"] * 2
    assert len(world.of(MessageFailed)) == 2
    assert world.of(MessageCompleted) == []
    if end != "left":
        assert given.messages == []
    assert [lines[1] for lines in story(world.events).values()] == ["delta a", "delta bc"]


async def test_a_cancelled_run_fails_its_open_messages_as_cancelled() -> None:
    world = root()
    model = HeldStream(TextPiece("a", "1"), TextPiece("b", "2"), FinishPiece(), before=2)

    async def reads(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        async with services.stream_model(model, QUESTION, publish=True) as given:
            async for _ in given:
                pass
        raise AssertionError

    running = asyncio.ensure_future(world.run(reads))
    await model.asked.wait()
    world.execution.cancel()
    assert (await running).cancelled
    assert [lines[-1] for lines in story(world.events).values()] == ["failed cancelled"] * 2


async def test_a_cancelled_runs_handle_shows_the_failed_message(
    local_runtime: MakeLocalRuntime, identity: Any, session_id: str
) -> None:
    model = HeldStream(TextPiece("a"), FinishPiece())

    @as_driver
    async def reads(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        async for _ in services.stream_model(model, QUESTION, publish=True):
            pass
        raise AssertionError

    handle = local_runtime(driver=reads).start("x", identity=identity, session_id=session_id)
    await model.asked.wait()
    await handle.cancel()
    assert (await soon(handle.result())).status == "cancelled"
    events = [event.payload for event in await all_events(handle)]
    assert list(story(events).values()) == [["started pending", "delta a", "failed cancelled"]]


# --- large messages ---------------------------------------------------------------------------------------


async def test_c144_a_large_message_is_an_artifact(
    local_runtime: MakeLocalRuntime, identity: Any, session_id: str
) -> None:
    text = "é" * 40_000

    @as_driver
    async def speaks(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        if request.input == "streamed":
            await_all = services.stream_model(ScriptedModel([stream(text)]), QUESTION, publish=True)
            async with await_all as given:
                async for _ in given:
                    pass
            assert [message.text for message in given.messages] == [text]
        else:
            message = await services.publish_message(text)
            assert message.text == text
        return DriverOutput(text="ok")

    runtime = local_runtime(driver=speaks)
    for mode in ("whole", "streamed"):
        handle = runtime.start(mode, identity=identity, session_id=session_id)
        assert (await soon(handle.result())).status == "completed"
        events = [event.payload for event in await all_events(handle)]
        (completed,) = [event for event in events if isinstance(event, MessageCompleted)]
        assert (completed.message.phase, completed.message.text) == ("final", "")
        assert completed.artifact_id is not None
        kept = await runtime.get_artifact(identity, session_id, completed.artifact_id)
        assert kept is not None
        assert kept.mime_type == "application/json"
        assert msgspec.json.decode(kept.data, type=PublicMessage) == PublicMessage(
            completed.message.id, "final", text
        )
        deltas = [event for event in events if isinstance(event, MessageDelta)]
        assert "".join(delta.text for delta in deltas) == text
        assert max(len(delta.text) for delta in deltas) == MAX_DELTA


@pytest.mark.parametrize(("surplus", "kept"), [(0, 0), (1, 1)])
async def test_c144_the_limit_is_that_of_the_whole_event(surplus: int, kept: int) -> None:
    world = root()
    probe = MessageCompleted(PublicMessage("message_" + "0" * 32, "final", ""))
    room = MAX_INLINE_BYTES - len(msgspec.json.encode(probe))
    await world.services.publish_message("\x00" * (room // 6) + "x" * (room % 6 + surplus))
    assert len(world.artifacts) == kept
    (completed,) = world.of(MessageCompleted)
    assert (completed.artifact_id is not None, completed.message.text == "") == (bool(kept), bool(kept))
    assert all(len(msgspec.json.encode(event)) <= MAX_EVENT_BYTES for event in world.events)


@pytest.mark.parametrize("mode", ["message", "response", "stream"])
async def test_a_large_message_that_cannot_be_kept_fails(mode: str) -> None:
    world = root()
    text = "x" * (MAX_INLINE_BYTES + 1)

    async def refuse(data: Any, mime_type: str) -> Any:
        world.services.cancelled = mode == "response"
        raise InputError("the store is full")

    async def publish() -> None:
        if mode == "message":
            await world.services.publish_message(text)
        elif mode == "response":
            await world.services.publish_response(ModelResponse(text=text))
        else:
            await read(world, ScriptedModel([stream("short", text)]), publish=True)

    world.services.put_artifact = refuse  # type: ignore[assignment,method-assign]
    with pytest.raises(InputError, match="the store is full"):
        await publish()
    assert [event.reason for event in world.of(MessageFailed)] == [
        "cancelled" if mode == "response" else "interrupted"
    ]
    assert world.of(MessageCompleted) == []


# --- drivers and delegates --------------------------------------------------------------------------------


async def test_a_driver_publishes_messages_of_its_own() -> None:
    world = root()
    message = await world.services.publish_message("Working on it.", "commentary")
    assert (message.phase, message.text) == ("commentary", "Working on it.")
    assert (await world.services.publish_message("Done.")).phase == "final"
    assert phases(world) == [("commentary", "Working on it."), ("final", "Done.")]
    for text, phase, hint in (
        ("x", "pending", "commentary, final or reasoning_summary"),
        ("x", "loud", "commentary, final or reasoning_summary"),
        ("", "final", "needs some text"),
        ("\ud800", "final", "lone surrogate"),
        (5, "final", "must be a string"),
    ):
        with pytest.raises(InputError, match=hint):
            await world.services.publish_message(text, phase)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="lone surrogate"):
        await world.services.publish_response(ModelResponse(text="\ud800"))
    with pytest.raises(InputError, match="can be published"):
        await world.services.publish_response(
            ModelResponse(items=(PublicItem(id="1", phase="loud", text="x"),))  # type: ignore[arg-type]
        )
    with pytest.raises(InputError, match="not a ModelResponse but a str"):
        await world.services.publish_response("text")  # type: ignore[arg-type]
    assert len(world.of(MessageStarted)) == 2


@pytest.mark.parametrize("child_text", [False, True])
async def test_a_delegates_text_and_messages_stay_inside_unless_the_app_says_otherwise(
    child_text: bool,
) -> None:
    world = root(participant="helper", child_text=child_text)
    services = world.services
    large = "x" * (MAX_INLINE_BYTES + 1)
    published = [
        await services.publish_message(large),
        *await services.publish_response(ModelResponse(text="b", phase="commentary")),
    ]
    async with services.stream_model(ScriptedModel([stream("c")]), QUESTION, publish=True) as given:
        async for _ in given:
            pass
    services.emit_text("d")
    services.emit(TextDelta("e"))
    services.emit({"type": "message.started", "id": "own", "phase": "final"})
    # The delegate itself has its messages either way.
    assert [(message.phase, message.text) for message in (*published, *given.messages)] == [
        ("final", large),
        ("commentary", "b"),
        ("final", "c"),
    ]
    assert len(world.artifacts) == child_text
    texts = [event.text for event in world.of(TextDelta)]
    assert texts == (["d", "e"] if child_text else [])
    assert len(world.of(*MESSAGES)) == (2 + 8 + 3 + 3 + 1 if child_text else 0)


async def test_text_and_messages_together_are_gathered_and_each_keeps_its_order() -> None:
    """As an agent does that streams: both grow with each piece."""
    world = root()
    pieces = [f"{number} " for number in range(1000)]

    async def speaks(request: RunRequest, services: ExecutionServices) -> DriverOutput:
        async with services.stream_model(ScriptedModel([stream(*pieces)]), QUESTION, publish=True) as given:
            async for chunk in given:
                if isinstance(chunk, TextPiece):
                    services.emit_text(chunk.text)
        return DriverOutput(text="ok")

    await world.run(speaks)
    whole = "".join(pieces)
    assert "".join(event.text for event in world.of(TextDelta)) == whole
    assert "".join(event.text for event in world.of(MessageDelta)) == whole
    assert world.events[1] == MessageDelta(world.events[0].id, "0 ")  # type: ignore[union-attr]
    assert world.of(TextDelta)[0] == TextDelta("0 ")
    assert len(world.events) < 60
    assert max(len(event.text) for event in world.of(TextDelta, MessageDelta)) <= GATHER_BYTES


async def test_tool_calls_that_are_streamed_are_no_text() -> None:
    world = root()
    model = ScriptedModel([stream(*call_pieces("f", "{}")), tool_calls(("f", {}))])
    await read(world, model, publish=True)
    await world.services.model(model, QUESTION, publish=True)
    assert world.of(*MESSAGES) == []
