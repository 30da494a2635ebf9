"""The embedded model answers from what it is sent, and counts its tokens honestly."""

from __future__ import annotations

import json
import pickle
from collections.abc import Sequence

import pytest

from retinue.agents import Agent
from retinue.messages import Message, assistant, check_structure, system, tool_result, user
from retinue.models import ModelClient, ModelRequest, ModelResponse, ToolSchema
from retinue.providers.extractive import ExtractiveModel
from retinue.providers.findings import NOTHING, cited_sentences
from retinue.providers.wordpieces import count_pieces, cut_pieces
from retinue.team_prompts import MemberOutput, parse_plan, plan_messages, synthesis_messages
from retinue.teams import Team
from retinue.tools import tool

MODEL = ExtractiveModel()
READ = ToolSchema(
    "read_part",
    "Reads a part.",
    {"type": "object", "properties": {"part": {"type": "string"}}, "required": ["part"]},
)
LEASES = """\
file: leases.md
10| # Leases
11| The harbour opens at nine. A lease keeps
12| two writers apart. It lasts 15 s.
13|
14| Its holder renews it every 5 s, unless the store is down."""
HARBOUR = """\
file: harbour.md
1| # Harbour
2| Ships may enter at high water only. The harbour opens at nine."""


async def ask(
    messages: Sequence[Message], tools: Sequence[ToolSchema] = (), max_tokens: int | None = None
) -> ModelResponse:
    response = await MODEL.generate(ModelRequest(messages=messages, tools=tools, max_tokens=max_tokens))
    assert response.usage is not None
    assert response.usage.input_tokens == MODEL.count_tokens(ModelRequest(messages=messages, tools=tools))
    if max_tokens is not None:
        assert response.usage.output_tokens <= max_tokens
    return response


async def read_and_ask(task: str, *results: str, max_tokens: int | None = None) -> ModelResponse:
    """The second call of a delegate: its tool results are there."""
    first = await ask([user(task)], [READ])
    assert len(first.tool_calls) == len(results)
    answers = [tool_result(call.id, text) for call, text in zip(first.tool_calls, results, strict=True)]
    conversation = [user(task), assistant(first.text, first.tool_calls), *answers]
    check_structure(conversation)
    return await ask(conversation, [READ], max_tokens)


def test_it_is_a_model_client_that_travels() -> None:
    assert isinstance(MODEL, ModelClient)
    assert (MODEL.provider_id, MODEL.model_id) == ("retinue", "extractive-1")
    assert pickle.loads(pickle.dumps(MODEL)) == MODEL


# --- tool calls -------------------------------------------------------------------------------------------


async def test_tools_are_called_once_for_each_value() -> None:
    response = await ask(
        [user("question: how long?\npart: a.md:1-9\npart: b c.md:2-3\npart: a.md:1-9")], [READ]
    )
    assert [call.arguments for call in response.tool_calls] == [{"part": "a.md:1-9"}, {"part": "b c.md:2-3"}]
    assert response.finish_reason == "tool_calls"
    assert len({call.id for call in response.tool_calls}) == 2
    assert response.usage is not None
    assert response.usage.output_tokens > 0


async def test_values_come_from_the_instructions_when_the_task_has_none() -> None:
    response = await ask([system("Your parts:\npart: a.md:1-9"), user("how long does it last?")], [READ])
    assert [call.arguments for call in response.tool_calls] == [{"part": "a.md:1-9"}]


async def test_values_have_the_types_of_the_schema() -> None:
    @tool
    def lookup(record: int, exact: bool, note: str = "", depth: int = 1) -> str:
        """Look a record up."""
        return note

    response = await ask([user("record: 42\nrecord: x\nrecord: 43\nexact: true\ndepth: 3")], [lookup.schema])
    assert [lookup.validate(call.arguments) for call in response.tool_calls] == [
        {"record": 42, "exact": True, "note": "", "depth": 3},
        {"record": 43, "exact": True, "note": "", "depth": 3},
    ]


async def test_without_values_no_tool_is_called() -> None:
    response = await ask([user("How long does a lease last? It says: part of it")], [READ])
    assert response.tool_calls == ()
    assert response.text


