"""What is kept, and what is not: stored turns survive, unstored ones touch no disk, deleted ones are gone."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.support import (
    MODEL,
    WEATHER,
    Answer,
    Served,
    ServedProcess,
    fetch,
    served_process,
    serving,
    until,
    wire,
)

Server = Served | ServedProcess


async def post(served: Server, **fields: Any) -> Answer:
    return await fetch(served, "POST", "/v1/responses", {"model": MODEL, **fields})


async def create(served: Server, **fields: Any) -> dict[str, Any]:
    answer = await post(served, **fields)
    assert answer.status == 200, answer.body
    response: dict[str, Any] = answer.json
    return response


async def get(served: Server, response_id: str, tail: str = "") -> Answer:
    return await fetch(served, "GET", f"/v1/responses/{response_id}{tail}")


async def delete(served: Server, response_id: str) -> Answer:
    return await fetch(served, "DELETE", f"/v1/responses/{response_id}")


async def is_continuable(served: Server, response_id: str) -> bool:
    answer = await post(served, input="go on", previous_response_id=response_id, store=False)
    if answer.status != 200:
        assert answer.status == 400
        assert answer.json["error"]["code"] == "previous_response_not_found"
    return answer.status == 200


def where_is(word: str, folder: Path) -> list[str]:
    """The files of a folder that contain a word."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert files
    return [path.name for path in files if word.encode() in path.read_bytes()]


def store_in(folder: Path) -> str:
    folder.mkdir(exist_ok=True)
    return f"sqlite:///{folder / 'turns.db'}"


async def test_unstored_content_touches_no_disk_and_no_log(tmp_path: Path) -> None:
    """On every transport, in every field that carries content, for turns that work and that are refused."""
    secret, kept = "canary-secret-4711", "canary-kept-4712"
    folder = tmp_path / "store"
    tool = {**WEATHER, "description": secret}
    fields: dict[str, Any] = {
        "input": f"Tell nobody: {secret}",
        "instructions": secret,
        "metadata": {"note": secret},
        "user": secret,
        "prompt_cache_key": secret,
        "store": False,
    }
    with served_process(
        "--store", store_in(folder), "--log-level", "debug", cwd=tmp_path
    ) as served:
        assert secret in str(await create(served, **fields))
        streamed = await post(served, stream=True, **fields)
        assert secret in str(streamed.events[-1])
        assert (await post(served, **fields, temperature=9)).status == 400
        assert (await post(served, **{**fields, "model": secret})).status == 404
        assert (await post(served, **fields, previous_response_id=secret)).status == 400
        assert (await get(served, secret)).status == 404
        async with wire(served) as socket:
            await socket.send(f'{{"broken": "{secret}"')
            assert (await socket.next())["type"] == "error"
            called = (await socket.turn(**fields, tools=[tool]))["response"]
            output = {
                "type": "function_call_output",
                "call_id": called["output"][0]["call_id"],
                "output": secret,
            }
            parent = (
                await socket.turn(
                    input=[output], previous_response_id=called["id"], tools=[tool], store=False
                )
            )["response"]
            assert secret in str(parent["output"])
            # A stored child takes none of its unstored ancestors along.
            child = (await socket.turn(input=kept, previous_response_id=parent["id"]))["response"]
            assert child["store"] is True
            # While it runs, the log of the database is a file too.
            assert where_is(secret, folder) == []
        await fetch(served, "GET", "/metrics")
        assert served.stop() == 0
    assert where_is(secret, tmp_path) == []
    assert secret not in "".join(served.printed)
    # The search does find what was stored, and even that is in no log.
    assert where_is(kept, folder) == ["turns.db"]
    assert kept not in "".join(served.printed)


