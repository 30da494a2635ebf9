"""Folders are read whole or with a reason, and every line goes to exactly one delegate."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retinue.docqa.documents import (
    MAX_FILE_BYTES,
    MAX_PART_CHARACTERS,
    Document,
    Part,
    plan_parts,
    read_folder,
    text_lines,
)
from retinue.errors import InputError


def write(root: Path, name: str, content: str | bytes = "Some text.\n") -> Path:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def skipped(root: Path) -> dict[str, str]:
    return {one.name: one.reason for one in read_folder(root).skipped}


def names(root: Path) -> list[str]:
    return [document.name for document in read_folder(root).documents]


# --- reading ----------------------------------------------------------------------------------------------


def test_text_and_markdown_are_read_in_stable_order(tmp_path: Path) -> None:
    for name in ("b.md", "a.TXT", "z/c.rst", "b/y.markdown", "b/x.md", "image.png", "script.py", "README"):
        write(tmp_path, name)
    assert names(tmp_path) == ["a.TXT", "b/x.md", "b/y.markdown", "b.md", "z/c.rst"]
    assert skipped(tmp_path) == {}


def test_hidden_files_and_folders_are_left_out(tmp_path: Path) -> None:
    for name in (".hidden.md", ".git/notes.md", "a/.cache/x.md", "a/b.md"):
        write(tmp_path, name)
    assert names(tmp_path) == ["a/b.md"]


def test_what_cannot_be_used_is_skipped_by_name(tmp_path: Path) -> None:
    write(tmp_path, "good.md", "\ufeffGrüße.\r\nZwei.\n")
    write(tmp_path, "latin.txt", "Gr\u00fc\u00dfe".encode("latin-1"))
    write(tmp_path, "nul.md", b"abc\0def")
    write(tmp_path, "empty.md", " \n\n\t\n")
    write(tmp_path, "huge.md", b"x" * (MAX_FILE_BYTES + 1))
    write(tmp_path, "utf16.txt", "text".encode("utf-16"))
    os.mkfifo(tmp_path / "pipe.md")
    found = skipped(tmp_path)
    assert names(tmp_path) == ["good.md"]
    assert found["latin.txt"] == "not UTF-8: byte 0xfc at offset 2"
    assert found["nul.md"] == "not text: a NUL byte at offset 3"
    assert found["empty.md"] == "empty"
    assert found["huge.md"].startswith("too large: 2,000,001 bytes")
    assert found["pipe.md"] == "no regular file"
    assert set(found) == {"latin.txt", "nul.md", "empty.md", "huge.md", "utf16.txt", "pipe.md"}
    assert read_folder(tmp_path).documents[0].lines == ("Grüße.", "Zwei.")


def test_a_file_of_the_largest_size_is_read(tmp_path: Path) -> None:
    write(tmp_path, "large.md", b"x" * MAX_FILE_BYTES)
    assert names(tmp_path) == ["large.md"]


def test_unreadable_files_and_folders_are_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "good.md")
    secret = write(tmp_path, "secret.md")
    closed = write(tmp_path, "closed/x.md").parent
    if os.geteuid() == 0:
        # Permissions do not bind root: refuse as the system would.
        read_bytes, scandir = Path.read_bytes, os.scandir

        def refusing_read(path: Path) -> bytes:
            if path == secret:
                raise PermissionError(13, "Permission denied")
            return read_bytes(path)

        def refusing_scan(path: Path) -> object:
            if path == closed:
                raise PermissionError(13, "Permission denied")
            return scandir(path)

        monkeypatch.setattr(Path, "read_bytes", refusing_read)
        monkeypatch.setattr("retinue.docqa.documents.os.scandir", refusing_scan)
    else:
        secret.chmod(0)
        closed.chmod(0)
    try:
        assert skipped(tmp_path) == {
            "secret.md": "cannot be read: Permission denied",
            "closed": "cannot be listed: Permission denied",
        }
    finally:
        closed.chmod(0o755)


def test_links_are_followed_inside_the_folder_only(tmp_path: Path) -> None:
    root = tmp_path / "docs"
    write(root, "a/one.md")
    outside = write(tmp_path, "outside/two.md")
    (root / "loop").symlink_to(root)
    (root / "a" / "up").symlink_to(root / "a")
    (root / "same.md").symlink_to(root / "a" / "one.md")
    (root / "out.md").symlink_to(outside)
    (root / "outdir").symlink_to(outside.parent)
    (root / "broken.md").symlink_to(root / "nothing.md")
    (root / "self.md").symlink_to(root / "self.md")
    assert names(root) == ["a/one.md", "same.md"]
    assert skipped(root) == {
        "out.md": "a link that leads out of the folder",
        "outdir": "a link that leads out of the folder",
        "broken.md": "a link that leads nowhere",
        "self.md": "a link that leads nowhere",
    }


def test_a_link_to_a_folder_beside_is_followed_once(tmp_path: Path) -> None:
    write(tmp_path, "a/one.md")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    assert names(tmp_path) == ["a/one.md", "b/one.md"]


def test_names_that_cannot_be_shown_are_skipped(tmp_path: Path) -> None:
    write(tmp_path, "good.md")
    write(tmp_path, "two\nlines.md")
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff.md")).write_text("x")
    reasons = set(skipped(tmp_path).values())
    assert names(tmp_path) == ["good.md"]
    assert reasons == {"its name has characters that cannot be shown"}


def test_a_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"there is no folder .*nowhere"):
        read_folder(tmp_path / "nowhere")


def test_a_file_instead_of_a_folder(tmp_path: Path) -> None:
    path = write(tmp_path, "a.md")
    with pytest.raises(InputError, match="is a file; give the folder that it is in"):
        read_folder(path)


def test_a_folder_without_documents(tmp_path: Path) -> None:
    write(tmp_path, "a.png")
    with pytest.raises(InputError, match=r"no document to read \(\.md"):
        read_folder(tmp_path)


def test_a_folder_with_nothing_usable_says_why(tmp_path: Path) -> None:
    write(tmp_path, "nul.md", b"\0")
    with pytest.raises(InputError, match=r"skipped: nul\.md: not text"):
        read_folder(tmp_path)


@pytest.mark.parametrize(
    ("data", "lines"),
    [
        (b"a\nb\n", ["a", "b"]),
        (b"a\nb", ["a", "b"]),
        (b"a\r\nb\r\n\r\n", ["a", "b", ""]),
        ("a\x0cb\u2028c\n".encode(), ["a\x0cb\u2028c"]),
        (b"", []),
    ],
)
def test_lines_are_an_editors_lines(data: bytes, lines: list[str]) -> None:
    assert text_lines(data) == lines


# --- splitting --------------------------------------------------------------------------------------------


def document(name: str, *lines: str) -> Document:
    return Document("/docs", name, lines, "digest")


def covered(groups: list[tuple[Part, ...]]) -> list[tuple[str, int]]:
    return [
        (part.document, line)
        for group in groups
        for part in group
        for line in range(part.first, part.last + 1)
    ]


lines = st.lists(
    st.one_of(
        st.sampled_from(["", "# Heading", "## Part", "```", "- item", "    code", "Title", "====="]),
        st.text(st.characters(codec="utf-8", exclude_characters="\n\r"), max_size=400),
    ),
    min_size=1,
    max_size=60,
)


@settings(max_examples=200, deadline=None)
@given(st.lists(lines, min_size=1, max_size=8), st.integers(1, 12), st.integers(1, 30))
def test_every_line_goes_to_exactly_one_delegate(texts: list[list[str]], delegates: int, longer: int) -> None:
    folder = [document(f"{index}.md", *text * longer) for index, text in enumerate(texts)]
    groups = plan_parts(folder, delegates)
    expected = [(one.name, line) for one in folder for line in range(1, len(one.lines) + 1)]
    assert covered(groups) == expected
    assert 1 <= len(groups) <= delegates
    assert all(groups)
    for part in (part for group in groups for part in group):
        text = next(one for one in folder if one.name == part.document).lines[part.first - 1 : part.last]
        assert part.characters == sum(len(line) + 1 for line in text)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 40), st.integers(1, 12))
def test_equal_documents_are_shared_out_equally(count: int, delegates: int) -> None:
    groups = plan_parts([document(f"{index:02}.md", "x" * 500) for index in range(count)], delegates)
    assert len(groups) == min(count, delegates)
    sizes = [len(group) for group in groups]
    assert max(sizes) <= -(-count // delegates) or max(sizes) - min(sizes) <= 1


def test_a_long_document_is_split_at_its_headings() -> None:
    chapter = ["text " * 20] * 40
    book = document("book.md", *(line for n in range(4) for line in [f"# Chapter {n}", "", *chapter, ""]))
    groups = plan_parts([book], 4)
    assert [part.first for group in groups for part in group] == [1, 44, 87, 130]


def test_a_document_is_not_split_inside_code() -> None:
    code = ["```", *["x = 1"] * 300, "```"]
    text = document("a.md", *["prose " * 10] * 30, "", *code, "", *["prose " * 10] * 30)
    begins = {part.first for group in plan_parts([text], 3) for part in group}
    fence, end = 32, 32 + len(code) - 1
    assert not any(fence < begin <= end for begin in begins)


def test_a_short_document_is_not_split() -> None:
    (group,) = plan_parts([document("a.md", *["short"] * 30)], 8)
    assert [part.id for part in group] == ["a.md:1-30"]


def test_fewer_documents_than_delegates_use_all_delegates() -> None:
    folder = [document(f"{n}.md", *["word " * 20, ""] * 200) for n in range(2)]
    groups = plan_parts(folder, 6)
    assert len(groups) == 6
    sizes = [sum(part.characters for part in group) for group in groups]
    assert max(sizes) < 1.6 * min(sizes)


def test_no_part_is_longer_than_a_model_can_take() -> None:
    giant = document("giant.md", *["word " * 20] * 5000)
    groups = plan_parts([giant, document("small.md", "x")], 2)
    parts = [part for group in groups for part in group]
    assert max(part.characters for part in parts) <= MAX_PART_CHARACTERS * 1.5
    assert len(groups) == 2


def test_delegates_must_be_someone() -> None:
    with pytest.raises(InputError, match="at least 1"):
        plan_parts([document("a.md", "x")], 0)
