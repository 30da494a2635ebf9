"""Models behind the messages API of Anthropic, through its SDK.

Blocks of thinking are signed, and must go back as they came: they are kept in the extras of the assistant's
message and sent verbatim.
"""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from retinue.budgets import Usage
from retinue.errors import ModelFailed
from retinue.messages import AudioPart, Content, FilePart, ImagePart, Message, TextPart, ToolCall
from retinue.models import (
    FinishPiece,
    FinishReason,
    ModelCapabilities,
    ModelChunk,
    ModelRequest,
    ModelResponse,
    TextPiece,
    ToolCallPiece,
    UsagePiece,
)
from retinue.providers.endpoint import (
    DEFAULT_TIMEOUT,
    Endpoint,
    check_server,
    is_transport_error,
    with_options,
)
from retinue.providers.openai_wire import WireNames

if TYPE_CHECKING:
    from anthropic import AsyncAnthropic

DEFAULT_BASE_URL = "https://api.anthropic.com"
MISSING_SDK = "the anthropic SDK is not installed; install it with: pip install 'retinue[anthropic]'"
DEFAULT_MAX_TOKENS = 8_192
"""Output cap where nothing bounds a call: the API wants one."""
EXTRAS = "anthropic.messages"
"""Key of ``Message.extras`` for the blocks of an answer."""
_FINISH: dict[object, FinishReason] = {
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
    "refusal": "content_filter",
}
_WHAT = "message of the messages API"


@dataclass(frozen=True)
class AnthropicModel:
    """A model client for one model of one server; plain data, its connections are made where it is used."""

    model: str
    base_url: str | None = None
    """ANTHROPIC_BASE_URL of the environment, or Anthropic itself, when left out."""
    api_key_env: str = "ANTHROPIC_API_KEY"
    """Name of the environment variable that holds the key, in the process that makes the call."""
    timeout: float = DEFAULT_TIMEOUT
    """Seconds for one answer; of a stream, for each of its pieces."""
    max_tokens: int = DEFAULT_MAX_TOKENS
    """Output cap of calls that nothing else bounds."""

    def __post_init__(self) -> None:
        check_server("an Anthropic model", self.model, self.base_url, self.api_key_env)

    @property
    def provider_id(self) -> str:
        return "anthropic"

    @property
    def model_id(self) -> str:
        return self.model

    @property
    def capabilities(self) -> ModelCapabilities:
        return ModelCapabilities()

    @property
    def server(self) -> str:
        """The base URL that calls go to, as this process sees it."""
        return self.base_url or os.environ.get("ANTHROPIC_BASE_URL") or DEFAULT_BASE_URL

    async def generate(self, request: ModelRequest) -> ModelResponse:
        """One message, without streaming and without retries."""
        names = WireNames(request.tools)
        options = self._options(request, names)
        key = self._endpoint.key()
        client = await self._client(key)
        import anthropic

        try:
            raw = await client.messages.with_raw_response.create(**options)
        except anthropic.AnthropicError as error:
            raise self._endpoint.failure(error, key) from None
        body = await raw.read()
        try:
            return _response(json.loads(body), names)
        except (ValueError, LookupError, TypeError, AttributeError):
            raise self._endpoint.no_answer(_WHAT, body, key) from None

    async def stream(self, request: ModelRequest) -> AsyncIterator[ModelChunk]:
        """One message, piece by piece, without retries; closing it ends the request."""
        names = WireNames(request.tools)
        options = self._options(request, names)
        key = self._endpoint.key()
        client = await self._client(key)
        import anthropic

        try:
            stream = await client.messages.create(**options, stream=True)
            try:
                pieces = _Pieces(names)
                async for raw in stream:
                    for chunk in pieces.take(raw.to_dict(warnings=False)):
                        yield chunk
            finally:
                await stream.close()
        except anthropic.AnthropicError as error:
            raise self._endpoint.failure(error, key) from None
        except (ValueError, LookupError, TypeError, AttributeError):
            raise ModelFailed(f"{self._called} streamed something that is no {_WHAT}") from None
        except Exception as error:
            if not is_transport_error(error):  # the SDK lets them through once the stream has begun
                raise
            raise self._endpoint.failure(error, key) from None

    async def close(self) -> None:
        """Close the connections that this event loop has to the server; a later call opens new ones."""
        await self._endpoint.close()

    @property
    def _called(self) -> str:
        return f"model {self.model} at {self.server}"

    @property
    def _endpoint(self) -> Endpoint:
        return Endpoint(
            sdk="anthropic",
            missing=MISSING_SDK,
            called=self._called,
            server=self.server,
            key_env=self.api_key_env,
            default_server=DEFAULT_BASE_URL,
            timeout=self.timeout,
        )

    async def _client(self, key: str) -> AsyncAnthropic:
        client: AsyncAnthropic = await self._endpoint.client(
            key,
            lambda anthropic: anthropic.AsyncAnthropic(
                base_url=self.server, api_key=key, timeout=self.timeout, max_retries=0
            ),
        )
        return client

    def _options(self, request: ModelRequest, names: WireNames) -> dict[str, Any]:
        told = [message.text for message in request.messages if message.role == "system"]
        options: dict[str, Any] = {
            "model": self.model,
            "max_tokens": self.max_tokens if request.max_tokens is None else request.max_tokens,
            "messages": _wire_messages(request.messages, names),
        }
        if told:
            options["system"] = [{"type": "text", "text": text} for text in told if text]
        if request.tools:
            options["tools"] = [
                {
                    "name": names.to_wire(schema.name),
                    "description": schema.description,
                    "input_schema": schema.parameters,
                }
                for schema in request.tools
            ]
        # The SDK no longer names the temperature, which older models and other servers take.
        further = {} if request.temperature is None else {"temperature": request.temperature}
        return with_options(options, {**request.options, **further}, self._called)


