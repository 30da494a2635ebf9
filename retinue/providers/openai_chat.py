"""Models behind the chat completions API of OpenAI and of the many servers that speak it, through its SDK."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

import msgspec

from retinue.budgets import Usage
from retinue.errors import ModelFailed
from retinue.messages import ToolCall
from retinue.models import ModelCapabilities, ModelChunk, ModelRequest, ModelResponse
from retinue.providers.endpoint import DEFAULT_TIMEOUT, Endpoint, check_server, with_options
from retinue.providers.openai_wire import (
    StreamPieces,
    WireNames,
    finish_reason,
    usage,
    wire_message,
    wire_tool,
)
from retinue.stream_assembly import chunks_of

if TYPE_CHECKING:
    from openai import AsyncOpenAI, AsyncStream

DEFAULT_BASE_URL = "https://api.openai.com/v1"
MISSING_SDK = "the openai SDK is not installed; install it with: pip install 'retinue[openai]'"

LimitParameter = Literal["max_tokens", "max_completion_tokens"]
_LIMITS = ("max_tokens", "max_completion_tokens")


@dataclass(frozen=True)
class OpenAIChatModel:
    """A model client for one model of one server; plain data, its connections are made where it is used."""

    model: str
    base_url: str | None = None
    """``http://127.0.0.1:8080/v1``; OPENAI_BASE_URL of the environment, or OpenAI itself, when left out."""
    api_key_env: str = "OPENAI_API_KEY"
    """Name of the environment variable that holds the key, in the process that makes the call."""
    timeout: float = DEFAULT_TIMEOUT
    """Seconds for one answer; of a stream, for each of its pieces."""
    limit_parameter: LimitParameter | None = None
    """What the server calls the output cap: ``max_completion_tokens`` at OpenAI, else ``max_tokens``."""

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
        return ModelCapabilities()

    @property
    def server(self) -> str:
        """The base URL that calls go to, as this process sees it."""
        return self.base_url or os.environ.get("OPENAI_BASE_URL") or DEFAULT_BASE_URL

    async def generate(self, request: ModelRequest) -> ModelResponse:
        """One completion, without streaming and without retries."""
        names = WireNames(request.tools)
        options = self._options(request, names)
        key = self._key()
        client = await self._client(key)
        import openai

        try:
            raw = await client.chat.completions.with_raw_response.create(**options)
        except openai.OpenAIError as error:
            raise self._endpoint.failure(error, key) from None
        return self._response(raw.content, names, key)

    async def stream(self, request: ModelRequest) -> AsyncIterator[ModelChunk]:
        """One completion, piece by piece, without retries; closing it ends the request."""
        names = WireNames(request.tools)
        options = self._options(request, names)
        key = self._key()
        client = await self._client(key)
        import openai

        try:
            stream = await client.chat.completions.create(
                **options, stream=True, stream_options={"include_usage": True}
            )
            try:
                kind = stream.response.headers.get("content-type", "")
                if "json" in kind or "html" in kind:  # a server that does not stream, or is none
                    for chunk in chunks_of(self._response(await _body(stream), names, key)):
                        yield chunk
                    return
                pieces = StreamPieces(names)
                async for raw in stream:
                    for chunk in pieces.take(raw.to_dict(warnings=False)):
                        yield chunk
            finally:
                await stream.close()
        except openai.OpenAIError as error:
            raise self._endpoint.failure(error, key) from None
        except (ValueError, LookupError, TypeError, AttributeError):
            raise ModelFailed(
                f"{self._called} streamed something that is no chat completion; check that the base URL is "
                "the API's root, which usually ends in /v1"
            ) from None

    async def close(self) -> None:
        """Close the connections that this event loop has to the server; a later call opens new ones."""
        await self._endpoint.close()

    # --- the client ---------------------------------------------------------------------------------------

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

    def _key(self) -> str:
        return self._endpoint.key()

    async def _client(self, key: str) -> AsyncOpenAI:
        client: AsyncOpenAI = await self._endpoint.client(
            key,
            lambda openai: openai.AsyncOpenAI(
                base_url=self.server, api_key=key, timeout=self.timeout, max_retries=0
            ),
        )
        return client

    # --- the request --------------------------------------------------------------------------------------

    def _options(self, request: ModelRequest, names: WireNames) -> dict[str, Any]:
        options: dict[str, Any] = {
            "model": self.model,
            "messages": [wire_message(message, names) for message in request.messages],
        }
        if request.tools:
            options["tools"] = [wire_tool(schema, names) for schema in request.tools]
        if request.max_tokens is not None:
            at_openai = urlsplit(self.server).hostname == urlsplit(DEFAULT_BASE_URL).hostname
            limit = self.limit_parameter or ("max_completion_tokens" if at_openai else "max_tokens")
            options[limit] = request.max_tokens
        if request.temperature is not None:
            options["temperature"] = request.temperature
        capped = _LIMITS if request.max_tokens is not None else ()
        return with_options(options, request.options, self._called, further=capped)

    # --- the answer ---------------------------------------------------------------------------------------

    def _response(self, body: bytes, names: WireNames, key: str) -> ModelResponse:
        try:
            answer = json.loads(body)
            choice = answer["choices"][0]
            message = choice["message"]
            text, calls = message.get("content"), message.get("tool_calls") or []
            if not isinstance(text, str | None) or not isinstance(calls, list):
                raise TypeError
        except (ValueError, LookupError, TypeError, AttributeError):
            raise self._endpoint.no_answer("chat completion", body, key) from None
        finish = choice.get("finish_reason")
        used = usage(answer.get("usage"))
        tool_calls = tuple(self._tool_call(call, names, finish, used) for call in calls)
        return ModelResponse(
            text=text or message.get("refusal") or "",
            tool_calls=tool_calls,
            usage=used,
            finish_reason=finish_reason(finish, bool(tool_calls)),
        )

    def _tool_call(self, call: Any, names: WireNames, finish: object, used: Usage | None) -> ToolCall:
        reported = None if used is None else msgspec.to_builtins(used)
        try:
            function = call["function"]
            call_id, name, arguments = call["id"], function["name"], function.get("arguments") or "{}"
            if not isinstance(call_id, str) or not isinstance(name, str):
                raise TypeError
        except (LookupError, TypeError, AttributeError):
            raise ModelFailed(
                f"{self._called} asked for a tool without an id or a name; no tool was run", usage=reported
            ) from None
        try:
            parsed = arguments if isinstance(arguments, dict) else json.loads(arguments)
        except (ValueError, TypeError):
            parsed = None
        if not isinstance(parsed, dict):
            why = ": the answer was cut at the output cap" if finish == "length" else ""
            raise ModelFailed(
                f"{self._called} called {names.from_wire(name)} with arguments that are no JSON object{why}; "
                "no tool was run",
                usage=reported,
            )
        return ToolCall(call_id, names.from_wire(name), parsed)


async def _body(stream: AsyncStream[Any]) -> bytes:
    """What a server answered instead of a stream."""
    import openai

    try:
        return bytes(await stream.response.aread())
    except Exception as error:
        raise openai.APIConnectionError(request=stream.response.request) from error
