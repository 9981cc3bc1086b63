"""What does a loop of commands take, where they run at the client and where the server runs them?

    python -m bench hosted

A loop of 50 shell calls, 100 tokens written around each, at several speeds of the scripted engine and behind a relay
that delays every byte: commands at the client with HTTP and `previous_response_id`, with the WebSocket, and hosted in a
container, as one response. The command is the same everywhere. Also: how many tokens were tokenized for each call. It
takes about four minutes; `--tps`, `--rtt-ms` and `--calls` for a part.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from typing import Any

import aiohttp

from bench.peer import server
from segue_bench.rounds import print_table, say
from segue_bench.server import relay

Json = dict[str, Any]
COMMAND = "echo done"
LOCAL: Json = {"type": "shell"}
HOSTED: Json = {"type": "shell", "environment": {"type": "container_auto"}}
TABLE = (
    "tokens/s {:,}|RTT ms {}|HTTP s {:.2f}|socket s {:.2f}|hosted s {:.2f}"
    "|saved ms a call {:.1f}|tokenized a call {:.0f}|{}"
)
Row = tuple[object, ...]
# Tokens a second at which a model is waited for most of the time.
SLOW = 100
TOKENS = re.compile(r"^segue_tokens_tokenized_total(?:\{[^}]*\})? (\S+)$", re.MULTILINE)


def script(calls: int, tokens: int) -> Json:
    call = {"name": "shell", "arguments": {"commands": [COMMAND]}}
    turns: list[Json] = [
        {"text": "Next.", "calls": [call], "pad_tokens": tokens} for _ in range(calls)
    ]
    return {"turns": [*turns, {"text": "Ready."}]}


async def output_of(call: Json) -> Json:
    """What the client's own shell says."""
    process = await asyncio.create_subprocess_exec(
        "sh", "-c", call["action"]["commands"][0], stdout=asyncio.subprocess.PIPE
    )
    printed, _ = await process.communicate()
    outcome = {"type": "exit", "exit_code": process.returncode}
    entry = {"stdout": printed.decode(), "stderr": "", "outcome": outcome}
    return {"type": "shell_call_output", "call_id": call["call_id"], "output": [entry]}


Ask = Callable[[Json], Awaitable[Json]]


async def loop(ask: Ask, tool: Json) -> int:
    """The whole loop; how many commands ran."""
    response = await ask({"input": "Go.", "tools": [tool]})
    count = 0
    while calls := [item for item in response["output"] if item["type"] == "shell_call"]:
        count += len(calls)
        if tool is HOSTED:
            break
        outputs = [await output_of(call) for call in calls]
        response = await ask(
            {"input": outputs, "tools": [tool], "previous_response_id": response["id"]}
        )
    assert response["status"] == "completed", response
    return count


async def by_http(session: aiohttp.ClientSession, base: str) -> Ask:
    async def ask(body: Json) -> Json:
        wanted = {"model": "scripted", **body}
        async with session.post(f"{base}/v1/responses", json=wanted) as answer:
            response: Json = await answer.json()
            return response

    return ask


async def by_socket(session: aiohttp.ClientSession, base: str) -> Ask:
    socket = await session.ws_connect(f"{base}/v1/responses")

    async def ask(body: Json) -> Json:
        await socket.send_json(
            {"type": "response.create", "model": "scripted", "store": False, **body}
        )
        while not (event := json.loads(await socket.receive_str()))["type"].startswith(
            ("response.completed", "response.failed", "error")
        ):
            pass
        response: Json = event["response"]
        return response

    return ask


WAYS = {"HTTP": (by_http, LOCAL), "socket": (by_socket, LOCAL), "hosted": (by_http, HOSTED)}


async def timed(near: int, way: str, calls: int) -> float:
    """Seconds for one loop."""
    connect, tool = WAYS[way]
    limit = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(timeout=limit) as session:
        ask = await connect(session, f"http://127.0.0.1:{near}")
        began = time.perf_counter()
        assert await loop(ask, tool) == calls
        return time.perf_counter() - began


async def tokenized(port: int) -> float:
    """How many tokens a server has tokenized."""
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"http://127.0.0.1:{port}/metrics") as page,
    ):
        found = TOKENS.search(await page.text())
    return float(found[1]) if found else 0.0


async def rows_at(tps: int, options: argparse.Namespace) -> list[Row]:
    """All loops at one speed, each way with a server of its own: one after the other, but beside each other where the
    model is so slow that nothing is computed most of the time."""
    flags = ("--tps", str(tps), "--environment", "bwrap")
    places = [(rtt_ms, way) for rtt_ms in options.rtt_ms for way in WAYS]
    with ExitStack() as stack:
        told = script(options.calls, options.tokens)
        ports = {
            way: stack.enter_context(server(told, *flags, is_pinned=False)).port for way in WAYS
        }
        near = {
            (rtt_ms, way): stack.enter_context(relay(ports[way], rtt_ms / 1e3, None)).port
            for rtt_ms, way in places
        }
        before = await tokenized(ports["hosted"])
        found: dict[tuple[int, str], float] = {}
        size = len(places) if tps <= SLOW else 1
        for group in (places[start : start + size] for start in range(0, len(places), size)):
            loops = [timed(near[place], place[1], options.calls) for place in group]
            found |= zip(group, await asyncio.gather(*loops), strict=True)
        count = options.calls * len(options.rtt_ms)
        each = (await tokenized(ports["hosted"]) - before) / count
    rows: list[Row] = []
    for rtt_ms in options.rtt_ms:
        times = [found[rtt_ms, way] for way in WAYS]
        saved_ms = (found[rtt_ms, "socket"] - found[rtt_ms, "hosted"]) / options.calls * 1e3
        # Never slower; a round trip a call less, but for what a busy machine takes.
        verdict = "held" if saved_ms >= rtt_ms * 0.9 - 2 else "MISSED"
        rows.append((tps, rtt_ms, *times, saved_ms, each, verdict))
    return rows


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench hosted", description=__doc__)
    parser.add_argument("--calls", type=int, default=50)
    parser.add_argument("--tokens", type=int, default=100, help="written around each call")
    parser.add_argument("--tps", type=int, nargs="+", default=[65, 1_000, 4_000])
    parser.add_argument("--rtt-ms", type=int, nargs="+", default=[0, 20, 80])
    options = parser.parse_args(arguments)
    rows: list[Row] = []
    for tps in options.tps:
        rows += asyncio.run(rows_at(tps, options))
        say(f"{tps:,} tokens/s done")
    print_table(TABLE, rows)
    return 0 if all(row[-1] == "held" for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
