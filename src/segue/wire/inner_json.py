"""What does a text hold that is JSON, such as the arguments of a call that comes back? Pure.

The values of a body are counted before it is decoded, but not those in its texts. What has more of them, or is deeper,
than an item may be stays a text: to take it apart would hold up other requests, and nothing walks what is very deep.
"""

from __future__ import annotations

from itertools import islice

import msgspec

from segue.wire.codec import ELEMENT_VALUES_MAX, is_deep, marks_of
from segue.wire.long_texts import long_strings
from segue.wire.slow_numbers import is_slow_text

_object = msgspec.json.Decoder(dict[str, object])


def has_many_values(text: str) -> bool:
    """Whether JSON that stands in a text has more values than one item may have."""
    if sum(map(text.count, ",[{")) <= ELEMENT_VALUES_MAX:
        return False
    # Some of them may be letters of a string.
    values = (mark for mark, _ in marks_of(text.encode()) if mark not in b"]}")
    return next(islice(values, ELEMENT_VALUES_MAX, None), None) is not None


def has_more_marks(data: bytes, wanted: bytes, most: int) -> bool:
    """Whether JSON of others has more of these brackets or commas; those in long texts are letters."""
    count = _count(data, wanted, 0, len(data))
    if count <= most:
        return False
    return count - sum(_count(data, wanted, *place) for place in long_strings(data)) > most


def _count(data: bytes, wanted: bytes, begin: int, end: int) -> int:
    return sum(data.count(mark, begin, end) for mark in wanted)


def inner_object(text: str) -> dict[str, object] | None:
    """The object that a text is, as JSON: the arguments of a call. None where it is none, or where it has more values,
    or is deeper, than one item may be, or is slow to read: then it is a text like any other."""
    if not text.startswith("{") or has_many_values(text) or is_slow_text(text):
        return None
    try:
        value = _object.decode(text)
    except (msgspec.MsgspecError, RecursionError, UnicodeError):
        return None
    return None if is_deep(value) else value