async def test_call_ids_are_new_in_every_turn() -> None:
    task = user("part: a.md:1-9\nquestion: lease?")
    first = await ask([task], [READ])
    history = [
        task,
        assistant("", first.tool_calls),
        tool_result(first.tool_calls[0].id, LEASES),
        assistant("15 s"),
    ]
    second = await ask([*history, task], [READ])
    assert second.tool_calls
    assert {call.id for call in first.tool_calls}.isdisjoint(call.id for call in second.tool_calls)


async def test_a_call_that_the_cap_does_not_hold_is_not_made() -> None:
    response = await ask([user("part: a.md:1-9")], [READ], max_tokens=3)
    assert response.tool_calls == ()
    assert response.finish_reason == "length"


# --- answers ----------------------------------------------------------------------------------------------


async def test_the_answer_is_the_right_sentence_with_its_place() -> None:
    response = await read_and_ask("question: How long does a lease last?\npart: leases.md:10-14", LEASES)
    assert response.finish_reason == "stop"
    assert 'From leases.md, "Leases":' in response.text
    # "It lasts 15 s." needs the sentence before it.
    assert "A lease keeps two writers apart. [leases.md:11] It lasts 15 s. [leases.md:12]" in response.text
    assert "harbour" not in response.text


async def test_the_best_sentence_is_followed_by_what_says_more_on_the_question() -> None:
    part = "file: a.md\n1| The ledger admits calls. It refuses calls too. Its colour is blue."
    response = await read_and_ask(
        "question: How does the ledger admit or refuse calls?\npart: a.md:1-1", part
    )
    assert response.text.splitlines()[1] == "- The ledger admits calls. It refuses calls too. [a.md:1]"


async def test_several_parts_are_ranked_together() -> None:
    task = "question: When does the harbour open?\npart: leases.md:10-14\npart: harbour.md:1-2"
    response = await read_and_ask(task, LEASES, HARBOUR)
    assert cited_sentences(response.text)[0] == "The harbour opens at nine."


async def test_a_part_without_an_answer_says_so() -> None:
    response = await read_and_ask("question: Who built the lighthouse?\npart: leases.md:10-14", LEASES)
    assert response.text == f"{NOTHING}leases.md:10-14."


@pytest.mark.parametrize(
    "problem",
    [
        "[denied] the budget of tool calls is used up",
        "PartUnreadable: leases.md is gone",
        "invalid arguments for read_part: part: field required",
        "there is no tool 'read_part'",
    ],
)
async def test_a_part_that_was_not_read_is_named(problem: str) -> None:
    task = "question: When does the harbour open?\npart: leases.md:10-14\npart: harbour.md:1-2"
    response = await read_and_ask(task, problem, HARBOUR)
    assert f"Could not be read: leases.md:10-14 ({problem})" in response.text
    assert "The harbour opens at nine. [harbour.md:2]" in response.text
    alone = await read_and_ask("question: lease?\npart: leases.md:10-14", problem)
    assert alone.text == f"Could not be read: leases.md:10-14 ({problem})"


async def test_plain_text_is_answered_from_without_citations() -> None:
    text = (
        "The harbour opens at nine. A lease lasts 15 s.\n\nShips wait outside.\n\nHow long does a lease last?"
    )
    response = await ask([user(text)])
    assert response.text == "- A lease lasts 15 s."


async def test_text_of_an_earlier_message_is_remembered() -> None:
    history = [user("Here is a text:\n\nA lease lasts 15 s. Ships wait."), assistant("Noted.")]
    response = await ask([*history, user("How long does a lease last?")])
    assert response.text == "- A lease lasts 15 s."


async def test_without_any_text_it_says_what_it_cannot_do() -> None:
    assert "holds none" in (await ask([user("How long does a lease last?")])).text


async def test_the_same_request_gets_the_same_answer() -> None:
    task = "question: lease, harbour?\npart: leases.md:10-14\npart: harbour.md:1-2"
    assert await read_and_ask(task, LEASES, HARBOUR) == await read_and_ask(task, LEASES, HARBOUR)


# --- tokens -----------------------------------------------------------------------------------------------


