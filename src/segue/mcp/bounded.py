"""How much of what an MCP server answers is read?

In: its answers over HTTP, as JSON or as events. Out: the same within limits, or an error, and a note of what was wrong.
The library that speaks the protocol takes bodies of any size, inflates them, and decodes them on the event loop, one
tool or block after the other. So what is large is looked at here first, in a thread; lists are cut to what is used.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from itertools import islice

import httpx2
import msgspec
from msgspec import Raw

from segue.mcp.definitions import TOOLS_MAX
from segue.wire.codec import encode, marks_of

# Of a tool's output, much more than a model is shown. An event may have as much as the library takes.
ANSWER_BYTES_MAX = 4 * 1024 * 1024
EVENT_BYTES_MAX = 1024 * 1024
# Less is not worth a thread.
SMALL_BYTES = 16 * 1024
# Brackets and commas: of a list of hundreds of tools, ten thousand.
MARKS_MAX = 65_536
# How many blocks of an output are used.
BLOCKS_MAX = 1_024
ENCODED = "identity"
EVENTS = "text/event-stream"
# What no longer fits a body that was read, or cut.
_OF_BODIES = frozenset({"content-length", "transfer-encoding"})

_fields = msgspec.json.Decoder(dict[str, Raw])
_rows = msgspec.json.Decoder(list[Raw])
Noting = Callable[[str], None]


class _TooMuch(httpx2.ReadError):
    """An answer that is not read."""


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
                raise _TooMuch("its content encoding was not asked for")
            if response.headers.get("content-type", "").startswith(EVENTS):
                events = _Events(stream, self._note)
                return httpx2.Response(response.status_code, headers=headers, stream=events)
            body = await _whole(stream)
        except _TooMuch as error:
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
    """A stream of events, each of them whole and within limits."""

    def __init__(self, inner: httpx2.AsyncByteStream, note: Noting) -> None:
        self._inner = inner
        self._note = note

    async def __aiter__(self) -> AsyncIterator[bytes]:
        lines: list[bytes] = []
        rest, size = bytearray(), 0
        try:
            async for chunk in self._inner:
                rest += chunk
                *whole, last = rest.split(b"\n")
                rest = last
                for line in whole:
                    lines.append(bytes(line).rstrip(b"\r"))
                    size += len(line) + 1
                    if not lines[-1]:
                        yield await _event(lines, size)
                        lines, size = [], 0
                if size + len(rest) > EVENT_BYTES_MAX:
                    raise _TooMuch(f"it sent an event of more than {EVENT_BYTES_MAX:,} bytes")
        except _TooMuch as error:
            self._note(str(error))
            raise
        yield b"\n".join([*lines, bytes(rest)])

    async def aclose(self) -> None:
        await self._inner.aclose()


async def _event(lines: list[bytes], size: int) -> bytes:
    """An event as it came, or with what is left of its data."""
    if size > SMALL_BYTES:
        data = b"\n".join(
            line[5:].removeprefix(b" ") for line in lines if line.startswith(b"data:")
        )
        if data:
            data = await asyncio.to_thread(within_limits, data)
            others = [line for line in lines if not line.startswith(b"data:")]
            # JSON has line breaks between its values only.
            lines = [b"data: " + data.replace(b"\r", b" ").replace(b"\n", b" "), *others]
    return b"\n".join(lines) + b"\n"


async def _whole(stream: httpx2.AsyncByteStream) -> bytes:
    body = bytearray()
    async for chunk in stream:
        body += chunk
        if len(body) > ANSWER_BYTES_MAX:
            raise _TooMuch(f"it answered with more than {ANSWER_BYTES_MAX:,} bytes")
    if len(body) <= SMALL_BYTES:
        return bytes(body)
    return await asyncio.to_thread(within_limits, bytes(body))


def within_limits(body: bytes) -> bytes:
    """A message with as many tools and blocks as are used. Slow work, for a thread."""
    marks = sum(map(body.count, (b",", b"{", b"[")))
    if marks > MARKS_MAX and sum(1 for _ in islice(marks_of(body), MARKS_MAX + 1)) > MARKS_MAX:
        raise _TooMuch("it answered with more values than are read")
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
        raise _TooMuch("it did not answer with a message of the protocol") from None
    return encode(message | {"result": Raw(encode(result))}) if is_cut else body
