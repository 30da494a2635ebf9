"""What sessions keep, in the SQLite store: history, conversations, state, artifacts, where they came from."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from retinue.errors import DamagedRecord
from retinue.ids import SessionAddress
from retinue.storage.rows import HISTORY, conversations_of
from retinue.storage.sqlite.access import Access, Parameters, by_session, content
from retinue.storage.sqlite.failures import damaged, damaged_row
from retinue.storage.sqlite.statements import statement
from retinue.store import Attestation, Origin, StoredArtifact, StoredSession

READ_SESSION = statement("read_session")
READ_CONVERSATIONS = statement("read_conversations")
READ_MESSAGES = statement("read_messages")
READ_ATTESTATIONS = statement("read_attestations")
ADVANCE_SESSION = statement("advance_session")
CLEAR_SESSION = statement("clear_session")
CLEAR_CONVERSATIONS = statement("clear_conversations")
CLEAR_STATE = statement("clear_state")
CLEAR_ATTESTATIONS = statement("clear_attestations")
CLEAR_ORIGIN = statement("clear_origin")
FIND_CONVERSATION = statement("find_conversation")
ADD_CONVERSATION = statement("add_conversation")
GROW_CONVERSATION = statement("grow_conversation")
ADD_MESSAGE = statement("add_message")
SET_STATE = statement("set_state")
ADD_ATTESTATION = statement("add_attestation")
IS_BLANK = statement("is_blank")
FORK_SESSION = statement("fork_session")
SET_ORIGIN = statement("set_origin")
COPY_MESSAGES = statement("copy_messages")
COPY_STATE = statement("copy_state")
ADD_ARTIFACT = statement("add_artifact")
READ_ARTIFACT = statement("read_artifact")
LIST_ARTIFACTS = statement("list_artifacts")


class ContentRows(Access):
    """The part of :class:`retinue.storage.rows.Rows` that is about what a session keeps."""

    def read_session(self, address: SessionAddress) -> StoredSession:
        parameters = by_session(address)
        row = self._one(READ_SESSION, parameters)
        if row is None:
            return StoredSession()
        revision, replayable, state, checksum, origin, origin_checksum = row
        if not isinstance(revision, int) or replayable not in (0, 1):
            raise damaged(READ_SESSION, parameters, self._url, "its revision or replayable flag is no number")
        history, conversations = conversations_of(self._read_messages(parameters))
        return StoredSession(
            revision=revision,
            replayable=bool(replayable),
            messages=history,
            conversations=conversations,
            state=b"{}" if state is None else self._intact(state, checksum, "state", parameters),
            attestations=self._read_attestations(parameters),
            origin=None
            if origin is None
            else self._decoded(origin, origin_checksum, Origin, "origin", parameters),
        )

    def _read_attestations(self, session: Parameters) -> tuple[Attestation, ...]:
        found: list[Attestation] = []
        for position, body, checksum in self._all(READ_ATTESTATIONS, session):
            key = {**session, "position": position}
            if position != len(found):
                what = "one before it is missing"
                raise damaged_row("attestation", key, self._url, what)
            found.append(self._decoded(body, checksum, Attestation, "attestation", key))
        return tuple(found)

    def _read_messages(self, session: Parameters) -> dict[str, list[bytes]]:
        """All messages by execution id; each list is whole, or refused."""
        sizes = dict(self._all(READ_CONVERSATIONS, session))
        found: dict[str, list[bytes]] = {execution_id: [] for execution_id in sizes}
        for execution_id, position, body, checksum in self._all(READ_MESSAGES, session):
            bodies = found[execution_id]
            key = {**session, "execution_id": execution_id, "position": position}
            if position != len(bodies):
                raise self._missing(session, execution_id, len(bodies))
            bodies.append(self._intact(body, checksum, "message", key))
        for execution_id, size in sizes.items():
            if size != len(found[execution_id]):
                raise self._missing(session, execution_id, len(found[execution_id]))
        return found

    def _missing(self, session: Parameters, execution_id: str, position: int) -> DamagedRecord:
        key = {**session, "execution_id": execution_id, "position": position}
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
                {"conversation_key": conversation_key, "position": position, **content(body)}
                for position, body in enumerate(messages, start=size)
            ],
        )

    def set_state(self, session_key: int, state: bytes) -> None:
        self._write(SET_STATE, {"session_key": session_key, **content(state)})

    def clear_session(self, session_key: int) -> None:
        parameters = {"session_key": session_key}
        for sql in (CLEAR_SESSION, CLEAR_CONVERSATIONS, CLEAR_STATE, CLEAR_ATTESTATIONS, CLEAR_ORIGIN):
            self._write(sql, parameters)

    def add_attestation(self, session_key: int, attestation: Attestation) -> None:
        body = msgspec.json.encode(attestation)
        self._write(ADD_ATTESTATION, {"session_key": session_key, **content(body)})

    def history_size(self, session_key: int) -> int:
        return self._find_history(session_key)[1]

    def _find_history(self, session_key: int) -> tuple[int | None, int]:
        """Key and size of the session's history; ``(None, 0)`` before its first message."""
        parameters = {"session_key": session_key, "execution_id": HISTORY}
        row = self._one(FIND_CONVERSATION, parameters)
        if row is None:
            return None, 0
        conversation_key, size = row
        if not isinstance(size, int):
            raise damaged_row("conversation", parameters, self._url, "its size is no number")
        return conversation_key, size

    def is_blank(self, session_key: int) -> bool:
        return bool(self._one(IS_BLANK, {"session_key": session_key})[0])

    def fork_session(self, session_key: int, target_key: int, fork_id: str, origin: Origin) -> None:
        self._write(FORK_SESSION, {"session_key": target_key, "source_key": session_key, "fork_id": fork_id})
        self._write(SET_ORIGIN, {"session_key": target_key, **content(msgspec.json.encode(origin))})
        if origin.messages == 0:
            return
        conversation_key, _ = self._find_history(session_key)
        made = self._write(
            ADD_CONVERSATION,
            {"session_key": target_key, "execution_id": HISTORY, "size": origin.messages},
        ).lastrowid
        parameters = {
            "conversation_key": conversation_key,
            "target_key": made,
            "size": origin.messages,
        }
        copied = self._write(COPY_MESSAGES, parameters).rowcount
        if copied != origin.messages:
            raise damaged_row(
                "message", {"conversation_key": conversation_key}, self._url, "some are missing"
            )

    def copy_state(self, session_key: int, target_key: int) -> None:
        self._write(COPY_STATE, {"session_key": session_key, "target_key": target_key})

    def add_artifacts(self, session_key: int, artifacts: Sequence[StoredArtifact]) -> None:
        self._write_many(
            ADD_ARTIFACT,
            [
                {
                    "session_key": session_key,
                    "artifact_id": artifact.artifact_id,
                    "mime_type": artifact.mime_type,
                    **content(artifact.data),
                }
                for artifact in artifacts
            ],
        )

    def read_artifact(self, address: SessionAddress, artifact_id: str) -> StoredArtifact | None:
        parameters = {**by_session(address), "artifact_id": artifact_id}
        row = self._one(READ_ARTIFACT, parameters)
        if row is None:
            return None
        mime_type, body, checksum = row
        data = self._intact(body, checksum, "artifact", parameters)
        return StoredArtifact(artifact_id=artifact_id, mime_type=mime_type, data=data)

    def list_artifacts(self, address: SessionAddress) -> Sequence[str]:
        return tuple(artifact_id for (artifact_id,) in self._all(LIST_ARTIFACTS, by_session(address)))
