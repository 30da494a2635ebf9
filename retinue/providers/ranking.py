"""Ranking sentences against a question: BM25 over the supplied sentences, their surroundings as context."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from retinue.providers.passages import Sentence
from retinue.providers.questions import Question, fingerprint
from retinue.providers.words import NEAR, STOP, terms, without_stops

_K1, _B, _SHORTEST = 0.8, 0.7, 0.6
"""BM25's saturation and length normalisation; none counts as shorter than this share of the average."""
_HEADING_SHARE, _LEAD_SHARE, _BEFORE_SHARE, _TABLE_SHARE = 0.5, 0.4, 0.25, 0.6
"""How much a word in the surroundings counts, of what it counts in the sentence itself."""
_OTHER_FORM_SHARE = 0.8
"""What a word counts that has only its stem in common with the question's."""
_NEAR_SHARE = 0.5
"""What a word counts that is only near the question's in meaning."""
_UNCOVERED = 0.35
"""What is left of the score of a sentence that covers nearly nothing of the question."""
_ABSENT_SHARE = 0.5
"""What a word that is nowhere in the text counts, of what is to be covered."""
_TITLE_FACTORS = (1.2, 1.6)
"""For sentences under a heading that has the question's only main word, or all of several."""
_GAP, _GAP_BONUS, _PAIR_FACTOR = 3, 0.2, 2.0
"""Words of the question at most so far apart add to the score; doubly, where they pair as in the question."""
_RANK_STEP = 0.08
"""What each place in an earlier ranking costs."""
_REPEAT_SHARES = (0.5, 0.3)
"""What is left of the score of a sentence that an earlier answer gave; less where more is asked for."""
_CONTAINED, _ALIKE = 0.75, 0.6
"""A sentence repeats a better one that has so much of its words, or shares so much of both their words."""
_FEW_SENTENCES = 20
"""Among fewer sentences how rare a word is says little."""


@dataclass(frozen=True, slots=True)
class Ranked:
    """A sentence with its score, and how much of the question it and its surroundings cover, from 0 to 1."""

    sentence: Sentence
    score: float
    coverage: float
    words: frozenset[str]


def rank(sentences: Sequence[Sentence], question: Question, *, least_idf: float = 0.25) -> list[Ranked]:
    """The sentences that share anything with the question, best first; ties keep the order of the text.

    Args:
        sentences: all of the supplied text, which says how rare a word is.
        question: what is looked for.
        least_idf: what the most common word counts at least, where the rarest counts 1.
    """
    if not sentences or not question.weights:
        return []
    own = [terms(sentence.text) for sentence in sentences]
    own_sets = [frozenset(words) for words in own]
    sets_of = {id(sentence): words for sentence, words in zip(sentences, own_sets, strict=True)}
    context = functools.lru_cache(maxsize=4096)(lambda text: frozenset(terms(text)))
    idf = _idf(own_sets, question.weights, least_idf)
    values = {word: weight * idf[word] for word, weight in question.weights.items()}
    # An answer need not cover words that only earlier answers had, and may say otherwise what is nowhere.
    present = frozenset[str]().union(*own_sets)
    total = sum(
        value * (1.0 if word in present else _ABSENT_SHARE)
        for word, value in values.items()
        if word not in question.hints
    )
    average = sum(map(len, own)) / len(own)
    main = question.main
    wanted = values.keys() | {other for word in values for other in NEAR.get(word, ())}
    ranked: list[Ranked] = []
    for sentence, words, distinct_words in zip(sentences, own, own_sets, strict=True):
        heading = context(" ".join(sentence.headings))
        lead = context(sentence.lead)
        before = sets_of.get(id(sentence.before), frozenset())
        if wanted.isdisjoint(distinct_words) and wanted.isdisjoint(heading | lead | before):
            continue
        lead_share = _TABLE_SHARE if sentence.kind == "row" else _LEAD_SHARE
        around = ((heading, _HEADING_SHARE), (lead, lead_share), (before, _BEFORE_SHARE))
        counts, lowered = Counter(words), sentence.text.lower()
        norm = _K1 * (1 - _B + _B * max(len(words) / average, _SHORTEST))
        score = covered = 0.0
        for word, value in values.items():
            count = counts.get(word, 0)
            if count:
                strength = count * (_K1 + 1) / (count + norm)
                if not any(form in lowered for form in question.forms.get(word, ())):
                    strength *= _OTHER_FORM_SHARE
                score += value * strength
                covered += value
            else:
                share = _nearby(word, distinct_words, around)
                score += value * share
                covered += value * share
        if score == 0.0:
            continue
        coverage = min(1.0, covered / total) if total else 1.0
        score *= question.fit(sentence, words) * (_UNCOVERED + (1 - _UNCOVERED) * coverage)
        pieces = sentence.pieces or (sentence.text,)
        if question.already_said and any(fingerprint(piece) in question.already_said for piece in pieces):
            score *= _REPEAT_SHARES[question.wants_more]
        if main and main <= heading:
            score *= _TITLE_FACTORS[len(main) > 1]
        score /= 1 + _RANK_STEP * sentence.rank
        score += _GAP_BONUS * _closeness(words, question, values)
        ranked.append(Ranked(sentence, score, coverage, distinct_words))
    ranked.sort(key=lambda item: -item.score)  # stable
    return ranked


