"""The Skills API over real sockets, and skills that are kept in the containers of shells."""

from __future__ import annotations

import asyncio
import json
import zipfile
from base64 import b64encode
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest

from segue.accounts.account import LOCAL
from segue_cli import cli
from segue_cli.commands.archive import read_backup
from tests.bundles.bad import BAD, BAD_FRONT, FRONT, GOOD, MIB, manifest, packed
from tests.clients.outside import run_python
from tests.keepers import (
    FLAGS,
    containers_are_gone,
    keeper_of,
    keeper_of_the_file,
    sandboxes_can_be_made,
)
from tests.scenarios.test_shell import DONE, run, shell_with
from tests.scenarios.test_tool_keys import key_for
from tests.scenarios.test_tools import scripted
from tests.support import MODEL, Answer, Served, fetch, served_process, wire

__all__ = ["containers_are_gone", "keeper_of_the_file", "sandboxes_can_be_made"]

Body = dict[str, Any]
TYPE = {"Content-Type": "multipart/form-data; boundary=x"}


def form(*files: tuple[bytes, bytes], field: bytes = b"files[]", default: bytes = b"") -> bytes:
    parts = [
        b'--x\r\nContent-Disposition: form-data; name="%s"; filename="%s"\r\n\r\n%s\r\n'
        % (field, name, data)
        for name, data in files
    ]
    if default:
        parts.append(
            b'--x\r\nContent-Disposition: form-data; name="default"\r\n\r\n' + default + b"\r\n"
        )
    return b"".join(parts) + b"--x--\r\n"


def zipped(data: bytes) -> bytes:
    return form((b"skill.zip", data), field=b"files")


async def post(served: Served, path: str, body: bytes, headers: Body | None = None) -> Answer:
    return await fetch(served, "POST", path, body, headers={**TYPE, **(headers or {})})


async def kept(served: Served, words: str = "Read.", headers: Body | None = None) -> Body:
    body = zipped(packed({"csv/SKILL.md": FRONT + words.encode()}))
    answer = await post(served, "/v1/skills", body, headers)
    assert answer.status == 200, answer.body
    return answer.json


def stored_zips(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("skill-*") if path.is_file()]


# --- the API --------------------------------------------------------------------------------------------


async def test_skill_is_kept_with_its_versions_and_deleted(tmp_path: Path) -> None:
    async with scripted(tmp_path, DONE, files_dir=str(tmp_path / "files"), **FLAGS) as served:
        files = [(path.encode(), data) for path, data in GOOD.items()]
        made = (await post(served, "/v1/skills", form(*files))).json
        assert made.pop("created_at") > 1_700_000_000
        name = made.pop("id")
        assert name.startswith("skill_")
        assert made == {
            "object": "skill",
            "name": "csv-insights",
            "description": "Sums of CSV files.",
            "default_version": "1",
            "latest_version": "1",
        }
        path = f"/v1/skills/{name}"
        content = await fetch(served, "GET", f"{path}/content")
        assert zipfile.ZipFile(BytesIO(content.body)).read("csv/scripts/a.py") == b"print(1)"
        other = packed({"SKILL.md": FRONT.replace(b"Sums", b"More sums")})
        second = await post(served, f"{path}/versions", zipped(other))
        assert second.json["object"] == "skill.version"
        assert (second.json["skill_id"], second.json["version"]) == (name, "2")
        flagged = form((b"s.zip", other), field=b"files", default=b"true")
        assert (await post(served, f"{path}/versions", flagged)).json["version"] == "3"
        skill = (await fetch(served, "GET", path)).json
        assert (skill["default_version"], skill["latest_version"]) == ("3", "3")
        assert skill["description"] == "More sums of CSV files."
        listed = (await fetch(served, "GET", f"{path}/versions?order=asc&limit=2")).json
        assert [one["version"] for one in listed["data"]] == ["1", "2"]
        assert listed["has_more"]
        rest = (
            await fetch(served, "GET", f"{path}/versions?order=asc&after={listed['last_id']}")
        ).json
        assert [one["version"] for one in rest["data"]] == ["3"]
        for wanted in ("2", 2):
            chosen = await fetch(served, "POST", path, {"default_version": wanted})
            assert chosen.json["default_version"] == "2"
        assert (await fetch(served, "GET", f"{path}/versions/2/content")).body == other
        assert (await fetch(served, "GET", f"{path}/versions/latest")).json["version"] == "3"
        # The default stays; another version goes, with its bytes, and its number does not come back.
        refused = await fetch(served, "DELETE", f"{path}/versions/2")
        assert (refused.status, refused.json["error"]["code"]) == (400, "default_version")
        gone = (await fetch(served, "DELETE", f"{path}/versions/3")).json
        assert (gone["object"], gone["version"], gone["deleted"]) == (
            "skill.version.deleted",
            "3",
            True,
        )
        assert len(stored_zips(tmp_path)) == 2
        assert (await post(served, f"{path}/versions", zipped(other))).json["version"] == "4"
        for missing in ("3", "9", "x", "02", "-1", "9" * 40):
            answer = await fetch(served, "GET", f"{path}/versions/{missing}")
            assert (answer.status, answer.json["error"]["code"]) == (404, "skill_not_found")
        for wanted in ("1", "4", "2"):
            assert (await fetch(served, "DELETE", f"{path}/versions/{wanted}")).status == 200
        # With its last version the skill is gone.
        assert (await fetch(served, "GET", path)).status == 404
        again = (await kept(served))["id"]
        assert (await fetch(served, "DELETE", f"/v1/skills/{again}")).json == {
            "id": again,
            "object": "skill.deleted",
            "deleted": True,
        }
        assert (await fetch(served, "GET", "/v1/skills")).json["data"] == []
        assert stored_zips(tmp_path) == []


