"""Ranking sentences against a question: BM25 over the supplied sentences, with what surrounds them as context."""

from __future__ import annotations

import functools
import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from retinue.providers.passages import Sentence

_CJK = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af"
_WORD = re.compile(rf"[{_CJK}]|[^\W_{_CJK}]+(?:['’][^\W\d_]{{1,2}}(?![^\W_]))?")
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")

_STOP = frozenset(
    """a about above after again against all also am an and any are as at be because been before being below between
    both but by can cannot could did do does doing down during each either else ever every for from further had has
    have having he her here hers him his how however i if in into is it its itself just let like may me might more
    most much must my neither no nor not now of off on once only or other our ours out over own per please quite
    rather same shall she should since so some such than that the their theirs them then there these they this
    those though through thus to too under until up upon us very was we were what when where whether which while
    who whom whose why will with within without would yes yet you your yours""".split()
)
_KEPT = frozenset({"down", "up", "off", "before", "after", "without", "not", "no", "once", "same", "all", "only", "again"})
"""Small words that may carry the question; they count a little."""
_FILLER = frozenset(
    """answer ask become call case come describe detail docs document documentation doc explain find folder get give
    go happen happens know list look make mean means need one part question say see show something state take tell
    thing things text try two use used using want way word work works project exactly actually really many long
    often page file""".split()
)
_DEFINITION = re.compile(
    r"\s*(?:what|who)(?:'s|\s+is|\s+are|\s+was|\s+does)\s+(?:an?\s+|the\s+)?(?P<term>[\w .`'-]+?)(?:\s+(?:mean|stand\s+for)\b.*)?"
    r"\s*\??\s*\Z|\s*(?:define|explain)\s+(?P<other>[\w .`'-]+?)\s*[.?]?\s*\Z",
    re.IGNORECASE,
)
_AMOUNT = re.compile(r"\bhow (?:many|much|long|large|big|often|fast|old)\b|\bwhen does\b|\bwhat (?:version|number)\b", re.I)
_NUMBER = re.compile(
    r"\d|\b(?:one|two|three|four|five|six|seven|eight|nine|ten|twelve|hundred|thousand|half|quarter|never|always|once"
    r"|twice|unlimited)\b",
    re.IGNORECASE,
)
_REASON = re.compile(r"\bwhy\b|\bwhat for\b|\breason\b", re.IGNORECASE)
_BECAUSE = re.compile(
    r"\b(?:because|so that|since|therefore|otherwise|in order to|the reason|that is why|hence)\b|\bcannot\b|, so\b", re.I
)
_COMMAND = re.compile(r"\b(?:command|run|start|install|option|flag|type|invoke|execute|example|syntax)\b", re.I)
_QUOTED = re.compile(r"`([^`]+)`|\"([^\"]+)\"|“([^”]+)”")

_K1, _B = 1.2, 0.45
_HEADING_SHARE, _LEAD_SHARE, _BEFORE_SHARE = 0.45, 0.4, 0.25
"""How much a word in the surroundings counts, of what it counts in the sentence itself."""
_PAIR_BONUS = 0.35
_REPEAT_SHARE = 0.35
"""What is left of the score of a sentence that an earlier answer has given already."""


# --- words ------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=65_536)
def _stems(word: str) -> tuple[str, ...]:
    """The stems of one written word; of ``BudgetLedger`` also those of its pieces."""
    pieces = _CAMEL.split(word)
    whole = stem(word.lower())
    if len(pieces) == 1:
        return (whole,)
    return tuple(dict.fromkeys((*(stem(piece.lower()) for piece in pieces), whole)))


def terms(text: str) -> list[str]:
    """The stemmed words of a text, stop words included, in order."""
    return [part for word in _WORD.findall(text) for part in _stems(word)]


