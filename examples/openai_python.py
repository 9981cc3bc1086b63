"""A coding agent in one loop: the OpenAI Python SDK on one WebSocket connection, each turn sends only the new items.

    python examples/openai_python.py FOLDER

OPENAI_BASE_URL is the URL of the server, EXAMPLE_MODEL names a model. `fix_the_bug.py` is the same with recovery.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import openai
from workspace import INSTRUCTIONS, TASK, TOOLS, Workspace

TURNS_MAX = 30


def main(folder: str) -> str:
    """Work until the model calls no more tools; its last words."""
    base_url = os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8080/v1")
    client = openai.OpenAI(base_url=base_url, api_key=os.environ.get("OPENAI_API_KEY", "none"))
    model = os.environ.get("EXAMPLE_MODEL") or client.models.list().data[0].id
    workspace = Workspace(folder)
    given: list[Any] = [{"role": "user", "content": TASK}]
    parent: dict[str, str] = {}
    with client.responses.connect() as connection:
        for _ in range(TURNS_MAX):
            connection.response.create(
                model=model,
                instructions=INSTRUCTIONS,
                tools=TOOLS,
                input=given,
                store=False,
                **parent,
            )
            response = wait_for_end(connection)
            parent = {"previous_response_id": response.id}
            calls = [item for item in response.output if item.type == "function_call"]
            if not calls:
                return str(response.output_text)
            given = [
                {
                    "type": "function_call_output",
                    "call_id": call.call_id,
                    "output": workspace.call(call.name, json.loads(call.arguments)),
                }
                for call in calls
            ]
    raise SystemExit(f"the model went on for {TURNS_MAX} turns")


def wait_for_end(connection: Any) -> Any:
    """The response, once it is complete; anything else ends the program with the server's message."""
    for event in connection:
        if event.type == "response.completed":
            return event.response
        if event.type in ("response.failed", "response.incomplete"):
            raise SystemExit(
                f"{event.type}: {event.response.error or event.response.incomplete_details}"
            )
        if event.type == "error":
            raise SystemExit(f"{event.error.code}: {event.error.message}")
    raise SystemExit("the connection ended before the response")


if __name__ == "__main__":
    print(main(sys.argv[1]))
