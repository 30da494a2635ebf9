"""The embedded model: deterministic, needs no network, and really reads what it is given.

It ranks the sentences of the supplied text against the question and answers with the best ones and their
places. Everything it says comes from the request alone, and it counts its tokens as a remote model would.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from retinue.budgets import Usage
from retinue.messages import Message, ToolCall
from retinue.models import FinishReason, ModelRequest, ModelResponse
from retinue.providers.findings import (
    MOST_FINDINGS,
    NOT_READ,
    NOTHING,
    Finding,
    cited_sentences,
    compose,
    find,
    read_findings,
    write_findings,
)
from retinue.providers.passages import Sentence, is_numbered, read_sentences
from retinue.providers.questions import Question
from retinue.providers.value_lines import arguments_in
from retinue.providers.wordpieces import count_calls, count_messages, count_pieces, cut_pieces
from retinue.team_prompts import MemberOutput, plan_members, synthesis_material

MOST_IN_ANSWER = 6
"""Findings in a composed answer."""
_EARLIER_TURNS = 2
_EARLIER_FINDINGS = 4
_LONGEST_QUESTION = 2_000
"""Characters of a question that a task repeats."""

_TOOL_PROBLEM = re.compile(
    r"\[denied\]|\[no result|invalid arguments for |there is no tool |[A-Za-z_.]*[A-Z][A-Za-z]*: "
)
_TASK_LINE = re.compile(r"(question|earlier question|earlier finding): (.*)\Z")
_REFERS_BACK = re.compile(
    r"\b(?:it|its|they|them|their|this|that|these|those|he|she|him|her|there|then|same|such|one|ones|former|latter"
    r"|above|earlier|previous|you said|more|else|again|instead|also|too|otherwise)\b"
    r"|\A\W*(?:and|but|or|so|why|how so|what about|how about|what if|in that case|when|where|who|really)\b",
    re.IGNORECASE,
)
_FEW_WORDS = 3
"""A question with fewer words of its own than this may lean on the one before it."""


@dataclass(frozen=True)
class ExtractiveModel:
    """A model client that answers with sentences of the text that it is given. Takes no options."""

    @property
    def provider_id(self) -> str:
        return "retinue"

    @property
    def model_id(self) -> str:
        return "extractive-1"

    def count_tokens(self, request: ModelRequest) -> int:
        """Exactly what the request will count as input."""
        return count_messages(request.messages, request.tools)

    async def generate(self, request: ModelRequest) -> ModelResponse:
        """Plan, call tools, answer from their results, or compose: whichever the request asks for."""
        messages, used = request.messages, self.count_tokens(request)
        calls, text = _tool_calls(request), ""
        finish: FinishReason = "stop"
        if calls:
            fitting = list(_fitting(calls, request.max_tokens))
            if fitting:
                usage = Usage(input_tokens=used, output_tokens=count_calls(fitting))
                return ModelResponse(tool_calls=tuple(fitting), usage=usage, finish_reason="tool_calls")
            text = f"I would have to call {calls[0].name}, but the output cap does not hold the call."
            finish = "length"
        elif (members := plan_members(messages)) is not None:
            text = _fit(_plans(messages, members), request.max_tokens)
        elif (material := synthesis_material(messages)) is not None:
            text = _fit(_syntheses(messages, *material), request.max_tokens)
        else:
            text = _fit(await _answers(messages), request.max_tokens)
        text, was_cut = cut_pieces(text, request.max_tokens)
        usage = Usage(input_tokens=used, output_tokens=count_pieces(text))
        return ModelResponse(text=text, usage=usage, finish_reason="length" if was_cut else finish)


def _fit(candidates: Iterable[str], limit: int | None) -> str:
    """The first candidate that the output cap holds whole, else the last, which will be cut."""
    text = ""
    for text in candidates:
        if limit is None or count_pieces(text) <= limit:
            break
    return text


# --- tool calls -------------------------------------------------------------------------------------------


def _tool_calls(request: ModelRequest) -> list[ToolCall]:
    """Calls for the tools whose required parameters are given as ``parameter: value`` lines."""
    if not request.tools or _turn(request.messages)[1]:
        return []
    question = _turn(request.messages)[0]
    sources = [question, *(message.text for message in request.messages if message.role == "system")]
    number = 1 + sum(len(message.tool_calls) for message in request.messages)
    calls: list[ToolCall] = []
    for schema in request.tools:
        for arguments in arguments_in(schema, sources):
            calls.append(ToolCall(f"call_{number + len(calls)}", schema.name, arguments))
    return calls


def _fitting(calls: Sequence[ToolCall], limit: int | None) -> Iterator[ToolCall]:
    used = 0
    for call in calls:
        used += count_calls([call])
        if limit is not None and used > limit:
            return
        yield call


# --- the plan ---------------------------------------------------------------------------------------------


def _plans(messages: Sequence[Message], members: Sequence[tuple[str, str]]) -> Iterator[str]:
    """A plan with a task for every member, then shorter ones for a small output cap."""
    asked, _ = _turn(messages)
    question = " ".join(asked.split())[:_LONGEST_QUESTION]
    earlier, findings = _earlier(messages, question)
    context = [f"earlier question: {text}" for text in earlier]
    context += [f"earlier finding: {text}" for text in findings]
    for lines, with_parts in (
        ([f"question: {question}", *context], True),
        ([f"question: {question}"], False),
    ):
        plan = []
        for name, description in members:
            parts = re.findall(r"^part: \S.*$", description, re.MULTILINE) if with_parts else []
            plan.append({"member_id": name, "task": "\n".join([*lines, *parts])})
        yield json.dumps(plan, ensure_ascii=False, indent=1)


def _earlier(messages: Sequence[Message], question: str) -> tuple[list[str], list[str]]:
    """The earlier questions that this one may refer to, the latest first, and the sentences that answered."""
    questions: list[str] = []
    findings: list[str] = []
    dialogue = [
        message for message in messages[:-1] if message.role in ("user", "assistant") and message.text
    ]
    while dialogue and len(questions) < _EARLIER_TURNS and _may_refer_back(question):
        answer = dialogue.pop().text if dialogue[-1].role == "assistant" else ""
        while dialogue and dialogue[-1].role == "assistant":
            dialogue.pop()
        if not dialogue:
            break
        question = " ".join(dialogue.pop().text.split())[:_LONGEST_QUESTION]
        questions.append(question)
        findings.extend(cited_sentences(answer)[:_EARLIER_FINDINGS])
    return questions, findings[: 2 * _EARLIER_FINDINGS]


def _may_refer_back(question: str) -> bool:
    return bool(_REFERS_BACK.search(question)) or len(Question.of(question).weights) < _FEW_WORDS


# --- answers ----------------------------------------------------------------------------------------------


async def _answers(messages: Sequence[Message]) -> Iterator[str]:
    """An answer from this turn's tool results, or else from the text in the messages; then shorter ones."""
    asked, results = _turn(messages)
    question, rest = _read_task(messages, asked)
    names = _call_names(messages)
    sentences: list[Sentence] = []
    read: list[str] = []
    not_read: list[str] = []
    for result in results:
        name = names.get(result.tool_call_id or "", "the tool")
        if not is_numbered(result.text) and _TOOL_PROBLEM.match(result.text):
            not_read.append(f"{name} ({_one_line(result.text)})")
            continue
        read.append(name)
        sentences.extend(read_sentences(result.text))
        await asyncio.sleep(0)  # a long part must not keep a cancellation waiting
    if not results:
        sentences = [one for text in rest for one in read_sentences(text)]
    notes = [f"{NOT_READ}{problem}" for problem in not_read]
    findings = find(sentences, question)
    if not findings and not sentences and not results:
        return iter(["I answer from text that I am given, and this request holds none beside the question."])
    if not findings:
        what = ", ".join(read) or "the text"
        return iter(["\n".join([*notes, *([f"{NOTHING}{what}."] if read or not results else [])])])
    return (
        "\n".join([write_findings(findings[:most]), *notes])
        for most in range(min(len(findings), MOST_FINDINGS), 0, -1)
    )


