"""Does every reference to a document lead somewhere?

Code, tests and benchmarks cite documents in comments and docstrings: `docs/protocol.md 6.10`, `docs/protocol.md 9 row
14`, `docs/protocol.md 5.2 rule 5`, `docs/inside/hazards.md F22`. The file must be in the repository and have that
heading, row or rule. The id of a hazard stands only after the name of its page. Documents link to each other: file and
heading must exist. Made-up texts show that each rule can fail.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CODE = ("src", "tests", "bench", "examples")
# Names of Markdown files that are no documents of ours: one that Segue writes, and a pattern.
NO_DOCUMENTS = {"SKILL.md", "segue-small-model.md", "NNNN-few-words.md"}

NAME = re.compile(r"(?<![\w/.-])[\w./-]*[\w-]\.md\b")
MARK = r"(?:[FT]\d+|\d+(?:\.\d+)*)"
PART = rf"{MARK}(?: (?:rows?|rules?) \d+(?: and \d+)*)?"
CITATION = re.compile(
    rf"(?P<page>docs/[\w./-]+\.md) (?P<parts>{PART}(?:(?:,? and |, | to ){PART})*)(?![\w%])"
)
HAZARD = re.compile(r"(?<![\w/-])[FT]\d{1,2}\b")
# What a text has that cites anything.
CITES = re.compile(rf"\.md\b|{HAZARD.pattern}")
HEADING = re.compile(r"^(#+) (.+)$", re.MULTILINE)
LINK = re.compile(r"\]\((?!\w+:)([^)#\s]*)(?:#([^)\s]+))?\)")


# --- what is read -----------------------------------------------------------------------------------------------------


@cache
def prose(path: Path) -> str:
    """The comments and docstrings of a Python file, each on one line; the whole text of another file."""
    text = path.read_text("utf-8")
    if path.suffix != ".py":
        return " ".join(text.split())
    strings = [
        node.value.value
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    ]
    comments: list[str] = []
    last = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            words = token.string.strip("#: ")
            if token.start[0] == last + 1 and comments:
                comments[-1] += " " + words
            else:
                comments.append(words)
            last = token.start[0]
    return "\n".join(" ".join(part.split()) for part in (*strings, *comments))


@cache
def code_files() -> list[Path]:
    """Those that cite anything."""
    kinds = {".py", ".sql", ".js", ".css"}
    return [
        path
        for folder in CODE
        for path in sorted((ROOT / folder).rglob("*"))
        if path.suffix in kinds
        and "node_modules" not in path.parts
        and CITES.search(path.read_text("utf-8"))
    ]


def documents() -> list[Path]:
    return [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


@cache
def marks(page: str) -> frozenset[str]:
    """What can be cited of a page: `6.10`, `9 row 14`, `5.2 rule 5`, and ids of hazards."""
    found: set[str] = set()
    section = ""
    for line in page.splitlines():
        if heading := re.match(r"#+ (\d+(?:\.\d+)*)\.? ", line):
            section = heading[1]
            found.add(section)
        elif line.startswith("#"):
            section = ""
        elif row := re.match(r"\| ([FT]?\d+) \|", line):
            found.add(row[1] if row[1][0] in "FT" else f"{section} row {row[1]}")
        elif rule := re.match(r"(\d+)\. ", line):
            found |= {f"{section} rule {rule[1]}", f"{section} row {rule[1]}"}
    return frozenset(found)


def cited(parts: str) -> Iterator[str]:
    """`9 rows 15 and 16, 4.4` -> `9 row 15`, `9 row 16`, `4.4`."""
    for part in re.findall(PART, parts):
        mark, _, rest = part.partition(" ")
        kind, _, numbers = rest.partition(" ")
        if not rest:
            yield mark
        for number in re.findall(r"\d+", numbers):
            yield f"{mark} {kind.rstrip('s')} {number}"


@cache
def anchors(page: str) -> frozenset[str]:
    """The names under which headings can be linked to."""
    titles = (
        re.sub(r"[`*]|\[([^]]*)\]\([^)]*\)", r"\1", found[2]) for found in HEADING.finditer(page)
    )
    return frozenset(re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles)


# --- the rules --------------------------------------------------------------------------------------------------------


def missing_documents(text: str, root: Path) -> Iterator[str]:
    """Documents that a comment names and that are not in the repository, by their path from its root."""
    for name in NAME.findall(text):
        if name not in NO_DOCUMENTS and not (root / name).is_file():
            yield name


def missing_marks(text: str, root: Path) -> Iterator[str]:
    """Sections, rows and rules that are cited and are not there."""
    for found in CITATION.finditer(text):
        path = root / found["page"]
        known = marks(path.read_text("utf-8")) if path.is_file() else frozenset[str]()
        yield from (
            f"{found['page']} {mark}" for mark in cited(found["parts"]) if mark not in known
        )


def bare_hazards(text: str, root: Path) -> Iterator[str]:
    """Ids of hazards that do not follow the name of their page."""
    yield from HAZARD.findall(CITATION.sub("", text))


def dead_links(path: Path) -> Iterator[str]:
    """Links of a document to files or headings that are not there."""
    text = path.read_text("utf-8")
    for target, anchor in LINK.findall(re.sub(r"```.*?```", "", text, flags=re.DOTALL)):
        other = (path.parent / target) if target else path
        if not other.exists():
            yield target
        elif anchor and anchor not in anchors(other.read_text("utf-8")):
            yield f"{target}#{anchor}"


def unknown_names(path: Path, root: Path) -> Iterator[str]:
    """Documents that a document names and that are found neither beside it, nor in docs/, nor from the root."""
    for name in NAME.findall(re.sub(r"https?://\S+", "", path.read_text("utf-8"))):
        if name not in NO_DOCUMENTS and not any(
            (at / name).is_file()
            for at in (path.parent, root / "docs", root / "docs" / "inside", root)
        ):
            yield name


Rule = Callable[[str, Path], Iterator[str]]
CODE_RULES: list[Rule] = [missing_documents, missing_marks, bare_hazards]


@pytest.mark.parametrize("rule", CODE_RULES, ids=lambda rule: rule.__name__)
def test_code_cites_only_what_is_there(rule: Rule) -> None:
    wrong = [
        f"{path.relative_to(ROOT)}: {complaint}"
        for path in code_files()
        for complaint in rule(prose(path), ROOT)
    ]
    assert wrong == []


def test_documents_link_only_to_what_is_there() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}: {link}" for path in documents() for link in dead_links(path)
    ]
    assert wrong == []


def test_documents_name_only_documents_that_are_there() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in documents()
        for name in unknown_names(path, ROOT)
    ]
    assert wrong == []


# --- the rules can fail -----------------------------------------------------------------------------------------------

PAGE = """
## 5. Events

