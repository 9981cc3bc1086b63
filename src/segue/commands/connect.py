"""How does a client find this server? `segue connect CLIENT` prints what to write, and for Codex writes it.

In: the name of a client, the server's address, a model. Out: a snippet that runs as it is; for Codex a change to its
`config.toml`, shown before it is made. What stands in that file is kept: other keys are not touched, a value that is
replaced stays behind as a comment, and the file as it was is copied first. A file that we cannot change without
meaning something else is left alone.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import re
import shutil
import sys
import tomllib
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from segue.errors import Misconfigured
from segue.settings import codex_home

ABOUT = "point a client at a running server: a snippet, or Codex's own configuration"
URL = "http://127.0.0.1:8080"
# A server on the same machine answers at once; one behind a slow network may take a while.
ASK_S_MAX = 5.0
BACKUPS_MAX = 1_000
PROVIDER = "segue"
TABLE = f"model_providers.{PROVIDER}"
# Codex's own prompt and tools are about 9,000 tokens, and then there is nothing said yet.
SMALL_TOKENS = 24_000
# What is written for a small model bears this mark, and goes when a larger one takes its place.
MARK = "  # for a small model"
SMALL_PROMPT = "segue-small-model.md"
SMALL_PROMPT_TEXT = (
    "You are a coding agent in a terminal. Use the tools where they help. Answer in few words.\n"
)
SMALL_FEATURES = ("multi_agent", "goals")

Value = str | bool | int


@dataclass(frozen=True, slots=True)
class Place:
    """Where a server is, and the model to ask there."""

    base_url: str
    model: str
    # The environment variable that holds the key, where the server wants one.
    key_env: str | None = None
    # What the model takes in, where the server says so.
    context_tokens: int | None = None

    @property
    def is_small(self) -> bool:
        """Whether Codex's usual prompt and tools leave too little room, or none."""
        return self.context_tokens is not None and self.context_tokens < SMALL_TOKENS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `segue connect`."""
    parser.add_argument("client", choices=(*SNIPPETS, "codex"), help="the client to connect")
    parser.add_argument("--url", default=URL, help=f"the server's address (default: {URL})")
    parser.add_argument("--model", help="the model's name (default: the first that is served)")
    parser.add_argument("--key-env", metavar="NAME", help="the variable that holds the key (Codex)")
    parser.add_argument("--print", action="store_true", help="only print, change nothing")
    parser.add_argument("--yes", action="store_true", help="write without asking")


def run(options: argparse.Namespace) -> int:
    """Print a snippet, or change Codex's configuration; the exit status says whether it is done."""
    base_url = base_url_of(options.url)
    place = find_place(base_url, options.model, options.key_env)
    if options.client != "codex":
        print(SNIPPETS[options.client](place))
        return 0
    if options.print:
        print(codex_block(place))
        return 0
    return _write_codex(place, codex_home() / "config.toml", is_agreed=options.yes)


def base_url_of(url: str) -> str:
    """The address that clients want: with the version, without a slash at the end."""
    if not re.match(r"https?://[^/]", url):
        raise Misconfigured(f"url: '{url}' is not an address such as {URL}.")
    url = url.rstrip("/")
    return url if url.endswith("/v1") else f"{url}/v1"


class _Model(msgspec.Struct):
    id: str
    context_window: int | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


def find_place(base_url: str, model: str | None, key_env: str | None = None) -> Place:
    """The model that was named, or the first that the running server serves."""
    try:
        served = _served(base_url)
    except Misconfigured:
        if model is None:
            raise
        served = []
    if model is None and not served:
        raise Misconfigured(f"model: the server at {base_url} serves no model.")
    name = model or served[0].id
    contexts = {one.id: one.context_window for one in served}
    return Place(base_url, name, key_env, contexts.get(name))


def _served(base_url: str) -> list[_Model]:
    try:
        with urllib.request.urlopen(f"{base_url}/models", timeout=ASK_S_MAX) as answer:
            return msgspec.json.decode(answer.read(), type=_Models).data
    except (OSError, urllib.error.URLError, msgspec.MsgspecError) as error:
        reason = getattr(error, "reason", None) or error
        raise Misconfigured(
            f"url: no Segue answers at {base_url} ({reason}). "
            "Start one with `segue serve`, name another --url, or say the --model yourself."
        ) from None


# --- snippets ----------------------------------------------------------------------------------------


