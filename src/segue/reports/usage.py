"""Who used how much, by day or month, key, owner and model? `GET /v1/organization/usage/completions`.

In the shape of OpenAI's usage API, so that its SDKs and the programs that add up costs read it: an owner is a project
there. The numbers are those of the ledger, as `segue usage` prints them. A key sees its own owner, an operator's all.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from operator import add
from urllib.parse import parse_qsl

from msgspec import Struct

from segue.aio import off_loop
from segue.errors import InvalidRequest
from segue.listener.api import Route
from segue.listener.exchange import Exchange
from segue.seams.store import Ledger, UsageTotal
from segue.wire.codec import encode

DAY_S = 86_400
# The newest so many days, or months, where the request does not say; and at most.
LIMITS = {"1d": (7, 366), "1mo": (12, 120)}
# What results may be told apart by, and the field of a total.
GROUPS = {"project_id": "owner", "api_key_id": "key_id", "model": "model"}
FILTERS = {"project_ids": "owner", "api_key_ids": "key_id", "models": "model"}
COUNTED = (
    *("turns", "input_tokens", "cached_tokens", "output_tokens", "tool_calls"),
    *("container_s", "cpu_s", "egress_bytes"),
)
# What OpenAI tells apart and we do not: taken, and null.
UNKNOWN_GROUPS = {"user_id", "batch", "service_tier", "api_source"}
# To add up more takes some milliseconds; a year of many keys has hundreds of thousands.
MANY_ROWS = 1_000

Totals = dict[tuple[str, ...], list[float]]


class UsageResult(Struct, frozen=True):
    """What was used in a bucket; the last fields are ours."""

    input_tokens: int
    num_model_requests: int
    output_tokens: int
    input_cached_tokens: int
    project_id: str | None
    api_key_id: str | None
    model: str | None
    tool_calls: int
    container_seconds: float
    container_cpu_seconds: float
    container_egress_bytes: int
    object: str = "organization.usage.completions.result"
    user_id: None = None
    batch: None = None
    service_tier: None = None


class UsageBucket(Struct, frozen=True):
    start_time: int
    end_time: int
    results: Sequence[UsageResult]
    object: str = "bucket"


class UsagePage(Struct, frozen=True):
    data: Sequence[UsageBucket]
    has_more: bool
    next_page: str | None
    object: str = "page"


class UsageReports:
    """The route of usage."""

    def __init__(self, ledger: Ledger, clock: Callable[[], float] = time.time) -> None:
        self._ledger = ledger
        self._clock = clock

    @property
    def routes(self) -> tuple[Route, ...]:
        path = "/v1/organization/usage/completions"
        return (Route("GET", path, self._answer, "dashboard"),)

    async def _answer(self, exchange: Exchange) -> None:
        asked = _Asked(exchange.scope["query_string"].decode("latin-1"), self._clock())
        spans = asked.spans
        owner = None if exchange.account.is_operator else exchange.owner
        rows = await self._ledger.report(owner, spans[0][0], spans[-1][1]) if spans else []
        page = await off_loop(len(rows) > MANY_ROWS, asked.page, rows)
        await exchange.answer(200, page)


class _Asked:
    """What a request asks for."""

    def __init__(self, query: str, now: float) -> None:
        pairs = [(name.removesuffix("[]"), value) for name, value in parse_qsl(query)]
        given = dict(pairs)
        self.lists = {
            name: frozenset(value for key, value in pairs if key == name)
            for name in ("group_by", *FILTERS)
        }
        if odd := self.lists["group_by"] - GROUPS.keys() - UNKNOWN_GROUPS:
            raise _refused("group_by", f"'{min(odd)[:64]}' is none of: {', '.join(GROUPS)}.")
        self.width = given.get("bucket_width", "1d")
        if self.width not in LIMITS:
            raise _refused("bucket_width", f"must be one of: {', '.join(LIMITS)}.")
        usual, most = LIMITS[self.width]
        self.limit = min(most, _number(given, "limit", usual))
        if not self.limit:
            raise _refused("limit", f"must be 1 to {most}.")
        if "start_time" not in given:
            raise _refused("start_time", "is missing: seconds since 1970.")
        start = _number(given, "start_time", 0)
        if page := given.get("page"):
            start = _number({"page": page.removeprefix("page_")}, "page", 0)
        self.end = min(_number(given, "end_time", int(now) + 1), int(now) + 1)
        self.start = _first(start, self.width)

    @property
    def spans(self) -> list[tuple[int, int]]:
        """The buckets of this page, from when to when."""
        spans: list[tuple[int, int]] = []
        at = self.start
        while at < self.end and len(spans) < self.limit:
            following = _following(at, self.width)
            spans.append((at, following))
            at = following
        return spans

    def page(self, rows: Sequence[UsageTotal]) -> bytes:
        """What was used in the buckets of this page. Each row is looked at once."""
        spans = self.spans
        days = [_day(begins_at) for begins_at, _ in spans]
        within: list[list[UsageTotal]] = [[] for _ in spans]
        for row in rows:
            if self._is_wanted(row):
                within[bisect_right(days, row.day) - 1].append(row)
        found = zip(spans, map(self._results, within), strict=True)
        buckets = [UsageBucket(*span, results) for span, results in found]
        after = spans[-1][1] if spans else self.end
        has_more = after < self.end
        return encode(UsagePage(buckets, has_more, f"page_{after}" if has_more else None))

    def _results(self, rows: Sequence[UsageTotal]) -> list[UsageResult]:
        """What was used in a bucket, a result for each group."""
        groups = [name for name in GROUPS if name in self.lists["group_by"]]
        totals: Totals = {}
        for row in rows:
            key = tuple(getattr(row, GROUPS[name]) for name in groups)
            used = [getattr(row, name) for name in COUNTED]
            totals[key] = [*map(add, totals[key], used)] if key in totals else used
        return [_result(dict(zip(groups, key, strict=True)), totals[key]) for key in sorted(totals)]

    def _is_wanted(self, row: UsageTotal) -> bool:
        return all(
            not self.lists[name] or getattr(row, field) in self.lists[name]
            for name, field in FILTERS.items()
        )


def _result(group: dict[str, str], used: Sequence[float]) -> UsageResult:
    turns, given, cached, written, calls, container_s, cpu_s, egress = used
    return UsageResult(
        int(given),
        int(turns),
        int(written),
        int(cached),
        group.get("project_id"),
        group.get("api_key_id"),
        group.get("model"),
        int(calls),
        container_s,
        cpu_s,
        int(egress),
    )


def _day(at: int) -> str:
    return time.strftime("%Y-%m-%d", time.gmtime(at))


def _first(at: int, width: str) -> int:
    """When the bucket of this time begins."""
    day = at // DAY_S * DAY_S
    return day if width == "1d" else day - (time.gmtime(day).tm_mday - 1) * DAY_S


def _following(at: int, width: str) -> int:
    if width == "1d":
        return at + DAY_S
    day = datetime.fromtimestamp(at, UTC)
    year, month = divmod(12 * day.year + day.month, 12)
    return int(datetime(year, month + 1, 1, tzinfo=UTC).timestamp())


def _number(given: dict[str, str], name: str, usual: int) -> int:
    text = given.get(name, str(usual))
    if not (text.isascii() and text.isdigit() and len(text) < 12):
        raise _refused(name, "must be a whole number.")
    return int(text)


def _refused(name: str, problem: str) -> InvalidRequest:
    return InvalidRequest(f"{name}: {problem}", param=name)
