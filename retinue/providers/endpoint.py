"""What the SDKs of providers have in common: keys, connections, and failures as ours.

The SDKs of OpenAI and Anthropic raise the same kinds of errors. They are told apart by what they carry, so
that neither must be installed for the other.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import time
import weakref
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import urlsplit

import msgspec

from retinue.budgets import Usage
from retinue.errors import ModelFailed, ValidationFailed

DEFAULT_TIMEOUT = 120.0
"""Seconds that one answer may take."""
NO_KEY = "not-needed"
"""What a server of one's own is sent as a key when the environment has none; most look at no key."""
LONGEST_QUOTE = 300
_NEVER_CONNECTED = frozenset(
    {"ConnectError", "ConnectTimeout", "PoolTimeout", "UnsupportedProtocol", "ProxyError"}
)
"""Transport errors, by name, after which the request certainly was not sent."""
_RETRYABLE = frozenset({408, 409, 425, 429})
"""Refusals, beside all from 500 on, after which the same request may be taken."""
_PASSING = frozenset(
    {
        "server_error",
        "api_error",
        "rate_limit_exceeded",
        "rate_limit_error",
        "overloaded_error",
        "timeout_error",
    }
)
"""Errors in the midst of an answer, as providers name them, after which it may be asked for again."""
_OF_STREAMS = frozenset({"stream", "stream_options"})

_clients: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[tuple[Any, ...], Any]]
_clients = weakref.WeakKeyDictionary()
"""Connections of this process: one client for each event loop, SDK, server, key and timeout."""


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """One server as one process reaches it."""

    sdk: str
    """Name of the module to import."""
    missing: str
    """What to do where it is not installed."""
    called: str
    """The model and the server, for messages."""
    server: str
    key_env: str
    default_server: str
    """The provider's own, which needs a key."""
    timeout: float

    def key(self) -> str:
        """The key in the environment; ``ModelFailed`` where the provider needs one and there is none."""
        key = os.environ.get(self.key_env, "").strip()
        if not key and self.server == self.default_server:
            raise ModelFailed(
                f"{self.called} needs a key: set ${self.key_env} in the environment of the process that "
                "makes the call (of a standing cluster: where the cluster was started), or name a server of "
                "your own with a base URL",
                started=False,
            )
        return key or NO_KEY

    async def client(self, key: str, make: Callable[[Any], Any]) -> Any:
        """The client of this event loop, made by ``make(sdk)`` on first use."""
        try:
            # Importing an SDK takes a while, and other delegates share this loop.
            sdk = await asyncio.to_thread(__import__, self.sdk)
        except ImportError:
            raise ModelFailed(self.missing, started=False) from None
        clients = _clients.setdefault(asyncio.get_running_loop(), {})
        place = (self.sdk, self.server, self.key_env, hash(key), self.timeout)
        if place not in clients:
            clients[place] = make(sdk)
        return clients[place]

    async def close(self) -> None:
        """Close the connections that this event loop has to the server; a later call opens new ones."""
        clients = _clients.get(asyncio.get_running_loop(), {})
        mine = (self.sdk, self.server, self.key_env)
        for place in [place for place in clients if place[:3] == mine]:
            await clients.pop(place).close()

    # --- failures -----------------------------------------------------------------------------------------

    def failure(self, error: Exception, key: str) -> ModelFailed:
        """An error of the SDK as ours: what happened, whether anything began, whether to try again."""
        status = getattr(error, "status_code", None)
        body = getattr(error, "body", None)
        if isinstance(body, Mapping) and (status is None or status < 400):  # it came in the midst of a stream
            return self.broke(key, body)
        if isinstance(status, int):
            headers = getattr(getattr(error, "response", None), "headers", None) or {}
            return self.refused(status, body, headers, key)
        cause = error.__cause__
        kind = type(cause).__name__ if cause is not None else type(error).__name__
        if kind in _NEVER_CONNECTED:
            return ModelFailed(
                f"no server answers at {self.server} ({str(cause) or kind}); check that it runs, that host "
                "and port of the base URL are right, and that this machine may reach it",
                started=False,
                retryable=True,
            )
        if "Timeout" in kind or "Timeout" in type(error).__name__:
            return ModelFailed(f"{self.called} gave no answer within {self.timeout:g} s", retryable=True)
        if "Connection" in type(error).__name__ or cause is not None:
            return ModelFailed(
                f"{self.called} broke the connection ({kind}); look into its log", retryable=True
            )
        return ModelFailed(f"{self.called} failed: {quote(str(error), key)}")

    def broke(self, key: str, body: Mapping[str, Any], usage: Usage | None = None) -> ModelFailed:
        """An error that the server told of in the midst of its answer: it had begun."""
        error = body.get("error", body)
        told = error if isinstance(error, Mapping) else {}
        kinds = {kind for kind in (told.get("type"), told.get("code")) if isinstance(kind, str | int)}
        passing = any(passes(kind) if isinstance(kind, int) else kind in _PASSING for kind in kinds)
        said = quote(_message_of(body) or ", ".join(map(str, kinds)) or "it does not say why", key)
        return ModelFailed(
            f"{self.called} failed in the midst of its answer: {said}",
            retryable=passing or not kinds,
            usage=None if usage is None else msgspec.to_builtins(usage),
        )

    def refused(self, status: int, body: object, headers: Mapping[str, str], key: str) -> ModelFailed:
        """A status that is no success."""
        said = quote(_message_of(body), key)
        if status in (401, 403):
            # The body is left out: OpenAI's shows a part of the key.
            step = f"check ${self.key_env} in the environment of the process that makes the call"
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
        return ModelFailed(
            f"{self.called} refused with HTTP {status}{f' ({said})' if said else ''}: {step}",
            status=status,
            started=status >= 500,  # what is refused with 4xx was not begun
            retryable=passes(status) and not _spent(body),
            retry_after=retry_after(headers),
        )

    def no_answer(self, what: str, body: bytes, key: str) -> ModelFailed:
        """Something came that is no answer of this API."""
        said = quote(error_text(body) or body[:LONGEST_QUOTE].decode("utf-8", "replace"), key)
        return ModelFailed(
            f"{self.called} answered something that is no {what}: {said or '(nothing)'}. Check that the base "
            "URL is the API's root, which usually ends in /v1"
        )


