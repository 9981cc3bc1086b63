"""What is the input of a custom tool, while the model still writes it?

To the model such a tool is a function with one string: `{"input": "…"}`. In: the JSON of its arguments in pieces, cut
anywhere. Out: the string as far as it is certain, so that a long patch is seen while it is written. Where the JSON is
broken nothing is lost: an escape that is none stays as it was written, and arguments that are something else altogether
are handed over as they are, at the end. What was cut in the middle of an escape is left out.
"""

from __future__ import annotations

import re

import msgspec
from msgspec import Struct

OPENING = re.compile(r'\s*\{\s*"input"\s*:\s*"')
PLAIN = re.compile(r'[^"\\]+')
# A whole escape; a character beyond the first 65,536 is two of them.
ESCAPE = re.compile(
    r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
    r'|\\u[0-9a-fA-F]{4}|\\["\\/bfnrt]'
)
# The beginning of one, up to the end of what has come.
BEGUN = re.compile(
    r"\\(?:u[0-9a-fA-F]{0,3})?|\\u[dD][89abAB][0-9a-fA-F]{2}(?:\\(?:u[0-9a-fA-F]{0,3})?)?"
)
# The longest beginning.
BEGUN_CHARS_MAX = 11


class _Input(Struct):
    input: str


class InputReader:
    """Reads the arguments of one call."""

    __slots__ = ("_held", "_is_closed", "_is_open")

    def __init__(self) -> None:
        # All of it until the string begins, then what may become an escape.
        self._held = ""
        self._is_open = False
        self._is_closed = False

    def feed(self, text: str) -> str:
        """What has become certain of the input."""
        if self._is_closed:
            return ""
        text = self._held + text
        if not self._is_open:
            opening = OPENING.match(text)
            if opening is None:
                self._held = text
                return ""
            self._is_open = True
            text = text[opening.end() :]
        return self._unescaped(text)

    def close(self) -> str:
        """What is left when there is no more: arguments that hold no such string at their beginning."""
        return "" if self._is_open else _whole(self._held)

    def _unescaped(self, text: str) -> str:
        parsed: list[str] = []
        at, self._held = 0, ""
        while at < len(text):
            if plain := PLAIN.match(text, at):
                parsed.append(plain[0])
                at = plain.end()
            elif text[at] == '"':
                self._is_closed = True
                break
            elif len(text) - at <= BEGUN_CHARS_MAX and BEGUN.fullmatch(text, at):
                self._held = text[at:]
                break
            else:
                escape = ESCAPE.match(text, at)
                written = "\\" if escape is None else escape[0]
                parsed.append(_meant(written))
                at += len(written)
        return "".join(parsed)


def input_of(arguments: str) -> str:
    """The input in arguments that are all there."""
    reader = InputReader()
    return reader.feed(arguments) + reader.close()


def _meant(escape: str) -> str:
    """The character; what is none, such as half of a pair, as it was written."""
    try:
        return msgspec.json.decode(f'"{escape}"', type=str)
    except msgspec.DecodeError:
        return escape


def _whole(arguments: str) -> str:
    """Another order of keys, or something else."""
    try:
        return msgspec.json.decode(arguments, type=_Input).input
    except msgspec.DecodeError:
        return arguments
