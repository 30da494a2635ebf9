"""Models behind the chat completions API of OpenAI and of the many servers that speak it, through its SDK."""

from __future__ import annotations

import asyncio
import json
import os
import weakref
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NoReturn
from urllib.parse import urlsplit

import msgspec

from retinue.budgets import Usage
from retinue.errors import ModelFailed, ValidationFailed
from retinue.messages import ToolCall
from retinue.models import ModelChunk, ModelRequest, ModelResponse
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
DEFAULT_TIMEOUT = 120.0
"""Seconds that one answer may take."""
MISSING_SDK = "the openai SDK is not installed; install it with: pip install 'retinue[openai]'"
_NO_KEY = "not-needed"
"""What a server of one's own is sent as a key when the environment has none; most look at no key."""
_LONGEST_QUOTE = 300
_NEVER_CONNECTED = frozenset(
    {"ConnectError", "ConnectTimeout", "PoolTimeout", "UnsupportedProtocol", "ProxyError"}
)
"""Transport errors, by name, after which the request certainly was not sent."""

LimitParameter = Literal["max_tokens", "max_completion_tokens"]

_clients: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[tuple[Any, ...], AsyncOpenAI]]
_clients = weakref.WeakKeyDictionary()
"""Connections of this process: one client for each event loop, server, key and timeout."""


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
        if not self.model:
            raise ValidationFailed("an OpenAI model needs a name, such as gpt-5-mini", path="model")
        if self.base_url is not None:
            parts = urlsplit(self.base_url)
            if parts.scheme not in ("http", "https") or not parts.hostname:
                raise ValidationFailed(
                    f"base URL {self.base_url!r:.200} must look like http://127.0.0.1:8080/v1",
                    path="base_url",
                )
            if parts.username or parts.password:
                raise ValidationFailed(
                    f"the base URL of {parts.hostname} must hold no key; put it into ${self.api_key_env}",
                    path="base_url",
                )

    @property
    def provider_id(self) -> str:
        return "openai"

    @property
    def model_id(self) -> str:
        return self.model

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
        except openai.APIStatusError as error:
            self._refused(error.status_code, error.body, key)
        except openai.APIConnectionError as error:
            self._unreachable(error)
        except openai.OpenAIError as error:
            raise ModelFailed(f"{self._called} failed: {_quote(str(error), key)}") from None
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
        except openai.APIStatusError as error:
            self._refused(error.status_code, error.body, key)
        except openai.APIConnectionError as error:
            self._unreachable(error)
        except openai.OpenAIError as error:
            raise ModelFailed(f"{self._called} failed: {_quote(str(error), key)}") from None
        except (ValueError, LookupError, TypeError, AttributeError):
            raise ModelFailed(
                f"{self._called} streamed something that is no chat completion; check that the base URL is "
                "the API's root, which usually ends in /v1"
            ) from None

    async def close(self) -> None:
        """Close the connections that this event loop has to the server; a later call opens new ones."""
        clients = _clients.get(asyncio.get_running_loop(), {})
        for place in [place for place in clients if place[:2] == (self.server, self.api_key_env)]:
            await clients.pop(place).close()

    # --- the client ---------------------------------------------------------------------------------------

    @property
    def _called(self) -> str:
        return f"model {self.model} at {self.server}"

    def _key(self) -> str:
        key = os.environ.get(self.api_key_env, "").strip()
        if not key and self.server == DEFAULT_BASE_URL:
            raise ModelFailed(
                f"{self._called} needs a key: set ${self.api_key_env} in the environment of the process that "
                "makes the call (of a standing cluster: where the cluster was started), or name a server of "
                "your own with a base URL",
                started=False,
            )
        return key or _NO_KEY

    async def _client(self, key: str) -> AsyncOpenAI:
        try:
            # Importing the SDK takes a while, and other delegates share this loop.
            openai = await asyncio.to_thread(__import__, "openai")
        except ImportError:
            raise ModelFailed(MISSING_SDK, started=False) from None
        clients = _clients.setdefault(asyncio.get_running_loop(), {})
        place = (self.server, self.api_key_env, hash(key), self.timeout)
        if place not in clients:
            clients[place] = openai.AsyncOpenAI(
                base_url=self.server, api_key=key, timeout=self.timeout, max_retries=0
            )
        return clients[place]

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
        return options

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
            said = _quote(_error_text(body) or body[:_LONGEST_QUOTE].decode("utf-8", "replace"), key)
            raise ModelFailed(
                f"{self._called} answered something that is no chat completion: {said or '(nothing)'}. Check "
                "that the base URL is the API's root, which usually ends in /v1"
            ) from None
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

    # --- failures -----------------------------------------------------------------------------------------

    def _refused(self, status: int, body: object, key: str) -> NoReturn:
        message = body.get("message") if isinstance(body, dict) else None
        said = _quote(message, key) if isinstance(message, str) else ""
        if status in (401, 403):
            # The body is left out: OpenAI's shows a part of the key.
            step = f"check ${self.api_key_env} in the environment of the process that makes the call"
            said = ""
        elif status == 404:
            step = (
                "check the model's name, and that the base URL is the API's root, which usually ends in /v1"
            )
        elif status == 429:
            step = "too many requests, or no quota left: wait, use fewer delegates, or check the account"
        elif status in (400, 413, 422):
            step = "the server does not take this request: try a smaller part, or a model with more context"
        elif status >= 500:
            step = "the server failed: try again, or look into its log"
        else:
            step = "look into the server's documentation for this status"
        raise ModelFailed(
            f"{self._called} refused with HTTP {status}{f' ({said})' if said else ''}: {step}",
            status=status,
            started=status >= 500,  # what is refused with 4xx was not begun
        ) from None

    def _unreachable(self, error: Exception) -> NoReturn:
        cause = error.__cause__
        kind = type(cause).__name__
        if kind in _NEVER_CONNECTED:
            why = str(cause) or kind
            raise ModelFailed(
                f"no server answers at {self.server} ({why}); check that it runs, that host and port of the "
                "base URL are right, and that this machine may reach it",
                started=False,
            ) from None
        if "Timeout" in kind or "Timeout" in type(error).__name__:
            raise ModelFailed(f"{self._called} gave no answer within {self.timeout:g} s") from None
        raise ModelFailed(
            f"{self._called} broke the connection ({kind if cause else type(error).__name__}); "
            "look into its log"
        ) from None


async def _body(stream: AsyncStream[Any]) -> bytes:
    """What a server answered instead of a stream."""
    import openai

    try:
        return bytes(await stream.response.aread())
    except Exception as error:
        raise openai.APIConnectionError(request=stream.response.request) from error


def _error_text(body: bytes) -> str:
    try:
        answer = json.loads(body)
    except ValueError:
        return ""
    error = answer.get("error") if isinstance(answer, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    return message if isinstance(message, str) else ""


def _quote(text: str, key: str) -> str:
    """What a server said, short, on one line, and without the key."""
    if key != _NO_KEY:
        text = text.replace(key, "[key]")
    text = " ".join(text.split())
    return text if len(text) <= _LONGEST_QUOTE else f"{text[: _LONGEST_QUOTE - 1]}…"
