"""Admissions of one ledger from 1 to 8 processes, one message a call and in batches.

The participants are Ray actors. Their messages are those of the runtime, encoded as it encodes them, and are
answered by its gate and its ledger in one process; what is left out is who the participants work for. One
admission is an ``AdmitModel`` with its answer, and the ``SettleModel`` that follows.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import ray

from benchmarks.measure import IDENTITY, Row, bare_hop_ms, p50_ms
from retinue import Agent, Budgets, Grants, RunRequest, RuntimeConfig, Usage, agent_driver
from retinue.actors.wire import decode, encode
from retinue.gate import Gate
from retinue.inbox import RunInbox
from retinue.ledger import BudgetLedger
from retinue.participants import Participant
from retinue.protocol import AdmitModel, ModelAdmitted, RootReply, SettleModel

PROCESSES = (1, 2, 4, 8)
BATCH = 32
"""Calls whose messages travel together; so many delegates of one process ask at the same moment."""
SECONDS = 2.0
"""For each figure."""

Message = AdmitModel | SettleModel


class Root:
    """The process of a root: its gate and its ledger, on the loop of the actor."""

    def __init__(self) -> None:
        config = RuntimeConfig(
            driver=agent_driver(Agent(name="bench", model=_Never())),
            budgets=Budgets(max_model_calls=10**9, max_tokens=10**12),
        )
        request = RunRequest(
            input="",
            identity=IDENTITY,
            session_id="bench",
            run_id="root",
            attempt_id="attempt",
            root_run_id="root",
            grants=Grants(),
        )
        self._ledger = BudgetLedger(config.budgets)
        inbox = RunInbox("root", (), lambda payload: None)
        self._gate = Gate(request, config, self._ledger, inbox, None, lambda payload, participant: None)
        self._request, self._participants = request, dict[str, Participant]()

    async def child_messages(self, data: bytes) -> bytes:
        return encode([self._answer(message) for message in decode(data, list[Message])])

    def _answer(self, message: Message) -> RootReply | None:
        participant = self._participant(message.participant)
        if isinstance(message, AdmitModel):
            return self._gate.admit_model(participant, message)
        self._gate.settle_model(participant, message)
        return None

    def _participant(self, name: str) -> Participant:
        if name not in self._participants:
            root = Participant(self._request, None)
            request = RunRequest(
                input="",
                identity=IDENTITY,
                session_id="bench",
                run_id=name,
                attempt_id=name,
                root_run_id="root",
                participant=name,
                grants=Grants(),
            )
            self._participants[name] = Participant(request, root)
            self._ledger.open_account(name, "", None)
        return self._participants[name]

    async def used(self) -> int:
        return self._ledger.snapshot().model_calls.used


class Asker:
    """A process with participants: asks, and settles with what it asks next."""

    async def ask(self, root: Any, name: str, batch: int, seconds: float) -> tuple[int, list[float]]:
        """Calls that were admitted, and the seconds that each message took, there and back."""
        settled: list[Message] = []
        times: list[float] = []
        admitted, round_ = 0, 0
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            round_ += 1
            calls = [f"{round_}-{number}" for number in range(batch)]
            asked: list[Message] = [
                AdmitModel(
                    participant=name,
                    call_id=call_id,
                    role="main",
                    projected_input=100,
                    requested_output=100,
                    provider_id="bench",
                    model_id="bench",
                    tools=[],
                )
                for call_id in calls
            ]
            start = time.perf_counter()
            data = await root.child_messages.remote(encode([*settled, *asked]))
            times.append(time.perf_counter() - start)
            replies = decode(data, list[RootReply | None])[len(settled) :]
            admitted += sum(isinstance(reply, ModelAdmitted) for reply in replies)
            settled = [
                SettleModel(
                    participant=name,
                    call_id=call_id,
                    provider_id="bench",
                    model_id="bench",
                    usage=Usage(input_tokens=90, output_tokens=10),
                    started=True,
                    answered=True,
                )
                for call_id in calls
            ]
        return admitted, times


class _Never:
    provider_id = "bench"
    model_id = "bench"

    async def generate(self, request: Any) -> Any:
        raise NotImplementedError


def measure(store: str) -> Row:
    before = bare_hop_ms()
    row: Row = {}
    askers: list[Any] = [ray.remote(Asker).options(num_cpus=0).remote() for _ in range(max(PROCESSES))]
    for processes in PROCESSES:
        for batch in (1, BATCH):
            name = f"{processes}{'_batched' if batch > 1 else ''}"
            row[f"per_s_{name}"], row[f"p50_ms_{name}"] = asyncio.run(_rate(askers[:processes], batch))
    for asker in askers:
        ray.kill(asker)
    hop = (before + bare_hop_ms()) / 2
    return {
        "per_s": row[f"per_s_{max(PROCESSES)}_batched"],
        "p50_ms": row["p50_ms_1"],
        "hop_ms": hop,
        "ratio": row["p50_ms_1"] / hop,
        "hops": 1,
        **row,
    }


async def _rate(askers: list[Any], batch: int) -> tuple[float, float]:
    """Admissions a second of all processes together, and the median milliseconds of a message."""
    root: Any = ray.remote(Root).options(num_cpus=0, max_concurrency=100).remote()
    await asyncio.gather(*(asker.ask.remote(root, f"warm-{n}", batch, 0.2) for n, asker in enumerate(askers)))
    began = await root.used.remote()
    start = time.perf_counter()
    answers = await asyncio.gather(
        *(asker.ask.remote(root, f"process-{n}", batch, SECONDS) for n, asker in enumerate(askers))
    )
    seconds = time.perf_counter() - start
    admitted = sum(count for count, _ in answers)
    assert await root.used.remote() - began == admitted
    ray.kill(root)
    return admitted / seconds, p50_ms([each for _, times in answers for each in times])