def is_transport_error(error: BaseException) -> bool:
    """Whether the HTTP client below an SDK raised this: a broken connection, a read that took too long."""
    return type(error).__module__.partition(".")[0] in ("httpx", "httpx2")


def check_server(name: str, model: object, base_url: str | None, key_env: str) -> None:
    """Raise ``ValidationFailed`` for a model without a name, or a base URL that is none or holds a key."""
    if not model:
        raise ValidationFailed(f"{name} needs a name", path="model")
    if base_url is None:
        return
    parts = urlsplit(base_url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValidationFailed(
            f"base URL {base_url!r:.200} must look like http://127.0.0.1:8080/v1", path="base_url"
        )
    if parts.username or parts.password:
        raise ValidationFailed(
            f"the base URL of {parts.hostname} must hold no key; put it into ${key_env}", path="base_url"
        )


def with_options(
    made: Mapping[str, Any], options: Mapping[str, Any], called: str, *, further: Collection[str] = ()
) -> dict[str, Any]:
    """A request with further options, which go into its body by their names.

    Args:
        made: what the client asks for, as the SDK takes it.
        options: ``ModelRequest.options``.
        called: the model, for messages.
        further: other names of what ``made`` has.

    Raises:
        ModelFailed: an option would replace what was admitted: the model, the messages, the cap, the tools.
    """
    taken = sorted(options.keys() & {*made, *further, *_OF_STREAMS})
    if taken:
        raise ModelFailed(
            f"{called}: {', '.join(taken)} cannot be set by options, for the request has it already; take it "
            "out of what the step controller sets",
            started=False,
        )
    return {**made, "extra_body": dict(options)} if options else dict(made)


def passes(status: int) -> bool:
    """Whether the same request may be taken later than one that was refused with this HTTP status."""
    return status in _RETRYABLE or status >= 500


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds after which a server wants to be asked again; ``None`` where it does not say."""
    lower = {name.lower(): value for name, value in headers.items()}
    said = lower.get("retry-after", "")
    ways: tuple[Callable[[], float], ...] = (
        lambda: float(lower["retry-after-ms"]) / 1000,
        lambda: float(said),
        lambda: parsedate_to_datetime(said).timestamp() - time.time(),
    )
    for seconds in ways:
        with contextlib.suppress(LookupError, ValueError, TypeError, OverflowError):
            if math.isfinite(found := seconds()):
                return max(0.0, found)
    return None


def error_text(body: bytes) -> str:
    """The message of an error as JSON; empty where there is none."""
    try:
        return _message_of(json.loads(body))
    except ValueError:
        return ""


def _message_of(body: object) -> str:
    if not isinstance(body, Mapping):
        return ""
    error = body.get("error", body)
    message = error.get("message") if isinstance(error, Mapping) else error
    return message if isinstance(message, str) else ""


def _spent(body: object) -> bool:
    """The account has nothing left, which waiting does not change; OpenAI says so with 429 too."""
    error = body.get("error", body) if isinstance(body, Mapping) else None
    return isinstance(error, Mapping) and "insufficient_quota" in (error.get("code"), error.get("type"))


def quote(text: str, key: str) -> str:
    """What a server said, short, on one line, and without the key."""
    if key != NO_KEY:
        text = text.replace(key, "[key]")
    text = " ".join(text.split())
    return text if len(text) <= LONGEST_QUOTE else f"{text[: LONGEST_QUOTE - 1]}…"
