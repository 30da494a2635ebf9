"""A model with a script, that records what it was asked, in child processes too."""

from __future__ import annotations

import asyncio
import atexit
import fcntl
import itertools
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from shutil import rmtree
from typing import Any

import msgspec

from retinue.budgets import Usage
from retinue.errors import RetinueError
from retinue.messages import Message, ToolCall
from retinue.models import FinishReason, ModelRequest, ModelResponse, ToolSchema


class ScriptStep(msgspec.Struct, frozen=True, kw_only=True):
    """One answer of a script; made with :func:`reply`, :func:`tool_calls`, a string or an exception."""

    response: ModelResponse | None = None
    error: dict[str, Any] | None = None
    delay: float = 0.0
    """Seconds before the answer."""


class Recorded(msgspec.Struct, frozen=True, kw_only=True):
    """One request that a :class:`ScriptedModel` got."""

    participant: str
    messages: Sequence[Message]
    tools: Sequence[ToolSchema]
    max_tokens: int | None
    temperature: float | None
    role: str


_DEFAULT_USAGE = Usage(input_tokens=10, output_tokens=5)


def reply(
    text: str = "",
    *,
    usage: Usage | None = _DEFAULT_USAGE,
    delay: float = 0.0,
    finish_reason: FinishReason = "stop",
) -> ScriptStep:
    """An answer in text. ``usage=None`` is a provider that does not say; ``delay`` is in seconds."""
    return ScriptStep(
        response=ModelResponse(text=text, usage=usage, finish_reason=finish_reason), delay=delay
    )


_call_numbers = itertools.count(1)


def tool_calls(
    *calls: tuple[str, Mapping[str, Any]] | ToolCall,
    text: str = "",
    usage: Usage | None = _DEFAULT_USAGE,
    delay: float = 0.0,
) -> ScriptStep:
    """An answer that calls tools: ``tool_calls(("lookup", {"id": "42"}))``."""
    made = tuple(
        call
        if isinstance(call, ToolCall)
        else ToolCall(f"scripted-{next(_call_numbers)}", call[0], dict(call[1]))
        for call in calls
    )
    response = ModelResponse(text=text, tool_calls=made, usage=usage, finish_reason="tool_calls")
    return ScriptStep(response=response, delay=delay)


Script = Sequence[ScriptStep | str | Exception]


class ScriptedModel:
    """Answers from a script, in order, and records every request.

    Args:
        script: the answers; or a mapping of participant names to theirs (``""`` is the root of the tree),
            because delegates run in other processes and in no fixed order. A participant that the mapping
            does not name uses the key ``"*"``.

    Copies of it, in any process of this machine, share one record and one place in the script, kept in a
    temporary folder that goes away when the process ends that made the original.
    """

    provider_id = "scripted"
    model_id = "scripted-1"

    def __init__(self, script: Script | Mapping[str, Script] = ()) -> None:
        scripts: Mapping[str, Script] = script if isinstance(script, Mapping) else {"*": script}
        self._scripts = {name: [_step(item) for item in steps] for name, steps in scripts.items()}
        self._folder = tempfile.mkdtemp(prefix="retinue-script-")
        atexit.register(rmtree, self._folder, True)

    def __getstate__(self) -> dict[str, Any]:
        return {"scripts": msgspec.json.encode(self._scripts), "folder": self._folder}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._scripts = msgspec.json.decode(state["scripts"], type=dict[str, list[ScriptStep]])
        self._folder = state["folder"]

    @property
    def requests(self) -> list[Recorded]:
        """Every request so far, from all processes; in order for each participant."""
        found: list[Recorded] = []
        for path in sorted(Path(self._folder).glob("*.jsonl")):
            found.extend(
                msgspec.json.decode(line, type=Recorded) for line in path.read_bytes().splitlines() if line
            )
        return found

    def requests_of(self, participant: str) -> list[Recorded]:
        """The requests of one participant; ``""`` is the root."""
        return [request for request in self.requests if request.participant == participant]

    async def generate(self, request: ModelRequest) -> ModelResponse:
        key = request.participant if request.participant in self._scripts else "*"
        index = self._record(request, key)
        steps = self._scripts.get(key, [])
        if index >= len(steps):
            raise RetinueError(
                f"the script of participant {request.participant!r} has {len(steps)} answers and was asked "
                f"for number {index + 1}",
                code="execution_failed",
            )
        step = steps[index]
        if step.delay:
            await asyncio.sleep(step.delay)
        if step.error is not None:
            from retinue.errors import error_from_payload

            raise error_from_payload(step.error)
        assert step.response is not None
        return step.response

    def _record(self, request: ModelRequest, key: str) -> int:
        """Write the request down; how many this part of the script had before."""
        name = key.encode().hex() or "root"
        line = msgspec.json.encode(
            Recorded(
                participant=request.participant,
                messages=request.messages,
                tools=request.tools,
                max_tokens=request.max_tokens,
                temperature=request.temperature,
                role=request.role,
            )
        )
        with (Path(self._folder) / f"{name}.jsonl").open("a+b") as record:
            fcntl.flock(record, fcntl.LOCK_EX)
            record.seek(0)
            before = sum(1 for _ in record)
            record.write(line + b"\n")
        return before


def _step(item: ScriptStep | str | Exception) -> ScriptStep:
    if isinstance(item, ScriptStep):
        return item
    if isinstance(item, str):
        return reply(item)
    if isinstance(item, RetinueError):
        return ScriptStep(error=item.to_payload())
    return ScriptStep(error={"code": "execution_failed", "message": str(item) or type(item).__name__})
