"""Whose fault was it? A response that failed by a mistake of its caller is counted as refused and wakes nobody; one
that failed by ours is in the log, at the default settings, with its code and its request. Over every transport."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from segue.observe.logs import TextFormatter
from segue_embedded.weights import find_weights
from tests.engines.fakes.vllm import FakeVllm
from tests.support import Served, fetch, metric, serving, until, wire

TOO_LONG = "word " * 2_000
WAYS = ["http", "sse", "websocket", "background"]


@pytest.fixture
async def fake() -> AsyncIterator[FakeVllm]:
    async with FakeVllm() as fake:
        yield fake


async def ask(served: Served, way: str, text: str) -> tuple[str, str]:
    """The code of the error of a response, and the id of its request."""
    body: dict[str, Any] = {"model": "fake", "input": text}
    if way == "websocket":
        async with wire(served) as socket:
            end = await socket.turn(**body)
            headers = socket.socket.response.headers  # type: ignore[union-attr]
            return end["response"]["error"]["code"], f"{headers['x-request-id']}.1"
    if way != "http":
        body |= {"stream": True} if way == "sse" else {"background": True}
    answer = await fetch(served, "POST", "/v1/responses", body)
    request_id = answer.headers["x-request-id"]
    if way == "http":
        return answer.json["error"]["code"], request_id
    if way == "sse":
        return answer.events[-1]["response"]["error"]["code"], request_id
    path = f"/v1/responses/{answer.json['id']}"
    while (found := (await fetch(served, "GET", path)).json)["status"] != "failed":
        pass
    return found["error"]["code"], request_id


async def counted(served: Served, way: str) -> tuple[float, float]:
    """Turns that were refused, and that failed."""
    transport = "http" if way == "background" else way
    name = 'segue_turns_total{outcome="%s",transport="%s"}'
    refused, failed = [name % (outcome, transport) for outcome in ("refused", "failed")]
    return await metric(served, refused), await metric(served, failed)


def serving_from(fake: FakeVllm, **flags: object) -> Any:
    tokenizer = str(find_weights("smollm2"))
    url = {"engine": "vllm", "engine_url": (fake.url,), "tokenizer": tokenizer}
    return serving(model=("fake",), context_tokens=1_000, **url, **flags)


@pytest.mark.parametrize("way", WAYS)
async def test_prompt_that_is_too_long_is_refused_once_and_no_failed_turn(
    fake: FakeVllm, way: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    path = tmp_path / "audit.jsonl"
    async with serving_from(fake, audit_log=str(path)) as served:
        code, request_id = await ask(served, way, TOO_LONG)
        assert code == "context_length_exceeded"
        assert await counted(served, way) == (1, 0)
    (line,) = [msgspec.json.decode(line) for line in path.read_text().splitlines()]
    assert (line["event"], line["outcome"]) == ("turn", "refused")
    assert (line["code"], line["request_id"]) == (code, request_id)
    assert code not in caplog.text


@pytest.mark.parametrize("way", WAYS)
async def test_turn_that_an_engine_breaks_off_fails_and_is_in_the_log(
    fake: FakeVllm, way: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    caplog.handler.setFormatter(TextFormatter("%(levelname)s %(request)s%(message)s"))
    fake.break_at = 1
    async with serving_from(fake) as served:
        code, request_id = await ask(served, way, "x")
        assert code == "server_error"
        assert await counted(served, way) == (0, 1)
        await until(lambda: "failed: 502 server_error" in caplog.text)
    (line,) = [line for line in caplog.text.splitlines() if "failed: 502 server_error" in line]
    assert line.startswith(f"INFO [{request_id}] turn resp_")
