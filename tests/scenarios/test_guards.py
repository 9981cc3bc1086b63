"""Guards in front of a real server: what is checked, what is held, what leaves, and what it costs.

The guard of most stories is one that the test opens and closes by hand, named in the settings as an operator would
name one of their own.
"""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from segue.accounts.account import LOCAL
from segue.accounts.hashes import issue_key
from segue.errors import Misconfigured
from segue.seams.guard import PASSED, Verdict
from segue.server.models import build_models
from segue.settings.checks import load_settings
from segue.settings.values import Settings
from tests.documents.papers import pdf
from tests.scenarios.test_mcp import DONE, echoing, hosting_own
from tests.support import MODEL, WAIT_S, WEATHER, Wire, fetch, metric, serving, wire

CHECKED = "segue_guard_chars_checked_total"
WATCHED = "segue_guard_chars_watched_total"
RULES = '[guard_rules]\npatterns = ["(?i)forbidden"]\n'
Flags = dict[str, Any]


class HandGuard:
    """Waits for the test before it answers, and remembers what it was shown."""

    def __init__(self) -> None:
        self.checked: list[str] = []
        self.watched: list[str] = []
        self.may_answer = asyncio.Event()
        self.was_asked = asyncio.Event()
        self.verdict = PASSED
        # Texts with this word are blocked.
        self.forbidden = ""

    @property
    def name(self) -> str:
        return "by-hand"

    async def check(self, texts: Sequence[str]) -> Verdict:
        self.checked += texts
        self.was_asked.set()
        await self.may_answer.wait()
        if self.forbidden and any(self.forbidden in text for text in texts):
            return Verdict("no")
        return self.verdict

    async def watch(self, text: str) -> Verdict:
        self.watched.append(text)
        return PASSED


BY_HAND: list[HandGuard] = []


def by_hand(settings: Settings) -> HandGuard:
    guard = HandGuard()
    BY_HAND.append(guard)
    return guard


HAND = {"guard": [f"{__name__}:by_hand"], "guard_sides": "input"}


@pytest.fixture(autouse=True)
def _forget() -> None:
    BY_HAND.clear()


def configured(path: Path, text: str) -> Flags:
    """The settings in this TOML."""
    file = path / "segue.toml"
    file.write_text(text)
    return {"config": str(file)}


@pytest.fixture
def rules(tmp_path: Path) -> Flags:
    """One word is forbidden."""
    return {"guard": ["rules"], **configured(tmp_path, RULES)}


def script(path: Path, *turns: dict[str, Any]) -> str:
    file = path / "script.json"
    file.write_text(json.dumps({"turns": turns}))
    return str(file)


def text_of(response: dict[str, Any]) -> str:
    return "".join(
        part["text"]
        for item in response["output"]
        if item["type"] == "message"
        for part in item["content"]
    )


# --- the input ----------------------------------------------------------------------------------------


async def test_blocked_input_is_a_failed_response_on_a_stream_and_a_status_in_plain_json(
    rules: Flags,
) -> None:
    async with serving(**rules) as served, wire(served) as socket:
        await socket.create(input="Something forbidden.", store=False)
        events = await socket.events()
        assert [event["type"] for event in events] == [
            "response.created",
            "response.in_progress",
            "response.failed",
        ]
        assert events[-1]["response"]["error"]["code"] == "invalid_prompt"
        assert events[-1]["response"]["output"] == []
        body = {"model": MODEL, "input": "Something forbidden."}
        answer = await fetch(served, "POST", "/v1/responses", body)
        assert (answer.status, answer.json["error"]["code"]) == (400, "invalid_prompt")
        streamed = await fetch(served, "POST", "/v1/responses", body | {"stream": True})
        assert streamed.events[-1]["type"] == "response.failed"
        # The socket is still good.
        assert (await socket.turn(input="Hello."))["type"] == "response.completed"


