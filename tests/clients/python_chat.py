"""The OpenAI client's helpers for Chat Completions as applications use them: create, stream, parse, errors.

    python_chat.py BASE_URL STORY/MODEL ...     runs in the clients' environment

Prints one JSON object: for each story what came, or how it broke.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from typing import Any

import openai
import pydantic

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}
QUESTION: dict[str, Any] = {"role": "user", "content": "What is the weather in all these cities?"}
TURNS_MAX = 64

Client = openai.OpenAI


class Town(pydantic.BaseModel):
    name: str
    people: int


def plain(value: Any) -> Any:
    return json.loads(value.to_json())


def loop(ask: Callable[[dict[str, Any]], Any], model: str) -> list[Any]:
    """A tool loop to its end, the answers sent back as the client's own objects."""
    messages: list[Any] = [QUESTION]
    found = []
    while len(found) < TURNS_MAX:
        completion = ask({"model": model, "messages": messages, "tools": [WEATHER]})
        found.append(plain(completion))
        message = completion.choices[0].message
        if not message.tool_calls:
            break
        messages = [*messages, message]
        for call in message.tool_calls:
            city = json.loads(call.function.arguments)["city"]
            said = {"role": "tool", "tool_call_id": call.id, "content": f"sunny in {city}"}
            messages.append(said)
    return found


def created(client: Client, model: str) -> Any:
    return {"turns": loop(lambda fields: client.chat.completions.create(**fields), model)}


def streamed(client: Client, model: str) -> Any:
    types: list[list[str]] = []

    def ask(fields: dict[str, Any]) -> Any:
        usage: Any = {"include_usage": True}
        with client.chat.completions.stream(**fields, stream_options=usage) as stream:
            types.append([event.type for event in stream])
            return stream.get_final_completion()

    return {"turns": loop(ask, model), "types": types}


def chunks(client: Client, model: str) -> Any:
    """A stream without its helper and without usage."""
    asked: Any = {"model": model, "messages": [QUESTION], "stream": True}
    return {"chunks": [plain(chunk) for chunk in client.chat.completions.create(**asked)]}


def parsed(client: Client, model: str) -> Any:
    completion = client.chat.completions.parse(
        model=model,
        messages=[{"role": "user", "content": "Name a town."}],
        response_format=Town,
    )
    town = completion.choices[0].message.parsed
    return {"town": town and town.model_dump()}


def refused(client: Client, model: str) -> Any:
    """Which errors the client makes of ours."""
    wrong: dict[str, Any] = {
        "model": {"model": "nobody"},
        "temperature": {"temperature": "hot"},
        "several": {"n": 3},
    }
    found = {}
    for name, fields in wrong.items():
        try:
            asked: Any = {"model": model, "messages": [QUESTION], **fields}
            client.chat.completions.create(**asked)
            found[name] = None
        except openai.APIStatusError as error:
            found[name] = {
                "kind": type(error).__name__,
                "code": error.code,
                "param": error.param,
                "request_id": error.request_id,
            }
    return found


STORIES: dict[str, Callable[[Client, str], Any]] = {
    "created": created,
    "streamed": streamed,
    "chunks": chunks,
    "parsed": parsed,
    "refused": refused,
}


def attempt(base_url: str, name: str, model: str) -> Any:
    """A story, or how it broke: the others are to be seen all the same."""
    try:
        client = openai.OpenAI(api_key="sk-test", base_url=base_url, max_retries=0, timeout=30)
        return STORIES[name](client, model)
    except Exception:
        return {"broke": traceback.format_exc()}


if __name__ == "__main__":
    print(json.dumps({one: attempt(sys.argv[1], *one.split("/")) for one in sys.argv[2:]}))
