"""The SQL of this store, from its ``.sql`` files.

A statement begins with ``-- name: <name>``. Every statement must say whose rows it touches: by the full
identity, or by a key that a search by identity gave. One that does neither is refused when this module is
imported, unless its heading says ``across tenants`` and why: so nobody can add an unscoped read by mistake.
"""

from __future__ import annotations

import re
from functools import lru_cache
from importlib import resources

_HEADING = re.compile(r"^-- name: (?P<name>\w+)(?P<across> \(across tenants: .+\))?$", re.MULTILINE)
_BY_IDENTITY = re.compile(
    r"\btenant_id = :tenant_id AND (\w+\.)?user_id = :user_id AND (\w+\.)?(session|run)_id = :\3_id\b"
)
_BY_KEY = re.compile(r"\bWHERE (session|run|conversation)_key = :\1_key\b")
_INSERT = re.compile(
    r"^INSERT INTO \w+ \(\s*(tenant_id, user_id, session_id|(session|run|conversation)_key)\b"
)


def parse(text: str) -> dict[str, str]:
    """The statements of one file by name.

    Raises:
        ValueError: a name is used twice, or a statement does not say whose rows it touches.
    """
    statements: dict[str, str] = {}
    headings = list(_HEADING.finditer(text))
    for heading, following in zip(headings, [*headings[1:], None], strict=True):
        name = heading["name"]
        sql = text[heading.end() : following.start() if following else None].strip().rstrip(";")
        if name in statements:
            raise ValueError(f"statement {name!r} stands twice")
        if heading["across"] is None and not _is_scoped(sql):
            raise ValueError(f"statement {name!r} does not say whose rows it touches")
        statements[name] = sql
    return statements


def _is_scoped(sql: str) -> bool:
    if sql.startswith("INSERT"):
        return _INSERT.search(sql) is not None
    return _BY_IDENTITY.search(sql) is not None or _BY_KEY.search(sql) is not None


@lru_cache(maxsize=1)
def _all() -> dict[str, str]:
    folder = resources.files("retinue.storage.sqlite") / "statements"
    found: dict[str, str] = {}
    for file in sorted(folder.iterdir(), key=lambda entry: entry.name):
        for name, sql in parse(file.read_text(encoding="utf-8")).items():
            if name in found:
                raise ValueError(f"statement {name!r} stands in two files")
            found[name] = sql
    return found


def statement(name: str) -> str:
    """The SQL of a statement; ``KeyError`` when there is none of this name."""
    return _all()[name]