def _python(place: Place) -> str:
    return f'''# pip install 'openai[realtime]'
from openai import OpenAI

ENDS = {{"response.completed", "response.failed", "response.incomplete", "error"}}
client = OpenAI(base_url="{place.base_url}", api_key="none")
with client.responses.connect() as connection:
    parent = {{}}
    for question in ("Name a fruit.", "And a vegetable."):
        connection.response.create(model="{place.model}", input=question, store=False, **parent)
        for event in connection:
            if event.type == "response.output_text.delta":
                print(event.delta, end="", flush=True)
            if event.type in ENDS:
                break
        print()
        parent = {{"previous_response_id": event.response.id}}'''


def _node(place: Place) -> str:
    return f"""// npm install openai ws
import OpenAI from 'openai';
import {{ ResponsesWS }} from 'openai/resources/responses/ws';

const client = new OpenAI({{ baseURL: '{place.base_url}', apiKey: 'none' }});
const socket = new ResponsesWS(client);
const questions = ['Name a fruit.', 'And a vegetable.'];
const ask = (parent) =>
  socket.send({{ type: 'response.create', model: '{place.model}', store: false, input: questions.shift(), ...parent }});

socket.on('error', (error) => console.error(error.message));
socket.on('event', (event) => {{
  if (event.type === 'response.output_text.delta') process.stdout.write(event.delta);
  if (event.type === 'response.completed') {{
    process.stdout.write('\\n');
    if (questions.length) ask({{ previous_response_id: event.response.id }});
    else socket.close();
  }}
}});
ask();"""


def _agents_python(place: Place) -> str:
    return f'''# pip install openai-agents 'openai[realtime]'
import asyncio

from agents import (
    Agent,
    responses_websocket_session,
    set_default_openai_client,
    set_default_openai_responses_transport,
    set_tracing_disabled,
)
from openai import AsyncOpenAI


async def main() -> None:
    client = AsyncOpenAI(base_url="{place.base_url}", api_key="none")
    set_tracing_disabled(True)
    set_default_openai_client(client, use_for_tracing=False)
    set_default_openai_responses_transport("websocket")
    agent = Agent(name="helper", model="{place.model}", instructions="Answer in one sentence.")
    async with responses_websocket_session() as session:
        run = session.run_streamed(agent, "Name a fruit.", auto_previous_response_id=True)
        async for _ in run.stream_events():
            pass
    print(run.final_output)


asyncio.run(main())'''


def _agents_js(place: Place) -> str:
    return f"""// npm install @openai/agents openai zod     (Node 22 or newer)
import {{ Agent, OpenAIProvider, Runner }} from '@openai/agents';
import OpenAI from 'openai';

const client = new OpenAI({{ baseURL: '{place.base_url}', apiKey: 'none' }});
const provider = new OpenAIProvider({{ openAIClient: client, useResponses: true, useResponsesWebSocket: true }});
const agent = new Agent({{ name: 'helper', model: '{place.model}', instructions: 'Answer in one sentence.' }});
const runner = new Runner({{ modelProvider: provider, tracingDisabled: true }});
const run = await runner.run(agent, 'Name a fruit.', {{ stream: true }});
for await (const _ of run);
await run.completed;
console.log(run.finalOutput);
await provider.close();"""


def _ai_sdk(place: Place) -> str:
    socket = place.base_url.replace("http", "ws", 1)
    return f"""// npm install ai @ai-sdk/openai @vercel/ai-sdk-openai-websocket-fetch zod ws
import {{ createOpenAI }} from '@ai-sdk/openai';
import {{ createWebSocketFetch }} from '@vercel/ai-sdk-openai-websocket-fetch';
import {{ streamText }} from 'ai';

const fetch = createWebSocketFetch({{ url: '{socket}/responses' }});
const openai = createOpenAI({{ baseURL: '{place.base_url}', apiKey: 'none', fetch }});
const run = streamText({{ model: openai('{place.model}'), prompt: 'Name a fruit.' }});
for await (const text of run.textStream) process.stdout.write(text);
process.stdout.write('\\n');
fetch.close();"""


def _curl(place: Place) -> str:
    body = json.dumps({"model": place.model, "input": "Name a fruit.", "stream": True})
    return f"curl -N {place.base_url}/responses -d '{body}'"


