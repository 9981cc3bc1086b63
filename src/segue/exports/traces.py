"""Where did a turn's time go, seen together with other services? OpenTelemetry traces over OTLP/HTTP.

In: turns that ended, with their timeline. Out: one span for each turn and one for each of its stages, posted as JSON to
a collector in the background, after the response. A client's `traceparent` becomes the parent of the turn's span.
A span has durations, token counts and the outcome; never content, and of its owner only a hash.

The protocol is small enough to be implemented here (docs/decisions/0014-guards-and-traces.md).
"""

from __future__ import annotations

import logging
import re
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from hashlib import blake2b

import aiohttp
import msgspec
from msgspec import Struct

from segue import __version__
from segue.border.one_answer import OneAnswerConnector
from segue.errors import Misconfigured
from segue.exports.batches import Batches
from segue.process.afterwards import MARKS, EndedTurn

log = logging.getLogger(__name__)

# Timeout of one batch.
POST_S_MAX = 10.0
# W3C Trace Context: version, trace, span, flags. A later version may add fields after them.
TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(?:-.*)?")
SAMPLED = 1
# OTLP numbers: span kinds server and internal, status code error.
SERVER, INTERNAL, ERROR = 2, 1, 2
# Statuses of a collector that mean: retry.
LATER = frozenset({429, 502, 503, 504})


# A span as the protocol writes it; whole numbers are text.
OtlpSpan = dict[str, object]


class TraceParent(Struct, frozen=True):
    """The client's span that this turn belongs to."""

    trace_id: str
    span_id: str
    is_sampled: bool


def parent_of(traceparent: str) -> TraceParent | None:
    """The parsed `traceparent`; None if there is none or it is invalid."""
    match = TRACEPARENT.fullmatch(traceparent.strip().lower()[:256])
    if match is None:
        return None
    version, trace_id, span_id, flags = match.groups()
    if version == "ff" or not int(trace_id, 16) or not int(span_id, 16):
        return None
    return TraceParent(trace_id, span_id, bool(int(flags, 16) & SAMPLED))


def spans_of(turn: EndedTurn, epoch: float) -> list[OtlpSpan]:
    """The spans of a turn, its own first; `epoch` is the wall clock at the zero of its marks' clock."""
    parent = parent_of(turn.receipt.traceparent)
    if parent is not None and not parent.is_sampled:
        return []
    trace_id = parent.trace_id if parent else secrets.token_hex(16)
    marks = turn.marks

    def span(name: str, kind: int, begin: float, end: float, parent_id: str) -> OtlpSpan:
        return {
            "traceId": trace_id,
            "spanId": secrets.token_hex(8),
            "name": f"segue.{name}",
            "kind": kind,
            "startTimeUnixNano": str(int((epoch + begin) * 1e9)),
            "endTimeUnixNano": str(int((epoch + end) * 1e9)),
            **({"parentSpanId": parent_id} if parent_id else {}),
        }

    parent_id = parent.span_id if parent else ""
    root = span("turn", SERVER, marks["received"], marks["sent"], parent_id)
    root["attributes"] = _attributes(turn)
    if turn.entry.status == "failed":
        root["status"] = {"code": ERROR, "message": turn.error or ""}
    spans, begin = [root], marks["received"]
    # A missing mark joins two stages; marks need not be in the order of the table.
    for mark, stage in MARKS.items():
        if (end := marks.get(mark)) is not None and end >= begin:
            spans.append(span(stage, INTERNAL, begin, end, str(root["spanId"])))
            begin = end
    return spans


