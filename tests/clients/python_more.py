"""The newer calls of the official Python client: background, compaction, counting, conversations, steering.

    python_more.py BASE_URL MODEL SLOW     MODEL improvises, SLOW takes seconds for an answer

Runs in the client's environment. Prints one JSON object: what each story gave, or how it broke.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from typing import Any

import openai

WAIT_S = 30
ENDS = ("response.completed", "response.incomplete", "response.failed")


def background(client: openai.OpenAI, model: str, slow: str) -> Any:
    """Left alone until it is done; another one is followed from the middle and cancelled."""
    made = client.responses.create(model=model, input="Hello", background=True)
    until = time.monotonic() + WAIT_S
    while (done := client.responses.retrieve(made.id)).status in ("queued", "in_progress"):
        assert time.monotonic() < until
    events = list(client.responses.retrieve(made.id, stream=True, starting_after=2))
    other = client.responses.create(model=slow, input="Hello", background=True)
    ended = client.responses.cancel(other.id)
    return {
        "made": made.status,
        "done": [done.status, done.output_text],
        "followed": [events[0].sequence_number, events[-1].type],
        "cancelled": ended.status,
    }


def compaction(client: openai.OpenAI, model: str, slow: str) -> Any:
    """A conversation is made small, and goes on."""
    items: list[Any] = [
        {
            "type": "message",
            "role": "user",
            "content": [{"type": "input_text", "text": f"Fact {n}."}],
        }
        for n in range(5)
    ]
    small = client.responses.compact(model=model, input=items)
    # Its types know only the model's messages here.
    window = [item.to_dict(warnings=False) for item in small.output]
    going_on = client.responses.create(
        model=model, input=[*window, {"role": "user", "content": "And?"}]
    )
    counted = client.responses.input_tokens.count(model=model, input=items)
    made = client.responses.create(model=model, input=items)
    return {
        "object": small.object,
        "types": [item.type for item in small.output],
        "answer": going_on.status,
        "tokens": [counted.input_tokens, made.usage.input_tokens if made.usage else None],
    }


def conversations(client: openai.OpenAI, model: str, slow: str) -> Any:
    """Two turns in one conversation, whose items can be listed."""
    made = client.conversations.create(metadata={"for": "test"})
    for question in ("Hello", "And?"):
        client.responses.create(model=model, input=question, conversation=made.id)
    items = list(client.conversations.items.list(made.id, order="asc"))
    client.conversations.delete(made.id)
    return {"roles": [getattr(item, "role", None) for item in items]}


def steering(client: openai.OpenAI, model: str, slow: str) -> Any:
    """A word while the model speaks: the answer ends, at a safe place or by itself, and another one follows."""
    types: list[str] = []
    responses: list[Any] = []
    ends: list[str] = []
    with client.responses.connect() as connection:
        connection.response.create(model=slow, input="Go on", store=False)
        for event in connection:
            is_first_word = event.type == "response.output_text.delta" and event.type not in types
            types.append(event.type)
            if is_first_word:
                connection.response.steer(
                    previous_response_id=responses[0].id,
                    input=[{"role": "user", "content": "Say it shorter."}],
                )
            if event.type == "response.created":
                responses.append(event.response)
            ends += [event.type] if event.type in ENDS else []
            if len(ends) == 2 or event.type in ("response.steer.failed", "error"):
                break
    return {
        "steer": [one for one in types if "steer" in one],
        "ends": ends,
        "parents": [one.previous_response_id for one in responses],
        "first": responses[0].id,
    }


STORIES = (background, compaction, conversations, steering)


def main(base_url: str, model: str, slow: str) -> dict[str, Any]:
    client = openai.OpenAI(api_key="sk-test", base_url=base_url, max_retries=0, timeout=WAIT_S)
    found: dict[str, Any] = {}
    for story in STORIES:
        try:
            found[story.__name__] = story(client, model, slow)
        except Exception:
            found[story.__name__] = {"broke": traceback.format_exc()}
    return found


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:4])))
