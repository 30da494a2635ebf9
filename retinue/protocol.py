"""Messages between processes: what a client asks of a session, and what a participant asks of its root.

All are msgspec structs with stable tags and travel as bytes; nothing that changes something lacks an id.
A *participant* is whoever spends in a tree: the root driver (name ``""``) or a delegate.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from retinue.approvals import ApprovalRequest
from retinue.budgets import Budgets, BudgetSnapshot, CallKind, Usage, UsageReport
from retinue.drivers import ControlMode, RunMode
from retinue.events import CompactionPayload, CompletionAction, InputRequest, Payload
from retinue.grants import Grants
from retinue.ids import Identity
from retinue.messages import Content
from retinue.policies import DenialKind, Effect
from retinue.results import DriverOutput, RunResult
from retinue.store import StoredArtifact

RunState = Literal["queued", "running", "awaiting_input", "cancelling", "finished"]
IfBusy = Literal["reject", "queue", "steer", "cancel"]
"""What a start does where another run has the session."""

# --- client to session ------------------------------------------------------------------------------------


class Resumption(msgspec.Struct, frozen=True, kw_only=True):
    """A run that ended ``budget_exhausted``, and what is added to its limits."""

    run_id: str
    top_up: Budgets
    carried: BudgetSnapshot | None = None
    """What it had spent, under the limits that hold now; filled in by the session."""


class StartRun(msgspec.Struct, frozen=True, kw_only=True):
    """Start a run. The id is the client's, so a repeat starts nothing twice."""

    run_id: str
    identity: Identity
    session_id: str
    input: Content
    grants: Grants | None = None
    deadline: float | None = None
    """Epoch seconds."""
    run_mode: RunMode = "execute"
    parent_run_id: str | None = None
    """Label of the caller's own records."""
    root_run_id: str | None = None
    """Label of the caller's own records; the run's own id when left out."""
    if_busy: IfBusy = "reject"
    resumes: Resumption | None = None
    """Go on where a run of this session ran out of budget; ``input`` is then that run's."""
    trace: dict[str, str] = msgspec.field(default_factory=dict)
    """W3C trace context of the caller."""


class RunStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A run as it is now; comes with every receipt, page of events and poll."""

    run_id: str
    state: RunState
    cursor: int
    budget: BudgetSnapshot
    hops: int = 0
    """Remote calls that the session host awaited for this run."""
    pending_input: InputRequest | None = None
    """The question that the run waits with."""
    queue_position: int | None = None
    """Of a queued run: 1 is next."""
    pending_approvals: Sequence[ApprovalRequest] = ()
    """Calls that wait for a decision, oldest first; at most 16."""


class SendInput(msgspec.Struct, frozen=True, kw_only=True):
    """Live input for a run. The id is the client's, so a repeat has no second effect."""

    run_id: str
    input_id: str
    input: Content
    mode: ControlMode


class ReplyInput(msgspec.Struct, frozen=True, kw_only=True):
    """An answer to a question. A repeat of the same ``reply_id`` gives the first receipt."""

    run_id: str
    request_id: str
    reply_id: str
    input: Content


class DecideRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A decision about a call that waits for approval. The same one again gives the first outcome."""

    run_id: str
    """Of the root run."""
    approval_id: str
    approve: bool
    by: str
    """Who decides, in the application's words."""
    reason: str = ""


class Receipt(msgspec.Struct, frozen=True, kw_only=True):
    """What became of something that was sent to a run. A refusal is raised instead, with its reason."""

    id: str
    """Of the input, of the answered request, or of the cancelled run."""
    action: Literal["steer", "follow_up", "reply", "cancel"]
    outcome: Literal["delivered", "deferred", "returned"]
    """``delivered``: it has reached the work at ``boundary``. ``deferred``: it waits for ``boundary``.
    ``returned``: it had no effect, because the run ended before it (or, for a cancel, had ended)."""
    boundary: Literal["model_call", "turn", "question", "run"]
    """``model_call``: before the next call of the model; ``turn``: as the next turn; ``question``: the
    question that waited; ``run``: the run as a whole."""
    status: RunStatus


class Fork(msgspec.Struct, frozen=True, kw_only=True):
    """Begin another session of the same user with the first turns of this one. Safe to repeat by its id."""

    fork_id: str
    target_session_id: str
    turns: int | None
    """How many are kept; ``None`` keeps all, a negative number leaves so many out."""
    keep_state: bool


class Forked(msgspec.Struct, frozen=True, kw_only=True):
    """The session that a fork began."""

    session_id: str
    revision: int
    messages: int
    """Messages that it took over."""
    of_revision: int
    """Revision of the session that it was forked from."""


class VouchFor(msgspec.Struct, frozen=True, kw_only=True):
    """Call a partial transcript replayable. Safe to repeat by its id."""

    mark_id: str
    by: str
    why: str


