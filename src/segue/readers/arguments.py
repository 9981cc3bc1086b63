"""What are the arguments of a call, while the model still writes them?

In: the text after the header of a call, cut anywhere, in the notation of the format. Out: the same as JSON, as soon as
it is certain: strings while they are written, other values when they are whole.

A value in tags has no type of its own; the tool's schema says it. What the schema calls a string, or does not know, is
a string. Everything else is read as JSON, or as Python where it is not; what is neither stays a string.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from typing import Protocol

import msgspec

from segue.readers.call_json import Braces
from segue.readers.formats import CallShape, Notation, Tags
from segue.readers.marks import (
    HEADER_CHARS_MAX,
    LETTERS,
    any_of,
    header,
    held_back,
    is_special,
)
from segue.schemas.json_schema import ANY, NAMES, TEXT, JsonSchema, properties_of

# What a template may say of a value that is a string.
STRINGS = ("true", "string")
WORDS = {"True": "true", "False": "false", "None": "null"}
TOKEN = re.compile(rf"\s+|[{{\[(]|[}}\])]|[,:=]|[^\s{{}}\[\](),:='\"<{LETTERS}]+|.", re.DOTALL)
PYTHON_ESCAPE = re.compile(
    r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[^xuU])", re.DOTALL
)
PYTHON_ESCAPE_CHARS_MAX = 10
# Quotes that words have, too; and what stands after a string in them.
PLAIN_QUOTES = ("'", '"')
AFTER_STRING = ",:=)]}"
ESCAPES = {
    "n": "\n",
    "t": "\t",
    "r": "\r",
    "b": "\b",
    "f": "\f",
    "\\": "\\",
    "'": "'",
    '"': '"',
    "\n": "",
}


class ArgumentsReader(Protocol):
    """Reads the arguments of one call."""

    def feed(self, text: str) -> tuple[str, str | None]:
        """What is certain now, as JSON; and the text after the arguments, or None if they go on."""

    def close(self) -> str:
        """What is missing in the JSON, if there is no more text."""


def arguments_reader(
    shape: CallShape, schema: JsonSchema, following: tuple[str, ...] = ()
) -> ArgumentsReader:
    """Reads the arguments of a call of this shape; the schema is the tool's. `following`: what may stand after it."""
    match shape.arguments:
        case Tags() as tags:
            begin = shape.header.partition("%")[0].strip()
            return TaggedArguments(tags, schema, (*following, *filter(None, (begin,))))
        case Notation() as notation:
            return NotedArguments(notation)
        case None:
            return JsonArguments()


class JsonArguments:
    """JSON stays as it was written; nothing at all is an empty object."""

    def __init__(self) -> None:
        self._braces = Braces()

    def feed(self, text: str) -> tuple[str, str | None]:
        is_fresh = self._braces.depth == 0
        end = self._braces.end_in(text)
        return "{}" if is_fresh and end == 0 else text[:end], None if end is None else text[end:]

    def close(self) -> str:
        return ""


# --- values in tags -------------------------------------------------------------------------------


# Newlines between the end of a call and what follows it.
GAPS = ("", "\n", "\n\n")


@cache
def missed_ends(tags: Tags, following: tuple[str, ...]) -> tuple[str, ...]:
    """What ends a value whose own end is missing: the next parameter, or the end of the call with what follows it. The
    end of a call alone may stand in a value: a file that is written has any lines."""
    ends = [
        mark if mark[1:] in following else f"{mark}{gap}{after}"
        for mark in tags.missed_ends
        for after in following or ("",)
        for gap in GAPS
    ]
    return tuple(dict.fromkeys((*filter(None, (tags.missed_next,)), *ends)))


