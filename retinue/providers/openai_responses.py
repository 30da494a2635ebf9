"""Models behind the responses API of OpenAI, through its SDK.

What the API wants back in the next request (reasoning, its own message items) is kept in the extras of the
assistant's message and sent verbatim; nothing is stored at the provider.
"""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from retinue.budgets import Usage
from retinue.errors import ModelFailed
from retinue.messages import AudioPart, Content, FilePart, ImagePart, Message, TextPart, ToolCall
from retinue.models import (
    FinishPiece,
    FinishReason,
    ItemPhase,
    ModelCapabilities,
    ModelChunk,
    ModelRequest,
    ModelResponse,
    PublicItem,
    TextPiece,
    ToolCallPiece,
    UsagePiece,
)
from retinue.providers.endpoint import DEFAULT_TIMEOUT, Endpoint, check_server, with_options
from retinue.providers.openai_chat import DEFAULT_BASE_URL, MISSING_SDK
from retinue.providers.openai_wire import WireNames

if TYPE_CHECKING:
    from openai import AsyncOpenAI

EXTRAS = "openai.responses"
"""Key of ``Message.extras`` for the items of an answer."""
_PHASES: dict[object, ItemPhase] = {"commentary": "commentary", "final": "final", "final_answer": "final"}
_ENCRYPTED = "reasoning.encrypted_content"
_WHAT = "response of the responses API"
_Broke = Callable[[Mapping[str, Any], Usage | None], ModelFailed]
"""Makes the error for one that came instead of an answer, with what the provider says of it."""


@dataclass(frozen=True)
class OpenAIResponsesModel:
    """A model client for one model of one server; plain data, its connections are made where it is used."""

    model: str
    base_url: str | None = None
    """``http://127.0.0.1:8080/v1``; OPENAI_BASE_URL of the environment, or OpenAI itself, when left out."""
    api_key_env: str = "OPENAI_API_KEY"
    """Name of the environment variable that holds the key, in the process that makes the call."""
    timeout: float = DEFAULT_TIMEOUT
    """Seconds for one answer; of a stream, for each of its pieces."""
    reasoning_summary: str | None = None
    """``auto``, ``concise`` or ``detailed``: summaries of the reasoning, as messages that may be shown."""

    def __post_init__(self) -> None:
        check_server("an OpenAI model", self.model, self.base_url, self.api_key_env)

    @property
    def provider_id(self) -> str:
        return "openai"

    @property
    def model_id(self) -> str:
        return self.model

    @property
    def capabilities(self) -> ModelCapabilities:
        return ModelCapabilities(message_phases="native", reasoning_summaries="native")

    @property
    def server(self) -> str:
        """The base URL that calls go to, as this process sees it."""
        return self.base_url or os.environ.get("OPENAI_BASE_URL") or DEFAULT_BASE_URL

    async def generate(self, request: ModelRequest) -> ModelResponse:
        """One response, without streaming and without retries."""
        names = WireNames(request.tools)
        options = self._options(request, names)
        key = self._endpoint.key()
        client = await self._client(key)
        import openai

        try:
            raw = await client.responses.with_raw_response.create(**options)
        except openai.OpenAIError as error:
            raise self._endpoint.failure(error, key) from None
        try:
            return _response(json.loads(raw.content), names, self._called, partial(self._endpoint.broke, key))
        except (ValueError, LookupError, TypeError, AttributeError):
            raise self._endpoint.no_answer(_WHAT, raw.content, key) from None

    async def stream(self, request: ModelRequest) -> AsyncIterator[ModelChunk]:
        """One response, piece by piece, without retries; closing it ends the request."""
        names = WireNames(request.tools)
        options = self._options(request, names)
        key = self._endpoint.key()
        client = await self._client(key)
        import openai

        try:
            stream = await client.responses.create(**options, stream=True)
            try:
                pieces = _Pieces(names, partial(self._endpoint.broke, key))
                async for raw in stream:
                    for chunk in pieces.take(raw.to_dict(warnings=False)):
                        yield chunk
            finally:
                await stream.close()
        except openai.OpenAIError as error:
            raise self._endpoint.failure(error, key) from None
        except (ValueError, LookupError, TypeError, AttributeError):
            raise ModelFailed(f"{self._called} streamed something that is no {_WHAT}") from None

    async def close(self) -> None:
        """Close the connections that this event loop has to the server; a later call opens new ones."""
        await self._endpoint.close()

    @property
    def _called(self) -> str:
        return f"model {self.model} at {self.server}"

    @property
    def _endpoint(self) -> Endpoint:
        return Endpoint(
            sdk="openai",
            missing=MISSING_SDK,
            called=self._called,
            server=self.server,
            key_env=self.api_key_env,
            default_server=DEFAULT_BASE_URL,
            timeout=self.timeout,
        )

    async def _client(self, key: str) -> AsyncOpenAI:
        client: AsyncOpenAI = await self._endpoint.client(
            key,
            lambda openai: openai.AsyncOpenAI(
                base_url=self.server, api_key=key, timeout=self.timeout, max_retries=0
            ),
        )
        return client

    def _options(self, request: ModelRequest, names: WireNames) -> dict[str, Any]:
        options: dict[str, Any] = {
            "model": self.model,
            "input": [item for message in request.messages for item in _wire_items(message, names)],
        }
        if request.tools:
            options["tools"] = [
                {
                    "type": "function",
                    "name": names.to_wire(schema.name),
                    "description": schema.description,
                    "parameters": schema.parameters,
                    "strict": False,
                }
                for schema in request.tools
            ]
        if request.max_tokens is not None:
            options["max_output_tokens"] = request.max_tokens
        if request.temperature is not None:
            options["temperature"] = request.temperature
        further: dict[str, Any] = {"store": False, **request.options}
        further["include"] = list(dict.fromkeys([_ENCRYPTED, *(further.get("include") or [])]))
        if self.reasoning_summary is not None:
            further["reasoning"] = {"summary": self.reasoning_summary, **(further.get("reasoning") or {})}
        return with_options(options, further, self._called)


