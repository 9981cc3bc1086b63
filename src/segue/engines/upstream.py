"""How is an engine behind HTTP asked, and what does it mean when that goes wrong?

In: a path and a body. Out: the data of server-sent events, as many together as have arrived together, or one of our own
errors; nothing foreign crosses this border. One pool of connections for each engine. An answer is awaited patiently,
because reading a long prompt may take minutes, but silence in the middle of one is a fault. Leaving a stream before its
end closes the connection, which every engine takes as the wish to stop.
"""

from __future__ import annotations

import asyncio
import logging
import re
from types import TracebackType
from typing import Literal, TypeVar

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from segue.engines.client import Answer, Broken, Client
from segue.errors import (
    ApiError,
    EngineFailed,
    InvalidRequest,
    Unavailable,
    context_overflow,
)

T = TypeVar("T")

log = logging.getLogger(__name__)

# Shorter than the five seconds after which llama.cpp's server and uvicorn (vLLM, SGLang) drop an idle connection, so
# that we seldom write into one that is being closed.
KEEP_S = 4.0
# One event. The longest is a last one that repeats the whole prompt.
LINE_BYTES_MAX = 64 * 1024 * 1024
# How much of a refusal is read.
REFUSAL_BYTES_MAX = 64 * 1024
# How much of an engine's own words a client is told.
WORDS_MAX = 500
# After the last event the connection goes back to the pool; one that does not end by then is closed.
LINGER_S = 2.0
# A job on a connection that was closed meanwhile fails sooner than this, one that the engine had begun later.
STALE_S = 1.0


class Lost(EngineFailed):
    """The connection broke or fell silent: the engine itself may be gone, which a mere error does not say."""


class Patience(Struct, frozen=True):
    """How long an engine may take, in seconds."""

    connect_s: float = 5.0
    # To the first event. Nothing may come while a prompt is read: 100,000 tokens take minutes on a CPU.
    first_s: float = 1800.0
    # Between events, once it speaks.
    silence_s: float = 120.0
    # For small questions: is it up, which version is it.
    probe_s: float = 5.0


ORDINARY_PATIENCE = Patience()


class Upstream:
    """One engine's address, with its key and its connections."""

    def __init__(
        self, url: str, key: str | None = None, patience: Patience = ORDINARY_PATIENCE
    ) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self._patience = patience
        headers = {"content-type": "application/json", "accept-encoding": "identity"}
        if key:
            headers["authorization"] = f"Bearer {key}"
        # How many jobs run at a time is decided where routes are chosen.
        self._client = Client(self.url, headers, KEEP_S)

    async def close(self) -> None:
        """Close all connections."""
        self._client.close()

    async def listen(self, path: str, body: bytes) -> Stream:
        """Ask, and return when the answer begins; a refusal is raised."""
        return Stream(await self._post(path, body), self._patience)

    async def call(
        self, method: Literal["GET", "POST"], path: str, body: bytes = b""
    ) -> tuple[int, bytes]:
        """A small question: status and body of the answer. As for a job, a stale connection is no answer."""
        try:
            return await self._call_once(method, path, body)
        except Broken:
            log.debug("asked once more, because the connection was closed meanwhile")
        except OSError as error:
            raise _unreachable(error) from error
        try:
            return await self._call_once(method, path, body)
        except OSError as error:
            raise _unreachable(error) from error

    async def _call_once(
        self, method: Literal["GET", "POST"], path: str, body: bytes
    ) -> tuple[int, bytes]:
        patience = self._patience
        async with asyncio.timeout(patience.probe_s):
            answer = await self._client.ask(method, path, body, patience.connect_s)
            try:
                return answer.status, await answer.read_whole(REFUSAL_BYTES_MAX)
            finally:
                answer.close()

    async def is_up(self, path: str) -> bool:
        """Whether it answers, and well."""
        try:
            status, _ = await self.call("GET", path)
        except ApiError:
            return False
        return status == 200

    async def _post(self, path: str, body: bytes) -> Answer:
        """The answer to a job, as soon as it begins.

        A kept connection that the engine has closed in the meantime fails at once and says nothing about the engine:
        once more, then. A job changes nothing in an engine, so asking twice is safe.
        """
        began = asyncio.get_running_loop().time()
        try:
            answer = await self._post_once(path, body)
        except Lost:
            if asyncio.get_running_loop().time() - began > STALE_S:
                raise
            answer = await self._post_once(path, body)
        if answer.status == 200 and answer.content_type == "text/event-stream":
            return answer
        raise await _read_refusal(answer)

    async def _post_once(self, path: str, body: bytes) -> Answer:
        try:
            async with asyncio.timeout(self._patience.first_s):
                return await self._client.ask("POST", path, body, self._patience.connect_s)
        except Broken as error:
            raise Lost("The engine broke off before its answer.") from error
        except OSError as error:
            raise _unreachable(error) from error


