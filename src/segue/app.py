"""Who is wired to whom? The only file that names concrete engines, dialects, stores and transports.

`open_app` builds everything from the settings and closes it again in the right order; `serve` puts it behind a port
until a signal comes, then drains.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, cast

import msgspec
import uvicorn
import uvloop
from msgspec import structs

from segue import __version__
from segue.audit import Audit
from segue.bus.hub import open_hub_bus
from segue.bus.local import LocalBus
from segue.dashboard.feed import Feed, Sources
from segue.dashboard.pages import Dashboard
from segue.dashboard.views import FULLEST, Memory, Replica
from segue.engines.routes import RoutedEngine
from segue.errors import ApiError, Misconfigured
from segue.ids import new_id
from segue.metrics import Metrics, together
from segue.models import build_models
from segue.settings import Settings, is_loopback, is_ring_stored, seal_path
from segue.stores.budget import Budget
from segue.stores.conversations import MemoryConversations, SqliteConversations
from segue.stores.database import SqliteDatabase
from segue.stores.hashes import KeyHashes, new_secret
from segue.stores.layered import LayeredRepeats, LayeredTurns, LayeredUpkeep
from segue.stores.memory import (
    MemoryEventLog,
    MemoryKeys,
    MemoryLedger,
    MemoryRepeats,
    MemoryTurns,
    MemoryUpkeep,
)
from segue.stores.seals import RingKey, RingSeals, new_key, open_ring, read_ring, rotate_ring
from segue.stores.sqlite import (
    SqliteEventLog,
    SqliteKeys,
    SqliteLedger,
    SqliteRepeats,
    SqliteTurns,
    SqliteUpkeep,
)
from segue.stores.upkeep import kept_up
from segue.tools.fetch import Fetcher, Policy, read_as_data
from segue.tools.index import IndexWeb, Report, build
from segue.tools.mcp import McpServer, McpServers, allow_hosts
from segue.tools.search import JsonEngine, JsonSearch
from segue.tools.web import LiveWeb, WebTool
from segue.traces import Traces
from segue.transports.auth import SCOPES, Account, Book
from segue.transports.desk import Desk, Limits, NearTurns
from segue.transports.http import HttpApp
from segue.transports.lobby import Lobby
from segue.transports.origin import gate
from segue.transports.protocol import HttpLimits, http_class
from segue.transports.socket import SocketLimits, socket_class
from segue.transports.tls import Certificate
from segue.turn.admit import Models
from segue.turn.circle import Circle
from segue.turn.hosted import Hosted, ToolLimits
from segue.turn.quota import KeyLimits
from segue.turn.recall import RenderCache
from segue.turn.run import Records, Runner
from segue.turn.seams import (
    Bus,
    Conversations,
    EventLog,
    Keys,
    Ledger,
    Repeats,
    Tool,
    Turns,
    Upkeep,
)
from segue.turn.settle import Afterwards
from segue.turn.values import Key, Owner, Retention, Used

if TYPE_CHECKING:
    from segue.stores.postgres import PostgresRing

log = logging.getLogger(__name__)

# The listener closes last: what is left then has been told already.
SERVER_STOP_S = 2
# So that health can be asked for, and a refusal heard, when all sockets are taken.
SPARE_CONNECTIONS = 100
# Connections that wait to be accepted: a herd that comes back at once is not refused.
BACKLOG = 2_048


@dataclass(frozen=True, slots=True)
class App:
    """A whole server, without a port."""

    http: HttpApp
    lobby: Lobby
    runner: Runner
    turns: Turns
    keys: Keys
    hashes: KeyHashes
    book: Book
    circle: Circle

    async def drain(self, grace_s: float) -> None:
        """Refuse new work, let running turns finish, end the rest, tell the sockets."""
        self.lobby.leave_idle()
        await self.runner.drain(grace_s)
        self.lobby.leave()


@dataclass(frozen=True, slots=True)
class Place:
    """Where a worker stands among those that one parent has started; a server that is alone has none."""

    house: str = ""
    # The socket where the workers meet, unless they meet in the database.
    hub: str = ""
    # The folder where one process shares the engines inside.
    engines: str = ""


ALONE = Place()


@asynccontextmanager
async def open_bus(settings: Settings, place: Place) -> AsyncIterator[Bus]:
    """How this worker and the others hear of each other: in the database, at the parent's hub, or not at all."""
    if settings.store.startswith(("postgresql://", "postgres://")):
        # Imported here, as the store is.
        from segue.bus.notify import open_notify_bus

        async with open_notify_bus(settings.store) as notify:
            yield notify
    elif place.hub:
        async with open_hub_bus(place.hub) as hub:
            yield hub
    else:
        yield LocalBus()


