"""The command line, ``retinue``. It imports Ray only once there is work for it: ``--help`` is quick."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version as package_version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from retinue.cluster import approvals_cli, listing_cli
from retinue.cluster.command import NOT_UP, Address, Json, errors_as_messages, print_json
from retinue.cluster.demo import DEFAULT_DELEGATES, DEFAULT_MAX_TOKENS, DemoOptions

if TYPE_CHECKING:
    from retinue.cluster.standing import DownReport, StatusReport, UpReport

app = typer.Typer(
    name="retinue",
    help="Agent sessions as actors on Ray.",
    epilog="Begin with: retinue demo",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Namespace = Annotated[str, typer.Option("--namespace", metavar="NAME", help="Ray namespace of the actors.")]


listing_cli.mount(app)
approvals_cli.mount(app)


def main() -> NoReturn:
    """Run the command line and exit."""
    app(prog_name="retinue")
    sys.exit(0)


def _print_version(wanted: bool) -> None:
    if wanted:
        versions = f"retinue {package_version('retinue')} (Ray {package_version('ray')}, Python "
        typer.echo(f"{versions}{'.'.join(map(str, sys.version_info[:3]))})")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print versions and exit."),
    ] = False,
) -> None:
    pass


@app.command()
def demo(
    folder: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Folder of text and Markdown files to read; this project's own docs when left out.",
            rich_help_panel="What is asked",
        ),
    ] = None,
    question: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="What to ask of the documents.", rich_help_panel="What is asked"),
    ] = None,
    session: Annotated[
        str | None,
        typer.Option(
            metavar="ID",
            help="Continue this conversation: a question may refer to the one before. "
            "A new one when left out.",
            rich_help_panel="What is asked",
        ),
    ] = None,
    store: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Where conversations are kept: sqlite:///PATH or memory:. "
            "A file in the user's data folder when left out.",
            rich_help_panel="What is asked",
        ),
    ] = None,
    delegates: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=1,
            help="How many delegates share the documents, at most.",
            rich_help_panel="The team and its budget",
        ),
    ] = DEFAULT_DELEGATES,
    max_tokens: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=1,
            help="Tokens for the whole team, input and output.",
            rich_help_panel="The team and its budget",
        ),
    ] = DEFAULT_MAX_TOKENS,
    max_model_calls: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Model calls of the whole team; enough for the team when left out.",
            rich_help_panel="The team and its budget",
        ),
    ] = None,
    max_tool_calls: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Tool calls of the whole team; enough for the documents when left out.",
            rich_help_panel="The team and its budget",
        ),
    ] = None,
    model: Annotated[
        str,
        typer.Option(
            metavar="MODEL",
            help="'extractive' is embedded, needs no network and cites sentences of the documents. "
            "'openai:NAME' is a model of an OpenAI-compatible server (extra: pip install 'retinue[openai]'; "
            "the key is taken from OPENAI_API_KEY).",
            rich_help_panel="The model",
        ),
    ] = "extractive",
    base_url: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="The server of an 'openai:' model, as in http://localhost:8080/v1.",
            rich_help_panel="The model",
        ),
    ] = None,
    json: Annotated[
        bool,
        typer.Option("--json", help="Print events as JSON lines, and one summary object at the end."),
    ] = False,
) -> None:
    """Put a question to a folder of documents.

    A coordinator splits it among delegates, each reads its part, and one answer comes back with its
    sources. Runs on the cluster of 'retinue up', else on a Ray of its own. Ctrl-C cancels every delegate.

    Exit status: 0 completed, 1 failed, 2 wrong usage, 3 stopped by the budget, 130 cancelled.
    """
    with errors_as_messages():
        from retinue.cluster.demo import run

        options = DemoOptions(
            folder=folder,
            question=question,
            delegates=delegates,
            max_tokens=max_tokens,
            max_model_calls=max_model_calls,
            max_tool_calls=max_tool_calls,
            model=model,
            base_url=base_url,
            session=session,
            store=store,
            json=json,
        )
        raise typer.Exit(run(options))


@app.command()
def up(
    address: Address = None,
    namespace: Namespace = "retinue",
    num_cpus: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="CPUs of a new cluster; all of the machine's when left out."),
    ] = None,
    max_resident: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Session hosts in use at once: a process for each session, or for up to 256 sessions of an "
            "app with isolation='shared'; as many as fit into a quarter of the memory when left out. On a "
            "cluster that is up already it changes the cap.",
        ),
    ] = None,
    idle_timeout: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            min=1,
            help="Unused for so long, a session leaves memory; 900 when left out. On a cluster that is up "
            "already it changes that.",
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Start the runtime on a cluster, where it stands until 'retinue down'.

    Without an address, it starts a one-machine cluster in the background. Programs on this machine then
    attach to it by themselves, and what they started goes on when they end. Clients need a token, which
    those on this machine find by themselves; RAY_AUTH_MODE=disabled turns that off. Harmless when repeated.
    """
    with errors_as_messages():
        from retinue.cluster import standing

        _tell("attaching to the cluster ..." if address else "starting ...", json)
        report = standing.up(
            address,
            namespace=namespace,
            num_cpus=num_cpus,
            max_resident=max_resident,
            idle_timeout=idle_timeout,
        )
        if json:
            record = asdict(report.record)
            print_json({**record, "started": report.started, "already": report.already})
        else:
            _print_up(report)


