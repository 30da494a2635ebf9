"""Live input of one run: what is taken, in which order, and who wins."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from retinue.drivers import ControlMode
from retinue.errors import InputError, Overloaded, Unsupported
from retinue.events import Control, InputApplied, InputReceived, InputRequested, Payload
from retinue.inbox import MAX_QUEUED, RunInbox
from retinue.protocol import InputReply, Rejected, ReplyInput, SendInput


class Inbox(RunInbox):
    """An inbox that keeps its events and what it said to the clocks."""

    def __init__(self, controls: Sequence[ControlMode] = ("steer", "follow_up")) -> None:
        self.events: list[Payload] = []
        self.clocks: list[object] = []
        super().__init__(
            "run",
            controls,
            self.events.append,
            on_wait=lambda timeout: self.clocks.append(timeout),
            on_resume=lambda: self.clocks.append("work"),
        )

    def put(self, mode: ControlMode, text: str = "x", input_id: str | None = None) -> str:
        return self.send(SendInput(run_id="run", input_id=input_id or text, input=text, mode=mode))

    def answer(self, request_id: str, text: str = "yes", reply_id: str = "r") -> None:
        self.reply(ReplyInput(run_id="run", request_id=request_id, reply_id=reply_id, input=text))


def code_of(work: object) -> str:
    with pytest.raises(InputError) as refused:
        work()  # type: ignore[operator]
    return refused.value.code


def test_steers_come_in_order_and_follow_ups_stay() -> None:
    inbox = Inbox()
    inbox.put("steer", "one")
    inbox.put("follow_up", "later")
    inbox.put("steer", "two")
    taken = [inbox.take_steer().input for _ in range(3)]
    assert taken == ["one", "two", None]
    assert inbox.next_turn().input == "later"
    applied = [event.input_id for event in inbox.events if isinstance(event, InputApplied)]
    assert applied == ["one", "two", "later"]


def test_a_repeat_has_no_second_effect_and_tells_where_the_first_is() -> None:
    inbox = Inbox()
    assert inbox.put("steer", "one") == "queued"
    assert inbox.put("steer", "one") == "queued"
    assert inbox.take_steer().input == "one"
    assert inbox.put("steer", "one") == "applied"
    assert inbox.take_steer().input is None
    assert [type(event) for event in inbox.events] == [Control, InputReceived, InputApplied]


def test_c137_32_inputs_wait_and_the_33rd_is_refused() -> None:
    inbox = Inbox()
    for number in range(MAX_QUEUED):
        inbox.put("follow_up" if number % 2 else "steer", f"input {number}")
    with pytest.raises(Overloaded) as refused:
        inbox.put("steer", "one more")
    assert refused.value.reason == "inbox_full"
    inbox.take_steer()
    inbox.put("steer", "one more")


def test_a_driver_gets_only_what_it_declares() -> None:
    inbox = Inbox(("follow_up",))
    for mode in ("steer", "replace"):
        with pytest.raises(Unsupported) as refused:
            inbox.put(mode)
        assert refused.value.operation == mode


def test_steering_ends_with_the_turn_and_begins_with_the_next() -> None:
    inbox = Inbox()
    inbox.put("follow_up", "next")
    assert inbox.take_steer(close=True).input_id is None
    assert code_of(lambda: inbox.put("steer", "too late")) == "run_finished"
    inbox.put("follow_up", "another")
    assert inbox.next_turn().input == "next"
    inbox.put("steer", "in time")
    inbox.end_turn()
    assert code_of(lambda: inbox.put("steer", "late again")) == "run_finished"
    inbox.revise()
    inbox.put("steer", "in the revision")


def test_a_steer_that_waits_keeps_steering_open() -> None:
    inbox = Inbox()
    inbox.put("steer", "first")
    assert inbox.take_steer(close=True).input == "first"
    inbox.put("steer", "second")


def test_c122_after_the_last_turn_nothing_is_taken() -> None:
    inbox = Inbox()
    assert inbox.next_turn().input_id is None
    assert code_of(lambda: inbox.put("follow_up")) == "run_finished"
    assert code_of(lambda: inbox.answer("run:1")) == "run_finished"


async def test_a_question_waits_for_one_answer() -> None:
    inbox = Inbox()
    answer = inbox.ask("", "run", "Sure?", ["yes", "no"], 5.0)
    request = inbox.pending
    assert request is not None
    assert (request.question, request.choices, request.timeout_ms) == ("Sure?", ["yes", "no"], 5000)
    assert request.id.startswith("run:")
    assert code_of(inbox.check_not_waiting) == "input_pending"
    assert code_of(lambda: inbox.ask("", "run", "And?", None, None)) == "input_pending"
    assert code_of(lambda: inbox.answer("run:other")) == "input_mismatch"  # c117
    inbox.answer(request.id, "yes", "first")
    assert await answer == InputReply(request_id=request.id, input="yes")
    inbox.answer(request.id, "no", "first")  # the same reply again: on the wire, not a second one
    assert code_of(lambda: inbox.answer(request.id, "no", "second")) == "input_already_resolved"  # c118
    assert code_of(lambda: inbox.answer("run:other")) == "input_not_pending"
    assert inbox.clocks == [5.0, "work"]
    inbox.check_not_waiting()


async def test_c121_a_stale_answer_leaves_the_second_question_alone() -> None:
    inbox = Inbox()
    inbox.ask("", "run", "first?", None, None)
    first = inbox.pending
    assert first is not None
    inbox.answer(first.id)
    answer = inbox.ask("", "run", "second?", None, None)
    assert code_of(lambda: inbox.answer(first.id, "stale", "late")) == "input_already_resolved"
    assert inbox.pending is not None
    assert not answer.done()


async def test_bad_content_leaves_the_question_pending() -> None:
    inbox = Inbox()
    inbox.ask("", "run", "?", None, None)
    assert inbox.pending is not None
    request_id = inbox.pending.id
    assert code_of(lambda: inbox.answer(request_id, "x" * 70_000)) == "invalid_input"
    assert inbox.pending is not None
    inbox.answer(request_id)


async def test_the_end_rejects_whoever_waits() -> None:
    for cancelled in (True, False):
        inbox = Inbox()
        answer = inbox.ask("", "run", "?", None, None)
        inbox.close("the user left", cancelled=cancelled)
        rejected = await answer
        assert isinstance(rejected, Rejected)
        assert rejected.cancelled is cancelled
        assert rejected.error["code"] == ("cancelled" if cancelled else "run_finished")
        assert inbox.pending is None


async def test_a_question_that_nobody_waits_for_is_withdrawn() -> None:
    inbox = Inbox()
    inbox.ask("child", "child", "?", None, None)
    inbox.withdraw("another")
    assert code_of(inbox.check_not_waiting) == "input_pending"
    inbox.withdraw("child")
    inbox.check_not_waiting()
    assert inbox.clocks == [None, "work"]
    request = next(event.request for event in inbox.events if isinstance(event, InputRequested))
    assert code_of(lambda: inbox.answer(request.id)) == "input_not_pending"


class InboxMachine(RuleBasedStateMachine):
    """Any order of messages: every input is applied at most once, in order, and only while it may be."""

    ids = Bundle("ids")

    @initialize()
    def begin(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.inbox = Inbox()
        self.sent: dict[str, ControlMode] = {}
        self.taken: list[str] = []
        self.open = True
        self.questions: list[tuple[str, asyncio.Future[InputReply | Rejected]]] = []
        self.winners: dict[str, str] = {}

    def teardown(self) -> None:
        if hasattr(self, "loop"):
            self.loop.close()

    @rule(target=ids, mode=st.sampled_from(["steer", "follow_up"]), number=st.integers(0, 40))
    def send(self, mode: ControlMode, number: int) -> str:
        input_id = f"{mode} {number}"
        try:
            state = self.inbox.put(mode, input_id)
        except (InputError, Overloaded):
            assert input_id not in self.sent
            return input_id
        assert state == ("applied" if input_id in self.taken else "queued")
        assert self.open or input_id in self.sent
        self.sent.setdefault(input_id, mode)
        return input_id

    @rule(close=st.booleans())
    def take(self, close: bool) -> None:
        taken = self.inbox.take_steer(close=close)
        self._took(taken.input_id, "steer")

    @rule()
    def next_turn(self) -> None:
        taken = self.inbox.next_turn()
        self._took(taken.input_id, "follow_up")
        if taken.input_id is None:
            self.open = False

    def _took(self, input_id: str | None, mode: ControlMode) -> None:
        waiting = [known for known, kind in self.sent.items() if kind == mode and known not in self.taken]
        assert input_id == (waiting[0] if waiting else None)
        if input_id is not None:
            self.taken.append(input_id)

    @rule()
    def ask(self) -> None:
        async def ask() -> asyncio.Future[InputReply | Rejected]:
            return self.inbox.ask("", "run", "?", None, None)

        try:
            answer = self.loop.run_until_complete(ask())
        except InputError:
            assert not self.open or self.inbox.pending is not None
            return
        assert self.inbox.pending is not None
        self.questions.append((self.inbox.pending.id, answer))

    @rule(which=st.integers(0, 5), who=st.sampled_from(["a", "b"]))
    def answer(self, which: int, who: str) -> None:
        if which >= len(self.questions):
            return
        request_id, _ = self.questions[which]
        try:
            self.inbox.answer(request_id, who, who)
        except InputError:
            assert not self.open or self.winners.get(request_id, who) != who
            return
        assert self.winners.setdefault(request_id, who) == who

    @invariant()
    def each_question_has_the_answer_of_its_winner(self) -> None:
        for request_id, answer in getattr(self, "questions", []):
            if request_id in self.winners:
                reply = answer.result()
                assert isinstance(reply, InputReply)
                assert reply.input == self.winners[request_id]


def test_any_order_of_messages() -> None:
    run_state_machine_as_test(InboxMachine, settings=settings(max_examples=60, deadline=None))
