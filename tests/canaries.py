"""Turns that are not to be stored, and secrets of some that are: words that must not be found anywhere afterwards.

`leave_traces` runs them against a server process of their own: plain turns, chains, warm-ups, tool loops, streams, and
everything that can go wrong. `find_traces` looks through all that such a process leaves behind.
"""

from __future__ import annotations

import json
import os
import re
from base64 import b64encode
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.support import MODEL, WEATHER, ServedProcess, fetch, wire

WORD = "canary-content-7f3a9"
# Looks like a key of ours, and is none.
FALSE_KEY = "sk-segue-canary" + "q" * 37


def message(number: int) -> str:
    return f"{WORD} {number}"


async def leave_traces(served: ServedProcess, secret: str, turns: int) -> None:
    """So many turns over all transports, none of them with words that are to be stored."""
    headers = {"Authorization": f"Bearer {secret}"}
    done = 0
    async with wire(served, additional_headers=headers) as socket:
        while done < turns:
            for body in socket_turns(done):
                await socket.create(**body)
                await socket.events()
                done += 1
            done += await chain(socket, done)
            for body in http_turns(done):
                await fetch(served, "POST", "/v1/responses", body, headers)
                done += 1
            done += await thread(served, headers, done)
            done += await rollout(socket, done)
            for path, body, more in other_turns(done):
                await fetch(served, "POST", path, body, headers | more)
                done += 1
            await go_wrong(served, socket, headers)


def socket_turns(number: int) -> Iterator[dict[str, Any]]:
    text = message(number)
    yield {"input": text, "store": False}
    yield {"input": text, "store": False, "generate": False, "instructions": text}
    yield {"input": text, "store": False, "tools": [{**WEATHER, "description": text}]}
    # Refused before it begins, or failed after that.
    yield {"input": text, "store": False, "previous_response_id": f"resp_{WORD}"}
    yield {"input": [{"type": text}], "store": False}
    yield {"input": text, "store": False, "metadata": {"note": text}, "user": text}


async def chain(socket: Any, number: int) -> int:
    """A tool loop of two turns."""
    text = message(number)
    first = await socket.turn(input=text, store=False, tools=[WEATHER])
    call = next(one for one in first["response"]["output"] if one["type"] == "function_call")
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": text}
    await socket.turn(
        input=[output], store=False, previous_response_id=first["response"]["id"], tools=[WEATHER]
    )
    return 2


def http_turns(number: int) -> Iterator[dict[str, Any]]:
    text = message(number)
    yield {"model": MODEL, "input": text, "store": False}
    yield {"model": MODEL, "input": text, "store": False, "stream": True}
    yield {"model": f"no-{WORD}", "input": text, "store": False}
    yield {"model": MODEL, "input": text, "store": False, "prompt_cache_key": text}
    # Stored with its request, so that another process can run it; what it was given for an MCP server is not.
    far = {"type": "mcp", "server_label": "far", "server_url": "https://far.example/mcp"}
    secret = {**far, "authorization": FALSE_KEY, "headers": {"X-Key": text}}
    added = {"type": "additional_tools", "role": "developer", "tools": [secret]}
    hello = {"role": "user", "content": "Hello"}
    yield {"model": MODEL, "input": "Hello", "background": True, "tools": [secret]}
    yield {"model": MODEL, "input": [added, hello], "background": True}


async def thread(served: ServedProcess, headers: dict[str, str], number: int) -> int:
    """A thread of two turns, and one that is lost."""
    text = message(number)
    words = {"model": MODEL, "max_tokens": 50, "messages": [{"role": "user", "content": text}]}
    tool = {"name": "f", "description": text, "input_schema": {"type": "object"}}
    create = {**words, "system": text, "tools": [tool], "tool_choice": {"type": "none"}}
    body = {**create, "thread": {"type": "create"}}
    first = await fetch(served, "POST", "/v1/messages", body, headers)
    for name in (first.json["id"], f"msg_{WORD}"):
        body = {**words, "thread": {"type": "continue", "previous_message_id": name}}
        answer = await fetch(served, "POST", "/v1/messages", body, headers)
        assert answer.status == (404 if WORD in name else 200)
    return 3


async def rollout(socket: Any, number: int) -> int:
    """A turn that is given the output of its call while it waits."""
    text = message(number)
    await socket.create(input=text, store=False, tools=[WEATHER], rollout=True)
    event = await socket.next()
    while event["type"] != "response.done":
        event = await socket.next()
    call = event["required_input"][0]["call_id"]
    output = {"type": "function_call_output", "call_id": call, "output": text}
    append = {"type": "response.append", "response_id": event["response_id"], "input": [output]}
    steer = {"type": "response.steer", "previous_response_id": f"resp_{WORD}", "input": text}
    await socket.send(steer)
    await socket.next()
    await socket.send(append)
    await socket.events()
    return 2


