"""Token estimates, as contract section 9 has them."""

from __future__ import annotations

import pytest

from retinue import Message, ModelRequest, ToolCall
from retinue.errors import Unsupported
from retinue.messages import TextPart, assistant, user
from retinue.models import ToolSchema
from retinue.tokens import estimate_messages, estimate_request, estimate_text
from tests.support import FunctionModel


@pytest.mark.parametrize(
    ("model", "per_token"),
    [
        ("gpt-4o", 3.3),
        ("gpt-3.5-turbo", 3.3),
        ("o3-mini", 3.3),
        ("openai/o1", 3.3),
        ("proto3-mini", 3.0),
        ("claude-sonnet", 3.2),
        ("gemini-pro", 3.4),
        ("llama", 3.0),
        ("", 3.0),
    ],
)
def test_characters_of_a_token_by_family(model: str, per_token: float) -> None:
    whole = int(per_token * 100)
    assert estimate_text("x" * whole, model) == 100
    assert estimate_text("x" * (whole + 1), model) == 101
    assert estimate_text("", model) == 0
    assert estimate_text("x", model) == 1


def test_an_empty_message_costs_six() -> None:
    assert estimate_messages([user("")]) == 6
    assert estimate_messages([]) == 0
    assert estimate_messages([user("x" * 30)] * 2) == 32


def test_calls_extras_parts_and_tools_count() -> None:
    plain = estimate_messages([assistant("")])
    assert estimate_messages([assistant("", [ToolCall("1", "look", {"a": "é"})])]) > plain
    assert estimate_messages([Message(role="assistant", extras={"a": 1})]) > plain
    assert estimate_messages([user([TextPart("x" * 30)])]) > estimate_messages([user("x" * 30)])
    schema = ToolSchema("n", "d", {})
    assert estimate_messages([], [schema]) == -(-len('{"name":"n","description":"d","parameters":{}}') // 3)


def test_the_applications_estimate_goes_before_characters_and_must_be_a_number() -> None:
    request = ModelRequest(messages=[user("x" * 30)], tools=[ToolSchema("n", "d", {})])
    model = FunctionModel()
    assert estimate_request(request, model) == estimate_messages(request.messages, request.tools)
    assert estimate_request(request, model, lambda asked, client: 7 if client is model else 0) == 7
    for wrong in (-1, 1.5, True, None, "7"):
        with pytest.raises(Unsupported, match="estimate_input_tokens"):
            estimate_request(request, model, lambda asked, client, wrong=wrong: wrong)  # type: ignore[misc]
