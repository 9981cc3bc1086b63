"""Clients of Chat Completions over real sockets: the same turn in their words, streamed and whole."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from segue.accounts.hashes import issue_key
from segue.limits import KeyLimits
from tests.chat import (
    BASH,
    CHAT,
    HELLO,
    ask,
    check_order,
    chunks_of,
    joined,
    script,
    without_ids,
)
from tests.engines.fakes.chat import FakeChat, delta
from tests.scenarios.test_web_search import ANSWER, SEARCH, URL, searching
from tests.support import MODEL, Served, fetch, metric, serving, until

PIXEL = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR4nGNgYPj/HwADAgH/"
    "p0M5TwAAAABJRU5ErkJggg=="
)
CALL = {"name": "bash", "arguments": {"command": "ls -l", "n": 1.5}}
CUSTOM = {"type": "custom", "custom": {"name": "patch", "description": "Takes a patch"}}


async def both(served: Served, messages: Any = HELLO, **fields: Any) -> dict[str, Any]:
    """The choice, which is the same as JSON and as a stream."""
    whole = await ask(served, messages, **fields)
    assert whole.status == 200, whole.json
    usage = {"stream_options": {"include_usage": True}}
    streamed = await ask(served, messages, stream=True, **usage, **fields)
    chunks = chunks_of(streamed.body)
    check_order(chunks, wants_usage=True)
    choice: dict[str, Any] = whole.json["choices"][0]
    plain = {**choice, "logprobs": (choice["logprobs"] or {"content": []})["content"]}
    assert without_ids(joined(chunks)) == without_ids(plain)
    details = ("prompt_tokens", "completion_tokens", "total_tokens")
    counts = [[one["usage"][name] for name in details] for one in (whole.json, chunks[-1])]
    assert counts[0] == counts[1]
    prompt, completion, total = counts[0]
    assert prompt + completion == total
    return choice


@pytest.mark.parametrize(
    "turn, reason",
    [
        ({"text": "Hello there."}, "stop"),
        ({"reasoning": "Let me see.", "text": "Hello there."}, "stop"),
        ({"text": "I look.", "calls": [CALL]}, "tool_calls"),
        (
            {"reasoning": "Two things.", "calls": [CALL, {"name": "bash", "arguments": {}}]},
            "tool_calls",
        ),
    ],
)
async def test_stream_and_object_say_the_same(
    tmp_path: Path, turn: dict[str, Any], reason: str
) -> None:
    async with serving(script=script(tmp_path, turn)) as served:
        choice = await both(served, tools=[BASH])
    message = choice["message"]
    assert choice["finish_reason"] == reason
    assert message["content"] == turn.get("text")
    assert message.get("reasoning_content") == turn.get("reasoning")
    called = [
        {"name": call["function"]["name"], "arguments": json.loads(call["function"]["arguments"])}
        for call in message.get("tool_calls", [])
    ]
    assert called == turn.get("calls", [])


async def test_chunks_have_no_usage_where_it_is_not_asked_for() -> None:
    async with serving() as served:
        answer = await ask(served, stream=True)
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    check_order(chunks_of(answer.body))


@pytest.mark.parametrize(
    "path", ["/chat/completions", "/v1/chat/completions/", "/v1/v1/chat/completions"]
)
async def test_other_spellings_of_the_path_are_the_same(path: str) -> None:
    async with serving() as served:
        answer = await fetch(served, "POST", path, {"model": MODEL, "messages": HELLO})
    assert answer.json["object"] == "chat.completion"


async def test_stored_completions_do_not_exist() -> None:
    async with serving() as served:
        made = await ask(served, store=True, metadata={"a": "b"})
        for path in (CHAT, f"{CHAT}/{made.json['id']}"):
            answer = await fetch(served, "GET", path)
            assert answer.status == 404
            assert "not stored" in answer.json["error"]["message"]
        turn_id = made.json["id"].replace("chatcmpl-", "resp_")
        assert (await fetch(served, "GET", f"/v1/responses/{turn_id}")).status == 404
        assert (await fetch(served, "GET", f"/v1/responses/{turn_id}/cache")).status == 200


async def test_custom_tool_is_called_and_answered(tmp_path: Path) -> None:
    turns = ({"calls": [{"name": "patch", "arguments": {"input": "*** Begin"}}]}, {"text": "Done."})
    async with serving(script=script(tmp_path, *turns)) as served:
        choice = await both(served, tools=[CUSTOM])
        (call,) = choice["message"]["tool_calls"]
        assert call["type"] == "custom"
        assert call["custom"]["name"] == "patch"
        history = [*HELLO, choice["message"]]
        history.append({"role": "tool", "tool_call_id": call["id"], "content": "applied"})
        assert (await both(served, history, tools=[CUSTOM]))["message"]["content"] == "Done."


async def test_old_functions_are_called_and_answered(tmp_path: Path) -> None:
    turns = ({"calls": [CALL]}, {"text": "Two files."})
    functions = {"functions": [BASH["function"]]}
    async with serving(script=script(tmp_path, *turns)) as served:
        choice = await both(served, **functions, function_call={"name": "bash"})
        message = choice["message"]
        assert choice["finish_reason"] == "function_call"
        assert json.loads(message["function_call"]["arguments"]) == CALL["arguments"]
        assert "tool_calls" not in message
        history = [*HELLO, message, {"role": "function", "name": "bash", "content": "a b"}]
        assert (await both(served, history, **functions))["message"]["content"] == "Two files."


async def test_structured_output_is_asked_for_by_every_name() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    asked: list[dict[str, Any]] = [
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": schema},
            }
        },
        {"response_format": {"type": "json_object", "schema": schema}},
        {"guided_json": schema},
        {"guided_json": json.dumps(schema)},
        {"structured_outputs": {"json": schema}},
    ]
    async with serving() as served:
        for fields in asked:
            assert (await ask(served, **fields)).status == 200, fields
        bad = await ask(
            served, response_format={"type": "json_schema", "json_schema": {"name": "x"}}
        )
    assert bad.status == 400
    assert bad.json["error"]["param"] == "response_format.json_schema.schema"


async def test_logprobs_are_those_of_the_text() -> None:
    async with serving() as served:
        choice = await both(served, logprobs=True, top_logprobs=2)
        assert (await both(served))["logprobs"] is None
    content = choice["logprobs"]["content"]
    assert choice["logprobs"]["refusal"] is None
    assert "".join(one["token"] for one in content) == choice["message"]["content"]
    assert all(len(one["top_logprobs"]) == 2 for one in content)


async def test_stop_string_ends_the_answer_and_is_left_out(tmp_path: Path) -> None:
    async with serving(script=script(tmp_path, {"text": "One, two, Observation: three"})) as served:
        choice = await both(served, stop=["Observation:", "x"])
        assert (choice["message"]["content"], choice["finish_reason"]) == ("One, two, ", "stop")
        assert (await ask(served, stop=list("abcde"))).status == 400


async def test_answer_that_is_too_long_ends_with_length() -> None:
    async with serving() as served:
        assert (await both(served, max_tokens=3))["finish_reason"] == "length"
        newer = await ask(served, max_tokens=3, max_completion_tokens=1_000)
        assert newer.json["choices"][0]["finish_reason"] == "stop"
        assert (await both(served, max_tokens=-1))["finish_reason"] == "stop"


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_prompt_that_is_too_long_is_a_status(is_streamed: bool) -> None:
    async with serving(context_tokens=64) as served:
        long = [{"role": "user", "content": "word " * 200}]
        answer = await ask(served, long, stream=is_streamed)
        wide = await ask(served, max_tokens=100_000)
    error = answer.json["error"]
    assert (answer.status, error["code"]) == (400, "context_length_exceeded")
    assert (error["type"], error["param"]) == ("invalid_request_error", "messages")
    assert wide.status == 200


async def test_silent_engine_is_covered_by_comments(tmp_path: Path) -> None:
    file = script(tmp_path, {"text": "Slow and steady."})
    async with serving(script=file, tps=15, heartbeat_s=0.02) as served:
        answer = await ask(served, stream=True)
    assert b": ping\n\n" in answer.body
    chunks = chunks_of(answer.body)
    check_order(chunks)
    assert joined(chunks)["message"]["content"] == "Slow and steady."
    # The role leaves before the first comment, so that a client knows that the turn has begun.
    assert answer.body.startswith(b"data: ")


async def test_image_is_shown_or_told_in_words() -> None:
    parts = [
        {"type": "text", "text": "What is this?"},
        {"type": "image_url", "image_url": {"url": PIXEL, "detail": "low"}},
    ]
    history = [
        *HELLO,
        {
            "role": "assistant",
            "tool_calls": [
                {"id": "c", "type": "function", "function": {"name": "bash", "arguments": "{}"}}
            ],
        },
        {"role": "tool", "tool_call_id": "c", "content": parts},
    ]
    async with serving() as served:
        assert (await ask(served, [{"role": "user", "content": parts}])).status == 200
        assert (await ask(served, history)).status == 200
    async with serving(unseen="refuse") as served:
        refused = await ask(served, [*HELLO, {"role": "user", "content": parts}])
    assert refused.status == 400
    assert refused.json["error"]["param"] == "messages[1]"


async def test_guarded_answer_ends_with_content_filter(tmp_path: Path) -> None:
    config = tmp_path / "segue.toml"
    config.write_text('[guard_rules]\npatterns = ["(?i)forbidden"]\n')
    file = script(tmp_path, {"text": "This is forbidden."})
    flags = {"config": str(config), "guard": ("rules",), "script": file}
    async with serving(**flags) as served:
        assert (await both(served))["finish_reason"] == "content_filter"
        refused = await ask(served, [{"role": "user", "content": "A forbidden question"}])
    assert (refused.status, refused.json["error"]["code"]) == (400, "invalid_prompt")


async def test_key_is_a_bearer_or_in_its_own_header() -> None:
    async with serving(auth="keys") as served:
        state = served.app.state
        _, secret = await issue_key(state.store.keys, state.hashes, "test", "ada")
        body = {"model": MODEL, "messages": HELLO}
        for headers in ({"Authorization": f"Bearer {secret}"}, {"x-api-key": secret}):
            assert (await fetch(served, "POST", CHAT, body, headers)).status == 200
        for headers in ({}, {"x-api-key": "wrong"}, {"Authorization": "Bearer wrong"}):
            answer = await fetch(served, "POST", CHAT, body, headers)
            assert (answer.status, answer.json["error"]["code"]) == (401, "invalid_api_key")


async def test_turns_count_against_the_limits_of_their_key() -> None:
    async with serving(auth="keys") as served:
        state = served.app.state
        limits = KeyLimits(requests_per_min=1)
        _, secret = await issue_key(state.store.keys, state.hashes, "test", "ada", limits=limits)
        headers = {"Authorization": f"Bearer {secret}"}
        body = {"model": MODEL, "messages": HELLO}
        answers = [await fetch(served, "POST", CHAT, body, headers) for _ in range(2)]
    assert [answer.status for answer in answers] == [200, 429]
    assert answers[1].json["error"]["type"] == "rate_limit_error"
    assert "retry-after" in answers[1].headers


async def test_metrics_tell_this_api_apart() -> None:
    async with serving() as served:
        await ask(served)
        await ask(served, stream=True)
        for transport in ("chat_http", "chat_sse"):
            name = f'segue_turns_total{{outcome="completed",transport="{transport}"}}'
            assert await metric(served, name) == 1


@pytest.mark.parametrize(
    "fields, param",
    [
        ({"n": 2}, "n"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"guided_regex": "a+"}, "guided_regex"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": "a.b"}}]}, "tools[0].name"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "hologram"}]}]},
            "messages[0].content[0].type",
        ),
    ],
)
async def test_what_cannot_be_honoured_is_refused(fields: dict[str, Any], param: str) -> None:
    async with serving() as served:
        answer = await fetch(served, "POST", CHAT, {"model": MODEL, "messages": HELLO} | fields)
    assert (answer.status, answer.json["error"]["param"]) == (400, param)


async def test_unknown_fields_and_old_unknown_content_are_ignored() -> None:
    history = [
        {"role": "user", "content": [{"type": "hologram", "hologram": 1}], "cache_control": {}},
        {"role": "assistant", "content": "Nice.", "provider_specific_fields": {"refusal": None}},
        *HELLO,
    ]
    extra = {"top_k": 20, "min_p": 0.1, "repetition_penalty": 1.1, "store": True, "prediction": {}}
    async with serving() as served:
        assert (await ask(served, history, **extra, surprise=[1])).status == 200


@pytest.mark.parametrize("call_id", [5, None, ["x"], {}])
async def test_field_of_ours_in_a_message_is_ignored_beside_a_custom_call(call_id: object) -> None:
    call = {"id": "c", "type": "custom", "custom": {"name": "patch", "input": "x"}}
    history = [
        {**HELLO[0], "call_id": call_id},
        {"role": "assistant", "tool_calls": [call], "call_id": call_id},
        {"role": "tool", "tool_call_id": "c", "content": "applied", "call_id": call_id},
    ]
    async with serving() as served:
        assert (await ask(served, history, tools=[CUSTOM])).status == 200


async def test_tools_are_chosen_by_every_spelling() -> None:
    named = {"function": {"name": "bash"}}
    allowed = {"mode": "required", "tools": [{"type": "function", **named}]}
    async with serving() as served:
        for choice in (
            {"type": "function", **named},
            {"type": "allowed_tools", "allowed_tools": allowed},
            "required",
        ):
            answer = await ask(served, tools=[BASH], tool_choice=choice)
            (call,) = answer.json["choices"][0]["message"]["tool_calls"]
            assert call["function"]["name"] == "bash"
        assert (
            "tool_calls"
            not in (await ask(served, tools=[BASH], tool_choice="none")).json["choices"][0][
                "message"
            ]
        )


async def test_client_that_leaves_has_cancelled_its_turn(tmp_path: Path) -> None:
    file = script(tmp_path, {"text": "A long story. " * 100})
    async with serving(script=file, tps=20) as served:
        body = json.dumps({"model": MODEL, "messages": HELLO, "stream": True}).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        head = f"POST {CHAT} HTTP/1.1\r\nHost: 127.0.0.1:{served.port}\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        await reader.readuntil(b"data: ")
        writer.close()
        await writer.wait_closed()
        await until(lambda: not served.app.runner.running_count)


async def test_web_search_that_is_not_set_up_is_refused() -> None:
    async with serving() as served:
        answer = await ask(served, tools=[BASH], web_search_options={})
    assert (answer.status, answer.json["error"]["param"]) == (400, "web_search_options")


async def test_text_that_cites_pages_has_its_annotations_at_the_end(tmp_path: Path) -> None:
    async with searching(tmp_path, SEARCH, ANSWER) as served:
        choice = await both(served, web_search_options={"search_context_size": "low"})
    message = choice["message"]
    cited = [one["url_citation"] for one in message["annotations"]]
    marks = [message["content"][one["start_index"] : one["end_index"]] for one in cited]
    assert marks == ["[1]", f"{URL}/rain.md"]
    assert {one["type"] for one in message["annotations"]} == {"url_citation"}
    assert "tool_calls" not in message
    assert choice["finish_reason"] == "stop"


async def test_engine_that_breaks_off_ends_the_stream_with_an_error() -> None:
    async with FakeChat(events=[delta(content="Once upon")], has_done=False) as fake:
        flags = {"engine": "chat", "engine_url": [fake.url], "model": ["gpt"]}
        async with serving(**flags) as served:
            asked = {"model": "gpt", "messages": HELLO}
            streamed = await fetch(served, "POST", CHAT, {**asked, "stream": True})
            whole = await fetch(served, "POST", CHAT, asked)
    *chunks, last, nothing = streamed.body.split(b"\n\n")
    assert streamed.status == 200
    assert b"Once upon" in chunks[-1]
    error = json.loads(last.removeprefix(b"data: "))["error"]
    assert (error["type"], nothing) == ("server_error", b"")
    assert (whole.status, whole.json["error"]["type"]) == (502, "server_error")
