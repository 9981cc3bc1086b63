"""Where did a turn's time go, for whoever looks at many services at once? OpenTelemetry traces over OTLP/HTTP.

In: turns that are over, with their timeline. Out: one span for each turn and one for each stage of it, posted as JSON
to a collector, after the answer and in the background. A client that traces itself is continued: its `traceparent` is
the parent. A span tells how long, how much and how it ended; never content, and of its owner a hash only.

The protocol is small enough to be spoken here (docs/decisions/0014-guards-and-traces.md).
"""

from __future__ import annotations

import logging
import re
import secrets
import time
from collections.abc import Iterator, Sequence
from hashlib import blake2b

import aiohttp
import msgspec
from msgspec import Struct

from segue import __version__
from segue.batches import Batches
from segue.errors import Misconfigured
from segue.process.afterwards import EndedTurn

log = logging.getLogger(__name__)

# What a collector may take for one batch.
POST_S_MAX = 10.0
# W3C Trace Context: version, trace, span, flags. A later version may add fields behind them.
TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(?:-.*)?")
SAMPLED = 1
# The word of the protocol for a span that answers somebody, for one inside of it, and for a failure.
SERVER, INTERNAL, ERROR = 2, 1, 2
# What lies between two neighbouring marks of a timeline. A mark that is missing joins its stages.
STAGES = {
    "validated": "validate",
    "resolved": "resolve",
    "rendered": "render",
    "first_token": "first_token",
    "last_token": "sample",
    "saved": "save",
    "sent": "send",
    "settled": "settle",
}
# Answers of a collector that mean: not now.
LATER = frozenset({429, 502, 503, 504})


class Value(Struct, frozen=True, omit_defaults=True):
    stringValue: str | None = None
    # The protocol writes whole numbers as text.
    intValue: str | None = None


class Attribute(Struct, frozen=True):
    key: str
    value: Value


class Status(Struct, frozen=True, omit_defaults=True):
    code: int = 0
    message: str = ""


class Span(Struct, frozen=True, omit_defaults=True):
    """A stretch of time with a name."""

    traceId: str
    spanId: str
    name: str
    kind: int
    startTimeUnixNano: str
    endTimeUnixNano: str
    parentSpanId: str = ""
    attributes: list[Attribute] = []
    status: Status = Status()


class Parent(Struct, frozen=True):
    """The span of the client that waits for this turn."""

    trace_id: str
    span_id: str
    is_sampled: bool


def parent_of(traceparent: str) -> Parent | None:
    """What a `traceparent` says; None if there is none, or it is not one."""
    found = TRACEPARENT.fullmatch(traceparent.strip().lower()[:256])
    if found is None:
        return None
    version, trace_id, span_id, flags = found.groups()
    if version == "ff" or not int(trace_id, 16) or not int(span_id, 16):
        return None
    return Parent(trace_id, span_id, bool(int(flags, 16) & SAMPLED))


def spans_of(settled: EndedTurn, epoch: float) -> list[Span]:
    """The spans of a turn, its own first; `epoch` is when the clock of its marks stood at zero."""
    parent = parent_of(settled.tally.traceparent)
    if parent is not None and not parent.is_sampled:
        return []
    trace_id = parent.trace_id if parent else secrets.token_hex(16)
    span_id = secrets.token_hex(8)
    marks = settled.tally.marks
    failure = settled.error or ""
    turn = Span(
        traceId=trace_id,
        spanId=span_id,
        parentSpanId=parent.span_id if parent else "",
        name="segue.turn",
        kind=SERVER,
        startTimeUnixNano=_nanos(epoch + marks["received"]),
        endTimeUnixNano=_nanos(epoch + marks["sent"]),
        attributes=[*_attributes(settled)],
        status=Status(ERROR, failure) if settled.entry.status == "failed" else Status(),
    )
    stages = [
        Span(
            traceId=trace_id,
            spanId=secrets.token_hex(8),
            parentSpanId=span_id,
            name=f"segue.{name}",
            kind=INTERNAL,
            startTimeUnixNano=_nanos(epoch + begin),
            endTimeUnixNano=_nanos(epoch + end),
        )
        for name, begin, end in _stages(marks)
    ]
    return [turn, *stages]