# --- the request ------------------------------------------------------------------------------------------


def _wire_messages(messages: Sequence[Message], names: WireNames) -> list[dict[str, Any]]:
    """The conversation as the API takes it: results of one round of tools are one message of the user."""
    wire: list[dict[str, Any]] = []
    for message in messages:
        if message.role == "system":
            continue
        role = "assistant" if message.role == "assistant" else "user"
        blocks = _blocks(message, names)
        if not blocks:
            continue
        if wire and wire[-1]["role"] == role:
            wire[-1]["content"] += blocks
        else:
            wire.append({"role": role, "content": blocks})
    return wire


def _blocks(message: Message, names: WireNames) -> list[dict[str, Any]]:
    kept = (message.extras or {}).get(EXTRAS)
    if message.role == "assistant" and isinstance(kept, Mapping) and isinstance(kept.get("content"), list):
        return list(kept["content"])
    if message.role == "tool":
        return [
            {"type": "tool_result", "tool_use_id": message.tool_call_id, "content": message.text or "(empty)"}
        ]
    return [
        *_wire_content(message.content),
        *(
            {"type": "tool_use", "id": call.id, "name": names.to_wire(call.name), "input": call.arguments}
            for call in message.tool_calls
        ),
    ]


def _wire_content(content: Content) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    return [_wire_part(part) for part in content]


def _wire_part(part: TextPart | ImagePart | AudioPart | FilePart) -> dict[str, Any]:
    if isinstance(part, TextPart):
        return {"type": "text", "text": part.text}
    if isinstance(part, AudioPart):
        raise ModelFailed("the messages API takes no sound; send it as text", started=False)
    if isinstance(part, ImagePart):
        if part.data.startswith(("http://", "https://")):
            return {"type": "image", "source": {"type": "url", "url": part.data}}
        kind: str = part.mime_type or "image/png"
        data = part.data
        if data.startswith("data:"):
            head, _, data = data.partition(",")
            kind = head.removeprefix("data:").partition(";")[0] or kind
        return {"type": "image", "source": {"type": "base64", "media_type": kind, "data": data}}
    source = {"type": "base64", "media_type": part.mime_type, "data": part.data}
    named = {"title": part.filename} if part.filename else {}
    return {"type": "document", "source": source, **named}


# --- the answer -------------------------------------------------------------------------------------------


def _response(answer: Mapping[str, Any], names: WireNames) -> ModelResponse:
    """A whole answer; raises ``TypeError`` or ``LookupError`` for what is none."""
    blocks = answer["content"]
    if not isinstance(blocks, list):
        raise TypeError
    calls = tuple(
        ToolCall(str(block["id"]), names.from_wire(block["name"]), dict(block["input"]))
        for block in blocks
        if block["type"] == "tool_use"
    )
    return ModelResponse(
        text="".join(block["text"] for block in blocks if block["type"] == "text"),
        tool_calls=calls,
        usage=_usage(answer.get("usage")),
        finish_reason=_finish(answer.get("stop_reason"), bool(calls)),
        extras=_extras(blocks),
    )