SNIPPETS: dict[str, Callable[[Place], str]] = {
    "python": _python,
    "node": _node,
    "agents-python": _agents_python,
    "agents-js": _agents_js,
    "ai-sdk": _ai_sdk,
    "curl": _curl,
}


# --- Codex -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What must stand in Codex's file."""

    top: dict[str, Value]
    provider: dict[str, Value]
    # Of these every line is marked.
    small_top: dict[str, Value]
    small_features: dict[str, Value]

    def over(self, meant: dict[str, object]) -> dict[str, object]:
        """What a file means that meant this before."""
        providers = _table_of(meant, "model_providers")
        own = {**_table_of(providers, PROVIDER), **self.provider}
        wanted = {**meant, **self.top, **self.small_top}
        wanted["model_providers"] = {**providers, PROVIDER: own}
        if self.small_features:
            wanted["features"] = {**_table_of(meant, "features"), **self.small_features}
        return wanted


def _table_of(meant: dict[str, object], name: str) -> dict[str, object]:
    table = meant.get(name)
    return table if isinstance(table, dict) else {}


def _wanted(place: Place) -> _Wanted:
    top: dict[str, Value] = {"model": place.model}
    if place.context_tokens is not None:
        top["model_context_window"] = place.context_tokens
    top["model_provider"] = PROVIDER
    provider: dict[str, Value] = {
        "name": PROVIDER,
        "base_url": place.base_url,
        "wire_api": "responses",
        "supports_websockets": True,
    }
    if place.key_env is not None:
        provider["env_key"] = place.key_env
    if not place.is_small:
        return _Wanted(top, provider, {}, {})
    return _Wanted(
        top,
        provider,
        {"model_instructions_file": SMALL_PROMPT, "web_search": "disabled"},
        dict.fromkeys(SMALL_FEATURES, False),
    )


def codex_block(place: Place) -> str:
    """The lines of a new `config.toml`."""
    return with_provider("", place).rstrip("\n")


def with_provider(text: str, place: Place) -> str:
    """Codex's file with Segue as its provider, and with everything else as it was."""
    lines = [line for line in text.splitlines() if not line.endswith(MARK)]
    try:
        tomllib.loads(text)
        meant = tomllib.loads("\n".join(lines))
    except tomllib.TOMLDecodeError as error:
        raise Misconfigured(f"Codex's config.toml is not TOML: {error}.") from None
    wanted = _wanted(place)
    end = next((n for n, line in enumerate(lines) if _header(line) is not None), len(lines))
    head, rest = lines[:end], lines[end:]
    for key, value in reversed(wanted.top.items()):
        head = _with_key(head, key, value, is_new_first=True)
    first = next(n for n, line in enumerate(head) if line.startswith("model_provider")) + 1
    head = _with_marked(head, first, wanted.small_top)
    rest = _with_table(rest, wanted.provider, has_head=bool(head))
    if wanted.small_features:
        rest = _with_features(rest, wanted.small_features)
    changed = "\n".join([*head, *rest]) + "\n"
    _check_meaning(changed, wanted.over(meant))
    return changed


def _header(line: str) -> str | None:
    """The name of the table that begins here."""
    found = re.match(r"\s*\[\[?\s*([^\]]+?)\s*\]", line)
    return found[1] if found else None


def _written(key: str, value: Value) -> str:
    return f"{key} = {json.dumps(value, ensure_ascii=False)}"


def _place_of(lines: list[str], key: str) -> int | None:
    return next(
        (n for n, line in enumerate(lines) if re.match(rf"\s*{re.escape(key)}\s*=", line)), None
    )


def _with_key(lines: list[str], key: str, value: Value, *, is_new_first: bool = False) -> list[str]:
    """The lines with this key set; what it was before stays as a comment."""
    wanted, number = _written(key, value), _place_of(lines, key)
    if number is not None:
        line = lines[number]
        if tomllib.loads(line) == {key: value}:
            return lines
        return [*lines[:number], f"# {line.strip()}", wanted, *lines[number + 1 :]]
    if is_new_first:
        return [wanted, *lines]
    last = len(_without_end(lines))
    return [*lines[:last], wanted, *lines[last:]]


def _with_marked(lines: list[str], first: int, keys: dict[str, Value]) -> list[str]:
    """The lines with these keys set from a place on, and marked; what they were before stays as a comment."""
    for key in keys:
        if (number := _place_of(lines, key)) is not None:
            lines = [*lines[:number], f"# {lines[number].strip()}", *lines[number + 1 :]]
    marked = [_written(key, value) + MARK for key, value in keys.items()]
    return [*lines[:first], *marked, *lines[first:]]


