"""How is the text of users and tools kept from being more than text, inside a chat template?

A template joins its own marks and foreign text into one string. So every mark in foreign text is broken before it goes
in, by a letter that is in no text, and that letter is taken out again before the text is encoded.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from segue.vocabularies.images import IMAGE
from segue.vocabularies.vocabulary import Chunk, Mark, Own

# Noncharacters: Unicode promises that no text has them; where a text does, they are escaped.
SHIELD = "\ufdd0"
PLACE = "\ufdd1"
ESCAPE = "\ufdd2"
# The mark of an image is ours already.
OURS = re.compile(f"(?!{IMAGE})[\ufdd0-\ufdd3]")
ESCAPED = re.compile(f"{ESCAPE}([0-3])")
# What stands around the words of a mark.
BRACKETS = "<>|｜/[]"
# What templates look for in a call or in the definition of a tool.
STRUCTURE = {
    "type", "function", "name", "arguments", "description", "parameters", "properties", "required", "items", "enum",
    "object", "array", "string", "integer", "number", "boolean", "null",
}  # fmt: skip


class Shield:
    """Breaks and mends these marks."""

    def __init__(self, marks: Iterable[str]) -> None:
        longest_first = sorted(marks, key=len, reverse=True)
        self._mark = re.compile("|".join(map(re.escape, longest_first)))
        self._first_letters = frozenset(mark[0] for mark in longest_first)
        self._words = {mark.strip(BRACKETS) for mark in longest_first}
        self._begun = {mark[:end] for mark in longest_first for end in range(1, len(mark))}
        self._ended = {mark[start:] for mark in longest_first for start in range(1, len(mark))}
        self._longest = max(map(len, longest_first), default=0)

    def text(self, text: str) -> str:
        """The same text with every mark in it broken, and with letters escaped that mean something here."""
        clean = text
        if not text.isascii():
            clean = OURS.sub(lambda mark: f"{ESCAPE}{ord(mark[0]) - 0xFDD0}", text)
        if any(letter in clean for letter in self._first_letters):
            # Breaking a mark may leave another that began inside of it.
            while self._mark.search(clean):
                clean = self._mark.sub(lambda mark: mark[0][0] + SHIELD + mark[0][1:], clean)
        return self._apart(clean)

    def _apart(self, text: str) -> str:
        """What would be a mark only together with words before or after it is kept apart from them, as `think` between
        `<` and `>`. Templates take white space around a text away, so it stays outside."""
        bare = text.strip()
        lengths = range(1, min(self._longest, len(bare) + 1))
        is_end = any(bare[:length] in self._ended for length in lengths)
        is_begin = any(bare[-length:] in self._begun for length in lengths)
        if not (is_end or is_begin or bare.strip(BRACKETS) in self._words) or not bare:
            return text
        before, _, after = text.partition(bare)
        return f"{before}{SHIELD if is_end else ''}{bare}{SHIELD}{after}"

    def value(self, value: object) -> object:
        """A JSON value with every text in it shielded, keys included."""
        match value:
            case str():
                return value if value in STRUCTURE else self.text(value)
            case list():
                return [self.value(entry) for entry in value]
            case dict():
                return {self.value(name): self.value(entry) for name, entry in value.items()}
            case _:
                return value

    def joined(self, chunks: Sequence[Chunk]) -> str:
        """These chunks as one text, in which only our own words have marks."""
        return "".join(
            chunk.text if isinstance(chunk, Own | Mark) else self.text(chunk) for chunk in chunks
        )


def mended(text: str) -> str:
    """The text as it was before it was shielded."""
    return ESCAPED.sub(lambda mark: chr(0xFDD0 + int(mark[1])), text.replace(SHIELD, ""))
