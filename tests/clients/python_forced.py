"""Hosted tools that the official Python client forces a real model to call, over HTTP and over its socket.

    python_forced.py BASE_URL MODEL WAY:STORY…   WAY is http or socket, STORY is mcp or web

There is an MCP server `own` with a tool `echo`, and a web search. Prints one JSON object: the response of each.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import openai

OWN: dict[str, Any] = {
    "type": "mcp",
    "server_label": "own",
    "require_approval": "never",
    "allowed_tools": ["echo"],
}

Ask = Callable[..., Any]


def by_http(client: openai.OpenAI) -> Ask:
    return client.responses.create


def by_socket(connection: Any) -> Ask:
    def ask(**fields: Any) -> Any:
        connection.response.create(**fields)
        for event in connection:
            if event.type in ("response.completed", "response.incomplete", "error"):
                return event.response
        raise AssertionError("the socket closed")

    return ask


STORIES: dict[str, dict[str, Any]] = {
    "mcp": {
        "input": "Say bees.",
        "tools": [OWN],
        "tool_choice": {"type": "mcp", "server_label": "own", "name": "echo"},
    },
    "web": {
        "input": "What brings rain?",
        "tools": [{"type": "web_search"}],
        # The name that the client's own types know.
        "tool_choice": {"type": "web_search_preview"},
    },
}


def main() -> None:
    url, model, *stories = sys.argv[1:]
    client = openai.OpenAI(base_url=url, api_key="none")
    told: dict[str, Any] = {}
    with client.responses.connect() as connection:
        for story in stories:
            way, _, what = story.partition(":")
            ask = by_http(client) if way == "http" else by_socket(connection)
            fields = {"model": model, "temperature": 0, "max_output_tokens": 48, **STORIES[what]}
            told[story] = ask(**fields).model_dump(mode="json")
    print(json.dumps(told))


main()
