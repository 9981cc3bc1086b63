"""Python code in a container, in real turns: real sandboxes, the scripted engine, every transport.

Where a machine forbids namespaces these tests cannot run; `tests/escapes` says so at the end of the run.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from base64 import b64encode
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from segue.accounts.account import LOCAL
from segue.isolation.limits import processes_of
from tests.keepers import (
    FLAGS,
    OWN,
    containers_are_gone,
    keeper_of,
    keeper_of_the_file,
    keeper_pid,
    sandboxes_can_be_made,
)
from tests.scenarios.test_shell import inside, run
from tests.scenarios.test_tool_keys import key_for
from tests.scenarios.test_tools import asking, calling, response_of, scripted
from tests.support import MODEL, Served, fetch, wire

__all__ = ["containers_are_gone", "keeper_of_the_file", "sandboxes_can_be_made"]

Body = dict[str, Any]
AUTO: Body = {"type": "code_interpreter", "container": {"type": "auto"}}
SHELL = {"type": "shell", "environment": {"type": "container_auto"}}
SHOWN = {"include": ["code_interpreter_call.outputs"]}
DONE = {"text": "Done."}


def python(code: str) -> Body:
    return calling("python", code=code)


def logs(call: Body) -> str:
    return "".join(each["logs"] for each in call["outputs"] if each["type"] == "logs")


@pytest.mark.parametrize("way", ["json", "sse", "websocket"])
async def test_model_runs_code_that_keeps_its_variables(way: str, tmp_path: Path) -> None:
    turns = [python("x = 6\nprint('hello')"), python("x * 7"), python("1 / 0"), DONE]
    async with scripted(tmp_path, *turns, **FLAGS) as served, asking(served, way) as ask:
        response = response_of(await ask({"input": "Go", "tools": [AUTO], **SHOWN}))
    first, second, third, _ = response["output"]
    assert [call["type"] for call in (first, second, third)] == ["code_interpreter_call"] * 3
    assert first["code"] == "x = 6\nprint('hello')"
    assert first["id"].startswith("ci_")
    assert first["outputs"] == [{"type": "logs", "logs": "hello"}]
    assert second["outputs"] == [{"type": "logs", "logs": "42"}]
    assert "ZeroDivisionError" in logs(third)
    assert {call["status"] for call in (first, second, third)} == {"completed"}
    assert len({call["container_id"] for call in (first, second, third)}) == 1
    # As it came.
    assert response["tools"] == [AUTO]


async def test_outputs_are_shown_only_where_they_are_asked_for(tmp_path: Path) -> None:
    async with (
        scripted(tmp_path, python("print(1)"), DONE, **FLAGS) as served,
        asking(served, "sse") as ask,
    ):
        told = await ask({"input": "Go", "tools": [AUTO]})
        shown = await ask({"input": "Go", "tools": [AUTO], **SHOWN})
    for events, before, after in ((told, None, None), (shown, [], [{"type": "logs", "logs": "1"}])):
        items = [one["item"] for one in events if one.get("item", {}).get("code") is not None]
        assert [item["outputs"] for item in items] == [before, after]


async def test_code_that_ends_its_process_loses_its_variables_and_says_so(tmp_path: Path) -> None:
    turns = [
        python("x = 1"),
        python("import os\nprint('last words', flush=True)\nos._exit(3)"),
        python("x"),
        python("y = 2\nwhile True: pass"),
        python("y"),
        DONE,
    ]
    flags = {**FLAGS, "environment_s_max": 1.0}
    async with scripted(tmp_path, *turns, **flags) as served, asking(served, "json") as ask:
        response = response_of(await ask({"input": "Go", "tools": [AUTO], **SHOWN}))
    _, ended, after, endless, kept, _ = response["output"]
    assert logs(ended).startswith("last words\n[")
    assert "variables are lost" in logs(ended)
    assert "NameError" in logs(after)
    assert "interrupted after 1 s" in logs(endless)
    assert logs(kept) == "2"


async def test_code_that_needs_too_much_memory_is_an_output(tmp_path: Path) -> None:
    turns = [python("x = 1\nb = b'x' * (3 << 30)"), python("print('works')\nx"), DONE]
    async with scripted(tmp_path, *turns, **FLAGS) as served, asking(served, "json") as ask:
        response = response_of(await ask({"input": "Go", "tools": [AUTO], **SHOWN}))
    killed, again, _ = response["output"]
    assert "memory" in logs(killed)
    assert "works" in logs(again)
    assert "NameError" in logs(again)


# The same for both ways to run something.
EITHER = pytest.mark.parametrize(
    "tool, wet",
    [(SHELL, run("printf 'It ra'; printf 'ins\\n'")), (AUTO, python("print('It ra' + 'ins')"))],
    ids=["shell", "code"],
)


@EITHER
async def test_guard_sees_what_is_printed_before_the_client_does(
    tool: Body, wet: Body, tmp_path: Path
) -> None:
    settings = tmp_path / "segue.toml"
    settings.write_text('[guard_rules]\npatterns = ["rains"]\n')
    flags = {**FLAGS, "guard": ("rules",), "config": str(settings)}
    async with scripted(tmp_path, wet, DONE, **flags) as served, asking(served, "sse") as ask:
        told = await ask({"input": "Go", "tools": [tool], **SHOWN})
    assert "It rains" not in json.dumps(told)
    assert response_of(told)["status"] != "completed"


@EITHER
async def test_audit_log_has_a_line_without_the_text(tool: Body, wet: Body, tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    flags = {**FLAGS, "audit_log": str(path)}
    async with scripted(tmp_path, wet, DONE, **flags) as served, asking(served, "json") as ask:
        response = response_of(await ask({"input": "Go", "tools": [tool], **SHOWN}))
    written = path.read_text()
    (line,) = [one for one in map(json.loads, written.splitlines()) if one["event"] == "command"]
    assert (line["outcome"], line["code"], line["printed_bytes"]) == ("exited", "0", 9)
    assert line["owner"] == LOCAL
    assert line["container_id"] in json.dumps(response["output"][0])
    assert "It ra" not in written


@EITHER
async def test_container_that_has_expired_is_refused(tool: Body, wet: Body, tmp_path: Path) -> None:
    async with scripted(tmp_path, DONE, **OWN) as served:
        made = (await fetch(served, "POST", "/v1/containers", {"name": "mine"})).json["id"]
        assert (await fetch(served, "GET", f"/v1/containers/{made}/files")).status == 200
        keeper = keeper_pid(served)
        for pid in processes_of(keeper):
            # One that ends takes others with it.
            if pid != keeper:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        async with asyncio.timeout(10):
            while (await keeper_of(served).find(LOCAL, made)).status != "expired":
                pass
        place = {"type": "container_reference", "container_id": made}
        named = {"container": made} if tool is AUTO else {"environment": place}
        body = {"model": MODEL, "input": "Go", "tools": [{"type": tool["type"], **named}]}
        refused = await fetch(served, "POST", "/v1/responses", body)
    assert (refused.status, refused.json["error"]["code"]) == (400, "container_expired")


WAIT = "x = 1\nopen('on', 'w').close()\nimport time\nwhile True: time.sleep(0.01)"


async def test_code_goes_on_in_a_new_container_where_its_own_has_ended(tmp_path: Path) -> None:
    """In the same response, and in the next turn; one that the request names is not replaced."""
    turns = [python(WAIT), python("print('works')\nx"), DONE, python("print('again')"), DONE]
    async with scripted(tmp_path, *turns, **FLAGS) as served, wire(served) as socket:
        client = keeper_of(served)
        await socket.create(input="Go", tools=[AUTO], **SHOWN)
        events = [await socket.next()]
        while not events[-1]["type"].endswith("interpreting"):
            events.append(await socket.next())
        (call,) = [one["item"] for one in events if "item" in one]
        async with asyncio.timeout(10):
            while not await listed(served, call["container_id"]):
                pass
        await client.delete(LOCAL, call["container_id"])
        first = (await socket.events())[-1]["response"]
        ended, again, _ = first["output"]
        await client.delete(LOCAL, again["container_id"])
        fields: Body = {"input": "Go", "previous_response_id": first["id"], **SHOWN}
        named = {"type": "code_interpreter", "container": again["container_id"]}
        refused = await socket.turn(**fields, tools=[named])
        second = (await socket.turn(**fields, tools=[AUTO]))["response"]
    assert "deleted" in logs(ended)
    assert logs(again).splitlines()[0].startswith("[The container had ended. This is a new one")
    assert "works" in logs(again)
    assert "NameError" in logs(again)
    assert ended["container_id"] != again["container_id"]
    assert refused["error"]["code"] == "container_not_found"
    (_, said) = logs(second["output"][0]).splitlines()
    assert said == "again"


async def listed(served: Served, container_id: str) -> list[Body]:
    answer = await fetch(served, "GET", f"/v1/containers/{container_id}/files")
    found: list[Body] = answer.json.get("data", [])
    return found


@pytest.mark.parametrize("is_stored", [True, False])
async def test_chain_keeps_its_interpreter(is_stored: bool, tmp_path: Path) -> None:
    turns = [python("x = 1"), DONE, DONE, python("x"), DONE]
    async with scripted(tmp_path, *turns, **FLAGS) as served, wire(served) as socket:
        fields: Body = {"tools": [AUTO], "store": is_stored, **SHOWN}
        first = (await socket.turn(input="Go", **fields))["response"]
        # A turn without a call is between them.
        second = await socket.turn(input="And", previous_response_id=first["id"], **fields)
        third = await socket.turn(
            input="Now", previous_response_id=second["response"]["id"], **fields
        )
        known = (await fetch(served, "GET", "/v1/containers")).json["data"]
    call, again = first["output"][0], third["response"]["output"][0]
    assert (call["container_id"], logs(again)) == (again["container_id"], "1")
    assert [each["id"] for each in known] == [call["container_id"]]


async def test_client_that_resends_its_history_keeps_the_interpreter(tmp_path: Path) -> None:
    turns = [python("x = 1\nprint('one')"), DONE, python("x"), DONE]
    async with scripted(tmp_path, *turns, **FLAGS) as served, asking(served, "json") as ask:
        fields: Body = {"tools": [AUTO], "store": False, **SHOWN}
        history: list[Body] = [{"role": "user", "content": "Go"}]
        first = response_of(await ask({"input": history, **fields}))
        history += [*first["output"], {"role": "user", "content": "Again"}]
        second = response_of(await ask({"input": history, **fields}))
    assert logs(second["output"][0]) == "1"
    assert second["output"][0]["container_id"] == first["output"][0]["container_id"]


async def test_shell_and_code_share_a_container(tmp_path: Path) -> None:
    turns = [run("echo 7 > n"), python("int(open('n').read()) * 6"), DONE]
    async with scripted(tmp_path, *turns, **FLAGS) as served, asking(served, "sse") as ask:
        response = response_of(await ask({"input": "Go", "tools": [AUTO, SHELL], **SHOWN}))
        call, _, code, _ = response["output"]
        more = {"input": "Go", "previous_response_id": response["id"], "tools": [SHELL]}
        later = response_of(await ask(more))
    assert logs(code) == "42"
    assert call["environment"]["container_id"] == code["container_id"]
    assert response["tools"][0] == AUTO
    assert later["tools"][0]["environment"]["container_id"] == code["container_id"]


async def test_files_of_the_input_are_in_the_container(tmp_path: Path) -> None:
    data = f"data:text/csv;base64,{b64encode(b'a,b').decode()}"
    part = {"type": "input_file", "filename": "in.csv", "file_data": data}
    message = {"role": "user", "content": [part, {"type": "input_text", "text": "Go"}]}
    turns = [python("print(open('in.csv').read())\nopen('in.csv', 'w').write('mine')")]
    turns += [
        {"text": "See [it](sandbox:/mnt/data/in.csv)."},
        python("open('in.csv').read()"),
        DONE,
    ]
    async with scripted(tmp_path, *turns, **FLAGS) as served, asking(served, "json") as ask:
        fields: Body = {"tools": [AUTO], **SHOWN}
        first = response_of(await ask({"input": [message], **fields}))
        again = [message, *first["output"], {"role": "user", "content": "Go on"}]
        second = response_of(await ask({"input": again, **fields}))
    assert logs(first["output"][0]).startswith("a,b\n")
    (citation,) = first["output"][1]["content"][0]["annotations"]
    assert (citation["type"], citation["filename"]) == ("container_file_citation", "in.csv")
    # What the code has changed is not written over.
    assert logs(second["output"][0]) == "'mine'"


FIGURES = """
import sys, types, zlib, struct
def chunk(kind, data):
    return struct.pack('>I', len(data)) + kind + data + struct.pack('>I', zlib.crc32(kind + data))
