"""Model calls of one execution: project, admit, call, settle (contract section 8)."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import msgspec

from retinue.budgets import CallKind, Usage
from retinue.config import ModelBinding
from retinue.current_work import current_trace
from retinue.errors import ModelFailed, Unsupported
from retinue.messages import Message, decode_message, encode_message
from retinue.model_stream import ModelStream
from retinue.models import ModelClient, ModelRequest, ModelResponse, ToolSchema
from retinue.protocol import (
    AdmitModel,
    ModelAdmitted,
    ModelPrepared,
    PrepareModel,
    ReleaseModel,
    SettleModel,
)
from retinue.steps import check_required
from retinue.telemetry import TelemetryContent
from retinue.tokens import estimate_request, estimate_text

if TYPE_CHECKING:
    from retinue.publishing import MessagePublisher
    from retinue.root_port import RootPort
    from retinue.services import ExecutionServices
    from retinue.stream_assembly import StreamAssembly


Answer: TypeAlias = Callable[[ModelClient, ModelRequest], Awaitable[ModelResponse]]


@dataclass(frozen=True)
class PlannedCall:
    """One call that was asked for and is not made yet."""

    services: ExecutionServices
    provider: ModelClient
    """Who is asked, unless the app binds a model to the role."""
    request: ModelRequest
    kind: CallKind

    @property
    def client(self) -> ModelClient:
        """Who is asked."""
        binding = self.services.config.binding(self.request.role)
        return self.provider if binding is None else binding.client

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
        # What abilities have to say comes before everything else (contract section 3).
        whole = (*self._services.prompts, *messages)
        return self._planned("task", provider, role, whole, tools, max_tokens, temperature)

    async def task(self, call: PlannedCall) -> ModelResponse:
        return await self.make(call, _generated)

    def stream(self, call: PlannedCall, publisher: MessagePublisher | None) -> ModelStream:
        return ModelStream(self, call, self._services.owned, publisher)

    async def policy(
        self,
        kind: CallKind,
        role: str,
        messages: Sequence[Message],
        max_tokens: int | None,
        temperature: float | None = None,
    ) -> ModelResponse:
        """A control or a finishing call: a bound role, plain messages, a whole answer without tools."""
        called = "control_model" if kind == "control" else "finish_model"
        binding = self._services.config.binding(role)
        if binding is None:
            raise Unsupported(
                f"model role {role!r} has no model bound to it; give RuntimeConfig(models={{{role!r}: ...}})",
                operation=f"{called}:{role}",
            )
        check_max_tokens(max_tokens)
        _check_control_options(binding, role, max_tokens, temperature)
        if any(message.role == "tool" or message.tool_calls or message.extras for message in messages):
            raise Unsupported(f"a {kind} call takes plain messages only", operation=f"{called}.messages")
        call = self._planned(kind, binding.client, role, messages, (), max_tokens, temperature)
        response = await self.make(call, _generated)
        if response.tool_calls or response.finish_reason != "stop":
            raise ModelFailed(
                f"the {kind} model for {role!r} must answer whole and without tools; it finished with "
                f"{response.finish_reason!r} and {len(response.tool_calls)} tool calls"
            )
        return response

    def _planned(
        self,
        kind: CallKind,
        provider: ModelClient,
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
        return PlannedCall(self._services, provider, request, kind)

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
        services = self._services
        call_id = services.next_call_id()
        if call.kind == "task":
            call = await self._prepared(call, call_id)
        request, client = call.request, call.client
        admission = AdmitModel(
            participant=services.participant,
            call_id=call_id,
            role=request.role,
            kind=call.kind,
            projected_input=self._projected(call, call_id),
            requested_output=request.max_tokens,
            provider_id=client.provider_id,
            model_id=client.model_id,
            tools=[tool.name for tool in request.tools] if call.kind == "task" else None,
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
            capped = msgspec.structs.replace(call.request, max_tokens=admitted.max_tokens)
            asked = dataclasses.replace(call, request=capped)
            response = await self._answered(asked, call_id, answer, assembly)
            usage = response.usage
            estimated = None if usage is not None else _estimated(response, admission)
            settlement = msgspec.structs.replace(
                settlement, usage=usage, estimated=estimated, answered=not services.cancelled
            )
        except ModelFailed as error:
            began = error.started or (assembly is not None and assembly.begun)
            settlement = msgspec.structs.replace(settlement, started=began, usage=_reported_usage(error))
            raise
        finally:
            if assembly is not None and settlement.usage is None and settlement.estimated is None:
                settlement = _told_by(assembly, settlement, admission.projected_input)
            await self._port.settle(settlement)
        if services.cancelled:
            raise asyncio.CancelledError("the run is being cancelled")
        return response

    async def _answered(
        self, call: PlannedCall, call_id: str, answer: Answer, assembly: StreamAssembly | None
    ) -> ModelResponse:
        """The provider's answer, checked, with whoever observes the run told of it."""
        request, client, telemetry = call.request, call.client, self._services.telemetry
        told = self._services.observed(
            "model",
            call_id,
            provider_id=client.provider_id,
            model_id=client.model_id,
            model_role=request.role,
            operation=call.kind,
        )
        if telemetry.wants_content:
            told.content = TelemetryContent(messages=request.messages)
        with told:
            try:
                response = self.checked(await answer(client, request), client)
            except ModelFailed as error:
                told.usage = _reported_usage(error)
                raise
            finally:
                if assembly is not None and told.usage is None:
                    told.usage = assembly.usage
            told.usage = response.usage
            told.add(finish_reason=response.finish_reason)
            if telemetry.wants_content:
                told.content = TelemetryContent(answer=response)
        return response

    async def _prepared(self, call: PlannedCall, call_id: str) -> PlannedCall:
        """A task call as the app's controller and context policy want it; a call is reserved for it then."""
        services, request = self._services, call.request
        if not services.config.prepares_steps:
            if services.participant == "":
                check_required(services.request.grants, [tool.name for tool in request.tools])
            return call
        asked = PrepareModel(
            participant=services.participant,
            call_id=call_id,
            role=request.role,
            tools=[tool.name for tool in request.tools],
            messages=[encode_message(message) for message in request.messages],
            provider_id=call.client.provider_id,
            model_id=call.client.model_id,
            trace=current_trace(),
        )
        try:
            prepared = await services.ask(asked)
        except asyncio.CancelledError:
            self._release(call_id)
            raise
        assert isinstance(prepared, ModelPrepared)
        try:
            return dataclasses.replace(call, request=_as_prepared(request, prepared))
        except BaseException:
            self._release(call_id)
            raise

    def _release(self, call_id: str) -> None:
        self._port.tell(ReleaseModel(participant=self._services.participant, call_id=call_id))

    def _projected(self, call: PlannedCall, call_id: str) -> int:
        try:
            return self._project(call.request, call.client)
        except BaseException:
            if call.kind == "task" and self._services.config.prepares_steps:
                self._release(call_id)
            raise

    @staticmethod
    def checked(response: object, client: ModelClient) -> ModelResponse:
        """A provider's answer, or ``ModelFailed`` for one that cannot be."""
        return _checked_response(response, client)

    def _project(self, request: ModelRequest, client: ModelClient) -> int:
        return estimate_request(request, client, self._services.config.estimate_input_tokens)


