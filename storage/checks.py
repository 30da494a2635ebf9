"""What the rules of the store operations check, before anything is written."""

from __future__ import annotations

import math
from collections.abc import Iterable

from retinue.errors import InputError, LeaseLost, NotFound, StoreUnavailable
from retinue.ids import Identity, SessionAddress, check_id, check_identity
from retinue.storage.rows import Rows, RunRow, SessionRow
from retinue.store import Attestation, Lease, RunRecord, SettleApproval, StoredApproval, StoredArtifact


class Checks:
    """Checks of addresses and leases.

    Args:
        store_id: of this store; addresses of another are refused.
    """

    def __init__(self, store_id: str) -> None:
        self._store_id = store_id

    def is_here(self, address: SessionAddress) -> bool:
        """Whether an address is of this store."""
        return address.store_id == self._store_id

    def address_of(self, identity: Identity, session_id: str) -> SessionAddress:
        """The address of a session of this store."""
        return SessionAddress(
            store_id=self._store_id,
            tenant_id=identity.tenant_id,
            user_id=identity.user_id,
            session_id=session_id,
        )

    def check_address(self, address: SessionAddress) -> None:
        """Raise unless an address is valid and of this store."""
        check_identity(address.identity, address.session_id)
        if not self.is_here(address):
            raise StoreUnavailable(
                f"the address of session {address.session_id!r} belongs to store {address.store_id}, and "
                f"this is {self._store_id}; open the store that the session is in",
                reason="other_store",
            )

    def check_lease(self, lease: Lease) -> None:
        """Raise :class:`LeaseLost` for a lease of another store.

        A memory store that was restarted is another store: what its leases allowed ended with it.
        """
        check_identity(lease.address.identity, lease.address.session_id)
        if not self.is_here(lease.address):
            raise LeaseLost(
                f"the lease of session {lease.address.session_id!r} was given by store "
                f"{lease.address.store_id}, and this is {self._store_id}"
            )

    def leased(self, rows: Rows, lease: Lease) -> SessionRow:
        """The session's row, if the lease stands; raises :class:`LeaseLost` otherwise."""
        self.check_lease(lease)
        return standing(rows.find_session(lease.address), lease)


def stands(row: SessionRow, lease: Lease) -> bool:
    """Whether a lease is the one that this row has now."""
    return row.holder is not None and row.epoch == lease.epoch


def standing(row: SessionRow | None, lease: Lease) -> SessionRow:
    """The row, if the lease stands; raises :class:`LeaseLost` otherwise."""
    if row is not None and stands(row, lease):
        return row
    session_id = lease.address.session_id
    if row is None:
        raise LeaseLost(f"session {session_id!r} has no lease: it was deleted, or nobody ever acquired it")
    if row.epoch == lease.epoch:
        raise LeaseLost(
            f"the lease of session {session_id!r} with epoch {lease.epoch} was released, or its holder fenced"
        )
    raise LeaseLost(
        f"the lease of session {session_id!r} with epoch {lease.epoch} was lost: epoch {row.epoch} stands",
        epoch=row.epoch,
    )


def run_of(rows: Rows, row: SessionRow, address: SessionAddress, run_id: str) -> RunRow:
    """The run's place, if it belongs to this session; raises :class:`NotFound` otherwise."""
    check_id("run_id", run_id)
    run = rows.find_run(address.identity, run_id)
    if run is None or run.session_key != row.key:
        raise NotFound(
            f"session {address.session_id!r} has no run {run_id!r}; open it before writing to it",
            run_id=run_id,
        )
    return run


def check_run(identity: Identity, run_id: str) -> None:
    """Raise unless a run's name is valid."""
    check_id("identity.tenant_id", identity.tenant_id)
    check_id("identity.user_id", identity.user_id)
    check_id("run_id", run_id)


def check_record(record: RunRecord, address: SessionAddress) -> None:
    """Raise unless a record belongs to the session of this address and can be stored."""
    if (record.tenant_id, record.user_id, record.session_id) != (
        address.tenant_id,
        address.user_id,
        address.session_id,
    ):
        raise InputError(f"the record of run {record.run_id!r} names another session than its lease")
    check_id("run_id", record.run_id)
    check_id("root_run_id", record.root_run_id)
    if record.parent_run_id is not None:
        check_id("parent_run_id", record.parent_run_id)
    check_text("app", record.app)
    _check_time("created_at", record.created_at)


def check_artifacts(artifacts: Iterable[StoredArtifact]) -> None:
    """Raise unless all artifacts can be stored."""
    for artifact in artifacts:
        check_id("artifact_id", artifact.artifact_id)
        check_text("mime_type", artifact.mime_type)


def check_approval(approval: StoredApproval, address: SessionAddress) -> None:
    """Raise unless a new request belongs to the session of this address and can be stored."""
    if (approval.tenant_id, approval.user_id, approval.session_id) != (
        address.tenant_id,
        address.user_id,
        address.session_id,
    ):
        raise InputError(f"request {approval.approval_id!r} names another session than its lease")
    for name in ("approval_id", "run_id", "tool_name", "digest"):
        check_id(name, getattr(approval, name))
    _check_time("requested_at", approval.requested_at)
    _check_time("expires_at", approval.expires_at)
    decided = (approval.decided_at, approval.by, approval.reason)
    if approval.state != "pending" or decided != (None, "", ""):
        raise InputError(
            "a new request for approval is pending, and has no decided_at, by and reason yet", field="state"
        )


def check_settlement(settlement: SettleApproval) -> None:
    """Raise unless a request can be settled so."""
    check_id("approval_id", settlement.approval_id)
    if settlement.state not in ("approved", "denied", "expired", "cancelled"):
        raise InputError(
            f"a request is settled as approved, denied, expired or cancelled, not {settlement.state!r:.80}",
            field="state",
        )
    check_text("by", settlement.by)
    check_text("reason", settlement.reason)
    _check_time("at", settlement.at)


def check_attestation(attestation: Attestation) -> None:
    """Raise unless an attestation can be stored."""
    check_text("attestation.by", attestation.by)
    check_text("attestation.why", attestation.why)
    _check_time("attestation.at", attestation.at)


def check_text(name: str, value: object) -> None:
    """Raise :class:`InputError` unless ``value`` is a string that UTF-8 can carry; it may be empty."""
    if value != "":
        check_id(name, value)


def _check_time(name: str, value: object) -> None:
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise InputError(f"{name} must be a finite number of seconds, not {value!r:.80}", field=name)
