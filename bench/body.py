"""How long does a large request hold the loop? The longest gap that another task sees while it is decoded.

    python -m bench body

A request of many messages, from 100 KB to 32 MB, goes through what a WebSocket message goes through: decoded, its
items checked in slices, its parent looked for. Beside it a task wakes as often as it can and notes the most CPU
time that the process used meanwhile. The first scan of the whole body is one piece; everything after it is cut into
slices.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Sequence
from contextlib import suppress

from segue.aio import off_loop
from segue.errors import ApiError
from segue.memory.budget import Memory
from segue.server.app import open_app
from segue.settings.checks import load_settings
from segue.turn.plan import Arrival, Caller, Receipt
from segue.turn.prepare import prepare
from segue.wire.codec import LARGE_BYTES, decode_create
from segue_bench.rounds import print_table

SIZES = (100_000, 1_000_000, 8_000_000, 32_000_000)
TEXT = 'A line of source code, with "quotes" and a newline.\n' * 36


def body_of(size: int) -> bytes:
    """A request of about this many bytes that is refused at its very end, after all its items were checked."""
    message = {"type": "message", "role": "user", "content": TEXT}
    count = max(1, size // len(json.dumps(message)))
    return json.dumps({"input": [message] * count}).encode()


async def longest_gap(size: int) -> tuple[float, float]:
    """Seconds that the loop was held at once, and in all."""
    settings = load_settings({"engine": "scripted", "store": "memory"}, environment={})
    async with open_app(settings) as app:
        body = body_of(size)
        gap, is_done = 0.0, False

        async def watch() -> None:
            nonlocal gap
            last = time.process_time()
            while not is_done:
                await asyncio.sleep(0)
                now = time.process_time()
                gap, last = max(gap, now - last), now

        watcher = asyncio.create_task(watch())
        await asyncio.sleep(0)
        began = time.perf_counter()
        with suppress(ApiError):  # No model is named: everything before that was done.
            receipt = Receipt(bytes_received=len(body))
            create = await off_loop(len(body) > LARGE_BYTES, decode_create, body)
            arrival = Arrival(create, Caller("bench", app.state.store.turns), receipt)
            await prepare(arrival, app.runner.resources, "resp_1", Memory().preparing(0))
        took = time.perf_counter() - began
        is_done = True
        await watcher
        return gap, took


def main(arguments: Sequence[str]) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m bench body", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(arguments)
    rows = []
    for size in SIZES:
        rounds = sorted(asyncio.run(longest_gap(size)) for _ in range(options.rounds))
        gap, took = rounds[len(rounds) // 2]
        rows.append((size / 1e6, gap * 1e3, took * 1e3))
    print_table("body MB {:.1f}|held at once ms {:.1f}|in all ms (median of rounds) {:.1f}", rows)
