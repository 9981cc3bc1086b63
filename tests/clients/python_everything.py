"""Every kind of answer of an MCP server through the official Python client, over HTTP and over its socket.

    python_everything.py BASE_URL MODEL     MODEL calls one tool after another of `all`, then answers

Prints one JSON object: for each way, without approval and with it, what each call came to.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import openai

FREE: dict[str, Any] = {"type": "mcp", "server_label": "all", "require_approval": "never"}
ASKED: dict[str, Any] = {"type": "mcp", "server_label": "all"}

Ask = Callable[..., Any]


def by_http(client: openai.OpenAI) -> Ask:
    def ask(**fields: Any) -> Any:
        with client.responses.stream(**fields) as stream:
            return stream.get_final_response()

    return ask


def by_socket(connection: Any) -> Ask:
    def ask(**fields: Any) -> Any:
        connection.response.create(**fields)
        for event in connection:
            if event.type in ("response.completed", "error"):
                return event.response
        raise AssertionError("the socket closed")

    return ask


def calls_in(response: Any) -> list[dict[str, Any]]:
    return [one.model_dump(mode="json") for one in response.output if one.type == "mcp_call"]


def approve_all(ask: Ask, model: str) -> list[dict[str, Any]]:
    """Say yes to each call, in a request of its own, until the model has what it wants."""
    told = ask(model=model, input="Go", tools=[ASKED])
    found: list[dict[str, Any]] = []
    while told.output[-1].type == "mcp_approval_request":
        yes = {
            "type": "mcp_approval_response",
            "approval_request_id": told.output[-1].id,
            "approve": True,
        }
        told = ask(model=model, input=[yes], tools=[ASKED], previous_response_id=told.id)
        found += calls_in(told)
    assert told.output[-1].type == "message"
    return found


def story(ask: Ask, model: str) -> dict[str, Any]:
    free = ask(model=model, input="Go", tools=[FREE])
    return {
        "listed": [tool.name for tool in free.output[0].tools],
        "free": calls_in(free),
        "asked": approve_all(ask, model),
        "said": free.output_text,
    }


def main() -> None:
    url, model = sys.argv[1:]
    client = openai.OpenAI(base_url=url, api_key="none")
    with client.responses.connect() as connection:
        told = {
            "http": story(by_http(client), model),
            "socket": story(by_socket(connection), model),
        }
    print(json.dumps(told))


main()
