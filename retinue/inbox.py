"""Live input of one run: steers and follow-ups that wait for their boundary, and the question that it asks.

    send ──> queue ──> a steer at the next model call, a follow-up as the next turn
    ask ──> question ──> reply: claimed by one answer before anybody hears of it

Everything is decided here in one step without an await, so two senders cannot both win. Belongs to the
control loop.
"""

from __future__ import annotations

import asyncio
import uuid
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from retinue.drivers import ControlMode
from retinue.errors import InputError, Overloaded, RetinueError, Unsupported
from retinue.events import (
    Control,
    InputApplied,
    InputMode,
    InputReceived,
    InputRequest,
    InputRequested,
    InputResolved,
    Payload,
    RunResumed,
)
from retinue.messages import Content, check_content
from retinue.protocol import InputReply, Rejected, ReplyInput, SendInput, TakenInput

MAX_QUEUED = 32
"""Inputs of one run that may wait (contract section 6)."""
REMEMBERED = 1024
"""Inputs and answers whose repeats are recognised."""

InputState = Literal["queued", "applied"]


@dataclass(frozen=True)
class _Input:
    input_id: str
    mode: InputMode
    content: Content


@dataclass(frozen=True)
class _Question:
    request: InputRequest
    participant: str
    answer: asyncio.Future[InputReply | Rejected]


