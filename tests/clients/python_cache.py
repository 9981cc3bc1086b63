"""The prompt cache fields, asked for and read by the official Python client. Runs in the client's environment.

    python_cache.py BASE_URL MODEL OTHER_MODEL

Two models. Prints one JSON object: for each way and each reason what the client reads in `prompt_cache_diagnostics`;
and the other outcomes, over every transport.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import openai
from openai.types.responses import Response

TOOL: dict[str, Any] = {"type": "function", "name": "get_time", "parameters": {}, "strict": False}
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
FORMAT = {"type": "json_schema", "name": "answer", "schema": SCHEMA}
FIRST: dict[str, Any] = {
    "instructions": "Be brief. " * 100,
    "input": [
        {"role": "user", "content": "Hello. " * 300},
        {"role": "assistant", "content": "Yes? " * 100},
        {"role": "user", "content": "Look."},
    ],
    "tools": [TOOL],
    "prompt_cache_key": "one",
    "reasoning": {"effort": "low"},
    "text": {"verbosity": "low"},
}
NEXT = {"role": "user", "content": "Go on."}
WAYS = ("chained", "full", "socket")

Fields = dict[str, Any]
Ask = Callable[..., Response]


def changed(other: str) -> dict[str, Fields]:
    """What differs in the second request, by the reason that it is."""
    return {
        "nothing": {},
        "model_changed": {"model": other},
        "prompt_cache_key_changed": {"prompt_cache_key": "two"},
        "tools_changed": {"tools": [{**TOOL, "name": "get_date"}]},
        "text_format_changed": {"text": {"verbosity": "low", "format": FORMAT}},
        "reasoning_effort_changed": {"reasoning": {"effort": "high"}},
        "verbosity_changed": {"text": {"verbosity": "high"}},
        "input_changed": {"instructions": "It is 12:00. " + FIRST["instructions"]},
        "service_tier_changed": {"service_tier": "flex"},
    }


def compare(first: Response) -> Fields:
    return {"prompt_cache_options": {"comparison_response_id": first.id}}


def read(response: Response) -> Any:
    """What an application reads."""
    found = response.prompt_cache_diagnostics
    assert response.prompt_cache_options is not None
    assert response.prompt_cache_options.mode == "implicit"
    return None if found is None else found.to_dict()


def follow(way: str, first: Response, history: list[Any]) -> Fields:
    """The part of the second request that says what it goes on from."""
    if way == "full":
        return {"input": [*history, *first.output, NEXT]}
    return {"input": [NEXT], "previous_response_id": first.id}


def compacted(client: openai.OpenAI, ask: Ask, way: str, model: str) -> Any:
    first = ask(model=model, **FIRST)
    fields = {**FIRST, "model": model, **compare(first)}
    if way == "full":
        history = [*FIRST["input"], *first.output]
        window = client.responses.with_raw_response.compact(model=model, input=history)
        kept = json.loads(window.text)["output"]
        return read(ask(**{**fields, "input": [*kept, NEXT]}))
    trigger: Any = {"type": "compaction_trigger"}
    short = ask(**{**FIRST, "model": model, "input": [trigger], "previous_response_id": first.id})
    return read(ask(**{**fields, "input": [NEXT], "previous_response_id": short.id}))


def matrix(client: openai.OpenAI, ask: Ask, way: str, model: str, other: str) -> Fields:
    found: Fields = {}
    for reason, fields in changed(other).items():
        first = ask(model=model, **FIRST)
        again = {**FIRST, "model": model, **follow(way, first, FIRST["input"]), **compare(first)}
        found[reason] = read(ask(**{**again, **fields}))
    found["context_compacted"] = compacted(client, ask, way, model)
    return found


def ended(events: Any) -> Response:
    for event in events:
        if event.type == "response.completed":
            return event.response
        assert event.type not in ("error", "response.failed"), event
    raise RuntimeError("no terminal event")


def transports(client: openai.OpenAI, model: str) -> Fields:
    """The same comparison, read in every other way."""
    first = client.responses.create(model=model, **FIRST)
    asked = {**FIRST, "model": model, "tools": [], **compare(first)}
    found = {"sse": read(ended(client.responses.create(**asked, stream=True)))}
    with client.responses.stream(**asked) as stream:
        for _ in stream:
            pass
        found["helper"] = read(stream.get_final_response())
    running = client.responses.create(**asked, background=True)
    found["background"] = read(ended(client.responses.retrieve(running.id, stream=True)))
    found["retrieved"] = read(client.responses.retrieve(running.id))
    options: Any = {"comparison_response_id": "resp_" + "0" * 32, "mode": "implicit", "ttl": "30m"}
    lost = client.responses.create(model=model, input="Hi.", prompt_cache_options=options)
    found["unknown"] = read(lost)
    usage = lost.usage
    assert usage is not None
    found["usage"] = usage.input_tokens_details.to_dict()
    kept = client.responses.create(
        model=model,
        input="Hi.",
        prompt_cache_retention="24h",
        prompt_cache_options={"mode": "explicit", "ttl": "12h"},
    )
    assert kept.prompt_cache_options is not None
    found["echo"] = [kept.prompt_cache_options.to_dict(), kept.prompt_cache_retention]
    found["absent"] = read(kept) if kept.prompt_cache_diagnostics else None
    return found


def main() -> None:
    base_url, model, other = sys.argv[1:]
    client = openai.OpenAI(base_url=base_url, api_key="none", max_retries=0)
    found: Fields = {}
    for way in WAYS[:2]:
        found[way] = matrix(client, client.responses.create, way, model, other)
    with client.responses.connect() as connection:

        def on_socket(**fields: Any) -> Response:
            connection.response.create(**fields, store=False)
            return ended(connection)

        found["socket"] = matrix(client, on_socket, "socket", model, other)
    found["transports"] = transports(client, model)
    print(json.dumps(found))


main()