PNG = b'\\x89PNG\\r\\n\\x1a\\n' + chunk(b'IHDR', struct.pack('>IIBBBBB', 1, 1, 8, 0, 0, 0, 0))
PNG += chunk(b'IDAT', zlib.compress(b'\\0\\0')) + chunk(b'IEND', b'')
class Figure:
    def savefig(self, path, **more): open(path, 'wb').write(PNG)
pyplot = types.ModuleType('matplotlib.pyplot')
pyplot.get_fignums = lambda: [1, 2]
pyplot.figure = lambda number: Figure()
pyplot.close = lambda what: setattr(pyplot, 'get_fignums', lambda: [])
sys.modules['matplotlib.pyplot'] = pyplot
"""


async def test_figures_are_images_and_are_cited(tmp_path: Path) -> None:
    """What draws is played by the code itself; where matplotlib is installed it is matplotlib."""
    answer = {"text": "See [this](sandbox:/mnt/data/figure-2.png)."}
    async with scripted(tmp_path, python(FIGURES), answer, **FLAGS) as served:
        async with asking(served, "sse") as ask:
            response = response_of(await ask({"input": "Go", "tools": [AUTO], **SHOWN}))
        call, message = response["output"]
        linked, drawn = message["content"][0]["annotations"]
        path = f"/v1/containers/{call['container_id']}/files/{drawn['file_id']}"
        assert (await fetch(served, "GET", path)).json["path"] == "/mnt/data/figure-1.png"
    said, *images = call["outputs"]
    assert said["logs"].splitlines()[0] == "[A figure was saved as /mnt/data/figure-1.png.]"
    assert [image["type"] for image in images] == ["image", "image"]
    assert images[0]["url"].startswith("data:image/png;base64,iVBOR")
    assert linked["filename"] == "figure-2.png"
    assert (drawn["filename"], drawn["start_index"], drawn["end_index"]) == ("figure-1.png", 0, 0)


BAD: list[tuple[Body, str, str | None]] = [
    ({}, "invalid_request", "tools[0].container"),
    ({"container": 3}, "invalid_value", "tools[0].container"),
    ({"container": {"type": "x"}}, "invalid_value", "tools[0].container.type"),
    (
        {"container": {"type": "auto", "memory_limit": "3g"}},
        "invalid_value",
        "tools[0].container.memory_limit",
    ),
]


async def test_interpreters_that_cannot_be_are_refused(tmp_path: Path) -> None:
    async with scripted(tmp_path, DONE, **FLAGS) as served:

        async def refused(container: Body) -> tuple[int, str, str | None]:
            tool = {"type": "code_interpreter", **container}
            body = {"model": MODEL, "input": "Go", "tools": [tool]}
            answer = await fetch(served, "POST", "/v1/responses", body)
            error = answer.json["error"]
            return answer.status, error["code"], error["param"]

        for container, code, param in BAD:
            status, found, where = await refused(container)
            assert (status, where) == (400, param), container
            assert found == code
        unknown = await refused({"container": "cntr_00"})
        assert unknown == (404, "container_not_found", "tools[0].container")
        lost = await refused({"container": {"type": "auto", "file_ids": ["file-00"]}})
        assert lost[0] in (400, 404)
        known = (await fetch(served, "GET", "/v1/containers")).json["data"]
    assert known == []


async def test_interpreter_is_said_not_to_be_set_up(tmp_path: Path) -> None:
    async with scripted(tmp_path, DONE) as served:
        body = {"model": MODEL, "input": "Go", "tools": [AUTO]}
        answer = await fetch(served, "POST", "/v1/responses", body)
    assert answer.status == 400
    assert "code_interpreter" in answer.json["error"]["message"]


async def test_calls_of_a_history_are_read_where_nothing_is_set_up(tmp_path: Path) -> None:
    """Code that another server has run."""
    call = {
        "type": "code_interpreter_call",
        "id": "ci_1",
        "code": "1 + 1",
        "container_id": "cntr_1",
        "outputs": [{"type": "logs", "logs": "2"}],
        "status": "completed",
    }
    async with scripted(tmp_path, DONE) as served:
        for outputs in (call["outputs"], None, [{"type": "image", "url": "https://x/y.png"}], 3):
            begun, asked = ({"role": "user", "content": text} for text in ("Go", "So?"))
            body = {"model": MODEL, "input": [begun, {**call, "outputs": outputs}, asked]}
            answer = await fetch(served, "POST", "/v1/responses", body)
            assert (answer.status, answer.json["status"]) == (200, "completed"), answer.body


async def test_key_needs_the_scope(tmp_path: Path) -> None:
    async with scripted(tmp_path, DONE, auth="keys", **FLAGS) as served:
        body = {"model": MODEL, "input": "Go", "tools": [AUTO]}
        for scope, status in (("shell", 403), ("code", 200)):
            headers = await key_for(served, scope)
            answer = await fetch(served, "POST", "/v1/responses", body, headers)
            assert answer.status == status, answer.body
            # Either scope shows what is in containers.
            assert (await fetch(served, "GET", "/v1/containers", None, headers)).status == 200


async def test_code_is_forced(tmp_path: Path) -> None:
    async with (
        scripted(tmp_path, python("6 * 7"), DONE, **FLAGS) as served,
        asking(served, "json") as ask,
    ):
        wanted: Body = {"input": "Go", "tools": [AUTO], **SHOWN}
        wanted["tool_choice"] = {"type": "code_interpreter"}
        response = response_of(await ask(wanted))
    assert logs(response["output"][0]) == "42"
    assert response["tool_choice"] == {"type": "code_interpreter"}


async def test_container_of_an_unstored_turn_is_in_memory(tmp_path: Path) -> None:
    code = python("import os\nprint(os.statvfs('/mnt/data').f_bsize, open('/proc/mounts').read())")
    async with scripted(tmp_path, code, DONE, **FLAGS) as served, asking(served, "json") as ask:
        response = response_of(await ask({"input": "Go", "tools": [AUTO], "store": False, **SHOWN}))
    (line,) = [line for line in logs(response["output"][0]).splitlines() if " /mnt/data " in line]
    assert " tmpfs " in line


LOOP = """
import os, time
if os.path.exists('on'):
    print(x)
