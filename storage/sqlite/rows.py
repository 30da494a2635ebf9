"""Rows of the SQLite store: one connection's view of the file, inside a transaction of its user."""

from __future__ import annotations

import sqlite3
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from retinue.errors import DamagedRecord
from retinue.ids import Identity, SessionAddress
from retinue.storage.rows import RunRow, SessionRow, conversations_of
from retinue.storage.sqlite.failures import damaged, damaged_row, is_damage
from retinue.storage.sqlite.statements import statement
from retinue.store import (
    Holder,
    RunOutcome,
    RunRecord,
    StoredArtifact,
    StoredEvent,
    StoredSession,
)

Parameters = Mapping[str, Any]

FIND_SESSION = statement("find_session")
ADD_SESSION = statement("add_session")
SET_LEASE = statement("set_lease")
RENEW_LEASE = statement("renew_lease")
END_LEASE = statement("end_lease")
HELD_BY = statement("held_by")
END_LEASES_OF = statement("end_leases_of")
ADD_FENCED = statement("add_fenced")
IS_FENCED = statement("is_fenced")
READ_SESSION = statement("read_session")
READ_CONVERSATIONS = statement("read_conversations")
READ_MESSAGES = statement("read_messages")
ADVANCE_SESSION = statement("advance_session")
CLEAR_SESSION = statement("clear_session")
CLEAR_CONVERSATIONS = statement("clear_conversations")
CLEAR_STATE = statement("clear_state")
FIND_CONVERSATION = statement("find_conversation")
ADD_CONVERSATION = statement("add_conversation")
GROW_CONVERSATION = statement("grow_conversation")
ADD_MESSAGE = statement("add_message")
SET_STATE = statement("set_state")
ADD_ARTIFACT = statement("add_artifact")
READ_ARTIFACT = statement("read_artifact")
FIND_RUN = statement("find_run")
READ_RUN = statement("read_run")
READ_OPEN_RUNS = statement("read_open_runs")
ADD_RUN = statement("add_run")
FINISH_RUN = statement("finish_run")
RESERVE_EVENTS = statement("reserve_events")
ADD_EVENT = statement("add_event")
READ_EVENTS = statement("read_events")

CHANGED = "its checksum does not match"

_decode_holder = msgspec.json.Decoder(Holder).decode


