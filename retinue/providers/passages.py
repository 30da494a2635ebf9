"""Reading supplied text: Markdown, plain text or numbered tool output, as sentences with their places.

A sentence knows the file and line where it begins, the headings above it and what leads up to it, so that
"It waits 15 s." can be found under the heading that says what "it" is.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["text", "row", "code"]

_FILE = re.compile(r"file: (.+?)\s*\Z")
_NUMBERED = re.compile(r"\s*(\d+)\| ?(.*)\Z", re.DOTALL)
_FENCE = re.compile(r"\s*(?:>\s*)?(`{3,}|~{3,})")
_HEADING = re.compile(r" {0,3}(#{1,6})\s+(.*?)\s*#*\s*\Z")
_UNDERLINE = re.compile(r"([=\-~^\"'*+#])\1{2,}\s*\Z")
_ITEM = re.compile(r"(\s*)(?:[-*+•]|\d{1,3}[.)]|\(?[a-z]\))\s+(?=\S)")
_TABLE_ROW = re.compile(r"\s*\|(.*)\|\s*\Z")
_TABLE_RULE = re.compile(r"\s*\|[\s|:\-]+\|\s*\Z")
_DIRECTIVE = re.compile(r"\s*(\.\. |<!--.*-->\s*\Z|\[[^\]]+\]: \S)")
_QUOTE = re.compile(r"\s*(?:>\s?)+")
_CELL_BREAK = re.compile(r"(?<!\\)\|")

_CODE_SPAN = re.compile(r"`[^`]+`|\0")
_NUMBERING = frozenset({"", "#", "n", "no", "no.", "nr", "nr.", "\u2116"})
_SUBJECT_WORDS = 4
_LINK = re.compile(r"!?\[([^\]\n]*)\]\((?:[^()\n]|\([^()\n]*\))*\)")
_TAG = re.compile(
    r"</?(?:p|br|div|span|img|a|b|i|em|strong|sub|sup|details|summary|table|tr|td|th|h[1-6]|center|picture|source)"
    r"\b[^<>]*>",
    re.IGNORECASE,
)
_EMPHASIS = re.compile(r"(?<![\w*])(\*\*\*|\*\*|__)(?=\S)(.+?)(?<=\S)\1(?!\w)")
_STAR = re.compile(r"(?<![\w*])\*(?=[^\s*])([^*\n]+?)(?<=[^\s*])\*(?![\w*])")
_BOLD_START = re.compile(r"\s*(?:\*\*|__)([^*_\n]{1,80}?)(?:\*\*|__)")
_SENTENCE_END = re.compile(
    r"[.!?\u2026][\"'\u201d\u2019)\]*_`]*\s+(?=[\"'\u201c\u2018(\[*_`]*[A-Z0-9\u00c0-\u00d6\u00d8-\u00de\u0400-\u042f])"
    r"|[\u3002\uff01\uff1f]\s*"
)
_ABBREVIATION = re.compile(
    r"(?:\b(?:e\.g|i\.e|etc|vs|cf|approx|incl|resp|nos|figs?|ch|pp|vol|eds|al|dr|mr|mrs|ms|prof|inc|ltd)|(?-i:\b[A-Z]))\.\Z",
    re.IGNORECASE,
)
_ANAPHOR = re.compile(
    r"[\"'\u201c(*]*(?:It|Its|They|Their|This|These|That|Those|Such|He|She|Both|Otherwise|Then|But|However|So|And|Also"
    r"|Instead|Therefore|Here|There|Only here|Only there|In both)\b"
)


@dataclass(slots=True)
class Sentence:
    """A sentence, a table row or a line of code."""

    text: str
    """As it is shown, without markup for emphasis and links."""
    file: str | None
    line: int | None
    """Number of the line where it begins; ``None`` when the text came without numbers."""
    headings: tuple[str, ...] = ()
    lead: str = ""
    """What comes before it and gives it its subject: a lead-in, a bold term, a table's header."""
    before: Sentence | None = None
    """The sentence before it in the same paragraph."""
    kind: Kind = "text"
    pieces: tuple[str, ...] = ()
    """The sentences that it was joined from, when it is several."""
    rank: int = 0
    """Place in an earlier ranking, from 0; a tie-breaker and a little more."""

    @property
    def citation(self) -> str:
        if self.line is None:
            return f"[{self.file}]" if self.file else ""
        return f"[{self.file or 'text'}:{self.line}]"

    @property
    def leans_back(self) -> bool:
        """It begins with a word such as "It" or "Otherwise", which the sentence before it explains."""
        return self.kind == "text" and _ANAPHOR.match(self.text) is not None