def _stages(marks: dict[str, float]) -> Iterator[tuple[str, float, float]]:
    """Each stage with its beginning and end; marks need not be in the order of the table."""
    begin = marks["received"]
    for mark, stage in STAGES.items():
        if (end := marks.get(mark)) is not None and end >= begin:
            yield stage, begin, end
            begin = end


def _attributes(settled: EndedTurn) -> Iterator[Attribute]:
    entry, tally = settled.entry, settled.tally
    owner = blake2b(entry.owner.encode(), digest_size=8).hexdigest()
    words = {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": entry.model,
        "gen_ai.response.id": entry.turn_id,
        "segue.transport": settled.transport,
        "segue.outcome": entry.status,
        "segue.owner_hash": owner,
        "error.type": settled.error or "",
        "segue.state.found_in": tally.found_in or "",
    }
    numbers = {
        "gen_ai.usage.input_tokens": entry.input_tokens,
        "gen_ai.usage.cached_tokens": entry.cached_tokens,
        "gen_ai.usage.output_tokens": entry.output_tokens,
        "segue.bytes_received": tally.bytes_received,
        "segue.items_validated": tally.items_validated,
        "segue.tokens_tokenized": tally.tokens_tokenized,
        "segue.tokens_reused": tally.tokens_reused,
        "segue.guard_chars_checked": tally.guard_chars_checked,
    }
    for name, word in words.items():
        if word:
            yield Attribute(name, Value(stringValue=word))
    for name, number in numbers.items():
        yield Attribute(name, Value(intValue=str(number)))


def _nanos(seconds: float) -> str:
    return str(int(seconds * 1e9))


class Traces:
    """The way of spans to a collector; a context that drains at its end."""

    def __init__(self, endpoint: str, headers: Sequence[str] = ()) -> None:
        self._url = endpoint.rstrip("/").removesuffix("/v1/traces") + "/v1/traces"
        self._headers = {"content-type": "application/json", **_headers(headers)}
        self._batches: Batches[list[Span]] = Batches("traces", self._post)
        self._session: aiohttp.ClientSession | None = None
        self._is_refused = False

    def observe(self, settled: EndedTurn) -> None:
        """A turn is over."""
        spans = spans_of(settled, time.time() - time.perf_counter())
        if spans:
            self._batches.add(spans)

    async def __aenter__(self) -> Traces:
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=POST_S_MAX))
        await self._batches.__aenter__()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._batches.__aexit__()
        assert self._session is not None
        await self._session.close()

    async def _post(self, batch: list[list[Span]]) -> bool:
        """Whether the collector has these, or never will."""
        assert self._session is not None
        body = encode([span for spans in batch for span in spans])
        try:
            async with self._session.post(self._url, data=body, headers=self._headers) as answer:
                is_taken, said = answer.status not in LATER, str(answer.status)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            is_taken, said, is_fine = False, type(error).__name__, False
        else:
            is_fine = answer.ok
        if is_fine == self._is_refused:
            self._is_refused = not is_fine
            if not is_fine:
                log.warning("the collector of traces does not take them: %s", said)
        return is_taken


def encode(spans: Sequence[Span]) -> bytes:
    """The body of a request to a collector."""
    named = {"service.name": "segue", "service.version": __version__}
    resource = [Attribute(name, Value(stringValue=value)) for name, value in named.items()]
    scope = {"name": "segue", "version": __version__}
    scoped = [{"scope": scope, "spans": spans}]
    return msgspec.json.encode(
        {"resourceSpans": [{"resource": {"attributes": resource}, "scopeSpans": scoped}]}
    )


def _headers(given: Sequence[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for one in given:
        name, is_there, value = one.partition("=")
        if not is_there or not name.strip():
            # Without its words: they may be half a key.
            raise Misconfigured("otel_headers: a header is written NAME=VALUE.")
        found[name.strip()] = value.strip()
    return found
