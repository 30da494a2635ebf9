"""What the demo shows: the state of each delegate, lines, pictures, JSON."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable

import pytest
from rich.console import Console

from retinue.budgets import BudgetSnapshot, ResourceSnapshot, Usage
from retinue.cluster.demo_output import Output
from retinue.cluster.live_view import LiveView, Progress, budget_lines, describe_resource
from retinue.errors import InputError
from retinue.events import (
    ChildFinished,
    ChildStarted,
    Control,
    Event,
    ModelComplete,
    Payload,
    RunStarted,
    RunTerminal,
    ToolComplete,
)
from retinue.results import Reason, RunResult, Status

REFUSED = Reason("budget_exhausted", "no tokens left")


def resource(used: int, limit: int | None, reserved: int = 0) -> ResourceSnapshot:
    remaining = None if limit is None else limit - used - reserved
    return ResourceSnapshot(limit=limit, used=used, reserved=reserved, remaining=remaining)


BUDGET = BudgetSnapshot(
    model_calls=resource(5, 20),
    tool_calls=resource(3, None),
    tokens=resource(1200, 2000, 300),
    unknown_usage_calls=1,
)


def result(
    status: Status = "completed", text: str = "It lasts 15 s. [a.md:3]", reason: Reason | None = None
) -> RunResult:
    return RunResult(
        status=status, text=text, reason=reason, budget=BUDGET, run_id="run_1", session_id="s", final_cursor=9
    )


class Story:
    """Events of a run with delegates ``a`` and ``b``, as the runtime numbers and labels them."""

    def __init__(self, take: Callable[[Event], list[str] | None]) -> None:
        self._take = take
        self._number = 0

    def tell(self, payload: Payload, delegate: str = "") -> list[str]:
        self._number += 1
        event = Event(
            event_id=f"run_1:{self._number}",
            sequence=self._number,
            timestamp=1.0,
            session_id="s",
            run_id=f"run_{delegate}" if delegate else "run_1",
            attempt_id="attempt_1",
            root_run_id="run_1",
            participant=delegate,
            payload=payload,
        )
        return self._take(event) or []


def answered(tokens: int) -> ModelComplete:
    return ModelComplete("retinue", "extractive-1", Usage(input_tokens=tokens, output_tokens=0))


READ = ToolComplete("read_part", "call_1")


@pytest.fixture
def progress() -> Progress:
    return Progress({"a": 1, "b": 2})


@pytest.fixture
def story(progress: Progress) -> Story:
    return Story(progress.apply)


def states(progress: Progress) -> dict[str, str]:
    return {name: delegate.describe() for name, delegate in progress.delegates.items()}


def test_a_run_from_its_events(progress: Progress, story: Story) -> None:
    assert states(progress) == {"a": "waiting", "b": "waiting"}
    assert story.tell(RunStarted("team:documents")) == ["planning ..."]
    assert story.tell(answered(10)) == []
    assert story.tell(ChildStarted("a"), "a") == ["waiting for the delegates ...", "a: reading"]
    assert story.tell(ChildStarted("b"), "b") == ["b: reading, 0 of 2 parts"]
    story.tell(answered(100), "a")
    assert story.tell(READ, "a") == ["a: answering"]
    assert story.tell(READ, "b") == []
    assert states(progress) == {"a": "answering", "b": "reading, 1 of 2 parts"}
    assert story.tell(ToolComplete("read_part", "call_2", denied=True), "b") == ["b: answering"]
    story.tell(answered(1000), "a")
    usage = Usage(input_tokens=1050, output_tokens=50)
    assert story.tell(ChildFinished("a", "completed", usage=usage), "a") == ["a: done (1,100 tokens)"]
    lines = story.tell(ChildFinished("b", "failed", Reason("model_failed", "no answer")), "b")
    assert lines == ["b: failed: no answer (0 tokens)", "composing the answer ..."]
    assert progress.phase == "composing the answer"
    story.tell(RunTerminal(result()))
    assert (progress.phase, progress.budget, progress.started) == ("ended", BUDGET, 2)


def test_a_delegate_without_budget_is_stopped_and_nothing_is_composed(
    progress: Progress, story: Story
) -> None:
    story.tell(ChildStarted("a"), "a")
    assert story.tell(ChildFinished("a", "failed", REFUSED), "a") == [
        "a: stopped: no tokens left (0 tokens)",
        "gathering what was found ...",
    ]


def test_delegates_that_were_cancelled_or_never_asked(progress: Progress, story: Story) -> None:
    story.tell(ChildStarted("a"), "a")
    assert progress.cancelling() == ["cancelling ..."]
    assert story.tell(ChildStarted("b"), "b") == ["b: reading, 0 of 2 parts"], "the phase stays cancelling"
    story.tell(ChildFinished("b", "cancelled", Reason("cancelled", "its parent ended")), "b")
    story.tell(RunTerminal(result("cancelled", "")))
    assert states(progress) == {"a": "cancelled", "b": "cancelled"}
    assert progress.cancelling() == []
    other = Progress({"a": 1})
    Story(other.apply).tell(RunTerminal(result()))
    assert states(other) == {"a": "not asked"}


def test_a_delegate_of_a_delegate_gets_a_line_of_its_own(progress: Progress, story: Story) -> None:
    story.tell(ChildStarted("helper"), "helper")
    assert "helper" in progress.delegates


def test_other_events_change_nothing(progress: Progress, story: Story) -> None:
    assert story.tell(Control("cancel", "why")) == []
    assert states(progress) == {"a": "waiting", "b": "waiting"}


def test_resources_in_words() -> None:
    assert describe_resource(resource(5, 20)) == "5 used, 15 of 20 left"
    assert describe_resource(resource(1200, 2000, 300)) == "1,200 used, 300 reserved, 500 of 2,000 left"
    assert describe_resource(resource(3, None)) == "3 used, no limit"
    assert budget_lines(BUDGET)[-1] == "calls with unknown usage: 1 (charged with their reservation)"


# --- pictures ---------------------------------------------------------------------------------------------


def picture(progress: Progress, height: int = 40) -> str:
    console = Console(file=io.StringIO(), width=100, height=height, force_terminal=False)
    console.print(LiveView(progress, "How [long]?").render(height))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_picture_has_a_line_for_each_delegate_and_the_budget(progress: Progress, story: Story) -> None:
    story.tell(ChildStarted("a"), "a")
    story.tell(answered(1234), "a")
    progress.budget = BUDGET
    lines = picture(progress).splitlines()
    assert lines[0] == "Question  How [long]?"
    assert any(re.search(r"a +reading +1,234 tokens", line) for line in lines)
    assert any(re.search(r"b +waiting", line) for line in lines)
    assert any(re.search(r"model calls .* 5 used, 15 of 20 left", line) for line in lines)
    assert any(re.search(r"tokens .* 1,200 used, 300 reserved, 500 of 2,000 left", line) for line in lines)


def test_many_delegates_fit_the_terminal_with_those_at_work_on_top() -> None:
    progress = Progress({f"m{number:03}": 1 for number in range(200)})
    story = Story(progress.apply)
    story.tell(ChildStarted("m150"), "m150")
    drawn = picture(progress, height=24)
    assert len(drawn.splitlines()) <= 24
    assert "m150" in drawn
    assert re.search(r"and 187 more; 0 done in all", drawn)


# --- output -----------------------------------------------------------------------------------------------


def outputs(*, as_json: bool) -> tuple[Output, io.StringIO, io.StringIO]:
    stdout, stderr = io.StringIO(), io.StringIO()
    return Output(json=as_json, stdout=stdout, stderr=stderr), stdout, stderr


def finish(output: Output, ended: RunResult) -> None:
    output.finish(
        ended,
        session="s",
        store="sqlite:////x.db",
        hops=7,
        wall=1.26,
        continue_with="retinue demo --session s",
    )


def test_plain_lines_where_nothing_can_be_redrawn(progress: Progress) -> None:
    output, stdout, stderr = outputs(as_json=False)
    with output.live(progress, "How long?"):
        story = Story(output.event)
        story.tell(RunStarted("team:documents"))
        story.tell(ChildStarted("a"), "a")
        output.draw(BUDGET)
        story.tell(RunTerminal(result()))
    finish(output, result())
    lines = stdout.getvalue().splitlines()
    assert lines[:3] == ["planning ...", "waiting for the delegates ...", "a: reading"]
    assert "It lasts 15 s. [a.md:3]" in lines, "square brackets are no markup"
    assert any("1.3 s, 7 hops" in line for line in lines)
    assert "stored    session s in sqlite:////x.db" in lines
    assert lines[-1] == "continue  retinue demo --session s"
    assert "\x1b" not in stdout.getvalue()
    assert stderr.getvalue() == ""


def test_json_is_events_and_one_summary_and_nothing_else(progress: Progress) -> None:
    output, stdout, stderr = outputs(as_json=True)
    output.introduce(["folder    x"])
    with output.live(progress, "How long?"):
        story = Story(output.event)
        story.tell(ChildStarted("a"), "a")
        story.tell(ChildStarted("b"), "b")
        story.tell(RunTerminal(result()))
    finish(output, result())
    *events, summary = [json.loads(line) for line in stdout.getvalue().splitlines()]
    assert [event["payload"]["type"] for event in events] == [
        "child.started",
        "child.started",
        "run.terminal",
    ]
    assert summary == {
        "status": "completed",
        "reason": None,
        "text": "It lasts 15 s. [a.md:3]",
        "delegates": 2,
        "model_calls": 5,
        "tool_calls": 3,
        "tokens": {"used": 1200, "reserved": 300, "limit": 2000},
        "unknown_usage_calls": 1,
        "wall_s": 1.26,
        "hops": 7,
        "session": "s",
        "run_id": "run_1",
        "store": "sqlite:////x.db",
    }
    assert "It lasts 15 s." in stderr.getvalue()


def test_a_terminal_that_cannot_show_a_character_does_not_end_the_demo() -> None:
    raw, errors = io.BytesIO(), io.BytesIO()
    stdout = io.TextIOWrapper(raw, encoding="ascii")
    output = Output(json=False, stdout=stdout, stderr=io.TextIOWrapper(errors, encoding="ascii"))
    finish(output, result(text="a → b"))
    stdout.flush()
    assert b"a \\u2192 b" in raw.getvalue()
    as_json = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    finish(
        Output(json=True, stdout=as_json, stderr=io.TextIOWrapper(errors, encoding="ascii")), result(text="→")
    )
    assert json.loads(as_json.buffer.getvalue())["text"] == "→"


def test_what_a_stopped_run_found_is_shown() -> None:
    output, stdout, _ = outputs(as_json=False)
    finish(output, result("stopped", "a:\nsome", REFUSED))
    shown = stdout.getvalue()
    assert "stopped: no tokens left" in shown
    assert "What was found until then:\na:\nsome" in shown


def test_a_failed_run_says_why_on_standard_error() -> None:
    output, _, stderr = outputs(as_json=False)
    finish(output, result("failed", "", Reason("model_failed", "no server answers")))
    assert stderr.getvalue() == "retinue demo: the run failed: no server answers\n"


def test_figures_that_are_lost_are_unknown_and_not_zero() -> None:
    output, stdout, stderr = outputs(as_json=True)
    lost = RunResult(
        status="failed", reason=Reason("interrupted", "gone"), run_id="run_1", session_id="s", final_cursor=3
    )
    finish(output, lost)
    summary = json.loads(stdout.getvalue())
    assert summary["model_calls"] is None
    assert summary["tokens"] == {"used": None, "reserved": None, "limit": None}
    assert "spent     unknown" in stderr.getvalue()


def test_an_error_before_the_run_is_one_message_and_a_summary() -> None:
    output, stdout, stderr = outputs(as_json=True)
    output.failed(InputError("there is no folder x"), began=0.0)
    assert stderr.getvalue() == "retinue demo: there is no folder x\n"
    summary = json.loads(stdout.getvalue())
    assert (summary["status"], summary["reason"]["code"]) == ("failed", "invalid_input")
