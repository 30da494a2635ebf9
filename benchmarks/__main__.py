"""``python -m benchmarks [name ...]``: print the table, write build/bench.json."""

from __future__ import annotations

import json
import platform
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks import (
    cancel_latency,
    cold_session,
    commits,
    fanout,
    idle_sessions,
    ledger,
    time_to_first_event,
    tool_run,
    warm_run,
)
from benchmarks.measure import Row
from retinue import connect

BENCHMARKS = {
    "warm_run": warm_run.measure,
    "cold_session": cold_session.measure,
    "fanout": fanout.measure,
    "commits": commits.measure,
    "ledger": ledger.measure,
    "tool_run": tool_run.measure,
    "idle_sessions": idle_sessions.measure,
    "time_to_first_event": time_to_first_event.measure,
    "cancel_latency": cancel_latency.measure,
}
TARGETS = {
    "warm_run": "ratio ≤ 6 hops",
    "cold_session": "ratio ≤ 10 hops",
    "fanout": "≥ 150/s, ≤ 1 MB each",
    "commits": "≥ 1,000/s",
    "ledger": "≥ 1,000/s",
    "tool_run": "LangGraph: ≤ its p50, ≥ 3 its rate",
    "idle_sessions": "≤ 1 MB each",
    "time_to_first_event": "ratio ≤ 6 hops",
    "cancel_latency": "ratio ≤ 6 hops",
}
COLUMNS = ("p50_ms", "hop_ms", "ratio", "hops", "per_s", "mb_each")
REPORT = Path("build/bench.json")


def main(names: list[str]) -> int:
    unknown = sorted(set(names) - set(BENCHMARKS))
    if unknown:
        print(f"no benchmark {', '.join(unknown)}; there are: {', '.join(BENCHMARKS)}", file=sys.stderr)
        return 2
    connect()
    rows: dict[str, Row] = {}
    with tempfile.TemporaryDirectory(prefix="retinue-bench-") as folder:
        for name in names or BENCHMARKS:
            print(f"{name} ...", file=sys.stderr, flush=True)
            rows[name] = BENCHMARKS[name](f"sqlite:///{folder}/{name}.db")
    _print(rows)
    REPORT.parent.mkdir(exist_ok=True)
    known = json.loads(REPORT.read_text()) if names and REPORT.exists() else {}
    REPORT.write_text(json.dumps({**known, **rows}, indent=2) + "\n")
    print(f"written to {REPORT}", file=sys.stderr)
    return 0


def _print(rows: dict[str, Row]) -> None:
    table = Table(title=f"Retinue on {platform.machine()}, Python {platform.python_version()}")
    for column in ("benchmark", *COLUMNS, "target"):
        table.add_column(column, justify="left" if column in ("benchmark", "target") else "right")
    for name, row in rows.items():
        cells = [f"{row[column]:.3g}" if column in row else "" for column in COLUMNS]
        table.add_row(name, *cells, TARGETS[name])
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