def _read_task(messages: Sequence[Message], asked: str) -> tuple[Question, list[str]]:
    """The question of the latest user message, and the texts that it may be answered from."""
    fields: dict[str, list[str]] = {"question": [], "earlier question": [], "earlier finding": []}
    others: list[str] = []
    for line in asked.splitlines():
        match = _TASK_LINE.match(line)
        if match:
            fields[match[1]].append(match[2])
        else:
            others.append(line)
    if fields["question"]:
        asked_for = " ".join(fields["question"])
        return Question.of(asked_for, fields["earlier question"], fields["earlier finding"]), [
            "\n".join(others)
        ]
    asked_for, supplied = _question_and_text(asked)
    before = [message.text for message in messages[:-1] if message.role in ("user", "tool") and message.text]
    earlier, findings = _earlier([*messages[: _last_user(messages) + 1]], asked_for)
    return Question.of(asked_for, earlier, findings), [*before, supplied]


def _question_and_text(asked: str) -> tuple[str, str]:
    """A message taken apart: its question is the last paragraph, or the first when only that one asks."""
    without_values = re.sub(r"^[ \t]*[a-z_]+:[ \t]*\S+[ \t]*$", "", asked, flags=re.MULTILINE)
    paragraphs = [paragraph for paragraph in re.split(r"\n\s*\n", without_values) if paragraph.strip()]
    if len(paragraphs) < 2:
        return without_values.strip() or asked, ""
    first, last = paragraphs[0], paragraphs[-1]
    if first.rstrip().endswith("?") and not last.rstrip().endswith("?"):
        return first, "\n\n".join(paragraphs[1:])
    if first.rstrip().endswith(":") and not last.rstrip().endswith("?"):
        return first, "\n\n".join(paragraphs[1:])
    return last, "\n\n".join(paragraphs[:-1])


