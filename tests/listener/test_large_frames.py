"""A large frame is decoded beside the loop; the frames after it wait, and are answered in their order."""

from __future__ import annotations

import json

from segue.wire.codec import LARGE_BYTES
from tests.support import TERMINAL, serving, wire

LONG = "word " * (LARGE_BYTES // 4)


async def test_frames_after_a_large_one_keep_their_order() -> None:
    bad = {"type": "response.create", "model": "scripted", "temperature": "hot", "stream_id": "a"}
    async with serving() as served, wire(served) as socket:
        await socket.create(input=LONG, store=False, metadata={"n": "0"}, max_output_tokens=16)
        await socket.send(json.dumps({**bad, "input": LONG}))
        await socket.create(input=LONG, store=False, metadata={"n": "1"}, max_output_tokens=16)
        await socket.create(input="Short.", store=False, metadata={"n": "2"}, max_output_tokens=16)
        await socket.send("not JSON")
        created, ended, refused = [], [], []
        # To the end: a client that closes with much unread waits ten seconds for the other side's close.
        while len(ended) + len(refused) < 5:
            event = await socket.next()
            if event["type"] == "error":
                refused.append((event["error"]["code"], event.get("stream_id")))
            elif event["type"] == "response.created":
                created.append(event["response"]["metadata"]["n"])
            elif event["type"] in TERMINAL:
                ended.append(event["response"]["metadata"]["n"])
        assert created == ended == ["0", "1", "2"]
        assert refused == [("invalid_value", "a"), ("invalid_json", None)]


async def test_connection_may_close_while_a_large_frame_is_decoded() -> None:
    async with serving() as served:
        async with wire(served) as socket:
            await socket.create(input=LONG, store=False)
        async with wire(served) as socket:
            assert (await socket.turn(input="Hi.", store=False))["type"] == "response.completed"
