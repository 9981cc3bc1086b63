"""Does the embedded model begin to answer as fast in turn 20 as in turn 2? Seconds to the first token.

    python -m bench chain

A chain of 20 turns over one WebSocket, about 60 new words each, short greedy answers. *Cold* is the context of turn 20
sent as a whole by a client that the server has never seen, with its first words changed, so that nothing of it is
cached anywhere. The first token is the first delta that arrives. Each round is a new chain; medians of rounds. Turn 20
still has to look at everything before it, but must compute only what is new.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from typing import Any

from bench.peer import Client, server
from segue_bench.rounds import print_table

MODEL = "smollm2"
TURNS = 20
# Turn 20 against turn 2.
RATIO_MAX = 2.0
CONTEXT_TOKENS = 4_096
WORDS = (
    "The report says that the north wall was painted in spring and the south wall in autumn. " * 3
)


def first_token(
    client: Client, parent: str | None, given: list[dict[str, Any]]
) -> tuple[float, dict[str, Any]]:
    """Seconds from the request to the first delta, and the response."""
    turn = client.timed_turn(
        model=MODEL,
        previous_response_id=parent,
        input=given,
        store=False,
        temperature=0,
        max_output_tokens=8,
    )
    assert turn.last["type"] in ("response.completed", "response.incomplete"), turn.last
    return turn.first_s, turn.last["response"]


class Chain:
    """One conversation, timed; its items are kept, so that they can be sent again as a whole."""

    def __init__(self, port: int, name: str) -> None:
        self._client = Client(port)
        self._name = name
        self._last: str | None = None
        self.items: list[dict[str, Any]] = []
        self.usage: dict[str, Any] = {}

    def turn(self, number: int) -> float:
        """The next turn; the seconds to its first token."""
        message = {"role": "user", "content": f"{self._name}, part {number}. {WORDS}"}
        took, response = first_token(self._client, self._last, [message])
        self._last, self.usage = response["id"], response["usage"]
        text = "".join(part["text"] for item in response["output"] for part in item["content"])
        self.items += [message, {"role": "assistant", "content": text}]
        return took

    def close(self) -> None:
        self._client.close()


def cold(port: int, chain: Chain, name: str) -> tuple[float, dict[str, Any]]:
    """Everything up to the last question in one request, with another name from its first word on."""
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
    flags: tuple[str, ...] = ("--engine", "embedded", "--context-tokens", str(CONTEXT_TOKENS))
    flags += ("--engine-parallel", "2", "--store", "memory")
    # The model computes on all cores.
    with server(None, *flags, is_pinned=False) as process:
        for number in range(options.rounds):
            chain = Chain(process.port, f"Anna {number}")
            for turn in range(1, TURNS + 1):
                took = chain.turn(turn)
                if (name := f"turn {turn}") in seconds:
                    seconds[name].append(took)
                    tokens[name] = chain.usage
            chain.close()
            took, tokens["cold"] = cold(process.port, chain, f"Berta {number}")
            seconds["cold"].append(took)
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    rows = [
        (
            name,
            tokens[name]["input_tokens"],
            tokens[name]["input_tokens_details"]["cached_tokens"],
            median,
            median / medians["turn 2"],
        )
        for name, median in medians.items()
    ]
    first = "to the first token s (median of rounds) {:.3f}"
    print_table(f"turn {{}}|tokens {{:,}}|cached {{:,}}|{first}|against turn 2 {{:.2f}} x", rows)
    ratio = medians[f"turn {TURNS}"] / medians["turn 2"]
    print(f"turn {TURNS} within {RATIO_MAX:g} x turn 2: {'yes' if ratio <= RATIO_MAX else 'no'}")
