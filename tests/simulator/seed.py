"""What does one seed stand for? A few processes, clients with their stories, faults, and then peace.

Everything is drawn from the seed. After the faults everything is mended, a while passes, and every response is read
once more at every process that is alive: by then all of them say the same.
"""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from dataclasses import dataclass, field
from random import Random
from typing import Any
from unittest.mock import patch

import asyncpg

import segue.server.app
from segue.accounts.hashes import KeyHashes
from segue.limits import Key, KeyLimits
from segue.observe.metrics import Metrics
from segue.seams.access import RingKey
from segue.stores.records import pack_key
from tests.simulator.checks import Watch, check_endings, check_kept, check_usage
from tests.simulator.clients import ENDED, Client, Heard
from tests.simulator.clock import EPOCH, ProcessLoop, World, ruling
from tests.simulator.database import Database, Faults
from tests.simulator.network import Network
from tests.simulator.process import Process, Said

# Clients begin and faults happen within this time; a fault lasts at most so long.
BUSY_S = 12.0
FAULT_S_MAX = 24.0
# How long a process that was ill may take to notice what it has missed.
SETTLE_S = 12.0
# How often a client is told in peace to come back later.
TOLD_LATER_MAX = 3
# The longest that all clients together may take after peace has come.
END_S_MAX = 400.0

RING = RingKey(b"ring", b"r" * 32)
OPEN_SECRET = "sk-segue-" + "o" * 43
LIMITED_SECRET = "sk-segue-" + "l" * 43
LIMITS = KeyLimits(requests_per_min=120, tokens_per_min=20_000, lanes_max=3)

FAULTS = (
    "pause",
    "kill",
    "vanish",
    "cut store",
    "cut bus",
    "cut all",
    "lost answers",
    "slow store",
)


STORIES = ("plain", "background", "stream", "followed", "conversation")
# Least delay and spread of a network: of one machine, of one room, of one country, of two continents.
NETWORKS = ((0.0002, 0.001), (0.001, 0.01), (0.01, 0.05), (0.05, 0.2))


@dataclass(frozen=True)
class Emphasis:
    """What is drawn more often, where something rare is looked for."""

    processes: tuple[int, ...] = (2, 2, 3, 3, 4)
    networks: tuple[tuple[float, float], ...] = NETWORKS
    stories: tuple[str, ...] = STORIES
    story_counts: tuple[int, int] = (3, 10)
    faults: tuple[str, ...] = FAULTS
    fault_counts: tuple[int, ...] = (0, 1, 1, 2, 2, 3, 4)
    fault_lengths: tuple[float, ...] = (2.0, 8.0, 20.0, FAULT_S_MAX)
    # How likely a request has an idempotency key, a key with limits, and a crowd beside it.
    keyed: float = 0.4
    limited: float = 0.3
    crowd: float = 0.05


EVERYTHING = Emphasis()


@dataclass
class SeededFaults(Faults):
    """What the server itself does wrong now."""

    random: Random
    slow: float = 0.0

    def slow_statement_s(self) -> float:
        if self.slow and self.random.random() < self.slow:
            return self.random.choice((0.01, 0.1, 1.0, 3.0))
        return 0.0


@dataclass
class Outcome:
    """What came of one seed."""

    seed: int
    broken: list[str]
    trace: list[tuple[float, str]]
    faults: Counter[str]
    statements: int
    turns: int
    seconds: float

    def tell(self) -> str:
        lines = [f"{at:8.3f}  {words}" for at, words in self.trace]
        return "\n".join([f"seed {self.seed}:", *lines])


