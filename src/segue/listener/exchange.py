"""What is one HTTP request and its answer? Its ASGI messages as methods.

A body is read within limits and decompressed; an answer carries `x-request-id`; an error becomes a status, headers and
one JSON body. Only this file of the HTTP transport knows whether the client is still connected.
"""

from __future__ import annotations

import asyncio
import codecs
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, MutableMapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from time import perf_counter
from typing import Any, NamedTuple
from urllib.parse import parse_qs, quote

from segue.accounts.account import Account
from segue.budgets.headers import RateHeaders, openai_headers
from segue.errors import (
    ApiError,
    InvalidRequest,
    OverBudget,
    Refused,
    ServerFault,
    Unauthenticated,
    Unavailable,
    too_large,
)
from segue.ids import new_id
from segue.listener.access_line import AccessLine
from segue.listener.inflate import inflate
from segue.memory.budget import Memory, sent_bytes
from segue.memory.intake import Inflow
from segue.seams.history import Owner
from segue.wire.codec import encode_error_body

log = logging.getLogger(__name__)

# The three parts of ASGI, which is untyped by design.
AsgiMessage = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[AsgiMessage]]
Send = Callable[[AsgiMessage], Awaitable[None]]

Headers = Sequence[tuple[bytes, bytes]]
# The value of a header of a request, or "".
ReadHeader = Callable[[bytes], str]


class ErrorAnswer(NamedTuple):
    """An error as an API says it."""

    status: int
    body: bytes
    headers: Headers = ()


def plain_error(error: ApiError, request_id: str) -> ErrorAnswer:
    """An error in the shape of OpenAI's APIs, for paths that belong to no API as well."""
    return ErrorAnswer(error.status, encode_error_body(error))


JSON = (b"content-type", b"application/json")
# What stands in the value of a header as it is.
VISIBLE = "".join(map(chr, range(0x20, 0x7F)))
TOO_LARGE = "payload_too_large"
# A body that inflates to no more than this does not wait.
INFLATED_BYTES = 1024 * 1024
# Answers above this size are counted before they leave.
ANSWER_BYTES, ANSWER_WAIT_S = 1024 * 1024, 5
UNREAD = "Too many large responses are waiting to be read by their clients."
# A refused upload that takes longer than this is cut off.
DISCARD_S_MAX = 10.0
# How much of a body is checked before the event loop may do other work.
CHECKED_BYTES = 256 * 1024
# How much of a path and of `X-Forwarded-For` is logged.
LOGGED_CHARS_MAX = 256
# The status of a client that left before its answer began, as proxies log it.
CLIENT_LEFT = 499
# Our extension of ASGI, which has no message for aborting a connection.
CUT = "segue.cut"


class ClientGone(Exception):
    """The client dropped its request."""


