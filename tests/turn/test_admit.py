"""Admission: the model, its usual sampling, and the first snapshot."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engines.fakes.chat import FakeChat, delta, end
from tests.support import MODEL, fetch, serving, wire


@pytest.mark.parametrize("said", [{}, {"temperature": None, "top_p": None, "top_logprobs": None}])
async def test_where_a_client_says_nothing_the_models_usual_sampling_holds(said: object) -> None:
    assert isinstance(said, dict)
    async with serving(temperature=0.3, top_p=0.9) as served:
        body = {"model": MODEL, "input": "Hello.", "store": False, **said}
        usual = (await fetch(served, "POST", "/v1/responses", body)).json
        bold = (await fetch(served, "POST", "/v1/responses", {**body, "temperature": 0})).json
    assert (usual["temperature"], usual["top_p"], usual["top_logprobs"]) == (0.3, 0.9, 0)
    assert (usual["presence_penalty"], usual["frequency_penalty"]) == (0, 0)
    assert (bold["temperature"], bold["top_p"]) == (0, 0.9)


async def test_longest_answer_of_a_model_is_said_to_be_incomplete() -> None:
    async with serving(output_tokens_max=5) as served:
        body = {"model": MODEL, "input": "Hello.", "store": False}
        cut = (await fetch(served, "POST", "/v1/responses", body)).json
        longer = {**body, "max_output_tokens": 100}
        whole = (await fetch(served, "POST", "/v1/responses", longer)).json
    assert (cut["status"], cut["usage"]["output_tokens"]) == ("incomplete", 5)
    assert whole["status"] == "completed"


GRAMMAR: dict[str, Any] = {
    "type": "custom",
    "name": "count",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: /[0-9]+/"},
}
FREE: dict[str, Any] = {"type": "custom", "name": "note", "format": {"type": "text"}}
BY_NAME = {"type": "custom", "name": "count"}
AMONG = {"type": "allowed_tools", "mode": "required", "tools": [BY_NAME]}
# (the choice, the tools, whether a grammar would have to be kept to)
CHOICES: list[tuple[object, list[dict[str, Any]], bool]] = [
    (BY_NAME, [GRAMMAR, FREE], True),
    (AMONG, [GRAMMAR, FREE], True),
    ("required", [GRAMMAR], True),
    ("required", [{"type": "namespace", "name": "n", "tools": [GRAMMAR]}], True),
    ("required", [GRAMMAR, FREE], False),
    ("required", [FREE], False),
    ({"type": "custom", "name": "note"}, [GRAMMAR, FREE], False),
    ("auto", [GRAMMAR], False),
    ("none", [GRAMMAR], False),
    ({**AMONG, "mode": "auto"}, [GRAMMAR], False),
]


@pytest.mark.parametrize("choice, tools, is_forced", CHOICES)
async def test_client_forces_a_grammar_on_an_engine_that_knows_only_json(
    choice: object, tools: list[dict[str, Any]], is_forced: bool
) -> None:
    """Refused before a word is said, on every transport; a tool that is merely offered does no harm."""
    name = "n__count" if "tools" in tools[-1] else tools[-1]["name"]
    called = {"index": 0, "function": {"name": name, "arguments": '{"input": "12"}'}}
    fake = FakeChat(events=[delta(tool_calls=[called]), end("tool_calls")])
    body = {"model": "gpt", "input": "Hello.", "store": False}
    body |= {"tools": tools, "tool_choice": choice}
    async with fake, serving(engine="chat", engine_url=(fake.url,), model=("gpt",)) as served:
        answer = await fetch(served, "POST", "/v1/responses", body)
        async with wire(served) as socket:
            event = await socket.turn(**body)
    if is_forced:
        error = answer.json["error"]
        assert (answer.status, error["code"]) == (400, "unsupported_value")
        assert error["param"] == "tool_choice"
        assert "the engine cannot be held to a grammar" in error["message"]
        assert (event["type"], event["error"]) == ("error", error)
        assert not fake.requests
    else:
        assert (answer.status, event["type"]) == (200, "response.completed"), answer.body


async def test_client_forces_a_grammar_on_the_scripted_engine() -> None:
    """It is held to nothing: what its script says is what comes."""
    body = {"model": MODEL, "input": "Hello.", "store": False, "tools": [GRAMMAR]}
    async with serving() as served:
        answer = await fetch(served, "POST", "/v1/responses", body | {"tool_choice": BY_NAME})
    assert answer.status == 200
    assert answer.json["output"][-1]["type"] == "custom_tool_call"
