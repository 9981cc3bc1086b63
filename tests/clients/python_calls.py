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

ITEMS = 7


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
