"""An inference server that batches: at each step every stream gets one token, as vLLM and SGLang write them.

`/v1/chat/completions`, `/v1/responses` and vLLM's `/inference/v1/generate` give the same words, one event for each
token; with the plugin `segue-vllm` there is one frame for each step. What to play is put at `/plan`: the steps begin
when that many streams have asked. `/times` says when each token was written, by the number of its answer, which the
first two words of the answer spell. Run as a process of its own (`python -m bench.engine_steps`), it prints its port.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import re
from collections.abc import Callable
from functools import cache, partial
from itertools import count
from time import perf_counter
from typing import Any, NamedTuple

from bench.upstream import FINE, HEAD, USAGE
from bench.vllm import IDS
from segue_vllm.frames import (
    PROTOCOL,
    Ask,
    End,
    Hello,
    Said,
    Taken,
    Tokens,
    read_asked,
    write_said,
)

WORDS = [word for word in IDS if word.startswith(" ") and word[1:].isalpha()]
SESSIONS = "/v1/segue/session"
GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
UPGRADED = (
    b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Accept: %b\r\n\r\n"
)
DONE = b"data: [DONE]\n\n"


class Plan(NamedTuple):
    """How many streams begin together, how long each is, and how many steps a second there are; 0: no pace."""

    streams: int
    tokens: int
    per_s: float


class Answer(NamedTuple):
    """How one endpoint writes an answer: what stands before and after its tokens, and each token."""

    before: list[bytes]
    token: Callable[[str, int], bytes]
    after: Callable[[str, int], list[bytes]]


def spelled(number: int) -> list[str]:
    """The number of an answer, as its first two words."""
    return [WORDS[number // len(WORDS) % len(WORDS)], WORDS[number % len(WORDS)]]


def numbered(words: list[str]) -> int:
    """The number that the first two words spell."""
    return WORDS.index(words[0]) * len(WORDS) + WORDS.index(words[1])


def word_at(number: int, place: int) -> str:
    """One word of an answer."""
    return spelled(number)[place] if place < 2 else WORDS[place % len(WORDS)]


def chunk(block: bytes) -> bytes:
    """One chunk of a body."""
    return b"%x\r\n%b\r\n" % (len(block), block)


def data(event: dict[str, Any]) -> bytes:
    """An event, as servers write it."""
    return b"data: %b\n\n" % json.dumps(event, separators=(",", ":")).encode()


# --- chat ---------------------------------------------------------------------------------------


def _chat_chunk(delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
    return {
        "id": "chatcmpl-9f2c1a7be04d4f6d8a53b0c7e21d9f64",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "scripted",
        "choices": [choice],
    }


@cache
def _chat_token(word: str) -> bytes:
    return data(_chat_chunk({"content": word}))


CHAT = Answer(
    [data(_chat_chunk({"role": "assistant", "content": ""}))],
    lambda word, place: _chat_token(word),
    lambda text, tokens: [
        data(_chat_chunk({}, "stop")),
        data({**_chat_chunk({}), "choices": [], "usage": USAGE}),
        DONE,
    ],
)

# --- vLLM's ids ---------------------------------------------------------------------------------


def _generated(ids: list[int], reason: str | None = None) -> dict[str, Any]:
    choice = {"index": 0, "logprobs": None, "finish_reason": reason, "token_ids": ids}
    name = "generate-tokens-9f2c1a7be04d4f6d8a53b0c7e21d9f64"
    return {"request_id": name, "choices": [choice], "prompt_logprobs": None}


@cache
def _generated_token(word: str) -> bytes:
    return data(_generated([IDS[word]]))


GENERATE = Answer(
    [],
    lambda word, place: _generated_token(word),
    lambda text, tokens: [
        data(_generated([IDS["<|im_end|>"]], "stop")),
        data({**_generated([]), "choices": [], "usage": USAGE}),
        DONE,
    ],
)

# --- responses ----------------------------------------------------------------------------------


def _named(event: dict[str, Any]) -> bytes:
    return b"event: %b\n%b" % (event["type"].encode(), data(event))


def _response(status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "id": "resp_1",
        "object": "response",
        "created_at": 1,
        "model": "scripted",
        "status": status,
        "output": output,
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
    }


_AT = {"item_id": "msg_1", "output_index": 0, "content_index": 0}
_DELTA = data({"type": "response.output_text.delta", **_AT, "delta": "@", "logprobs": []})
_DELTA_HEAD, _, _DELTA_TAIL = _DELTA.removesuffix(b"}\n\n").partition(b"@")


def _message(status: str, text: str | None) -> dict[str, Any]:
    parts = [] if text is None else [_part(text)]
    return {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "status": status,
        "content": parts,
    }


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _event(kind: str, number: int, **fields: Any) -> bytes:
    return _named({"type": f"response.{kind}", "sequence_number": number, **fields})


def _responses_token(word: str, place: int) -> bytes:
    return b'event: response.output_text.delta\n%b%b%b,"sequence_number":%d}\n\n' % (
        _DELTA_HEAD,
        word.encode(),
        _DELTA_TAIL,
        place + 4,
    )


def _responses_after(text: str, tokens: int) -> list[bytes]:
    done, number = _message("completed", text), tokens + 4
    usage = {
        "input_tokens": 100,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 100 + tokens,
    }
    whole = {**_response("completed", [done]), "usage": usage}
    return [
        _event("output_text.done", number, **_AT, text=text, logprobs=[]),
        _event("content_part.done", number + 1, **_AT, part=_part(text)),
        _event("output_item.done", number + 2, output_index=0, item=done),
        _event("completed", number + 3, response=whole),
    ]


RESPONSES = Answer(
    [
        _event("created", 0, response=_response("in_progress", [])),
        _event("in_progress", 1, response=_response("in_progress", [])),
        _event("output_item.added", 2, output_index=0, item=_message("in_progress", None)),
        _event("content_part.added", 3, **_AT, part=_part("")),
    ],
    _responses_token,
    _responses_after,
)

ANSWERS = {
    b"POST /v1/chat/completions ": CHAT,
    b"POST /v1/responses ": RESPONSES,
    b"POST /inference/v1/generate ": GENERATE,
}


# --- steps ----------------------------------------------------------------------------------------


class Stream:
    """One answer on its way."""

    def __init__(self, transport: asyncio.Transport, answer: Answer, number: int) -> None:
        self._transport = transport
        self._answer = answer
        self._number = number
        self._words: list[str] = []
        self.times: list[float] = []
        transport.write(HEAD + b"".join(map(chunk, answer.before)))

    def step(self) -> None:
        """Write the next token."""
        self.times.append(perf_counter())
        self._transport.write(self._next())

    def end(self) -> None:
        """Write what follows the last token."""
        self._transport.write(self._end())

    def write_all(self, tokens: int) -> None:
        """Everything at once."""
        blocks = [self._next() for _ in range(tokens)]
        self._transport.write(b"".join([*blocks, self._end()]))

    def flush(self) -> None:
        """Each token is on its way already."""

    def _next(self) -> bytes:
        place = len(self._words)
        word = word_at(self._number, place)
        self._words.append(word)
        return chunk(self._answer.token(word, place))

    def _end(self) -> bytes:
        after = self._answer.after("".join(self._words), len(self._words))
        return b"".join(map(chunk, after)) + chunk(b"")


class Sessions:
    """A connection of the plugin `segue-vllm`: all streams of a step in one frame."""

    def __init__(self, transport: asyncio.Transport, head: bytes) -> None:
        self._transport = transport
        found = re.search(rb"sec-websocket-key: *(\S+)", head, re.IGNORECASE)
        assert found, "a WebSocket has a key"
        accept = base64.b64encode(hashlib.sha1(found[1] + GUID).digest())
        transport.write(UPGRADED % accept)
        self._said: list[Said] = [Hello(PROTOCOL, "steps", 1, 1_000_000)]
        self.flush()

    def say(self, said: Said) -> None:
        """With the frame of this step."""
        self._said.append(said)

    def flush(self) -> None:
        """Send the frame."""
        if not self._said:
            return
        data, self._said = write_said(self._said), []
        size = len(data)
        head = bytes((0x82, size)) if size < 126 else b"\x82\x7e" + size.to_bytes(2)
        if size >= 1 << 16:
            head = b"\x82\x7f" + size.to_bytes(8)
        self._transport.write(head + data)


class SessionStream:
    """One answer among those of its connection."""

    def __init__(self, sessions: Sessions, stream: int, number: int) -> None:
        self._sessions, self._stream, self._number = sessions, stream, number
        self._place = 0
        self.times: list[float] = []
        sessions.say(Taken(stream, stream))
        self.flush = sessions.flush

    def step(self) -> None:
        """The next token."""
        self.times.append(perf_counter())
        word = word_at(self._number, self._place)
        self._place += 1
        self._sessions.say(Tokens(self._stream, [IDS[word]]))

    def end(self) -> None:
        """After the last token."""
        stop = IDS["<|im_end|>"]
        self._sessions.say(Tokens(self._stream, [stop]))
        self._sessions.say(End(self._stream, "stop", stop))

    def write_all(self, tokens: int) -> None:
        """Everything at once, a frame for each token."""
        for _ in range(tokens):
            self.step()
            self.flush()
        self.end()
        self.flush()


class Engine:
    """The streams of a plan, and the clock that moves all of them."""

    def __init__(self) -> None:
        self.plan = Plan(1, 1, 0)
        self.times: dict[int, list[float]] = {}
        self._streams: list[Stream | SessionStream] = []
        self._numbers = count()
        self._loop = asyncio.get_running_loop()

    def put(self, plan: Plan) -> None:
        """Play this from now on."""
        self.plan, self.times, self._streams = plan, {}, []

    def add(self, make: Callable[[int], Stream | SessionStream]) -> None:
        """A stream that waits for the others of its plan."""
        number = next(self._numbers) % len(WORDS) ** 2
        stream = make(number)
        if not self.plan.per_s:
            stream.write_all(self.plan.tokens)
            return
        self.times[number] = stream.times
        self._streams.append(stream)
        if len(self._streams) == self.plan.streams:
            begun, self._streams = self._streams, []
            self._step(begun, self._loop.time(), 0)

    def _step(self, streams: list[Stream | SessionStream], began: float, place: int) -> None:
        for stream in streams:
            stream.step() if place < self.plan.tokens else stream.end()
        for stream in streams:
            stream.flush()
        if place < self.plan.tokens:
            due = began + (place + 1) / self.plan.per_s
            self._loop.call_at(due, self._step, streams, began, place + 1)


def masked_frame(buffer: bytes) -> tuple[int, bytes, bytes] | None:
    """First byte and payload of a client's frame, and what comes after it; None until it is whole."""
    if len(buffer) < 2:
        return None
    size = buffer[1] & 0x7F
    start = {126: 4, 127: 10}.get(size, 2)
    if size >= 126:
        size = int.from_bytes(buffer[2:start])
    end = start + 4 + size
    if len(buffer) < end:
        return None
    mask = buffer[start : start + 4] * (size // 4 + 1)
    plain = int.from_bytes(buffer[start + 4 : end]) ^ int.from_bytes(mask[:size])
    return buffer[0], plain.to_bytes(size), buffer[end:]


class Connection(asyncio.Protocol):
    """One connection: a request at a time."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._transport: asyncio.Transport
        self._buffer = b""
        self._sessions: Sessions | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if self._sessions is not None:
            self._take_frames(self._sessions)
            return
        while (end := self._buffer.find(b"\r\n\r\n")) >= 0:
            found = re.search(rb"content-length: *(\d+)", self._buffer[:end].lower())
            size = end + 4 + (int(found[1]) if found else 0)
            if len(self._buffer) < size:
                return
            head, body = self._buffer[:end], self._buffer[end + 4 : size]
            self._buffer = self._buffer[size:]
            self._take(head, body)

    def _take_frames(self, sessions: Sessions) -> None:
        """Whole, masked frames of a client."""
        while (frame := masked_frame(self._buffer)) is not None:
            first, payload, self._buffer = frame
            if first & 0x0F == 2 and isinstance(ask := read_asked(payload), Ask):
                self._engine.add(partial(SessionStream, sessions, ask.stream))

    def _take(self, head: bytes, body: bytes) -> None:
        answer = next((ANSWERS[path] for path in ANSWERS if head.startswith(path)), None)
        if answer is not None and b'"stream":true' in body.replace(b" ", b""):
            self._engine.add(partial(Stream, self._transport, answer))
        elif answer is not None:
            # So Segue asks whether there is this endpoint.
            self._reply({"error": {"message": "stream it", "code": 400}}, b"400 Bad Request")
        elif head.startswith(b"POST /plan "):
            self._engine.put(Plan(**json.loads(body)))
            self._reply({})
        elif head.startswith(b"GET /times "):
            self._reply(self._engine.times)
        elif head.startswith(b"GET /segue/session "):
            self._reply({"package": "segue-vllm", "version": "0", "protocol": 1, "path": SESSIONS})
        elif head.startswith(b"GET %b " % SESSIONS.encode()):
            self._sessions = Sessions(self._transport, head)
        elif head.startswith(b"GET /version "):
            self._reply({"version": "0.32.0"})
        else:
            self._transport.write(FINE)

    def _reply(self, body: object, status: bytes = b"200 OK") -> None:
        data = json.dumps(body).encode()
        head = b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        self._transport.write(head % (status, len(data)) + data)


async def main() -> None:
    """Serve until killed."""
    loop = asyncio.get_running_loop()
    engine = Engine()
    server = await loop.create_server(lambda: Connection(engine), "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