class EventPageReply(msgspec.Struct, frozen=True, kw_only=True):
    """Some events in order; ``closed`` when nothing follows them."""

    events: Sequence[tuple[int, bytes]]
    closed: bool
    status: RunStatus


class Settled(msgspec.Struct, frozen=True, kw_only=True):
    """The one result, and the final figures."""

    result: RunResult
    status: RunStatus


# --- participant to root ----------------------------------------------------------------------------------


class PrepareModel(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A task call, where the app has a controller or a context policy: reserve a call, then let them speak.
    Reply: :class:`ModelPrepared`; then comes :class:`AdmitModel` with the same call id, or
    :class:`ReleaseModel`."""

    participant: str
    call_id: str
    role: str
    tools: Sequence[str]
    """Names of the tools that are offered."""
    messages: Sequence[bytes]
    """Of the request, encoded."""
    provider_id: str
    model_id: str
    trace: dict[str, str] = msgspec.field(default_factory=dict)
    """W3C trace context, for what the policies do."""


class PrepareRun(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The driver will start next: let the controller speak. From the root. Reply: :class:`Acknowledged`."""


class ReleaseModel(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A prepared call will not be made. Needs no reply."""

    participant: str
    call_id: str


class AdmitModel(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """May I call this model? Checks and reserves in one step. Reply: :class:`ModelAdmitted`."""

    participant: str
    call_id: str
    role: str
    kind: CallKind = "task"
    projected_input: int
    requested_output: int | None
    provider_id: str = ""
    model_id: str = ""
    tools: Sequence[str] | None = None
    """Names of the tools that a task call offers; its answer may use no others."""


class SettleModel(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What a model call used. Needs no reply."""

    participant: str
    call_id: str
    provider_id: str
    model_id: str
    usage: Usage | None
    started: bool
    answered: bool
    """The provider gave a usable answer: ``model.complete`` is due."""
    estimated: Usage | None = None
    """Where ``usage`` is unknown: what can be told from an answer that broke off. Evidence, not the
    charge."""


class ToolAttempt(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One call of a tool, or one effect, that wants to run."""

    id: str
    """Unique for the participant; models may repeat their own call ids."""
    call_id: str
    """As the model knows it."""
    tool_name: str
    arguments: bytes = b"{}"
    """JSON of the arguments as they will be used."""
    effect: Effect = "unknown"
    requires_approval: bool | None = None
    """``None`` leaves it to the app's :class:`Approvals`."""
    ask: str | None = None
    """Why a policy of the agent's own asks for an approval, if it does."""
    driver: bool = False
    """An effect of the driver itself, which no model chose: the offered tools do not bound it."""
    trace: dict[str, str] = msgspec.field(default_factory=dict)
    """W3C trace context, for what the policies do."""


class AdmitTools(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """May I run these? The gate of contract section 7 for a batch. Reply: :class:`ToolsAdmitted`."""

    participant: str
    attempts: Sequence[ToolAttempt]


class AwaitVerdict(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The verdict about an attempt that was ``pending``; replied to when it is there. Reply:
    :class:`ToolsAdmitted` with one verdict."""

    participant: str
    attempt_id: str


class ReadUsage(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What the tree used. Reply: :class:`UsageRead`."""

    participant: str


class Compacting(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A context policy shortens a conversation. Needs no reply."""

    participant: str
    payload: CompactionPayload


class ToolDone(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A tool call has its result. Needs no reply."""

    participant: str
    call_id: str
    tool_name: str
    error: bool


class Record(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Messages for canonical history and for conversations, encoded. From the root; needs no reply."""

    canonical: Sequence[bytes] = ()
    conversation: Sequence[bytes] = ()
    execution_id: str = ""


class Emit(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """An event of a participant. Needs no reply."""

    participant: str
    payload: Payload


class Spawn(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Start a delegate. Reply: :class:`Spawned`."""

    participant: str
    child_run_id: str
    name: str
    input: Content
    budgets: Budgets | None
    placement: Literal["pooled"]
    work: bytes
    """The agent or driver, pickled by the participant's process; never stored."""
    trace: dict[str, str] = msgspec.field(default_factory=dict)


class AwaitChild(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The outcome of a delegate; replied to when it has ended. Reply: :class:`ChildEnded`."""

    participant: str
    child_run_id: str


class CancelChild(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Cancel a delegate and everything below it. Needs no reply."""

    participant: str
    child_run_id: str
    reason: str


class Finished(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """How a participant's work ended: an output, or the error that escaped. Reply: :class:`Acknowledged`."""

    participant: str
    output: bytes | None = None
    """A :class:`DriverOutputWire` as JSON."""
    error: dict[str, Any] | None = None
    cancelled: bool = False
    state: bytes | None = None
    """Application state after a root driver, as JSON; ``None`` when unchanged."""
    transcript: Sequence[bytes] = ()
    """A delegate's conversation."""
    hops: int = 0


class Began(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The driver is about to start. From the root; needs no reply."""


class TakeInput(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The oldest steer that waits, at a boundary. From the root. Reply: :class:`TakenInput`."""

    close: bool = False
    """Where none waits, take no more steers until the next turn."""


class NextTurn(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A turn completed and was accepted: the oldest follow-up, or nothing, and then no input is taken any
    more. From the root. Reply: :class:`TakenInput`."""


class EndTurn(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The driver has returned: steers are refused until the next turn. From the root; needs no reply."""


class Revise(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The completion policy decided. From the root. Reply: :class:`Revision`."""

    action: CompletionAction
    reason: str


class AskInput(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Ask whoever follows the run; replied to when somebody answered. Reply: :class:`InputReply`."""

    participant: str
    question: str
    choices: Sequence[str] | None
    timeout: float | None
    """Seconds."""


class WithdrawInput(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Whoever asked no longer waits for the answer. Needs no reply."""

    participant: str


class PutArtifact(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Keep this beside the session. Reply: :class:`Acknowledged` once it is stored."""

    participant: str
    artifact: StoredArtifact


class GetArtifact(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """An artifact of this session. Reply: :class:`ArtifactRead`."""

    participant: str
    artifact_id: str


ParticipantMessage = (
    PrepareRun | PrepareModel | ReleaseModel | AdmitModel | SettleModel | AdmitTools | AwaitVerdict
    | ReadUsage | Compacting | ToolDone | Record | Emit | Spawn | AwaitChild | CancelChild
    | Began | TakeInput | EndTurn | NextTurn | Revise | AskInput | WithdrawInput | PutArtifact
    | GetArtifact | Finished
)  # fmt: skip


class ModelAdmitted(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    max_tokens: int | None


class ModelPrepared(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What a controller and a context policy made of a call."""

    role: str
    tools: Sequence[str]
    """Names of the tools that may be offered."""
    options: dict[str, Any]
    """What the controller sets; each is on the list of the role's binding."""
    messages: Sequence[bytes] | None = None
    """The projected request; ``None`` where it is as it was."""


class ToolVerdict(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Whether one attempt may run."""

    allowed: bool = False
    denial: DenialKind | None = None
    reason: str = ""
    pending: bool = False
    """Not decided yet: :class:`AwaitVerdict` gives it."""


class ToolsAdmitted(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    verdicts: Sequence[ToolVerdict]
    """In the order of the attempts."""


class UsageRead(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    report: UsageReport


class Spawned(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    pass


class Acknowledged(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    pass


class ChildEnded(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    output: bytes | None = None
    error: dict[str, Any] | None = None
    cancelled: bool = False
    usage: Usage = msgspec.field(default_factory=Usage)


class TakenInput(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    input_id: str | None = None
    """``None`` when nothing waited."""
    input: Content | None = None


class Revision(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    allowed: bool
    """A revision may begin; false when the limit of revisions is reached, or none was asked for."""


class InputReply(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    request_id: str
    input: Content


class ArtifactRead(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    artifact: StoredArtifact | None


class Rejected(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The request failed or was refused, with a :meth:`RetinueError.to_payload`."""

    error: dict[str, Any]
    cancelled: bool = False
    """The run is ending: the participant must stop."""


RootReply = (
    ModelPrepared | ModelAdmitted | ToolsAdmitted | UsageRead | Spawned | Acknowledged | ChildEnded
    | TakenInput | Revision | InputReply | ArtifactRead | Rejected
)  # fmt: skip


# --- root to child host -----------------------------------------------------------------------------------


class ChildOrder(msgspec.Struct, frozen=True, kw_only=True):
    """Run this delegate: everything its process needs to know."""

    activation_id: str
    """Of the root's session: messages of another activation are refused."""
    tree_id: str
    """Run id of the root, where its messages go."""
    root_run_id: str
    run_id: str
    parent_run_id: str
    attempt_id: str
    participant: str
    depth: int
    """1 for a delegate of the root, 2 for a delegate of such a one."""
    identity: Identity
    session_id: str
    """The root's; the delegate's own label is ``<session>:<name>``."""
    input: Content
    grants: Grants
    run_mode: RunMode
    deadline: float | None
    work: bytes
    token_limited: bool
    """The tree has a token limit: agents ask for their usual output only."""
    trace: dict[str, str] = msgspec.field(default_factory=dict)
    """W3C trace context of whoever started it."""


def encode_output(output: DriverOutput) -> bytes:
    """A driver's output as JSON; its history has been recorded before."""
    return msgspec.json.encode(
        {
            "text": output.text,
            "status": output.status,
            "structured": output.structured,
            "reason": output.reason,
            "usage": output.usage,
            "artifacts": list(output.artifacts),
        }
    )


_output_decoder = msgspec.json.Decoder(DriverOutput)


def decode_output(data: bytes) -> DriverOutput:
    return _output_decoder.decode(data)
