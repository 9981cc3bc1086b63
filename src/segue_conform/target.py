"""How does the suite speak with the server under test?

Requests, event streams and WebSocket connections as a plain client would make them; nothing is repaired on the way.
Whatever cannot be read as the protocol says is `Wrong`, in words that name it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import cast

import aiohttp

from segue_conform.case import Absent, Json, Wrong, expect, shown

TERMINAL = ("response.completed", "response.failed", "response.incomplete")
# How long a server may take for one answer, or be silent on a stream: the suite's turns are short.
ANSWER_S = 30.0
# How much of an answer is read.
BODY_BYTES_MAX = 16 * 1024 * 1024
# What a script is put between in the text of a user message; the scripted upstream looks for it.
MARK = "conform-script:"


def script(*steps: Json, words: str = "") -> str:
    """A user's text that makes the scripted upstream play these steps, one for each call of the model."""
    return f"{words}{MARK}{json.dumps(list(steps))}"


@dataclass(frozen=True)
class Answer:
    """An HTTP answer: its body as JSON, or None where it has none."""

    status: int
    headers: Mapping[str, str]
    body: object

    @property
    def json(self) -> Json:
        expect(isinstance(self.body, dict), f"the body is {shown(self.body)}, not a JSON object")
        return cast(Json, self.body)

    def ok(self) -> Json:
        """The body of an answer with status 200."""
        if self.status in (404, 405, 501):
            raise Absent(f"HTTP {self.status}: {shown(self.body)}")
        expect(self.status == 200, f"HTTP {self.status}: {shown(self.body)}")
        return self.json


@dataclass(frozen=True)
class Streamed:
    """An answer as server-sent events: each with its name, in order; `ended` where the stream had its end mark."""

    status: int
    content_type: str
    names: list[str]
    events: list[Json]
    ended: bool

    @property
    def types(self) -> list[str]:
        return [event.get("type", "") for event in self.events]


@dataclass
class Target:
    """The server under test."""

    session: aiohttp.ClientSession
    # Without a slash at the end, and with `/v1`.
    base: str
    model: str
    key: str | None = None
    upstream: str | None = None
    headers: dict[str, str] = field(default_factory=dict)
    answer_s: float = ANSWER_S

    def create(self, content: object = "Say hello.", **fields: object) -> Json:
        """The body of a request for a response; None leaves a field out."""
        body = {"model": self.model, "input": content, **fields}
        return {name: value for name, value in body.items() if value is not None}

    def _headers(self, headers: Mapping[str, str] | None) -> dict[str, str]:
        own = {} if self.key is None else {"Authorization": f"Bearer {self.key}"}
        return {**own, **self.headers, **(headers or {})}

    async def request(
        self, method: str, path: str, body: object = None, headers: Mapping[str, str] | None = None
    ) -> Answer:
        """One request; a body of bytes is sent as it is."""
        data = body if isinstance(body, bytes) else None if body is None else json.dumps(body)
        sent = self._headers(headers)
        if data is not None:
            sent.setdefault("Content-Type", "application/json")
        async with (
            asyncio.timeout(self.answer_s),
            self.session.request(method, self.base + path, data=data, headers=sent) as answer,
        ):
            read = await answer.content.read(BODY_BYTES_MAX)
            while chunk := await answer.content.read(BODY_BYTES_MAX):
                read += chunk
                expect(len(read) <= BODY_BYTES_MAX, "the answer is too long")
            return Answer(answer.status, answer.headers, _parsed(read))

    async def post(
        self, path: str, body: object, headers: Mapping[str, str] | None = None
    ) -> Answer:
        return await self.request("POST", path, body, headers)

    async def get(self, path: str) -> Answer:
        return await self.request("GET", path)

    async def delete(self, path: str) -> Answer:
        return await self.request("DELETE", path)

    async def stream(
        self, path: str, body: object = None, headers: Mapping[str, str] | None = None
    ) -> Streamed:
        """A request whose answer is a stream of events; GET where there is no body."""
        method = "GET" if body is None else "POST"
        sent = {"Accept": "text/event-stream", **self._headers(headers)}
        async with (
            asyncio.timeout(self.answer_s),
            self.session.request(method, self.base + path, json=body, headers=sent) as answer,
        ):
            content_type = answer.headers.get("Content-Type", "")
            text = ""
            if answer.status != 200:
                text = (await answer.content.read(BODY_BYTES_MAX)).decode(errors="replace")
            if answer.status in (404, 405, 501):
                raise Absent(f"HTTP {answer.status}: {shown(text)}")
            expect(answer.status == 200, f"HTTP {answer.status}: {shown(text)}")
            names, events, ended = [], list[Json](), False
            async for name, data in _server_sent(answer.content):
                if data == "[DONE]":
                    ended = True
                    continue
                event = _parsed(data.encode())
                expect(isinstance(event, dict), f"an event is {shown(data)}, not a JSON object")
                names.append(name)
                events.append(cast(Json, event))
            return Streamed(answer.status, content_type, names, events, ended)

    @asynccontextmanager
    async def socket(self, headers: Mapping[str, str] | None = None) -> AsyncIterator[Socket]:
        """A WebSocket connection to `/v1/responses`."""
        address = "ws" + self.base.removeprefix("http") + "/responses"
        try:
            connection = await self.session.ws_connect(
                address, headers=self._headers(headers), max_msg_size=BODY_BYTES_MAX, autoping=True
            )
        except aiohttp.WSServerHandshakeError as error:
            raise Absent(
                f"the upgrade to WebSocket was answered with HTTP {error.status}"
            ) from None
        async with connection:
            yield Socket(connection, self)

    async def upstream_state(self) -> Json:
        """What the scripted upstream counts: requests that run, that it has answered, that were aborted."""
        async with self.session.get(f"{self.upstream}/conform/state") as answer:
            return cast(Json, await answer.json())


