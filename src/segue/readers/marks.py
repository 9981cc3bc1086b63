"""Where in a text are the marks of a format?

A mark that is a special token of the vocabulary is known by its id, and its text means nothing. Inside the readers such
a token is one letter that no text can have (half of a surrogate pair), so that patterns find tokens and text alike.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache, lru_cache
from typing import Any

from segue.readers.formats import CallFormat
from segue.vocabularies.vocabulary import Vocabulary

FIRST_LETTER = 0xDC00
LETTERS = "\udc00-\udfff"
SLOTS = {
    "%name%": rf"(?P<name>[^\s<>{{}}()\[\]\"'=,`{LETTERS}]+)",
    "%key%": rf"(?P<key>[^<>\"\n{LETTERS}]+?)",
    "%tag%": rf"(?P<key>[^<>/\s\"{LETTERS}][^<>\s\"{LETTERS}]*)",
    "%type%": r"(?P<type>\w*)",
    "%index%": r"\d+",
    "%any%": rf"[^<>{{}}\[\]{LETTERS}]*",
    " ": r"\s*",
}
SLOT = re.compile(r"(%\w+%| )")
FENCE = "```"
# A longer text before the arguments is no header: a name has at most 128 characters.
HEADER_CHARS_MAX = 1024


@dataclass(frozen=True, slots=True)
class SpeltFormat:
    """A format on a vocabulary."""

    # With the letters of special tokens for their text.
    format: CallFormat
    # The letter of a special token, by its id.
    letters: dict[int, str]
    # For `str.translate`: a text without letters.
    hidden: dict[int, None]
    # With which bytes marks begin that are text, and fences.
    first_bytes: frozenset[int]


@lru_cache(maxsize=64)
def spelt_format(format: CallFormat, vocabulary: Vocabulary) -> SpeltFormat:
    """This format on this vocabulary. A special token that has text is a mark wherever its text stands."""
    texts: list[str] = []

    def noted(text: str) -> str:
        texts.append(text)
        return text

    _changed(format, noted)
    names = [name for name in sorted(vocabulary.specials, key=len, reverse=True)
             if any(name in text for text in texts)
             and not vocabulary.bytes_of(vocabulary.special(name))]  # fmt: skip
    letter_of = {name: chr(FIRST_LETTER + n) for n, name in enumerate(names)}

    def spelt(text: str) -> str:
        for name, letter in letter_of.items():
            text = text.replace(name, letter)
        return text

    found = _changed(format, spelt)
    marks = filter(None, (FENCE, found.think, found.thought, *found.begins, *found.dropped))
    return SpeltFormat(
        found,
        {vocabulary.special(name): letter for name, letter in letter_of.items()},
        dict.fromkeys(map(ord, letter_of.values())),
        frozenset(ord(mark[0]) for mark in marks if mark[0].isascii()),
    )


def _changed(value: Any, change: Callable[[str], str]) -> Any:
    """The same value with every text in it changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, tuple):
        return tuple(_changed(part, change) for part in value)
    if not is_dataclass(value) or isinstance(value, type):
        return value
    parts = {part.name: _changed(getattr(value, part.name), change) for part in fields(value)}
    return replace(value, **parts)


def is_special(mark: str) -> bool:
    """Whether this begins with a special token."""
    return FIRST_LETTER <= ord(mark[0]) <= 0xDFFF


# --- patterns -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Header:
    """Something of a known form at the beginning of a text, which may not be whole yet."""

    whole: re.Pattern[str]
    begun: re.Pattern[str]

    def may_begin(self, text: str) -> bool:
        """Whether more text can make this the header."""
        return len(text) <= HEADER_CHARS_MAX and self.begun.fullmatch(text) is not None


@cache
def header(text: str, ahead: tuple[str, ...] = ()) -> Header:
    """The pattern of a text with slots (`formats.py`), if one of `ahead` follows it. There are few."""
    atoms = [atom for part in SLOT.split(text)
             for atom in ([SLOTS[part]] if part in SLOTS else map(re.escape, part))]  # fmt: skip
    following = "|".join(map(re.escape, ahead))
    begun = "|".join(_nested([re.escape(letter) for letter in mark], "") for mark in ahead)
    whole = "".join(atoms) + (f"(?={following})" if ahead else "")
    return Header(re.compile(whole), re.compile(f"(?:{_nested(atoms, begun)})?"))


def _nested(atoms: list[str], last: str) -> str:
    """A pattern of any beginning of these atoms."""
    for atom in reversed(atoms):
        last = f"{atom}(?:{last})?"
    return last


# Most marks are constants, so that there are few.
@lru_cache(maxsize=256)
def _starts(marks: tuple[str, ...]) -> tuple[int, frozenset[str], frozenset[str]]:
    """All parts with which these marks begin: the length of the longest, their first letters, and they themselves."""
    starts = frozenset(mark[:n] for mark in marks for n in range(1, len(mark)))
    longest = max(map(len, starts), default=0)
    return longest, frozenset(start[0] for start in starts), starts


def held_back(text: str, marks: tuple[str, ...]) -> int:
    """How many characters at the end may still be newlines before a mark, and a part of it."""
    longest, letters, starts = _starts(marks)
    begun = 0
    for at in range(max(0, len(text) - longest), len(text)):
        if text[at] in letters and text[at:] in starts:
            begun = len(text) - at
            break
    return len(text) - len(text[: len(text) - begun].rstrip("\n"))


@lru_cache(maxsize=256)
def any_of(marks: tuple[str, ...]) -> re.Pattern[str]:
    """Finds any of these marks, the longest first."""
    return re.compile("|".join(map(re.escape, sorted(marks, key=len, reverse=True))))


@cache
def marks_and_fences(marks: tuple[str, ...]) -> re.Pattern[str]:
    """Finds any of these marks, and fences."""
    return re.compile(f"`{{3,}}|{any_of(marks).pattern}")
