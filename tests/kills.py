"""Kill a server with SIGKILL while clients write, start it again on the same store, ask for all that it acknowledged.

    SEGUE_TEST_SEED=7 make test-reliability ARGS=tests/reliability/test_kills.py

The seed is printed; it decides the moments, not how far the clients have come by then.
"""

from __future__ import annotations

import asyncio
import os
import random
import secrets
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.crashes import Begun, Book, Fact, check, writing
from tests.support import WAIT_S, ServedProcess, served_process

# Between the first request and the kill.
LOAD_S = (0.02, 0.6)
# One kill in so many comes while the server starts.
START_EVERY = 8
# Of what earlier rounds were told, so many facts are looked at again in each; at the end all are.
OLD_MAX = 40

Look = Callable[[], Awaitable[list[str]]]


def new_seed() -> int:
    """The seed of this run: the one that is asked for, or any."""
    seed = int(os.environ.get("SEGUE_TEST_SEED") or secrets.randbelow(10**6))
    print(f"SEGUE_TEST_SEED={seed}")
    return seed


@dataclass
class Tally:
    """What came of a run of kills."""

    kills: int = 0
    facts: int = 0
    starts_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)

    def __str__(self) -> str:
        return (
            f"{self.kills} kills, {self.facts} things acknowledged, none lost; start to listening: "
            f"median {statistics.median(self.starts_s):.2f} s, slowest {max(self.starts_s):.2f} s, "
            f"of processor time {statistics.median(self.cpu_s):.2f} s"
        )


@dataclass
class Victim:
    """A server that is killed and started again with these words."""

    words: Sequence[str]
    folder: Path
    chance: random.Random
    # What is half there in the store.
    look: Look
    # Whether it takes a while until it is known who is dead.
    is_lease_long: bool = False
    book: Book = field(default_factory=Book)
    tally: Tally = field(default_factory=Tally)
    looked_at: int = 0

    async def run(self, kills: int) -> Tally:
        """Kill it so often, and look after each time."""
        while self.tally.kills < kills:
            if self.tally.kills % START_EVERY == START_EVERY - 1:
                await self.kill_at_start()
            began = time.monotonic()
            with served_process(*self.words, cwd=self.folder) as served:
                self.tally.starts_s.append(time.monotonic() - began)
                self.tally.cpu_s.append(cpu_s(served.process.pid) or self.tally.starts_s[-1])
                await self.check(served, self.some())
                await self.kill_under_load(served)
            assert "Traceback" not in "".join(served.printed), "".join(served.printed)
        with served_process(*self.words, cwd=self.folder) as served:
            await self.check(served, self.book.facts)
            await until_whole(self.look)
            self.tally.facts = len(self.book.facts)
            assert served.stop() == 0
        return self.tally

    def some(self) -> list[Fact]:
        """What was told since the last time, and some of what was told before."""
        old, fresh = self.book.facts[: self.looked_at], self.book.facts[self.looked_at :]
        self.looked_at = len(self.book.facts)
        start = self.chance.randrange(max(1, len(old) - OLD_MAX))
        found = old[start : start + OLD_MAX] + fresh
        if self.is_lease_long:
            return [fact for fact in found if not isinstance(fact, Begun)]
        return found

    async def check(self, served: ServedProcess, facts: Sequence[Fact]) -> None:
        found = await check(served, self.book.facts, facts)
        if not self.is_lease_long:
            # What the last one left queued is run first.
            await until_whole(self.look)
        assert not found, f"after {self.tally.kills} kills: {found}"

    async def kill_under_load(self, served: ServedProcess) -> None:
        is_noted = asyncio.Event()
        self.book.on_note = lambda count: is_noted.set()
        async with writing(served, self.book) as writers:
            # However slow the machine is, there is something to remember.
            async with asyncio.timeout(WAIT_S):
                await is_noted.wait()
            await asyncio.sleep(self.chance.uniform(*LOAD_S))
            early = [one.exception() or one.result() for one in writers if one.done()]
            served.process.kill()
            await asyncio.to_thread(served.process.wait, WAIT_S)
            async with asyncio.timeout(WAIT_S):
                await asyncio.gather(*writers)
        assert not early, early
        self.tally.kills += 1

    async def kill_at_start(self) -> None:
        """Before it listens, or soon after: in the middle of recovery, as it may be."""
        words = ["-m", "segue_cli.cli", "serve", "--port", "0", "--engine", "scripted", *self.words]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        process = await asyncio.create_subprocess_exec(
            sys.executable, *words, cwd=self.folder, **quiet
        )
        usual = statistics.median(self.tally.starts_s or [2.0])
        await asyncio.sleep(self.chance.uniform(usual / 2, usual * 1.1))
        process.kill()
        async with asyncio.timeout(WAIT_S):
            await process.wait()
        self.tally.kills += 1


async def until_whole(look: Look) -> None:
    """Wait until nothing is half there. What a dead process left running counts, until it is known to be dead."""
    until = time.monotonic() + WAIT_S
    while found := await look():
        assert time.monotonic() < until, found
        await asyncio.sleep(0.2)


def cpu_s(pid: int) -> float | None:
    """The processor time that this process has used; None where that cannot be read so."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
