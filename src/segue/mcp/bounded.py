"""How much of what an MCP server answers is read?

In: its answers over HTTP, as JSON or as events. Out: the same within limits, or an error, and a note of what was wrong.
The library that speaks the protocol takes bodies of any size, inflates them, and decodes them on the event loop, one
tool or block after the other. So what is large is looked at here first, in a thread; lists are cut to what is used.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Iterator
from itertools import islice
from time import monotonic

import httpx2
import msgspec
from msgspec import Raw

from segue.mcp.definitions import TOOLS_MAX
from segue.wire.codec import encode, marks_of
from segue.wire.slow_numbers import SLOW_NUMBERS_MAX, slow_numbers

# Of a tool's output, much more than a model is shown. An event may have as much as the library takes.
ANSWER_BYTES_MAX = 4 * 1024 * 1024
EVENT_BYTES_MAX = 1024 * 1024
# Less is not worth a thread.
SMALL_BYTES = 16 * 1024
# Brackets and commas: of a list of hundreds of tools, ten thousand.
MARKS_MAX = 65_536
# Parts of an event or of an answer, each of which the library takes for itself; so many of them some milliseconds,
# after which others have their time. And the lines of an event: of JSON that is printed for people, some thousands.
CHUNKS_MAX, CHUNKS_AT_ONCE, LINES_MAX = 65_536, 64, 16_384
# Events in so many seconds: a call that reports ten times a second how far it is has 6,000 in ten minutes.
EVENTS_MAX, EVENTS_S = 16_384, 600.0
# The fields of an event; all other lines, comments among them, say nothing.
FIELDS = (b"data:", b"event:", b"id:", b"retry:")
# A number of more digits takes long to read, and is none that a tool has meant.
DIGITS_MAX = 1_024
LONG_NUMBER = re.compile(rb"[0-9]{%d}" % DIGITS_MAX)
# How many blocks of an output are used.
BLOCKS_MAX = 1_024
ENCODED = "identity"
EVENTS = "text/event-stream"
# What no longer fits a body that was read, or cut.
_OF_BODIES = frozenset({"content-length", "transfer-encoding"})

_fields = msgspec.json.Decoder(dict[str, Raw])
_rows = msgspec.json.Decoder(list[Raw])
Noting = Callable[[str], None]


class TooMuch(httpx2.ReadError):
    """An answer that is not read."""


class NoMessage(TooMuch):
    """What was sent is none of the protocol's messages."""


class BoundedTransport(httpx2.AsyncBaseTransport):
    """Sends requests by another transport, and reads answers within limits."""

    def __init__(self, inner: httpx2.AsyncBaseTransport, note: Noting) -> None:
        """`note` is told what was wrong with an answer; the library's own errors do not say it."""
        self._inner = inner
        self._note = note

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        request.headers["accept-encoding"] = ENCODED
        response = await self._inner.handle_async_request(request)
        stream = response.stream
        assert isinstance(stream, httpx2.AsyncByteStream)
        headers = [pair for pair in response.headers.multi_items() if pair[0] not in _OF_BODIES]
        try:
            if response.headers.get("content-encoding", ENCODED) != ENCODED:
                raise TooMuch("its content encoding was not asked for")
            if response.headers.get("content-type", "").startswith(EVENTS):
                events = _Events(stream, self._note)
                return httpx2.Response(response.status_code, headers=headers, stream=events)
            body = await _whole(stream)
        except TooMuch as error:
            await stream.aclose()
            self._note(str(error))
            raise
        except BaseException:
            await stream.aclose()
            raise
        await stream.aclose()
        return httpx2.Response(response.status_code, headers=headers, content=body)

    async def aclose(self) -> None:
        await self._inner.aclose()


class _Events(httpx2.AsyncByteStream):
    """A stream of events, each of them whole and within limits, without what is no part of an event."""

    def __init__(self, inner: httpx2.AsyncByteStream, note: Noting) -> None:
        self._inner = inner
        self._note = note

    async def __aiter__(self) -> AsyncIterator[bytes]:
        reader = _EventReader()
        events = chunks = 0
        began = monotonic()
        try:
            async for chunk in self._inner:
                chunks += 1
                if monotonic() - began > EVENTS_S:
                    # Some servers have one stream for all their answers.
                    events, began = 0, monotonic()
                if chunks % CHUNKS_AT_ONCE == 0 or len(chunk) > SMALL_BYTES:
                    await asyncio.sleep(0)
                for lines in reader.read(chunk):
                    events += 1
                    if events > EVENTS_MAX:
                        raise TooMuch(f"it sent more than {EVENTS_MAX:,} events at a time")
                    yield await _event(lines)
        except TooMuch as error:
            self._note(str(error))
            raise
        yield reader.rest()

    async def aclose(self) -> None:
        await self._inner.aclose()


