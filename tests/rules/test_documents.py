"""Can a reader find every document, and a reviewer read every line?

Every file of docs/ can be reached from docs/README.md, directly or through the index of its folder. A decision record
has the number of its file. Lines have at most 200 characters, outside tables and addresses.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rules.test_citations import LINK, ROOT, documents

DOCS = ROOT / "docs"
CHARS_MAX = 200


def linked(page: Path) -> set[Path]:
    """The files that a page links to."""
    targets = (target for target, _ in LINK.findall(page.read_text("utf-8")) if target)
    return {(page.parent / target).resolve() for target in targets}


def lost_documents(docs: Path) -> Iterator[str]:
    """Documents that neither the index nor the index of their folder links to."""
    index = docs / "README.md"
    known = linked(index)
    known |= {file for page in known if page.name == "README.md" for file in linked(page)}
    for path in sorted(docs.rglob("*.md")):
        if path != index and path.resolve() not in known:
            yield path.relative_to(docs).as_posix()


def misnumbered(decisions: Path) -> Iterator[str]:
    """Records whose title does not begin with the number of their file, or that share a number."""
    numbers: set[str] = set()
    for path in sorted(decisions.glob("[0-9]*.md")):
        number = path.name[:4]
        if not path.read_text("utf-8").startswith(f"# {number}: "):
            yield f"{path.name} does not begin with its number"
        if number in numbers:
            yield f"{number} is used twice"
        numbers.add(number)


def long_lines(text: str) -> Iterator[int]:
    """The numbers of the lines that are too long to review."""
    for number, line in enumerate(text.splitlines(), 1):
        without_addresses = re.sub(r"https?://\S+", "", line)
        if len(without_addresses) > CHARS_MAX and not line.lstrip().startswith("|"):
            yield number


def test_every_document_is_linked_from_the_index() -> None:
    assert list(lost_documents(DOCS)) == []


def test_records_have_the_numbers_of_their_files() -> None:
    assert list(misnumbered(DOCS / "decisions")) == []


def test_glossary_defines_each_word_once() -> None:
    rows = re.findall(r"^\| (.+?) \|", (DOCS / "glossary.md").read_text("utf-8"), re.MULTILINE)
    words = [word for row in rows for word in row.split(", ")]
    assert len(words) > 20
    assert len(words) == len(set(words))


def test_lines_can_be_reviewed() -> None:
    wrong = [
        f"{page.relative_to(ROOT)}:{number}"
        for page in documents()
        for number in long_lines(page.read_text("utf-8"))
    ]
    assert not wrong, "\n" + "\n".join(wrong)


def test_rule_sees_a_document_that_is_not_linked(tmp_path: Path) -> None:
    for folder in ("decisions", "clients"):
        (tmp_path / folder).mkdir()
    (tmp_path / "README.md").write_text(
        "[a](a.md#top) [d](decisions/README.md) [x](https://a.b/c.md)"
    )
    (tmp_path / "decisions" / "README.md").write_text("[one](0001-one.md)")
    for name in ("a.md", "b.md", "decisions/0001-one.md", "decisions/0002-two.md", "clients/c.md"):
        (tmp_path / name).write_text("# A page\n")
    assert list(lost_documents(tmp_path)) == ["b.md", "clients/c.md", "decisions/0002-two.md"]


def test_rule_sees_a_record_with_another_number(tmp_path: Path) -> None:
    for name, title in (("0001-a", "0001: A"), ("0002-b", "1. B"), ("0002-c", "0002: C")):
        (tmp_path / f"{name}.md").write_text(f"# {title}\n")
    assert list(misnumbered(tmp_path)) == [
        "0002-b.md does not begin with its number",
        "0002 is used twice",
    ]


@pytest.mark.parametrize(
    "line, is_long",
    [
        ("x" * 200, False),
        ("x" * 201, True),
        ("| " + "x" * 300 + " |", False),
        ("see https://example.com/" + "x" * 300, False),
        ("see https://example.com/ " + "x" * 300, True),
    ],
)
def test_rule_sees_a_line_that_is_too_long(line: str, is_long: bool) -> None:
    assert list(long_lines("short\n" + line)) == ([2] if is_long else [])
