"""What is not read must not pile up: heartbeats, warm-ups, refusals and requests that wait, each for a client that
sends and does not read."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import websockets

from tests.scenarios.test_connections import narrow_socket
from tests.support import Served, Wire, metric, serving, wire

OUTBOX_BYTES_MAX = 64 * 1024
# What the kernel takes at most for a connection on loopback is a few megabytes; this is more.
WORDS = "the " * 60_000
UNREAD = "segue_unread_bytes"


@asynccontextmanager
async def stuffed(tmp_path: Path, **flags: Any) -> AsyncIterator[Served]:
    """A server whose model takes its time, and that is patient with readers."""
    script = tmp_path / "script.json"
    script.write_text(json.dumps({"turns": [{"text": "x", "pad_tokens": 1_000}]}))
    async with serving(
        script=str(script), outbox_bytes_max=OUTBOX_BYTES_MAX, write_s_max=60, **flags
    ) as served:
        yield served


@asynccontextmanager
async def unreading(served: Served) -> AsyncIterator[Wire]:
    """A client that does not read, but for the first frame or two."""
    socket = await websockets.connect(
        served.ws_url,
        sock=narrow_socket(served.port),
        max_queue=1,
        compression=None,
        ping_interval=None,
    )
    try:
        yield Wire(socket)
    finally:
        socket.transport.abort()


async def settled(served: Served) -> float:
    """What waits to be read, once that has stopped growing but for a few words."""
    before = 0.0
    async with asyncio.timeout(30):
        while (now := await metric(served, UNREAD)) > before + len(WORDS) / 4 or not now:
            before = now
            await pulses(served, 5)
    return now


async def pulses(served: Served, count: int) -> None:
    """Until another client has heard so many heartbeats."""
    async with wire(served) as socket:
        await socket.create(input="x", store=False)
        while count:
            count -= (await socket.next())["type"] == "response.in_progress"


async def test_heartbeats_do_not_pile_up_for_a_client_that_does_not_read(tmp_path: Path) -> None:
    async with (
        stuffed(tmp_path, tps=0.5, heartbeat_s=0.02) as served,
        unreading(served) as socket,
    ):
        for lane in range(8):
            await socket.create(input="x", instructions=WORDS, stream_id=str(lane), store=False)
        waits = await settled(served)
        assert waits > OUTBOX_BYTES_MAX
        await pulses(served, 20)
        # One beat alone would be more than this; a model's first word is not.
        assert await metric(served, UNREAD) < waits + len(WORDS) / 2


async def test_warm_ups_wait_until_their_client_reads(tmp_path: Path) -> None:
    async with stuffed(tmp_path, heartbeat_s=0.02, tps=10) as served, unreading(served) as socket:
        for _ in range(40):
            await socket.create(input="x", instructions=WORDS, generate=False, store=False)
        # One turn more than what fits, with its three snapshots.
        assert await settled(served) < OUTBOX_BYTES_MAX + 4 * len(WORDS)
        for _ in range(40):
            assert (await socket.events())[-1]["type"] == "response.completed"
        assert await metric(served, UNREAD) == 0


@pytest.mark.parametrize(
    "frame",
    [
        {"type": "response.create", "model": "nobody's", "metadata": {"k" * 65: "v"}},
        {"type": "response.steer", "previous_response_id": "resp_1", "input": "x" * 20_000},
    ],
)
async def test_client_that_does_not_read_its_refusals_is_closed(
    tmp_path: Path, frame: dict[str, Any]
) -> None:
    async with stuffed(tmp_path, heartbeat_s=0.02, tps=0.5) as served, unreading(served) as socket:
        for lane in range(8):
            await socket.create(input="x", instructions=WORDS, stream_id=str(lane), store=False)
        waits = await settled(served)
        text = json.dumps(frame)
        for _ in range(2_000):
            await socket.send(text)
        await pulses(served, 5)
        assert await metric(served, UNREAD) <= waits + 4 * OUTBOX_BYTES_MAX
        with pytest.raises(websockets.ConnectionClosed):
            while True:
                await socket.next()
        assert socket.socket.close_code == 1008


async def test_requests_that_wait_are_bounded_in_bytes(tmp_path: Path) -> None:
    async with (
        stuffed(tmp_path, tps=10, heartbeat_s=15, body_bytes_max=len(WORDS) + 1_000) as served,
        wire(served) as socket,
    ):
        await socket.create(input="x", store=False)
        while (await socket.next())["type"] != "response.output_text.delta":
            pass
        for _ in range(3):
            await socket.create(input=WORDS[: len(WORDS) // 2], store=False, generate=False)
        while (event := await socket.next())["type"] != "error":
            pass
        assert event["status"] == 429
        assert "bytes" in event["error"]["message"]


async def test_repeats_of_a_long_answer_are_refused_while_their_client_does_not_read(
    tmp_path: Path,
) -> None:
    asked: dict[str, Any] = {"input": "x", "instructions": WORDS, "idempotency_key": "k"}
    async with stuffed(tmp_path, heartbeat_s=15, store=f"sqlite:///{tmp_path}/s.db") as served:
        async with wire(served) as first:
            await first.create(**asked)
            last = (await first.events())[-1]
        async with unreading(served) as socket:
            for lane in range(15):
                await socket.create(**asked, stream_id=str(lane))
            async with asyncio.timeout(30):
                while not await metric(served, UNREAD):
                    await pulse(served)
                for _ in range(5):
                    await pulse(served)
            # The answer that was sent last, with its three snapshots, and what was there before.
            assert await metric(served, UNREAD) < 5 * OUTBOX_BYTES_MAX + 5 * len(WORDS)
            ends: dict[str, str] = {}
            while len(ends) < 15:
                event = await socket.next()
                if event["type"] == "error":
                    assert (event["status"], event["error"]["code"]) == (
                        503,
                        "server_is_overloaded",
                    )
                if event["type"] in ("error", "response.completed"):
                    ends[event["stream_id"]] = event["type"]
            assert "error" in ends.values()
            # Who reads gets it.
            await socket.create(**asked, stream_id="0")
            while (event := await socket.next())["type"] != "response.completed":
                pass
            assert event["response"]["id"] == last["response"]["id"]


async def pulse(served: Served) -> None:
    """One turn of another client."""
    async with wire(served) as socket:
        await socket.create(input="y", store=False)
        await socket.events()
