"""Any model that pydantic-ai's model layer knows: Google, Bedrock, Mistral, Groq and others.

Only its models are used, through its direct requests: no agent of its own, no retries.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from retinue.budgets import Usage
from retinue.errors import ModelFailed, ValidationFailed
from retinue.messages import AudioPart, Content, FilePart, ImagePart, Message, TextPart, ToolCall
from retinue.models import (
    FinishPiece,
    FinishReason,
    ModelChunk,
    ModelRequest,
    ModelResponse,
    TextPiece,
    ToolCallPiece,
    UsagePiece,
)
from retinue.providers.endpoint import NO_KEY, quote
from retinue.providers.openai_wire import WireNames

if TYPE_CHECKING:
    from pydantic_ai import messages as wire
    from pydantic_ai.models import Model, ModelRequestParameters

MISSING_SDK = "pydantic-ai is not installed; install it with: pip install 'retinue[pydantic-ai]'"
EXTRAS = "pydantic_ai"
"""Key of ``Message.extras`` for an answer as pydantic-ai has it."""
_RETRYABLE = frozenset({408, 409, 425, 429})


@dataclass(frozen=True)
class PydanticAIModel:
    """A model client over a model of pydantic-ai; made where it is used when it is given by name."""

    model: str | Model
    """``"google-gla:gemini-2.5-flash"`` and the like, or a model object, which must be picklable on Ray."""

    def __post_init__(self) -> None:
        model: object = self.model
        if not model or (isinstance(model, str) and ":" not in model):
            raise ValidationFailed(
                f"a pydantic-ai model is named <provider>:<model>, as in google-gla:gemini-2.5-flash, not "
                f"{model!r:.80}",
                path="model",
            )

    @property
    def provider_id(self) -> str:
        if isinstance(self.model, str):
            return self.model.partition(":")[0]
        return str(self.model.system)

    @property
    def model_id(self) -> str:
        return self.model.partition(":")[2] if isinstance(self.model, str) else self.model.model_name

    async def generate(self, request: ModelRequest) -> ModelResponse:
        """One answer, without streaming and without retries."""
        direct = await self._direct()
        names = WireNames(request.tools)
        try:
            response = await direct.model_request(self.model, **_asked(request, names))
        except Exception as error:
            raise self._failure(error) from error
        return _response(response, names)

    async def stream(self, request: ModelRequest) -> AsyncIterator[ModelChunk]:
        """One answer, piece by piece, without retries; closing it ends the request."""
        direct = await self._direct()
        names = WireNames(request.tools)
        try:
            async with direct.model_request_stream(self.model, **_asked(request, names)) as streamed:
                pieces = _Pieces(names)
                async for event in streamed:
                    for chunk in pieces.take(event):
                        yield chunk
                for chunk in pieces.end(streamed.get()):
                    yield chunk
        except (ModelFailed, GeneratorExit):
            raise
        except Exception as error:
            raise self._failure(error) from error

    async def _direct(self) -> Any:
        try:
            return await asyncio.to_thread(__import__, "pydantic_ai.direct", fromlist=["direct"])
        except ImportError:
            raise ModelFailed(MISSING_SDK, started=False) from None

    def _failure(self, error: Exception) -> ModelFailed:
        from pydantic_ai.exceptions import ModelAPIError, ModelHTTPError, UserError

        called = f"model {self.model_id} of {self.provider_id}"
        said = quote(str(error), NO_KEY)
        if isinstance(error, ModelHTTPError):
            status = error.status_code
            return ModelFailed(
                f"{called} refused with HTTP {status}",
                status=status,
                started=status >= 500,
                retryable=status in _RETRYABLE or status >= 500,
            )
        if isinstance(error, UserError | ImportError):
            return ModelFailed(f"{called} cannot be used: {said}", started=False)
        return ModelFailed(
            f"{called} failed: {type(error).__name__}: {said}", retryable=isinstance(error, ModelAPIError)
        )


# --- the request ------------------------------------------------------------------------------------------


def _asked(request: ModelRequest, names: WireNames) -> dict[str, Any]:
    settings: dict[str, Any] = dict(request.options)
    if request.max_tokens is not None:
        settings["max_tokens"] = request.max_tokens
    if request.temperature is not None:
        settings["temperature"] = request.temperature
    return {
        "messages": _wire_messages(request.messages, names),
        "model_settings": settings or None,
        "model_request_parameters": _parameters(request, names),
    }


def _parameters(request: ModelRequest, names: WireNames) -> ModelRequestParameters:
    from pydantic_ai.models import ModelRequestParameters
    from pydantic_ai.tools import ToolDefinition

    return ModelRequestParameters(
        function_tools=[
            ToolDefinition(
                name=names.to_wire(schema.name),
                description=schema.description,
                parameters_json_schema=schema.parameters,
            )
            for schema in request.tools
        ]
    )


def _wire_messages(messages: Sequence[Message], names: WireNames) -> list[wire.ModelMessage]:
    """The conversation as pydantic-ai has it: requests of parts, and responses."""
    from pydantic_ai import messages as wire

    called = {call.id: names.to_wire(call.name) for message in messages for call in message.tool_calls}
    made: list[wire.ModelMessage] = []
    for message in messages:
        if message.role == "assistant":
            made.append(_wire_response(message, names))
            continue
        part: wire.ModelRequestPart
        if message.role == "system":
            part = wire.SystemPromptPart(message.text)
        elif message.role == "tool":
            call_id = message.tool_call_id or ""
            part = wire.ToolReturnPart(called.get(call_id, call_id), message.text, call_id)
        else:
            part = wire.UserPromptPart(_wire_content(message.content))
        last = made[-1] if made else None
        if isinstance(last, wire.ModelRequest):
            last.parts = [*last.parts, part]
        else:
            made.append(wire.ModelRequest(parts=[part]))
    return made


def _wire_response(message: Message, names: WireNames) -> wire.ModelResponse:
    from pydantic_ai import messages as wire

    kept = (message.extras or {}).get(EXTRAS)
    if isinstance(kept, Mapping):
        (response,) = wire.ModelMessagesTypeAdapter.validate_python([kept])
        assert isinstance(response, wire.ModelResponse)
        return response
    parts: list[Any] = [wire.TextPart(message.text)] if message.text else []
    parts += [
        wire.ToolCallPart(names.to_wire(call.name), call.arguments, call.id) for call in message.tool_calls
    ]
    return wire.ModelResponse(parts=parts)


def _wire_content(content: Content) -> Any:
    if isinstance(content, str):
        return content
    return [_wire_part(part) for part in content]


def _wire_part(part: TextPart | ImagePart | AudioPart | FilePart) -> Any:
    import base64

    from pydantic_ai import messages as wire

    if isinstance(part, TextPart):
        return part.text
    if isinstance(part, ImagePart) and part.data.startswith(("http://", "https://")):
        return wire.ImageUrl(url=part.data)
    default = {ImagePart: "image/png", AudioPart: "audio/wav"}.get(type(part), "application/octet-stream")
    data = part.data.partition(",")[2] if part.data.startswith("data:") else part.data
    return wire.BinaryContent(base64.b64decode(data), media_type=part.mime_type or default)


# --- the answer -------------------------------------------------------------------------------------------


def _response(response: wire.ModelResponse, names: WireNames) -> ModelResponse:
    from pydantic_ai import messages as wire

    calls = tuple(
        ToolCall(part.tool_call_id, names.from_wire(part.tool_name), _arguments(part))
        for part in response.parts
        if isinstance(part, wire.ToolCallPart)
    )
    return ModelResponse(
        text="".join(part.content for part in response.parts if isinstance(part, wire.TextPart)),
        tool_calls=calls,
        usage=_usage(response.usage),
        finish_reason=_finish(response.finish_reason, bool(calls)),
        extras=_extras(response),
    )


def _arguments(part: wire.ToolCallPart) -> dict[str, Any]:
    try:
        return part.args_as_dict()
    except (ValueError, AssertionError):
        raise ModelFailed(
            f"the model called {part.tool_name} with arguments that are no JSON object; no tool was run"
        ) from None


def _extras(response: wire.ModelResponse) -> dict[str, Any] | None:
    """The answer as it is, where it holds more than text and calls: it must go back so."""
    from pydantic_ai import messages as wire

    plain = all(
        isinstance(part, wire.TextPart | wire.ToolCallPart) and not part.provider_details
        for part in response.parts
    )
    if plain:
        return None
    (kept,) = wire.ModelMessagesTypeAdapter.dump_python([response], mode="json")
    return {EXTRAS: kept}


def _usage(reported: Any) -> Usage | None:
    if reported is None or not (reported.input_tokens or reported.output_tokens):
        return None  # the model layer has zeros where its provider said nothing
    return Usage(
        input_tokens=reported.input_tokens,
        output_tokens=reported.output_tokens,
        cached_tokens=reported.cache_read_tokens,
        reasoning_tokens=(reported.details or {}).get("reasoning_tokens", 0),
        audio_input_tokens=reported.input_audio_tokens,
        audio_output_tokens=getattr(reported, "output_audio_tokens", 0),
    )


def _finish(reason: str | None, has_calls: bool) -> FinishReason:
    if reason in ("length", "content_filter"):
        return "length" if reason == "length" else "content_filter"
    if reason == "error":
        raise ModelFailed("the model ended its answer with an error")
    return "tool_calls" if has_calls else "stop"


class _Pieces:
    """Turns the events of one streamed answer into chunks."""

    def __init__(self, names: WireNames) -> None:
        self._names = names
        self._called = False

    def take(self, event: Any) -> list[ModelChunk]:
        from pydantic_ai import messages as wire

        if isinstance(event, wire.PartStartEvent):
            return self._begin(event.index, event.part)
        if not isinstance(event, wire.PartDeltaEvent):
            return []
        delta = event.delta
        if isinstance(delta, wire.TextPartDelta):
            return [TextPiece(delta.content_delta)] if delta.content_delta else []
        if isinstance(delta, wire.ToolCallPartDelta) and isinstance(delta.args_delta, str):
            return [ToolCallPiece(index=event.index, arguments=delta.args_delta)]
        return []

    def _begin(self, place: int, part: Any) -> list[ModelChunk]:
        from pydantic_ai import messages as wire

        if isinstance(part, wire.TextPart):
            return [TextPiece(part.content)] if part.content else []
        if not isinstance(part, wire.ToolCallPart):
            return []
        self._called = True
        arguments = part.args if isinstance(part.args, str) else part.args_as_json_str() if part.args else ""
        name = self._names.from_wire(part.tool_name)
        return [ToolCallPiece(index=place, id=part.tool_call_id, name=name, arguments=arguments)]

    def end(self, response: wire.ModelResponse) -> list[ModelChunk]:
        chunks: list[ModelChunk] = []
        if (used := _usage(response.usage)) is not None:
            chunks.append(UsagePiece(used))
        finish = _finish(response.finish_reason, self._called)
        chunks.append(FinishPiece(finish, extras=_extras(response)))
        return chunks