### 5.2 Order

1. First.
2. Second.

## 9. Choices

| # | question |
|---|---|
| 14 | where? |

## Rows

| F22 | overlap |
"""

CASES: list[tuple[Rule, str, bool]] = [
    (missing_documents, "see docs/page.md", False),
    (missing_documents, "see page.md", True),
    (missing_documents, "see docs/other.md.", True),
    (missing_marks, "docs/page.md 5.2", False),
    (missing_marks, "(docs/page.md 5.2 rule 2, 9 row 14).", False),
    (missing_marks, "docs/page.md 5 and 5.2: both", False),
    (missing_marks, "docs/page.md F22", False),
    (missing_marks, "docs/page.md 6", True),
    (missing_marks, "docs/page.md 5, 5.3", True),
    (missing_marks, "docs/page.md 9 rows 14 and 15", True),
    (missing_marks, "docs/page.md 5.2 rule 3", True),
    (missing_marks, "docs/page.md F22, F23", True),
    (missing_marks, "docs/gone.md 5", True),
    (bare_hazards, "docs/page.md F22, F23: a row", False),
    (bare_hazards, "T1: another row", True),
    (bare_hazards, "docs/page.md F22. And T3.", True),
    (bare_hazards, "float32, UTF8, F16C, /F1", False),
]


@pytest.mark.parametrize(
    "rule, text, complains", CASES, ids=[f"{case[0].__name__}-{n}" for n, case in enumerate(CASES)]
)
def test_rule_tells_a_good_citation_from_a_bad_one(
    tmp_path: Path, rule: Rule, text: str, complains: bool
) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "page.md").write_text(PAGE)
    assert bool(list(rule(text, tmp_path))) is complains


def test_rule_tells_a_good_link_from_a_bad_one(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# A page: `of` things\n[a](page.md) [b](#a-page-of-things) [c](gone.md) [d](page.md#gone) page.md, left.md"
    )
    assert list(dead_links(page)) == ["gone.md", "page.md#gone"]
    assert list(unknown_names(page, tmp_path)) == ["gone.md", "left.md"]


def test_prose_is_comments_and_docstrings(tmp_path: Path) -> None:
    file = tmp_path / "file.py"
    file.write_text('"""One\n   two."""\nname = "no"\n# three\n# four\n\n\n# five\n')
    assert prose(file) == "One two.\nthree four\nfive"
