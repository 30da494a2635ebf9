"""What a policy sees, without a run: services that note what they are told, and answer from a list."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

from retinue import BudgetSnapshot, Grants, Identity, Message, ModelResponse, PolicyContext, RunRequest
from retinue.config import RuntimeConfig
from retinue.events import CompactionPayload
from retinue.messages import encode_message
from retinue.policies import CallUnderReview, Decision, PolicyAction
from retinue.protocol import Compacting, ParticipantMessage, PrepareModel, RootReply, SettleModel
from retinue.services import ExecutionServices
from retinue.tool_process import LocalTasks
from tests.support import trivial

GRANTED = Grants(tool_ids=["look", "write"], model_roles=["main", "judge"])


class NoRoot:
    """A port behind which nobody is: policies are not asked for what needs a root."""

    steer_waits = False

    @property
    def budget(self) -> BudgetSnapshot:
        raise AssertionError("there is no budget here")

    async def ask(self, message: ParticipantMessage) -> RootReply:
        raise AssertionError(f"nobody answers {message!r}")

    def tell(self, message: ParticipantMessage) -> None:
        raise AssertionError(f"nobody hears {message!r}")

    async def settle(self, message: SettleModel) -> None:
        raise AssertionError(f"nobody settles {message!r}")


class PolicyServices(ExecutionServices):
    """Services of one participant, of whom only policies ask something.

    Args:
        answers: texts or whole answers of control calls, in order; an exception is raised.
        config: members of the app's configuration.
    """

    def __init__(
        self,
        *answers: str | ModelResponse | BaseException,
        participant: str = "",
        run_id: str = "run",
        grants: Grants = GRANTED,
        **config: Any,
    ) -> None:
        self.answers = list(answers)
        self.asked: list[tuple[str, list[Message], int | None, float | None]] = []
        self.told: list[CompactionPayload] = []
        super().__init__(
            request=RunRequest(
                input="x",
                identity=Identity(tenant_id="t", user_id="u"),
                session_id="s",
                run_id=run_id,
                attempt_id="attempt",
                root_run_id="run",
                participant=participant,
                grants=grants,
            ),
            config=RuntimeConfig(driver=trivial, grants=grants, **config),
            port=cast(Any, NoRoot()),
            threads=ThreadPoolExecutor(1),
            tasks=LocalTasks(),
        )

    async def control_model(
        self,
        role: str,
        messages: Sequence[Message],
        *,
        max_tokens: int | None = None,
        temperature: float | None = None,
    ) -> ModelResponse:
        self.asked.append((role, list(messages), max_tokens, temperature))
        answer = self.answers.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        return ModelResponse(text=answer) if isinstance(answer, str) else answer

    def tell(self, message: ParticipantMessage) -> None:
        assert isinstance(message, Compacting)
        assert message.participant == self.participant
        self.told.append(message.payload)

    @property
    def context(self) -> PolicyContext:
        return PolicyContext(self)


class Named:
    """A policy that is known by its name, because copies of it work in delegates."""

    asked: list[tuple[str, str, str]] = []  # noqa: RUF012 - of all copies
    """Which policy was asked about which tool, and for whom."""

    def __init__(self, name: str, action: PolicyAction = "allow") -> None:
        self.name, self.action = name, action

    def decide(self, call: CallUnderReview, ctx: PolicyContext) -> Decision:
        self.asked.append((self.name, call.tool_name, ctx.participant))
        return Decision(action=self.action, reason=self.name)


class Pinned(Named):
    """One that cannot be copied into another process."""

    def __reduce__(self) -> Any:
        raise TypeError("the policy stays at the root")


def asking(
    messages: Sequence[Message] = (), *, role: str = "main", tools: Sequence[str] = (), model_id: str = "m"
) -> PrepareModel:
    """A task call that is about to be made."""
    return PrepareModel(
        participant="",
        call_id="call-1",
        role=role,
        tools=list(tools),
        messages=[encode_message(message) for message in messages],
        provider_id="p",
        model_id=model_id,
    )
