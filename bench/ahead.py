"""What does a server itself do when the engine reads a tool's output while the tool runs? No engine, no GPU.

    python -m bench ahead [--history 50000] [--tokens 20000] [--seconds 2] [--rounds 5]

An output appears bit by bit after a history that is warm, in front of an engine that keeps conversations and takes
some time for each token that it has not read (`READ_S`). Compared with an output of 500 tokens, and with one that is
read only when it is there. *While*: processor time until the tool ends. *After*: processor time from there to the
request of the next round. *Sent* are the ids in that request, *unread* those of them that the engine has not read
by then, and which the first token waits for.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import AsyncGenerator, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

from bench.render import HEAD, History, item, smollm2
from bench.render import history as make_history
from segue.dialects.chatml import SMOLLM2
from segue.dialects.family import TokenDialect
from segue.engine_sessions.known import KnownTurn, KnownTurns
from segue.seams.model import Finish, Job, Piece, Sampling, Scene
from segue.seams.prompt import Tokens
from segue.tools.ahead import ReadAhead
from segue.turn.plan import Plan, Tally
from segue.turn.resources import NextRound
from segue.wire.items import Item
from segue_bench.rounds import interleaved, print_table

SHORT = 500
PARTS_PER_S = 20
# Of each token that is new to the engine, and of each job; about those of an 8B on one H200.
READ_S, JOB_S = 50e-6, 15e-3


class KeepingEngine:
    """Knows what it was given, and takes its time for what it was not."""

    def __init__(self) -> None:
        self.known = KnownTurns()
        self._handles = 0
        self.jobs = 0
        # Of the last job.
        self.sent = 0

    async def sample(self, job: Job) -> AsyncGenerator[Piece, None]:
        assert isinstance(job.prompt, Tokens)
        scope = job.owner, job.cache_salt
        begins = self.known.find(job.prompt, scope)
        self.jobs += 1
        self.sent = len(begins.data) // 4
        turn = KnownTurn(job.prompt, scope, begins, is_ahead=job.is_ahead)
        self._handles += 1
        turn.handle = self._handles
        if job.is_ahead:
            await asyncio.sleep(JOB_S + self.sent * READ_S)
        self.known.add(turn)
        yield Finish("length", cached_tokens=begins.length)


class Cost(NamedTuple):
    """One output."""

    while_s: float
    after_s: float
    sent: int
    jobs: int


def output(text: str) -> tuple[Item, ...]:
    """The answer to the last call."""
    return (item(type="function_call_output", call_id="call_1", output=text),)


async def appear(
    dialect: TokenDialect, past: History, text: str, seconds: float, *, is_read: bool
) -> Cost:
    """This output over so long, and then the request of the next round."""
    engine = KeepingEngine()

    def scene(items: tuple[Item, ...]) -> Scene:
        return Scene(HEAD, past.warm, items)

    def job(items: tuple[Item, ...]) -> Job:
        prompt = dialect.render(scene(items)).context
        return Job(prompt, scene(items), Sampling(), frozenset(), 1)

    asked = job(())
    async for _ in engine.sample(asked):
        pass
    model = SimpleNamespace(dialect=dialect, engine=engine)
    plan = SimpleNamespace(id="resp_1", model=model, tally=Tally())
    following = NextRound(scene, asked, Finish("stop", cached_tokens=0))
    ahead = ReadAhead(cast(Plan, plan), following)
    parts = max(1, round(seconds * PARTS_PER_S))
    began, cpu = time.monotonic(), time.process_time()
    for number in range(1, parts + 1):
        await asyncio.sleep(max(0.0, began + number * seconds / parts - time.monotonic()))
        if is_read:
            ahead.show(text[: number * len(text) // parts], output)
    await ahead.stop()
    ended = time.process_time()
    engine.jobs, jobs = 0, engine.jobs - 1
    async for _ in engine.sample(job(output(text))):
        pass
    return Cost(ended - cpu, time.process_time() - ended, engine.sent, jobs)


def texts(tokens: int, run: int) -> str:
    """Source text of about so many tokens, another one for each run."""
    from bench.render import TEXT

    size, at = 4 * tokens, 9_973 * run
    return (TEXT * (1 + (at + size) // len(TEXT)))[at : at + size]


def main(arguments: Sequence[str]) -> None:
    """Print the table."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        "python -m bench ahead", None, __doc__, formatter_class=formatter
    )
    parser.add_argument("--history", type=int, default=50_000)
    parser.add_argument("--tokens", type=int, default=20_000)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(arguments)
    dialect = TokenDialect(SMOLLM2, smollm2())
    past = make_history(dialect, options.history)
    run = 0

    def measured(tokens: int, *, is_read: bool) -> Cost:
        nonlocal run
        run += 1
        text = texts(tokens, run)
        return asyncio.run(appear(dialect, past, text, options.seconds, is_read=is_read))

    ways: dict[str, Any] = {
        f"{SHORT:,} tokens": lambda: measured(SHORT, is_read=True),
        f"{options.tokens:,}, read while they appear": lambda: measured(
            options.tokens, is_read=True
        ),
        f"{options.tokens:,}, read at the end": lambda: measured(options.tokens, is_read=False),
    }
    found = interleaved(ways, options.rounds)
    print_table(
        "output {}|jobs {:.0f}|while CPU ms {:.1f}|after CPU ms {:.2f}|sent and unread {:,.0f}",
        [
            (name, jobs, while_s * 1e3, after_s * 1e3, sent)
            for name, costs in found.items()
            for while_s, after_s, sent, jobs in [
                [statistics.median(column) for column in zip(*costs, strict=True)]
            ]
        ],
    )