async def _generated(client: ModelClient, request: ModelRequest) -> ModelResponse:
    return await client.generate(request)


def _as_prepared(request: ModelRequest, prepared: ModelPrepared) -> ModelRequest:
    """The request with what a controller and a context policy changed."""
    options = dict(prepared.options)
    asked, temperature = options.pop("max_tokens", None), options.pop("temperature", request.temperature)
    check_max_tokens(asked)
    caps = [cap for cap in (request.max_tokens, asked) if cap is not None]
    offered = set(prepared.tools)
    messages = request.messages
    if prepared.messages is not None:
        messages = tuple(decode_message(body) for body in prepared.messages)
    return msgspec.structs.replace(
        request,
        role=prepared.role,
        tools=tuple(tool for tool in request.tools if tool.name in offered),
        messages=messages,
        max_tokens=min(caps, default=None),
        temperature=temperature,
        options={**request.options, **options},
    )


def _estimated(response: ModelResponse, admission: AdmitModel) -> Usage:
    """What a whole answer used, where its provider does not say."""
    pieces = [response.text, *(msgspec.json.encode(call).decode() for call in response.tool_calls)]
    made = sum(estimate_text(piece, admission.model_id) for piece in pieces)
    return Usage(input_tokens=admission.projected_input, output_tokens=made)


def _told_by(assembly: StreamAssembly, settlement: SettleModel, projected_input: int) -> SettleModel:
    """The settlement of a stream that broke off, with what is known of it."""
    usage = assembly.usage
    estimated = None if usage is not None else assembly.estimate(settlement.model_id)
    if estimated is not None and estimated.input_tokens == 0:
        estimated = msgspec.structs.replace(estimated, input_tokens=projected_input)
    return msgspec.structs.replace(settlement, usage=usage, estimated=estimated)


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