class TaggedArguments:
    """Every parameter stands in tags of its own."""

    def __init__(self, tags: Tags, schema: JsonSchema, following: tuple[str, ...] = ()) -> None:
        self._tags = tags
        self._opening = header(tags.opening)
        self._closing = tags.closing
        self._missed = missed_ends(tags, following)
        self._ends = (tags.closing, *self._missed)
        self._schema = schema
        # The parameters that were read.
        self._keys: set[str] = set()
        self._held = ""
        self._before = "{"
        # What a value may be; None between two values.
        self._types: frozenset[str] | None = None
        self._value: list[str] = []
        # Whether a value may begin with what stands around raw text.
        self._may_be_raw = False

    def feed(self, text: str) -> tuple[str, str | None]:
        rest: str | None = self._held + text
        self._held = ""
        parsed: list[str] = []
        while rest is not None:
            if self._types is None:
                bare = rest.lstrip()
                if self._tags.comma:
                    bare = bare.removeprefix(self._tags.comma).lstrip()
                opening = self._opening.whole.match(bare)
                if opening is None and self._opening.may_begin(bare):
                    self._held = rest
                    break
                if opening is None:
                    return "".join(parsed) + self._ended(), rest
                parsed.append(self._begun(opening))
                rest = bare[opening.end() :]
            else:
                rest = self._more(rest, parsed)
        return "".join(parsed), None

    def close(self) -> str:
        if self._types is None:
            return self._ended()
        parsed: list[str] = []
        missed = next(
            (mark for mark in self._tags.missed_ends if self._held.startswith(mark)), None
        )
        self._end_value("" if missed else self._held, parsed)
        return "".join(parsed) + self._ended()

    def _begun(self, opening: re.Match[str]) -> str:
        said = opening.groupdict()
        key = said["key"].strip()
        self._keys.add(key)
        kind = said.get("type")
        if kind is None:
            self._types = self._schema.types(properties_of(self._schema.root).get(key))
        else:
            self._types = TEXT if kind in STRINGS else ANY
        self._value = []
        self._closing = self._tags.closing.replace("%tag%", key)
        self._ends = (self._closing, *self._missed)
        self._may_be_raw = self._tags.raw is not None
        before = self._before
        self._before = ", "
        return f"{before}{_quoted(key)}: " + ('"' if self._is_string else "")

    @property
    def _is_string(self) -> bool:
        return self._types == TEXT

    def _more(self, text: str, parsed: list[str]) -> str | None:
        if self._may_be_raw and self._tags.raw is not None:
            before, after = self._tags.raw
            if before.startswith(text):
                self._held = text
                return None
            self._may_be_raw = False
            if text.startswith(before):
                text = text.removeprefix(before)
                self._closing = after + self._closing
                self._ends = (self._closing,)
        at, mark = self._end_in(text)
        if not mark:
            self._add_value(text[:at], parsed)
            self._held = text[at:]
            return None
        self._end_value(text[:at], parsed)
        # A missing end is not used up.
        return text[at + len(mark) if mark == self._closing else at :]

    def _end_in(self, text: str) -> tuple[int, str]:
        """Where the value ends, and with which mark; no mark: up to where the text is part of it."""
        for end_mark in any_of(self._ends).finditer(text):
            at = end_mark.start()
            if end_mark[0] != self._tags.missed_next:
                return at, end_mark[0]
            # The next parameter, where its name is one: any other stands in the value.
            opening = self._opening.whole.match(text, at + 1)
            if opening is None and self._opening.may_begin(
                text[at + 1 : at + 2 + HEADER_CHARS_MAX]
            ):
                return len(text[:at].rstrip("\n")), ""
            if opening is not None and self._is_missing(opening["key"].strip()):
                return at, end_mark[0]
        return len(text) - held_back(text, self._ends), ""

    def _is_missing(self, key: str) -> bool:
        """Whether the tool has this parameter, and the call does not yet."""
        known = properties_of(self._schema.root)
        return key not in self._keys and (key in known or not known)

    def _add_value(self, text: str, parsed: list[str]) -> None:
        if not self._value and self._tags.is_wrapped:
            text = text.removeprefix("\n")
        if text:
            self._value.append(text)
            parsed.append(_quoted(text)[1:-1] if self._is_string else "")

    def _end_value(self, last: str, parsed: list[str]) -> None:
        if self._tags.is_wrapped or self._tags.is_ended_on_line:
            last = last.removesuffix("\n")
        self._add_value(last, parsed)
        assert self._types is not None
        if self._is_string:
            parsed.append('"')
        else:
            text = "".join(self._value)
            parsed.append(nested(text, self._tags.nested) or typed(text, self._types))
        self._types = None

    def _ended(self) -> str:
        return "{}" if self._before == "{" else "}"


def typed(text: str, types: frozenset[str]) -> str:
    """The JSON of a value that was written as text, if it may be of these types."""
    bare = text.strip()
    try:
        value = msgspec.json.decode(bare)
    except (msgspec.DecodeError, RecursionError):
        value, bare = _from_python(bare)
        if not bare:
            return _quoted(text)
    kind = NAMES.get(type(value), "object")
    kinds = {kind, "number"} if kind == "integer" else {kind}
    is_meant = "string" not in types or bool(kinds & types)
    return bare if is_meant else _quoted(text)


def nested(text: str, mark: str) -> str:
    """The JSON of a list or an object that stands in tags with this mark before them; nothing: it does not."""
    if not mark or mark not in text:
        return ""
    # The values inside each open tag, by their names.
    levels: list[list[tuple[str, str]]] = [[]]
    before, *parts = re.split(re.escape(mark) + r"<(/?)([^<>]+)>", text)
    for slash, name, after in zip(parts[::3], parts[1::3], parts[2::3], strict=True):
        if not slash:
            levels.append([])
        elif len(levels) > 1:
            inner = levels.pop()
            levels[-1].append((name, _joined(inner) if inner else typed(before, ANY)))
        before = after
    return _joined(levels[0])


def _joined(values: list[tuple[str, str]]) -> str:
    if all(name == "item" for name, _ in values):
        return f"[{', '.join(value for _, value in values)}]"
    return "{" + ", ".join(f"{_quoted(name)}: {value}" for name, value in values) + "}"


def _from_python(text: str) -> tuple[object, str]:
    """The value of a Python literal, and its JSON; no JSON: it is none."""
    try:
        value = ast.literal_eval(text)
        return value, msgspec.json.encode(value).decode()
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return None, ""


