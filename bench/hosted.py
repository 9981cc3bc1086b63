"""What does a loop of commands take, where they run at the client and where the server runs them?

    python -m bench hosted

A loop of 50 shell calls, 100 tokens written around each, at several speeds of the scripted engine and behind a relay
that delays every byte: commands at the client with HTTP and `previous_response_id`, with the WebSocket, and hosted in a
container, as one response. The command is the same everywhere. Also: how many tokens were tokenized for each call.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp

from bench.peer import server
from segue_bench.rounds import print_table
from segue_bench.server import relay

Json = dict[str, Any]
COMMAND = "echo done"
LOCAL: Json = {"type": "shell"}
HOSTED: Json = {"type": "shell", "environment": {"type": "container_auto"}}
TABLE = (
    "tokens/s {:,}|RTT ms {}|HTTP s {:.2f}|socket s {:.2f}|hosted s {:.2f}"
    "|saved ms a call {:.1f}|tokenized a call {:.0f}|{}"
)
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


async def timed(port: int, near: int, way: str, calls: int) -> tuple[float, float]:
    """Seconds for one loop, and tokens that were tokenized for each call."""
    connect, tool = WAYS[way]
    limit = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(timeout=limit) as session:
        before = await tokenized(session, port)
        ask = await connect(session, f"http://127.0.0.1:{near}")
        began = time.perf_counter()
        assert await loop(ask, tool) == calls
        took = time.perf_counter() - began
        return took, (await tokenized(session, port) - before) / calls


async def tokenized(session: aiohttp.ClientSession, port: int) -> float:
    async with session.get(f"http://127.0.0.1:{port}/metrics") as page:
        found = TOKENS.search(await page.text())
    return float(found[1]) if found else 0.0


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench hosted", description=__doc__)
    parser.add_argument("--calls", type=int, default=50)
    parser.add_argument("--tokens", type=int, default=100, help="written around each call")
    parser.add_argument("--tps", type=int, nargs="+", default=[65, 1_000, 4_000])
    parser.add_argument("--rtt-ms", type=int, nargs="+", default=[0, 20, 80])
    options = parser.parse_args(arguments)
    is_held = True
    for tps in options.tps:
        flags = ("--tps", str(tps), "--environment", "bwrap")
        with server(script(options.calls, options.tokens), *flags, is_pinned=False) as process:
            for rtt_ms in options.rtt_ms:
                with relay(process.port, rtt_ms / 1e3, None) as between:
                    found = {
                        way: asyncio.run(timed(process.port, between.port, way, options.calls))
                        for way in WAYS
                    }
                saved_ms = (found["socket"][0] - found["hosted"][0]) / options.calls * 1e3
                # Never slower; a round trip a call less, but for what a busy machine takes.
                held = saved_ms >= rtt_ms * 0.9 - 2
                is_held &= held
                times = [found[way][0] for way in WAYS]
                verdict = "held" if held else "MISSED"
                row = (tps, rtt_ms, *times, saved_ms, found["hosted"][1], verdict)
                # Each as it comes: at few tokens a second a row takes minutes.
                print_table(TABLE, [row])
    return 0 if is_held else 1


if __name__ == "__main__":
    sys.exit(main())
