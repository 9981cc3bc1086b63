"""What does the end of a turn cost its client? The wait for the last event, and for the next turn's first word.

    python -m bench ending

First: from the last token to the last event, as the client sees it, for turns that are not stored and for turns that
are, in SQLite in the folder for temporary files: `full` waits for the disk, `relaxed` does not. Second: from a request
to the first word of its answer, each sent as soon as the turn before has ended, while the ledger writes at once and
while it takes 200 ms for every write. Servers run side by side and take turns, so that a noisy machine is noisy for
all.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial

from bench.peer import Client, server
from segue.seams.history import UsageEntry
from segue.stores import sqlite
from segue_bench.rounds import interleaved, print_table
from segue_cli import cli

LEDGER_S = 0.2
# At a speed at which they come one by one; the limit ends a turn with a word and not with an end mark after it.
SCRIPT = {"turns": [{"text": "Once", "pad_tokens": 80}]}
TOKENS = 40
FLAGS = ("--tps", "1000")
ENDINGS = {
    "not stored": (False, "full"),
    "stored, relaxed": (True, "relaxed"),
    "stored, full": (True, "full"),
}
LEDGERS = {"a fast ledger": "segue_cli.cli", "a ledger of 200 ms": "bench.ending"}


class SlowLedger(sqlite._Ledger):
    """Takes its time for every write."""

    async def settle(self, entries: Sequence[UsageEntry]) -> None:
        await asyncio.sleep(LEDGER_S)
        await super().settle(entries)


def end_s(client: Client, *, store: bool) -> float:
    """From the last delta of a turn to its last event."""
    return client.timed_turn(input="Tell me.", store=store, max_output_tokens=TOKENS).end_s


class Conversation:
    """Each turn is sent as soon as the one before has ended."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._parent: str | None = None

    def first_word_s(self) -> float:
        """From the next request to the first delta of its answer."""
        turn = self._client.timed_turn(
            input="Go on.",
            store=False,
            previous_response_id=self._parent,
            max_output_tokens=TOKENS,
        )
        self._parent = turn.last["response"]["id"]
        return turn.first_s


def show(title: str, ways: Mapping[str, Callable[[], float]], turns: int) -> None:
    """Measure and print one table."""
    rows = []
    for name, times in interleaved(ways, turns).items():
        median, late = statistics.median(times), statistics.quantiles(times, n=20)[-1]
        rows.append((name, median * 1e3, late * 1e3))
    print_table(title + " {}|p50 {:.2f} ms|p95 {:.2f} ms", rows)


def main(arguments: Sequence[str]) -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(prog="python -m bench ending", description=__doc__)
    parser.add_argument("--turns", type=int, default=100)
    options = parser.parse_args(arguments)
    with ExitStack() as stack:

        def client(*flags: str, module: str = "segue_cli.cli") -> Client:
            return Client(stack.enter_context(server(SCRIPT, *FLAGS, *flags, module=module)).port)

        clients = {kind: client("--durability", kind) for kind in ("full", "relaxed")}
        ends = {
            name: partial(end_s, clients[kind], store=store)
            for name, (store, kind) in ENDINGS.items()
        }
        show("last token to last event", ends, options.turns)
        words = {
            name: Conversation(client(module=module)).first_word_s
            for name, module in LEDGERS.items()
        }
        show("request to first word, turn after turn", words, options.turns)


if __name__ == "__main__":
    # A server that was started for the second table.
    sqlite._Ledger = SlowLedger  # type: ignore[misc]
    sys.exit(cli.main())
