"""Does a pattern of the operator take longer than others may wait? It is tried when it is loaded.

In: a compiled pattern, and how much of a text is searched at once. Out: the text for which it takes too long, or None.
Tried are strings of blanks, line breaks, digits, letters and the pattern's own characters, with an end that does not
fit, first short ones and then longer and longer ones: a pattern that doubles its work with each character is found
while it still ends.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator

# Processor time for one search.
SEARCH_S_MAX = 0.025
USUAL_PIECES = (" ", "\n", "\t", "1", "a", "A", " \n", "1 ", "a ", "a1", "-", ".", "_", "/")
OWN_PIECES_MAX = 16
END = "\0"
# Up to this size each is tried, as one character more may double the work; from there on in larger steps.
EACH_CHARS_MAX = 48
GROWTH = 1.5


def slow_text(pattern: re.Pattern[str], chars: int) -> str | None:
    """What is repeated in a text of at most so many characters that takes this pattern too long; None if nothing is."""
    own = dict.fromkeys(char for char in pattern.pattern if char not in r"\|*+?(){}[]^$.")
    pieces = dict.fromkeys([*USUAL_PIECES, *list(own)[:OWN_PIECES_MAX]])
    return next((piece for piece in pieces if _is_slow(pattern, piece, chars)), None)


def _is_slow(pattern: re.Pattern[str], piece: str, chars: int) -> bool:
    texts = (piece * (size // len(piece)) + END for size in _sizes(chars))
    # Tried twice: the first time may have been interrupted.
    return any(
        _searched_s(pattern, text) > SEARCH_S_MAX and _searched_s(pattern, text) > SEARCH_S_MAX
        for text in texts
    )


def _sizes(chars: int) -> Iterator[int]:
    size = 2
    while size < chars:
        yield size
        size = size + 1 if size < EACH_CHARS_MAX else int(size * GROWTH)
    yield chars


def _searched_s(pattern: re.Pattern[str], text: str) -> float:
    began = time.thread_time()
    pattern.search(text)
    return time.thread_time() - began