@dataclass
class Simulation:
    """One seed, while it runs."""

    seed: int
    emphasis: Emphasis = EVERYTHING
    faults: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.world = World(self.seed)
        self.random = random = self.world.random
        least_s, spread_s = random.choice(self.emphasis.networks)
        self.round_trip_s = 2 * least_s + spread_s
        lag = Random(random.random())
        self.server = SeededFaults(Random(random.random()))
        self.database = Database(self.world, self.server)
        self.network = Network(self.world, self.database, lambda: least_s + spread_s * lag.random())
        self.said, self.heard = Said(), Heard()
        self.clients = ProcessLoop(self.world, "clients")
        self.processes: list[Process] = []
        self.tasks: list[asyncio.Task[None]] = []
        self._losing: dict[str, Random] = {}
        self.network.loses_answer = self._loses_answer
        self._add_keys()

    def _add_keys(self) -> None:
        tables = self.database.tables
        tables["ring"][1,] = {"place": 1, "name": RING.name, "secret": RING.secret}
        hashes = KeyHashes([RING])
        for id, secret, limits in (
            ("key_open", OPEN_SECRET, KeyLimits()),
            ("key_limited", LIMITED_SECRET, LIMITS),
        ):
            key = Key(id, id, "ada", ("responses",), limits, hashes.newest, created_at=int(EPOCH))
            tables["keys"][id,] = pack_key(key, hashes.digests(secret)[0])

    def _loses_answer(self, client: str, name: str) -> bool:
        dice = self._losing.get(client)
        return dice is not None and dice.random() < 0.2

    # --- the run ---

    def run(self) -> Outcome:
        built = segue.server.app.build_models
        with ExitStack() as stack:
            stack.enter_context(ruling(self.world))
            stack.enter_context(patch.object(asyncpg, "connect", self.network.connect))
            stack.enter_context(patch.object(asyncpg, "create_pool", self.network.create_pool))
            stack.callback(setattr, segue.server.app, "build_models", built)
            # The lag of a simulated loop is always nothing.
            stack.enter_context(patch.object(Metrics, "watch_loop", _never))
            gc.disable()
            stack.callback(gc.enable)
            stack.callback(self.world.close)
            stack.callback(self.network.end)
            self._play()
            return Outcome(
                self.seed,
                list(self.world.broken),
                list(self.world.trace),
                self.faults,
                self.database.statements,
                len(self.said.tokens),
                self.world.now,
            )

    def _play(self) -> None:
        world = self.world
        for name in "ABCD"[: self.random.choice(self.emphasis.processes)]:
            self._start(name)
        world.run(20, lambda: all(one.app is not None for one in self.processes))
        watch = Watch(world, self.database, self.processes, self.round_trip_s)
        watch.look()
        self._plan_clients()
        peace_at = self._plan_faults()
        world.run(peace_at)
        if not world.broken:
            world.note("peace")
            world.run(world.now + END_S_MAX, self._is_quiet)
            has_died = any(not one.is_alive for one in self.processes)
            world.run(
                world.now + (watch.free_s + 2 if has_died else SETTLE_S if self.faults else 2)
            )
        if not world.broken:
            self._ask_all()
        if not world.broken:
            check_endings(world, self.heard)
            check_kept(world, self.heard, self.database)
            check_usage(world, self.said, self.database, self.processes)

    def _is_quiet(self) -> bool:
        if not all(task.done() for task in self.tasks):
            return False
        return not any(one.app and one.app.runner.running_count for one in self._reachable())

    def _start(self, name: str) -> None:
        self.processes.append(Process(self.world, self.network, name, self.said))

    # --- clients ---

    def _client(self, secret: str = OPEN_SECRET) -> Client:
        dice = Random(self.random.random())
        return Client(self.world, self.clients, self._reachable, self.heard, secret, dice)

    def _reachable(self) -> list[Process]:
        """A balancer sends nothing to a process that is gone."""
        return [one for one in self.processes if one.is_alive and one.app is not None]

    def _begin(self, at: float, story: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self.world.at(at, lambda: self.clients.call_soon(self._spawn, story))

    def _spawn(self, story: Callable[[], Coroutine[Any, Any, None]]) -> None:
        task = self.clients.create_task(story())
        self.clients.mind(task)
        self.tasks.append(task)

    def _plan_clients(self) -> None:
        random, begin, emphasis = self.random, self.world.now, self.emphasis
        stories = random.randint(*emphasis.story_counts)
        # So that a dead process may leave more than one batch of turns behind.
        if random.random() < emphasis.crowd:
            self._plan_crowd(begin)
        for number in range(stories):
            client = self._client(
                LIMITED_SECRET if random.random() < emphasis.limited else OPEN_SECRET
            )
            key = f"key{number}" if random.random() < emphasis.keyed else ""
            kind = random.choice(emphasis.stories)
            at = begin + random.uniform(0, BUSY_S)
            self._begin(
                at, lambda client=client, kind=kind, key=key: self._story(client, kind, key)
            )

    def _story(self, client: Client, kind: str, key: str) -> Coroutine[Any, Any, None]:
        match kind:
            case "plain":
                return client.plain(client.body(), key)
            case "background":
                return client.background(client.body(), key)
            case "stream":
                return client.stream(client.body(), key)
            case "followed":
                return client.stream(client.body(background=True), key)
            case _:
                return client.converse(turns=3)

    def _plan_crowd(self, begin: float) -> None:
        for _ in range(60):
            client = self._client()
            body = {"model": "m", "input": "40 pieces of 1000 ms"}
            self._begin(begin, lambda client=client, body=body: client.background(body))

    # --- faults ---

    def _plan_faults(self) -> float:
        """When everything is mended again."""
        random, peace_at, emphasis = self.random, self.world.now + BUSY_S, self.emphasis
        lives = len(self.processes)
        for _ in range(random.choice(emphasis.fault_counts)):
            kind, process = random.choice(emphasis.faults), random.choice(self.processes)
            at = self.world.now + random.uniform(0, BUSY_S)
            length = random.choice(emphasis.fault_lengths) * random.uniform(0.5, 1)
            if kind in ("kill", "vanish"):
                lives -= 1
                if not lives:
                    continue
                if random.random() < 0.4:
                    self.world.at(at + length, self._start, f"{process.name}'{lives}")
            self.world.at(at, self._harm, kind, process, length)
            peace_at = max(peace_at, at + length)
        return peace_at + 1

    def _harm(self, kind: str, process: Process, length: float) -> None:
        if not process.is_alive or (
            kind in ("kill", "vanish") and sum(one.is_alive for one in self.processes) < 2
        ):
            return
        self.faults[kind] += 1
        self.world.note(f"FAULT {kind} {process.name} for {length:.1f} s")
        match kind:
            case "pause":
                process.pause()
                self.world.after(length, process.resume)
            case "kill" | "vanish":
                process.kill(silently=kind == "vanish")
            case "cut store" | "cut bus":
                self._cut(process, (kind.split()[1],), length)
            case "cut all":
                self._cut(process, ("store", "bus"), length)
            case "lost answers":
                self._losing[process.name] = Random(self.random.random())
                process.was_ill, process.well_since = True, None
                self.world.after(length, self._losing.pop, process.name, None)
            case "slow store":
                self.server.slow = 0.1
                self.world.after(length, setattr, self.server, "slow", 0.0)

    def _cut(self, process: Process, what: tuple[str, ...], length: float) -> None:
        for one in what:
            process.cut(one)
            self.world.after(length, process.mend, one)

    # --- the end ---

    def _ask_all(self) -> None:
        """Every process answers once more, and says of every response what all say."""
        self.tasks = []
        known = sorted({one.turn_id for one in self.heard.sightings} | self.heard.acknowledged)
        for process in self._reachable():
            self._begin(self.world.now, lambda process=process: self._ask_last(process, known))
        for conversation in sorted(self.heard.conversations):
            self._begin(self.world.now, lambda name=conversation: self._speak_last(name))
        self._begin(self.world.now, self._use_limits)
        self.world.run(self.world.now + 60, lambda: bool(self.tasks) and self._is_quiet())
        # Usage that the ledger could not take is taken with that of a later turn.
        self.world.run(self.world.now + 2)

    async def _ask_last(self, process: Process, known: list[str]) -> None:
        client = self._client()
        for turn_id in known:
            asked_at = self.world.now
            request = await client.ask("GET", f"/v1/responses/{turn_id}", process=process)
            if request.status == 404:
                client.missing(turn_id, request)
            elif request.status != 200:
                self.world.fail(f"{turn_id} at {process.name} in peace: {request.status}")
            elif client.see(asked_at, request, request.json(), "last poll") not in ENDED:
                self.world.fail(f"{turn_id} has not ended at {process.name}")
        await self._one_more(client, process, {"model": "m", "input": "1 pieces of 20 ms"})

    async def _one_more(
        self, client: Client, process: Process | None, body: dict[str, Any]
    ) -> None:
        request = await client.ask("POST", "/v1/responses", body, process=process)
        for _ in range(TOLD_LATER_MAX):
            if request.status != 429:
                break
            # Another process gives its places back, and takes longer for it than a refusal waits.
            await asyncio.sleep(float(request.answer_headers["retry-after"]))
            request = await client.ask("POST", "/v1/responses", body, process=process)
        if request.status != 200 or request.json()["status"] != "completed":
            name = request.process.name
            self.world.fail(
                f"a turn in peace at {name}: {request.status} {bytes(request.answer[:300])!r}"
            )

    async def _speak_last(self, conversation: str) -> None:
        """No conversation is locked any more."""
        body = {"model": "m", "input": "1 pieces of 20 ms", "conversation": conversation}
        await self._one_more(self._client(), None, body)

    async def _use_limits(self) -> None:
        """The places of a limited key are free again: all of them can be had at once, somewhere."""
        await asyncio.sleep(1)
        body = {"model": "m", "input": "1 pieces of 400 ms"}
        process = self._reachable()[0]
        one_more = (
            self._one_more(self._client(LIMITED_SECRET), process, body)
            for _ in range(LIMITS.lanes_max)
        )
        await asyncio.gather(*one_more)


async def _never(*_: object) -> None:
    await asyncio.Event().wait()


def simulate(seed: int, emphasis: Emphasis = EVERYTHING) -> Outcome:
    """Run one seed."""
    return Simulation(seed, emphasis).run()
