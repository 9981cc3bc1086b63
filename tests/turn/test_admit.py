"""Admission: the model, its usual sampling, and the first snapshot."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest

from segue.accounts.hashes import issue_key
from segue_embedded.weights import find_weights
from tests.contracts.dialect import smollm2
from tests.engines.fakes.chat import FakeChat, delta, end
from tests.engines.fakes.vllm import FakeVllm
from tests.support import MODEL, Served, fetch, serving, wire


@pytest.mark.parametrize("parsed", [{}, {"temperature": None, "top_p": None, "top_logprobs": None}])
async def test_where_a_client_says_nothing_the_models_usual_sampling_holds(parsed: object) -> None:
    assert isinstance(parsed, dict)
    async with serving(temperature=0.3, top_p=0.9) as served:
        body = {"model": MODEL, "input": "Hello.", "store": False, **parsed}
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
    spoken = [delta(content="12"), end()] if choice == "none" else None
    fake = FakeChat(events=spoken or [delta(tool_calls=[called]), end("tool_calls")])
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
        assert "which the engine does not support" in error["message"]
        assert (event["type"], event["error"]) == ("error", error)
        assert not fake.requests
    else:
        assert (answer.status, event["type"]) == (200, "response.completed"), answer.body


@asynccontextmanager
async def serving_vllm(fake: FakeVllm | None = None) -> AsyncIterator[Served]:
    """The whole product in front of a FAKE vLLM."""
    weights = str(find_weights("smollm2"))
    async with fake or FakeVllm(model="m") as found:
        flags = {"engine": "vllm", "engine_url": (found.url,), "model": ("m",)}
        async with serving(**flags, tokenizer=weights) as served:
            yield served


OTHER = {**GRAMMAR, "name": "other"}
BROKEN = [
    ({"type": "grammar", "syntax": "ebnf", "definition": "x"}, "neither lark nor regex"),
    ({"type": "grammar", "syntax": "lark"}, "no 'definition'"),
    ({"type": "grammar"}, "neither lark nor regex"),
]


@pytest.mark.parametrize("shape, problem", BROKEN)
async def test_client_forces_a_grammar_that_is_none(shape: object, problem: str) -> None:
    tool = {**GRAMMAR, "format": shape}
    body = {"model": "m", "input": "Hi", "tools": [tool], "tool_choice": BY_NAME}
    async with serving_vllm() as served:
        answer = await fetch(served, "POST", "/v1/responses", body)
    assert answer.status == 400
    assert problem in answer.json["error"]["message"]


async def test_client_forces_one_of_several_grammars() -> None:
    body = {"model": "m", "input": "Hi", "tools": [GRAMMAR, OTHER], "tool_choice": "required"}
    async with serving_vllm() as served:
        answer = await fetch(served, "POST", "/v1/responses", body)
    assert answer.status == 400
    assert "only one grammar can be enforced" in answer.json["error"]["message"]


async def test_engine_is_held_to_the_grammar_of_a_forced_tool() -> None:
    """What is between our words is the input, as it was sampled; the next turn goes on behind it."""
    body: dict[str, Any] = {"model": "m", "input": "Hi", "tools": [GRAMMAR]}
    body |= {"tool_choice": BY_NAME, "max_output_tokens": 20}
    sampled = [*smollm2().encode('12"\n'), 2]
    fake = FakeVllm(lambda prompt: sampled, model="m")
    async with serving_vllm(fake) as served:
        first = (await fetch(served, "POST", "/v1/responses", body)).json
        output = {"type": "custom_tool_call_output", "output": "ok"}
        output["call_id"] = first["output"][0]["call_id"]
        more = {"model": "m", "input": [output], "previous_response_id": first["id"]}
        await fetch(served, "POST", "/v1/responses", body | more | {"tool_choice": "auto"})
    assert first["output"][0]["input"] == '12"\n'
    one, two = (request for request in fake.requests if "prompt" in request)
    assert one["structured_outputs"] == {"grammar": "start: /[0-9]+/"}
    assert "structured_outputs" not in two
    before = [*cast("list[int]", one["prompt"]), *sampled[:-1]]
    assert cast("list[int]", two["prompt"])[: len(before)] == before


async def test_client_forces_a_grammar_on_the_scripted_engine() -> None:
    """It is held to nothing: what its script says is what comes."""
    body = {"model": MODEL, "input": "Hello.", "store": False, "tools": [GRAMMAR]}
    async with serving() as served:
        answer = await fetch(served, "POST", "/v1/responses", body | {"tool_choice": BY_NAME})
    assert answer.status == 200
    assert answer.json["output"][-1]["type"] == "custom_tool_call"


async def test_tier_is_the_one_that_the_key_allows() -> None:
    """Only a key with the scope goes before others; without keys everybody may."""
    asked = {"priority": "priority", "ultrafast": "priority", "flex": "flex", "auto": "default"}
    async with serving() as served:
        assert await tiers_of(served, "") == asked
        app, api = served.app, ("responses", "models")
        _, may = await issue_key(
            app.state.store.keys, app.state.hashes, "may", "ada", (*api, "priority")
        )
        _, may_not = await issue_key(app.state.store.keys, app.state.hashes, "may not", "ada", api)
        await app.state.accounts.confirm()
        assert await tiers_of(served, may) == asked
        assert await tiers_of(served, may_not) == asked | {
            "priority": "default",
            "ultrafast": "default",
        }


async def tiers_of(served: Served, secret: str) -> dict[str, str]:
    """The tier that is used for each that is asked for, by HTTP and by a socket."""
    found, headers = {}, {"Authorization": f"Bearer {secret}"}
    async with wire(served, additional_headers=headers) as socket:
        for tier in ("priority", "ultrafast", "flex", "auto"):
            body = {"model": MODEL, "input": "Hello.", "store": False, "service_tier": tier}
            answer = await fetch(served, "POST", "/v1/responses", body, headers)
            found[tier] = answer.json["service_tier"]
            assert (await socket.turn(**body))["response"]["service_tier"] == found[tier]
    return found
