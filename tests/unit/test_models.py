"""What clients declare, and answers put together from their pieces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from retinue import (
    FinishPiece,
    ModelCapabilities,
    ModelChunk,
    ModelResponse,
    PublicItem,
    StreamingModelClient,
    TextPiece,
    ToolCall,
    ToolCallPiece,
    Usage,
    UsagePiece,
    capabilities_of,
)
from retinue.errors import ModelFailed, ValidationFailed
from retinue.models import ModelClient
from retinue.stream_assembly import StreamAssembly, chunks_of
from retinue.testing import ScriptedModel
from tests.support import FunctionModel, answering

USAGE = Usage(input_tokens=3, output_tokens=4)


def assembled(*chunks: Any) -> ModelResponse:
    assembly = StreamAssembly(answering())
    for chunk in chunks:
        assembly.take(chunk)
    return assembly.response()


def refused(*chunks: Any) -> str:
    with pytest.raises(ModelFailed) as error:
        assembled(*chunks)
    assert str(error.value).startswith("test function")
    return str(error.value)


# --- capabilities -----------------------------------------------------------------------------------------


def test_c145_a_provider_without_declarations_infers_phases_and_has_no_summaries() -> None:
    assert capabilities_of(answering()) == ModelCapabilities(
        message_phases="inferred", reasoning_summaries="unsupported"
    )
    assert capabilities_of(object()) == ModelCapabilities()


def test_what_a_client_declares_is_what_it_has() -> None:
    class Native(FunctionModel):
        capabilities = ModelCapabilities(message_phases="native", reasoning_summaries="native")

    class Odd(FunctionModel):
        capabilities = {"message_phases": "native"}  # noqa: RUF012

    assert capabilities_of(Native()).message_phases == "native"
    with pytest.raises(ValidationFailed, match=r"Odd\.capabilities must be a ModelCapabilities") as error:
        capabilities_of(Odd())
    assert error.value.path == "Odd.capabilities"


def test_a_client_streams_when_it_has_a_stream() -> None:
    assert isinstance(answering(), ModelClient)
    assert not isinstance(answering(), StreamingModelClient)
    assert isinstance(ScriptedModel(), StreamingModelClient)


# --- assembly ---------------------------------------------------------------------------------------------


def test_pieces_make_the_answer() -> None:
    response = assembled(
        TextPiece("Let me "),
        ToolCallPiece(index=1, id="b", name="second"),
        TextPiece("see."),
        ToolCallPiece(index=0, id="a", name="first", arguments='{"x": '),
        ToolCallPiece(index=0, arguments='[1, "é"]}'),
        UsagePiece(USAGE),
        FinishPiece("tool_calls", {"signature": "s"}, "commentary"),
    )
    assert response == ModelResponse(
        text="Let me see.",
        tool_calls=(ToolCall("a", "first", {"x": [1, "é"]}), ToolCall("b", "second", {})),
        usage=USAGE,
        finish_reason="tool_calls",
        extras={"signature": "s"},
        phase="commentary",
    )


def test_items_are_kept_apart_and_summaries_are_no_part_of_the_text() -> None:
    response = assembled(
        TextPiece("thinking", "r", "reasoning_summary"),
        TextPiece("One ", "a"),
        TextPiece("moment.", "a", "commentary"),
        TextPiece("Done", "b", "final"),
        TextPiece(".", "b"),
        FinishPiece(),
    )
    assert response.text == "One moment.Done."
    assert response.items == (
        PublicItem(id="r", phase="reasoning_summary", text="thinking"),
        PublicItem(id="a", phase="commentary", text="One moment."),
        PublicItem(id="b", phase="final", text="Done."),
    )


def test_a_summary_without_an_item_is_kept_apart_from_the_text_too() -> None:
    response = assembled(TextPiece("hm", phase="reasoning_summary"), TextPiece("yes"), FinishPiece())
    assert response.text == "yes"
    assert [(item.phase, item.text) for item in response.items] == [
        ("reasoning_summary", "hm"),
        (None, "yes"),
    ]


def test_a_label_on_plain_text_is_the_phase_of_the_answer() -> None:
    response = assembled(TextPiece("a"), TextPiece("b", phase="commentary"), FinishPiece())
    assert (response.text, response.phase, response.items) == ("ab", "commentary", ())


def test_usage_is_the_last_report() -> None:
    running = Usage(input_tokens=3, output_tokens=1)
    assert assembled(UsagePiece(running, False), UsagePiece(USAGE), FinishPiece()).usage == USAGE
    assert assembled(FinishPiece(), UsagePiece(USAGE)).usage == USAGE
    assert assembled(UsagePiece(USAGE), UsagePiece(running, False), FinishPiece()).usage == USAGE
    assert assembled(UsagePiece(running, False), UsagePiece(USAGE, False), FinishPiece()).usage == USAGE
    assert assembled(FinishPiece()).usage is None


def test_a_running_total_of_a_broken_stream_is_not_what_it_used() -> None:
    assembly = StreamAssembly(answering())
    seen = [(assembly.begun, assembly.usage)]
    for chunk in (UsagePiece(Usage(input_tokens=3), False), UsagePiece(USAGE)):
        assembly.take(chunk)
        seen.append((assembly.begun, assembly.usage))
    assert seen == [(False, None), (True, None), (True, USAGE)]


def test_c115_two_terminal_reports_or_no_finish_are_no_answer() -> None:
    assert "reported its usage twice" in refused(UsagePiece(USAGE), UsagePiece(USAGE), FinishPiece())
    assert "ended without a finish" in refused(TextPiece("hel"), UsagePiece(USAGE))
    assert "ended without a finish" in refused()


@pytest.mark.parametrize(
    ("pieces", "hint"),
    [
        (["{"], "no JSON object"),
        (['{"a": 1'], "no JSON object"),
        (["[1]"], "no JSON object"),
        (["null"], "no JSON object"),
        (['{"a": NaN}'], "no JSON object"),
        (['{"a": 1}', '{"a": 1}'], "no JSON object"),
        (["[" * 100_000], "no JSON object"),
    ],
)
def test_c97_malformed_streamed_arguments_are_no_answer(pieces: Sequence[str], hint: str) -> None:
    chunks = [ToolCallPiece(index=0, id="a", name="f", arguments=piece) for piece in pieces]
    assert hint in refused(*chunks, FinishPiece("tool_calls"))
    assert "cut at the output cap" in refused(*chunks, FinishPiece("length"))


@pytest.mark.parametrize("chunk", [ToolCallPiece(index=0, id="a"), ToolCallPiece(index=0, name="f")])
def test_a_tool_call_needs_an_id_and_a_name(chunk: ToolCallPiece) -> None:
    assert "without an id or a name" in refused(chunk, FinishPiece("tool_calls"))


def test_what_contradicts_itself_is_no_answer() -> None:
    first = ToolCallPiece(index=0, id="a", name="f")
    assembled(first, first, FinishPiece("tool_calls"))  # some servers repeat id and name with each piece
    assert "changed the id" in refused(first, ToolCallPiece(index=0, id="b"))
    assert "changed the name" in refused(first, ToolCallPiece(index=0, name="g"))
    assert "first called the item 'i' final and then commentary" in refused(
        TextPiece("a", "i", "final"), TextPiece("b", "i", "commentary")
    )
    assert "a second finish" in refused(FinishPiece(), FinishPiece())
    assert "TextPiece after the stream had finished" in refused(FinishPiece(), TextPiece("late"))


def test_rewriting_what_was_streamed_is_refused_and_adding_to_it_is_not() -> None:
    streamed = (TextPiece("Hel", "a"), TextPiece("x", "b"))
    for text in ("Hal", "He", "hello"):
        assert "rewrote the item 'a'" in refused(
            *streamed, FinishPiece(items=(PublicItem(id="a", text=text),))
        )
    assembly = StreamAssembly(answering())
    for chunk in streamed:
        assembly.take(chunk)
    items = (PublicItem(id="a", phase="final", text="Hello"), PublicItem(id="c", text="new"))
    added = assembly.take(FinishPiece(items=items))
    assert [(item.id, text) for item, text in added] == [("a", "lo"), ("c", "new")]
    assert assembly.response().text == "Helloxnew"
    assert [item.phase for item in assembly.response().items] == ["final", None, None]


@pytest.mark.parametrize(
    ("chunk", "hint"),
    [
        ("text", "streamed str, not a ModelChunk"),
        (None, "streamed NoneType, not a ModelChunk"),
        ({"type": "text", "text": "x"}, "streamed dict, not a ModelChunk"),
        (ModelResponse(text="x"), "streamed ModelResponse, not a ModelChunk"),
        (TextPiece(5), "broken piece"),  # type: ignore[arg-type]
        (TextPiece("x", phase="thoughts"), "broken piece"),  # type: ignore[arg-type]
        (TextPiece("\ud83d"), "lone surrogate"),
        (ToolCallPiece(index=0, name="\udfff"), "lone surrogate"),
        (ToolCallPiece(index="0"), "broken piece"),  # type: ignore[arg-type]
        (FinishPiece("done"), "broken piece"),  # type: ignore[arg-type]
        (FinishPiece(extras={"x": object()}), "broken piece"),
        (UsagePiece({"input_tokens": -1}), "impossible usage"),  # type: ignore[arg-type]
        (UsagePiece(Usage(output_tokens=-1)), "impossible usage"),
        (UsagePiece(Usage(output_tokens=1.5)), "impossible usage"),  # type: ignore[arg-type]
        (UsagePiece(Usage(input_tokens=True)), "impossible usage"),
        (UsagePiece(None), "impossible usage"),  # type: ignore[arg-type]
    ],
)
def test_what_is_no_piece_is_refused_with_the_providers_name(chunk: object, hint: str) -> None:
    assert hint in refused(chunk)


def test_pieces_travel_as_json() -> None:
    chunks: list[ModelChunk] = [
        TextPiece("x", "i", "final"),
        ToolCallPiece(index=0, id="a", name="f", arguments="{}"),
        UsagePiece(USAGE, False),
        FinishPiece("length", {"a": 1}, "final", (PublicItem(id="i"),)),
    ]
    assert msgspec.json.decode(msgspec.json.encode(chunks), type=list[ModelChunk]) == chunks


texts = st.text(st.characters(codec="utf-8"), max_size=30)
responses = st.builds(
    ModelResponse,
    text=texts,
    tool_calls=st.lists(
        st.builds(ToolCall, st.uuids().map(str), st.just("f"), st.dictionaries(texts, texts, max_size=3)),
        max_size=3,
    ).map(tuple),
    usage=st.none() | st.builds(Usage, input_tokens=st.integers(0, 99), output_tokens=st.integers(0, 99)),
    finish_reason=st.sampled_from(["stop", "tool_calls", "length", "content_filter"]),
    extras=st.none() | st.dictionaries(texts, texts, max_size=2),
    phase=st.sampled_from([None, "commentary", "final"]),
)


@given(responses, st.data())
def test_an_answer_taken_apart_however_finely_is_the_same_answer(
    response: ModelResponse, data: st.DataObject
) -> None:
    assembly = StreamAssembly(answering())
    seen = ""
    for chunk in chunks_of(response):
        for piece in _split(chunk, data):
            seen += "".join(text for _, text in assembly.take(piece))
    assert assembly.response() == response
    assert seen == response.text


def _split(chunk: ModelChunk, data: st.DataObject) -> list[ModelChunk]:
    if isinstance(chunk, TextPiece):
        at = data.draw(st.integers(0, len(chunk.text)))
        return [TextPiece(chunk.text[:at]), TextPiece(chunk.text[at:])]
    if isinstance(chunk, ToolCallPiece):
        at = data.draw(st.integers(0, len(chunk.arguments)))
        first = msgspec.structs.replace(chunk, arguments=chunk.arguments[:at])
        return [first, ToolCallPiece(index=chunk.index, arguments=chunk.arguments[at:])]
    return [chunk]
