"""The same stories over the three APIs: what a server does besides answering does not depend on how it was asked."""

from __future__ import annotations

import asyncio
import json
import sys
from asyncio.subprocess import PIPE, STDOUT
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from segue.accounts.hashes import issue_key
from segue.limits import KeyLimits
from segue.server.apis import APIS
from segue.settings.values import API_NAMES
from segue_cli.cli import main
from tests.chat import script
from tests.dashboard.test_routes import feed
from tests.scenarios.test_replicas import staged
from tests.support import (
    MODEL,
    Answer,
    Served,
    ServedProcess,
    fetch,
    loaded_modules,
    metric,
    served_process,
    serving,
    until,
)

PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR4nGNgYPj/HwADAgH/p0M5TwAAAABJRU5ErkJggg=="
RULES = '[guard_rules]\npatterns = ["(?i)forbidden"]\n'
Fields = dict[str, Any]


@dataclass(frozen=True)
class Asking:
    """How clients of one API ask, and what they read."""

    path: str
    prefix: str
    label: str
    # The request for an answer to this text, after these messages; and where the answer's text is.
    body: Callable[[str, Sequence[Fields]], Fields]
    text: Callable[[Any], str]
    # A picture as a part of a message, and the code of an error.
    picture: Fields
    code: Callable[[Any], str]
    # The status of a server that stops.
    unavailable: int = 503

    async def ask(
        self,
        served: Served | ServedProcess,
        text: str = "Hello",
        headers: Mapping[str, str] | None = None,
        before: Sequence[Fields] = (),
        **fields: Any,
    ) -> Answer:
        body = {"model": MODEL, **self.body(text, before), **fields}
        return await fetch(served, "POST", self.path, body, headers)

    def id_of(self, answer: Answer) -> str:
        """The id of a turn, also of one that was streamed."""
        text = answer.body.decode()
        start = text.index(f'"{self.prefix}') + 1
        return text[start : text.index('"', start)]


def _messages(text: str, before: Sequence[Fields]) -> list[Fields]:
    return [*before, {"role": "user", "content": text}]


ASKING = {
    "responses": Asking(
        path="/v1/responses",
        prefix="resp_",
        label="",
        body=lambda text, before: {"input": _messages(text, before), "store": False},
        text=lambda body: body["output"][-1]["content"][0]["text"],
        picture={"type": "input_image", "image_url": f"data:image/png;base64,{PIXEL}"},
        code=lambda body: body["error"]["code"],
    ),
    "messages": Asking(
        path="/v1/messages",
        prefix="msg_",
        label="messages_",
        body=lambda text, before: {"messages": _messages(text, before), "max_tokens": 4096},
        text=lambda body: body["content"][-1]["text"],
        picture={
            "type": "image",
            "source": {"type": "base64", "media_type": "image/png", "data": PIXEL},
        },
        code=lambda body: body["error"]["type"],
        unavailable=529,
    ),
    "chat": Asking(
        path="/v1/chat/completions",
        prefix="chatcmpl-",
        label="chat_",
        body=lambda text, before: {"messages": _messages(text, before)},
        text=lambda body: body["choices"][0]["message"]["content"],
        picture={
            "type": "image_url",
            "image_url": {"url": f"data:image/png;base64,{PIXEL}"},
        },
        code=lambda body: body["error"]["code"],
    ),
}
# What every API says of a request that is over the limits of its key.
LIMITED = ("rate_limit_exceeded", "rate_limit_error", "rate_limit_exceeded")
apis = pytest.mark.parametrize("asking", ASKING.values(), ids=ASKING)


async def rows_of(served: Served) -> list[Fields]:
    """The turns as the dashboard has them, when all of them are counted."""
    await fetch(served, "GET", "/metrics")
    async with feed(served) as messages:
        _, update = await anext(messages), await anext(messages)
    rows: list[Fields] = update["turns"]
    return rows


def test_every_api_has_its_stories() -> None:
    assert ASKING.keys() == APIS.keys() == set(API_NAMES)


