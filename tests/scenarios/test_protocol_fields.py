"""Every field of a request (docs/protocol.md 2), asked for in each of the four ways: what it does, what is echoed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.events import RESPONSE_FIELDS
from tests.support import MODEL, WEATHER, ServedProcess, served_process
from tests.ways import WAYS, ask, made, refused

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}},
    "required": ["name"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "name": "person", "schema": SCHEMA, "strict": True}
PATCH = {"type": "custom", "name": "apply_patch", "description": "Edit a file"}
CHOICE = {"type": "function", "name": "get_weather"}
NAMED = {"type": "allowed_tools", "mode": "auto", "tools": [CHOICE]}

# The field, what is asked, and what the response then says.
HONOURED: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("model", {"model": MODEL}, {"model": MODEL}),
    ("input as a string", {"input": "Hello"}, {"status": "completed"}),
    ("input as items", {"input": [{"role": "user", "content": "Hello"}]}, {"status": "completed"}),
    ("instructions", {"instructions": "Be brief."}, {"instructions": "Be brief."}),
    ("instructions null", {"instructions": None}, {"instructions": None}),
    ("previous_response_id null", {"previous_response_id": None}, {"previous_response_id": None}),
    ("store", {"store": True}, {"store": True}),
    ("store false", {"store": False}, {"store": False}),
    ("store null", {"store": None}, {"store": True}),
    ("store left out", {}, {"store": True}),
    ("generate", {"generate": True}, {"status": "completed"}),
    ("generate false", {"generate": False}, {"output": []}),
    (
        "prompt_cache_options prewarm",
        {"prompt_cache_options": {"prewarm": True}},
        {"output": [], "prompt_cache_options": {"mode": "implicit", "ttl": "30m"}},
    ),
    (
        "prompt_cache_options",
        {"prompt_cache_options": {"mode": "explicit", "ttl": "12h"}},
        {"prompt_cache_options": {"mode": "explicit", "ttl": "12h"}},
    ),
    (
        "prompt_cache_options comparison_response_id",
        {"prompt_cache_options": {"comparison_response_id": "resp_1"}},
        {
            "prompt_cache_options": {
                "mode": "implicit",
                "ttl": "30m",
                "comparison_response_id": "resp_1",
            },
            "prompt_cache_diagnostics": {"type": "comparison_response_not_found"},
        },
    ),
    ("tools", {"tools": [WEATHER]}, {"tools": [WEATHER]}),
    ("tool_choice none", {"tools": [WEATHER], "tool_choice": "none"}, {"tool_choice": "none"}),
    ("tool_choice auto", {"tools": [WEATHER], "tool_choice": "auto"}, {"tool_choice": "auto"}),
    (
        "tool_choice required",
        {"tools": [WEATHER], "tool_choice": "required"},
        {"tool_choice": "required"},
    ),
    ("tool_choice function", {"tools": [WEATHER], "tool_choice": CHOICE}, {"tool_choice": CHOICE}),
    (
        "tool_choice custom",
        {"tools": [PATCH], "tool_choice": {"type": "custom", "name": "apply_patch"}},
        {"tool_choice": {"type": "custom", "name": "apply_patch"}},
    ),
    (
        "tool_choice allowed_tools",
        {"tools": [WEATHER], "tool_choice": NAMED},
        {"tool_choice": NAMED},
    ),
    ("max_output_tokens", {"max_output_tokens": 900}, {"max_output_tokens": 900}),
    ("temperature", {"temperature": 0.25}, {"temperature": 0.25}),
    ("top_p", {"top_p": 0.5}, {"top_p": 0.5}),
    ("presence_penalty", {"presence_penalty": 1.5}, {"presence_penalty": 1.5}),
    ("frequency_penalty", {"frequency_penalty": -1}, {"frequency_penalty": -1}),
    (
        "text verbosity",
        {"text": {"verbosity": "low"}},
        {"text": {"format": {"type": "text"}, "verbosity": "low"}},
    ),
    (
        "text json_object",
        {"text": {"format": {"type": "json_object"}}},
        {"text": {"format": {"type": "json_object"}, "verbosity": "medium"}},
    ),
    (
        "text json_schema",
        {"text": {"format": FORMAT}},
        {"text": {"format": FORMAT, "verbosity": "medium"}},
    ),
    (
        "reasoning",
        {"reasoning": {"effort": "high", "summary": "auto"}},
        {"reasoning": {"effort": "high", "summary": "auto"}},
    ),
    ("truncation", {"truncation": "auto"}, {"truncation": "auto"}),
    ("metadata", {"metadata": {"a": "b"}}, {"metadata": {"a": "b"}}),
]
# Nothing is done with these; some are repeated.
IGNORED: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("stream_options", {"stream_options": {"include_obfuscation": True, "later": 1}}, {}),
    ("parallel_tool_calls", {"parallel_tool_calls": False}, {"parallel_tool_calls": False}),
    ("max_tool_calls", {"max_tool_calls": 3}, {"max_tool_calls": 3}),
    ("top_logprobs", {"top_logprobs": 3}, {"top_logprobs": 3}),
    ("include", {"include": ["reasoning.encrypted_content", "message.output_text.logprobs"]}, {}),
    ("include of the future", {"include": ["nobody.knows.this"]}, {}),
    ("prompt_cache_key", {"prompt_cache_key": "key"}, {"prompt_cache_key": "key"}),
    (
        "prompt_cache_retention",
        {"prompt_cache_retention": "24h"},
        {"prompt_cache_retention": "24h"},
    ),
    ("safety_identifier", {"safety_identifier": "someone"}, {"safety_identifier": "someone"}),
    ("user", {"user": "someone"}, {"user": "someone"}),
    ("moderation", {"moderation": {"model": "m", "policy": {"input": {"mode": "score"}}}}, {}),
    ("image", {"image": {"context_compression": "enabled"}}, {}),
    ("access_programs", {"access_programs": {"cyber": "standard"}}, {}),
    ("client_metadata", {"client_metadata": {"session_id": "s"}}, {}),
    ("multi_agent", {"multi_agent": {"enabled": True}}, {}),
    ("a field of the future", {"from_the_future": {"a": [None, 1]}}, {}),
] + [
    # The tier is the one that was really used, whatever was asked for.
    (f"service_tier {tier}", {"service_tier": tier}, {"service_tier": used})
    for used, tiers in {
        "default": ("auto", "default", "scale", "gold"),
        "flex": ("flex",),
        "priority": ("priority", "fast", "ultrafast"),
    }.items()
    for tier in tiers
]
ROWS = HONOURED + IGNORED
# Fields of the response that are there only where the request has theirs.
ONLY_ECHOED = {"prompt_cache_options", "prompt_cache_retention", "prompt_cache_diagnostics"}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedProcess]:
    folder = tmp_path_factory.mktemp("fields")
    with served_process("--store", "memory", cwd=folder) as served:
        yield served


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("asked, said", [row[1:] for row in ROWS], ids=[row[0] for row in ROWS])
async def test_field_is_taken_and_echoed(
    served: ServedProcess, way: str, asked: dict[str, Any], said: dict[str, Any]
) -> None:
    response = await made(served, way, **{"input": "Hello", **asked})
    assert {name: response[name] for name in said} == said
    assert response.keys() - RESPONSE_FIELDS.keys() == said.keys() & ONLY_ECHOED
    assert RESPONSE_FIELDS.keys() <= response.keys()


@pytest.mark.parametrize("way", WAYS)
async def test_forced_tool_is_called_and_a_forbidden_one_is_not(
    served: ServedProcess, way: str
) -> None:
    for choice in ("required", CHOICE):
        response = await made(served, way, input="x", tools=[WEATHER], tool_choice=choice)
        assert [item["type"] for item in response["output"]] == ["function_call"]
    response = await made(served, way, input="x", tools=[WEATHER], tool_choice="none")
    assert [item["type"] for item in response["output"]] == ["message"]


@pytest.mark.parametrize("way", WAYS)
async def test_settings_are_not_inherited_from_the_parent_but_the_model_is(
    served: ServedProcess, way: str
) -> None:
    parent = await made(
        served,
        way,
        input="Hello",
        instructions="Be brief.",
        temperature=0.5,
        tools=[WEATHER],
        tool_choice="none",
        metadata={"a": "b"},
        max_output_tokens=700,
    )
    child = await made(served, way, model=None, input="Go on", previous_response_id=parent["id"])
    assert child["previous_response_id"] == parent["id"]
    assert child["model"] == parent["model"]
    assert child["instructions"] is None
    assert child["tools"] == []
    assert child["tool_choice"] == "auto"
    assert child["metadata"] == {}
    assert child["max_output_tokens"] is None
    assert child["temperature"] != parent["temperature"]


@pytest.mark.parametrize("way", WAYS)
async def test_request_without_model_or_input_is_told_what_is_missing(
    served: ServedProcess, way: str
) -> None:
    assert await refused(served, way, model=None, input="x") == (400, "invalid_request", "model")
    for nothing in (None, []):
        assert await refused(served, way, input=nothing) == (400, "invalid_request", "input")


@pytest.mark.parametrize("way", WAYS)
async def test_prompt_templates_are_refused_by_name(served: ServedProcess, way: str) -> None:
    told = await ask(served, way, input="x", prompt={"id": "pmpt_1", "version": "2"})
    assert told.status == 400
    assert told.error["code"] == "unsupported_parameter"
    assert told.error["param"] == "prompt"
    assert told.error["message"] == "'prompt' is not supported by this server."


@pytest.mark.parametrize("way", ["json", "sse"])
async def test_stream_id_is_refused_on_http(served: ServedProcess, way: str) -> None:
    found = await refused(served, way, input="x", stream_id="a")
    assert found == (400, "unsupported_parameter", "stream_id")


@pytest.mark.parametrize("way", WAYS)
async def test_answer_that_hits_its_limit_is_incomplete(served: ServedProcess, way: str) -> None:
    told = await ask(served, way, input="Hello there, how are you?", max_output_tokens=3)
    assert told.response["status"] == "incomplete"
    assert told.response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert told.response["usage"]["output_tokens"] == 3


@pytest.mark.parametrize("way", WAYS)
async def test_names_in_errors_are_cut(served: ServedProcess, way: str) -> None:
    """Calls, tools and items that the client made up are named, but not repeated without end."""
    long = "n" * 5_000
    call = {"type": "function_call", "call_id": long, "name": long, "arguments": "{}"}
    asked: list[dict[str, Any]] = [
        {"input": [call]},
        {"input": [{"type": "function_call_output", "call_id": long, "output": ""}]},
        {"input": "x", "tools": [WEATHER], "tool_choice": {"type": "function", "name": long}},
        {"input": "x", "tools": [WEATHER], "tool_choice": {"type": long}},
        {"input": "x", "model": long},
        {"input": "x", "previous_response_id": long},
        {"input": [{"type": long}]},
        {"input": "x", "truncation": long},
    ]
    for fields in asked:
        told = await ask(served, way, **fields)
        assert told.status in (400, 404)
        assert "nnn" in told.error["message"]
        assert len(told.error["message"]) < 500
