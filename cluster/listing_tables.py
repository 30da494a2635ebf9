"""Lists of actors, sessions, runs and approvals: as JSON, and as tables for people."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from retinue.approval_records import approval_of
from retinue.cluster.run_lines import quoted, shown
from retinue.errors import DamagedRecord
from retinue.events import RunTerminal, decode_event
from retinue.ids import SessionAddress
from retinue.json_values import encode_json
from retinue.messages import Message
from retinue.snapshots import decode_session
from retinue.store import (
    ApprovalPage,
    Origin,
    RunPage,
    RunRecord,
    SessionSummary,
    StoredApproval,
    StoredSession,
)

if TYPE_CHECKING:
    from retinue.actors.listing import ActorPage, ActorRow
    from retinue.host import ResidentSession

Summaries = Sequence[SessionSummary]
_LONG_ID = re.compile(r"([0-9a-f]{8})[0-9a-f]{16,}")
SESSIONS_SHOWN = 5
"""Sessions of one host that the table names; JSON has all."""


class SessionRow(msgspec.Struct, frozen=True, kw_only=True):
    """A session in a list."""

    tenant_id: str
    user_id: str
    session_id: str
    revision: int
    replayable: bool
    messages: int
    runs: int
    open_runs: int
    holder_id: str | None
    actor: str | None
    """The session host of this cluster that has it."""


class SessionPageView(msgspec.Struct, frozen=True, kw_only=True):
    sessions: Sequence[SessionRow]
    next: tuple[str, str, str] | None
    """``--after`` of the next page."""


class AttestationRow(msgspec.Struct, frozen=True, kw_only=True):
    """Who called a partial transcript replayable, and why."""

    by: str
    why: str
    revision: int
    at: datetime


class RunRow(msgspec.Struct, frozen=True, kw_only=True):
    """A run in a list."""

    run_id: str
    tenant_id: str
    user_id: str
    session_id: str
    app: str
    created_at: datetime
    state: str
    """``queued``, ``open``, or how it ended."""
    reason: str | None
    """Code of the reason of an ended run."""
    parent_run_id: str | None
    root_run_id: str
    final_cursor: int | None


class RunPageView(msgspec.Struct, frozen=True, kw_only=True):
    runs: Sequence[RunRow]
    next: int | None
    """``--before`` of the next page."""


class ApprovalRow(msgspec.Struct, frozen=True, kw_only=True):
    """A request for approval in a list."""

    approval_id: str
    state: str
    tool_name: str
    arguments: dict[str, Any]
    """As they were shown; cut where they are long."""
    digest: str
    asked_because: str
    tenant_id: str
    user_id: str
    session_id: str
    root_run_id: str
    run_id: str
    """Of the run or delegate that asks."""
    agent_name: str
    requested_at: datetime
    expires_at: datetime
    decided_at: datetime | None
    by: str
    reason: str
    """Of the decision."""


class ApprovalPageView(msgspec.Struct, frozen=True, kw_only=True):
    approvals: Sequence[ApprovalRow]
    next: int | None
    """``--after`` of the next page."""


class SessionView(msgspec.Struct, frozen=True, kw_only=True):
    """One session as last committed."""

    tenant_id: str
    user_id: str
    session_id: str
    revision: int
    replayable: bool
    origin: Origin | None
    attestations: Sequence[AttestationRow]
    state: dict[str, Any]
    conversations: dict[str, int]
    """Messages of each root run and delegate."""
    message_count: int
    messages: Sequence[Message]
    """The last ones of the history, without what is the provider's own."""
    runs: Sequence[RunRow]
    host_id: str | None
    """Where it lives now."""


def plain(page: object) -> Any:
    """As JSON values."""
    return msgspec.to_builtins(page)


# --- what was read ----------------------------------------------------------------------------------------


def session_page(found: Summaries, places: Mapping[str, str], *, more: bool) -> SessionPageView:
    rows = [
        SessionRow(**msgspec.structs.asdict(each), actor=places.get(each.holder_id or "")) for each in found
    ]
    last = rows[-1] if more and rows else None
    return SessionPageView(
        sessions=rows, next=(last.tenant_id, last.user_id, last.session_id) if last else None
    )


def run_page(page: RunPage) -> RunPageView:
    return RunPageView(runs=[_run_row(record) for record in page.records], next=page.next)


def _run_row(record: RunRecord) -> RunRow:
    state, reason = "queued" if record.queued else "open", None
    if record.outcome is not None:
        state, reason = _outcome(record.outcome)
    return RunRow(
        run_id=record.run_id,
        tenant_id=record.tenant_id,
        user_id=record.user_id,
        session_id=record.session_id,
        app=record.app,
        created_at=_moment(record.created_at),
        state=state,
        reason=reason,
        parent_run_id=record.parent_run_id,
        root_run_id=record.root_run_id,
        final_cursor=record.final_cursor,
    )


