"""What is one HTTP request and its answer? The ASGI messages of it, as calls that say what they do.

A body is read within a limit and decompressed; an answer carries `x-request-id`; an error becomes its one body. Whether
the client is still there is known here, and nowhere else in the HTTP transport.
"""

from __future__ import annotations

import asyncio
import codecs
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping, Sequence
from contextlib import asynccontextmanager, suppress
from http import HTTPStatus
from typing import Any
from urllib.parse import parse_qs

from segue.accounts.account import Account
from segue.errors import ApiError, InvalidRequest, Refused, Unauthenticated, too_large
from segue.ids import new_id
from segue.transports.inflate import inflate
from segue.turn.running import Running, Subscriber
from segue.turn.values import Cancel, Owner
from segue.wire.codec import encode_error_body

log = logging.getLogger(__name__)

# The three words of ASGI, which is untyped by design.
Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

JSON = (b"content-type", b"application/json")
# A refused upload that takes longer than this is cut off instead.
DISCARD_S_MAX = 10.0
# Our extension of ASGI, which has no word for it.
CUT = "segue.cut"


class ClientGone(Exception):
    """The client dropped its request."""


class Exchange:
    """One HTTP request and its answer."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, body_s_max: float) -> None:
        self.scope = scope
        self._body_s_max = body_s_max
        self.receive = receive
        self.send = send
        self.request_id = new_id("req")
        self.has_started = False
        self._is_read = False
        # Whose request it is, and for what it stands.
        self.owner: Owner = ""
        self.account: Account
        # What the browser of a page of another origin is told.
        self.origin_headers: Sequence[tuple[bytes, bytes]] = ()
        self.arguments: dict[str, str] = {}

    @property
    def query(self) -> dict[str, str]:
        """The query's parameters, the last of each name."""
        pairs = parse_qs(self.scope["query_string"].decode("latin-1"), keep_blank_values=True)
        return {name: values[-1] for name, values in pairs.items()}

    def header(self, name: bytes) -> str:
        """A header's value, or nothing; one that is there twice is both, and so none that we know."""
        return ", ".join(v.decode("latin-1") for k, v in self.scope["headers"] if k == name)

    async def body(self, bytes_max: int) -> bytes:
        """The whole body, decompressed, within the limits."""
        try:
            async with asyncio.timeout(self._body_s_max):
                body = await self._receive_all(bytes_max)
        except TimeoutError:
            # Whatever still comes is not waited for.
            self._is_read = True
            raise Refused(
                f"The request body took longer than {self._body_s_max:g} s.",
                status=408,
                code="request_timeout",
            ) from None
        encoding = self.header(b"content-encoding").strip().lower()
        return await inflate(body, encoding, bytes_max)

    async def _receive_all(self, bytes_max: int) -> bytes:
        chunks: list[bytes] = []
        size = 0
        while not self._is_read:
            chunks.append(await self._receive_part())
            size += len(chunks[-1])
            if size > bytes_max:
                chunks.clear()
                raise too_large(max(size, self._declared_bytes), bytes_max)
        return b"".join(chunks)

    async def text(self, bytes_max: int) -> bytes:
        """The whole body, if it is text at all."""
        return checked(await self.body(bytes_max))

    @property
    def _declared_bytes(self) -> int:
        return int(self.header(b"content-length") or 0)

    async def _receive_part(self) -> bytes:
        message = await self.receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        self._is_read = not message.get("more_body")
        part: bytes = message.get("body", b"")
        return part

    async def _discard_rest(self) -> None:
        """Read the rest of the body: to close on unread bytes would reset the connection, and our answer with it."""
        with suppress(TimeoutError, ClientGone):
            async with asyncio.timeout(DISCARD_S_MAX):
                while not self._is_read:
                    await self._receive_part()

    async def left(self) -> None:
        """Wait until the client is gone."""
        while (await self.receive())["type"] != "http.disconnect":
            pass

    async def cut(self) -> None:
        """Break the connection off: a close would wait for a peer that does not read."""
        self.scope["extensions"][CUT]["call"]()
        await self.left()

    async def start(self, status: int, headers: Sequence[tuple[bytes, bytes]]) -> None:
        """Status and headers; they leave together with the first bytes of the body."""
        self.has_started = True
        named = [*headers, *self.origin_headers, (b"x-request-id", self.request_id.encode())]
        await self.send({"type": "http.response.start", "status": status, "headers": named})

    async def write(self, data: bytes, *, is_last: bool) -> None:
        """A part of the body."""
        await self.send({"type": "http.response.body", "body": data, "more_body": not is_last})

    async def answer(
        self, status: int, body: bytes, headers: Sequence[tuple[bytes, bytes]] = (JSON,)
    ) -> None:
        """A whole answer."""
        length = (b"content-length", str(len(body)).encode())
        await self.start(status, [*headers, length])
        await self.write(body, is_last=True)

    async def refuse(self, error: ApiError) -> None:
        """An error as a status and its one body."""
        headers = [JSON]
        if isinstance(error, Refused) and error.allow is not None:
            headers.append((b"allow", error.allow.encode()))
        if isinstance(error, Unauthenticated):
            headers.append((b"www-authenticate", error.challenge.encode()))
        if error.wait_s is not None:
            headers.append((b"retry-after", str(math.ceil(error.wait_s)).encode()))
        if error.status == HTTPStatus.REQUEST_TIMEOUT:
            headers.append((b"connection", b"close"))
        await self._discard_rest()
        await self.answer(error.status, encode_error_body(error), headers)


def checked(body: bytes) -> bytes:
    """The body, if it is text at all: undecoded parts of it are kept as bytes."""
    try:
        codecs.utf_8_decode(body, "strict", True)
    except UnicodeDecodeError as error:
        raise InvalidRequest(
            f"We could not parse the JSON of your request: it is not valid UTF-8 at byte {error.start}.",
            code="invalid_json",
        ) from None
    return body


@asynccontextmanager
async def listening(exchange: Exchange) -> AsyncIterator[None]:
    """While inside, the client is there; if it leaves, or does not read, this ends with `ClientGone`."""
    listener = asyncio.current_task()
    assert listener is not None

    async def watch() -> None:
        await exchange.left()
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
        log.warning("request %s: cut, because the client does not read", exchange.request_id)
        watcher.cancel()
        await exchange.cut()
        raise ClientGone from None
    finally:
        watcher.cancel()


@asynccontextmanager
async def heard_by(
    exchange: Exchange, running: Running, subscriber: Subscriber
) -> AsyncIterator[None]:
    """While inside, the client hears this turn; if it leaves an unfinished one that nobody else hears, that is a
    cancel, unless the turn runs in the background."""
    try:
        async with listening(exchange):
            yield
    finally:
        running.detach(subscriber)
        if not (running.is_ended or running.has_subscribers or running.is_background):
            running.notify(Cancel())