def read_sentences(text: str) -> list[Sentence]:
    """The sentences of a text in order. Numbered lines and ``file:`` headers are recognised by their form."""
    reader = _Reader()
    for line in text.replace("\r\n", "\n").split("\n"):
        header = _FILE.match(line)
        if header and reader.expects_header:
            reader.open_file(header[1])
            continue
        numbered = _NUMBERED.match(line) if reader.numbered is not False else None
        if numbered:
            reader.numbered = True
            reader.read(int(numbered[1]), numbered[2])
        elif reader.numbered is True:
            # Between a tool's numbered lines there are only its own remarks; the next file may follow.
            reader.expects_header = True
        elif line.strip():
            reader.numbered = False
            reader.expects_header = False
            reader.read(None, line)
        else:
            reader.read(None, line)
    return reader.finish()


def is_numbered(text: str) -> bool:
    """Whether a text has numbered lines, as tools that read files give them."""
    return any(_NUMBERED.match(line) for line in text.split("\n", 12)[:12])


@dataclass
class _Reader:
    """Lines in, sentences out: knows fences, headings, lists, tables, quotes and paragraphs."""

    sentences: list[Sentence] = field(default_factory=list)
    numbered: bool | None = None
    expects_header: bool = True
    file: str | None = None
    _stack: list[tuple[int, str]] = field(default_factory=list)
    _lines: list[tuple[int | None, str]] = field(default_factory=list)
    _fence: str | None = None
    _header: list[str] | None = None
    """Cells of the table's header, while in a table."""
    _item_indent: int | None = None
    """Indentation of the list item being read, while in a list."""
    _lead: str = ""
    """The last paragraph's last sentence, when it ended in a colon."""
    _front_matter: bool = False

    def open_file(self, name: str) -> None:
        self._flush()
        self.file = name
        self.numbered = None
        self._stack, self._fence, self._header, self._item_indent, self._lead = [], None, None, None, ""

    def finish(self) -> list[Sentence]:
        self._flush()
        return self.sentences

    def read(self, number: int | None, line: str) -> None:
        if self._in_front_matter(number, line) or self._in_code(number, line):
            return
        if not line.strip():
            self._flush()
            self._header = None
            return
        if self._is_table(number, line) or self._is_heading(line) or _DIRECTIVE.match(line):
            return
        line = _QUOTE.sub("", line, count=1) if line.lstrip().startswith(">") else line
        item = _ITEM.match(line)
        if item:
            self._flush()
            self._item_indent = len(item[1])
            line = line[item.end() :]
        elif not self._lines and self._item_indent is not None and not line.startswith((" ", "\t")):
            self._item_indent, self._lead = None, ""
        self._lines.append((number, line.strip()))

    # --- blocks -------------------------------------------------------------------------------------------

    def _in_front_matter(self, number: int | None, line: str) -> bool:
        if number == 1 and line.strip() == "---":
            self._front_matter = True
            return True
        if self._front_matter and line.strip() in ("---", "..."):
            self._front_matter = False
            return True
        return self._front_matter

    def _in_code(self, number: int | None, line: str) -> bool:
        fence = _FENCE.match(line)
        if self._fence is not None:
            if fence and fence[1].startswith(self._fence):
                self._fence = None
            else:
                self._add_code(number, line)
            return True
        if fence:
            self._flush()
            self._fence = fence[1]
            return True
        if not self._lines and self._item_indent is None and line.startswith(("    ", "\t")) and line.strip():
            self._add_code(number, line)
            return True
        return False

    def _add_code(self, number: int | None, line: str) -> None:
        letters = sum(map(str.isalnum, line))
        if letters >= 4 and letters * 2 >= len(line.strip()):
            code = line.strip().replace("`", "'")
            self._add(Sentence(f"`{code}`", self.file, number, lead=self._lead, kind="code"))

    def _is_table(self, number: int | None, line: str) -> bool:
        row = _TABLE_ROW.match(line)
        if row is None:
            self._header = None
            return False
        self._flush(keep_lead=True)
        if _TABLE_RULE.match(line):
            return True
        cells = [_shown(cell.replace("\\|", "|")) for cell in _CELL_BREAK.split(row[1])]
        if self._header is None:
            self._header = cells
            return True
        text = _row_text(self._header, cells)
        if text:
            lead = " ".join([self._lead, *filter(None, self._header)])
            self._add(Sentence(text, self.file, number, lead=lead, kind="row"))
        return True

    def _is_heading(self, line: str) -> bool:
        heading = _HEADING.match(line)
        if heading:
            self._flush()
            self._push_heading(len(heading[1]), heading[2])
            return True
        underline = _UNDERLINE.match(line)
        if underline and len(self._lines) == 1 and self._item_indent is None:
            title = self._lines.pop()[1]
            self._push_heading({"=": 1, "-": 2}.get(underline[1], 3), title)
            return True
        return underline is not None

    def _push_heading(self, level: int, title: str) -> None:
        while self._stack and self._stack[-1][0] >= level:
            self._stack.pop()
        self._stack.append((level, _shown(title)))
        self._item_indent, self._lead = None, ""

    # --- sentences ----------------------------------------------------------------------------------------

    def _flush(self, *, keep_lead: bool = False) -> None:
        """End the paragraph: its lines become sentences."""
        lines, self._lines = self._lines, []
        if not lines:
            return
        joined = " ".join(text for _, text in lines)
        starts: list[tuple[int, int | None]] = []
        offset = 0
        for number, text in lines:
            starts.append((offset, number))
            offset += len(text) + 1
        bold = _BOLD_START.match(joined)
        subject = bold[1] if bold else ""
        before: Sentence | None = None
        # "**Keeper.** One for each app." is one sentence: the bold words are its subject.
        skipped = bold.end() if bold and len(subject.split()) <= _SUBJECT_WORDS else 0
        for begin, end in _split(joined, skipped):
            shown = _shown(joined[begin:end])
            if not any(map(str.isalnum, shown)):
                continue
            number = next(number for start, number in reversed(starts) if start <= begin)
            lead = f"{self._lead} {subject}" if before is not None else self._lead
            before = Sentence(shown, self.file, number, lead=lead.strip(), before=before)
            self._add(before)
        if before is not None and (before.text.endswith(":") or not keep_lead):
            if before.text.endswith(":"):
                self._lead = before.text
            elif self._item_indent is None:
                self._lead = ""

    def _add(self, sentence: Sentence) -> None:
        sentence.headings = tuple(title for _, title in self._stack)
        self.sentences.append(sentence)


