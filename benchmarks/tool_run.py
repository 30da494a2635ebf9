"""Model → tool → model on persisted sessions, and the same with LangGraph and its SQLite saver beside it.

Both have a model and a tool of no latency, a SQLite file, and conversations that go on. What is measured is
one run after another, and many at once.
"""

from __future__ import annotations

import asyncio
import importlib.util
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from benchmarks.measure import IDENTITY, Row, bare_hop_ms, p50_ms
from benchmarks.warm_run import SPARE_SECONDS
from retinue import (
    Agent,
    Grants,
    ModelRequest,
    ModelResponse,
    Runtime,
    ToolCall,
    Usage,
    agent_driver,
    tool,
)

SESSIONS = 32
"""Conversations; also the runs at once."""
RUNS = 160
"""One after another."""
ROUNDS = 8
"""Runs of each conversation, where many are at once."""

Once = Callable[[int], Awaitable[None]]


@tool
async def look(item: str) -> str:
    """Look at an item."""
    return f"seen {item}"


class OneTool:
    """Asks for the tool first, and answers when it has its result."""

    provider_id = "bench"
    model_id = "one-tool"

    async def generate(self, request: ModelRequest) -> ModelResponse:
        usage = Usage(input_tokens=10, output_tokens=1)
        if request.messages[-1].role == "tool":
            return ModelResponse(text="done", usage=usage)
        call = ToolCall(f"call-{len(request.messages)}", "look", {"item": "x"})
        return ModelResponse(tool_calls=(call,), usage=usage, finish_reason="tool_calls")


def measure(store: str) -> Row:
    row: Row = {}
    hop = bare_hop_ms()
    ours = _figures(_retinue(store))
    row.update(p50_ms=ours[0], per_s=ours[1], hop_ms=hop, ratio=ours[0] / hop, hops=4)
    if importlib.util.find_spec("langgraph") is None:
        print("tool_run: LangGraph is not installed (pip install 'retinue[bench]')", file=sys.stderr)
        return row
    with tempfile.TemporaryDirectory() as folder:
        theirs = asyncio.run(_langgraph(Path(folder) / "langgraph.db"))
    row["langgraph"] = {"p50_ms": theirs[0], "per_s": theirs[1]}  # type: ignore[assignment]
    print(
        f"tool_run: LangGraph with its SQLite saver: p50 {theirs[0]:.3g} ms, {theirs[1]:.3g}/s; "
        f"Retinue: p50 {ours[0]:.3g} ms, {ours[1]:.3g}/s",
        file=sys.stderr,
    )
    return row


def _retinue(store: str) -> tuple[Runtime, Once]:
    runtime = Runtime(
        driver=agent_driver(Agent(name="bench", model=OneTool(), tools=[look])),
        grants=Grants(tool_ids=["look"]),
        store=store,
        isolation="shared",
    )

    async def once(number: int) -> None:
        result = await runtime.run("look", identity=IDENTITY, session_id=f"tool-run-{number}")
        assert result.status == "completed", result.reason

    return runtime, once


def _figures(made: tuple[Runtime, Once]) -> tuple[float, float]:
    runtime, once = made
    with runtime:
        return asyncio.run(_measured(once))


async def _measured(once: Once) -> tuple[float, float]:
    """Median milliseconds of one run after another, and runs a second of many at once."""
    for number in range(SESSIONS):  # every conversation is resident, or has its thread, then
        await once(number)
    await asyncio.sleep(SPARE_SECONDS)
    seconds = []
    for number in range(RUNS):
        start = time.perf_counter()
        await once(number % SESSIONS)
        seconds.append(time.perf_counter() - start)

    async def many(number: int) -> None:
        for _ in range(ROUNDS):
            await once(number)

    start = time.perf_counter()
    await asyncio.gather(*(many(number) for number in range(SESSIONS)))
    return p50_ms(seconds), SESSIONS * ROUNDS / (time.perf_counter() - start)


async def _langgraph(file: Path) -> tuple[float, float]:
    from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
    from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver
    from langgraph.graph import END, START, MessagesState, StateGraph

    async def model(state: Any) -> Any:
        if isinstance(state["messages"][-1], ToolMessage):
            return {"messages": [AIMessage("done")]}
        call = {"name": "look", "args": {"item": "x"}, "id": f"call-{len(state['messages'])}"}
        return {"messages": [AIMessage("", tool_calls=[call])]}

    async def tools(state: Any) -> Any:
        return {
            "messages": [
                ToolMessage(f"seen {call['args']['item']}", tool_call_id=call["id"])
                for call in state["messages"][-1].tool_calls
            ]
        }

    graph = StateGraph(MessagesState)
    graph.add_node("model", model)
    graph.add_node("tools", tools)
    graph.add_edge(START, "model")
    graph.add_conditional_edges(
        "model", lambda state: "tools" if state["messages"][-1].tool_calls else END, ["tools", END]
    )
    graph.add_edge("tools", "model")
    async with AsyncSqliteSaver.from_conn_string(str(file)) as saver:
        compiled = graph.compile(checkpointer=saver)

        async def once(number: int) -> None:
            config: Any = {"configurable": {"thread_id": f"tool-run-{number}"}}
            state = await compiled.ainvoke({"messages": [HumanMessage("look")]}, config)
            assert state["messages"][-1].content == "done"

        return await _measured(once)
