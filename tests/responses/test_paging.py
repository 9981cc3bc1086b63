"""A long list in pages: whatever ids its items bear, every item is seen once and the pages come to an end."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from segue.responses.paging import choose_page, encode_page
from segue.wire.codec import decode_item
from segue.wire.items import Item
from tests.support import fetch, serving

NAMES = ("msg_a", "msg_b", "msg_a~2", "msg_a~3")


def item(name: str, text: str) -> tuple[str, Item]:
    return name, decode_item(json.dumps({"id": name, "role": "user", "content": text}).encode(), "")


@given(
    names=st.lists(st.sampled_from(NAMES), max_size=12),
    limit=st.integers(1, 4),
    order=st.sampled_from(("asc", "desc")),
)
def test_pages_show_every_item_once(names: list[str], limit: int, order: str) -> None:
    rows = [item(name, str(n)) for n, name in enumerate(names)]
    query = {"limit": str(limit), "order": order}
    seen: list[str] = []
    ids: list[str] = []
    for _ in range(len(rows) + 1):
        chosen = choose_page(names, query)
        shown = [rows[at][1] for at in chosen.positions]
        page = json.loads(encode_page(chosen, shown))
        seen += [one["content"][0]["text"] for one in page["data"]]
        ids += [one["id"] for one in page["data"]]
        if not page["has_more"]:
            break
        # As the SDKs ask for the next page.
        query["after"] = page["data"][-1]["id"]
        assert page["last_id"] == query["after"]
    expected = [str(n) for n in range(len(rows))]
    assert seen == (expected if order == "asc" else expected[::-1])
    assert len(set(ids)) == len(ids)


async def test_item_that_was_sent_twice_is_listed_twice() -> None:
    twice = {"id": "msg_1", "role": "user", "content": "Again."}
    async with serving() as served:
        made = await fetch(served, "POST", "/v1/conversations", {"items": [twice, twice]})
        path = f"/v1/conversations/{made.json['id']}/items"
        first = (await fetch(served, "GET", f"{path}?order=asc&limit=1")).json
        after = f"{path}?order=asc&limit=1&after={first['last_id']}"
        second = (await fetch(served, "GET", after)).json
        assert (first["has_more"], second["has_more"]) == (True, False)
        found = await fetch(served, "GET", f"{path}/{second['last_id']}")
        assert found.json == second["data"][0]
        body = {"model": "scripted", "input": [twice, twice, {"role": "user", "content": "Go."}]}
        response = (await fetch(served, "POST", "/v1/responses", body)).json["id"]
        listed = (await fetch(served, "GET", f"/v1/responses/{response}/input_items")).json["data"]
        assert [one["id"] for one in listed[1:]] == ["msg_1~2", "msg_1"]
