"""Files that clients keep on the server: uploaded, listed, read, used in an input, deleted; each its owner's."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from segue.accounts.hashes import issue_key
from tests.documents.papers import pdf
from tests.files.test_depot import files_in
from tests.files.test_form import form
from tests.postgres import PostgresServer
from tests.support import MODEL, Answer, Served, fetch, serving, wire

FORM = {"Content-Type": "multipart/form-data; boundary=xyz"}
POEM = b"The fox is red. " * 40


def body(
    data: bytes = POEM, name: str = "poem.txt", purpose: str = "user_data", **more: str
) -> bytes:
    fields = [(f'{key}"', value.encode()) for key, value in more.items()]
    return form(('purpose"', purpose.encode()), *fields, (f'file"; filename="{name}"', data))


async def upload(
    served: Served,
    data: bytes = POEM,
    name: str = "poem.txt",
    headers: Mapping[str, str] = {},
    **more: str,
) -> dict[str, Any]:
    answer = await fetch(served, "POST", "/v1/files", body(data, name, **more), {**FORM, **headers})
    assert answer.status == 200, answer.body
    return answer.json


@asynccontextmanager
async def kept(kind: str, folder: Path) -> AsyncIterator[dict[str, object]]:
    yield {"store": "memory"} if kind == "memory" else {"store": f"sqlite:///{folder / 'a.db'}"}


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
async def test_file_is_kept_listed_read_and_deleted(kind: str, tmp_path: Path) -> None:
    async with kept(kind, tmp_path) as flags, serving(**flags) as served:
        made = await upload(served)
        assert {**made, "id": "", "created_at": 0} == {
            "id": "",
            "object": "file",
            "bytes": len(POEM),
            "created_at": 0,
            "filename": "poem.txt",
            "purpose": "user_data",
            "status": "processed",
        }
        path = f"/v1/files/{made['id']}"
        assert (await fetch(served, "GET", path)).json == made
        content = await fetch(served, "GET", path + "/content")
        assert content.body == POEM
        assert content.headers["content-disposition"] == 'attachment; filename="poem.txt"'
        other = await upload(served, b"x", "b.txt", purpose="vision")
        listed = (await fetch(served, "GET", "/v1/files")).json
        assert {row["id"] for row in listed["data"]} == {made["id"], other["id"]}
        assert listed["has_more"] is False
        pages = await fetch(served, "GET", "/v1/files?purpose=vision&limit=1&order=asc")
        assert [row["id"] for row in pages.json["data"]] == [other["id"]]
        deleted = await fetch(served, "DELETE", path)
        assert deleted.json == {"id": made["id"], "object": "file", "deleted": True}
        for verb, at in (("GET", path), ("GET", path + "/content"), ("DELETE", path)):
            assert (await fetch(served, verb, at)).status == 404
    left = [path.read_bytes() for path in files_in(tmp_path)]
    assert not any(POEM[:30] in data for data in left), "deleted means gone"


async def test_list_goes_on_after_a_file_in_both_orders() -> None:
    async with serving() as served:
        ids = [(await upload(served, b"x", f"{n}.txt"))["id"] for n in range(5)]
        listed = (await fetch(served, "GET", "/v1/files?order=asc")).json["data"]
        order = [row["id"] for row in listed]
        assert {*order} == {*ids}
        page = (await fetch(served, "GET", f"/v1/files?order=asc&limit=2&after={order[1]}")).json
        assert ([row["id"] for row in page["data"]], page["has_more"]) == (order[2:4], True)
        page = (await fetch(served, "GET", f"/v1/files?limit=9&after={order[1]}")).json
        assert ([row["id"] for row in page["data"]], page["has_more"]) == (order[:1], False)
        for query in ("limit=0", "limit=10001", "order=up", "after=file-x"):
            assert (await fetch(served, "GET", f"/v1/files?{query}")).status == 400


@pytest.mark.parametrize(
    "more, param",
    [
        ({"purpose": "art"}, "purpose"),
        ({"purpose": ""}, "purpose"),
        ({"data": b""}, "file"),
        ({"expires_after[anchor]": "never"}, "expires_after[anchor]"),
        (
            {"expires_after[anchor]": "created_at", "expires_after[seconds]": "9"},
            "expires_after[seconds]",
        ),
    ],
)
async def test_bad_upload_is_refused_and_leaves_nothing(
    more: dict[str, Any], param: str, tmp_path: Path
) -> None:
    async with serving(files_dir=str(tmp_path / "files")) as served:
        answer = await fetch(served, "POST", "/v1/files", body(**more), FORM)
        assert (answer.status, answer.json["error"]["param"]) == (400, param)
        assert (await fetch(served, "GET", "/v1/files")).json["data"] == []
    assert files_in(tmp_path) == []


async def test_upload_that_is_too_large_or_cut_off_leaves_nothing(tmp_path: Path) -> None:
    flags = {"files_dir": str(tmp_path / "files"), "file_bytes_max": 1_000_000}
    async with serving(**flags) as served:
        answer = await fetch(served, "POST", "/v1/files", body(b"x" * 1_000_001), FORM)
        assert (answer.status, answer.json["error"]["code"]) == (413, "payload_too_large")
        await upload(served, b"y" * 1_000_000)
        _, writer = await asyncio.open_connection("127.0.0.1", served.port)
        head = "POST /v1/files HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 900000\r\n"
        writer.write(f"{head}Content-Type: {FORM['Content-Type']}\r\n\r\n".encode())
        writer.write(body(b"z" * 800_000)[:700_000])
        await writer.drain()
        writer.close()
        await writer.wait_closed()
        async with asyncio.timeout(10):
            while [*(tmp_path / "files" / "uploads").iterdir()]:
                await fetch(served, "GET", "/health")
        assert len((await fetch(served, "GET", "/v1/files")).json["data"]) == 1


async def test_owner_has_a_quota_and_is_told_what_to_do() -> None:
    async with serving(owner_files_bytes_max=1_000) as served:
        made = await upload(served, b"x" * 900)
        answer = await fetch(served, "POST", "/v1/files", body(b"x" * 200), FORM)
        assert (answer.status, answer.json["error"]["code"]) == (413, "file_quota_exceeded")
        assert "Delete some first" in answer.json["error"]["message"]
        await fetch(served, "DELETE", f"/v1/files/{made['id']}")
        await upload(served, b"x" * 200)


async def reading(served: Served, *parts: dict[str, Any], **fields: Any) -> Answer:
    asked = {"model": MODEL, "input": [{"role": "user", "content": [*parts]}], **fields}
    return await fetch(served, "POST", "/v1/responses", asked)


@pytest.mark.parametrize("name, data", [("poem.txt", POEM), ("poem.pdf", pdf(POEM.decode()))])
async def test_model_reads_an_uploaded_file_as_if_it_had_come_inline(
    name: str, data: bytes, tmp_path: Path
) -> None:
    flags = {"store": f"sqlite:///{tmp_path / 'a.db'}", "check_rendering": True}
    async with serving(**flags) as served:
        made = await upload(served, data, name)
        answer = await reading(served, {"type": "input_file", "file_id": made["id"]})
        used = answer.json["usage"]["input_tokens"]
        assert used > 120
        await fetch(served, "DELETE", f"/v1/files/{made['id']}")
        # The history has what was read, whatever became of the file.
        again = {
            "model": MODEL,
            "input": "And?",
            "previous_response_id": answer.json["id"],
        }
        ended = await fetch(served, "POST", "/v1/responses", again)
        assert ended.json["usage"]["input_tokens"] > used
        gone = await reading(served, {"type": "input_file", "file_id": made["id"]})
        assert (gone.status, gone.json["error"]["code"]) == (404, "file_not_found")
        assert gone.json["error"]["param"] == "input[0].content[0].file_id"


async def test_image_by_its_file_is_described_where_the_model_cannot_see() -> None:
    async with serving() as served, wire(served) as socket:
        made = await upload(served, b"\x89PNG\r\n\x1a\n" + b"1" * 50, "fox.png", purpose="vision")
        part = {"type": "input_image", "file_id": made["id"]}
        assert (await reading(served, part)).status == 200
        await socket.create(input=[{"role": "user", "content": [part]}], store=False)
        assert (await socket.events())[-1]["type"] == "response.completed"
        text = await upload(served)
        refused = await reading(served, {"type": "input_image", "file_id": text["id"]})
        assert (refused.status, refused.json["error"]["code"]) == (400, "invalid_value")


async def test_file_of_another_owner_and_an_absent_one_are_the_same_to_the_byte(
    tmp_path: Path,
) -> None:
    async with serving(auth="keys", store=f"sqlite:///{tmp_path / 'a.db'}") as served:
        state = served.app.state
        issued = [
            await issue_key(state.store.keys, state.hashes, name, name) for name in ("ada", "bob")
        ]
        ada, bob = ({"Authorization": f"Bearer {secret}"} for _, secret in issued)
        made = await upload(served, headers=ada)
        path = f"/v1/files/{made['id']}"
        assert (await fetch(served, "GET", path, headers=ada)).status == 200
        absent = "file-" + "0" * 32
        for verb, rest in (("GET", ""), ("GET", "/content"), ("DELETE", "")):
            foreign = await fetch(served, verb, path + rest, headers=bob)
            missing = await fetch(served, verb, f"/v1/files/{absent}{rest}", headers=bob)
            assert foreign.status == missing.status == 404
            assert foreign.body == missing.body.replace(absent.encode(), made["id"].encode())
        assert (await fetch(served, "GET", "/v1/files", headers=bob)).json["data"] == []
        used = {"type": "input_file", "file_id": made["id"]}
        asked = json.dumps({"model": MODEL, "input": [{"role": "user", "content": [used]}]})
        answer = await fetch(served, "POST", "/v1/responses", asked.encode(), bob)
        assert (answer.status, answer.json["error"]["code"]) == (404, "file_not_found")


async def test_file_outlives_a_restart(tmp_path: Path) -> None:
    flags = {"store": f"sqlite:///{tmp_path / 'a.db'}"}
    async with serving(**flags) as served:
        made = await upload(served)
    async with serving(**flags) as served:
        assert (await fetch(served, "GET", f"/v1/files/{made['id']}/content")).body == POEM


async def test_machines_that_share_a_database_share_files_or_say_what_is_missing(
    postgres: PostgresServer, tmp_path: Path
) -> None:
    store = await postgres.make_database()
    async with serving(store=store) as served:
        for answer in (
            await fetch(served, "POST", "/v1/files", body(), FORM),
            await fetch(served, "GET", "/v1/files"),
            await reading(served, {"type": "input_file", "file_id": "file-1"}),
        ):
            assert (answer.status, answer.json["error"]["code"]) == (501, "files_not_set_up")
            assert "--files-dir" in answer.json["error"]["message"]
    flags = {"store": store, "files_dir": str(tmp_path / "shared")}
    async with serving(**flags) as one, serving(**flags) as other:
        made = await upload(one)
        assert (await fetch(other, "GET", f"/v1/files/{made['id']}/content")).body == POEM
        assert (await fetch(other, "DELETE", f"/v1/files/{made['id']}")).status == 200
        assert (await fetch(one, "GET", f"/v1/files/{made['id']}")).status == 404
