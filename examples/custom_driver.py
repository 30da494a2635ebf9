"""A driver of your own: what runs inside a run, in forty lines.

    python examples/custom_driver.py

A driver decides what is asked and in which order. It never counts and never grants: whatever spends goes
through the services, and the ledger says yes or no.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from retinue import (
    Agent,
    Budgets,
    DriverCapabilities,
    DriverOutput,
    ExecutionServices,
    Grants,
    Identity,
    Message,
    RunRequest,
    RunResult,
    Runtime,
)
from retinue.errors import RetinueError
from retinue.events import Custom
from retinue.providers.extractive import ExtractiveModel


@dataclass(frozen=True)
class EachQuestion:
    """Gives each question of the input to a delegate, together with the text that they are all about."""

    reader: Agent
    id: str = "each-question"
    version: int = 1
    capabilities: DriverCapabilities = DriverCapabilities()

    async def start(self, request: RunRequest, services: ExecutionServices) -> DriverOutput:
        text, *questions = str(request.input).split("\n? ")
        services.record_conversation([Message(role="user", content=str(request.input))])
        answers = await asyncio.gather(*(self._ask(services, text, question) for question in questions))
        services.emit(Custom("answered", len(answers)))
        # The session's own state: a JSON object, committed with the run, there again in the next.
        services.state["questions"] = services.state.get("questions", 0) + len(questions)
        # An effect passes the same gate as a tool: it must be granted, and it is one tool attempt.
        await services.dispatch_effect("file-report", {"lines": len(answers)}, self._file)
        report = "\n".join(answers)
        services.record_conversation([Message(role="assistant", content=report)])
        services.emit_text(report)
        return DriverOutput(text=report, structured={"answers": len(answers)})

    async def _ask(self, services: ExecutionServices, text: str, question: str) -> str:
        # Its own limit lies inside the run's: whichever is tighter holds.
        child = await services.delegate(
            self.reader, f"{text}\n\n{question}?", name="reader", budgets=Budgets(max_model_calls=1)
        )
        try:
            return (await child.result()).text
        except RetinueError as error:  # an ordinary failed delegate: the others go on
            return f"(no answer to {question!r}: {error.code})"

    async def _file(self, arguments: dict[str, Any]) -> None:
        """Here the report would be sent somewhere."""


def main(**options: Any) -> RunResult:
    runtime = Runtime(
        driver=EachQuestion(reader=Agent(name="reader", model=ExtractiveModel())),
        grants=Grants(tool_ids=["file-report"]),
        budgets=Budgets(max_tokens=10_000),
        **options,
    )
    result = runtime.run_blocking(
        "The bridge was built in 1931. It carries two tracks. Trains may cross it at 40 km/h."
        "\n? When was the bridge built\n? How fast may trains cross",
        identity=Identity(tenant_id="acme", user_id="ann"),
        session_id="bridge",
    )
    print(result.status, result.text, sep="\n")
    return result


if __name__ == "__main__":
    main()
