"""The right sentence is found among distractors, in whatever form the question puts it."""

from __future__ import annotations

import time

import pytest

from retinue.providers.passages import read_sentences
from retinue.providers.questions import Question
from retinue.providers.ranking import distinct, rank
from retinue.providers.words import stem, terms

GUIDE = """\
# Guide

Leases keep two writers apart. A lease lasts 15 s, and its holder renews it every 5 s. The weather was fine.

## Stopping

Press Ctrl-C to cancel the run. Every delegate is told at once, because they share one tree.
Children that do not answer are left behind after 20 s. The cancellation is recorded.

| dies | what happens |
| --- | --- |
| the client | nothing, the run goes on |
| the store | runs wait, then fail |

## Installing

    pip install retinue

Activation codes are not needed. An activation is a session that lives in a process now.
The `max_output_tokens` option caps an answer at 1024 tokens. Tokens are pieces of words.
The BudgetLedger admits a call before it is made.
"""


def best(question: str, text: str = GUIDE) -> str:
    ranked = rank(read_sentences(text), Question.of(question))
    return ranked[0].sentence.text if ranked else ""


@pytest.mark.parametrize(
    ("question", "start"),
    [
        ("How long does a lease last?", "A lease lasts 15 s"),
        ("How often are leases renewed?", "A lease lasts 15 s"),
        ("How do I cancel a run?", "Press Ctrl-C"),
        ("How can a run be stopped?", "Press Ctrl-C"),
        ("Why does every delegate hear of it at once?", "Every delegate is told"),
        ("What happens when the client dies?", "the client: nothing"),
        ("what if the store is dead", "the store: runs wait"),
        ("What is an activation?", "An activation is a session"),
        ("Which command installs it?", "`pip install retinue`"),
        ("What does max_output_tokens do?", "The `max_output_tokens` option"),
        ("what does maxOutputTokens do", "The `max_output_tokens` option"),
        ("When does the budget ledger admit calls?", "The BudgetLedger admits"),
        ("How long are silent children waited for?", "Children that do not answer"),
    ],
)
def test_the_right_sentence_leads(question: str, start: str) -> None:
    assert best(question).startswith(start)


def test_nothing_in_common_is_nothing_found() -> None:
    assert rank(read_sentences(GUIDE), Question.of("Who painted the ceiling?")) == []


def test_coverage_tells_a_passing_mention_from_an_answer() -> None:
    question = Question.of("How is the quarterly revenue of the weather service computed?")
    assert max(item.coverage for item in rank(read_sentences(GUIDE), question)) < 0.4


def test_headings_lend_their_words() -> None:
    text = "# Storage\n\nIt takes 40 MB.\n\n# Memory\n\nIt takes 90 MB."
    assert best("How much storage is taken?", text) == "It takes 40 MB."
    assert best("How much memory is taken?", text) == "It takes 90 MB."


def test_rare_words_count_more_than_common_ones() -> None:
    text = "The run ends well. The run goes on. The run is told. A gryphon ends it."
    assert best("Does a gryphon run?", text) == "A gryphon ends it."


def test_near_repetitions_are_dropped() -> None:
    text = "A lease lasts 15 s.\n\nLeases last 15 s by default.\n\nA lease is renewed by its holder."
    chosen = distinct(rank(read_sentences(text), Question.of("lease")), 5, least_share=0.0)
    assert [item.sentence.line for item in chosen] == [None, None]
    assert (
        len({item.sentence.text for item in chosen} & {"A lease lasts 15 s.", "Leases last 15 s by default."})
        == 1
    )


def test_an_earlier_question_helps_and_does_not_drown_the_new_one() -> None:
    text = "A lease lasts 15 s. The lock is renewed every 5 s. The lease is renewed every 7 s."
    alone = rank(read_sentences(text), Question.of("How often is it renewed?"))
    joined = rank(
        read_sentences(text), Question.of("How often is it renewed?", ["How long does a lease last?"])
    )
    assert {item.sentence.text for item in alone[:2]} == {
        "The lock is renewed every 5 s.",
        "The lease is renewed every 7 s.",
    }
    assert joined[0].sentence.text == "The lease is renewed every 7 s."


def test_a_question_of_small_words_is_about_the_one_before() -> None:
    text = "The provider said what it used. A lease is fenced by its epoch. It was said again."
    asked = Question.of("And what else is said about that?", ["What is a lease?"], ["A lease lasts 15 s."])
    assert rank(read_sentences(text), asked)[0].sentence.text == "A lease is fenced by its epoch."
    alone = rank(read_sentences(text), Question.of("What is said?"))
    assert "said" in alone[0].sentence.text


def test_what_was_said_already_gives_way_when_more_is_asked_for() -> None:
    text = "A lease lasts 15 s and is renewed. A lease is fenced by its epoch."
    said = ["A lease lasts 15 s and is renewed."]
    more = rank(read_sentences(text), Question.of("What else is said about a lease?", ["lease?"], said))
    assert more[0].sentence.text == "A lease is fenced by its epoch."


@pytest.mark.parametrize(
    "words",
    [
        "cancel cancels cancelled cancelling cancellation",
        "lease leases leased leasing",
        "reserve reserves reserved reservation reservations",
        "policy policies",
        "stop stops stopped stopping",
        "expire expires expired expiration",
        "child's child",
    ],
)
def test_forms_of_a_word_share_a_stem(words: str) -> None:
    assert len({stem(word) for word in words.split()}) == 1


@pytest.mark.parametrize("words", ["status state", "bus but", "process press", "host ghost", "is its"])
def test_different_words_do_not(words: str) -> None:
    assert len({stem(word) for word in words.split()}) == 2


def test_identifiers_are_found_by_their_words_and_as_a_whole() -> None:
    assert set(terms("session_conflict")) == {stem("session"), stem("conflict"), "sessionconflict"}
    assert set(terms("SessionConflict")) == set(terms("session_conflict"))
    assert terms("__init__") == terms("init")


def test_other_scripts_are_found() -> None:
    text = "租约持续十五秒。天气很好。"
    assert best("租约多久", text) == "租约持续十五秒。"


def test_speed_of_a_long_part_is_of_the_order_that_a_delegate_can_bear() -> None:
    # Not a benchmark: only something quadratic would miss this by so much.
    text = (GUIDE + "\n") * (240_000 // len(GUIDE))
    began = time.perf_counter()
    rank(read_sentences(text), Question.of("How long does a lease last when the store is down?"))
    assert time.perf_counter() - began < 10.0