@dataclass(frozen=True, slots=True)
class Store:
    """What a durable store is made of."""

    turns: Turns
    ledger: Ledger
    events: EventLog
    repeats: Repeats
    conversations: Conversations
    upkeep: Upkeep
    keys: Keys
    is_ready: Callable[[], Awaitable[bool]]
    # What of it this process holds in memory.
    state: MemoryTurns
    # The keys of what clients keep for us, where all who use the store share them.
    ring: PostgresRing | None = None


@asynccontextmanager
async def open_store(settings: Settings) -> AsyncIterator[Store]:
    """The durable store, with the process's cache in front, and the ledger beside it. What dead processes left
    running has ended."""
    kinds = {"memory": _open_memory, "sqlite": _open_sqlite}
    async with kinds.get(settings.store.partition(":")[0], _open_postgres)(settings) as store:
        await store.upkeep.recover()
        yield store


@asynccontextmanager
async def _open_memory(settings: Settings) -> AsyncIterator[Store]:
    # Events and turns have a budget each; keys are small and have their own.
    budget = settings.process_state_bytes_max
    ledger, log, repeats = MemoryLedger(), MemoryEventLog(budget // 4), MemoryRepeats()
    on_erase = [log.erase, repeats.erase]
    near = MemoryTurns(budget, stored_only=True, ledger=ledger, on_erase=on_erase)
    upkeep = MemoryUpkeep(near, log, repeats)
    conversations = MemoryConversations(budget // 4)
    yield Store(near, ledger, log, repeats, conversations, upkeep, MemoryKeys(), _always, near)


@asynccontextmanager
async def _open_sqlite(settings: Settings) -> AsyncIterator[Store]:
    path = Path(settings.store.removeprefix("sqlite:///"))
    try:
        database = await SqliteDatabase.open(path, durability=settings.durability)
    except ApiError as error:
        raise Misconfigured(f"store: {path} cannot be opened: {error.__cause__}.") from error
    try:
        near = MemoryTurns(settings.process_state_bytes_max, stored_only=True)
        yield Store(
            turns=LayeredTurns(near, SqliteTurns(database)),
            ledger=SqliteLedger(database),
            events=SqliteEventLog(database),
            repeats=LayeredRepeats(MemoryRepeats(), SqliteRepeats(database)),
            conversations=SqliteConversations(database),
            upkeep=LayeredUpkeep(near, SqliteUpkeep(database)),
            keys=SqliteKeys(database),
            is_ready=database.is_ready,
            state=near,
        )
    finally:
        await database.close()


@asynccontextmanager
async def _open_postgres(settings: Settings) -> AsyncIterator[Store]:
    # Imported here: a server without PostgreSQL needs neither its client nor the time to load it.
    from segue.stores.pool import PostgresDatabase
    from segue.stores.postgres import (
        PostgresConversations,
        PostgresEventLog,
        PostgresKeys,
        PostgresLedger,
        PostgresRepeats,
        PostgresRing,
        PostgresTurns,
        PostgresUpkeep,
    )

    try:
        database = await PostgresDatabase.open(settings.store, durability=settings.durability)
    except ApiError as error:
        raise Misconfigured(
            f"store: {settings.shown_store} cannot be opened: {error.__cause__ or error}."
        ) from error
    try:
        near = MemoryTurns(settings.process_state_bytes_max, stored_only=True)
        yield Store(
            turns=LayeredTurns(near, PostgresTurns(database)),
            ledger=PostgresLedger(database),
            events=PostgresEventLog(database),
            repeats=LayeredRepeats(MemoryRepeats(), PostgresRepeats(database)),
            conversations=PostgresConversations(database),
            upkeep=LayeredUpkeep(near, PostgresUpkeep(database)),
            keys=PostgresKeys(database),
            is_ready=database.is_ready,
            state=near,
            ring=PostgresRing(database),
        )
    finally:
        await database.close()


async def read_usage(settings: Settings, owner: Owner | None, days: int) -> Sequence[Used]:
    """What was used on the last days, today included, by day, owner and model."""
    if settings.store == "memory":
        raise Misconfigured("store: memory keeps usage only while the server runs.")
    today = int(time.time()) // 86_400
    async with open_store(settings) as store:
        return await store.ledger.report(owner, (today - days + 1) * 86_400)


def _durable(settings: Settings) -> Settings:
    if settings.store == "memory":
        raise Misconfigured("store: memory has keys only while the server runs; name another one.")
    return settings


async def create_key(
    settings: Settings, name: str, owner: Owner, scopes: Sequence[str], limits: KeyLimits
) -> tuple[Key, str]:
    """A fresh key and its secret, which nobody can be told again."""
    unknown = set(scopes) - set(SCOPES)
    if unknown or not scopes:
        raise Misconfigured(f"scopes: there are {', '.join(SCOPES)}.")
    async with open_store(_durable(settings)) as store:
        hashes = KeyHashes(await _load_ring(settings, store))
        await _check_ring(store.keys, hashes, settings)
        return await give_out(store.keys, hashes, name, owner, scopes, limits)


async def give_out(
    keys: Keys,
    hashes: KeyHashes,
    name: str,
    owner: Owner,
    scopes: Sequence[str] = SCOPES[:2],
    limits: KeyLimits | None = None,
) -> tuple[Key, str]:
    """A fresh key in this store, and its secret."""
    secret = new_secret()
    key = Key(
        id=new_id("key"),
        name=name,
        owner=owner,
        scopes=tuple(scopes),
        limits=limits or KeyLimits(),
        ring=hashes.newest,
        created_at=int(time.time()),
    )
    await keys.add(key, hashes.digests(secret)[0])
    return key, secret


async def list_keys(settings: Settings) -> Sequence[Key]:
    """Every key of the store."""
    async with open_store(_durable(settings)) as store:
        return await store.keys.given_out()


async def revoke_key(settings: Settings, key_id: str) -> bool:
    """Take a key back; False if there is nothing to take back."""
    async with open_store(_durable(settings)) as store:
        return await store.keys.revoke(key_id)


async def _check_ring(keys: Keys, hashes: KeyHashes, settings: Settings) -> None:
    """Keys that were hashed under another ring are nobody's here: say so before anybody wonders."""
    valid = [key for key in await keys.given_out() if key.revoked_at is None]
    strange = sum(not hashes.knows(key.ring) for key in valid)
    if strange:
        raise Misconfigured(
            f"seal_keys: {strange} of the {len(valid)} keys in this store were made with another ring "
            f"than {_ring_name(settings)}. Name the file that they were made with, or revoke them."
        )


async def _check_public(keys: Keys, settings: Settings) -> None:
    """A public address only where keys are asked for, and there are some."""
    if is_loopback(settings.host) or settings.auth == "keys":
        return
    if not await keys.given_out():
        raise Misconfigured(
            f"host: {settings.host} is not a loopback address, and nobody needs a key yet. "
            f"Make one first: segue keys create --name NAME --store {settings.shown_store}"
        )


async def _always() -> bool:
    return True


def index_folder(folder: Path, into: Path, prefix: str, note: Callable[[int, int], None]) -> Report:
    """Bring an index of documents up to date with a folder."""
    return build(folder, into, prefix, note)


@asynccontextmanager
async def open_fetcher(settings: Settings) -> AsyncIterator[Fetcher]:
    """The one way to follow an address from outside; off unless the operator has switched it on."""
    fetcher = Fetcher(
        Policy(
            settings.fetch,
            allow=settings.fetch_allow,
            deny=settings.fetch_deny,
            ports=settings.fetch_port,
            bytes_max=settings.fetch_bytes_max,
            s_max=settings.fetch_s_max,
        )
    )
    try:
        yield fetcher
    finally:
        fetcher.close()


@asynccontextmanager
async def open_web(settings: Settings, fetcher: Fetcher) -> AsyncIterator[WebTool | None]:
    """The web search; None where there is neither an index nor an engine nor a page that may be opened."""
    index = IndexWeb(Path(settings.search_index)) if settings.search_index else None
    engine = JsonSearch(_search_engine(settings)) if settings.search_url else None
    is_live = engine is not None or fetcher.is_on
    live = LiveWeb(engine, fetcher) if is_live else None
    try:
        yield WebTool(index, live) if index is not None or is_live else None
    finally:
        if engine is not None:
            engine.close()


def _search_engine(settings: Settings) -> JsonEngine:
    url, title, text = settings.search_fields.split()
    name, _, value = settings.search_header.partition(":")
    headers = ((name, value.strip()),) if name else ()
    return JsonEngine(settings.search_url, settings.search_results, (url, title, text), headers)


@asynccontextmanager
async def open_app(settings: Settings, place: Place = ALONE) -> AsyncIterator[App]:
    """Everything wired, running turns owned, and closed again in the right order."""
    served = build_models(settings, place.engines)
    models = served.models
    metrics = Metrics()
    async with (
        aclosing(served),
        open_store(settings) as store,
        open_fetcher(settings) as fetcher,
        AsyncExitStack() as outlets,
        open_bus(settings, place) as bus,
    ):
        circle = Circle(bus, place.house)
        recall = RenderCache(settings.render_cache_bytes_max)

        def memory() -> list[Memory]:
            fullest = max((one.state_bytes for one in lobby.sessions), default=0)
            return [
                Memory("turns", store.state.bytes, settings.process_state_bytes_max),
                Memory("recalled prompts", recall.bytes, settings.render_cache_bytes_max),
                Memory(FULLEST, fullest, settings.connection_state_bytes_max),
            ]

        feed = Feed(
            Sources(
                models=list(models),
                sessions=lambda: (one.glance() for one in lobby.sessions),
                runnings=lambda: runner.runnings,
                memory=memory,
                probe=lambda: is_ready(),
                replicas=lambda checks: _replicas(models, checks),
                backlog=lambda: afterwards.backlog,
                ask=lambda question: circle.ask("feed", question, circle.housemates),
                worker=circle.worker,
                process=place.house,
            )
        )
        observers = [metrics.observe, feed.observe]
        refusals = [metrics.note_refusal, feed.note_refusal]
        if settings.otel_endpoint:
            traces = Traces(settings.otel_endpoint, settings.otel_headers)
            observers.append((await outlets.enter_async_context(traces)).observe)
        if settings.audit_log:
            audit = await outlets.enter_async_context(Audit(settings.audit_log))
            observers.append(audit.observe)
            refusals.append(audit.note_refusal)
        afterwards = Afterwards(store.ledger, observers)

        def note_refusal(transport: str, code: str) -> None:
            for note in refusals:
                note(transport, code)

        ring = await _load_ring(settings, store)
        hashes = KeyHashes(ring)
        await _check_ring(store.keys, hashes, settings)
        await _check_public(store.keys, settings)
        book = Book(store.keys, hashes.digests, settings.auth)
        budget = Budget(settings.connections_state_bytes_max)

        def open_cache(account: Account) -> tuple[NearTurns, Turns]:
            near = MemoryTurns(settings.connection_state_bytes_max)
            near.enter(budget, account.key_id, account.quota.limits.state_bytes_max)
            return near, LayeredTurns(near, store.turns)

        async def is_ready() -> dict[str, bool]:
            checks = {"store": await store.is_ready()}
            for name, model in {one.name: one for one in models.values()}.items():
                checks[f"engine:{name}"] = is_up = await model.engine.is_ready()
                if isinstance(model.engine, RoutedEngine):
                    for health in model.engine.replicas():
                        metrics.note_engine(health.name, is_up=health.is_up)
                else:
                    metrics.note_engine(name, is_up=is_up)
            return checks

        async def write_own_metrics() -> bytes:
            await afterwards.drained()
            await is_ready()
            return metrics.write()

        async def write_metrics() -> bytes:
            others, own = await asyncio.gather(
                circle.ask("metrics", b"", circle.housemates), write_own_metrics()
            )
            return together([own, *others.values()])

        async def erase(owner: Owner, turn_id: str) -> bool:
            is_erased = await store.turns.delete(owner, turn_id)
            runner.forget(owner, turn_id)
            await lobby.erase(owner, turn_id)
            # Sooner than the store would tell them.
            await circle.tell("erased", msgspec.msgpack.encode((owner, turn_id)))
            return is_erased

        async def let_go(owner: Owner, turn_id: str) -> None:
            await store.state.delete(owner, turn_id)
            runner.forget(owner, turn_id)
            await lobby.erase(owner, turn_id)

        retention = Retention(settings.retention_s, settings.events_retention_s)
        async with (
            _open_tools(settings, fetcher) as hosted,
            Runner(
                models,
                Records(afterwards, store.events, store.repeats, store.conversations),
                RingSeals(ring),
                heartbeat_s=settings.heartbeat_s,
                append_s_max=settings.append_s_max,
                recall=recall,
                hosted=hosted,
                read_url=partial(read_as_data, fetcher) if fetcher.is_on else None,
                guards=served.owners,
            ) as runner,
            kept_up(store.upkeep, retention, let_go),
        ):
            desk = Desk(
                runner=runner,
                book=book,
                gate=gate(
                    settings.host,
                    settings.allowed_hosts,
                    settings.cors_origins,
                    is_open=lambda: not book.is_required,
                ),
                turns=store.turns,
                conversations=store.conversations,
                erase=erase,
                open_cache=open_cache,
                is_ready=is_ready,
                write_metrics=write_metrics,
                limits=Limits(
                    body_bytes_max=settings.body_bytes_max,
                    connection_age_s=settings.connection_age_s,
                    write_s_max=settings.write_s_max,
                    outbox_bytes_max=settings.outbox_bytes_max,
                    is_websocket_on=settings.websocket,
                    reconnect_s=settings.reconnect_s,
                    body_s_max=settings.body_s_max,
                    connections_max=settings.connections_max,
                ),
                note_refusal=note_refusal,
            )
            lobby = Lobby(desk)
            runner.meet(bus, circle, store.turns)
            circle.answer("metrics", lambda worker, body: write_own_metrics())
            circle.answer("feed", lambda worker, body: feed.answer(body))
            circle.answer("erased", lambda worker, body: _erased(body, let_go))
            _watch(
                metrics,
                lobby,
                afterwards,
                lambda: (
                    sum(one.bytes for one in (store.state, recall, served, lobby.lost))
                    + runner.ended_bytes
                ),
            )
            metrics.note_limits(settings)
            pages = Dashboard(desk, feed).routes
            async with book.kept(lobby.dismiss), circle.joined():
                yield App(
                    HttpApp(desk, pages),
                    lobby,
                    runner,
                    store.turns,
                    store.keys,
                    hashes,
                    book,
                    circle,
                )


async def _erased(body: bytes, let_go: Callable[[Owner, str], Awaitable[None]]) -> None:
    """Another worker has erased a turn."""
    owner, turn_id = msgspec.msgpack.decode(body, type=tuple[str, str])
    await let_go(owner, turn_id)


@asynccontextmanager
async def _open_tools(settings: Settings, fetcher: Fetcher) -> AsyncIterator[Hosted]:
    """The tools that this process runs; sessions with MCP servers end with it."""
    limits = ToolLimits(settings.tool_s_max, settings.tool_output_bytes_max)
    async with open_web(settings, fetcher) as web:
        tools: dict[str, Tool] = {} if web is None else {"web_search": web}
        if not settings.mcp and not settings.mcp_hosts:
            yield Hosted(tools, limits=limits)
            return
        async with aclosing(_open_servers(settings)) as servers:
            tools |= {"mcp": servers, "mcp_list": servers.lister}
            yield Hosted(tools, servers.check, limits)


def _open_servers(settings: Settings) -> McpServers:
    if find_spec("mcp") is None:
        raise Misconfigured("mcp: the package 'mcp' is not installed: pip install 'segue[mcp]'.")
    return McpServers(
        [McpServer(**structs.asdict(one)) for one in settings.mcp],
        allow_hosts(settings.mcp_hosts),
        list_s=settings.mcp_list_s,
    )


def _replicas(models: Models, checks: Mapping[str, bool]) -> list[Replica]:
    """How the engines are: each replica where there are several, else what its engine last answered."""
    found: list[Replica] = []
    for name, model in {one.name: one for one in models.values()}.items():
        if isinstance(model.engine, RoutedEngine):
            for health in model.engine.replicas():
                found.append(
                    Replica(name, health.name, health.is_up, health.running, health.waiting)
                )
        elif f"engine:{name}" in checks:
            found.append(Replica(name, name, checks[f"engine:{name}"]))
    return found


def rotate_seals(settings: Settings) -> int:
    """Put a fresh key in front of the ring; how many it has then."""
    if is_ring_stored(settings):
        return asyncio.run(_rotate_stored(settings))
    path = seal_path(settings)
    if path is None:
        raise Misconfigured("seal_keys: a server with the memory store keeps no keys.")
    return rotate_ring(path)


async def _rotate_stored(settings: Settings) -> int:
    async with open_store(settings) as store:
        assert store.ring is not None
        return await store.ring.rotate()


async def _load_ring(settings: Settings, store: Store) -> Sequence[RingKey]:
    """The keys that seal and hash: from the database, from their file, or for this process alone."""
    if is_ring_stored(settings):
        assert store.ring is not None
        return await store.ring.load()
    path = seal_path(settings)
    if path is None:
        return [new_key()]
    open_ring(path)
    return read_ring(path)


def _ring_name(settings: Settings) -> str:
    return "the database's" if is_ring_stored(settings) else str(seal_path(settings))


def _watch(
    metrics: Metrics, lobby: Lobby, afterwards: Afterwards, shared_bytes: Callable[[], int]
) -> None:
    """The gauges, each read where its value lives."""

    def state_bytes() -> int:
        return shared_bytes() + sum(session.state_bytes for session in lobby.sessions)

    metrics.watch("segue_connections", "Open WebSocket connections", lambda: len(lobby.sessions))
    metrics.watch("segue_state_bytes", "Bytes of history held in memory", state_bytes)
    metrics.watch(
        "segue_ledger_backlog", "Turns that wait to be settled", lambda: afterwards.backlog
    )


class Server(uvicorn.Server):
    """uvicorn, with the stop in our hands: it goes on answering while we drain."""

    def __init__(self, config: uvicorn.Config, on_listening: Callable[[str], None]) -> None:
        super().__init__(config)
        self._on_listening = on_listening

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are `serve`'s."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, then say where."""
        await super().startup(sockets)
        if self.started:
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            self._on_listening(url_of(host, port, is_secure=self.config.is_ssl))


def url_of(host: str, number: int, *, is_secure: bool) -> str:
    """Where a port can be reached."""
    scheme = "https" if is_secure else "http"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{number}"


def open_certificate(settings: Settings) -> Certificate | None:
    """The certificate of the port, where there is one."""
    if not settings.tls_cert:
        return None
    return Certificate(Path(settings.tls_cert), Path(settings.tls_key))


def build_server(
    app: App,
    settings: Settings,
    on_listening: Callable[[str], None],
    certificate: Certificate | None = None,
) -> Server:
    """The port in front of an app: HTTP by uvicorn, WebSocket by our own socket class."""
    limits = SocketLimits(
        message_bytes_max=settings.body_bytes_max,
        outbox_bytes_max=settings.outbox_bytes_max,
        write_s_max=settings.write_s_max,
        close_s_max=SERVER_STOP_S / 2,
        message_s_max=settings.body_s_max,
        handshake_s_max=settings.handshake_s_max,
        frames_per_s=settings.frames_per_s,
        frames_burst_max=settings.frames_burst_max,
    )
    http_limits = HttpLimits(
        head_s_max=settings.handshake_s_max,
        write_s_max=settings.write_s_max,
        connections_max=settings.connections_max + SPARE_CONNECTIONS,
    )
    config = uvicorn.Config(
        app.http,
        host=settings.host,
        port=settings.port,
        http=cast("type[asyncio.Protocol]", http_class(http_limits)),
        ws=socket_class(app.lobby.accept, limits),
        ssl_context_factory=(
            None if certificate is None else lambda config, usual: certificate.context
        ),
        loop="uvloop",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=SERVER_STOP_S,
    )
    return Server(config, on_listening)


def listen(settings: Settings) -> socket.socket:
    """The port, or why it cannot be had."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        return socket.create_server((settings.host, settings.port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise Misconfigured(
            f"port: {settings.host}:{settings.port} cannot be had: {error.strerror}. "
            "Name another one with --port."
        ) from None


async def run_server(settings: Settings) -> None:
    """Serve until a signal comes, then drain; a second signal ends the grace."""
    with listen(settings) as port:
        await serve_on(port, settings, lambda url: announce(settings, url))


async def serve_on(
    port: socket.socket,
    settings: Settings,
    on_listening: Callable[[str], None],
    place: Place = ALONE,
) -> None:
    """Serve on this port, which is somebody else's to close."""
    certificate = open_certificate(settings)
    async with AsyncExitStack() as stack:
        app = await stack.enter_async_context(open_app(settings, place))
        server = build_server(app, settings, on_listening, certificate)
        loop = asyncio.get_running_loop()
        asked: asyncio.Queue[None] = asyncio.Queue()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, asked.put_nowait, None)
        if certificate is not None:
            loop.add_signal_handler(signal.SIGHUP, certificate.reload)
            await stack.enter_async_context(certificate.watched())
        serving = asyncio.create_task(server.serve([port]))
        asking = asyncio.create_task(asked.get())
        await asyncio.wait([serving, asking], return_when=asyncio.FIRST_COMPLETED)
        if not serving.done():
            log.info(
                "stopping: %d turns run, up to %g s", app.runner.running_count, settings.grace_s
            )
            draining = asyncio.create_task(app.drain(settings.grace_s))
            hurrying = asyncio.create_task(asked.get())
            await asyncio.wait([draining, hurrying], return_when=asyncio.FIRST_COMPLETED)
            if not draining.done():
                await app.drain(0)
            await draining
            hurrying.cancel()
        server.should_exit = True
        asking.cancel()
        await serving


def announce(settings: Settings, url: str) -> None:
    """What a person needs to see first."""
    names = ", ".join(f"{model.name} ({model.engine})" for model in settings.served())
    print(f"Segue {__version__} serves {names} at {url}/v1 (store: {settings.shown_store})")
    if any(model.engine == "scripted" for model in settings.served()):
        print("The scripted engine plays a script at a given speed: it is not a model.")
    print("Stop with Ctrl-C.", flush=True)


def serve(settings: Settings) -> int:
    """Serve; the exit status says whether the port could be had."""
    uvloop.run(run_server(settings))
    return 0
