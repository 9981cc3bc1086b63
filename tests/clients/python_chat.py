"""Chat Completions by the official Python client. Runs in the client's environment.

    python_chat.py BASE_URL

Prints one JSON object: what each call and each helper gave, errors as the exception that an application would catch.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import openai
from pydantic import BaseModel

ASKED: list[Any] = [{"role": "user", "content": "What is the weather in all cities?"}]
TURNS_MAX = 40


class GetWeather(BaseModel):
    """The weather in a city"""

    city: str


class City(BaseModel):
    name: str
    people: int


TOOL = openai.pydantic_function_tool(GetWeather, name="get_weather")


def looped(client: openai.OpenAI, model: str, speak: Callable[..., Any]) -> dict[str, Any]:
    """An agent's loop that resends everything, as the client's own objects."""
    messages, turns = [*ASKED], []
    while len(turns) < TURNS_MAX:
        completion = speak(client, model=model, messages=messages, tools=[TOOL])
        (choice,) = completion.choices
        message = choice.message
        calls = message.tool_calls or []
        turns.append(
            {
                "id": completion.id,
                "finish": choice.finish_reason,
                "text": message.content,
                "thought": getattr(message, "reasoning_content", None),
                "calls": [[call.id, call.function.name, call.function.arguments] for call in calls],
                "usage": completion.usage and completion.usage.model_dump(exclude_none=True),
            }
        )
        if not calls:
            break
        messages.append(message)
        for call in calls:
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "sunny"})
    return {"turns": turns}


def created(client: openai.OpenAI, **fields: Any) -> Any:
    return client.chat.completions.create(**fields)


def parsed(client: openai.OpenAI, **fields: Any) -> Any:
    completion = client.chat.completions.parse(**fields)
    for call in completion.choices[0].message.tool_calls or ():
        assert isinstance(call.function.parsed_arguments, GetWeather)
    return completion


def streamed(client: openai.OpenAI, **fields: Any) -> Any:
    """The strict helper, which puts the chunks together."""
    usage: Any = {"include_usage": True}
    with client.chat.completions.stream(**fields, stream_options=usage) as stream:
        text = "".join(event.delta for event in stream if event.type == "content.delta")
        completion = stream.get_final_completion()
    assert text == (completion.choices[0].message.content or "")
    return completion


def chunked(client: openai.OpenAI) -> list[Any]:
    """The chunks themselves."""
    usage: Any = {"include_usage": True}
    with client.chat.completions.create(
        model="improvised", messages=ASKED, stream=True, stream_options=usage
    ) as stream:
        return [chunk.model_dump(exclude_unset=True) for chunk in stream]


def shaped(client: openai.OpenAI) -> dict[str, Any]:
    """An answer in a shape of the application's own."""
    completion = client.chat.completions.parse(
        model="improvised", messages=ASKED, response_format=City
    )
    found = completion.choices[0].message.parsed
    assert isinstance(found, City)
    return found.model_dump()


def likely(client: openai.OpenAI) -> list[str]:
    completion = client.chat.completions.create(
        model="improvised", messages=ASKED, logprobs=True, top_logprobs=1
    )
    logprobs = completion.choices[0].logprobs
    assert logprobs is not None
    return [one.token for one in logprobs.content or ()]


def caught(call: Callable[[], object]) -> dict[str, Any]:
    """The error that a call ends with."""
    try:
        call()
    except openai.APIStatusError as error:
        found = {"kind": type(error).__name__, "code": error.code, "param": error.param}
        return {**found, "request_id": error.request_id}
    return {"kind": None}


def main(url: str) -> dict[str, Any]:
    client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
    create = client.chat.completions.create
    loops = {"create": created, "parse": parsed, "stream": streamed}
    return {
        "loops": {name: looped(client, "loop", speak) for name, speak in loops.items()},
        "thinking": {
            view: looped(client, f"thinking-{view}", streamed)
            for view in ("text", "summary", "hidden")
        },
        "chunks": chunked(client),
        "shaped": shaped(client),
        "likely": likely(client),
        "errors": {
            "model": caught(lambda: create(model="nothing", messages=ASKED)),
            "n": caught(lambda: create(model="improvised", messages=ASKED, n=2)),
            "stored": caught(lambda: client.chat.completions.retrieve("chatcmpl-1")),
            "listed": caught(lambda: client.chat.completions.list()),
            "embeddings": caught(lambda: client.embeddings.create(model="improvised", input="x")),
            "completions": caught(
                lambda: client.completions.create(model="improvised", prompt="x")
            ),
        },
    }


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
