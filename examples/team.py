"""Three delegates at once under one budget, with every event printed as it comes.

    python examples/team.py

The members run in child hosts, which are other processes. Each has a conversation and an account of its own,
but every model call and every tool call of all of them is admitted by the one ledger beside the run's root.
"""

from __future__ import annotations

from typing import Any

from retinue import Agent, Budgets, Grants, Identity, RunResult, Runtime, Team, team_driver, tool
from retinue.events import ChildFinished, Event, ModelComplete, TextDelta, ToolComplete
from retinue.providers.extractive import ExtractiveModel

LOGS = {
    "harbour": "Two ships waited until four for the crane. The tide was high at noon.",
    "railway": "The morning train waited ten minutes for its containers. All other trains ran on time.",
    "depot": "Six trucks waited an hour for a driver. The gate was painted.",
}


@tool
def read_log(place: str) -> str:
    """Read today's log of a place."""
    return LOGS[place]


def member(place: str) -> Agent:
    # The embedded model calls a tool when a text that it sees has `parameter: value` lines for it. A remote
    # model would be told in words.
    return Agent(
        name=place,
        model=ExtractiveModel(),
        description=f"Knows the log of the {place}.",
        instructions=f"Read your log, then answer from it.\n\nplace: {place}",
        tools=[read_log],
    )


def make_team() -> Team:
    return Team(
        name="operations",
        members=[member(place) for place in LOGS],
        coordinator=Agent(name="dispatcher", model=ExtractiveModel()),
        parallel=True,
        on_member_error="continue",  # the synthesis is told of a member that failed
    )


def line(event: Event) -> str:
    who = event.participant or "coordinator"
    match event.payload:
        case ModelComplete(usage=usage):
            what = f"{usage.total_tokens if usage else '?'} tokens"
        case ToolComplete(tool_name=name):
            what = name
        case ChildFinished(status=status):
            what = status
        case TextDelta(text=text):
            what = text
        case _:
            what = ""
    return f"{event.sequence:3} {who:12} {event.type:16} {what}"


def main(**options: Any) -> RunResult:
    runtime = Runtime(
        driver=team_driver(make_team()),
        grants=Grants(tool_ids=["read_log"]),  # nothing is granted by default; delegates have these too
        budgets=Budgets(max_model_calls=10, max_tool_calls=3, max_tokens=20_000),
        **options,
    )
    handle = runtime.start(
        "What waited today?",
        identity=Identity(tenant_id="acme", user_id="ann"),
        session_id="operations",
    )
    for event in handle.iter_events():
        print(line(event))
    result = handle.wait()
    spent = result.budget
    assert spent is not None  # None only where the process that counted was lost
    print(f"{result.status}: {spent.model_calls.used} model calls, {spent.tokens.used} tokens")
    return result


if __name__ == "__main__":
    main()
