"""What the demo shows while it runs: a line for each delegate, and what is spent and left."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from retinue.budgets import BudgetSnapshot, ResourceSnapshot
from retinue.events import (
    ChildFinished,
    ChildStarted,
    Event,
    ModelComplete,
    RunStarted,
    RunTerminal,
    ToolComplete,
)
from retinue.results import RunResult

DelegateState = Literal[
    "waiting", "reading", "answering", "done", "failed", "stopped", "cancelled", "not asked"
]
Phase = Literal[
    "starting Ray",
    "planning",
    "waiting for the delegates",
    "composing the answer",
    "gathering what was found",
    "cancelling",
    "ended",
]

_STYLES: dict[DelegateState, str] = {
    "waiting": "dim",
    "reading": "cyan",
    "answering": "blue",
    "done": "green",
    "failed": "red",
    "stopped": "yellow",
    "cancelled": "yellow",
    "not asked": "dim",
}
_MARKS: dict[DelegateState, str] = {
    "waiting": "·",
    "done": "✓",
    "failed": "✗",
    "stopped": "■",
    "cancelled": "■",
    "not asked": "·",
}
_OTHER_LINES = 10
"""Lines of the picture that are no delegate's."""


@dataclass
class DelegateProgress:
    """One delegate as its events tell it."""

    name: str
    parts: int
    """Parts that it has to read."""
    state: DelegateState = "waiting"
    calls: int = 0
    """Tool calls that have a result."""
    tokens: int = 0
    problem: str = ""

    def describe(self) -> str:
        """The state with what belongs to it: ``reading, 2 of 5 parts``."""
        if self.state == "reading" and self.parts > 1:
            return f"reading, {self.calls} of {self.parts} parts"
        return f"{self.state}: {self.problem}" if self.problem else self.state


class Progress:
    """The state of a run of the team, from its events alone.

    Args:
        parts: the members in order, each with the number of parts that it has to read.
    """

    def __init__(self, parts: Mapping[str, int]) -> None:
        self.delegates = {name: DelegateProgress(name, count) for name, count in parts.items()}
        self.phase: Phase = "starting Ray"
        self.budget: BudgetSnapshot | None = None
        self.result: RunResult | None = None
        self.started = 0
        """Delegates that were started."""
        self._open: set[str] = set()
        self._names: dict[str, str] = {}

    def apply(self, event: Event) -> list[str]:
        """Take an event in; gives the lines that say what is new, for where nothing can be redrawn."""
        payload = event.payload
        if isinstance(payload, RunStarted):
            return self._enter("planning")
        if isinstance(payload, ChildStarted):
            delegate = self._delegate(payload.name)
            delegate.state = "reading"
            self.started += 1
            self._open.add(event.run_id)
            self._names[event.run_id] = payload.name
            return [*self._enter("waiting for the delegates"), f"{delegate.name}: {delegate.describe()}"]
        if isinstance(payload, ChildFinished):
            return self._finished(event.run_id, payload)
        if isinstance(payload, RunTerminal):
            return self._ended(payload.result)
        name = event.participant or self._names.get(event.run_id)
        if name:
            return self._worked(self._delegate(name), payload)
        return []

    def cancelling(self) -> list[str]:
        """The person asked to stop."""
        return self._enter("cancelling")

    # --- one event ----------------------------------------------------------------------------------------

    def _worked(self, delegate: DelegateProgress, payload: object) -> list[str]:
        before = delegate.state
        if isinstance(payload, ModelComplete):
            delegate.tokens += payload.usage.total_tokens if payload.usage is not None else 0
        elif isinstance(payload, ToolComplete):
            delegate.calls += 1
            if delegate.calls >= delegate.parts and delegate.state == "reading":
                delegate.state = "answering"
        return [f"{delegate.name}: {delegate.describe()}"] if delegate.state != before else []

    def _finished(self, run_id: str, payload: ChildFinished) -> list[str]:
        delegate = self._delegate(payload.name)
        states: dict[str, DelegateState] = {
            "completed": "done",
            "cancelled": "cancelled",
            "stopped": "stopped",
        }
        delegate.state = states.get(payload.status, "failed")
        if payload.reason is not None and payload.reason.code == "budget_exhausted":
            delegate.state = "stopped"
        if delegate.state in ("failed", "stopped") and payload.reason is not None:
            delegate.problem = payload.reason.message
        # Its own figure knows calls whose event was not seen.
        delegate.tokens = max(delegate.tokens, payload.usage.total_tokens)
        self._open.discard(run_id)
        lines = [f"{delegate.name}: {delegate.describe()} ({delegate.tokens:,} tokens)"]
        if self._open:
            return lines
        # Where the budget refused a delegate, the team gives what it has without another model call.
        refused = any(one.state == "stopped" for one in self.delegates.values())
        return [*lines, *self._enter("gathering what was found" if refused else "composing the answer")]

    def _ended(self, result: RunResult) -> list[str]:
        self.result, self.budget = result, result.budget
        for delegate in self.delegates.values():
            if delegate.state == "waiting":
                delegate.state = "not asked"
            elif delegate.state in ("reading", "answering"):
                delegate.state = "cancelled" if result.status == "cancelled" else "failed"
        self.phase = "ended"
        return []

    def _enter(self, phase: Phase) -> list[str]:
        if self.phase in (phase, "ended") or (self.phase == "cancelling" and phase != "ended"):
            return []
        self.phase = phase
        return [f"{phase} ..."]

    def _delegate(self, name: str) -> DelegateProgress:
        return self.delegates.setdefault(name, DelegateProgress(name, 1))


