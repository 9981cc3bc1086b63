"""Tools of an MCP server through the official Python client, over HTTP and over its socket.

    python_mcp.py BASE_URL MODEL     MODEL asks `time` for the time, then answers

Prints one JSON object: for each way the types of the output, with approval and without.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import openai

FREE: dict[str, Any] = {"type": "mcp", "server_label": "time", "require_approval": "never"}
ASKED: dict[str, Any] = {"type": "mcp", "server_label": "time"}

Ask = Callable[..., Any]


def types_of(response: Any) -> list[str]:
    return [item.type for item in response.output]


def by_http(client: openai.OpenAI) -> Ask:
    """The helper that checks the order of all events."""

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


def story(ask: Ask, model: str) -> dict[str, Any]:
    """A call that nobody is asked about, and one that is approved."""
    free = ask(model=model, input="What time is it?", tools=[FREE])
    asked = ask(model=model, input="What time is it?", tools=[ASKED])
    yes = {
        "type": "mcp_approval_response",
        "approval_request_id": asked.output[-1].id,
        "approve": True,
    }
    done = ask(model=model, input=[yes], tools=[ASKED], previous_response_id=asked.id)
    return {
        "free": types_of(free),
        "asked": types_of(asked),
        "done": types_of(done),
        "output": json.loads(done.output[0].output)["timezone"],
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