class RunInbox:
    """What people send to one run.

    Args:
        run_id: of the run.
        controls: what its driver can take.
        emit: adds an event to the run's log.
        on_wait: called with a question's own time limit in seconds when a question begins to wait.
        on_resume: called when it waits no longer.
    """

    def __init__(
        self,
        run_id: str,
        controls: Sequence[ControlMode],
        emit: Callable[[Payload], None],
        *,
        on_wait: Callable[[float | None], None] = lambda timeout: None,
        on_resume: Callable[[], None] = lambda: None,
    ) -> None:
        self._run_id = run_id
        self._controls = frozenset(controls)
        self._emit = emit
        self._on_wait = on_wait
        self._on_resume = on_resume
        self._queue: deque[_Input] = deque()
        self._steers = 0
        """Of those in the queue."""
        self._inputs: OrderedDict[str, InputState] = OrderedDict()
        self._question: _Question | None = None
        self._answered: OrderedDict[str, str] = OrderedDict()
        """Reply ids by request id."""
        self._open = True
        self._steering = True

    # --- live input ---------------------------------------------------------------------------------------

    def send(self, sent: SendInput) -> InputState:
        """Queue an input; a repeat of its id tells where the first one is.

        Raises:
            InputError: ``run_finished`` when the run takes no input any more, or no steer in this turn;
                ``invalid_input`` for bad content.
            Unsupported: the driver does not take this kind of input.
            Overloaded: :data:`MAX_QUEUED` wait already.
        """
        known = self._inputs.get(sent.input_id)
        if known is not None:
            return known
        if not self._open or (sent.mode == "steer" and not self._steering):
            raise self._finished("takes no steer at its end" if self._open else "takes no input any more")
        if sent.mode not in self._controls or sent.mode == "replace":
            raise Unsupported(
                f"the driver of run {self._run_id} does not take {sent.mode!r}; it takes "
                f"{', '.join(sorted(self._controls)) or 'no live input'}",
                operation=sent.mode,
            )
        if len(self._queue) >= MAX_QUEUED:
            raise Overloaded(
                f"{MAX_QUEUED} inputs of run {self._run_id} wait already; send again when some were applied",
                reason="inbox_full",
            )
        content = check_content(sent.input)
        self._queue.append(_Input(sent.input_id, sent.mode, content))
        self._steers += sent.mode == "steer"
        self._inputs[sent.input_id] = "queued"
        while len(self._inputs) > REMEMBERED:
            self._inputs.popitem(last=False)
        self._emit(Control(sent.mode))
        self._emit(InputReceived(sent.input_id, sent.mode))
        return "queued"

    @property
    def steer_waits(self) -> bool:
        """Whether a steer waits; may be asked from any thread, which then takes it with a message."""
        return self._steers > 0

    def take_steer(self, *, close: bool = False) -> TakenInput:
        """The oldest steer, which is applied with that. With ``close`` and none there, steering ends."""
        taken = self._take("steer")
        if close and taken.input_id is None:
            self._steering = False
        return taken

    def end_turn(self) -> None:
        """The driver has returned: no steer can reach this turn any more."""
        self._steering = False

    def next_turn(self) -> TakenInput:
        """The oldest follow-up, which begins a turn; without one no input is taken any more."""
        taken = self._take("follow_up")
        if taken.input_id is None:
            self._open = False
        self._steering = self._open
        return taken

    def revise(self) -> None:
        """The same work begins another turn, and can be steered in it."""
        self._steering = self._open

    def _take(self, mode: InputMode) -> TakenInput:
        for item in self._queue:
            if item.mode == mode:
                self._queue.remove(item)
                self._steers -= mode == "steer"
                self._inputs[item.input_id] = "applied"
                self._emit(InputApplied(item.input_id, mode))
                return TakenInput(input_id=item.input_id, input=item.content)
        return TakenInput()

    # --- questions ----------------------------------------------------------------------------------------

    @property
    def pending(self) -> InputRequest | None:
        """The question that waits."""
        return None if self._question is None else self._question.request

    def check_not_waiting(self) -> None:
        """Raise :class:`InputError` (``input_pending``) while a question waits: no model call may start."""
        if self._question is not None:
            raise InputError(
                f"question {self._question.request.id} waits for its answer; no model call may start",
                code="input_pending",
                request_id=self._question.request.id,
            )

    def ask(
        self,
        participant: str,
        run_id: str,
        question: str,
        choices: Sequence[str] | None,
        timeout: float | None,
    ) -> asyncio.Future[InputReply | Rejected]:
        """Ask; the future has the answer.

        Raises:
            InputError: ``input_pending`` while another question waits, ``run_finished`` after the end.
        """
        if not self._open:
            raise self._finished("asks nothing any more")
        self.check_not_waiting()
        request = InputRequest(
            id=f"{self._run_id}:{uuid.uuid4()}",
            run_id=run_id,
            question=question,
            choices=None if choices is None else list(choices),  # as it is read from an event
            timeout_ms=None if timeout is None else round(timeout * 1000),
        )
        answer: asyncio.Future[InputReply | Rejected] = asyncio.get_running_loop().create_future()
        self._question = _Question(request, participant, answer)
        self._emit(InputRequested(request))
        self._on_wait(timeout)
        return answer

    def reply(self, reply: ReplyInput) -> None:
        """Answer the question. One answer wins; a repeat of that same reply changes nothing.

        Raises:
            InputError: ``run_finished``, ``input_already_resolved``, ``input_not_pending``,
                ``input_mismatch`` or ``invalid_input``, looked at in this order.
        """
        if self._answered.get(reply.request_id) == reply.reply_id:
            return
        if not self._open:
            raise self._finished("takes no answer any more")
        if reply.request_id in self._answered:
            raise InputError(
                f"question {reply.request_id} was answered before",
                code="input_already_resolved",
                request_id=reply.request_id,
            )
        question = self._question
        if question is None:
            raise InputError(f"run {self._run_id} asks nothing now", code="input_not_pending")
        if question.request.id != reply.request_id:
            raise InputError(
                f"run {self._run_id} waits with question {question.request.id}, not {reply.request_id}",
                code="input_mismatch",
                request_id=question.request.id,
            )
        content = check_content(reply.input)
        self._answered[reply.request_id] = reply.reply_id
        while len(self._answered) > REMEMBERED:
            self._answered.popitem(last=False)
        self._question = None
        self._emit(InputResolved(reply.request_id))
        self._on_resume()
        self._emit(RunResumed(reply.request_id))
        _settle(question.answer, InputReply(request_id=reply.request_id, input=content))

    def withdraw(self, participant: str) -> None:
        """Whoever asked no longer waits: the run goes on without an answer."""
        question = self._question
        if question is None or question.participant != participant:
            return
        self._question = None
        self._on_resume()
        self._emit(RunResumed(question.request.id))
        _settle(question.answer, _rejected(self._finished("ended what asked")))

    # --- the end ------------------------------------------------------------------------------------------

    def close(self, reason: str, *, cancelled: bool) -> None:
        """Take nothing any more; whoever waits with a question is rejected."""
        self._open = self._steering = False
        question, self._question = self._question, None
        if question is not None:
            error = RetinueError(reason, code="cancelled") if cancelled else self._finished("has ended")
            _settle(question.answer, _rejected(error, cancelled=cancelled))

    def _finished(self, what: str) -> InputError:
        return InputError(f"run {self._run_id} {what}", code="run_finished", run_id=self._run_id)


def _rejected(error: RetinueError, *, cancelled: bool = False) -> Rejected:
    return Rejected(error=error.to_payload(), cancelled=cancelled)


def _settle(answer: asyncio.Future[InputReply | Rejected], value: InputReply | Rejected) -> None:
    if not answer.done():
        answer.set_result(value)
