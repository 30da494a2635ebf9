"""A tool asks before it acts, and somebody else answers.

    python examples/questions.py

The run waits with its question: it makes no model call, and its session stays where it is. Whoever can name
the run and its identity may answer, from any process; the first answer wins.
"""

from __future__ import annotations

import asyncio
from typing import Any

from retinue import Agent, Grants, Identity, RunResult, Runtime, ToolContext, agent_driver, tool
from retinue.errors import InputError
from retinue.events import InputRequested
from retinue.providers.extractive import ExtractiveModel

WHO = Identity(tenant_id="acme", user_id="ann")


@tool
async def book(day: str, ctx: ToolContext) -> str:
    """Book the room, if somebody agrees to the price."""
    reply = await ctx.services.request_input(
        f"The room costs 40 euros on {day}. Book it?", choices=["yes", "no"], timeout=60
    )
    return f"The room is booked for {day}." if reply.input == "yes" else "The room is not booked."


def main(**options: Any) -> RunResult:
    runtime = Runtime(
        driver=agent_driver(Agent(name="clerk", model=ExtractiveModel(), tools=[book])),
        grants=Grants(tool_ids=["book"]),
        **options,
    )
    # The embedded model reads tool arguments from lines like `day: Monday`.
    handle = runtime.start("day: Monday\n\nIs the room booked?", identity=WHO, session_id="room")
    asyncio.run(handle.accepted())  # its record is stored: from here on the run can be found

    # This could be another process: all that it needs is the id of the run.
    other = runtime.attach(handle.run_id, identity=WHO)
    for event in other.iter_events(types=["input.requested"]):
        if isinstance(event.payload, InputRequested):
            question = event.payload.request
            print(question.question, question.choices, f"({handle.state})")
            print("answer:", other.reply_blocking(question.id, "yes").outcome)
            try:
                handle.reply_blocking(question.id, "no")
            except InputError as error:  # too late, whatever the run does by now
                print("second answer:", error.code in ("input_already_resolved", "run_finished"))

    result = handle.wait()
    print(result.status, result.text)
    return result


if __name__ == "__main__":
    main()