class SQLiteRows:
    """:class:`retinue.storage.rows.Rows` over a connection.

    Args:
        connection: in autocommit mode, used by one thread at a time.
        store_id: of the file.
        url: of the store, for errors.
    """

    def __init__(self, connection: sqlite3.Connection, store_id: str, url: str) -> None:
        self._connection = connection
        self._store_id = store_id
        self._url = url

    # sessions and leases

    def find_session(self, address: SessionAddress) -> SessionRow | None:
        parameters = _of_session(address)
        row = self._one(FIND_SESSION, parameters)
        if row is None:
            return None
        key, revision, commit_id, commit_revision, epoch, renewals, holder = row
        try:
            return msgspec.convert(
                {
                    "key": key,
                    "revision": revision,
                    "commit_id": commit_id,
                    "commit_revision": commit_revision,
                    "epoch": epoch,
                    "renewals": renewals,
                    "holder": None if holder is None else _decode_holder(holder),
                },
                SessionRow,
            )
        except (msgspec.DecodeError, TypeError) as error:
            raise damaged(FIND_SESSION, parameters, self._url, str(error)) from error

    def add_session(self, address: SessionAddress) -> SessionRow:
        key = self._write(ADD_SESSION, _of_session(address)).lastrowid
        assert key is not None
        return SessionRow(
            key=key, revision=0, commit_id=None, commit_revision=0, epoch=0, renewals=0, holder=None
        )

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
        return self._write(RENEW_LEASE, {**_of_session(address), "epoch": epoch}).rowcount == 1

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

    # what a session keeps

    def read_session(self, address: SessionAddress) -> StoredSession:
        parameters = _of_session(address)
        row = self._one(READ_SESSION, parameters)
        if row is None:
            return StoredSession()
        revision, replayable, state, checksum = row
        if not isinstance(revision, int) or replayable not in (0, 1):
            raise damaged(READ_SESSION, parameters, self._url, "its revision or replayable flag is no number")
        history, conversations = conversations_of(self._read_messages(parameters))
        return StoredSession(
            revision=revision,
            replayable=bool(replayable),
            messages=history,
            conversations=conversations,
            state=b"{}" if state is None else self._intact(state, checksum, "state", parameters),
        )

    def _read_messages(self, of_session: Parameters) -> dict[str, list[bytes]]:
        """All messages by execution id; each list is whole, or refused."""
        sizes = dict(self._all(READ_CONVERSATIONS, of_session))
        found: dict[str, list[bytes]] = {execution_id: [] for execution_id in sizes}
        for execution_id, position, body, checksum in self._all(READ_MESSAGES, of_session):
            bodies = found[execution_id]
            key = {**of_session, "execution_id": execution_id, "position": position}
            if position != len(bodies):
                raise self._missing(of_session, execution_id, len(bodies))
            bodies.append(self._intact(body, checksum, "message", key))
        for execution_id, size in sizes.items():
            if size != len(found[execution_id]):
                raise self._missing(of_session, execution_id, len(found[execution_id]))
        return found

    def _missing(self, of_session: Parameters, execution_id: str, position: int) -> DamagedRecord:
        key = {**of_session, "execution_id": execution_id, "position": position}
        return damaged_row("message", key, self._url, "it is missing, or one too many")

    def advance_session(self, session_key: int, revision: int, commit_id: str, replayable: bool) -> None:
        self._write(
            ADVANCE_SESSION,
            {
                "session_key": session_key,
                "revision": revision,
                "commit_id": commit_id,
                "replayable": replayable,
            },
        )

    def append_messages(self, session_key: int, execution_id: str, messages: Sequence[bytes]) -> None:
        of_conversation = {"session_key": session_key, "execution_id": execution_id}
        row = self._one(FIND_CONVERSATION, of_conversation)
        if row is None:
            size = 0
            conversation_key = self._write(
                ADD_CONVERSATION, {**of_conversation, "size": len(messages)}
            ).lastrowid
        else:
            conversation_key, size = row
            self._write(
                GROW_CONVERSATION, {"conversation_key": conversation_key, "size": size + len(messages)}
            )
        self._write_many(
            ADD_MESSAGE,
            [
                {
                    "conversation_key": conversation_key,
                    "position": position,
                    "body": body,
                    "checksum": zlib.crc32(body),
                }
                for position, body in enumerate(messages, start=size)
            ],
        )

    def set_state(self, session_key: int, state: bytes) -> None:
        self._write(SET_STATE, {"session_key": session_key, "body": state, "checksum": zlib.crc32(state)})

    def clear_session(self, session_key: int) -> None:
        of_session = {"session_key": session_key}
        self._write(CLEAR_SESSION, of_session)
        self._write(CLEAR_CONVERSATIONS, of_session)
        self._write(CLEAR_STATE, of_session)

    def add_artifacts(self, session_key: int, artifacts: Sequence[StoredArtifact]) -> None:
        self._write_many(
            ADD_ARTIFACT,
            [
                {
                    "session_key": session_key,
                    "artifact_id": artifact.artifact_id,
                    "mime_type": artifact.mime_type,
                    "body": artifact.data,
                    "checksum": zlib.crc32(artifact.data),
                }
                for artifact in artifacts
            ],
        )

    def read_artifact(self, address: SessionAddress, artifact_id: str) -> StoredArtifact | None:
        parameters = {**_of_session(address), "artifact_id": artifact_id}
        row = self._one(READ_ARTIFACT, parameters)
        if row is None:
            return None
        mime_type, body, checksum = row
        data = self._intact(body, checksum, "artifact", parameters)
        return StoredArtifact(artifact_id=artifact_id, mime_type=mime_type, data=data)

    # runs and events

    def find_run(self, identity: Identity, run_id: str) -> RunRow | None:
        row = self._one(FIND_RUN, _of_run(identity, run_id))
        return None if row is None else RunRow(key=row[0], session_key=row[1])

    def read_run(self, identity: Identity, run_id: str) -> RunRecord | None:
        row = self._one(READ_RUN, _of_run(identity, run_id))
        return None if row is None else self._record(identity, row)

    def read_open_runs(self, address: SessionAddress) -> Sequence[RunRecord]:
        rows = self._all(READ_OPEN_RUNS, _of_session(address))
        return tuple(self._record(address.identity, row) for row in rows)

    def _record(self, identity: Identity, row: Sequence[Any]) -> RunRecord:
        (
            session_id, run_id, root_run_id, parent_run_id, app, input_, checksum,
            created_at, reserved_to, final_cursor, outcome, outcome_checksum,
        ) = row  # fmt: skip
        key = _of_run(identity, run_id)
        if outcome is not None:
            outcome = self._intact(outcome, outcome_checksum, "run", key)
        try:
            return msgspec.convert(
                {
                    "tenant_id": identity.tenant_id,
                    "user_id": identity.user_id,
                    "session_id": session_id,
                    "run_id": run_id,
                    "root_run_id": root_run_id,
                    "parent_run_id": parent_run_id,
                    "app": app,
                    "input": self._intact(input_, checksum, "run", key),
                    "created_at": created_at,
                    "reserved_to": reserved_to,
                    "final_cursor": final_cursor,
                    "outcome": outcome,
                },
                RunRecord,
            )
        except msgspec.ValidationError as error:
            raise damaged_row("run", key, self._url, str(error)) from error

    def add_run(self, session_key: int, record: RunRecord) -> None:
        outcome = record.outcome
        self._write(
            ADD_RUN,
            {
                "session_key": session_key,
                "tenant_id": record.tenant_id,
                "user_id": record.user_id,
                "run_id": record.run_id,
                "root_run_id": record.root_run_id,
                "parent_run_id": record.parent_run_id,
                "app": record.app,
                "input": record.input,
                "checksum": zlib.crc32(record.input),
                "created_at": record.created_at,
                "reserved_to": record.reserved_to,
                "final_cursor": record.final_cursor,
                "outcome": outcome,
                "outcome_checksum": None if outcome is None else zlib.crc32(outcome),
            },
        )

    def finish_run(self, run_key: int, outcome: RunOutcome) -> None:
        self._write(
            FINISH_RUN,
            {
                "run_key": run_key,
                "outcome": outcome.outcome,
                "outcome_checksum": zlib.crc32(outcome.outcome),
                "final_cursor": outcome.final_cursor,
            },
        )

    def reserve_events(self, run_key: int, reserve_to: int) -> None:
        self._write(RESERVE_EVENTS, {"run_key": run_key, "reserve_to": reserve_to})

    def add_events(self, run_key: int, events: Sequence[StoredEvent]) -> None:
        self._write_many(
            ADD_EVENT,
            [
                {
                    "run_key": run_key,
                    "sequence": event.sequence,
                    "body": event.body,
                    "checksum": zlib.crc32(event.body),
                }
                for event in events
            ],
        )

    def read_events(self, identity: Identity, run_id: str, after: int, limit: int) -> Sequence[StoredEvent]:
        of_run = _of_run(identity, run_id)
        rows = self._all(READ_EVENTS, {**of_run, "after": after, "limit": limit})
        return tuple(
            StoredEvent(sequence, self._intact(body, checksum, "event", {**of_run, "sequence": sequence}))
            for sequence, body, checksum in rows
        )

    # statements

    def _one(self, sql: str, parameters: Parameters) -> Any:
        """The only row, or ``None``."""
        rows = self._all(sql, parameters)
        return rows[0] if rows else None

    def _all(self, sql: str, parameters: Parameters) -> list[Any]:
        try:
            return self._connection.execute(sql, parameters).fetchall()
        except sqlite3.Error as error:
            raise self._failed(error, sql, parameters) from error

    def _write(self, sql: str, parameters: Parameters) -> sqlite3.Cursor:
        try:
            return self._connection.execute(sql, parameters)
        except sqlite3.Error as error:
            raise self._failed(error, sql, parameters) from error

    def _write_many(self, sql: str, parameters: Sequence[Parameters]) -> None:
        try:
            self._connection.executemany(sql, parameters)
        except sqlite3.Error as error:
            raise self._failed(error, sql, parameters[0]) from error

    def _failed(self, error: sqlite3.Error, sql: str, parameters: Parameters) -> Exception:
        """Damage is refused where it is, without what SQLite quotes of the content; all else goes on."""
        if is_damage(error):
            return damaged(sql, parameters, self._url, "SQLite finds its page or text damaged")
        return error

    def _intact(self, body: Any, checksum: Any, table: str, key: Parameters) -> bytes:
        """The content of a row, if it is what was stored."""
        if not isinstance(body, bytes) or zlib.crc32(body) != checksum:
            raise damaged_row(table, key, self._url, CHANGED)
        return body


def _of_session(address: SessionAddress) -> dict[str, str]:
    return {
        "tenant_id": address.tenant_id,
        "user_id": address.user_id,
        "session_id": address.session_id,
    }


def _of_run(identity: Identity, run_id: str) -> dict[str, str]:
    return {"tenant_id": identity.tenant_id, "user_id": identity.user_id, "run_id": run_id}