def _extras(blocks: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """What must go back verbatim; nothing where text and calls say it all."""
    if all(block["type"] in ("text", "tool_use") and not block.get("citations") for block in blocks):
        return None
    return {EXTRAS: {"content": [dict(block) for block in blocks]}}


def _finish(reason: object, has_calls: bool) -> FinishReason:
    return _FINISH.get(reason) or ("tool_calls" if has_calls else "stop")


def _usage(reported: object) -> Usage | None:
    """The usage of an answer. What came from a cache, or went into one, is input like all other."""
    if not isinstance(reported, Mapping):
        return None
    given, made = reported.get("input_tokens"), reported.get("output_tokens")
    if not isinstance(given, int) or not isinstance(made, int):
        return None
    read = reported.get("cache_read_input_tokens") or 0
    written = reported.get("cache_creation_input_tokens") or 0
    return Usage(input_tokens=given + read + written, output_tokens=made, cached_tokens=read)


class _Pieces:
    """Turns the events of one streamed message into chunks."""

    def __init__(self, names: WireNames) -> None:
        self._names = names
        self._blocks: dict[int, dict[str, Any]] = {}
        """The blocks as far as they have come, by place."""
        self._json: dict[int, list[str]] = {}
        self._usage: dict[str, Any] = {}

    def take(self, event: Mapping[str, Any]) -> list[ModelChunk]:
        match event["type"]:
            case "message_start":
                return self._count(event["message"].get("usage"), terminal=False)
            case "content_block_start":
                return self._begin(event["index"], dict(event["content_block"]))
            case "content_block_delta":
                return self._grow(event["index"], event["delta"])
            case "message_delta":
                reason = event["delta"].get("stop_reason")
                chunks = self._count(event.get("usage"), terminal=True)
                return [*chunks, *self._finished(reason)] if reason else chunks
        return []  # the SDK raises events that are errors

    def _begin(self, place: int, block: dict[str, Any]) -> list[ModelChunk]:
        self._blocks[place] = block
        if block["type"] == "tool_use":
            return [ToolCallPiece(index=place, id=block["id"], name=self._names.from_wire(block["name"]))]
        text = block.get("text") if block["type"] == "text" else None
        return [TextPiece(text)] if text else []

    def _grow(self, place: int, delta: Mapping[str, Any]) -> list[ModelChunk]:
        block = self._blocks[place]
        match delta["type"]:
            case "text_delta":
                block["text"] = block.get("text", "") + delta["text"]
                return [TextPiece(delta["text"])]
            case "input_json_delta":
                self._json.setdefault(place, []).append(delta["partial_json"])
                if block["type"] == "tool_use":  # there are those of the provider's own tools, too
                    return [ToolCallPiece(index=place, arguments=delta["partial_json"])]
            case "citations_delta":
                block["citations"] = [*(block.get("citations") or []), delta["citation"]]
            case "thinking_delta":
                block["thinking"] = block.get("thinking", "") + delta["thinking"]
            case "signature_delta":
                block["signature"] = block.get("signature", "") + delta["signature"]
        return []

    def _count(self, reported: object, *, terminal: bool) -> list[ModelChunk]:
        """The message's own numbers first, then what the end says of them."""
        if isinstance(reported, Mapping):
            self._usage |= {name: value for name, value in reported.items() if value is not None}
        used = _usage(self._usage)
        return [] if used is None else [UsagePiece(used, terminal=terminal)]

    def _finished(self, reason: object) -> list[ModelChunk]:
        for place, pieces in self._json.items():
            self._blocks[place]["input"] = _parsed("".join(pieces))
        blocks = [self._blocks[place] for place in sorted(self._blocks)]
        calls = [place for place, block in self._blocks.items() if block["type"] == "tool_use"]
        whole: list[
            ModelChunk
        ] = [  # some servers give the arguments at once, with the beginning of the block
            ToolCallPiece(index=place, arguments=json.dumps(self._blocks[place].get("input") or {}))
            for place in calls
            if place not in self._json
        ]
        return [*whole, FinishPiece(_finish(reason, bool(calls)), extras=_extras(blocks))]


def _parsed(text: str) -> Any:
    """Arguments for the block that goes back; what is broken fails where the pieces are put together."""
    try:
        return json.loads(text or "{}")
    except ValueError:
        return {}