def _idf(sets: Sequence[frozenset[str]], weights: Mapping[str, float], least: float) -> dict[str, float]:
    """How rare each word of the question is among the sentences, from ``least`` to 1."""
    size, counts = len(sets), Counter[str]()
    least = max(least, 1 - size / _FEW_SENTENCES)
    for words in sets:
        counts.update(words & weights.keys())
    scale = math.log(2 + size)
    return {
        word: min(1.0, max(least, math.log(1 + (size - counts[word] + 0.5) / (counts[word] + 0.5)) / scale))
        for word in weights
    }


def _nearby(word: str, own: frozenset[str], around: Iterable[tuple[frozenset[str], float]]) -> float:
    """What a word counts that the sentence has not: where it stands around, or one near it in meaning."""
    best = max((share for place, share in around if word in place), default=0.0)
    others = NEAR.get(word)
    if others and not others.isdisjoint(own):
        return max(best, _NEAR_SHARE) + best * _BEFORE_SHARE
    if others and best == 0.0 and any(not others.isdisjoint(place) for place, _ in around):
        return _NEAR_SHARE * _LEAD_SHARE
    return best


def _closeness(words: Sequence[str], question: Question, values: Mapping[str, float]) -> float:
    """How close together the question's words stand in a sentence, stop words apart."""
    total, last, last_at = 0.0, "", 0
    for at, word in enumerate(without_stops(words)):
        if word not in values:
            continue
        gap = at - last_at
        if last and last != word and gap <= _GAP:
            factor = _PAIR_FACTOR if (last, word) in question.pairs else 1.0
            total += factor * min(values[last], values[word]) / gap
        last, last_at = word, at
    return total


def distinct(ranked: Sequence[Ranked], most: int, *, least_share: float) -> list[Ranked]:
    """The best ``most`` sentences, without those that nearly repeat a better one.

    Args:
        ranked: best first.
        most: how many at most.
        least_share: of the best score; what scores less is left out.
    """
    chosen: list[Ranked] = []
    for item in ranked:
        if len(chosen) == most or item.score < ranked[0].score * least_share:
            break
        if not any(_repeats(item.words - STOP, other.words - STOP) for other in chosen):
            chosen.append(item)
    return chosen


def _repeats(later: frozenset[str], better: frozenset[str]) -> bool:
    """Nothing much is in the later one that the better has not, or they are nearly the same."""
    shared = len(later & better)
    return shared >= _CONTAINED * len(later) or shared >= _ALIKE * len(later | better)
