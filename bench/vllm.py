"""A vLLM without a model: it answers `/v1/completions` with token ids that were written down before.

It speaks over real HTTP what Segue asks of vLLM (docs/engines/README.md): ids in, ids out, one token in each event. The
ids are SmolLM2's. It runs in threads of this process. Before each thing that it writes it calls `pace`, which may wait.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import cycle
from typing import Any

# Tokens of SmolLM2's vocabulary by what they say.
IDS = {
    "<|im_end|>": 2,
    '"': 18,
    ",": 28,
    ".": 30,
    "/": 31,
    "0": 32,
    "1": 33,
    "2": 34,
    ":": 42,
    "<": 44,
    ">": 46,
    "I": 57,
    "_": 79,
    " the": 260,
    " and": 284,
    " is": 314,
    " that": 338,
    " are": 359,
    " at": 418,
    ' "': 476,
    " will": 523,
    " more": 540,
    " so": 588,
    " long": 986,
    '",': 1002,
    "read": 1040,
    "name": 1245,
    "py": 1306,
    " look": 1492,
    " here": 1535,
    "path": 1537,
    "It": 1589,
    '":': 1799,
    " next": 1867,
    " words": 1924,
    " enough": 2001,
    "file": 2153,
    "time": 2256,
    " file": 2301,
    " ten": 3772,
    "call": 4350,
    " stream": 5390,
    "main": 6157,
    "target": 6999,
    "source": 7032,
    ' {"': 9583,
    "</": 9617,
    "src": 10920,
    "}}": 17859,
    "tool": 19324,
    "convert": 20068,
    "arguments": 24370,
    " noon": 27616,
    "UTC": 35204,
    '{"': 39428,
    "timezone": 41371,
}
LONGEST = max(map(len, IDS))


def ids_of(text: str) -> list[int]:
    """This text as token ids: the longest known word first."""
    found: list[int] = []
    while text:
        word = next(text[:n] for n in range(LONGEST, 0, -1) if text[:n] in IDS)
        found.append(IDS[word])
        text = text.removeprefix(word)
    return found


def call(name: str, arguments: dict[str, str]) -> str:
    """A call as a ChatML model writes it."""
    body = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>{body}</tool_call>"


class Engine(ThreadingHTTPServer):
    """Gives the answers in turn, and then again from the first."""

    daemon_threads = True

    def __init__(self, answers: Sequence[str]) -> None:
        super().__init__(("127.0.0.1", 0), Connection)
        self.answers = cycle([[*ids_of(answer), IDS["<|im_end|>"]] for answer in answers])
        self.pace: Callable[[], None] = lambda: None

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self.server_port}"


class Connection(BaseHTTPRequestHandler):
    """One connection, kept open between requests."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: Engine

    def do_GET(self) -> None:
        """Health and version."""
        self._reply(200, {"version": "0.32.0"} if self.path == "/version" else {})

    def do_POST(self) -> None:
        """Stream the next answer; the way that speaks only ids is closed, as it is unless vLLM is told otherwise."""
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.path != "/v1/completions":
            self._reply(403, {"error": {"message": "Forbidden", "code": 403}})
            return
        self.server.pace()
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        for event in events(body["model"], body["prompt"], next(self.server.answers)):
            self.server.pace()
            self.wfile.write(chunk(b"data: %b\n\n" % json.dumps(event).encode()))
        self.server.pace()
        self.wfile.write(chunk(b"data: [DONE]\n\n") + chunk(b""))

    def _reply(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


def chunk(data: bytes) -> bytes:
    """A chunk of a body; an empty one ends it."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def events(model: str, prompt: Sequence[int], ids: Sequence[int]) -> Iterator[dict[str, Any]]:
    """A completion as vLLM 0.32 streams it with `return_token_ids`."""
    head = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": model}
    for n, id in enumerate(ids):
        is_last = n == len(ids) - 1
        choice = {
            "index": 0,
            "text": "",
            "logprobs": None,
            "finish_reason": "stop" if is_last else None,
            "stop_reason": id if is_last else None,
            "token_ids": [id],
            "prompt_token_ids": prompt if n == 0 else None,
        }
        yield {**head, "choices": [choice], "usage": None}
    usage = {
        "prompt_tokens": len(prompt),
        "completion_tokens": len(ids),
        "total_tokens": len(prompt) + len(ids),
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    yield {**head, "choices": [], "usage": usage}


@contextmanager
def serving(answers: Sequence[str]) -> Iterator[Engine]:
    """An engine that gives these answers."""
    with Engine(answers) as engine:
        thread = threading.Thread(target=engine.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        try:
            yield engine
        finally:
            engine.shutdown()
            thread.join()
