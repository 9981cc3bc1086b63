"""How does a model write, as data that a person can see and correct?

A `DerivedFamily` has the words of one template, letter by letter. From it come the `CallFormat` by which answers are
read, and the `Spelling` to which forced calls are held. `to_toml` and `from_toml` are its file.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec
from msgspec import Struct

from segue.derivation.atoms import OPEN_TAG, Lexer
from segue.errors import Misconfigured
from segue.readers.call_json import Braces
from segue.readers.call_tags import JSON_QUOTE, Spelling
from segue.readers.formats import OBJECTS, CallFormat, CallShape, Notation, Tags

# How often the version of the file has changed.
FILE_VERSION = 1
TEXT_CHARS_MAX = 400


class Thoughts(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The marks of a thought."""

    begin: str
    end: str
    # Which thoughts of earlier answers a prompt has: "all", "until the user speaks", "none" or "unknown".
    kept: str = "unknown"


class Arguments(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """How the arguments of a call are written."""

    # "json": one JSON object; "tags": a value between two marks; "notation": an object that is not JSON.
    form: str
    # Before and after one value: `%key%` or `%tag%` is its name, `%type%` its type.
    opening: str = ""
    closing: str = ""
    separator: str = ""
    # Around a string in a notation.
    quotes: tuple[str, ...] = ()
    has_escapes: bool = False
    # What stands before the tags of lists and objects in a value.
    nested: str = ""
    booleans: tuple[str, ...] = ("true", "false")
    # What the template says of the type of a string, and of another value.
    string_type: str = ""
    other_type: str = ""
    is_sorted: bool = False
    # What stands around a value in tags that has letters of tags in it.
    raw: tuple[str, str] | None = None


class Calls(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """How a call is written: `%name%` is the tool, `%id%` the id of the call, `%index%` its number."""

    # Before the first call, before the arguments of each, after them, between two calls, and after the last.
    header: str
    end: str
    arguments: Arguments
    section_begin: str = ""
    separator: str = ""
    section_end: str = ""
    # The first number of a call.
    first_index: int = 0
    # Whether several calls may stand in one answer.
    is_parallel: bool = True


class DerivedFamily(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """How a model writes, as its own template does."""

    version: int = FILE_VERSION
    thoughts: Thoughts | None = None
    calls: Calls | None = None
    # Marks around the words of an answer that say nothing.
    dropped: tuple[str, ...] = ()
    # How the output of a tool is written; `%result%` is the output. Shown, not used: the template writes it.
    result: str = ""
    # The parts that are not read, and why.
    refused: dict[str, str] = {}


@dataclass(frozen=True, slots=True)
class Readable:
    """A family as readers and forced calls take it."""

    format: CallFormat
    spelling: Spelling | None


def readable(family: DerivedFamily, lexer: Lexer) -> Readable:
    """The values by which this family is read and forced; `Misconfigured` where its data do not fit together."""
    thoughts = family.thoughts
    think = thoughts.begin.strip() if thoughts else ""
    thought = thoughts.end.strip() if thoughts else ""
    if family.calls is None:
        format = CallFormat("derived", (), (), (), (), think, thought, dropped=family.dropped)
        return Readable(format, None)
    calls = family.calls
    before, _, after = calls.header.partition("%name%")
    if not _ or "%name%" in after:
        raise Misconfigured("the header of a call has no %name%, or more than one.")
    split = _Split(calls, before, after, lexer)
    return Readable(
        CallFormat(
            "derived",
            (),
            split.begins,
            split.ends,
            split.shapes,
            think,
            thought,
            dropped=family.dropped,
            is_listed=split.is_listed,
            is_lined=split.is_lined,
            is_bare=not split.begins,
        ),
        _spelling(calls),
    )


class _Split:
    """A call cut into the mark that begins it, its header, what closes it, and the mark that ends calls."""

    def __init__(self, calls: Calls, before: str, after: str, lexer: Lexer) -> None:
        self._lexer = lexer
        section = calls.section_begin.strip()
        section_end = calls.section_end.strip()
        # A list around the calls.
        begin, header = (section, before) if section else ("", before)
        opened = f"{section}{before}"
        if not section:
            begin, header = self._first_mark(before)
        self.is_listed = begin.endswith("[") or header.lstrip().startswith("[")
        if begin.endswith("["):
            begin = begin[:-1].rstrip()
        header = header.lstrip()
        if header.startswith("["):
            header = header[1:].lstrip()
        if self.is_listed and section_end.startswith("]"):
            section_end = section_end[1:].lstrip()
        closing, end = self._closing(calls, opened, section_end)
        if self.is_listed and closing.endswith("]"):
            closing = closing[:-1].rstrip()
        # Objects without a mark, with commas between, or calls in a section that have a mark each.
        separated = (",", ";") if section else () if begin else (",",)
        self.is_listed |= calls.separator.strip() in separated
        between = calls.end + calls.separator
        self.is_lined = bool(section and section_end) and between.isspace() and "\n" in between
        self.begins = (begin,) if begin else ()
        self.ends = (end,) if end else ()
        if begin and not lexer.begins_with_mark(begin):
            raise Misconfigured(f"calls begin with {begin!r}, which is no mark but words.")
        is_open = calls.arguments.opening.startswith("(")
        shape = CallShape(
            relaxed(f"{header}%name%{after}") + ("( " if is_open else ""),
            ahead=self._ahead(calls, after, closing or end),
            arguments=_argument_reader(calls.arguments, closing),
            closing=closing,
        )
        self.shapes: tuple[CallShape, ...] = (shape,)
        if not begin:
            # A bare object is read where it has the usual keys only.
            bare = {relaxed(shape.header.replace(" ", "")) for shape in OBJECTS}
            if shape.header.replace(" ", "") not in {usual.replace(" ", "") for usual in bare}:
                raise Misconfigured(f"calls begin without a mark, with {before!r}.")
            self.shapes = OBJECTS

    def _first_mark(self, before: str) -> tuple[str, str]:
        """The marks at the beginning, up to white space or a brace, and the rest."""
        atoms = self._lexer.atoms(before.lstrip())
        end = 0
        for n, atom in enumerate(atoms):
            if atom.isspace() or atom in "{[":
                break
            if self._lexer.is_mark(atom):
                end = n + 1
        if end == 0 and atoms and atoms[0] == "<":
            # A tag with the name of the tool in it.
            return before.strip(), ""
        return "".join(atoms[:end]), "".join(atoms[end:])

    def _closing(self, calls: Calls, opened: str, section_end: str) -> tuple[str, str]:
        """What closes each call, and what ends all calls."""
        text = calls.end.strip()
        depth = _depth(calls.header.partition("%name%")[2], opened)
        closing = ""
        if depth:
            braces = Braces(depth)
            at = braces.end_in(text)
            if at is None:
                raise Misconfigured(f"the object of a call is not closed by {text!r}.")
            closing, text = "}" * depth, text[at:].strip()
        if section_end or calls.section_begin.strip():
            return closing + text, section_end
        if depth:
            return closing, text
        *inner, last = text.split() or [""]
        return (" ".join(inner), last) if inner else self._halves(last)

    def _halves(self, text: str) -> tuple[str, str]:
        """Marks in a row: the last one ends the calls."""
        atoms = self._lexer.atoms(text)
        if len(atoms) > 1 and all(map(self._lexer.is_mark, atoms)):
            return "".join(atoms[:-1]), atoms[-1]
        return "", text

    @staticmethod
    def _ahead(calls: Calls, after: str, closing: str) -> tuple[str, ...]:
        """What may follow a header: needed where nothing else ends the name."""
        arguments = calls.arguments
        match arguments.form:
            case "json":
                is_object = calls.end.strip().startswith(("}", ","))
                others = (closing,) if closing and not is_object else ()
                return ("{", *others)
            case "notation" if not arguments.opening.startswith("("):
                return ("{",)
            case "tags" if not after.strip():
                begin = arguments.opening.partition("%")[0].strip()
                return tuple(mark for mark in (begin, closing) if mark)
            case _:
                return ()


def _depth(after: str, opened: str) -> int:
    """How many objects are open where the arguments begin."""
    depth = 0
    for letter in re.sub(r'"[^"]*"', "", (opened + after).replace("%name%", "")):
        depth += {"{": 1, "}": -1}.get(letter, 0)
    return max(depth, 0)


def relaxed(header: str) -> str:
    """A header in which white space may be more or less, where it is that of JSON."""
    text = re.sub(r"\s+", " ", header.replace("%id%", "%any%"))
    if not re.search(r'\{.*"', text):
        return text
    before, brace, rest = text.partition("{")
    parts = re.split(r'("[^"]*")', brace + rest)
    spaced = [
        part if n % 2 else re.sub(r"\s*([{}\[\]:,])\s*", r" \1 ", part)
        for n, part in enumerate(parts)
    ]
    joined = re.sub(r" +", " ", "".join(spaced))
    return before + joined.lstrip()


def _argument_reader(arguments: Arguments, call_end: str) -> Tags | Notation | None:
    match arguments.form:
        case "json":
            return None
        case "tags":
            closing = arguments.closing
            is_on_line = closing.startswith("\n")
            is_wrapped = is_on_line and arguments.opening.endswith("\n")
            begin = arguments.opening.partition("%")[0].strip()
            ended = call_end.split("\n")[0].strip()
            # What begins on a new line after a value whose own end is missing; only a tag with the name of a parameter.
            is_missed = OPEN_TAG.match(begin) and f"{closing}{arguments.separator}".endswith("\n")
            return Tags(
                re.sub(r"\s+", " ", arguments.opening).strip(),
                closing.strip(),
                f"\n{begin}" if is_missed else "",
                (f"\n{ended}",) if is_missed and ended else (),
                is_wrapped=is_wrapped,
                is_ended_on_line=is_on_line and not is_wrapped,
                nested=arguments.nested,
                raw=arguments.raw,
                comma="," if arguments.separator.strip() == "," else "",
            )
        case "notation":
            return Notation(
                arguments.quotes, arguments.has_escapes, is_open=arguments.opening.startswith("(")
            )
        case other:
            raise Misconfigured(f"arguments are written in no form that is called {other!r}.")


def _spelling(calls: Calls) -> Spelling | None:
    arguments = calls.arguments
    first = calls.header.replace("%index%", str(calls.first_index))
    before, _, after = first.partition("%name%")
    begin = calls.section_begin + before
    end = calls.end + calls.section_end
    # The name stands inside a mark or an object: all of that is the header.
    atom = re.search(r'(?:<[^<>\s]*[\s="]*[^<>\n]*|\{[^{}]*)\Z', begin)
    at = atom.start() if atom else len(begin)
    begin, header = begin[:at], f"{begin[at:]}%name%{after}"
    if arguments.form == "json":
        return Spelling(begin, header, end)
    if arguments.form == "tags":
        opening = arguments.opening.replace("%tag%", "%key%")
        if arguments.nested:
            # Lists and objects in tags are read, and not spelt.
            return None
        if "%type%" in opening and (arguments.string_type, arguments.other_type) != (
            "true",
            "false",
        ):
            return None
        opening = opening.replace("%type%", "%string%")
        return Spelling(
            begin, header, end, (opening, arguments.closing.replace("%tag%", "%key%")),
            separator=arguments.separator, booleans=arguments.booleans,
        )  # fmt: skip
    is_open = arguments.opening.startswith("(")
    opening = arguments.opening.lstrip("({")
    bracket, closed = ("(", ")") if is_open else ("{", "}")
    quote = arguments.quotes[0] if arguments.quotes else JSON_QUOTE
    return Spelling(
        begin, f"{header}{bracket}", f"{closed}{end}", (opening, ""), quote,
        separator=arguments.separator, booleans=arguments.booleans, is_sorted=arguments.is_sorted,
    )  # fmt: skip


# --- its file -----------------------------------------------------------------------------------------

HEAD = (
    "# How this model writes, worked out from its chat template. Slots: %name% is the tool, %key% a\n"
    "# parameter, %id% the id of a call, %index% its number, %type% the type of a value.\n"
    "# Use it with --dialect FILE: it is proven against the template before it is used.\n"
)


def to_toml(family: DerivedFamily) -> str:
    """The file of this family."""
    built = {"version": FILE_VERSION, **msgspec.to_builtins(family)}
    return HEAD + "\n".join(_lines("", built))


def _lines(path: str, table: dict[str, object]) -> Iterator[str]:
    """Values first, then the tables inside."""
    for name, value in table.items():
        if not isinstance(value, dict):
            yield f"{_key(name)} = {json.dumps(value, ensure_ascii=False)}"
    for name, value in table.items():
        if isinstance(value, dict):
            inner = f"{path}.{_key(name)}" if path else _key(name)
            yield f"\n[{inner}]"
            yield from _lines(inner, value)
    if not path:
        yield ""


def _key(name: str) -> str:
    return name if re.fullmatch("[A-Za-z0-9_-]+", name) else json.dumps(name, ensure_ascii=False)


def from_toml(text: str, path: str) -> DerivedFamily:
    """The family in this file."""
    try:
        family = msgspec.convert(tomllib.loads(text), DerivedFamily)
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as wrong:
        raise Misconfigured(f"dialect: {path} is no description of a dialect: {wrong}.") from None
    if family.version != FILE_VERSION:
        raise Misconfigured(
            f"dialect: {path} has version {family.version}; this Segue reads version {FILE_VERSION}. "
            "Make it again with segue models derive."
        )
    if long := next(
        (text for text in _texts(msgspec.to_builtins(family)) if len(text) > TEXT_CHARS_MAX), ""
    ):
        raise Misconfigured(
            f"dialect: {path} has a mark of more than {TEXT_CHARS_MAX} letters: {long[:40]!r}…"
        )
    return family


def _texts(value: object) -> Iterator[str]:
    match value:
        case str():
            yield value
        case list() | tuple():
            for entry in value:
                yield from _texts(entry)
        case dict():
            for entry in value.values():
                yield from _texts(entry)
        case _:
            pass
