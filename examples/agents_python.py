"""A coding agent with the OpenAI Agents SDK for Python, over one WebSocket connection.

    python examples/agents_python.py FOLDER

OPENAI_BASE_URL is the URL of the server, EXAMPLE_MODEL names a model. `auto_previous_response_id` makes every turn send
only the new items; its responses are stored (the default), so that the chain survives a new connection.
"""

from __future__ import annotations

import asyncio
import os
import sys

from agents import (
    Agent,
    function_tool,
    responses_websocket_session,
    set_default_openai_client,
    set_default_openai_responses_transport,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from workspace import INSTRUCTIONS, TASK, Workspace

TURNS_MAX = 30


async def main(folder: str) -> str:
    """Run the agent to its end; its last words."""
    base_url = os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8080/v1")
    client = AsyncOpenAI(base_url=base_url, api_key=os.environ.get("OPENAI_API_KEY", "none"))
    model = os.environ.get("EXAMPLE_MODEL") or (await client.models.list()).data[0].id
    set_tracing_disabled(True)
    set_default_openai_client(client, use_for_tracing=False)
    set_default_openai_responses_transport("websocket")
    workspace = Workspace(folder)
    methods = (workspace.list_files, workspace.read_file, workspace.edit_file, workspace.run_tests)
    agent = Agent(
        name="fixer",
        model=model,
        instructions=INSTRUCTIONS,
        tools=[function_tool(method) for method in methods],
    )
    async with responses_websocket_session() as session:
        run = session.run_streamed(agent, TASK, max_turns=TURNS_MAX, auto_previous_response_id=True)
        async for _ in run.stream_events():
            pass
    return str(run.final_output)


if __name__ == "__main__":
    try:
        print(asyncio.run(main(sys.argv[1])))
    except Exception as error:
        raise SystemExit(f"{type(error).__name__}: {error}") from None
