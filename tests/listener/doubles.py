"""What a transport is tested against: a runner whose turns the test plays by hand, caches in a dictionary, no keys.

The turns are real `Running` objects; only what is beyond the seams of a transport is replaced.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from segue.accounts.account import LOCAL, Account, Accounts
from segue.engines.forwarded import forwarded
from segue.files.api import files_api
from segue.files.depot import Depot
from segue.limits import Key
from segue.listener.auth import origin_policy
from segue.listener.services import Services
from segue.listener.table import routes_of
from segue.passthrough.api import passthrough_api
from segue.process.runner import Runner
from segue.reports.usage import UsageReports
from segue.seams.history import Turn
from segue.server.apis import APIS
from segue.server.app import edge_limits
from segue.server.pages import ServerPages
from segue.settings.values import Settings
from segue.stores.memory import MemoryLedger
from segue.turn.assemble import Assembler
from segue.turn.notices import Cancel
from segue.turn.plan import Arrival, Caller
from segue.turn.running import Running, Subscriber
from segue.wire.events import Event
from segue.wire.requests import Create
from tests.contracts.turns import make_turn, response_of


class Cache:
    """The turns of a connection, or of the store; counts look-ups."""

    def __init__(self) -> None:
        self.turns: dict[str, Turn] = {}
        self.looked_up: list[str] = []
        self.is_closed = False

    @property
    def bytes(self) -> int:
        return len(self.turns)

    def held(self, owner: str, turn_id: str) -> Turn | None:
        self.looked_up.append(turn_id)
        turn = self.turns.get(turn_id)
        return turn if turn is not None and turn.owner == owner else None

    async def find(self, owner: str, turn_id: str) -> Turn | None:
        return self.held(owner, turn_id)

    async def read(self, owner: str, turn_id: str) -> Turn | None:
        return self.held(owner, turn_id)

    async def save(self, turn: Turn) -> None:
        self.turns[turn.id] = turn

    async def delete(self, owner: str, turn_id: str) -> bool:
        return self.turns.pop(turn_id, None) is not None

    def forget(self, owner: str, turn_id: str) -> None:
        self.turns.pop(turn_id, None)

    def close(self) -> None:
        self.is_closed = True


class NoKeys:
    """A store that never had an API key."""

    async def find(self, digests: Sequence[str]) -> Mapping[str, Key]:
        return {}

    async def given_out(self) -> bool:
        return False


@dataclass
class Begun:
    """A turn that a transport has begun; the test decides what happens in it."""

    create: Create
    caller: Caller
    running: Running

    @property
    def is_cancelled(self) -> bool:
        return Cancel() in self.running.inbox

    def publish(self, kind: str) -> None:
        number = self.running.last + 1
        data = json.dumps({"type": kind, "sequence_number": number}, separators=(",", ":"))
        self.running.publish([Event(kind, number, data.encode())])

    def end(self, kind: str = "response.completed") -> None:
        """The turn is saved in the cache of its connection, then its terminal event leaves."""
        if kind == "response.completed":
            turn = make_turn(self.running.id, owner=LOCAL, is_stored=self.running.is_stored)
            cast(Cache, self.caller.turns).turns[turn.id] = turn
        self.publish(kind)


@dataclass
class PlayedRunner:
    """A runner whose turns the test plays."""

    models: dict[str, object] = field(default_factory=dict)
    fenced: frozenset[str] = frozenset()
    is_draining: bool = False
    begun: list[Begun] = field(default_factory=list)
    logged: list[str] = field(default_factory=list)
    # Raised instead of beginning the next turn.
    fault: Exception | None = None
    # What happens in each turn right after it has begun.
    play: Callable[[Begun], None] = lambda begun: None

    async def begin(self, arrival: Arrival, subscriber: Subscriber) -> Running:
        create = arrival.create
        caller = arrival.caller
        if self.fault is not None:
            fault, self.fault = self.fault, None
            raise fault
        name = f"resp_{len(self.begun) + 1}"
        is_stored = create.store is not False
        response = response_of(name, store=is_stored)
        running = Running(caller.owner, Assembler.over(response), is_stored=is_stored)
        running.attach(subscriber)
        begun = Begun(create, caller, running)
        self.begun.append(begun)
        begun.publish("response.created")
        self.play(begun)
        return running

    @property
    def registry(self) -> PlayedRunner:
        return self

    def find(self, owner: str, turn_id: str) -> Running | None:
        for begun in self.begun:
            if begun.running.id == turn_id and not begun.running.is_ended:
                return begun.running
        return None

    async def reach(self, owner: str, turn_id: str, turns: object) -> Running | None:
        return self.find(owner, turn_id)

    async def snapshot(self, owner: str, turn_id: str, *, is_known: bool) -> bytes | None:
        return None

    def log_events(self, running: Running) -> None:
        self.logged.append(running.id)


@dataclass
class Stage:
    """The services of a transport, and what lies behind them."""

    runner: PlayedRunner = field(default_factory=PlayedRunner)
    store: Cache = field(default_factory=Cache)
    near: Cache = field(default_factory=Cache)
    refusals: list[tuple[str, str]] = field(default_factory=list)
    limits: Settings = field(default_factory=Settings)

    def __post_init__(self) -> None:
        self.accounts = Accounts(NoKeys(), lambda secret: [secret], "off")  # type: ignore[arg-type]
        self.services = Services(
            runner=cast(Runner, self.runner),
            accounts=self.accounts,
            origin_policy=origin_policy("127.0.0.1", (), (), lambda: True),
            turns=self.store,
            conversations=cast(Any, None),
            erase=self.store.delete,
            open_cache=self.open_cache,
            limits=edge_limits(self.limits),
            note_refusal=lambda transport, code, request_id: self.refusals.append(
                (transport, code)
            ),
        )

    def open_cache(self, account: Account) -> tuple[Cache, Cache]:
        return self.near, self.near

    async def is_ready(self) -> dict[str, bool]:
        return {"store": True}

    async def write_metrics(self) -> bytes:
        return b"figures"


async def ticks(count: int = 5) -> None:
    """Let everything run that is ready."""
    for _ in range(count):
        await asyncio.sleep(0)


def no_files() -> Depot:
    """The routes are described, and none of them is called."""
    raise AssertionError


def described_routes() -> tuple[tuple[str, str], ...]:
    """What the OpenAPI document is made from: the routes of all APIs and of the server itself."""
    stage = Stage()
    apis = (*APIS.values(), passthrough_api(forwarded), files_api(no_files))
    routes = [*routes_of(apis, stage.services), *UsageReports(MemoryLedger()).routes]
    return ServerPages(stage.services, stage.is_ready, stage.write_metrics, routes).described
