"""What the clients of SDKs have in common: missing SDKs, times to wait, options, errors within answers."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from email.utils import formatdate
from typing import Any

import pytest

from retinue import ModelRequest, Usage
from retinue.errors import ModelFailed
from retinue.messages import user
from retinue.models import StreamingModelClient
from retinue.providers.anthropic_messages import AnthropicModel
from retinue.providers.endpoint import LONGEST_QUOTE, Endpoint, retry_after, with_options
from retinue.providers.openai_chat import OpenAIChatModel
from retinue.providers.openai_responses import OpenAIResponsesModel
from retinue.providers.openai_wire import usage
from retinue.providers.pydantic_ai import PydanticAIModel

KEY = "sk-test-0123456789"
HELLO = ModelRequest(messages=[user("hello")])
SERVER = "http://127.0.0.1:9/v1"
ENDPOINT = Endpoint(
    sdk="openai",
    missing="no SDK",
    called="model m",
    server=SERVER,
    key_env="K",
    default_server="",
    timeout=1.0,
)


@pytest.mark.parametrize(
    ("make", "module", "extra"),
    [
        (lambda: OpenAIChatModel("m", base_url=SERVER), "openai", "openai"),
        (lambda: OpenAIResponsesModel("m", base_url=SERVER), "openai", "openai"),
        (lambda: AnthropicModel("m", base_url=SERVER), "anthropic", "anthropic"),
        (lambda: PydanticAIModel("openai-chat:m"), "pydantic_ai.direct", "pydantic-ai"),
    ],
)
async def test_a_missing_sdk_names_its_extra(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[], StreamingModelClient], module: str, extra: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    client = make()  # needs no SDK
    with pytest.raises(ModelFailed, match=rf"retinue\[{extra}\]") as failed:
        await client.generate(HELLO)
    assert not failed.value.started
    with pytest.raises(ModelFailed, match=rf"retinue\[{extra}\]"):
        async for _ in client.stream(HELLO):
            pass


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({}, None),
        ({"Retry-After": "7"}, 7.0),
        ({"retry-after": "0.5"}, 0.5),
        ({"Retry-After": "0"}, 0.0),
        ({"Retry-After": "-3"}, 0.0),
        ({"Retry-After-Ms": "1500", "Retry-After": "9"}, 1.5),
        ({"retry-after-ms": "soon", "Retry-After": "9"}, 9.0),
        ({"Retry-After": "Wed, 21 Oct 2015 07:28:00 GMT"}, 0.0),
        ({"Retry-After": "soon"}, None),
        ({"Retry-After": "inf"}, None),
        ({"Retry-After": "nan"}, None),
        ({"Retry-After": ""}, None),
    ],
)
def test_times_to_wait(headers: dict[str, str], seconds: float | None) -> None:
    assert retry_after(headers) == seconds


def test_a_date_to_wait_for() -> None:
    found = retry_after({"Retry-After": formatdate(time.time() + 60, usegmt=True)})
    assert found is not None
    assert 55 < found <= 60


def test_options_go_into_the_body_and_replace_nothing() -> None:
    made = {"model": "m", "max_tokens": 5}
    assert with_options(made, {}, "model m") == made
    assert with_options(made, {"top_p": 1}, "model m") == {**made, "extra_body": {"top_p": 1}}
    for taken in ("model", "max_tokens", "max_completion_tokens", "stream", "stream_options"):
        with pytest.raises(ModelFailed, match=taken) as failed:
            with_options(made, {"top_p": 1, taken: 3}, "model m", further=["max_completion_tokens"])
        assert not failed.value.started


@pytest.mark.parametrize(
    ("body", "retryable"),
    [
        ({"error": {"type": "overloaded_error", "message": "x"}}, True),
        ({"code": 502, "message": "x"}, True),
        ({"type": "Internal", "code": 500, "message": "x"}, True),
        ({"code": 400, "message": "x"}, False),
        ({"type": "invalid_request_error", "code": None, "message": "x"}, False),
        ({"message": "x"}, True),
        ({"error": "x"}, True),
        ({"error": {"code": {"odd": 1}, "message": "x"}}, True),
    ],
)
def test_errors_within_answers(body: dict[str, Any], retryable: bool) -> None:
    error = ENDPOINT.broke(KEY, body, Usage(input_tokens=1))
    assert (error.started, error.retryable, error.data["usage"]) == (True, retryable, {"input_tokens": 1})
    assert error.message.endswith(": x")


def test_an_account_with_nothing_left_is_not_asked_again() -> None:
    busy = {"error": {"code": "rate_limit_exceeded", "message": "x"}}
    for body, retryable in ((busy, True), ({"error": {"code": "insufficient_quota"}}, False), ("x", True)):
        error = ENDPOINT.refused(429, body, {"Retry-After": "1"}, KEY)
        assert (error.started, error.retryable, error.retry_after) == (False, retryable, 1.0)


def test_what_a_server_says_is_short_and_has_no_key() -> None:
    said = ENDPOINT.broke(KEY, {"message": f"{KEY}\n" * 200}).message
    assert KEY not in said
    assert "\n" not in said
    assert len(said) < LONGEST_QUOTE + 100


def test_usage_has_sound_too() -> None:
    reported = {
        "prompt_tokens": 20,
        "completion_tokens": 9,
        "prompt_tokens_details": {"cached_tokens": 5, "audio_tokens": 3},
        "completion_tokens_details": {"reasoning_tokens": 4, "audio_tokens": 2},
    }
    assert usage(reported) == Usage(
        input_tokens=20,
        output_tokens=9,
        cached_tokens=5,
        reasoning_tokens=4,
        audio_input_tokens=3,
        audio_output_tokens=2,
    )
    assert usage({**reported, "completion_tokens": None}) is None