@dataclass
class Socket:
    """One WebSocket connection."""

    connection: aiohttp.ClientWebSocketResponse
    target: Target

    async def send(self, message: object) -> None:
        await self.connection.send_str(message if isinstance(message, str) else json.dumps(message))

    async def create(self, content: object = "Say hello.", **fields: object) -> None:
        """Send a `response.create` that is not stored, unless the fields say so."""
        wanted = {"store": False, **fields}
        await self.send({"type": "response.create", **self.target.create(content, **wanted)})

    async def event(self) -> Json:
        """The next event."""
        wait_s = self.target.answer_s
        try:
            message = await self.connection.receive(wait_s)
        except TimeoutError:
            raise Wrong(f"no event within {wait_s:g} s") from None
        if message.type is not aiohttp.WSMsgType.TEXT:
            raise Wrong(
                f"the connection sent {message.type.name} ({shown(message.data)}), not text"
            )
        event = _parsed(cast(str, message.data).encode())
        expect(isinstance(event, dict), f"a message is {shown(message.data)}, not a JSON object")
        return cast(Json, event)

    async def events(self) -> list[Json]:
        """The events of a turn, up to its end: a terminal event, or an `error`."""
        events = [await self.event()]
        while not is_end(events[-1]):
            events.append(await self.event())
        return events

    async def turn(self, content: object = "Say hello.", **fields: object) -> Json:
        """A whole turn that must complete: the response of its terminal event."""
        await self.create(content, **fields)
        return completed(await self.events())

    async def refused(self, content: object = "Say hello.", **fields: object) -> Json:
        """A turn that must fail: the error, of an `error` event or of `response.failed`."""
        await self.create(content, **fields)
        return error_of((await self.events())[-1])


def is_end(event: Json) -> bool:
    return event.get("type") in (*TERMINAL, "error")


def completed(events: list[Json]) -> Json:
    """The response of a turn that completed."""
    last = events[-1] if events else {}
    expect(last.get("type") == "response.completed", f"the turn ended with {shown(last)}")
    return cast(Json, last["response"])


def error_of(event: Json) -> Json:
    """The error of a turn that failed, whichever way it is reported."""
    found = event.get("response", {}).get("error") if event["type"] == "response.failed" else None
    found = event.get("error") if event["type"] == "error" else found
    expect(isinstance(found, dict), f"no error in {shown(event)}")
    return cast(Json, found)


def _parsed(data: bytes) -> object:
    if not data:
        return None
    try:
        return json.loads(data)
    except ValueError:
        return data.decode(errors="replace")


async def _server_sent(content: aiohttp.StreamReader) -> AsyncIterator[tuple[str, str]]:
    """Name and data of each event."""
    name, data = "", list[str]()
    async for raw in content:
        line = raw.decode().rstrip("\r\n")
        if not line:
            if data:
                yield name, "\n".join(data)
            name, data = "", []
        elif not line.startswith(":"):
            key, _, value = line.partition(":")
            value = value.removeprefix(" ")
            if key == "event":
                name = value
            elif key == "data":
                data.append(value)
