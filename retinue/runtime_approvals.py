"""``runtime.approvals``: calls that wait for a person, in all sessions of a runtime's store."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Sequence
from typing import TYPE_CHECKING, get_args

import msgspec

from retinue.approval_records import approval_of, check_decision, run_of, unknown_approval
from retinue.approvals import Approval, ApprovalState
from retinue.client import SessionClient
from retinue.errors import InputError, NotFound
from retinue.ids import Identity, check_id, check_identity
from retinue.loop import awaited, blocking, on_client_loop
from retinue.protocol import DecideRequest
from retinue.store import PAGE_LIMIT, ListApprovals, StoredApproval

if TYPE_CHECKING:
    from retinue.backend import Backend


class RuntimeApprovals:
    """Requests for approval of a runtime: list them across sessions, look at one, decide it.

    Any process that reaches the store's sessions may decide; of two deciders at once one wins. Who may decide
    what is for the application to check: an identity here says whose request it is, not who decides.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    # --- looking ------------------------------------------------------------------------------------------

    async def list(
        self,
        identity: Identity | None = None,
        *,
        tenant_id: str | None = None,
        user_id: str | None = None,
        session_id: str | None = None,
        run_id: str | None = None,
        state: ApprovalState | None = "pending",
        limit: int = 100,
    ) -> Sequence[Approval]:
        """Requests of a tenant, oldest first; of one of its users, sessions or runs, where that is named.

        Args:
            identity: instead of ``tenant_id`` and ``user_id``.
            session_id: needs a user.
            run_id: of a root run; needs a user.
            state: ``None`` lists all, also those that were settled.
            limit: requests at most.

        Raises:
            InputError: no tenant is named, or a part of the question is missing or wrong.
        """
        question = _question(identity, tenant_id, user_id, session_id, run_id, state, limit)
        return await awaited(on_client_loop(self._list(question, limit)))

    def list_blocking(
        self,
        identity: Identity | None = None,
        *,
        tenant_id: str | None = None,
        user_id: str | None = None,
        session_id: str | None = None,
        run_id: str | None = None,
        state: ApprovalState | None = "pending",
        limit: int = 100,
    ) -> Sequence[Approval]:
        """The blocking twin of :meth:`list`."""
        question = _question(identity, tenant_id, user_id, session_id, run_id, state, limit)
        return blocking(on_client_loop(self._list(question, limit)))

    async def _list(self, question: ListApprovals, limit: int) -> Sequence[Approval]:
        client = await self._backend.client()
        if question.run_id is not None and question.session_id is None:
            assert question.tenant_id is not None
            assert question.user_id is not None
            owner = Identity(tenant_id=question.tenant_id, user_id=question.user_id)
            record = await client.store.read_run(owner, question.run_id)
            if record is None:
                return []
            question = msgspec.structs.replace(question, session_id=record.session_id)
        found = await list_approvals(client, question, limit)
        return [approval_of(stored) for stored in found]

    async def get(self, approval_id: str, *, identity: Identity) -> Approval:
        """One request as it stands. Raises :class:`NotFound` where this identity has none of that id."""
        return await awaited(self._getting(approval_id, identity))

    def get_blocking(self, approval_id: str, *, identity: Identity) -> Approval:
        """The blocking twin of :meth:`get`."""
        return blocking(self._getting(approval_id, identity))

    def _getting(self, approval_id: str, identity: Identity) -> concurrent.futures.Future[Approval]:
        check_identity(identity, "any")
        check_id("approval_id", approval_id)
        return on_client_loop(self._get(approval_id, identity))

    async def _get(self, approval_id: str, identity: Identity) -> Approval:
        client = await self._backend.client()
        stored = await client.store.read_approval(identity, approval_id)
        if stored is None:
            raise unknown_approval(approval_id)
        return approval_of(stored)

    # --- deciding -----------------------------------------------------------------------------------------

    async def approve(self, approval_id: str, *, identity: Identity, by: str, reason: str = "") -> Approval:
        """Let a call run that waits for approval; the first decision wins, and a repeat is harmless.

        Args:
            identity: whose run asks.
            by: who decides, in the application's words.
            reason: kept with the decision.

        Raises:
            InputError: code ``input_already_resolved``: it was settled otherwise, also by time or by the end
                of the run; ``state`` and ``by`` say how.
            NotFound: this identity has no such request.
        """
        return await awaited(self._deciding(approval_id, identity, True, by, reason))

    def approve_blocking(
        self, approval_id: str, *, identity: Identity, by: str, reason: str = ""
    ) -> Approval:
        """The blocking twin of :meth:`approve`."""
        return blocking(self._deciding(approval_id, identity, True, by, reason))

    async def deny(self, approval_id: str, *, identity: Identity, by: str, reason: str = "") -> Approval:
        """Refuse a call that waits for approval: the model reads ``reason``. Otherwise as :meth:`approve`."""
        return await awaited(self._deciding(approval_id, identity, False, by, reason))

    def deny_blocking(self, approval_id: str, *, identity: Identity, by: str, reason: str = "") -> Approval:
        """The blocking twin of :meth:`deny`."""
        return blocking(self._deciding(approval_id, identity, False, by, reason))

    def _deciding(
        self, approval_id: str, identity: Identity, approve: bool, by: str, reason: str
    ) -> concurrent.futures.Future[Approval]:
        check_identity(identity, "any")
        check_decision(approval_id, by, reason)
        decision = DecideRequest(
            run_id=run_of(approval_id), approval_id=approval_id, approve=approve, by=by, reason=reason
        )
        return on_client_loop(self._decide(identity, decision))

    async def _decide(self, identity: Identity, decision: DecideRequest) -> Approval:
        return approval_of(await decide_by_id(await self._backend.client(), identity, decision))