@dataclass(slots=True, eq=False)
class Exchange:
    """One HTTP request and its answer."""

    scope: Scope
    receive: Receive
    send: Send
    _body_s_max: float
    _memory: Memory
    _inflow: Inflow | None = None
    request_id: str = field(default_factory=partial(new_id, "req"))
    received_at: float = field(default_factory=perf_counter)
    # The status that was sent; until then, that of a client that leaves.
    status: int = CLIENT_LEFT
    sent_bytes: int = 0
    # The size of the body, decompressed.
    body_bytes: int = 0
    # The path with names in place of ids; of a path that we do not know, nothing.
    route: str = ""
    # Of the API that the request is for: how it says errors, and what its transports are called in metrics.
    error_answer: Callable[[ApiError, str], ErrorAnswer] = plain_error
    label: str = ""
    rate_headers: RateHeaders = openai_headers
    # For the access log: the response that it made or names, and why it did not go well.
    response_id: str = ""
    reason: str = ""
    has_started: bool = False
    _is_read: bool = False
    # Who sent it, once that is known.
    owner: Owner = ""
    key_name: str = ""
    account: Account = field(init=False)
    # Besides its own: CORS headers for the page that sent it, and warnings.
    more_headers: Headers = ()
    arguments: dict[str, str] = field(default_factory=dict)

    @property
    def query(self) -> dict[str, str]:
        """The parameters of the query, the last one of each name."""
        pairs = parse_qs(self.scope["query_string"].decode("latin-1"), keep_blank_values=True)
        return {name: values[-1] for name, values in pairs.items()}

    def header(self, name: bytes) -> str:
        """The value of a header, or ""; a repeated header is both values joined, which no check accepts."""
        return ", ".join(v.decode("latin-1") for k, v in self.scope["headers"] if k == name)

    async def text(self, bytes_max: int) -> bytes | bytearray:
        """The whole body, decompressed, within the limits, if it is UTF-8."""
        self._inflow = inflow = Inflow(self._memory.intake, self.account.key_id)
        try:
            async with asyncio.timeout(self._body_s_max):
                body = await self._receive_all(inflow, bytes_max)
                plain = await self._inflate(body, inflow, bytes_max)
        except TimeoutError:
            raise self._too_slow() from None
        self.body_bytes = len(plain)
        inflow.count(0, len(plain))
        return await check_utf8(plain)

    def _too_slow(self) -> Refused:
        # The rest is not waited for.
        self._is_read = True
        message = f"The request body took longer than {self._body_s_max:g} s."
        return Refused(message, status=408, code="request_timeout")

    async def _inflate(self, body: bytearray, inflow: Inflow, bytes_max: int) -> bytes | bytearray:
        """The plain body. One that becomes large waits until there is room for the largest."""
        encoding = self.header(b"content-encoding").strip().lower()
        small = min(bytes_max, max(len(body), INFLATED_BYTES))
        try:
            return await inflate(body, encoding, small)
        except Refused as error:
            if error.code != TOO_LARGE or small == bytes_max:
                raise
        # It is not complete yet: the oldest of such may always go on.
        inflow.count(len(body), 0)
        await inflow.room(len(body) + bytes_max)
        return await inflate(body, encoding, bytes_max)

    def hold(self, size: int) -> None:
        """The request stands for so much more than it has brought: until it is a turn, that is on its way as well."""
        if self._inflow is not None:
            self._inflow.count(0, self.body_bytes + size)

    def release_body(self) -> None:
        """The body is a turn now, or no longer needed."""
        if self._inflow is not None:
            self._inflow.count(0, 0)

    @contextmanager
    def holding_body(self) -> Iterator[None]:
        """The body is no longer on its way, and stays in memory while inside; refused where there is no room for it."""
        with self._memory.preparing(sent_bytes(self.body_bytes, 0)):
            self.release_body()
            yield

    async def _receive_all(self, inflow: Inflow, bytes_max: int) -> bytearray:
        """One growing buffer: to join many parts at the end would take long."""
        body = bytearray()
        while not self._is_read:
            body += await self._receive_part()
            if (size := len(body)) > bytes_max:
                body.clear()
                declared_bytes = int(self.header(b"content-length") or 0)
                raise too_large(max(size, declared_bytes), bytes_max)
            if not self._is_read:
                inflow.count(size, 0)
                await inflow.more()
        return body

    async def parts(self, bytes_max: int) -> AsyncIterator[bytes]:
        """The body as it arrives, for what must not be in memory as a whole; each part within a time."""
        size = 0
        while not self._is_read:
            try:
                async with asyncio.timeout(self._body_s_max):
                    part = await self._receive_part()
            except TimeoutError:
                raise self._too_slow() from None
            size += len(part)
            if size > bytes_max:
                raise too_large(max(size, int(self.header(b"content-length") or 0)), bytes_max)
            yield part

    async def _receive_part(self) -> bytes:
        message = await self.receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        self._is_read = not message.get("more_body")
        part: bytes = message.get("body", b"")
        return part

    async def _discard_rest(self) -> None:
        """Read the rest of the body: closing with unread bytes would reset the connection and lose our answer."""
        with suppress(TimeoutError, ClientGone):
            async with asyncio.timeout(DISCARD_S_MAX):
                while not self._is_read:
                    await self._receive_part()

    async def disconnected(self) -> None:
        """Wait until the client is gone."""
        while (await self.receive())["type"] != "http.disconnect":
            pass

    async def cut(self) -> None:
        """Abort the connection: a close would wait for a client that does not read."""
        self.scope["extensions"][CUT]["call"]()
        await self.disconnected()

    async def start(self, status: int, headers: Headers) -> None:
        """Send status and headers; they leave together with the first bytes of the body."""
        self.has_started = True
        self.status = status
        named = [*headers, *self.more_headers, (b"x-request-id", self.request_id.encode())]
        await self.send({"type": "http.response.start", "status": status, "headers": named})

    async def write(self, data: bytes, *, is_last: bool) -> None:
        """Send a part of the body."""
        self.sent_bytes += len(data)
        await self.send({"type": "http.response.body", "body": data, "more_body": not is_last})

    async def answer(self, status: int, body: bytes, headers: Headers = (JSON,)) -> None:
        """Send a whole answer. A large one is refused where too much waits for clients that do not read; not that to a
        request which has changed something, and was refused before that if there is no memory."""
        unread, is_reading = self._memory.unread, self.scope["method"] == "GET"
        is_large = is_reading and len(body) > ANSWER_BYTES
        if is_large and unread.bytes + len(body) > unread.bytes_max:
            raise Unavailable(UNREAD, wait_s=ANSWER_WAIT_S)
        length = (b"content-length", str(len(body)).encode())
        await self.start(status, [*headers, length])
        await self.write(body, is_last=True)

    async def refuse(self, error: ApiError) -> None:
        """Send an error as a status, headers and a body."""
        status, body, more = self.error_answer(error, self.request_id)
        headers = [JSON, *_error_headers(error), *more]
        if error.status == HTTPStatus.REQUEST_TIMEOUT:
            headers.append((b"connection", b"close"))
        self.reason = error.code
        await self._discard_rest()
        await self.answer(status, body, headers)

    def access_line(self) -> AccessLine:
        """What the access log says of it."""
        client = self.scope["client"]
        return AccessLine(
            event="request",
            request_id=self.request_id,
            method=self.scope["method"],
            path=self.scope["raw_path"][:LOGGED_CHARS_MAX].decode("ascii", "backslashreplace"),
            status=self.status,
            took_s=perf_counter() - self.received_at,
            sent_bytes=self.sent_bytes,
            address=client[0] if client else "",
            forwarded_for=self.header(b"x-forwarded-for")[:LOGGED_CHARS_MAX],
            owner=self.owner,
            key=self.key_name,
            response_id=self.response_id,
            reason=self.reason,
        )


