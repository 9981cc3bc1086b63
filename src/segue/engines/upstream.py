"""How is an engine asked over HTTP, and what does each failure mean?

In: a path and a body. Out: the data of server-sent events, as many together as have arrived together, or one of our own
errors; no foreign exception leaves this file. One pool of connections for each engine. The first event may take long,
because reading a long prompt takes minutes, but silence in the middle of an answer is a failure. Leaving a stream
before its end closes the connection, which stops the job in every engine.
"""

from __future__ import annotations

import asyncio
import logging
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing, suppress
from functools import partial
from typing import Literal, TypeVar
from urllib.parse import urlsplit

from msgspec import Struct

from segue.border.numbers import BRACKETS_MAX, few, has_too_much, wait_of
from segue.border.refusals import REFUSAL_BYTES_MAX, EngineLost, error_for_status
from segue.engines.client import ConnectionBroken, HttpClient, HttpResponse
from segue.errors import ApiError, EngineFailed, Unavailable
from segue.printable import shown_address

log = logging.getLogger(__name__)

P = TypeVar("P", bound=asyncio.Protocol)

# Shorter than the five seconds after which llama.cpp's server and uvicorn (vLLM, SGLang) drop an idle connection, so
# that we seldom write into one that is being closed.
KEEP_S = 4.0
# One event. The longest repeats the ids of a whole prompt: of a million tokens, 8 MB.
LINE_BYTES_MAX = 10 * 1024 * 1024
# How much of a short answer is read: a list of models may be long.
ANSWER_BYTES_MAX = 4 * 1024 * 1024
# After the last event the connection goes back to the pool; if the response does not end by then, it is closed. And so
# long a whole answer waits for what its engine has counted, which comes at once or not at all.
LINGER_S = 2.0
# What a server that works answers when it is asked how it is: that we ask too often is an answer too.
ANSWERED = (200, 429)
# A job on a connection that was closed meanwhile fails sooner than this; a job that the engine has begun fails later.
STALE_S = 1.0


class Timeouts(Struct, frozen=True):
    """How long an engine may take."""

    connect_s: float = 5.0
    # To the first event. Nothing may come while a prompt is read: 100,000 tokens take minutes on a CPU.
    first_s: float = 1800.0
    # Between events.
    silence_s: float = 120.0
    # For short requests: is it up, which version is it.
    probe_s: float = 5.0


DEFAULT_TIMEOUTS = Timeouts()


# An address that ends so names the version itself: `/v1`, `/api/paas/v4`, `/v1beta/openai`.
_VERSION = re.compile(r"(?:/v\d+\w*)?/openai$|/v\d+\w*$")


def split_address(url: str) -> tuple[str, str]:
    """The root of a server, and the path of its version of OpenAI's API, which is `/v1` where none is given."""
    url = url.rstrip("/")
    found = _VERSION.search(urlsplit(url).path)
    return (url.removesuffix(found[0]), found[0]) if found else (url, "/v1")


