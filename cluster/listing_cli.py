"""Commands that look: ``retinue actors list``, ``sessions list|show``, ``runs list|watch``.

They change nothing: sessions are read as last committed, without a lease, and runs are followed from outside.
"""

from __future__ import annotations

from typing import Annotated

import typer

from retinue.cluster.command import NOT_UP, Address, Json, errors_as_messages, print_json
from retinue.errors import NotFound
from retinue.ids import Identity, SessionAddress

LIMIT = 100
"""Rows of a list, unless told otherwise."""
MOST = 500
SHOWN_RUNS = 20
"""Runs that ``sessions show`` lists, the newest first."""

actors = typer.Typer(help="The actors of the runtime on the cluster.", no_args_is_help=True)
sessions = typer.Typer(help="Sessions in a store: list them, show one.", no_args_is_help=True)
runs = typer.Typer(help="Runs in a store: list them, watch one.", no_args_is_help=True)

Namespace = Annotated[
    str | None,
    typer.Option(
        "--namespace", metavar="NAME", help="Ray namespace of the actors; as it was put up when left out."
    ),
]
StoreUrl = Annotated[
    str | None,
    typer.Option(
        "--store",
        metavar="URL",
        help="The store, as in sqlite:////data/retinue.db; the cluster's default when left out. Where no "
        "cluster is up, a file of this machine is opened for reading.",
    ),
]
Limit = Annotated[int, typer.Option("--limit", metavar="N", min=1, max=MOST, help="Rows at most.")]
Tenant = Annotated[str | None, typer.Option("--tenant", metavar="ID", help="Only of this tenant.")]
User = Annotated[str | None, typer.Option("--user", metavar="ID", help="Only of this user; needs --tenant.")]
OneTenant = Annotated[str, typer.Option("--tenant", metavar="ID", help="The tenant.")]
OneUser = Annotated[str, typer.Option("--user", metavar="ID", help="The user.")]


def mount(app: typer.Typer) -> None:
    """Add these commands to the command line."""
    app.add_typer(actors, name="actors")
    app.add_typer(sessions, name="sessions")
    app.add_typer(runs, name="runs")


@actors.command("list")
def list_actors(
    address: Address = None,
    namespace: Namespace = None,
    after: Annotated[
        str | None, typer.Option("--after", metavar="NAME", help="Go on behind the actor of this name.")
    ] = None,
    limit: Limit = LIMIT,
    json: Json = False,
) -> None:
    """List the actors: what each is, where it runs, and whose sessions a session host has.

    Exit status: 0, 1 where no cluster is up.
    """
    with errors_as_messages():
        from retinue.cluster import listing_tables, view
        from retinue.loop import blocking, on_client_loop

        with view.cluster_that_is_up(address, namespace) as connection:
            if connection is None:
                typer.echo("No cluster is up. `retinue up` starts one on this machine.", err=True)
                raise typer.Exit(NOT_UP)
            from retinue.actors import listing

            page = blocking(
                on_client_loop(listing.list_actors(connection.namespace, after=after, limit=limit))
            )
            if json:
                print_json(listing_tables.plain(page))
            else:
                listing_tables.print_actors(page)


@sessions.command("list")
def list_sessions(
    tenant: Tenant = None,
    user: User = None,
    after: Annotated[
        tuple[str, str, str] | None,
        typer.Option("--after", metavar="TENANT USER SESSION", help="Go on behind this session."),
    ] = None,
    limit: Limit = LIMIT,
    address: Address = None,
    namespace: Namespace = None,
    store: StoreUrl = None,
    json: Json = False,
) -> None:
    """List sessions in the order of tenant, user and session, with what each has and where it lives."""
    with errors_as_messages():
        from retinue.cluster import listing_tables, view
        from retinue.store import ListSessions

        question = ListSessions(tenant_id=tenant, user_id=user, after=after, limit=limit + 1)
        with view.open_view(address, namespace, store) as here:

            async def ask() -> listing_tables.Summaries:
                return await (await here.client()).store.list_sessions(question)

            found = here.ask(ask())
            page = listing_tables.session_page(found[:limit], here.places(), more=len(found) > limit)
        if json:
            print_json(listing_tables.plain(page))
        else:
            listing_tables.print_sessions(page)