async def list_approvals(
    client: SessionClient, question: ListApprovals, limit: int
) -> Sequence[StoredApproval]:
    """Requests that answer a question, over as many pages as it takes, ``limit`` at most."""
    found: list[StoredApproval] = []
    after = question.after
    while len(found) < limit:
        page = await client.store.list_approvals(
            msgspec.structs.replace(question, after=after, limit=min(limit - len(found), PAGE_LIMIT))
        )
        found.extend(page.approvals)
        after = page.next
        if after is None:
            break
    return found


async def decide_by_id(client: SessionClient, identity: Identity, decision: DecideRequest) -> StoredApproval:
    """Decide a request of which only the id is known.

    Raises:
        NotFound: this identity has no such request.
        InputError: it was settled otherwise.
    """
    try:
        record = await client.find_run(identity, decision.run_id)
    except NotFound:
        raise unknown_approval(decision.approval_id) from None
    return await client.decide(identity, record.session_id, decision)


def _question(
    identity: Identity | None,
    tenant_id: str | None,
    user_id: str | None,
    session_id: str | None,
    run_id: str | None,
    state: ApprovalState | None,
    limit: int,
) -> ListApprovals:
    if identity is not None:
        check_identity(identity, "any")
        if tenant_id is not None or user_id is not None:
            raise InputError("give an identity, or a tenant_id with or without a user_id", field="identity")
        tenant_id, user_id = identity.tenant_id, identity.user_id
    if tenant_id is None:
        raise InputError("say whose requests: an identity, or a tenant_id", field="tenant_id")
    check_id("tenant_id", tenant_id)
    for name, value in (("user_id", user_id), ("session_id", session_id), ("run_id", run_id)):
        if value is not None:
            check_id(name, value)
            if user_id is None:
                raise InputError(f"{name} is found only together with a user_id", field="user_id")
    if state is not None and state not in get_args(ApprovalState):
        raise InputError(
            f"state is one of {', '.join(get_args(ApprovalState))}, or None for all, not {state!r:.80}",
            field="state",
        )
    number: object = limit
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise InputError(f"limit must be a positive number of requests, not {limit!r:.80}", field="limit")
    return ListApprovals(
        tenant_id=tenant_id, user_id=user_id, session_id=session_id, run_id=run_id, state=state
    )
