"""Ray's token: whether there is one, where it comes from, and what to tell whoever lacks it.

Ray has two modes, off and token, set by ``RAY_AUTH_MODE``. What is not obvious, and is handled here:

- the mode is read once, when Ray is imported, and the token once, when it is first used;
- mode ``token`` without a token (or with ``RAY_AUTH_TOKEN_PATH`` naming a file that cannot be read) does not
  raise: Ray ends the process;
- a client that is given an address never turns tokens on by itself, though it may have the right one;
- a new local Ray does, and writes its token to a file that everybody can read.
"""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Mapping
from pathlib import Path

MODE = "RAY_AUTH_MODE"
TOKEN = "RAY_AUTH_TOKEN"  # noqa: S105 - the variable's name
TOKEN_PATH = "RAY_AUTH_TOKEN_PATH"  # noqa: S105 - the variable's name
_TOKEN_BYTES = 32


def new_token() -> str:
    """A token that nobody can guess."""
    return secrets.token_hex(_TOKEN_BYTES)


def token_source(environ: Mapping[str, str]) -> str | None:
    """Where Ray would take the token from, in words for an error message; ``None`` where it has none."""
    if environ.get(TOKEN, "").strip():
        return f"the variable {TOKEN}"
    if TOKEN_PATH in environ:
        path = Path(environ[TOKEN_PATH]).expanduser()
        return f"the file {path} ({TOKEN_PATH})" if _has_text(path) else None
    path = default_token_path(environ)
    return f"the file {path}" if _has_text(path) else None


def read_token(environ: Mapping[str, str]) -> str | None:
    """The token that Ray would use."""
    if token := environ.get(TOKEN, "").strip():
        return token
    path = Path(environ[TOKEN_PATH]).expanduser() if TOKEN_PATH in environ else default_token_path(environ)
    return path.read_text("utf-8").strip() if _has_text(path) else None


def default_token_path(environ: Mapping[str, str]) -> Path:
    """Ray's own place for a token."""
    home = environ.get("HOME")
    return (Path(home) if home else Path.home()) / ".ray" / "auth_token"


def how_to_give_a_token(environ: Mapping[str, str]) -> str:
    """The next step for someone who has no token, or an unusable one."""
    if TOKEN_PATH in environ and not environ.get(TOKEN, "").strip():
        return f"{TOKEN_PATH} names {environ[TOKEN_PATH]}, which is empty or cannot be read"
    return f"set {TOKEN}, or {TOKEN_PATH} to a file that has it, or put it into {default_token_path(environ)}"


def write_token(path: Path, token: str) -> None:
    """Write a token to a file of which only this user can read a byte, ever."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(token)


class Environment:
    """Variables that this process sets for Ray, and puts back as they were."""

    def __init__(self) -> None:
        self._before: dict[str, str | None] = {}

    def set(self, changes: Mapping[str, str | None]) -> None:
        """Set variables, or remove those with ``None``; Ray reads them again if it has read them already."""
        for name, value in changes.items():
            self._before.setdefault(name, os.environ.get(name))
            _set(name, value)
        reread()

    def restore(self) -> None:
        """Put back what was there before the first :meth:`set`."""
        for name, value in self._before.items():
            _set(name, value)
        self._before.clear()
        reread()


def reread() -> None:
    """Have an imported Ray read mode and token again. It has no public name for that."""
    raylet = sys.modules.get("ray._raylet")
    if raylet is not None:
        raylet.Config.initialize("")
        raylet.AuthenticationTokenLoader.instance().reset_cache()


def _set(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


def _has_text(path: Path) -> bool:
    try:
        return bool(path.read_text("utf-8").strip())
    except (OSError, UnicodeDecodeError):
        return False
