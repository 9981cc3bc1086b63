"""How is each client set up? What `segue connect` prints, and which clients cannot be used.

In: a server and one of its models. Out: a program from `snippets/`, or the client's own settings as text. A key never
stands in it, only the name of its environment variable. The model's name comes from the server: it is quoted wherever
it stands, by the rules of that language.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from importlib.resources import files
from typing import NamedTuple

import msgspec

from segue.errors import Misconfigured
from segue_cli.client.talk import SEGUE_KEY, ModelEndpoint

# Where the server does not say its context.
CONTEXT_TOKENS = 131_072
OUTPUT_TOKENS_MAX = 32_000
# What stands in a snippet: a value, and as what; the name of a variable is a bare word everywhere.
PLACE = re.compile(r"\{(\w+):(string|word|text)\}|\{key_env\}")


class Client(NamedTuple):
    """A client: its settings, and what a person does with them. Without a function they are a text in `snippets/`."""

    settings: Callable[[ModelEndpoint], object] | None = None
    use: str = ""


def settings_of(client: str, endpoint: ModelEndpoint) -> str:
    """What this client needs, ready to be saved."""
    make = CLIENTS[client].settings
    if make is None:
        return snippet(client, endpoint)
    return msgspec.json.format(msgspec.json.encode(make(endpoint)), indent=2).decode()


def snippet(client: str, endpoint: ModelEndpoint) -> str:
    """A program for this client, from `snippets/`, that runs as it is."""
    text = (files("segue_cli.client") / "snippets" / f"{client}.txt").read_text().rstrip("\n")
    url = f"{endpoint.base_url}/responses"
    values = {
        "base_url": endpoint.base_url,
        "responses_url": url,
        "socket_url": url.replace("http", "ws", 1),
        "model": endpoint.model,
        "body": _literal({"model": endpoint.model, "input": "Name a fruit.", "stream": True}),
    }
    forms: dict[str, Callable[[str], str]]
    forms = {"string": _literal, "word": shlex.quote, "text": str}

    def write(place: re.Match[str]) -> str:
        name, form = place.groups()
        return forms[form](values[name]) if name else endpoint.key_env or SEGUE_KEY

    return PLACE.sub(write, text)


def _literal(value: object) -> str:
    """As JSON, which is a literal of Python and of JavaScript too."""
    return json.dumps(value, ensure_ascii=False)


def opencode(endpoint: ModelEndpoint) -> dict[str, object]:
    """`opencode.json`: the provider of the AI SDK that uses the Responses API."""
    if "{" in endpoint.model:
        # It would put the contents of a file or of a variable there.
        raise Misconfigured(f"model: opencode does not take braces in a name: '{endpoint.model}'.")
    context = endpoint.context_tokens or CONTEXT_TOKENS
    limit = {"context": context, "output": min(context // 4, OUTPUT_TOKENS_MAX)}
    settings: dict[str, object] = {
        "$schema": "https://opencode.ai/config.json",
        "model": f"segue/{endpoint.model}",
        "small_model": f"segue/{endpoint.model}",
        "provider": {
            "segue": {
                "npm": "@ai-sdk/openai",
                "name": "Segue",
                "options": {
                    "baseURL": endpoint.base_url,
                    "apiKey": f"{{env:{endpoint.key_env}}}" if endpoint.key_env else "none",
                },
                "models": {endpoint.model: {"name": endpoint.model, "limit": limit}},
            }
        },
    }
    # Its own prompt fills a small context: it would compact after every answer, without an end.
    return settings | ({"compaction": {"auto": False}} if endpoint.is_small else {})


def pi(endpoint: ModelEndpoint) -> dict[str, object]:
    """`models.json` of pi."""
    model: dict[str, object] = {"id": endpoint.model}
    if endpoint.context_tokens:
        model["contextWindow"] = endpoint.context_tokens
    if endpoint.sees_images:
        model["input"] = ["text", "image"]
    provider = {
        "baseUrl": endpoint.base_url,
        "api": "openai-responses",
        "apiKey": f"${endpoint.key_env}" if endpoint.key_env else "none",
        "models": [model],
    }
    return {"providers": {"segue": provider}}


def zed(endpoint: ModelEndpoint) -> dict[str, object]:
    """The part of Zed's `settings.json`."""
    model = {
        "name": endpoint.model,
        "max_tokens": endpoint.context_tokens or CONTEXT_TOKENS,
        "capabilities": {
            "tools": True,
            "images": bool(endpoint.sees_images),
            "parallel_tool_calls": True,
            "prompt_cache_key": True,
            "chat_completions": False,
        },
    }
    provider = {"api_url": endpoint.base_url, "available_models": [model]}
    return {"language_models": {"openai_compatible": {"segue": provider}}}


CLIENTS = {
    "python": Client(),
    "node": Client(),
    "agents-python": Client(),
    "agents-js": Client(),
    "ai-sdk": Client(),
    "langchain": Client(),
    "pydantic-ai": Client(),
    "curl": Client(),
    "opencode": Client(
        opencode,
        "Save this as opencode.json in your project, or add it to ~/.config/opencode/opencode.json; then: opencode",
    ),
    "pi": Client(
        pi, "Save this as ~/.pi/agent/models.json, or add it there; then: pi --provider segue"
    ),
    "cline": Client(use="Run this command once; then: cline"),
    "zed": Client(
        zed,
        "Add this to Zed's settings.json (zed: open settings), and enter an API key for the provider segue, any text "
        "if the server needs none: in the settings for LLM providers, or in the variable SEGUE_API_KEY.",
    ),
    "other": Client(),
}
UNSUPPORTED = {
    "aider": "it uses the Chat Completions API, and Segue serves the Responses API.",
    "claude-code": "it uses Anthropic's Messages API, and Segue serves the Responses API.",
    "continue": "it uses the Responses API at api.openai.com only, and Chat Completions at any other URL.",
}