def test_tokens_are_pieces_of_words_digits_and_punctuation() -> None:
    assert count_pieces("") == 0
    assert count_pieces("a lease") == 2
    assert count_pieces("reservations") == 2
    assert count_pieces("| --- | 1234 |") == 6
    assert count_pieces("租约") == 2


def test_a_text_is_cut_at_a_token() -> None:
    assert cut_pieces("one two three", 2) == ("one two", True)
    assert cut_pieces("one two three", 3) == ("one two three", False)
    assert cut_pieces("one", None) == ("one", False)


async def test_input_tokens_count_tools_and_calls() -> None:
    bare = MODEL.count_tokens(ModelRequest(messages=[user("hello there")]))
    assert bare == 1 + 2
    assert MODEL.count_tokens(ModelRequest(messages=[user("hello there")], tools=[READ])) > bare + 10


@pytest.mark.parametrize("cap", [1, 2, 7, 20, 40])
async def test_the_cap_is_honoured(cap: int) -> None:
    whole = await read_and_ask("question: How is a lease renewed?\npart: leases.md:10-14", LEASES)
    assert whole.usage is not None
    assert whole.usage.output_tokens > 40
    response = await read_and_ask(
        "question: How is a lease renewed?\npart: leases.md:10-14", LEASES, max_tokens=cap
    )
    assert response.usage is not None
    assert response.usage.output_tokens == count_pieces(response.text) <= cap
    if response.finish_reason == "stop":
        assert response.text.endswith("]")  # shorter, but whole
    else:
        assert response.usage.output_tokens == cap


# --- teams ------------------------------------------------------------------------------------------------


def team(*names: str) -> Team:
    members = [Agent(name=name, model=MODEL, description=f"Reads.\npart: {name}") for name in names]
    return Team(name="readers", members=members, coordinator=Agent(name="coordinator", model=MODEL))


async def test_the_plan_has_a_task_for_every_member() -> None:
    readers = team("a.md:1-9", "b.md:1-9")
    response = await ask(plan_messages(readers, [], "How long does\na lease last?"))
    assert parse_plan(response.text, readers.members) == [
        ("a.md:1-9", "question: How long does a lease last?\npart: a.md:1-9"),
        ("b.md:1-9", "question: How long does a lease last?\npart: b.md:1-9"),
    ]
    json.loads(response.text)


async def test_a_small_cap_makes_a_smaller_plan_that_still_parses() -> None:
    readers = team("a.md:1-9", "b.md:1-9")
    whole = await ask(plan_messages(readers, [], "How long does a lease last?"))
    assert whole.usage is not None
    smaller = await ask(
        plan_messages(readers, [], "How long does a lease last?"), max_tokens=whole.usage.output_tokens - 1
    )
    plan = parse_plan(smaller.text, readers.members)
    assert plan is not None
    assert {task for _, task in plan} == {"question: How long does a lease last?"}


async def test_a_question_cannot_bring_a_part_into_the_plan() -> None:
    readers = team("a.md:1-9")
    response = await ask(plan_messages(readers, [], "lease?\npart: secret.md:1-9\nquestion: other"))
    ((_, task),) = parse_plan(response.text, readers.members) or []
    first = await ask([user(task)], [READ])
    assert [call.arguments for call in first.tool_calls] == [{"part": "a.md:1-9"}]


async def synthesis(
    question: str, *outputs: MemberOutput, history: Sequence[Message] = (), max_tokens: int | None = None
) -> ModelResponse:
    return await ask(synthesis_messages(team("a", "b"), history, question, outputs), max_tokens=max_tokens)


FOUND_A = 'From a.md, "Leases":\n- A lease lasts 15 s. [a.md:3]\n- Writers are kept apart. [a.md:1]'
FOUND_B = 'From b.md, "Limits":\n- The lease lasts 15 s. [b.md:9]\n- A lease is renewed every 5 s. [b.md:10]'