class _EventReader:
    """Takes events out of bytes that are cut anywhere; what is said between them is left out, and not for ever."""

    def __init__(self) -> None:
        self._lines: list[bytes] = []
        # The beginning of a line, and how much has come since the last event.
        self._parts: list[bytes] = []
        self._bytes = self._chunks = 0

    def read(self, chunk: bytes) -> Iterator[list[bytes]]:
        """The lines of each event that is whole with this."""
        self._bytes += len(chunk)
        self._chunks += 1
        if b"\n" in chunk:
            *whole, last = b"".join([*self._parts, chunk]).split(b"\n")
            self._parts = [last] if last else []
            for line in whole:
                # Most lines of those who send much are empty.
                if line.startswith(FIELDS):
                    self._lines.append(line.rstrip(b"\r"))
                elif self._lines and line in (b"", b"\r"):
                    yield self._lines
                    self._lines = []
                    self._bytes, self._chunks = len(last), 1
        else:
            self._parts.append(chunk)
        if self._bytes > EVENT_BYTES_MAX:
            raise TooMuch(f"it sent an event of more than {EVENT_BYTES_MAX:,} bytes")
        if self._chunks > CHUNKS_MAX or len(self._lines) > LINES_MAX:
            raise TooMuch("it sent an event in more parts than are read")

    def rest(self) -> bytes:
        """What is left at the end."""
        return b"\n".join([*self._lines, b"".join(self._parts)])


async def _event(lines: list[bytes]) -> bytes:
    """An event as it came, or with what is left of its data."""
    if sum(map(len, lines)) > SMALL_BYTES:
        data = b"\n".join(
            line[5:].removeprefix(b" ") for line in lines if line.startswith(b"data:")
        )
        if data:
            data = await asyncio.to_thread(within_limits, data)
            others = [line for line in lines if not line.startswith(b"data:")]
            # JSON has line breaks between its values only.
            lines = [b"data: " + data.replace(b"\r", b" ").replace(b"\n", b" "), *others]
    return b"\n".join([*lines, b"", b""])


async def _whole(stream: httpx2.AsyncByteStream) -> bytes:
    body = bytearray()
    chunks = 0
    async for chunk in stream:
        body += chunk
        chunks += 1
        if chunks % CHUNKS_AT_ONCE == 0 or len(chunk) > SMALL_BYTES:
            await asyncio.sleep(0)
        if len(body) > ANSWER_BYTES_MAX:
            raise TooMuch(f"it answered with more than {ANSWER_BYTES_MAX:,} bytes")
        if chunks > CHUNKS_MAX:
            raise TooMuch("it answered in more parts than are read")
    if len(body) <= SMALL_BYTES:
        return bytes(body)
    return await asyncio.to_thread(within_limits, bytes(body))


def within_limits(body: bytes) -> bytes:
    """A message with as many tools and blocks as are used. Slow work, for a thread."""
    marks = sum(map(body.count, (b",", b"{", b"[")))
    if marks > MARKS_MAX and sum(1 for _ in islice(marks_of(body), MARKS_MAX + 1)) > MARKS_MAX:
        raise TooMuch("it answered with more values than are read")
    if LONG_NUMBER.search(body) and _has_long_number(body):
        raise TooMuch("it answered with a number that is too long")
    if slow_numbers(body) > SLOW_NUMBERS_MAX:
        raise TooMuch("it answered with more numbers of three-digit exponents than are read")
    try:
        message = _fields.decode(body)
        result = _fields.decode(message["result"]) if "result" in message else {}
        is_cut = False
        for name, most in (("tools", TOOLS_MAX), ("content", BLOCKS_MAX)):
            rows = _rows.decode(result[name]) if name in result else []
            if len(rows) > most:
                result[name] = Raw(encode(rows[:most]))
                is_cut = True
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        raise NoMessage("it did not answer with a message of the protocol") from None
    return encode(message | {"result": Raw(encode(result))}) if is_cut else body


def _has_long_number(body: bytes) -> bool:
    """Whether a number between two marks has so many digits; those of a string are letters."""
    before = 0
    for _, at in marks_of(body):
        if at - before > DIGITS_MAX:
            value = body[before:at].rstrip()
            if not value.endswith(b'"') and LONG_NUMBER.search(value):
                return True
        before = at + 1
    return False