def _quoted(text: str) -> str:
    # A special token inside a value has no text.
    clean = text if text.isascii() else re.sub(f"[{LETTERS}]", "", text)
    return msgspec.json.encode(clean).decode()


# --- objects that are not JSON --------------------------------------------------------------------


class NotedArguments:
    """An object in another notation: `{k:<|"|>v<|"|>}`, or what stands between the parentheses of a Python call."""

    def __init__(self, notation: Notation) -> None:
        self._notation = notation
        self._held = ""
        # What is open, by its closing letter.
        self._open: list[str] = []
        self._is_key = False
        # The quote of the string that is open.
        self._quote = ""
        if notation.is_open:
            self._open.append("}")
            self._is_key = True
        self._before = "{" if notation.is_open else ""

    def feed(self, text: str) -> tuple[str, str | None]:
        rest = self._held + text
        parsed = [self._before]
        self._held = self._before = ""
        while rest:
            if not self._quote and is_special(rest) and rest[0] not in self._notation.quotes:
                # The end of the call, though something is still open.
                return "".join(parsed) + self.close(), rest
            used = self._string(rest, parsed) if self._quote else self._step(rest, parsed)
            if not used:
                self._held = rest
                break
            rest = rest[used:]
            if not self._open:
                return "".join(parsed), rest
        return "".join(parsed), None

    def close(self) -> str:
        parsed = [self._before]
        if self._quote:
            # Of what waits only a quote and white space can be its end.
            last = "" if self._held.rstrip() == self._quote else self._held
            parsed += [_quoted(last)[1:-1], '"']
        elif self._held:
            self._word(self._held, parsed)
        return "".join(parsed) + "".join(reversed(self._open))

    def _step(self, text: str, parsed: list[str]) -> int:
        """How much of the text was used; nothing: more is needed."""
        quotes = self._notation.quotes
        for quote in quotes:
            if text.startswith(quote):
                self._quote = quote
                parsed.append('"')
                return len(quote)
            if quote.startswith(text):
                return 0
        token_match = TOKEN.match(text)
        assert token_match is not None
        token = token_match[0]
        if token in ("{", "[", "("):
            self._open.append("}" if token == "{" else "]")
            self._is_key = token == "{"
            parsed.append("{" if token == "{" else "[")
        elif token in ("}", "]", ")"):
            parsed.append(self._open.pop())
        elif token == ",":
            self._is_key = self._open[-1] == "}"
            parsed.append(", ")
        elif token in (":", "=") and self._is_key:
            self._is_key = False
            parsed.append(": ")
        elif not token.isspace():
            if token_match.end() == len(text):
                return 0
            self._word(token, parsed)
        return len(token)

    def _word(self, word: str, parsed: list[str]) -> None:
        """A key, a number, or the name of a value; anything else is a string without quotes."""
        word = WORDS.get(word, word)
        if self._is_key:
            parsed.append(_quoted(word))
            return
        try:
            msgspec.json.decode(word)
        except msgspec.DecodeError:
            word = _quoted(word)
        parsed.append(word)

    def _string(self, text: str, parsed: list[str]) -> int:
        """How much of an open string was used."""
        quote = self._quote
        # Lists and objects inside are written as JSON or Python has them, which escape.
        is_inner = quote in PLAIN_QUOTES and len(self._open) > 1
        has_escapes = self._notation.has_escapes or is_inner
        mark = any_of((quote, "\\") if has_escapes else (quote,)).search(text)
        if mark is None:
            end = len(text) if len(quote) == 1 else len(text) - held_back(text, (quote,))
            parsed.append(_quoted(text[:end])[1:-1])
            return end
        at = mark.start()
        if at:
            parsed.append(_quoted(text[:at])[1:-1])
            return at
        if mark[0] == quote:
            return self._string_end(text, parsed)
        escape = PYTHON_ESCAPE.match(text)
        if escape is None and len(text) < PYTHON_ESCAPE_CHARS_MAX:
            return 0
        written = "\\" if escape is None else escape[0]
        parsed.append(_quoted(_meant(written))[1:-1])
        return len(written)

    def _string_end(self, text: str, parsed: list[str]) -> int:
        """A quote ends a string where something may stand after it; in `it's` it is a letter."""
        quote = self._quote
        following = text[len(quote) :].lstrip()
        if quote in PLAIN_QUOTES and not following:
            return 0
        if quote in PLAIN_QUOTES and following[0] not in AFTER_STRING and not is_special(following):
            parsed.append(_quoted(quote)[1:-1])
        else:
            self._quote = ""
            parsed.append('"')
        return len(quote)


def _meant(escape: str) -> str:
    """What a Python escape stands for; what is none stays as it was written."""
    if escape[1:2] in ("x", "u", "U"):
        letter = int(escape[2:], 16)
        return escape if 0xD800 <= letter <= 0xDFFF or letter > 0x10FFFF else chr(letter)
    return ESCAPES.get(escape[1:], escape)
