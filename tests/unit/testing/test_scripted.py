"""The scripted model: one script and one record, however many copies there are."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import pickle
import subprocess
import sys
import time
from pathlib import Path

import pytest

from retinue import (
    FinishPiece,
    Message,
    ModelChunk,
    ModelRequest,
    ModelResponse,
    PublicItem,
    StreamingModelClient,
    TextPiece,
    ToolCall,
    ToolCallPiece,
    Usage,
    UsagePiece,
)
from retinue.errors import BudgetExhausted, ModelFailed, RetinueError
from retinue.messages import user
from retinue.models import ModelClient
from retinue.testing import ScriptedModel, call_pieces, reply, stream, tool_calls


async def ask(model: ScriptedModel, text: str = "x", participant: str = "") -> ModelResponse:
    return await model.generate(ModelRequest(messages=[user(text)], participant=participant))


async def read(model: ScriptedModel, participant: str = "") -> list[ModelChunk]:
    request = ModelRequest(messages=[user("x")], participant=participant)
    return [chunk async for chunk in model.stream(request)]


async def test_answers_come_in_order_and_requests_are_kept() -> None:
    model = ScriptedModel(
        ["one", reply("two", usage=None, finish_reason="length"), tool_calls(("f", {"a": 1}))]
    )
    assert isinstance(model, ModelClient)
    first, second, third = [await ask(model, str(number)) for number in range(3)]
    assert (first.text, first.usage) == ("one", Usage(input_tokens=10, output_tokens=5))
    assert (second.text, second.usage, second.finish_reason) == ("two", None, "length")
    assert [(call.name, call.arguments) for call in third.tool_calls] == [("f", {"a": 1})]
    assert third.finish_reason == "tool_calls"
    assert [request.messages[0].text for request in model.requests] == ["0", "1", "2"]


async def test_a_script_that_is_over_says_so() -> None:
    model = ScriptedModel({"a": ["one"]})
    await ask(model, participant="a")
    with pytest.raises(RetinueError, match="participant 'a' has 1 answers and was asked for number 2"):
        await ask(model, participant="a")
    with pytest.raises(RetinueError, match="participant 'b' has 0 answers"):
        await ask(model, participant="b")


async def test_each_participant_has_its_own_place_in_its_own_script() -> None:
    model = ScriptedModel({"": ["root"], "a/b": ["first", "second"], "*": ["other 1", "other 2"]})
    texts = [(await ask(model, participant=participant)).text for participant in ("a/b", "x", "", "a/b", "y")]
    assert texts == ["first", "other 1", "root", "second", "other 2"]
    assert len(model.requests_of("a/b")) == 2
    assert len(model.requests_of("x")) == 1
    assert len(model.requests) == 5


async def test_errors_are_raised_with_their_code_and_data() -> None:
    model = ScriptedModel(
        [
            BudgetExhausted("no", resource="tokens"),
            ModelFailed("gone", started=False),
            ValueError("odd"),
            KeyError(),
        ]
    )
    with pytest.raises(BudgetExhausted) as refused:
        await ask(model)
    assert refused.value.resource == "tokens"
    with pytest.raises(ModelFailed) as failed:
        await ask(model)
    assert failed.value.started is False
    with pytest.raises(RetinueError, match="odd"):
        await ask(model)
    with pytest.raises(RetinueError, match="KeyError"):
        await ask(model)


async def test_a_delay_is_waited_out_and_can_be_cancelled() -> None:
    model = ScriptedModel([reply("slow", delay=0.05), reply("slower", delay=60)])
    before = time.monotonic()
    await ask(model)
    assert time.monotonic() - before >= 0.05
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(ask(model), 0.01)
    assert len(model.requests) == 2


def _ask_from_elsewhere(data: bytes, participant: str, count: int) -> None:
    model = pickle.loads(data)
    for number in range(count):
        asyncio.run(ask(model, f"{participant} {number}", participant))


def test_copies_in_other_processes_share_script_and_record() -> None:
    model = ScriptedModel({"a": ["1", "2", "3"], "*": [str(number) for number in range(20)]})
    context = multiprocessing.get_context("spawn")
    data = pickle.dumps(model)
    processes = [
        context.Process(target=_ask_from_elsewhere, args=(data, name, count))
        for name, count in (("a", 3), ("b", 10), ("c", 10))
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    # The two that share a script got its twenty answers between them, each once: none was refused.
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert [request.messages[0].text for request in model.requests_of("a")] == ["a 0", "a 1", "a 2"]
    assert len(model.requests_of("b")) == len(model.requests_of("c")) == 10
    with pytest.raises(RetinueError, match="asked for number 21"):
        asyncio.run(ask(model, participant="d"))


def test_a_record_lives_as_long_as_the_process_that_made_the_original() -> None:
    model = ScriptedModel(["x"])
    copy = pickle.loads(pickle.dumps(model))
    asyncio.run(ask(copy))
    del copy
    gc.collect()
    assert len(model.requests) == 1
    # A model that is made inline for a delegate is gone before its copy is asked.
    copy = pickle.loads(pickle.dumps(ScriptedModel(["inline"])))
    gc.collect()
    assert asyncio.run(ask(copy)).text == "inline"
    program = "from retinue.testing import ScriptedModel; print(ScriptedModel()._folder)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert not Path(done.stdout.strip()).exists()


async def test_what_is_recorded_is_the_whole_request() -> None:
    calls = tool_calls(ToolCall("mine", "f"), ("g", {}), text="thinking", usage=None)
    model = ScriptedModel([calls])
    from retinue.models import ToolSchema

    schema = ToolSchema("f", "does f", {"type": "object"})
    request = ModelRequest(
        messages=[Message(role="assistant", extras={"s": 1})],
        tools=[schema],
        max_tokens=7,
        temperature=0.5,
        role="judge",
        participant="p",
    )
    response = await model.generate(request)
    assert (response.text, response.usage, response.tool_calls[0]) == (
        "thinking",
        None,
        ToolCall("mine", "f"),
    )
    (recorded,) = model.requests
    assert recorded.messages == [Message(role="assistant", extras={"s": 1})]
    assert recorded.tools == [schema]
    assert (recorded.max_tokens, recorded.temperature, recorded.role, recorded.participant) == (
        7,
        0.5,
        "judge",
        "p",
    )


# --- streams ----------------------------------------------------------------------------------------------

USAGE = Usage(input_tokens=10, output_tokens=5)


async def test_a_stream_gives_its_pieces_and_ends_as_the_script_says() -> None:
    odd = Usage(input_tokens=1)
    model = ScriptedModel(
        [
            stream("Hel", "lo"),
            stream("a", usage=None, finish=False),
            stream("a", UsagePiece(odd), usage=odd, finish_reason="length", phase="final"),
            stream(*call_pieces("f", '{"a"', ": 1}", id="c")),
            stream("a", FinishPiece("stop", {"s": 1})),
        ]
    )
    assert isinstance(model, StreamingModelClient)
    assert await read(model) == [TextPiece("Hel"), TextPiece("lo"), UsagePiece(USAGE), FinishPiece()]
    assert await read(model) == [TextPiece("a")]
    assert await read(model) == [
        TextPiece("a"),
        UsagePiece(odd),
        UsagePiece(odd),
        FinishPiece("length", phase="final"),
    ]
    assert await read(model) == [
        ToolCallPiece(index=0, id="c", name="f"),
        ToolCallPiece(index=0, arguments='{"a"'),
        ToolCallPiece(index=0, arguments=": 1}"),
        UsagePiece(USAGE),
        FinishPiece("tool_calls"),
    ]
    assert await read(model) == [TextPiece("a"), FinishPiece("stop", {"s": 1}), UsagePiece(USAGE)]
    assert [request.streamed for request in model.requests] == [True] * 5


async def test_a_stream_breaks_where_the_script_says() -> None:
    model = ScriptedModel(
        [stream("Hel", ModelFailed("gone", started=False), "lo"), RuntimeError("never began")]
    )
    chunks = model.stream(ModelRequest(messages=[user("x")]))
    assert await anext(chunks) == TextPiece("Hel")
    with pytest.raises(ModelFailed, match="gone") as failed:
        await anext(chunks)
    assert failed.value.started is False
    with pytest.raises(RetinueError, match="never began"):
        await read(model)


async def test_whole_and_streamed_answers_serve_both_ways_of_asking() -> None:
    script = [
        stream("Hel", "lo", *call_pieces("f", "{}", id="c"), phase="commentary"),
        reply(items=[("commentary", "a"), ("final", "b"), ("reasoning_summary", "c"), (None, "d")]),
        reply("text", phase="final"),
        tool_calls(ToolCall("c", "f", {"a": [1]}), text="t", phase="commentary"),
    ]
    whole = ScriptedModel(script)
    first, second, third, fourth = [await ask(whole) for _ in script]
    assert first == ModelResponse(
        text="Hello",
        tool_calls=(ToolCall("c", "f", {}),),
        usage=USAGE,
        finish_reason="tool_calls",
        phase="commentary",
    )
    assert second.text == "abd"
    assert second.items[:2] == (
        PublicItem(id="item-1", phase="commentary", text="a"),
        PublicItem(id="item-2", phase="final", text="b"),
    )
    assert (third.phase, fourth.phase) == ("final", "commentary")
    streamed = ScriptedModel(script)
    pieces = [await read(streamed) for _ in script]
    assert pieces[1][1] == TextPiece("b", "item-2", "final")
    assert pieces[2] == [TextPiece("text"), UsagePiece(USAGE), FinishPiece(phase="final")]
    assert ToolCallPiece(index=0, id="c", name="f", arguments='{"a":[1]}') in pieces[3]
    with pytest.raises(ModelFailed, match="without a finish"):
        await ask(ScriptedModel([stream("a", finish=False)]))


async def test_the_delay_is_before_each_piece() -> None:
    model = ScriptedModel([stream("a", "b", delay=0.02)])
    before = time.monotonic()
    await read(model)
    assert time.monotonic() - before >= 0.08  # two pieces, the usage and the finish


def _read_elsewhere(data: bytes) -> None:
    model = pickle.loads(data)
    chunks = asyncio.run(read(model, "p"))
    assert chunks[0] == TextPiece("Hel", "i", "commentary"), chunks
    with pytest.raises(ModelFailed) as failed:
        asyncio.run(read(model, "p"))
    assert failed.value.started is False


def test_streams_work_in_other_processes() -> None:
    model = ScriptedModel(
        {"p": [stream(TextPiece("Hel", "i", "commentary")), stream(ModelFailed("no", started=False))]}
    )
    process = multiprocessing.get_context("spawn").Process(
        target=_read_elsewhere, args=(pickle.dumps(model),)
    )
    process.start()
    process.join(60)
    assert process.exitcode == 0
    assert len(model.requests_of("p")) == 2
