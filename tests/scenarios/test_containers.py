"""The Containers API, and the official clients with a shell in a container, against the `segue` command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.clients.agents import NPM_AGENTS
from tests.clients.outside import run_node, run_python
from tests.keepers import FLAGS, containers_are_gone, keeper_of_the_file, sandboxes_can_be_made
from tests.scenarios.test_shell import DONE, run
from tests.scenarios.test_tools import calling, scripted
from tests.support import fetch, served_process

__all__ = ["containers_are_gone", "keeper_of_the_file", "sandboxes_can_be_made"]

Body = dict[str, Any]


@pytest.mark.parametrize("workers", [1, 2])
def test_official_clients_use_a_container(workers: int, tmp_path: Path) -> None:
    script = tmp_path / "script.json"
    turns = [run("cat in.txt 2>/dev/null; echo a,b > x.csv"), DONE]
    script.write_text(json.dumps({"turns": turns}))
    flags = ["--engine", "scripted", "--script", str(script), "--environment", "bwrap"]
    flags += ["--store", f"sqlite:///{tmp_path}/turns.db", "--workers", str(workers)]
    with served_process(*flags, cwd=tmp_path) as served:
        found = run_python("python_shell.py", served, "scripted")
        by_ai_sdk = run_node("node_ai_sdk.mjs", served, "scripted", "shell", modules=NPM_AGENTS)
    sdk, agents = found["sdk"], found["agents"]
    assert sdk["types"] == ["shell_call", "shell_call_output", "message"]
    assert sdk["outputs"][0]["output"][0]["stdout"] == "words"
    assert (sdk["listed"], sdk["name"], sdk["minutes"]) == (True, "mine", 5)
    assert sdk["put"] == ["/mnt/data/in.txt", "user", 5]
    assert sdk["out"] == ["assistant", "a,b\n"]
    assert sdk["cites_file"]
    assert sdk["gone"] == "container_not_found"
    assert "response.shell_call_output_content.delta" in sdk["events"]
    assert agents["first"] == agents["second"] == agents["streamed"] == DONE["text"]
    assert agents["calls"] == ["shell_call", "shell_call_output", "message"]
    for one in by_ai_sdk:
        assert (one["text"], one["files"]) == (DONE["text"], ["x.csv"])
        assert one["calls"] == [["shell", True]]
        printed = {"stdout": "", "stderr": "", "outcome": {"type": "exit", "exitCode": 0}}
        assert one["results"] == [{"output": [printed]}]


def test_official_clients_run_code(tmp_path: Path) -> None:
    script = tmp_path / "script.json"
    code = "open('x.csv', 'w').write('a,b')\n6 * 7"
    script.write_text(json.dumps({"turns": [calling("python", code=code), DONE]}))
    flags = ["--engine", "scripted", "--script", str(script), "--environment", "bwrap"]
    with served_process(*flags, "--store", "memory", cwd=tmp_path) as served:
        found = run_python("python_code.py", served, "scripted")
        by_ai_sdk = run_node("node_ai_sdk.mjs", served, "scripted", "code", modules=NPM_AGENTS)
    sdk, agents = found["sdk"], found["agents"]
    assert sdk["types"] == ["code_interpreter_call", "message"]
    assert (sdk["logs"], sdk["content"], sdk["again"]) == (["42"], "a,b", [True, "completed"])
    assert "response.code_interpreter_call_code.delta" in sdk["events"]
    assert agents == {"final": [DONE["text"]] * 2, "codes": [code]}
    for one in by_ai_sdk:
        assert (one["text"], one["files"]) == (DONE["text"], ["x.csv"])
        assert one["calls"] == [["code", True]]
        assert one["results"] == [{"outputs": [{"type": "logs", "logs": "42"}]}]


async def test_lists_have_pages_and_bad_requests_are_refused(tmp_path: Path) -> None:
    async with scripted(tmp_path, DONE, **FLAGS) as served:
        made = []
        for name in ("a", "b", "c"):
            answer = await fetch(served, "POST", "/v1/containers", {"name": name})
            assert answer.status == 200, answer.body
            made.append(answer.json)
        assert made[0]["object"] == "container"
        assert made[0]["network_policy"] == {"type": "disabled"}
        assert made[0]["isolation"] == "kernel-shared"
        assert made[0]["limits_by"] in ("cgroup", "watcher")
        page = (await fetch(served, "GET", "/v1/containers?limit=2")).json
        assert ([one["name"] for one in page["data"]], page["has_more"]) == (["c", "b"], True)
        rest = (await fetch(served, "GET", f"/v1/containers?after={page['last_id']}")).json
        assert ([one["name"] for one in rest["data"]], rest["has_more"]) == (["a"], False)
        oldest = (await fetch(served, "GET", "/v1/containers?order=asc&limit=1")).json
        assert oldest["data"][0]["name"] == "a"
        assert len((await fetch(served, "GET", "/v1/containers?name=b")).json["data"]) == 1
        for body in (
            {},
            {"name": ""},
            {"name": "x", "memory_limit": "2g"},
            {"name": "x", "expires_after": {"anchor": "created_at", "minutes": 5}},
            {"name": "x", "expires_after": {"anchor": "last_active_at", "minutes": 0}},
            {"name": "x", "skills": [{"type": "inline"}]},
            {"name": "x", "network_policy": {"type": "allowlist", "allowed_domains": ["a.b"]}},
        ):
            assert (await fetch(served, "POST", "/v1/containers", body)).status == 400
        deep = b'{"name":"x","network_policy":' + b"[" * 100_000
        assert (await fetch(served, "POST", "/v1/containers", deep)).status == 400
        for path in ("/v1/containers?limit=0", "/v1/containers?order=up", "/v1/containers?after=x"):
            assert (await fetch(served, "GET", path)).status == 400
        for path in ("cntr_x", "cntr_x/files", f"{made[0]['id']}/files/cfile_x/content"):
            assert (await fetch(served, "GET", f"/v1/containers/{path}")).status == 404


async def test_container_whose_files_are_not_there_is_not_made(tmp_path: Path) -> None:
    """Else a few such requests would use up all containers of their owner."""
    async with scripted(tmp_path, DONE, **FLAGS) as served:
        body = {"name": "x", "file_ids": ["file-x"]}
        assert (await fetch(served, "POST", "/v1/containers", body)).status == 404
        environment = {"type": "container_auto", "file_ids": ["file-x"]}
        tools = [{"type": "shell", "environment": environment}]
        turn = {"model": "scripted", "input": "Go", "tools": tools}
        assert (await fetch(served, "POST", "/v1/responses", turn)).status == 404
        assert (await fetch(served, "GET", "/v1/containers")).json["data"] == []


async def test_upload_that_a_container_refuses_is_said_why(tmp_path: Path) -> None:
    """Also where much of it is still on its way."""
    async with scripted(tmp_path, DONE, **FLAGS) as served:
        made = (await fetch(served, "POST", "/v1/containers", {"name": "x"})).json["id"]
        for container, name, size, status in (
            (made, "\u00e9" * 200, 5, 400),
            (made, "\u00e9" * 200, 3_000_000, 400),
            ("cntr_x", "a.txt", 3_000_000, 404),
        ):
            head = f'--b\r\nContent-Disposition: form-data; name="file"; filename="{name}"\r\n\r\n'
            body = head.encode() + b"x" * size + b"\r\n--b--\r\n"
            headers = {"Content-Type": "multipart/form-data; boundary=b"}
            path = f"/v1/containers/{container}/files"
            refused = await fetch(served, "POST", path, body, headers)
            assert refused.status == status, refused.body


async def test_server_without_sandboxes_has_no_containers(tmp_path: Path) -> None:
    async with scripted(tmp_path, DONE) as served:
        assert (await fetch(served, "GET", "/v1/containers")).status == 404
