"""What is shown of all that a command prints? Its beginning as it comes, and its end when it is over.

In: the bytes of one stream, cut anywhere. Out: text without broken characters, at most so many characters; what is left
out in the middle is replaced by a note. Pure: the same bytes give the same text however they are cut.
"""

from __future__ import annotations

import codecs

# How many characters of each stream of a command are shown, where a call does not say; and at most.
CHARS_USUAL = 16_384
CHARS_MAX = 65_536
# The bytes of the longest character; and those that begin none.
CHAR_BYTES = 4
CONTINUING = bytes(range(0x80, 0xC0))
# Each piece is cut off before the tail grows beyond twice of what is kept.
_PIECES = 2


def chars_of(wanted: int | None) -> int:
    """How many characters to show where a call wants so many."""
    return CHARS_USUAL if wanted is None else max(0, min(wanted, CHARS_MAX))


class Excerpt:
    """One stream of a command: its head, and its tail. Only what is shown is decoded: a command may print faster than
    broken characters are replaced."""

    def __init__(self, chars_max: int) -> None:
        self._head_left = chars_max - chars_max // 2
        self._tail_max = chars_max // 2
        self._tail = bytearray()
        # Characters and bytes before the tail.
        self._left_out = self._dropped = 0
        # A byte that is broken is one character, which turns into that byte again.
        self._decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")

    def feed(self, data: bytes) -> str:
        """What may be shown now."""
        return self._add(data)

    def close(self) -> str:
        """The stream is over: the rest that is shown."""
        head = self._add(b"", is_last=True)
        text = self._tail.decode(errors="surrogateescape")
        text = text[max(0, len(text) - self._tail_max) :]
        tail = text.encode(errors="surrogateescape")
        self._drop(len(self._tail) - len(tail))
        note = f"\n[… {self._left_out} characters left out …]\n" if self._dropped else ""
        return head + note + _shown(tail)

    def _add(self, data: bytes, *, is_last: bool = False) -> str:
        head = ""
        if self._head_left:
            text = self._decoder.decode(data, is_last)
            head, rest = text[: self._head_left], text[self._head_left :]
            self._head_left -= len(head)
            data = rest.encode(errors="surrogateescape")
            if not self._head_left:
                data += self._decoder.getstate()[0]
        self._tail += data
        most = CHAR_BYTES * self._tail_max
        if len(self._tail) > _PIECES * most:
            self._drop(len(self._tail) - most)
        return _shown(head.encode(errors="surrogateescape"))

    def _drop(self, size: int) -> None:
        """Leave out the beginning of the tail."""
        self._dropped += size
        self._left_out += len(self._tail[:size].translate(None, CONTINUING))
        del self._tail[:size]


def _shown(data: bytes) -> str:
    """The text of bytes; without a character that databases cannot hold and terminals do not show."""
    return data.decode(errors="replace").replace("\0", "\ufffd")