@app.command()
def down(json: Json = False) -> None:
    """Release all sessions, end the runtime, and stop the cluster if 'up' started it.

    Returns when all its processes are gone. A cluster that 'up' was given stays up.
    """
    with errors_as_messages():
        from retinue.cluster import standing

        _tell("releasing sessions and stopping ...", json)
        report = standing.down()
        if json:
            print_json(asdict(report))
        else:
            _print_down(report)


@app.command()
def status(address: Address = None, namespace: Namespace = "retinue", json: Json = False) -> None:
    """Show the cluster that is up, and what stands on it.

    Exit status: 0 where it answers, 1 where none is up or it does not answer.
    """
    with errors_as_messages():
        from retinue.cluster import standing

        report = standing.status(address, namespace=namespace)
        if json:
            print_json(asdict(report))
        else:
            _print_status(report)
        raise typer.Exit(0 if report.up else NOT_UP)


# --- what a person sees -------------------------------------------------------------------------------------


def _tell(what: str, json: bool) -> None:
    """Something is happening: on standard error where standard output is for a program."""
    typer.echo(f"retinue: {what}", err=json)


def _print_up(report: UpReport) -> None:
    record = report.record
    done = (
        "is up already" if report.already else "is up" if report.started else "has the runtime's actors now"
    )
    typer.echo(f"The cluster at {record.address} {done}.")
    rows = [
        ("namespace", record.namespace),
        ("clients need", "a token" if record.auth == "token" else "no token"),
    ]
    if record.token_path:
        rows.append(("the token is in", record.token_path))
    if record.log:
        rows.append(("its log is", record.log))
    _print_rows(rows)
    if record.started_here and record.auth != "token":
        typer.echo(
            "Whoever reaches this address over the network can run code here: RAY_AUTH_MODE is 'disabled'."
        )
    typer.echo("Programs on this machine attach to it by themselves.")
    stop = "stop it" if record.started_here else "take the runtime's actors away; the cluster stays up"
    typer.echo(f"To {stop}: retinue down")


def _print_down(report: DownReport) -> None:
    if report.address is None:
        typer.echo("No cluster is up.")
        return
    if report.trouble is not None:
        typer.echo(f"Note: {report.trouble}", err=True)
    if report.sessions:
        typer.echo(f"{_count(len(report.sessions), 'session')} released.")
    if report.left_running:
        typer.echo(f"The runtime's actors have left the cluster at {report.address}, which stays up.")
    else:
        ended = _count(report.processes, "process", "processes")
        typer.echo(f"The cluster at {report.address} is down ({ended} ended).")


def _print_status(report: StatusReport) -> None:
    if report.address is None:
        typer.echo("No cluster is up. `retinue up` starts one on this machine.")
        return
    typer.echo(f"The cluster at {report.address} {'is up' if report.up else 'does not answer'}.")
    rows: list[tuple[str, object]] = [("namespace", report.namespace)]
    if report.since is not None:
        rows.append(("since", time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(report.since))))
    if report.pid is not None:
        rows.append(("process", f"{report.pid} (retinue down stops it)"))
    if report.auth is not None:
        rows.append(("clients need", "a token" if report.auth == "token" else "no token"))
    if report.up:
        rows.append(("nodes", report.nodes))
        rows += [(name, _amount(name, value)) for name, value in sorted(report.resources.items())]
    if report.log is not None:
        rows.append(("log", report.log))
    _print_rows(rows)
    if report.trouble is not None:
        typer.echo(report.trouble, err=True)
    if report.statistics:
        typer.echo("The runtime:")
        _print_nested(report.statistics, "  ")


def _print_rows(rows: Sequence[tuple[str, object]]) -> None:
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        typer.echo(f"  {name:<{width}}  {value}")


def _print_nested(values: Mapping[str, Any], indent: str) -> None:
    for name, value in values.items():
        label = name.replace("_", " ")
        if isinstance(value, Mapping):
            if value:
                typer.echo(f"{indent}{label}")
                _print_nested(value, indent + "  ")
        elif isinstance(value, list | tuple) and value and all(isinstance(item, Mapping) for item in value):
            for item in value:
                typer.echo(f"{indent}{label.removesuffix('s')}")
                _print_nested(item, indent + "  ")
        else:
            text = ", ".join(map(str, value)) or "none" if isinstance(value, list | tuple) else value
            typer.echo(f"{indent}{label}: {text}")


def _amount(name: str, value: float) -> str:
    return f"{value / 2**30:.1f} GiB" if name == "memory" else f"{value:g}"


def _count(number: int, one: str, many: str | None = None) -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"


if __name__ == "__main__":
    main()
