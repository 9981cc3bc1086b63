"""Record a server under load, cut the power at random steps of the recording, and start a server on what is left.

The server, its store and its clients are the real ones, in this process; only the disk is watched (`tests.disk`). That
a client was told something is a step of the same recording, so it is known what was acknowledged before the cut.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from segue.seals.ring import read_ring
from tests.crashes import Book, Fact, check, settled_halves, writing
from tests.cuts import SHM_BYTES, WAYS, cut_at
from tests.disk import Recording, Step, Synced, Told, recorded
from tests.support import serving

DATABASE = "turns.db"
# What a sync takes on the recorded disk: an acknowledgement that did not wait for it would come before it.
SYNC_S = 0.002
# One cut in so many falls into the first steps, while the file is made and its tables are.
EARLY_EVERY = 5
EARLY_STEPS = 120


@dataclass(frozen=True)
class Recorded:
    """What a server did to its disk, and what its clients were told meanwhile."""

    recording: Recording
    facts: Sequence[Fact]

    def told_before(self, place: int) -> list[Fact]:
        """What clients knew when the power went."""
        steps = self.recording.steps[:place]
        return [self.facts[step.number] for step in steps if isinstance(step, Told)]


@dataclass
class Outcome:
    """What came of some cuts."""

    cuts: int = 0
    facts: int = 0
    found: list[str] = field(default_factory=list)
    # Processor time: others may be at work on this machine.
    starts_s: list[float] = field(default_factory=list)


async def record(folder: Path, load_s: float, durability: str = "full") -> Recorded:
    """Let clients write to a fresh store for so long."""
    os.mkdir(folder)
    store = f"sqlite:///{folder / DATABASE}"
    with recorded(folder, SYNC_S) as recording:
        book = Book(on_note=recording.tell)
        async with (
            serving(store=store, durability=durability, tps=3_000) as served,
            writing(served, book) as writers,
        ):
            await asyncio.sleep(load_s)
            assert not any(task.done() for task in writers), writers
    # Nothing has escaped the recording: without a cut it leads to the very files that are there.
    steps = recording.steps
    assert cut_at(steps, len(steps), random.Random(0), "everything") == files_in(folder)
    return Recorded(recording, book.facts)


def files_in(folder: Path) -> dict[str, bytes]:
    """What is in a folder."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


async def cut(recorded: Recorded, folder: Path, times: int, chance: random.Random) -> Outcome:
    """Cut the power so often, first where most is at stake and then anywhere, and see what a server makes of it."""
    outcome = Outcome()
    steps = recorded.recording.steps
    for number in range(times):
        if number == 0:
            place = worst_place(steps)
            image = cut_at(steps, place, chance, "nothing")
        else:
            is_early = number % EARLY_EVERY == 0
            place = chance.randrange(min(EARLY_STEPS, len(steps)) if is_early else len(steps))
            image = cut_at(steps, place, chance, chance.choice(WAYS))
        facts = recorded.told_before(place)
        target = folder / f"cut{number}"
        write_image(target, image, chance)
        found = await restart(target, facts, outcome)
        outcome.found += [f"cut {number} at step {place}: {one}" for one in found]
        outcome.cuts += 1
        outcome.facts += len(facts)
    return outcome


def worst_place(steps: Sequence[Step]) -> int:
    """Where clients have been told the most since anything was last synced."""
    worst, most, told = 0, 0, 0
    for number, step in enumerate(steps):
        if isinstance(step, Synced):
            told = 0
        elif isinstance(step, Told):
            told += 1
            if told > most:
                worst, most = number + 1, told
    return worst


def write_image(folder: Path, image: dict[str, bytes], chance: random.Random) -> None:
    """The files as the cut left them. What processes shared in memory is nobody's to sync: it may hold anything."""
    folder.mkdir()
    for name, content in image.items():
        (folder / name).write_bytes(content)
    if chance.random() < 0.5:
        (folder / f"{DATABASE}-shm").write_bytes(chance.randbytes(SHM_BYTES))


async def restart(folder: Path, facts: Sequence[Fact], outcome: Outcome) -> list[str]:
    """What is missing or half there, once a server has started on these files."""
    path = folder / DATABASE
    ring = folder / f"{DATABASE}.seals"
    kept = read_ring(ring) if ring.exists() else None
    began = time.process_time()
    async with serving(store=f"sqlite:///{path}") as served:
        outcome.starts_s.append(time.process_time() - began)
        found = [*await check(served, facts), *await settled_halves(path)]
    if kept is not None and read_ring(ring) != kept:
        found.append("the ring of keys is another one")
    if kept is None and facts:
        found.append("lost: the ring of keys is not there")
    return found
