"""How is each client set up? What `segue connect` prints.

In: a server, one of its models, one of its APIs. Out: a program from `snippets/`, the client's own settings, or lines
for a shell, as text. A key never stands in it, only the name of its environment variable. The model's name comes from
the server: it is quoted wherever it stands, by the rules of that language.
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


# A slow engine reads a long prompt for many minutes; the server sends pings meanwhile.
REQUEST_MS_MAX = 3_600_000
RESPONSES, CHAT, MESSAGES = "responses", "chat", "messages"


class Client(NamedTuple):
    """A client: its settings, and what a person does with them. Without a function they are a text in `snippets/`.

    `variables` makes an environment, with the key in it, instead of settings. The first of its APIs is the default.
    """

    settings: Callable[[ModelEndpoint, str], object] | None = None
    use: str = ""
    apis: tuple[str, ...] = (RESPONSES,)
    variables: Callable[[ModelEndpoint, str, str], dict[str, str]] | None = None


def api_of(client: str, asked: str | None) -> str:
    """The API that a client is set up for."""
    apis = CLIENTS[client].apis if client in CLIENTS else (RESPONSES,)
    if asked is None:
        return apis[0]
    if asked not in apis:
        raise Misconfigured(f"api: {client} does not use '{asked}'; choose from {', '.join(apis)}.")
    return asked


def settings_of(client: str, endpoint: ModelEndpoint, api: str | None = None) -> str:
    """What this client needs, ready to be saved, or to be run by a shell."""
    row, api = CLIENTS[client], api_of(client, api)
    if row.variables is not None:
        key = f"${{{endpoint.key_env or SEGUE_KEY}:-none}}"
        variables = row.variables(endpoint, api, key)
        quoted = {
            name: f'"{key}"' if text == key else shlex.quote(text)
            for name, text in variables.items()
        }
        return "\n".join(f"export {name}={text}" for name, text in quoted.items())
    if row.settings is None:
        return snippet(client, endpoint, api)
    return msgspec.json.format(msgspec.json.encode(row.settings(endpoint, api)), indent=2).decode()


def snippet(client: str, endpoint: ModelEndpoint, api: str = RESPONSES) -> str:
    """A program for this client, from `snippets/`, that runs as it is."""
    text = (files("segue_cli.client") / "snippets" / f"{client}.txt").read_text().rstrip("\n")
    url = f"{endpoint.base_url}/responses"
    context, output = _limits(endpoint)
    values = {
        "base_url": endpoint.base_url,
        "root_url": endpoint.root_url,
        "responses_url": url,
        "socket_url": url.replace("http", "ws", 1),
        "model": endpoint.model,
        "body": _literal({"model": endpoint.model, "input": "Name a fruit.", "stream": True}),
        "context": str(context),
        "output": str(output),
        "cline_provider": CLINE_PROVIDERS.get(api, ""),
        "continue_key": f"${{{{ secrets.{endpoint.key_env} }}}}" if endpoint.key_env else "none",
        "continue_provider": "anthropic" if api == MESSAGES else "openai",
    }
    forms: dict[str, Callable[[str], str]]
    forms = {"string": _literal, "word": shlex.quote, "text": str}

    def write(place: re.Match[str]) -> str:
        name, form = place.groups()
        return forms[form](values[name]) if name else endpoint.key_env or SEGUE_KEY

    return PLACE.sub(write, text)


def _limits(endpoint: ModelEndpoint) -> tuple[int, int]:
    """The context window, and how much of it an answer may be."""
    context = endpoint.context_tokens or CONTEXT_TOKENS
    return context, min(context // 4, OUTPUT_TOKENS_MAX)


def _literal(value: object) -> str:
    """As JSON, which is a literal of Python and of JavaScript too."""
    return json.dumps(value, ensure_ascii=False)


def claude_code(endpoint: ModelEndpoint, api: str, key: str) -> dict[str, str]:
    """Its environment: this server and this model for every call, those of subagents and titles as well."""
    names = ("", "DEFAULT_OPUS_", "DEFAULT_SONNET_", "DEFAULT_HAIKU_", "DEFAULT_FABLE_")
    variables = {"ANTHROPIC_BASE_URL": endpoint.root_url, "ANTHROPIC_AUTH_TOKEN": key}
    variables |= {f"ANTHROPIC_{name}MODEL": endpoint.model for name in names}
    if endpoint.context_tokens:
        context, output = _limits(endpoint)
        # It takes the window of a model that it does not know for a million tokens, and would never compact.
        variables["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] = str(context)
        variables["CLAUDE_CODE_MAX_OUTPUT_TOKENS"] = str(output)
    return variables | {
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "API_TIMEOUT_MS": str(REQUEST_MS_MAX),
        "CLAUDE_STREAM_IDLE_TIMEOUT_MS": str(REQUEST_MS_MAX),
    }


def qwen_code(endpoint: ModelEndpoint, api: str, key: str) -> dict[str, str]:
    """Its environment; `--auth-type` says which of the two it uses."""
    url = endpoint.root_url if api == MESSAGES else endpoint.base_url
    prefix = qwen_auth(api).upper()
    return {
        f"{prefix}_BASE_URL": url,
        f"{prefix}_API_KEY": key,
        f"{prefix}_MODEL": endpoint.model,
        "QWEN_DEFAULT_AUTH_TYPE": qwen_auth(api),
    }


def qwen_auth(api: str) -> str:
    """Its name for an API."""
    return "anthropic" if api == MESSAGES else "openai"


def aider(endpoint: ModelEndpoint, api: str, key: str) -> dict[str, str]:
    """Its environment. LiteLLM, which it uses, takes the API from the beginning of the model's name."""
    prefix = "anthropic" if api == MESSAGES else "openai"
    url = endpoint.root_url if api == MESSAGES else endpoint.base_url
    return {
        f"{prefix.upper()}_API_BASE": url,
        f"{prefix.upper()}_API_KEY": key,
        "AIDER_MODEL": f"{prefix}/{endpoint.model}",
        "AIDER_WEAK_MODEL": f"{prefix}/{endpoint.model}",
        "AIDER_SHOW_MODEL_WARNINGS": "false",
    }