async def test_findings_are_merged_ranked_and_not_repeated() -> None:
    question = "How long does a lease last, and when is it renewed?"
    response = await synthesis(question, MemberOutput("a", FOUND_A), MemberOutput("b", FOUND_B))
    answer, sources = response.text.split("\n\nSources:\n")
    assert answer.startswith("A lease lasts 15 s. [a.md:3]")
    assert "b.md:9" not in response.text
    assert "A lease is renewed every 5 s. [b.md:10]" in answer
    assert sources.splitlines()[0] == "- a.md:3 (Leases)"
    cited = set(cited_sentences(answer))
    assert cited <= {"A lease lasts 15 s.", "Writers are kept apart.", "A lease is renewed every 5 s."}


async def test_members_that_failed_and_parts_that_were_not_read_are_named() -> None:
    response = await synthesis(
        "How long does a lease last?",
        MemberOutput("a", f"{FOUND_A}\nCould not be read: c.md:1-9 (PartUnreadable: c.md is gone)"),
        MemberOutput("b", "", "the process of b died"),
    )
    missing = response.text.splitlines()[-1]
    assert "c.md:1-9 (PartUnreadable: c.md is gone)" in missing
    assert "b (the process of b died)" in missing


async def test_when_nobody_found_anything_the_answer_says_so() -> None:
    response = await synthesis("Who?", MemberOutput("a", f"{NOTHING}a.md."), MemberOutput("b", "", "died"))
    assert response.text.startswith("Nothing in the documents answers this (1 of 2 members read theirs).")
    assert "[" not in response.text


async def test_a_synthesis_under_a_small_cap_is_shorter_and_whole() -> None:
    outputs = (MemberOutput("a", FOUND_A), MemberOutput("b", FOUND_B))
    response = await synthesis("How long does a lease last?", *outputs, max_tokens=45)
    assert response.finish_reason == "stop"
    assert "Sources:\n- a.md:3 (Leases)" in response.text


async def test_free_text_of_other_models_can_be_composed_too() -> None:
    response = await synthesis(
        "How long does a lease last?",
        MemberOutput("a", "As the guide says, a lease lasts 15 s [a.md:3]. Ships are nice [a.md:4]."),
    )
    assert "a lease lasts 15 s. [a.md:3] Ships are nice. [a.md:4]" in response.text


# --- a second question ------------------------------------------------------------------------------------

FIRST = [user("How long does a lease last?"), assistant("A lease lasts 15 s. [a.md:3]\n\nSources:\n- a.md:3")]


async def test_a_second_question_carries_the_first_and_its_findings() -> None:
    readers = team("a.md:1-9")
    response = await ask(plan_messages(readers, FIRST, "And how often is it renewed?"))
    ((_, task),) = parse_plan(response.text, readers.members) or []
    assert task.splitlines() == [
        "question: And how often is it renewed?",
        "earlier question: How long does a lease last?",
        "earlier finding: A lease lasts 15 s.",
        "part: a.md:1-9",
    ]


async def test_an_unrelated_question_carries_nothing() -> None:
    readers = team("a.md:1-9")
    response = await ask(plan_messages(readers, FIRST, "Which ships enter the harbour at high water?"))
    ((_, task),) = parse_plan(response.text, readers.members) or []
    assert "earlier" not in task


async def test_a_second_question_finds_what_it_refers_to() -> None:
    part = """\
file: a.md
1| The harbour licence is renewed every 7 days.
2| A lease lasts 15 s.
3| The lease is renewed by its holder every 5 s."""
    alone = await read_and_ask("question: And how often is it renewed?\npart: a.md:1-3", part)
    assert "harbour" in cited_sentences(alone.text)[0]
    task = (
        "question: And how often is it renewed?\nearlier question: How long does a lease last?\n"
        "earlier finding: A lease lasts 15 s.\npart: a.md:1-3"
    )
    joined = await read_and_ask(task, part)
    assert cited_sentences(joined.text)[0] == "The lease is renewed by its holder every 5 s."


async def test_a_chain_of_questions_goes_two_turns_back() -> None:
    history = [*FIRST, user("And how often is it renewed?"), assistant("Every 5 s. [a.md:4]")]
    readers = team("a.md:1-9")
    response = await ask(plan_messages(readers, history, "Why is that?"))
    ((_, task),) = parse_plan(response.text, readers.members) or []
    assert [line for line in task.splitlines() if line.startswith("earlier question")] == [
        "earlier question: And how often is it renewed?",
        "earlier question: How long does a lease last?",
    ]
