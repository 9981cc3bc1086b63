"""Requests for completions become turns: every field by values, and any body is a turn or a refusal."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET, Raw

from segue.completions.reading import ChatReading
from segue.completions.request import ChatRequest, decode_chat, to_create
from segue.completions.tools import offered_tools
from segue.errors import InvalidRequest
from segue.resent.memo import Memo
from segue.wire.codec import decode_tools
from segue.wire.requests import Create

HELLO = [{"role": "user", "content": "Hello"}]
MEMO: Memo[tuple[Raw, ...]] = Memo(1_000_000)


def create_of(**fields: Any) -> Create:
    body = json.dumps({"model": "m", "messages": HELLO, **fields}).encode()
    return ChatReading(MEMO, "ada", "session-1").decode(body)


def test_fields_of_the_same_meaning_are_handed_on() -> None:
    same: dict[str, Any] = {
        "model": "m",
        "temperature": 0.5,
        "top_p": 0.9,
        "presence_penalty": 1,
        "frequency_penalty": -1,
        "seed": 7,
        "user": "ada",
        "safety_identifier": "x",
        "service_tier": "flex",
        "parallel_tool_calls": False,
        "prompt_cache_key": "k",
        "stream": True,
        "stop": ["a", "b"],
    }
    create = create_of(**same)
    assert {name: getattr(create, name) for name in same} == same


def test_turn_is_never_stored() -> None:
    create = create_of(store=True, metadata={"a": "b"})
    assert (create.store, create.metadata) == (False, None)


def test_session_of_a_header_is_a_hint_where_no_key_is_given() -> None:
    assert create_of().prompt_cache_key == "session-1"
    assert create_of(prompt_cache_key="mine").prompt_cache_key == "mine"


@pytest.mark.parametrize(
    "fields, limit",
    [
        ({}, None),
        ({"max_tokens": 5}, 5),
        ({"max_tokens": 5, "max_completion_tokens": 7}, 7),
        ({"max_tokens": -1}, None),
        ({"max_tokens": None}, None),
    ],
)
def test_newer_limit_goes_before_the_older(fields: dict[str, Any], limit: int | None) -> None:
    assert create_of(**fields).max_output_tokens == limit


@pytest.mark.parametrize(
    "fields, effort",
    [
        ({}, None),
        ({"reasoning_effort": "high"}, "high"),
        ({"reasoning_effort": "low", "enable_thinking": False}, "low"),
        ({"chat_template_kwargs": {"enable_thinking": False, "other": 1}}, "none"),
        ({"chat_template_kwargs": {"thinking": True}}, "medium"),
        ({"chat_template_kwargs": {"reasoning_effort": "low"}}, "low"),
        ({"enable_thinking": False}, "none"),
        ({"thinking": {"type": "disabled"}}, "none"),
        ({"thinking": {"type": "enabled", "budget_tokens": 5}}, "medium"),
        ({"reasoning": {"effort": "minimal"}}, "minimal"),
        ({"reasoning": {"enabled": False}}, "none"),
    ],
)
def test_thinking_is_switched_by_every_name(fields: dict[str, Any], effort: str | None) -> None:
    reasoning = create_of(**fields).reasoning
    assert reasoning is not None
    assert reasoning.effort == effort


def test_logprobs_are_asked_for_by_logprobs() -> None:
    create = create_of(logprobs=True, top_logprobs=3)
    assert (create.include, create.top_logprobs) == (["message.output_text.logprobs"], 3)
    assert create_of(top_logprobs=3).top_logprobs is None


def test_tools_are_flat_and_keep_their_schemas() -> None:
    schema = {"type": "object", "properties": {}}
    function = {"name": "f", "description": "d", "parameters": schema, "strict": True}
    grammar = {"type": "grammar", "grammar": {"syntax": "regex", "definition": "a+"}}
    listed = [
        {"type": "function", "function": function},
        {"type": "custom", "custom": {"name": "g", "format": grammar}},
        {"type": "custom", "custom": {"name": "h"}},
    ]
    tools = offered_tools(Raw(json.dumps(listed).encode()), None, is_old=False)
    assert isinstance(tools, Raw)
    first, second, third = json.loads(bytes(tools))
    assert first == {"type": "function", **function}
    assert second["format"] == {"type": "grammar", "syntax": "regex", "definition": "a+"}
    assert third == {"type": "custom", "name": "h"}
    assert len(decode_tools(tools, None)[0].offers) == 3


def test_web_search_is_a_tool() -> None:
    options = Raw(
        b'{"search_context_size":"low","user_location":{"type":"approximate","approximate":{"city":"Oslo"}}}'
    )
    tools = offered_tools(None, options, is_old=False)
    assert isinstance(tools, Raw)
    (tool,) = json.loads(bytes(tools))
    assert (tool["type"], tool["search_context_size"]) == ("web_search", "low")
    assert tool["user_location"]["city"] == "Oslo"
    assert offered_tools(None, None, is_old=False) is UNSET


def test_tools_that_were_sent_before_are_the_very_same() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert create_of(tools=tools).tools is create_of(tools=tools).tools


def test_error_of_an_item_names_its_message() -> None:
    reading = ChatReading(MEMO, "ada", None)
    thinking = {"role": "assistant", "content": "a", "reasoning_content": "b"}
    body = {"model": "m", "messages": [*HELLO, thinking, *HELLO]}
    reading.decode(json.dumps(body).encode())
    for item, message in ((0, 0), (1, 1), (2, 1), (3, 2)):
        error = InvalidRequest(
            f"Invalid value for 'input[{item}].content'.", param=f"input[{item}]"
        )
        named = reading.in_clients_words(error)
        assert named.param == f"messages[{message}]"
        assert named.message == f"Invalid value for 'messages[{message}]'."


@pytest.mark.parametrize(
    "response_format",
    [
        {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}},
        {"type": "json_object", "schema": {"type": "object"}},
        None,
    ],
)
def test_nothing_of_a_turn_holds_the_body(response_format: object) -> None:
    asked = {
        "model": "m",
        "messages": [*HELLO, {"role": "assistant", "content": [{"type": "text", "text": "Hi"}]}],
        "tools": [
            {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
        ],
        "response_format": response_format,
        "guided_json": {"type": "object"},
        "web_search_options": {},
    }
    body = bytearray(json.dumps(asked).encode())
    reading = ChatReading(MEMO, "ada", None)
    create = reading.decode(body)
    # It could not be emptied if anything pointed into it.
    body.clear()
    assert create.text is not None
    assert create.text.format is not None
    assert reading.form.wants_search


def test_messages_are_read_once() -> None:
    memo: Memo[tuple[Raw, ...]] = Memo(1_000_000)
    body = json.dumps({"model": "m", "messages": HELLO * 3}).encode()
    first = ChatReading(memo, "ada", None).decode(body).input
    second = ChatReading(memo, "ada", None).decode(body).input
    foreign = ChatReading(memo, "bob", None).decode(body).input
    assert isinstance(first, list)
    assert isinstance(second, list)
    assert isinstance(foreign, list)
    assert all(one is other for one, other in zip(first, second, strict=True))
    assert all(one is not other for one, other in zip(first, foreign, strict=True))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)
FIELDS = st.sampled_from(ChatRequest.__struct_fields__)


@given(st.dictionaries(FIELDS, JSON))
def test_any_body_is_a_turn_or_a_refusal(fields: dict[str, Any]) -> None:
    try:
        create = create_of(**fields)
    except InvalidRequest:
        return
    assert create.store is False


@given(st.binary(max_size=40))
def test_any_bytes_are_a_turn_or_a_refusal(body: bytes) -> None:
    with pytest.raises(InvalidRequest):
        request = decode_chat(body)
        to_create(request, [], UNSET, None)
        raise InvalidRequest("It was a request.")