def _syntheses(messages: Sequence[Message], request: str, outputs: Sequence[MemberOutput]) -> Iterator[str]:
    """One answer from the members' outputs, then shorter ones."""
    earlier, said = _earlier(messages, request)
    question = Question.of(request, earlier, said)
    findings: list[list[Finding]] = []
    missing: list[str] = []
    for output in outputs:
        report = read_findings(output.text)
        findings.append(report.findings)
        missing.extend(report.not_read)
        if output.error is not None:
            missing.append(f"{output.name} ({_one_line(output.error)})")
    notes = f"\n\nNot read, so it may be missing above: {'; '.join(missing)}." if missing else ""
    if not any(findings):
        read = len(outputs) - sum(output.error is not None for output in outputs)
        yield f"Nothing in the documents answers this ({read} of {len(outputs)} members read theirs).{notes}"
        return
    for most in range(MOST_IN_ANSWER, 0, -1):
        yield compose(findings, question, most) + notes


# --- the request ------------------------------------------------------------------------------------------


def _last_user(messages: Sequence[Message]) -> int:
    return max((index for index, message in enumerate(messages) if message.role == "user"), default=-1)


def _turn(messages: Sequence[Message]) -> tuple[str, list[Message]]:
    """The latest user message, and the tool results after it."""
    last = _last_user(messages)
    if last < 0:
        return "", [message for message in messages if message.role == "tool"]
    return messages[last].text, [message for message in messages[last:] if message.role == "tool"]


def _call_names(messages: Sequence[Message]) -> dict[str, str]:
    """What each tool call was for: the values that it was given."""
    return {
        call.id: ", ".join(map(str, call.arguments.values())) or call.name
        for message in messages
        for call in message.tool_calls
    }


def _one_line(text: str) -> str:
    short = " ".join(text.split())
    return short if len(short) <= 200 else f"{short[:199]}…"
