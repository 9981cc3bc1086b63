"""One thing, one word: is the glossary short, are names unique, are messages in plain words?

- docs/glossary.md defines a word of ours once, in alphabetical order, and has few of them.
- A public class or type of the package has a name that no other one has.
- Texts that people read use no old-fashioned words: logs, errors, help, that is, every string that is no docstring.
- In the rooms of `CLEAN`, docstrings and comments use none either, and nothing is called `one`: the noun says more. A
  room that has been cleaned is added here, and stays clean.

Made-up pages and trees show that each rule can fail.
"""

from __future__ import annotations

import ast
import re
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "segue"
GLOSSARY = ROOT / "docs" / "glossary.md"

TERMS_MAX = 45
# Names that two files may have, and why. Empty on purpose.
SHARED_NAMES: dict[str, str] = {}
# What an engineer would not type into a search box, and what to write instead.
BANNED = {
    "told": "returned, sent, reported",
    "whoever": "the client, the caller",
    "nobody": "no client, no key",
    "somebody": "a client, another owner",
    "behind": "after",
    "in vain": "without a result",
    "by heart": "cached",
    "left alone": "not changed",
    "cannot be had": "is not available",
    "is of no use": "cannot be used",
}
# Rooms and packages whose docstrings, comments and names are in plain words too.
CLEAN = (
    *(
        "segue/cluster",
        "segue/derivation",
        "segue/dialects",
        "segue/documents",
        "segue/exports",
        "segue/guards",
    ),
    *("segue/listener", "segue/memory", "segue/openapi", "segue/readers", "segue/replicas"),
    *(
        "segue/responses",
        "segue/server",
        "segue/session",
        "segue/settings",
        "segue/seals",
        "segue/stores",
    ),
    *("segue/vocabularies", "segue/web", "segue/wire", "segue/workers"),
    *("segue_bench", "segue_conform", "segue_dashboard", "segue_embedded", "segue_fleet"),
)
# What is quoted as code is a name and no word of ours: a user called `nobody`.
QUOTED = re.compile(r"`[^`]*`")
FILLER = "one"
BANNED_WORDS = re.compile(rf"\b({'|'.join(BANNED)})\b", re.IGNORECASE)


# --- the glossary -----------------------------------------------------------------------------------------------------


def terms(page: str) -> list[list[str]]:
    """The words that a glossary defines, in its order; a row may define two that belong together."""
    cells = re.findall(r"^\| (?!word |-)([^|]+?) \|", page, re.MULTILINE)
    return [cell.split(", ") for cell in cells]


def glossary_complaints(page: str) -> Iterator[str]:
    rows = terms(page)
    count = Counter(term for row in rows for term in row)
    yield from (f"{term} is defined twice" for term in count if count[term] > 1)
    if count.total() > TERMS_MAX:
        yield f"{count.total()} terms are more than {TERMS_MAX}"
    if rows != sorted(rows):
        yield "the terms are not in alphabetical order"


# --- names ------------------------------------------------------------------------------------------------------------


def public_types(tree: ast.Module) -> Iterator[str]:
    """The public classes and type aliases at the top of a module. A TypeVar is no type."""
    for node in tree.body:
        match node:
            case ast.ClassDef(name=name):
                pass
            case ast.Assign(value=ast.Call(func=ast.Name(id=maker))) if maker != "NewType":
                continue
            case ast.Assign(targets=[ast.Name(id=name)]):
                pass
            case ast.AnnAssign(target=ast.Name(id=name)):
                pass
            case _:
                continue
        # A constant has capitals only.
        if name[0].isupper() and (isinstance(node, ast.ClassDef) or not name.isupper()):
            yield name


def repeated_names(package: Path) -> Iterator[str]:
    """Public types that more than one file defines."""
    places: dict[str, list[str]] = defaultdict(list)
    for path in sorted(package.rglob("*.py")):
        for name in public_types(ast.parse(path.read_bytes())):
            places[name].append(path.relative_to(package).as_posix())
    for name, files in sorted(places.items()):
        if len(files) > 1 and name not in SHARED_NAMES:
            yield f"{name}: {', '.join(files)}"


# --- messages ---------------------------------------------------------------------------------------------------------


def texts(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """The strings of a module that are no docstrings, with their lines."""
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
        if is_text and id(node) not in docstrings:
            yield node.lineno, node.value


def old_words(package: Path) -> Iterator[str]:
    """Banned words in texts that people read."""
    for path in sorted(package.rglob("*.py")):
        for line, text in texts(ast.parse(path.read_bytes())):
            # One word alone is a key or a name.
            for found in BANNED_WORDS.finditer(text) if " " in text.strip() else ():
                place = path.relative_to(package).as_posix()
                yield f'{place}:{line}: "{found[0]}" in "{text}"; say {BANNED[found[0].lower()]}'


# --- docstrings, comments and filler names ----------------------------------------------------------------------------

DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """The docstrings and comments of a module, with their lines."""
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, DOCUMENTED) and (text := ast.get_docstring(node)) is not None:
            yield node.body[0].lineno, text
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type == tokenize.COMMENT:
                yield token.start[0], token.string


