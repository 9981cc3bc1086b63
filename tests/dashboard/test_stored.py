"""The list of stored conversations: the caller's own, a page at a time, and searched."""

from pathlib import Path
from typing import Any

import pytest

import segue_dashboard.stored as stored
from segue.accounts.hashes import issue_key
from tests.support import MODEL, Served, fetch, serving

STORED = "/dashboard/stored"


async def say(served: Served, text: Any, key: str, **more: Any) -> str:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    body = {"model": MODEL, "input": text, **more}
    answer = await fetch(served, "POST", "/v1/responses", body, headers)
    assert answer.status == 200
    return str(answer.json["id"])


async def listed(served: Served, query: str = "", key: str = "") -> tuple[list[str], str | None]:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    answer = await fetch(served, "GET", f"{STORED}{query}", None, headers)
    assert answer.status == 200
    return [row["id"] for row in answer.json["data"]], answer.json["next"]


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
async def test_conversations_are_listed_by_their_last_response(kind: str, tmp_path: Path) -> None:
    store = "memory" if kind == "memory" else f"sqlite:///{tmp_path / 'a.db'}"
    async with serving(store=store) as served:
        first = await say(served, "A fruit?", "")
        second = await say(served, "And a vegetable?", "", previous_response_id=first)
        third = await say(
            served, [{"role": "user", "content": [{"type": "input_text", "text": "A TREE?"}]}], ""
        )
        await say(served, "Not kept.", "", store=False)
        assert await listed(served) == ([third, second], None)
        # A search looks at every response, whatever the case of its letters.
        assert await listed(served, "?q=FRUIT") == ([first], None)
        assert await listed(served, "?q=a%20tree") == ([third], None)
        assert await listed(served, f"?q={second}") == ([second], None)
        assert await listed(served, "?q=cellar") == ([], None)
        # What a tool said stands where nobody has asked anything.
        answered = [
            {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "twelve files"},
        ]
        tool = await say(served, answered, "")
        row = (await fetch(served, "GET", f"{STORED}?q=twelve", None)).json["data"][0]
        assert (row["id"], row["question"]) == (tool, "[function_call_output] twelve files")
        row = (await fetch(served, "GET", f"{STORED}?q={second}", None)).json["data"][0]
        assert row["question"] == "And a vegetable?"
        assert "And a vegetable?" in row["answer"]
        assert row["model"] == MODEL
        assert row["input_tokens"] > 0


async def test_pages_meet_without_a_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored, "PAGE_ROWS", 2)
    monkeypatch.setattr(stored, "SEARCHED_MAX", 3)
    async with serving(store="memory") as served:
        ids = [await say(served, f"number {number % 2}", "") for number in range(5)]
        for query, wanted in (("", ids), ("q=number%200", ids[::2])):
            found: list[str] = []
            before: str | None = ""
            while before is not None:
                page, before = await listed(served, f"?{query}&before={before}")
                found += page
            assert found == wanted[::-1]


async def test_nobody_sees_the_conversations_of_others() -> None:
    async with serving(auth="keys", store="memory") as served:
        app = served.app

        async def key(name: str, *scopes: str) -> str:
            made = await issue_key(app.state.store.keys, app.state.hashes, name, name, scopes)
            return made[1]

        ada, bob = await key("ada", "responses"), await key("bob", "responses", "dashboard")
        looker = await key("eve", "dashboard")
        hers = await say(served, "A fruit?", ada)
        assert await listed(served, key=ada) == ([hers], None)
        assert await listed(served, key=bob) == ([], None)
        assert await listed(served, "?q=fruit", key=bob) == ([], None)
        for secret, status in ((looker, 403), ("", 401)):
            headers = {"Authorization": f"Bearer {secret}"} if secret else {}
            assert (await fetch(served, "GET", STORED, None, headers)).status == status
