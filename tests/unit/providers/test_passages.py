"""Sentences keep their places, and know what stands around them."""

from __future__ import annotations

import pytest

from retinue.providers.passages import Sentence, read_sentences


def numbered(text: str, file: str = "guide.md", first: int = 1) -> str:
    lines = text.strip("\n").split("\n")
    return "\n".join([f"file: {file}", *(f"{n}| {line}" for n, line in enumerate(lines, first))])


def read(text: str, first: int = 1) -> list[Sentence]:
    return read_sentences(numbered(text, first=first))


def shown(text: str) -> list[tuple[int | None, str]]:
    return [(sentence.line, sentence.text) for sentence in read(text)]


def test_a_sentence_that_spans_lines_has_the_line_where_it_begins() -> None:
    text = "The cache is cold. It warms\nup slowly, over\na minute. Then it is fast."
    assert shown(text) == [
        (1, "The cache is cold."),
        (1, "It warms up slowly, over a minute."),
        (3, "Then it is fast."),
    ]


def test_line_numbers_are_those_of_the_tool() -> None:
    assert [sentence.citation for sentence in read("One.\n\nTwo.", first=41)] == [
        "[guide.md:41]",
        "[guide.md:43]",
    ]


def test_several_files_in_one_text() -> None:
    text = numbered("Alpha.", "a.md") + "\n" + numbered("Beta.", "b/c.md", first=7)
    assert [sentence.citation for sentence in read_sentences(text)] == ["[a.md:1]", "[b/c.md:7]"]


def test_a_line_of_a_document_cannot_pretend_to_be_a_file() -> None:
    assert {sentence.file for sentence in read("file: other.md\n\nReal.")} == {"guide.md"}


def test_headings_are_context_and_no_answers() -> None:
    sentences = read("# Guide\n\nHello there.\n\n## Leases\n\nThey last long.\n\n# Other\n\nBye now.")
    assert [(sentence.text, sentence.headings) for sentence in sentences] == [
        ("Hello there.", ("Guide",)),
        ("They last long.", ("Guide", "Leases")),
        ("Bye now.", ("Other",)),
    ]


def test_underlined_headings() -> None:
    sentences = read("Guide\n=====\n\nHello there.\n\nLeases\n------\n\nThey last long.")
    assert [sentence.headings for sentence in sentences] == [("Guide",), ("Guide", "Leases")]


@pytest.mark.parametrize(
    "text",
    [
        "Use e.g. Redis or i.e. nothing.",
        "Version 3.11 is needed.",
        "Dr. Who and J. Smith agree.",
        "Files such as a.md and b.md count.",
        "See fig. 3 for it.",
    ],
)
def test_points_that_end_no_sentence(text: str) -> None:
    assert shown(text) == [(1, text)]


def test_numbers_may_end_a_sentence() -> None:
    assert [text for _, text in shown("At most 64. More are refused.")] == [
        "At most 64.",
        "More are refused.",
    ]


def test_list_items_stand_alone_and_know_their_lead() -> None:
    sentences = read("It can be stopped in two ways:\n\n- by hand, with\n  a key\n- 2. by time")
    assert [(sentence.line, sentence.text) for sentence in sentences] == [
        (1, "It can be stopped in two ways:"),
        (3, "by hand, with a key"),
        (5, "2. by time"),
    ]
    assert sentences[1].lead == sentences[2].lead == "It can be stopped in two ways:"


def test_table_rows_read_on_their_own() -> None:
    two = read("| limit | value |\n| --- | --- |\n| children | 64 |")
    assert [(sentence.line, sentence.text, sentence.kind) for sentence in two] == [(3, "children: 64", "row")]
    three = read("| who dies | what then | seen |\n|---|---|---|\n| the client | nothing | |\n| a | b | c |")
    assert [sentence.text for sentence in three] == [
        "the client: nothing",
        "who dies: a; what then: b; seen: c",
    ]
    assert "who dies" in three[0].lead


def test_code_lines_are_units_and_drawings_are_none() -> None:
    text = "Start it:\n\n```bash\nretinue up --head\n\n# +-----+\n```\n\n    make demo\n\nDone."
    assert [(sentence.line, sentence.text, sentence.kind) for sentence in read(text)] == [
        (1, "Start it:", "text"),
        (4, "`retinue up --head`", "code"),
        (9, "`make demo`", "code"),
        (11, "Done.", "text"),
    ]


def test_headings_inside_code_are_code() -> None:
    assert read("```\n# install everything\n```\n\nText here.")[-1].headings == ()


def test_markup_is_not_shown() -> None:
    text = 'The **ledger** is *beside* the [root](x.md "t"), <br>see `__init__` and snake_case.'
    assert shown(text) == [(1, "The ledger is beside the root, see `__init__` and snake_case.")]
    assert shown("**`a*b`** and *`<br>`* stay.") == [(1, "`a*b` and `<br>` stay.")]


def test_bold_words_at_the_start_are_the_subject() -> None:
    sentences = read("**Pool keeper.** One for each app. It alone starts hosts.")
    assert [sentence.text for sentence in sentences] == [
        "Pool keeper. One for each app.",
        "It alone starts hosts.",
    ]
    assert sentences[1].lead == "Pool keeper."


def test_front_matter_comments_and_directives_are_left_out() -> None:
    text = "---\ntitle: Guide\n---\n<!-- hidden -->\n.. toctree::\n\nText here."
    assert [text for _, text in shown(text)] == ["Text here."]


def test_a_sentence_that_leans_back_knows_the_one_before() -> None:
    first, second = read("A lease lasts 15 s. It is renewed.")
    assert second.leans_back
    assert second.before is first
    assert not first.leans_back
    assert read("One.\n\nIt is apart.")[1].before is None


def test_plain_text_has_no_citations() -> None:
    assert [sentence.citation for sentence in read_sentences("One thing.\nTwo things.")] == ["", ""]


def test_windows_line_ends() -> None:
    assert [text for _, text in [(s.line, s.text) for s in read_sentences("One.\r\n\r\nTwo.")]] == [
        "One.",
        "Two.",
    ]


def test_other_scripts() -> None:
    assert [text for _, text in shown("租约持续十五秒。之后续期。")] == ["租约持续十五秒。", "之后续期。"]
