"""Words of the embedded model: stems, stop words, words near each other in meaning. English, lightly."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable

_CJK = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af"
_WORD = re.compile(
    rf"[{_CJK}]|[^\W_{_CJK}](?:[^\W{_CJK}]*[^\W_{_CJK}])?(?:['\u2019][^\W\d_]{{1,2}}(?![^\W_]))?"
)
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
_VOWEL = re.compile("[aeiouy]")

_STOP_WORDS = """
    a about above after again against all also am an and any are as at be because been before being below
    between both but by can cannot could did do does doing down during each either else ever every for
    from further had has have having he her here hers him his how however i if in into is it its itself
    just let may me might more most much must my neither no nor not now of off on once only or other our
    ours out over own per please quite rather same shall she should since so some such than that the their
    theirs them then there these they this those though through thus to too under until up upon us very
    was we were what when where whether which while who whom whose why will with within without would yes
    yet you your yours"""
_KEPT_WORDS = "down up off before after without not no once same all only again"
_FILLER_WORDS = """
    allow answer ask asked become called came case certain come describe detail difference different doc
    docs document documentation done exactly explain few file find folder gave get give given gives go
    gone got gotten happen happens keep kind knew know known like list look lot made make many mean means
    meant name need often one page part possible project question really said saw say says see seen
    several show showed shown something sort take taken tell tells text thing things told took try two
    type use used using various want way went word work works"""
_NEAR_WORDS = (
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

_NOUN_ENDINGS = (
    ("sses", "ss", 2), ("ies", "y", 2), ("ves", "ve", 2), ("ss", "ss", 0), ("us", "us", 0), ("is", "is", 0),
    ("s", "", 3),
)  # fmt: skip
_VERB_ENDINGS = (
    ("izations", "ize", 2), ("ization", "ize", 2), ("ations", "", 4), ("ation", "", 4), ("ings", "", 3),
    ("ing", "", 3), ("edly", "", 3), ("ied", "y", 2), ("ed", "", 3), ("ments", "", 4), ("ment", "", 4),
    ("ness", "", 4), ("fully", "ful", 3), ("ably", "able", 3), ("ly", "", 4), ("er", "", 4), ("ion", "", 4),
)  # fmt: skip
"""(ending, what stands in its place, letters that must be left before it); the first that fits is taken."""


def stem(word: str) -> str:
    """A light English stem: endings of number, tense and nouns of action go, doubled consonants too."""
    word = word.split("'", 1)[0].split("\u2019", 1)[0]
    if len(word) <= 3 or not word.isascii() or not word.isalpha():
        return word
    for ending, instead, least in _NOUN_ENDINGS:
        if word.endswith(ending) and len(word) - len(ending) >= least:
            word = word.removesuffix(ending) + instead
            break
    for ending, instead, least in _VERB_ENDINGS:
        rest = word.removesuffix(ending)
        if rest != word and len(rest) >= least and _VOWEL.search(rest):
            word = rest + instead
            break
    if len(word) > 4 and word.endswith("e"):
        word = word[:-1]
    if len(word) > 3 and word[-1] == word[-2] and word[-1] not in "aeiou":
        word = word[:-1]
    if len(word) > 3 and word.endswith("y"):
        word = word[:-1] + "i"
    return word


@functools.lru_cache(maxsize=65_536)
def stems(word: str) -> tuple[str, ...]:
    """The stem of a written word; of ``BudgetLedger`` and ``budget_ledger`` those of pieces and whole."""
    pieces = [piece for name in word.split("_") for piece in _CAMEL.split(name) if piece]
    if len(pieces) == 1:
        return (stem(word.lower()),)
    return (*(stem(piece.lower()) for piece in pieces), stem(word.replace("_", "").lower()))


def written(text: str) -> list[str]:
    """The words of a text as they are written."""
    return _WORD.findall(text)


def terms(text: str) -> list[str]:
    """The stemmed words of a text, stop words included, in order."""
    return [part for word in _WORD.findall(text) for part in stems(word)]


def without_stops(words: Iterable[str]) -> list[str]:
    """Stems without those of stop words."""
    return [word for word in words if word not in STOP]


def _near() -> dict[str, frozenset[str]]:
    found: dict[str, set[str]] = {}
    for group in _NEAR_WORDS:
        together = {stem(word) for word in group.split()}
        for one in together:
            found.setdefault(one, set()).update(together - {one})
    return {word: frozenset(others) for word, others in found.items()}


STOP = frozenset(map(stem, _STOP_WORDS.split())) | frozenset(_STOP_WORDS.split())
"""Stems of words that say nothing on their own."""
KEPT = frozenset(map(stem, _KEPT_WORDS.split()))
"""Stop words that may carry a question ("is the store down?"); they count a little."""
FILLER = frozenset(map(stem, _FILLER_WORDS.split()))
"""Words of asking; they count a little."""
NEAR = _near()
"""Stems that may stand for each other."""
