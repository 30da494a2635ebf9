"""Commands that decide: ``retinue approvals list|approve|deny``."""

from __future__ import annotations

import getpass
from typing import TYPE_CHECKING, Annotated

import typer

from retinue.approvals import ApprovalState
from retinue.cluster.command import Address, Json, errors_as_messages, print_json
from retinue.cluster.listing_cli import LIMIT, Limit, Namespace, StoreUrl, Tenant, User
from retinue.errors import InputError, NotFound
from retinue.ids import Identity

if TYPE_CHECKING:
    from retinue.client import SessionClient
    from retinue.store import StoredApproval

approvals = typer.Typer(help="Calls that wait for a person: list them, decide them.", no_args_is_help=True)

ApprovalId = Annotated[str, typer.Argument(metavar="ID", help="The request, as 'approvals list' shows it.")]
By = Annotated[
    str | None,
    typer.Option("--by", metavar="NAME", help="Who decides; the name of the operating system's user."),
]
Why = Annotated[str, typer.Option("--reason", metavar="TEXT", help="Kept with the decision.")]
Session = Annotated[
    str | None, typer.Option("--session", metavar="ID", help="Only of this session; needs --user.")
]


def mount(app: typer.Typer) -> None:
    """Add these commands to the command line."""
    app.add_typer(approvals, name="approvals")


@approvals.command("list")
def list_approvals(
    tenant: Tenant = None,
    user: User = None,
    session: Session = None,
    state: Annotated[
        str,
        typer.Option(
            metavar="STATE",
            help="'pending', 'approved', 'denied', 'expired', 'cancelled', or 'all' of them.",
        ),
    ] = "pending",
    after: Annotated[
        int | None, typer.Option("--after", metavar="N", help="Go on behind a page that ended with this.")
    ] = None,
    limit: Limit = LIMIT,
    address: Address = None,
    namespace: Namespace = None,
    store: StoreUrl = None,
    json: Json = False,
) -> None:
    """List requests for approval, the oldest first: what each wants to do, and until when it waits."""
    with errors_as_messages():
        from retinue.cluster import listing_tables, view
        from retinue.store import ApprovalPage, ListApprovals

        question = ListApprovals(
            tenant_id=tenant,
            user_id=user,
            session_id=session,
            state=_state(state),
            after=after,
            limit=limit,
        )
        with view.open_view(address, namespace, store) as here:

            async def ask() -> ApprovalPage:
                return await (await here.client()).store.list_approvals(question)

            page = listing_tables.approval_page(here.ask(ask()))
        if json:
            print_json(listing_tables.plain(page))
        else:
            listing_tables.print_approvals(page)


@approvals.command("approve")
def approve(
    approval_id: ApprovalId,
    by: By = None,
    reason: Why = "",
    tenant: Tenant = None,
    user: User = None,
    address: Address = None,
    namespace: Namespace = None,
    store: StoreUrl = None,
    json: Json = False,
) -> None:
    """Let a call run that waits for approval.

    The first decision wins; the same one again changes nothing.

    Exit status: 0, 2 where it was settled otherwise (by somebody else, by time, with its run) or is unknown.
    """
    _decide(approval_id, True, by, reason, tenant, user, address, namespace, store, json)


@approvals.command("deny")
def deny(
    approval_id: ApprovalId,
    by: By = None,
    reason: Annotated[
        str, typer.Option("--reason", metavar="TEXT", help="Kept with the decision; the model reads it.")
    ] = "",
    tenant: Tenant = None,
    user: User = None,
    address: Address = None,
    namespace: Namespace = None,
    store: StoreUrl = None,
    json: Json = False,
) -> None:
    """Refuse a call that waits for approval. The run goes on without it.

    The first decision wins; the same one again changes nothing.

    Exit status: 0, 2 where it was settled otherwise (by somebody else, by time, with its run) or is unknown.
    """
    _decide(approval_id, False, by, reason, tenant, user, address, namespace, store, json)


def _decide(
    approval_id: str,
    approve: bool,
    by: str | None,
    reason: str,
    tenant: str | None,
    user: str | None,
    address: str | None,
    namespace: str | None,
    store: str | None,
    json: bool,
) -> None:
    with errors_as_messages():
        from retinue.approval_records import check_decision, run_of
        from retinue.cluster import listing_tables, view
        from retinue.protocol import DecideRequest

        decision = DecideRequest(
            run_id=run_of(approval_id),
            approval_id=approval_id,
            approve=approve,
            by=by or _operator(),
            reason=reason,
        )
        check_decision(approval_id, decision.by, reason)
        with view.open_view(address, namespace, store) as here:

            async def decide() -> StoredApproval:
                client = await here.client()
                found = await _find(client, approval_id, tenant, user)
                identity = Identity(tenant_id=found.tenant_id, user_id=found.user_id)
                try:
                    return await client.decide(identity, found.session_id, decision)
                except NotFound:  # its host may have died, and its record tells by now how it ended
                    return await client.decide(identity, found.session_id, decision)

            row = listing_tables.approval_row(here.ask(decide()))
        if json:
            print_json(listing_tables.plain(row))
        else:
            listing_tables.print_decision(row)


async def _find(
    client: SessionClient, approval_id: str, tenant: str | None, user: str | None
) -> StoredApproval:
    """The request of this id, whoever it belongs to: pending ones are looked at first."""
    from retinue.approval_records import unknown_approval
    from retinue.store import PAGE_LIMIT, ListApprovals

    if tenant is not None and user is not None:
        identity = Identity(tenant_id=tenant, user_id=user)
        found = await client.store.read_approval(identity, approval_id)
        if found is not None:
            return found
        raise unknown_approval(approval_id)
    states: tuple[ApprovalState | None, ...] = ("pending", None)
    for state in states:
        after: int | None = None
        while True:
            page = await client.store.list_approvals(
                ListApprovals(tenant_id=tenant, user_id=user, state=state, after=after, limit=PAGE_LIMIT)
            )
            for each in page.approvals:
                if each.approval_id == approval_id:
                    return each
            after = page.next
            if after is None:
                break
    raise unknown_approval(approval_id)


def _state(named: str) -> ApprovalState | None:
    from typing import get_args

    states = get_args(ApprovalState)
    if named == "all":
        return None
    for state in states:
        if named == state:
            return state  # type: ignore[no-any-return]
    raise InputError(f"--state is one of {', '.join(states)} or all, not {named!r:.80}", field="state")


def _operator() -> str:
    """The user of the operating system, where there is one."""
    try:
        return getpass.getuser() or "operator"
    except (OSError, KeyError):
        return "operator"
