"""Tool arguments that stand in a text as ``parameter: value`` lines."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from retinue.models import ToolSchema


def arguments_in(schema: ToolSchema, sources: Sequence[str]) -> list[dict[str, Any]]:
    """The argument objects that the first text with all required parameters gives."""
    properties: dict[str, Any] = schema.parameters.get("properties", {})
    required: list[str] = schema.parameters.get("required", [])
    for source in sources if required else ():
        values = {name: _values(source, name, properties[name]) for name in properties}
        if not all(values.get(name) for name in required):
            continue
        rows = max(len(values[name]) for name in required)
        given = {name: found for name, found in values.items() if found}
        if all(len(found) in (1, rows) for found in given.values()):
            return [
                {name: found[row] if len(found) == rows else found[0] for name, found in given.items()}
                for row in range(rows)
            ]
    return []


def _values(text: str, name: str, schema: dict[str, Any]) -> list[Any]:
    """The values of one parameter in ``name: value`` lines, each once, in order, as the schema's type."""
    lines = re.findall(rf"^[ \t]*(?:[-*][ \t]+)?{re.escape(name)}:[ \t]*(\S.*?)[ \t]*$", text, re.MULTILINE)
    parse = _PARSERS.get(schema.get("type", "string"))
    if parse is None:
        return []
    values: list[Any] = []
    for line in dict.fromkeys(lines):
        try:
            values.append(parse(line))
        except ValueError:
            continue
    return values


def _boolean(text: str) -> bool:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    raise ValueError(text)


_PARSERS: dict[str, Callable[[str], Any]] = {
    "string": str,
    "integer": int,
    "number": float,
    "boolean": _boolean,
}
