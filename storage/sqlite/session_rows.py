"""Sessions and their leases in the SQLite store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from retinue.ids import SessionAddress
from retinue.storage.rows import SessionRow, new_session
from retinue.storage.sqlite.access import FLAGS, Access, by_session
from retinue.storage.sqlite.failures import damaged, damaged_row
from retinue.storage.sqlite.statements import statement
from retinue.store import Holder, ListSessions, SessionSummary

FIND_SESSION = statement("find_session")
ADD_SESSION = statement("add_session")
READ_EPOCH_FLOOR = statement("read_epoch_floor")
SET_EPOCH_FLOOR = statement("set_epoch_floor")
SET_LEASE = statement("set_lease")
RENEW_LEASE = statement("renew_lease")
END_LEASE = statement("end_lease")
HELD_BY = statement("held_by")
END_LEASES_OF = statement("end_leases_of")
ADD_FENCED = statement("add_fenced")
IS_FENCED = statement("is_fenced")
LIST_SESSIONS = statement("list_sessions")
LIST_SESSIONS_OF_TENANT = statement("list_sessions_of_tenant")
LIST_SESSIONS_OF_USER = statement("list_sessions_of_user")
DELETE_ALL_OF_SESSION = tuple(
    statement(name)
    for name in (
        "delete_events_of",
        "delete_approvals_of",
        "delete_runs_of",
        "clear_artifacts",
        "clear_conversations",
        "clear_state",
        "clear_attestations",
        "clear_origin",
        "delete_session",
    )
)
"""Children before what they belong to."""

_decode_holder = msgspec.json.Decoder(Holder).decode


class SessionRows(Access):
    """The part of :class:`retinue.storage.rows.Rows` that is about who may write."""

    def find_session(self, address: SessionAddress) -> SessionRow | None:
        parameters = by_session(address)
        row = self._one(FIND_SESSION, parameters)
        if row is None:
            return None
        key, revision, commit_id, commit_revision, fork_id, epoch, renewals, holder = row
        try:
            return msgspec.convert(
                {
                    "key": key,
                    "revision": revision,
                    "commit_id": commit_id,
                    "commit_revision": commit_revision,
                    "fork_id": fork_id,
                    "epoch": epoch,
                    "renewals": renewals,
                    "holder": None if holder is None else _decode_holder(holder),
                },
                SessionRow,
            )
        except (msgspec.DecodeError, TypeError) as error:
            raise damaged(FIND_SESSION, parameters, self._url, str(error)) from error

    def add_session(self, address: SessionAddress) -> SessionRow:
        epoch = self._epoch_floor()
        key = self._write(ADD_SESSION, {**by_session(address), "epoch": epoch}).lastrowid
        assert key is not None
        return new_session(key, epoch)

    def raise_epoch_floor(self, epoch: int) -> None:
        if epoch > self._epoch_floor():
            self._write(SET_EPOCH_FLOOR, {"epoch": str(epoch)})

    def _epoch_floor(self) -> int:
        """Without it no session may be added: an epoch could come a second time."""
        row = self._one(READ_EPOCH_FLOOR, {})
        try:
            return int(row[0])
        except (TypeError, ValueError) as error:
            what = "it is no number, or missing"
            raise damaged_row("meta", {"name": "epoch_floor"}, self._url, what) from error

    def delete_session(self, session_key: int) -> None:
        parameters = {"session_key": session_key}
        for sql in DELETE_ALL_OF_SESSION:
            self._write(sql, parameters)

    def set_lease(self, session_key: int, epoch: int, holder: Holder) -> None:
        self._write(
            SET_LEASE,
            {
                "session_key": session_key,
                "epoch": epoch,
                "holder_id": holder.holder_id,
                "holder": msgspec.json.encode(holder),
            },
        )

    def renew_lease(self, address: SessionAddress, epoch: int) -> bool:
        return self._write(RENEW_LEASE, {**by_session(address), "epoch": epoch}).rowcount == 1

    def end_lease(self, session_key: int) -> None:
        self._write(END_LEASE, {"session_key": session_key})

    def fence_holder(self, holder_id: str) -> Sequence[SessionAddress]:
        parameters = {"holder_id": holder_id}
        self._write(ADD_FENCED, parameters)
        held = [
            SessionAddress(store_id=self._store_id, tenant_id=tenant, user_id=user, session_id=session)
            for tenant, user, session in self._all(HELD_BY, parameters)
        ]
        if held:
            self._write(END_LEASES_OF, parameters)
        return tuple(held)

    def is_fenced(self, holder_id: str) -> bool:
        return self._one(IS_FENCED, {"holder_id": holder_id}) is not None

    def list_sessions(self, question: ListSessions) -> Sequence[SessionSummary]:
        after_tenant, after_user, after_session = question.after or ("", "", "")
        sql = LIST_SESSIONS
        if question.tenant_id is not None:
            sql = LIST_SESSIONS_OF_TENANT if question.user_id is None else LIST_SESSIONS_OF_USER
        parameters = {
            "tenant_id": question.tenant_id,
            "user_id": question.user_id,
            "after_tenant": after_tenant,
            "after_user": after_user,
            "after_session": after_session,
            "limit": question.limit,
        }
        return tuple(self._summary(row) for row in self._all(sql, parameters))

    def _summary(self, row: Sequence[Any]) -> SessionSummary:
        tenant_id, user_id, session_id, revision, replayable, messages, runs, open_runs, holder_id = row
        try:
            return msgspec.convert(
                {
                    "tenant_id": tenant_id,
                    "user_id": user_id,
                    "session_id": session_id,
                    "revision": revision,
                    "replayable": FLAGS.get(replayable),
                    "messages": messages or 0,
                    "runs": runs,
                    "open_runs": open_runs,
                    "holder_id": holder_id,
                },
                SessionSummary,
            )
        except msgspec.ValidationError as error:
            key = {"tenant_id": tenant_id, "user_id": user_id, "session_id": session_id}
            raise damaged_row("session", key, self._url, str(error)) from error
