"""A real model behind the real ports: SmolLM2 in this process, over HTTP, SSE and WebSocket."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import jsonschema

from segue.dialects.chatml import ChatmlDialect
from segue.dialects.vocabulary import vocabulary_from_gguf
from segue.engines.embedded import EmbeddedEngine
from segue.engines.weights import find_weights
from segue.turn.admit import Model
from tests.support import WEATHER, Served, fetch, kinds, metric, serving, wire

NAME = "smollm2"
CONTEXT = 1_024


@asynccontextmanager
async def serving_smollm2() -> AsyncIterator[Served]:
    """The whole product, with the embedded model beside the scripted one."""
    path = find_weights("smollm2")
    words = vocabulary_from_gguf(path)
    engine = EmbeddedEngine(path, words, context_tokens=CONTEXT, parallel=2)
    try:
        async with serving() as served:
            models = served.app.runner.models
            assert isinstance(models, dict)
            models[NAME] = Model(NAME, engine, ChatmlDialect(words), CONTEXT)
            yield served
    finally:
        await engine.close()


async def test_client_talks_to_a_model_over_websocket() -> None:
    """Turn by turn only the new tokens are tokenized by us and computed by the engine."""
    async with serving_smollm2() as served, wire(served) as socket:
        parent, known, tokenized = None, 0, []
        for turn in range(5):
            before = await metric(served, "segue_tokens_tokenized_total")
            end = await socket.turn(
                model=NAME,
                input="And then?" if turn else "Tell me a story of a cat.",
                previous_response_id=parent,
                max_output_tokens=16,
                store=False,
            )
            assert end["type"] in ("response.completed", "response.incomplete"), end
            usage = end["response"]["usage"]
            # The last token that was sampled is not computed before it is needed.
            assert known - 1 <= usage["input_tokens_details"]["cached_tokens"] <= known
            parent, known = end["response"]["id"], usage["total_tokens"]
            tokenized.append(await metric(served, "segue_tokens_tokenized_total") - before)
        assert tokenized[0] > tokenized[1] == tokenized[2] == tokenized[3] == tokenized[4] > 0


async def test_client_talks_to_a_model_over_http() -> None:
    """The same greedy answer as JSON, as SSE and over a socket."""
    story = {"model": NAME, "input": "Say hello.", "temperature": 0, "max_output_tokens": 24}
    async with serving_smollm2() as served:
        plain = (await fetch(served, "POST", "/v1/responses", story)).json
        events = (await fetch(served, "POST", "/v1/responses", {**story, "stream": True})).events
        async with wire(served) as socket:
            await socket.create(**story)
            heard = await socket.events()

    text = plain["output"][0]["content"][0]["text"]
    assert "hello" in text.lower()
    assert "".join(one.get("delta", "") for one in events) == text
    assert events[-1]["response"]["output"][0]["content"][0]["text"] == text
    assert kinds(heard)[-1] == kinds(events)[-1]
    assert "".join(one.get("delta", "") for one in heard) == text


async def test_client_demands_a_tool_and_its_arguments_satisfy_the_schema() -> None:
    """The string is bounded: at temperature 1 this model may go on in an endless one until its limit, which is then
    an incomplete call and not a broken one."""
    city = {"type": "string", "maxLength": 12}
    tool = WEATHER | {"parameters": WEATHER["parameters"] | {"properties": {"city": city}}}
    async with serving_smollm2() as served:
        for _ in range(5):
            story = {"model": NAME, "input": "Weather in Oslo?", "tools": [tool]}
            story |= {"tool_choice": "required", "max_output_tokens": 60}
            answer = (await fetch(served, "POST", "/v1/responses", story)).json
            calls = [one for one in answer["output"] if one["type"] == "function_call"]
            assert [call["name"] for call in calls] == ["get_weather"], answer["output"]
            jsonschema.validate(json.loads(calls[0]["arguments"]), tool["parameters"])


async def test_client_leaves_a_model_in_mid_sentence_and_the_next_one_is_served() -> None:
    async with serving_smollm2() as served:
        async with wire(served) as socket:
            await socket.create(model=NAME, input="Tell me everything.", store=False)
            while (await socket.next())["type"] != "response.output_text.delta":
                pass
        answer = await fetch(
            served, "POST", "/v1/responses", {"model": NAME, "input": "Hi", "max_output_tokens": 2}
        )
        assert answer.status == 200
