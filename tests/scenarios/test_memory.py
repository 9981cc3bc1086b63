"""A server with little memory: half requests wait, others go on, and what it holds can be seen."""

from __future__ import annotations

import asyncio
import gc
import json
import weakref
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from segue.errors import ApiError
from segue.readers.text_reader import TextReader
from segue.wire.codec import LARGE_BYTES
from segue.wire.items import ITEM_BYTES
from tests.support import MODEL, WAIT_S, Served, fetch, metric, serving, wire

MIB = 1024 * 1024
# So that a few bodies are all that may be on their way.
LITTLE = {"memory_bytes_max": 128 * MIB, "body_bytes_max": 4 * MIB}
TEXT = "word " * (MIB // 2)
BODY = json.dumps({"model": MODEL, "input": TEXT, "store": False, "max_output_tokens": 1}).encode()
INBOUND = 'segue_memory_bytes{part="inbound"}'
RUNNING = 'segue_memory_bytes{part="running"}'
STORED = 'segue_memory_bytes{part="stored"}'


@asynccontextmanager
async def half_body(served: Served, body: bytes) -> AsyncIterator[asyncio.StreamWriter]:
    """A request whose last byte is still missing; the rest is sent as far as it is read."""
    _, writer = await asyncio.open_connection("127.0.0.1", served.port)
    head = f"POST /v1/responses HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body[:-1])
    try:
        yield writer
    finally:
        writer.close()


async def until_inbound(served: Served, least: int) -> None:
    async with asyncio.timeout(WAIT_S):
        while await metric(served, INBOUND) < least:
            pass


async def post(served: Served, body: bytes, **headers: str) -> Any:
    answer = await fetch(served, "POST", "/v1/responses", body, headers)
    return answer.status, answer.json


async def test_half_requests_wait_while_small_ones_and_the_oldest_are_served() -> None:
    async with serving(**LITTLE) as served, wire(served) as socket:
        async with (
            half_body(served, BODY) as oldest,
            half_body(served, BODY),
            half_body(served, BODY),
        ):
            await until_inbound(served, len(BODY) - 1)
            later = asyncio.create_task(post(served, BODY))
            assert (await post(served, b'{"model":"scripted","input":"x","store":false}'))[0] == 200
            assert (await socket.turn(input="x", store=False))["type"] == "response.completed"
            assert await metric(served, INBOUND) < 2 * LITTLE["body_bytes_max"]
            assert await metric(served, "segue_state_bytes") >= len(BODY) - 1
            oldest.write(BODY[-1:])
        assert (await later)[0] == 200
        async with asyncio.timeout(WAIT_S):
            while await metric(served, INBOUND):
                pass


async def test_compressed_requests_are_inflated_as_there_is_room() -> None:
    small = zlib.compress(BODY)
    async with serving(**LITTLE) as served:
        encoded = {"Content-Encoding": "deflate"}
        answers = await asyncio.gather(*(post(served, small, **encoded) for _ in range(8)))
        assert [status for status, _ in answers] == [200] * 8
        assert served.app.state.memory.intake.bytes == 0
        assert served.app.state.memory.intake.pool.members == 0


async def test_request_that_does_not_end_is_refused_after_its_time() -> None:
    async with serving(**LITTLE, body_s_max=0.3) as served, half_body(served, BODY):
        await until_inbound(served, 1)
        async with asyncio.timeout(WAIT_S):
            while await metric(served, INBOUND):
                pass


async def test_turn_is_refused_at_the_limit_of_all_memory_and_runs_after_it() -> None:
    async with serving(**LITTLE) as served, wire(served) as socket:
        memory = served.app.state.memory
        memory.bytes_max = -1
        memory.enforce()
        refused = await socket.turn(input="x", store=False)
        assert refused["error"]["message"] == "The server has reached its memory limit."
        assert (await post(served, b'{"model":"scripted","input":"x"}'))[0] == 503
        memory.bytes_max = MIB
        memory.enforce()
        assert (await socket.turn(input="x", store=False))["type"] == "response.completed"


async def test_queued_turn_counts_once_as_one_that_runs() -> None:
    async with serving(**LITTLE, tps=0.001) as served:
        words = "word " * 20_000
        queued = {"model": MODEL, "input": words, "background": True}
        assert (await post(served, json.dumps(queued).encode()))[0] == 200
        async with asyncio.timeout(WAIT_S):
            # The request as it came, as bytes and as a value; and once it is rendered, its token ids.
            while await metric(served, RUNNING) < 3 * len(words) + 4 * 20_000:
                pass
        assert await metric(served, STORED) < 5_000


@pytest.mark.parametrize(
    "field",
    [
        {"user": "u" * 50_000},
        {"prompt_cache_key": "k" * 50_000},
        {"text": {"format": {"type": "json_object", "schema": {"description": "d" * 50_000}}}},
        {
            "tool_choice": {
                "type": "allowed_tools",
                "mode": "auto",
                "tools": [{"type": "function", "name": "f"}] * 1_500,
            }
        },
    ],
    ids=lambda field: next(iter(field)),
)
async def test_kept_turn_counts_what_its_response_repeats(field: dict[str, Any]) -> None:
    async with serving(**LITTLE) as served:
        asked = {"model": MODEL, "input": "x", **field}
        assert (await post(served, json.dumps(asked).encode()))[0] == 200
        assert await metric(served, STORED) > 100_000


async def test_stored_history_counts_while_a_turn_stands_on_it_that_the_cache_has_dropped() -> None:
    async with serving(**LITTLE, tps=0.001) as served:
        first = {"model": MODEL, "input": "word " * 2_000, "generate": False}
        _, response = await post(served, json.dumps(first).encode())
        child = {"input": "x", "previous_response_id": response["id"], "background": True}
        assert (await post(served, json.dumps(child).encode()))[0] == 200
        assert await metric(served, RUNNING) < 20_000
        memory = served.app.state.memory
        memory.bytes_max = 0
        memory.enforce()
        assert await metric(served, STORED) == 0
        assert await metric(served, RUNNING) > 20_000


async def test_prompt_of_many_short_items_counts_each_of_them() -> None:
    given = [{"role": "user", "content": "a"}] * 2_000
    asked = json.dumps({"model": MODEL, "input": given, "store": False}).encode()
    async with serving(**LITTLE, render_cache_bytes_max=0) as served:
        assert (await post(served, asked))[0] == 200
        kept = await metric(served, 'segue_memory_bytes{part="prompts"}')
        assert kept > len(given) * ITEM_BYTES


def readers() -> list[object]:
    return [one for one in gc.get_objects() if type(one) is TextReader]


async def test_refused_and_failed_requests_are_freed_without_the_garbage_collector() -> None:
    def errors() -> list[object]:
        return [one for one in gc.get_objects() if isinstance(one, ApiError)]

    async with serving(context_tokens=10) as served:
        gc.collect()
        before = errors()
        gc.disable()
        try:
            async with wire(served) as socket:
                for bad in ("[", "[" * (LARGE_BYTES + 1)):
                    await socket.send(bad)
                    assert (await socket.next())["type"] == "error"
                await socket.create(input="x", previous_response_id="resp_none")
                assert (await socket.next())["type"] == "error"
            for body in (b"[", b'{"model":"scripted","input":"%b"}' % (b"word " * 20)):
                assert (await post(served, body))[0] == 400
            async with asyncio.timeout(WAIT_S):
                while any(one not in before for one in errors()):
                    await metric(served, INBOUND)
        finally:
            gc.enable()


async def test_connections_and_turns_are_freed_without_the_garbage_collector() -> None:
    async with serving() as served:
        gc.collect()
        # Of other tests in this process.
        before = readers()
        gc.disable()
        try:
            async with wire(served) as socket:
                await socket.turn(input="x", store=False)
                (session,) = map(weakref.ref, served.app.upgrades.sessions)
            await post(served, b'{"model":"scripted","input":"x"}')
            async with asyncio.timeout(WAIT_S):
                while session() is not None:
                    await metric(served, INBOUND)
                # Work after a response may go on for a while.
                while any(one not in before for one in readers()):
                    await metric(served, INBOUND)
        finally:
            gc.enable()