async def test_stored_turns_survive_a_restart_and_can_be_continued(tmp_path: Path) -> None:
    store = store_in(tmp_path / "store")
    async with serving(store=store) as served:
        first = await create(served, input="Weather?", tools=[WEATHER], metadata={"a": "b"})
        output = {
            "type": "function_call_output",
            "call_id": first["output"][0]["call_id"],
            "output": "sun",
        }
        second = await create(
            served, input=[output], tools=[WEATHER], previous_response_id=first["id"]
        )
        items = (await get(served, second["id"], "/input_items")).json
    async with serving(store=store) as served:
        assert (await get(served, first["id"])).json == first
        assert (await get(served, second["id"])).json == second
        assert (await get(served, second["id"], "/input_items")).json == items
        third = await create(
            served, input="More?", tools=[WEATHER], previous_response_id=second["id"]
        )
        assert third["usage"]["input_tokens"] > second["usage"]["input_tokens"]
        async with wire(served) as socket:
            fork = await socket.turn(input="Else?", previous_response_id=second["id"])
            assert fork["type"] == "response.completed"


async def test_deleted_turn_is_erased_and_its_descendants_end_there(tmp_path: Path) -> None:
    word = "canary-deleted-4713"
    folder = tmp_path / "store"
    store = store_in(folder)
    async with serving(store=store) as served:
        root = await create(served, input="root")
        gone = await create(served, input=word, instructions=word, previous_response_id=root["id"])
        child = await create(served, input="child", previous_response_id=gone["id"])
        grandchild = await create(served, input="grandchild", previous_response_id=child["id"])
        assert where_is(word, folder)

        answer = await delete(served, gone["id"])
        assert answer.status == 200
        assert answer.json == {"id": gone["id"], "object": "response", "deleted": True}
        for again in (await delete(served, gone["id"]), await get(served, gone["id"])):
            assert again.status == 404
            assert again.json["error"]["code"] == "not_found"
        assert (await get(served, gone["id"], "/input_items")).status == 404
        assert not await is_continuable(served, gone["id"])
        for descendant in (child, grandchild):
            assert (await get(served, descendant["id"])).json == descendant
            assert not await is_continuable(served, descendant["id"])
        assert await is_continuable(served, root["id"])
    assert where_is(word, folder) == []
    async with serving(store=store) as served:
        assert (await get(served, gone["id"])).status == 404
        assert (await get(served, grandchild["id"])).json == grandchild
        assert not await is_continuable(served, grandchild["id"])
        assert await is_continuable(served, root["id"])


async def test_deleted_turn_is_gone_from_open_connections_too(tmp_path: Path) -> None:
    """The connection's cache is memory of ours: what was erased must not come back out of it."""
    async with serving(store=store_in(tmp_path)) as served, wire(served) as socket:
        root = (await socket.turn(input="root"))["response"]
        child = (await socket.turn(input="x", previous_response_id=root["id"]))["response"]
        assert (await delete(served, root["id"])).status == 200
        for parent in (root, child):
            refused = await socket.turn(input="y", previous_response_id=parent["id"], stream_id="f")
            assert refused["type"] == "error", parent
            assert refused["error"]["code"] == "previous_response_not_found"
        assert (await get(served, child["id"])).status == 200


async def test_running_turn_cannot_be_deleted(tmp_path: Path) -> None:
    async with serving(tps=1) as served, wire(served) as socket:
        await socket.create(input="x")
        response_id = (await socket.next())["response"]["id"]
        refused = await delete(served, response_id)
        assert refused.status == 409
        assert refused.json["error"]["code"] == "conflict"


async def test_stored_child_of_an_unstored_parent_is_kept_and_ends_with_the_socket(
    tmp_path: Path,
) -> None:
    async with serving(store=store_in(tmp_path)) as served:
        async with wire(served) as socket:
            parent = (await socket.turn(input="root", store=False))["response"]
            child = (await socket.turn(input="x", previous_response_id=parent["id"]))["response"]
            assert (await get(served, parent["id"])).status == 404
            assert (await get(served, child["id"])).json == child
            # Here its ancestors are in memory.
            on = await socket.turn(input="y", previous_response_id=child["id"], store=False)
            assert on["type"] == "response.completed"
            assert not await is_continuable(served, child["id"])
        async with wire(served) as socket:
            refused = await socket.turn(input="y", previous_response_id=child["id"])
            assert refused["error"]["code"] == "previous_response_not_found"
        assert (await get(served, child["id"])).json == child