class Upstream:
    """One engine's address, with its key and its connections."""

    def __init__(
        self,
        url: str,
        key: str | None = None,
        timeouts: Timeouts = DEFAULT_TIMEOUTS,
        host: str = "",
    ) -> None:
        """`host`: what the server is called, where the URL has only one of the addresses of that name."""
        # Native endpoints are below the root, those of OpenAI's API below the version.
        self.url, self._version = split_address(url)
        # For logs: without a password.
        self.name = shown_address(self.url)
        self.timeouts = timeouts
        headers = {"content-type": "application/json", "accept-encoding": "identity"}
        if key:
            headers["authorization"] = f"Bearer {key}"
        # How many jobs run at a time is decided in `queued.py`.
        self._client = HttpClient(self.url, headers, KEEP_S, host)

    async def close(self) -> None:
        self._client.close()

    async def stream(
        self, path: str, body: bytes, headers: Mapping[str, str] | None = None
    ) -> EventStream:
        """Send a job, and return when its answer begins; a refusal is raised. `headers` are those of this job alone."""
        response = await self._post(path, body, headers)
        if response.status == 200 and response.content_type == "text/event-stream":
            return EventStream(response, self.timeouts)
        raise await self._read_refusal(response)

    async def forward(self, path: str, body: bytes) -> HttpResponse:
        """Pass a request on, and return when its answer begins; a refusal is raised."""
        response = await self._post(path, body)
        if response.status == 200:
            return response
        raise await self._read_refusal(response)

    async def _post(
        self, path: str, body: bytes, headers: Mapping[str, str] | None = None
    ) -> HttpResponse:
        """The response of the engine, when it begins.

        A kept connection that the engine has closed in the meantime fails at once, which does not mean that the engine
        is down: the job is sent once more. A job changes nothing in an engine, so sending it twice is safe.
        """
        loop = asyncio.get_running_loop()
        retry_until = loop.time() + STALE_S
        lines = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
        while True:
            try:
                async with asyncio.timeout(self.timeouts.first_s):
                    return await self._send("POST", path, body, lines.encode("latin-1"))
            except ConnectionBroken as error:
                if loop.time() > retry_until:
                    raise EngineLost("The engine broke off before its answer.") from error
                retry_until = 0.0
            except OSError as error:
                raise self._unreachable(error) from error

    async def _read_refusal(self, response: HttpResponse) -> ApiError:
        body = b""
        with suppress(OSError), closing(response):
            async with asyncio.timeout(LINGER_S):
                body = await response.read_whole(REFUSAL_BYTES_MAX)
        wait_s = wait_of(response.retry_after)
        return error_for_status(response.status, body, wait_s, f"engine {self.name}")

    def _unreachable(self, error: BaseException, level: int = logging.WARNING) -> Unavailable:
        reason = str(error) or type(error).__name__
        log.log(level, "engine %s cannot be reached: %s", self.name, reason)
        return Unavailable("The engine does not answer. Please retry later.")

    async def _send(
        self, method: Literal["GET", "POST"], path: str, body: bytes, headers: bytes = b""
    ) -> HttpResponse:
        if path.startswith("/v1/"):
            path = self._version + path.removeprefix("/v1")
        return await self._client.send(method, path, body, self.timeouts.connect_s, headers)

    async def call(
        self, method: Literal["GET", "POST"], path: str, body: bytes = b""
    ) -> tuple[int, bytes]:
        """A short request: status and body, nothing where that has more values than are read. As for a job, it is sent
        again if the engine had closed the connection."""
        retries = 1
        while True:
            try:
                async with asyncio.timeout(self.timeouts.probe_s):
                    response = await self._send(method, path, body)
                    with closing(response):
                        return response.status, few(await response.read_whole(ANSWER_BYTES_MAX))
            except OSError as error:
                if not retries or not isinstance(error, ConnectionBroken):
                    # The caller logs it where it matters.
                    raise self._unreachable(error, logging.DEBUG) from error
                retries -= 1

    async def upgrade(self, path: str, key: str, make: Callable[[], P]) -> P:
        """Ask for a WebSocket on a connection of its own, which this protocol hears from then on. Raises `OSError`."""
        lines = (
            "upgrade: websocket\r\nconnection: Upgrade\r\nsec-websocket-version: 13\r\n"
            f"sec-websocket-key: {key}\r\n"
        )
        return await self._client.upgrade(path, lines.encode(), make, self.timeouts.connect_s)

    async def is_up(self, path: str) -> bool:
        """Whether it answers."""
        try:
            status, _ = await self.call("GET", path)
        except ApiError:
            return False
        return status in ANSWERED


