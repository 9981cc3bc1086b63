"""How many numbers are in some JSON that take long to read? Pure.

The JSON library reads a number in some 0.03 us; one near the largest or the smallest that there is (`1e300`, `5e-324`),
or of hundreds of digits, in 6 to 16, and no other request goes on meanwhile: 65,000 of them in one item took 0.7 s, and
arguments of 10 MB 14 s. So what has many of them is refused before it is read, or stays a text.
"""

from __future__ import annotations

import re

from segue.rests import Rests, rested
from segue.wire.long_texts import string_end

# In one request: ten milliseconds. People write a few, as the bounds of a schema.
SLOW_NUMBERS_MAX = 1_000
# In one text that is JSON, such as arguments: many of those are read one after the other.
SLOW_IN_TEXT_MAX = 8
# So few are not worth a look at what is a number and what a string.
FEW = 4
# An exponent of three digits. A long run of digits matters where there is room for many.
EXPONENT = rb"[0-9][eE][-+]?[0-9]{3}"
SLOW = re.compile(EXPONENT)
SLOW_OR_LONG = re.compile(EXPONENT + rb"|[0-9]{256}")
LONG_FROM_BYTES = 64 * 1024
# The most that is searched at once.
WINDOW_BYTES = 64 * 1024


def slow_numbers(data: bytes) -> int:
    """About how many there are; a few may be letters of strings. Slow work if there are megabytes."""
    slow = SLOW if len(data) <= LONG_FROM_BYTES else SLOW_OR_LONG
    places = range(0, len(data), WINDOW_BYTES)
    count = sum(len(slow.findall(data, at, at + WINDOW_BYTES)) for at in rested(places))
    return count if count <= FEW else _outside_strings(data, slow)


def _outside_strings(data: bytes, slow: re.Pattern[bytes]) -> int:
    at, count, rests = 0, 0, Rests()
    while at < len(data):
        quote = data.find(b'"', at)
        end = len(data) if quote < 0 else quote
        for begin in range(at, end, WINDOW_BYTES):
            count += len(slow.findall(data, begin, min(begin + WINDOW_BYTES, end)))
            rests.take()
        at = end if quote < 0 else string_end(data, quote + 1, rests)
    return count


def is_slow_text(text: str) -> bool:
    """Whether JSON that stands in a text would take long to read."""
    return slow_numbers(text.encode()) > SLOW_IN_TEXT_MAX