async def test_answer_is_held_until_the_verdict_and_heartbeats_go_on() -> None:
    async with serving(**HAND, heartbeat_s=0.05) as served, wire(served) as socket:
        await socket.create(input="Hello.", store=False)
        guard = BY_HAND[0]
        async with asyncio.timeout(WAIT_S):
            await guard.was_asked.wait()
        seen = [await socket.next() for _ in range(5)]
        assert {event["type"] for event in seen} == {"response.created", "response.in_progress"}
        guard.may_answer.set()
        events = seen + await socket.events()
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert "You said: Hello." in text_of(events[-1]["response"])
        assert guard.checked == ["Hello."]


async def test_blocked_input_stops_the_engine_and_is_charged_as_far_as_it_went(
    tmp_path: Path,
) -> None:
    file = script(tmp_path, {"text": "Once upon a time", "pad_tokens": 10_000})
    flags = HAND | {"script": file, "tps": 200, "heartbeat_s": 0.05}
    async with serving(**flags) as served, wire(served) as socket:
        await socket.create(input="Hello.", store=False)
        guard = BY_HAND[0]
        # Some heartbeats long the engine samples and everything is held.
        early = {(await socket.next())["type"] for _ in range(8)}
        assert early == {"response.created", "response.in_progress"}
        guard.verdict = Verdict("it is not nice")
        guard.may_answer.set()
        failed = (await socket.events())[-1]["response"]
        assert failed["status"] == "failed"
        assert "it is not nice" in failed["error"]["message"]
        assert failed["output"] == []
        assert failed["usage"]["input_tokens"] > 0
        assert 0 < failed["usage"]["output_tokens"] < 5_000
        assert served.app.runner.running_count == 0


async def test_only_what_is_new_is_checked_also_after_a_reload(
    tmp_path: Path, rules: Flags
) -> None:
    flags = rules | {"store": f"sqlite:///{tmp_path / 'a.db'}"}
    head = {"instructions": "Be brief.", "tools": [WEATHER], "tool_choice": "none"}
    async with serving(**flags) as served, wire(served) as socket:
        first = await socket.turn(input="x" * 5_000, **head)
        tools_chars = await metric(served, CHECKED) - 5_000 - len("Be brief.")
        assert tools_chars > 50
        before = await metric(served, CHECKED)
        second = await socket.turn(
            input="Go on.", previous_response_id=first["response"]["id"], **head
        )
        assert await metric(served, CHECKED) - before == len("Go on.")
        before = await metric(served, CHECKED)
        await socket.turn(
            input="Go on.",
            previous_response_id=second["response"]["id"],
            **head | {"instructions": "Be long."},
        )
        assert await metric(served, CHECKED) - before == len("Go on.") + len("Be long.")
    async with serving(**flags) as served:
        body = {
            "model": MODEL,
            "input": "And on.",
            "previous_response_id": second["response"]["id"],
            **head,
        }
        assert (await fetch(served, "POST", "/v1/responses", body)).status == 200
        assert await metric(served, CHECKED) == len("And on.")


async def test_history_is_checked_once_more_when_the_rules_are_others(
    tmp_path: Path, rules: Flags
) -> None:
    store = f"sqlite:///{tmp_path / 'a.db'}"
    async with serving(store=store) as served:
        body = {"model": MODEL, "input": "Something forbidden."}
        first = (await fetch(served, "POST", "/v1/responses", body)).json
        assert await metric(served, CHECKED) == 0
    async with serving(store=store, **rules) as served:
        body = {"model": MODEL, "input": "Go on.", "previous_response_id": first["id"]}
        answer = await fetch(served, "POST", "/v1/responses", body)
        assert (answer.status, answer.json["error"]["code"]) == (400, "invalid_prompt")


async def test_tool_output_is_checked(rules: Flags) -> None:
    async with serving(**rules) as served, wire(served) as socket:
        last = await socket.turn(input="Weather?", tools=[WEATHER], store=False)
        call = last["response"]["output"][0]
        output = {"type": "function_call_output", "call_id": call["call_id"], "output": "FORBIDDEN"}
        last = await socket.turn(
            previous_response_id=last["response"]["id"], input=[output], store=False
        )
        assert last["response"]["error"]["code"] == "invalid_prompt"


