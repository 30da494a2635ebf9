"""``make soak``, second part: random interleavings of the ledger. Exit status: 1 for an overshoot or a
leak."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

from benchmarks.ledger_walk import walk

WALKS = 1_000_000
SHARE = 5_000
"""Walks that one process does at once."""
REPORT = Path("build/soak_ledger.json")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make soak", description=__doc__)
    parser.add_argument("--walks", type=int, default=WALKS, metavar="N", help="interleavings (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the first one (%(default)s)")
    given = parser.parse_args(arguments)
    began, admitted, refused, done = time.monotonic(), 0, 0, 0
    with ProcessPoolExecutor() as pool:
        shares = [
            pool.submit(walk, first, min(SHARE, given.seed + given.walks - first))
            for first in range(given.seed, given.seed + given.walks, SHARE)
        ]
        for share in as_completed(shares):
            try:
                yes, no = share.result()
            except AssertionError as error:
                print(f"the ledger is wrong: {error}", file=sys.stderr)
                pool.shutdown(cancel_futures=True)
                return 1
            admitted, refused, done = admitted + yes, refused + no, done + 1
            print(f"\r{done}/{len(shares)} shares of {SHARE:,} interleavings", end="", file=sys.stderr)
    report = {
        "interleavings": given.walks,
        "first_seed": given.seed,
        "calls_admitted": admitted,
        "calls_refused": refused,
        "seconds": round(time.monotonic() - began, 1),
    }
    REPORT.parent.mkdir(exist_ok=True)
    REPORT.write_text(json.dumps(report, indent=2) + "\n")
    print(f"\nledger: {report}; no overshoot, no leak")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