async def test_client_pages_through_input_items() -> None:
    given: list[dict[str, Any]] = [
        {"role": "user", "content": "zero"},
        {"type": "message", "role": "user", "content": "one", "id": "msg_own"},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "x", "later": [1]},
        {"role": "developer", "content": [{"type": "input_text", "text": "four"}]},
    ]
    async with serving() as served:
        parent = await create(served, input="not listed")
        response = await create(served, input=given, previous_response_id=parent["id"])

        async def page(query: str) -> dict[str, Any]:
            answer = await get(served, response["id"], f"/input_items{query}")
            assert answer.status == 200
            found: dict[str, Any] = answer.json
            assert found["object"] == "list"
            assert found["first_id"] == (found["data"][0]["id"] if found["data"] else None)
            assert found["last_id"] == (found["data"][-1]["id"] if found["data"] else None)
            return found

        whole = await page("?order=asc")
        assert whole["has_more"] is False
        ids = [item["id"] for item in whole["data"]]
        assert len(set(ids)) == 5
        assert ids[1] == "msg_own"
        for item, sent in zip(whole["data"], given, strict=True):
            shown = {"type": "message", "id": item["id"], "status": "completed", **sent}
            if isinstance(sent.get("content"), str):
                shown["content"] = [{"type": "input_text", "text": sent["content"]}]
            assert item == shown
        newest_first = await page("")
        assert [item["id"] for item in newest_first["data"]] == ids[::-1]
        walked: list[str] = []
        more = await page("?order=asc&limit=2")
        for _ in range(5):
            walked += [item["id"] for item in more["data"]]
            if not more["has_more"]:
                break
            more = await page(f"?order=asc&limit=2&after={more['last_id']}")
        assert walked == ids
        rest = await page(f"?limit=100&after={ids[1]}")
        assert [item["id"] for item in rest["data"]] == [ids[0]]
        assert (await page(f"?after={ids[0]}"))["data"] == []


@pytest.mark.parametrize("is_on_disk", [True, False])
async def test_turn_that_runs_while_its_parent_is_deleted_does_not_bring_it_back(
    is_on_disk: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long it runs, and whatever is deleted after it."""
    monkeypatch.setattr("segue.stores.erased.KEPT_S_MIN", 0.0)
    script = tmp_path / "script.json"
    script.write_text('{"turns": [{"text": "First."}, {"text": "Second", "pad_tokens": 400}]}')
    store = store_in(tmp_path / "store") if is_on_disk else "memory"
    async with serving(store=store, script=str(script), tps=400) as served:
        async with wire(served) as socket:
            other = (await socket.turn(input="other"))["response"]["id"]
            parent = (await socket.turn(input="secret"))["response"]["id"]
            await socket.create(input="go on", previous_response_id=parent)
            await socket.next()
            for name in (parent, other):
                assert (await delete(served, name)).status == 200
            child = (await socket.events())[-1]["response"]["id"]
        assert (await get(served, parent)).status == 404
        assert (await get(served, child)).status == 200
        assert not await is_continuable(served, parent)
        assert not await is_continuable(served, child)


async def test_nobody_is_told_of_an_end_that_is_not_on_the_disk(tmp_path: Path) -> None:
    """Neither whoever asks for a response that has just been finished: its save may still fail, or be lost."""
    path = tmp_path / "turns.db"
    async with serving(store=f"sqlite:///{path}", tps=20) as served:
        begun = await create(served, input="x", background=True)
        running = served.app.runner.registry.find("local", begun["id"])
        assert running is not None
        await until(lambda: running.visible.status == "in_progress")
        with closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            await until(lambda: running.response.status == "completed")
            shown = (await get(served, begun["id"])).json
            assert (shown["status"], shown["output"], shown["usage"]) == ("in_progress", [], None)
            other.execute("ROLLBACK")
        await until(lambda: running.is_ended)
        assert (await get(served, begun["id"])).json["status"] == "completed"
