"""Who is wired to whom? `open_app` builds a whole server from the settings, without a port, and closes it in the
reverse order. Each part has a builder here or beside this file, which returns a value from values that exist already.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from msgspec import structs

from segue.accounts.account import Accounts
from segue.accounts.hashes import KeyHashes, issue_key
from segue.aio import GiveUp, in_background
from segue.errors import ApiError
from segue.listener.auth import origin_policy
from segue.listener.services import Services
from segue.memory.budget import Memory, memory_for, resident_bytes
from segue.process.chains import Lineages
from segue.process.queued import QueuedTurns
from segue.process.runner import Records, Runner
from segue.responses.http import HttpApp
from segue.responses.upgrades import Upgrades
from segue.seams.access import Keys
from segue.seams.engine_status import EngineStatus
from segue.seams.history import Owner
from segue.seams.store import IdempotencyKeys, Retention, Turns
from segue.server.cluster import ALONE, WorkerPlace, open_cluster, share_routes
from segue.server.control import WorkerStatus
from segue.server.discovery import Discovery
from segue.server.drains import Drains
from segue.server.hosted import HostedTools
from segue.server.models import ServedModels, build_models
from segue.server.observers import HealthCheck, Observers, open_observers
from segue.server.reload import Reload
from segue.server.reports import CacheReports
from segue.server.state import Eraser, State, build_state
from segue.server.states import open_slot_states
from segue.server.storage import KEYS_TOPIC, open_store
from segue.settings.values import Settings
from segue.stores.maintenance import maintained
from segue.stores.seals import RingSeals
from segue.turn.plan import Caller
from segue.turn.resources import Resources
from segue_dashboard.feed import Feed, Sources
from segue_dashboard.fleet import FleetReports
from segue_dashboard.keys import KeyRoutes, KeySources
from segue_dashboard.routes import Dashboard
from segue_dashboard.views import FULLEST, CacheUse

if TYPE_CHECKING:
    from segue.cluster.peers import Peers

# A start waits so long for what the engines say of themselves, and then goes on without it.
MEET_S_MAX = 2.0

__all__ = ["ALONE", "App", "WorkerPlace", "open_app"]


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
    # None where one process serves alone.
    peers: Peers | None
    memory: Memory
    # Which engines answered at the start, by the names of their models.
    met: Mapping[str, bool]
    health: HealthCheck
    reload: Reload
    drains: Drains
    discovery: Discovery

    async def status(self) -> WorkerStatus:
        """What an operator sees of this process."""
        checks = await self.health.check()
        return WorkerStatus(
            pid=os.getpid(),
            checks={**checks, "accepting": not self.runner.is_draining},
            models=list(self.runner.models),
            engines=self.reload.engines(self.health.replicas(checks)),
            responses_running=self.runner.running_count,
            connections=len(self.upgrades.sessions),
            memory_bytes=self.memory.bytes,
            memory_bytes_max=self.memory.bytes_max,
            resident_bytes=resident_bytes(),
        )

    async def drain(self, grace_s: float) -> None:
        """Refuse new work, let running turns finish, end the rest, close the WebSocket connections."""
        self.upgrades.leave_idle()
        await self.runner.drain(grace_s)
        self.upgrades.leave()


@asynccontextmanager
async def open_app(
    settings: Settings, place: WorkerPlace = ALONE, give_up: GiveUp | None = None
) -> AsyncIterator[App]:
    """Everything wired and running; what was opened last is closed first. `give_up` is called when a background loop
    fails without which this process cannot go on."""
    memory_bytes = memory_for(settings.memory_bytes_max, settings.workers)
    settings = structs.replace(settings, memory_bytes_max=memory_bytes)
    served = build_models(settings, place.engines)
    async with (
        aclosing(served),
        open_store(settings) as store,
        open_cluster(settings, place) as cluster,
        HostedTools(settings) as hosted,
    ):
        state = await build_state(settings, store, cluster)
        async with _open_server(served, state, hosted, place, give_up) as app:
            yield app


@asynccontextmanager
async def _open_server(
    served: ServedModels,
    state: State,
    hosted: HostedTools,
    place: WorkerPlace,
    give_up: GiveUp | None,
) -> AsyncIterator[App]:
    settings, store = state.settings, state.store
    async with (
        open_observers(state) as observers,
        build_runner(served, state, hosted, observers) as runner,
    ):
        observers.metrics.note_replaced(place.replaced)
        eraser = Eraser(state, runner)
        health = HealthCheck(state, runner, observers, served)
        reports = CacheReports(state)
        services = build_services(state, runner, observers, eraser, health, reports)
        upgrades = Upgrades(services)
        eraser.caches += [upgrades.erase, state.reuse.forget, state.render_cache.forget]
        watch_gauges(observers, served, state, hosted, runner, upgrades)
        names = list(runner.models)
        feed = build_feed(state, runner, observers, health, upgrades, names)
        reload = Reload(served, runner, services, names, place.engines)
        key_routes = KeyRoutes(services, build_keys(state, observers))
        peers = None if state.cluster is None else state.cluster.peers

        def engines() -> list[EngineStatus]:
            return reload.engines(health.replicas({}))

        def load() -> tuple[int, int]:
            return runner.running_count, len(upgrades.sessions)

        totals = observers.metrics.replicas.totals
        fleet = FleetReports(engines, totals, load, observers.history, peers)
        pages = (Dashboard(services, feed), key_routes, reports, fleet)
        http = HttpApp(services, [route for page in pages for route in page.routes])

        async def caller_of(owner: Owner, key: str) -> Caller:
            account = await state.accounts.find_digest(key)
            quota = account.turn_quota
            return Caller(owner, store.turns, may=account.scopes, quota=quota, key=key)

        retention = Retention(settings.retention_s, settings.events_retention_s)
        drains = Drains(served, engines, health.check, peers)
        discovery = Discovery(served, reload.retire, observers.metrics.note_lookup_failure)
        with suppress(TimeoutError):
            await asyncio.wait_for(discovery.look(), MEET_S_MAX)
        with suppress(TimeoutError):
            await asyncio.wait_for(health.meet_engines(), MEET_S_MAX)
        async with (
            maintained(store.maintenance, retention, eraser.forget, runner.fenced, give_up),
            in_background("memory_limit", state.memory.keep_within, give_up),
            share_routes(state.cluster, store.shared_limits, served),
            _joined(state, upgrades, give_up),
            QueuedTurns(runner, store.maintenance, store.turns, caller_of).taken_over(),
            reload.closing_retired(),
            in_background("drain_orders", drains.keep),
            open_slot_states(served, state, eraser),
            in_background("engine_discovery", discovery.keep),
            state.meter.running(),
        ):
            keys = (store.keys, state.hashes, state.accounts)
            yield App(
                http,
                upgrades,
                runner,
                store.turns,
                *keys,
                peers,
                state.memory,
                health.met,
                health,
                reload,
                drains,
                discovery,
            )


def build_runner(
    served: ServedModels, state: State, hosted: HostedTools, observers: Observers
) -> Runner:
    """The owner of the turns that run in this process; with a cluster it also reaches those of other processes."""
    settings, store, cluster = state.settings, state.store, state.cluster
    idempotency_keys: IdempotencyKeys = store.idempotency_keys
    if cluster is not None:
        # Imported here and below: one process alone needs nothing of the cluster room.
        from segue.cluster.idempotency import SharedIdempotencyKeys

        idempotency_keys = SharedIdempotencyKeys(idempotency_keys, cluster.peers)
    lineages = Lineages()
    records = Records(observers.afterwards, store.events, idempotency_keys, store.conversations)
    resources = Resources(
        models=served.models,
        seals=RingSeals(state.ring),
        prompt_cache=state.render_cache,
        hosted=hosted,
        open_gate=served.open_gate,
        guards=served.owners,
        append_s_max=settings.append_s_max,
        cache_salt=state.cache_salt,
        trace_lineage=lineages.trace,
        drop_lineage=lineages.drop,
        diagnose=state.reuse.diagnose,
        report_prompt=state.reuse.add if settings.reuse_bytes_max else None,
    )
    runner = Runner(
        resources,
        records,
        heartbeat_s=settings.heartbeat_s,
        background_s_max=settings.background_s_max,
        outlives=settings.store_kind != "memory",
        memory=state.memory,
    )
    if cluster is not None:
        # Imported here: one process alone needs nothing of the cluster room.
        from segue.cluster.remote import RemoteTurns

        others = RemoteTurns(
            cluster.bus,
            cluster.peers,
            runner.registry.find_here,
            store.turns,
            store.events,
            silence_s=2 * settings.heartbeat_s,
        )
        runner.connect_workers(others)
    return runner


def build_services(
    state: State,
    runner: Runner,
    observers: Observers,
    eraser: Eraser,
    health: HealthCheck,
    reports: CacheReports,
) -> Services:
    """What every transport needs."""
    settings, accounts = state.settings, state.accounts
    names, origins = settings.allowed_hosts, settings.cors_origins
    policy = origin_policy(settings.host, names, origins, lambda: not accounts.is_required)
    return Services(
        runner=runner,
        accounts=accounts,
        origin_policy=policy,
        turns=state.store.turns,
        conversations=state.store.conversations,
        erase=eraser.erase,
        open_cache=state.open_cache,
        is_ready=health.check,
        write_metrics=health.write_metrics,
        find_report=reports.find,
        limits=settings,
        memory=state.memory,
        note_refusal=observers.note_refusal,
        count_request=observers.metrics.count_request,
        write_access=observers.write_access,
    )


def build_feed(
    state: State,
    runner: Runner,
    observers: Observers,
    health: HealthCheck,
    upgrades: Upgrades,
    names: Sequence[str],
) -> Feed:
    """What the dashboard shows of this process and of its siblings; `names` are the models now."""
    sources = Sources(
        models=names,
        sessions=lambda: (session.status() for session in tuple(upgrades.sessions)),
        runnings=lambda: runner.registry.running.values(),
        memory=lambda: _cache_uses(state, upgrades),
        probe=health.check,
        replicas=health.replicas,
        backlog=lambda: observers.afterwards.backlog,
        lag_ms=lambda: observers.metrics.lag_ms,
    )
    if state.cluster is None:
        return Feed(observers.history, sources)
    peers = state.cluster.peers
    sources = replace(
        sources,
        ask=lambda body: peers.ask("feed", body, peers.siblings),
        worker=peers.worker,
        process=state.cluster.group,
    )
    feed = Feed(observers.history, sources)
    peers.answer("feed", lambda worker, body: feed.answer(body))
    return feed


def build_keys(state: State, observers: Observers) -> KeySources:
    """What an operator needs to manage API keys in the dashboard."""

    async def confirm() -> None:
        state.accounts.look()
        if state.cluster is not None:
            # A worker that cannot be reached confirms by itself.
            with suppress(ApiError):
                await state.cluster.bus.publish(KEYS_TOPIC, b"")

    store = state.store
    create = partial(issue_key, store.keys, state.hashes)
    return KeySources(store.keys, store.ledger, create, confirm, observers.note_operation)


def _cache_uses(state: State, upgrades: Upgrades) -> Sequence[CacheUse]:
    settings = state.settings
    fullest = max((session.state_bytes for session in upgrades.sessions), default=0)
    return [
        CacheUse("stored responses", state.store.state.bytes, settings.process_state_bytes_max),
        CacheUse("rendered prompts", state.render_cache.bytes, settings.render_cache_bytes_max),
        CacheUse(FULLEST, fullest, settings.connection_state_bytes_max),
    ]


def watch_gauges(
    observers: Observers,
    served: ServedModels,
    state: State,
    hosted: HostedTools,
    runner: Runner,
    upgrades: Upgrades,
) -> None:
    """The gauges, each read where its value lives, and what the memory of the process consists of."""
    store, memory, registry = state.store, state.memory, runner.registry
    parts: dict[str, Callable[[], int]] = {
        "connections": lambda: sum(session.state_bytes for session in upgrades.sessions),
        "lost_connections": lambda: upgrades.lost.bytes,
        "stored": lambda: store.state.bytes + sum(cache.bytes for cache in store.beside),
        "prompts": lambda: state.render_cache.bytes + state.reuse.bytes + state.reuse.waiting_bytes,
        "running": lambda: (
            sum(running.bytes for running in registry.running.values()) + state.budget.dropped.bytes
        ),
        "ended": lambda: registry.ended_bytes,
        "engines": lambda: served.bytes,
        "files": lambda: hosted.bytes,
    }
    # What costs least to fill again goes first.
    caches = (state.reuse.shrink, state.render_cache.shrink)
    memory.watch(parts, (*caches, store.state.shrink, state.budget.shrink))
    watch = observers.metrics.watch
    watch("segue_connections", lambda: len(upgrades.sessions))
    watch("segue_state_bytes", lambda: memory.bytes)
    observers.metrics.watch_parts(memory.parts)
    watch("segue_unread_bytes", lambda: memory.unread.bytes)
    watch("segue_ledger_backlog", lambda: observers.afterwards.backlog)


@asynccontextmanager
async def _joined(state: State, upgrades: Upgrades, give_up: GiveUp | None) -> AsyncIterator[None]:
    """Notice revoked keys while inside; with a cluster, hear of them and be a peer of the other processes."""
    accounts = state.accounts
    if state.cluster is None:
        async with accounts.kept(upgrades.dismiss, give_up=give_up):
            yield
        return
    bus = state.cluster.bus
    async with (
        bus.subscribe(KEYS_TOPIC, lambda _: accounts.look()),
        accounts.kept(upgrades.dismiss, partial(bus.publish, KEYS_TOPIC, b""), give_up),
        state.cluster.peers.joined(),
    ):
        yield