else:
    x = 3
    open('on', 'w').close()
    while True: time.sleep(0.01)
"""


async def test_cancelled_code_is_stopped(tmp_path: Path) -> None:
    """The interpreter is interrupted and keeps its variables."""
    tools = [SHELL, AUTO]
    async with scripted(tmp_path, python(LOOP), DONE, **FLAGS) as served:
        body = {"model": MODEL, "input": "Go", "tools": tools, "background": True}
        queued = (await fetch(served, "POST", "/v1/responses", body)).json
        async with asyncio.timeout(10):
            while "on" not in await inside(served, queued, "ls"):
                pass
        await fetch(served, "POST", f"/v1/responses/{queued['id']}/cancel", {})
        cancelled = (await fetch(served, "GET", f"/v1/responses/{queued['id']}")).json
        named = {"type": "code_interpreter", "container": cancelled["output"][0]["container_id"]}
        async with asking(served, "json") as ask:
            again = response_of(await ask({"input": "Go", "tools": [named], **SHOWN}))
    assert cancelled["status"] == "cancelled"
    assert [one["status"] for one in cancelled["output"]] == ["incomplete"]
    assert logs(again["output"][0]) == "3"


async def test_server_that_stops_ends_the_code(tmp_path: Path) -> None:
    """The client has a terminal event and an item that says that it was not done; nothing goes on."""
    code = "try:\n    import time\n    open('on', 'w').close()\n    time.sleep(60)\nfinally: open('off', 'w').close()"
    async with scripted(tmp_path, python(code), DONE, **FLAGS) as served, wire(served) as socket:
        await socket.create(input="Go", tools=[SHELL, AUTO], **SHOWN)
        first = (await socket.next())["response"]
        async with asyncio.timeout(10):
            while "on" not in await inside(served, first, "ls"):
                pass
        await served.app.runner.drain(0)
        ended = (await socket.events())[-1]
        async with asyncio.timeout(10):
            while "off" not in await inside(served, first, "ls"):
                pass
    assert ended["type"] in ("response.failed", "response.incomplete")
    assert [one["status"] for one in ended["response"]["output"]] == ["incomplete"]
