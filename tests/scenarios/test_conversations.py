"""Conversations: rows of items by name, which responses read and add to (docs/protocol.md 1)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import MODEL, Answer, Served, fetch, metric, serving, wire

HELLO = {"role": "user", "content": "My name is Ada."}


@pytest.fixture(params=["memory", "sqlite"])
async def served(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Served]:
    store = "memory" if request.param == "memory" else f"sqlite:///{tmp_path}/s.db"
    async with serving(store=store, check_rendering=True) as served:
        yield served


async def begin(served: Served, **fields: Any) -> str:
    answer = await fetch(served, "POST", "/v1/conversations", fields)
    assert answer.status == 200, answer.body
    assert answer.json["object"] == "conversation"
    found: str = answer.json["id"]
    assert found.startswith("conv_")
    return found


async def speak(served: Served, conversation: Any, **fields: Any) -> Answer:
    body = {"model": MODEL, "input": "And you?", "conversation": conversation, **fields}
    return await fetch(served, "POST", "/v1/responses", body)


async def items(served: Served, name: str, query: str = "order=asc&limit=100") -> list[Any]:
    answer = await fetch(served, "GET", f"/v1/conversations/{name}/items?{query}")
    found: list[Any] = answer.json["data"]
    return found


async def test_responses_read_and_add_to_a_conversation(served: Served) -> None:
    name = await begin(served, items=[HELLO], metadata={"a": "b"})
    first = (await speak(served, name)).json
    assert first["conversation"] == {"id": name}
    assert first["previous_response_id"] is None
    second = (await speak(served, {"id": name})).json
    shelved = await items(served, name)
    assert [one["type"] for one in shelved] == ["message"] * 5
    assert [one["role"] for one in shelved] == ["user", "user", "assistant", "user", "assistant"]
    assert [one["id"] for one in shelved[2::2]] == [
        first["output"][0]["id"],
        second["output"][0]["id"],
    ]
    assert len({one["id"] for one in shelved}) == 5
    assert second["usage"]["input_tokens"] > first["usage"]["input_tokens"]


async def test_conversation_costs_what_a_chain_costs(served: Served) -> None:
    name = await begin(served)
    first = (await speak(served, name, input="Hello.")).json
    before = await metric(served, "segue_tokens_tokenized_total")
    second = (await speak(served, name, input="And?")).json
    tokenized = await metric(served, "segue_tokens_tokenized_total") - before

    chained = (
        await fetch(served, "POST", "/v1/responses", {"model": MODEL, "input": "Hello."})
    ).json
    body = {"model": MODEL, "input": "And?", "previous_response_id": chained["id"]}
    before = await metric(served, "segue_tokens_tokenized_total")
    last = (await fetch(served, "POST", "/v1/responses", body)).json
    assert await metric(served, "segue_tokens_tokenized_total") - before == tokenized
    assert last["usage"] == second["usage"]
    assert first["usage"] == chained["usage"]


async def test_conversation_is_spoken_on_the_socket_too(served: Served) -> None:
    name = await begin(served, items=[HELLO])
    async with wire(served) as socket:
        one = await socket.turn(input="One.", conversation=name)
        two = await socket.turn(input="Two.", conversation={"id": name})
    assert one["response"]["conversation"] == two["response"]["conversation"] == {"id": name}
    assert len(await items(served, name)) == 5


async def test_items_are_added_listed_and_erased(served: Served) -> None:
    name = await begin(served)
    path = f"/v1/conversations/{name}/items"
    added = await fetch(served, "POST", path, {"items": [HELLO, {**HELLO, "id": "msg_mine"}]})
    shown = [{"type": "input_text", "text": HELLO["content"]}]
    assert [one["content"] for one in added.json["data"]] == [shown] * 2
    assert added.json["data"][1]["id"] == "msg_mine"
    assert (await fetch(served, "GET", f"{path}/msg_mine")).json == added.json["data"][1]
    page = (await fetch(served, "GET", f"{path}?limit=1")).json
    assert (page["first_id"], page["has_more"]) == ("msg_mine", True)
    await speak(served, name)
    gone = await fetch(served, "DELETE", f"{path}/msg_mine")
    assert gone.json["id"] == name
    assert (await fetch(served, "GET", f"{path}/msg_mine")).status == 404
    assert (await fetch(served, "DELETE", f"{path}/msg_mine")).status == 404
    shelved = await items(served, name)
    assert len(shelved) == 3
    again = await speak(served, name)
    assert again.status == 200
    assert len(await items(served, name)) == 5


async def test_erased_item_is_not_shown_to_the_model_again(served: Served) -> None:
    long = {"role": "user", "content": "word " * 300, "id": "msg_long"}
    name = await begin(served, items=[HELLO, long])
    first = (await speak(served, name)).json
    await fetch(served, "DELETE", f"/v1/conversations/{name}/items/msg_long")
    second = (await speak(served, name)).json
    assert second["usage"]["input_tokens"] < first["usage"]["input_tokens"] - 200


async def test_metadata_is_changed_and_the_conversation_erased(served: Served) -> None:
    name = await begin(served, metadata={"a": "b"})
    path = f"/v1/conversations/{name}"
    changed = await fetch(served, "POST", path, {"metadata": {"c": "d"}})
    assert changed.json["metadata"] == {"c": "d"}
    assert (await fetch(served, "GET", path)).json == changed.json
    gone = await fetch(served, "DELETE", path)
    assert gone.json == {"id": name, "object": "conversation.deleted", "deleted": True}
    for answer in (await fetch(served, "GET", path), await fetch(served, "DELETE", path)):
        assert answer.status == 404
    refused = await speak(served, name)
    assert (refused.status, refused.json["error"]["code"]) == (404, "conversation_not_found")


@pytest.mark.parametrize(
    "fields, status, param",
    [
        ({"previous_response_id": "resp_0"}, 400, "conversation"),
        ({"store": False}, 400, "store"),
        ({"conversation": "conv_0"}, 404, "conversation"),
        ({"conversation": 7}, 400, "conversation"),
        ({"conversation": "\0"}, 404, "conversation"),
        ({"conversation": "c" * 9_999}, 404, "conversation"),
        ({"input": [HELLO, {**HELLO, "id": "msg_\0"}]}, 400, "input[1].id"),
        ({"input": [{**HELLO, "id": "m" * 513}]}, 400, "input[0].id"),
        ({"input": [{"type": "item_reference", "id": "\0"}]}, 400, "input[0].id"),
    ],
)
async def test_what_a_conversation_cannot_do_is_refused(
    served: Served, fields: dict[str, Any], status: int, param: str
) -> None:
    name = await begin(served)
    body = {"model": MODEL, "input": "And you?", "conversation": name, **fields}
    answer = await fetch(served, "POST", "/v1/responses", body)
    assert (answer.status, answer.json["error"]["param"]) == (status, param)


@pytest.mark.parametrize(
    "given",
    [
        [HELLO] * 21,
        [{"type": "item_reference", "id": "x"}],
        [{"type": "compaction_trigger"}],
        [7],
        [{**HELLO, "id": "msg_\0"}],
        [{**HELLO, "id": "m" * 513}],
        [{"type": "configuration_update", "text": {"format": {"type": "text", "schema": [None]}}}],
    ],
)
async def test_items_that_no_conversation_holds_are_refused(served: Served, given: Any) -> None:
    assert (await fetch(served, "POST", "/v1/conversations", {"items": given})).status == 400
    name = await begin(served)
    path = f"/v1/conversations/{name}/items"
    assert (await fetch(served, "POST", path, {"items": given})).status == 400
    assert await items(served, name) == []


@pytest.mark.parametrize("odd", ["%00", "conv_%00", "%ED%A0%80", "c" * 9_999])
async def test_odd_names_in_a_path_are_not_found(served: Served, odd: str) -> None:
    name = await begin(served, items=[HELLO])
    for method, path in (
        ("GET", odd), ("POST", odd), ("DELETE", odd), ("GET", f"{odd}/items"), ("GET", f"{odd}/items/a"),
        ("GET", f"{name}/items/{odd}"), ("DELETE", f"{name}/items/{odd}"),
    ):  # fmt: skip
        answer = await fetch(
            served, method, f"/v1/conversations/{path}", {} if method == "POST" else None
        )
        assert answer.status in (400, 404), (method, path[:20], answer.body)
    assert len(await items(served, name)) == 1


async def test_one_response_at_a_time_speaks_in_a_conversation() -> None:
    async with serving(tps=50) as served:
        name = await begin(served)
        answers = await asyncio.gather(speak(served, name), speak(served, name))
        assert sorted(one.status for one in answers) == [200, 409]
        refused = next(one for one in answers if one.status == 409)
        assert refused.json["error"]["code"] == "conversation_locked"
        assert (await speak(served, name)).status == 200


async def test_failed_response_adds_nothing(served: Served) -> None:
    name = await begin(served)
    refused = await speak(served, name, model="nobody's")
    assert refused.status == 404
    assert await items(served, name) == []
    assert (await speak(served, name)).status == 200


async def test_conversation_survives_a_restart(tmp_path: Path) -> None:
    store = f"sqlite:///{tmp_path}/s.db"
    async with serving(store=store) as served:
        name = await begin(served, items=[HELLO])
        first = (await speak(served, name)).json
    async with serving(store=store) as served:
        second = (await speak(served, name)).json
        assert second["usage"]["input_tokens"] > first["usage"]["input_tokens"]
        assert len(await items(served, name)) == 5