async def check_utf8(body: bytes | bytearray) -> bytes | bytearray:
    """The body, if it is UTF-8: parts of it are kept as bytes and never decoded. A long one is checked in slices."""
    at, view = 0, memoryview(body)
    try:
        while at < len(body):
            if at:
                await asyncio.sleep(0)
            end = at + CHECKED_BYTES
            # A character that the end of a slice cuts in two belongs to the next one.
            at += codecs.utf_8_decode(view[at:end], "strict", end >= len(body))[1]
    except UnicodeDecodeError as error:
        raise InvalidRequest(
            f"We could not parse the JSON of your request: it is not valid UTF-8 at byte {at + error.start}.",
            code="invalid_json",
        ) from None
    return body


def text_header(name: bytes, text: str) -> tuple[bytes, bytes]:
    """A header with a text that is no constant. What is not visible ASCII is percent-encoded, so that no text ends the
    line or keeps the answer from leaving."""
    return name, quote(text, safe=VISIBLE, errors="replace").encode()


def _error_headers(error: ApiError) -> list[tuple[bytes, bytes]]:
    headers: list[tuple[bytes, bytes]] = []
    if isinstance(error, Refused) and error.allow is not None:
        headers.append(text_header(b"allow", error.allow))
    if isinstance(error, Unauthenticated):
        headers.append(text_header(b"www-authenticate", error.challenge))
    if error.wait_s is not None:
        headers.append(text_header(b"retry-after", str(math.ceil(error.wait_s))))
    if isinstance(error, OverBudget):
        # The SDKs of both vendors read it: a retry within seconds would be refused too.
        headers.append((b"x-should-retry", b"false"))
    return headers


def raw_refusal(error: ApiError, headers: Headers = ()) -> bytes:
    """An error as the bytes of a whole HTTP answer, where no ASGI request exists: a bad head, a refused upgrade."""
    body = encode_error_body(error)
    request_id = error.request_id or new_id("req")
    extra = {"request_id": request_id}
    log.debug("refused before routing: %d %s", error.status, error.code, extra=extra)
    every = (
        *headers,
        *_error_headers(error),
        JSON,
        (b"content-length", str(len(body)).encode()),
        (b"x-request-id", request_id.encode()),
        (b"connection", b"close"),
    )
    phrase = HTTPStatus(error.status).phrase
    lines = [f"HTTP/1.1 {error.status} {phrase}".encode(), *(b"%b: %b" % pair for pair in every)]
    return b"\r\n".join([*lines, b"", body])


def answerable(fault: Exception, what: str, request_id: str) -> ApiError:
    """The error that is sent to the client. An unexpected one is a mistake of ours: the log has its traceback."""
    if isinstance(fault, ApiError):
        return fault.kept()
    log.error(what, exc_info=fault, extra={"request_id": request_id})
    return ServerFault("The server had an error.")


@asynccontextmanager
async def listening(exchange: Exchange) -> AsyncIterator[None]:
    """Watch the client while inside; if it leaves or does not read, this ends with `ClientGone`."""
    listener = asyncio.current_task()
    assert listener is not None

    async def watch() -> None:
        await exchange.disconnected()
        is_gone.append(True)
        listener.cancel()

    is_gone: list[bool] = []
    watcher = asyncio.create_task(watch())
    try:
        yield
    except asyncio.CancelledError:
        if not is_gone:
            raise
        listener.uncancel()
        raise ClientGone from None
    except TimeoutError:
        log.warning("connection cut: the client does not read")
        watcher.cancel()
        await exchange.cut()
        raise ClientGone from None
    finally:
        watcher.cancel()