def stem(word: str) -> str:
    """A light English stem: endings of number, tense and nouns of action go, doubled consonants too."""
    word = word.split("'", 1)[0].split("’", 1)[0]
    if len(word) <= 3 or not word.isascii() or not word.isalpha():
        return word
    for ending, instead, least in _ENDINGS:
        if word.endswith(ending) and len(word) - len(ending) >= least:
            word = word[: len(word) - len(ending)] + instead
            break
    for ending, instead, least in _VERB_ENDINGS:
        if word.endswith(ending) and len(word) - len(ending) >= least and re.search("[aeiouy]", word[: -len(ending)]):
            word = word[: len(word) - len(ending)] + instead
            break
    if len(word) > 4 and word.endswith("e"):
        word = word[:-1]
    if len(word) > 3 and word[-1] == word[-2] and word[-1] not in "aeiou":
        word = word[:-1]
    if len(word) > 3 and word.endswith("y"):
        word = word[:-1] + "i"
    return word


_ENDINGS = (("sses", "ss", 2), ("ies", "y", 2), ("ves", "ve", 2), ("ss", "ss", 0), ("us", "us", 0), ("is", "is", 0), ("s", "", 3))
_VERB_ENDINGS = (
    ("izations", "ize", 2), ("ization", "ize", 2), ("ations", "", 4), ("ation", "", 4), ("ings", "", 3), ("ing", "", 3),
    ("edly", "", 3), ("ied", "y", 2), ("ed", "", 3), ("ments", "", 4), ("ment", "", 4), ("ness", "", 4), ("fully", "ful", 3),
    ("ably", "able", 3), ("ly", "", 4), ("er", "", 4), ("ion", "", 4),
)  # fmt: skip
_IRREGULAR_GROUPS = (
    "die dies died dying dead death killed kill kills lost crash crashes",
    "run runs ran running",
    "begin began begun start starts started",
    "write wrote written writes writing",
    "choose chose chosen choice",
    "send sent sends",
    "hold held holds",
    "keep kept keeps",
    "stop stopped cancel cancelled canceled abort interrupt interrupted",
    "limit limits cap maximum max bound",
    "minimum min least",
    "remove delete deleted drop erase",
    "install setup",
    "store stored save saved persist persisted durable",
    "error errors failure fail fails failed",
    "wait waits timeout",
    "fast quick speed latency performance",
    "configure configuration config setting settings option options",
    "licence license",
    "folder directory",
    "repeat repeated retry twice duplicate",
)


def _neighbours() -> dict[str, frozenset[str]]:
    found: dict[str, set[str]] = {}
    for group in _IRREGULAR_GROUPS:
        stems = {stem(word) for word in group.split()}
        for one in stems:
            found.setdefault(one, set()).update(stems - {one})
    return {word: frozenset(others) for word, others in found.items()}


_NEIGHBOURS = _neighbours()
_NEIGHBOUR_SHARE = 0.5
_STOP_STEMS = frozenset(map(stem, _STOP)) | _STOP
_FILLER_STEMS = frozenset(map(stem, _FILLER))
_KEPT_STEMS = frozenset(map(stem, _KEPT))


# --- the question -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Question:
    """What is looked for: weighted words, and what kind of answer the question's form asks for."""

    text: str
    weights: dict[str, float]
    pairs: frozenset[tuple[str, str]] = frozenset()
    defines: str | None = None
    """The term that the question asks the meaning of."""
    wants_number: bool = False
    wants_reason: bool = False
    wants_command: bool = False
    already_said: frozenset[str] = field(default=frozenset())

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
        for share, earlier in zip((0.5, 0.25), earlier_questions, strict=False):
            for word, weight in _weights(earlier).items():
                weights.setdefault(word, weight * share)
        common = Counter(word for finding in earlier_findings for word in _weights(finding))
        for word, _ in common.most_common(8):
            weights.setdefault(word, 0.15)
        return cls(
            text=text,
            weights=weights,
            pairs=_pairs(text),
            defines=_defined(text),
            wants_number=bool(_AMOUNT.search(text)),
            wants_reason=bool(_REASON.search(text)),
            wants_command=bool(_COMMAND.search(text)),
            already_said=frozenset(map(fingerprint, earlier_findings)),
        )


