"""Clients of the Messages API over real sockets: the same turn in their words, streamed and whole."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest

from segue.accounts.hashes import issue_key
from segue.limits import KeyLimits
from tests.chat import script
from tests.engines.fakes.chat import FakeChat, delta, usage
from tests.message_events import (
    BASH,
    HELLO,
    MESSAGES,
    VERSION,
    ask,
    both,
    events_of,
    joined,
    prompt_of,
)
from tests.support import MODEL, Served, fetch, metric, serving, until

PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR4nGNgYPj/HwADAgH/p0M5TwAAAABJRU5ErkJggg=="
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PIXEL}}
CALL = {"name": "bash", "arguments": {"command": "ls -l", "n": 1.5}}
TOO_LONG = re.compile(r"^prompt is too long: \d+ tokens > \d+ maximum$")


def results(message: dict[str, Any], *texts: str) -> list[dict[str, Any]]:
    """The history after this answer, with these results of its calls."""
    calls = [block["id"] for block in message["content"] if block["type"] == "tool_use"]
    blocks = [
        {"type": "tool_result", "tool_use_id": call, "content": text}
        for call, text in zip(calls, texts, strict=True)
    ]
    content = message["content"]
    return [{"role": "assistant", "content": content}, {"role": "user", "content": blocks}]


# --- answers ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "turn, kinds, reason",
    [
        ({"text": "Hello there."}, ["text"], "end_turn"),
        ({"reasoning": "Let me see.", "text": "Hello."}, ["thinking", "text"], "end_turn"),
        ({"text": "I look.", "calls": [CALL]}, ["text", "tool_use"], "tool_use"),
        (
            {"reasoning": "Two.", "calls": [CALL, {"name": "bash", "arguments": {}}]},
            ["thinking", "tool_use", "tool_use"],
            "tool_use",
        ),
    ],
)
async def test_stream_and_object_say_the_same(
    tmp_path: Path, turn: dict[str, Any], kinds: list[str], reason: str
) -> None:
    async with serving(script=script(tmp_path, turn)) as served:
        message = await both(served, tools=[BASH])
    content = message["content"]
    assert [block["type"] for block in content] == kinds
    assert (message["stop_reason"], message["stop_sequence"]) == (reason, None)
    assert message["id"].startswith("msg_")
    assert message["model"] == MODEL
    called = [block for block in content if block["type"] == "tool_use"]
    assert [block["input"] for block in called] == [
        call["arguments"] for call in turn.get("calls", [])
    ]
    assert all(re.fullmatch("toolu_[a-zA-Z0-9_-]+", block["id"]) for block in called)


async def test_agent_goes_on_with_results_in_the_order_in_which_they_came(tmp_path: Path) -> None:
    turns = ({"reasoning": "Both.", "calls": [CALL, CALL]}, {"text": "Done."})
    async with serving(script=script(tmp_path, *turns)) as served:
        message = await both(served, tools=[BASH])
        answer, given = results(message, "one", "two")
        given["content"] = given["content"][::-1]
        given["content"].append({"type": "text", "text": "Go on."})
        done = await both(served, [*HELLO, answer, given], tools=[BASH])
    assert done["content"][0]["text"] == "Done."


async def test_thought_comes_back_by_its_signature_alone(tmp_path: Path) -> None:
    """With `display: omitted` nothing of a thought is readable, and the prompt goes on with it all the same."""
    turns = ({"reasoning": "Secret plan.", "calls": [CALL]}, {"text": "Done."})
    hidden = {"thinking": {"type": "adaptive", "display": "omitted"}, "tools": [BASH]}
    async with serving(script=script(tmp_path, *turns)) as served:
        message = await both(served, **hidden)
        thought = message["content"][0]
        assert (thought["type"], thought["thinking"]) == ("thinking", "")
        assert "Secret" not in json.dumps(message)
        with_thought = await both(served, [*HELLO, *results(message, "ok")], **hidden)
        bare = {**message, "content": message["content"][1:]}
        # Without the render cache a thought that is left out is missing in the prompt.
        without = await ask(served, [*HELLO, *results(bare, "ok")], **hidden)
    assert with_thought["content"][0]["text"] == "Done."
    assert without.status == 200


async def test_signature_of_another_server_is_no_error() -> None:
    blocks = [
        {"type": "thinking", "thinking": "Mine.", "signature": "from-elsewhere"},
        {"type": "thinking", "thinking": "", "signature": ""},
        {"type": "redacted_thinking", "data": "closed"},
        {"type": "text", "text": "Hi."},
    ]
    history = [*HELLO, {"role": "assistant", "content": blocks}, *HELLO]
    async with serving() as served:
        assert (await ask(served, history)).status == 200


@pytest.mark.parametrize("is_hidden", [True, False])
async def test_operator_hides_thoughts(tmp_path: Path, is_hidden: bool) -> None:
    file = script(tmp_path, {"reasoning": "Secret plan.", "text": "Done."})
    view = "hidden" if is_hidden else "summary"
    async with serving(script=file, reasoning=view) as served:
        thought, text = (await both(served))["content"]
    assert thought["thinking"] == ("" if is_hidden else "Secret plan.")
    assert thought["signature"]
    assert text["text"] == "Done."


async def test_stop_sequence_is_named(tmp_path: Path) -> None:
    async with serving(script=script(tmp_path, {"text": "One, two, END three"})) as served:
        message = await both(served, stop_sequences=["x", "END", "zz"])
        assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "END")
        assert message["content"][0]["text"] == "One, two, "
        many = await ask(served, stop_sequences=[str(number) for number in range(16)])
        assert many.status == 200
        for bad in (list("abcdefghijklmnopq"), [""], ["x" * 257]):
            assert (await ask(served, stop_sequences=bad)).status == 400


async def test_answer_that_is_cut_says_by_what(tmp_path: Path) -> None:
    file = script(tmp_path, {"text": "word " * 100})
    async with serving(script=file, context_tokens=100) as served:
        assert (await both(served, max_tokens=3))["stop_reason"] == "max_tokens"
        # The limit is larger than the context: it is cut, not refused.
        full = await both(served, max_tokens=64_000)
        assert full["stop_reason"] == "model_context_window_exceeded"
        none = await fetch(served, "POST", MESSAGES, {"model": MODEL, "messages": HELLO})
        assert none.json["stop_reason"] == "max_tokens"


async def test_warm_up_reads_the_prompt_and_says_nothing() -> None:
    async with serving() as served:
        message = await both(served, max_tokens=0)
    assert (message["content"], message["usage"]["output_tokens"]) == ([], 0)
    assert message["usage"]["input_tokens"] > 0
    assert message["stop_reason"] == "max_tokens"


async def test_structured_output_is_asked_for_in_both_places() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    format_ = {"type": "json_schema", "schema": schema}
    async with serving() as served:
        for fields in ({"output_config": {"format": format_}}, {"output_format": format_}):
            assert (await ask(served, **fields)).status == 200
        for bad in ({"type": "json_schema"}, {"type": "grammar", "schema": {}}):
            assert (await ask(served, output_config={"format": bad})).status == 400


async def test_tools_are_chosen_by_every_spelling() -> None:
    async with serving() as served:
        for choice in ({"type": "any"}, {"type": "tool", "name": "bash"}, {"type": "auto"}):
            message = (await ask(served, tools=[BASH], tool_choice=choice)).json
            assert message["content"][-1]["name"] == "bash"
        single = {"type": "auto", "disable_parallel_tool_use": True}
        assert (await ask(served, tools=[BASH], tool_choice=single)).status == 200
        none = await ask(served, tools=[BASH], tool_choice={"type": "none"})
        assert none.json["stop_reason"] == "end_turn"
        for bad in ({"type": "tool", "name": "nothing"}, {"type": "tool"}, {"type": "some"}):
            assert (await ask(served, tools=[BASH], tool_choice=bad)).status == 400


async def test_tools_that_clients_run_bring_their_schema() -> None:
    tools = [
        {"type": "bash_20250124", "name": "bash"},
        {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool"},
        {"type": "memory_20250818", "name": "memory"},
    ]
    async with serving() as served:
        for tool in tools:
            choice = {"type": "tool", "name": tool["name"]}
            answer = await ask(served, tools=tools, tool_choice=choice)
            assert answer.json["content"][-1]["name"] == tool["name"]


async def test_image_is_shown_or_described() -> None:
    parts = [{"type": "text", "text": "What is this?"}, IMAGE]
    call = {"type": "tool_use", "id": "toolu_1", "name": "bash", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [IMAGE]}
    history = [
        *HELLO,
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result]},
    ]
    async with serving() as served:
        assert (await ask(served, [{"role": "user", "content": parts}])).status == 200
        assert (await ask(served, history)).status == 200
    async with serving(unseen="refuse") as served:
        assert (await ask(served, [{"role": "user", "content": parts}])).status == 400


async def test_system_messages_and_deferred_tools_leave_the_head_alone() -> None:
    """Neither a new system message nor a tool that was found changes what stands before it."""
    found = {**BASH, "name": "found", "defer_loading": True}
    call = {"type": "tool_use", "id": "toolu_1", "name": "search", "input": {"query": "x"}}
    reference = {"type": "tool_reference", "tool_name": "found"}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [reference]}
    search = {**BASH, "name": "search"}
    history: list[dict[str, Any]] = [
        *HELLO,
        {"role": "system", "content": "Today is Monday."},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result]},
        {"role": "system", "content": "<total_tokens>5 left</total_tokens>"},
    ]
    async with serving() as served:
        few = await count(served, history[:2], tools=[search])
        deferred = await count(served, history[:2], tools=[found, search])
        assert few == deferred
        named = {"type": "tool", "name": "found"}
        answer = await ask(served, history, tools=[found, search], tool_choice=named)
        assert answer.json["content"][-1]["name"] == "found"
        # Before it was found it cannot be called.
        early = await ask(served, history[:2], tools=[found, search], tool_choice=named)
        assert early.status == 400


async def count(served: Served, messages: Any, **fields: Any) -> int:
    body = {"model": MODEL, "messages": messages, **fields}
    answer = await fetch(served, "POST", f"{MESSAGES}/count_tokens", body, VERSION)
    assert answer.status == 200, answer.json
    found: int = answer.json["input_tokens"]
    return found


async def test_count_is_that_of_the_turn() -> None:
    system = [{"type": "text", "text": "Be brief."}]
    async with serving() as served:
        counted = await count(served, HELLO, system=system, tools=[BASH])
        usage = (await ask(served, system=system, tools=[BASH])).json["usage"]
        assert prompt_of(usage) == counted
        answered = [*HELLO, {"role": "assistant", "content": "Hi."}]
        assert await count(served, answered) > await count(served, HELLO)
        missing = {"model": "gpt-9", "messages": HELLO}
        unknown = await fetch(served, "POST", f"{MESSAGES}/count_tokens", missing, VERSION)
    assert (unknown.status, unknown.json["error"]["message"]) == (404, "model: gpt-9")


async def test_billing_header_is_left_out_and_said() -> None:
    billing = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.325.596;"}
    words = {"type": "text", "text": "Be brief."}
    async with serving() as served:
        plain = await ask(served, system=[words])
        billed = await ask(served, system=[billing, words])
    assert prompt_of(billed.json["usage"]) == prompt_of(plain.json["usage"])
    assert billed.headers["x-segue-repairs"] == "billing_header"
    assert "x-segue-repairs" not in plain.headers


async def test_usage_says_what_was_written_to_the_cache_where_something_was_marked() -> None:
    marked = [{"type": "text", "text": "word " * 50, "cache_control": {"type": "ephemeral"}}]
    long = [{**marked[0], "cache_control": {"type": "ephemeral", "ttl": "1h"}}]
    async with serving() as served:
        for content, ttl in ((marked, "5m"), (long, "1h"), ("word " * 50, "")):
            usage = (await both(served, [{"role": "user", "content": content}]))["usage"]
            written = usage["cache_creation_input_tokens"]
            assert written == sum(usage["cache_creation"].values())
            other = {"5m": "1h", "1h": "5m"}.get(ttl, "5m")
            assert usage["cache_creation"][f"ephemeral_{other}_input_tokens"] == 0
            assert ttl or not written


async def test_diagnostics_compare_with_an_earlier_message() -> None:
    async with serving() as served:
        first = (await ask(served, tools=[BASH])).json
        compared = {"diagnostics": {"previous_message_id": first["id"]}}
        same = (await ask(served, tools=[BASH], **compared)).json
        assert same["diagnostics"] is None
        changed = (await ask(served, tools=[{**BASH, "name": "sh"}], **compared)).json
        assert changed["diagnostics"]["cache_miss_reason"]["type"] == "tools_changed"
        missing = {"diagnostics": {"previous_message_id": "msg_" + "0" * 32}}
        lost = (await ask(served, **missing)).json["diagnostics"]["cache_miss_reason"]
        assert lost == {"type": "previous_message_not_found"}


async def test_cache_report_is_kept_under_the_number_of_the_message() -> None:
    async with serving() as served:
        message = (await ask(served)).json
        turn_id = message["id"].replace("msg_", "resp_")
        assert (await fetch(served, "GET", f"/v1/responses/{turn_id}/cache")).status == 200
        assert (await fetch(served, "GET", f"/v1/responses/{turn_id}")).status == 404


# --- models -------------------------------------------------------------------------------------------


async def test_models_have_the_shape_that_the_header_asks_for() -> None:
    async with serving(context_tokens=4_096) as served:
        ours = await fetch(served, "GET", "/v1/models")
        theirs = await fetch(served, "GET", "/v1/models?limit=1000", headers=VERSION)
        card = await fetch(served, "GET", f"/v1/models/{MODEL}", headers=VERSION)
        after = await fetch(served, "GET", f"/v1/models?after_id={MODEL}", headers=VERSION)
        before = await fetch(served, "GET", f"/v1/models?before_id={MODEL}", headers=VERSION)
        missing = await fetch(served, "GET", "/v1/models/none", headers=VERSION)
        wrong = await fetch(served, "GET", "/v1/models?limit=0", headers=VERSION)
        long = await fetch(served, "GET", f"/v1/models?limit={1:09}{5:05000}", headers=VERSION)
    assert ours.json["object"] == "list"
    (model,) = theirs.json["data"]
    assert (model["type"], model["id"], model["max_input_tokens"]) == ("model", MODEL, 4_096)
    assert (theirs.json["has_more"], theirs.json["first_id"]) == (False, MODEL)
    assert card.json == model
    assert after.json["data"] == before.json["data"] == []
    assert (missing.status, missing.json["error"]["message"]) == (404, "model: none")
    assert (wrong.status, wrong.json["type"]) == (400, "error")
    assert long.status == 400


# --- errors -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_prompt_that_is_too_long_is_said_so_that_clients_compact(is_streamed: bool) -> None:
    async with serving(context_tokens=64) as served:
        long = [{"role": "user", "content": "word " * 200}]
        answer = await ask(served, long, stream=is_streamed)
    assert answer.status == 400
    assert answer.json["type"] == "error"
    assert TOO_LONG.match(answer.json["error"]["message"])
    assert answer.json["request_id"] == answer.headers["request-id"]


BAD: list[tuple[dict[str, Any], int, str, str]] = [
    ({"model": "gpt-9"}, 404, "not_found_error", "model: gpt-9"),
    ({"messages": []}, 400, "invalid_request_error", "messages: at least one message is required"),
    (
        {"messages": [{"role": "robot", "content": "x"}]},
        400,
        "invalid_request_error",
        "messages.0.role",
    ),
    ({"messages": [{"role": "user"}]}, 400, "invalid_request_error", "messages.0: Object missing"),
    (
        {"messages": [{"role": "user", "content": [{"type": "hologram"}]}]},
        400,
        "invalid_request_error",
        "messages.0.content.0: content of type 'hologram'",
    ),
    (
        {"messages": [*HELLO, {"role": "assistant", "content": "The answer is ("}]},
        400,
        "invalid_request_error",
        "does not support assistant message prefill",
    ),
    ({"safeguards": [{"type": "x"}]}, 400, "invalid_request_error", "safeguards: "),
    ({"compaction": {"type": "enabled"}}, 400, "invalid_request_error", "compaction: "),
    ({"max_tokens": -1}, 400, "invalid_request_error", "max_tokens: "),
    *(
        (
            {"tools": [{"type": kind, "name": "tool"}]},
            400,
            "invalid_request_error",
            kind.rpartition("_2")[0] or kind,
        )
        for kind in (
            "web_search_20250305",
            "web_fetch_20260209",
            "code_execution_20260120",
            "computer_20251124",
            "browser_toolset_20260801",
            "advisor_20260301",
        )
    ),
    (
        {"tools": [BASH, {"type": "mcp_toolset", "mcp_server_name": "files"}]},
        400,
        "invalid_request_error",
        "'mcp' is not set up on this server",
    ),
]


@pytest.mark.parametrize("fields, status, kind, words", BAD, ids=lambda value: str(value)[:40])
async def test_what_would_be_wrong_in_silence_is_refused(
    fields: dict[str, Any], status: int, kind: str, words: str
) -> None:
    async with serving() as served:
        body = {"model": MODEL, "max_tokens": 10, "messages": HELLO} | fields
        answer = await fetch(served, "POST", MESSAGES, body, VERSION)
    assert (answer.status, answer.json["error"]["type"]) == (status, kind)
    assert words in answer.json["error"]["message"]


async def test_body_that_is_no_request_is_refused_in_the_shape_of_the_api() -> None:
    async with serving() as served:
        for body in (b"", b"{", b"[]", b'{"model": 5}', b"\xff", b"[" * 100_000):
            answer = await fetch(served, "POST", MESSAGES, body, VERSION)
            assert (answer.status, answer.json["type"]) == (400, "error"), body
        wrong = await fetch(served, "GET", MESSAGES)
        assert (wrong.status, wrong.json["error"]["type"]) == (405, "invalid_request_error")
        batches = await fetch(served, "POST", f"{MESSAGES}/batches", {})
        assert (batches.status, batches.json["error"]["type"]) == (404, "not_found_error")


async def test_calls_and_results_that_do_not_fit_are_refused_in_the_words_of_the_api() -> None:
    use = {"type": "tool_use", "id": "toolu_a", "name": "bash", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "toolu_a", "content": "x"}
    called = [*HELLO, {"role": "assistant", "content": [use]}]
    given = {"role": "user", "content": [result]}
    async with serving() as served:
        open_call = (await ask(served, [*called, *HELLO])).json["error"]["message"]
        assert open_call.startswith(
            "messages.1: `tool_use` ids were found without `tool_result` blocks immediately after: toolu_a."
        )
        stray = (await ask(served, [given])).json["error"]["message"]
        assert "unexpected `tool_use_id` found in `tool_result` blocks: toolu_a" in stray
        twice = [*HELLO, {"role": "assistant", "content": [use, use]}, given]
        assert (
            "`tool_use` ids must be unique" in (await ask(served, twice)).json["error"]["message"]
        )
        both_ways = [*called, {"role": "user", "content": [result, result]}]
        message = (await ask(served, both_ways)).json["error"]["message"]
        assert "each tool_use must have a single result" in message


async def test_failure_after_the_start_is_an_event(tmp_path: Path) -> None:
    """The process goes while the model speaks: the client has a message that began, so the error is an event."""
    file = script(tmp_path, {"text": "word " * 1_000})
    async with serving(script=file, tps=50) as served:
        asking = asyncio.create_task(ask(served, stream=True))
        await until(lambda: served.app.runner.running_count)
        (running,) = served.app.runner.registry.running.values()
        await until(lambda: running.last > 5)
        await served.app.runner.drain(0)
        answer = await asking
    *_, last = events_of(answer.body)
    assert (last["type"], last["error"]["type"]) == ("error", "api_error")
    assert last["request_id"] == answer.headers["request-id"]


async def test_server_that_drains_is_overloaded() -> None:
    async with serving() as served:
        served.app.runner.is_draining = True
        answer = await ask(served)
    assert (answer.status, answer.json["error"]["type"]) == (529, "overloaded_error")
    assert "retry-after" in answer.headers


async def test_silent_engine_is_covered_by_pings(tmp_path: Path) -> None:
    file = script(tmp_path, {"text": "Slow and steady."})
    async with serving(script=file, tps=15, heartbeat_s=0.02) as served:
        answer = await ask(served, stream=True)
    events = events_of(answer.body)
    assert [event["type"] for event in events[:2]] == ["message_start", "ping"]
    assert joined(events)["content"][0]["text"] == "Slow and steady."


async def test_guard_that_stops_input_or_answer_is_a_refusal(tmp_path: Path) -> None:
    config = tmp_path / "segue.toml"
    config.write_text('[guard_rules]\npatterns = ["(?i)forbidden"]\n')
    file = script(tmp_path, {"text": "This is forbidden."})
    async with serving(config=str(config), guard=("rules",), script=file) as served:
        answered = await both(served)
        asked = await both(served, [{"role": "user", "content": "A forbidden question"}])
    for message in (answered, asked):
        assert message["stop_reason"] == "refusal"
        assert message["stop_details"]["type"] == "refusal"
        assert message["stop_details"]["explanation"]
    assert asked["content"] == []


# --- chat endpoints -----------------------------------------------------------------------------------


async def test_chat_endpoint_names_the_stop_sequence_and_says_how_long_is_too_long() -> None:
    met = {"choices": [{"delta": {}, "finish_reason": "stop", "stop_reason": "END"}]}
    words = (
        "This model's maximum context length is 4096 tokens. However, you requested 9000 tokens. "
        "Please reduce the length of the messages."
    )
    events = [delta(content="One."), met, usage(9, 3, cached=4)]
    async with (
        FakeChat(events=events) as fake,
        serving(engine="chat", engine_url=(fake.url,), model=(MODEL,)) as served,
    ):
        message = await both(served, stop_sequences=[str(number) for number in range(9)] + ["END"])
        assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "END")
        assert prompt_of(message["usage"]) == 9
        assert message["usage"]["cache_read_input_tokens"] == 4
        assert len(fake.requests[0]["stop"]) == 4
        fake.refuses = (400, words)
        for is_streamed in (False, True):
            refused = await ask(served, stream=is_streamed)
            said = "prompt is too long: 9000 tokens > 4096 maximum"
            assert (refused.status, refused.json["error"]["message"]) == (400, said)


# --- keys and limits ----------------------------------------------------------------------------------


async def test_key_is_in_its_own_header_or_a_bearer() -> None:
    async with serving(auth="keys") as served:
        state = served.app.state
        _, secret = await issue_key(state.store.keys, state.hashes, "test", "ada")
        good = ({"Authorization": f"Bearer {secret}"}, {"x-api-key": secret})
        for headers in (*good, {"x-api-key": secret, "Authorization": "Bearer wrong"}):
            assert (await ask(served, headers=headers)).status == 200
            assert (
                await fetch(served, "GET", "/v1/models", headers=VERSION | headers)
            ).status == 200
        bad: list[dict[str, str]] = [{}, {"x-api-key": "wrong"}, {"Authorization": "Bearer wrong"}]
        bad.append({"x-api-key": "wrong", "Authorization": f"Bearer {secret}"})
        for headers in bad:
            answer = await ask(served, headers=headers)
            assert (answer.status, answer.json["error"]["type"]) == (401, "authentication_error")
            assert answer.headers["x-should-retry"] == "false"


async def test_turns_count_against_the_limits_of_their_key_and_counts_do_not() -> None:
    async with serving(auth="keys") as served:
        state = served.app.state
        limits = KeyLimits(requests_per_min=1)
        _, secret = await issue_key(state.store.keys, state.hashes, "test", "ada", limits=limits)
        key = {"x-api-key": secret}
        body = {"model": MODEL, "messages": HELLO}
        counts = [
            await fetch(served, "POST", f"{MESSAGES}/count_tokens", body, VERSION | key)
            for _ in range(5)
        ]
        answers = [await ask(served, headers=key) for _ in range(2)]
    assert {answer.status for answer in counts} == {200}
    assert [answer.status for answer in answers] == [200, 429]
    assert answers[1].json["error"]["type"] == "rate_limit_error"
    assert "retry-after" in answers[1].headers


async def test_metrics_tell_this_api_apart() -> None:
    async with serving() as served:
        await ask(served)
        await ask(served, stream=True, path=f"{MESSAGES}?beta=true")
        for transport in ("messages_http", "messages_sse"):
            name = f'segue_turns_total{{outcome="completed",transport="{transport}"}}'
            assert await metric(served, name) == 1


async def test_client_that_looks_first_finds_the_server() -> None:
    async with serving() as served:
        for path in ("/api/hello", "/"):
            assert (await fetch(served, "HEAD", path)).status == 200


async def test_every_answer_names_its_request_once() -> None:
    async with serving() as served:
        answers = [
            await ask(served),
            await ask(served, stream=True),
            await ask(served, [{"role": "user", "content": "x"}], model="none"),
            await fetch(served, "GET", "/v1/models", headers=VERSION),
            await fetch(served, "GET", f"{MESSAGES}/nothing"),
        ]
    for answer in answers:
        assert answer.headers["request-id"] == answer.headers["x-request-id"]


async def test_unknown_fields_betas_and_old_unknown_content_are_ignored() -> None:
    history = [
        {
            "role": "user",
            "content": [{"type": "hologram", "hologram": 1}, {"type": "text", "text": "x"}],
        },
        {"role": "assistant", "content": "Nice."},
        {
            "role": "user",
            "content": [{"type": "text", "text": ""}, {"type": "text", "text": "Go on."}],
        },
    ]
    extra: dict[str, Any] = {
        "top_k": 20,
        "temperature": 0.5,
        "service_tier": "auto",
        "container": "c",
        "fallbacks": [],
        "tags": ["x"],
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "surprise": {"a": [1]},
    }
    beta = {"anthropic-beta": "nothing-2031-01-01,context-management-2025-06-27"}
    async with serving() as served:
        assert (await ask(served, history, headers=beta, **extra)).status == 200


async def test_client_that_leaves_cancels_its_turn(tmp_path: Path) -> None:
    file = script(tmp_path, {"text": "word " * 1_000})
    async with serving(script=file, tps=50) as served:
        asking = asyncio.create_task(ask(served, stream=True))
        await until(lambda: served.app.runner.running_count)
        asking.cancel()
        await until(lambda: not served.app.runner.running_count)
