"""A history that has become too long goes on from a summary, by each of the three ways (docs/protocol.md 1.2, 6.12)."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.events import check_turn
from tests.support import MODEL, WEATHER, Served, fetch, serving, wire

STORY = "The river went on and on and nobody knew where it ended. " * 40
SUMMARY = "They spoke of a river; the code word is heron."
CALL = {"name": "get_weather", "arguments": {"city": "Paris"}}


@asynccontextmanager
async def scripted(tmp_path: Path, *texts: str, **flags: Any) -> AsyncIterator[Served]:
    script = tmp_path / "script.json"
    script.write_text(json.dumps({"turns": [{"text": text} for text in texts]}))
    async with serving(script=str(script), context_tokens=4_000, **flags) as served:
        yield served


def input_tokens(last: dict[str, Any]) -> int:
    found: int = last["response"]["usage"]["input_tokens"]
    return found


@pytest.mark.parametrize("store", [True, False])
async def test_trigger_compacts_a_chain_which_goes_on(tmp_path: Path, store: bool) -> None:
    async with (
        scripted(tmp_path, STORY, STORY, SUMMARY, "Heron.", check_rendering=True) as served,
        wire(served) as socket,
    ):
        last = await socket.turn(input="A story.", instructions="Be kind.", store=store)
        last = await socket.turn(
            previous_response_id=last["response"]["id"],
            input="More.",
            instructions="Be kind.",
            store=store,
        )
        before = input_tokens(last)
        await socket.create(
            previous_response_id=last["response"]["id"],
            input=[{"type": "compaction_trigger"}],
            instructions="Be kind.",
            store=store,
        )
        events = await socket.events()
        response = check_turn(events)
        assert [item["type"] for item in response["output"]] == ["compaction"]
        assert "response.compaction.compacting" in {one["type"] for one in events}
        assert SUMMARY not in json.dumps(events)
        last = await socket.turn(
            previous_response_id=response["id"],
            input="The code word?",
            instructions="Be kind.",
            store=store,
        )
        assert last["type"] == "response.completed"
        assert input_tokens(last) < before / 2


async def test_compacted_chain_is_continued_from_the_store_as_from_memory(tmp_path: Path) -> None:
    store = f"sqlite:///{tmp_path}/s.db"
    used = []
    for connections in (1, 2):
        async with (
            scripted(tmp_path, STORY, SUMMARY, "Heron.", store=store) as served,
            wire(served) as socket,
        ):
            last = await socket.turn(input="A story.")
            compacted = await socket.turn(
                previous_response_id=last["response"]["id"],
                input=[{"type": "compaction_trigger"}],
            )
            if connections == 1:
                last = await socket.turn(
                    previous_response_id=compacted["response"]["id"], input="The code word?"
                )
        if connections == 2:
            async with (
                scripted(tmp_path, STORY, SUMMARY, "Heron.", store=store) as served,
                wire(served) as socket,
            ):
                last = await socket.turn(
                    previous_response_id=compacted["response"]["id"], input="The code word?"
                )
        used.append(input_tokens(last))
    assert used[0] == used[1]


async def test_threshold_compacts_inside_a_response(tmp_path: Path) -> None:
    async with (
        scripted(
            tmp_path, STORY, STORY, SUMMARY, "Heron.", "Again.", check_rendering=True
        ) as served,
        wire(served) as socket,
    ):
        manage = [{"type": "compaction", "compact_threshold": 1_000}]
        last = await socket.turn(input="A story.", context_management=manage)
        last = await socket.turn(
            previous_response_id=last["response"]["id"], input="More.", context_management=manage
        )
        assert [one["type"] for one in last["response"]["output"]] == ["message"]
        await socket.create(
            previous_response_id=last["response"]["id"],
            input="The code word?",
            context_management=manage,
        )
        response = check_turn(await socket.events())
        assert [one["type"] for one in response["output"]] == ["compaction", "message"]
        last = await socket.turn(
            previous_response_id=response["id"], input="Again?", context_management=manage
        )
        assert [one["type"] for one in last["response"]["output"]] == ["message"]
        assert input_tokens(last) < 500


async def test_limit_of_the_client_counts_its_answer_and_no_summary(tmp_path: Path) -> None:
    # The script tells the same for the summary and behind it.
    async with scripted(tmp_path, SUMMARY) as served, wire(served) as socket:
        await socket.create(
            input=STORY * 3,
            context_management=[{"type": "compaction", "compact_threshold": 1_000}],
            max_output_tokens=20,
        )
        response = check_turn(await socket.events())
    assert response["status"] == "completed"
    assert response["output"][-1]["content"][0]["text"] == SUMMARY
    assert response["usage"]["output_tokens"] > 20


async def test_chain_outgrows_its_context_and_goes_on_compacted(tmp_path: Path) -> None:
    texts = [STORY] * 3 + ["…"]
    async with scripted(tmp_path, *texts) as served, wire(served) as socket:
        manage = [{"type": "compaction", "compact_threshold": 2_000}]
        last = await socket.turn(input="A story.", context_management=manage)
        compactions = 0
        for _ in range(8):
            last = await socket.turn(
                previous_response_id=last["response"]["id"],
                input="More of it, please. " + STORY[:1500],
                context_management=manage,
            )
            assert last["type"] == "response.completed", last
            compactions += last["response"]["output"][0]["type"] == "compaction"
        assert compactions


async def test_compaction_makes_room_for_many_turns(tmp_path: Path) -> None:
    manage = [{"type": "compaction", "compact_threshold": 1_000}]
    async with scripted(tmp_path, "Short.") as served, wire(served) as socket:
        last, compacted = None, []
        for number in range(16):
            asked = f"Question {number}: " + "please look at this thing " * 20
            end = await socket.turn(
                input=asked, previous_response_id=last, store=False, context_management=manage
            )
            last = end["response"]["id"]
            if end["response"]["output"][0]["type"] == "compaction":
                compacted.append(number)
            elif compacted[-1:] == [number - 1]:
                assert input_tokens(end) < 500
    assert compacted
    assert all(later - before >= 4 for before, later in pairwise(compacted))


@pytest.mark.parametrize("transport", ["http", "websocket"])
async def test_window_of_the_endpoint_begins_a_new_chain(tmp_path: Path, transport: str) -> None:
    async with scripted(tmp_path, STORY, SUMMARY, "Heron.") as served, wire(served) as socket:
        first = await socket.turn(input="A story.")
        body = {"model": MODEL, "previous_response_id": first["response"]["id"], "input": "Why?"}
        answer = await fetch(served, "POST", "/v1/responses/compact", body)
        assert answer.status == 200, answer.body
        window = answer.json
        assert window["object"] == "response.compaction"
        kinds = [item["type"] for item in window["output"]]
        assert kinds == ["message", "message", "compaction"]
        assert all(item["id"] for item in window["output"])
        assert window["usage"]["output_tokens"] > 0
        given = [*window["output"], {"role": "user", "content": "The code word?"}]
        if transport == "websocket":
            last = (await socket.turn(input=given, store=False))["response"]
        else:
            last = (
                await fetch(served, "POST", "/v1/responses", {"model": MODEL, "input": given})
            ).json
        assert last["status"] == "completed"
        assert last["usage"]["input_tokens"] < first["response"]["usage"]["output_tokens"]


async def test_chains_compaction_that_is_resent_hides_what_is_before_it(tmp_path: Path) -> None:
    """A client that keeps its history itself may send all of it: the model sees what follows the compaction."""
    async with scripted(tmp_path, STORY, SUMMARY, "Heron.") as served, wire(served) as socket:
        first = await socket.turn(input="A story.")
        second = await socket.turn(
            previous_response_id=first["response"]["id"], input=[{"type": "compaction_trigger"}]
        )
        given = [
            {"role": "user", "content": "A story."},
            *first["response"]["output"],
            *second["response"]["output"],
            {"role": "user", "content": "The code word?"},
        ]
        last = await socket.turn(input=given)
        assert last["type"] == "response.completed"
        assert input_tokens(last) < 300
        page = await fetch(
            served, "GET", f"/v1/responses/{last['response']['id']}/input_items?order=asc"
        )
        kinds = [item["type"] for item in page.json["data"]]
        assert kinds == ["message", "message", "compaction", "message"]


async def test_foreign_compaction_is_refused(tmp_path: Path) -> None:
    async with scripted(tmp_path, "x") as served, wire(served) as socket:
        given = [
            {"type": "compaction", "encrypted_content": "AAAA"},
            {"role": "user", "content": "?"},
        ]
        refused = await socket.turn(input=given)
        assert refused["error"]["code"] == "invalid_encrypted_content"


async def test_compact_needs_a_model(tmp_path: Path) -> None:
    async with scripted(tmp_path, "x") as served:
        answer = await fetch(served, "POST", "/v1/responses/compact", {"input": "Hello."})
        assert answer.status == 400


async def test_reasoning_comes_back_sealed_and_is_read_again(tmp_path: Path) -> None:
    script = tmp_path / "r.json"
    script.write_text(
        json.dumps(
            {"turns": [{"reasoning": "I think of a heron.", "calls": [CALL]}, {"text": "!"}]}
        )
    )
    async with serving(script=str(script), dialect="qwen3") as served, wire(served) as socket:
        last = await socket.turn(input="Think.", tools=[WEATHER], store=False)
        thought, call = last["response"]["output"]
        assert thought["encrypted_content"]
        assert "heron" not in thought["encrypted_content"]
        output = {"type": "function_call_output", "call_id": call["call_id"], "output": "sun"}
        sealed = {key: thought[key] for key in ("id", "type", "summary", "encrypted_content")}
        used = []
        for shown in (thought, sealed, {**sealed, "encrypted_content": "AAAA"}):
            given = [{"role": "user", "content": "Think."}, shown, call, output]
            last = await socket.turn(input=given, tools=[WEATHER], store=False)
            used.append(input_tokens(last))
        assert used[0] == used[1] > used[2]
