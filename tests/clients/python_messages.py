"""The official Anthropic client as applications use it: calls, streams, counts, models, parsing, errors.

    python_messages.py BASE_URL STORY/MODEL ...     runs in the clients' environment

Prints one JSON object: for each story what came, or how it broke.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from typing import Any

import anthropic
import pydantic

WEATHER: dict[str, Any] = {
    "name": "get_weather",
    "description": "The weather in a city",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    },
}
QUESTION: dict[str, Any] = {"role": "user", "content": "What is the weather in all these cities?"}
TURNS_MAX = 64


class Town(pydantic.BaseModel):
    name: str
    people: int


class Talk:
    """A client and a model."""

    def __init__(self, base_url: str, model: str) -> None:
        self.model = model
        self.client = anthropic.Anthropic(
            api_key="sk-test",
            base_url=base_url.removesuffix("/v1"),
            max_retries=0,
            timeout=30,
        )

    def asked(self, messages: list[Any], **more: Any) -> dict[str, Any]:
        fields = {"model": self.model, "max_tokens": 500, "messages": messages}
        return {**fields, "tools": [WEATHER], **more}


def plain(value: Any) -> Any:
    return json.loads(value.to_json())


def results(message: Any) -> list[dict[str, Any]]:
    """What the tools say to the calls of this message."""
    return [
        {
            "type": "tool_result",
            "tool_use_id": block.id,
            "content": f"sunny in {block.input['city']}",
        }
        for block in message.content
        if block.type == "tool_use"
    ]


def loop(ask: Callable[[list[Any]], Any]) -> list[Any]:
    """A tool loop to its end, with the whole history in each request."""
    messages: list[Any] = [QUESTION]
    found = []
    while len(found) < TURNS_MAX:
        message = ask(messages)
        found.append(plain(message))
        if not (answers := results(message)):
            break
        messages += [
            {"role": "assistant", "content": message.content},
            {"role": "user", "content": answers},
        ]
    return found


def created(talk: Talk) -> Any:
    return {"turns": loop(lambda given: talk.client.messages.create(**talk.asked(given)))}


def streamed(talk: Talk) -> Any:
    types: list[list[str]] = []

    def ask(given: list[Any]) -> Any:
        with talk.client.messages.stream(**talk.asked(given)) as stream:
            types.append([event.type for event in stream])
            return stream.get_final_message()

    return {"turns": loop(ask), "types": types}


def counted(talk: Talk) -> Any:
    fields = talk.asked([QUESTION], system="Be brief.")
    made = talk.client.messages.create(**fields)
    del fields["max_tokens"]
    return {
        "tokens": talk.client.messages.count_tokens(**fields).input_tokens,
        "usage": plain(made)["usage"],
    }


def parsed(talk: Talk) -> Any:
    message = talk.client.messages.parse(
        model=talk.model,
        max_tokens=200,
        messages=[{"role": "user", "content": "Name a town."}],
        output_format=Town,
    )
    town = message.parsed_output
    return {"town": town and town.model_dump()}


def models(talk: Talk) -> Any:
    listed = [plain(model) for model in talk.client.models.list()]
    return {"listed": listed, "one": plain(talk.client.models.retrieve(talk.model))}


def refused(talk: Talk) -> Any:
    """Which errors the client makes of ours."""
    wrong: dict[str, dict[str, Any]] = {
        "model": {"model": "nobody"},
        "temperature": {"extra_body": {"temperature": "hot"}},
        "orphan": {
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "tool_result", "tool_use_id": "x", "content": "y"}],
                }
            ]
        },
        "server tool": {"tools": [{"type": "code_execution_20250825", "name": "code_execution"}]},
    }
    found = {}
    for name, fields in wrong.items():
        try:
            talk.client.messages.create(**{**talk.asked([QUESTION]), **fields})
            found[name] = None
        except anthropic.APIStatusError as error:
            found[name] = {
                "kind": type(error).__name__,
                "body": error.body,
                "request_id": error.request_id,
            }
    return found


STORIES: dict[str, Callable[[Talk], Any]] = {
    "created": created,
    "streamed": streamed,
    "counted": counted,
    "parsed": parsed,
    "models": models,
    "refused": refused,
}


def attempt(base_url: str, name: str, model: str) -> Any:
    """A story, or how it broke: the others are to be seen all the same."""
    try:
        return STORIES[name](Talk(base_url, model))
    except Exception:
        return {"broke": traceback.format_exc()}


if __name__ == "__main__":
    print(json.dumps({one: attempt(sys.argv[1], *one.split("/")) for one in sys.argv[2:]}))
