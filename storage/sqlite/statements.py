"""The SQL of this store, from its ``.sql`` files.

A statement begins with ``-- name: <name>``. Every statement must say whose rows it touches: by the full
identity, or by a key that a search by identity gave. One that does neither is refused when this module is
imported, unless its heading says ``across tenants``, ``across users`` (of one tenant) or ``across sessions``
(of one user), and why: so nobody can add an unscoped read by mistake.
"""

from __future__ import annotations

import re
from functools import lru_cache
from importlib import resources

_HEADING = re.compile(
    r"^-- name: (?P<name>\w+)( \(across (?P<across>tenants|users|sessions): .+\))?$", re.MULTILINE
)
_SCOPES = {
    "tenants": re.compile(""),
    "users": re.compile(r"\bWHERE tenant_id = :tenant_id\b"),
    "sessions": re.compile(r"\bWHERE tenant_id = :tenant_id AND user_id = :user_id\b"),
}
"""What a statement must say whose heading lets it go across some of them."""
_BY_IDENTITY = re.compile(
    r"\btenant_id = :tenant_id AND (\w+\.)?user_id = :user_id "
    r"AND (\w+\.)?(session|run|approval)_id = :\3_id\b"
)
_BY_KEY = re.compile(r"\bWHERE (\w+\.)?(session|run|conversation|approval)_key = :\2_key\b")
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
        if not _is_scoped(sql, heading["across"]):
            raise ValueError(f"statement {name!r} does not say whose rows it touches")
        statements[name] = sql
    return statements


def _is_scoped(sql: str, across: str | None) -> bool:
    if across is not None:
        return _SCOPES[across].search(sql) is not None
    reads = _BY_IDENTITY.search(sql) is not None or _BY_KEY.search(sql) is not None
    if sql.startswith("INSERT"):
        return _INSERT.search(sql) is not None and (reads or "SELECT" not in sql)
    return reads


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
