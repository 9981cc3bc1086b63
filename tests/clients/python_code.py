"""Runs in the clients' own environment: Python code in a container, by the OpenAI SDK and by the Agents SDK.

Arguments: the base URL and the model. Prints one JSON object with what came of it.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys

from openai import AsyncOpenAI, OpenAI

# This folder has a module of the same name as the Agents SDK.
sys.path.pop(0)
from agents import (
    Agent,
    CodeInterpreterTool,
    OpenAIResponsesModel,
    Runner,
    set_tracing_disabled,
)

AUTO = {"type": "code_interpreter", "container": {"type": "auto"}}


def by_sdk(client: OpenAI, model: str) -> dict[str, object]:
    """A streamed turn, its outputs, and the file that it made; then the same container by its id."""
    shown = ["code_interpreter_call.outputs"]
    with client.responses.stream(model=model, input="Go", tools=[AUTO], include=shown) as stream:
        events = [event.type for event in stream]
        response = stream.get_final_response()
    call, message = response.output
    (citation,) = message.content[0].annotations
    content = client.containers.files.content.retrieve(
        citation.file_id, container_id=citation.container_id
    )
    named = {"type": "code_interpreter", "container": call.container_id}
    again = client.responses.create(model=model, input="Go", tools=[named], include=shown)
    return {
        "events": events,
        "types": [item.type for item in response.output],
        "logs": [output.logs for output in call.outputs],
        "content": content.text,
        "again": [again.output[0].container_id == call.container_id, again.output[0].status],
    }


async def by_agents(client: AsyncOpenAI, model: str) -> dict[str, object]:
    """An agent in one run and streamed."""
    responses = OpenAIResponsesModel(model=model, openai_client=client)
    tools = [CodeInterpreterTool(tool_config=AUTO)]
    agent = Agent(name="coder", model=responses, tools=tools)
    result = await Runner.run(agent, "Go")
    streamed = Runner.run_streamed(agent, "Go")
    codes = []
    async for event in streamed.stream_events():
        if event.type == "run_item_stream_event" and event.item.type == "tool_call_item":
            codes.append(event.item.raw_item.code)
    return {"final": [result.final_output, streamed.final_output], "codes": codes}


def main() -> None:
    url, model = sys.argv[1], sys.argv[2]
    os.environ["OPENAI_API_KEY"] = "none"
    set_tracing_disabled(True)
    with OpenAI(base_url=url, api_key="none") as client:
        sdk = by_sdk(client, model)

    async def run() -> dict[str, object]:
        async with AsyncOpenAI(base_url=url, api_key="none") as client:
            return await by_agents(client, model)

    print(json.dumps({"sdk": sdk, "agents": asyncio.run(run())}))


if __name__ == "__main__":
    main()