class LiveView:
    """Draws a :class:`Progress` for a terminal."""

    def __init__(self, progress: Progress, question: str) -> None:
        self._progress = progress
        self._question = question
        self._begun = time.monotonic()
        self._spinner = Spinner("dots")

    def render(self, height: int = 40) -> RenderableType:
        """The picture now, in at most about ``height`` lines."""
        progress = self._progress
        parts: list[RenderableType] = [Text.assemble(("Question  ", "bold"), self._question), self._heading()]
        if progress.delegates:
            parts.append(self._table(max(3, height - _OTHER_LINES)))
        if progress.budget is not None:
            parts.append(budget_table(progress.budget))
        return Group(*parts)

    def _heading(self) -> RenderableType:
        seconds = time.monotonic() - self._begun
        if self._progress.phase == "ended":
            result = self._progress.result
            return Text(f"{result.status if result else 'ended'} after {seconds:.1f} s", style="bold")
        self._spinner.update(text=Text(f"{self._progress.phase} ... {seconds:.1f} s", style="bold"))
        return self._spinner

    def _table(self, most: int) -> Table:
        table = Table.grid(padding=(0, 2))
        table.add_column(width=1)
        table.add_column(overflow="ellipsis", no_wrap=True)
        table.add_column(overflow="ellipsis", no_wrap=True)
        table.add_column(justify="right", no_wrap=True)
        delegates = list(self._progress.delegates.values())
        if len(delegates) > most:
            # Those at work are what one wants to see.
            order = {"reading": 0, "answering": 0, "failed": 1, "stopped": 1}
            delegates = sorted(delegates, key=lambda one: order.get(one.state, 2))[: most - 1]
        for delegate in delegates:
            style = _STYLES[delegate.state]
            mark = Text(_MARKS.get(delegate.state, "▸"), style=style)
            tokens = f"{delegate.tokens:,} tokens" if delegate.tokens else ""
            table.add_row(
                mark, delegate.name, Text(delegate.describe(), style=style), Text(tokens, style="dim")
            )
        hidden = len(self._progress.delegates) - len(delegates)
        if hidden:
            done = sum(one.state == "done" for one in self._progress.delegates.values())
            table.add_row("", Text(f"and {hidden} more; {done} done in all", style="dim"), "", "")
        return table


def budget_table(budget: BudgetSnapshot) -> Table:
    """What is spent, reserved and left, with a bar for each resource that has a limit."""
    table = Table.grid(padding=(0, 2))
    for name, resource in _resources(budget):
        bar: RenderableType = ""
        if resource.limit:
            completed = min(resource.limit, resource.used + resource.reserved)
            bar = ProgressBar(total=resource.limit, completed=completed, width=24)
        table.add_row(Text(name, style="bold"), bar, Text(describe_resource(resource)))
    if budget.unknown_usage_calls:
        text = (
            f"{budget.unknown_usage_calls} calls did not say what they used; charged with their reservation"
        )
        table.add_row("", "", Text(text, style="yellow"))
    return table


def budget_lines(budget: BudgetSnapshot) -> list[str]:
    """The same in plain lines."""
    lines = [f"{name}: {describe_resource(resource)}" for name, resource in _resources(budget)]
    if budget.unknown_usage_calls:
        lines.append(
            f"calls with unknown usage: {budget.unknown_usage_calls} (charged with their reservation)"
        )
    return lines


def describe_resource(resource: ResourceSnapshot) -> str:
    """``5 used, 2 reserved, 13 of 20 left``."""
    words = [f"{resource.used:,} used"]
    if resource.reserved:
        words.append(f"{resource.reserved:,} reserved")
    if resource.limit is None or resource.remaining is None:
        words.append("no limit")
    else:
        words.append(f"{resource.remaining:,} of {resource.limit:,} left")
    return ", ".join(words)


def _resources(budget: BudgetSnapshot) -> list[tuple[str, ResourceSnapshot]]:
    return [
        ("model calls", budget.model_calls),
        ("tool calls", budget.tool_calls),
        ("tokens", budget.tokens),
    ]