# --- the request ------------------------------------------------------------------------------------------


def _wire_items(message: Message, names: WireNames) -> list[dict[str, Any]]:
    """A message as items of the API; its own items go back as they came."""
    kept = (message.extras or {}).get(EXTRAS)
    if message.role == "assistant" and isinstance(kept, Mapping) and isinstance(kept.get("output"), list):
        return list(kept["output"])
    if message.role == "tool":
        return [{"type": "function_call_output", "call_id": message.tool_call_id, "output": message.text}]
    items: list[dict[str, Any]] = []
    if message.role != "assistant" or message.text:
        content = _wire_content(message.content, message.role)
        # OpenAI does not need the type; llama.cpp does, for what an assistant said.
        items.append({"type": "message", "role": message.role, "content": content})
    items += [
        {
            "type": "function_call",
            "call_id": call.id,
            "name": names.to_wire(call.name),
            "arguments": json.dumps(call.arguments, ensure_ascii=False),
        }
        for call in message.tool_calls
    ]
    return items


def _wire_content(content: Content, role: str) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    if role == "assistant":
        return "\n".join(part.text for part in content if isinstance(part, TextPart))
    return [_wire_part(part) for part in content]


def _wire_part(part: TextPart | ImagePart | AudioPart | FilePart) -> dict[str, Any]:
    if isinstance(part, TextPart):
        return {"type": "input_text", "text": part.text}
    if isinstance(part, ImagePart):
        is_url = part.data.startswith(("http://", "https://", "data:"))
        url = part.data if is_url else f"data:{part.mime_type or 'image/png'};base64,{part.data}"
        return {"type": "input_image", "image_url": url}
    if isinstance(part, AudioPart):
        kind = (part.mime_type or "audio/wav").removeprefix("audio/")
        return {"type": "input_audio", "input_audio": {"data": part.data, "format": kind}}
    data = f"data:{part.mime_type or 'application/octet-stream'};base64,{part.data}"
    return {"type": "input_file", "filename": part.filename or "file", "file_data": data}


# --- the answer -------------------------------------------------------------------------------------------


def _response(answer: Mapping[str, Any], names: WireNames, called: str, broke: _Broke) -> ModelResponse:
    """A whole answer; raises ``TypeError`` or ``LookupError`` for what is none."""
    output = answer["output"]
    if not isinstance(output, list):
        raise TypeError
    used = _usage(answer.get("usage"))
    if answer.get("status") == "failed":
        raise broke(answer.get("error") or {}, used)
    cut = answer.get("status") == "incomplete"
    calls = tuple(
        _tool_call(item, names, called, used, cut) for item in output if item["type"] == "function_call"
    )
    items = _items(output)
    return ModelResponse(
        text="".join(item.text for item in items if item.phase != "reasoning_summary"),
        tool_calls=calls,
        usage=used,
        finish_reason=_finish(answer, bool(calls)),
        extras=_extras(output),
        items=items,
    )


def _items(output: Sequence[Mapping[str, Any]]) -> tuple[PublicItem, ...]:
    found: list[PublicItem] = []
    for item in output:
        if item["type"] == "message":
            parts = [part.get("text") or part.get("refusal") or "" for part in item.get("content") or []]
            phase = _PHASES.get(item.get("phase"))
            found.append(PublicItem(id=str(item["id"]), phase=phase, text="".join(parts)))
        elif item["type"] == "reasoning":
            parts = [part.get("text") or "" for part in item.get("summary") or []]
            if any(parts):
                text = "\n\n".join(parts)
                found.append(PublicItem(id=str(item["id"]), phase="reasoning_summary", text=text))
    return tuple(found)