def bindings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Every name that is given to a value, with its line: variables, parameters and captures of a pattern."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store(), lineno=line):
                yield line, name
            case ast.arg(arg=name, lineno=line):
                yield line, name
            case (
                ast.MatchAs(name=str(name), lineno=line)
                | ast.MatchStar(name=str(name), lineno=line)
            ):
                yield line, name


def unclean(room: Path) -> Iterator[str]:
    """Banned words in docstrings and comments, and values that are called `one`."""
    for path in sorted(room.rglob("*.py")):
        for line, text in prose(path):
            for word in BANNED_WORDS.findall(QUOTED.sub("", text)):
                yield f'{path.name}:{line}: "{word}" in a docstring or comment; say {BANNED[word.lower()]}'
        for line, name in bindings(ast.parse(path.read_bytes())):
            if name == FILLER:
                yield f'{path.name}:{line}: "{name}" is no name; say what it is, as in `for turn in turns`'


def test_glossary_is_short_and_defines_each_word_once() -> None:
    assert list(glossary_complaints(GLOSSARY.read_text("utf-8"))) == []


def test_public_type_names_are_unique() -> None:
    found = list(repeated_names(PACKAGE))
    assert not found, "\n" + "\n".join(found)


def test_messages_use_plain_words() -> None:
    found = list(old_words(PACKAGE))
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize("room", CLEAN)
def test_clean_room_stays_clean(room: str) -> None:
    assert (PACKAGE.parent / room).is_dir(), f"{room} is not there any more"
    complaints = list(unclean(PACKAGE.parent / room))
    assert not complaints, "\n" + "\n".join(complaints)


# --- the rules can fail -----------------------------------------------------------------------------------------------

HEAD = "# Glossary\n\n| word | meaning |\n|---|---|\n"


@pytest.mark.parametrize(
    "rows, complaint",
    [
        (["chain", "fork", "near, far"], ""),
        (["chain", "fork", "fork"], "fork is defined twice"),
        (["chain", "far, near", "near"], "near is defined twice"),
        (["fork", "chain"], "the terms are not in alphabetical order"),
        ([f"word{n:02}" for n in range(TERMS_MAX + 1)], f"{TERMS_MAX + 1} terms are more"),
    ],
)
def test_rule_tells_a_good_glossary_from_a_bad_one(rows: list[str], complaint: str) -> None:
    page = HEAD + "".join(f"| {row} | a meaning |\n" for row in rows)
    found = list(glossary_complaints(page))
    assert [one.startswith(complaint) for one in found] == ([True] if complaint else [])


@pytest.mark.parametrize(
    "one, other, complains",
    [
        ("class Answer: ...", "class Reply: ...", False),
        ("class Answer: ...", "class Answer: ...", True),
        ("class Answer: ...", "Answer = str | None", True),
        ("class Answer: ...", "Answer: TypeAlias = str", True),
        ("Owner = NewType('Owner', str)", "class Owner: ...", True),
        ("Value = TypeVar('Value')", "class Value: ...", False),
        ("class _Answer: ...", "class _Answer: ...", False),
        ("LIMIT = 1", "LIMIT = 2", False),
        ("class Answer: ...", "def f():\n    class Answer: ...", False),
    ],
)
def test_rule_sees_a_name_that_two_files_have(
    tmp_path: Path, one: str, other: str, complains: bool
) -> None:
    for room, text in (("wire", one), ("turn", other)):
        (tmp_path / room).mkdir()
        (tmp_path / room / "items.py").write_text(text)
    assert bool(list(repeated_names(tmp_path))) is complains


@pytest.mark.parametrize(
    "text, complains",
    [
        ('log.info("the peer was told twice")', True),
        ('raise NotFound(f"Nobody has {name}.")', True),
        ('parser.add_argument("--x", help="a key that is of no use")', True),
        ('log.info("the peer was informed twice")', False),
        ('kind = "told"', False),
        ('"""Nobody is told behind."""', False),
    ],
)
def test_rule_sees_an_old_word(tmp_path: Path, text: str, complains: bool) -> None:
    (tmp_path / "file.py").write_text(text)
    assert bool(list(old_words(tmp_path))) is complains


@pytest.mark.parametrize(
    "text, complains",
    [
        ('"""Nobody is told."""', True),
        ('def f():\n    """What stands behind it."""', True),
        ("x = 1  # whoever asks", True),
        ('"""It runs as `nobody`, and is informed."""', False),
        ('log.info("told")', False),
        ("for one in range(3): ...", True),
        ("one = 1", True),
        ("while one := f(): ...", True),
        ("[one for one in ()]", True),
        ("def f(one): ...", True),
        ("lambda one: 1", True),
        ("match x:\n    case [one]: ...", True),
        ("match x:\n    case [1, *one]: ...", True),
        ("turn.one = f(one=1, other=one)", False),
        ("for turn in turns: ...", False),
    ],
)
def test_rule_sees_what_is_not_clean(tmp_path: Path, text: str, complains: bool) -> None:
    (tmp_path / "file.py").write_text(text)
    assert bool(list(unclean(tmp_path))) is complains
