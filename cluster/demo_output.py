"""Where the demo's words go: a live picture in a terminal, plain lines elsewhere, or JSON lines."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any, TextIO

import msgspec
from rich.console import Console
from rich.live import Live

from retinue.budgets import BudgetSnapshot
from retinue.cluster.live_view import LiveView, Progress, budget_lines
from retinue.ended_runs import empty_budget
from retinue.errors import RetinueError
from retinue.events import Event, encode_event
from retinue.results import RunResult


class Output:
    """Everything that a person or a program sees of one demo.

    Args:
        json: events and the summary go to standard output as JSON lines, everything else to standard error.
        stdout, stderr: for tests; the process's own by default.
    """

    def __init__(self, *, json: bool, stdout: TextIO | None = None, stderr: TextIO | None = None) -> None:
        self._json = json
        self._stdout = stdout or sys.stdout
        self._stderr = stderr or sys.stderr
        for stream in (self._stdout, self._stderr):
            if isinstance(stream, io.TextIOWrapper):
                # Documents have any characters; a terminal that cannot show one must not end the demo.
                stream.reconfigure(errors="backslashreplace")
        self._console = Console(
            file=self._stderr if json else self._stdout, highlight=False, markup=False, soft_wrap=True
        )
        self._progress = Progress({})
        self._live: Live | None = None
        self._view: LiveView | None = None

    # --- lines --------------------------------------------------------------------------------------------

    def say(self, line: str, *, style: str | None = None, prose: bool = False) -> None:
        """A line for the person. In a terminal prose breaks between words; the rest can be copied whole."""
        with _deaf_ends():
            soft_wrap = not (prose and self._console.is_terminal)
            self._console.print(line, style=style, soft_wrap=soft_wrap)

    def introduce(self, lines: Sequence[str]) -> None:
        for line in lines:
            self.say(line, style="yellow" if line.startswith(("skipped", "note")) else None)

    def failed(self, error: RetinueError, began: float) -> None:
        """One clear message for an error before or beside the run; with ``json`` a summary too."""
        with _deaf_ends():
            print(f"retinue demo: {error.message}", file=self._stderr, flush=True)
        if self._json:
            reason = {"code": error.code, "message": error.message}
            self._write_json(
                _summary(empty_budget(), status="failed", reason=reason, wall=time.monotonic() - began)
            )

    # --- while it runs ------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def live(self, progress: Progress, question: str) -> Iterator[None]:
        """Show the progress until the block ends: redrawn in a terminal, else a line for each change."""
        self._progress = progress
        if self._json or not self._console.is_terminal:
            yield
            return
        self._view = LiveView(progress, question)
        self._live = Live(
            self._view.render(self._console.height),
            console=self._console,
            auto_refresh=False,
            transient=False,
        )
        try:
            with self._live:
                yield
                self._redraw()
        finally:
            self._live = self._view = None

    def event(self, event: Event) -> None:
        """An event arrived."""
        if self._json:
            self._write_json(msgspec.Raw(encode_event(event)))
        self._lines(self._progress.apply(event))

    def draw(self, budget: BudgetSnapshot) -> None:
        """Time went by; what is spent may have changed."""
        # Before the run is there nothing is known of its budget, not even the limits that the demo sets.
        if self._progress.phase != "ended" and budget.tokens.limit is not None:
            self._progress.budget = budget
        self._redraw()

    def cancelling(self) -> None:
        """The person asked to stop."""
        self._lines(self._progress.cancelling())

    def _lines(self, lines: Sequence[str]) -> None:
        if self._live is not None:
            self._redraw()
            return
        for line in lines:
            self.say(line)

    def _redraw(self) -> None:
        if self._live is not None and self._view is not None:
            self._live.update(self._view.render(self._console.height), refresh=True)

    # --- the end ------------------------------------------------------------------------------------------

    def finish(
        self,
        result: RunResult,
        *,
        session: str,
        store: str,
        hops: int,
        wall: float,
        continue_with: str | None,
    ) -> None:
        """The answer or why there is none, what was spent, and how to go on."""
        reason = result.reason.message if result.reason is not None else ""
        if result.status == "failed":
            with _deaf_ends():
                print(f"retinue demo: the run failed: {reason}", file=self._stderr, flush=True)
        elif result.status != "completed":
            self.say("")
            self.say(f"{result.status}: {reason}", style="yellow")
        if result.text:
            self.say("")
            if result.status != "completed":
                self.say("What was found until then:", style="bold")
            self.say(result.text, prose=True)
        self.say("")
        spent = "; ".join(budget_lines(result.budget)) if result.budget is not None else "unknown"
        self.say(f"spent     {spent}; {wall:.1f} s, {hops} hops", prose=True)
        if continue_with is not None:
            self.say(f"stored    session {session} in {store}")
            self.say(f"continue  {continue_with}")
        if self._json:
            summary = _summary(
                result.budget,
                status=result.status,
                reason=result.reason,
                text=result.text,
                delegates=self._progress.started,
                wall=wall,
                hops=hops,
                session=session,
                run_id=result.run_id,
                store=store,
            )
            self._write_json(summary)

    def abandoned(self, *, session: str, store: str, run_id: str, wall: float) -> None:
        """The person did not wait for the run to end: what it spent is not known here."""
        message = "ended without waiting for the run; its session takes the next run all the same"
        self.say(message)
        if self._json:
            summary = _summary(
                None,
                status="cancelled",
                reason={"code": "cancelled", "message": message},
                delegates=self._progress.started,
                wall=wall,
                session=session,
                run_id=run_id,
                store=store,
            )
            self._write_json(summary)

    def _write_json(self, value: Any) -> None:
        line = msgspec.json.encode(value) + b"\n"
        with _deaf_ends():
            if isinstance(self._stdout, io.TextIOWrapper):
                self._stdout.buffer.write(line)  # JSON is UTF-8, whatever the terminal's encoding
            else:
                self._stdout.write(line.decode())
            self._stdout.flush()


def _summary(
    budget: BudgetSnapshot | None,
    *,
    status: str,
    wall: float,
    reason: Any = None,
    text: str = "",
    delegates: int = 0,
    hops: int = 0,
    session: str | None = None,
    run_id: str | None = None,
    store: str | None = None,
) -> dict[str, Any]:
    """The summary object of ``--json`` (docs/demo.md); without a budget its figures are unknown."""
    tokens = budget.tokens if budget is not None else None
    return {
        "status": status,
        "reason": reason,
        "text": text,
        "delegates": delegates,
        "model_calls": budget.model_calls.used if budget is not None else None,
        "tool_calls": budget.tool_calls.used if budget is not None else None,
        "tokens": {
            "used": tokens.used if tokens is not None else None,
            "reserved": tokens.reserved if tokens is not None else None,
            "limit": tokens.limit if tokens is not None else None,
        },
        "unknown_usage_calls": budget.unknown_usage_calls if budget is not None else None,
        "wall_s": round(wall, 3),
        "hops": hops,
        "session": session,
        "run_id": run_id,
        "store": store,
    }


@contextlib.contextmanager
def _deaf_ends() -> Iterator[None]:
    """Writing to a pipe that nobody reads any more (``| head``) is no reason to abandon a run."""
    try:
        yield
    except BrokenPipeError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