class Stream:
    """One answer as it comes. Iterate it under `async with`; each step gives the events that came together."""

    __slots__ = (
        "_answer",
        "_heard_at",
        "_is_cut",
        "_loop",
        "_parts",
        "_patience",
        "_silent_s",
        "_timer",
        "is_over",
    )

    def __init__(self, answer: Answer, patience: Patience) -> None:
        self._answer = answer
        self._patience = patience
        self._loop = asyncio.get_running_loop()
        # The beginning of a line that is not whole yet.
        self._parts: list[bytes] = []
        self._silent_s = patience.first_s
        self._heard_at = self._loop.time()
        self._is_cut = False
        self._timer = self._watch()
        # Set by the engine when it has heard the last event: what is left on the wire is only the end.
        self.is_over = False

    async def __aenter__(self) -> Stream:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._timer.cancel()
        if self.is_over and kind in (None, GeneratorExit):
            # Its end is on the way, and then the connection serves the next job. Nobody waits for that.
            self._loop.call_later(LINGER_S, self._answer.close)
        else:
            self._answer.close()

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> list[bytes]:
        while True:
            try:
                chunk = await self._answer.read()
            except OSError as error:
                raise self.broke_off() from error
            if not chunk:
                # The engines that we know end every event with an empty line, so that nothing is left over here.
                raise StopAsyncIteration
            self._heard_at = self._loop.time()
            self._parts.append(chunk)
            if b"\n" not in chunk:
                self._check_length()
                continue
            lines = b"".join(self._parts).split(b"\n")
            self._parts = [lines.pop()]
            events = [data for line in lines if line and (data := _data(line))]
            if events:
                self._allow(self._patience.silence_s)
                return events

    def wait_on(self) -> None:
        """What was heard is not the first word yet: that is awaited as patiently as before."""
        self._allow(self._patience.first_s)

    def _allow(self, silent_s: float) -> None:
        if self._silent_s != silent_s:
            self._silent_s = silent_s
            self._timer.cancel()
            self._timer = self._watch()

    def broke_off(self) -> Lost:
        """What to raise when the events end before the answer does."""
        if self._is_cut:
            return Lost(f"The engine said nothing for {self._silent_s:g} seconds.")
        return Lost("The engine broke off in the middle of its answer.")

    def _check_length(self) -> None:
        if sum(map(len, self._parts)) > LINE_BYTES_MAX:
            raise EngineFailed("The engine sent an event without an end.")

    def _watch(self) -> asyncio.TimerHandle:
        """Look when the silence would be too long. Events do not touch the timer, it looks again at need."""
        return self._loop.call_at(self._heard_at + self._silent_s, self._check)

    def _check(self) -> None:
        if self._heard_at + self._silent_s <= self._loop.time():
            self._is_cut = True
            self._answer.close()
        else:
            self._timer = self._watch()