@sessions.command("show")
def show_session(
    tenant: OneTenant,
    user: OneUser,
    session: Annotated[str, typer.Option("--session", metavar="ID", help="The session.")],
    messages: Annotated[
        int, typer.Option("--messages", metavar="N", min=0, help="Messages of its history, the last ones.")
    ] = 10,
    address: Address = None,
    namespace: Namespace = None,
    store: StoreUrl = None,
    json: Json = False,
) -> None:
    """Show a session as last committed: its history, its state, its runs, and where it lives."""
    with errors_as_messages():
        from retinue.cluster import listing_tables, view
        from retinue.store import ListRuns

        question = ListRuns(tenant_id=tenant, user_id=user, session_id=session, limit=SHOWN_RUNS)
        with view.open_view(address, namespace, store) as here:

            async def ask() -> listing_tables.SessionView:
                client = await here.client()
                where = SessionAddress(
                    store_id=client.store.store_id, tenant_id=tenant, user_id=user, session_id=session
                )
                stored = await client.store.read_session(where)
                known = await client.store.list_runs(question)
                if not stored.messages and stored.revision == 0 and not known.records:
                    raise NotFound(
                        f"there is no session {session!r} of user {user!r} in tenant {tenant!r}; "
                        "`retinue sessions list` shows those that are there",
                        session_id=session,
                    )
                located = await here.backend.resident(where)
                host_id = located.host_id if located is not None else None
                return listing_tables.session_view(where, stored, known.records, host_id, messages)

            shown = here.ask(ask())
        if json:
            print_json(listing_tables.plain(shown))
        else:
            listing_tables.print_session(shown)


@runs.command("list")
def list_runs(
    tenant: Tenant = None,
    user: User = None,
    session: Annotated[
        str | None, typer.Option("--session", metavar="ID", help="Only of this session; needs --user.")
    ] = None,
    open_only: Annotated[bool, typer.Option("--open", help="Only those that have not ended.")] = False,
    before: Annotated[
        int | None, typer.Option("--before", metavar="N", help="Go on behind a page that ended with this.")
    ] = None,
    limit: Limit = LIMIT,
    address: Address = None,
    namespace: Namespace = None,
    store: StoreUrl = None,
    json: Json = False,
) -> None:
    """List runs, the newest first, with how each ended."""
    with errors_as_messages():
        from retinue.cluster import listing_tables, view
        from retinue.store import ListRuns, RunPage

        question = ListRuns(
            tenant_id=tenant,
            user_id=user,
            session_id=session,
            open_only=open_only,
            before=before,
            limit=limit,
        )
        with view.open_view(address, namespace, store) as here:

            async def ask() -> RunPage:
                return await (await here.client()).store.list_runs(question)

            page = listing_tables.run_page(here.ask(ask()))
        if json:
            print_json(listing_tables.plain(page))
        else:
            listing_tables.print_runs(page)


@runs.command("watch")
def watch_run(
    run_id: Annotated[str, typer.Argument(metavar="RUN_ID", help="The run.")],
    tenant: OneTenant,
    user: OneUser,
    after: Annotated[
        int, typer.Option("--after", metavar="CURSOR", min=0, help="Only events behind this number.")
    ] = 0,
    address: Address = None,
    namespace: Namespace = None,
    store: StoreUrl = None,
    json: Annotated[bool, typer.Option("--json", help="Print each event as a line of JSON.")] = False,
) -> None:
    """Follow a run to its end, a line for each event. Ctrl-C stops watching; the run goes on.

    Exit status: 0 once the run has ended, 2 with an error, 130 when interrupted.
    """
    with errors_as_messages():
        from retinue.cluster import run_lines, view

        with view.open_view(address, namespace, store) as here:
            run_lines.watch(here, run_id, Identity(tenant_id=tenant, user_id=user), after=after, json=json)