def _attributes(turn: EndedTurn) -> list[object]:
    entry, tally = turn.entry, turn.tally
    values: dict[str, str | int | None] = {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": entry.model,
        "gen_ai.response.id": turn.shown_id,
        "segue.request_id": turn.receipt.request_id,
        "segue.transport": turn.receipt.transport,
        "segue.outcome": turn.outcome,
        "segue.owner_hash": blake2b(entry.owner.encode(), digest_size=8).hexdigest(),
        "error.type": turn.error,
        "segue.state.found_in": tally.found_in,
        "gen_ai.usage.input_tokens": entry.input_tokens,
        "gen_ai.usage.cached_tokens": entry.cached_tokens,
        "gen_ai.usage.output_tokens": entry.output_tokens,
        "segue.engine.replica": tally.started.route,
        "segue.engine.worker": tally.started.worker,
        "segue.bytes_received": tally.bytes_received,
        "segue.items_validated": tally.items_validated,
        "segue.tokens_tokenized": tally.tokens_tokenized,
        "segue.tokens_reused": tally.tokens_reused,
        "segue.reuse.lost_reason": tally.lost[0] if tally.lost else None,
        "segue.reuse.lost_tokens": tally.lost[1] if tally.lost else None,
        "segue.guard_chars_checked": tally.guard_chars_checked,
        "segue.media_told": tally.media_told or None,
    }
    return [_attribute(name, value) for name, value in values.items() if value not in (None, "")]


def _attribute(name: str, value: str | int | None) -> object:
    kind = "stringValue" if isinstance(value, str) else "intValue"
    return {"key": name, "value": {kind: str(value)}}


class Traces:
    """Sends spans to a collector."""

    def __init__(
        self, session: aiohttp.ClientSession, endpoint: str, headers: Sequence[str]
    ) -> None:
        self._session = session
        self._url = endpoint.rstrip("/").removesuffix("/v1/traces") + "/v1/traces"
        self._headers = {"content-type": "application/json", **_headers(headers)}
        self.batches: Batches[list[OtlpSpan]] = Batches("traces", self._post)
        self._is_failing = False

    def observe(self, turn: EndedTurn) -> None:
        """Add the spans of a turn that ended."""
        spans = spans_of(turn, time.time() - time.perf_counter())
        if spans:
            self.batches.add(spans)

    async def _post(self, batch: list[list[OtlpSpan]]) -> bool:
        """True if the collector took the batch or refused it for good, False to retry."""
        body = encode([span for spans in batch for span in spans])
        try:
            # The headers may have a key, which is for this collector.
            async with self._session.post(
                self._url, data=body, headers=self._headers, allow_redirects=False
            ) as answer:
                is_taken, is_fine = answer.status not in LATER, answer.status < 300
                reason = f"status {answer.status}"
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            is_taken, is_fine, reason = False, False, type(error).__name__
        if not is_fine and not self._is_failing:
            log.warning("traces: collector %s does not accept spans: %s", self._url, reason)
        self._is_failing = not is_fine
        return is_taken


@asynccontextmanager
async def open_traces(endpoint: str, headers: Sequence[str] = ()) -> AsyncIterator[Traces]:
    """Sends spans to this collector while inside, and the rest on the way out."""
    timeout = aiohttp.ClientTimeout(total=POST_S_MAX)
    async with aiohttp.ClientSession(connector=OneAnswerConnector(), timeout=timeout) as session:
        traces = Traces(session, endpoint, headers)
        async with traces.batches:
            yield traces


def encode(spans: Sequence[OtlpSpan]) -> bytes:
    """The body of a request to a collector."""
    named = {"service.name": "segue", "service.version": __version__}
    resource = {"attributes": [_attribute(name, value) for name, value in named.items()]}
    scope = {"name": "segue", "version": __version__}
    scoped = [{"scope": scope, "spans": spans}]
    return msgspec.json.encode({"resourceSpans": [{"resource": resource, "scopeSpans": scoped}]})


def _headers(given: Sequence[str]) -> dict[str, str]:
    headers: dict[str, str] = {}
    for header in given:
        name, separator, value = header.partition("=")
        if not separator or not name.strip():
            # The value is not repeated: it may be a secret.
            raise Misconfigured("otel_headers: write each header as NAME=VALUE.")
        headers[name.strip()] = value.strip()
    return headers