def _outcome(body: bytes) -> tuple[str, str | None]:
    try:
        payload = decode_event(body).payload
    except msgspec.DecodeError:
        return "unreadable", DamagedRecord.code
    assert isinstance(payload, RunTerminal)
    return payload.result.status, payload.result.reason.code if payload.result.reason else None


def approval_page(page: ApprovalPage) -> ApprovalPageView:
    return ApprovalPageView(approvals=[approval_row(each) for each in page.approvals], next=page.next)


def approval_row(stored: StoredApproval) -> ApprovalRow:
    """Raises :class:`DamagedRecord` where the request cannot be read."""
    approval = approval_of(stored)
    request = approval.request
    return ApprovalRow(
        approval_id=request.id,
        state=approval.state,
        tool_name=request.tool_name,
        arguments=request.arguments,
        digest=request.digest,
        asked_because=request.reason,
        tenant_id=request.tenant_id,
        user_id=request.user_id,
        session_id=request.session_id,
        root_run_id=request.root_run_id,
        run_id=request.run_id,
        agent_name=request.agent_name,
        requested_at=_moment(request.requested_at),
        expires_at=_moment(request.expires_at),
        decided_at=None if approval.decided_at is None else _moment(approval.decided_at),
        by=approval.by,
        reason=approval.reason,
    )


def session_view(
    where: SessionAddress,
    stored: StoredSession,
    records: Sequence[RunRecord],
    host_id: str | None,
    messages: int,
) -> SessionView:
    snapshot = decode_session(stored)
    last = snapshot.history[len(snapshot.history) - messages :] if messages else ()
    return SessionView(
        tenant_id=where.tenant_id,
        user_id=where.user_id,
        session_id=where.session_id,
        revision=snapshot.revision,
        replayable=snapshot.replayable,
        origin=snapshot.origin,
        attestations=[
            AttestationRow(by=each.by, why=each.why, revision=each.revision, at=_moment(each.at))
            for each in snapshot.attestations
        ],
        state=snapshot.state,
        conversations={key: len(bodies) for key, bodies in snapshot.conversations.items()},
        message_count=len(snapshot.history),
        messages=[msgspec.structs.replace(message, extras=None) for message in last],
        runs=[_run_row(record) for record in records],
        host_id=host_id,
    )


# --- what a person sees -----------------------------------------------------------------------------------


def print_actors(page: ActorPage) -> None:
    table = _table("name", "role", "state", "pid", "node", "app", "what it has")
    for row in page.actors:
        table.add_row(
            _text(_short(row.name)),
            ", ".join(row.roles),
            row.state,
            "" if row.pid is None else str(row.pid),
            (row.node_id or "")[:8],
            _text(", ".join(row.apps)),
            _text(_holds(row)),
        )
    _print(table, len(page.actors), "actor")
    if page.next is not None:
        _console().print(f"More: --after {page.next}")


def _holds(row: ActorRow) -> str:
    if row.store is not None:
        return row.store
    if row.delegates is not None:
        return f"{row.delegates} delegates" if row.delegates else ""
    lines = [_resident(session) for session in row.sessions[:SESSIONS_SHOWN]]
    if len(row.sessions) > SESSIONS_SHOWN:
        lines.append(f"and {len(row.sessions) - SESSIONS_SHOWN} more sessions (--json)")
    return "\n".join(lines)


def _resident(session: ResidentSession) -> str:
    whose = "/".join(map(shown, (session.tenant_id, session.user_id, session.session_id)))
    if session.active_run is not None:
        return f"{whose}: {shown(session.active_run)}"
    return f"{whose}: " + ("must stay" if session.idle is None else f"idle {session.idle:.0f} s")


def print_sessions(page: SessionPageView) -> None:
    table = _table(
        "tenant", "user", "session", "revision", "messages", "runs", "open", "replayable", "resident in"
    )
    for row in page.sessions:
        where = _short(row.actor or row.holder_id or "")
        table.add_row(
            _text(row.tenant_id),
            _text(row.user_id),
            _text(row.session_id),
            str(row.revision),
            str(row.messages),
            str(row.runs),
            str(row.open_runs or ""),
            "yes" if row.replayable else "no",
            _text(where if row.actor or not where else f"{where}, not of this cluster"),
        )
    _print(table, len(page.sessions), "session")
    if page.next is not None:
        _console().print("More: --after " + " ".join(map(_argument, page.next)))


