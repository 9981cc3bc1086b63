"""Which pages does the dashboard add to a server, and from where does each read what it shows?

The one door of this package: a server calls `dashboard_routes` where the package is installed.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from segue.accounts.hashes import issue_key
from segue.errors import ApiError
from segue.listener.api import Route
from segue.listener.services import Services
from segue.listener.upgrades import Upgrades
from segue.process.runner import Runner
from segue.server.health import HealthCheck
from segue.server.observers import Observers
from segue.server.pages import ServerPages
from segue.server.state import State
from segue.server.storage import KEYS_TOPIC
from segue_dashboard.feed import Feed, Sources
from segue_dashboard.fleet import FleetReports
from segue_dashboard.history import RecentTurns
from segue_dashboard.keys import KeyRoutes, KeySources
from segue_dashboard.routes import Dashboard
from segue_dashboard.stored import StoredRoutes
from segue_dashboard.views import FULLEST, CacheUse


def dashboard_routes(
    state: State,
    services: Services,
    observers: Observers,
    health: HealthCheck,
    upgrades: Upgrades,
    pages: ServerPages,
    served: Sequence[Route],
) -> list[Route]:
    """The routes of all pages; `served`: those of the APIs."""
    runner, history = services.runner, RecentTurns()
    observers.add(history.observe, history.note_refusal)
    fleet = FleetReports(
        health.servers,
        observers.metrics.replicas.totals,
        lambda: (runner.running_count, len(upgrades.sessions)),
        history,
        state.peers,
    )
    has_containers = any(route.path == "/v1/containers" for route in served)
    feed = _build_feed(state, history, runner, observers, health, upgrades, has_containers)
    keys = KeyRoutes(services, _key_sources(state, observers))
    stored = StoredRoutes(state.store.listing, state.store.turns)
    return [*Dashboard(services, feed, pages).routes, *keys.routes, *fleet.routes, *stored.routes]


def _build_feed(
    state: State,
    history: RecentTurns,
    runner: Runner,
    observers: Observers,
    health: HealthCheck,
    upgrades: Upgrades,
    has_containers: bool,
) -> Feed:
    """What the dashboard shows of this process and of its siblings."""
    sources = Sources(
        models=lambda: list(runner.models),
        sessions=lambda: (session.status() for session in tuple(upgrades.sessions)),
        runnings=lambda: runner.registry.running.values(),
        memory=lambda: _cache_uses(state, upgrades),
        probe=health.check,
        replicas=health.replicas,
        backlog=lambda: observers.afterwards.backlog,
        lag_ms=lambda: observers.metrics.lag_ms,
        has_containers=has_containers,
    )
    if state.cluster is None:
        return Feed(history, sources)
    peers = state.cluster.peers
    sources = replace(
        sources,
        ask=lambda body: peers.ask("feed", body, peers.siblings),
        worker=peers.worker,
        process=state.cluster.group,
    )
    feed = Feed(history, sources)
    peers.on_message("feed", lambda worker, body: feed.answer(body))
    return feed


def _key_sources(state: State, observers: Observers) -> KeySources:
    """What an operator needs to manage API keys in the dashboard."""

    async def confirm() -> None:
        state.accounts.confirm_soon()
        if state.cluster is not None:
            # A worker that cannot be reached confirms by itself.
            with suppress(ApiError):
                await state.cluster.bus.publish(KEYS_TOPIC, b"")

    store = state.store
    create = partial(issue_key, store.keys, state.hashes)
    return KeySources(store.keys, store.ledger, create, confirm, observers.note_operation)


def _cache_uses(state: State, upgrades: Upgrades) -> Sequence[CacheUse]:
    settings = state.settings
    rendered = state.render_cache.bytes + state.memo.bytes
    fullest = max((session.state_bytes for session in upgrades.sessions), default=0)
    return [
        CacheUse("stored responses", state.store.state.bytes, settings.process_state_bytes_max),
        CacheUse("rendered prompts", rendered, settings.render_cache_bytes_max),
        CacheUse(FULLEST, fullest, settings.connection_state_bytes_max),
    ]