async def test_what_a_rollout_is_given_later_is_checked(rules: Flags) -> None:
    async with serving(**rules) as served, wire(served) as socket:
        await socket.create(input="Weather?", tools=[WEATHER], store=False, rollout=True)
        event = await socket.next()
        while event["type"] != "response.done":
            event = await socket.next()
        before = await metric(served, CHECKED)
        output = {
            "type": "function_call_output",
            "call_id": event["required_input"][0]["call_id"],
            "output": "forbidden",
        }
        await socket.send(
            {"type": "response.append", "response_id": event["response_id"], "input": [output]}
        )
        failed = (await socket.events())[-1]["response"]
        assert failed["error"]["code"] == "invalid_prompt"
        assert [item["type"] for item in failed["output"]] == ["function_call"]
        assert await metric(served, CHECKED) - before > len("forbidden")


async def test_warm_up_is_checked_and_its_verdict_holds_for_its_child(rules: Flags) -> None:
    async with serving(**rules) as served, wire(served) as socket:
        bad = await socket.turn(input="Forbidden.", generate=False, store=False)
        assert bad["response"]["error"]["code"] == "invalid_prompt"
        good = await socket.turn(input="Allowed.", generate=False, store=False)
        assert good["type"] == "response.completed"
        before = await metric(served, CHECKED)
        last = await socket.turn(
            input="More.", previous_response_id=good["response"]["id"], store=False
        )
        assert last["type"] == "response.completed"
        assert await metric(served, CHECKED) - before == len("More.")


async def test_cancel_does_not_wait_for_a_verdict_and_leaks_nothing() -> None:
    async with serving(**HAND) as served:
        body = {"model": MODEL, "input": "Hello.", "background": True}
        queued = (await fetch(served, "POST", "/v1/responses", body)).json
        guard = BY_HAND[0]
        async with asyncio.timeout(WAIT_S):
            await guard.was_asked.wait()
        path = f"/v1/responses/{queued['id']}"
        cancelled = (await fetch(served, "POST", f"{path}/cancel")).json
        assert (cancelled["status"], cancelled["output"]) == ("cancelled", [])


# --- the answer ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("tps", [0, 400])
async def test_blocked_answer_ends_incomplete_with_what_has_passed(
    tmp_path: Path, tps: int, rules: Flags
) -> None:
    words = "This much is fine. " * 20 + "Here it is: FORBIDDEN fruit. " + "And more. " * 100
    file = script(tmp_path, {"text": words}, {"text": "Fine again."})
    flags = rules | {"script": file, "check_rendering": True}
    async with (
        serving(**flags, guard_window_chars=100, tps=tps) as served,
        wire(served) as socket,
    ):
        await socket.create(input="Tell me.", store=False)
        events = await socket.events()
        last = events[-1]
        assert last["type"] == "response.incomplete"
        assert last["response"]["incomplete_details"] == {"reason": "content_filter"}
        told = "".join(event.get("delta", "") for event in events)
        assert told == text_of(last["response"])
        assert words.startswith(told)
        assert "FORBIDDEN" not in told
        # At most a window is held back.
        assert words.index("FORBIDDEN") - len(told) <= 100 + len("FORBIDDEN")
        assert last["response"]["output"][0]["status"] == "incomplete"
        assert last["response"]["usage"]["output_tokens"] > 0
        # It can be continued, from what was told.
        after = await socket.turn(
            input="Go on.", previous_response_id=last["response"]["id"], store=False
        )
        assert after["type"] == "response.completed"


async def test_answer_that_passes_is_told_whole_and_in_order(tmp_path: Path, rules: Flags) -> None:
    words = "One, two, three. " * 200
    file = script(tmp_path, {"reasoning": "Let me count. " * 30, "text": words})
    async with (
        serving(**rules, script=file, guard_window_chars=64) as served,
        wire(served) as socket,
    ):
        await socket.create(input="Count.", store=False)
        events = await socket.events()
        assert events[-1]["type"] == "response.completed"
        assert text_of(events[-1]["response"]) == words
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert await metric(served, WATCHED) == len(words) + len("Let me count. " * 30)


async def test_guard_of_answers_alone_checks_no_input(tmp_path: Path, rules: Flags) -> None:
    file = script(tmp_path, {"text": "Fine."})
    async with serving(**rules, guard_sides="output", script=file) as served:
        body = {"model": MODEL, "input": "Forbidden."}
        assert (await fetch(served, "POST", "/v1/responses", body)).json["status"] == "completed"
        assert await metric(served, CHECKED) == 0
        assert await metric(served, WATCHED) == len("Fine.")


