"""A root of a tree that answers at once: a real ledger, a list of events, and no session behind it."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from retinue import BudgetSnapshot, ExecutionServices, Identity, RunRequest
from retinue.config import RuntimeConfig
from retinue.errors import RetinueError
from retinue.events import ModelComplete, Payload, payload_type
from retinue.execution import DriverExecution
from retinue.grants import Grants
from retinue.ledger import ROOT, BudgetLedger
from retinue.messages import Content
from retinue.protocol import (
    Acknowledged,
    AdmitModel,
    Emit,
    Finished,
    ModelAdmitted,
    ParticipantMessage,
    PutArtifact,
    Rejected,
    RootReply,
    SettleModel,
)
from retinue.store import StoredArtifact
from retinue.tool_process import LocalTasks
from tests.support import Start, driver, estimate, soon, trivial


@dataclass
class FakeRoot:
    """The other end of a port. ``cancelled`` refuses admissions, as a run that is ending does."""

    config: RuntimeConfig = field(default_factory=lambda: RuntimeConfig(driver=trivial))
    participant: str = ""
    cancelled: bool = False
    events: list[Payload] = field(default_factory=list)
    artifacts: dict[str, StoredArtifact] = field(default_factory=dict)
    settled: list[SettleModel] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.ledger = BudgetLedger(self.config.budgets)
        if self.participant:
            self.ledger.open_account("child", ROOT, None)
        self.services = ExecutionServices(
            request=RunRequest(
                input="x",
                identity=Identity(tenant_id="t", user_id="u"),
                session_id="s",
                run_id="child" if self.participant else "root",
                attempt_id="attempt",
                root_run_id="root",
                participant=self.participant,
                grants=Grants(),
            ),
            config=self.config,
            port=self,
            threads=ThreadPoolExecutor(1),
            tasks=LocalTasks(),
        )

    # --- the port -----------------------------------------------------------------------------------------

    async def ask(self, message: ParticipantMessage) -> RootReply:
        await asyncio.sleep(0)
        return self._handle(message)

    def tell(self, message: ParticipantMessage) -> None:
        self._handle(message)

    async def settle(self, message: SettleModel) -> None:
        self._handle(message)

    @property
    def budget(self) -> BudgetSnapshot:
        return self.ledger.snapshot()

    @property
    def steer_waits(self) -> bool:
        return False

    def _handle(self, message: ParticipantMessage) -> RootReply:
        match message:
            case AdmitModel() if self.cancelled:
                return Rejected(error={"code": "cancelled", "message": "ending"}, cancelled=True)
            case AdmitModel():
                try:
                    grant = self.ledger.admit_model(
                        message.participant,
                        message.call_id,
                        message.projected_input,
                        message.requested_output,
                    )
                except RetinueError as error:
                    return Rejected(error=error.to_payload())
                return ModelAdmitted(max_tokens=grant.max_tokens)
            case SettleModel():
                self.settled.append(message)
                try:
                    self.ledger.settle_model(
                        message.participant, message.call_id, message.usage, started=message.started
                    )
                except RetinueError as error:
                    return Rejected(error=error.to_payload())
                if message.answered:
                    self.events.append(ModelComplete(message.provider_id, message.model_id, message.usage))
            case Emit():
                self.events.append(message.payload)
            case PutArtifact():
                self.artifacts[message.artifact.artifact_id] = message.artifact
            case _:
                pass
        return Acknowledged()

    # --- what tests ask -----------------------------------------------------------------------------------

    @property
    def types(self) -> list[str]:
        return [payload_type(payload) for payload in self.events]

    def of(self, *kinds: type) -> list[Any]:
        """Events of these types."""
        return [payload for payload in self.events if isinstance(payload, kinds)]

    async def run(self, function: Start, input: Content = "x") -> Finished:
        """Run a driver to its end, as a host would."""
        self.execution = DriverExecution(driver(function), self.services.request, self.services)
        finished: Finished = await soon(self.execution.run())
        assert self.ledger.open_reservations == 0
        return finished


def root(*, participant: str = "", **options: Any) -> FakeRoot:
    """A root of an app with these options; every request is estimated with five tokens."""
    options.setdefault("estimate_input_tokens", estimate(5))
    return FakeRoot(RuntimeConfig(driver=trivial, **options), participant)
