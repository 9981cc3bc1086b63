"""What costs most on a running server? `segue doctor --traffic`: its last hour, in plain words."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from segue.printable import say
from segue.wire.cache import CacheAdvice
from segue_cli.client.asking import decoded
from segue_cli.client.talk import server_of

CALM = "Nothing that could have been reused was computed again."


def print_traffic(options: argparse.Namespace) -> int:
    """Ask the server that the flags name, and print its advice."""
    body = server_of(options).ask("/dashboard/advice")
    if options.json:
        say(body.decode(errors="replace"))
        return 0
    say("\n".join(told(decoded(body, CacheAdvice, "its advice"))))
    return 0


def told(advice: CacheAdvice) -> Iterator[str]:
    """The advice as lines of text."""
    share = advice.lost_tokens / max(1, advice.input_tokens)
    yield (
        f"last hour: {advice.turns:,} turns, {advice.input_tokens:,} tokens of prompts; computed again although "
        f"they could have been reused: {advice.lost_tokens:,} ({share:.0%})"
    )
    if not advice.costs:
        yield CALM
    for number, cost in enumerate(advice.costs, 1):
        took = f" (about {cost.lost_ms / 1000:,.1f} s)" if cost.lost_ms else ""
        yield f"{number}. {cost.words}{took}"
        yield f"   {cost.advice}"
        if cost.response_id:
            yield f"   see: segue explain {cost.response_id}"
