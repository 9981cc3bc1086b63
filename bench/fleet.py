"""How warm does a conversation stay in a fleet, against load-only routing and against an oracle?

    python -m bench fleet [--sessions 64] [--turns 10] [--parts warm,restarts,kills] [--json FILE] [--svg FILE]

A whole fleet on this machine (`segue_fleet.fleet`): replicas that count prefix blocks, two machines with two workers
behind HAProxy in turns, one PostgreSQL. The sessions are recorded ones, all at once, by three ways (`fleet_play.py`).
Lengths are divided by `--tokens-per`, and so are the rates and the KV room of the replicas; their clock runs
`--time-factor` times as fast as ours. Pauses between turns are the recorded ones, up to `--gap-s`.

    warm      all ways, by Segue's routes and, in a second fleet, by a balancer that knows only the load
    restarts  each way: after a worker, a machine, HAProxy and PostgreSQL were restarted, and a replica was replaced
    kills     a machine and a replica are killed under load: what clients heard, and when prompts are found again
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import msgspec

from bench.fleet_play import WAYS, Agent, Heard, Players, Way
from bench.placement import Judged, Placed, Replaced, in_order, judge
from segue_bench.charts import BAR, ROW, bar, picture, text
from segue_bench.machine import describe
from segue_bench.sessions import SeededText, load_sessions, plan
from segue_fleet.blocks import ReplicaShape
from segue_fleet.fleet import Fleet, FleetShape
from segue_fleet.replica import Arrival
from segue_fleet.words import known_words

PARTS = ("warm", "restarts", "kills")
# What a replica is taken to be, before everything is divided: an engine on one node, tokens a second and KV room.
PREFILL_TPS, DECODE_TPS, SLOTS = 20_000.0, 60.0, 16
KV_TOKENS = 2_000_000
OF_ORACLE_MIN, SPREAD_MAX = 0.95, 1.3


class Rig:
    """A fleet, its agents, and all that its replicas were sent, also by replicas that are gone."""

    def __init__(self, fleet: Fleet, options: argparse.Namespace) -> None:
        self.fleet = fleet
        self.options = options
        self.texts = SeededText(known_words().texts)
        self._gone: dict[str, list[Arrival]] = {}
        self.replaced: list[Replaced] = []

    def now_s(self) -> float:
        """By the clock of the replicas."""
        return time.monotonic() * self.fleet.shape.time_factor

    def players(self) -> Players:
        options = self.options
        return Players(
            self.fleet.url,
            self.texts,
            time_factor=options.time_factor,
            gap_s_max=options.gap_s,
            seed=options.seed,
        )

    def agents(self, way: Way, count: int, turns: int) -> list[Agent]:
        return agents_of(way, count, turns, self.options.tokens_per, self.options.seed)

    def arrivals(self) -> list[Placed]:
        found = {
            name: [*self._gone.get(name, ()), *_arrivals(self.fleet, name)]
            for name in self.fleet.replicas
        }
        return in_order(found)

    def replace_replica(self, name: str, number: signal.Signals = signal.SIGTERM) -> None:
        """It ends, and another one without memory takes its address."""
        self._gone.setdefault(name, []).extend(_arrivals(self.fleet, name))
        self.fleet.signal(name, number)
        self.replaced.append(Replaced(name, self.now_s()))
        self.fleet.run(name)

    def judge(self, edges: Sequence[float]) -> list[Judged]:
        return judge(
            self.arrivals(), self.fleet.shape.replica, self.fleet.replicas, self.replaced, edges
        )


def _arrivals(fleet: Fleet, name: str) -> list[Arrival]:
    with urllib.request.urlopen(fleet.members[name].url + "/arrivals", timeout=30) as page:
        return msgspec.json.decode(page.read(), type=list[Arrival])


def agents_of(way: Way, count: int, turns: int, tokens_per: int, seed: int) -> list[Agent]:
    """Sessions that are long enough, drawn by seed; more agents than sessions play some of them again as others."""
    sessions = [one for one in load_sessions() if len(one.turns) >= turns]
    random.Random(seed).shuffle(sessions)
    agents = []
    for number in range(count):
        session = sessions[number % len(sessions)]
        named = msgspec.structs.replace(session, id=f"{session.id} {number}")
        agents.append(Agent(named.id, plan(named, tokens_per, turns), way))
    return agents


@contextmanager
def running(options: argparse.Namespace, *, is_by_load: bool = False) -> Iterator[Rig]:
    """A fleet for as long as this lasts."""
    scale = options.tokens_per
    replica = ReplicaShape(
        kv_tokens=options.kv_tokens // scale,
        slots=SLOTS,
        prefill_tps=PREFILL_TPS / scale,
        decode_tps=DECODE_TPS / scale,
    )
    shape = FleetShape(
        machines=options.machines,
        workers=options.workers,
        replicas=options.replicas,
        replica=replica,
        time_factor=options.time_factor,
        with_prometheus=False,
        is_by_load=is_by_load,
        serve_flags=("--grace-s", "5", "--log-level", "warning"),
    )
    with tempfile.TemporaryDirectory(prefix="segue-fleet-", dir="/tmp") as name:
        folder = Path(name)
        # PostgreSQL may run as another user.
        folder.chmod(0o711)
        fleet = Fleet(folder, shape)
        fleet.start()
        try:
            yield Rig(fleet, options)
        finally:
            fleet.stop()


# --- warm ---------------------------------------------------------------------------------------------


async def play_ways(rig: Rig, ways: Sequence[Way]) -> dict[str, Judged]:
    """One way after the other, all sessions of a way at once."""
    edges = []
    for way in ways:
        edges.append(rig.now_s())
        async with rig.players() as players:
            options = rig.options
            agents = rig.agents(way, options.sessions, options.turns)
            await players.play(agents, options.turns, options.stagger_s)
            _say_errors(way, players.heard)
    return dict(zip(ways, rig.judge(edges)[1:], strict=True))


def _say_errors(name: str, heard: Sequence[Heard]) -> None:
    errors = Counter(error for one in heard for error in one.errors)
    if errors:
        print(f"  {name}: errors {dict(errors)}", file=sys.stderr)


# --- restarts -----------------------------------------------------------------------------------------


def _kill_worker(rig: Rig) -> None:
    """One worker of one machine, as the kernel would when memory is short; its parent starts another."""
    process = rig.fleet.members["machine-a"].process
    assert process is not None
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(children[-1]), signal.SIGKILL)


RESTARTS: dict[str, Callable[[Rig], None]] = {
    "nothing": lambda rig: None,
    "worker killed": _kill_worker,
    "machine restarted": lambda rig: rig.fleet.restart("machine-b"),
    "HAProxy restarted": lambda rig: rig.fleet.restart("haproxy"),
    "PostgreSQL restarted": lambda rig: rig.fleet.restart("postgres"),
    "replica replaced": lambda rig: rig.replace_replica("replica-0"),
}


async def play_restarts(rig: Rig, way: Way) -> dict[str, Judged]:
    """The same sessions go on after each of them; a part is what comes after it, before the next."""
    turns = max(2, rig.options.turns // 3)
    agents = rig.agents(way, rig.options.sessions, turns * len(RESTARTS))
    edges = [rig.now_s()]
    async with rig.players() as players:
        for do in RESTARTS.values():
            await asyncio.to_thread(do, rig)
            edges.append(rig.now_s())
            await players.play(agents, turns, rig.options.stagger_s if len(edges) == 2 else 0)
        _say_errors(way, players.heard)
    return dict(zip(RESTARTS, rig.judge(edges)[2:], strict=True))


# --- kills --------------------------------------------------------------------------------------------


async def play_kill(rig: Rig, way: Way, what: str) -> dict[str, object]:
    """In the middle of the load a machine or a replica is killed; a moment later it is started again."""
    options = rig.options
    agents = rig.agents(way, options.sessions, options.turns)
    async with rig.players() as players:
        began = time.monotonic()
        playing = asyncio.create_task(players.play(agents, options.turns, options.stagger_s))
        await players.have_heard(options.sessions * options.turns // 3)
        killed_at = time.monotonic()
        if what.startswith("replica-"):
            await asyncio.to_thread(rig.replace_replica, what, signal.SIGKILL)
        else:
            await asyncio.to_thread(rig.fleet.signal, what, signal.SIGKILL)
            await asyncio.to_thread(rig.fleet.run, what)
        up_at = time.monotonic()
        await playing
    after = [one for one in players.heard if one.ended_at >= killed_at]
    errors = Counter(error for one in after for error in one.errors)
    return {
        "way": way,
        "killed": what,
        "turns": len(players.heard),
        "turns_after": len(after),
        "turns_with_errors": sum(bool(one.errors) for one in after),
        "errors": dict(errors),
        "tries_max": max((len(one.errors) for one in after), default=0) + 1,
        "turns_lost": options.sessions * options.turns - len(players.heard),
        "turns_read_again": sum(
            one.is_continuation and one.cached_tokens < one.input_tokens / 2 for one in after
        ),
        "longest_s": max((one.seconds for one in after if one.errors), default=0.0),
        "down_s": up_at - killed_at,
        "ran_s": killed_at - began,
        "hits_back_s": hits_back_s(players.heard, killed_at),
    }


def hits_back_s(heard: Sequence[Heard], killed_at: float, window: int = 32) -> float:
    """From the kill on: until so many turns in a row always found 95 % of the part of their prompts found before."""

    def part(turns: Sequence[Heard]) -> float:
        return sum(one.cached_tokens for one in turns) / max(
            1, sum(one.input_tokens for one in turns)
        )

    ended = sorted((one for one in heard if one.is_continuation), key=lambda one: one.ended_at)
    before = [one for one in ended if one.ended_at < killed_at]
    after = [one for one in ended if one.ended_at >= killed_at]
    back_at, usual = killed_at, part(before)
    for at in range(max(1, len(after) - window + 1)):
        turns = after[at : at + window]
        if turns and part(turns) < 0.95 * usual:
            back_at = max(one.ended_at for one in turns if one.cached_tokens < one.input_tokens / 2)
    return back_at - killed_at


# --- what is printed ----------------------------------------------------------------------------------


def figures(judged: Judged) -> dict[str, object]:
    return {
        **asdict(judged),
        "share": round(judged.share, 4),
        "oracle_share": round(judged.oracle_share, 4),
        "of_oracle": round(judged.of_oracle, 4),
        "spread": round(judged.spread, 3),
    }


def row(name: str, judged: Judged) -> str:
    return (
        f"  {name:32} {judged.jobs:5} jobs  found {judged.share:6.1%} of shared, oracle {judged.oracle_share:6.1%}"
        f" = {judged.of_oracle:6.1%}  computed max/min {judged.spread:4.2f}"
        f"  wait p50 {judged.wait_s_p50:6.2f} s p95 {judged.wait_s_p95:6.2f} s"
    )


def chart(warm: dict[str, dict[str, Judged]]) -> str:
    """What was found of the shared tokens: by way, and by who placed the jobs."""
    rows = [
        (f"{way}, {name}", judged.share, colour)
        for way in WAYS
        for name, colour in (("segue", "ws"), ("load only", "http-full"))
        if (judged := warm[name].get(way)) is not None
    ]
    rows += [
        (f"{way}, oracle", judged.oracle_share, "rest") for way, judged in warm["segue"].items()
    ]
    rows.sort(key=lambda row: WAYS.index(row[0].partition(",")[0]))  # type: ignore[arg-type]
    parts = [text(8, 20, "Shared tokens that the replicas found", "title")]
    for number, (name, share, colour) in enumerate(rows):
        y = 34 + number * ROW
        parts += [
            text(170, y + 13, name, "", "end"),
            bar(178, y, max(1.5, 560 * share), BAR, colour, f"{name}: {share:.1%}", 3),
            text(186 + 560 * share, y + 13, f"{share:.1%}"),
        ]
    return picture(44 + len(rows) * ROW, "Shared tokens that the replicas found", parts)


def missed(warm: dict[str, dict[str, Judged]], restarts: dict[str, dict[str, Judged]]) -> list[str]:
    """The bars that were not reached."""
    found = []
    for way, one in warm.get("segue", {}).items():
        if one.of_oracle < OF_ORACLE_MIN:
            found.append(f"{way}: {one.of_oracle:.1%} of the oracle, below {OF_ORACLE_MIN:.0%}")
        if one.spread > SPREAD_MAX:
            found.append(f"{way}: computed tokens differ by {one.spread:.2f}, above {SPREAD_MAX}")
        other = warm.get("load only", {}).get(way)
        if other is not None and one.wait_s_p95 > other.wait_s_p95:
            found.append(
                f"{way}: p95 wait {one.wait_s_p95:.2f} s, above load only ({other.wait_s_p95:.2f} s)"
            )
    for way, parts in restarts.items():
        for name, one in parts.items():
            if one.of_oracle < OF_ORACLE_MIN:
                found.append(f"{way}, {name}: {one.of_oracle:.1%} of the oracle")
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sessions", type=int, default=64)
    parser.add_argument("--turns", type=int, default=10, help="the first turns of each session")
    parser.add_argument("--machines", type=int, default=2)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--tokens-per", type=int, default=16, help="lengths and rates by this")
    parser.add_argument("--kv-tokens", type=int, default=KV_TOKENS, help="before it is divided")
    parser.add_argument("--time-factor", type=float, default=10.0)
    parser.add_argument("--gap-s", type=float, default=60.0, help="longest pause, simulated")
    parser.add_argument("--stagger-s", type=float, default=300.0, help="in which all begin")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--json", help="write all figures to this file")
    parser.add_argument("--svg", help="write a chart to this file")


def main(arguments: Sequence[str]) -> int:
    """Run the parts; 1 if a bar was missed."""
    parser = argparse.ArgumentParser(prog="python -m bench fleet", description=__doc__)
    add_arguments(parser)
    options = parser.parse_args(arguments)
    parts = set(options.parts.split(","))
    ways = [way for way in WAYS if way in options.ways.split(",")]
    warm: dict[str, dict[str, Judged]] = {}
    restarts: dict[str, dict[str, Judged]] = {}
    kills: list[dict[str, object]] = []
    began = time.monotonic()
    print(
        f"  {options.sessions} sessions, their first {options.turns} turns; lengths, rates and KV room divided by "
        f"{options.tokens_per}; {options.replicas} replicas with {options.kv_tokens:,} tokens of KV room each "
        f"before that; simulated time {options.time_factor:g} times as fast, "
        f"sessions begin within {options.stagger_s:g} s of it"
    )
    for name in ("segue", "load only") if "warm" in parts else ():
        for way in ways:
            # A fleet of its own: what was computed for one way is no work of the next.
            with running(options, is_by_load=name != "segue") as rig:
                warm.setdefault(name, {}).update(asyncio.run(play_ways(rig, [way])))
            print(row(f"{name}, {way}", warm[name][way]), flush=True)
    for way in ways if "restarts" in parts else ():
        with running(options) as rig:
            restarts[way] = asyncio.run(play_restarts(rig, way))
        for name, judged in restarts[way].items():
            print(row(f"{way}, {name}", judged), flush=True)
    for what in ("machine-b", "replica-1") if "kills" in parts else ():
        for way in ways:
            with running(options) as rig:
                kills.append(asyncio.run(play_kill(rig, way, what)))
            print(f"  {json.dumps(kills[-1])}", flush=True)
    found = missed(warm, restarts)
    print(f"  {time.monotonic() - began:.0f} s", *(f"MISSED {one}" for one in found), sep="\n  ")
    if options.svg and warm:
        Path(options.svg).write_text(chart(warm))
    if options.json:
        result = {
            "machine": msgspec.to_builtins(describe()),
            "options": vars(options),
            "replica": {"prefill_tps": PREFILL_TPS, "decode_tps": DECODE_TPS, "slots": SLOTS},
            "warm": {k: {way: figures(one) for way, one in v.items()} for k, v in warm.items()},
            "restarts": {k: {n: figures(one) for n, one in v.items()} for k, v in restarts.items()},
            "kills": kills,
            "missed": found,
        }
        Path(options.json).write_text(json.dumps(result, indent=1) + "\n")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