def other_turns(number: int) -> Iterator[tuple[str, dict[str, Any], dict[str, str]]]:
    """Every other way to ask: path, body, headers."""
    text = message(number)
    said = {"model": MODEL, "messages": [{"role": "user", "content": text}]}
    for is_stream in (False, True):
        yield "/v1/chat/completions", {**said, "stream": is_stream, "user": text}, {}
        yield "/v1/messages", {**said, "max_tokens": 20, "stream": is_stream, "system": text}, {}
    yield "/v1/chat/completions", {**said, "tools": [{"type": text}]}, {}
    yield "/v1/messages", {**said, "max_tokens": text}, {}
    yield "/v1/messages/count_tokens", said, {}
    yield "/v1/responses/input_tokens", {"model": MODEL, "input": text}, {}
    # Nobody passes these on here, and a model that is not served is named in the refusal.
    yield "/v1/embeddings", {"model": MODEL, "input": text}, {}
    yield "/v1/completions", {"model": text, "prompt": text}, {}
    once = {"model": MODEL, "input": text, "store": False}
    yield "/v1/responses", once, {"Idempotency-Key": f"key-{number}"}
    yield "/v1/responses", once, {"Idempotency-Key": f"key-{number}", "traceparent": text}
    yield "/v1/responses", once, {"User-Agent": "agent/1", "x-request-id": text}
    # What a body may be that is no JSON, or is packed.
    yield "/v1/responses", {**once, "text": {"format": {"type": text}}}, {}
    yield "/v1/responses", {**once, "tools": [{"type": "function", "name": text}]}, {}


async def go_wrong(served: ServedProcess, socket: Any, headers: dict[str, str]) -> None:
    """What is answered with an error, with content and with keys in every place where one might write them."""
    for frame in (f'{{"type": "{WORD}"}}', f'{{"{WORD}', f'["{WORD}"]'):
        await socket.send(frame)
        await socket.next()
    for body in (f'{{"{WORD}'.encode(), json.dumps({"input": {WORD: 1}}).encode()):
        await fetch(served, "POST", "/v1/responses", body, headers)
    await fetch(served, "GET", f"/v1/responses/{WORD}", headers=headers)
    await fetch(served, "GET", f"/{WORD}?key={FALSE_KEY}", headers=headers)
    for wrong in (f"Bearer {FALSE_KEY}", f"Basic {FALSE_KEY}", FALSE_KEY):
        await fetch(served, "GET", "/v1/models", headers={"Authorization": wrong})
        upgrade = {
            "Connection": "Upgrade",
            "Upgrade": "websocket",
            "Sec-WebSocket-Version": "13",
            "Sec-WebSocket-Key": "AAAAAAAAAAAAAAAAAAAAAA==",
            "Sec-WebSocket-Protocol": f"segue.v1, segue-key.{FALSE_KEY}",
        }
        await fetch(served, "GET", f"/v1/responses?key={FALSE_KEY}", headers=upgrade)
    await fetch(served, "GET", "/v1/models", headers={"Host": WORD, "Origin": f"http://{WORD}"})


async def read_metrics(served: ServedProcess, secret: str) -> bytes:
    """What Prometheus is told."""
    answer = await fetch(served, "GET", "/metrics", headers={"Authorization": f"Bearer {secret}"})
    assert answer.status == 200
    return answer.body


def encoded(word: str) -> Iterator[bytes]:
    """A word as it is, and in the middle of base64, wherever it begins there."""
    yield word.encode()
    for before in range(3):
        text = b64encode(b"x" * before + word.encode())
        # The first and the last letters depend on what is beside it.
        yield text[4 if before else 0 : -4]


def files_below(folder: Path) -> dict[str, bytes]:
    """All files; folders of sandboxes go while they are looked at."""
    found: dict[str, bytes] = {}
    for place, _, names in os.walk(folder):
        for path in (Path(place, name) for name in names):
            with suppress(FileNotFoundError):
                if path.is_file():
                    found[str(path)] = path.read_bytes()
    return found


def find_traces(folder: Path, printed: list[str], metrics: bytes, secret: str) -> list[str]:
    """Where a word or a key was left."""
    places = files_below(folder)
    for name in places:
        if name.endswith("access"):
            # The path of a request is there to be seen, without its query.
            places[name] = re.sub(rb" /\S*", b"", places[name])
    places["log"] = "".join(printed).encode()
    places["metrics"] = metrics
    assert any(name.endswith("s.db") for name in places)
    words = [*encoded(WORD), FALSE_KEY.encode(), secret.encode()]
    return [name for name, data in places.items() if any(word in data for word in words)]
