"""What a policy of the application is told of the run that it judges, and what it may do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from retinue.budgets import BudgetSnapshot
from retinue.drivers import RunMode
from retinue.events import CompactionPayload
from retinue.grants import Grants
from retinue.ids import Identity
from retinue.messages import Message
from retinue.models import ModelRequest, ModelResponse
from retinue.protocol import Compacting
from retinue.tokens import estimate_messages, estimate_request

if TYPE_CHECKING:
    from retinue.services import ExecutionServices
    from retinue.telemetry import Operation


class PolicyContext:
    """The run or delegate that asks. Belongs to a user loop of the root's process."""

    def __init__(self, services: ExecutionServices, revision: int = 0) -> None:
        self._services = services
        request = services.request
        self.identity: Identity = request.identity
        self.session_id = request.session_id
        self.run_id = request.run_id
        self.root_run_id = request.root_run_id
        self.participant = request.participant
        """Name of the delegate; empty for the root."""
        self.run_mode: RunMode = request.run_mode
        self.grants: Grants = request.grants
        self.revision = revision
        self.config = services.config
        """The app."""

    @property
    def budget(self) -> BudgetSnapshot:
        """What the whole tree has spent, reserved and left."""
        return self._services.budget

    def estimate_tokens(self, messages: Sequence[Message], *, role: str = "main", model_id: str = "") -> int:
        """Tokens of these messages, as a request of their own without tools.

        The app's ``estimate_input_tokens`` is asked where a model is bound to ``role``; otherwise they are
        estimated from their characters, for the family of ``model_id``.
        """
        binding = self.config.binding(role)
        if binding is None:
            return estimate_messages(messages, model_id=model_id)
        request = ModelRequest(messages=tuple(messages), role=role, participant=self.participant)
        return estimate_request(request, binding.client, self.config.estimate_input_tokens)

    def emit_compaction(self, payload: CompactionPayload) -> None:
        """Tell of a conversation that is being shortened."""
        self._services.tell(Compacting(participant=self._services.participant, payload=payload))

    async def control_model(
        self,
        role: str,
        messages: Sequence[Message],
        *,
        max_tokens: int | None = None,
        temperature: float | None = None,
    ) -> ModelResponse:
        """A model call of the policy's own, on the budget of whoever is judged: see
        :meth:`ExecutionServices.control_model`."""
        return await self._services.control_model(
            role, messages, max_tokens=max_tokens, temperature=temperature
        )


def controller_call(ctx: PolicyContext, operation: str) -> Operation:
    """A call of the controller for whoever asks, as observers are told of it; make it in ``with``."""
    services = ctx._services
    return services.observed("controller", services.next_call_id(), operation=operation)
