"""What of a request that is passed on is changed, and what of its answer is read? Bytes in, bytes out. Pure.

A request goes on as it came, but for the name of its model, which the engine may call otherwise, and a limit that the
operator has set. Of an answer only the usage is read, which engines write at its beginning or at its end.
"""

from __future__ import annotations

import re

import msgspec
from msgspec import UNSET, Raw, Struct

from segue.errors import InvalidRequest
from segue.limits import UNSEEN_TOKENS_MAX
from segue.wire.codec import decode_body, encode
from segue.wire.requests import RawField, Whole

# What a decoder raises for what an engine may send.
UNREADABLE = (msgspec.MsgspecError, ValueError, OverflowError, RecursionError)
# About so many bytes of a request are a token, where nobody has counted.
TOKEN_BYTES = 4
DONE = b"data: [DONE]"
# How much of an answer is searched for its usage, at either end.
END_BYTES = 8 * 1024
# An event that is longer than this passes unread.
EVENT_BYTES_MAX = 1024 * 1024
NO_CHOICES = re.compile(rb"\[\s*\]")
_END = re.compile(rb"\r?\n\r?\n")
_USAGE = re.compile(rb'(?<!\\)"usage"\s*:\s*(\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\})')


class StreamChoice(Struct, frozen=True):
    include_usage: bool | None = None


class PassedRequest(Struct, frozen=True):
    """What is read of a request that is passed on."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamChoice | None = None
    max_tokens: Whole | None = None

    @property
    def wants_usage(self) -> bool:
        """Whether its stream ends with the usage."""
        return self.stream_options is not None and self.stream_options.include_usage is True


class CachedCount(Struct, frozen=True):
    cached_tokens: int | None = None


class PassedUsage(Struct, frozen=True):
    """What an engine says that an answer cost."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    total_tokens: int | None = None
    prompt_tokens_details: CachedCount | None = None

    def counts(self, request_bytes: int) -> tuple[int, int, int]:
        """The tokens of the prompt, those of them that were cached, and those of the answer; what cannot be is 0: they
        are charged, stored and added up."""
        details = self.prompt_tokens_details or CachedCount()
        prompt = _counted(self.prompt_tokens, request_bytes + UNSEEN_TOKENS_MAX)
        completion = _counted(self.completion_tokens, UNSEEN_TOKENS_MAX)
        return prompt, _counted(details.cached_tokens, prompt), completion


def _counted(count: int | None, most: int) -> int:
    return count if count is not None and 0 <= count <= most else 0


class Passed(Struct, frozen=True):
    """A request that is passed on: what was read of it, and all its fields."""

    request: PassedRequest
    fields: dict[str, Raw]

    @property
    def model(self) -> str:
        if not self.request.model:
            raise InvalidRequest("You must provide a model parameter.", param="model")
        return self.request.model

    def encoded(self, model: str, tokens_max: int | None) -> bytes:
        """The body for the engine, which calls the model so. `tokens_max`: how long the operator lets an answer be. Of
        a stream the usage is always asked for: it counts against the limits of the key."""
        request = self.request
        changed: dict[str, object] = {**self.fields, "model": model}
        if tokens_max is not None:
            asked = request.max_tokens
            changed["max_tokens"] = tokens_max if asked is None else min(asked, tokens_max)
        if request.stream:
            changed["stream_options"] = {"include_usage": True}
        return encode(changed)


_request = msgspec.json.Decoder(PassedRequest)
_fields = msgspec.json.Decoder(dict[str, Raw])
_usage = msgspec.json.Decoder(PassedUsage)


class ChunkRead(Struct, frozen=True):
    choices: RawField = UNSET
    usage: RawField = UNSET


_chunk = msgspec.json.Decoder(ChunkRead)


def decode_passed(body: bytes | bytearray) -> Passed:
    """The request in a body."""
    return Passed(decode_body(_request, body), decode_body(_fields, body))


class WholeAnswer:
    """Reads an answer that is one object, as it passes."""

    def __init__(self) -> None:
        self._begun = b""
        self._end = b""

    def feed(self, data: bytes) -> bytes:
        """What of this goes to the client: everything."""
        if len(self._begun) < END_BYTES:
            self._begun += data[:END_BYTES]
        self._end = (self._end + data)[-END_BYTES:]
        return data

    def end(self) -> bytes:
        """Nothing is held back."""
        return b""

    def usage(self, request_bytes: int) -> PassedUsage:
        """What it cost, where the engine says it."""
        found = [*_USAGE.finditer(self._end), *_USAGE.finditer(self._begun)]
        return next((read for match in found if (read := _read_usage(match[1]))), PassedUsage())


class StreamedAnswer:
    """Reads an answer that is a stream of events, as it passes."""

    def __init__(self, *, wants_usage: bool) -> None:
        self._wants_usage = wants_usage
        self._rest = bytearray()
        self._usage: PassedUsage | None = None
        # How many events have come, and whether the last one has.
        self._events = 0
        self._is_whole = False

    def usage(self, request_bytes: int) -> PassedUsage:
        """What it cost. The engine says it at the end; of a stream that its client leaves before, what is seen from
        outside counts: at least a token for each event. Else no limit would hold for who does not wait for the end."""
        if self._usage is None and self._events and not self._is_whole:
            return PassedUsage(request_bytes // TOKEN_BYTES, self._events)
        return self._usage or PassedUsage()

    def feed(self, data: bytes) -> bytes:
        """What of this goes to the client: whole events, but for a usage that it has not asked for."""
        # An end of an event may have begun before; what is before that was looked at already.
        seen = max(0, len(self._rest) - 3)
        self._rest += data
        events: list[bytes] = []
        if _END.search(self._rest, seen):
            *events, rest = bytes(self._rest).replace(b"\r\n", b"\n").split(b"\n\n")
            self._rest = bytearray(rest)
        if len(self._rest) > EVENT_BYTES_MAX:
            return b"".join(event + b"\n\n" for event in events) + self.end()
        return b"".join(event + b"\n\n" for event in events if self._is_for_client(event))

    def end(self) -> bytes:
        """What is left when the answer has ended."""
        rest, self._rest = self._rest, bytearray()
        return bytes(rest)

    def _is_for_client(self, event: bytes) -> bool:
        if not event.startswith(b"data:"):
            return True
        self._is_whole = self._is_whole or event == DONE
        self._events += not self._is_whole
        if b'"usage"' not in event:
            return True
        try:
            read = _chunk.decode(event.removeprefix(b"data:"))
        except UNREADABLE:
            return True
        usage = _read_usage(bytes(read.usage)) if isinstance(read.usage, Raw) else None
        self._usage = usage or self._usage
        has_choices = (
            not isinstance(read.choices, Raw) or NO_CHOICES.fullmatch(read.choices) is None
        )
        return self._wants_usage or has_choices


def _read_usage(raw: bytes) -> PassedUsage | None:
    try:
        return _usage.decode(raw)
    except UNREADABLE:
        return None
