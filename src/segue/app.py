"""Who is wired to whom? `open_app` builds a whole server from the settings, without a port, and closes it again in the
right order.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, closing
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import msgspec
from msgspec import structs

from segue.accounts.account import Account, Accounts
from segue.accounts.metering import Meter
from segue.audit import Audit
from segue.cluster.hub import open_hub_bus
from segue.cluster.idempotency import SharedIdempotencyKeys
from segue.cluster.local import LocalBus
from segue.cluster.peers import Peers
from segue.dashboard.feed import Feed, Sources
from segue.dashboard.routes import Dashboard
from segue.dashboard.views import FULLEST, Memory, Replica
from segue.engines.routes import RoutedEngine
from segue.errors import Misconfigured
from segue.metrics import Metrics, together
from segue.models import build_models
from segue.process.render_cache import RenderCache
from segue.process.runner import Records, Runner
from segue.settings import Settings
from segue.storage import KEYS_TOPIC, check_public, check_ring, load_ring, open_store
from segue.stores.budget import Budget
from segue.stores.hashes import KeyHashes
from segue.stores.layered import LayeredTurns
from segue.stores.maintenance import kept_up
from segue.stores.memory import (
    MemoryTurns,
)
from segue.stores.seals import RingSeals
from segue.tools.fetch import Fetcher, Policy, read_as_data
from segue.tools.hosted import Hosted, ToolLimits
from segue.tools.hosts import McpHosts, policy_for
from segue.tools.index import IndexWeb, Report, build
from segue.tools.mcp import McpServer, McpServers
from segue.tools.pdf import Papers
from segue.tools.search import JsonEngine, JsonSearch
from segue.tools.web import LiveWeb, WebTool
from segue.traces import Traces
from segue.transports.auth import origin_policy
from segue.transports.http import HttpApp
from segue.transports.services import Limits, NearTurns, Services
from segue.transports.upgrades import Upgrades
from segue.turn.commit import Afterwards, EndedTurn
from segue.turn.plan import Models
from segue.turn.seams import (
    Bus,
    Keys,
    Tool,
    Turns,
)
from segue.turn.values import Owner, Retention

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class App:
    """A whole server, without a port."""

    http: HttpApp
    upgrades: Upgrades
    runner: Runner
    turns: Turns
    keys: Keys
    hashes: KeyHashes
    accounts: Accounts
    peers: Peers

    async def drain(self, grace_s: float) -> None:
        """Refuse new work, let running turns finish, end the rest, tell the sockets."""
        self.upgrades.leave_idle()
        await self.runner.drain(grace_s)
        self.upgrades.leave()


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
        from segue.cluster.notify import open_notify_bus

        async with open_notify_bus(settings.store) as notify:
            yield notify
    elif place.hub:
        async with open_hub_bus(place.hub) as hub:
            yield hub
    else:
        yield LocalBus()


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
        peers = Peers(bus, place.house)
        render_cache = RenderCache(settings.render_cache_bytes_max)

        def memory() -> list[Memory]:
            fullest = max((one.state_bytes for one in upgrades.sessions), default=0)
            return [
                Memory("turns", store.state.bytes, settings.process_state_bytes_max),
                Memory("recalled prompts", render_cache.bytes, settings.render_cache_bytes_max),
                Memory(FULLEST, fullest, settings.connection_state_bytes_max),
            ]

        feed = Feed(
            Sources(
                models=list(models),
                sessions=lambda: (one.status() for one in upgrades.sessions),
                runnings=lambda: runner.runnings,
                memory=memory,
                probe=lambda: is_ready(),
                replicas=lambda checks: _replicas(models, checks),
                backlog=lambda: afterwards.backlog,
                ask=lambda question: peers.ask("feed", question, peers.siblings),
                worker=peers.worker,
                process=place.house,
            )
        )

        def fit(settled: EndedTurn) -> None:
            """What an owner has in the caches of the process, beside connections, counts for each of its keys."""
            owner = settled.entry.owner
            for account in accounts.bounded(owner):
                left = max(0, account.quota.state_bytes_max - budget.bytes_of(account.key_id))
                # What was rendered is made again sooner than what was stored is read again.
                render_cache.trim(owner, max(0, left - store.state.bytes_of(owner)))
                store.state.trim(owner, left)

        observers = [metrics.observe, feed.observe, fit]
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

        ring = await load_ring(settings, store)
        hashes = KeyHashes(ring)
        await check_ring(store.keys, hashes, settings)
        await check_public(store.keys, settings)
        budget = Budget(settings.connections_state_bytes_max)
        meter = Meter(store.shared_limits, peers, budget.trim)
        accounts = Accounts(store.keys, hashes.digests, settings.auth, meter)

        def open_cache(account: Account) -> tuple[NearTurns, Turns]:
            near = MemoryTurns(settings.connection_state_bytes_max)
            near.enter(budget, account.key_id, lambda: account.quota.state_bytes_max)
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
                peers.ask("metrics", b"", peers.siblings), write_own_metrics()
            )
            return together([own, *others.values()])

        async def erase(owner: Owner, turn_id: str) -> bool:
            is_erased = await store.turns.delete(owner, turn_id)
            runner.forget(owner, turn_id)
            await upgrades.erase(owner, turn_id)
            # Sooner than the store would tell them.
            await peers.send("erased", msgspec.msgpack.encode((owner, turn_id)))
            return is_erased

        async def let_go(owner: Owner, turn_id: str) -> None:
            await store.state.delete(owner, turn_id)
            runner.forget(owner, turn_id)
            await upgrades.erase(owner, turn_id)

        papers = Papers(settings.file_s_max)
        retention = Retention(settings.retention_s, settings.events_retention_s)
        async with (
            _open_tools(settings, fetcher, papers) as hosted,
            Runner(
                models,
                Records(
                    afterwards,
                    store.events,
                    SharedIdempotencyKeys(store.idempotency_keys, peers),
                    store.conversations,
                ),
                RingSeals(ring),
                heartbeat_s=settings.heartbeat_s,
                append_s_max=settings.append_s_max,
                render_cache=render_cache,
                hosted=hosted,
                read_url=partial(read_as_data, fetcher) if fetcher.is_on else None,
                guards=served.owners,
            ) as runner,
            kept_up(store.maintenance, retention, let_go),
        ):
            services = Services(
                runner=runner,
                accounts=accounts,
                origin_policy=origin_policy(
                    settings.host,
                    settings.allowed_hosts,
                    settings.cors_origins,
                    is_open=lambda: not accounts.is_required,
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
            upgrades = Upgrades(services)
            runner.meet(bus, peers, store.turns)
            peers.answer("metrics", lambda worker, body: write_own_metrics())
            peers.answer("feed", lambda worker, body: feed.answer(body))
            peers.answer("erased", lambda worker, body: _erased(body, let_go))
            _watch(
                metrics,
                upgrades,
                afterwards,
                lambda: (
                    sum(one.bytes for one in (store.state, *store.beside))
                    + sum(one.bytes for one in (render_cache, served, upgrades.lost, papers))
                    + runner.ended_bytes
                ),
            )
            metrics.note_limits(settings)
            pages = Dashboard(services, feed).routes
            async with (
                bus.subscribe(KEYS_TOPIC, lambda body: accounts.look()),
                accounts.kept(upgrades.dismiss, partial(bus.publish, KEYS_TOPIC, b"")),
                peers.joined(),
                meter.running(),
            ):
                yield App(
                    HttpApp(services, pages),
                    upgrades,
                    runner,
                    store.turns,
                    store.keys,
                    hashes,
                    accounts,
                    peers,
                )


async def _erased(body: bytes, let_go: Callable[[Owner, str], Awaitable[None]]) -> None:
    """Another worker has erased a turn."""
    owner, turn_id = msgspec.msgpack.decode(body, type=tuple[str, str])
    await let_go(owner, turn_id)


@asynccontextmanager
async def _open_tools(
    settings: Settings, fetcher: Fetcher, papers: Papers
) -> AsyncIterator[Hosted]:
    """The tools that this process runs; sessions with MCP servers end with it."""
    limits = ToolLimits(settings.tool_s_max, settings.tool_output_bytes_max)
    async with open_web(settings, fetcher) as web:
        tools: dict[str, Tool] = {} if web is None else {"web_search": web}
        if not settings.mcp and not settings.mcp_hosts:
            yield Hosted(tools, limits=limits, read_pdf=papers.read)
            return
        async with _open_servers(settings) as servers:
            tools |= {"mcp": servers, "mcp_list": servers.lister}
            yield Hosted(tools, servers.check, limits, papers.read)


@asynccontextmanager
async def _open_servers(settings: Settings) -> AsyncIterator[McpServers]:
    if find_spec("mcp") is None:
        raise Misconfigured("mcp: the package 'mcp' is not installed: pip install 'segue[mcp]'.")
    # A fetcher of its own: its list and its ports are others, and it works where pages are not fetched.
    with closing(Fetcher(policy_for(settings.mcp_hosts, settings.fetch_deny))) as fetcher:
        known = [McpServer(**structs.asdict(one)) for one in settings.mcp]
        hosts = McpHosts(settings.mcp_hosts, fetcher)
        async with aclosing(McpServers(known, hosts, list_s=settings.mcp_list_s)) as servers:
            yield servers


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


def _watch(
    metrics: Metrics, upgrades: Upgrades, afterwards: Afterwards, shared_bytes: Callable[[], int]
) -> None:
    """The gauges, each read where its value lives."""

    def state_bytes() -> int:
        return shared_bytes() + sum(session.state_bytes for session in upgrades.sessions)

    metrics.watch("segue_connections", "Open WebSocket connections", lambda: len(upgrades.sessions))
    metrics.watch("segue_state_bytes", "Bytes of history held in memory", state_bytes)
    metrics.watch(
        "segue_unread_bytes",
        "Bytes that wait for WebSocket clients to read them",
        lambda: sum(session.unread_bytes for session in upgrades.sessions),
    )
    metrics.watch(
        "segue_ledger_backlog", "Turns that wait to be settled", lambda: afterwards.backlog
    )
