"""Findings of the embedded model: cited sentences as text, and the same text read back.

A finding is a line of a list, ``- It waits 15 s. [guide.md:12] Then it gives up. [guide.md:13]``, under a
line that says where it stands, ``From guide.md, "Timeouts":``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from retinue.providers.passages import Sentence, read_sentences
from retinue.providers.questions import Question
from retinue.providers.ranking import distinct, rank
from retinue.providers.words import terms

MOST_FINDINGS, LEAST_SHARE = 5, 0.5
"""Findings of one part: how many at most, and what share of the best one's score each needs."""
LEAST_COVERAGE, USUAL_WORDS = 0.4, 4
"""Share of the question that a sentence with its surroundings must cover to say anything on it; less of a
question that has more main words than usual, since no one sentence answers all of that."""
NOTHING = "Nothing on this in "
NOT_READ = "Could not be read: "
_ADJACENT_LINES = 3
_MOST_BACK = 3
"""Sentences of one finding that lean on each other."""

_CITATION = re.compile(r"\[((?:[^\[\]\n]|\[[^\[\]\n]*\])+?):(\d+)\]")
_FROM = re.compile(r'From (.+?)(?:, "(.*)")?:\s*\Z')
_BULLET = re.compile(r"\s*(?:[-*•]|\d{1,3}[.)])\s+")


@dataclass(frozen=True)
class Finding:
    """Sentences that belong together, each with its citation, and the heading that they stand under."""

    pieces: tuple[tuple[str, str], ...]
    """(sentence, citation); an empty citation where there is none."""
    heading: str = ""

    @property
    def text(self) -> str:
        """The sentences with their citations."""
        return " ".join(f"{sentence} {citation}".rstrip() for sentence, citation in self.pieces)

    @property
    def plain(self) -> str:
        """The sentences alone."""
        return " ".join(sentence for sentence, _ in self.pieces)

    @property
    def places(self) -> list[tuple[str, int]]:
        """File and line of each citation."""
        return [(match[1], int(match[2])) for _, cited in self.pieces for match in _CITATION.finditer(cited)]


@dataclass
class Report:
    """What an answer of a member says: its findings, and what it could not say."""

    findings: list[Finding] = field(default_factory=list)
    not_read: list[str] = field(default_factory=list)


def find(sentences: Sequence[Sentence], question: Question) -> list[Finding]:
    """The few sentences that answer a question, each with those that it leans on; none when none does."""
    least = LEAST_COVERAGE * min(1.0, USUAL_WORDS / max(1, len(question.main)))
    ranked = [item for item in rank(sentences, question) if item.coverage >= least]
    chosen = distinct(ranked, MOST_FINDINGS, least_share=LEAST_SHARE)
    after = {id(sentence.before): sentence for sentence in sentences if sentence.before is not None}
    return _joined([item.sentence for item in chosen], after, question)


def _joined(chosen: Sequence[Sentence], after: Mapping[int, Sentence], question: Question) -> list[Finding]:
    """Findings of sentences, best first, with the neighbours that make them readable.

    A sentence that leans back brings those before it. The next one follows if it was chosen too, and after
    the best also if it says more on the question ("It ...").
    """
    wanted = set(map(id, chosen))
    given: set[int] = set()
    findings: list[Finding] = []
    for sentence in chosen:
        chain = [sentence]
        while chain[0].leans_back and chain[0].before is not None and len(chain) < _MOST_BACK:
            chain.insert(0, chain[0].before)
        follower = after.get(id(sentence))
        if follower is not None and (
            id(follower) in wanted or (not findings and _says_more(follower, question))
        ):
            chain.append(follower)
        chain = [one for one in chain if id(one) not in given]
        given.update(map(id, chain))
        if chain:
            findings.append(Finding(_pieces(chain), sentence.headings[-1] if sentence.headings else ""))
    return findings


def _says_more(sentence: Sentence, question: Question) -> bool:
    about = question.defines is not None or not question.main.isdisjoint(terms(sentence.text))
    return sentence.leans_back and about


def _pieces(chain: Sequence[Sentence]) -> tuple[tuple[str, str], ...]:
    pieces: list[tuple[str, str]] = []
    for sentence in chain:
        if pieces and pieces[-1][1] == sentence.citation:
            pieces[-1] = (f"{pieces[-1][0]} {sentence.text}", sentence.citation)
        else:
            pieces.append((sentence.text, sentence.citation))
    return tuple(pieces)


