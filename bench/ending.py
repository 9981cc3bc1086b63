"""What does the end of a turn cost its client? The wait for the terminal event, and for the next turn's first word.

    python -m bench ending

First: from the last token to the terminal event, as the client sees it, for turns that are not stored and for turns
that are, in SQLite on the folder for temporary files: `full` waits for the disk, `relaxed` does not. Second: from a
request to the first word of its answer, each sent as soon as the turn before has ended, while the ledger writes at once
and while it takes 200 ms for every write. Servers run side by side and take turns, so that a noisy machine is noisy for
all.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from bench.peer import TERMINAL, Client, server
from segue import cli
from segue.stores import sqlite
from segue.turn.values import UsageEntry

LEDGER_S = 0.2
DELTA = b'{"type":"response.output_text.delta"'
# At a speed at which they come one by one; the limit ends a turn with a word and not with an end mark behind it.
SCRIPT = {"turns": [{"text": "Once", "pad_tokens": 80}]}
TOKENS = 40
FLAGS = ("--tps", "1000")
ENDINGS = {
    "not stored": (False, "full"),
    "stored, relaxed": (True, "relaxed"),
    "stored, full": (True, "full"),
}
LEDGERS = {"a fast ledger": "segue.cli", "a ledger of 200 ms": "bench.ending"}


class SlowLedger(sqlite._Ledger):
    """Takes its time for every write."""

    async def settle(self, entries: Sequence[UsageEntry]) -> None:
        """As a ledger far away would."""
        await asyncio.sleep(LEDGER_S)
        await super().settle(entries)


def end_s(client: Client, *, store: bool) -> float:
    """From the last delta of a turn to its terminal event."""
    client.send(input="Tell me.", store=store, max_output_tokens=TOKENS)
    last = 0.0
    while not (event := client.next_event()).startswith(TERMINAL):
        if event.startswith(DELTA):
            last = time.perf_counter()
    return time.perf_counter() - last


class Chain:
    """A conversation that goes on as soon as it may."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._parent: str | None = None

    def first_word_s(self) -> float:
        """From the next request to the first delta of its answer."""
        began = time.perf_counter()
        self._client.send(
            input="Go on.",
            store=False,
            previous_response_id=self._parent,
            max_output_tokens=TOKENS,
        )
        while not self._client.next_event().startswith(DELTA):
            pass
        took = time.perf_counter() - began
        self._parent = json.loads(self._client.receive()[-1])["response"]["id"]
        return took


def in_turns(ways: dict[str, Callable[[], float]], count: int) -> dict[str, list[float]]:
    """Each way so often, one after the other; what the first time takes does not count."""
    found: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(count + 1):
        for name, way in ways.items():
            took = way()
            if number:
                found[name].append(took)
    return found


def show(name: str, taken: list[float]) -> None:
    """One line."""
    middle, late = statistics.median(taken) * 1e3, statistics.quantiles(taken, n=20)[-1] * 1e3
    print(f"{name:<20} {middle:>8.2f} ms {late:>8.2f} ms")


def main(arguments: Sequence[str]) -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(prog="python -m bench ending", description=__doc__)
    parser.add_argument("--turns", type=int, default=100)
    options = parser.parse_args(arguments)
    with ExitStack() as stack:
        clients = {
            kind: Client(stack.enter_context(server(SCRIPT, *FLAGS, "--durability", kind)).port)
            for kind in ("full", "relaxed")
        }
        ends: dict[str, Callable[[], float]] = {
            name: lambda client=clients[kind], store=store: end_s(client, store=store)  # type: ignore[misc]
            for name, (store, kind) in ENDINGS.items()
        }
        print("last token to terminal event      p50         p95")
        for name, taken in in_turns(ends, options.turns).items():
            show(name, taken)
    with ExitStack() as stack:
        words = {
            name: Chain(
                Client(stack.enter_context(server(SCRIPT, *FLAGS, module=module)).port)
            ).first_word_s
            for name, module in LEDGERS.items()
        }
        print("request to first word, turn after turn, with")
        for name, taken in in_turns(words, options.turns).items():
            show(name, taken)


if __name__ == "__main__":
    # A server that was started for the second table.
    sqlite._Ledger = SlowLedger  # type: ignore[misc]
    sys.exit(cli.main())
