"""A driver that streams, at module level so that other processes can import it."""

from __future__ import annotations

from dataclasses import dataclass, field

from retinue import DriverCapabilities, DriverOutput, ExecutionServices, RunRequest, TextPiece
from retinue.messages import user
from retinue.testing import ScriptedModel


@dataclass(frozen=True)
class Speaker:
    """Streams its model's answers, published, until one has no commentary in it; with the input ``delegate``
    a delegate named ``helper`` does."""

    model: ScriptedModel
    id: str = "speaker"
    version: int = 1
    capabilities: DriverCapabilities = field(default_factory=DriverCapabilities)

    async def start(self, request: RunRequest, services: ExecutionServices) -> DriverOutput:
        if request.input == "delegate":
            child = await services.delegate(self, "go", name="helper")
            return DriverOutput(text=(await child.result()).text)
        while True:
            async with services.stream_model(
                self.model, [user(request.input)], max_tokens=20, publish=True
            ) as stream:
                async for chunk in stream:
                    if isinstance(chunk, TextPiece):
                        services.emit_text(chunk.text)
            if all(message.phase == "final" for message in stream.messages):
                return DriverOutput(text=stream.response.text)
