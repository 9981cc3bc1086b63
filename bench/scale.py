"""What would 10, 100 and 1,000 replicas find? Recorded sessions, simulated replicas, the product's own choice.

    python -m bench scale [--replicas 10,100,1000] [--turns 12] [--kv-tokens 2000000] [--json FILE] [--svg FILE]

No process, no socket, no clock: an event queue. Sessions arrive over ten minutes, so many for each replica, with the
recorded lengths and pauses (at most `--gap-s`); most of them begin with one of a few popular heads (instructions and
tools), as the users of one agent do. Replicas are those of `segue_fleet.blocks`, with blocks of 1,024 tokens. Placed by

    segue      `segue.replicas.placement.choose`, with the loads of all replicas and the parent's replica known
    load only  the fewest jobs
    hashing    the session's name by rendezvous hashing, whatever the load
    oracle     knows how long each session will become, what each replica has, and when it is free

and `pooled` is what one replica with the KV room of all would find.
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from pathlib import Path
from zlib import crc32

from msgspec import structs

from segue.replicas.measures import Pace, Work
from segue.replicas.placement import Asked, ReplicaLoad, choose, rank
from segue_bench.charts import ChartAxis, ChartLine, line_chart
from segue_bench.sessions import Session, load_sessions
from segue_fleet.blocks import BlockCache, ReplicaClock, ReplicaShape
from segue_fleet.replica import percentile

BLOCK = 1_024
SESSIONS_PER_REPLICA = 12
ARRIVE_S = 600.0
# Of so many popular heads the first is the most popular; the rest of the sessions have a head of their own.
POPULAR, POPULAR_SHARE = 12, 0.8
COLOURS = {"segue": "ws", "oracle": "rest", "hashing": "http-chained", "load only": "http-full"}
# What a replica is taken to be: an engine on one node.
SHAPE = ReplicaShape(
    kv_tokens=2_000_000, slots=32, prefill_tps=20_000, decode_tps=60, block_tokens=BLOCK
)


@dataclass(slots=True)
class Turn:
    """A request as blocks: the same number is the same text up to there."""

    blocks: list[int]
    shared: int
    tokens: int
    answer: int
    gap_s: float
    parent: int


@dataclass(slots=True)
class Played:
    """A session on its way."""

    name: str
    head: bytes
    turns: list[Turn]
    at: int = 0
    # Which replica served each turn.
    routes: list[int] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """What its longest prompt has."""
        return max(turn.tokens for turn in self.turns)


@dataclass
class Sum:
    """What came of one policy."""

    policy: str
    replicas: int
    jobs: int = 0
    prompt_tokens: int = 0
    shared_tokens: int = 0
    found_tokens: int = 0
    pooled_tokens: int = 0
    computed_max_by_mean: float = 0.0
    wait_s_p50: float = 0.0
    wait_s_p95: float = 0.0
    first_s_p95: float = 0.0
    choice_us: float = 0.0

    @property
    def share(self) -> float:
        return self.found_tokens / max(1, self.shared_tokens)


class Machines:
    """All replicas: their caches and clocks, and what is known of them."""

    def __init__(self, count: int, shape: ReplicaShape) -> None:
        self.shape = shape
        self.count = count
        self.caches = [BlockCache(shape.kv_tokens // BLOCK) for _ in range(count)]
        self.clocks = [ReplicaClock(shape) for _ in range(count)]
        self.paces = [Pace() for _ in range(count)]
        self.jobs = [0] * count
        self.names = [f"replica-{number}" for number in range(count)]
        self.loads = [ReplicaLoad(name, slots=shape.slots) for name in self.names]
        self.heads: dict[bytes, Work] = {}
        self.work = Work()
        # Tokens that the sessions which live there will need at most; for the oracle.
        self.live = [0] * count

    def refresh(self, number: int, now: float) -> None:
        jobs, pace, slots = self.jobs[number], self.paces[number], self.shape.slots
        self.loads[number] = structs.replace(
            self.loads[number],
            running=min(jobs, slots),
            waiting=max(0, jobs - slots),
            work=pace.work.at(now),
            prefill_tokens_s=pace.prefill_tokens_s or 0.0,
            service_s=pace.service_s or 0.0,
            delay_s=pace.delay_s(now),
        )

    def found(self, number: int, turn: Turn) -> int:
        """Tokens of its shared beginning; all of them where all whole blocks are there."""
        whole = turn.shared // BLOCK
        found = self.caches[number].found(turn.blocks[:whole])
        return turn.shared if found == whole else found * BLOCK


Policy = Callable[[Machines, Played, Turn, float], int]


def by_segue(machines: Machines, played: Played, turn: Turn, now: float) -> int:
    route = played.routes[turn.parent] if turn.parent >= 0 else None
    known = machines.heads.get(played.head)
    share = (known.at(now) if known else 0.0) / max(1.0, machines.work.at(now))
    asked = Asked(
        head=played.head,
        beginning=played.name.encode(),
        route=None if route is None else machines.names[route],
        held_tokens=turn.shared,
        prompt_tokens=turn.tokens,
        head_share=min(1.0, share),
    )
    if route is not None:
        machines.refresh(route, now)
        choice = choose(machines.loads, asked)
        if choice.reason == "parent":
            return route
    for number in range(machines.count):
        machines.refresh(number, now)
    return machines.names.index(choose(machines.loads, asked).name)


def by_load(machines: Machines, played: Played, turn: Turn, now: float) -> int:
    fewest = min(machines.jobs)
    free = [number for number, jobs in enumerate(machines.jobs) if jobs == fewest]
    return free[crc32(f"{played.name} {played.at}".encode()) % len(free)]


def by_hash(machines: Machines, played: Played, turn: Turn, now: float) -> int:
    if played.routes:
        return played.routes[0]
    key = played.name.encode()
    return min(range(machines.count), key=lambda number: rank(key, machines.names[number]))


def by_oracle(machines: Machines, played: Played, turn: Turn, now: float) -> int:
    """A session begins where those that live there will need least; it goes on where its first token comes soonest."""
    if turn.parent < 0:
        number = min(range(machines.count), key=lambda one: machines.live[one])
        if not played.routes:
            machines.live[number] += played.tokens
        return number
    others = set(played.routes)
    others.add(min(range(machines.count), key=lambda one: machines.clocks[one].free_at(now)))

    def first_at(number: int) -> float:
        missing = turn.tokens - machines.found(number, turn)
        return machines.clocks[number].free_at(now) + missing / machines.shape.prefill_tps

    return min(others, key=first_at)


POLICIES: dict[str, Policy] = {
    "segue": by_segue,
    "load only": by_load,
    "hashing": by_hash,
    "oracle": by_oracle,
}


def sessions_of(count: int, turns: int, gap_s_max: float, seed: int) -> list[Played]:
    """So many sessions, recorded ones by turns, each with text of its own but for its head."""
    draw = random.Random(seed)
    recorded = [one for one in load_sessions() if len(one.turns) >= turns]
    weights = [1 / (number + 1) for number in range(POPULAR)]
    numbers = iter(range(1 << 62))
    popular = [[next(numbers) for _ in range(64)] for _ in range(POPULAR)]
    made = []
    for number in range(count):
        session = recorded[draw.randrange(len(recorded))]
        at = draw.choices(range(POPULAR), weights)[0] if draw.random() < POPULAR_SHARE else -1
        made.append(_played(session, number, turns, gap_s_max, at, popular, numbers.__next__))
    return made


def _played(
    session: Session,
    number: int,
    turns: int,
    gap_s_max: float,
    at: int,
    popular: Sequence[list[int]],
    fresh: Callable[[], int],
) -> Played:
    head = f"popular {at}" if at >= 0 else f"own {number}"
    head_tokens = session.tools + session.system
    known = popular[at][: head_tokens // BLOCK] if at >= 0 else []
    made: list[Turn] = []
    for turn, after in zip(session.turns[:turns], [*session.turns[1:turns], None], strict=True):
        kept = made[turn.parent].blocks[: turn.shared // BLOCK] if turn.parent >= 0 else known
        shared = turn.shared if turn.parent >= 0 else len(known) * BLOCK
        kept = kept[: turn.input // BLOCK]
        blocks = [*kept, *(fresh() for _ in range(turn.input // BLOCK - len(kept)))]
        gap = 0.0 if after is None else min(max(0.0, after.at_s - turn.at_s), gap_s_max)
        made.append(
            Turn(blocks, min(shared, turn.input), turn.input, turn.output, gap, turn.parent)
        )
    return Played(f"{session.id} {number}", blake2b(head.encode()).digest()[:8], made)


def simulate(
    policy: str, sessions: Sequence[Played], count: int, shape: ReplicaShape, seed: int
) -> Sum:
    """All sessions, by the order in which their turns come."""
    machines, place = Machines(count, shape), POLICIES[policy]
    pooled = BlockCache(count * shape.kv_tokens // BLOCK)
    draw, result = random.Random(seed), Sum(policy, count)
    seen: set[int] = set()
    computed, waits, firsts = [0] * count, [], []
    # (time, order, what happens then)
    queue: list[tuple[float, int, Callable[[float], None]]] = []
    order = iter(range(1 << 62))
    spent = 0.0

    def later(at: float, do: Callable[[float], None]) -> None:
        heapq.heappush(queue, (at, next(order), do))

    def start(played: Played, now: float) -> None:
        nonlocal spent
        turn = played.turns[played.at]
        began = time.process_time()
        number = place(machines, played, turn, now)
        spent += time.process_time() - began
        found = machines.found(number, turn)
        served = machines.clocks[number].serve(now, turn.tokens, found, turn.answer)
        missing = turn.tokens - found
        machines.caches[number].use(turn.blocks)
        machines.jobs[number] += 1
        machines.heads.setdefault(played.head, Work()).add(missing, now)
        machines.work.add(missing, now)
        machines.refresh(number, now)
        pace = machines.paces[number]
        later(
            served.first_at_s,
            lambda at: pace.note_first_token(missing, served.first_at_s - now, at),
        )

        def end(at: float) -> None:
            machines.jobs[number] -= 1
            pace.note_end(at - served.read_at_s)
            machines.refresh(number, at)

        later(served.end_at_s, end)
        whole = turn.blocks[: turn.shared // BLOCK]
        is_known = all(one in seen for one in whole)
        if turn.shared and is_known:
            result.shared_tokens += turn.shared
            in_pool = pooled.found(whole)
            result.pooled_tokens += turn.shared if in_pool == len(whole) else in_pool * BLOCK
            result.found_tokens += found
        seen.update(turn.blocks)
        pooled.use(turn.blocks)
        result.jobs += 1
        result.prompt_tokens += turn.tokens
        computed[number] += missing
        waits.append(served.wait_s)
        firsts.append(served.first_at_s - now)
        played.routes.append(number)
        played.at += 1
        if played.at == len(played.turns):
            machines.live[played.routes[0]] -= played.tokens
        else:
            later(max(now + turn.gap_s, served.end_at_s), lambda at: start(played, at))

    for one in sessions:
        later(draw.uniform(0, ARRIVE_S), lambda at, one=one: start(one, at))  # type: ignore[misc]
    while queue:
        now, _, do = heapq.heappop(queue)
        do(now)
    result.computed_max_by_mean = max(computed) / max(1.0, sum(computed) / count)
    result.wait_s_p50, result.wait_s_p95 = percentile(waits, 0.5), percentile(waits, 0.95)
    result.first_s_p95 = percentile(firsts, 0.95)
    result.choice_us = spent / max(1, result.jobs) * 1e6
    return result


def table(sums: Sequence[Sum]) -> str:
    """As the documents have it."""
    lines = [
        "| replicas | placed by | shared tokens found | of one pooled cache | computed, most by mean | wait p95 "
        "| first token p95 |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {one.replicas:,} | {one.policy} | {one.share:.1%} | {one.found_tokens / max(1, one.pooled_tokens):.1%} "
        f"| {one.computed_max_by_mean:.2f} | {one.wait_s_p95:.1f} s | {one.first_s_p95:.1f} s |"
        for one in sums
    ]
    return "\n".join(lines)


def chart(sums: Sequence[Sum]) -> str:
    """The shared tokens that were found, by the number of replicas."""
    counts = sorted({one.replicas for one in sums})
    lines = [
        ChartLine(
            policy,
            colour,
            [(one.replicas, 100 * one.share) for one in sums if one.policy == policy],
        )
        for policy, colour in COLOURS.items()
    ]
    return line_chart(
        "Shared tokens that the replicas found, %",
        [line for line in lines if line.points],
        ChartAxis(
            counts[0], max(counts[-1], counts[0] + 1), [(n, f"{n:,}") for n in counts], is_log=True
        ),
        ChartAxis(0, 100, [(n, str(n)) for n in range(0, 101, 20)]),
        "replicas",
    )


def main(arguments: Sequence[str]) -> int:
    """Simulate each policy with each number of replicas."""
    parser = argparse.ArgumentParser(prog="python -m bench scale", description=__doc__)
    parser.add_argument("--replicas", default="10,100,1000")
    parser.add_argument("--turns", type=int, default=12, help="the first turns of each session")
    parser.add_argument("--sessions", type=int, default=SESSIONS_PER_REPLICA, help="a replica")
    parser.add_argument("--kv-tokens", type=int, default=SHAPE.kv_tokens)
    parser.add_argument("--gap-s", type=float, default=120.0, help="longest pause")
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--json", help="write all figures to this file")
    parser.add_argument("--svg", help="write a chart to this file")
    options = parser.parse_args(arguments)
    shape = structs.replace(SHAPE, kv_tokens=options.kv_tokens)
    sums = []
    for count in map(int, options.replicas.split(",")):
        for policy in options.policies.split(","):
            began = time.perf_counter()
            sessions = sessions_of(
                count * options.sessions, options.turns, options.gap_s, options.seed
            )
            sums.append(simulate(policy, sessions, count, shape, options.seed))
            one = sums[-1]
            print(
                f"  {count:5} {policy:10} found {one.share:6.1%}, wait p95 {one.wait_s_p95:6.1f} s, "
                f"{one.jobs:,} jobs, a choice {one.choice_us:,.0f} us, {time.perf_counter() - began:.0f} s",
                flush=True,
            )
    print(table(sums))
    if options.svg:
        Path(options.svg).write_text(chart(sums))
    if options.json:
        rows = [asdict(one) for one in sums]
        Path(options.json).write_text(
            json.dumps({"options": vars(options), "sums": rows}, indent=1) + "\n"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
