"""Agents know this API under several paths: all of them are one place, on both transports."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import websockets

from tests.support import MODEL, Served, fetch, serving, wire

PATHS = ("/v1/responses", "/responses", "/v1/codex/responses")


@dataclass(frozen=True)
class RemoteTurns:
    """A server, by another path."""

    ws_url: str


@pytest.mark.parametrize("path", PATHS)
async def test_client_creates_continues_and_fetches_by_any_path(path: str) -> None:
    async with serving() as served:
        body = {"model": MODEL, "input": "Hello"}
        made = (await fetch(served, "POST", path, body)).json
        assert made["status"] == "completed"
        for other in PATHS:
            assert (await fetch(served, "GET", f"{other}/{made['id']}")).json == made
        items = await fetch(served, "GET", f"{path}/{made['id']}/input_items")
        assert items.json["data"][0]["content"] == [{"type": "input_text", "text": "Hello"}]
        async with wire(_by(served, path)) as socket:
            event = await socket.turn(input="And?", previous_response_id=made["id"])
            assert event["type"] == "response.completed"
        assert (await fetch(served, "DELETE", f"{path}/{made['id']}")).status == 200


@pytest.mark.parametrize(
    "path", ["/v2/responses", "/codex/responses", "/v1/codex", "/responses/x/y"]
)
async def test_other_paths_are_unknown(path: str) -> None:
    async with serving() as served:
        answer = await fetch(served, "POST", path, {"model": MODEL, "input": "Hello"})
        assert answer.status == 404
        with pytest.raises(websockets.InvalidStatus) as refused:
            async with wire(_by(served, path)):
                pass
        assert refused.value.response.status_code == 404


def _by(served: Served, path: str) -> RemoteTurns:
    return RemoteTurns(served.ws_url.replace("/v1/responses", path))
