"""Which ids spell this text, when only the last of them is known?

llama.cpp's server is silent while its text ends in the middle of a character: of the three tokens of an emoji it
shows the last one, with the whole text and with how many there were. The others are found again from their bytes.
Mostly there is one way only. Where there are several, the one that the vocabulary itself would write is taken; where
there is none, because the model wrote bytes that are no text, the text is written anew. Then the words are the same,
and the engine's next prefix is shorter than it could be: never wrong, only slower.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

# A character has four bytes at most. More silent tokens than this are bytes that are no text.
SILENT_MAX = 8


class Words(Protocol):
    """The vocabulary of the model, as far as it is needed here."""

    @property
    def size(self) -> int:
        """How many ids there are."""

    def bytes_of(self, id: int) -> bytes:
        """The exact bytes of a token, perhaps a part of a character."""

    def encode(self, text: str) -> Sequence[int]:
        """The ids with which the vocabulary itself would write this text."""


class Spelling:
    """Finds tokens by their bytes."""

    def __init__(self, words: Words) -> None:
        self._words = words
        # Only a token that is no text by itself can be silent. They are few: SmolLM2 has about 400.
        pieces = ((words.bytes_of(id), id) for id in range(words.size))
        self._parts = {piece: id for piece, id in pieces if not _is_text(piece)}

    def find(self, text: str, count: int, last: int) -> list[int]:
        """The `count` ids that made this text, the last of which is given."""
        written = list(self._words.encode(text))
        if len(written) == count and written[-1] == last:
            return written
        whole, end = text.encode(), self._words.bytes_of(last)
        if count <= SILENT_MAX and whole.endswith(end):
            found = self._split(whole[: len(whole) - len(end)], count - 1)
            if found is not None:
                return [*found, last]
        return written

    def _split(self, data: bytes, count: int) -> list[int] | None:
        """The data as so many parts of characters, long ones first; None if that cannot be."""
        if count == 0:
            return None if data else []
        for size in range(len(data) - count + 1, 0, -1):
            id = self._parts.get(data[:size])
            rest = None if id is None else self._split(data[size:], count - 1)
            if id is not None and rest is not None:
                return [id, *rest]
        return None


def _is_text(piece: bytes) -> bool:
    try:
        piece.decode()
    except UnicodeDecodeError:
        return False
    return True