async def test_lists_have_pages_and_bad_requests_are_refused(tmp_path: Path) -> None:
    async with scripted(tmp_path, DONE, **FLAGS) as served:
        names = [(await kept(served))["id"] for _ in range(3)]
        page = (await fetch(served, "GET", "/v1/skills?limit=2")).json
        assert page["has_more"]
        rest = (await fetch(served, "GET", f"/v1/skills?limit=2&after={page['last_id']}")).json
        assert sorted(one["id"] for one in (*page["data"], *rest["data"])) == sorted(names)
        oldest = (await fetch(served, "GET", "/v1/skills?order=asc")).json
        assert oldest["data"] == [*page["data"], *rest["data"]][::-1]
        for query in ("limit=0", "limit=101", "order=up", "after=skill_x"):
            assert (await fetch(served, "GET", f"/v1/skills?{query}")).status == 400
        for body in ({}, {"default_version": None}, {"default_version": []}):
            assert (await fetch(served, "POST", f"/v1/skills/{names[0]}", body)).status == 400
        bad = await post(
            served, f"/v1/skills/{names[0]}/versions", form((b"SKILL.md", FRONT), default=b"maybe")
        )
        assert (bad.status, bad.json["error"]["param"]) == (400, "default")


BAD_FORMS = [
    (b"", "last boundary"),
    (form(), "files"),
    (form((b"a/SKILL.md", FRONT))[:-8], "last boundary"),
    (form((b"a/SKILL.md", FRONT), (b"a/SKILL.md", FRONT)), "same name"),
    (form((b"a/SKILL.md", FRONT), (b"a/skill.MD", FRONT)), "same name"),
    (form((b"a/SKILL.md", FRONT), (b"../up", b"")), "leads elsewhere"),
    (form((b"a/SKILL.md", FRONT), (b"/etc/passwd", b"")), "leads elsewhere"),
    (form((b"a/SKILL.md", FRONT), (b"", b"")), "leads elsewhere"),
    (form((b"a/SKILL.md", FRONT), (b"a/\xff\xfe", b"")), "not UTF-8"),
    (form((b"a/SKILL.md", FRONT), (b"b/x", b"")), "one folder"),
    (form((b"a/SKILL.md", FRONT), (b"a", b"")), "same name"),
    (form((b"a/SKILL.md", FRONT), *[(b"a/%d" % n, b"") for n in range(500)]), "500 files"),
    (form((b"a/SKILL.md", FRONT), (b"a/b", bytes(26 << 20))), "a file has more"),
    (form((b"a/SKILL.md", b"No front.")), "front matter"),
    (form((b"a/SKILL.md", FRONT), field=b"file"), "files"),
]


async def test_bad_form_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    async with scripted(tmp_path, DONE, files_dir=str(tmp_path / "files"), **FLAGS) as served:
        for body, words in BAD_FORMS:
            refused = await post(served, "/v1/skills", body)
            assert refused.status == 400, refused.body
            assert words in refused.json["error"]["message"]
        assert stored_zips(tmp_path) == []
        assert (await fetch(served, "GET", "/v1/skills")).json["data"] == []
        # Whole and too large, and in another shape than a form.
        large = await post(served, "/v1/skills", zipped(bytes(53 << 20)))
        assert large.status == 413
        packed_form = await post(served, "/v1/skills", zipped(b"x"), {"Content-Encoding": "gzip"})
        assert packed_form.status == 415
        assert (await fetch(served, "POST", "/v1/skills", {"files": []})).status == 400


