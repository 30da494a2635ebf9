"""Model calls of one execution: project, admit, call, settle (contract section 8)."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import msgspec

from retinue.budgets import Usage
from retinue.config import ModelBinding
from retinue.errors import ModelFailed, Unsupported
from retinue.messages import Message
from retinue.model_stream import ModelStream
from retinue.models import ModelClient, ModelRequest, ModelResponse, ToolSchema
from retinue.protocol import AdmitModel, ModelAdmitted, SettleModel
from retinue.tokens import estimate_messages

if TYPE_CHECKING:
    from retinue.publishing import MessagePublisher
    from retinue.root_port import RootPort
    from retinue.services import ExecutionServices
    from retinue.stream_assembly import StreamAssembly


Answer: TypeAlias = Callable[[ModelRequest], Awaitable[ModelResponse]]


@dataclass(frozen=True)
class PlannedCall:
    """One call that was asked for and is not made yet."""

    services: ExecutionServices
    client: ModelClient
    request: ModelRequest

    @property
    def called(self) -> str:
        return f"{self.client.provider_id} {self.client.model_id}"

    @property
    def cancelled(self) -> bool:
        return self.services.cancelled


class ModelCalls:
    """Makes the model calls of one execution, every one admitted before and settled after."""

    def __init__(self, services: ExecutionServices, port: RootPort) -> None:
        self._services = services
        self._port = port

    def plan(
        self,
        provider: ModelClient,
        messages: Sequence[Message],
        tools: Sequence[ToolSchema],
        max_tokens: int | None,
        temperature: float | None,
        role: str,
    ) -> PlannedCall:
        """A task call that is about to be made; nothing is asked or counted yet."""
        check_max_tokens(max_tokens)
        binding = self._services.config.binding(role)
        client = binding.client if binding else provider
        # What abilities have to say comes before everything else (contract section 3).
        whole = (*self._services.prompts, *messages)
        return self._planned(client, role, whole, tools, max_tokens, temperature)

    async def task(self, call: PlannedCall) -> ModelResponse:
        return await self.make(call, call.client.generate)

    def stream(self, call: PlannedCall, publisher: MessagePublisher | None) -> ModelStream:
        return ModelStream(self, call, self._services.owned, publisher)

    async def control(
        self, role: str, messages: Sequence[Message], max_tokens: int | None, temperature: float | None
    ) -> ModelResponse:
        binding = self._services.config.binding(role)
        if binding is None:
            raise Unsupported(
                f"model role {role!r} has no model bound to it; give RuntimeConfig(models={{{role!r}: ...}})",
                operation=f"control_model:{role}",
            )
        check_max_tokens(max_tokens)
        _check_control_options(binding, role, max_tokens, temperature)
        if any(message.role == "tool" or message.tool_calls or message.extras for message in messages):
            raise Unsupported("a control call takes plain messages only", operation="control_model.messages")
        call = self._planned(binding.client, role, messages, (), max_tokens, temperature)
        response = await self.make(call, call.client.generate)
        if response.tool_calls or response.finish_reason != "stop":
            raise ModelFailed(
                f"the control model for {role!r} must answer whole and without tools; it finished with "
                f"{response.finish_reason!r} and {len(response.tool_calls)} tool calls"
            )
        return response

    def _planned(
        self,
        client: ModelClient,
        role: str,
        messages: Sequence[Message],
        tools: Sequence[ToolSchema],
        max_tokens: int | None,
        temperature: float | None,
    ) -> PlannedCall:
        request = ModelRequest(
            messages=tuple(messages),
            tools=tuple(tools),
            max_tokens=max_tokens,
            temperature=temperature,
            role=role,
            participant=self._services.request.participant,
        )
        return PlannedCall(self._services, client, request)

    async def make(
        self, call: PlannedCall, answer: Answer, assembly: StreamAssembly | None = None
    ) -> ModelResponse:
        """Admit a call, have it answered, settle it.

        Args:
            call: what is asked of whom.
            answer: asks the provider, under the output cap that was granted.
            assembly: what has come of a streamed answer; a call that fails is charged with the usage that
                it knows, and certainly began when there is anything in it.
        """
        services, request, client = self._services, call.request, call.client
        call_id = services.next_call_id()
        admission = AdmitModel(
            participant=services.participant,
            call_id=call_id,
            role=request.role,
            projected_input=self._project(request, client),
            requested_output=request.max_tokens,
        )
        settlement = SettleModel(
            participant=services.participant,
            call_id=call_id,
            provider_id=client.provider_id,
            model_id=client.model_id,
            usage=None,
            started=True,
            answered=False,
        )
        try:
            admitted = await services.ask(admission)
        except asyncio.CancelledError:
            # The yes may be on its way: what it reserved is given back.
            await self._port.settle(msgspec.structs.replace(settlement, started=False))
            raise
        assert isinstance(admitted, ModelAdmitted)
        try:
            response = await answer(msgspec.structs.replace(request, max_tokens=admitted.max_tokens))
            usage = self.checked(response, client).usage
            settlement = msgspec.structs.replace(settlement, usage=usage, answered=not services.cancelled)
        except ModelFailed as error:
            began = error.started or (assembly is not None and assembly.begun)
            settlement = msgspec.structs.replace(settlement, started=began, usage=_reported_usage(error))
            raise
        finally:
            if assembly is not None and settlement.usage is None:
                settlement = msgspec.structs.replace(settlement, usage=assembly.usage)
            await self._port.settle(settlement)
        if services.cancelled:
            raise asyncio.CancelledError("the run is being cancelled")
        return response

    @staticmethod
    def checked(response: object, client: ModelClient) -> ModelResponse:
        """A provider's answer, or ``ModelFailed`` for one that cannot be."""
        return _checked_response(response, client)

    def _project(self, request: ModelRequest, client: ModelClient) -> int:
        estimate = self._services.config.estimate_input_tokens
        if estimate is None:
            return estimate_messages(request.messages, request.tools, client.model_id)
        projected: object = estimate(request, client)
        if isinstance(projected, bool) or not isinstance(projected, int) or projected < 0:
            raise Unsupported(
                f"estimate_input_tokens gave {projected!r}; it must give a nonnegative integer",
                operation="estimate_input_tokens",
            )
        return projected