def _data(line: bytes) -> bytes:
    """The data of one line, if it has any. Older llama.cpp servers give an error a line of its own kind."""
    if line.startswith(b"data:"):
        return line[5:].strip()
    return b'{"error":' + line[6:] + b"}" if line.startswith(b"error:") else b""


# --- what an engine's words mean ------------------------------------------------------------------


class _Fault(Struct):
    message: str = ""
    type: str | None = None
    code: int | str | None = None
    n_prompt_tokens: int | None = None
    n_ctx: int | None = None


class _Refusal(Struct):
    """The shapes in which engines refuse: an `error` (object or words), a bare `message`, FastAPI's `detail`."""

    error: _Fault | str | UnsetType = UNSET
    message: str = ""
    detail: Raw | UnsetType = UNSET


_refusal = msgspec.json.Decoder(_Refusal)
_CONTEXT = re.compile(
    r"context[ _](?:length|size|window)|maximum (?:input|model) length|exceed_context_size"
    r"|longer than the (?:maximum )?model|input (?:is|length).*too long|max_model_len",
    re.IGNORECASE,
)


async def _read_refusal(answer: Answer) -> ApiError:
    try:
        async with asyncio.timeout(LINGER_S):
            body = await answer.read_whole(REFUSAL_BYTES_MAX)
    except OSError:
        body = b""
    finally:
        answer.close()
    after = answer.retry_after
    return refusal(answer.status, body, float(after) if after.isdigit() else None)


def refusal(status: int, body: bytes, wait_s: float | None = None) -> ApiError:
    """Our error for an engine's refusal: by its status, and by its words where only they tell."""
    fault = _fault(body)
    words = fault.message[:WORDS_MAX]
    log.warning("an engine answered %d: %s", status, fault.type or fault.code)
    if status in (400, 413, 422):
        if fault.n_prompt_tokens is not None and fault.n_ctx is not None:
            return context_overflow(fault.n_prompt_tokens, fault.n_ctx)
        if _CONTEXT.search(f"{fault.type} {fault.code} {words}"):
            return InvalidRequest(
                f"Your input exceeds the context window of this model. {words}".rstrip(),
                code="context_length_exceeded",
                param="input",
            )
        return InvalidRequest(f"The engine refused this request. {words}".rstrip())
    if status in (401, 403):
        return EngineFailed("The engine does not accept the server's key.")
    if status == 404:
        return EngineFailed("The engine does not know this model or this kind of request.")
    if status in (408, 425, 429, 502, 503, 504):
        return Unavailable("The engine cannot take this request now.", wait_s=wait_s)
    return EngineFailed("The engine had an error.")


def _fault(body: bytes) -> _Fault:
    try:
        found = _refusal.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return _Fault()
    match found.error:
        case _Fault() as fault:
            return fault
        case str() as words:
            return _Fault(words)
        case _:
            pass
    told = bytes(found.detail).decode(errors="replace") if isinstance(found.detail, Raw) else ""
    return _Fault(found.message or told.strip('"'))


def told(raw: Raw | bytes) -> ApiError:
    """Our error for one that came inside a stream; its code is a status, where it has one."""
    fault = _fault(b'{"error":' + bytes(raw) + b"}")
    status = fault.code if isinstance(fault.code, int) else 500
    if isinstance(fault.code, str) and fault.code.isdigit():
        status = int(fault.code)
    if status == 500 and _CONTEXT.search(f"{fault.type} {fault.code} {fault.message}"):
        status = 400
    return refusal(status, b'{"error":' + bytes(raw) + b"}")


def read(decoder: msgspec.json.Decoder[T], data: bytes) -> T:
    """What an event says, or a fault of the engine."""
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        log.warning("an engine said something that cannot be read: %s", error)
        raise EngineFailed("The engine said something that cannot be read.") from None


def _unreachable(error: BaseException) -> Unavailable:
    log.warning("an engine does not answer: %s", type(error).__name__)
    return Unavailable("The engine does not answer. Please retry later.")