async def test_bad_bundles_are_refused_on_both_ways_and_nothing_is_written(tmp_path: Path) -> None:
    async with scripted(tmp_path, DONE, files_dir=str(tmp_path / "files"), **FLAGS) as served:
        for name, (make, words) in BAD.items():
            data = make()
            if len(data) > 10 * MIB:
                continue
            refused = await post(served, "/v1/skills", zipped(data))
            assert (refused.status, refused.json["error"]["code"]) == (400, "invalid_skill"), name
            assert words in refused.json["error"]["message"]
            source = {"type": "base64", "data": b64encode(data).decode()}
            skill = {"type": "inline", "name": "a", "description": "b", "source": source}
            inline = {"model": MODEL, "input": "Go", "tools": [shell_with(skill)]}
            for path, body in (
                ("/v1/responses", inline),
                ("/v1/containers", {"name": "x", "skills": [skill]}),
            ):
                refused = await fetch(served, "POST", path, body)
                assert (refused.status, refused.json["error"]["code"]) == (400, "invalid_skill"), (
                    name
                )
        for name, (text, words) in BAD_FRONT.items():
            refused = await post(served, "/v1/skills", zipped(manifest(text)))
            assert (refused.status, refused.json["error"]["code"]) == (400, "invalid_skill"), name
            assert words in refused.json["error"]["message"]
        assert await keeper_of(served).list_all(LOCAL) == []
        assert [path for path in (tmp_path / "files").rglob("*") if path.is_file()] == []


async def test_foreign_skill_and_an_absent_one_are_the_same_to_the_byte(tmp_path: Path) -> None:
    async with scripted(tmp_path, DONE, auth="keys", **FLAGS) as served:
        mine = await key_for(served, "shell", "skills")
        yours = await key_for(served, "shell", "skills", owner="you")
        other = await key_for(served, "shell", owner="plain")
        skill = (await kept(served, headers=mine))["id"]
        absent = f"skill_{'0' * 32}"
        for verb, path in (
            ("GET", "{}"),
            ("DELETE", "{}"),
            ("GET", "{}/content"),
            ("GET", "{}/versions"),
            ("GET", "{}/versions/1"),
            ("DELETE", "{}/versions/1"),
            ("GET", "{}/versions/1/content"),
            ("POST", "{}"),
        ):
            body = {"default_version": "1"} if verb == "POST" else None
            answers = []
            for name in (skill, absent):
                url = f"/v1/skills/{path.format(name)}"
                answer = await fetch(served, verb, url, body, headers=yours)
                answers.append((answer.status, answer.body.replace(name.encode(), b"ID")))
            assert answers[0] == answers[1]
            assert answers[0][0] == 404
        assert (await fetch(served, "GET", "/v1/skills", headers=yours)).json["data"] == []
        assert (await fetch(served, "GET", "/v1/skills", headers=other)).status == 403
        refs = [{"type": "skill_reference", "skill_id": name} for name in (skill, absent)]
        for ref in refs:
            asked = {"model": MODEL, "input": "Go", "tools": [shell_with(ref)]}
            refused = await fetch(served, "POST", "/v1/responses", asked, headers=yours)
            assert (refused.status, refused.json["error"]["code"]) == (404, "skill_not_found")
            forbidden = await fetch(served, "POST", "/v1/responses", asked, headers=other)
            assert forbidden.status == 403


async def test_owner_has_a_quota_and_is_told_what_to_do(tmp_path: Path) -> None:
    flags = {**FLAGS, "owner_files_bytes_max": 300}
    async with scripted(tmp_path, DONE, files_dir=str(tmp_path / "files"), **flags) as served:
        await kept(served)
        refused = await post(served, "/v1/skills", zipped(packed({"csv/SKILL.md": FRONT})))
        assert (refused.status, refused.json["error"]["code"]) == (413, "skill_quota_exceeded")
        assert "Delete some first" in refused.json["error"]["message"]
        assert len(stored_zips(tmp_path)) == 1