def _checked_response(response: object, client: ModelClient) -> ModelResponse:
    called = f"{client.provider_id} {client.model_id}"
    if not isinstance(response, ModelResponse):
        raise ModelFailed(f"{called} returned {type(response).__name__}, not a ModelResponse")
    usage: object = response.usage
    if usage is not None:
        problem = usage.problem() if isinstance(usage, Usage) else f"it is a {type(usage).__name__}"
        if problem:
            raise ModelFailed(f"{called} reported impossible usage: {problem}")
    try:
        # As whoever reads it later would: text that UTF-8 cannot carry, calls without arguments and the like
        # are found before any tool runs.
        msgspec.json.decode(msgspec.json.encode(response), type=ModelResponse)
    except (TypeError, ValueError) as error:
        used = None if usage is None else msgspec.to_builtins(usage)
        raise ModelFailed(f"{called} gave an answer that cannot be kept: {error}", usage=used) from None
    return response


def _reported_usage(error: ModelFailed) -> Usage | None:
    """What a provider says that a failed call used; ``None`` where it says nothing usable."""
    try:
        usage = msgspec.convert(error.data.get("usage"), Usage | None)
    except msgspec.ValidationError:
        return None
    return usage if usage is not None and usage.problem() is None else None


def check_max_tokens(value: object) -> None:
    """Raise ``Unsupported`` unless ``value`` is a positive integer or ``None``; nothing is reserved then."""
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise Unsupported(f"max_tokens must be a positive integer, not {value!r}", operation="max_tokens")


def _check_control_options(
    binding: ModelBinding, role: str, max_tokens: int | None, temperature: float | None
) -> None:
    if temperature is not None and not (math.isfinite(temperature) and temperature >= 0):
        raise Unsupported(
            f"temperature must be a finite number of at least 0, not {temperature!r}", operation="temperature"
        )
    for name, value in (("max_tokens", max_tokens), ("temperature", temperature)):
        if value is not None and name not in binding.options:
            raise Unsupported(f"model role {role!r} does not allow the option {name}", operation=name)


__all__ = ["ModelCalls", "Usage", "check_max_tokens"]
