"""What of a text may reach a terminal or a log? Neither control characters, which are orders to a terminal, nor
characters that nobody sees and that change what is read, nor passwords in addresses.

In: text of a model, of a server, of an engine or of a client. Out: the same, with such characters as JSON writes them,
so that JSON stays JSON. Tabs and newlines stay; carriage returns are left out. Everything that is printed passes here:
`say` is the one place that prints, `cell` makes the cell of a table.
"""

from __future__ import annotations

import re
from typing import TextIO
from urllib.parse import urlsplit

# C0 and C1 with DEL between them; the two separators at which some programs break lines; what turns the direction of a
# text, or has no width (joiners stay: words of some languages, and emoji, need them); tags, which hide text; and
# halves of pairs, which no terminal can be sent.
_CONTROLS = {*range(0x20), *range(0x7F, 0xA0), 0x2028, 0x2029} - {ord("\t"), ord("\n")}
_TURNING = {0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2060, 0x2070)}
_UNSEEN = {0x180E, 0x200B, 0xFEFF, *range(0xFFF9, 0xFFFC), *range(0xE0000, 0xE0080)}
_HALVES = {*range(0xD800, 0xE000)}


def _escaped(code: int) -> str:
    if code < 0x10000:
        return f"\\u{code:04x}"
    high, low = divmod(code - 0x10000, 0x400)
    return f"\\u{0xD800 + high:04x}\\u{0xDC00 + low:04x}"


_TABLE = {code: _escaped(code) for code in _CONTROLS | _TURNING | _UNSEEN | _HALVES} | {
    ord("\r"): ""
}
_NAMES = _TABLE | {code: _escaped(code) for code in map(ord, "\r\n\t\u200c\u200d")}


def printable(text: str) -> str:
    """The text without orders to a terminal."""
    return text if text.isprintable() else text.translate(_TABLE)


def printable_name(text: str) -> str:
    """A name, which is one line, and in which nothing is unseen."""
    return text if text.isprintable() else text.translate(_NAMES)


def cell(text: str) -> str:
    """A name in a table of `rich`, which reads words in brackets as orders of its own."""
    return re.sub(r"(\\*)\[", r"\1\1\\[", printable_name(text))


def say(text: str = "", *, end: str = "\n", file: TextIO | None = None) -> None:
    """Print a text, for a person or as JSON."""
    print(printable(text), end=end, file=file, flush=True)


def without_password(url: str) -> str:
    """An address without its password."""
    # One that is not encoded may have any marks of an address: then everything up to the last @ goes.
    hidden = re.sub(r"(//[^/@:?]*):([^/?@]*@(?=[^@?]*(\?|$))|.*@)", r"\1:…@", url)
    return re.sub(r"(password=)[^&]*", r"\1…", hidden)


def shown_address(url: str) -> str:
    """The address without user and password."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