def write_findings(findings: Sequence[Finding]) -> str:
    """Findings as text, those of one place under one line that names it."""
    lines: list[str] = []
    last = None
    for finding in findings:
        file = finding.places[0][0] if finding.places else ""
        place = (file, finding.heading)
        if place != last and file:
            lines.append(f'From {file}, "{finding.heading}":' if finding.heading else f"From {file}:")
        last = place
        lines.append(f"- {finding.text}")
    return "\n".join(lines)


def read_findings(text: str) -> Report:
    """Findings read back from an answer; of free text with citations too."""
    report = Report()
    heading = ""
    for line in text.splitlines():
        place = _FROM.match(line)
        if place:
            heading = place[2] or ""
        elif line.startswith(NOT_READ):
            report.not_read.append(line.removeprefix(NOT_READ))
        elif line.strip() and not line.startswith(NOTHING):
            report.findings.extend(_read_line(_BULLET.sub("", line, count=1), heading))
    return report


def _read_line(line: str, heading: str) -> list[Finding]:
    pieces: list[tuple[str, str]] = []
    position = 0
    for match in _CITATION.finditer(line):
        sentence = line[position : match.start()].strip(" ;,")
        if pieces:
            sentence = sentence.lstrip(".!?: ")  # the stop that follows a citation belongs before it
        if sentence:
            pieces.append((sentence, match[0]))
        elif pieces:
            pieces[-1] = (pieces[-1][0], f"{pieces[-1][1]} {match[0]}")
        position = match.end()
    if pieces:
        return [Finding(tuple(pieces), heading)]
    return [Finding(((sentence.text, ""),), heading) for sentence in read_sentences(line)]


def cited_sentences(text: str) -> list[str]:
    """The sentences of an answer that carry a citation."""
    report = read_findings(text)
    return [sentence for finding in report.findings for sentence, cited in finding.pieces if cited]


def compose(groups: Sequence[Sequence[Finding]], question: Question, most: int) -> str:
    """One answer from the findings of several members, each best first: ranked together, with sources."""
    findings: list[Finding] = []
    sentences: list[Sentence] = []
    for place in range(max(map(len, groups), default=0)):
        for group in groups:
            if place < len(group):
                findings.append(group[place])
                sentences.append(_as_sentence(group[place], place))
    # Every finding has the question's main words: how rare they are among findings says little.
    chosen = distinct(rank(sentences, question, least_idf=0.6), most, least_share=0.5)
    of = {id(sentence): finding for sentence, finding in zip(sentences, findings, strict=True)}
    picked = [of[id(item.sentence)] for item in chosen] or findings[:most]
    lead, others = picked[:1], picked[1:]
    # What follows the best finding in its text reads on from it.
    for other in sorted(others, key=lambda finding: finding.places[:1]):
        if _follows(lead[-1], other):
            others.remove(other)
            lead.append(other)
    paragraphs = [" ".join(_closed(finding) for finding in lead)]
    if others:
        paragraphs.append("\n".join(["Also:", *(f"- {finding.text}" for finding in others)]))
    sources = _sources([*lead, *others])
    if sources:
        paragraphs.append("\n".join(["Sources:", *sources]))
    return "\n\n".join(paragraphs)


def _as_sentence(finding: Finding, place: int) -> Sentence:
    pieces = tuple(sentence for sentence, _ in finding.pieces)
    return Sentence(finding.plain, None, None, headings=(finding.heading,), pieces=pieces, rank=place)


def _follows(one: Finding, other: Finding) -> bool:
    if not one.places or not other.places or one.heading != other.heading:
        return False
    (file, line), (other_file, other_line) = one.places[-1], other.places[0]
    return file == other_file and line <= other_line <= line + _ADJACENT_LINES


def _closed(finding: Finding) -> str:
    """A finding for a paragraph: what is no sentence gets a full stop, so that the next can follow."""
    pieces = [
        (sentence if sentence.endswith((".", "!", "?", ":", "…", "`", "。")) else f"{sentence}.", cited)
        for sentence, cited in finding.pieces
    ]
    return Finding(tuple(pieces), finding.heading).text


def _sources(findings: Sequence[Finding]) -> list[str]:
    """A line for each place: ``- guide.md:12, 13 (Timeouts)``."""
    lines: dict[tuple[str, str], list[int]] = {}
    for finding in findings:
        for file, line in finding.places:
            numbers = lines.setdefault((file, finding.heading), [])
            if line not in numbers:
                numbers.append(line)
    return [
        f"- {file}:{', '.join(map(str, sorted(numbers)))}" + (f" ({heading})" if heading else "")
        for (file, heading), numbers in lines.items()
    ]
