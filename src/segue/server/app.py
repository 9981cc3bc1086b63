"""Who is wired to whom? `open_app` builds a whole server from the settings, without a port, and closes it in the
reverse order. Each part has a builder here or beside this file, which returns a value from values that exist already.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path

from msgspec import structs

from segue.accounts.account import Account
from segue.aio import GiveUp, in_background
from segue.budgets.budget import BudgetSources
from segue.engines.forwarded import forwarded
from segue.engines.queued import forget
from segue.files.api import files_api
from segue.listener.api import Api
from segue.listener.auth import origin_policy
from segue.listener.edge_limits import EdgeLimits
from segue.listener.http import HttpApp
from segue.listener.services import Services
from segue.listener.table import RouteTable, routes_of
from segue.listener.upgrades import Upgrades
from segue.memory.budget import memory_for, resident_bytes
from segue.passthrough.api import passthrough_api
from segue.process.chains import Lineages
from segue.process.queued import QueuedTurns
from segue.process.runner import Records, Runner
from segue.reports.usage import UsageReports
from segue.reports.workers import CacheReports
from segue.seals.cipher import RingSeals
from segue.seams.store import IdempotencyKeys, Retention
from segue.server.apis import APIS, is_on
from segue.server.cluster import ALONE, WorkerPlace, open_cluster, share_routes
from segue.server.control import WorkerStatus
from segue.server.discovery import Discovery
from segue.server.drains import Drains
from segue.server.environment import counting, environment_apis, open_environment
from segue.server.files import LateFiles
from segue.server.health import HealthCheck
from segue.server.hosted import HostedTools
from segue.server.models import ServedModels, build_models
from segue.server.observers import Observers, open_observers
from segue.server.pages import ServerPages, has_dashboard
from segue.server.reload import Reload
from segue.server.state import Eraser, State, build_state
from segue.server.storage import KEYS_TOPIC, open_store
from segue.settings.values import FIELDS, Settings
from segue.stores.maintenance import maintained
from segue.stores.threads import open_chain, seal_chain
from segue.turn.resources import Resources

# A start waits so long for what the engines say of themselves, and then goes on without it.
MEET_S_MAX = 2.0

__all__ = ["ALONE", "App", "WorkerPlace", "open_app"]


@dataclass(frozen=True, slots=True)
class App:
    """A whole server, without a port."""

    http: HttpApp
    upgrades: Upgrades
    runner: Runner
    state: State
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
            engines=self.health.engines(checks),
            responses_running=self.runner.running_count,
            connections=len(self.upgrades.sessions),
            memory_bytes=self.state.memory.bytes,
            memory_bytes_max=self.state.memory.bytes_max,
            resident_bytes=resident_bytes(),
        )

    async def drain(self, grace_s: float) -> None:
        """Refuse new work, let running turns finish, end the rest, close the WebSocket connections."""
        self.upgrades.close_idle()
        await self.runner.drain(grace_s)
        self.upgrades.close_all()


@asynccontextmanager
async def open_app(
    settings: Settings,
    place: WorkerPlace = ALONE,
    give_up: GiveUp | None = None,
    rows: Mapping[str, Api] = APIS,
) -> AsyncIterator[App]:
    """Everything wired and running; what was opened last is closed first. `give_up` is called when a background loop
    fails without which this process cannot go on. `rows`: the APIs that there are."""
    memory_bytes = memory_for(settings.memory_bytes_max, settings.workers)
    settings = structs.replace(settings, memory_bytes_max=memory_bytes)
    served = build_models(settings, place.engines)
    async with (
        aclosing(served),
        open_store(settings) as store,
        open_cluster(settings, place) as cluster,
        LateFiles(settings, store.files, store.skills) as files,
        open_environment(settings, place.keeper) as environment,
        HostedTools(settings, files, environment) as hosted,
        in_background("files_sweep", files.sweep_forever),
    ):
        state = await build_state(settings, store, cluster)
        every = (*rows.values(), files_api(files.load), passthrough_api(forwarded))
        every += environment_apis(environment, files)
        async with _open_server(served, state, hosted, place, give_up, every) as app:
            yield app


@asynccontextmanager
async def _open_server(
    served: ServedModels,
    state: State,
    hosted: HostedTools,
    place: WorkerPlace,
    give_up: GiveUp | None,
    rows: Collection[Api],
) -> AsyncIterator[App]:
    settings, store = state.settings, state.store
    apis = [api for api in rows if is_on(api, settings)]
    off = [api for api in rows if api not in apis]
    async with (
        open_observers(state) as observers,
        build_runner(served, state, hosted, observers) as runner,
    ):
        observers.metrics.note_replaced(place.replaced)
        sources = state.meter.budget_sources = BudgetSources(
            store.ledger.spent, observers.afterwards.drained, observers.metrics.note_budget
        )
        observers.turns.append(lambda turn: sources.settled(turn.entry.owner, turn.entry.turn_id))
        if hosted.environment is not None and observers.audit is not None:
            hosted.environment.note_command = observers.audit.note_command
        eraser = Eraser(state, runner)
        health = HealthCheck(state, served, observers)
        reports = CacheReports(state.reuse, state.peers)
        services = build_services(state, runner, observers, eraser, reports, hosted)
        upgrades = Upgrades(services, apis, off)
        eraser.caches += [upgrades.erase, state.reuse.forget, state.render_cache.forget]
        eraser.owners += [upgrades.forget_owner, state.forget_owner, forget(lambda: served.engines)]
        if hosted.environment is not None:
            eraser.owners.append(hosted.environment.delete_all)
        watch_gauges(observers, served, state, hosted, runner, upgrades)
        routes = [*routes_of(apis, services), *UsageReports(store.ledger).routes]
        pages = ServerPages(services, health.check, health.write_metrics, routes)
        routes += pages.routes
        if has_dashboard():
            # Imported here: it may be left out of an installation.
            from segue_dashboard.pages import dashboard_routes

            routes += dashboard_routes(state, services, observers, health, upgrades, pages, routes)
        else:
            routes.append(pages.welcome)
        routes += reports.routes
        reload = Reload(served, runner, services, place.engines)
        retention = Retention(settings.retention_s, settings.events_retention_s)
        drains = Drains(served, health.servers, health.check, state.peers)
        discovery = Discovery(served, reload.retire, observers.metrics.note_lookup_failure)
        with suppress(TimeoutError):
            await asyncio.wait_for(discovery.look_up(), MEET_S_MAX)
        with suppress(TimeoutError):
            await asyncio.wait_for(health.meet_engines(), MEET_S_MAX)
        async with (
            maintained(store.maintenance, retention, eraser.forget, runner.fenced, give_up),
            in_background("memory_limit", state.memory.enforce_forever, give_up),
            in_background("thread_expiry", state.threads.expire_forever),
            share_routes(state.cluster, store.shared_limits, served),
            _joined(state, upgrades, give_up),
            QueuedTurns(runner, store.maintenance, store.turns, state.caller_of).taken_over(),
            reload.closing_retired(),
            in_background("drain_orders", drains.repeat_forever),
            _keep_slot_states(served, state, eraser),
            in_background("engine_discovery", discovery.look_up_forever),
            state.meter.running(),
            counting(hosted.environment, observers.metrics, store.ledger),
        ):
            http = HttpApp(services, RouteTable(routes, off))
            yield App(http, upgrades, runner, state, health, reload, drains, discovery)


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
    state.store.state.erased.oldest_at = runner.registry.oldest_at
    if cluster is not None:
        # Imported here: one process alone needs nothing of the cluster room.
        from segue.cluster.remote import RemoteTurns
        from segue.cluster.threads import RemoteThreads

        others = RemoteTurns(
            cluster.bus,
            cluster.peers,
            runner.registry.find_here,
            store.turns,
            store.events,
            silence_s=2 * settings.heartbeat_s,
        )
        runner.connect_workers(others)
        seals, threads = RingSeals(state.ring), state.threads
        threads.fetch = RemoteThreads(
            cluster.peers, threads.held, partial(seal_chain, seals), partial(open_chain, seals)
        ).fetch
    return runner


def build_services(
    state: State,
    runner: Runner,
    observers: Observers,
    eraser: Eraser,
    reports: CacheReports,
    hosted: HostedTools,
) -> Services:
    """What every API needs."""
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
        open_threads=state.open_threads if settings.threads else None,
        find_report=reports.find,
        set_up_tools=hosted.set_up,
        limits=edge_limits(settings),
        memory=state.memory,
        memo=state.memo,
        note_refusal=observers.note_refusal,
        count_request=observers.metrics.count_request,
        write_access=observers.write_access,
    )


def edge_limits(settings: Settings) -> EdgeLimits:
    """The limits of one client: those that are settings have their names."""
    names = {field.name for field in fields(EdgeLimits)} & FIELDS.keys()
    return EdgeLimits(**{name: getattr(settings, name) for name in names})


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
        "threads": lambda: state.threads.bytes,
        "stored": lambda: store.state.bytes + sum(cache.bytes for cache in store.beside),
        "prompts": lambda: (
            sum(cache.bytes for cache in (state.render_cache, state.memo, state.reuse))
            + state.reuse.waiting_bytes
        ),
        "running": lambda: (
            sum(running.bytes for running in registry.running.values()) + state.budget.dropped.bytes
        ),
        "ended": lambda: registry.ended_bytes,
        "engines": lambda: served.bytes,
        "files": lambda: hosted.bytes,
    }
    # What costs least to fill again goes first.
    caches = (state.reuse.shrink, state.memo.shrink, state.render_cache.shrink)
    memory.watch(parts, (*caches, store.state.shrink, state.budget.shrink))
    watch = observers.metrics.watch
    watch("segue_connections", lambda: len(upgrades.sessions))
    watch("segue_tasks", lambda: len(asyncio.all_tasks()))
    watch("segue_state_bytes", lambda: memory.bytes)
    observers.metrics.watch_parts(memory.parts)
    watch("segue_unread_bytes", lambda: memory.unread.bytes)
    watch("segue_ledger_backlog", lambda: observers.afterwards.backlog)


@asynccontextmanager
async def _joined(state: State, upgrades: Upgrades, give_up: GiveUp | None) -> AsyncIterator[None]:
    """Notice revoked keys while inside; with a cluster, hear of them and be a peer of the other processes."""
    accounts = state.accounts
    accounts.holds_state = lambda account: state.threads.holds(account.owner, account.key_id)

    def on_revoked(account: Account) -> None:
        upgrades.dismiss(account)
        state.threads.drop(account.owner, account.key_id)

    if state.cluster is None:
        async with accounts.kept(on_revoked, give_up=give_up):
            yield
        return
    bus = state.cluster.bus
    async with (
        bus.subscribe(KEYS_TOPIC, lambda _: accounts.confirm_soon()),
        accounts.kept(on_revoked, partial(bus.publish, KEYS_TOPIC, b""), give_up),
        state.cluster.peers.joined(),
    ):
        yield


@asynccontextmanager
async def _keep_slot_states(
    served: ServedModels, state: State, eraser: Eraser
) -> AsyncIterator[None]:
    """Restore what embedded models had read before a restart; save it while inside and on the way out."""
    path, store = state.settings.store_path, state.store
    async with AsyncExitStack() as stack:
        for built in served.built.values():
            if built.keep_states is None or path is None:
                continue
            folder = Path(f"{path}.states")
            seals = RingSeals(state.ring)
            keeping = built.keep_states(folder, seals, store.state.tips, store.turns)
            eraser.caches.append(await stack.enter_async_context(keeping))
        yield
