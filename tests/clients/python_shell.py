"""Runs in the clients' own environment: a shell in a container, by the OpenAI SDK and by the Agents SDK.

Arguments: the base URL and the model. Prints one JSON object with what came of it.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys

from openai import AsyncOpenAI, NotFoundError, OpenAI

# This folder has a module of the same name as the Agents SDK.
sys.path.pop(0)
from agents import (
    Agent,
    OpenAIResponsesModel,
    Runner,
    ShellTool,
    set_tracing_disabled,
)


def by_sdk(client: OpenAI, model: str) -> dict[str, object]:
    """A container made by name, a file put into it, a turn that uses it, what it made, and its end."""
    made = client.containers.create(
        name="mine", expires_after={"anchor": "last_active_at", "minutes": 5}
    )
    put = client.containers.files.create(made.id, file=("in.txt", b"words"))
    tool = {
        "type": "shell",
        "environment": {"type": "container_reference", "container_id": made.id},
    }
    with client.responses.stream(model=model, input="Go", tools=[tool]) as stream:
        events = [event.type for event in stream]
        response = stream.get_final_response()
    files = {file.path: file for file in client.containers.files.list(made.id)}
    out = files["/mnt/data/x.csv"]
    text = response.output[-1].content[0]
    found = {
        "events": events,
        "types": [item.type for item in response.output],
        "outputs": [item.to_dict() for item in response.output if item.type == "shell_call_output"],
        "listed": [each.id for each in client.containers.list(limit=10)] == [made.id],
        "name": client.containers.retrieve(made.id).name,
        "minutes": made.expires_after.minutes,
        "put": [put.path, put.source, put.bytes],
        "out": [
            out.source,
            client.containers.files.content.retrieve(out.id, container_id=made.id).read().decode(),
        ],
        "cited": [one.to_dict() for one in text.annotations],
        "cites_file": text.annotations[0].file_id == out.id,
    }
    client.containers.files.delete(out.id, container_id=made.id)
    client.containers.delete(made.id)
    try:
        client.containers.retrieve(made.id)
    except NotFoundError as error:
        found["gone"] = error.code
    return found


async def by_agents(base_url: str, model: str) -> dict[str, object]:
    """As the official example does it: a container that is made, then a second agent with a reference to it."""
    client = AsyncOpenAI(base_url=base_url, api_key="none")
    shown = OpenAIResponsesModel(model=model, openai_client=client)

    def agent(environment: dict[str, object]) -> Agent:
        return Agent(
            name="Shell",
            model=shown,
            instructions="Use the shell.",
            tools=[ShellTool(environment=environment)],
        )

    first = await Runner.run(agent({"type": "container_auto"}), "Go")
    container = next(
        item.environment.container_id
        for response in first.raw_responses
        for item in response.output
        if item.type == "shell_call"
    )
    reference = {"type": "container_reference", "container_id": container}
    second = await Runner.run(agent(reference), "Again")
    streamed = Runner.run_streamed(agent(reference), "Again")
    events = [event.type async for event in streamed.stream_events()]
    await client.close()
    return {
        "first": first.final_output,
        "second": second.final_output,
        "streamed": streamed.final_output,
        "has_events": len(events) > 0,
        "calls": [item.type for response in second.raw_responses for item in response.output],
    }


def main() -> None:
    base_url, model = sys.argv[1:3]
    os.environ["OPENAI_AGENTS_DISABLE_TRACING"] = "1"
    set_tracing_disabled(True)
    with OpenAI(base_url=base_url, api_key="none") as client:
        found = {"sdk": by_sdk(client, model), "agents": asyncio.run(by_agents(base_url, model))}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
