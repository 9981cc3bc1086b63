"""An inference server that costs next to nothing: it reads a request and answers with the same stream each time.

`/v1/chat/completions` and `/v1/responses` give the same answer: a few words, then a call; the latter also in one piece,
and on a WebSocket, so that a client can talk to it without any gateway. Run as a process of its own (`python -m
bench.upstream`), it prints its port.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import re
import struct
from collections.abc import Iterable
from itertools import count
from typing import Any

WORDS = "I will look at the next file and then say what is wrong with it".split()  # noqa: SIM905
NAME = "tool_0"
ARGUMENTS = ['{"argument', '_0": ', '"src', "/main", ".py", " line", " 20", '"}']
USAGE = {"prompt_tokens": 100, "completion_tokens": 24, "total_tokens": 124}
# Where the number of the call goes: a client answers each by its own id.
NUMBER = b"@@@@@@"

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
FINE_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
FINE = FINE_HEAD % 2 + b"{}"
STREAMED = rb'"stream": *true'


def chat_events() -> list[dict[str, Any]]:
    """The answer as a chat endpoint streams it."""

    def chunk(delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "finish_reason": reason}
        return {
            "id": "c",
            "object": "chat.completion.chunk",
            "created": 1,
            "model": "scripted",
            "choices": [choice],
        }

    def called(function: dict[str, str], **more: str) -> dict[str, Any]:
        return chunk({"tool_calls": [{"index": 0, "function": function, **more}]})

    words = [chunk({"content": f" {word}"}) for word in WORDS]
    begun = called({"name": NAME, "arguments": ""}, id=f"call_{NUMBER.decode()}", type="function")
    arguments = [called({"arguments": piece}) for piece in ARGUMENTS]
    last = {**chunk({}), "choices": [], "usage": USAGE}
    return [
        chunk({"role": "assistant"}),
        *words,
        begun,
        *arguments,
        chunk({}, "tool_calls"),
        last,
    ]


def responses_events() -> list[dict[str, Any]]:
    """The same answer as a Responses endpoint streams it."""
    number = count()
    message_id, item_id, call_id = (f"{kind}_{NUMBER.decode()}" for kind in ("msg", "fc", "call"))
    text = "".join(f" {word}" for word in WORDS)
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    message = {"id": message_id, "type": "message", "role": "assistant"}
    call = {"id": item_id, "type": "function_call", "call_id": call_id, "name": NAME}
    done = [
        {**message, "status": "completed", "content": [part]},
        {**call, "status": "completed", "arguments": "".join(ARGUMENTS)},
    ]
    usage = {
        "input_tokens": 100,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": 24,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 124,
    }
    response = {
        "id": f"resp_{NUMBER.decode()}",
        "object": "response",
        "created_at": 1,
        "model": "scripted",
        "status": "in_progress",
        "output": [],
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
    }

    def event(kind: str, **fields: Any) -> dict[str, Any]:
        return {"type": f"response.{kind}", "sequence_number": next(number), **fields}

    at = {"item_id": message_id, "output_index": 0, "content_index": 0}
    of = {"item_id": item_id, "output_index": 1}
    whole = {**response, "status": "completed", "output": done, "usage": usage}
    return [
        event("created", response=response),
        event("in_progress", response=response),
        event(
            "output_item.added",
            output_index=0,
            item={**message, "status": "in_progress", "content": []},
        ),
        event("content_part.added", **at, part={**part, "text": ""}),
        *[event("output_text.delta", **at, delta=f" {word}", logprobs=[]) for word in WORDS],
        event("output_text.done", **at, text=text, logprobs=[]),
        event("content_part.done", **at, part=part),
        event("output_item.done", output_index=0, item=done[0]),
        event(
            "output_item.added",
            output_index=1,
            item={**call, "status": "in_progress", "arguments": ""},
        ),
        *[event("function_call_arguments.delta", **of, delta=piece) for piece in ARGUMENTS],
        event("function_call_arguments.done", **of, arguments="".join(ARGUMENTS), name=NAME),
        event("output_item.done", output_index=1, item=done[1]),
        event("completed", response=whole),
    ]


def streamed(blocks: Iterable[bytes]) -> bytes:
    """One chunk an event, as servers write them."""
    return b"".join(b"%x\r\n%b\r\n" % (len(block), block) for block in blocks) + b"0\r\n\r\n"


def chat_stream() -> bytes:
    """The whole answer of the chat endpoint."""
    blocks = [b"data: %b\n\n" % json.dumps(event).encode() for event in chat_events()]
    return HEAD + streamed([*blocks, b"data: [DONE]\n\n"])


def responses_stream() -> bytes:
    """The whole answer of the Responses endpoint."""
    return HEAD + streamed(
        b"event: %b\ndata: %b\n\n" % (event["type"].encode(), json.dumps(event).encode())
        for event in responses_events()
    )


def compact(event: dict[str, Any]) -> bytes:
    """An event as servers write it."""
    return json.dumps(event, separators=(",", ":")).encode()


def responses_whole() -> bytes:
    """The same answer in one piece."""
    data = compact(responses_events()[-1]["response"])
    return FINE_HEAD % len(data) + data


def responses_frames() -> bytes:
    """The same answer as WebSocket messages."""
    frames = []
    for event in map(compact, responses_events()):
        size = len(event)
        head = (
            struct.pack(">BB", 0x81, size) if size < 126 else struct.pack(">BBH", 0x81, 126, size)
        )
        frames.append(head + event)
    return b"".join(frames)


def accepted(head: bytes) -> bytes:
    """The answer to a WebSocket upgrade (RFC 6455, 4.2.2)."""
    found = re.search(rb"sec-websocket-key: *(\S+)", head, re.IGNORECASE)
    key = (found[1] if found else b"") + b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
    digest = base64.b64encode(hashlib.sha1(key, usedforsecurity=False).digest())
    lines = (b"HTTP/1.1 101 Switching Protocols", b"upgrade: websocket", b"connection: upgrade")
    return b"\r\n".join([*lines, b"sec-websocket-accept: " + digest, b"", b""])


def frame_end(buffer: bytes) -> int:
    """Where the client's first frame ends; 0 where its size has not come yet."""
    if len(buffer) < 2:
        return 0
    size, start = buffer[1] & 0x7F, 6
    if size > 125:
        width = 2 if size == 126 else 8
        if len(buffer) < 2 + width:
            return 0
        size, start = int.from_bytes(buffer[2 : 2 + width], "big"), 6 + width
    return start + size


