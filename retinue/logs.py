"""Logs for machines: one JSON object a line, with the ids of the work that the record is about.

    RETINUE_LOG=json retinue up          retinue.logs.configure(json=True)

The ids come from :mod:`retinue.current_work`, so they are on every record that is logged for a run: by this
package, by the application's drivers, policies and tools, and by the libraries that they use. Nothing here
reads a prompt or an answer. Of an exception the class and the places are told, and its text only where it is
an error of this package: others say what they like.
"""

from __future__ import annotations

import json as json_format
import logging
import os
import re
import sys
import traceback
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Literal, TextIO

import msgspec

from retinue.current_work import current_trace, current_work, trace_ids
from retinue.errors import RetinueError, ValidationFailed

LOG_VARIABLE = "RETINUE_LOG"
"""Environment variable: ``json`` or ``text``. Nothing is configured where it is empty."""
LEVEL_VARIABLE = "RETINUE_LOG_LEVEL"
"""Environment variable: a level's name; ``info`` by default."""
HIDDEN = "[hidden]"

_FRAMES = 20
"""Innermost places of an exception that are told."""


class LogOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How processes log."""

    format: Literal["json", "text"]
    level: str = "INFO"


class JsonFormatter(logging.Formatter):
    """Records as JSON objects, with what is known of the work that is being done."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": _rfc3339(record.created),
            "level": record.levelname,
            "logger": record.name,
            "message": _writable(without_secrets(record.getMessage())),
        }
        work = current_work()
        if work is not None:
            line["tenant_id"] = work.tenant_id
            line["user_id"] = work.user_id
            line["session_id"] = work.session_id
            line["run_id"] = work.run_id
        ids = trace_ids(current_trace())
        if ids is not None:
            line["trace_id"], line["span_id"] = ids
        if record.exc_info and record.exc_info[1] is not None:
            line["exception"] = _told(record.exc_info[1])
        return _writable(json_format.dumps(line, ensure_ascii=False))


def configure(
    *, json: bool | None = None, level: str | int | None = None, stream: TextIO | None = None
) -> None:
    """Let the root logger of this process write lines; what this did before is replaced.

    Args:
        json: objects, or plain text; by default as RETINUE_LOG says, and text where it says nothing.
        level: lowest level that is written, by default as RETINUE_LOG_LEVEL says, and else ``INFO``.
        stream: where to; standard error by default.

    Raises:
        ValidationFailed: a level that there is not, or a variable that says something else.
    """
    environment = from_environment()
    as_json = json if json is not None else environment is not None and environment.format == "json"
    name = _checked_level(os.environ.get(LEVEL_VARIABLE) if level is None else level)
    global _options
    _options = LogOptions(format="json" if as_json else "text", level=name)
    root = logging.getLogger()
    for handler in list(root.handlers):
        if isinstance(handler, _Handler):
            root.removeHandler(handler)
    handler = _Handler(sys.stderr if stream is None else stream)
    if as_json:
        handler.setFormatter(JsonFormatter())
    else:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root.addHandler(handler)
    root.setLevel(name)


def configure_process(options: LogOptions | None) -> None:
    """Configure a process of a cluster, once: as its own environment says, else as it is told.

    Args:
        options: how whoever started it logs; ``None`` leaves the logging of the process alone.
    """
    if _options is not None:
        return
    try:
        options = from_environment() or options
        if options is not None:
            configure(json=options.format == "json", level=options.level)
    except ValidationFailed as error:
        logging.getLogger(__name__).warning("%s", error.message)


def configured() -> LogOptions | None:
    """What :func:`configure` was told in this process; ``None`` where it was not called."""
    return _options


def from_environment(environment: Mapping[str, str] = os.environ) -> LogOptions | None:
    """What the environment says; ``None`` where it says nothing.

    Raises:
        ValidationFailed: it says something that cannot be.
    """
    form = environment.get(LOG_VARIABLE, "").strip().lower()
    if not form:
        return None
    if form not in ("json", "text"):
        raise ValidationFailed(f"{LOG_VARIABLE} is 'json' or 'text', not {form!r:.80}", path=LOG_VARIABLE)
    level = _checked_level(environment.get(LEVEL_VARIABLE))
    return LogOptions(format="json" if form == "json" else "text", level=level)


_SECRETS = re.compile(
    r"""
    (?P<kept>(?:
        \bbearer\s+                                         # a header
      | \b[\w-]*(?:api[_-]?key|token|secret|password|passwd|authorization)["']?\s*[=:]\s*["']?
        (?:(?:bearer|basic)\s+)?
      | ://[^/\s:@]+:(?=[^/\s@]+@)                          # a URL with a password
    ))
    [^\s"'&,;@)}\]]+
    | \b(?:sk|pk|rk|ghp|gho|xox[abp])[-_][A-Za-z0-9_-]{12,} # keys that say what they are
    """,
    re.VERBOSE | re.IGNORECASE,
)


def without_secrets(text: str) -> str:
    """The text without what looks like a credential: keys, tokens, passwords in URLs."""
    return _SECRETS.sub(lambda found: f"{found['kept'] or ''}{HIDDEN}", text)


class _Handler(logging.StreamHandler[TextIO]):
    """The handler that :func:`configure` made."""


_options: LogOptions | None = None


def _checked_level(level: str | int | None) -> str:
    if level is None or level == "":
        return "INFO"
    name: str = logging.getLevelName(level) if isinstance(level, int) else level.strip().upper()
    if name not in logging.getLevelNamesMapping():
        known = ", ".join(each.lower() for each in logging.getLevelNamesMapping())
        raise ValidationFailed(f"there is no log level {level!r:.40}; there are {known}", path="level")
    return name


def _writable(text: str) -> str:
    """The text with what UTF-8 cannot carry spelled out."""
    return text.encode(errors="backslashreplace").decode()


def _rfc3339(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _told(error: BaseException) -> dict[str, Any]:
    """An exception without what it may have from its caller: source lines, arguments, foreign texts."""
    frames = traceback.extract_tb(error.__traceback__)[-_FRAMES:]
    told: dict[str, Any] = {
        "type": f"{type(error).__module__}.{type(error).__qualname__}".removeprefix("builtins."),
        "stack": [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames],
    }
    if isinstance(error, RetinueError):
        told["code"] = error.code
        told["message"] = _writable(without_secrets(error.message))
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if cause is not None and cause is not error:
        told["cause"] = f"{type(cause).__module__}.{type(cause).__qualname__}".removeprefix("builtins.")
    return told
