"""A client asks how likely the tokens were: the same numbers in deltas, parts, items and the response."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from tests.support import MODEL, fetch, serving, wire

INCLUDE = ["message.output_text.logprobs"]


def told(events: Sequence[dict[str, Any]]) -> dict[str, list[Any]]:
    """Where logprobs stand, by the event."""
    found: dict[str, list[Any]] = {"delta": []}
    for event in events:
        match event["type"]:
            case "response.output_text.delta":
                found["delta"] += event["logprobs"]
            case "response.output_text.done":
                found["done"] = event["logprobs"]
            case "response.content_part.done":
                found["part"] = event["part"]["logprobs"]
            case "response.output_item.done":
                found["item"] = event["item"]["content"][0]["logprobs"]
            case "response.completed":
                found["response"] = event["response"]["output"][0]["content"][0]["logprobs"]
            case _:
                pass
    return found


async def test_client_asks_how_likely_the_tokens_were() -> None:
    body = {"model": MODEL, "input": "Hello 🦜.", "top_logprobs": 2, "include": INCLUDE}
    async with serving() as served:
        streamed = (await fetch(served, "POST", "/v1/responses", {**body, "stream": True})).events
        async with wire(served) as socket:
            await socket.create(**body)
            heard = await socket.events()
        plain = (await fetch(served, "POST", "/v1/responses", body)).json
        again = await fetch(served, "GET", f"/v1/responses/{plain['id']}")
    found = told(streamed)
    assert found == told(heard)
    assert all(one == found["done"] for one in found.values())
    part = plain["output"][0]["content"][0]
    assert part["logprobs"] == found["done"]
    assert again.json["output"] == plain["output"]
    assert bytes(byte for one in found["done"] for byte in one["bytes"]).decode() == part["text"]
    for one in found["done"]:
        assert list(one) == ["token", "bytes", "logprob", "top_logprobs"]
        assert -1 < one["logprob"] <= 0
        assert len(one["top_logprobs"]) == 2
        assert [*one["top_logprobs"][0]] == ["token", "bytes", "logprob"]


@pytest.mark.parametrize(
    "asked, is_told",
    [({"include": INCLUDE}, True), ({"top_logprobs": 5}, False), ({"include": []}, False)],
)
async def test_include_asks_and_top_logprobs_only_says_how_many(
    asked: dict[str, Any], is_told: bool
) -> None:
    async with serving() as served:
        body = {"model": MODEL, "input": "Hello.", **asked}
        answer = (await fetch(served, "POST", "/v1/responses", body)).json
    logprobs = answer["output"][0]["content"][0]["logprobs"]
    assert bool(logprobs) == is_told
    assert all(one["top_logprobs"] == [] for one in logprobs)


async def test_calls_have_no_logprobs() -> None:
    tool = {"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}}
    async with serving() as served:
        body = {"model": MODEL, "input": "Hi", "tools": [tool], "include": INCLUDE}
        answer = (await fetch(served, "POST", "/v1/responses", body)).json
    assert answer["output"][0]["type"] == "function_call"
    assert "logprobs" not in json.dumps(answer["output"])