class Upstream(asyncio.Protocol):
    """One connection: a request at a time."""

    chat = stream = whole = frames = b""
    calls = count(100_000)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._buffer = b""
        self._is_websocket = False

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while self._next_frame() if self._is_websocket else self._next_request():
            pass

    def _next_request(self) -> bool:
        """Answer the first request, if all of it is here."""
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            return False
        head = self._buffer[:end]
        found = re.search(rb"content-length: *(\d+)", head.lower())
        size = end + 4 + (int(found[1]) if found else 0)
        if len(self._buffer) < size:
            return False
        body, self._buffer = self._buffer[end + 4 : size], self._buffer[size:]
        self._write(self._answer(head, body))
        return True

    def _answer(self, head: bytes, body: bytes) -> bytes:
        line = head.partition(b"\r\n")[0]
        if b"/chat/completions" in line:
            return self.chat
        if line.startswith(b"POST /v1/responses"):
            return self.stream if re.search(STREAMED, body) else self.whole
        if b"upgrade: websocket" in head.lower():
            self._is_websocket = True
            return accepted(head)
        return FINE

    def _next_frame(self) -> bool:
        """Answer the first message, if all of it is here."""
        end = frame_end(self._buffer)
        if not end or len(self._buffer) < end:
            return False
        is_text, self._buffer = self._buffer[0] & 0x0F == 1, self._buffer[end:]
        if is_text:
            self._write(self.frames)
        return True

    def _write(self, answer: bytes) -> None:
        self._transport.write(answer.replace(NUMBER, b"%d" % next(self.calls)))


async def main() -> None:
    """Serve until killed."""
    Upstream.chat, Upstream.stream = chat_stream(), responses_stream()
    Upstream.whole, Upstream.frames = responses_whole(), responses_frames()
    server = await asyncio.get_running_loop().create_server(Upstream, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