@apis
async def test_operator_finds_a_turn_by_its_id_everywhere(
    asking: Asking, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    access, audit = tmp_path / "access.jsonl", tmp_path / "audit.jsonl"
    logs = {"access_log": str(access), "audit_log": str(audit), "log_format": "json"}
    async with serving(**logs) as served:
        whole = await asking.ask(served)
        streamed = await asking.ask(served, stream=True)
        answers = (whole, streamed)
        assert [answer.status for answer in answers] == [200, 200]
        ids = [asking.id_of(answer) for answer in answers]
        assert len({*ids}) == 2
        # In metrics each transport of each API is counted by itself; the page waits until turns are counted.
        for transport in ("http", "sse"):
            labels = f'outcome="completed",transport="{asking.label}{transport}"'
            assert await metric(served, f"segue_turns_total{{{labels}}}") == 1
        # The dashboard.
        rows = await rows_of(served)
        assert [row["id"] for row in rows] == ids
        assert [row["transport"] for row in rows] == [
            asking.label + "http",
            asking.label + "sse",
        ]
        assert all(row["marks"][-1] for row in rows)
        # The cache report, in the spelling of any API.
        for turn_id in ids:
            number = turn_id.removeprefix(asking.prefix)
            for other in ASKING.values():
                spelled = other.prefix + number
                report = await fetch(served, "GET", f"/v1/responses/{spelled}/cache")
                assert (report.status, report.json["response_id"]) == (200, spelled)
        command = ["explain", ids[1], "--url", served.url]
        assert await asyncio.to_thread(main, command) == 0
        assert capsys.readouterr().out.startswith(f"{ids[1]} ({MODEL})\n")
    lines = [json.loads(line) for line in access.read_text().splitlines()]
    turns = [line for line in lines if line["path"] == asking.path]
    assert [(line["status"], line["response_id"]) for line in turns] == [(200, one) for one in ids]
    assert [line["request_id"] for line in turns] == [
        one.headers["x-request-id"] for one in answers
    ]
    written = [json.loads(line) for line in audit.read_text().splitlines()]
    assert [line["response_id"] for line in written] == ids


@apis
async def test_refusals_are_counted_by_api(asking: Asking) -> None:
    async with serving() as served:
        answer = await asking.ask(served, model="none")
        assert answer.status == 404
        labels = f'outcome="refused",transport="{asking.label}http"'
        assert await metric(served, f"segue_turns_total{{{labels}}}") == 1
        async with feed(served) as messages:
            _, update = await anext(messages), await anext(messages)
        (refusal,) = update["picture"]["refusals"]
        assert (refusal["transport"], refusal["code"]) == (asking.label + "http", "model_not_found")


@apis
async def test_guard_lets_nothing_through(asking: Asking, tmp_path: Path) -> None:
    config = tmp_path / "segue.toml"
    config.write_text(RULES)
    said = script(tmp_path, {"text": "This is forbidden to say."})
    async with serving(config=str(config), guard=["rules"], script=said) as served:
        for streams in (False, True):
            given = await asking.ask(served, "Is this forbidden?", stream=streams)
            assert b"to say" not in given.body
            made = await asking.ask(served, "Speak.", stream=streams)
            assert made.status == 200
            assert b"to say" not in made.body
        assert await metric(served, "segue_guard_chars_checked_total") > 0


@pytest.mark.parametrize("name", API_NAMES)
async def test_limits_of_a_key_hold_for_all_apis_together(name: str) -> None:
    """Two requests a minute, whichever way they come; the third is refused in the words of its API."""
    asking = ASKING[name]
    async with serving(auth="keys") as served:
        state = served.app.state
        limits = KeyLimits(requests_per_min=2)
        _, secret = await issue_key(state.store.keys, state.hashes, "k", "ada", limits=limits)
        headers = {"Authorization": f"Bearer {secret}"}
        for other in (each for key, each in ASKING.items() if key != name):
            assert (await other.ask(served, headers=headers)).status == 200
        refused = await asking.ask(served, headers=headers)
        assert refused.status == 429
        assert asking.code(refused.json) == dict(zip(API_NAMES, LIMITED, strict=True))[name]
        assert int(refused.headers["retry-after"]) > 0
        assert (await asking.ask(served)).status == 401


@apis
async def test_tokens_count_against_the_quota_of_a_key(asking: Asking) -> None:
    async with serving(auth="keys") as served:
        state = served.app.state
        limits = KeyLimits(tokens_per_min=20)
        _, secret = await issue_key(state.store.keys, state.hashes, "k", "ada", limits=limits)
        headers = {"Authorization": f"Bearer {secret}"}
        assert (await asking.ask(served, "word " * 40, headers)).status == 200
        await fetch(served, "GET", "/metrics")
        await until(lambda: not served.app.runner.running_count)
        assert (await asking.ask(served, headers=headers)).status == 429


@apis
async def test_picture_for_a_model_that_sees_none_is_said_in_words_or_refused(
    asking: Asking,
) -> None:
    before = [{"role": "user", "content": [asking.picture]}]
    async with serving() as served:
        assert (await asking.ask(served, "What is it?", before=before)).status == 200
        assert [row["unseen"] for row in await rows_of(served)] == [1]
    async with serving(unseen="refuse") as served:
        refused = await asking.ask(served, "What is it?", before=before)
        assert refused.status == 400
        assert b"does not support image" in refused.body


@apis
@pytest.mark.parametrize("view", ["text", "hidden"])
async def test_operator_decides_whether_reasoning_is_shown(
    asking: Asking, view: str, tmp_path: Path
) -> None:
    played = script(tmp_path, {"reasoning": "Deep in thought.", "text": "Hello there."})
    asks = {"messages": {"thinking": {"type": "enabled", "budget_tokens": 1024}}}
    fields = next(
        (asks[name] for name, one in ASKING.items() if one is asking and name in asks), {}
    )
    async with serving(script=played, reasoning=view) as served:
        for streams in (False, True):
            answer = await asking.ask(served, stream=streams, **fields)
            assert (b"Deep" in answer.body) is (view == "text")
            assert b"Hello" in answer.body


@apis
async def test_server_that_stops_ends_what_runs_and_refuses_the_rest(asking: Asking) -> None:
    async with serving(tps=20) as served:
        stream = asyncio.create_task(asking.ask(served, "Tell me. " * 50, stream=True))
        await until(lambda: served.app.runner.running_count)
        stopping = asyncio.create_task(served.app.runner.drain(0.1))
        await until(lambda: served.app.runner.is_draining)
        refused = await asking.ask(served)
        assert refused.status == asking.unavailable
        await stopping
        answer = await stream
        # Whole, with an end that the client understands.
        assert answer.status in (200, asking.unavailable)
        assert b"error" in answer.body or b"DONE" in answer.body or b"message_stop" in answer.body
        assert not served.app.runner.running_count


def test_two_workers_serve_all_apis_and_explain_each_others_turns(tmp_path: Path) -> None:
    async def story(served: ServedProcess) -> None:
        for asking in ASKING.values():
            answers = [await asking.ask(served, stream=streams) for streams in (False, True) * 3]
            assert {answer.status for answer in answers} == {200}
            for turn_id in map(asking.id_of, answers):
                report = await fetch(served, "GET", f"/v1/responses/{turn_id}/cache")
                assert report.status == 200
            labels = f'outcome="completed",transport="{asking.label}sse"'
            assert await metric(served, f"segue_turns_total{{{labels}}}") == 3

    with served_process("--workers", "2", cwd=tmp_path) as served:
        asyncio.run(story(served))
        assert served.stop() == 0
    assert f"  APIs       {', '.join(ASKING)}\n" in served.printed


ROOMS = {"messages": "segue.messages", "chat": "segue.completions"}


@apis
def test_api_is_loaded_by_its_first_request(asking: Asking, tmp_path: Path) -> None:
    profiled = {"PYTHONPROFILEIMPORTTIME": "1"}
    with served_process("--store", "memory", cwd=tmp_path, environment=profiled) as served:
        assert asyncio.run(asking.ask(served)).status == 200
        assert served.stop() == 0
    loaded = loaded_modules(served)
    for name, room in ROOMS.items():
        assert f"{room}.api" in loaded
        assert (f"{room}.routes" in loaded) is (asking is ASKING[name])
        assert (f"{room}.request" in loaded) is (asking is ASKING[name])


# How clients of each API name a session: headers, and fields of the request.
SESSIONS: Mapping[str, Callable[[str], tuple[Mapping[str, str], Fields]]] = {
    "responses": lambda name: ({}, {"prompt_cache_key": name}),
    "messages": lambda name: ({"X-Claude-Code-Session-Id": name}, {}),
    "chat": lambda name: ({"x-session-id": name}, {}),
}


@pytest.mark.parametrize("name", API_NAMES)
async def test_conversations_keep_their_replica_and_sessions_are_only_hints(name: str) -> None:
    asking = ASKING[name]
    async with staged() as (served, _):

        async def go_on(session: str, past: list[Fields], words: str) -> None:
            """The next turn of a conversation whose client sends all of it."""
            headers, fields = SESSIONS[name](session)
            answer = await asking.ask(served, words, headers, past, model="counted", **fields)
            assert answer.status == 200
            said = {"role": "assistant", "content": asking.text(answer.json)}
            past += [{"role": "user", "content": words}, said]

        # Two conversations of one session, in turn: a loop, and a side call with other words.
        talks: dict[str, list[Fields]] = {"First of all " * 30: [], "Something else " * 30: []}
        for words in [*talks] * 3:
            await go_on("one", talks[words], words)
        chains: dict[str, set[str]] = {}
        for row in await rows_of(served):
            chains.setdefault(row["chain"], set()).add(row["replica"])
        assert [len(replicas) for replicas in chains.values()] == [1, 1]
        # The same words in another session are another conversation.
        await go_on("another", [], "First of all " * 30)
        assert len({row["chain"] for row in await rows_of(served)}) == 3


@apis
async def test_api_that_is_off_says_so_in_its_own_shape(asking: Asking) -> None:
    name = next(name for name, one in ASKING.items() if one is asking)
    others = [other for other in API_NAMES if other != name]
    async with serving(apis=others) as served:
        refused = await asking.ask(served)
        assert refused.status == 404
        assert asking.code(refused.json) in ("unknown_url", "not_found_error")
        message = refused.json["error"]["message"]
        assert f"The API '{name}' is switched off: --apis" in message
        for other in others:
            assert (await ASKING[other].ask(served)).status == 200
        described = (await fetch(served, "GET", "/openapi.json")).json["paths"]
        assert asking.path not in described


async def test_commands_say_which_api_they_miss() -> None:
    async with serving(apis=["messages"]) as served:
        for command in (["explain", "msg_1"], ["chat"]):
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "segue_cli.cli", *command, "--url", served.url),
                stdin=PIPE,
                stdout=PIPE,
                stderr=STDOUT,
            )
            said, _ = await process.communicate(b"Hello\n")
            assert process.returncode == 2
            assert b"The API 'responses' is switched off: --apis" in said


async def test_alias_of_a_pattern_is_answered_by_every_api(tmp_path: Path) -> None:
    config = tmp_path / "segue.toml"
    config.write_text('[[models]]\nname = "own"\naliases = ["claude-*"]\n')
    async with serving(config=str(config)) as served:
        for asking in ASKING.values():
            answer = await asking.ask(served, model="claude-sonnet-5")
            assert (answer.status, answer.json["model"]) == (200, "claude-sonnet-5")
        assert await metric(served, 'segue_output_tokens_total{model="own"}') > 0