def print_session(view: SessionView) -> None:
    console = _console()
    console.print(f"Session {shown(view.session_id)} of {shown(view.user_id)} in {shown(view.tenant_id)}")
    rows: list[tuple[str, str]] = [
        ("revision", str(view.revision)),
        ("replayable", "yes" if view.replayable else "no"),
        ("resident in", view.host_id or "no process that is known"),
        ("state", ", ".join(map(shown, view.state)) or "empty"),
        ("transcripts", f"{len(view.conversations)}, of runs and delegates"),
    ]
    if view.origin is not None:
        origin = view.origin
        rows.append(
            (
                "forked from",
                f"{shown(origin.session_id)} at revision {origin.revision}, {origin.messages} messages",
            )
        )
    rows += [
        ("attested", f"revision {each.revision} by {shown(each.by)} on {_date(each.at)}: {shown(each.why)}")
        for each in view.attestations
    ]
    for name, value in rows:
        console.print(f"  {name:<12} {value}")
    console.print(f"Messages: the last {len(view.messages)} of {view.message_count}")
    for message in view.messages:
        console.print(f"  {message.role:<10} {_message(message)}")
    if view.runs:
        console.print("Runs, the newest first")
        console.print(_run_table(view.runs, whose=False))


def _message(message: Message) -> str:
    parts = [quoted(message.text)] if message.text else []
    if not isinstance(message.content, str) and (others := len(message.content) - _texts(message)):
        parts.append(f"{others} other parts")
    parts += [f"calls {shown(call.name)}" for call in message.tool_calls]
    if message.tool_call_id is not None:
        parts.append(f"for {shown(message.tool_call_id)}")
    return ", ".join(parts)


def _texts(message: Message) -> int:
    return sum(hasattr(part, "text") for part in message.content)


def print_runs(page: RunPageView) -> None:
    _print(_run_table(page.runs, whose=True), len(page.runs), "run")
    if page.next is not None:
        _console().print(f"More: --before {page.next}")


def print_approvals(page: ApprovalPageView) -> None:
    table = _table("approval", "tenant", "user", "session", "tool", "why", "expires", "state")
    for row in page.approvals:
        asker = f"{row.agent_name}: " if row.agent_name else ""
        by = f" by {row.by}" if row.by else ""
        because = f": {row.reason}" if row.reason else ""
        table.add_row(
            _text(row.approval_id),
            _text(row.tenant_id),
            _text(row.user_id),
            _text(row.session_id),
            _text(f"{asker}{row.tool_name} {encode_json(row.arguments).decode()}"),
            _text(row.asked_because),
            _date(row.expires_at),
            _text(f"{row.state}{by}{because}"),
        )
    _print(table, len(page.approvals), "request")
    if page.next is not None:
        _console().print(f"More: --after {page.next}")


def print_decision(row: ApprovalRow) -> None:
    by = f" by {shown(row.by)}" if row.by else ""
    _console().print(f"{row.state.capitalize()}{by}: {shown(row.tool_name)} of {shown(row.root_run_id)}")


def _run_table(rows: Sequence[RunRow], *, whose: bool) -> Table:
    owner = ("tenant", "user", "session") if whose else ()
    table = _table("run", *owner, "app", "created", "state", "events")
    for row in rows:
        ids = (row.tenant_id, row.user_id, row.session_id) if whose else ()
        state = f"{row.state}: {row.reason}" if row.reason and row.reason != row.state else row.state
        table.add_row(
            _text(row.run_id),
            *map(_text, ids),
            _text(row.app),
            _date(row.created_at),
            _text(state),
            "" if row.final_cursor is None else str(row.final_cursor),
        )
    return table


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        right = column in ("revision", "messages", "runs", "open", "pid", "events")
        table.add_column(column, justify="right" if right else "left", overflow="fold")
    return table


def _short(name: str) -> str:
    """An actor's name as tables show it; JSON has the whole."""
    return _LONG_ID.sub(r"\1", name.removeprefix("retinue."))


def _text(value: str) -> Text:
    """Text of others: no markup, no control characters."""
    return Text("\n".join(shown(line, 200) for line in value.split("\n")))


def _argument(value: str) -> str:
    import shlex

    return shlex.quote(shown(value, 1000))


def _moment(seconds: float) -> datetime:
    """A time that JSON gets as RFC 3339."""
    return datetime.fromtimestamp(seconds, UTC)


def _date(moment: datetime) -> str:
    """In the time zone of whoever looks."""
    return moment.astimezone().strftime("%Y-%m-%d %H:%M:%S")


def _print(table: Table, count: int, what: str) -> None:
    console = _console()
    if count:
        console.print(table)
    console.print(f"{count} {what if count == 1 else what + 's'}")


def _console() -> Console:
    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else 200  # a file has no width
    return Console(markup=False, highlight=False, width=width)
