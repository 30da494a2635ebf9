"""What all commands of the command line share: options, exit statuses, errors as messages, JSON."""

from __future__ import annotations

import json as json_format
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from retinue.errors import RetinueError

NOT_UP = 1
"""Exit status of a command that needs a cluster where none is up."""
FAULT = 2
"""Exit status of a command that ended with an error."""
INTERRUPTED = 130

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
Address = Annotated[
    str | None,
    typer.Option(
        "--address",
        metavar="HOST:PORT",
        help="The head of a Ray cluster, or 'auto' for one on this machine. "
        "Also RETINUE_ADDRESS or RAY_ADDRESS.",
    ),
]


def print_json(value: object) -> None:
    typer.echo(json_format.dumps(value, default=str))


@contextmanager
def errors_as_messages() -> Iterator[None]:
    """An error of ours is one message on standard error, never a traceback."""
    try:
        yield
    except RetinueError as error:
        typer.echo(f"retinue: {error.message} [{error.code}]", err=True)
        raise typer.Exit(FAULT) from None
    except KeyboardInterrupt:
        typer.echo("retinue: interrupted", err=True)
        raise typer.Exit(INTERRUPTED) from None
    except BrokenPipeError:
        # `retinue status | head`: nobody reads on. The interpreter flushes at exit and shall not complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(FAULT) from None
    except OSError as error:
        place = f": {error.filename}" if error.filename else ""
        typer.echo(f"retinue: {error.strerror or error}{place}", err=True)
        raise typer.Exit(FAULT) from None