def fingerprint(text: str) -> str:
    """A sentence without case, spacing and punctuation, to know it again."""
    return " ".join(_WORD.findall(text.lower()))


def _weights(text: str) -> dict[str, float]:
    weights: dict[str, float] = {}
    for word in terms(text):
        if word in _KEPT_STEMS:
            weight = 0.25
        elif word in _STOP_STEMS or (len(word) == 1 and word.isascii() and not word.isdigit()):
            continue
        elif word in _FILLER_STEMS:
            weight = 0.25
        else:
            weight = 1.0
        weights[word] = max(weights.get(word, 0.0), weight)
    for match in _QUOTED.finditer(text):
        for word in terms(next(filter(None, match.groups()))):
            if word in weights:
                weights[word] = 1.5
    if not any(weight >= 1.0 for weight in weights.values()):
        # Nothing but filler: then the filler is the question.
        return dict.fromkeys(weights, 1.0)
    return weights


def _pairs(text: str) -> frozenset[tuple[str, str]]:
    words = terms(text)
    return frozenset(
        pair
        for pair in zip(words, words[1:], strict=False)
        if not (pair[0] in _STOP_STEMS - _KEPT_STEMS or pair[1] in _STOP_STEMS - _KEPT_STEMS)
    )


def _defined(text: str) -> str | None:
    match = _DEFINITION.match(text)
    if match is None:
        return None
    words = [word for word in terms(match["term"] or match["other"] or "") if word not in _STOP_STEMS]
    return " ".join(words) if 1 <= len(words) <= 3 else None


# --- the ranking ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ranked:
    """A sentence with its score, and how much of the question it and its surroundings cover, from 0 to 1."""

    sentence: Sentence
    score: float
    coverage: float
    words: frozenset[str]


def rank(sentences: Sequence[Sentence], question: Question) -> list[Ranked]:
    """The sentences that share anything with the question, the best first; ties keep the order of the text."""
    if not sentences or not question.weights:
        return []
    own = [terms(sentence.text) for sentence in sentences]
    own_sets = [frozenset(words) for words in own]
    idf = _idf(own_sets, question)
    total = sum(weight * idf[word] for word, weight in question.weights.items())
    average = sum(map(len, own)) / len(own)
    places = {id(sentence): index for index, sentence in enumerate(sentences)}
    context_of = functools.lru_cache(maxsize=4096)(lambda text: frozenset(terms(text)))
    wanted = frozenset(question.weights) | frozenset(
        other for word in question.weights for other in _NEIGHBOURS.get(word, ())
    )
    ranked: list[Ranked] = []
    for index, sentence in enumerate(sentences):
        heading = context_of(" ".join(sentence.headings))
        lead = context_of(sentence.lead)
        before = own_sets[places[id(sentence.before)]] if id(sentence.before) in places else frozenset()
        if wanted.isdisjoint(own_sets[index]) and wanted.isdisjoint(heading | lead | before):
            continue
        counts = Counter(own[index])
        norm = _K1 * (1 - _B + _B * len(own[index]) / average)
        score = covered = 0.0
        for word, weight in question.weights.items():
            in_sentence = counts.get(word, 0) * (_K1 + 1) / (counts.get(word, 0) + norm)
            strength, near = _strength(word, own_sets[index], heading, lead, before)
            value = weight * idf[word]
            score += value * max(in_sentence, strength)
            covered += value * near
        if score > 0.0:
            score *= _form(sentence, own[index], question) * (0.35 + 0.65 * covered / total)
            score += _PAIR_BONUS * _pair_score(own[index], question, idf)
            if fingerprint(sentence.text) in question.already_said:
                score *= _REPEAT_SHARE
            ranked.append(Ranked(sentence, score, covered / total, own_sets[index]))
    ranked.sort(key=lambda item: (-item.score, item.sentence.rank, places[id(item.sentence)]))
    return ranked


