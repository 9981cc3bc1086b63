"""An engine that says whatever it is asked to: a process of its own, so that only Segue's work is measured.

A chat endpoint, whose last user message names what is said, and how often: `deltas 20000`. And a vLLM, an SGLang and a
llama.cpp, which are sent no words: the temperature is the place in `TOKEN_SAID`, and the limit how often. As a module
it prints its port and answers until it is ended.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Json = Any
MODEL = "liar"
SSE = "text/event-stream"


def event(value: object) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def chunk(delta: Json, finish: str | None = None, index: int = 0) -> bytes:
    choice = {"index": index, "delta": delta, "finish_reason": finish}
    return event({"object": "chat.completion.chunk", "model": MODEL, "choices": [choice]})


def usage(read: int, wrote: int, cached: int = 0) -> bytes:
    told = {"prompt_tokens": read, "completion_tokens": wrote, "total_tokens": read + wrote}
    told |= {"prompt_tokens_details": {"cached_tokens": cached}}
    return event({"object": "chat.completion.chunk", "model": MODEL, "choices": [], "usage": told})


def call(number: int, arguments: str) -> Json:
    function = {"name": "f", "arguments": arguments}
    return {
        "tool_calls": [
            {"index": number, "id": f"call_{number}", "type": "function", "function": function}
        ]
    }


WORD, STOP, END = chunk({"content": "word "}), chunk({}, "stop"), b"data: [DONE]\n\n"
CALLED = chunk({}, "tool_calls")
GOOD = usage(10, 3)
WHOLE = WORD * 3 + STOP + GOOD + END


def written(word: bytes) -> Callable[[int], bytes]:
    return lambda size: word * size + STOP + GOOD + END


def filled(before: bytes, piece: bytes, after: bytes) -> Callable[[int], bytes]:
    """One event with so many of these in it."""
    return lambda size: (
        b"data: " + before + b",".join([piece] * size) + after + b"\n\n" + WORD + STOP + GOOD + END
    )


DELTA = b'{"choices":[{"index":0,"delta":{'
SAID: dict[str, Callable[[int], bytes]] = {
    "deltas": written(WORD),
    "empty-deltas": lambda size: WORD + chunk({}) * size + STOP + GOOD + END,
    "thoughts": lambda size: chunk({"reasoning_content": "so "}) * size + WORD + STOP + GOOD + END,
    "comments": lambda size: b": still here\n\n" * size + WORD + STOP + GOOD + END,
    "blank-lines": lambda size: b"\n" * size + WORD + STOP + GOOD + END,
    "one-delta": lambda size: chunk({"content": "word " * size}) + STOP + GOOD + END,
    "open-marks": lambda size: chunk({"content": "<think>" * size}) + STOP + GOOD + END,
    "fields": lambda size: (
        chunk({"content": "word ", **{f"f{n}": n for n in range(size)}}) + STOP + GOOD + END
    ),
    "calls": lambda size: b"".join(chunk(call(n, "{}")) for n in range(size)) + CALLED + GOOD + END,
    "arguments": lambda size: (
        chunk(call(0, '{"a": "'))
        + chunk(call(0, "x")) * size
        + chunk(call(0, '"}'))
        + CALLED
        + GOOD
        + END
    ),
    "choices": lambda size: WORD + chunk({"content": "other "}, index=1) * size + STOP + GOOD + END,
    "late-deltas": lambda size: WORD + STOP + chunk({"content": "late "}) * size + GOOD + END,
    "usages": lambda size: WORD + STOP + GOOD * size + END,
    "choices-at-once": filled(b'{"choices":[', b"{}", b"]}"),
    "calls-at-once": filled(DELTA + b'"tool_calls":[', b"{}", b"]}}]}"),
    "parts-at-once": filled(DELTA + b'"content":[', b"{}", b"]}}]}"),
    "logprobs-at-once": filled(DELTA + b'"content":"a"},"logprobs":{"content":[', b"{}", b"]}}]}"),
    "arguments-at-once": filled(
        DELTA + b'"tool_calls":[{"index":0,"function":{"name":"f","arguments":{"a":[',
        b"1",
        b"]}}}]}}]}",
    ),
    "an-error": filled(b'{"error":{"message":"a","type":"', b"a", b'"}}'),
    # The size is the number that is lied about.
    "lies": lambda size: WORD * 3 + STOP + usage(size, size) + END,
    "negative": lambda size: WORD * 3 + STOP + usage(-size, -size, -size) + END,
    "cached": lambda size: WORD * 3 + STOP + usage(10, 3, size) + END,
    "bytes-at-once": filled(
        DELTA + b'"content":"a"},"logprobs":{"content":[{"bytes":[', b"7", b"]}]}}]}"
    ),
    # The size is the number of bytes after which the connection ends.
    "cut": lambda size: WHOLE[:size],
    "cut-chunks": lambda size: WHOLE[:size],
}

# --- engines of token ids: what begins, a token, what ends, and what says that the answer is whole -------------------

TOKEN = b"1000"
SHAPES: dict[str, tuple[bytes, bytes, bytes]] = {
    "/v1/completions": (
        b'{"choices":[{"index":0,"text":"","token_ids":[',
        b']}],"usage":null}',
        b'{"choices":[{"index":0,"text":"","token_ids":[],"finish_reason":"stop"}]}',
    ),
    "/generate": (
        b'{"output_ids":[',
        b'],"meta_info":{"completion_tokens":%d}}',
        b'{"output_ids":[],"meta_info":{"finish_reason":{"type":"stop"}}}',
    ),
    "/completion": (
        b'{"content":"a","tokens":[',
        b'],"tokens_predicted":%d}',
        b'{"stop":true,"stop_type":"eos"}',
    ),
}


def tokens(path: str, count: int, by_now: int) -> bytes:
    """An event with so many ids."""
    begin, end, _ = SHAPES[path]
    end = end % by_now if b"%d" in end else end
    return b"data: " + begin + b",".join([TOKEN] * count) + end + b"\n\n"


def ended(path: str) -> bytes:
    return b"data: " + SHAPES[path][2] + b"\n\n"


TOKEN_SAID: list[Callable[[str, int], bytes]] = [
    lambda path, size: b"".join(tokens(path, 1, n + 1) for n in range(size)) + ended(path) + END,
    lambda path, size: tokens(path, size, size) + ended(path) + END,
    # Much that is none of its business, when the answer is whole.
    lambda path, size: tokens(path, 1, 1) + ended(path) + tokens(path, 1, 2) * size + END,
]
ONE_BY_ONE, AT_ONCE, AFTER_THE_END = range(len(TOKEN_SAID))


class Handler(BaseHTTPRequestHandler):
    """Answers as it is told; the whole answer is written at once."""

    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        return

    def do_GET(self) -> None:
        self._answer(
            json.dumps({"object": "list", "data": [{"id": MODEL}]}).encode(), "application/json"
        )

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path in SHAPES:
            asked = body.get("sampling_params") or body
            limits = ("max_tokens", "max_new_tokens", "n_predict")
            size = next(asked[name] for name in limits if name in asked)
            said = TOKEN_SAID[round(100 * asked["temperature"])]
            self._answer(said(self.path, size), SSE)
            return
        if not self.path.endswith("/chat/completions"):
            self.send_error(404)
            return
        asked = body["messages"][-1]["content"]
        text = asked if isinstance(asked, str) else asked[0]["text"]
        kind, _, size = text.partition(" ")
        data = SAID[kind](int(size))
        if kind == "cut-chunks":
            self._answer(b"%x\r\n%b\r\n" % (len(data), data) if data else b"", SSE, "chunked")
        else:
            self._answer(data, SSE)

    def _answer(self, data: bytes, kind: str, encoding: str = "") -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Connection", "close")
        if encoding:
            self.send_header("Transfer-Encoding", encoding)
        self.end_headers()
        self.wfile.write(data)
        self.close_connection = True


@contextmanager
def lying_engine() -> Iterator[str]:
    """Its address, for as long as this lasts."""
    command = [sys.executable, "-m", "tests.growth.lying_engine"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.kill()


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    print(server.server_port, flush=True)
    server.serve_forever()
