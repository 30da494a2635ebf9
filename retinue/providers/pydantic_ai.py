"""Any model that pydantic-ai's model layer knows: Google, Bedrock, Mistral, Groq and others.

Only its models are used, through its direct requests: no agent of its own, no retries.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from retinue.budgets import Usage
from retinue.errors import ModelFailed, ValidationFailed
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
from retinue.providers.endpoint import NO_KEY, passes, quote
from retinue.providers.openai_wire import WireNames
from retinue.stream_assembly import chunks_of

if TYPE_CHECKING:
    from pydantic_ai import messages as wire
    from pydantic_ai.models import Model, ModelRequestParameters

MISSING_SDK = "pydantic-ai is not installed; install it with: pip install 'retinue[pydantic-ai]'"
EXTRAS = "pydantic_ai"
"""Key of ``Message.extras`` for an answer as pydantic-ai has it."""
_models: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, Model]]
_models = weakref.WeakKeyDictionary()
"""Models by name, of each event loop of this process."""


@dataclass(frozen=True)
class PydanticAIModel:
    """A model client over a model of pydantic-ai; made where it is used when it is given by name."""

    model: str | Model
    """``"google:gemini-2.5-flash"`` and the like, or a model object, which must be picklable on Ray."""

    def __post_init__(self) -> None:
        model: object = self.model
        if not model or (isinstance(model, str) and ":" not in model):
            raise ValidationFailed(
                f"a pydantic-ai model is named <provider>:<model>, as in google:gemini-2.5-flash, not "
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

    @property
    def capabilities(self) -> ModelCapabilities:
        return ModelCapabilities()

    async def generate(self, request: ModelRequest) -> ModelResponse:
        """One answer, without streaming and without retries."""
        direct = await self._direct()
        names = WireNames(request.tools)
        try:
            model = await self._model()
            response = await direct.model_request(model, **_asked(request, names, model))
        except Exception as error:
            raise self._failure(error) from None
        return _response(response, names)

    async def stream(self, request: ModelRequest) -> AsyncIterator[ModelChunk]:
        """One answer, piece by piece, without retries; closing it ends the request."""
        direct = await self._direct()
        names = WireNames(request.tools)
        try:
            model = await self._model()
            if not _streams(model):
                for chunk in chunks_of(await self.generate(request)):
                    yield chunk
                return
            async with direct.model_request_stream(model, **_asked(request, names, model)) as streamed:
                async for event in streamed:
                    if text := _text_of(event):
                        yield TextPiece(text)
                for chunk in _end(streamed.get(), names):
                    yield chunk
        except ModelFailed:
            raise
        except Exception as error:
            raise self._failure(error) from None

    async def close(self) -> None:
        """Close the connections that this event loop has for a model by name; a later call opens new ones."""
        if isinstance(self.model, str):
            known = _models.get(asyncio.get_running_loop(), {}).pop(self.model, None)
            if known is not None:
                await known.__aexit__(None, None, None)

    async def _direct(self) -> Any:
        try:
            return await asyncio.to_thread(__import__, "pydantic_ai.direct", fromlist=["direct"])
        except ImportError:
            raise ModelFailed(MISSING_SDK, started=False) from None

    async def _model(self) -> Model:
        """The model; one that is given by name is made once on each event loop, with its connections."""
        if not isinstance(self.model, str):
            return self.model
        models = _models.setdefault(asyncio.get_running_loop(), {})
        if self.model not in models:
            from pydantic_ai.models import infer_model

            made = infer_model(self.model)
            models[self.model] = made  # before the next await: others ask at the same moment
            await made.__aenter__()
        return models[self.model]

    def _failure(self, error: Exception) -> ModelFailed:
        """An error of the model layer as ours, without what a server said: it may quote keys and prompts."""
        from pydantic_ai import exceptions as wire

        called = f"model {self.model_id} of {self.provider_id}"
        if isinstance(error, wire.UserError | ImportError):  # of this machine, before anything was sent
            return ModelFailed(f"{called} cannot be used: {quote(str(error), NO_KEY)}", started=False)
        if not isinstance(error, wire.ModelAPIError):
            return ModelFailed(f"{called} failed with {type(error).__name__}")
        status = error.status_code if isinstance(error, wire.ModelHTTPError) else None
        refused = isinstance(error, wire.ModelRequestRejectedError | wire.ModelQuotaExceededError)
        unsent = isinstance(error, wire.ModelConnectionError) and error.phase in ("pool", "connect")
        began = status >= 500 if status is not None else not refused
        return ModelFailed(
            f"{called} {'failed' if status is None else f'refused with HTTP {status}'}: "
            f"{error.provider_error_code or error.provider_error_type or type(error).__name__}",
            status=status,
            started=not unsent and (error.in_stream or began),
            retryable=not refused if status is None else passes(status) and not refused,
            retry_after=error.retry_after,
        )


# --- the request ------------------------------------------------------------------------------------------


def _streams(model: Model) -> bool:
    """Whether a model can stream: the base class has a method that only says that it cannot."""
    from pydantic_ai.models import Model

    return type(model).request_stream is not Model.request_stream


def _asked(request: ModelRequest, names: WireNames, model: Model) -> dict[str, Any]:
    settings: dict[str, Any] = dict(request.options)
    if "max_retries" not in model.unsupported_settings:
        settings["max_retries"] = 0  # SDKs try twice more by themselves, and no ledger sees it
    if request.max_tokens is not None:
        settings["max_tokens"] = request.max_tokens
    if request.temperature is not None:
        settings["temperature"] = request.temperature
    return {
        "messages": _wire_messages(request.messages, names),
        "model_settings": settings,
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

    used = _usage(response.usage)
    calls = tuple(
        ToolCall(part.tool_call_id, names.from_wire(part.tool_name), _arguments(part, used))
        for part in response.parts
        if isinstance(part, wire.ToolCallPart)
    )
    return ModelResponse(
        text="".join(part.content for part in response.parts if isinstance(part, wire.TextPart)),
        tool_calls=calls,
        usage=used,
        finish_reason=_finish(response.finish_reason, bool(calls), used),
        extras=_extras(response),
    )


def _arguments(part: wire.ToolCallPart, used: Usage | None) -> dict[str, Any]:
    try:
        return part.args_as_dict(raise_if_invalid=True)
    except (ValueError, AssertionError):
        raise ModelFailed(
            f"the model called {part.tool_name} with arguments that are no JSON object; no tool was run",
            usage=None if used is None else msgspec.to_builtins(used),
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
        audio_output_tokens=reported.output_audio_tokens,
    )


def _finish(reason: str | None, has_calls: bool, used: Usage | None) -> FinishReason:
    if reason in ("length", "content_filter"):
        return "length" if reason == "length" else "content_filter"
    if reason == "error":
        raise ModelFailed(
            "the model ended its answer with an error",
            usage=None if used is None else msgspec.to_builtins(used),
        )
    return "tool_calls" if has_calls else "stop"


def _end(response: wire.ModelResponse, names: WireNames) -> list[ModelChunk]:
    """What ends a stream. Calls come whole: providers may give the parts of several in any order, and
    arguments as objects that replace each other."""
    from pydantic_ai import messages as wire

    calls = [part for part in response.parts if isinstance(part, wire.ToolCallPart)]
    chunks: list[ModelChunk] = [
        ToolCallPiece(
            index=index,
            id=part.tool_call_id,
            name=names.from_wire(part.tool_name),
            arguments=part.args if isinstance(part.args, str) else part.args_as_json_str(),
        )
        for index, part in enumerate(calls)
    ]
    used = _usage(response.usage)
    if used is not None:
        chunks.append(UsagePiece(used))
    finish = _finish(response.finish_reason, bool(calls), used)
    return [*chunks, FinishPiece(finish, extras=_extras(response))]


def _text_of(event: object) -> str:
    """The piece of text in an event of a stream; reasoning is left out."""
    from pydantic_ai import messages as wire

    if isinstance(event, wire.PartStartEvent) and isinstance(event.part, wire.TextPart):
        return event.part.content
    if isinstance(event, wire.PartDeltaEvent) and isinstance(event.delta, wire.TextPartDelta):
        return event.delta.content_delta
    return ""
