"""JSON with texts of megabytes, decoded and encoded in slices: each call of the library holds up every thread."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain
from typing import TypeAlias, TypeVar, cast

import msgspec
from msgspec import Raw, Struct, structs

from segue.rests import PIECE, Copied, Rests, copied, joined

T = TypeVar("T")
# Long texts by what stands for them: as they are written, and what they say.
Texts: TypeAlias = dict[str, tuple[memoryview, str]]
# Larger JSON than this is looked at for texts above the second size.
LARGE_BYTES, LONG_BYTES = 1024 * 1024, 256 * 1024
# Short strings and all that is between them; and many escapes of a string at once.
BETWEEN = re.compile(rb'(?:"[^"\\]{0,256}+"|[^"]{1,2048}+){0,128}+')
ESCAPES = re.compile(rb'(?:\\.[^"\\]{0,64}+){1,1024}+', re.DOTALL)
KEY_END = re.compile(rb"[ \t\r\n]{0,64}:")
# The first half of a character that is written as two escapes. The longest escape has twelve bytes.
HIGH_HALF = re.compile(rb"\\u[dD][89abAB]")
ESCAPE_BYTES_MAX = 12
# Stands for a long text meanwhile. Where a text may not be long, this is too long as well.
MARK = b"a long text ".ljust(4_096, b".")
NAME, NAMED = MARK.decode(), re.compile(rb'"(%b[0-9]+)"' % re.escape(MARK))
BACKSLASH = b"\\"

_encode = msgspec.json.Encoder().encode
_decode_text = msgspec.json.Decoder(str).decode


def string_end(body: bytes | bytearray, at: int, rests: Rests | None = None) -> int:
    """The place after the string whose inside begins here."""
    quote = body.find(b'"', at)
    while quote >= 0:
        escape = body.find(BACKSLASH, at, quote)
        if escape < 0:
            return quote + 1
        found = ESCAPES.match(body, escape)
        at = escape + 2 if found is None else found.end()
        if at > quote:
            quote = body.find(b'"', at)
        if rests is not None:
            rests.take()
    return len(body)


def decode(decoded: Callable[[bytes | bytearray], T], body: Raw | bytes | bytearray) -> T:
    """What this makes of a body: long texts stay out of it, are decoded for themselves, and put back."""
    if len(body) <= LARGE_BYTES:
        return decoded(body)
    if isinstance(body, Raw):
        body = copied((body,))
    texts: Texts = {}
    rest, at, view = bytearray(), 0, memoryview(body)
    try:
        for start, end in long_strings(body):
            name = f"{NAME}{len(texts)}"
            rest += b"".join((view[at:start], _encode(name)))
            texts[name], at = (view[start:end], joined(_text(body, start + 1, end - 1))), end
        rest += view[at:]
        if texts and rest.count(MARK) == len(texts):
            return cast("T", _changed(decoded(rest), partial(_put_back, texts)))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        # What is said of a mistake is about the whole.
        pass
    return decoded(body)


def long_strings(body: bytes | bytearray) -> Iterator[tuple[int, int]]:
    """The places of the long strings that are no keys."""
    at, rests = 0, Rests()
    while (found := BETWEEN.match(body, at)) and (start := found.end()) < len(body):
        at = start
        if body[start] == ord('"'):
            at = string_end(body, start + 1, rests)
            if at - start > LONG_BYTES and not KEY_END.match(body, at):
                yield start, at


def _changed(value: object, change: Callable[[str | Raw], str | Raw]) -> object:
    """The same value with other texts in it."""
    match value:
        case str() | Raw():
            return change(value)
        case list():
            return [_changed(inner, change) for inner in value]
        case dict():
            return {name: _changed(inner, change) for name, inner in value.items()}
        case Struct():
            fields = {
                name: _changed(getattr(value, name), change) for name in value.__struct_fields__
            }
            return structs.replace(value, **fields)
        case _:
            return value


def _put_back(texts: Texts, value: str | Raw) -> str | Raw:
    if isinstance(value, str):
        return texts[value][1] if value in texts else value
    if MARK not in (data := bytes(value)):
        return value
    return Raw(copied(_spliced(data, lambda name: texts[name][:1])))


def _spliced(data: bytes, parts_of: Callable[[str], Iterable[Copied]]) -> Iterator[Copied]:
    """With long strings in place of what stands for them."""
    at = 0
    for found in NAMED.finditer(data):
        yield data[at : found.start()]
        yield from parts_of(found[1].decode())
        at = found.end()
    yield data[at:]


def _text(body: bytes | bytearray, at: int, last: int) -> Iterator[str]:
    """What the inside of an encoded string says, in slices."""
    while at < last:
        end = _cut(body, at, at + PIECE) if at + PIECE < last else last
        yield _decode_text(b'"' + body[at:end] + b'"')
        at = end


def _cut(string: bytes | bytearray, start: int, end: int) -> int:
    """The last place before `end` that is inside of no character and no escape."""
    slash = string.rfind(BACKSLASH, end - ESCAPE_BYTES_MAX, end)
    if slash < 0:
        while string[end] & 0xC0 == 0x80:
            end -= 1
        return end
    # An escape begins where a run of backslashes does.
    begin = start + len(string[start : slash + 1].rstrip(BACKSLASH))
    if HIGH_HALF.match(string, begin - 6):
        begin = start + len(string[start : begin - 5].rstrip(BACKSLASH))
    return begin if begin > start else start + (slash + 1 - start) // 2 * 2


def encode(value: object) -> bytes:
    """The same as the library makes of it; nothing is free after it."""
    long: dict[str, str | Raw] = {}

    def taken(value: str | Raw) -> str | Raw:
        if len(value) <= PIECE:
            return value
        long[name := f"{NAME}{len(long)}"] = value
        return name

    rest = _encode(_changed(value, taken))
    if rest.count(MARK) != len(long):
        return copied((_encode(value),))
    return copied(_spliced(rest, lambda name: _parts_of(long[name])))


def _parts_of(value: str | Raw) -> Iterable[Copied]:
    if isinstance(value, Raw):
        return (value,)
    slices = (value[at : at + PIECE] for at in range(0, len(value), PIECE))
    return chain((b'"',), (memoryview(_encode(part))[1:-1] for part in slices), (b'"',))