async def test_skill_outlives_a_restart(tmp_path: Path) -> None:
    flags = {**FLAGS, "store": f"sqlite:///{tmp_path}/turns.db"}
    async with scripted(tmp_path, DONE, **flags) as served:
        skill = await kept(served)
    async with scripted(tmp_path, DONE, **flags) as served:
        assert (await fetch(served, "GET", f"/v1/skills/{skill['id']}")).json == skill
        assert (await fetch(served, "GET", f"/v1/skills/{skill['id']}/content")).status == 200


# --- in containers --------------------------------------------------------------------------------------

LOOK = run("cat /home/user/skills/*/SKILL.md | tail -n +5")


def reference(skill: str, **more: object) -> Body:
    return {"type": "skill_reference", "skill_id": skill, **more}


async def told(served: Served, response: Body) -> list[str]:
    """What the model of a response was told of skills."""
    listed = await fetch(served, "GET", f"/v1/responses/{response['id']}/input_items?order=asc")
    texts = [one.get("content", [{}])[0].get("text", "") for one in listed.json["data"]]
    return [text for text in texts if text.startswith("Skills in the container")]


@pytest.mark.parametrize(
    "version, words",
    [
        ({}, "First."),
        ({"version": None}, "First."),
        ({"version": "latest"}, "Second."),
        ({"version": 2}, "Second."),
        ({"version": "1"}, "First."),
    ],
)
async def test_model_uses_a_version_of_a_skill(version: Body, words: str, tmp_path: Path) -> None:
    async with scripted(tmp_path, LOOK, DONE, **FLAGS) as served, wire(served) as socket:
        skill = (await kept(served, "First."))["id"]
        second = zipped(packed({"csv/SKILL.md": FRONT + b"Second."}))
        assert (await post(served, f"/v1/skills/{skill}/versions", second)).status == 200
        tool = shell_with(reference(skill, **version))
        response = (await socket.turn(input="Go", tools=[tool]))["response"]
        assert response["output"][1]["output"][0]["stdout"] == words
        (text,) = await told(served, response)
        assert "- csv-insights: Sums of CSV files. (read /home/user/skills/csv-insights-" in text


@pytest.mark.parametrize("version", ["9", 9, "newest", -1])
async def test_version_that_is_not_there_is_refused(version: object, tmp_path: Path) -> None:
    async with scripted(tmp_path, DONE, **FLAGS) as served:
        skill = (await kept(served))["id"]
        for path, body in (
            ("/v1/containers", {"name": "x", "skills": [reference(skill, version=version)]}),
            (
                "/v1/responses",
                {
                    "model": MODEL,
                    "input": "Go",
                    "tools": [shell_with(reference(skill, version=version))],
                },
            ),
        ):
            refused = await fetch(served, "POST", path, body)
            assert (refused.status, refused.json["error"]["code"]) == (404, "skill_not_found")
        assert await keeper_of(served).list_all(LOCAL) == []


async def test_model_hears_of_the_skills_of_its_container_once_a_history(tmp_path: Path) -> None:
    """A container that was made with skills, a fork, and a skill that comes later."""
    turns = [LOOK, DONE, LOOK, DONE, LOOK, DONE, LOOK, DONE]
    async with scripted(tmp_path, *turns, **FLAGS) as served, wire(served) as socket:
        skill = (await kept(served))["id"]
        made = await fetch(
            served, "POST", "/v1/containers", {"name": "x", "skills": [reference(skill)]}
        )
        assert made.status == 200, made.body
        place = {"type": "container_reference", "container_id": made.json["id"]}
        tool = {"type": "shell", "environment": place}
        first = (await socket.turn(input="Go", tools=[tool]))["response"]
        assert first["output"][1]["output"][0]["stdout"] == "Read."
        assert len(await told(served, first)) == 1
        second = (await socket.turn(input="On", tools=[tool], previous_response_id=first["id"]))[
            "response"
        ]
        assert await told(served, second) == []
        # Another history knows nothing of it, although its container has it.
        other = (await socket.turn(input="Go", tools=[tool]))["response"]
        assert len(await told(served, other)) == 1


