"""Questions as the embedded model looks for them: weighted words, and the form that an answer would have."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from retinue.providers.passages import Sentence
from retinue.providers.words import FILLER, KEPT, STOP, stems, terms, without_stops, written

_KEPT_WEIGHT, _FILLER_WEIGHT, _PIECE_WEIGHT, _QUOTED_WEIGHT = 0.4, 0.25, 0.3, 1.5
"""What small words, words of asking, pieces of names and quoted words count; any other word counts 1."""
_EARLIER_SHARES, _MEANT_SHARES, _FINDING_WEIGHT, _FINDING_WORDS = (0.5, 0.25), (0.8, 0.3), 0.15, 8
"""What words of the questions before count, more where the question says "it"; and the most common words of
the sentences that answered them."""

_DEFINITION = re.compile(
    r"\s*(?:what|who)(?:'s|\s+is|\s+are|\s+was|\s+does)\s+(?:an?\s+|the\s+)?(?P<term>[\w .`'-]+?)"
    r"(?:\s+(?:mean|stand\s+for)\b.*)?\s*\??\s*\Z"
    r"|\s*(?:define|explain)\s+(?P<other>[\w .`'-]+?)\s*[.?]?\s*\Z",
    re.IGNORECASE,
)
_AMOUNT = re.compile(
    r"\bhow (?:many|much|long|large|big|small|often|fast|slow|old|quickly|far|high|deep)\b"
    r"|\bwhat (?:version|number)\b",
    re.IGNORECASE,
)
_NUMBER = re.compile(
    r"\d|\b(?:one|two|three|four|five|six|seven|eight|nine|ten|twelve|hundred|thousand|half|quarter|never|always|once"
    r"|twice|unlimited)\b",
    re.IGNORECASE,
)
_WHEN = re.compile(r"\Awhen\b|\bsince when\b|\bhow (?:long|soon|often)\b", re.IGNORECASE)
_TIME = re.compile(
    r"\d\s?(?:ms|s|sec|seconds?|min|minutes?|h|hours?|days?|weeks?|months?|years?)\b"
    r"|\b(?:after|before|until|once|as soon as|whenever)\b",
    re.IGNORECASE,
)
_REASON = re.compile(r"\bwhy\b|\bwhat for\b|\breason\b", re.IGNORECASE)
_BECAUSE = re.compile(
    r"\b(?:because|so that|since|therefore|otherwise|in order to|the reason|that is why|hence|cannot)\b"
    r"|, so\b",
    re.IGNORECASE,
)
_COMMAND = re.compile(
    r"\bcommands?\b|\bhow (?:do|can|could|should|would|to) (?:i|we|you|one)?\b"
    r"|\b(?:install|flag|invoke|syntax)\b",
    re.IGNORECASE,
)
_PRONOUN = re.compile(r"\b(?:it|its|they|them|their|this|that|these|those|he|him|she|her)\b", re.IGNORECASE)
_MORE = re.compile(r"\b(?:more|else|others?|another|further|besides|apart from|beyond)\b", re.IGNORECASE)
_CODE = re.compile(r"`([^`]+)`")
_SUBJECT = re.compile(
    r"\W*((?:[\w'-]+[ `\"\u201d]+){0,3}?[\w'-]+)[`\"\u201d)]*(?:\s*\([^)]*\))?"
    r"\s*(?:(?:is|are|was|were|means)\b|[:\u2014\u2013.]\s|[:.]\Z)",
    re.IGNORECASE,
)
_QUOTED = re.compile(r"`([^`]+)`|\"([^\"]+)\"|\u201c([^\u201d]+)\u201d")

_SHORT_WORDS, _READABLE_WORDS, _LENGTH_STEP = 5, 28, 0.012
"""Fewer words make a fragment; more than are readable cost a sentence so much each."""
_PHRASE_BONUS, _MOST_PHRASES = 0.2, 3


@dataclass(frozen=True)
class Question:
    """What is looked for: weighted words, and what kind of answer the question's form asks for."""

    text: str
    weights: Mapping[str, float]
    """Each stem and what it counts."""
    hints: frozenset[str] = frozenset()
    """Those of them that come from the findings of earlier answers only."""
    forms: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """Each stem as the question writes it: "activation" is closer to "activations" than to "active"."""
    pairs: frozenset[tuple[str, str]] = frozenset()
    """Neighbouring stems, stop words apart."""
    phrases: frozenset[tuple[str, str, str]] = frozenset()
    """Three stems in a row, stop words included, with at least one that counts."""
    defines: str | None = None
    """The term that the question asks the meaning of."""
    wants_number: bool = False
    wants_time: bool = False
    wants_reason: bool = False
    wants_command: bool = False
    already_said: frozenset[str] = frozenset()
    """Fingerprints of the sentences that an earlier answer gave."""
    wants_more: bool = False
    """It asks for something else than was said."""

    @classmethod
    def of(
        cls, text: str, earlier_questions: Sequence[str] = (), earlier_findings: Sequence[str] = ()
    ) -> Question:
        """The question with, at less weight, what it may refer to.

        Args:
            text: the question.
            earlier_questions: those before it, the latest first.
            earlier_findings: sentences that answered them.
        """
        weights = _weights(text)
        if not earlier_questions and all(weight < 1.0 for weight in weights.values()):
            weights = dict.fromkeys(weights, 1.0)  # nothing but filler: then the filler is the question
        shares = _MEANT_SHARES if _PRONOUN.search(text) else _EARLIER_SHARES
        for share, earlier in zip(shares, earlier_questions, strict=False):
            for word, weight in _weights(earlier).items():
                weights.setdefault(word, weight * share)
        common = Counter(word for finding in earlier_findings for word in _weights(finding))
        hints = [word for word, _ in common.most_common(_FINDING_WORDS) if word not in weights]
        weights.update(dict.fromkeys(hints, _FINDING_WEIGHT))
        words = terms(text)
        return cls(
            text=text,
            weights=weights,
            hints=frozenset(hints),
            forms=_forms(" ".join([text, *earlier_questions, *earlier_findings])),
            pairs=frozenset(itertools.pairwise(without_stops(words))),
            phrases=frozenset(
                phrase for phrase in triples(words) if any(weights.get(word, 0.0) >= 1.0 for word in phrase)
            ),
            defines=_defined(text),
            wants_number=bool(_AMOUNT.search(text)),
            wants_time=bool(_WHEN.search(text)),
            wants_reason=bool(_REASON.search(text)),
            wants_command=bool(_COMMAND.search(text)),
            already_said=frozenset(map(fingerprint, earlier_findings)),
            wants_more=bool(_MORE.search(text)),
        )

    @property
    def main(self) -> frozenset[str]:
        """The stems that the question is about, without small words and words of asking."""
        return frozenset(word for word, weight in self.weights.items() if weight >= 1.0)

    def fit(self, sentence: Sentence, words: Sequence[str]) -> float:
        """How well a sentence's form fits the question's, around 1; ``words`` are the sentence's stems."""
        text, factor = sentence.text, 1.0
        if len(words) < _SHORT_WORDS and sentence.kind == "text" and ":" not in text:
            factor *= 0.75
        factor /= 1 + _LENGTH_STEP * max(0, len(words) - _READABLE_WORDS)
        if text.endswith(":"):
            factor *= 0.7
        if text.endswith("?"):
            factor *= 0.6
        if sentence.kind == "code":
            factor *= 1.15 if self.wants_command else 0.7
        elif self.wants_command:
            in_code = {word for code in _CODE.findall(text) for word in terms(code)}
            factor *= 0.85 if in_code.isdisjoint(self.weights) else 1.3
        if self.wants_number:
            factor *= 1.25 if _NUMBER.search(text) else 0.9
        if self.wants_time and _TIME.search(text):
            factor *= 1.2
        if self.wants_reason and _BECAUSE.search(text):
            factor *= 1.25
        shared = len(self.phrases.intersection(triples(words))) if self.phrases else 0
        return factor * (1 + _PHRASE_BONUS * min(_MOST_PHRASES, shared)) * self._subject(text)

    def _subject(self, text: str) -> float:
        """More than 1 for a sentence that is about what is asked: "A hop is ...", "Hop (one call): ..."."""
        start = _SUBJECT.match(text)
        subject = without_stops(terms(start[1])) if start else []
        if subject and self.defines == " ".join(subject):
            return 1.8
        if subject and all(self.weights.get(word, 0.0) >= _EARLIER_SHARES[0] for word in subject):
            return 1.4
        if self.defines and " ".join(without_stops(terms(text[:80]))).startswith(self.defines):
            return 1.2
        return 1.0