def _with_table(lines: list[str], table: dict[str, Value], *, has_head: bool) -> list[str]:
    """The lines with the provider's table, changed where it stands or added at the end."""
    names = [_header(line) for line in lines]
    if TABLE not in names:
        lines = _without_end(lines)
        gap = [""] if lines or has_head else []
        new = [_written(key, value) for key, value in table.items()]
        return [*lines, *gap, f"[{TABLE}]", *new]
    begin, end = _range(names, TABLE)
    body = lines[begin:end]
    for key, value in table.items():
        body = _with_key(body, key, value)
    return [*lines[:begin], *body, *lines[end:]]


def _with_features(lines: list[str], features: dict[str, Value]) -> list[str]:
    names = [_header(line) for line in lines]
    if "features" not in names:
        lines = [*_without_end(lines), "", f"[features]{MARK}"]
        return _with_marked(lines, len(lines), features)
    begin, end = _range(names, "features")
    return [*lines[:begin], *_with_marked(lines[begin:end], 0, features), *lines[end:]]


def _without_end(lines: list[str]) -> list[str]:
    """The lines without the empty ones behind the last."""
    last = max((n for n, line in enumerate(lines) if line.strip()), default=-1) + 1
    return lines[:last]


def _range(names: list[str | None], table: str) -> tuple[int, int]:
    """Where the lines of a table stand, without its header."""
    begin = names.index(table) + 1
    end = next((n for n in range(begin, len(names)) if names[n] is not None), len(names))
    return begin, end


def _check_meaning(changed: str, wanted: dict[str, object]) -> None:
    """Refuse a change that would mean anything but this: the file is written in a way that we cannot read."""
    try:
        is_right = tomllib.loads(changed) == wanted
    except tomllib.TOMLDecodeError:
        is_right = False
    if not is_right:
        raise Misconfigured(
            "Codex's config.toml is written in a way that cannot be changed safely. "
            "Add by hand what `segue connect codex --print` shows."
        )


def _write_codex(place: Place, path: Path, *, is_agreed: bool) -> int:
    path = path.resolve()
    try:
        before = path.read_text() if path.exists() else ""
    except (OSError, UnicodeDecodeError) as error:
        raise Misconfigured(f"{path} cannot be read: {error}.") from None
    after = with_provider(before, place)
    if after == before:
        print(f"{path} points there already.")
        return 0
    _show(before, after, path)
    if place.is_small:
        print(
            f"{place.model} takes in {place.context_tokens} tokens, and Codex's own prompt and tools are about 9,000. "
            f"So this gives it a short prompt ({SMALL_PROMPT}) and few tools.\n"
        )
    if not is_agreed and not _is_confirmed():
        print("Nothing was written.")
        return 1
    backup = _back_up(path)
    _replace(path, after)
    if place.is_small:
        _replace(path.with_name(SMALL_PROMPT), SMALL_PROMPT_TEXT)
    print(f"Written to {path}." + (f" It was copied to {backup.name} first." if backup else ""))
    print('Try it: codex exec --skip-git-repo-check "say hello"')
    return 0


def _show(before: str, after: str, path: Path) -> None:
    if not before:
        print(f"{path} will be:\n\n{after}")
        return
    print(f"{path} will change:\n")
    for line in difflib.unified_diff(before.splitlines(), after.splitlines(), lineterm="", n=2):
        if not line.startswith(("---", "+++")):
            print(line)
    print()


def _is_confirmed() -> bool:
    """Ask; where nobody can answer, the answer is no."""
    print("Write this? [y/N] ", end="", flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _back_up(path: Path) -> Path | None:
    """A copy beside the file, under a name that is free."""
    if not path.exists():
        return None
    for number in range(BACKUPS_MAX):
        backup = path.with_name(f"{path.name}.before-segue" + (f"-{number}" if number else ""))
        if not backup.exists():
            shutil.copy2(path, backup)
            return backup
    raise Misconfigured(f"{path.parent} has {BACKUPS_MAX} copies of {path.name} already.")


def _replace(path: Path, text: str) -> None:
    """Write it whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}.new")
    fresh.write_text(text)
    if path.exists():
        shutil.copymode(path, fresh)
    os.replace(fresh, path)
