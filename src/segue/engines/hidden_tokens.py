"""Which token ids made this text, when only the last of them is known?

llama.cpp's server sends nothing while its text ends in the middle of a character: of the three tokens of an emoji it
sends the last one, with the whole text and with how many there were. The others are found from their bytes. Mostly
there is only one solution. Where there are several, the one that the vocabulary itself would write is taken; where
there is none, because the model wrote bytes that are not text, the text is encoded again. Then the text is the same,
and the engine finds a shorter prefix in its cache: never wrong, only slower.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

# A character has four bytes at most. More hidden tokens than this are bytes that are not text.
HIDDEN_MAX = 8


class TokenVocabulary(Protocol):
    """What engines need of the model's vocabulary."""

    @property
    def size(self) -> int:
        """How many ids there are."""

    def bytes_of(self, id: int) -> bytes:
        """The exact bytes of a token, perhaps a part of a character."""

    @property
    def specials(self) -> frozenset[str]:
        """All special tokens by their text."""

    def special(self, text: str) -> int:
        """The id of a special token."""

    def encode(self, text: str) -> Sequence[int]:
        """The ids with which the vocabulary itself would write this text."""


class HiddenTokens:
    """Finds tokens by their bytes."""

    def __init__(self, vocabulary: TokenVocabulary) -> None:
        self.vocabulary = vocabulary
        # Only a token that is not text by itself can be hidden. They are few: SmolLM2 has about 400.
        pieces = ((vocabulary.bytes_of(id), id) for id in range(vocabulary.size))
        self._parts = {piece: id for piece, id in pieces if not _is_text(piece)}

    def find(self, text: str, count: int, last: int) -> list[int]:
        """The `count` ids that made this text, the last of which is given."""
        encoded = list(self.vocabulary.encode(text))
        if len(encoded) == count and encoded[-1] == last:
            return encoded
        whole, end = text.encode(), self.vocabulary.bytes_of(last)
        if count <= HIDDEN_MAX and whole.endswith(end):
            hidden = self._split(whole[: len(whole) - len(end)], count - 1)
            if hidden is not None:
                return [*hidden, last]
        return encoded

    def _split(self, data: bytes, count: int) -> list[int] | None:
        """The bytes as `count` tokens, long ones first; None if there are no such tokens."""
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