def _idf(sets: Sequence[frozenset[str]], question: Question) -> dict[str, float]:
    counts: Counter[str] = Counter()
    for words in sets:
        counts.update(words & question.weights.keys())
    size = len(sets)
    # At least a quarter, so that a word that is everywhere in a small text still counts as being asked for.
    return {
        word: max(0.25, math.log(1 + (size - counts[word] + 0.5) / (counts[word] + 0.5)) / math.log(2 + size))
        for word in question.weights
    }


def _strength(
    word: str, own: frozenset[str], heading: frozenset[str], lead: frozenset[str], before: frozenset[str]
) -> tuple[float, float]:
    """What a word counts by where it stands (for the score, for the coverage); of synonyms half."""
    if word in own:
        return 0.0, 1.0
    best = 0.0
    for place, share in ((heading, _HEADING_SHARE), (lead, _LEAD_SHARE), (before, _BEFORE_SHARE)):
        if word in place:
            best = max(best, share)
    others = _NEIGHBOURS.get(word)
    if others:
        if not others.isdisjoint(own):
            best = max(best, _NEIGHBOUR_SHARE)
        elif best == 0.0 and not others.isdisjoint(heading | lead):
            best = _NEIGHBOUR_SHARE * _HEADING_SHARE
    return best, best


def _form(sentence: Sentence, words: Sequence[str], question: Question) -> float:
    """How well a sentence's form fits the question's, around 1."""
    factor = 1.0
    text = sentence.text
    if len(words) < 5:
        factor *= 0.75
    elif len(words) > 70:
        factor *= 0.85
    if text.endswith(":"):
        factor *= 0.7
    if text.endswith("?"):
        factor *= 0.6
    if sentence.kind == "code":
        factor *= 1.15 if question.wants_command else 0.7
    elif question.wants_command and "`" in text:
        factor *= 1.1
    if question.wants_number:
        factor *= 1.25 if _NUMBER.search(text) else 0.9
    if question.wants_reason and _BECAUSE.search(text):
        factor *= 1.25
    if question.defines and " ".join(_without_stops(words)[:6]).startswith(question.defines):
        factor *= 1.6 if re.match(r"\W*(?:an?\s|the\s)?[\w`*()., -]{2,60}?(?:\b(?:is|are|was|means|has|holds|makes|runs)\b|:|—| – )", text, re.I) else 1.25
    return factor


def _without_stops(words: Iterable[str]) -> list[str]:
    return [word for word in words if word not in _STOP_STEMS]


def _pair_score(words: Sequence[str], question: Question, idf: dict[str, float]) -> float:
    if not question.pairs:
        return 0.0
    found = question.pairs.intersection(zip(words, words[1:], strict=False))
    return sum(min(idf.get(first, 0.0), idf.get(second, 0.0)) for first, second in found)


def distinct(ranked: Sequence[Ranked], most: int, *, least_share: float, overlap: float = 0.6) -> list[Ranked]:
    """The best ``most`` sentences, without those that nearly repeat a better one.

    Args:
        ranked: best first.
        most: how many at most.
        least_share: of the best score; what scores less is left out.
        overlap: share of the smaller sentence's words in the other from which on it is a repetition.
    """
    chosen: list[Ranked] = []
    for item in ranked:
        if len(chosen) == most or item.score < ranked[0].score * least_share:
            break
        words = item.words - _STOP_STEMS
        if not any(_overlap(words, other.words - _STOP_STEMS) >= overlap for other in chosen):
            chosen.append(item)
    return chosen


def _overlap(one: frozenset[str], other: frozenset[str]) -> float:
    smaller = min(len(one), len(other))
    return len(one & other) / smaller if smaller else 1.0