OPENCODE_PACKAGES = {
    RESPONSES: "@ai-sdk/openai",
    CHAT: "@ai-sdk/openai-compatible",
    MESSAGES: "@ai-sdk/anthropic",
}
PI_APIS = {
    RESPONSES: "openai-responses",
    CHAT: "openai-completions",
    MESSAGES: "anthropic-messages",
}
CLINE_PROVIDERS = {RESPONSES: "openai-native", CHAT: "openai-compatible"}


def opencode(endpoint: ModelEndpoint, api: str = RESPONSES) -> dict[str, object]:
    """`opencode.json`: the provider of the AI SDK for an API."""
    if "{" in endpoint.model:
        # It would put the contents of a file or of a variable there.
        raise Misconfigured(f"model: opencode does not take braces in a name: '{endpoint.model}'.")
    context, output = _limits(endpoint)
    settings: dict[str, object] = {
        "$schema": "https://opencode.ai/config.json",
        "model": f"segue/{endpoint.model}",
        "small_model": f"segue/{endpoint.model}",
        "provider": {
            "segue": {
                "npm": OPENCODE_PACKAGES[api],
                "name": "Segue",
                "options": {
                    "baseURL": endpoint.base_url,
                    "apiKey": f"{{env:{endpoint.key_env}}}" if endpoint.key_env else "none",
                },
                "models": {
                    endpoint.model: {
                        "name": endpoint.model,
                        "limit": {"context": context, "output": output},
                    }
                },
            }
        },
    }
    # Its own prompt fills a small context: it would compact after every answer, without an end.
    return settings | ({"compaction": {"auto": False}} if endpoint.is_small else {})


def pi(endpoint: ModelEndpoint, api: str = RESPONSES) -> dict[str, object]:
    """`models.json` of pi."""
    model: dict[str, object] = {"id": endpoint.model}
    if endpoint.context_tokens:
        model["contextWindow"] = endpoint.context_tokens
    if endpoint.sees_images:
        model["input"] = ["text", "image"]
    provider = {
        "baseUrl": endpoint.root_url if api == MESSAGES else endpoint.base_url,
        "api": PI_APIS[api],
        "apiKey": f"${endpoint.key_env}" if endpoint.key_env else "none",
        "models": [model],
    }
    return {"providers": {"segue": provider}}


def zed(endpoint: ModelEndpoint, api: str = RESPONSES) -> dict[str, object]:
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


EVERY_API = (RESPONSES, CHAT, MESSAGES)
CLIENTS = {
    "claude-code": Client(
        use="Run these lines in the shell in which you start it; then: claude",
        apis=(MESSAGES,),
        variables=claude_code,
    ),
    "python": Client(),
    "node": Client(),
    "anthropic-python": Client(apis=(MESSAGES,)),
    "anthropic-node": Client(apis=(MESSAGES,)),
    "agents-python": Client(),
    "agents-js": Client(),
    "ai-sdk": Client(),
    "langchain": Client(),
    "pydantic-ai": Client(),
    "curl": Client(),
    "opencode": Client(
        opencode,
        "Save this as opencode.json in your project, or add it to ~/.config/opencode/opencode.json; then: opencode",
        EVERY_API,
    ),
    "pi": Client(
        pi,
        "Save this as ~/.pi/agent/models.json, or add it there; then: pi --provider segue",
        EVERY_API,
    ),
    "cline": Client(use="Run this command once; then: cline", apis=(RESPONSES, CHAT)),
    "qwen-code": Client(
        use="Run these lines in the shell in which you start it; then: qwen",
        apis=(CHAT, MESSAGES),
        variables=qwen_code,
    ),
    "continue": Client(
        use="Save this as ~/.continue/config.yaml, or add the model there; then: cn",
        apis=(CHAT, MESSAGES),
    ),
    "aider": Client(
        use="Run these lines in the shell in which you start it; then: aider",
        apis=(CHAT, MESSAGES),
        variables=aider,
    ),
    "zed": Client(
        zed,
        "Add this to Zed's settings.json (zed: open settings), and enter an API key for the provider segue, any text "
        "if the server needs none: in the settings for LLM providers, or in the variable SEGUE_API_KEY.",
    ),
    "other": Client(),
}