def _split(text: str, skipped: int) -> Iterator[tuple[int, int]]:
    """Begin and end of each sentence in a paragraph; none ends in its first ``skipped`` characters."""
    begin = 0
    for match in _SENTENCE_END.finditer(text):
        if match.start() < skipped:
            continue
        if _ABBREVIATION.search(text[max(0, match.start() - 8) : match.start() + 1]):
            continue
        if text[begin : match.start()].isdigit():  # a number at the start counts, it ends nothing
            continue
        yield begin, match.end()
        begin = match.end()
    if begin < len(text):
        yield begin, len(text)


def _shown(text: str) -> str:
    """Text as it is shown: links as their words, no emphasis marks, no layout tags, single spaces."""
    if "](" in text:
        text = _LINK.sub(r"\1", text)
    if "<" in text or "*" in text or "__" in text:
        # Code is shown as it stands, so it is taken out for the while.
        codes = _CODE_SPAN.findall(text)
        text = _CODE_SPAN.sub("\0", text)
        text = _STAR.sub(r"\1", _EMPHASIS.sub(r"\2", _TAG.sub(" ", text)))
        text = re.sub("\0", lambda _: codes.pop(0), text)
    return " ".join(text.split())


def _row_text(header: Sequence[str], cells: Sequence[str]) -> str:
    """A row that reads on its own: ``first cell: second`` of two columns, of more each with its header."""
    named = [
        (header[index] if index < len(header) else "", cell)
        for index, cell in enumerate(cells)
        if any(map(str.isalnum, cell))
    ]
    if not named:
        return ""
    if len(named) > 1 and re.fullmatch(r"#?\d+\.?", named[0][1]) and named[0][0].lower() in _NUMBERING:
        del named[0]  # a running number says nothing
    if len(header) == 2 or len(named) < 3:
        return ": ".join([*(cell.rstrip(".") for _, cell in named[:-1]), named[-1][1]])
    return "; ".join(f"{name}: {cell}" if name else cell for name, cell in named)
