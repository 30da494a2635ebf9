"""Store URLs: which store is meant, and opening it.

=========================  =================================================================================
``memory:``                dictionaries of this process, gone with it
``sqlite:///notes.db``     an SQLite file, relative to the working directory (three slashes)
``sqlite:////data/a.db``   an SQLite file, absolute (four slashes: three, and the one that begins the path)
``sqlite:///~/notes.db``   an SQLite file in the home folder of this user
=========================  =================================================================================
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import platformdirs

from retinue.errors import StoreUnavailable
from retinue.storage.memory import MEMORY_URL, MemoryEngine
from retinue.storage.sqlite.engine import SQLiteEngine
from retinue.store import StoreEngine

HOME_VARIABLE = "RETINUE_HOME"
"""Environment variable that names the folder of this user's stores."""
DEFAULT_FILE = "retinue.db"

_SQLITE = "sqlite:///"
_KINDS = "memory: and sqlite:///FILE (sqlite:////FILE for an absolute path)"
_SCHEME = re.compile(r"^([A-Za-z][A-Za-z0-9+.-]*):")
_CREDENTIALS = re.compile(r"//[^/@]*@")


def open_store(url: str, *, shared: bool = False) -> StoreEngine:
    """Open a store. Blocks while a file is opened.

    Args:
        url: see this module's table.
        shared: whether the engine will serve several processes, as in a store actor: a memory store then
            reports itself as the one writer of the whole cluster.

    Raises:
        StoreUnavailable: it cannot be opened. ``url`` is the store, without credentials; ``reason`` the cause
            in a word: ``unknown_scheme``, ``bad_url``, ``no_folder``, ``is_folder``, ``not_writable``,
            ``not_a_database``, ``not_a_store``, ``newer_schema``, ``damaged``, ``disk_full``, ``locked``,
            ``no_wal``, ``io_error``, ``no_memory`` or ``failed``.
    """
    path = _sqlite_path(url)
    if path is None:
        return MemoryEngine(distributed=shared)
    if path.parent == home_folder():
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise StoreUnavailable(
                f"the folder {path.parent} of this user's stores cannot be created: {error.strerror}; set "
                f"{HOME_VARIABLE} to one that can",
                url=normalise_url(url),
                reason="not_writable",
            ) from error
    return SQLiteEngine(path)


def normalise_url(url: str) -> str:
    """The one form of a store's URL: absolute, symbolic links followed, without credentials.

    Two URLs of one file give the same text; store actors are named by it. Nothing is opened.

    Raises:
        StoreUnavailable: no store has such a URL.
    """
    path = _sqlite_path(url)
    return MEMORY_URL if path is None else f"{_SQLITE}{path}"


def is_relative(url: str) -> bool:
    """Whether a URL names a file by where this process happens to be."""
    path = url.removeprefix(_SQLITE)
    return path != url and not path.startswith("~/") and not Path(path).is_absolute()


def default_url() -> str:
    """The store of this user: ``retinue.db`` under ``RETINUE_HOME``, or else in the user's data folder."""
    return f"{_SQLITE}{home_folder() / DEFAULT_FILE}"


def home_folder() -> Path:
    """The folder of this user's stores, absolute; it need not exist."""
    configured = os.environ.get(HOME_VARIABLE)
    folder = Path(configured).expanduser() if configured else Path(platformdirs.user_data_dir("retinue"))
    return Path(os.path.realpath(folder))


def _sqlite_path(url: str) -> Path | None:
    """The file of an SQLite URL; ``None`` for memory."""
    if url == MEMORY_URL:
        return None
    scheme = _SCHEME.match(url)
    if scheme is None:
        hint = f"; for a file write {_SQLITE}{_shown(url)}" if url else ""
        raise _bad(url, "bad_url", f"a store URL begins with its kind: {_KINDS}{hint}")
    if scheme[1].lower() == "memory":
        raise _bad(url, "bad_url", f"the memory store is {MEMORY_URL}, with nothing behind it")
    if scheme[1].lower() != "sqlite":
        raise _bad(url, "unknown_scheme", f"there is no store of kind {scheme[1]!r}; there are {_KINDS}")
    if not url.startswith(_SQLITE):
        raise _bad(url, "bad_url", f"write {_SQLITE}FILE, or sqlite:////FILE for an absolute path")
    name = url.removeprefix(_SQLITE)
    if not name or name == ":memory:":
        raise _bad(url, "bad_url", f"no file is named; for a store in memory use {MEMORY_URL}")
    if "?" in name or "\0" in name:
        raise _bad(url, "bad_url", "a file name with '?' or NUL is not taken, and there are no options")
    return Path(os.path.realpath(Path(name).expanduser() if name.startswith("~/") else name))


def _bad(url: str, reason: str, text: str) -> StoreUnavailable:
    shown = _shown(url)
    return StoreUnavailable(f"store {shown!r}: {text}", url=shown, reason=reason)


def _shown(url: str) -> str:
    """The URL without user name and password."""
    return _CREDENTIALS.sub("//", url)