async def test_model_hears_of_skills_again_after_a_compaction(tmp_path: Path) -> None:
    turns = [LOOK, DONE, {"text": "A summary."}, LOOK, DONE]
    async with scripted(tmp_path, *turns, **FLAGS) as served, wire(served) as socket:
        skill = (await kept(served))["id"]
        tool = shell_with(reference(skill))
        long = "word " * 30_000
        first = (await socket.turn(input="Go", tools=[tool]))["response"]
        more: Body = {"input": long, "tools": [tool], "previous_response_id": first["id"]}
        more["context_management"] = [{"type": "compaction", "compact_threshold": 2_000}]
        second = (await socket.turn(**more))["response"]
        assert any(item["type"] == "compaction" for item in second["output"])
        third = (await socket.turn(input="On", tools=[tool], previous_response_id=second["id"]))[
            "response"
        ]
        # The same container, and the model knows of the skill.
        assert third["tools"] == first["tools"]
        assert await told(served, third)
        assert third["output"][1]["output"][0]["stdout"] == "Read."


async def test_skill_that_failed_halfway_is_written_again(tmp_path: Path) -> None:
    """A large file does not fit beside what the first command has written; then there is room."""
    fill = run("head -c 60000000 /dev/zero > /home/user/full")
    empty = run("rm /home/user/full")
    look = run("cat /home/user/skills/*/b.bin | wc -c")
    async with scripted(tmp_path, fill, DONE, empty, DONE, look, DONE, **FLAGS) as served:
        large = form((b"csv/SKILL.md", FRONT), (b"csv/b.bin", bytes(20 << 20)))
        skill = (await post(served, "/v1/skills", large)).json["id"]
        async with wire(served) as socket:
            plain = {"type": "shell", "environment": {"type": "container_auto"}}
            first = (await socket.turn(input="Go", tools=[plain]))["response"]
            asked: Body = {"model": MODEL, "input": "On", "previous_response_id": first["id"]}
            asked["tools"] = [shell_with(reference(skill))]
            refused = await fetch(served, "POST", "/v1/responses", asked)
            assert (refused.status, refused.json["error"]["code"]) == (413, "container_full")
            (about,) = await keeper_of(served).list_all(LOCAL)
            assert about.skills == []
            more = {"previous_response_id": first["id"]}
            second = (await socket.turn(input="On", tools=[plain], **more))["response"]
            more = {"previous_response_id": second["id"]}
            third = (await socket.turn(input="On", tools=asked["tools"], **more))["response"]
            assert third["tools"] == first["tools"]
            assert third["output"][1]["output"][0]["stdout"].strip() == str(20 << 20)


async def test_server_without_sandboxes_has_no_skills(tmp_path: Path) -> None:
    async with scripted(tmp_path, DONE) as served:
        assert (await fetch(served, "GET", "/v1/skills")).status == 404


async def test_skills_are_in_the_backup_and_come_back(tmp_path: Path) -> None:
    store, file = f"sqlite:///{tmp_path / 'live.db'}", str(tmp_path / "segue.backup")
    async with scripted(tmp_path, DONE, **{**FLAGS, "store": store}) as served:
        skill = await kept(served)
        assert await asyncio.to_thread(cli.main, ["backup", file, "--store", store]) == 0
    # Versions of Segue without skills refuse it.
    assert read_backup(Path(file)).format == 3
    moved = f"sqlite:///{tmp_path / 'moved' / 'segue.db'}"
    assert cli.main(["restore", file, "--store", moved]) == 0
    async with scripted(tmp_path, DONE, **{**FLAGS, "store": moved}) as served:
        assert (await fetch(served, "GET", f"/v1/skills/{skill['id']}")).json == skill
        content = await fetch(served, "GET", f"/v1/skills/{skill['id']}/content")
        assert zipfile.ZipFile(BytesIO(content.body)).testzip() is None


def test_official_python_client_keeps_and_uses_skills(tmp_path: Path) -> None:
    script = tmp_path / "script.json"
    script.write_text(json.dumps({"turns": [LOOK, DONE]}))
    flags = ["--engine", "scripted", "--script", str(script), "--environment", "bwrap"]
    flags += ["--store", f"sqlite:///{tmp_path}/turns.db"]
    with served_process(*flags, cwd=tmp_path) as served:
        found = run_python("python_skills.py", served, "scripted")
    assert found["sync"] == {
        "versions": ["2", "1"],
        "default": "2",
        "chosen": "1",
        "listed": True,
        "zip": "PK",
        "output": "Read.",
        "pages": 3,
        "oldest": True,
        "named": True,
        "gone": True,
        "deleted": "skill.deleted",
        "missing": "skill_not_found",
    }
    assert found["async"] == {
        "skills": True,
        "files": ["/mnt/data/1", "/mnt/data/2", "/mnt/data/3"],
        "content": "words",
    }