async def test_answer_blocked_at_once_shows_no_item(tmp_path: Path, rules: Flags) -> None:
    file = script(tmp_path, {"text": "Forbidden."})
    async with serving(**rules, script=file) as served:
        body = {"model": MODEL, "input": "Tell me."}
        answer = await fetch(served, "POST", "/v1/responses", body)
        assert answer.status == 200
        assert answer.json["status"] == "incomplete"
        assert answer.json["output"] == []


async def test_summary_of_a_compaction_is_watched(tmp_path: Path, rules: Flags) -> None:
    file = script(tmp_path, {"text": "A forbidden summary."})
    async with serving(**rules, script=file) as served:
        body = {"model": MODEL, "input": [{"role": "user", "content": "Hello."}]}
        answer = await fetch(served, "POST", "/v1/responses/compact", body)
        assert (answer.status, answer.json["error"]["code"]) == (400, "invalid_prompt")


# --- who guards ---------------------------------------------------------------------------------------


async def test_nothing_is_checked_unless_a_guard_is_named(tmp_path: Path) -> None:
    async with serving(**configured(tmp_path, RULES)) as served, wire(served) as socket:
        assert (await socket.turn(input="Forbidden."))["type"] == "response.completed"
        assert await metric(served, CHECKED) == await metric(served, WATCHED) == 0


async def test_each_model_and_each_owner_has_its_own_guards(tmp_path: Path) -> None:
    models = '[[models]]\nname = "open"\n[[models]]\nname = "strict"\nguard = ["rules"]\n'
    async with serving(**configured(tmp_path, RULES + models)) as served:
        for model, status in (("open", 200), ("strict", 400)):
            body = {"model": model, "input": "Forbidden."}
            assert (await fetch(served, "POST", "/v1/responses", body)).status == status
    owners = f"[guard_owners]\n{LOCAL} = []\n"
    async with serving(**configured(tmp_path, RULES + models + owners)) as served:
        body = {"model": "strict", "input": "Forbidden."}
        assert (await fetch(served, "POST", "/v1/responses", body)).status == 200


async def test_key_has_the_guards_of_its_owner(tmp_path: Path) -> None:
    flags = configured(tmp_path, RULES + '[guard_owners]\nada = ["rules"]\n')
    async with serving(**flags, auth="keys") as served:
        for owner, status in (("ada", 400), ("bob", 200)):
            _, secret = await issue_key(
                served.app.state.store.keys, served.app.state.hashes, "test", owner
            )
            body = {"model": MODEL, "input": "Forbidden."}
            headers = {"authorization": f"Bearer {secret}"}
            answer = await fetch(served, "POST", "/v1/responses", body, headers)
            assert answer.status == status


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"guard": ["rulez"]}, "rulez"),
        ({"guard": ["no.such:thing"]}, "cannot be imported"),
        ({"guard": ["moderation"]}, "guard_url"),
        ({"guard": ["classifier"]}, "guard_classifier"),
    ],
)
def test_operator_is_told_what_a_guard_lacks(flags: Flags, words: str) -> None:
    settings = load_settings({"engine": "scripted", "store": "memory"} | flags, environment={})
    with pytest.raises(Misconfigured, match=words):
        build_models(settings)


# --- an endpoint for moderation -----------------------------------------------------------------------


