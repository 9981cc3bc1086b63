"""What is shown of all that a command prints? Its beginning as it comes, and its end when it is over.

In: the bytes of one stream, cut anywhere. Out: text without broken characters, at most so many characters; what is left
out in the middle is replaced by a note. Pure: the same bytes give the same text however they are cut.
"""

from __future__ import annotations

import codecs

# How many characters of each stream of a command are shown, where a call does not say; and at most.
CHARS_USUAL = 16_384
CHARS_MAX = 65_536
# Each piece is cut off before the tail grows beyond twice of what is kept.
_PIECES = 2


def chars_of(wanted: int | None) -> int:
    """How many characters to show where a call wants so many."""
    return CHARS_USUAL if wanted is None else max(0, min(wanted, CHARS_MAX))


class Excerpt:
    """One stream of a command: its head, and its tail."""

    def __init__(self, chars_max: int) -> None:
        self._head_left = chars_max - chars_max // 2
        self._tail_max = chars_max // 2
        self._tail = ""
        self._left_out = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, data: bytes) -> str:
        """What may be shown now."""
        return self._add(self._decoder.decode(data))

    def close(self) -> str:
        """The stream is over: the rest that is shown."""
        head = self._add(self._decoder.decode(b"", final=True))
        self._cut()
        note = f"\n[… {self._left_out} characters left out …]\n" if self._left_out else ""
        return head + note + self._tail

    def _add(self, text: str) -> str:
        # A character that databases cannot hold and terminals do not show.
        text = text.replace("\0", "\ufffd")
        head, rest = text[: self._head_left], text[self._head_left :]
        self._head_left -= len(head)
        self._tail += rest
        if len(self._tail) > _PIECES * self._tail_max:
            self._cut()
        return head

    def _cut(self) -> None:
        over = max(0, len(self._tail) - self._tail_max)
        self._left_out += over
        self._tail = self._tail[over:]
