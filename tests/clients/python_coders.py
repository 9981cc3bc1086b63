"""Coding agents of Python libraries on Chat Completions and on Messages: each works in a folder until the model calls
no more tools, and prints its last words.

    python tests/clients/python_coders.py LIBRARY URL FOLDER MODEL

They share the tools of `examples/workspace.py`. URL is that of the server, without the version.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from workspace import INSTRUCTIONS, TASK, TOOLS, Workspace

TURNS_MAX = 30
KEY = "none"
Tools = dict[str, Callable[..., str]]


def anthropic_runner(url: str, workspace: Workspace, model: str) -> str:
    """The tool runner of Anthropic's own library, which uses threads."""
    import anthropic

    client = anthropic.Anthropic(base_url=url, api_key=KEY)
    runner = client.beta.messages.tool_runner(
        model=model,
        max_tokens=1000,
        system=INSTRUCTIONS,
        tools=[anthropic.beta_tool(tool) for tool in functions(workspace).values()],
        messages=[{"role": "user", "content": TASK}],
        max_iterations=TURNS_MAX,
    )
    answer = runner.until_done()
    return "".join(block.text for block in answer.content if block.type == "text")


def litellm_loop(url: str, workspace: Workspace, model: str) -> str:
    import litellm

    messages: list[Any] = [
        {"role": "system", "content": INSTRUCTIONS},
        {"role": "user", "content": TASK},
    ]
    tools = [
        {"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}}
        for tool in TOOLS
    ]
    for _ in range(TURNS_MAX):
        answer = litellm.completion(
            f"openai/{model}", messages, tools=tools, api_base=f"{url}/v1", api_key=KEY
        )
        message = answer.choices[0].message
        if not message.tool_calls:
            return str(message.content)
        messages.append(message)
        messages += [
            {
                "role": "tool",
                "tool_call_id": call.id,
                "content": workspace.call(call.function.name, json.loads(call.function.arguments)),
            }
            for call in message.tool_calls
        ]
    raise SystemExit("too many turns")


def langchain_chat(url: str, workspace: Workspace, model: str) -> str:
    from langchain_openai import ChatOpenAI

    return _langchain(ChatOpenAI(model=model, base_url=f"{url}/v1", api_key=KEY), workspace)


def langchain_messages(url: str, workspace: Workspace, model: str) -> str:
    from langchain_anthropic import ChatAnthropic

    return _langchain(
        ChatAnthropic(model=model, base_url=url, api_key=KEY, max_tokens=1000), workspace
    )


def _langchain(chat: Any, workspace: Workspace) -> str:
    from langchain_core.messages import ToolMessage

    bound = chat.bind_tools(list(functions(workspace).values()))
    messages: list[Any] = [("system", INSTRUCTIONS), ("user", TASK)]
    for _ in range(TURNS_MAX):
        pieces = list(bound.stream(messages))
        answer = pieces[0]
        for piece in pieces[1:]:
            answer += piece
        if not answer.tool_calls:
            return str(answer.text)
        messages.append(answer)
        messages += [
            ToolMessage(workspace.call(call["name"], call["args"]), tool_call_id=call["id"])
            for call in answer.tool_calls
        ]
    raise SystemExit("too many turns")


def pydantic_chat(url: str, workspace: Workspace, model: str) -> str:
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=f"{url}/v1", api_key=KEY)
    return _pydantic(OpenAIChatModel(model, provider=provider), workspace)


def pydantic_messages(url: str, workspace: Workspace, model: str) -> str:
    import anthropic
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.providers.anthropic import AnthropicProvider

    client = anthropic.AsyncAnthropic(base_url=url, api_key=KEY)
    return _pydantic(
        AnthropicModel(model, provider=AnthropicProvider(anthropic_client=client)), workspace
    )


def _pydantic(model: Any, workspace: Workspace) -> str:
    from pydantic_ai import Agent

    tools = list(functions(workspace).values())
    return str(Agent(model, instructions=INSTRUCTIONS, tools=tools).run_sync(TASK).output)


def smolagents_loop(url: str, workspace: Workspace, model: str) -> str:
    from smolagents import OpenAIServerModel, ToolCallingAgent, tool

    described = {
        "read_file": "\n\nArgs:\n    path: a path as listed",
        "edit_file": "\n\nArgs:\n    path: a path\n    old: the text as it is\n    new: the text as it is to be",
    }
    tools = functions(workspace)
    for name, more in described.items():
        tools[name].__doc__ = f"{tools[name].__doc__}{more}"
    server = OpenAIServerModel(model, api_base=f"{url}/v1", api_key=KEY)
    return str(ToolCallingAgent([tool(each) for each in tools.values()], server).run(TASK))


def functions(workspace: Workspace) -> Tools:
    """The tools as plain functions, as the libraries want them."""

    def list_files() -> str:
        """List the files of the project."""
        return workspace.list_files()

    def read_file(path: str) -> str:
        """Read a file of the project."""
        return workspace.read_file(path)

    def edit_file(path: str, old: str, new: str) -> str:
        """Replace a text that occurs exactly once in a file by another."""
        return workspace.edit_file(path, old, new)

    def run_tests() -> str:
        """Run the project's tests; the last line says whether they pass."""
        return workspace.run_tests()

    tools: list[Callable[..., str]] = [list_files, read_file, edit_file, run_tests]
    return {tool.__name__: tool for tool in tools}


LIBRARIES = {
    "anthropic": anthropic_runner,
    "litellm": litellm_loop,
    "langchain-chat": langchain_chat,
    "langchain-messages": langchain_messages,
    "pydantic-chat": pydantic_chat,
    "pydantic-messages": pydantic_messages,
    "smolagents": smolagents_loop,
}


if __name__ == "__main__":
    library, url, folder, model = sys.argv[1:]
    print(LIBRARIES[library](url, Workspace(folder), model))