class EventStream:
    """The events of one answer; its reader closes it."""

    def __init__(self, response: HttpResponse, timeouts: Timeouts) -> None:
        self._response = response
        self._timeouts = timeouts
        self._loop = asyncio.get_running_loop()
        # The beginning of a line that is not whole yet.
        self._line = bytearray()
        self._silent_s = timeouts.first_s
        # When something came, and when an event came.
        self._received_at = self._event_at = self._loop.time()
        self._is_timed_out = False
        # So often the silence is checked; events do not touch the timer.
        self._check_s = min(timeouts.first_s, timeouts.silence_s)
        self._timer = self._loop.call_later(self._check_s, self._check)
        # How many more there may be, as the engine says for its job.
        self.events_left = sys.maxsize
        self.brackets_max = BRACKETS_MAX
        # Set by the engine when it has read the last event: only the end of the response is still to come.
        self.is_over = False
        # Whether the answer is whole, so that nothing that comes now, or does not come, may cost it.
        self._is_whole = False

    def close(self) -> None:
        """Stop reading, which stops the job."""
        self._timer.cancel()
        # When its end has arrived, the connection serves the next job; this job does not wait for that.
        self._response.close(LINGER_S if self.is_over else 0.0)

    async def read(self, use: Callable[[list[bytes]], bool]) -> bool:
        """Give the events to `use`, as many as came together, until that says it is enough; False at their end.

        They are used where they arrive, in the callback of the connection.
        """
        # The engines that we know end every event with an empty line, so that nothing is left over at the end.
        try:
            return await self._response.read_until(partial(self._arrived, use))
        except (OSError, EngineFailed) as error:
            if self._is_whole:
                return False
            if isinstance(error, EngineFailed):
                raise
            raise self.broke_off() from error

    def note_whole(self) -> None:
        """The answer is complete: only counts can follow, and they have `LINGER_S` to arrive."""
        if not self._is_whole:
            self._is_whole = True
            self._timer.cancel()
            self._timer = self._loop.call_later(LINGER_S, self._response.close)

    def _arrived(self, use: Callable[[list[bytes]], bool], chunk: bytes) -> bool:
        self._received_at = self._loop.time()
        events = self._events_in(chunk)
        if not events:
            return False
        self._event_at = self._received_at
        self._silent_s = self._timeouts.silence_s
        self.events_left -= len(events)
        if self.events_left < 0:
            raise EngineFailed("The engine sent more events than its answer can have.")
        return use(events)

    def _events_in(self, chunk: bytes) -> list[bytes]:
        """The events that are whole with this chunk."""
        if not self._line and chunk.endswith(b"\n\n") and chunk.find(b"\n") == len(chunk) - 2:
            # One line, as most chunks are when an engine streams token by token.
            return _events_of((chunk[:-2],))
        if b"\n" in chunk:
            whole = bytes(self._line) + chunk
            # Only what came in many parts can be so long.
            if has_too_much(whole, self.brackets_max):
                raise EngineFailed("The engine sent an event with more values than an answer has.")
            *lines, rest = whole.split(b"\n")
            self._line = bytearray(rest)
            return _events_of(lines)
        self._line += chunk
        if len(self._line) > LINE_BYTES_MAX:
            raise EngineFailed("The engine sent an event without an end.")
        return []

    def wait_on(self) -> None:
        """The prompt is still being read: allow the long silence before a first event again."""
        self._silent_s = self._timeouts.first_s

    def broke_off(self) -> EngineLost:
        """What to raise when the events end before the answer does."""
        if self._is_timed_out:
            return EngineLost(f"The engine sent nothing for {self._silent_s:g} seconds.")
        return EngineLost("The engine broke off in the middle of its answer.")

    def _check(self) -> None:
        # Blank lines and comments show that the connection lives; but they are no answer.
        until = min(self._received_at + self._silent_s, self._event_at + self._timeouts.first_s)
        left_s = until - self._loop.time()
        if left_s <= 0:
            self._is_timed_out = True
            self._response.close()
        else:
            self._timer = self._loop.call_later(min(left_s, self._check_s), self._check)


BOM = b"\xef\xbb\xbf"


def _events_of(lines: Iterable[bytes]) -> list[bytes]:
    events = []
    # Every other line is empty, as a rule.
    for line in filter(None, lines):
        if line.startswith(b"data:"):
            if data := line[5:].strip():
                events.append(data)
        elif line.startswith(b"error:"):
            # So older llama.cpp servers send an error.
            events.append(b'{"error":%b}' % line[6:])
        elif line.startswith(BOM):
            # A stream may begin with one (the HTML standard, 9.2.5).
            events += _events_of((line.removeprefix(BOM),))
    return events
