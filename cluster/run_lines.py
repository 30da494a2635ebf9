"""A run as lines of text or JSON, one for each event."""

from __future__ import annotations

import time
from collections.abc import Iterator

import typer

from retinue.cluster.view import View
from retinue.errors import NotFound
from retinue.events import (
    ApprovalRequested,
    ApprovalResolved,
    ChildFinished,
    ChildStarted,
    CompactionCompleted,
    CompactionFailed,
    CompactionStarted,
    Completion,
    Control,
    Custom,
    Event,
    EventsLost,
    InputApplied,
    InputReceived,
    InputRequested,
    InputResolved,
    MessageCompleted,
    MessageDelta,
    MessageFailed,
    MessageStarted,
    ModelComplete,
    RunResumed,
    RunStarted,
    RunTerminal,
    TextDelta,
    ToolComplete,
    ToolProgress,
    encode_event,
)
from retinue.ids import Identity
from retinue.json_values import encode_json
from retinue.results import Reason

WIDTH = 100
"""Characters of what a model, a tool or a person said that a line shows."""


def watch(view: View, run_id: str, identity: Identity, *, after: int, json: bool) -> None:
    """Print a run's events until its terminal one.

    Raises:
        NotFound: this identity has no such run, or it is open and in no process that can be asked.
        EventGap: the events after the cursor are no longer kept.
    """
    for event in _events(view, run_id, identity, after):
        typer.echo(encode_event(event).decode() if json else event_line(event))


def _events(view: View, run_id: str, identity: Identity, after: int) -> Iterator[Event]:
    cursor = after
    for last_attempt in (False, True):
        handle = view.follow(run_id, identity)
        view.ask(handle.accepted())
        try:
            for event in handle.iter_events(cursor):
                cursor = event.sequence
                yield event
            return
        except NotFound:
            if last_attempt:  # else its host may have died, and its record tells by now how it ended
                raise


def event_line(event: Event) -> str:
    """Time, number, delegate, type and what there is to say of it."""
    clock = time.strftime("%H:%M:%S", time.localtime(event.timestamp))
    who = f"{shown(event.participant)}: " if event.participant else ""
    said = _said(event)
    return f"{clock} {event.sequence:>5}  {who}{event.type}{'  ' + said if said else ''}"


def _said(event: Event) -> str:
    match event.payload:
        case RunStarted(driver_id=driver):
            return shown(driver)
        case RunTerminal(result=result):
            spent = f"{result.usage.total_tokens} tokens"
            reason = f": {_because(result.reason)}" if result.reason else ""
            text = f"  {quoted(result.text)}" if result.text else ""
            return f"{result.status}{reason}, {spent}{text}"
        case TextDelta(text=text) | MessageDelta(text=text):
            return quoted(text)
        case ModelComplete() as call:
            used = "usage unknown" if call.usage is None else f"{call.usage.total_tokens} tokens"
            return f"{shown(call.provider_id)}/{shown(call.model_id)}, {used}"
        case ToolComplete() as call:
            return f"{shown(call.tool_name)}{', an error or denied' if call.denied else ''}"
        case ToolProgress() as progress:
            return f"{shown(progress.tool_name)} {quoted(_json(progress.data))}"
        case Control() as control:
            return f"{control.operation}{': ' + shown(control.reason) if control.reason else ''}"
        case InputRequested(request=request):
            choices = f" [{', '.join(map(shown, request.choices))}]" if request.choices else ""
            return f"{quoted(request.question)}{choices} ({shown(request.id)})"
        case InputResolved(request_id=request_id) | RunResumed(request_id=request_id):
            return shown(request_id)
        case InputReceived() as live:
            return f"{live.mode} {shown(live.input_id)}"
        case InputApplied() as live:
            return f"{live.mode} {shown(live.input_id)}"
        case Completion() as decided:
            return f"{decided.action}: {shown(decided.reason)}"
        case ApprovalRequested(request=request):
            return f"{shown(request.tool_name)} {quoted(_json(request.arguments))} ({shown(request.id)})"
        case ApprovalResolved() as resolved:
            by = f" by {shown(resolved.by)}" if resolved.by else ""
            why = f": {shown(resolved.reason)}" if resolved.reason else ""
            return f"{resolved.state}{by}{why} ({shown(resolved.approval_id)})"
        case CompactionStarted() as compaction:
            return f"{shown(compaction.policy_id)}, {compaction.before_tokens} tokens"
        case CompactionCompleted() as compaction:
            tokens = f"{compaction.before_tokens} to {compaction.after_tokens} tokens"
            return f"{shown(compaction.policy_id)}, {tokens}"
        case CompactionFailed() as compaction:
            return f"{shown(compaction.policy_id)}: {shown(compaction.reason)}"
        case MessageStarted() as message:
            return message.phase
        case MessageCompleted(message=message):
            return f"{message.phase} {quoted(message.text)}"
        case MessageFailed() as failed:
            return failed.reason
        case ChildStarted(name=name):
            return shown(name)
        case ChildFinished() as child:
            reason = f": {_because(child.reason)}" if child.reason else ""
            return f"{child.status}{reason}, {child.usage.total_tokens} tokens"
        case EventsLost() as lost:
            return f"{lost.first} to {lost.last}, with the process that had them"
        case Custom() as custom:
            return f"{shown(custom.name)} {quoted(_json(custom.data))}"


def _because(reason: Reason) -> str:
    return f"{shown(reason.code)}, {shown(reason.message)}"


def _json(data: object) -> str:
    return encode_json(data).decode()


def quoted(text: str, width: int = WIDTH) -> str:
    """Text of others in quotes, on one line, cut where it is long."""
    return f'"{shown(text, width)}"'


def shown(text: str, width: int = WIDTH) -> str:
    """Text of others, made harmless for a terminal: no line ends and no control characters."""
    cut = text if len(text) <= width else text[: width - 1] + "…"
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in cut
    )
