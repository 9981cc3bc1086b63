"""How does a client talk to each server? One conversation by one way; a turn gives times and what the server counted.

A body is written before the clock starts, so what a client takes to encode is not in the times. The time to the first
token is the time to the first text that is not empty (to the first ids, where ids are what comes).
"""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Raw, Struct

from segue_bench.client import (
    ClientConnection,
    ServerAddress,
    Traffic,
    frame,
    open_websocket,
    read_body,
    read_chunk,
    read_head,
    read_message,
)

INSTRUCTIONS = "You are a coding agent. Look before you change, and say what you found. " * 14
END = "<|im_end|>\n"


@dataclass(frozen=True, slots=True)
class Place:
    """Which server, and what is asked of its model."""

    url: str
    tools: list[dict[str, Any]]
    tokenizer: Path
    output_tokens: int
    temperature: float


class Turn(Struct, frozen=True):
    """One turn, in seconds, tokens and bytes."""

    ttft_s: float
    turn_s: float
    decode_s: float
    prompt: int
    cached: int | None
    output: int
    sent: int


class TalkFailed(Exception):
    """A server did not answer as it should."""


# --- what servers answer --------------------------------------------------------------------------


class TalkDetails(Struct, frozen=True):
    cached_tokens: int | None = None


class TalkUsage(Struct, frozen=True):
    """In the words of chat completions, or of responses."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: TalkDetails | None = None
    input_tokens: int = 0
    output_tokens: int = 0
    input_tokens_details: TalkDetails | None = None


class _Delta(Struct, frozen=True):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(Struct, frozen=True):
    delta: _Delta = _Delta()
    token_ids: list[int] | None = None


class _Chunk(Struct, frozen=True):
    choices: list[_Choice] = []
    usage: TalkUsage | None = None
    error: Raw | None = None


class _Part(Struct, frozen=True):
    text: str = ""


class _Item(Struct, frozen=True):
    content: list[_Part] | None = None


class _Response(Struct, frozen=True):
    id: str
    status: str = ""
    output: list[_Item] = []
    usage: TalkUsage | None = None


class _Event(Struct, frozen=True):
    type: str
    delta: str = ""
    response: _Response | None = None


_chunk = msgspec.json.Decoder(_Chunk)
_kind = msgspec.json.Decoder(_Event)
ENDS = ("response.completed", "response.incomplete", "response.failed", "error")


def sse(connection: ClientConnection) -> Iterator[bytes]:
    """The data of each event, up to the end of the body."""
    rest = b""
    while chunk := read_chunk(connection):
        *whole, rest = (rest + chunk.replace(b"\r\n", b"\n")).split(b"\n\n")
        for event in whole:
            if not event.startswith(b":"):
                yield event.removeprefix(b"data: ").rpartition(b"\ndata: ")[2]


# --- conversations --------------------------------------------------------------------------------


class Talk(ABC):
    """A conversation with the whole history in every request; each kind says how that looks."""

    path = ""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.traffic = Traffic()
        self.address = ServerAddress(place.url)
        self.connection = self._connect()
        self.said: list[bytes] = []
        self._first_at = self._last_at = 0.0

    def _connect(self) -> ClientConnection:
        return ClientConnection(self.address, self.traffic)

    def say(self, role: str, text: str) -> None:
        """Add a message; it goes out with the next turn."""
        self.said.append(msgspec.json.encode({"role": role, "content": text}))

    def turn(self) -> Turn:
        """Ask, and read the answer to its end; it becomes part of the history."""
        body, sent = self._body(), self.traffic.sent
        self._first_at = self._last_at = 0.0
        began = time.perf_counter()
        usage = self._exchange(body)
        ended = time.perf_counter()
        details = usage.prompt_tokens_details or usage.input_tokens_details
        return Turn(
            (self._first_at or ended) - began,
            ended - began,
            self._last_at - self._first_at,
            usage.prompt_tokens or usage.input_tokens,
            details.cached_tokens if details else None,
            usage.completion_tokens or usage.output_tokens,
            self.traffic.sent - sent,
        )

    @abstractmethod
    def _body(self) -> bytes:
        """The next request, written before the clock starts."""

    @abstractmethod
    def _exchange(self, body: bytes) -> TalkUsage:
        """Send it and read the answer to its end."""

    def _note(self) -> None:
        self._last_at = time.perf_counter()
        self._first_at = self._first_at or self._last_at

    def _post(self, body: bytes) -> Iterator[bytes]:
        """The events that answer this body."""
        head = (
            f"POST {self.path} HTTP/1.1\r\n{self.address.headers()}Content-Type: application/json\r\n"
            f"Accept: text/event-stream\r\nContent-Length: {len(body)}\r\n\r\n"
        ).encode()
        self.connection.send(head + body)
        answer = read_head(self.connection)
        if answer.status != 200:
            words = read_body(self.connection, answer).decode()[:300]
            raise TalkFailed(f"{self.path}: status {answer.status}: {words}")
        return sse(self.connection)


class ChatTalk(Talk):
    """`/v1/chat/completions`."""

    path = "/v1/chat/completions"

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self._fields = _fields(
            model="m",
            tools=chat_tools(place.tools),
            stream=True,
            stream_options={"include_usage": True},
            max_completion_tokens=place.output_tokens,
            temperature=place.temperature,
        )
        self.say("system", INSTRUCTIONS)

    def _body(self) -> bytes:
        return b'{"messages":[' + b",".join(self.said) + b"]," + self._fields

    def _exchange(self, body: bytes) -> TalkUsage:
        text, usage = "", TalkUsage()
        for data in self._post(body):
            if data == b"[DONE]":
                continue
            chunk = _checked(data)
            usage = chunk.usage or usage
            for choice in chunk.choices:
                if new := choice.delta.content or choice.delta.reasoning_content:
                    self._note()
                    text += new
        self.say("assistant", text)
        return usage


@cache
def tokenizer(folder: Path) -> Any:
    """Of this model; a process loads it once, and those that it forks have it."""
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(folder / "tokenizer.json"))


class IdsTalk(Talk):
    """`/inference/v1/generate`: all ids each turn, no text anywhere. What the engine's own HTTP takes at least."""

    path = "/inference/v1/generate"

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self._tokenizer = tokenizer(place.tokenizer)
        self._begin = self._encoded("<|im_start|>assistant\n")
        self._sampling = {
            "max_tokens": place.output_tokens,
            "temperature": place.temperature,
            "detokenize": False,
        }
        tools = "\n".join(json.dumps(tool) for tool in chat_tools(place.tools))
        self._ids = self._encoded(f"<|im_start|>system\n{INSTRUCTIONS}\n\n# Tools\n\n{tools}{END}")

    def _encoded(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def say(self, role: str, text: str) -> None:
        self._ids += self._encoded(f"<|im_start|>{role}\n{text}{END}")

    def _body(self) -> bytes:
        self._ids += self._begin
        fields = _fields(
            model="m",
            stream=True,
            stream_options={"include_usage": True},
            sampling_params=self._sampling,
        )
        return b'{"token_ids":' + msgspec.json.encode(self._ids) + b"," + fields

    def _exchange(self, body: bytes) -> TalkUsage:
        usage = TalkUsage()
        for data in self._post(body):
            if data == b"[DONE]":
                continue
            chunk = _checked(data)
            usage = chunk.usage or usage
            for choice in chunk.choices:
                if choice.token_ids:
                    self._note()
                    self._ids += choice.token_ids
        self._ids += self._encoded(END)
        return usage


class ResponsesTalk(Talk):
    """`/v1/responses` over HTTP."""

    path = "/v1/responses"
    store = False

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self._fields = _fields(
            model="m",
            instructions=INSTRUCTIONS,
            tools=place.tools,
            store=self.store,
            max_output_tokens=place.output_tokens,
            temperature=place.temperature,
        )

    def say(self, role: str, text: str) -> None:
        kind = "input_text" if role == "user" else "output_text"
        content = [{"type": kind, "text": text}]
        self.said.append(msgspec.json.encode({"type": "message", "role": role, "content": content}))

    def _body(self) -> bytes:
        return b'{"stream":true,"input":[' + b",".join(self.said) + b"]," + self._fields

    def _exchange(self, body: bytes) -> TalkUsage:
        last = None
        for data in self._post(body):
            if data != b"[DONE]":
                last = self._seen(data) or last
        response = _ended(last)
        self.say(
            "assistant", "".join(p.text for item in response.output for p in item.content or ())
        )
        return response.usage or TalkUsage()

    def _seen(self, data: bytes) -> _Event | None:
        """Note an event; give it back if it is the last one."""
        event = _kind.decode(data)
        if event.type.endswith(".delta") and event.delta:
            self._note()
        return event if event.type in ENDS else None


class SocketTalk(ResponsesTalk):
    """A WebSocket: the id of the response before, and what is new."""

    _parent = b""

    def _connect(self) -> ClientConnection:
        return open_websocket(self.address, self.traffic)

    def _body(self) -> bytes:
        new = b'{"type":"response.create",' + self._parent + b'"input":['
        return frame(new + b",".join(self.said) + b"]," + self._fields)

    def _exchange(self, body: bytes) -> TalkUsage:
        self.connection.send(body)
        while (last := self._seen(read_message(self.connection))) is None:
            pass
        response = _ended(last)
        self._parent = b'"previous_response_id":"' + response.id.encode() + b'",'
        self.said = []
        return response.usage or TalkUsage()


class StoredSocketTalk(SocketTalk):
    """The same with `store: true`."""

    store = True


def chat_tools(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """These tools as chat completions name them."""
    fields = ("name", "description", "parameters")
    return [{"type": "function", "function": {f: tool[f] for f in fields}} for tool in tools]


def _fields(**fields: object) -> bytes:
    """The rest of a body, after its long part."""
    return msgspec.json.encode(fields)[1:]


def _checked(data: bytes) -> _Chunk:
    chunk = _chunk.decode(data)
    if chunk.error is not None:
        raise TalkFailed(bytes(chunk.error).decode()[:300])
    return chunk


def _ended(last: _Event | None) -> _Response:
    if last is None or last.response is None or last.response.status == "failed":
        raise TalkFailed(f"no response at the end: {str(last)[:300]}")
    return last.response
