"""Files and pictures by address: read before the turn begins, kept inside the items, or refused where they stand."""

from __future__ import annotations

import base64
import json
from functools import partial
from typing import Any

import pytest

from segue.dialects.parts import part_of
from segue.errors import InvalidRequest
from segue.tools.fetch import read_as_data
from segue.turn.attach import URLS_MAX, attach
from segue.wire.codec import decode_item
from segue.wire.items import Item
from tests.support import MODEL, fetch, serving, wire
from tests.tools.test_fetch import page, site


def item(**fields: Any) -> Item:
    return decode_item(json.dumps(fields).encode(), "input[0]")


def said(*parts: dict[str, Any]) -> Item:
    return item(type="message", role="user", extra=1, content=list(parts))


async def read(url: str, kind: str) -> str:
    if "missing" in url:
        raise InvalidRequest("no", code="url_failed")
    return f"data:text/plain;base64,{base64.b64encode(f'{kind} at {url}'.encode()).decode()}"


async def test_file_is_read_and_its_words_are_told() -> None:
    (found,) = await attach(
        (said({"type": "input_file", "file_url": "https://a.com/x/notes.txt?v=1"}),), read
    )
    raw = json.loads(found.raw)
    assert raw["extra"] == 1
    assert raw["content"][0]["filename"] == "notes.txt"
    assert raw["content"][0]["file_url"] == "https://a.com/x/notes.txt?v=1"
    assert "file at https://a.com/x/notes.txt?v=1" in part_of(found).text


async def test_picture_is_read_in_messages_and_outputs() -> None:
    picture = {"type": "input_image", "image_url": "https://a.com/p.png", "detail": "low"}
    output = item(type="function_call_output", call_id="c", output=[picture])
    for found in await attach((said(picture), output), read):
        (part,) = json.loads(found.raw).get("content") or json.loads(found.raw)["output"]
        assert part["image_url"].startswith("data:text/plain;base64,")
        assert part["detail"] == "low"


async def test_what_has_no_address_stays_to_the_byte() -> None:
    items = (
        said({"type": "input_text", "text": "https://a.com/"}),
        said({"type": "input_image", "image_url": "data:image/png;base64,AAAA"}),
        said({"type": "input_file", "file_data": "AAAA", "file_url": "https://a.com/"}),
        item(type="message", role="user", content="https://a.com/"),
    )
    assert await attach(items, read) is items


async def test_refusal_names_the_place() -> None:
    parts = [
        {"type": "input_text", "text": "x"},
        {"type": "input_file", "file_url": "https://missing.com/"},
    ]
    with pytest.raises(InvalidRequest) as refusal:
        await attach((said(), said(*parts)), read)
    assert (refusal.value.code, refusal.value.param) == (
        "url_failed",
        "input[1].content[1].file_url",
    )


async def test_addresses_are_bounded() -> None:
    parts = [{"type": "input_file", "file_url": "https://a.com/"}] * (URLS_MAX + 1)
    with pytest.raises(InvalidRequest, match="Too many addresses"):
        await attach((said(*parts),), read)


async def test_fetcher_reads_what_it_takes_for_public() -> None:
    async with site(lambda head: page("It rains – often.".encode(), kind="text/plain")) as (
        url,
        fetcher,
        _,
    ):
        (found,) = await attach(
            (said({"type": "input_file", "file_url": url + "/a.txt"}),),
            partial(read_as_data, fetcher),
        )
        assert "It rains – often." in part_of(found).text
        with pytest.raises(InvalidRequest) as refusal:
            await attach(
                (said({"type": "input_image", "image_url": url + "/a.png"}),),
                partial(read_as_data, fetcher),
            )
    assert refusal.value.code == "url_failed"


INSIDE = {
    "role": "user",
    "content": [{"type": "input_file", "file_url": "http://127.0.0.1:80/secret"}],
}


async def test_client_is_refused_an_address_inside_on_every_transport() -> None:
    async with serving(fetch="public") as served:
        refused = await fetch(served, "POST", "/v1/responses", {"model": MODEL, "input": [INSIDE]})
        assert refused.status == 400
        error = refused.json["error"]
        assert (error["code"], error["param"]) == ("url_refused", "input[0].content[0].file_url")
        async with wire(served) as socket:
            event = await socket.turn(input=[INSIDE])
            assert event["error"] == error
            assert (await socket.turn(input="go on"))["type"] == "response.completed"


async def test_address_is_told_in_words_while_fetching_is_off() -> None:
    async with serving() as served:
        answer = await fetch(served, "POST", "/v1/responses", {"model": MODEL, "input": [INSIDE]})
    assert answer.json["status"] == "completed"
