"""What is a simulated process? The real application, on a loop of its own, with an engine that takes simulated time.

Requests reach it as ASGI messages over lines of the network. Everything behind that is the real code: HTTP handlers,
runner, stores, bus, peers, maintenance.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import AsyncGenerator, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from itertools import count
from typing import Any
from urllib.parse import urlsplit

import segue.server.app
from segue.listener.exchange import CUT
from segue.seams.model import EngineFacts, Finish, Ids, Job, Piece
from segue.server.app import App, WorkerPlace, open_app
from segue.server.models import ServedModels
from segue.settings.checks import load_settings
from segue.settings.values import Settings
from segue.turn.plan import Model
from segue.turn.sampling import ModelCall
from tests.contracts.engine import chatml
from tests.contracts.turns import said
from tests.simulator.clock import ProcessLoop, World
from tests.simulator.network import Line, Network

# What a request asks of the engine: how many pieces, and how long each takes.
ASKED = re.compile(rb"(\d+) pieces of (\d+) ms")
CONTEXT_TOKENS = 100_000


@cache
def answer_ids() -> list[int]:
    return chatml().write([said("So it is said, and so it is written down.", "assistant")]).tolist()


@cache
def settings() -> Settings:
    flags = {
        "engine": "scripted", "store": "postgresql://simulated/", "port": 0, "grace_s": 0, "auth": "keys",
    }  # fmt: skip
    return load_settings(flags, environment={})


@dataclass
class Said:
    """What all engines have said: for each turn how many tokens, by the process and the run. One that was queued may be
    taken over and run again."""

    tokens: dict[str, Counter[tuple[str, int]]] = field(default_factory=dict)
    runs: Iterator[int] = field(default_factory=count)


@dataclass
class SimulatedEngine:
    """Says a few pieces, each after a while; what it has said is counted for each turn."""

    process: str
    said: Said
    can_constrain = False
    grammars: frozenset[str] = frozenset()
    facts = EngineFacts()

    async def is_ready(self) -> bool:
        return True

    async def sample(self, job: Job) -> AsyncGenerator[Piece, None]:
        # A job does not name its turn; the function that takes its pieces is the turn's own.
        call = getattr(job.take, "__self__", None)
        assert isinstance(call, ModelCall)
        ids = answer_ids()
        (pieces, pause_ms) = ASKED.findall(job.scene.given[-1].raw)[-1]
        said = self.said.tokens.setdefault(call.running.id, Counter())
        run = (self.process, next(self.said.runs))
        for index in range(int(pieces)):
            await asyncio.sleep(int(pause_ms) / 1_000)
            said[run] += 1
            yield Ids([ids[index % (len(ids) - 2)]])
        said[run] += 1
        yield Ids([ids[-1]])
        yield Finish("stop")


class Process:
    """One process of the service."""

    def __init__(self, world: World, network: Network, name: str, said: Said) -> None:
        self.name = name
        self.world = world
        self.network = network
        self.loop = ProcessLoop(world, name)
        self.app: App | None = None
        self._said = said
        self.requests: dict[Request, None] = {}
        # Since when it has been well: alive, running, and connected.
        self.well_since: float | None = world.now
        self.died_at: float | None = None
        # Whether anything was ever wrong with it.
        self.was_ill = False
        self._run(self._live())

    def _run(self, work: Any) -> None:
        self.loop.call_soon(lambda: self.loop.mind(self.loop.create_task(work)))

    async def _live(self) -> None:
        engine = SimulatedEngine(self.name, self._said)
        model = Model("m", engine, chatml(), CONTEXT_TOKENS)
        segue.server.app.build_models = lambda *_: ServedModels({"m": model})
        async with open_app(settings(), WorkerPlace(group=self.name)) as self.app:
            await asyncio.Event().wait()

    @property
    def is_alive(self) -> bool:
        return self.died_at is None

    def serve(self, request: Request) -> None:
        """A request has arrived."""
        if self.app is None or self.loop.is_dead:
            request.lose()
            return
        self.requests[request] = None
        self._run(self.app.http(request.scope(), request.receive, request.send))

    # --- what may happen to it ---

    def pause(self) -> None:
        self.loop.is_paused = True
        self._is_ill()

    def resume(self) -> None:
        if not self.loop.is_dead:
            self.loop.resume()

    def kill(self, *, silently: bool) -> None:
        """The process dies: alone, so that its kernel closes its connections; or with its machine."""
        self.loop.is_dead, self.loop.is_paused = True, False
        self.died_at = self.world.now
        self._is_ill()
        if silently:
            self.network.vanish(self.name)
        else:
            self.network.reset(self.name)
        for request in tuple(self.requests):
            request.lose(silently=silently)
        self.requests.clear()

    def _is_ill(self) -> None:
        self.was_ill, self.well_since = True, None

    def cut(self, what: str) -> None:
        self.network.cut(f"{self.name}/{what}")
        self._is_ill()

    def mend(self, what: str) -> None:
        self.network.mend(f"{self.name}/{what}")

    def look(self) -> None:
        """Note since when it has been well."""
        is_well = self.is_alive and not self.loop.is_paused and self.app is not None
        is_well = is_well and not any(
            path.startswith(f"{self.name}/") for path in self.network.cuts
        )
        if not is_well:
            self.well_since = None
        elif self.well_since is None:
            self.well_since = self.world.now


@dataclass(eq=False)
class Request:
    """One HTTP request of a client, on a connection of its own, and what has come back."""

    process: Process
    method: str
    target: str
    headers: Mapping[str, str]
    body: bytes
    client: ProcessLoop
    status: int = 0
    answer: bytearray = field(default_factory=bytearray)
    answer_headers: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        network, path = self.process.network, f"{self.process.name}/clients"
        self._up, self._down = Line(network, path), Line(network, path)
        self._inbox: asyncio.Queue[dict[str, Any]] | None = None
        self._is_left = self.is_whole = self.is_lost = False
        self.news = asyncio.Event()
        self._up.put(lambda: self.process.loop.call_soon(self.process.serve, self))

    # --- at the process ---

    def scope(self) -> dict[str, Any]:
        url = urlsplit(self.target)
        headers = [(name.encode(), value.encode()) for name, value in self.headers.items()]
        return {
            "type": "http", "method": self.method, "path": url.path, "headers": headers,
            "query_string": url.query.encode(), "extensions": {CUT: {"call": self._abort}},
        }  # fmt: skip

    async def receive(self) -> dict[str, Any]:
        if self._inbox is None:
            self._inbox = asyncio.Queue()
            self._inbox.put_nowait({"type": "http.request", "body": self.body})
            if self._is_left:
                self._inbox.put_nowait({"type": "http.disconnect"})
        return await self._inbox.get()

    async def send(self, message: Mapping[str, Any]) -> None:
        self._down.put(lambda: self.client.call_soon(self._take, message))
        if message["type"] == "http.response.body" and not message["more_body"]:
            self.process.requests.pop(self, None)

    def _abort(self) -> None:
        """The process cuts the connection."""
        self.lose()
        self._disconnect()

    def _disconnect(self) -> None:
        self._is_left = True
        if self._inbox is not None:
            self._inbox.put_nowait({"type": "http.disconnect"})

    # --- at the client ---

    def _take(self, message: Mapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.answer_headers = {k.decode(): v.decode() for k, v in message["headers"]}
        else:
            self.answer += message["body"]
            self.is_whole = not message["more_body"]
        self.news.set()

    def lose(self, *, silently: bool = False) -> None:
        """The process is gone: its client hears of it, or nobody does."""
        if not silently:
            self._down.put(lambda: self.client.call_soon(self._be_lost))

    def _be_lost(self) -> None:
        self.is_lost = True
        self.news.set()

    def leave(self) -> None:
        """The client closes its connection."""
        if not self.is_whole:
            self._up.put(lambda: self.process.loop.call_soon(self._disconnect))

    def json(self) -> Any:
        return json.loads(self.answer)