@asynccontextmanager
async def endpoint(answer: Any) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_post("/v1/moderations", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    finally:
        await runner.cleanup()


async def test_endpoint_that_fails_blocks_or_lets_pass_as_the_operator_says() -> None:
    async def broken(request: web.Request) -> web.Response:
        return web.Response(status=500)

    async with endpoint(broken) as url:
        flags = {"guard": ["moderation"], "guard_url": url}
        async with serving(**flags) as served:
            body = {"model": MODEL, "input": "Hello."}
            answer = await fetch(served, "POST", "/v1/responses", body)
            assert (answer.status, answer.json["error"]["code"]) == (503, "server_is_overloaded")
            assert "retry-after" in answer.headers
        async with serving(**flags, guard_unreachable="pass") as served:
            answer = await fetch(served, "POST", "/v1/responses", body)
            assert answer.status == 200


# --- what else goes through the gate ------------------------------------------------------------------


async def test_steer_is_checked_with_the_response_that_follows_it(
    tmp_path: Path, rules: Flags
) -> None:
    file = script(tmp_path, {"text": "A long story. " * 80}, {"text": "Short."})
    async with (
        serving(**rules, script=file, tps=400, guard_window_chars=64) as served,
        wire(served) as socket,
    ):
        await socket.create(input="Tell me.", store=False)
        event = first = await socket.next()
        while event["type"] != "response.output_text.delta":
            event = await socket.next()
        target = first["response"]["id"]
        await socket.send(
            {"type": "response.steer", "previous_response_id": target, "input": "Forbidden."}
        )
        steered = (await socket.events())[-1]["response"]
        assert steered["incomplete_details"] == {"reason": "steered"}
        successor = (await socket.events())[-1]["response"]
        assert successor["previous_response_id"] == target
        assert successor["error"]["code"] == "invalid_prompt"


async def ask_for_a_yes(socket: Wire, **fields: Any) -> tuple[str, dict[str, Any]]:
    """A turn that ends, or waits, with a call that a person must allow: its id, and the yes."""
    await socket.create(input="Go", tools=[{"type": "mcp", "server_label": "own"}], **fields)
    (guard,) = BY_HAND
    async with asyncio.timeout(WAIT_S):
        await guard.was_asked.wait()
    guard.may_answer.set()
    asked, turn_id = "", ""
    event = await socket.next()
    while event["type"] not in ("response.completed", "response.done"):
        turn_id = turn_id or event["response"]["id"]
        if event["type"] == "response.output_item.done":
            asked = event["item"]["id"]
        event = await socket.next()
    guard.may_answer.clear()
    guard.was_asked.clear()
    yes = {"type": "mcp_approval_response", "approval_request_id": asked, "approve": True}
    return turn_id, yes


@pytest.mark.parametrize("is_blocked", [False, True])
@pytest.mark.parametrize("is_rollout", [False, True])
async def test_approved_call_waits_for_the_verdict_on_what_came_with_the_yes(
    is_rollout: bool, is_blocked: bool, tmp_path: Path
) -> None:
    async with (
        hosting_own(tmp_path, echoing("a"), DONE, **HAND) as (served, far),
        wire(served) as socket,
    ):
        turn_id, yes = await ask_for_a_yes(socket, rollout=is_rollout)
        (guard,) = BY_HAND
        given = [{**yes, "reason": "Now."}]
        if is_rollout:
            append = {"type": "response.append", "response_id": turn_id, "input": given}
            await socket.send(append)
        else:
            tool = {"type": "mcp", "server_label": "own"}
            await socket.create(input=given, tools=[tool], previous_response_id=turn_id)
        async with asyncio.timeout(WAIT_S):
            await guard.was_asked.wait()
        before, shown = list(far.calls), sum("Now." in text for text in guard.checked)
        if is_blocked:
            guard.verdict = Verdict("no")
        guard.may_answer.set()
        last = (await socket.events())[-1]["response"]
    assert (before, shown) == ([], 1)
    if is_blocked:
        assert last["error"]["code"] == "invalid_prompt"
        assert far.calls == []
    else:
        assert [one["type"] for one in last["output"]][-2:] == ["mcp_call", "message"]
        assert far.calls == ["a"]
        assert sum("Now." in text for text in guard.checked) == 1, "nothing is shown twice"


async def test_tool_of_the_server_waits_for_the_verdict(tmp_path: Path) -> None:
    pay = {"type": "function", "name": "pay", "description": "Pays.", "defer_loading": True}
    find = {"calls": [{"name": "tool_search", "arguments": {"query": "pay"}}]}
    file = script(tmp_path, find, {"text": "Done."})
    async with serving(**HAND, script=file, heartbeat_s=0.05) as served, wire(served) as socket:
        await socket.create(input="Pay.", tools=[pay, {"type": "tool_search"}], store=False)
        guard = BY_HAND[0]
        async with asyncio.timeout(WAIT_S):
            await guard.was_asked.wait()
        early = {(await socket.next())["type"] for _ in range(5)}
        assert early == {"response.created", "response.in_progress"}
        guard.may_answer.set()
        last = (await socket.events())[-1]["response"]
        kinds = [item["type"] for item in last["output"]]
        assert kinds == ["tool_search_call", "tool_search_output", "message"]
        # What the tool has found was shown to the guard as well.
        shown = '{"type": "function", "function": {"name": "pay", "description": "Pays."}}'
        assert guard.checked.count(shown) == 2


@pytest.mark.parametrize("word, types", [("Says it", []), ("forbidden fruit", ["mcp_call"])])
async def test_what_a_tool_of_the_server_has_found_is_checked_before_it_leaves(
    word: str, types: list[str], tmp_path: Path
) -> None:
    """The list of a remote server's tools, and the output of a call: the client gets neither."""
    turns = (echoing("forbidden fruit"), DONE)
    async with hosting_own(tmp_path, *turns, **HAND) as (served, far), wire(served) as socket:
        tool = {"type": "mcp", "server_label": "own", "require_approval": "never"}
        (guard,) = BY_HAND
        guard.forbidden = word
        guard.may_answer.set()
        await socket.create(input="Go", tools=[tool], store=False)
        events = await socket.events()
    assert events[-1]["response"]["error"]["code"] == "invalid_prompt"
    done = [one["item"] for one in events if one["type"] == "response.output_item.done"]
    assert [one["type"] for one in done] == ["mcp_list_tools", *types]
    assert word not in json.dumps([one.get("output") or one.get("tools") for one in done])
    assert far.calls == ["forbidden fruit"] * len(types)
    assert sum("Says it" in text for text in guard.checked) == 1, "nothing is shown twice"


async def test_compaction_of_a_blocked_conversation_fails(tmp_path: Path, rules: Flags) -> None:
    file = script(tmp_path, {"text": "A summary."})
    async with serving(**rules, script=file) as served:
        body = {"model": MODEL, "input": [{"role": "user", "content": "Forbidden."}]}
        answer = await fetch(served, "POST", "/v1/responses/compact", body)
        assert (answer.status, answer.json["error"]["code"]) == (400, "invalid_prompt")
        body = {"model": MODEL, "input": [{"role": "user", "content": "Fine."}]}
        assert (await fetch(served, "POST", "/v1/responses/compact", body)).status == 200


async def test_stop_of_the_server_does_not_wait_for_a_verdict() -> None:
    async with asyncio.timeout(WAIT_S):
        async with serving(**HAND) as served, wire(served) as socket:
            await socket.create(input="Hello.")
            await BY_HAND[0].was_asked.wait()
            draining = asyncio.create_task(served.app.drain(0))
            assert (await socket.events())[-1]["type"] == "response.failed"
            await draining


async def test_words_of_a_pdf_are_checked_as_the_model_reads_them(rules: Flags) -> None:
    data = base64.b64encode(pdf("Something forbidden stands here.")).decode()
    file = {"type": "input_file", "filename": "a.pdf", "file_data": data}
    asked = {"model": MODEL, "input": [{"role": "user", "content": [file]}]}
    async with serving(**rules) as served:
        answer = await fetch(served, "POST", "/v1/responses", asked)
    assert (answer.status, answer.json["error"]["code"]) == (400, "invalid_prompt")


@pytest.mark.parametrize("data", ["aGVsbG8=", "AAAA"])
async def test_name_of_a_file_is_checked(rules: Flags, data: str) -> None:
    """Of a text and of what cannot be read: the model reads the name of either."""
    file = {"type": "input_file", "filename": "forbidden.txt", "file_data": data}
    async with serving(**rules) as served:
        for item in (
            {"role": "user", "content": [file]},
            {"type": "function_call_output", "call_id": "c", "output": [file]},
        ):
            call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
            asked = {"model": MODEL, "input": [call, item] if "call_id" in item else [item]}
            answer = await fetch(served, "POST", "/v1/responses", asked)
            assert (answer.status, answer.json["error"]["code"]) == (400, "invalid_prompt")
