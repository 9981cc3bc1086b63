"""An agent whose prompt begins with the current time, on the model inside: seconds to the first token, turn by turn.

    python -m bench clock

Three agents send their whole history on each of ten turns. The first has no clock. The second begins its instructions
with the time, so that every turn changes line 1. The third does the same, on a server with a rule that moves the line
to the end. Medians of rounds; the report of the second agent's last turn says where its prompts part. The tenth turn of
the repaired agent must begin within twice the time of the agent without a clock.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from bench.chain import CONTEXT_TOKENS, MODEL, first_token
from bench.peer import Client, server
from segue_bench.rounds import interleaved, print_table

TURNS = 10
RATIO_MAX = 2.0
MOVED = "clock, moved"
RULES = (
    "Rule {}: read the file before you change it, run the tests after it, and say what you did. "
)
RULE_COUNT = 30
WORDS = "Look at the next file of the list and tell me what it is for. "
REPAIR = """
[[repairs]]
name = "clock"
pattern = '^Current time: .*$'
how = "move"
"""


class Agent:
    """Sends everything on each turn."""

    def __init__(self, port: int, name: str, *, has_clock: bool) -> None:
        self._client = Client(port)
        self._rules = f"{name}\n" + "".join(RULES.format(n) for n in range(RULE_COUNT))
        self._has_clock = has_clock
        self._items: list[dict[str, Any]] = []
        self.last: dict[str, Any] = {}

    def turn(self) -> float:
        """Seconds to the first token of the next turn."""
        number = len(self._items) // 2 + 1
        clock = f"Current time: 12:{number:02}:07\n" if self._has_clock else ""
        self._items.append({"role": "user", "content": f"Part {number}. {WORDS}"})
        given = [{"role": "system", "content": clock + self._rules}, *self._items]
        took, self.last = first_token(self._client, None, given)
        text = "".join(part["text"] for item in self.last["output"] for part in item["content"])
        self._items.append({"role": "assistant", "content": text})
        return took

    def close(self) -> None:
        self._client.close()


def main(arguments: Sequence[str]) -> int:
    """Print the figures; 1 where the repair does not help enough."""
    parser = argparse.ArgumentParser(prog="python -m bench clock", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args(arguments)
    flags = ["--engine", "embedded", "--context-tokens", str(CONTEXT_TOKENS), "--store", "memory"]
    # Two conversations on one server: both keep their prefix.
    flags += ["--engine-parallel", "2"]
    seconds: dict[str, list[list[float]]] = {"no clock": [], "clock": [], MOVED: []}
    cached: dict[str, int] = {}
    told = ""
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="segue-bench-"))
        config = Path(folder) / "segue.toml"
        config.write_text(REPAIR)
        # The model computes on all cores.
        plain = stack.enter_context(server(None, *flags, is_pinned=False))
        repairing = stack.enter_context(
            server(None, *flags, "--config", str(config), is_pinned=False)
        )
        for number in range(options.rounds):
            agents = {
                name: Agent(
                    (repairing if name == MOVED else plain).port,
                    f"Agent {name} {number}",
                    has_clock=name != "no clock",
                )
                for name in seconds
            }
            # They take turns, so that a noisy machine is noisy for all.
            talks = interleaved({name: agent.turn for name, agent in agents.items()}, TURNS, 0)
            for name, agent in agents.items():
                seconds[name].append(talks[name])
                cached[name] = agent.last["usage"]["input_tokens_details"]["cached_tokens"]
                agent.close()
            path = f"/v1/responses/{agents['clock'].last['id']}/cache"
            with urlopen(f"http://127.0.0.1:{plain.port}{path}", timeout=30) as answer:
                told = json.load(answer)["summary"]
    medians = {
        name: [statistics.median(times) for times in zip(*rounds, strict=True)]
        for name, rounds in seconds.items()
    }
    rows = [
        (name, *(times[n - 1] for n in (1, 2, 5, 10)), cached[name])
        for name, times in medians.items()
    ]
    turns = "|".join(f"turn {n} s {{:.3f}}" for n in (1, 2, 5, 10))
    print_table(f"agent on {MODEL} {{}}|{turns}|cached in turn 10 {{:,}}", rows)
    print(f"segue explain: {told}")
    ratio = medians[MOVED][-1] / medians["no clock"][-1]
    print(f"turn {TURNS} with the repair: {ratio:.2f} x the agent without a clock")
    return int(ratio > RATIO_MAX)
