"""Tool loops by the official Python client, as an application would write them. Runs in the client's environment.

    python_loop.py BASE_URL MODEL/TRANSPORT ...     TRANSPORT is json, sse, helper or socket

Prints one JSON object: for each loop its turns, or how it broke; for each turn the answer and what Segue counted.
"""

from __future__ import annotations

import json
import re
import sys
import traceback
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import openai

TURNS_MAX = 64
STORE = {"json": True, "sse": True, "helper": True, "socket": False}
TOOLS: list[Any] = [
    {
        "type": "function",
        "name": "get_weather",
        "description": "The weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
            "additionalProperties": False,
        },
        "strict": True,
    }
]

Ask = Callable[[dict[str, Any]], tuple[Any, list[str]]]


@contextmanager
def transport(client: openai.OpenAI, name: str) -> Iterator[Ask]:
    """A function that takes one turn's fields and gives the response and the types of its events."""
    match name:
        case "json":
            yield lambda fields: (client.responses.create(**fields), [])
        case "sse":
            yield lambda fields: by_events(client.responses.create(stream=True, **fields))
        case "helper":
            yield lambda fields: by_helper(client, fields)
        case "socket":
            with client.responses.connect() as connection:
                yield lambda fields: by_socket(connection, fields)


def by_events(events: Any) -> tuple[Any, list[str]]:
    types = []
    for event in events:
        types.append(event.type)
        if event.type in ("response.completed", "response.failed", "response.incomplete"):
            return event.response, types
        if event.type == "error":
            raise RuntimeError(event.to_json())
    raise RuntimeError(f"no terminal event after {types}")


def by_helper(client: openai.OpenAI, fields: dict[str, Any]) -> tuple[Any, list[str]]:
    with client.responses.stream(**fields) as stream:
        types = [event.type for event in stream]
        return stream.get_final_response(), types


def by_socket(connection: Any, fields: dict[str, Any]) -> tuple[Any, list[str]]:
    connection.response.create(**fields)
    return by_events(connection)


def counters(base_url: str) -> dict[str, float]:
    """Segue's own counters that have no labels."""
    with urllib.request.urlopen(base_url.removesuffix("/v1") + "/metrics", timeout=30) as answer:
        page = answer.read().decode()
    return {name: float(value) for name, value in re.findall(r"^(segue_\w+) (\S+)$", page, re.M)}


def loop(base_url: str, model: str, name: str) -> dict[str, Any]:
    client = openai.OpenAI(api_key="sk-test", base_url=base_url, max_retries=0, timeout=30)
    turns: list[dict[str, Any]] = []
    before = counters(base_url)
    given: list[Any] = [{"role": "user", "content": "What is the weather in all these cities?"}]
    parent: dict[str, str] = {}
    with transport(client, name) as ask:
        while len(turns) < TURNS_MAX:
            fields = {"model": model, "tools": TOOLS, "store": STORE[name], "input": given}
            response, types = ask({**fields, **parent})
            calls = [item for item in response.output if item.type == "function_call"]
            after = counters(base_url)
            turns.append(
                {
                    "response": json.loads(response.to_json()),
                    "text": response.output_text,
                    "types": types,
                    "calls": [[call.call_id, call.name, call.arguments] for call in calls],
                    "counted": {key: after[key] - before.get(key, 0) for key in after},
                }
            )
            before = after
            if not calls:
                break
            parent = {"previous_response_id": response.id}
            given = [
                {
                    "type": "function_call_output",
                    "call_id": call.call_id,
                    "output": f"sunny in {json.loads(call.arguments)['city']}",
                }
                for call in calls
            ]
    return {"turns": turns}


def attempt(base_url: str, model: str, name: str) -> dict[str, Any]:
    """A loop, or how it broke: the others are to be seen all the same."""
    try:
        return loop(base_url, model, name)
    except Exception:
        return {"broke": traceback.format_exc()}


if __name__ == "__main__":
    print(json.dumps({one: attempt(sys.argv[1], *one.split("/")) for one in sys.argv[2:]}))
