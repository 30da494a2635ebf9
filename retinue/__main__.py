"""`python -m retinue` is the command line."""

from __future__ import annotations

if __name__ == "__main__":
    from retinue.cluster.cli import main

    main()
