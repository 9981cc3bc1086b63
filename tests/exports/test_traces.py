"""Traces as a collector gets them, over real sockets; and what a `traceparent` means."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from segue.errors import Misconfigured
from segue.exports import batches
from segue.exports.traces import open_traces, parent_of
from tests.support import MODEL, WAIT_S, fetch, serving, wire

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TRACEPARENT = f"00-{TRACE}-{SPAN}-01"
STAGES = [
    "segue.validate",
    "segue.resolve",
    "segue.render",
    "segue.first_token",
    "segue.sample",
    "segue.save",
    "segue.send",
    "segue.settle",
]


class Collector:
    """An OTLP receiver that keeps what it gets, and can be out of order for a while."""

    def __init__(self) -> None:
        self.url = ""
        self.bodies: list[bytes] = []
        self.headers: list[dict[str, str]] = []
        self.statuses: list[int] = []
        # Where it leads, if it is not this one.
        self.elsewhere = ""
        self.has_heard = asyncio.Event()

    async def answer(self, request: web.Request) -> web.Response:
        if self.elsewhere:
            raise web.HTTPTemporaryRedirect(self.elsewhere)
        if self.statuses:
            return web.Response(status=self.statuses.pop(0))
        self.bodies.append(await request.read())
        self.headers.append({k.lower(): v for k, v in request.headers.items()})
        self.has_heard.set()
        return web.json_response({"partialSuccess": {}})

    @property
    def spans(self) -> list[dict[str, Any]]:
        return [
            span
            for body in self.bodies
            for resource in json.loads(body)["resourceSpans"]
            for scope in resource["scopeSpans"]
            for span in scope["spans"]
        ]

    @property
    def turns(self) -> list[dict[str, Any]]:
        return [span for span in self.spans if span["name"] == "segue.turn"]


@asynccontextmanager
async def collecting() -> AsyncIterator[Collector]:
    collector = Collector()
    app = web.Application()
    app.router.add_post("/v1/traces", collector.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        collector.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        yield collector
    finally:
        await runner.cleanup()


def attributes(span: dict[str, Any]) -> dict[str, str]:
    return {one["key"]: next(iter(one["value"].values())) for one in span["attributes"]}


async def test_turn_becomes_a_span_with_one_inside_for_each_stage() -> None:
    async with collecting() as collector:
        async with serving(otel_endpoint=collector.url, otel_headers=["x-team=a=b"]) as served:
            body = {"model": MODEL, "input": "A canary that sings."}
            answer = await fetch(
                served, "POST", "/v1/responses", body, {"traceparent": TRACEPARENT}
            )
        # What was still waiting was handed over at the stop.
        turn, *stages = collector.spans
        assert (turn["traceId"], turn["parentSpanId"]) == (TRACE, SPAN)
        assert [span["name"] for span in stages] == STAGES
        assert {span["parentSpanId"] for span in stages} == {turn["spanId"]}
        assert {span["traceId"] for span in stages} == {TRACE}
        edges = [int(turn["startTimeUnixNano"])]
        for span in stages:
            assert int(span["startTimeUnixNano"]) == edges[-1]
            edges.append(int(span["endTimeUnixNano"]))
        assert edges == sorted(edges)
        assert int(turn["endTimeUnixNano"]) == edges[-2]
        said = attributes(turn)
        assert said["gen_ai.response.id"] == answer.json["id"]
        assert said["gen_ai.request.model"] == MODEL
        assert int(said["gen_ai.usage.output_tokens"]) == answer.json["usage"]["output_tokens"] > 0
        assert said["segue.transport"] == "http"
        assert b"canary" not in b"".join(collector.bodies)
        assert b'"local"' not in b"".join(collector.bodies)
        assert collector.headers[0]["x-team"] == "a=b"


async def test_spans_and_the_key_of_a_collector_go_nowhere_else() -> None:
    async with collecting() as thief, collecting() as collector:
        collector.elsewhere = f"{thief.url}/v1/traces"
        secret = ["x-api-key=secret"]
        async with serving(otel_endpoint=collector.url, otel_headers=secret) as served:
            await fetch(served, "POST", "/v1/responses", {"model": MODEL, "input": "Hello."})
        assert thief.headers == []


async def test_trace_in_the_metadata_of_a_frame_is_continued() -> None:
    async with collecting() as collector:
        async with serving(otel_endpoint=collector.url) as served, wire(served) as socket:
            for metadata in (
                {"ws_request_header_traceparent": TRACEPARENT, "session_id": "s"},
                {"ws_request_header_traceparent": 7},
                "nonsense",
                {"ws_request_header_traceparent": TRACEPARENT[:-2] + "00"},
            ):
                last = await socket.turn(input="Hello.", client_metadata=metadata, store=False)
                assert last["type"] == "response.completed"
        traces = [turn["traceId"] for turn in collector.turns]
        # The last one's client does not want to be traced.
        assert len(traces) == len(set(traces)) == 3
        assert traces[0] == TRACE
        assert TRACE not in traces[1:]


async def test_failed_turn_is_an_error_that_names_its_code() -> None:
    async with collecting() as collector:
        async with serving(otel_endpoint=collector.url, context_tokens=10) as served:
            body = {"model": MODEL, "input": "Too long for so small a context."}
            assert (await fetch(served, "POST", "/v1/responses", body)).status == 400
        assert collector.turns[0]["status"] == {"code": 2, "message": "context_length_exceeded"}


async def test_collector_that_is_busy_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "RETRY_S", 0.01)
    monkeypatch.setattr(batches, "GATHER_S", 0.01)
    async with collecting() as collector:
        collector.statuses = [503, 429]
        async with serving(otel_endpoint=collector.url) as served:
            await fetch(served, "POST", "/v1/responses", {"model": MODEL, "input": "Hello."})
            async with asyncio.timeout(WAIT_S):
                await collector.has_heard.wait()
        assert len(collector.turns) == 1


async def test_server_serves_and_stops_though_no_collector_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(batches, "WAITING_MAX", 2)
    async with asyncio.timeout(WAIT_S):
        async with serving(otel_endpoint="http://127.0.0.1:9") as served:
            for _ in range(4):
                body = {"model": MODEL, "input": "Hello.", "store": False}
                assert (await fetch(served, "POST", "/v1/responses", body)).status == 200


@pytest.mark.parametrize(
    "text",
    [
        "",
        "00",
        TRACEPARENT.replace("00-", "ff-", 1),
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE}-{SPAN}",
        f"00-{TRACE[:-1]}-{SPAN}-01",
        "x" * 10_000,
    ],
)
def test_what_is_no_traceparent_is_ignored(text: str) -> None:
    assert parent_of(text) is None


def test_traceparent_of_a_later_version_is_understood() -> None:
    found = parent_of(f"01-{TRACE}-{SPAN}-03-more")
    assert found is not None
    assert (found.trace_id, found.span_id, found.is_sampled) == (TRACE, SPAN, True)


async def test_header_for_the_collector_needs_a_name() -> None:
    with pytest.raises(Misconfigured, match="NAME=VALUE") as told:
        async with open_traces("http://127.0.0.1:9", ["secret-without-name"]):
            pass
    assert "secret" not in str(told.value)
