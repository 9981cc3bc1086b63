"""Files and pictures by address: read before the turn begins, kept inside the items, or refused where they stand."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from segue.accounts.account import LOCAL
from segue.dialects.parts import part_of
from segue.documents.pdf import PdfTexts
from segue.errors import InvalidRequest
from segue.tools.hosted import ServerTools
from segue.tools.inputs import TEXT_COST, URLS_MAX, UrlKind, attach
from segue.web.fetch import DataReader
from segue.wire.codec import decode_item
from segue.wire.items import Item
from tests.hosted import AtHand
from tests.support import MODEL, WEATHER, Served, fetch, serving, wire
from tests.web.test_fetch import page, site


def item(**fields: Any) -> Item:
    return decode_item(json.dumps(fields).encode(), "input[0]")


def said(*parts: dict[str, Any]) -> Item:
    return item(type="message", role="user", extra=1, content=list(parts))


class Reader:
    """Says what was asked for."""

    bytes_max = 1_000_000

    async def __call__(self, url: str, kind: UrlKind) -> str:
        if "missing" in url:
            raise InvalidRequest("no", code="url_failed")
        return f"data:text/plain;base64,{base64.b64encode(f'{kind} at {url}'.encode()).decode()}"


read = Reader()


class Room:
    """As much memory as anybody wants."""

    def __init__(self) -> None:
        self.taken: list[int] = []

    async def take(self, size: int) -> None:
        self.taken.append(size)

    def give(self, size: int) -> None:
        self.taken.append(-size)


async def test_file_is_read_and_its_words_are_told() -> None:
    (found,) = await attach(
        (said({"type": "input_file", "file_url": "https://a.com/x/notes.txt?v=1"}),), read, Room()
    )
    raw = json.loads(found.raw)
    assert raw["extra"] == 1
    assert raw["content"][0]["filename"] == "notes.txt"
    assert raw["content"][0]["file_url"] == "https://a.com/x/notes.txt?v=1"
    assert "file at https://a.com/x/notes.txt?v=1" in part_of(found).text


async def test_picture_is_read_in_messages_and_outputs() -> None:
    picture = {"type": "input_image", "image_url": "https://a.com/p.png", "detail": "low"}
    output = item(type="function_call_output", call_id="c", output=[picture])
    for found in await attach((said(picture), output), read, Room()):
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
    assert await attach(items, read, Room()) is items


async def test_refusal_names_the_place() -> None:
    parts = [
        {"type": "input_text", "text": "x"},
        {"type": "input_file", "file_url": "https://missing.com/"},
    ]
    with pytest.raises(InvalidRequest) as refusal:
        await attach((said(), said(*parts)), read, Room())
    assert (refusal.value.code, refusal.value.param) == (
        "url_failed",
        "input[1].content[1].file_url",
    )


async def test_memory_is_set_aside_for_an_address_before_it_is_read() -> None:
    room = Room()
    part = {"type": "input_file", "file_url": "https://a.com/x"}
    (found,) = await attach((said(part),), read, room)
    size = len(json.loads(found.raw)["content"][0]["file_data"])
    assert room.taken == [read.bytes_max, -read.bytes_max, TEXT_COST * size]


async def test_addresses_are_bounded() -> None:
    parts = [{"type": "input_file", "file_url": "https://a.com/"}] * (URLS_MAX + 1)
    with pytest.raises(InvalidRequest, match="Too many URLs"):
        await attach((said(*parts),), read, Room())


async def test_fetcher_reads_what_it_takes_for_public() -> None:
    async with site(lambda head: page("It rains – often.".encode(), kind="text/plain")) as (
        url,
        fetcher,
        _,
    ):
        (found,) = await attach(
            (said({"type": "input_file", "file_url": url + "/a.txt"}),),
            DataReader(fetcher),
            Room(),
        )
        assert "It rains – often." in part_of(found).text
        with pytest.raises(InvalidRequest) as refusal:
            await attach(
                (said({"type": "input_image", "image_url": url + "/a.png"}),),
                DataReader(fetcher),
                Room(),
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


def file_at(url: str) -> dict[str, Any]:
    return {"type": "input_file", "file_url": url}


async def kept_files(served: Served, turn_id: str) -> list[str]:
    """The files inside what a turn was given, as they are kept."""
    turn = await served.app.state.store.turns.find(LOCAL, turn_id)
    assert turn is not None
    raws = [json.loads(one.raw) for each in turn.rounds for one in each.given]
    parts = [part for one in raws for part in one.get("content", one.get("output", []))]
    return [part["file_data"] for part in parts if part["type"] == "input_file"]


@asynccontextmanager
async def reading(folder: Path, *turns: dict[str, Any]) -> AsyncIterator[tuple[Served, str]]:
    """A server that may read one site, and the site's address."""
    script = folder / "script.json"
    script.write_text(json.dumps({"turns": turns}))
    async with (
        site(lambda head: page(b"It rains.", kind="text/plain")) as (url, fetcher, _),
        serving(script=str(script), tps=300) as served,
    ):
        runner = served.app.runner
        read_url = DataReader(fetcher)
        hosted = ServerTools(read_pdf=PdfTexts(1.0).read, read_url=read_url)
        runner.resources = replace(runner.resources, hosted=AtHand(hosted))
        yield served, url


async def test_address_in_an_appended_output_is_read_like_that_of_a_create(tmp_path: Path) -> None:
    call = {"calls": [{"name": "get_weather", "arguments": {"city": "Oslo"}}]}
    async with (
        reading(tmp_path, call, {"text": "Done."}) as (served, url),
        wire(served) as socket,
    ):
        await socket.create(input="Go", tools=[WEATHER], rollout=True)
        event = await socket.next()
        while event["type"] != "response.done":
            event = await socket.next()
        (owed,) = event["required_input"]
        append = {"type": "response.append", "response_id": event["response_id"]}
        for path in ("http://10.0.0.1/a.txt", url + "/a.txt"):
            await socket.send({**append, "input": [{**owed, "output": [file_at(path)]}]})
            answer = await socket.next()
            if path.startswith(url):
                break
            assert answer["error"]["code"] == "url_refused"
            assert answer["error"]["param"] == "input[0].output[0].file_url"
        last = (await socket.events())[-1]["response"]
        assert last["status"] == "completed"
        (data,) = await kept_files(served, last["id"])
    assert base64.b64decode(data.partition(",")[2]) == b"It rains."


async def test_address_in_a_steer_is_read_when_its_successor_begins(tmp_path: Path) -> None:
    long = {"text": "Once there was a river. It went on and on and on. " * 30}
    async with (
        reading(tmp_path, long, long, {"text": "Short."}) as (served, url),
        wire(served) as socket,
    ):
        for path in ("http://10.0.0.1/a.txt", url + "/a.txt"):
            await socket.create(input="Go")
            target = (await socket.next())["response"]["id"]
            given = [{"role": "user", "content": [file_at(path)]}]
            steer = {"type": "response.steer", "previous_response_id": target, "input": given}
            await socket.send(steer)
            first = (await socket.events())[-1]["response"]
            assert first["incomplete_details"] == {"reason": "steered"}
            if not path.startswith(url):
                failed = await socket.next()
                assert failed["type"] == "response.steer.failed"
                assert failed["error"]["code"] == "successor_creation_failed"
        last = (await socket.events())[-1]["response"]
        assert last["previous_response_id"] == target
        (data,) = await kept_files(served, last["id"])
    assert base64.b64decode(data.partition(",")[2]) == b"It rains."
