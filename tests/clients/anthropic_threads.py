"""A tool loop by the official Anthropic client, which uses threads by itself. Runs in the client's environment.

    anthropic_threads.py BASE_URL CONTROL_URL MODEL json|stream

Each run of the tool first asks CONTROL_URL/N, so that the test can do something to the server in mid-loop. Prints one
JSON object: the requests as they were sent with their statuses, the cities that were asked for, and the last text.
"""

from __future__ import annotations

import json
import sys
import urllib.request
from typing import Any

import anthropic
from anthropic import beta_tool


def main(base_url: str, control_url: str, model: str, way: str) -> None:
    sent: list[dict[str, Any]] = []
    cities: list[str] = []

    def on_request(request: Any) -> None:
        body = json.loads(request.content)
        sent.append(
            {
                "thread": body.get("thread"),
                "messages": len(body["messages"]),
                "has_head": "system" in body or "tools" in body,
            }
        )

    def on_response(response: Any) -> None:
        sent[-1]["status"] = response.status_code

    hooks = {"request": [on_request], "response": [on_response]}
    client = anthropic.Anthropic(
        base_url=base_url,
        api_key="none",
        max_retries=0,
        http_client=anthropic.DefaultHttpxClient(event_hooks=hooks),
    )

    @beta_tool
    def get_weather(city: str) -> str:
        """The weather in a city

        Args:
            city: The city.
        """
        cities.append(city)
        with urllib.request.urlopen(f"{control_url}/{len(cities)}", timeout=30) as answer:
            answer.read()
        return f"sunny in {city}"

    asked: dict[str, Any] = {
        "model": model,
        "max_tokens": 500,
        "system": "Be short.",
        "tools": [get_weather],
        "messages": [{"role": "user", "content": "Weather?"}],
    }
    if way == "stream":
        messages = [
            stream.get_final_message()
            for stream in client.beta.messages.tool_runner(stream=True, **asked)
        ]
    else:
        messages = list(client.beta.messages.tool_runner(**asked))
    text = "".join(block.text for block in messages[-1].content if block.type == "text")
    print(json.dumps({"sent": sent, "cities": cities, "text": text, "answers": len(messages)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