def _extras(output: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """What must go back verbatim; nothing where text and calls say it all."""
    plain = all(item["type"] in ("message", "function_call") and not item.get("phase") for item in output)
    return None if plain else {EXTRAS: {"output": [dict(item) for item in output]}}


def _tool_call(
    item: Mapping[str, Any], names: WireNames, called: str, used: Usage | None, cut: bool
) -> ToolCall:
    name = names.from_wire(item["name"])
    try:
        arguments = json.loads(item.get("arguments") or "{}")
    except ValueError:
        arguments = None
    if not isinstance(arguments, dict):
        why = ": the answer was cut at the output cap" if cut else ""
        raise ModelFailed(
            f"{called} called {name} with arguments that are no JSON object{why}; no tool was run",
            usage=None if used is None else msgspec.to_builtins(used),
        )
    return ToolCall(str(item["call_id"]), name, arguments)


def _finish(answer: Mapping[str, Any], has_calls: bool) -> FinishReason:
    if answer.get("status") == "incomplete":
        why = (answer.get("incomplete_details") or {}).get("reason")
        return "content_filter" if why == "content_filter" else "length"
    return "tool_calls" if has_calls else "stop"


def _usage(reported: object) -> Usage | None:
    if not isinstance(reported, Mapping):
        return None
    given, made = reported.get("input_tokens"), reported.get("output_tokens")
    if not isinstance(given, int) or not isinstance(made, int):
        return None
    return Usage(
        input_tokens=given,
        output_tokens=made,
        cached_tokens=(reported.get("input_tokens_details") or {}).get("cached_tokens") or 0,
        reasoning_tokens=(reported.get("output_tokens_details") or {}).get("reasoning_tokens") or 0,
    )


class _Pieces:
    """Turns the events of one streamed response into chunks."""

    def __init__(self, names: WireNames, broke: _Broke) -> None:
        self._names = names
        self._broke = broke
        self._calls: dict[int, bool] = {}
        """Places of tool calls in the output, and whether pieces of their arguments came."""
        self._phases: dict[str, ItemPhase | None] = {}
        self._places: dict[str, int] = {}
        """Places of items by their ids, for servers that give none (llama.cpp's is one)."""

    def take(self, event: Mapping[str, Any]) -> list[ModelChunk]:
        match event["type"]:
            case "response.output_item.added":
                return self._added(event["item"], self._place(event))
            case "response.output_text.delta" | "response.refusal.delta":
                item_id = event["item_id"]
                return [TextPiece(event["delta"], item_id, self._phases.get(item_id))]
            case "response.reasoning_summary_text.delta":
                return [TextPiece(event["delta"], event["item_id"], "reasoning_summary")]
            case "response.reasoning_summary_part.added" if event.get("summary_index"):
                return [TextPiece("\n\n", event["item_id"], "reasoning_summary")]
            case "response.function_call_arguments.delta":
                place = self._place(event)
                self._calls[place] = True
                return [ToolCallPiece(index=place, arguments=event["delta"])]
            case "response.output_item.done" if event["item"]["type"] == "function_call":
                place = self._place(event)
                if self._calls.get(place):
                    return []
                return [ToolCallPiece(index=place, arguments=event["item"].get("arguments") or "")]
            case "response.completed" | "response.incomplete":
                return self._finished(event["response"])
            case "response.failed":
                answer = event["response"]
                raise self._broke(answer.get("error") or {}, _usage(answer.get("usage")))
            case "error":
                raise self._broke({name: event.get(name) for name in ("code", "message")}, None)
        return []

    def _place(self, event: Mapping[str, Any]) -> int:
        index = event.get("output_index")
        if isinstance(index, int):
            return index
        item_id = event.get("item_id") or event["item"]["id"]
        return self._places.setdefault(item_id, len(self._places))

    def _added(self, item: Mapping[str, Any], place: int) -> list[ModelChunk]:
        if item["type"] == "message":
            self._phases[item["id"]] = _PHASES.get(item.get("phase"))
        if item["type"] != "function_call":
            return []
        self._calls[place] = False
        name = self._names.from_wire(item["name"])
        return [ToolCallPiece(index=place, id=item["call_id"], name=name)]

    def _finished(self, answer: Mapping[str, Any]) -> list[ModelChunk]:
        output = answer["output"]
        items = _items(output)
        calls = any(item["type"] == "function_call" for item in output)
        chunks: list[ModelChunk] = []
        if (used := _usage(answer.get("usage"))) is not None:
            chunks.append(UsagePiece(used))
        chunks.append(FinishPiece(_finish(answer, calls), extras=_extras(output), items=items))
        return chunks
