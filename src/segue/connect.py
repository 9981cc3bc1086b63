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


@dataclass(frozen=True, slots=True)
class Place:
    """Where a server is, and the model to ask there."""

    base_url: str
    model: str
    # The environment variable that holds the key, where the server wants one.
    key_env: str | None = None


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
    model = options.model or first_model(base_url)
    place = Place(base_url, model, options.key_env)
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


class _Models(msgspec.Struct):
    data: list[_Model]


def first_model(base_url: str) -> str:
    """The first model that the running server serves."""
    try:
        with urllib.request.urlopen(f"{base_url}/models", timeout=ASK_S_MAX) as answer:
            models = msgspec.json.decode(answer.read(), type=_Models).data
    except (OSError, urllib.error.URLError, msgspec.MsgspecError) as error:
        reason = getattr(error, "reason", None) or error
        raise Misconfigured(
            f"url: no Segue answers at {base_url} ({reason}). "
            "Start one with `segue serve`, name another --url, or say the --model yourself."
        ) from None
    if not models:
        raise Misconfigured(f"model: the server at {base_url} serves no model.")
    return models[0].id


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


def _codex_keys(place: Place) -> tuple[dict[str, str], dict[str, str | bool]]:
    """What must stand at the top of Codex's file, and in the provider's table."""
    table: dict[str, str | bool] = {
        "name": PROVIDER,
        "base_url": place.base_url,
        "wire_api": "responses",
        "supports_websockets": True,
    }
    if place.key_env is not None:
        table["env_key"] = place.key_env
    return {"model": place.model, "model_provider": PROVIDER}, table


def codex_block(place: Place) -> str:
    """The lines of a new `config.toml`."""
    return with_provider("", place).rstrip("\n")


def with_provider(text: str, place: Place) -> str:
    """Codex's file with Segue as its provider, and with everything else as it was."""
    try:
        meant = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise Misconfigured(f"Codex's config.toml is not TOML: {error}.") from None
    top, table = _codex_keys(place)
    lines = text.splitlines()
    end = next((n for n, line in enumerate(lines) if _header(line) is not None), len(lines))
    head, rest = lines[:end], lines[end:]
    for key, value in reversed(top.items()):
        head = _with_key(head, key, value, is_new_first=True)
    changed = "\n".join([*head, *_with_table(rest, table, has_head=bool(head))]) + "\n"
    _check_meaning(changed, meant, top, table)
    return changed


def _header(line: str) -> str | None:
    """The name of the table that begins here."""
    found = re.match(r"\s*\[\[?\s*([^\]]+?)\s*\]", line)
    return found[1] if found else None


def _with_key(
    lines: list[str], key: str, value: str | bool, *, is_new_first: bool = False
) -> list[str]:
    """The lines with this key set; what it was before stays as a comment."""
    wanted = f"{key} = {json.dumps(value, ensure_ascii=False)}"
    for number, line in enumerate(lines):
        if re.match(rf"\s*{re.escape(key)}\s*=", line):
            if tomllib.loads(line) == {key: value}:
                return lines
            return [*lines[:number], f"# {line.strip()}", wanted, *lines[number + 1 :]]
    if is_new_first:
        return [wanted, *lines]
    last = max((n for n, line in enumerate(lines) if line.strip()), default=-1) + 1
    return [*lines[:last], wanted, *lines[last:]]


def _with_table(lines: list[str], table: dict[str, str | bool], *, has_head: bool) -> list[str]:
    """The lines with the provider's table, changed where it stands or added at the end."""
    names = [_header(line) for line in lines]
    if TABLE not in names:
        while lines and not lines[-1].strip():
            lines = lines[:-1]
        gap = [""] if lines or has_head else []
        new = [f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in table.items()]
        return [*lines, *gap, f"[{TABLE}]", *new]
    begin = names.index(TABLE) + 1
    end = next((n for n in range(begin, len(lines)) if names[n] is not None), len(lines))
    body = lines[begin:end]
    for key, value in table.items():
        body = _with_key(body, key, value)
    return [*lines[:begin], *body, *lines[end:]]


def _check_meaning(
    changed: str, meant: dict[str, object], top: dict[str, str], table: dict[str, str | bool]
) -> None:
    """Refuse a change that would mean anything but these keys: the file is written in a way that we cannot read."""
    before = meant.get("model_providers")
    providers = before if isinstance(before, dict) else {}
    wanted = {
        **meant,
        **top,
        "model_providers": {**providers, PROVIDER: {**providers.get(PROVIDER, {}), **table}},
    }
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
    if not is_agreed and not _is_confirmed():
        print("Nothing was written.")
        return 1
    backup = _back_up(path)
    _replace(path, after)
    print(f"Written to {path}." + (f" It was copied to {backup.name} first." if backup else ""))
    print('Try it: codex exec "say hello"')
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
