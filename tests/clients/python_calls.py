"""The plain HTTP calls of the official Python client. Runs in the client's environment.

    python_calls.py BASE_URL MODEL     MODEL improvises

Prints one JSON object: what each call gave, errors as the exception that an application would catch.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import openai
from pydantic import BaseModel

ITEMS = 7


class City(BaseModel):
    """An answer in a shape of the application's own."""

    name: str
    people: int


def caught(call: Callable[[], object]) -> dict[str, Any]:
    """The error that a call ends with."""
    try:
        call()
    except openai.APIStatusError as error:
        return {
            "kind": type(error).__name__,
            "status": error.status_code,
            "code": error.code,
            "param": error.param,
            "type": error.type,
            "message": error.message,
            "request_id": error.request_id,
        }
    return {"kind": None}


def cut(client: openai.OpenAI, model: str) -> list[str]:
    """The strict helper's events of an answer that is cut short."""
    with client.responses.stream(model=model, input="x " * 50, max_output_tokens=16) as stream:
        return [event.type for event in stream]


def resent(client: openai.OpenAI, model: str) -> str:
    """The whole history sent again, as the client's own objects, by an application that keeps no parent."""
    tools: list[Any] = [{"type": "function", "name": "get_weather", "parameters": {}}]
    history: list[Any] = [{"role": "user", "content": "Weather?"}]
    first = client.responses.create(model=model, input=history, tools=tools, store=False)
    history += first.output
    call_id = first.output[-1].call_id
    history.append({"type": "function_call_output", "call_id": call_id, "output": "snow"})
    return client.responses.create(model=model, input=history, tools=tools, store=False).output_text


def warm(client: openai.OpenAI, model: str) -> list[Any]:
    """A warm-up on a socket, then an empty input that stands on it."""
    told: list[Any] = []
    parent: dict[str, str] = {}
    with client.responses.connect() as connection:
        for given, generate in (("Hello there", False), ([], True)):
            connection.response.create(
                model=model,
                input=given,
                store=False,
                **({} if generate else {"generate": False}),
                **parent,
            )
            types = []
            for event in connection:
                types.append(event.type)
                if event.type in ("response.completed", "error"):
                    break
            told.append([types, event.response.output_text])
            parent = {"previous_response_id": event.response.id}
    return told


def texts(pages: Any) -> list[str]:
    return [item.content[0].text for item in pages]


def calls(base_url: str, model: str) -> dict[str, Any]:
    client = openai.OpenAI(api_key="sk-test", base_url=base_url, max_retries=0, timeout=30)
    responses = client.responses
    made = responses.create(
        model=model,
        input=[
            {"role": "user", "content": [{"type": "input_text", "text": f"item {index}"}]}
            for index in range(ITEMS)
        ],
        metadata={"for": "test"},
        temperature=0.5,
    )
    unstored = responses.create(model=model, input="Hello", store=False)
    fetched = responses.retrieve(made.id)
    items = responses.input_items
    first = items.list(made.id, limit=3, order="asc")
    found: dict[str, Any] = {
        "made": json.loads(made.to_json()),
        "fetched": json.loads(fetched.to_json()),
        "request_id": made._request_id,
        "unset": texts(items.list(made.id)),
        "asc": texts(items.list(made.id, limit=2, order="asc")),
        "desc": texts(items.list(made.id, limit=3, order="desc")),
        "first": [texts(first.data), first.has_more],
        "after": texts(items.list(made.id, order="asc", after=first.data[-1].id).data),
        "ids": [item.id for item in items.list(made.id, limit=2, order="asc")],
        "models": [one.id for one in client.models.list()],
        "parsed": responses.parse(
            model=model, input="x", text_format=City
        ).output_parsed.model_dump(),
        "cut": cut(client, model),
        "resent": resent(client, model),
        "warm": warm(client, model),
        "model": json.loads(client.models.retrieve(model).to_json()),
        "errors": {
            "parent": caught(
                lambda: responses.create(model=model, input="x", previous_response_id="resp_0")
            ),
            "parent streamed": caught(
                lambda: responses.create(
                    model=model, input="x", previous_response_id="resp_0", stream=True
                )
            ),
            "model": caught(lambda: responses.create(model="nobody", input="x")),
            "model card": caught(lambda: client.models.retrieve("nobody")),
            "response": caught(lambda: responses.retrieve("resp_0")),
            "unstored": caught(lambda: responses.retrieve(unstored.id)),
            "temperature": caught(lambda: responses.create(model=model, input="x", temperature=9)),
            "limit": caught(lambda: items.list(made.id, limit=0)),
        },
    }
    child = responses.create(model=model, input="And now?", previous_response_id=made.id)
    responses.delete(made.id)
    errors = found["errors"]
    errors["deleted"] = caught(lambda: responses.retrieve(made.id))
    errors["deleted twice"] = caught(lambda: responses.delete(made.id))
    errors["deleted items"] = caught(lambda: items.list(made.id))
    errors["deleted parent"] = caught(
        lambda: responses.create(model=model, input="x", previous_response_id=made.id)
    )
    errors["orphan"] = caught(
        lambda: responses.create(model=model, input="x", previous_response_id=child.id)
    )
    found["child"] = responses.retrieve(child.id).output_text
    return found


if __name__ == "__main__":
    print(json.dumps(calls(*sys.argv[1:3])))
