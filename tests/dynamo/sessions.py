"""Recorded agent sessions through a server, and how much of their parents the engine found.

The sessions are those of `segue_bench` (numbers only, with their notice), made smaller so that two cores are enough:
the first turns of each, a sixteenth of their tokens. A step that goes on from an earlier one names it
(`previous_response_id`), over a socket for each session or over HTTP. All sessions run at once.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from segue_bench.sessions import Answered, Part, SeededText, Step, load_sessions, plan
from tests.support import TERMINAL, Served, Wire, fetch, wire

TOKENS_PER, TURNS = 16, 12
# Between an answer and the next turn, on average: so that turns of several sessions mix.
THINK_S = 0.05
WORDS = "test module parser fails because token stream ends early will read file"
TEXTS = SeededText(WORDS.split(" "))


@dataclass
class Found:
    """What came of it: of all that parents held, prompt and answer, how much was cached."""

    turns: int = 0
    held: int = 0
    cached: int = 0
    # Of parents, without their answers.
    prompts: int = 0
    failed: list[Any] = field(default_factory=list)
    # Set after so many turns.
    milestone: int = 30
    reached: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def share(self) -> float:
        return self.cached / max(1, self.held)


def sessions(count: int) -> list[list[Step]]:
    """So many sessions, each cut to the same number of steps."""
    long = [one for one in load_sessions() if len(one.turns) >= TURNS]
    return [plan(one, TOKENS_PER, TURNS) for one in long[:count]]


class Client:
    """A client that plays sessions; `way` is `socket` or `http`."""

    def __init__(self, served: Served, way: str, model: str, seed: int = 1) -> None:
        self.served = served
        self.way = way
        self.model = model
        self.seed = seed
        self.found = Found()

    async def play(self, played: Sequence[Sequence[Step]]) -> Found:
        """All sessions at once."""
        await asyncio.gather(*(self._session(n, steps) for n, steps in enumerate(played)))
        return self.found

    async def _session(self, number: int, steps: Sequence[Step]) -> None:
        rng = random.Random(self.seed * 1_000 + number)
        if self.way == "http":
            await self._steps(None, rng, steps)
            return
        async with wire(self.served) as socket:
            await self._steps(socket, rng, steps)

    async def _steps(self, socket: Wire | None, rng: random.Random, steps: Sequence[Step]) -> None:
        done: list[dict[str, Any]] = []
        for step in steps:
            parent = None if step.parent is None else done[step.parent]
            fields = {
                "model": self.model,
                # Runs of one test do not share their beginnings.
                "instructions": f"{self.way} {self.seed} {TEXTS.text(step.head)}",
                "input": [item for part in step.new for item in _items(part, done)],
                "max_output_tokens": 400,
            }
            if parent is not None:
                fields["previous_response_id"] = parent["id"]
            done.append(await self._turn(socket, fields, parent))
            await asyncio.sleep(rng.expovariate(1 / THINK_S))

    async def _turn(
        self, socket: Wire | None, fields: dict[str, Any], parent: dict[str, Any] | None
    ) -> dict[str, Any]:
        response = await _answer(self.served, socket, fields)
        self.found.turns += 1
        if self.found.turns == self.found.milestone:
            self.found.reached.set()
        if response.get("status") not in ("completed", "incomplete"):
            self.found.failed.append(response)
            raise AssertionError(response)
        if parent is not None:
            held = parent["usage"]["total_tokens"]
            cached = response["usage"]["input_tokens_details"]["cached_tokens"]
            self.found.held += held
            self.found.prompts += parent["usage"]["input_tokens"]
            self.found.cached += min(cached, held)
        return response


def _items(part: Part, done: Sequence[dict[str, Any]]) -> list[Any]:
    if isinstance(part, Answered):
        return list(done[part.step]["output"])
    return [{"role": "user", "content": TEXTS.text(part)}]


async def _answer(served: Served, socket: Wire | None, fields: dict[str, Any]) -> dict[str, Any]:
    if socket is None:
        answer = await fetch(served, "POST", "/v1/responses", fields)
        return dict(json.loads(answer.body))
    event = await socket.turn(**fields)
    assert event["type"] in TERMINAL
    return dict(event.get("response") or event)
