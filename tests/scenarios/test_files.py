"""PDFs inside requests: read beside everything else, once, and the same for whoever continues."""

from __future__ import annotations

import asyncio
import base64
from pathlib import Path
from typing import Any

import pytest

from tests.documents.papers import TEDIOUS, drawn, pdf
from tests.scenarios.test_rollout import CALL, append, outputs, scripted, until_done
from tests.support import MODEL, WEATHER, fetch, serving, wire

WORDS = "The glacier moves slowly. " * 20
SLOW = drawn(*[TEDIOUS] * 4)


def asking(data: bytes, **fields: Any) -> dict[str, Any]:
    file = {
        "type": "input_file",
        "filename": "a.pdf",
        "file_data": base64.b64encode(data).decode(),
    }
    return {"model": MODEL, "input": [{"role": "user", "content": [file]}], **fields}


async def test_others_are_served_while_a_file_is_read_and_it_is_given_up_in_time() -> None:
    async with serving(file_s_max=1, heartbeat_s=0.2) as served:
        slow = asyncio.create_task(fetch(served, "POST", "/v1/responses", asking(SLOW)))
        for _ in range(5):
            assert (await fetch(served, "GET", "/health")).status == 200
        assert not slow.done()
        refused = await slow
        assert refused.status == 400
        error = refused.json["error"]
        assert (error["code"], error["param"]) == ("file_failed", "input[0].content[0]")
    async with serving(file_s_max=0.01) as served:
        counted = await fetch(served, "POST", "/v1/responses/input_tokens", asking(SLOW))
        assert (counted.status, counted.json["error"]["code"]) == (400, "file_failed")


async def test_client_hears_heartbeats_while_a_file_is_read_and_can_cancel() -> None:
    async with serving(file_s_max=60, heartbeat_s=0.2) as served, wire(served) as socket:
        await socket.create(**asking(SLOW))
        seen = [await socket.next() for _ in range(4)]
        assert [event["type"] for event in seen[1:]] == ["response.in_progress"] * 3
        begun = await fetch(served, "POST", "/v1/responses", asking(SLOW, background=True))
        ended = await fetch(served, "POST", f"/v1/responses/{begun.json['id']}/cancel")
        assert ended.json["status"] == "cancelled"


async def test_text_of_a_file_is_the_same_warm_cold_and_after_a_restart(tmp_path: Path) -> None:
    flags = {"store": f"sqlite:///{tmp_path / 'a.db'}", "check_rendering": True}
    first = asking(pdf(WORDS), store=True)
    usages = []
    async with serving(**flags) as served:
        plain = (await fetch(served, "POST", "/v1/responses", asking(b"%PDF broken"))).json
        begun = (await fetch(served, "POST", "/v1/responses", first)).json
        more = begun["usage"]["input_tokens"] - plain["usage"]["input_tokens"]
        assert more > 80
        again = {"model": MODEL, "input": "And now?", "previous_response_id": begun["id"]}
        usages.append((await fetch(served, "POST", "/v1/responses", again)).json["usage"])
        resent = [*first["input"], *begun["output"], {"role": "user", "content": "And now?"}]
        whole = {"model": MODEL, "input": resent}
        usages.append((await fetch(served, "POST", "/v1/responses", whole)).json["usage"])
        listed = await fetch(served, "GET", f"/v1/responses/{begun['id']}/input_items")
        assert "glacier" in listed.json["data"][0]["content"][0]["segue:text"]
    async with serving(**flags) as served:
        usages.append((await fetch(served, "POST", "/v1/responses", again)).json["usage"])
    assert len({usage["input_tokens"] for usage in usages}) == 1, usages


@pytest.mark.parametrize("file_s_max", [30, 0.01])
async def test_rollout_reads_the_file_that_it_is_given(tmp_path: Path, file_s_max: float) -> None:
    turns = ({"calls": [CALL]}, {"text": "Done."})
    flags = {"file_s_max": file_s_max}
    async with scripted(tmp_path, *turns, **flags) as served, wire(served) as socket:
        await socket.create(input="Go.", tools=[WEATHER], rollout=True, store=False)
        done = (await until_done(socket))[-1]
        (output,) = outputs(done)
        output["output"] = asking(pdf(WORDS))["input"][0]["content"]
        await append(socket, done["response_id"], [output])
        ended = (await socket.events())[-1]["response"]
    if file_s_max > 1:
        assert ended["usage"]["input_tokens"] > 250
    else:
        assert ended["error"]["code"] == "file_failed"
