"""An MCP server that answers with much: what is read of it, and what is said of the rest."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from itertools import pairwise
from typing import Any

import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from segue.mcp.bounded import (
    ANSWER_BYTES_MAX,
    BLOCKS_MAX,
    CHUNKS_AT_ONCE,
    CHUNKS_MAX,
    DIGITS_MAX,
    EVENT_BYTES_MAX,
    EVENTS_MAX,
    LINES_MAX,
    MARKS_MAX,
    SMALL_BYTES,
    BoundedTransport,
    within_limits,
)
from segue.mcp.definitions import TOOLS_MAX

JSON, EVENTS = "application/json", "text/event-stream"
# Larger than what is taken as it is, with line breaks between values.
LISTED = json.dumps(
    {"id": 1, "result": {"tools": [{"name": f"t{n}", "x": "a" * 20} for n in range(700)]}}, indent=1
).encode()
SENT = (
    b": still there\n\n"
    b'event: message\ndata: {"id":1}\n\n'
    b"id: 7\r\ndata: " + b"\r\ndata: ".join(LISTED.split(b"\n")) + b"\r\n\r\n"
    b'data: {"last":2}'
)


class Chunks(httpx2.AsyncByteStream):
    def __init__(self, chunks: Sequence[bytes]) -> None:
        self.chunks = chunks
        self.taken = 0
        self.is_closed = False

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for chunk in self.chunks:
            self.taken += 1
            yield chunk

    async def aclose(self) -> None:
        self.is_closed = True


class Answering(httpx2.AsyncBaseTransport):
    def __init__(self, headers: dict[str, str], *chunks: bytes) -> None:
        self.headers = headers
        self.stream = Chunks(chunks)
        self.asked: list[str] = []

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        self.asked.append(request.headers["accept-encoding"])
        return httpx2.Response(200, headers=self.headers, stream=self.stream)


async def read(inner: Answering) -> tuple[bytes, list[str]]:
    """What is read, and what is noted of it."""
    faults: list[str] = []
    async with httpx2.AsyncClient(transport=BoundedTransport(inner, faults.append)) as client:
        try:
            return (await client.get("http://tools.example/mcp")).content, faults
        except httpx2.ReadError:
            assert faults
            assert inner.stream.is_closed
            return b"", faults


def message(**result: Any) -> bytes:
    return json.dumps({"jsonrpc": "2.0", "id": 1, "result": result}).encode()


async def test_answer_is_read_as_it_came() -> None:
    body = message(content=[{"type": "text", "text": "a," * SMALL_BYTES}])
    inner = Answering({"content-type": JSON}, body[:100], body[100:])
    assert await read(inner) == (body, [])
    assert inner.asked == ["identity"]


@pytest.mark.parametrize("kind, most", [(JSON, ANSWER_BYTES_MAX), (EVENTS, EVENT_BYTES_MAX)])
async def test_answer_without_an_end_is_not_read_to_it(kind: str, most: int) -> None:
    chunk = b"a" * (most // 4)
    inner = Answering({"content-type": kind}, *([chunk] * 100))
    body, faults = await read(inner)
    assert body == b""
    assert f"more than {most:,} bytes" in faults[0]
    assert inner.stream.taken <= 6


async def test_answer_that_would_have_to_be_inflated_is_not_read() -> None:
    inner = Answering({"content-type": JSON, "content-encoding": "gzip"}, b"\x1f\x8b")
    assert (await read(inner))[1] == ["its content encoding was not asked for"]
    assert inner.stream.taken == 0


@pytest.mark.parametrize("said", [b"\n" * 64, b": still here\n\n", b"\r\n\r\n", b"x\n" * 9])
async def test_stream_that_says_nothing_is_not_read_for_ever(said: bytes) -> None:
    chunk = said * (EVENT_BYTES_MAX // 16 // len(said))
    inner = Answering({"content-type": EVENTS}, *([chunk] * 100))
    assert (await read(inner))[0] == b""
    assert inner.stream.taken <= 18


@pytest.mark.parametrize(
    "kind, chunk, most",
    [
        (EVENTS, b"data: {}\n\n", EVENTS_MAX),
        (EVENTS, b"a", CHUNKS_MAX),
        (EVENTS, b"data: 1\n" * 64, LINES_MAX // 64),
        (JSON, b"a", CHUNKS_MAX),
    ],
)
async def test_answer_in_very_many_parts_is_not_read_to_its_end(
    kind: str, chunk: bytes, most: int
) -> None:
    inner = Answering({"content-type": kind}, *([chunk] * (most + 9)))
    assert (await read(inner))[0] == b""
    assert inner.stream.taken == most + 1


@pytest.mark.parametrize("kind", [JSON, EVENTS])
async def test_others_have_their_time_while_an_answer_dribbles(kind: str) -> None:
    """Its parts are all there: nothing has to be waited for."""
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    text = b"data: " + message(content=[{"type": "text", "text": "a" * 9_000}]) + b"\n\n"
    sent = [text[at : at + 1] for at in range(len(text))]
    task = asyncio.create_task(other())
    assert (await read(Answering({"content-type": kind}, *sent)))[0] == text
    task.cancel()
    assert turns >= len(sent) // CHUNKS_AT_ONCE


async def test_number_of_thousands_of_digits_is_not_read() -> None:
    """In a text they are letters."""
    digits = b"7" * DIGITS_MAX
    text = b'[{"type":"text","text":"so: 1, ' + digits + b' , a"}]'
    filler = b'"' + b"a" * SMALL_BYTES + b'"'
    for value, is_read in ((text, True), (digits, False), (b'[1,{"a":-' + digits + b"}]", False)):
        body = b'{"id":1,"result":{"a":%b,"content":%b}}' % (filler, value)
        body = body if is_read else body.replace(b'"content"', b'"structuredContent"')
        got, faults = await read(Answering({"content-type": JSON}, body))
        assert (got == body) is is_read, faults


@pytest.mark.parametrize(
    "body",
    [
        message(structuredContent={"n": list(range(MARKS_MAX + 1))}),
        message(content=[{"type": "text", "text": ""}] * MARKS_MAX),
        b"[" * SMALL_BYTES * 2,
        message(tools={"a": "a" * SMALL_BYTES}),
        b'{"result": 1, "a": "' + b"a" * SMALL_BYTES + b'"}',
    ],
)
async def test_answer_of_many_values_or_of_another_kind_is_not_read(body: bytes) -> None:
    for kind, sent in ((JSON, body), (EVENTS, b"data: " + body + b"\n\n")):
        assert (await read(Answering({"content-type": kind}, sent)))[0] == b""


def test_lists_are_cut_to_what_is_used_of_them() -> None:
    tools = [{"name": f"t{n}"} for n in range(TOOLS_MAX + 9)]
    blocks = [{"type": "text", "text": str(n)} for n in range(BLOCKS_MAX + 9)]
    cut = json.loads(within_limits(message(tools=tools, content=blocks, more="a")))
    assert cut["id"] == 1
    result = cut["result"]
    assert (result["tools"], result["more"]) == (tools[:TOOLS_MAX], "a")
    assert result["content"] == blocks[:BLOCKS_MAX]


def events_of(sent: bytes) -> list[tuple[str, Any]]:
    found = []
    for event in sent.replace(b"\r\n", b"\n").split(b"\n\n"):
        lines = event.split(b"\n")
        data = b"\n".join(line[6:] for line in lines if line.startswith(b"data: "))
        named = sorted(line.decode() for line in lines if not line.startswith(b"data: "))
        found.append(("|".join(named), json.loads(data) if data else None))
    return found


@given(st.lists(st.integers(0, len(SENT)), max_size=6))
async def test_events_are_the_same_wherever_chunks_end(places: list[int]) -> None:
    cuts = [0, *sorted(places), len(SENT)]
    chunks = [SENT[start:end] for start, end in pairwise(cuts)]
    got, faults = await read(Answering({"content-type": EVENTS}, *chunks))
    # Without what is no event.
    expected = events_of(SENT)[1:]
    expected[1][1]["result"]["tools"] = expected[1][1]["result"]["tools"][:TOOLS_MAX]
    assert events_of(got) == expected
    assert not faults
