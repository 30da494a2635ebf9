"""Fail unless the last line of a `retinue demo --json` run is the summary of a job that went well."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any


def faults(summary: dict[str, Any], *, least_delegates: int) -> list[str]:
    """What is wrong with the summary, one line each; empty when nothing is."""
    found: list[str] = []

    def require(what: str, holds: bool, value: object) -> None:
        if not holds:
            found.append(f"{what}: got {value!r}")

    def number(value: object) -> float:
        return value if isinstance(value, int | float) and not isinstance(value, bool) else float("nan")

    tokens = summary.get("tokens")
    tokens = tokens if isinstance(tokens, dict) else {}
    require("status must be 'completed'", summary.get("status") == "completed", summary.get("status"))
    delegates = summary.get("delegates")
    require(f"delegates must be {least_delegates} or more", number(delegates) >= least_delegates, delegates)
    for key in ("model_calls", "tool_calls"):
        require(f"{key} must be above 0", number(summary.get(key)) > 0, summary.get(key))
    used, limit = tokens.get("used"), tokens.get("limit")
    require("tokens.used must be above 0", number(used) > 0, used)
    require("tokens.used must be within tokens.limit", number(used) <= number(limit), f"{used} of {limit}")
    require("tokens.reserved must be 0", number(tokens.get("reserved")) == 0, tokens.get("reserved"))
    require("reason must be there, and null", summary.get("reason", "missing") is None, summary.get("reason"))
    for key in ("wall_s", "hops"):
        require(f"{key} must be above 0", number(summary.get(key)) > 0, summary.get(key))
    unknown = summary.get("unknown_usage_calls")
    require("unknown_usage_calls must be 0", number(unknown) == 0, unknown)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path, help="what `retinue demo --json` printed")
    parser.add_argument("--least-delegates", type=int, default=2)
    options = parser.parse_args()

    lines = [line for line in options.output.read_text("utf-8").splitlines() if line.strip()]
    if not lines:
        print("the demo printed nothing", file=sys.stderr)
        return 1
    try:
        summary = json.loads(lines[-1])
    except ValueError:
        print(f"the demo's last line is not JSON: {lines[-1][:200]}", file=sys.stderr)
        return 1
    if not isinstance(summary, dict):
        print(f"the demo's last line is not an object: {lines[-1][:200]}", file=sys.stderr)
        return 1
    found = faults(summary, least_delegates=options.least_delegates)
    for fault in found:
        print(f"demo summary: {fault}", file=sys.stderr)
    if not found:
        print(f"demo summary: as it should be ({len(lines)} lines)")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
