"""Runs and their events in the SQLite store."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import msgspec

from retinue.ids import Identity, SessionAddress
from retinue.storage.rows import ListedRun, RunRow
from retinue.storage.sqlite.access import FLAGS, Access, by_run, by_session, content
from retinue.storage.sqlite.failures import damaged_row
from retinue.storage.sqlite.statements import statement
from retinue.store import ListRuns, RunOutcome, RunRecord, StoredEvent

FIND_RUN = statement("find_run")
READ_RUN = statement("read_run")
READ_OPEN_RUNS = statement("read_open_runs")
ADD_RUN = statement("add_run")
BEGIN_RUN = statement("begin_run")
FINISH_RUN = statement("finish_run")
RESERVE_EVENTS = statement("reserve_events")
ADD_EVENT = statement("add_event")
READ_EVENTS = statement("read_events")
READ_LISTED_RUN = statement("read_listed_run")
PAGES = tuple(
    statement(name)
    for name in ("list_runs", "list_runs_of_tenant", "list_runs_of_user", "list_runs_of_session")
)
"""The keys of a page, by how much a list is narrowed down: not, to a tenant, a user, a session."""
OPEN_PAGES = tuple(
    statement(name)
    for name in (
        "list_open_runs",
        "list_open_runs_of_tenant",
        "list_open_runs_of_user",
        "list_open_runs_of_session",
    )
)

NEWEST = 2**63 - 1
"""No key is higher."""


class RunRows(Access):
    """The part of :class:`retinue.storage.rows.Rows` that is about runs."""

    def find_run(self, identity: Identity, run_id: str) -> RunRow | None:
        row = self._one(FIND_RUN, by_run(identity, run_id))
        return None if row is None else RunRow(key=row[0], session_key=row[1])

    def read_run(self, identity: Identity, run_id: str) -> RunRecord | None:
        row = self._one(READ_RUN, by_run(identity, run_id))
        return None if row is None else self._record(row)

    def read_open_runs(self, address: SessionAddress) -> Sequence[RunRecord]:
        return tuple(self._record(row) for row in self._all(READ_OPEN_RUNS, by_session(address)))

    def _record(self, row: Sequence[Any]) -> RunRecord:
        (
            tenant_id, user_id, session_id, run_id, root_run_id, parent_run_id, app, input_, checksum,
            created_at, reserved_to, final_cursor, outcome, outcome_checksum, queued, start, start_checksum,
        ) = row  # fmt: skip
        key = {"tenant_id": tenant_id, "user_id": user_id, "run_id": run_id}
        if outcome is not None:
            outcome = self._intact(outcome, outcome_checksum, "run", key)
        try:
            return msgspec.convert(
                {
                    "tenant_id": tenant_id,
                    "user_id": user_id,
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
                    "queued": FLAGS.get(queued),
                    "start": b"" if start is None else self._intact(start, start_checksum, "run", key),
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
                "queued": record.queued,
                "start": record.start or None,
                "start_checksum": zlib.crc32(record.start) if record.start else None,
            },
        )

    def begin_run(self, run_key: int) -> None:
        self._write(BEGIN_RUN, {"run_key": run_key})

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
            [{"run_key": run_key, "sequence": event.sequence, **content(event.body)} for event in events],
        )

    def read_events(self, identity: Identity, run_id: str, after: int, limit: int) -> Sequence[StoredEvent]:
        run = by_run(identity, run_id)
        rows = self._all(READ_EVENTS, {**run, "after": after, "limit": limit})
        return tuple(
            StoredEvent(sequence, self._intact(body, checksum, "event", {**run, "sequence": sequence}))
            for sequence, body, checksum in rows
        )

    def list_runs(self, question: ListRuns) -> Sequence[ListedRun]:
        parameters = {
            "tenant_id": question.tenant_id,
            "user_id": question.user_id,
            "session_id": question.session_id,
            "before": NEWEST if question.before is None else question.before,
            "limit": question.limit,
        }
        pages = OPEN_PAGES if question.open_only else PAGES
        keys = [key for (key,) in self._all(pages[_narrowness(question)], parameters)]
        return tuple(
            ListedRun(key, self._record(self._one(READ_LISTED_RUN, {"run_key": key}))) for key in keys
        )


def _narrowness(question: ListRuns) -> int:
    """How many of tenant, user and session a list names: each is named only with those before it."""
    return sum(part is not None for part in (question.tenant_id, question.user_id, question.session_id))