def fingerprint(text: str) -> str:
    """A sentence without case, spacing and punctuation, to know it again."""
    return " ".join(written(text.lower()))


def triples(words: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """Every three words in a row."""
    return zip(words, words[1:], words[2:], strict=False)


def _weights(text: str) -> dict[str, float]:
    weights: dict[str, float] = {}
    # The measure in "how large" says what kind of answer is wanted, not what it is about.
    for name in written(_AMOUNT.sub(" ", text)):
        *pieces, whole = stems(name)
        for word, most in ((whole, 1.0), *((piece, _PIECE_WEIGHT) for piece in pieces)):
            if word in KEPT:
                weight = _KEPT_WEIGHT
            elif word in STOP or (len(word) == 1 and word.isascii() and not word.isdigit()):
                continue
            else:
                weight = _FILLER_WEIGHT if word in FILLER else most
            weights[word] = max(weights.get(word, 0.0), weight)
    for match in _QUOTED.finditer(text):
        for word in terms(next(filter(None, match.groups()))):
            if word in weights:
                weights[word] = _QUOTED_WEIGHT
    return weights


def _forms(text: str) -> dict[str, frozenset[str]]:
    forms: dict[str, set[str]] = {}
    for word in written(text):
        lowered = word.lower()
        # Without its last letter, "leases" is found in "leased" and "policy" in "policies".
        start = lowered[:-1] if len(lowered) > 4 else lowered
        for part in stems(word):
            forms.setdefault(part, set()).add(start)
    return {part: frozenset(starts) for part, starts in forms.items()}


def _defined(text: str) -> str | None:
    match = _DEFINITION.match(text)
    if match is None:
        return None
    words = without_stops(terms(match["term"] or match["other"] or ""))
    return " ".join(words) if 1 <= len(words) <= 3 else None
