"""An inference server that batches: at each step every stream gets one token, as vLLM and SGLang write them.

`/v1/chat/completions`, `/v1/responses` and vLLM's `/inference/v1/generate` give the same words, one event for each
token. What to play is put at `/plan`: the steps begin when that many streams have asked. `/times` says when each token
was written, by the number of its answer, which the first two words of the answer spell. Run as a process of its own
(`python -m bench.engine_steps`), it prints its port.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from functools import cache
from itertools import count
from time import perf_counter
from typing import Any, NamedTuple

from bench.upstream import FINE, HEAD, USAGE
from bench.vllm import IDS

WORDS = [word for word in IDS if word.startswith(" ") and word[1:].isalpha()]
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

    def _next(self) -> bytes:
        place = len(self._words)
        word = word_at(self._number, place)
        self._words.append(word)
        return chunk(self._answer.token(word, place))

    def _end(self) -> bytes:
        after = self._answer.after("".join(self._words), len(self._words))
        return b"".join(map(chunk, after)) + chunk(b"")


class Engine:
    """The streams of a plan, and the clock that moves all of them."""

    def __init__(self) -> None:
        self.plan = Plan(1, 1, 0)
        self.times: dict[int, list[float]] = {}
        self._streams: list[Stream] = []
        self._numbers = count()
        self._loop = asyncio.get_running_loop()

    def put(self, plan: Plan) -> None:
        """Play this from now on."""
        self.plan, self.times, self._streams = plan, {}, []

    def add(self, transport: asyncio.Transport, answer: Answer) -> None:
        """A stream that waits for the others of its plan."""
        number = next(self._numbers) % len(WORDS) ** 2
        stream = Stream(transport, answer, number)
        if not self.plan.per_s:
            stream.write_all(self.plan.tokens)
            return
        self.times[number] = stream.times
        self._streams.append(stream)
        if len(self._streams) == self.plan.streams:
            begun, self._streams = self._streams, []
            self._step(begun, self._loop.time(), 0)

    def _step(self, streams: list[Stream], began: float, place: int) -> None:
        for stream in streams:
            stream.step() if place < self.plan.tokens else stream.end()
        if place < self.plan.tokens:
            due = began + (place + 1) / self.plan.per_s
            self._loop.call_at(due, self._step, streams, began, place + 1)


class Connection(asyncio.Protocol):
    """One connection: a request at a time."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._transport: asyncio.Transport
        self._buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while (end := self._buffer.find(b"\r\n\r\n")) >= 0:
            found = re.search(rb"content-length: *(\d+)", self._buffer[:end].lower())
            size = end + 4 + (int(found[1]) if found else 0)
            if len(self._buffer) < size:
                return
            head, body = self._buffer[:end], self._buffer[end + 4 : size]
            self._buffer = self._buffer[size:]
            self._take(head, body)

    def _take(self, head: bytes, body: bytes) -> None:
        answer = next((ANSWERS[path] for path in ANSWERS if head.startswith(path)), None)
        if answer is not None and b'"stream":true' in body.replace(b" ", b""):
            self._engine.add(self._transport, answer)
        elif answer is not None:
            # So Segue asks whether there is this endpoint.
            self._reply({"error": {"message": "stream it", "code": 400}}, b"400 Bad Request")
        elif head.startswith(b"POST /plan "):
            self._engine.put(Plan(**json.loads(body)))
            self._reply({})
        elif head.startswith(b"GET /times "):
            self._reply(self._engine.times)
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
