"""Asking a model again: when, how often, after how long, and what the ledger counts."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from retinue import Agent, Budgets, Grants, Identity, RunResult, Usage, agent_driver
from retinue.errors import BudgetExhausted, ModelFailed, ValidationFailed
from retinue.model_retries import LONGEST_WAIT, retried
from retinue.models import TextPiece
from retinue.testing import ScriptedModel, reply, stream, tool_calls
from tests.conftest import MakeLocalRuntime
from tests.support import Flag, code_of, estimate, nothing_is_left, soon, spent

BUSY = ModelFailed("busy", started=False, retryable=True)
"""It was refused, so it is no call."""
BROKEN = ModelFailed("broken", retryable=True)
"""It was begun, and nobody knows what it used."""
WRONG = ModelFailed("wrong", started=False)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("retinue.model_retries.FIRST_WAIT", 0.001)


class Attempts:
    """Fails with these errors in turn, then answers."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.made = 0

    async def __call__(self) -> str:
        self.made += 1
        if self.errors:
            raise self.errors.pop(0)
        return "answer"


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that were waited, which take none."""
    waited: list[float] = []

    async def sleep(seconds: float, *args: Any) -> None:
        waited.append(seconds)

    monkeypatch.setattr("asyncio.sleep", sleep)
    return waited


# --- the rule ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("errors", "retries", "made", "answered"),
    [
        ([], 2, 1, True),
        ([BUSY, BROKEN], 2, 3, True),
        ([BUSY, BROKEN, BUSY], 2, 3, False),
        ([BUSY], 0, 1, False),
        ([WRONG], 2, 1, False),
        ([BUSY, WRONG], 2, 2, False),
        ([BUSY, BudgetExhausted("spent")], 2, 2, False),
        ([ValueError("mine")], 2, 1, False),
    ],
)
async def test_how_often(
    waits: list[float], errors: list[Exception], retries: int, made: int, answered: bool
) -> None:
    attempts = Attempts(*errors)
    if answered:
        assert await retried(attempts, retries) == "answer"
    else:
        with pytest.raises(type(errors[-1])) as raised:
            await retried(attempts, retries)
        assert raised.value is errors[made - 1]
    assert attempts.made == made
    assert len(waits) == made - 1


async def test_pauses_double_and_no_two_are_the_same(waits: list[float]) -> None:
    for _ in range(20):
        with pytest.raises(ModelFailed):
            await retried(Attempts(*[BUSY] * 4), 3)
    rounds = [waits[at : at + 3] for at in range(0, len(waits), 3)]
    assert all(0.5 <= one <= 1.0 and 1.0 <= two <= 1.5 and 2.0 <= three <= 2.5 for one, two, three in rounds)
    assert len({one for one, _, _ in rounds}) > 10


@pytest.mark.parametrize(("asked", "least"), [(7.0, 7.0), (0.0, 0.0), (3_600.0, LONGEST_WAIT)])
async def test_a_provider_that_says_when_is_not_asked_before(
    waits: list[float], asked: float, least: float
) -> None:
    busy = ModelFailed("busy", started=False, retryable=True, retry_after=asked)
    for _ in range(10):
        assert await retried(Attempts(busy), 1) == "answer"
    assert all(least <= waited <= least + 0.5 for waited in waits)
    assert len(set(waits)) > 1  # all who were told the same do not come at once


async def test_nothing_is_repeated_that_may_not_be(waits: list[float]) -> None:
    attempts = Attempts(BUSY)
    with pytest.raises(ModelFailed):
        await retried(attempts, 5, may_repeat=lambda: False)
    assert (attempts.made, waits) == (1, [])


async def test_a_cancel_ends_the_pause() -> None:
    attempts = Attempts(ModelFailed("busy", retryable=True, retry_after=30.0))
    asking = asyncio.ensure_future(retried(attempts, 2))
    while not attempts.made:
        await asyncio.sleep(0)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(asking, 5)
    assert attempts.made == 1


# --- in a run ---------------------------------------------------------------------------------------------


async def run(
    make: MakeLocalRuntime,
    identity: Identity,
    session_id: str,
    *steps: Any,
    streams: bool = False,
    budgets: Budgets | None = None,
    **agent: Any,
) -> tuple[RunResult, ScriptedModel]:
    model = ScriptedModel({"": list(steps)})
    runtime = make(
        driver=agent_driver(Agent(name="a", model=model, max_output_tokens=50, **agent), stream=streams),
        grants=Grants(tool_ids=[]),
        budgets=budgets or Budgets(max_tokens=1_000),
        estimate_input_tokens=estimate(10),
    )
    result: RunResult = await soon(runtime.run("x", identity=identity, session_id=session_id))
    budget = spent(result)
    assert (budget.tokens.reserved, budget.model_calls.reserved, budget.open_calls) == (0, 0, 0)
    return result, model


@pytest.mark.parametrize("streams", [False, True])
async def test_each_retry_is_a_call_of_the_run(
    quick: None, local_runtime: MakeLocalRuntime, identity: Identity, session_id: str, streams: bool
) -> None:
    result, model = await run(
        local_runtime, identity, session_id, BROKEN, BUSY, reply("hi", usage=Usage(input_tokens=3)),
        streams=streams,
    )  # fmt: skip
    assert (result.status, result.text) == ("completed", "hi")
    assert len(model.requests) == 3
    budget = spent(result)
    assert (budget.model_calls.used, budget.unknown_usage_calls) == (2, 1)
    assert budget.tokens.used == 60 + 3  # what was reserved for the broken one, and what the last one used
    assert result.usage == Usage(input_tokens=3)


async def test_each_request_of_a_run_has_its_own_retries(
    quick: None, local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    steps = [BUSY, BUSY, tool_calls(("none", {})), BUSY, BUSY, reply("hi")]
    result, model = await run(local_runtime, identity, session_id, *steps)
    assert (result.status, result.text, len(model.requests)) == ("completed", "hi", 6)


async def test_a_budget_that_ends_during_retries_ends_the_run_as_such(
    quick: None, local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    result, model = await run(
        local_runtime, identity, session_id, *[BROKEN] * 9,
        budgets=Budgets(max_model_calls=2), model_retries=8,
    )  # fmt: skip
    assert (result.status, code_of(result)) == ("stopped", "budget_exhausted")
    assert (len(model.requests), spent(result).model_calls.used) == (2, 2)


@pytest.mark.parametrize(("retries", "asked"), [(0, 1), (1, 2), (2, 3)])
async def test_the_agent_says_how_often(
    quick: None,
    local_runtime: MakeLocalRuntime,
    identity: Identity,
    session_id: str,
    retries: int,
    asked: int,
) -> None:
    result, model = await run(local_runtime, identity, session_id, *[BUSY] * 5, model_retries=retries)
    assert (result.status, code_of(result), len(model.requests)) == ("failed", "model_failed", asked)


@pytest.mark.parametrize(
    ("pieces", "asked"),
    [
        ([], 2),  # nobody saw anything
        (["hel"], 1),
        ([TextPiece("I think", "r", "reasoning_summary")], 1),  # people see that too
    ],
)
async def test_what_people_have_seen_a_part_of_is_not_asked_for_again(
    quick: None,
    local_runtime: MakeLocalRuntime,
    identity: Identity,
    session_id: str,
    pieces: list[Any],
    asked: int,
) -> None:
    result, model = await run(
        local_runtime, identity, session_id, stream(*pieces, BROKEN, usage=None), reply("hello"), streams=True
    )
    assert len(model.requests) == asked
    assert result.status == ("completed" if asked == 2 else "failed")
    assert spent(result).unknown_usage_calls == 1


async def test_a_run_that_is_cancelled_in_the_pause_asks_no_more(
    monkeypatch: pytest.MonkeyPatch, local_runtime: MakeLocalRuntime, identity: Identity, session_id: str
) -> None:
    waiting = Flag()

    def no_jitter(*between: float) -> float:
        waiting.set()
        return 0.0

    monkeypatch.setattr("retinue.model_retries.random.uniform", no_jitter)
    model = ScriptedModel({"": [ModelFailed("busy", retryable=True, retry_after=30.0), reply("late")]})
    runtime = local_runtime(
        driver=agent_driver(Agent(name="a", model=model)),
        budgets=Budgets(max_tokens=10_000),
        estimate_input_tokens=estimate(10),
    )
    handle = runtime.start("x", identity=identity, session_id=session_id)
    await waiting.wait()
    await handle.cancel()
    result: RunResult = await soon(handle.result())
    assert result.status == "cancelled"
    assert len(model.requests) == 1
    assert spent(result).unknown_usage_calls == 1
    await nothing_is_left(runtime, handle)


@pytest.mark.parametrize("wrong", [-1, 1.5, True, "2"])
def test_a_number_of_retries_that_is_none(wrong: Any) -> None:
    with pytest.raises(ValidationFailed, match="model_retries"):
        Agent(name="a", model=ScriptedModel(), model_retries=wrong)
