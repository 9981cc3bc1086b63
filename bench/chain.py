"""Does the embedded model begin to answer as fast in turn 20 as in turn 2? Seconds to the first token.

    python -m bench chain

A chain of 20 turns over one WebSocket, about 60 new words each, short greedy answers. *Cold* is the context of turn 20
sent as a whole by a client that the server has never seen, with its first words changed, so that nothing of it is
cached anywhere. The first token is the first delta that leaves the server. Each round is a new chain; medians of
rounds. Turn 20 still has to look at everything before it, but must compute only what is new.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from typing import Any

from bench.peer import Client, server

MODEL = "smollm2"
TURNS = 20
# Turn 20 against turn 2.
RATIO_MAX = 2.0
CONTEXT_TOKENS = 4_096
ENDED = (b'{"type":"response.completed"', b'{"type":"response.incomplete"')
WORDS = (
    "The report says that the north wall was painted in spring and the south wall in autumn. " * 3
)


class Chain:
    """One conversation, timed; what was said is kept, so that it can be sent again as a whole."""

    def __init__(self, port: int, name: str) -> None:
        self._client = Client(port)
        self._name = name
        self._last: str | None = None
        self.items: list[dict[str, Any]] = []
        self.usage: dict[str, Any] = {}

    def turn(self, number: int) -> float:
        """One turn on; the seconds to its first token."""
        message = {"role": "user", "content": f"{self._name}, part {number}. {WORDS}"}
        took, response = first_token(self._client, self._last, [message])
        self._last, self.usage = response["id"], response["usage"]
        said = [{"role": "assistant", "content": text_of(response)}]
        self.items += [message, *said]
        return took

    def close(self) -> None:
        """Hang up."""
        self._client.close()


def text_of(response: dict[str, Any]) -> str:
    """What the model said."""
    return "".join(part["text"] for item in response["output"] for part in item["content"])


def first_token(
    client: Client, parent: str | None, given: list[dict[str, Any]]
) -> tuple[float, dict[str, Any]]:
    """Seconds from the request to the first delta, and the response."""
    began = time.perf_counter()
    client.send(
        model=MODEL,
        previous_response_id=parent,
        input=given,
        store=False,
        temperature=0,
        max_output_tokens=8,
    )
    took = 0.0
    while True:
        event = client.next_event()
        if not took and b'.delta"' in event[:60]:
            took = time.perf_counter() - began
        if event.startswith(ENDED):
            return took, json.loads(event)["response"]
        assert not event.startswith((b'{"type":"error"', b'{"type":"response.failed"')), event


def cold(port: int, chain: Chain, name: str) -> tuple[float, dict[str, Any]]:
    """Everything up to the last question in one request, under another name from its first word on."""
    client = Client(port)
    items = [dict(item) for item in chain.items[:-1]]
    items.insert(0, {"role": "system", "content": f"{name} is not {chain.items[0]['content'][:8]}"})
    took, response = first_token(client, None, items)
    client.close()
    return took, response["usage"]


def main(arguments: Sequence[str]) -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(prog="python -m bench chain", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args(arguments)
    seconds: dict[str, list[float]] = {"turn 2": [], f"turn {TURNS}": [], "cold": []}
    tokens: dict[str, dict[str, Any]] = {}
    flags = ("--engine", "embedded", "--context-tokens", str(CONTEXT_TOKENS))
    with server(None, *flags, "--engine-parallel", "2", "--store", "memory") as peer:
        for number in range(options.rounds):
            chain = Chain(peer.port, f"Anna {number}")
            for turn in range(1, TURNS + 1):
                took = chain.turn(turn)
                if (name := f"turn {turn}") in seconds:
                    seconds[name].append(took)
                    tokens[name] = chain.usage
            chain.close()
            took, tokens["cold"] = cold(peer.port, chain, f"Berta {number}")
            seconds["cold"].append(took)
    print(
        "             tokens   cached   to the first token s   against turn 2   (median of rounds)"
    )
    medians = {name: statistics.median(found) for name, found in seconds.items()}
    for name, median in medians.items():
        usage = tokens[name]
        cached = usage["input_tokens_details"]["cached_tokens"]
        print(
            f"{name:<10} {usage['input_tokens']:>8,}   {cached:>6,}   {median:>20.3f}   "
            f"{median / medians['turn 2']:>12.2f} x"
        )
    ratio = medians[f"turn {TURNS}"] / medians["turn 2"]
    print(f"turn {TURNS} within {RATIO_MAX:g} x turn 2: {'yes' if ratio <= RATIO_MAX else 'no'}")
